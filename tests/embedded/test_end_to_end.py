"""The stack as a new user has it: one command, events in, streams out, parts that die, and an end without remains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tailrace.embedded.process import free_port
from tailrace.testing.installation import lives, wait_for

SETS = 40


class Stack:
    """``tailrace up`` in a folder of its own, and the other commands against it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._up: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = (sys.executable, "-m", "tailrace", "up", "--dir", str(self.folder), "--port", str(self.port))
        with (self.folder.parent / "up.log").open("a") as log:
            self._up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._up.stdout is not None
        first = self._up.stdout.readline()
        assert first.startswith(f"READY {self.url}"), (self.folder.parent / "up.log").read_text()

    def stop(self) -> int:
        """End it as Ctrl-C does; return its exit code."""
        assert self._up is not None
        family = psutil.Process(self._up.pid).children(recursive=True)
        self._up.send_signal(signal.SIGINT)
        code = self._up.wait(60)
        wait_for("the end of all its processes", lambda: not any(map(lives, family)), 10)
        return code

    def kill(self) -> None:
        if self._up is not None and self._up.poll() is None:
            self._up.terminate()
            self._up.wait(60)

    def run(self, *arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "tailrace", *arguments)
        environment = os.environ | {"TAILRACE_URL": self.url}
        return subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=120, env=environment, check=False
        )

    def put(self, first: int, n: int) -> None:
        lines = (json.dumps({"key": ["q", f"set-{i % SETS}"], "value": {"n": i}}) for i in range(first, first + n))
        done = self.run("put", "jobs", given="\n".join(lines))
        assert done.returncode == 0, done.stderr

    def tail(self, number: int) -> list[int]:
        done = self.run("tail", f"q/set-{number}", "-o", "start", "-e", "-J")
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["data"]["n"] for line in done.stdout.splitlines()]

    def has(self, number: int, wanted: list[int]) -> bool:
        return self.tail(number) == wanted

    def replaced(self, part: str, pid: object) -> bool:
        return self.parts()[part]["pid"] not in (pid, None)

    def parts(self) -> dict[str, dict[str, object]]:
        found = json.loads((self.folder / "parts.json").read_text())
        rows = found if isinstance(found, list) else found["parts"]
        return {row["name"]: row for row in rows}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, quick_spark: None) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack") / "data")
    stack.start()
    yield stack
    stack.kill()


def _wait_for_all(stack: Stack, total: int) -> None:
    for number in (0, 17, SETS - 1):
        wanted = list(range(number, total, SETS))
        wait_for(f"all of set {number}", partial(stack.has, number, wanted))


@pytest.mark.timeout(400)
def test_events_put_are_tailed_once_and_in_order_whatever_happens_to_the_parts(stack: Stack) -> None:
    stack.put(0, 2_000)
    _wait_for_all(stack, 2_000)
    for part in ("pipeline", "valkey"):
        before = stack.parts()[part]["pid"]
        os.kill(int(str(before)), signal.SIGKILL)
        wait_for(f"another {part}", partial(stack.replaced, part, before))
    wait_for("the stack to be ready", lambda: stack.run("status").returncode == 0)
    wait_for("a put to work again", lambda: stack.run("put", "other", given='{"value": 1}').returncode == 0)
    stack.put(2_000, 1_000)
    _wait_for_all(stack, 3_000)


def test_a_second_stack_in_the_same_folder_is_refused(stack: Stack) -> None:
    second = stack.run("up", "--dir", str(stack.folder), "--port", str(free_port()))
    assert second.returncode == 1
    assert str(stack.folder) in second.stderr
    assert "embedded.in_use" in second.stderr


@pytest.mark.timeout(300)
def test_ctrl_c_leaves_no_process_and_the_data_is_there_after_a_restart(stack: Stack) -> None:
    before = stack.tail(3)
    assert stack.stop() in (0, 130)
    stack.start()
    assert stack.tail(3) == before

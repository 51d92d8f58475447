"""The supervisor: order, restarts, and an end that leaves no process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailrace.embedded import process as ports
from tailrace.embedded.process import lock_folder, lock_holder
from tailrace.embedded.stack import Backoff
from tailrace.errors import DirectoryInUse, PrerequisiteMissing

# Two parts; each says when it starts, starts a process of its own, and is ready when its file is there.
PROGRAM = """
import asyncio, sys
from pathlib import Path
from rich.console import Console
from tailrace.embedded.process import Part, lock_folder
from tailrace.embedded.stack import Backoff, Supervisor
from tailrace.errors import TailraceError

folder, behaviour = Path(sys.argv[1]), sys.argv[2]
CHILD = '''
import os, signal, subprocess, sys, time
name, folder, behaviour = sys.argv[1:]
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"{folder}/journal", "a").write(f"{name} starts\\\\n")
print("about to", behaviour, flush=True)
if behaviour == "fail" and name == "second":
    sys.exit(3)
subprocess.Popen(["sleep", "600"], process_group=0)
time.sleep(0.2)
while behaviour == "hurry" and name == "first" and not os.path.exists(f"{folder}/second.ready"):
    time.sleep(0.01)
if not (behaviour == "hang" and name == "second"):
    open(f"{folder}/{name}.ready", "w").close()
    open(f"{folder}/journal", "a").write(f"{name} serves\\\\n")
time.sleep(600)
'''

def part(name):
    return Part(
        name=name,
        command=(sys.executable, "-c", CHILD, name, str(folder), behaviour),
        log=folder / f"{name}.log",
        ready=(folder / f"{name}.ready").exists,
        at_once=behaviour == "hurry",
        ready_timeout=1.5,
        stop_timeout=1 if behaviour == "stubborn" else 5,
    )

async def main():
    parts = [part("first"), part("second")]
    supervisor = Supervisor(folder, parts, Console(stderr=True), backoff=Backoff(first=0.1))
    return await supervisor.run(lambda: print("UP", flush=True))

try:
    with lock_folder(folder):
        sys.exit(asyncio.run(main()))
except TailraceError as error:
    sys.exit(f"{error.code}: {error}")
"""


class Stack:
    """A supervisor in a process of its own, as people run it."""

    def __init__(self, folder: Path, behaviour: str = "behave") -> None:
        self.folder = folder
        command = [sys.executable, "-c", PROGRAM, str(folder), behaviour]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_up(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "UP\n"

    def end(self, *signals: int) -> tuple[int, str]:
        """Send the signals, wait, and return the exit code and the standard error."""
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.3)
        _, stderr = self.process.communicate(timeout=20)
        return self.process.returncode, stderr

    def part(self, name: str) -> dict[str, Any]:
        parts = json.loads((self.folder / "parts.json").read_text(encoding="utf-8"))
        return next(part for part in parts if part["name"] == name)

    def left(self) -> list[int]:
        """Every process that any part started and that still runs."""
        return [
            process.pid
            for process in psutil.process_iter(["cmdline", "environ"])
            if (process.info["environ"] or {}).get("STACK") == str(self.folder) and process.pid != self.process.pid
        ]


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stack]]:
    monkeypatch.setenv("STACK", str(tmp_path))
    started: list[Stack] = []

    def start(behaviour: str = "behave") -> Stack:
        started.append(Stack(tmp_path, behaviour))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def eventually(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_parts_start_in_order_each_when_the_one_before_it_serves(stack: Callable[..., Stack], tmp_path: Path) -> None:
    running = stack()
    running.wait_up()
    journal = (tmp_path / "journal").read_text(encoding="utf-8").splitlines()
    assert journal == ["first starts", "first serves", "second starts", "second serves"]
    assert running.part("second")["state"] == "ready"
    assert len(running.left()) == 4


def test_a_part_that_copes_alone_starts_beside_those_before_it(stack: Callable[..., Stack], tmp_path: Path) -> None:
    running = stack("hurry")
    running.wait_up()
    journal = (tmp_path / "journal").read_text(encoding="utf-8").splitlines()
    assert sorted(journal[:2]) == ["first starts", "second starts"]
    assert journal[2:] == ["second serves", "first serves"]
    _, stderr = running.end(signal.SIGTERM)
    assert stderr.index("second    stopped") < stderr.index("first     stopping")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains_in_reverse_order_and_leaves_no_process(stack: Callable[..., Stack], number: int) -> None:
    running = stack()
    running.wait_up()
    code, stderr = running.end(number)
    assert code == 0
    assert stderr.index("second    stopped") < stderr.index("first     stopping")
    assert running.left() == []
    assert running.part("first")["state"] == "stopped"


def test_a_killed_part_is_started_again_and_said_so(stack: Callable[..., Stack]) -> None:
    running = stack()
    running.wait_up()
    first = running.part("first")["pid"]
    os.kill(first, signal.SIGKILL)
    eventually(lambda: running.part("first")["restarts"] == 1 and running.part("first")["state"] == "ready")
    assert running.part("first")["pid"] != first
    eventually(lambda: len(running.left()) == 4)
    _, stderr = running.end(signal.SIGTERM)
    assert "first     died (exit -9), restarting in 0.1 s" in stderr
    assert running.left() == []


def test_the_pause_doubles_to_its_limit_and_is_forgotten_after_a_minute_of_health() -> None:
    backoff = Backoff()
    pauses = [backoff.after(None, 0)]
    for _ in range(6):
        pauses.append(backoff.after(pauses[-1], 1))
    assert pauses == [0.5, 1, 2, 4, 8, 15, 15]
    assert backoff.after(15, 61) == 0.5


def test_a_part_that_ignores_the_signal_is_killed_after_its_time(stack: Callable[..., Stack]) -> None:
    running = stack("stubborn")
    running.wait_up()
    code, stderr = running.end(signal.SIGTERM)
    assert code == 0
    assert "second    killed" in stderr
    assert running.left() == []


def test_a_second_signal_ends_everything_at_once(stack: Callable[..., Stack]) -> None:
    running = stack("stubborn")
    running.wait_up()
    began = time.monotonic()
    code, _ = running.end(signal.SIGINT, signal.SIGINT)
    assert code == 130
    assert time.monotonic() - began < 1.9
    assert running.left() == []


def test_a_signal_while_starting_drains_too(stack: Callable[..., Stack], tmp_path: Path) -> None:
    running = stack("hang")
    eventually((tmp_path / "first.ready").exists)
    code, _ = running.end(signal.SIGTERM)
    assert code == 0
    assert running.left() == []


def test_a_killed_supervisor_leaves_no_child(stack: Callable[..., Stack]) -> None:
    running = stack()
    running.wait_up()
    parts = [running.part(name)["pid"] for name in ("first", "second")]
    running.process.kill()
    eventually(lambda: not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in parts))
    for pid in running.left():  # what the parts themselves started is theirs to end, as Spark's JVM does
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("behaviour", "reason"), [("fail", "ended with exit code 3"), ("hang", "was not ready after 1.5 s")]
)
def test_a_part_that_does_not_come_up_is_an_error_with_the_end_of_its_log(
    stack: Callable[..., Stack], behaviour: str, reason: str
) -> None:
    running = stack(behaviour)
    code, stderr = running.end()
    assert code == 1
    assert f"embedded.failed: second {reason}" in stderr
    assert f"about to {behaviour}" in stderr
    assert running.left() == []


def test_a_second_start_on_the_same_folder_is_refused(stack: Callable[..., Stack], tmp_path: Path) -> None:
    running = stack()
    running.wait_up()
    assert lock_holder(tmp_path) == running.process.pid
    with (
        pytest.raises(DirectoryInUse, match=rf"in use by process {running.process.pid}: stop that one .* --dir"),
        lock_folder(tmp_path),
    ):
        pass
    running.end(signal.SIGTERM)
    assert lock_holder(tmp_path) is None
    with lock_folder(tmp_path):
        assert lock_holder(tmp_path) == os.getpid()


def test_a_folder_keeps_its_ports_while_they_are_free(tmp_path: Path) -> None:
    file = tmp_path / "ports.json"
    first = ports.assign_ports(file, {"kafka": 0, "valkey": 0})
    assert len(set(first.values())) == 2
    assert ports.assign_ports(file, {"kafka": 0, "valkey": 0}) == first
    with socket.create_server(("127.0.0.1", first["kafka"])):
        moved = ports.assign_ports(file, {"kafka": 0, "valkey": 0})
        assert moved["kafka"] != first["kafka"]
        assert moved["valkey"] == first["valkey"]
        with pytest.raises(PrerequisiteMissing, match=r"is taken .* embedded\.kafka_port"):
            ports.assign_ports(file, {"kafka": first["kafka"], "valkey": 0})

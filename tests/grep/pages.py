"""A page with an ``EventSource`` in a real browser, and the wire between it and a service."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.grep.site import PATIENCE_S

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")

SCRIPT = """
const source = new EventSource(%s);
const tell = (kind, event) => console.log(
    JSON.stringify({kind, id: event.lastEventId, data: event.data, state: source.readyState}));
for (const kind of ["open", "message", "error", "caught-up", "progress", "gap", "end", "problem"])
    source.addEventListener(kind, (event) => tell(kind, event));
"""

# A browser that is driven through pipes wants them to be the descriptors 3 and 4.
_SHIM = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for want, end in zip((3, 4), ends):
    os.dup2(end, want)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """A page that follows one feed and tells what happens to it."""

    def __init__(self, told: Iterator[dict[str, Any]]) -> None:
        self.happened: list[dict[str, Any]] = []
        self._told: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, args=(told,), daemon=True).start()

    def _listen(self, told: Iterator[dict[str, Any]]) -> None:
        for each in told:
            self._told.put(each)

    def until(self, condition: Callable[[Page], bool]) -> None:
        """Wait for a condition over what happened."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self):
            try:
                self.happened.append(self._told.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"waited in vain; this has happened: {self.happened}") from None

    def saw(self, kind: str, times: int = 1) -> None:
        """Wait for something to have happened so often."""
        self.until(lambda page: len(page.of(kind)) >= times)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.happened if each["kind"] == kind]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(each["data"]) for each in self.of("message")]


@contextlib.contextmanager
def in_browser(url: str, path: str, folder: Path) -> Iterator[Page]:
    """Follow a feed with the EventSource of a browser, in a page that the service itself has."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"there is none of {', '.join(BROWSERS)} on this machine")
    theirs, ours = os.pipe(), os.pipe()
    given = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}")
    command = [sys.executable, "-I", "-S", "-c", _SHIM, str(theirs[0]), str(ours[1]), browser, *given]
    with (
        (folder / "browser.log").open("wb") as log,
        subprocess.Popen(
            command, pass_fds=(theirs[0], ours[1]), stdout=log, stderr=log, start_new_session=True
        ) as process,
        os.fdopen(theirs[1], "wb", 0) as commands,
        os.fdopen(ours[0], "rb") as answers,
    ):
        os.close(theirs[0])
        os.close(ours[1])
        try:
            driven = _Driven(commands, _messages(answers))
            target = driven.call("Target.createTarget", url=url)["targetId"]
            session = driven.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            driven.call("Runtime.enable", session)
            while (
                driven.call("Runtime.evaluate", session, expression="document.title")["result"]["value"] != "Tailrace"
            ):
                time.sleep(0.05)
            driven.call("Runtime.evaluate", session, expression=SCRIPT % json.dumps(path))
            yield Page(driven.logged())
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # what is called a browser may be a script that starts one


class _Driven:
    """A browser that does what it is told."""

    def __init__(self, commands: Any, messages: Iterator[dict[str, Any]]) -> None:
        self._commands, self._messages, self._numbers = commands, messages, count(1)

    def call(self, method: str, session: str | None = None, **given: object) -> dict[str, Any]:
        number = next(self._numbers)
        sent = {"id": number, "method": method, "params": given} | ({"sessionId": session} if session else {})
        self._commands.write(json.dumps(sent).encode() + b"\0")
        answer = next(message for message in self._messages if message.get("id") == number)
        assert "error" not in answer, answer
        assert "exceptionDetails" not in answer["result"], answer
        found: dict[str, Any] = answer["result"]
        return found

    def logged(self) -> Iterator[dict[str, Any]]:
        """Yield what the page logs."""
        for message in self._messages:
            if message.get("method") == "Runtime.consoleAPICalled":
                yield json.loads(message["params"]["args"][0]["value"])


def _messages(answers: Any) -> Iterator[dict[str, Any]]:
    rest = b""
    while chunk := answers.read1(1 << 16):
        *whole, rest = (rest + chunk).split(b"\0")
        yield from map(json.loads, whole)


class Wire:
    """Carries bytes to a service and back, and remembers what went over it. Use as ``with``."""

    def __init__(self, port: int) -> None:
        self._service = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.carried: list[tuple[bytearray, bytearray]] = []
        """Of each connection that has reached the service, what was asked and what was answered."""

    def __enter__(self) -> Wire:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def feeds(self) -> list[tuple[str, str]]:
        """Return the Last-Event-ID of each request for a search, and the answer to it."""
        found: list[tuple[str, str]] = []
        for asked, answered in self.carried:
            heads = asked.decode().split("\r\n\r\n")[:-1]
            answers = re.split(r"(?=HTTP/1\.1 \d{3} )", answered.decode())[1:]
            for head, answer in zip(heads, answers, strict=False):
                if head.startswith("GET /v1/grep?"):
                    last = re.search(r"^last-event-id: (.*)\r$", head + "\r", re.MULTILINE | re.IGNORECASE)
                    found.append((last[1] if last else "", answer))
        return found

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    service = socket.create_connection(("127.0.0.1", self._service))
                except OSError:
                    client.close()
                    continue
                asked, answered = bytearray(), bytearray()
                self.carried.append((asked, answered))
                for source, target, noted in ((client, service, asked), (service, client, answered)):
                    threading.Thread(target=_carry, args=(source, target, noted), daemon=True).start()


def _carry(source: socket.socket, target: socket.socket, noted: bytearray) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(1 << 16):
            noted += chunk
            target.sendall(chunk)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

"""A page with an ``EventSource`` in a real browser, and the wire between it and a service."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.browser import browsing
from tests.views.grep.site import PATIENCE_S

SCRIPT = """
const source = new EventSource(%s);
const tell = (kind, event) => console.log(
    JSON.stringify({kind, id: event.lastEventId, data: event.data, state: source.readyState}));
for (const kind of ["open", "message", "error", "caught-up", "progress", "gap", "end", "problem"])
    source.addEventListener(kind, (event) => tell(kind, event));
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
    with browsing(url, folder) as tab:
        while tab.evaluate("document.title") != "Tailrace":
            time.sleep(0.05)
        tab.evaluate(SCRIPT % json.dumps(path))
        yield Page(tab.logged())


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

    def carries(self, pattern: re.Pattern[str]) -> None:
        """Wait for an answer to a search to have such a text in it."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(pattern.search(answer) for _, answer in self.feeds()):
            assert time.monotonic() < deadline, f"nothing like {pattern.pattern!r} in {self.feeds()}"
            time.sleep(0.01)

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

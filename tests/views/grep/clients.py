"""Clients of searches over HTTP: sockets, taps between them and the service, and pages of a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlencode

from tailrace.client.connection import SseFrame, SseReader
from tests.browser import browsing
from tests.views.grep.site import PATIENCE_S

T = TypeVar("T")


class Client:
    """A reader that connects again, by its last id, to the next of its ports when it is cut off, until ``end``."""

    def __init__(self, *ports: int, last: str | None = None, **asked: Any) -> None:
        self.asked = asked
        self.frames: list[SseFrame] = []
        self.last = last
        """The last id of a whole frame."""
        self.connections = 0
        """Number of answers it has got."""
        self.done = False
        self.reading: asyncio.Task[Client] | None = None
        self._ports = cycle(ports)
        self._more = asyncio.Event()

    def __enter__(self) -> Client:
        """Read in the background."""
        self.reading = asyncio.create_task(self.read())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.reading is not None:
            self.reading.cancel()

    async def read(self) -> Client:
        """Read until the feed says that it has ended."""
        try:
            for port in self._ports:
                try:
                    first = True
                    async for frame in stream(port, grep_path(**self.asked), self.last):
                        self.connections += first
                        first = False
                        self._take(frame)
                except (OSError, EOFError):
                    pass  # it was cut off
                if self.done:
                    return self
                await asyncio.sleep(0.05)
        finally:
            self._more.set()
        raise AssertionError("unreachable")

    def _take(self, frame: SseFrame) -> None:
        self.frames.append(frame)
        self.last = frame.id or self.last
        assert frame.event != "problem", frame.data
        self.done |= frame.event == "end"
        self._more.set()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(frame.data or b"") for frame in self.frames if is_event(frame)]

    @property
    def ids(self) -> list[str]:
        return [event["id"] for event in self.events]

    def facts(self, name: str) -> list[dict[str, Any]]:
        """Return what the frames of one kind say."""
        return [json.loads(frame.data or b"{}") for frame in self.frames if frame.event == name]

    async def until(self, condition: Callable[[Client], bool]) -> Client:
        """Wait for a condition over what came."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self):
                assert self.reading is None or not self.reading.done(), self.reading
                self._more.clear()
                await self._more.wait()
        return self

    async def has(self, count: int) -> Client:
        """Wait until so many events have come."""
        return await self.until(lambda _: sum(map(is_event, self.frames)) >= count)

    async def saw(self, name: str) -> Client:
        """Wait for a frame about the feed itself."""
        return await self.until(lambda _: any(frame.event == name for frame in self.frames))


def grep_path(**asked: Any) -> str:
    """Return the address of a search; ``q`` may be the query itself, ``start`` is ``from``."""
    given = {("from" if name == "start" else name): value for name, value in asked.items() if value is not None}
    return "/v1/grep?" + urlencode(
        {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
    )


async def ask(port: int, path: str, last: str | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request, and read the head of its answer, which must be 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request(path, last))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head + await reader.read(4096)
    except BaseException:
        writer.close()
        raise
    return reader, writer


def request(path: str, last: str | None = None) -> bytes:
    resumed = "" if last is None else f"Last-Event-ID: {last}\r\n"
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n{resumed}\r\n".encode()


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the body that an answer has, until it is whole; OSError or EOFError if it is cut off before."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def stream(port: int, path: str, last: str | None = None) -> AsyncIterator[SseFrame]:
    """Yield the frames of an event stream."""
    reader, writer = await ask(port, path, last)
    try:
        found = SseReader()
        async for chunk in chunks(reader):
            for frame in found.feed(chunk):
                yield frame
    finally:
        writer.close()


async def read_all(clients: Sequence[Client], at_once: int = 100) -> None:
    """Read feeds to their ends."""
    room = asyncio.Semaphore(at_once)

    async def read(client: Client) -> None:
        async with room:
            await client.read()

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*map(read, clients))


def is_event(frame: SseFrame) -> bool:
    """Return True if a frame is an event: neither a control frame nor an id alone."""
    return frame.event == "message" and frame.data is not None


async def eventually(look: Callable[[], T]) -> T:
    """Look until there is something to see; return it."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := look()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return found


EVENT = b'\ndata: {"id":'


class Tap(asyncio.Protocol):
    """One client."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._tail = b""
        self.events = 0
        """Number of events that have come."""
        self.lost = False
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        seen = self._tail + data
        self.events += seen.count(EVENT) - self._tail.count(EVENT)
        self._tail = seen[-len(EVENT) + 1 :]

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @staticmethod
    def body(answer: bytes) -> bytes:
        """Return the body of an answer, as far as it has come."""
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), answer[:2_000]
        found: list[bytes] = []
        while True:
            size, line, rest = rest.partition(b"\r\n")
            if not line:
                return b"".join(found)
            found.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]

    def ids(self) -> list[str]:
        """Return the ids of the events that have come."""
        frames = SseReader().feed(self.body(b"".join(self._parts)))
        return [json.loads(frame.data or b"")["id"] for frame in frames if is_event(frame)]


async def open_taps(stack: ExitStack, port: int, paths: Sequence[str], at_once: int = 50) -> list[Tap]:
    """Connect to feeds, and wait until each has begun; they are closed with the stack."""
    room = asyncio.Semaphore(at_once)
    loop = asyncio.get_running_loop()

    async def connect(path: str) -> Tap:
        async with room:
            transport, tap = await loop.create_connection(Tap, "127.0.0.1", port)
            stack.callback(tap.close)
            transport.write(request(path))
            await eventually(lambda: tap._parts or tap.lost)
            assert tap._parts[0].startswith(b"HTTP/1.1 200 "), tap._parts
            return tap

    return await asyncio.gather(*map(connect, paths))


SCRIPT = """
const source = new EventSource(%s);
const tell = (kind, event) => console.log(
    JSON.stringify({kind, id: event.lastEventId, data: event.data, state: source.readyState}));
for (const kind of ["open", "message", "error", "caught-up", "progress", "gap", "end", "problem"])
    source.addEventListener(kind, (event) => tell(kind, event));
"""


class Page:
    """A page that follows one feed and reports its events."""

    def __init__(self, messages: Iterator[dict[str, Any]]) -> None:
        self.happened: list[dict[str, Any]] = []
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, args=(messages,), daemon=True).start()

    def _listen(self, messages: Iterator[dict[str, Any]]) -> None:
        for each in messages:
            self._messages.put(each)

    def until(self, condition: Callable[[Page], bool]) -> None:
        """Wait for a condition over what happened."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self):
            try:
                self.happened.append(self._messages.get(timeout=max(0.0, deadline - time.monotonic())))
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

"""Clients over plain sockets that know HTTP, event streams and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import cycle
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlencode

from tailrace.client.sse_reader import SseFrame, SseReader
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
        """How often it has got an answer."""
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
    """Whether a frame is neither about the feed itself nor an id alone."""
    return frame.event == "message" and frame.data is not None


async def eventually(look: Callable[[], T]) -> T:
    """Look until there is something to see; return it."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := look()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return found

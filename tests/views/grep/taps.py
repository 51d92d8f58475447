"""Clients by the thousand: each collects bytes, and looks at them when it is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack

from tailrace.client.sse_reader import SseReader
from tests.views.grep.clients import eventually, is_event, request

EVENT = b'\ndata: {"id":'


class Tap(asyncio.Protocol):
    """One client."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._tail = b""
        self.events = 0
        """How many events have come."""
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
        """Return what an answer says, as far as it has come."""
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

"""Writes events from standard input to a topic, in the order in which they come.

A thread reads ahead while a batch is under way, so a slow source is sent at once and a fast one in full batches. A line
that is no event stops the command with its number; every line before it has been written.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from collections import deque

import msgspec

from tailrace.api import failure
from tailrace.client import BATCH_BYTES, River, connect
from tailrace.errors import EventRefused, UsageError

READ_BYTES = 2**20
AHEAD_CHUNKS = 32
_LINE = re.compile(r"(?:(?<=\. )|(?<=; ))line (\d+)(?=: )")
_NULL = msgspec.Raw(b"null")


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    value: msgspec.Raw
    key: msgspec.Raw = _NULL
    headers: msgspec.Raw = _NULL
    time: msgspec.Raw = _NULL


class _Answer(msgspec.Struct):
    events: list[msgspec.Raw]


_check = msgspec.json.Decoder(_Line).decode


def put(topic: str, *, batch: int, coordinates: bool, url: str) -> int:
    """Write standard input to the topic and say how much it was."""
    writer = _Writer(topic, batch, coordinates)
    began = time.monotonic()
    try:
        asyncio.run(writer.run(url))
    except KeyboardInterrupt:
        return 130
    finally:
        spent = time.monotonic() - began
        print(f"{writer.written:,} events written to {topic} in {spent:.1f} s", file=sys.stderr)
    return 0


class _Input:
    """Standard input, read ahead by a thread up to a limit."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._chunks: deque[bytes] = deque()
        self._ready = asyncio.Event()
        self._room = threading.Semaphore(AHEAD_CHUNKS)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        chunk = b"first"
        while chunk:
            self._room.acquire()
            chunk = os.read(0, READ_BYTES)
            self._chunks.append(chunk)
            try:
                self._loop.call_soon_threadsafe(self._ready.set)
            except RuntimeError:  # the loop has ended before the input
                return

    async def take(self) -> list[bytes]:
        """Wait for more and return all there is; an empty chunk is the end."""
        await self._ready.wait()
        self._ready.clear()
        taken = [self._chunks.popleft() for _ in range(len(self._chunks))]
        self._room.release(len(taken))
        return taken


class _Writer:
    def __init__(self, topic: str, batch: int, coordinates: bool) -> None:
        self.topic, self.batch, self.coordinates = topic, batch, coordinates
        self.written = 0
        self._number = 0  # of the last line taken
        self._lines: list[bytes] = []
        self._numbers: list[int] = []
        self._size = 0

    async def run(self, url: str) -> None:
        source = _Input(asyncio.get_running_loop())
        rest: list[bytes] = []
        async with connect(url) as river:
            ended = False
            while not ended:
                chunks = await source.take()
                ended = b"" in chunks
                *lines, tail = b"".join([*rest, *chunks]).split(b"\n")
                rest = [tail]
                if ended and tail:
                    lines.append(tail)
                for line in lines:
                    await self._add(river, line)
                await self._send(river)

    async def _add(self, river: River, line: bytes) -> None:
        self._number += 1
        if not line or line.isspace():
            return
        try:
            _check(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            await self._send(river)
            raise EventRefused(f'line {self._number}: {error}; an event is {{"key": …, "value": …}}') from None
        if self._lines and (len(self._lines) >= self.batch or self._size + len(line) > BATCH_BYTES):
            await self._send(river)
        self._lines.append(line)
        self._numbers.append(self._number)
        self._size += len(line) + 1

    async def _send(self, river: River) -> None:
        if not self._lines:
            return
        lines, numbers = self._lines, self._numbers
        self._lines, self._numbers, self._size = [], [], 0
        try:
            answer = await river.put_lines(self.topic, lines)
        except UsageError as error:
            # The service counts the lines of the batch; whoever reads the message counts those of the input.
            said = _LINE.sub(
                lambda found: f"line {dict(enumerate(numbers, 1)).get(int(found[1]), found[1])}", str(error)
            )
            where = f"lines {numbers[0]} to {numbers[-1]}"
            raise failure({"code": error.code, "detail": f"{where}: {said}"}) from None
        self.written += len(lines)
        if self.coordinates:
            rows = msgspec.json.decode(answer, type=_Answer).events
            sys.stdout.buffer.write(b"".join(bytes(row) + b"\n" for row in rows))
            sys.stdout.buffer.flush()

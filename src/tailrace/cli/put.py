"""Writes events from standard input to a topic, for ``tailrace put``.

Lines are written in their order. A thread reads ahead while a batch is sent: a slow input is sent at once, a fast one
in full batches. A line that is no event stops the command with the line's number; every line before it is written.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections import deque

import msgspec

from tailrace.client.connection import failure
from tailrace.client.river import BATCH_BYTES, River, connect
from tailrace.errors import EventRefused, UsageError

READ_BYTES = 2**20
AHEAD_CHUNKS = 32
_LINE_NUMBER = re.compile(r"(?:(?<=\. )|(?<=; ))line (\d+)(?=: )")
_NULL = msgspec.Raw(b"null")


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    value: msgspec.Raw
    key: msgspec.Raw = _NULL
    headers: msgspec.Raw = _NULL
    time: msgspec.Raw = _NULL


_check = msgspec.json.Decoder(_Line).decode


class InputWriter:
    """Writes standard input to a topic, up to ``batch`` events at once; with ``prints_ids`` also where each is."""

    def __init__(self, topic: str, batch: int, *, prints_ids: bool) -> None:
        self.topic, self.batch, self.prints_ids = topic, batch, prints_ids
        self.written = 0
        self._number = 0  # of the last line read
        self._lines: list[bytes] = []
        self._numbers: list[int] = []
        self._size = 0

    async def run(self, url: str) -> None:
        """Write until the input ends."""
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
            # The service counts the lines of the batch, the user those of the input.
            in_input = dict(enumerate(numbers, 1))
            detail = _LINE_NUMBER.sub(lambda found: f"line {in_input.get(int(found[1]), found[1])}", str(error))
            detail = f"lines {numbers[0]} to {numbers[-1]}: {detail}"
            raise failure({"code": error.code, "detail": detail}) from None
        self.written += len(lines)
        if self.prints_ids:
            rows = msgspec.json.decode(answer, type=dict[str, list[msgspec.Raw]])["events"]
            sys.stdout.buffer.write(b"".join(bytes(row) + b"\n" for row in rows))
            sys.stdout.buffer.flush()


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
        """Wait for input and return all chunks that were read; an empty chunk is the end."""
        await self._ready.wait()
        self._ready.clear()
        chunks = [self._chunks.popleft() for _ in range(len(self._chunks))]
        self._room.release(len(chunks))
        return chunks

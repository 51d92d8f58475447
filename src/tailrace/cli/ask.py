"""Commands that ask the service once and print the answer: a table on a terminal, JSON everywhere else.

Writes events from standard input to a topic, in the order in which they come.

A thread reads ahead while a batch is under way, so a slow source is sent at once and a fast one in full batches. A line
that is no event stops the command with its number; every line before it has been written.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import sys
import threading
import time
from collections import deque
from typing import Any

import msgspec

from tailrace.api import failure
from tailrace.cli.follow import ask, lines, percent, plain, size, table, text
from tailrace.client.river import BATCH_BYTES, River, connect
from tailrace.errors import EventRefused, StreamNotFound, UsageError


def streams(
    prefix: str | None, limit: int | None, *, top: int | None = None, memory: bool = False, json: bool, url: str
) -> None:
    """Print the streams."""
    found = ask(url, lambda river: river.streams(prefix, limit, top=top, memory=memory))
    if plain(json):
        lines(found)
        return
    rows = [
        (
            s.name,
            f"{s.events:,}",
            size(s.bytes),
            *([size(s.memory or 0)] if memory else []),
            f"{s.days:,}",
            f"{math.floor(s.packed * 100)}%",
            s.last_time or "",
        )
        for s in found
    ]
    table(("stream", "events", "bytes", *(["memory"] if memory else []), "days", "packed", "last event"), rows)


def days(name: str, *, json: bool, url: str) -> None:
    """Print the days of a stream."""
    found = ask(url, lambda river: river.days(name))
    if not found:
        raise StreamNotFound(name)
    if plain(json):
        lines(found)
        return
    rows = [
        (
            d.day,
            f"{d.events:,}",
            size(d.bytes),
            size(d.raw_bytes) if d.raw_bytes else "",
            str(d.first),
            str(d.last),
            d.state,
        )
        for d in found
    ]
    table(("day", "events", "bytes", "unpacked", "first", "last", "state"), rows)


_FIGURES = (
    "rate",
    "lag",
    "batch_ms",
    "in",
    "stored",
    "skipped",
    "dead",
    "expired",
    "unaccounted",
    "outbox",
    "restarts",
)


def status(*, json: bool, url: str) -> None:
    """Print what the parts do."""
    answer = ask(url, lambda river: river.status())
    if plain(json):
        lines([answer])
        return
    parts = [part for part in answer.get("parts", []) if isinstance(part, dict)]
    rest = [" ".join(f"{k}={v}" for k, v in part.items() if k not in ("name", "state")) for part in parts]
    table(("part", "state", ""), [(text(p, "name"), text(p, "state"), r) for p, r in zip(parts, rest, strict=True)])
    views = [(name, view) for name, view in answer.get("views", {}).items() if isinstance(view, dict)]
    table(
        ("view", *(name for name, _ in views)),
        [(key.replace("_", " "), *(text(view, key) for _, view in views)) for key in _FIGURES],
    )
    jobs = [job for job in answer.get("upkeep", ()) if isinstance(job, dict)]
    if jobs:
        table(
            ("upkeep", "view", "last run", "took", "state", ""),
            [(text(job, "job"), text(job, "view"), *_run(job)) for job in jobs],
        )
    searches = answer.get("searches") or {}
    if searches.get("alive"):
        row = tuple(text(searches, key) for key in ("alive", "followers", "scanning"))
        table(("searches", "followers", "scans waiting"), [row])
    rules = [rule for rule in answer.get("folds", ()) if isinstance(rule, dict)]
    if rules:
        rows = [(text(rule, "rule"), text(rule, "pending"), percent(rule.get("ratio"))) for rule in rules]
        table(("folds", "pending", "folded"), rows)
    gaps = [
        (text(gap, "source"), text(gap, "first"), text(gap, "until")) for _, v in views[:1] for gap in v.get("gaps", ())
    ]
    if gaps:
        table(("dropped by Kafka before it was read", "from offset", "until"), gaps)


def _run(job: dict[str, Any]) -> tuple[str, str, str, str]:
    """When a run of upkeep ended, how long it took, how it went, and what it counted."""
    ended = text(job, "ended").partition(".")[0].replace("T", " ")
    took = "" if job.get("seconds") is None else f"{job['seconds']:,.1f}s"
    late = "overdue" if job.get("overdue") else ""
    went = f"failed: {job['error']}" if job.get("error") else "" if job.get("started") else "has not run"
    figures = job.get("figures") or {}
    said = [
        f"{key.replace('_', ' ')} {size(value) if 'bytes' in key and isinstance(value, int) else text(figures, key)}"
        for key, value in figures.items()
        if value
    ]
    return ended, took, ", ".join(filter(None, (late, went))) or "ok", ", ".join(said)


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

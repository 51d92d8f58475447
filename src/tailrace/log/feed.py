"""The feed of logs: one name or several, from anywhere, then live; exact when resumed.

Invariant: from any cursor a feed yields exactly the events after it, each once and in each log's order, or says which
stretch is gone. Several logs are merged by time as far as they have been read; each keeps its own order and place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from heapq import heapify, heappop, heapreplace

import msgspec

from tailrace.errors import CursorGone, StreamNotFound
from tailrace.log.cursor import Cursor, FromCursor, FromEnd, FromLast, FromTime, Position
from tailrace.log.frame import AnyFrame, Control, Frame, Moved
from tailrace.log.hub import Hub, Piece
from tailrace.log.reader import Reader, before_time, end_of, last_events
from tailrace.log.request import Request
from tailrace.log.segment import Gap, Key, key_of
from tailrace.log.store import Logs

BATCH_BYTES = 256 << 10
UNTIL_GRACE_MS = 1000
"""How long after ``until`` a live feed still waits for what was under way."""

_encode = msgspec.json.Encoder().encode


class Item(msgspec.Struct, frozen=True, gc=False):
    """An event of one log, ready to be merged: ``data`` is None when it is left out."""

    time_ms: int
    position: Position
    index: int
    """Of its segment."""
    data: bytes | None


class Line:
    """One log of a feed: its reader and what was read ahead of the merge."""

    def __init__(self, reader: Reader, target: Position, at: int = 0) -> None:
        self.reader = reader
        self.at = at
        """Which of the request's names it is."""
        self.position = reader.position
        self.ahead: deque[Item | Gap] = deque()
        self.target = target
        self.until: Key | None = None
        """Where the request ends, when it ends at a cursor."""
        self.done = False


class LogFeeds:
    """Opens feeds over the logs of one view."""

    def __init__(self, hub: Hub, logs: Logs, clock: Callable[[], int]) -> None:
        self._hub = hub
        self._logs = logs
        self._clock = clock

    async def open(self, request: Request) -> Feed:
        """Check the request against what exists and find its start. Raises before anything is sent."""
        ends = [await end_of(self._logs, name) for name in request.names]
        if request.missing == "fail":
            for name, end in zip(request.names, ends, strict=True):
                if end == Position.START:
                    raise StreamNotFound(name)
        starts = await self._starts(request, ends)
        feed = Feed(self._hub, self._logs, request, starts, ends, self._clock)
        await feed.begin()
        return feed

    async def _starts(self, request: Request, ends: list[Position]) -> Sequence[Position]:
        start, names = request.start, request.names
        if isinstance(start, FromCursor):
            return start.cursor.positions
        if isinstance(start, FromEnd):
            return ends
        if isinstance(start, FromTime):
            return [await before_time(self._logs, name, start.time_ms) for name in names]
        if isinstance(start, FromLast):
            return latest([await last_events(self._logs, name, start.count) for name in names], ends, start.count)
        return [Position.START] * len(names)


def latest(tails: Sequence[Sequence[tuple[int, Position]]], ends: Sequence[Position], count: int) -> list[Position]:
    """Take ``count`` events from the ends of all logs, always the latest of those that are left; return the places."""
    taken = [0] * len(tails)
    heads = [(-tail[0][0], i) for i, tail in enumerate(tails) if tail]
    heapify(heads)
    for _ in range(min(count, sum(map(len, tails)))):
        i = heads[0][1]
        taken[i] += 1
        if taken[i] < len(tails[i]):
            heapreplace(heads, (-tails[i][taken[i]][0], i))
        else:
            heappop(heads)
    return [tail[n - 1][1] if n else end for tail, n, end in zip(tails, taken, ends, strict=True)]


class Feed:
    """An open feed: ``async for`` yields batches of frames until it ends; ``aclose`` ends it early."""

    def __init__(
        self,
        hub: Hub,
        logs: Logs,
        request: Request,
        starts: Sequence[Position],
        ends: Sequence[Position],
        clock: Callable[[], int],
    ) -> None:
        self._hub, self._logs, self._request, self._clock = hub, logs, request, clock
        self._starts, self._ends = starts, ends
        self._plain = len(request.names) == 1 and request.limit is None and request.since_ms is None
        """Whether the cursor is one position and nothing else: most are, and every event has one."""
        self._lines: list[Line] = []
        self._wake = asyncio.Event()
        self._stack = AsyncExitStack()
        self._sent = request.sent
        self._announced = False
        self._ended = False

    @property
    def cursor(self) -> str:
        """Where the feed stands."""
        if self._plain:
            position = self._lines[0].position
            return f"{position.epoch}.{position.number}"
        return str(self._cursor())

    async def begin(self) -> None:
        """Follow the logs and read the first stretch, so that a cursor that is gone is known before the first byte."""
        request = self._request
        try:
            for name, start, end in zip(request.names, self._starts, self._ends, strict=True):
                channel = await self._stack.enter_async_context(self._hub.follow(name, self._wake))
                line = self._line(Reader(self._logs, name, start, channel), end, len(self._lines))
                self._lines.append(line)
                if request.until is not None:
                    log = await self._logs.log(name)
                    line.until = key_of(log, self._last_of(request.until, line.at))
                    line.done = key_of(log, start) >= line.until
            await self._fill()
            if request.on_gap == "fail":
                for line in self._lines:
                    if line.ahead and isinstance(gap := line.ahead[0], Gap):
                        raise CursorGone(line.reader.name, str(gap.after), str(gap.to), gap.reason)
        except BaseException:
            await self.aclose()
            raise

    def _line(self, reader: Reader, end: Position, at: int) -> Line:
        return Line(reader, end, at)

    def _last_of(self, until: Cursor, at: int) -> Position:
        """Return the last place of a log that a cursor has seen."""
        ahead = until.ahead[at] if until.ahead else ()
        return Position(until.positions[at].epoch, ahead[-1][1]) if ahead else until.positions[at]

    def __aiter__(self) -> AsyncIterator[list[AnyFrame]]:
        return self._batches()

    async def aclose(self) -> None:
        """Stop following."""
        self._ended = True
        await self._stack.aclose()

    async def _batches(self) -> AsyncIterator[list[AnyFrame]]:
        try:
            while not self._ended:
                self._wake.clear()
                frames = await self._merge()
                frames += self._controls()
                if frames:
                    yield frames
                elif not self._ended:
                    await self._wait()
        finally:
            await self._stack.aclose()

    async def _wait(self) -> None:
        until = self._request.until_ms
        if until is None:
            await self._wake.wait()
            return
        left = max(0.05, (until + UNTIL_GRACE_MS - self._clock()) / 1000)
        try:
            await asyncio.wait_for(self._wake.wait(), left)
        except TimeoutError:
            return

    async def _fill(self) -> None:
        """Read on wherever a log has nothing ahead, so that the merge can compare all of them."""
        for line in self._lines:
            if line.ahead or line.done:
                continue
            for piece in await line.reader.next():
                if isinstance(piece, Gap):
                    line.ahead.append(piece)
                else:
                    self._take(line, piece)

    def _take(self, line: Line, piece: Piece) -> None:
        """Turn a stored run into items, leaving out what was seen before and what was not asked for."""
        request, segment, entry = self._request, piece.segment, piece.entry
        skip = self._seen(line, piece)
        times = entry.run.times
        number = entry.first + skip - 1
        for time_ms, data in zip(times[skip:], entry.run.frames(segment.start_ms, skip), strict=True):
            number += 1
            wanted = (request.since_ms is None or time_ms >= request.since_ms) and (
                request.until_ms is None or time_ms <= request.until_ms
            )
            line.ahead.append(Item(time_ms, Position(segment.epoch, number), segment.index, data if wanted else None))

    @staticmethod
    def _seen(line: Line, piece: Piece) -> int:
        """Return how many events of a run were seen before."""
        last = line.ahead[-1] if line.ahead else None
        seen = line.position if last is None or isinstance(last, Gap) else last.position
        return max(0, seen.number + 1 - piece.entry.first) if seen.epoch == piece.segment.epoch else 0

    async def _merge(self) -> list[AnyFrame]:
        frames: list[AnyFrame] = []
        size = 0
        moved = False
        limit = self._request.limit
        await self._fill()
        while size < BATCH_BYTES and (limit is None or self._sent < limit):
            line = self._next_line()
            if line is None:
                break
            if isinstance(line.ahead[0], Gap) and frames and self._request.on_gap == "fail":
                break  # what precedes the gap goes out first
            item = line.ahead.popleft()
            if isinstance(item, Gap):
                frames.append(self._gap(line, item))
                continue
            line.position = item.position
            line.done = line.until is not None and (item.index, item.position.number) >= line.until
            if item.data is None:
                moved = True
            else:
                moved = False
                self._sent += 1
                frames.append(Frame(self.cursor, item.data))
                size += len(item.data)
            if not line.ahead and not line.done and len(self._lines) > 1:
                await self._fill()
        if moved:
            frames.append(Moved(self.cursor))
        return frames

    def _next_line(self) -> Line | None:
        """Return the log whose next event is the earliest; one that has nothing ahead is at its end."""
        best: Line | None = None
        best_ms = 0
        for line in self._lines:
            if not line.ahead or line.done:
                continue
            head = line.ahead[0]
            if isinstance(head, Gap):
                return line
            if best is None or head.time_ms < best_ms:
                best, best_ms = line, head.time_ms
        return best

    def _gap(self, line: Line, gap: Gap) -> AnyFrame:
        if self._request.on_gap == "fail":
            raise CursorGone(line.reader.name, str(gap.after), str(gap.to), gap.reason)
        line.position = gap.to
        facts = {"name": line.reader.name, "from": str(gap.after), "to": str(gap.to), "reason": gap.reason}
        return Control("gap", self.cursor, _encode(facts))

    def _controls(self) -> list[AnyFrame]:
        """Say that the feed has caught up, or that it has ended."""
        request, frames = self._request, list[AnyFrame]()
        if not self._announced and all(map(_caught_up, self._lines)):
            self._announced = True
            frames.append(Control("caught-up", self.cursor))
        full = request.limit is not None and self._sent >= request.limit
        read = all(line.done or not line.ahead for line in self._lines)
        over = self._announced and read and (not request.follow or self._past_until())
        if full or over or all(line.done for line in self._lines):
            self._ended = True
            reason = "limit" if full else "until" if request.until_ms or request.until else "caught-up"
            cursor = str(msgspec.structs.replace(self._cursor(), ended=True))
            frames.append(Control("end", cursor, _encode({"reason": reason, "events": self._sent})))
        return frames

    def _past_until(self) -> bool:
        until = self._request.until_ms
        return until is not None and self._clock() >= until + UNTIL_GRACE_MS

    def _cursor(self) -> Cursor:
        request = self._request
        sent = self._sent if request.limit is not None else None
        return Cursor(tuple(line.position for line in self._lines), sent, request.since_ms)


def _caught_up(line: Line) -> bool:
    """Whether a log has been sent up to what it had when the feed began."""
    target, position = line.target, line.position if line.ahead else line.reader.position
    if line.done or (line.reader.is_at_end and not line.ahead):
        return True
    return target.epoch == position.epoch and target.number <= position.number

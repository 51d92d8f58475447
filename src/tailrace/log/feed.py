"""The loop of every feed, and the feed of logs: one name or several, from any start, then live.

Invariant: from any cursor a feed yields exactly the events after it, each once and in each log's order, or a gap frame
for events that are gone. It merges several logs by time as far as it has read them; each keeps its own order and
position. A LogReader reads one log, from the hub's live end or from the store.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import Self

import msgspec

from tailrace.errors import CursorGone, StreamNotFound
from tailrace.log.cursor import Cursor, FromCursor, FromEnd, FromLast, FromTime, Position
from tailrace.log.hub import Hub, LiveEnd, SegmentEntry, woken
from tailrace.log.request import AnyFrame, AnyRequest, ControlFrame, EventFrame, FeedRequest, Moved
from tailrace.log.run import NumberedRun
from tailrace.log.segment import Gap, OrderKey, Segment, key_of, locate
from tailrace.log.store import Logs

READ_BYTES = 1 << 20
"""Approximate bytes of one read from the store; a reader adapts its count of entries to it."""
MOST_ENTRIES = 500
SMALL_BYTES, MOST_SEGMENTS = 128 << 10, 200
"""Most stored bytes, and most segments, when a reader reads small segments together."""
TRIES = 5
"""Attempts at a search backwards that packing or expiry may disturb."""
BATCH_BYTES = 256 << 10
UNTIL_GRACE_MS = 1000
"""Time that a live feed waits after ``until`` for events under way."""
LEAST_WAIT_S = 0.05
"""Shortest wait of a feed that is about to end at a time."""
_encode = msgspec.json.Encoder().encode


class OpenFeed(ABC):
    """The loop of a feed. A view says how to read (``_next``), how to wait, and what its cursor is."""

    def __init__(self, request: AnyRequest, clock: Callable[[], int], until_ms: float | None = None) -> None:
        self._parameters, self._sent, self._caught_up = request.parameters, request.sent, request.resumed
        self._clock, self._until_ms = clock, until_ms
        self._is_strict = request.parameters.on_gap == "fail"
        """True if the frames before a gap are the last ones: then CursorGone is raised."""
        self._ended = False
        self._wake = asyncio.Event()
        """Set when there may be something new."""
        self._stack = AsyncExitStack()
        """What the feed follows."""

    @property
    def cursor(self) -> str:
        """Cursor after the last frame; empty while there is none."""
        return self._cursor_text()

    @abstractmethod
    def _cursor_text(self, ended: bool = False) -> str:
        """Return the cursor after the last frame; with ``ended`` the one that says that the request has ended."""

    @abstractmethod
    async def _begin(self) -> None:
        """Find the start; errors of the request are raised here."""

    @abstractmethod
    async def _next(self) -> Sequence[AnyFrame]:
        """Return the next frames; none if there is nothing now."""

    @abstractmethod
    async def _wait(self) -> None:
        """Wait until there may be more."""

    async def begin(self) -> Self:
        """Begin to follow, before the first frame is asked for."""
        try:
            await self._begin()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aiter__(self) -> AsyncGenerator[Sequence[AnyFrame], None]:
        try:
            while not self._ended:
                if frames := await self._next():
                    yield frames
                elif not self._ended:
                    await self._wait()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        self._ended = True
        await self._stack.aclose()

    @property
    def _is_full(self) -> bool:
        """True if the limit is reached."""
        limit = self._parameters.limit
        return limit is not None and self._sent >= limit

    @property
    def _counted(self) -> int | None:
        """Events sent, for the cursor; None if the request has no limit to count for."""
        return None if self._parameters.limit is None else self._sent

    @property
    def _left_s(self) -> float:
        """Time that a live feed still waits for events up to ``until``; endless if it does not end at a time."""
        return inf if self._until_ms is None else (self._until_ms + UNTIL_GRACE_MS - self._clock()) / 1000

    @property
    def _is_over(self) -> bool:
        """True if the feed ends as soon as it has caught up."""
        return not self._parameters.follow or self._left_s <= 0

    def _catch_up(self, data: bytes = b"{}") -> list[AnyFrame]:
        """Return the frame that says that the feed has caught up; it is sent once."""
        self._caught_up = True
        return [ControlFrame("caught-up", self.cursor, data)]

    def _end(self, reason: str) -> list[AnyFrame]:
        """End the feed; return its last frame."""
        self._ended = True
        facts = {"reason": reason, "events": self._sent}
        return [ControlFrame("end", self._cursor_text(ended=True), _encode(facts))]


class LogFeeds:
    """Opens feeds over the logs of one view."""

    def __init__(self, hub: Hub, logs: Logs, clock: Callable[[], int]) -> None:
        self.hub, self.logs, self.clock = hub, logs, clock

    async def open(self, request: FeedRequest) -> LogFeed:
        """Check the request against the logs and find its start. Errors are raised here, before the first frame."""
        ends = [(await self.logs.log(name)).end for name in request.names]
        if request.parameters.missing == "fail":
            for name, end in zip(request.names, ends, strict=True):
                if end == Position.START:
                    raise StreamNotFound(name)
        starts = await self._starts(request, ends)
        return await LogFeed(self, request, starts, ends).begin()

    async def _starts(self, request: FeedRequest, ends: list[Position]) -> Sequence[Position]:
        start, names = request.start, request.names
        if isinstance(start, FromCursor):
            return start.cursor.positions
        if isinstance(start, FromEnd):
            return ends
        if isinstance(start, FromTime):
            return [await before_time(self.logs, name, start.time_ms) for name in names]
        if isinstance(start, FromLast):
            return latest([await last_events(self.logs, name, start.count) for name in names], ends, start.count)
        return [Position.START] * len(names)


class LogFeed(OpenFeed):
    """An open feed over the logs of names."""

    def __init__(
        self, feeds: LogFeeds, request: FeedRequest, starts: Sequence[Position], ends: Sequence[Position]
    ) -> None:
        super().__init__(request, feeds.clock, request.until_ms)
        self._hub, self._logs, self._request = feeds.hub, feeds.logs, request
        self._starts, self._ends = starts, ends
        self._caught_up = False
        self._plain = len(request.names) == 1 and request.parameters.limit is None and request.since_ms is None
        """True if the cursor is a single position: the common case, formatted for every event."""
        self._lines: list[MergeLine] = []

    @property
    def cursor(self) -> str:
        if self._plain:
            position = self._lines[0].position
            return f"{position.epoch}.{position.number}"
        return self._cursor_text()

    def _cursor_text(self, ended: bool = False) -> str:
        return str(self._cursor(ended))

    async def _begin(self) -> None:
        """Follow the logs and read their first entries, so that CursorGone is raised before the first frame."""
        request = self._request
        for name, start, end in zip(request.names, self._starts, self._ends, strict=True):
            live_end = await self._stack.enter_async_context(self._hub.follow(name, self._wake))
            line = self._line(LogReader(self._logs, name, start, live_end), end, len(self._lines))
            self._lines.append(line)
            if request.until is not None:
                log = await self._logs.log(name)
                line.until = key_of(log, request.until.last_seen(line.at))
                line.done = key_of(log, start) >= line.until
        await self._fill()
        for line in self._lines:
            if self._is_strict and line.ahead and isinstance(gap := line.ahead[0], Gap):
                self._gap(line, gap)

    def _line(self, reader: LogReader, end: Position, at: int) -> MergeLine:
        return MergeLine(reader, end, at)

    async def _next(self) -> list[AnyFrame]:
        self._wake.clear()
        return await self._merge() + self._controls()

    async def _wait(self) -> None:
        await woken(self._wake, max(LEAST_WAIT_S, self._left_s))

    async def _fill(self) -> None:
        """Read the logs that have no event ahead, so that the merge can compare all of them."""
        for line in self._lines:
            if line.ahead or line.done:
                continue
            for piece in await line.reader.next():
                if isinstance(piece, Gap):
                    line.ahead.append(piece)
                else:
                    self._take(line, piece)

    def _take(self, line: MergeLine, piece: SegmentEntry) -> None:
        """Turn a stored run into items: skip events that were sent, leave out those outside the requested times."""
        request, segment, entry = self._request, piece.segment, piece.entry
        skip = self._seen(line, piece)
        times = entry.run.times
        number = entry.first + skip - 1
        for time_ms, data in zip(times[skip:], entry.run.frames(segment.start_ms, skip), strict=True):
            number += 1
            wanted = (request.since_ms is None or time_ms >= request.since_ms) and (
                request.until_ms is None or time_ms <= request.until_ms
            )
            line.ahead.append(
                MergeItem(time_ms, Position(segment.epoch, number), segment.index, data if wanted else None)
            )

    @staticmethod
    def _seen(line: MergeLine, piece: SegmentEntry) -> int:
        """Return how many events of a run precede the line's position."""
        last = line.ahead[-1] if line.ahead else None
        seen = line.position if last is None or isinstance(last, Gap) else last.position
        return max(0, seen.number + 1 - piece.entry.first) if seen.epoch == piece.segment.epoch else 0

    async def _merge(self) -> list[AnyFrame]:
        frames: list[AnyFrame] = []
        size = 0
        moved = False
        await self._fill()
        while size < BATCH_BYTES and not self._is_full:
            line = self._next_line()
            if line is None:
                break
            if isinstance(line.ahead[0], Gap) and frames and self._is_strict:
                break  # the frames before the gap go out first
            item = line.ahead.popleft()
            if isinstance(item, Gap):
                frames.append(self._gap(line, item))
                continue
            line.position = item.position
            line.done = line.until is not None and (item.index, item.position.number) >= line.until
            moved = item.data is None
            if item.data is not None:
                self._sent += 1
                frames.append(EventFrame(self.cursor, item.data))
                size += len(item.data)
            if not line.ahead and not line.done and len(self._lines) > 1:
                await self._fill()
        if moved:
            frames.append(Moved(self.cursor))
        return frames

    def _next_line(self) -> MergeLine | None:
        """Return the log whose next event is the earliest; a log with no event ahead is at its end."""
        best: MergeLine | None = None
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

    def _gap(self, line: MergeLine, gap: Gap) -> AnyFrame:
        name, after, to = line.reader.name, str(gap.after), str(gap.to)
        if self._is_strict:
            raise CursorGone(name, after, to, gap.reason)
        line.position = gap.to
        facts = {"name": name, "from": after, "to": to, "reason": gap.reason}
        return ControlFrame("gap", self.cursor, _encode(facts))

    def _controls(self) -> list[AnyFrame]:
        """Return the frames that announce that the feed has caught up or has ended."""
        request, frames = self._request, list[AnyFrame]()
        if not self._caught_up and all(line.is_caught_up for line in self._lines):
            frames += self._catch_up()
        read = all(line.done or not line.ahead for line in self._lines)
        if self._is_full:
            frames += self._end("limit")
        elif (self._caught_up and read and self._is_over) or all(line.done for line in self._lines):
            frames += self._end("until" if request.until_ms or request.until else "caught-up")
        return frames

    def _cursor(self, ended: bool = False) -> Cursor:
        positions = tuple(line.position for line in self._lines)
        return Cursor(positions, self._counted, self._request.since_ms, ended)


class MergeLine:
    """One log of a feed: its reader and the events read ahead of the merge."""

    def __init__(self, reader: LogReader, target: Position, at: int = 0) -> None:
        self.reader = reader
        self.at = at
        """Index of its name in the request."""
        self.position = reader.position
        self.ahead: deque[MergeItem | Gap] = deque()
        self.target = target
        """End of the log when the feed was opened: the feed has caught up there."""
        self.until: OrderKey | None = None
        """End of the request, if it ends at a cursor."""
        self.done = False

    @property
    def is_caught_up(self) -> bool:
        """True if the log was sent up to its end at the time the feed was opened."""
        target, position = self.target, self.position if self.ahead else self.reader.position
        if self.done or (self.reader.is_at_end and not self.ahead):
            return True
        return target.epoch == position.epoch and target.number <= position.number


class MergeItem(msgspec.Struct, frozen=True, gc=False):
    """An event of one log, ready to be merged: ``data`` is None if the feed leaves it out."""

    time_ms: int
    position: Position
    index: int
    """Index of its segment."""
    data: bytes | None


class LogReader:
    """Reads one log from a position on: each event once and in order, events that are gone as a Gap."""

    def __init__(self, logs: Logs, name: str, position: Position, live_end: LiveEnd) -> None:
        self.name, self.position = name, position
        self._logs, self._live_end, self._era = logs, live_end, live_end.era
        self._index: int | None = None
        self._count = 4
        self.is_at_end = False
        """True if the last read returned nothing."""

    @property
    def key(self) -> OrderKey:
        """Position in the log's own order."""
        return self._index or 0, self.position.number

    async def next(self) -> list[SegmentEntry | Gap]:
        """Return the next entries and move behind them; an empty list at the end of the log."""
        live_end = self._live_end
        comparable = self._era == live_end.era and self._index is not None
        self._era = live_end.era
        live = live_end.after(self.position.epoch, self.key) if comparable else None
        pieces: list[SegmentEntry | Gap] = _within_read(live) if live is not None else await self._from_store()
        self.is_at_end = not pieces
        for piece in reversed(pieces):
            if isinstance(piece, SegmentEntry):
                self._move(piece.segment, piece.entry.last)
                break
        return pieces

    async def _from_store(self, again: bool = True) -> list[SegmentEntry | Gap]:
        gaps: list[SegmentEntry | Gap] = []
        log = await self._logs.log(self.name)
        place = locate(log, self.position)
        if place.gap is not None:
            gaps.append(place.gap)
            self.position = place.position
        elif not log.segments and self.position == Position.START:
            self.position = log.expired  # everything has expired, and the start is behind it
        if not log.segments:
            # The live end announces the next event; entries that it may still hold are gone.
            self._index = max(self._index or 0, self._live_end.head[0])
        for at, segment in enumerate(log.segments[place.at :], place.at + 1):
            is_inside = segment.epoch == self.position.epoch and segment.first <= self.position.number
            after = self.position.number if is_inside else segment.first - 1
            entries = await self._logs.read(self.name, segment, after, self._count)
            if entries:
                mean = sum(entry.size for entry in entries) // len(entries) + 1
                self._count = max(1, min(MOST_ENTRIES, READ_BYTES // mean))
                more = await self._following(log.segments[at:]) if entries[-1].last >= segment.last else []
                return [*gaps, *(SegmentEntry(segment, entry) for entry in entries), *more]
            if after < segment.last:
                # The registry, read before, lists more than the segment has: it expired meanwhile, or is damaged.
                if again and not gaps:
                    return await self._from_store(again=False)
                gaps.append(Gap(Position(segment.epoch, after), segment.end, "missing"))
            self._move(segment, max(after, segment.last))
        return gaps

    async def _following(self, segments: Sequence[Segment]) -> list[SegmentEntry]:
        """Return the entries of the small segments that follow one which was read to its end.

        A log may have thousands of them; reading them one by one would read the registry as often.
        """
        small: list[Segment] = []
        size = 0
        for segment in segments:
            size += segment.bytes
            if segment.open or size > SMALL_BYTES or len(small) == MOST_SEGMENTS:
                break
            small.append(segment)
        read: list[SegmentEntry] = []
        requests = [(self.name, segment, segment.first - 1) for segment in small]
        answers = await self._logs.read_many(requests, MOST_ENTRIES) if small else []
        for segment, entries in zip(small, answers, strict=True):
            read += [SegmentEntry(segment, entry) for entry in entries]
            if not entries or entries[-1].last < segment.last:
                break  # it has more entries, or was changed meanwhile: the next read deals with it
        return read

    def _move(self, segment: Segment, number: int) -> None:
        self._index = segment.index
        self.position = Position(segment.epoch, number)


def _within_read(pieces: list[SegmentEntry]) -> list[SegmentEntry | Gap]:
    """Return the first pieces, as many as one read may return."""
    first: list[SegmentEntry | Gap] = []
    size = 0
    for piece in pieces:
        if first and size + piece.entry.size > READ_BYTES:
            break
        first.append(piece)
        size += piece.entry.size
    return first


def latest(tails: Sequence[Sequence[tuple[int, Position]]], ends: Sequence[Position], count: int) -> list[Position]:
    """Return the position in each log before the last ``count`` events of all logs together, merged by time."""
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


async def before_time(logs: Logs, name: str, time_ms: int) -> Position:
    """Return the latest position that has every event at or after a time behind it.

    Running-maximum times only grow along a log, so this bisects: first the segments, then the entries.
    """
    log = await logs.log(name)
    for segment in log.segments:
        if segment.newest_ms >= time_ms:
            low, high = segment.first, segment.last
            while low < high:
                middle = (low + high) // 2
                entries = await logs.read(name, segment, middle - 1, 1)
                if not entries:
                    high = middle
                elif entries[0].newest_ms >= time_ms:
                    if entries[0].first <= low:
                        break
                    high = min(middle, entries[0].first)
                else:
                    low = entries[0].last + 1
            return Position(segment.epoch, low - 1)
    return log.end


EventTimes = Callable[[NumberedRun], Sequence[int | None]]
"""Returns the time that orders each event of a run; None for an event that the feed leaves out."""


async def last_events(
    logs: Logs, name: str, count: int, times: EventTimes = lambda entry: entry.run.times, most: int = 1 << 53
) -> list[tuple[int, Position]]:
    """Return (time, position before it) of the last ``count`` events that the feed shows, the latest first.

    Inspects about ``most`` events at most.
    """
    for _ in range(TRIES):
        hits: list[tuple[int, Position]] = []
        step, inspected, is_torn = 1, 0, False
        for segment in reversed((await logs.log(name)).segments):
            before = segment.last
            while before >= segment.first and len(hits) < count and inspected < most:
                entries = await logs.read_back(name, segment, before, step)
                if not entries:
                    is_torn = True  # a listed segment was packed or dropped meanwhile, or is damaged
                    break
                step = min(50, 2 * step)
                for entry in entries:
                    numbered = zip(range(entry.last, entry.first - 1, -1), reversed(times(entry)), strict=True)
                    hits += [(ms, Position(segment.epoch, number - 1)) for number, ms in numbered if ms is not None]
                    inspected += len(entry.run)
                before = entries[-1].first - 1
            if len(hits) >= count or inspected >= most:
                break
        if not is_torn:
            break
    return hits[:count]

"""Feeds of tags: one protocol for both stores, the store in Valkey, where each tag has a log, and the merge of logs.

Invariant: from any cursor a feed yields exactly the events after it that the request shows, each once, those of one
source in their order. Events that the request does not show move the cursor, too.

``TagFeed`` is over one tag, ``MergedTags`` over several. A merge orders events by timeuuid as far as it has read. In
addition the events of a source must keep their order, whichever of the tags they have. They come from one partition, so
the merge keeps the order of offsets within each partition, although each log mixes its partitions in its own way:

    log of tag "a"    p:1  p:4             an event is written partition:offset
    log of tag "b"    q:7  p:2  p:3
    feed over both    p:1  p:2  p:3  p:4  q:7      if p:4 comes before q:7 by timeuuid

An event goes out once every log is known to be read up to its offset, by the events read or by the mark of the shard.
If another log has an earlier event of the same partition, that one goes first, ahead of its turn in its own log, as p:2
and p:3 above. The cursor lists the numbers that were sent ahead. An event is sent before all events of its partition
with a higher offset, unless more than ``MAX_BYTES_AHEAD`` lie between them in one log, ``MAX_RANGES`` ranges are sent
ahead already, or a mark did not come within ``MARK_TIMEOUT_S``.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.api.answers import Tag
from tailrace.config.settings import Settings
from tailrace.errors import StreamNotFound
from tailrace.log.cursor import Cursor, FromCursor, FromLast, Position, Ranges
from tailrace.log.event import Partition, iso_time
from tailrace.log.feed import BATCH_BYTES, LogFeed, LogFeeds, LogReader, MergeItem, MergeLine, last_events, latest
from tailrace.log.hub import Hub, SegmentEntry, woken
from tailrace.log.request import AnyFeed, AnyFrame, EventFrame, Moved
from tailrace.log.run import NumberedRun
from tailrace.log.segment import Gap, OrderKey, key_of
from tailrace.log.store import Logs
from tailrace.valkey.marks import NOTHING
from tailrace.valkey.shards import Nodes
from tailrace.views.tags.model import TagFilter, TagRequest, filter_run

if TYPE_CHECKING:
    from tailrace.views.tags.rows.feed import TagRowsFeed

logger = logging.getLogger(__name__)

MAX_BYTES_AHEAD = 8 << 20
"""About how much is read ahead of the merge, in all logs together."""
MAX_RANGES = 40
"""Ranges of numbers sent ahead that a cursor may list."""
MAX_READS = 50
"""Reads of the logs between two batches; then the cursor moves on, even if no event is shown."""
MARK_TIMEOUT_S = 30.0
"""Longest wait of an event for the marks of other shards; a driver raises them about once a second."""
MARK_POLL_S = 0.05
ALL = 1 << 62


class TagFeed(LogFeed):
    _request: TagRequest

    def __init__(
        self,
        feeds: LogFeeds,
        request: TagRequest,
        filters: Sequence[TagFilter],
        starts: Sequence[Position],
        ends: Sequence[Position],
    ) -> None:
        super().__init__(feeds, request, starts, ends)
        self._filters = filters
        self._shows_all = all(each.shows_all for each in filters)

    def _take(self, line: MergeLine, piece: SegmentEntry) -> None:
        segment, entry = piece.segment, piece.entry
        skip = self._seen(line, piece)
        frames = entry.run.frames(segment.start_ms, skip, line.reader.name)
        first, add = entry.first + skip, line.ahead.append
        if self._shows_all:
            for number, data in enumerate(frames, first):
                add(MergeItem(0, Position(segment.epoch, number), segment.index, data))
            return
        results = filter_run(entry.run, self._filters[line.at], skip)
        if not any(is_shown for _, is_shown in results):
            if results:  # no frame is needed: one item moves the position behind all of them
                add(MergeItem(0, Position(segment.epoch, entry.last), segment.index, None))
            return
        for number, ((_, is_shown), data) in enumerate(zip(results, frames, strict=True), first):
            add(MergeItem(0, Position(segment.epoch, number), segment.index, data if is_shown else None))


class _Event(msgspec.Struct, eq=False):
    ms: int
    partition: Partition
    offset: int
    position: Position
    index: int
    """Index of its segment."""
    data: bytes | None
    """None if the event is not shown, or sent."""
    before: int
    """Number of the shown event before it in the log; the events between are not shown."""
    read_s: float


class _Line(MergeLine):
    ahead: deque[_Event | Gap]  # type: ignore[assignment]

    def __init__(self, reader: LogReader, target: Position, at: int, sent_ahead: Ranges) -> None:
        super().__init__(reader, target, at)
        self.unsent: dict[Partition, deque[_Event]] = {}
        """Events still to be sent, by partition, in the order of offsets."""
        self.size = 0
        """Bytes of the unsent events."""
        self.reached: dict[Partition, int] = {}
        """Last offset that was read of each partition."""
        self.marks: dict[Partition, int] = {}
        """Marks that were read before the log was read to its end: it is complete up to them."""
        self.sent_ahead: list[list[int]] = [list(both) for both in sent_ahead]
        """Numbers, from and to, that were sent ahead of their turn."""
        self.shown = 0
        """Number of the last shown event that was read."""

    def complete_to(self, partition: Partition, is_full: bool) -> int:
        """Return the offset up to which everything of a partition is read; a full line waits for nothing more."""
        if self.done or (is_full and not self.reader.is_at_end):
            return ALL
        return max(self.reached.get(partition, NOTHING), self.marks.get(partition, NOTHING))

    def trim(self) -> bool:
        """Move the position behind events that are sent or not shown; return True if it moved."""
        moved = False
        while self.ahead:
            head = self.ahead[0]
            if isinstance(head, Gap) or head.data is not None:
                break
            self.ahead.popleft()
            if head.position.epoch != self.position.epoch:
                self.sent_ahead.clear()
            self.position, moved = head.position, True
            self.done = self.done or (self.until is not None and (head.index, head.position.number) >= self.until)
        if moved and self.sent_ahead:
            self.sent_ahead = [both for both in self.sent_ahead if both[1] > self.position.number]
        return moved


class MergedTags(TagFeed):
    _lines: list[_Line]  # type: ignore[assignment]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._max_size = max(BATCH_BYTES, MAX_BYTES_AHEAD // len(self._request.names))
        self._complete: dict[Partition, int] = {}
        """Cache of ``_complete_to``, cleared when a log is read on."""
        self._is_waiting = False
        """True if an event waits for marks."""
        self._marks_are_old = True
        """True if marks may have risen since they were read."""
        self._moved = False
        self._warn_s = 0.0

    def _line(self, reader: LogReader, end: Position, at: int) -> MergeLine:
        start = self._request.start
        sent_ahead = start.cursor.ahead[at] if isinstance(start, FromCursor) and start.cursor.ahead else ()
        return _Line(reader, end, at, sent_ahead)

    def _cursor(self, ended: bool = False) -> Cursor:
        cursor = super()._cursor(ended)
        if not any(line.sent_ahead for line in self._lines):
            return cursor
        return msgspec.structs.replace(cursor, ahead=tuple(_ranges(line) for line in self._lines))

    async def _wait(self) -> None:
        if self._is_waiting:
            await woken(self._wake, MARK_POLL_S)
        else:
            await super()._wait()

    async def _fill(self) -> None:
        for line in self._lines:
            if not line.unsent and not line.ahead and not line.done:
                await self._read(line)

    async def _read(self, line: _Line) -> bool:
        """Read on in a log; return False at its end."""
        pieces = await line.reader.next()
        for piece in pieces:
            if isinstance(piece, Gap):
                line.ahead.append(piece)
            else:
                self._take(line, piece)
        if pieces:
            self._complete.clear()
            self._marks_are_old = True
        self._moved |= line.trim()
        return bool(pieces)

    def _take(self, line: MergeLine, piece: SegmentEntry) -> None:
        assert isinstance(line, _Line)
        segment, entry = piece.segment, piece.entry
        skip = self._seen(line, piece)
        if not line.ahead and line.position.epoch != segment.epoch:
            # The same position in the epoch of the new events: numbers sent ahead belong to that epoch.
            line.position = Position(segment.epoch, entry.first + skip - 1)
            line.sent_ahead.clear()
        run, partition = entry.run, entry.run.partition
        results, now = filter_run(run, self._filters[line.at], skip), asyncio.get_running_loop().time()
        if not results:
            return
        offsets, number = run.offsets[skip:], entry.first + skip - 1
        line.reached[partition] = max(offsets[-1], line.reached.get(partition, NOTHING))
        if not any(is_shown for _, is_shown in results):
            # No frame is needed: one event moves the position behind all of them.
            end = Position(segment.epoch, entry.last)
            line.ahead.append(_Event(results[-1][0], partition, offsets[-1], end, segment.index, None, line.shown, now))
            return
        frames = run.frames(segment.start_ms, skip, line.reader.name)
        for (ms, is_shown), offset, data in zip(results, offsets, frames, strict=True):
            number += 1
            position = Position(segment.epoch, number)
            is_shown = is_shown and not self._is_excluded(line, position)
            event = _Event(ms, partition, offset, position, segment.index, data if is_shown else None, line.shown, now)
            line.ahead.append(event)
            if is_shown:
                line.shown = number
                line.size += len(data)
                line.unsent.setdefault(partition, deque()).append(event)

    def _is_excluded(self, line: _Line, position: Position) -> bool:
        """Return True for an event that was sent ahead, or that lies behind the cursor that the request ends at."""
        number = position.number
        if line.sent_ahead and position.epoch == line.position.epoch and _contains(line.sent_ahead, number):
            return True
        until = self._request.until
        if until is None or not until.ahead or until.positions[line.at].epoch != position.epoch:
            return False
        return number > until.positions[line.at].number and not _contains(until.ahead[line.at], number)

    async def _read_to_marks(self) -> None:
        """Read the marks, then all logs to their ends: the logs are complete up to these marks."""
        lines = [line for line in self._lines if not line.done]
        shards = sorted({self._logs.shard_of(line.reader.name) for line in lines})
        marks = dict(zip(shards, await self._logs.marks(shards), strict=True))
        registries = await self._logs.logs_of([line.reader.name for line in lines])
        for line, log in zip(lines, registries, strict=True):
            end: OrderKey = (log.segments[-1].index, log.segments[-1].last) if log.segments else (-1, 0)
            while line.reader.key < end and line.size < self._max_size and await self._read(line):
                pass
            if line.reader.key >= end:
                line.marks = marks[self._logs.shard_of(line.reader.name)]
        self._complete.clear()
        self._marks_are_old = False

    async def _merge(self) -> list[AnyFrame]:
        frames: list[AnyFrame] = []
        size = reads = 0
        self._is_waiting, self._marks_are_old = False, True
        await self._fill()
        while size < BATCH_BYTES and not self._is_full:
            if reads > MAX_READS:
                self._wake.set()  # there is more to read: do not wait
                break
            gap = next((line for line in self._lines if line.ahead and isinstance(line.ahead[0], Gap)), None)
            if gap is not None:
                if frames and self._is_strict:
                    break  # events before the gap go out first
                item = gap.ahead.popleft()
                assert isinstance(item, Gap)
                gap.sent_ahead.clear()
                frames.append(self._gap(gap, item))
                gap.trim()
                continue
            # The merge needs the next event of every log that is not read to its end.
            unread = (line for line in self._lines if not (line.unsent or line.done or line.reader.is_at_end))
            if (line := next(unread, None)) is not None:
                reads += 1
                await self._read(line)
                continue
            heads = self._heads()
            turn = self._first_of_partition(*heads[0]) if heads else None
            if turn is None:
                if heads and (behind := self._behind(*heads[0])) is not None:
                    reads += 1
                    await self._read(behind)
                    continue
                if self._marks_are_old and any(line.unsent for line in self._lines):
                    await self._read_to_marks()
                    continue
                turn = self._other_event(heads)
            if turn is None:
                break
            line, event = turn
            data = self._send(line, event)
            self._sent += 1
            self._moved = False
            frames.append(EventFrame(self.cursor, data))
            size += len(data)
        if self._moved:
            self._moved = False
            frames.append(Moved(self.cursor))
        return frames

    def _heads(self) -> list[tuple[_Line, _Event]]:
        """Return the first event of each log that has one, in the order of timeuuids."""
        first = [(line, line.ahead[0]) for line in self._lines if line.ahead and not line.done]
        heads = [(line, head) for line, head in first if not isinstance(head, Gap)]
        return sorted(heads, key=lambda each: (each[1].ms, each[1].offset))

    def _other_event(self, heads: Sequence[tuple[_Line, _Event]]) -> tuple[_Line, _Event] | None:
        """Return an event that may go out while the next one by timeuuid waits, or one that has waited too long."""
        for line, head in heads:
            if (choice := self._first_of_partition(line, head)) is not None:
                return choice
            self._is_waiting = True
        return self._overdue(heads)

    def _first_of_partition(self, line: _Line, head: _Event) -> tuple[_Line, _Event] | None:
        """Return the event that goes out in place of ``head``: the first of its partition; None if it is not known."""
        first, event = self._earliest(head.partition)
        if event.offset > self._complete_to(head.partition):
            return None
        return (first, event) if event is first.ahead[0] or self._may_precede(first, event) else (line, head)

    def _earliest(self, partition: Partition) -> tuple[_Line, _Event]:
        """Return the unsent event of a partition with the lowest offset in all logs."""
        lines = [line for line in self._lines if partition in line.unsent and not line.done]
        line = min(lines, key=lambda line: line.unsent[partition][0].offset)
        return line, line.unsent[partition][0]

    def _complete_to(self, partition: Partition) -> int:
        """Return the offset up to which all logs have read a partition, or as much of it as memory allows."""
        complete = self._complete.get(partition)
        if complete is None:
            fullness = [line.size >= self._max_size for line in self._lines]
            complete = min(line.complete_to(partition, full) for line, full in zip(self._lines, fullness, strict=True))
            if not any(fullness):
                self._complete[partition] = complete
        return complete

    def _may_precede(self, line: _Line, event: _Event) -> bool:
        """Return True if the cursor has room to list an event as sent ahead."""
        if event.position.epoch != line.position.epoch:
            return False
        return any(both[1] == event.before for both in line.sent_ahead) or (
            sum(len(each.sent_ahead) for each in self._lines) < MAX_RANGES
        )

    def _send(self, line: _Line, event: _Event) -> bytes:
        """Remove an event, and move the position of its log, or list it as sent ahead; return its data."""
        data = event.data or b""
        unsent = line.unsent[event.partition]
        if unsent[0] is event:
            unsent.popleft()
        else:
            unsent.remove(event)
        if not unsent:
            del line.unsent[event.partition]
        line.size -= len(data)
        event.data = None
        if line.ahead[0] is event:
            line.trim()
            return data
        number = event.position.number
        joined = next((both for both in line.sent_ahead if both[1] == event.before), None)
        if joined is None:
            line.sent_ahead.append([number, number])
        else:
            joined[1] = number
        return data

    def _behind(self, line: _Line, head: _Event) -> _Line | None:
        """Return a log that must be read on before ``head``, or the first event of its partition, can go out."""
        _, event = self._earliest(head.partition)
        for other in self._lines:
            unread = other is not line and not other.done and not other.reader.is_at_end
            if unread and other.size < self._max_size and other.complete_to(head.partition, False) < event.offset:
                return other
        return None

    def _overdue(self, heads: Sequence[tuple[_Line, _Event]]) -> tuple[_Line, _Event] | None:
        """Return an event that waited too long for marks: the driver may have died."""
        now = asyncio.get_running_loop().time()
        for line, head in heads:
            if now - head.read_s >= MARK_TIMEOUT_S:
                if now >= self._warn_s:
                    self._warn_s = now + MARK_TIMEOUT_S
                    logger.warning(
                        "tag %r: %s:%d waited %g s for the marks of the other tags' shards, and goes out without them",
                        *(line.reader.name, head.partition, head.offset, MARK_TIMEOUT_S),
                    )
                earliest = self._earliest(head.partition)
                return earliest if self._may_precede(*earliest) else (line, head)
        return None


def _contains(ranges: Iterable[Sequence[int]], number: int) -> bool:
    return any(low <= number <= high for low, high in ranges)


def _ranges(line: _Line) -> Ranges:
    """Return the numbers of a log that were sent ahead, as sorted ranges that do not touch."""
    ranges: list[tuple[int, int]] = []
    for low, high in sorted(map(tuple, line.sent_ahead)):
        if ranges and ranges[-1][1] + 1 >= low:
            ranges[-1] = ranges[-1][0], max(high, ranges[-1][1])
        else:
            ranges.append((low, high))
    return tuple(ranges)


PAGE = 100
"""Registries read in one round trip."""
MAX_INSPECTED = 1_000_000
"""Events of one tag that are inspected to find the last N that a request shows."""


class TagStore(ABC):
    own_cursors: bool
    """True if its cursors have their own form."""

    async def open(self, request: TagRequest) -> AnyFeed:
        """Check the request against the store, find its start, and open a feed. Raises before anything is sent."""
        if request.parameters.missing == "fail":
            for tag in request.names:
                if not await self._exists(tag):
                    raise StreamNotFound(tag)
        filters = [TagFilter(request, index) for index in range(len(request.names))]
        if request.mode == "all":
            request, filters = msgspec.structs.replace(request, names=request.names[:1]), filters[:1]
        return await (await self._feed(request, filters)).begin()

    @abstractmethod
    async def _exists(self, tag: str) -> bool:
        """Return True if the tag has, or had, events."""

    @abstractmethod
    async def _feed(self, request: TagRequest, filters: Sequence[TagFilter]) -> TagFeed | TagRowsFeed:
        """Find the start of a feed that shows what the filters, one for each tag, show."""

    @abstractmethod
    async def tags(self, prefix: str, after: str, limit: int) -> list[Tag]:
        """Return up to ``limit`` tags that begin with ``prefix`` and follow ``after``, in order of their bytes."""

    @abstractmethod
    async def is_at_end(self, names: Sequence[str], cursor: str) -> bool:
        """Return True if there is no event after a cursor of a feed that reads these tags."""

    async def close(self) -> None:
        """Close all connections."""
        return


def open_store(settings: Settings, nodes: Nodes, hub: Hub, logs: Logs, clock: Callable[[], int]) -> TagStore:
    if settings.tags.store == "cassandra":
        from tailrace.views.tags.rows.feed import CassandraTags

        return CassandraTags(settings, nodes, hub, clock)
    return ValkeyTags(hub, logs, clock)


class ValkeyTags(TagStore, LogFeeds):  # type: ignore[misc]  # its requests are those of tags
    own_cursors = False

    async def _exists(self, tag: str) -> bool:
        return (await self.logs.log(tag)).end != Position.START

    async def _feed(self, request: TagRequest, filters: Sequence[TagFilter]) -> TagFeed:
        ends = [(await self.logs.log(tag)).end for tag in request.names]
        if isinstance(request.start, FromLast):
            count, tails = request.start.count, []
            for tag, tag_filter in zip(request.names, filters, strict=True):
                times = partial(_shown_times, tag_filter)
                tails.append(await last_events(self.logs, tag, count, times, MAX_INSPECTED))
            starts = latest(tails, ends, count)
        else:
            starts = list(await self._starts(request, ends))
        form = TagFeed if len(request.names) == 1 else MergedTags
        return form(self, request, filters, starts, ends)

    async def tags(self, prefix: str, after: str, limit: int) -> list[Tag]:
        tags: list[Tag] = []
        while len(tags) < limit:
            names = await self.logs.names(after, prefix, min(limit - len(tags), PAGE))
            if not names:
                break
            after = names[-1]
            for name, log in zip(names, await self.logs.logs_of(names), strict=True):
                if segments := log.segments:  # else the tag has just expired as a whole
                    events, size = sum(each.events for each in segments), sum(each.bytes for each in segments)
                    first, last = iso_time(segments[0].start_ms), iso_time(segments[-1].newest_ms)
                    buckets = len({each.start_ms for each in segments})
                    tags.append(Tag(name, events, size, buckets, first, last))
        return tags

    async def is_at_end(self, names: Sequence[str], cursor: str) -> bool:
        positions = Cursor.parse(cursor, len(names)).positions
        for log, position in zip(await self.logs.logs_of(names), positions, strict=True):
            if log.segments and key_of(log, position) < (log.segments[-1].index, log.segments[-1].last):
                return False
        return True


def _shown_times(tag_filter: TagFilter, entry: NumberedRun) -> list[int | None]:
    return [ms if is_shown else None for ms, is_shown in filter_run(entry.run, tag_filter)]

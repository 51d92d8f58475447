"""Feeds over several tags: each event once, in the order of stamps as far as is read, and of each source in its order.

The events of a source come by one partition, in whose order they must go out, whichever of the tags has them. The logs
of two tags may have them otherwise between others, if they lie in two shards. So an event goes out when every log is
known to be read as far as its offset, by what was read or by the shard's mark; and if another log has an earlier one of
its partition, that one goes first, before its turn there. The cursor then says what was sent ahead.

Invariant: an event is sent before all others of its partition that have a higher offset, unless more than
``MOST_BYTES`` lie between them in one log, ``MOST_RANGES`` were sent ahead already, or a mark did not come within
``HELD_S``. Whatever the order, each is sent once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tailrace.log.cursor import (
    Cursor,
    FromCursor,
    Position,
    Ranges,
)
from tailrace.log.event import Partition
from tailrace.log.feed import BATCH_BYTES, LogFeed, LogReader, MergeItem, MergeLine
from tailrace.log.hub import Hub, SegmentEntry
from tailrace.log.request import AnyFrame, EventFrame, Moved
from tailrace.log.segment import Gap, OrderKey
from tailrace.log.store import Logs
from tailrace.valkey.marks import NOTHING
from tailrace.views.tags.request import TagFilter, TagRequest, look


class TagFeed(LogFeed):
    """An open feed over the log of one tag."""

    def __init__(
        self,
        hub: Hub,
        logs: Logs,
        request: TagRequest,
        wanted: Sequence[TagFilter],
        starts: Sequence[Position],
        ends: Sequence[Position],
        clock: Callable[[], int],
    ) -> None:
        """``wanted``: what is shown of each of the logs."""
        super().__init__(hub, logs, request, starts, ends, clock)
        self._asked, self._wanted = request, wanted
        bounded = request.since_ms is not None or request.until_ms is not None
        self._shows_all = not bounded and all(each.is_everything for each in wanted)

    def _take(self, line: MergeLine, piece: SegmentEntry) -> None:
        """Turn a stored run into items, leaving out what was seen before and what is not shown."""
        segment, entry = piece.segment, piece.entry
        skip = self._seen(line, piece)
        frames = entry.run.frames(segment.start_ms, skip, line.reader.name)
        first, add = entry.first + skip, line.ahead.append
        if self._shows_all:
            for number, data in enumerate(frames, first):
                add(MergeItem(0, Position(segment.epoch, number), segment.index, data))
            return
        stamped = look(entry.run, self._asked, self._wanted[line.at], skip)
        if not any(is_shown for _, is_shown in stamped):
            # Nothing has to be written out: one place stands for all of them.
            if stamped:
                add(MergeItem(0, Position(segment.epoch, entry.last), segment.index, None))
            return
        for number, ((_, is_shown), data) in enumerate(zip(stamped, frames, strict=True), first):
            add(MergeItem(0, Position(segment.epoch, number), segment.index, data if is_shown else None))


logger = logging.getLogger(__name__)

MOST_BYTES = 8 << 20
"""What is read ahead of the merge, in all logs together, about."""
MOST_RANGES = 40
MOST_READS = 50
"""Reads of the logs between two batches: of many events few may be shown, and the cursor has to move on."""
HELD_S = 30.0
"""How long an event waits for the marks of other shards; a driver raises them with every batch, about once a second."""
LOOK_S = 0.05
"""How often marks are read while an event waits for them."""
ALL = 1 << 62


class _Event:
    """An event of one log that is to be sent."""

    __slots__ = ("before", "data", "index", "is_sent", "ms", "offset", "partition", "position", "read_s")

    def __init__(
        self,
        ms: int,
        place: Partition,
        offset: int,
        position: Position,
        index: int,
        data: bytes | None,
        before: int,
        read_s: float,
    ) -> None:
        self.ms, self.partition, self.offset, self.position, self.index = ms, place, offset, position, index
        self.data = data
        self.is_sent = data is None
        self.before = before
        """The number of the event before it that is shown: what lies between is passed over anyway."""
        self.read_s = read_s


class _Line(MergeLine):
    """The log of one tag."""

    ahead: deque[_Event | Gap]  # type: ignore[assignment]

    def __init__(self, reader: LogReader, target: Position, at: int, early: Ranges) -> None:
        super().__init__(reader, target, at)
        self.places: dict[Partition, deque[_Event]] = {}
        """What is still to be sent, by partition, in the order of offsets."""
        self.size = 0
        self.reached: dict[Partition, int] = {}
        """The last offset that was read of each partition."""
        self.marks: dict[Partition, int] = {}
        """Offsets up to which everything is read, since the log was read to its end after they were."""
        self.early: list[list[int]] = [list(both) for both in early]
        """Numbers, from and to, that were sent before their turn."""
        self.shown = 0

    def complete(self, place: Partition, is_full: bool) -> int:
        """Return the offset up to which everything of a partition is read here."""
        if self.done or (is_full and not self.reader.is_at_end):
            return ALL
        return max(self.reached.get(place, NOTHING), self.marks.get(place, NOTHING))

    def trim(self) -> bool:
        """Move behind what was sent or is not shown; return whether the place moved."""
        moved = False
        while self.ahead:
            head = self.ahead[0]
            if isinstance(head, Gap) or not head.is_sent:
                break
            self.ahead.popleft()
            if head.position.epoch != self.position.epoch:
                self.early.clear()
            self.position, moved = head.position, True
            self.done = self.done or (self.until is not None and (head.index, head.position.number) >= self.until)
        if moved and self.early:
            self.early = [both for both in self.early if both[1] > self.position.number]
        return moved


class MergedTags(TagFeed):
    """An open feed over the logs of several tags."""

    _lines: list[_Line]  # type: ignore[assignment]

    def __init__(self, *given: Any) -> None:
        """Take what a ``TagFeed`` takes."""
        super().__init__(*given)
        self._most = max(BATCH_BYTES, MOST_BYTES // len(self._asked.names))
        self._known: dict[Partition, int] = {}
        """Offsets up to which all logs are read; emptied when one is read on."""
        self._is_held = False
        self._is_news = True
        """Whether marks may say more than when they were read."""
        self._moved = False
        self._warn_s = 0.0

    def _line(self, reader: LogReader, end: Position, at: int) -> MergeLine:
        start = self._asked.start
        early = start.cursor.ahead[at] if isinstance(start, FromCursor) and start.cursor.ahead else ()
        return _Line(reader, end, at, early)

    def _cursor(self) -> Cursor:
        found = super()._cursor()
        if not any(line.early for line in self._lines):
            return found
        ahead = tuple(_ranges(line) for line in self._lines)
        return Cursor(found.positions, found.sent, found.since_ms, found.ended, ahead)

    async def _wait(self) -> None:
        if not self._is_held:
            await super()._wait()
            return
        try:
            await asyncio.wait_for(self._wake.wait(), LOOK_S)
        except TimeoutError:
            return

    # Reading.

    async def _fill(self) -> None:
        for line in self._lines:
            if not line.places and not line.ahead and not line.done:
                await self._read(line)

    async def _read(self, line: _Line) -> bool:
        """Read on in a log; return whether there was something."""
        pieces = await line.reader.next()
        for piece in pieces:
            if isinstance(piece, Gap):
                line.ahead.append(piece)
            else:
                self._take(line, piece)
        if pieces:
            self._known.clear()
            self._is_news = True
        self._moved |= line.trim()
        return bool(pieces)

    def _take(self, line: MergeLine, piece: SegmentEntry) -> None:
        assert isinstance(line, _Line)
        segment, entry = piece.segment, piece.entry
        skip = self._seen(line, piece)
        if not line.ahead and line.position.epoch != segment.epoch:
            # The same place, said in the epoch of what follows: what is sent ahead is counted from there.
            line.position = Position(segment.epoch, entry.first + skip - 1)
            line.early.clear()
        run, place = entry.run, entry.run.partition
        stamped, now = look(run, self._asked, self._wanted[line.at], skip), asyncio.get_running_loop().time()
        offsets, number = run.offsets[skip:], entry.first + skip - 1
        if not any(is_shown for _, is_shown in stamped):
            if stamped:  # nothing has to be written out: one place stands for all of them
                end = Position(segment.epoch, entry.last)
                line.ahead.append(_Event(stamped[-1][0], place, offsets[-1], end, segment.index, None, line.shown, now))
                line.reached[place] = max(offsets[-1], line.reached.get(place, NOTHING))
            return
        frames = run.frames(segment.start_ms, skip, line.reader.name)
        waiting = line.places.get(place)
        for (ms, is_shown), offset, data in zip(stamped, offsets, frames, strict=True):
            number += 1
            position = Position(segment.epoch, number)
            is_shown = is_shown and not self._is_left_out(line, position)
            event = _Event(ms, place, offset, position, segment.index, data if is_shown else None, line.shown, now)
            line.ahead.append(event)
            if is_shown:
                line.shown = number
                line.size += len(data)
                if waiting is None:
                    waiting = line.places[place] = deque()
                waiting.append(event)
        if offsets:
            line.reached[place] = max(offsets[-1], line.reached.get(place, NOTHING))

    def _is_left_out(self, line: _Line, position: Position) -> bool:
        """Whether an event was sent before, or lies behind the cursor that the request ends at."""
        number = position.number
        if line.early and position.epoch == line.position.epoch and any(a <= number <= b for a, b in line.early):
            return True
        until = self._request.until
        if until is None or not until.ahead or until.positions[line.at].epoch != position.epoch:
            return False
        return number > until.positions[line.at].number and not any(a <= number <= b for a, b in until.ahead[line.at])

    async def _prove(self) -> None:
        """Read marks, then all logs to where they ended after that: up to the marks nothing is missing."""
        lines = [line for line in self._lines if not line.done]
        shards = sorted({self._logs.shard_of(line.reader.name) for line in lines})
        marks = dict(zip(shards, await self._logs.marks(shards), strict=True))
        registries = await self._logs.logs_of([line.reader.name for line in lines])
        for line, log in zip(lines, registries, strict=True):
            end: OrderKey = (log.segments[-1].index, log.segments[-1].last) if log.segments else (-1, 0)
            while line.reader.key < end and line.size < self._most and await self._read(line):
                pass
            if line.reader.key >= end:
                line.marks = marks[self._logs.shard_of(line.reader.name)]
        self._known.clear()
        self._is_news = False

    # Merging.

    async def _merge(self) -> list[AnyFrame]:
        frames: list[AnyFrame] = []
        size, reads, limit = 0, 0, self._request.limit
        self._is_held, self._is_news = False, True
        await self._fill()
        while size < BATCH_BYTES and (limit is None or self._sent < limit):
            if reads > MOST_READS:
                self._wake.set()  # there is more to read: do not wait
                break
            gap = next((line for line in self._lines if line.ahead and isinstance(line.ahead[0], Gap)), None)
            if gap is not None:
                if frames and self._request.on_gap == "fail":
                    break  # what precedes the gap goes out first
                found = gap.ahead.popleft()
                assert isinstance(found, Gap)
                gap.early.clear()
                frames.append(self._gap(gap, found))
                gap.trim()
                continue
            if (unread := self._unread()) is not None:
                reads += 1
                await self._read(unread)
                continue
            turn = self._turn()
            if turn is None:
                if (behind := self._behind()) is not None:
                    reads += 1
                    await self._read(behind)
                    continue
                if self._is_news and any(line.places for line in self._lines):
                    await self._prove()
                    continue
                turn = self._other_turn()
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

    def _unread(self) -> _Line | None:
        """Return a log of which nothing is there to be compared, though it has not been read to its end."""
        for line in self._lines:
            if not line.places and not line.done and not line.reader.is_at_end:
                return line
        return None

    def _turn(self) -> tuple[_Line, _Event] | None:
        """Return the event that goes out next, by its stamp; None if it has to wait for what is not known yet."""
        heads = self._heads()
        return self._first(*heads[0]) if heads else None

    def _other_turn(self) -> tuple[_Line, _Event] | None:
        """Return an event that goes out while the next one by stamp is held; one that was held for too long, too."""
        heads = self._heads()
        for line, head in heads:
            if (turn := self._first(line, head)) is not None:
                return turn
            self._is_held = True
        return self._released(heads)

    def _first(self, line: _Line, head: _Event) -> tuple[_Line, _Event] | None:
        """Return the first event of the partition of one whose turn it is; None if another may be before it."""
        first, event = self._earliest(head.partition)
        if event.offset > self._complete(head.partition):
            return None
        return (first, event) if event is first.ahead[0] or self._may_precede(first, event) else (line, head)

    def _heads(self) -> list[tuple[_Line, _Event]]:
        """Return the logs that have something to send, with what is first in each, in the order of stamps."""
        heads: list[tuple[_Line, _Event]] = []
        for line in self._lines:
            if line.ahead and not line.done and not isinstance(head := line.ahead[0], Gap):
                heads.append((line, head))
        heads.sort(key=lambda each: (each[1].ms, each[1].offset))
        return heads

    def _earliest(self, place: Partition) -> tuple[_Line, _Event]:
        """Return the first event of a partition in all logs."""
        waiting = [line for line in self._lines if place in line.places and not line.done]
        line = min(waiting, key=lambda line: line.places[place][0].offset)
        return line, line.places[place][0]

    def _complete(self, place: Partition) -> int:
        """Return the offset up to which everything of a partition is read, or as much as there is room for."""
        known = self._known.get(place)
        if known is None:
            fullness = [line.size >= self._most for line in self._lines]
            known = min(line.complete(place, full) for line, full in zip(self._lines, fullness, strict=True))
            if not any(fullness):
                self._known[place] = known
        return known

    def _may_precede(self, line: _Line, event: _Event) -> bool:
        """Whether a cursor can say that an event was sent before its turn."""
        if event.position.epoch != line.position.epoch:
            return False
        return any(both[1] == event.before for both in line.early) or (
            sum(len(each.early) for each in self._lines) < MOST_RANGES
        )

    def _send(self, line: _Line, event: _Event) -> bytes:
        """Take an event out, and move the place of its log, or note that it went before its turn."""
        data = event.data or b""
        waiting = line.places[event.partition]
        if waiting[0] is event:
            waiting.popleft()
        else:
            waiting.remove(event)
        if not waiting:
            del line.places[event.partition]
        line.size -= len(data)
        event.is_sent, event.data = True, None
        number = event.position.number
        if line.ahead[0] is event:
            line.trim()
            return data
        joined = next((both for both in line.early if both[1] == event.before), None)
        if joined is None:
            line.early.append([number, number])
        else:
            joined[1] = number
        return data

    def _behind(self) -> _Line | None:
        """Return a log that has to be read on before the next event can go out."""
        for line, head in self._heads()[:1]:
            _, event = self._earliest(head.partition)
            for other in self._lines:
                unread = other is not line and not other.done and not other.reader.is_at_end
                if unread and other.size < self._most and other.complete(head.partition, False) < event.offset:
                    return other
        return None

    def _released(self, heads: Sequence[tuple[_Line, _Event]]) -> tuple[_Line, _Event] | None:
        """Return an event that has been held for too long: the driver may have died in the middle."""
        now = asyncio.get_running_loop().time()
        for line, head in heads:
            if now - head.read_s >= HELD_S:
                if now >= self._warn_s:
                    self._warn_s = now + HELD_S
                    logger.warning(
                        "tag %r: %s:%d waited %g s for the marks of the other tags' shards, and goes out without them",
                        *(line.reader.name, head.partition, head.offset, HELD_S),
                    )
                return (
                    self._earliest(head.partition)
                    if self._may_precede(*self._earliest(head.partition))
                    else (line, head)
                )
        return None


def _ranges(line: _Line) -> Ranges:
    """Return what was sent ahead in a log, in order."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(map(tuple, line.early)):
        if found and found[-1][1] + 1 >= low:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)

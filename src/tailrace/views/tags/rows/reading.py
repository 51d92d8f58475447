"""The reader of one tag's rows, without I/O: which rows to read, which to deliver or hold, and the cursor of each.

The pipeline writes rows before it moves the mark of their partition, so all rows up to the marks are visible, and rows
beyond them are ignored. The floor of a partition is the millisecond below which none of its rows is still to come. Rows
that another program wrote have no marks; there the numbers of each source tell what is missing. Invariants:

- every row up to the scanned timeuuid that a mark covers was taken, without a hole along a partition;
- a row that was not taken yet, or not written yet, lies after the low timeuuid of the cursor;
- everything taken above that timeuuid is named in the cursor: by partition, or by source where there are no marks.

So a reader that resumes at any cursor delivers exactly the rest. How a gap is waited for, with ``gap_timeout = 10s``:

    time     rows that become visible     delivered      held
     0 s     a:1  b:1                     a:1  b:1                    a:1 is number 1 of source a
     1 s     a:3  b:2                     b:2            a:3          a:2 is missing: search for it at once
     2 s     a:4                                         a:3 a:4      each further read repeats the search; the cursor
     4 s     a:2                          a:2 a:3 a:4                 lists "a, delivered up to 1" until then

    or, if a:2 does not appear:
    11 s                                  LostNumbers(a, 2, 2), a:3 a:4    10 s after a:3 was seen

Only the source with the gap is held. A source whose first visible row is, say, a:5 is held for ``new_source_scan``
(0.1 s) in case lower numbers are still to appear; then a:5 is delivered without LostNumbers. Rows with marks are never
held for this, since a mark says that all rows below it are visible.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Generic
from uuid import UUID

import msgspec

from tailrace.log.event import Partition
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import first_of, last_of, ms_of, order
from tailrace.views.tags.rows.cursor import OpenSource, Reached, TagPosition, hashed, hashed_partition
from tailrace.views.tags.rows.gaps import BacktrackSchedule, HeldSource, KnownSources, R, ReadSettings, TagRow

ROOM_FOR_HELD = 2
"""Entries of the cursor reserved for held sources, so that rows read ahead cannot block the rows that they wait for."""


class DeliveredRow(msgspec.Struct, Generic[R], frozen=True, gc=False):
    """An event to deliver, and the position after it."""

    row: R
    position: TagPosition


class LostNumbers(msgspec.Struct, frozen=True):
    """Numbers of a source that were not found in time between two timeuuids, and the position after them."""

    source: str
    first: int
    last: int
    after: UUID
    to: UUID
    position: TagPosition


class SearchRange(msgspec.Struct, frozen=True):
    """A range to search for missed rows: after one timeuuid, up to another."""

    after: UUID
    to: UUID


class Reading(Generic[R]):
    """The state of one tag's reader.

    Args:
        from_beginning: There is nothing before the start, so every source begins with its lowest number.
    """

    def __init__(
        self, start: TagPosition, settings: ReadSettings, *, from_beginning: bool = False, now_ms: int
    ) -> None:
        self._settings = settings
        self._start, self._start_order = start.low, order(start.low)
        self._from_beginning = from_beginning
        self._levels = PartitionLevels()
        self._scanned, self._to = start.low, start.low
        self._settled: UUID | None = None
        """Last timeuuid below all floors."""
        self._resume = ResumePoint(start)
        self._carry: list[R] = []
        """Rows at the end of a page that share a timeuuid, perhaps with the next page."""
        self._sources = KnownSources(start, settings.known_sources)
        self._held: dict[str, HeldSource[R]] = {}
        self._held_rows = 0
        self._open_searched = not start.open
        """True if the sources that were open at the start have been searched for."""
        self._held_searched = True
        """True if there was a search for the gaps of all held sources."""
        self._backtracks = BacktrackSchedule(settings, now_ms)
        self.is_at_end = False
        """True if all rows up to the requested timeuuid were taken."""
        self.is_full = False
        """True if no row can be taken before a gap is closed or given up, or floors rise."""

    @property
    def is_waiting(self) -> bool:
        """True if a source is held, or one that was open at the start is still to be searched for."""
        return bool(self._held) or not self._open_searched

    def position(self) -> TagPosition:
        return self._resume.position(self._held.values())

    # Reading on.

    def begin(
        self, marks: Mapping[Partition, int], floors: Mapping[Partition, int], now_ms: int, until: UUID | None = None
    ) -> tuple[UUID, UUID]:
        """Begin to read on: return the timeuuids after which, and up to which, to read.

        The caller first runs the ``searches``, then passes the rows of this range to ``take_page``, in order, and calls
        ``finish``. It may call ``begin`` again at any time.

        Args:
            marks: Last offset of each partition whose rows are visible; read after the floors and before the rows.
            floors: Millisecond of each partition below which no row beyond its mark will be written.
            until: Nothing beyond this timeuuid is wanted.
        """
        after = self._levels.changed_after(marks, self._scanned, self._start)
        to = last_of(self._settings.to_ms(now_ms, floors.values()))
        if until is not None:
            to = min(to, until, key=order)
        self._to = max(to, self._scanned, self._to, key=order)  # a clock that steps back changes nothing
        self._scanned = after
        self._levels.renew(marks, floors)
        self._settled = self._levels.settled(self._start)
        self._carry = []
        self.is_at_end, self.is_full = False, self._held_rows >= self._settings.max_held
        if floors:
            self._raise_low()
        return after, self._to

    def take_page(self, rows: Sequence[R], now_ms: int) -> list[DeliveredRow[R] | LostNumbers]:
        """Take the next rows of the range; return what to deliver."""
        if self.is_full:
            return []
        rows = [*self._carry, *rows]
        # Rows with the same timeuuid are taken together, and the next page may begin with one.
        whole = len(rows)
        while whole and rows[whole - 1].timeuuid == rows[-1].timeuuid:
            whole -= 1
        self._carry = rows[whole:]
        return self._take_rows(rows[:whole], now_ms)

    def finish(self, now_ms: int) -> list[DeliveredRow[R] | LostNumbers]:
        """Note that all rows of the range were passed; return what to deliver."""
        if self.is_full:
            return []
        out = self._take_rows(self._carry, now_ms)
        self._carry = []
        if not self.is_full:
            self.is_at_end = True
            if self._levels.floors and not self._levels.unmarked:  # else rows may still appear below
                self._scanned = self._to
                self._raise_low()
        return out

    def _take_rows(self, rows: Sequence[R], now_ms: int) -> list[DeliveredRow[R] | LostNumbers]:
        out: list[DeliveredRow[R] | LostNumbers] = []
        for i, row in enumerate(rows):
            is_last = i + 1 == len(rows) or rows[i + 1].timeuuid != row.timeuuid
            committed = self._levels.is_committed(row)
            if committed and not self._fits(row):
                self.is_full = True
                self._carry = []
                break
            if not committed and not self._levels.floors:
                self._settled = self._resume.low  # the first partition was just introduced; its floor was not read
            if is_last:
                self._scanned = row.timeuuid
                self._raise_low()
            if committed:
                self._take(row, now_ms, out)
        return out

    def unknown_partitions(self, rows: Iterable[TagRow]) -> set[Partition]:
        """Return the partitions of rows that may have marks or not.

        A partition is introduced to the shard before its first row is written. So the caller reads the levels again,
        after the rows, and passes the partitions without levels to ``add_unmarked``. Rows of the others are ignored
        until ``begin``.
        """
        return self._levels.unknown(rows)

    def add_unmarked(self, partitions: Iterable[Partition]) -> None:
        """Note partitions without marks: their visible rows are committed, and others may appear at any timeuuid."""
        self._levels.unmarked.update(partitions)

    # Missed rows.

    def searches(self, now_ms: int) -> list[SearchRange]:
        """Return the ranges to search for missed rows now; the caller passes their rows to ``find_missed``."""
        ranges: list[SearchRange] = []
        if not self._open_searched:
            since_ms = min(each.since_ms for each in self._resume.open.values())
            if order(first_of(since_ms)) <= self._start_order:
                ranges.append(SearchRange(last_of(since_ms - 1), self._start))
        if self._held:
            after = min((held.after for held in self._held.values()), key=order)
            ranges.append(SearchRange(after, max((held.lowest.timeuuid for held in self._held.values()), key=order)))
        since = self._backtracks.since_ms(ms_of(self._scanned), now_ms)
        if since is not None:
            after = max(last_of(since - 1), self._start, key=order)
            if order(after) < order(self._scanned):
                ranges.append(SearchRange(after, self._scanned))
        return ranges

    def find_missed(self, rows: Iterable[TagRow]) -> list[TagRow]:
        """Return the rows that were missed; the caller passes them, complete and in order, to ``take_missed``."""
        limit = order(self._scanned)
        return [
            row
            for row in rows
            if self._levels.is_committed(row) and order(row.timeuuid) <= limit and self._is_missed(row)
        ]

    def take_missed(self, rows: Iterable[R], now_ms: int) -> list[DeliveredRow[R] | LostNumbers]:
        """Take rows that ``find_missed`` returned; return what to deliver."""
        out: list[DeliveredRow[R] | LostNumbers] = []
        for row in rows:
            if self._is_missed(row) and self._fits(row):
                self._take(row, now_ms, out)
        return out

    def searched(self) -> None:
        """Note that all ``searches`` were run."""
        self._open_searched = self._held_searched = True
        self._resume.close_below()

    def _is_missed(self, row: TagRow) -> bool:
        number = row.tag_seq
        if (held := self._held.get(row.source)) is not None:
            if number <= held.number or number in held or order(row.timeuuid) <= order(held.after):
                return False
            return number >= held.first or self._sources.is_new(row)
        delivered = self._last_number(row.source)
        if delivered == number and (last := self._sources.get(row.source)) is not None:
            # The source comes from two partitions, and a driver died between rows and mark: it left one of two events
            # with this number. Both are delivered.
            is_other = row.partition != last.partition and self._levels.is_marked(row.partition)
            return is_other and order(row.timeuuid) > order(last.timeuuid)
        if delivered is not None:
            return number > delivered
        return order(row.timeuuid) > self._start_order and self._sources.is_new(row)

    def expire(self, now_ms: int) -> list[DeliveredRow[R] | LostNumbers]:
        """Give up gaps whose wait is over; return what to deliver."""
        out: list[DeliveredRow[R] | LostNumbers] = []
        for held in list(self._held.values()):
            held.limit_wait(now_ms)
            while held and now_ms >= held.deadline_ms(self._settings.timeouts):
                is_optional, (first, last), after = held.is_optional, held.missing, held.after
                to = held.lowest.timeuuid
                held.skip_gap()
                if not is_optional:
                    out.append(LostNumbers(held.source, first, last, after, to, self.position()))
                self._release(held, out)
        return out

    def due_ms(self) -> int | None:
        """Return when ``expire`` or ``searches`` have something to do; None if that is not known, 0 for now."""
        if not self._held_searched:
            return 0
        due = [held.deadline_ms(self._settings.timeouts) for held in self._held.values()]
        if self._backtracks.due_ms is not None:
            due.append(self._backtracks.due_ms)
        return min(due, default=None)

    def expect(self, rows: Iterable[TagRow]) -> None:
        """Note the lowest number of each source after the start, for rows without marks."""
        lowest: dict[str, TagRow] = {}
        for row in rows:
            if self._levels.is_marked(row.partition) or self._resume.opened(row.source) is not None:
                continue
            if order(row.timeuuid) > self._start_order and (
                row.source not in lowest or row.tag_seq < lowest[row.source].tag_seq
            ):
                lowest[row.source] = row
        for source, row in lowest.items():
            if source not in self._sources:
                self._sources.expect(row, self._start)

    # One row.

    def _fits(self, row: R) -> bool:
        """Return True if the cursor and the memory have room for a row."""
        settings = self._settings
        ahead, held = len(self._resume), len(self._held)
        if ahead + held + ROOM_FOR_HELD + 2 <= settings.room and self._held_rows < settings.max_held:
            return True
        if not self._is_missed(row):
            return True
        source, number, marked = row.source, self._last_number(row.source), self._levels.is_marked(row.partition)
        is_next = row.tag_seq == number + 1 if number is not None else self._is_first(row, ms_of(row.timeuuid))
        is_open = source in self._held or self._resume.opened(source) is not None
        more = 0
        if (
            self._settled is not None
            and order(row.timeuuid) > order(self._settled)
            and not self._resume.names(row, marked)
        ):
            more += marked or (is_next and not is_open)
        if is_next:
            return not more or (ahead + more <= settings.room - ROOM_FOR_HELD and ahead + held + more <= settings.room)
        return ahead + held + more + (not is_open) <= settings.room and self._held_rows < settings.max_held

    def _last_number(self, source: str) -> int | None:
        """Return the number of the last delivered event of a source; None if it is not known."""
        if (held := self._held.get(source)) is not None:
            return held.number
        if (last := self._sources.get(source)) is not None:
            return last.number
        if (above := self._resume.delivered_above(source)) is not None:
            return above[0]
        opened = self._resume.opened(source)
        return None if opened is None else opened.number

    def _take(self, row: R, now_ms: int, out: list[DeliveredRow[R] | LostNumbers]) -> None:
        if self._levels.is_marked(row.partition):
            self._resume.add_partition(row)
        if not self._is_missed(row):
            self._recognise(row)
            return
        held = self._held.get(row.source) or self._hold(row, now_ms)
        if held is None:
            self._deliver(row, out)
            return
        if row.tag_seq == held.number + 1:
            held.number, held.after = row.tag_seq, row.timeuuid
            self._deliver(row, out)
            self._release(held, out)
            return
        if not held:
            self._held[row.source] = held
            self._held_searched = False
        self._held_rows += 1
        held.add(row, now_ms)

    def _recognise(self, row: TagRow) -> None:
        """Note the last delivered event of a source that was open at the start."""
        opened = self._resume.opened(row.source)
        if opened is None or opened.number != row.tag_seq:
            return
        del self._resume.open[opened.source]
        self._sources.remember(row)
        if not self._levels.is_marked(row.partition):
            self._resume.add_source(row)

    def _hold(self, row: TagRow, now_ms: int) -> HeldSource[R] | None:
        """Return a hold for the source of a row; None if the row is the next of its source."""
        source = row.source
        if (last := self._sources.get(source)) is not None:
            return HeldSource(source, last.number, last.timeuuid, 0, now_ms) if row.tag_seq > last.number + 1 else None
        if (above := self._resume.delivered_above(source)) is not None:
            return HeldSource(source, *above, 0, now_ms)
        if (opened := self._resume.open.pop(hashed(source), None)) is not None:
            return HeldSource(source, opened.number, last_of(opened.since_ms - 1), opened.first, now_ms)
        if self._is_first(row, now_ms):
            return None
        since_ms = bucket_start(ms_of(row.timeuuid), self._settings.span_ms) - self._settings.span_ms
        return HeldSource(source, 0, max(last_of(since_ms - 1), self._start, key=order), row.tag_seq, now_ms)

    def _is_first(self, row: TagRow, now_ms: int) -> bool:
        """Return True if the first row seen of a source is taken for its first."""
        settings = self._settings
        if row.tag_seq == 1 or self._levels.is_marked(row.partition):
            return True
        if settings.timeouts.first_ms == 0 or row.tag_seq > settings.timeouts.max_numbers:
            return True
        bucket_end = bucket_start(ms_of(row.timeuuid), settings.span_ms) + settings.span_ms
        return not self._from_beginning and bucket_end <= now_ms

    def _release(self, held: HeldSource[R], out: list[DeliveredRow[R] | LostNumbers]) -> None:
        """Deliver held rows up to the next gap."""
        while (row := held.next()) is not None:
            self._held_rows -= 1
            if not held:
                self._held.pop(held.source, None)
            self._deliver(row, out)
        if held:
            held.restart_wait()
            self._held[held.source] = held
        else:
            self._held.pop(held.source, None)

    def _deliver(self, row: R, out: list[DeliveredRow[R] | LostNumbers]) -> None:
        self._sources.deliver(row)
        if not self._levels.is_marked(row.partition):
            self._resume.add_source(row)
        out.append(DeliveredRow(row, self.position()))

    def _raise_low(self) -> None:
        low = self._settled
        if low is None or order(self._scanned) <= order(low):
            low = self._scanned
        self._resume.raise_low(low, self._open_searched)


class PartitionLevels:
    """The marks and floors of partitions, as read last.

    A row is *committed* if the mark of its partition covers it, or if the partition is known to have no marks, since
    another program writes it. Rows of a partition that may have marks which were not read are not committed.
    """

    def __init__(self) -> None:
        self._marks: Mapping[Partition, int] | None = None
        self.floors: Mapping[Partition, int] = {}
        self.unmarked: set[Partition] = set()
        """Partitions that are known to have no marks."""

    def renew(self, marks: Mapping[Partition, int], floors: Mapping[Partition, int]) -> None:
        self._marks, self.floors = marks, floors

    def changed_after(self, marks: Mapping[Partition, int], scanned: UUID, start: UUID) -> UUID:
        """Return the timeuuid after which rows may have been added: the old floors of partitions whose mark moved.

        A new partition has nothing below the lowest of all floors: its introduction to the shard ensures that.
        """
        before, after = self._marks, scanned
        if before is None:
            return after
        lowest = min(self.floors.values(), default=None)
        for partition, mark in marks.items():
            if before.get(partition) == mark:
                continue
            floor = self.floors.get(partition) if partition in before else lowest
            if floor is None:
                return start
            after = min(after, last_of(floor - 1), key=order)
        return max(after, start, key=order)

    def settled(self, start: UUID) -> UUID | None:
        """Return the last timeuuid below all floors; the start if a partition has no floor, None if none has one."""
        if self._marks is not None and not self.floors.keys() >= self._marks.keys():
            return start
        lowest = min(self.floors.values(), default=None)
        return None if lowest is None else last_of(lowest - 1)

    def is_marked(self, partition: Partition) -> bool:
        return partition in self.floors or (self._marks is not None and partition in self._marks)

    def is_committed(self, row: TagRow) -> bool:
        mark = self._marks.get(row.partition) if self._marks else None
        if mark is not None:
            return row.offset <= mark
        return row.partition in self.unmarked and row.partition not in self.floors

    def unknown(self, rows: Iterable[TagRow]) -> set[Partition]:
        return {
            row.partition for row in rows if row.partition not in self.unmarked and not self.is_marked(row.partition)
        }


class ResumePoint:
    """The low timeuuid of a reader, and the partitions and sources that are delivered above it.

    Invariant: the timeuuid only rises; events taken above it are named, by partition or by source, and those below it
    are not.
    """

    def __init__(self, start: TagPosition) -> None:
        self.low, self._order = start.low, order(start.low)
        self._partitions = {each.partition: (each.offset, last_of(each.ms)) for each in start.reached}
        self._sources: dict[str, tuple[int, UUID]] = {}
        self.open = {each.source: each for each in start.open}
        """Sources that were open at the start and not seen since, by the hash of their name."""

    def __len__(self) -> int:
        return len(self._partitions) + len(self._sources) + len(self.open)

    def opened(self, source: str) -> OpenSource | None:
        """Return the entry of a source that was open at the start."""
        return self.open.get(hashed(source)) if self.open else None

    def delivered_above(self, source: str) -> tuple[int, UUID] | None:
        """Return number and timeuuid of the last event of a source that is named."""
        return self._sources.get(source) if self._sources else None

    def names(self, row: TagRow, marked: bool) -> bool:
        """Return True if the partition of a row is named, or its source if the partition has no marks."""
        return hashed_partition(row.partition) in self._partitions if marked else row.source in self._sources

    def add_partition(self, row: TagRow) -> None:
        """Name the partition of a row that was taken."""
        if row.timeuuid == self.low or order(row.timeuuid) <= self._order:
            return
        key = hashed_partition(row.partition)
        before = self._partitions.get(key)
        if before is None or row.offset >= before[0]:
            self._partitions[key] = row.offset, row.timeuuid

    def add_source(self, row: TagRow) -> None:
        """Name the source of a delivered row whose partition has no marks."""
        timeuuid = row.timeuuid
        before = self._sources.get(row.source)
        if before is not None:
            timeuuid = max(timeuuid, before[1], key=order)
        if order(timeuuid) > self._order:
            self._sources[row.source] = row.tag_seq, timeuuid

    def raise_low(self, timeuuid: UUID, open_searched: bool) -> None:
        """Raise the low timeuuid and drop the names below it; open sources only after they were searched for."""
        position = order(timeuuid)
        if position <= self._order:
            return
        self.low, self._order = timeuuid, position
        if self._partitions:
            self._partitions = {key: each for key, each in self._partitions.items() if order(each[1]) > position}
        if self._sources:
            self._sources = {source: each for source, each in self._sources.items() if order(each[1]) > position}
        if open_searched:
            self.close_below()

    def close_below(self) -> None:
        """Drop sources that were open at the start, below the low timeuuid, and were not found."""
        if self.open:
            self.open = {key: each for key, each in self.open.items() if order(last_of(each.since_ms)) > self._order}

    def position(self, held: Collection[HeldSource[Any]]) -> TagPosition:
        """Return the position to resume at, with the held sources."""
        if not (self._partitions or self._sources or self.open or held):
            return TagPosition(self.low)
        reached = (Reached(key, offset, ms_of(last)) for key, (offset, last) in self._partitions.items())
        sources = dict(self.open)
        for source, (number, last) in self._sources.items():
            sources[hashed(source)] = OpenSource(hashed(source), number, ms_of(last))
        for each in held:
            # Without a number that says what was delivered, a millisecond with a delivered event is not searched again.
            since_ms = ms_of(each.after) + (1 if each.first and not each.number else 0)
            sources[hashed(each.source)] = OpenSource(hashed(each.source), each.number, since_ms, each.first)
        return TagPosition(self.low, tuple(reached), tuple(sources.values()))

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
from datetime import timedelta
from typing import TypeAlias
from uuid import UUID

import msgspec

from tailrace.config.values import milliseconds
from tailrace.log.event import Partition
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import first_of, last_of, ms_of, order
from tailrace.views.tags.rows.model import (
    ROOM_FOR_HELD,
    KnownSources,
    OpenSource,
    PartitionLevels,
    ResumePoint,
    RowKey,
    StoredRow,
    TagPosition,
    hashed,
)
from tailrace.views.tags.settings import TagsSettings

MIN_LAG_MS, MAX_LAG_MS = 50, 5_000
"""Bounds of the delay where it is measured."""
MAX_SEARCH_SPAN_MS = 60_000
"""Missed rows that lie further apart than this are read separately."""
MIN_PAUSE_MS = 10


class ReadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a feed over rows and of its readers, one for each tag; ``of`` shows which key is which field."""

    refresh_ms: int = 3_000
    notify: bool = True
    fails: bool = True
    delay_ms: int | None = 5_000
    """None: as far as the floors are behind the clock."""
    future_ms: int = 1_000
    """Floors may be ahead of the clock by this much, unless a clock was set."""
    span_ms: int = 3_600_000
    gap_ms: int = 10_000
    first_ms: int = 100
    max_missing: int = 5_000
    short_ms: int | None = 1_000
    short_period_ms: int | None = 5_000
    long_ms: int | None = 120_000
    long_period_ms: int | None = None
    known_sources: int = 100_000
    max_held: int = 10_000
    """Events held back, of all sources; then reading stops."""
    room: int = 32
    """Entries of the cursor above its low timeuuid; then reading stops."""

    @classmethod
    def of(cls, tags: TagsSettings) -> ReadSettings:
        return cls(
            refresh_ms=milliseconds(tags.refresh),
            notify=tags.notify,
            fails=tags.on_missing == "fail",
            delay_ms=_ms_or_none(tags.delay),
            future_ms=milliseconds(tags.future_limit),
            span_ms=milliseconds(tags.span),
            gap_ms=milliseconds(tags.gap_timeout),
            first_ms=milliseconds(tags.new_source_scan),
            max_missing=tags.max_missing,
            short_ms=_ms_or_none(tags.back_track),
            short_period_ms=_ms_or_none(tags.back_track_period),
            long_ms=_ms_or_none(tags.long_back_track),
            long_period_ms=_ms_or_none(tags.long_back_track_period),
            known_sources=tags.known_sources,
        )

    @property
    def debounce_ms(self) -> int:
        """Interval whose announcements are answered by one read."""
        return max(MIN_PAUSE_MS, (self.delay_ms or 0) // 20)

    def to_ms(self, now_ms: int, floors: Collection[int]) -> int:
        """Return the millisecond up to which to read, given the floors of all partitions."""
        if max(floors, default=now_ms) > now_ms + self.future_ms:
            # A clock was set, ours or theirs: read everything, or it would wait until our clock is there, too.
            return max(floors)
        if self.delay_ms is not None:
            return now_ms - self.delay_ms
        behind_ms = now_ms - min(floors) + 1 if floors else 0
        return now_ms - min(max(behind_ms, MIN_LAG_MS), MAX_LAG_MS)


def _ms_or_none(duration: timedelta | None) -> int | None:
    return None if duration is None else milliseconds(duration)


class BacktrackSchedule:
    """The times at which a reader searches the past again for rows that appeared late."""

    def __init__(self, settings: ReadSettings, now_ms: int) -> None:
        self._settings, self._searched_ms, self._searched_long_ms = settings, now_ms, now_ms

    @property
    def due_ms(self) -> int | None:
        """Time of the next search; None: never."""
        return None if self._settings.short_ms is None else self._searched_ms + self._settings.short_ms

    def since_ms(self, scanned_ms: int, now_ms: int) -> int | None:
        """Return the millisecond to search from, for a reader that has scanned to one; None if no search is due."""
        settings = self._settings
        if not _is_over(self._searched_ms, settings.short_ms, now_ms):
            return None
        self._searched_ms, period_ms = now_ms, settings.short_period_ms
        if _is_over(self._searched_long_ms, settings.long_ms, now_ms):
            self._searched_long_ms, period_ms = now_ms, settings.long_period_ms
        furthest_ms = bucket_start(scanned_ms, settings.span_ms) - settings.span_ms
        return furthest_ms if period_ms is None else max(furthest_ms, scanned_ms - period_ms)


def _is_over(begin_ms: int, interval_ms: int | None, now_ms: int) -> bool:
    """Return True if an interval is over, also if the clock was set back to before it began."""
    return interval_ms is not None and not begin_ms <= now_ms < begin_ms + interval_ms


class HeldSource:
    """A source with a gap, and its events above the gap; ``number`` is that of its last delivered event, 0 for none.

    The missing events have later timeuuids than ``after``. Of a source that was not known, numbers below ``first`` need
    not exist; 0: it was known.
    """

    def __init__(self, source: str, number: int, after: UUID, first: int, now_ms: int) -> None:
        self.source, self.number, self.after, self.first = source, number, after, first
        self.since_ms = now_ms
        """Begin of the wait for the missing events."""
        self._rows: dict[int, tuple[StoredRow, int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    @property
    def lowest(self) -> StoredRow:
        return self._rows[min(self._rows)][0]

    @property
    def missing(self) -> tuple[int, int]:
        """First and last missing number below the lowest held event."""
        return self.number + 1, min(self._rows) - 1

    @property
    def is_optional(self) -> bool:
        """True if the missing events below the lowest one need not exist."""
        return min(self._rows) <= self.first

    def entry(self) -> OpenSource:
        # Without a number that says what was delivered, a millisecond with a delivered event is not searched again.
        since_ms = ms_of(self.after) + (1 if self.first and not self.number else 0)
        return OpenSource(hashed(self.source), self.number, since_ms, self.first)

    def add(self, row: StoredRow, now_ms: int) -> None:
        self._rows[row.tag_seq] = row, now_ms

    def next(self) -> StoredRow | None:
        """Remove and return the event with the next number; None if it is missing."""
        item = self._rows.pop(self.number + 1, None)
        if item is None:
            return None
        self.number += 1
        self.after = item[0].timeuuid
        return item[0]

    def restart_wait(self) -> None:
        """Wait for the next gap, from the time when the events above it were seen."""
        self.since_ms = min((seen_ms for _, seen_ms in self._rows.values()), default=self.since_ms)

    def deadline_ms(self, settings: ReadSettings) -> int:
        first, last = self.missing
        if last - first >= settings.max_missing:
            return self.since_ms
        return self.since_ms + (settings.first_ms if self.is_optional else settings.gap_ms)


class DeliveredRow(msgspec.Struct, frozen=True, gc=False):
    row: StoredRow
    position: TagPosition


class LostNumbers(msgspec.Struct, frozen=True):
    """Numbers of a source that were not found in time between two timeuuids, and the position after them."""

    source: str
    first: int
    last: int
    after: UUID
    to: UUID
    position: TagPosition


Delivery: TypeAlias = DeliveredRow | LostNumbers


class Reading:
    """The state of one tag's reader.

    With ``from_beginning`` there is nothing before the start, so every source begins with its lowest number.
    """

    def __init__(
        self, start: TagPosition, settings: ReadSettings, *, from_beginning: bool = False, now_ms: int
    ) -> None:
        self._settings = settings
        self._start, self._start_order = start.low, order(start.low)
        self._from_beginning = from_beginning
        self.levels = PartitionLevels()
        self._scanned, self._to = start.low, start.low
        self._settled: UUID | None = None
        """Last timeuuid below all floors."""
        self._resume = ResumePoint(start)
        self._carry: list[StoredRow] = []
        """Rows at the end of a page that share a timeuuid, perhaps with the next page."""
        self._sources = KnownSources(start, settings.known_sources)
        self._held: dict[str, HeldSource] = {}
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
        return self._resume.position([held.entry() for held in self._held.values()])

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
        after = self.levels.changed_after(marks, self._scanned, self._start)
        to = last_of(self._settings.to_ms(now_ms, floors.values()))
        if until is not None:
            to = min(to, until, key=order)
        self._to = max(to, self._scanned, self._to, key=order)  # a clock that steps back changes nothing
        self._scanned = after
        self.levels.renew(marks, floors)
        self._settled = self.levels.settled(self._start)
        self._carry = []
        self.is_at_end, self.is_full = False, self._held_rows >= self._settings.max_held
        if floors:
            self._raise_low()
        return after, self._to

    def take_page(self, rows: Sequence[StoredRow], now_ms: int) -> list[Delivery]:
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

    def finish(self, now_ms: int) -> list[Delivery]:
        """Note that all rows of the range were passed; return what to deliver."""
        if self.is_full:
            return []
        out = self._take_rows(self._carry, now_ms)
        self._carry = []
        if not self.is_full:
            self.is_at_end = True
            if self.levels.floors and not self.levels.unmarked:  # else rows may still appear below
                self._scanned = self._to
                self._raise_low()
        return out

    def _take_rows(self, rows: Sequence[StoredRow], now_ms: int) -> list[Delivery]:
        out: list[Delivery] = []
        for i, row in enumerate(rows):
            is_last = i + 1 == len(rows) or rows[i + 1].timeuuid != row.timeuuid
            committed = self.levels.is_committed(row)
            if committed and not self._fits(row):
                self.is_full = True
                self._carry = []
                break
            if not committed and not self.levels.floors:
                self._settled = self._resume.low  # the first partition was just introduced; its floor was not read
            if is_last:
                self._scanned = row.timeuuid
                self._raise_low()
            if committed:
                self._take(row, now_ms, out)
        return out

    def searches(self, now_ms: int) -> list[tuple[UUID, UUID]]:
        """Return the ranges, after one timeuuid and up to another, whose rows the caller passes to ``find_missed``."""
        ranges: list[tuple[UUID, UUID]] = []
        if not self._open_searched:
            since_ms = min(each.since_ms for each in self._resume.open.values())
            if order(first_of(since_ms)) <= self._start_order:
                ranges.append((last_of(since_ms - 1), self._start))
        if self._held:
            after = min((held.after for held in self._held.values()), key=order)
            ranges.append((after, max((held.lowest.timeuuid for held in self._held.values()), key=order)))
        since = self._backtracks.since_ms(ms_of(self._scanned), now_ms)
        if since is not None:
            after = max(last_of(since - 1), self._start, key=order)
            if order(after) < order(self._scanned):
                ranges.append((after, self._scanned))
        return ranges

    def find_missed(self, rows: Iterable[RowKey]) -> list[RowKey]:
        """Return the rows that were missed; the caller passes them, complete and in order, to ``take_missed``."""
        limit, committed = order(self._scanned), filter(self.levels.is_committed, rows)
        return [row for row in committed if order(row.timeuuid) <= limit and self._is_missed(row)]

    def take_missed(self, rows: Iterable[StoredRow], now_ms: int) -> list[Delivery]:
        """Take rows that ``find_missed`` returned; return what to deliver."""
        out: list[Delivery] = []
        for row in rows:
            if self._is_missed(row) and self._fits(row):
                self._take(row, now_ms, out)
        return out

    def searched(self) -> None:
        """Note that all ``searches`` were run."""
        self._open_searched = self._held_searched = True
        self._resume.close_below()

    def _is_missed(self, row: RowKey) -> bool:
        number = row.tag_seq
        if (held := self._held.get(row.source)) is not None:
            if number <= held.number or number in held or order(row.timeuuid) <= order(held.after):
                return False
            return number >= held.first or self._sources.is_new(row)
        delivered = self._last_number(row.source)
        if delivered == number and (last := self._sources.get(row.source)) is not None:
            # The source comes from two partitions, and a driver died between rows and mark: it left one of two events
            # with this number. Both are delivered.
            is_other = row.partition != last.partition and self.levels.is_marked(row.partition)
            return is_other and order(row.timeuuid) > order(last.timeuuid)
        if delivered is not None:
            return number > delivered
        return order(row.timeuuid) > self._start_order and self._sources.is_new(row)

    def expire(self, now_ms: int) -> list[Delivery]:
        """Give up gaps whose wait is over; return what to deliver."""
        out: list[Delivery] = []
        for held in list(self._held.values()):
            held.since_ms = min(held.since_ms, now_ms)  # the clock may have been set back
            while held and now_ms >= held.deadline_ms(self._settings):
                is_optional, (first, last), after = held.is_optional, held.missing, held.after
                to, held.number = held.lowest.timeuuid, last
                if not is_optional:
                    out.append(LostNumbers(held.source, first, last, after, to, self.position()))
                self._release(held, out)
        return out

    def due_ms(self) -> int | None:
        """Return when ``expire`` or ``searches`` have something to do; None if that is not known, 0 for now."""
        if not self._held_searched:
            return 0
        due = [held.deadline_ms(self._settings) for held in self._held.values()]
        if self._backtracks.due_ms is not None:
            due.append(self._backtracks.due_ms)
        return min(due, default=None)

    def expect(self, rows: Iterable[RowKey]) -> None:
        """Note the lowest number of each source after the start, for rows without marks."""
        for row in sorted(rows, key=lambda row: row.tag_seq):
            if self.levels.is_marked(row.partition) or self._resume.opened(row.source) is not None:
                continue
            if order(row.timeuuid) > self._start_order and self._sources.get(row.source) is None:
                self._sources.expect(row, self._start)

    def _fits(self, row: StoredRow) -> bool:
        """Return True if the cursor and the memory have room for a row."""
        settings = self._settings
        ahead, held = len(self._resume), len(self._held)
        if ahead + held + ROOM_FOR_HELD + 2 <= settings.room and self._held_rows < settings.max_held:
            return True
        if not self._is_missed(row):
            return True
        source, number, marked = row.source, self._last_number(row.source), self.levels.is_marked(row.partition)
        is_next = row.tag_seq == number + 1 if number is not None else self._is_first(row, ms_of(row.timeuuid))
        is_open = source in self._held or self._resume.opened(source) is not None
        is_above = self._settled is not None and order(row.timeuuid) > order(self._settled)
        more = is_above and not self._resume.names(row, marked) and (marked or (is_next and not is_open))
        if is_next:
            return not more or (ahead + more <= settings.room - ROOM_FOR_HELD and ahead + held + more <= settings.room)
        return ahead + held + more + (not is_open) <= settings.room and self._held_rows < settings.max_held

    def _last_number(self, source: str) -> int | None:
        """Return the number of the last delivered event of a source; None if it is not known."""
        if (held := self._held.get(source)) is not None:
            return held.number
        if (last := self._sources.get(source)) is not None:
            return last.number
        if (above := self._resume.sources.get(source)) is not None:
            return above[0]
        opened = self._resume.opened(source)
        return None if opened is None else opened.number

    def _take(self, row: StoredRow, now_ms: int, out: list[Delivery]) -> None:
        if self.levels.is_marked(row.partition):
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

    def _recognise(self, row: RowKey) -> None:
        """Note the last delivered event of a source that was open at the start."""
        opened = self._resume.opened(row.source)
        if opened is None or opened.number != row.tag_seq:
            return
        del self._resume.open[opened.source]
        self._sources.remember(row)
        if not self.levels.is_marked(row.partition):
            self._resume.add_source(row)

    def _hold(self, row: RowKey, now_ms: int) -> HeldSource | None:
        """Return a hold for the source of a row; None if the row is the next of its source."""
        source = row.source
        if (last := self._sources.get(source)) is not None:
            return HeldSource(source, last.number, last.timeuuid, 0, now_ms) if row.tag_seq > last.number + 1 else None
        if (above := self._resume.sources.get(source)) is not None:
            return HeldSource(source, *above, 0, now_ms)
        if (opened := self._resume.open.pop(hashed(source), None)) is not None:
            return HeldSource(source, opened.number, last_of(opened.since_ms - 1), opened.first, now_ms)
        if self._is_first(row, now_ms):
            return None
        since_ms = bucket_start(ms_of(row.timeuuid), self._settings.span_ms) - self._settings.span_ms
        return HeldSource(source, 0, max(last_of(since_ms - 1), self._start, key=order), row.tag_seq, now_ms)

    def _is_first(self, row: RowKey, now_ms: int) -> bool:
        """Return True if the first row seen of a source is taken for its first."""
        settings = self._settings
        if row.tag_seq == 1 or self.levels.is_marked(row.partition):
            return True
        if settings.first_ms == 0 or row.tag_seq > settings.max_missing:
            return True
        bucket_end = bucket_start(ms_of(row.timeuuid), settings.span_ms) + settings.span_ms
        return not self._from_beginning and bucket_end <= now_ms

    def _release(self, held: HeldSource, out: list[Delivery]) -> None:
        """Deliver held rows up to the next gap."""
        while (row := held.next()) is not None:
            self._held_rows -= 1
            if not held:
                del self._held[held.source]
            self._deliver(row, out)
        held.restart_wait()

    def _deliver(self, row: StoredRow, out: list[Delivery]) -> None:
        self._sources.deliver(row)
        if not self.levels.is_marked(row.partition):
            self._resume.add_source(row)
        out.append(DeliveredRow(row, self.position()))

    def _raise_low(self) -> None:
        low = self._settled
        if low is None or order(self._scanned) <= order(low):
            low = self._scanned
        self._resume.raise_low(low, self._open_searched)


def search_spans(timeuuids: Sequence[UUID]) -> list[tuple[UUID, UUID]]:
    """Return the first and the last timeuuid of each range that is read at once."""
    ranges: list[tuple[UUID, UUID]] = []
    for timeuuid in timeuuids:
        if ranges and ms_of(timeuuid) - ms_of(ranges[-1][1]) <= MAX_SEARCH_SPAN_MS:
            ranges[-1] = ranges[-1][0], timeuuid
        else:
            ranges.append((timeuuid, timeuuid))
    return ranges

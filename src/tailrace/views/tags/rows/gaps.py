"""Gaps in the numbers of a source, and the settings of a reader that waits for them.

Numbers of a source in a tag have no gap: 1, 2, 3, or from a lower number on if events were tagged later than written.
So a reader knows which events it misses. Invariant: a source with a gap is held back, and nothing else is; a held event
is delivered after all events below it, or when the wait for them is over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar
from uuid import UUID

import msgspec

from tailrace.log.event import Partition
from tailrace.log.segment import bucket_start
from tailrace.views.tags.rows.cursor import TagPosition, hashed_partition

MIN_LAG_MS, MAX_LAG_MS = 50, 5_000
"""Bounds of the delay where it is measured."""


class TagRow(Protocol):
    """The fields of a row that decide when it is delivered."""

    @property
    def source(self) -> str: ...
    @property
    def tag_seq(self) -> int: ...
    @property
    def timeuuid(self) -> UUID: ...
    @property
    def partition(self) -> Partition: ...
    @property
    def offset(self) -> int: ...


R = TypeVar("R", bound=TagRow)


class GapTimeouts(msgspec.Struct, frozen=True):
    """The longest waits for missing events."""

    gap_ms: int = 10_000
    first_ms: int = 100
    """For events below the first one that is seen of a source."""
    max_numbers: int = 5_000
    """A larger gap is not waited for."""


class HeldSource(Generic[R]):
    """A source with a gap, and its events above the gap.

    Args:
        number: Number of its last delivered event; 0: none.
        after: The missing events have later timeuuids than this one.
        first: Lowest number seen of a source that was not known: lower numbers need not exist. 0: it was known.
    """

    def __init__(self, source: str, number: int, after: UUID, first: int, now_ms: int) -> None:
        self.source, self.number, self.after, self.first = source, number, after, first
        self._since_ms = now_ms
        self._rows: dict[int, tuple[R, int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    @property
    def lowest(self) -> R:
        """The held event with the lowest number."""
        return self._rows[min(self._rows)][0]

    @property
    def missing(self) -> tuple[int, int]:
        """First and last missing number below the lowest held event."""
        return self.number + 1, min(self._rows) - 1

    @property
    def is_optional(self) -> bool:
        """True if the missing events below the lowest one need not exist."""
        return min(self._rows) <= self.first

    def add(self, row: R, now_ms: int) -> None:
        self._rows[row.tag_seq] = row, now_ms

    def next(self) -> R | None:
        """Remove and return the event with the next number; None if it is missing."""
        item = self._rows.pop(self.number + 1, None)
        if item is None:
            return None
        self.number += 1
        self.after = item[0].timeuuid
        return item[0]

    def restart_wait(self) -> None:
        """Wait for the next gap, from the time when the events above it were seen."""
        self._since_ms = min((seen_ms for _, seen_ms in self._rows.values()), default=self._since_ms)

    def limit_wait(self, now_ms: int) -> None:
        """Let the wait begin now at the latest, in case the clock was set back."""
        self._since_ms = min(self._since_ms, now_ms)

    def skip_gap(self) -> None:
        """Give up the missing events below the lowest one."""
        self.number = min(self._rows) - 1

    def deadline_ms(self, timeouts: GapTimeouts) -> int:
        """Return when the wait for the missing events ends."""
        first, last = self.missing
        if last - first >= timeouts.max_numbers:
            return self._since_ms
        return self._since_ms + (timeouts.first_ms if self.is_optional else timeouts.gap_ms)


class ReadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one tag's reader."""

    delay_ms: int | None = 5_000
    """Distance to the clock; None: as far as the floors are behind it."""
    future_ms: int = 1_000
    """Floors may be ahead of the clock by this much, unless a clock was set."""
    span_ms: int = 3_600_000
    """Length of a bucket."""
    timeouts: GapTimeouts = GapTimeouts()
    short_ms: int | None = 1_000
    """Interval of searches through the recent past; None: never."""
    short_period_ms: int | None = 5_000
    """Length of that past; None: to the start of the bucket before, which is the furthest of all searches."""
    long_ms: int | None = 120_000
    long_period_ms: int | None = None
    known_sources: int = 100_000
    """Sources whose last number is remembered."""
    max_held: int = 10_000
    """Events held back, of all sources; then reading stops."""
    room: int = 32
    """Entries of the cursor above its low timeuuid; then reading stops."""

    def to_ms(self, now_ms: int, floors: Collection[int]) -> int:
        """Return the millisecond up to which to read, given the floors of all partitions."""
        if max(floors, default=now_ms) > now_ms + self.future_ms:
            # A clock was set, ours or theirs: read everything, or it would wait until our clock is there, too.
            return max(floors)
        if self.delay_ms is not None:
            return now_ms - self.delay_ms
        behind_ms = now_ms - min(floors) + 1 if floors else 0
        return now_ms - min(max(behind_ms, MIN_LAG_MS), MAX_LAG_MS)


class BacktrackSchedule:
    """The times at which a reader searches the past again for rows that appeared late."""

    def __init__(self, settings: ReadSettings, now_ms: int) -> None:
        self._settings = settings
        self._short_due = now_ms + (settings.short_ms or 0)
        self._long_due = now_ms + (settings.long_ms or 0)

    @property
    def due_ms(self) -> int | None:
        """Time of the next search; None: never."""
        return None if self._settings.short_ms is None else self._short_due

    def since_ms(self, scanned_ms: int, now_ms: int) -> int | None:
        """Return the millisecond to search from, for a reader that has scanned to one; None if no search is due."""
        settings = self._settings
        if not _is_due(self._short_due, settings.short_ms, now_ms):
            return None
        self._short_due = now_ms + (settings.short_ms or 0)
        period_ms = settings.short_period_ms
        if _is_due(self._long_due, settings.long_ms, now_ms):
            self._long_due = now_ms + (settings.long_ms or 0)
            period_ms = settings.long_period_ms
        furthest_ms = bucket_start(scanned_ms, settings.span_ms) - settings.span_ms
        return furthest_ms if period_ms is None else max(furthest_ms, scanned_ms - period_ms)


def _is_due(due_ms: int, every_ms: int | None, now_ms: int) -> bool:
    """Return True if an interval is over, also if the clock was set back to before it began."""
    return every_ms is not None and not due_ms - every_ms <= now_ms < due_ms


class LastDelivered(msgspec.Struct, frozen=True, gc=False):
    """The last delivered event of a source."""

    number: int
    timeuuid: UUID
    partition: Partition
    offset: int


class KnownSources:
    """The last delivered event of each source, for as many sources as there is room for.

    Of other sources, forgotten or delivered before the start, only the delivered offset of their partition is known.
    """

    def __init__(self, start: TagPosition, capacity: int) -> None:
        self._capacity = capacity
        self._last: OrderedDict[str, LastDelivered] = OrderedDict()
        self._delivered = {each.partition: each.offset for each in start.reached}
        """Offset up to which events of unknown sources were delivered, by hash of the partition."""

    def __contains__(self, source: str) -> bool:
        return source in self._last

    def get(self, source: str) -> LastDelivered | None:
        """Return the last event of a source; None if the source is not known."""
        return self._last.get(source)

    def is_new(self, row: TagRow) -> bool:
        """Return True if a row of an unknown source was not delivered before."""
        return row.offset > self._delivered.get(hashed_partition(row.partition), -1)

    def expect(self, row: TagRow, after: UUID) -> None:
        """Add a source whose next event is this row, after a timeuuid."""
        self._last[row.source] = LastDelivered(row.tag_seq - 1, after, row.partition, -1)

    def remember(self, row: TagRow) -> None:
        """Add a source by an event that was delivered before."""
        self._last[row.source] = LastDelivered(row.tag_seq, row.timeuuid, row.partition, row.offset)

    def deliver(self, row: TagRow) -> None:
        """Note a delivered event; if there are too many sources, forget the one that was silent longest."""
        last = self._last.get(row.source)
        if last is not None and last.partition != row.partition:
            self._forget(last)
        self.remember(row)
        self._last.move_to_end(row.source)
        if len(self._last) > self._capacity:
            self._forget(self._last.popitem(last=False)[1])

    def _forget(self, last: LastDelivered) -> None:
        key = hashed_partition(last.partition)
        self._delivered[key] = max(self._delivered.get(key, -1), last.offset)

"""How the rows of a tag are read: how far behind the clock, how long what is missing is waited for, and the limits."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from tailrace.log.segment import bucket_start
from tailrace.views.tags.rows.tag_gaps import Waits

LEAST_LAG_MS, MOST_LAG_MS = 50, 5_000
"""Between these the delay lies when it is measured."""


class Reads(msgspec.Struct, frozen=True, kw_only=True):
    """How a tag is read."""

    delay_ms: int | None = 5_000
    """How far behind the clock; None = as far as the places are."""
    future_ms: int = 1_000
    """How far ahead of the clock a stamp can be, unless a clock was set."""
    span_ms: int = 3_600_000
    """How long a bucket is."""
    waits: Waits = Waits()
    short_ms: int | None = 1_000
    """How often it looks back a little; None = never."""
    short_period_ms: int | None = 5_000
    """How far; None = to the start of the bucket before, which is as far as it ever looks."""
    long_ms: int | None = 120_000
    long_period_ms: int | None = None
    known: int = 100_000
    """Sources whose numbers are remembered."""
    held: int = 10_000
    """Events that are held, over all sources; no more are read then."""
    room: int = 32
    """What the cursor may name above its low-water stamp; no more is read then."""

    def to_ms(self, now_ms: int, floors: Collection[int]) -> int:
        """Return up to which millisecond is read, given the floors of all places."""
        if max(floors, default=now_ms) > now_ms + self.future_ms:
            # A clock was set, ours or theirs: all there is, or it would have to wait until this one is there too.
            return max(floors)
        if self.delay_ms is not None:
            return now_ms - self.delay_ms
        behind_ms = now_ms - min(floors) + 1 if floors else 0
        return now_ms - min(max(behind_ms, LEAST_LAG_MS), MOST_LAG_MS)


class Turns:
    """When it is looked back again, and how far."""

    def __init__(self, reads: Reads, now_ms: int) -> None:
        self._reads = reads
        self._short_due = now_ms + (reads.short_ms or 0)
        self._long_due = now_ms + (reads.long_ms or 0)

    @property
    def due_ms(self) -> int | None:
        """When it is time again; None = never."""
        return None if self._reads.short_ms is None else self._short_due

    def since_ms(self, at_ms: int, now_ms: int) -> int | None:
        """Return from which millisecond on to look, where reading is at one; None if it is not time."""
        reads = self._reads
        if not _is_over(self._short_due, reads.short_ms, now_ms):
            return None
        self._short_due = now_ms + (reads.short_ms or 0)
        period_ms = reads.short_period_ms
        if _is_over(self._long_due, reads.long_ms, now_ms):
            self._long_due = now_ms + (reads.long_ms or 0)
            period_ms = reads.long_period_ms
        furthest_ms = bucket_start(at_ms, reads.span_ms) - reads.span_ms
        return furthest_ms if period_ms is None else max(furthest_ms, at_ms - period_ms)


def _is_over(due_ms: int, every_ms: int | None, now_ms: int) -> bool:
    """Whether a turn is over: also when it can only have begun before the clock was set back."""
    return every_ms is not None and not due_ms - every_ms <= now_ms < due_ms

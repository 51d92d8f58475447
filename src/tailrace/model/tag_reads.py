"""How the rows of a tag are read: how far behind the clock, how long what is missing is waited for, and the limits."""

from __future__ import annotations

import msgspec

from tailrace.model.tag_gaps import Waits

LEAST_LAG_MS, MOST_LAG_MS = 50, 5_000
"""Between these the delay lies when it is measured."""


class Reads(msgspec.Struct, frozen=True, kw_only=True):
    """How a tag is read."""

    delay_ms: int | None = 5_000
    """How far behind the clock; None = as far as the places are."""
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

    def lag_ms(self, now_ms: int, lowest_ms: int | None) -> int:
        """Return how far behind the clock is read, given the lowest floor of all places."""
        if self.delay_ms is not None:
            return self.delay_ms
        behind_ms = 0 if lowest_ms is None else now_ms - lowest_ms + 1
        return min(max(behind_ms, LEAST_LAG_MS), MOST_LAG_MS)

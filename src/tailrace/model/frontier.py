"""The frontier: how far time has certainly come for everything that the pipeline has applied.

Timers (quiet periods, idle sessions) use it as their ``now``. A pipeline that was down for ten minutes then acts as
if it had not been: time stands still with it.

Invariant: no record with a running-maximum time below the frontier is still to be applied, so the frontier of a set of
sources never passes what one of them has yet to deliver.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """How far one source is applied, and what was known of its end."""

    applied: int
    """The lowest mark of the source over all shards: everything up to it is applied."""
    end: int
    """The offset after the last record, listed after ``listed_ms`` was read from the clock."""
    listed_ms: int
    newest_ms: int | None
    """Running-maximum time of what is applied; None when nothing is."""


def frontier(sources: Iterable[Progress]) -> int | None:
    """Return the time in milliseconds that all sources have passed, or None when one has not begun."""
    lowest: int | None = None
    for source in sources:
        time_ms = source.listed_ms if source.applied + 1 >= source.end else source.newest_ms
        if time_ms is None:
            return None
        lowest = time_ms if lowest is None else min(lowest, time_ms)
    return lowest

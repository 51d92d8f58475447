"""Buckets: the stretch of time that one segment of a log belongs to; for day streams, a UTC day.

A bucket is [start, start + length) in milliseconds, so buckets of different lengths compare, and the length may change
at any time. Invariant: a name's bucket never moves back. A record goes to the bucket of its own time, but never before
the name's floor (the end of the last bucket that was sealed, packed or expired) and never after the limit (the store's
clock and a little), so a bucket that has a successor is never written again.
"""

from __future__ import annotations

from datetime import date, timedelta

DAY_MS = 86_400_000
_EPOCH = date(1970, 1, 1)


def bucket_start(time_ms: int, span_ms: int = DAY_MS) -> int:
    """Return when the bucket that a time falls into began."""
    return time_ms - time_ms % span_ms


def day_text(time_ms: int) -> str:
    """Return the UTC day of a time as ``2026-11-15``."""
    return (_EPOCH + timedelta(days=time_ms // DAY_MS)).isoformat()

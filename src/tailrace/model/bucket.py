"""Buckets: the stretch of time that one segment of a log belongs to; for day streams, a UTC day.

Invariant: a name's bucket never moves back. A record goes to the bucket of its own time, but never before the name's
floor and never after the limit (the store's clock and a little), so a bucket that has a successor is never written
again.
"""

from __future__ import annotations

from datetime import date, timedelta

DAY_MS = 86_400_000
_EPOCH = date(1970, 1, 1)


def bucket_of(time_ms: int, span_ms: int = DAY_MS) -> int:
    """Return the number of the bucket that a time falls into, counted from the Unix epoch."""
    return time_ms // span_ms


def is_late(time_ms: int, bucket: int, span_ms: int = DAY_MS) -> bool:
    """Return whether a record was stored in a later bucket than its own time says."""
    return time_ms // span_ms < bucket


def day_text(bucket: int) -> str:
    """Return a day bucket as ``2026-11-15``."""
    return (_EPOCH + timedelta(days=bucket)).isoformat()

"""Segments: the ordered pieces of a log, and the rule that finds a reader's place among them.

A log's numbers only grow inside an epoch, and an epoch is never used again. A new epoch begins when the store behind
the log is another process than before, since that one may have lost its last writes.

Invariant of ``locate``: a reader that stands after (epoch, number) is sent to exactly the events after it, or is told
which stretch is gone. Nothing is ever bound to an old place silently.

Buckets: the stretch of time that one segment of a log belongs to; for day streams, a UTC day.

A bucket is [start, start + length) in milliseconds, so buckets of different lengths compare, and the length may change
at any time. Invariant: a name's bucket never moves back. A record goes to the bucket of its own time, but never before
the name's floor (the end of the last bucket that was sealed, packed or expired) and never after the limit (the store's
clock and a little), so a bucket that has a successor is never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta

import msgspec

from tailrace.log.cursor import Position

RAW, PACKED, SEALED = 0, 1, 2
"""States: runs as they came; rewritten into few large pieces; runs as they came, closed before the bucket's end."""


class Segment(msgspec.Struct, frozen=True):
    """A piece of a log: one bucket, one epoch, consecutive in the log's order."""

    index: int
    start_ms: int
    """When its bucket began."""
    span_ms: int
    """How long its bucket is."""
    epoch: int
    first: int
    """Number of its first event."""
    last: int
    """Number of its last event; grows while the segment is open."""
    events: int
    bytes: int
    """Stored size of its runs."""
    newest_ms: int
    """The log's running-maximum time when its last event was appended."""
    raw_bytes: int = 0
    """Size of its events without compression, when it is packed."""
    state: int = RAW
    replaced: tuple[tuple[int, int, int], ...] = ()
    """(epoch, first, last) of all that was rebuilt, kept by the first segment of what came in its place.

    Those of its own epoch were taken out of the log, before its first event or after its last.
    """
    open: bool = False
    """Whether it is the one that ``apply`` appends to."""

    @property
    def end(self) -> Position:
        """The place after its last event."""
        return Position(self.epoch, self.last)

    @property
    def before(self) -> Position:
        """The place before its first event."""
        return Position(self.epoch, self.first - 1)

    @property
    def end_ms(self) -> int:
        """When its bucket ends."""
        return self.start_ms + self.span_ms


class Log(msgspec.Struct, frozen=True):
    """A log as its registry shows it."""

    segments: Sequence[Segment] = ()
    expired: Position = Position.START
    """The end of what has expired: whoever stands before it has missed something."""

    @property
    def end(self) -> Position:
        """The place after everything that the log has, or had."""
        return self.segments[-1].end if self.segments else self.expired


class Gap(msgspec.Struct, frozen=True):
    """A stretch that a reader can no longer get: after ``after``, up to and including ``to``."""

    after: Position
    to: Position
    reason: str


Key = tuple[int, int]
"""A place in a log's own order, which is that of its segments: index of the segment, number."""


_BEFORE = (-1 << 62, 0)


class SegmentPlace(msgspec.Struct, frozen=True):
    """Where to read next: after ``position`` in the segment at ``at`` of the list (``len`` of it when at the end)."""

    at: int
    position: Position
    gap: Gap | None = None


def locate(log: Log, after: Position) -> SegmentPlace:
    """Find where a reader that has seen everything up to ``after`` goes on."""
    segments, expired = log.segments, log.expired
    if after == Position.START:
        return SegmentPlace(0, after)
    if not segments:
        seen = expired == Position.START or (after.epoch == expired.epoch and after.number >= expired.number)
        return SegmentPlace(0, after) if seen else SegmentPlace(0, expired, Gap(after, expired, "expired"))
    for i, segment in enumerate(segments):
        for epoch, first, last in segment.replaced:
            if after.epoch == epoch and first <= after.number <= last:
                if epoch == segment.epoch:
                    # These were taken out of it, at its beginning or its end: there is nothing to miss.
                    return SegmentPlace(i, after)
                # Who had read all of it goes on behind; who was inside gets the new one from its beginning.
                whole = (epoch, last) == segment.replaced[-1][::2] and after.number == last
                behind = max(j for j, other in enumerate(segments) if other.epoch == segment.epoch) + 1
                return SegmentPlace(behind, after) if whole else _told(i, segment, after, "rebuilt")
    if after.epoch == expired.epoch and after.number <= expired.number:
        missed = after.number < expired.number
        return _told(0, segments[0], after, "expired") if missed else SegmentPlace(0, segments[0].before)
    mine = [i for i, segment in enumerate(segments) if segment.epoch == after.epoch]
    if not mine:
        return _epoch_gone(log, after)
    if after.number + 1 < segments[mine[0]].first and expired != Position.START:
        # The segment that it is a place in has expired, and so has one of another epoch behind it.
        return _told(0, segments[0], after, "expired")
    # The last one that begins at or before the place: what follows in the list may be of another epoch.
    at = max((i for i in mine if segments[i].first <= after.number + 1), default=mine[0])
    if after.number > segments[at].last and at == mine[-1] and at + 1 < len(segments):
        return _told(at + 1, segments[at + 1], after, "store-rolled-back")
    return SegmentPlace(at, after)


def _epoch_gone(log: Log, after: Position) -> SegmentPlace:
    """The cursor's epoch has no segment left: its prefix expired, or the store lost it."""
    reason = "expired" if after.epoch < log.expired.epoch else "store-rolled-back"
    for i, segment in enumerate(log.segments):
        if segment.epoch > after.epoch:
            return _told(i, segment, after, reason)
    end = log.segments[-1].end
    return SegmentPlace(len(log.segments) - 1, end, Gap(after, end, "store-rolled-back"))


def _told(at: int, segment: Segment, after: Position, reason: str) -> SegmentPlace:
    return SegmentPlace(at, segment.before, Gap(after, segment.before, reason))


def key_of(log: Log, place: Position) -> Key:
    """Return where a place is in the log's own order: epochs do not say, since a rebuilt segment has a late one."""
    if place == Position.START or not log.segments:
        return _BEFORE
    found = locate(log, place)
    if found.at < len(log.segments):
        segment = log.segments[found.at]
        if found.position.epoch == segment.epoch and found.position.number >= segment.first:
            return segment.index, found.position.number
    if found.at == 0:
        return _BEFORE
    end = log.segments[found.at - 1]
    return end.index, end.last


DAY_MS = 86_400_000
_EPOCH = date(1970, 1, 1)


def bucket_start(time_ms: int, span_ms: int = DAY_MS) -> int:
    """Return when the bucket that a time falls into began."""
    return time_ms - time_ms % span_ms


def day_text(time_ms: int) -> str:
    """Return the UTC day of a time as ``2026-11-15``."""
    return (_EPOCH + timedelta(days=time_ms // DAY_MS)).isoformat()

"""Segments: the parts of a log in order, each for one bucket of time, and the rule that finds a reader's position.

Numbers only grow inside an epoch, and an epoch is never used again. A new epoch begins when the server behind the log
is another process than before, since the old one may have lost its last writes.

Invariant of ``locate``: a reader that has seen everything up to (epoch, number) gets exactly the events after it, or a
Gap that says what is lost. A position is never silently reused for other events.

A bucket is [start, start + length) in milliseconds, for day streams a UTC day. Buckets of different lengths compare, so
the length may change at any time. Invariant: the bucket that a log writes to never moves back. A record goes to the
bucket of its own time, but not before the log's floor (the end of the last bucket that was sealed, packed or expired)
and not after the limit (the store's clock plus a margin), so a bucket that has a successor is never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta

import msgspec

from tailrace.log.cursor import Position

RAW, PACKED, SEALED = 0, 1, 2
"""States: runs as written; repacked into few large pieces; runs as written, closed before the bucket's end."""


class Segment(msgspec.Struct, frozen=True):
    """A part of a log: one bucket, one epoch, consecutive in the log's order."""

    index: int
    start_ms: int
    """Start of its bucket."""
    span_ms: int
    """Length of its bucket."""
    epoch: int
    first: int
    """Number of its first event."""
    last: int
    """Number of its last event; grows while the segment is open."""
    events: int
    bytes: int
    """Stored size of its runs."""
    newest_ms: int
    """Running-maximum time of the log when its last event was appended."""
    raw_bytes: int = 0
    """Size of its events without compression, if it is packed."""
    state: int = RAW
    replaced: tuple[tuple[int, int, int], ...] = ()
    """(epoch, first, last) of each segment that a rebuild replaced by this one and the segments after it.

    Entries of its own epoch stand for events that were removed, before its first event or after its last.
    """
    open: bool = False
    """True for the segment that ``apply`` appends to."""

    @property
    def end(self) -> Position:
        """Position after its last event."""
        return Position(self.epoch, self.last)

    @property
    def before(self) -> Position:
        """Position before its first event."""
        return Position(self.epoch, self.first - 1)

    @property
    def end_ms(self) -> int:
        """End of its bucket."""
        return self.start_ms + self.span_ms


class Log(msgspec.Struct, frozen=True):
    """The registry of a log: its segments in order."""

    segments: Sequence[Segment] = ()
    expired: Position = Position.START
    """Position after the last expired event: a reader before it has missed events."""

    @property
    def end(self) -> Position:
        """Position after the last event that the log ever had."""
        return self.segments[-1].end if self.segments else self.expired


class Gap(msgspec.Struct, frozen=True):
    """A range of events that a reader can no longer get: after ``after``, up to and including ``to``."""

    after: Position
    to: Position
    reason: str


class SegmentPosition(msgspec.Struct, frozen=True):
    """Next read of a reader: after ``position`` in segment ``at`` of the list (``len`` of the list at the end)."""

    at: int
    position: Position
    gap: Gap | None = None


def locate(log: Log, after: Position) -> SegmentPosition:
    """Find where a reader that has seen everything up to ``after`` reads next."""
    segments, expired = log.segments, log.expired
    if after == Position.START:
        return SegmentPosition(0, after)
    if not segments:
        seen = expired == Position.START or (after.epoch == expired.epoch and after.number >= expired.number)
        return SegmentPosition(0, after) if seen else SegmentPosition(0, expired, Gap(after, expired, "expired"))
    for i, segment in enumerate(segments):
        for epoch, first, last in segment.replaced:
            if after.epoch == epoch and first <= after.number <= last:
                if epoch == segment.epoch:
                    # These were removed at its beginning or its end: the reader misses nothing.
                    return SegmentPosition(i, after)
                # A reader that had read all of the old ones continues behind the new ones; any other starts them anew.
                whole = (epoch, last) == segment.replaced[-1][::2] and after.number == last
                behind = max(j for j, other in enumerate(segments) if other.epoch == segment.epoch) + 1
                return SegmentPosition(behind, after) if whole else _after_gap(i, segment, after, "rebuilt")
    if after.epoch == expired.epoch and after.number <= expired.number:
        missed = after.number < expired.number
        return _after_gap(0, segments[0], after, "expired") if missed else SegmentPosition(0, segments[0].before)
    mine = [i for i, segment in enumerate(segments) if segment.epoch == after.epoch]
    if not mine:
        return _epoch_gone(log, after)
    if after.number + 1 < segments[mine[0]].first and expired != Position.START:
        # Its segment has expired, and so has one of another epoch behind it.
        return _after_gap(0, segments[0], after, "expired")
    # The last segment that begins at or before the position: the next in the list may be of another epoch.
    at = max((i for i in mine if segments[i].first <= after.number + 1), default=mine[0])
    if after.number > segments[at].last and at == mine[-1] and at + 1 < len(segments):
        return _after_gap(at + 1, segments[at + 1], after, "store-rolled-back")
    return SegmentPosition(at, after)


def _epoch_gone(log: Log, after: Position) -> SegmentPosition:
    """Locate a position whose epoch has no segment left: its segments expired, or the store lost them."""
    reason = "expired" if after.epoch < log.expired.epoch else "store-rolled-back"
    for i, segment in enumerate(log.segments):
        if segment.epoch > after.epoch:
            return _after_gap(i, segment, after, reason)
    end = log.segments[-1].end
    return SegmentPosition(len(log.segments) - 1, end, Gap(after, end, "store-rolled-back"))


def _after_gap(at: int, segment: Segment, after: Position, reason: str) -> SegmentPosition:
    return SegmentPosition(at, segment.before, Gap(after, segment.before, reason))


OrderKey = tuple[int, int]
"""A position that compares within one log: index of the segment, number. Epochs do not, since a rebuild begins one."""
_BEFORE = (-1 << 62, 0)


def key_of(log: Log, position: Position) -> OrderKey:
    if position == Position.START or not log.segments:
        return _BEFORE
    target = locate(log, position)
    if target.at < len(log.segments):
        segment = log.segments[target.at]
        if target.position.epoch == segment.epoch and target.position.number >= segment.first:
            return segment.index, target.position.number
    if target.at == 0:
        return _BEFORE
    end = log.segments[target.at - 1]
    return end.index, end.last


DAY_MS = 86_400_000
_EPOCH = date(1970, 1, 1)


def bucket_start(time_ms: int, span_ms: int = DAY_MS) -> int:
    """Return the start of the bucket that a time falls into."""
    return time_ms - time_ms % span_ms


def day_text(time_ms: int) -> str:
    """Return the UTC day of a time as ``2026-11-15``."""
    return (_EPOCH + timedelta(days=time_ms // DAY_MS)).isoformat()

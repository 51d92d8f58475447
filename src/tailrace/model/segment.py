"""Segments: the ordered pieces of a log, and the rule that finds a reader's place among them.

A log's numbers only grow inside an epoch, and an epoch is never used again. A new epoch begins when the store behind
the log is another process than before, since that one may have lost its last writes.

Invariant of ``locate``: a reader that stands after (epoch, number) is sent to exactly the events after it, or is told
which stretch is gone. Nothing is ever bound to an old place silently.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tailrace.model.cursor import Position


class Segment(msgspec.Struct, frozen=True):
    """A piece of a log: one bucket, one epoch, consecutive in the log's order."""

    index: int
    bucket: int
    epoch: int
    first: int
    """Number of its first event."""
    last: int
    """Number of its last event; grows while the segment is the log's last."""
    events: int
    bytes: int
    """Stored size of its runs."""
    newest_ms: int
    """The log's running-maximum time when its last event was appended."""

    @property
    def end(self) -> Position:
        """The place after its last event."""
        return Position(self.epoch, self.last)

    @property
    def before(self) -> Position:
        """The place before its first event."""
        return Position(self.epoch, self.first - 1)


class Gap(msgspec.Struct, frozen=True):
    """A stretch that a reader can no longer get: after ``after``, up to and including ``to``."""

    after: Position
    to: Position
    reason: str


class Place(msgspec.Struct, frozen=True):
    """Where to read next: after ``position`` in the segment at ``at`` of the list (``len`` of it when at the end)."""

    at: int
    position: Position
    gap: Gap | None = None


def locate(segments: Sequence[Segment], after: Position) -> Place:
    """Find where a reader that has seen everything up to ``after`` goes on."""
    if not segments or after == Position.START:
        return Place(0, after)
    mine = [i for i, segment in enumerate(segments) if segment.epoch == after.epoch]
    if not mine:
        return _epoch_gone(segments, after)
    head = segments[0]
    if mine[0] == 0 and head.index > 0 and after.number < head.before.number:
        return Place(0, head.before, Gap(after, head.before, "expired"))
    for i in mine:
        if after.number < segments[i].last:
            return Place(i, after)
    last = mine[-1]
    if after.number > segments[last].last and last + 1 < len(segments):
        following = segments[last + 1]
        return Place(last + 1, following.before, Gap(after, following.before, "store-rolled-back"))
    return Place(last, after)


def _epoch_gone(segments: Sequence[Segment], after: Position) -> Place:
    """The cursor's epoch has no segment left: its prefix expired, or the store lost it."""
    for i, segment in enumerate(segments):
        if segment.epoch > after.epoch:
            reason = "expired" if i == 0 and segment.index > 0 else "store-rolled-back"
            return Place(i, segment.before, Gap(after, segment.before, reason))
    end = segments[-1].end
    return Place(len(segments) - 1, end, Gap(after, end, "store-rolled-back"))

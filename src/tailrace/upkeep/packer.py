"""Packing: closed segments are rewritten into few large pieces, checked, and swapped in.

For each segment: read its runs, stage the pieces aside, read them back, compare count and checksum of every event with
what was read first, and only then swap, which one atomic function does together with removing the runs and raising the
floor. Invariant: at every moment a reader finds either all runs or all pieces, with the same events; dying at any step
leaves the log as it was or packed, and what was staged ends by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tailrace.model.pack import digest, pack, pieces
from tailrace.model.run import Entry
from tailrace.model.segment import PACKED, SEALED, Log, Segment
from tailrace.stores.registry import Registry
from tailrace.stores.staging import Packed, Piece, Staging
from tailrace.upkeep import failpoint
from tailrace.upkeep.throttle import Throttle

logger = logging.getLogger(__name__)

GROUP_BYTES = 512 << 10
GROUP_SEGMENTS = 64
"""Small segments are packed together, so many or so many stored bytes; a larger one is streamed on its own."""

STEPS = ("read", "staged", "checked", "swapped")
"""The failpoints, in order."""


class Due(msgspec.Struct, frozen=True):
    """A segment to be packed."""

    name: str
    segment: Segment


class Outcome(msgspec.Struct, frozen=True):
    """What was packed, and what was left as it is, by reason."""

    segments: int = 0
    events: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    raw_bytes: int = 0
    left: dict[str, int] = {}

    def __add__(self, other: Outcome) -> Outcome:
        left = {why: self.left.get(why, 0) + other.left.get(why, 0) for why in self.left | other.left}
        return Outcome(
            self.segments + other.segments,
            self.events + other.events,
            self.bytes_before + other.bytes_before,
            self.bytes_after + other.bytes_after,
            self.raw_bytes + other.raw_bytes,
            left,
        )


def due_segments(name: str, log: Log, after_ms: int, now_ms: int) -> Iterator[Due]:
    """Yield the segments of a log that can be packed: not packed yet, and sealed or over for long enough."""
    for segment in log.segments:
        if segment.state == SEALED or (segment.state != PACKED and segment.end_ms + after_ms <= now_ms):
            yield Due(name, segment)


class Packer:
    """Packs segments of one view under one lease."""

    def __init__(
        self,
        registry: Registry,
        staging: Staging,
        *,
        piece_bytes: int,
        after_ms: int,
        clock: Callable[[], int],
        throttle: Throttle | None = None,
        reached: Callable[[str], None] = failpoint.reached,
    ) -> None:
        self._registry, self._staging = registry, staging
        self._piece_bytes, self._after_ms, self._clock = piece_bytes, after_ms, clock
        self._throttle = throttle or Throttle()
        self._reached = reached

    def pack(self, dues: Sequence[Due]) -> Outcome:
        """Pack segments; one that cannot be packed now is left as it is and counted with the reason."""
        total = Outcome()
        for group in _groups(dues):
            if len(group) == 1:
                total += self._pack_large(group[0])
            else:
                total += self._pack_small(group)
            self._throttle.take(len(group), sum(due.segment.bytes for due in group))
        return total

    def _pack_small(self, dues: Sequence[Due]) -> Outcome:
        """Pack segments together: four round trips for all of them."""
        held = self._registry.whole([(due.name, due.segment) for due in dues])
        self._reached("read")
        found: list[tuple[Due, list[Entry], list[Piece]]] = []
        outcome = Outcome()
        for due, entries in zip(dues, held, strict=True):
            if not _complete(due, len_of(entries), entries[-1].last if entries else 0):
                outcome += _left("incomplete")
                continue
            cut = [_piece(due, part, i == 0) for i, part in enumerate(pieces(entries, self._piece_bytes))]
            found.append((due, entries, cut))
        flat = [piece for _, _, cut in found for piece in cut]
        self._staging.stage(flat)
        self._reached("staged")
        back = iter(self._staging.staged(flat))
        packed: list[tuple[Due, Packed]] = []
        for due, entries, cut in found:
            stored = [entry for _ in cut for entry in next(back)]
            if digest(stored) != digest(entries):
                logger.error(
                    "stream %r, segment %d: what was staged differs; left as it was", due.name, due.segment.index
                )
                outcome += _left("differs")
                continue
            packed.append((due, _packed(due, cut, sum(entry.size for entry in entries))))
        return outcome + self._swap(packed)

    def _pack_large(self, due: Due) -> Outcome:
        """Pack one segment piece by piece, each checked before the next is read: memory is that of one piece."""
        cut: list[Piece] = []
        events = raw = last = 0
        for part in pieces(self._registry.entries(due.name, due.segment), self._piece_bytes):
            self._reached("read")
            piece = _piece(due, part, not cut)
            self._staging.stage([piece])
            self._reached("staged")
            if digest(self._staging.staged([piece])[0]) != digest(part):
                logger.error(
                    "stream %r, segment %d: what was staged differs; left as it was", due.name, due.segment.index
                )
                return _left("differs")
            events, raw, last = events + piece.events, raw + sum(entry.size for entry in part), piece.last
            cut.append(msgspec.structs.replace(piece, stored=piece.stored[:0], size=len(piece.stored)))
        if not _complete(due, events, last):
            return _left("incomplete")
        return self._swap([(due, _packed(due, cut, raw))])

    def _swap(self, packed: Sequence[tuple[Due, Packed]]) -> Outcome:
        self._reached("checked")
        outcome = Outcome()
        answers = self._staging.swap([p for _, p in packed], self._after_ms, self._clock())
        for (due, p), answer in zip(packed, answers, strict=True):
            if answer == "ok":
                outcome += Outcome(1, due.segment.events, due.segment.bytes, p.bytes, p.raw_bytes)
            else:
                outcome += _left(answer)
        self._reached("swapped")
        return outcome


def _groups(dues: Sequence[Due]) -> Iterator[list[Due]]:
    group: list[Due] = []
    size = 0
    for due in dues:
        if group and (size + due.segment.bytes > GROUP_BYTES or len(group) == GROUP_SEGMENTS):
            yield group
            group, size = [], 0
        group.append(due)
        size += due.segment.bytes
    if group:
        yield group


def len_of(entries: Sequence[Entry]) -> int:
    """Return how many events entries have."""
    return sum(len(entry.run) for entry in entries)


def _complete(due: Due, events: int, last: int) -> bool:
    """Whether what was read is what the registry says; an open segment may have grown, which the swap finds too."""
    return events == due.segment.events and last == due.segment.last


def _piece(due: Due, entries: Sequence[Entry], is_first: bool) -> Piece:
    stored = pack(entries)
    end = entries[-1]
    return Piece(due.name, due.segment.index, end.last, len_of(entries), end.newest_ms, stored, is_first, len(stored))


def _packed(due: Due, cut: Sequence[Piece], raw_bytes: int) -> Packed:
    return Packed(due.name, due.segment, len(cut), sum(piece.size for piece in cut), raw_bytes)


def _left(why: str) -> Outcome:
    return Outcome(left={why: 1})

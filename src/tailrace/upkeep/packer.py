"""Packing: rewrites closed segments into few large pieces, checks these, and swaps them in.

For each segment: read its runs, stage the pieces, read them back, compare count and checksum of every event with the
runs, and only then swap, which one atomic function does together with removing the runs and raising the floor.
Invariant: at every moment a reader finds either all runs or all pieces, with the same events; a death at any step
leaves the log as it was or packed, and staged pieces expire by themselves.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from tailrace.errors import StoreError
from tailrace.log.pack import digest, pack, pieces
from tailrace.log.run import NumberedRun, encode
from tailrace.log.segment import PACKED, SEALED, Log, Segment
from tailrace.log.store import LogRegistry, PackedPiece, StagedSegment, Staging
from tailrace.upkeep import failpoint
from tailrace.upkeep.job import Throttle

logger = logging.getLogger(__name__)


GROUP_BYTES = 2 << 20
GROUP_SEGMENTS = 256
"""Limits of a group of small segments that are packed together; a larger segment is streamed on its own."""
UNLIMITED = 1 << 62
STEPS = ("read", "staged", "checked", "swapped")
"""The failpoints, in order."""
FAULTS = {
    "differs": "what was staged differs from what was read",
    "incomplete": "it holds less than its registry says",
    "unreadable": "a stored run cannot be read",
}
"""Reasons to leave a segment that stay until it is rebuilt; the others are gone at the next run."""


class DueSegment(msgspec.Struct, frozen=True):
    """A segment to be packed."""

    name: str
    segment: Segment


class PackOutcome(msgspec.Struct, frozen=True):
    """Totals of packed segments, and counts of segments that were left, by reason."""

    segments: int = 0
    events: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    raw_bytes: int = 0
    left: dict[str, int] = {}

    def __add__(self, other: PackOutcome) -> PackOutcome:
        left = {why: self.left.get(why, 0) + other.left.get(why, 0) for why in self.left | other.left}
        return PackOutcome(
            self.segments + other.segments,
            self.events + other.events,
            self.bytes_before + other.bytes_before,
            self.bytes_after + other.bytes_after,
            self.raw_bytes + other.raw_bytes,
            left,
        )


def due_segments(name: str, log: Log, after_ms: int, now_ms: int) -> Iterator[DueSegment]:
    """Yield the segments of a log that are due: not packed, and sealed or ended long enough ago."""
    for segment in log.segments:
        if segment.state == SEALED or (segment.state != PACKED and segment.end_ms + after_ms <= now_ms):
            yield DueSegment(name, segment)


class _Left(Exception):
    """Leaves a segment as it is."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)


class Packer:
    """Packs segments of one view under one lease.

    ``check`` is called between groups, between the pieces of a large segment and while the throttle sleeps; an error
    that it raises ends the packing.
    """

    def __init__(
        self,
        registry: LogRegistry,
        staging: Staging,
        *,
        piece_bytes: int,
        piece_events: int = UNLIMITED,
        after_ms: int,
        clock: Callable[[], int],
        throttle: Throttle | None = None,
        reached: Callable[[str], None] = failpoint.reached,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._registry, self._staging = registry, staging
        self._cut, self._after_ms, self._clock = (piece_bytes, piece_events), after_ms, clock
        self._throttle = throttle or Throttle()
        self._reached, self._check = reached, check

    def pack(self, dues: Iterable[DueSegment]) -> PackOutcome:
        """Pack segments; one that cannot be packed now is left and counted with the reason."""
        total = PackOutcome()
        for group in groups(dues):
            self._next()
            with _uncollected():
                total += self._pack_small(group) if len(group) > 1 else self._pack_large(group[0])
            self._throttle.take(len(group), 0)
        return total

    def _next(self) -> None:
        """Wait for the throttle, and check."""
        self._throttle.wait(self._check)
        self._check()

    def _pack_small(self, dues: Sequence[DueSegment]) -> PackOutcome:
        """Pack segments together: four round trips for all of them."""
        try:
            read = self._registry.read_whole([(due.name, due.segment) for due in dues])
        except StoreError as error:
            if type(error) is not StoreError:
                raise
            # One of them cannot be read: each is packed by itself, so that the others are.
            return sum((self._pack_large(due) for due in dues), PackOutcome())
        self._reached("read")
        found: list[tuple[DueSegment, list[NumberedRun], list[PackedPiece]]] = []
        outcome = PackOutcome()
        for due, entries in zip(dues, read, strict=True):
            why = _unlike(due, _count(entries), entries[-1].last if entries else 0)
            if why:
                outcome += _leave(due, why)
                continue
            cut = [_piece(due, part, i == 0) for i, part in enumerate(pieces(entries, *self._cut))]
            found.append((due, entries, cut))
        flat = [piece for _, _, cut in found for piece in cut]
        self._staging.stage(flat)
        self._reached("staged")
        back = iter(self._staging.read_staged(flat))
        packed: list[tuple[DueSegment, StagedSegment]] = []
        for due, entries, cut in found:
            stored = [entry for _ in cut for entry in next(back)]
            if digest(stored) != digest(entries):
                outcome += _leave(due, "differs")
                continue
            packed.append((due, _packed(due, cut, sum(entry.size for entry in entries))))
        outcome += self._swap(packed)
        self._throttle.take(0, sum(entry.size for entries in read for entry in entries))
        return outcome

    def _pack_large(self, due: DueSegment) -> PackOutcome:
        """Pack one segment piece by piece, each checked before the next is read: memory is that of one piece."""
        try:
            packed = self._stage(due)
        except _Left as left:
            return _leave(due, left.why)
        return self._swap([(due, packed)])

    def _stage(self, due: DueSegment) -> StagedSegment:
        cut: list[PackedPiece] = []
        events = raw = last = 0
        for part in pieces(self._entries(due), *self._cut):
            self._next()
            self._reached("read")
            piece = _piece(due, part, not cut)
            self._staging.stage([piece])
            self._reached("staged")
            if digest(self._staging.read_staged([piece])[0]) != digest(part):
                raise _Left("differs")
            size = sum(entry.size for entry in part)
            events, raw, last = events + piece.events, raw + size, piece.last
            cut.append(msgspec.structs.replace(piece, stored=piece.stored[:0], size=len(piece.stored)))
            self._throttle.take(0, size)
        if why := _unlike(due, events, last):
            raise _Left(why)
        return _packed(due, cut, raw)

    def _entries(self, due: DueSegment) -> Iterator[NumberedRun]:
        try:
            yield from self._registry.entries(due.name, due.segment)
        except StoreError as error:
            if type(error) is not StoreError:
                raise
            logger.error("stream %r, segment %d: %s", due.name, due.segment.index, error)
            raise _Left("unreadable") from None

    def _swap(self, packed: Sequence[tuple[DueSegment, StagedSegment]]) -> PackOutcome:
        self._reached("checked")
        outcome = PackOutcome()
        answers = self._staging.swap([p for _, p in packed], self._after_ms, self._clock())
        for (due, p), answer in zip(packed, answers, strict=True):
            if answer == "ok":
                outcome += PackOutcome(1, due.segment.events, due.segment.bytes, p.bytes, p.raw_bytes)
            else:
                outcome += _leave(due, answer)
        self._reached("swapped")
        return outcome


def groups(
    dues: Iterable[DueSegment], segments: int = GROUP_SEGMENTS, size: int = GROUP_BYTES
) -> Iterator[list[DueSegment]]:
    """Yield groups of segments with at most these counts of segments and, about, of stored bytes."""
    group: list[DueSegment] = []
    stored = 0
    for due in dues:
        if group and (stored + due.segment.bytes > size or len(group) == segments):
            yield group
            group, stored = [], 0
        group.append(due)
        stored += due.segment.bytes
    if group:
        yield group


def _count(entries: Sequence[NumberedRun]) -> int:
    return sum(len(entry.run) for entry in entries)


def _unlike(due: DueSegment, events: int, last: int) -> str:
    """Return the reason if the runs are not those of the registry: an open segment may have grown."""
    if last > due.segment.last:
        return "moved"
    return "" if events == due.segment.events and last == due.segment.last else "incomplete"


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn off the garbage collector: it would scan thousands of lists, none of them garbage."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _piece(due: DueSegment, entries: Sequence[NumberedRun], is_first: bool) -> PackedPiece:
    stored = pack(entries)
    if len(entries) == 1 and len(plain := encode(entries[0].run)) < len(stored):
        stored = plain  # a single small run is smallest as it is
    end = entries[-1]
    return PackedPiece(
        due.name, due.segment.index, end.last, _count(entries), end.newest_ms, stored, is_first, len(stored)
    )


def _packed(due: DueSegment, cut: Sequence[PackedPiece], raw_bytes: int) -> StagedSegment:
    return StagedSegment(due.name, due.segment, len(cut), sum(piece.size for piece in cut), raw_bytes)


def _leave(due: DueSegment, why: str) -> PackOutcome:
    if why in FAULTS:
        logger.error(
            "stream %r, segment %d is left as it is: %s; `tailrace audit` says more, `tailrace rebuild` restores it",
            due.name,
            due.segment.index,
            FAULTS[why],
        )
    return PackOutcome(left={why: 1})

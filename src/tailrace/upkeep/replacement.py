"""Rebuilding a log: which of its segments are replaced, what comes in their place, in which order and which buckets.

What Kafka no longer has stays: segments that hold nothing else are not touched, and single events are carried over.
Invariant: each source keeps its order along the whole log; a bucket never begins before the one in front of it, nor
after the one behind; and whoever stands inside what was replaced is found there by ``locate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

import msgspec

from tailrace.log.columns import TagColumns, TagFields
from tailrace.log.cursor import Position
from tailrace.log.event import Headers, Partition
from tailrace.log.pack import MERGED_BYTES, MERGED_EVENTS, pack, pieces
from tailrace.log.run import NumberedRun, Run
from tailrace.log.segment import DAY_MS, PACKED, Segment
from tailrace.log.store import NewSegment, PackedPiece
from tailrace.upkeep.examine import Bounds, fingerprint


class RestoredEvent(msgspec.Struct, frozen=True, gc=False):
    """An event on its way into a rebuilt log."""

    partition: Partition
    offset: int
    time_ms: int
    key: bytes | None
    headers: Headers
    value: bytes
    newest_ms: int
    """The running-maximum time that it is merged by."""
    start_ms: int
    """When the bucket that it asks for began."""
    span_ms: int
    fields: TagFields | None = None
    """Its tag fields, if the log has such."""


class Survey(msgspec.Struct, frozen=True):
    """What a segment holds that can be read, each event once and in the order of its source."""

    segment: Segment
    sound: bool
    """Whether all of it is as its registry says."""
    retained: bool
    """Whether Kafka still has some of it."""
    events: int
    low: int
    high: int
    """Sums of the fingerprints."""
    bounds: Bounds
    """Lowest and highest offset of each source."""
    carried: Mapping[Partition, int]
    """How many events of each source Kafka no longer has."""


class ReplacedSegments(msgspec.Struct, frozen=True):
    """The segments that are replaced, as a range of the list, and the indexes for what comes in their place."""

    begin: int
    end: int
    top: int
    """The highest index there is; the last new segment gets it."""
    room: int | None
    """How many indexes there are, down from the top; None = as many as are needed."""


def whole_log(surveys: Sequence[Survey], due: int, behind: Segment | None) -> ReplacedSegments:
    """Return the stretch from the first segment that is damaged or that Kafka has something of, to the end.

    Args:
        due: How many segments are about to expire: they are left to it.
        behind: The segment that follows the list.
    """
    begin = next((i for i, s in enumerate(surveys) if i >= due and (s.retained or not s.sound)), len(surveys))
    # Behind the last one there is no room: the place is the pipeline's.
    begin = min(begin, max(0, len(surveys) - 1))
    return _stretch(surveys, begin, len(surveys), behind)


def all_of_it(surveys: Sequence[Survey], behind: Segment | None) -> ReplacedSegments:
    """Return the stretch of the whole log, whatever Kafka has of it."""
    return _stretch(surveys, 0, len(surveys), behind)


def one_day(surveys: Sequence[Survey], day_ms: int, behind: Segment | None) -> ReplacedSegments:
    """Return the stretch of the segments whose buckets touch a UTC day; an empty one in its place if none does."""
    until = day_ms + DAY_MS
    begin = next((i for i, s in enumerate(surveys) if s.segment.end_ms > day_ms), len(surveys))
    end = next((i for i, s in enumerate(surveys) if i >= begin and s.segment.start_ms >= until), len(surveys))
    return _stretch(surveys, begin, end, behind)


def _stretch(surveys: Sequence[Survey], begin: int, end: int, behind: Segment | None) -> ReplacedSegments:
    after = surveys[end].segment if end < len(surveys) else behind
    if end > begin:
        top = surveys[end - 1].segment.index
    elif after is not None:
        top = after.index - 1
    elif surveys:
        return ReplacedSegments(begin, end, surveys[-1].segment.index, 0)
    else:
        # The pipeline may begin the log at 0 at any moment.
        top = -1
    return ReplacedSegments(begin, end, top, None if begin == 0 else top - surveys[begin - 1].segment.index)


class StretchBounds(msgspec.Struct, frozen=True):
    """Which of Kafka's records go into a stretch."""

    above: Mapping[Partition, int]
    """The highest offset in front of the stretch."""
    below: Mapping[Partition, int]
    """The lowest offset behind it."""
    lowest: Mapping[Partition, int]
    """The lowest offset in the whole log: what comes before it may have expired."""
    inside: Bounds
    """What is left inside the stretch."""
    horizon_ms: int
    not_before: int | None = None
    """Buckets that end by then belong to a lost neighbour, unless something of the stretch comes before them."""
    not_after: int | None = None

    def admit(self, source: Partition, offset: int, start_ms: int, span_ms: int) -> bool:
        """Return whether a record, with the bucket it asks for, goes into the stretch."""
        if offset <= self.above.get(source, -1) or offset >= self.below.get(source, offset + 1):
            return False
        end_ms = start_ms + span_ms
        if end_ms <= self.horizon_ms and offset < self.lowest.get(source, offset + 1):
            return False
        low, high = self.inside.get(source, (offset + 1, offset - 1))
        if self.not_before is not None and end_ms <= self.not_before and offset < low:
            return False
        return self.not_after is None or start_ms < self.not_after or offset <= high


def limits(
    surveys: Sequence[Survey], stretch: ReplacedSegments, horizon_ms: int, day_ms: int | None = None
) -> StretchBounds:
    """Return which records go into a stretch; for a day, only those of the day where its neighbours have holes."""
    front, inside, back = surveys[: stretch.begin], surveys[stretch.begin : stretch.end], surveys[stretch.end :]
    above = {source: high for source, (_, high) in _joined(front).items()}
    below = {source: low for source, (low, _) in _joined(back).items()}
    lowest = {source: low for source, (low, _) in _joined(surveys).items()}
    found = StretchBounds(above, below, lowest, _joined(inside), horizon_ms)
    if day_ms is None:
        return found
    edges = inside or back[:1]
    begins = not front and bool(edges) and edges[0].segment.index == 0
    return msgspec.structs.replace(
        found,
        not_before=None if begins or (front and _whole(front, [*front, *edges[:1]])) else day_ms,
        not_after=None if inside and _whole(back, [*inside[-1:], *back]) else day_ms + DAY_MS,
    )


def _joined(surveys: Sequence[Survey]) -> dict[Partition, tuple[int, int]]:
    found: dict[Partition, tuple[int, int]] = {}
    for survey in surveys:
        for source, (low, high) in survey.bounds.items():
            known = found.get(source, (low, high))
            found[source] = min(low, known[0]), max(high, known[1])
    return found


def _whole(neighbours: Sequence[Survey], row: Sequence[Survey]) -> bool:
    """Whether nothing is lost of the neighbours of a stretch: each is sound, and no index is left out in the row."""
    unbroken = all(b.segment.index == a.segment.index + 1 for a, b in pairwise(row))
    return unbroken and all(survey.sound for survey in neighbours)


def merged(
    old: Iterator[RestoredEvent], new: Iterator[RestoredEvent], carried: Mapping[Partition, int]
) -> Iterator[RestoredEvent]:
    """Merge what is carried over with Kafka's records by their running-maximum times.

    Of one source, what is carried over comes first: Kafka has dropped it, so its offsets are lower.
    """
    left = dict(carried)
    a, b = next(old, None), next(new, None)
    while a is not None or b is not None:
        if b is None or (a is not None and (a.newest_ms <= b.newest_ms or left.get(b.partition, 0) > 0)):
            assert a is not None
            left[a.partition] = left.get(a.partition, 0) - 1
            yield a
            a = next(old, None)
        else:
            yield b
            b = next(new, None)


class Buckets:
    """The buckets of new segments, by the pipeline's rule; when there is no room for more, the last one grows.

    Args:
        front: The segment in front of them: what asks for a bucket before its end goes to its bucket.
        room: How many there may be; None = any number.
        lowest: Begin and length of the first one there may be.
        highest: Begin and length of the last one there may be.
    """

    def __init__(
        self,
        front: Segment | None = None,
        room: int | None = None,
        lowest: tuple[int, int] | None = None,
        highest: tuple[int, int] | None = None,
    ) -> None:
        self._front, self._room, self._lowest, self._highest = front, room, lowest, highest
        self.made: list[tuple[int, int]] = []
        """Begin and end of each."""

    def place(self, start_ms: int, span_ms: int) -> int:
        """Return which bucket an event goes to, counted from 0, given the one that it asks for."""
        if self._lowest is not None and start_ms < self._lowest[0]:
            start_ms, span_ms = self._lowest
        if self._highest is not None and start_ms >= self._highest[0]:
            start_ms, span_ms = self._highest
        if not self.made:
            if self._front is not None and start_ms < self._front.end_ms:
                self.made.append((self._front.start_ms, self._front.end_ms))
            else:
                self.made.append((start_ms, start_ms + span_ms))
        elif start_ms >= self.made[-1][1]:
            if len(self.made) == self._room:
                self.made[-1] = self.made[-1][0], start_ms + span_ms
            else:
                self.made.append((start_ms, start_ms + span_ms))
        return len(self.made) - 1


def replaced(front: Sequence[Segment], gone: Sequence[Segment], expired: Position) -> tuple[tuple[int, int, int], ...]:
    """Return (epoch, first, last) of all that is replaced, the last segment of the log's order last.

    A place between two segments, such as the one a reader is sent to after a gap, counts to the one behind it. Nobody
    knows the epoch of a segment whose row cannot be read: it is 0, and left out.
    """
    reached = {expired.epoch: expired.number}
    for segment in front:
        reached[segment.epoch] = max(segment.last, reached.get(segment.epoch, 0))
    found: list[tuple[int, int, int]] = []
    for segment in gone:
        if not segment.epoch:
            continue
        found += [each for each in segment.replaced if each[0] != segment.epoch]
        first = min(segment.first, reached.get(segment.epoch, 0) + 1)
        last = max(segment.last, *(each[2] for each in segment.replaced if each[0] == segment.epoch), 0)
        if found and found[-1][0] == segment.epoch and found[-1][2] == first - 1:
            first = found.pop()[1]
        found.append((segment.epoch, first, last))
        reached[segment.epoch] = last
    return tuple(found)


NO_ROOM, DIFFERS = "no-room", "differs"
"""Why events cannot be staged: there is no place for them, or what is stored is not what was written."""


class _Part(msgspec.Struct):
    """A new segment as it grows."""

    first: int
    last: int = 0
    newest_ms: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    pieces: int = 0


class SegmentDraft:
    """The new segments of one log, staged piece by piece as their events come; the number of each is counted from 1."""

    def __init__(
        self,
        name: str,
        buckets: Buckets,
        newest_ms: int,
        latest_ms: int,
        piece_bytes: int,
        stage: Callable[[PackedPiece, Sequence[NumberedRun]], bool] | None,
    ) -> None:
        self._name, self._buckets, self._piece_bytes, self._stage = name, buckets, piece_bytes, stage
        self._newest_ms, self._latest_ms = newest_ms, latest_ms
        self.parts: list[_Part] = []
        self.events = self.low = self.high = 0

    def write(self, events: Iterator[RestoredEvent], has_room: bool) -> str:
        """Stage all events; return why that is not possible, or nothing."""
        placed = ((self._buckets.place(event.start_ms, event.span_ms), event) for event in events)
        for at, group in groupby(placed, key=lambda pair: pair[0]):
            if not has_room:
                return NO_ROOM
            part = _Part(self.events + 1)
            self.parts.append(part)
            for entries in pieces(self._entries(event for _, event in group), self._piece_bytes):
                end = entries[-1]
                part.last, part.newest_ms = end.last, end.newest_ms
                part.raw_bytes += sum(entry.size for entry in entries)
                if self._stage is not None:
                    stored = pack(entries)
                    n = end.last - entries[0].first + 1
                    is_first = part.pieces == 0
                    piece = PackedPiece(self._name, at, end.last, n, end.newest_ms, stored, is_first, len(stored))
                    part.bytes += len(stored)
                    if not self._stage(piece, entries):
                        return DIFFERS
                part.pieces += 1
        return ""

    def segments(self, epoch: int, top: int, gone: tuple[tuple[int, int, int], ...]) -> list[NewSegment]:
        """Return the new segments, the last one with the highest index."""
        found: list[NewSegment] = []
        lowest = top - len(self.parts) + 1
        for i, (part, (start, end)) in enumerate(zip(self.parts, self._buckets.made, strict=True)):
            segment = Segment(
                index=lowest + i,
                start_ms=start,
                span_ms=end - start,
                epoch=epoch,
                first=part.first,
                last=part.last,
                events=part.last - part.first + 1,
                bytes=part.bytes,
                newest_ms=part.newest_ms,
                raw_bytes=part.raw_bytes,
                state=PACKED,
                replaced=gone if i == 0 else (),
            )
            found.append(NewSegment(segment, i, part.pieces))
        return found

    def _entries(self, events: Iterable[RestoredEvent]) -> Iterator[NumberedRun]:
        """Make runs of neighbours of one source."""
        for source, group in groupby(events, key=lambda event: event.partition):
            run: list[RestoredEvent] = []
            size = 0
            for event in group:
                run.append(event)
                size += len(event.value) + len(event.key or b"") + 16
                if len(run) == MERGED_EVENTS or size >= MERGED_BYTES:
                    yield self._entry(source, run, size)
                    run, size = [], 0
            if run:
                yield self._entry(source, run, size)

    def _entry(self, source: Partition, events: Sequence[RestoredEvent], size: int) -> NumberedRun:
        label, first = str(source), self.events + 1
        for e in events:
            low, high = fingerprint(label, e.offset, e.time_ms, e.key, e.headers, e.value, e.fields, numbered=True)
            self.low, self.high = self.low + low, self.high + high
        self.events += len(events)
        newest_ms = max(e.time_ms if e.fields is None else e.fields.ms for e in events)
        self._newest_ms = max(self._newest_ms, min(self._latest_ms, newest_ms))
        keys, rows = [e.key for e in events], [e.fields for e in events if e.fields is not None]
        offsets, times = [e.offset for e in events], [e.time_ms for e in events]
        run = Run.of(
            source,
            offsets,
            times,
            keys[:1] if keys.count(keys[0]) == len(keys) else keys,
            [e.headers for e in events] if any(e.headers for e in events) else None,
            [e.value for e in events],
            TagColumns.of(rows, offsets, times) if rows else None,
        )
        return NumberedRun(first, self.events, self._newest_ms, run, size)

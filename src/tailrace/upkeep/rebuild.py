"""Rebuilds: restores from Kafka the events that a view has lost, while the pipeline and all readers go on.

An audit finds the names with faults; without any, nothing is done. Then one Spark job restores them. Invariant: a
rebuild that dies is begun again from the beginning, and its finished part stays.

For one log, the rules here choose the segments to replace, and draft the new ones with their events, order and buckets.
Events that Kafka no longer has stay: segments of nothing else are not touched, and single events are carried over.
Invariant: each partition keeps its order along the whole log; a bucket never begins before the one in front of it, nor
after the one behind; and ``locate`` finds every reader's position inside the replaced part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import msgspec

from tailrace.config.settings import Settings
from tailrace.config.values import milliseconds
from tailrace.errors import StoreError, StreamNotFound
from tailrace.log.cursor import Position
from tailrace.log.event import Partition
from tailrace.log.pack import MERGED_BYTES, MERGED_EVENTS, pieces
from tailrace.log.run import NumberedRun, Run, TagColumns
from tailrace.log.segment import DAY_MS, PACKED, Segment
from tailrace.log.store import NewSegment, Staging
from tailrace.upkeep.audit import Auditor
from tailrace.upkeep.copy import (
    ATTEMPTS,
    DIFFERS,
    MOVED,
    NO_ROOM,
    REBUILT,
    Assignment,
    History,
    RebuildPlan,
    RebuildStart,
    Restored,
    RestoredEvent,
    WantedNames,
)
from tailrace.upkeep.examine import Bounds, fingerprint
from tailrace.upkeep.job import JobLease, now_ms
from tailrace.upkeep.pack import SegmentStage
from tailrace.upkeep.spark import spark_for
from tailrace.valkey.shards import Shards
from tailrace.view import View


class Rebuilding:
    """One run of a rebuild; ``facts`` has the work so far, also after a failure.

    It restores one stream (``name``) or all, one UTC day of it or all days, or only logs with events of a source, whose
    erased events come back. Raises BadRequest if the view has no copy of Kafka's records, or for such an option that
    makes no sense for it. Without ``spark``, a session is started, and ended.
    """

    name = "rebuild"
    whole = True
    """Every run leaves its report, also one of a single name."""

    def __init__(
        self,
        settings: Settings,
        view: View,
        *,
        name: str | None = None,
        day_ms: int | None = None,
        source: str | None = None,
        spark: Any = None,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self._copy = view.copy(settings)
        self._copy.require(day=day_ms, source=source)
        self.view = view.name
        self._settings, self._name, self._day_ms = settings, name, day_ms
        self._source, self._spark, self._clock = source, spark, clock
        self._names = 0
        self.restored: dict[str, Restored] = {}

    def facts(self) -> dict[str, object]:
        outcomes = self.restored.values()
        rebuilt = [each for each in outcomes if each.verdict == REBUILT]
        left = Counter(each.verdict for each in outcomes if each.verdict != REBUILT)
        return {"names": self._names, "rebuilt": len(rebuilt), **self._copy.facts(rebuilt, dict(left))}

    def look(self, shards: Shards) -> dict[str, object]:
        """Return what would be done, and change nothing."""
        self.run(shards, None)
        return self.facts()

    def run(self, shards: Shards, lease: JobLease | None) -> None:
        """Restore the logs with faults; without a lease, change nothing.

        Logs that were restored before it failed stay so. StreamNotFound: neither the view nor Kafka has the stream.
        """
        requested = None if self._name is None else frozenset([self._name])
        if self._source is not None and requested is None:
            requested = self._copy.names_of(shards, self._source)
        with spark_for(self._settings, self._spark) as spark:
            auditor = Auditor(self._settings, spark, self._copy, self._clock, brought_back=self._source)
            suspects, self._names = auditor.suspects(shards, WantedNames(names=requested))
            if self._name is not None and not self._names:
                raise StreamNotFound(self._name)
            if suspects:
                self._restore(spark, shards, frozenset(suspects), lease)
        if lease is not None and self._source is not None:
            lease.check()
            self._copy.bring_back(shards, lease.token, self._source, requested or ())

    def _restore(self, spark: Any, shards: Shards, names: frozenset[str], lease: JobLease | None) -> None:
        """Restore logs; those that changed meanwhile once more."""
        if lease is not None:
            lease.check()
        token = None if lease is None else lease.token
        start = self._copy.begin(shards, token, self._clock())
        history = History(self._settings, spark, self._copy, self._source)
        for _ in range(ATTEMPTS):
            rows, _work = history.run(
                shards,
                WantedNames(names=names),
                lambda work, records: self._copy.rebuild(spark, self._plan(work, start, token), records),
                start.marks,
            )
            self.restored |= {row.name: self._copy.outcome(*row) for row in rows}
            names = frozenset(name for name in names if self.restored[name].verdict == MOVED)
            if not names:
                break
        if wrong := [each.name for each in self.restored.values() if each.verdict == DIFFERS]:
            raise StoreError(f"what was staged for {wrong[0]!r} is not what was written: is the store sound?")

    def _plan(self, work: Assignment, start: RebuildStart, token: int | None) -> RebuildPlan:
        upkeep = self._settings.upkeep
        return RebuildPlan(
            work=work,
            start=start,
            token=token or 0,
            dry_run=token is None,
            now_ms=self._clock(),
            day_ms=self._day_ms,
            piece_bytes=upkeep.segment_bytes,
            remember_ms=milliseconds(upkeep.remember),
        )


class Survey(msgspec.Struct, frozen=True):
    """The readable events of a segment, each once and in the order of its partition."""

    segment: Segment
    sound: bool
    """True if the segment agrees with its registry."""
    retained: bool
    """True if Kafka still has some of the events."""
    events: int
    low: int
    high: int
    """Sums of the fingerprints."""
    bounds: Bounds
    """Lowest and highest offset of each partition."""
    carried: Mapping[Partition, int]
    """Events of each partition that Kafka no longer has."""


class ReplacedPart(msgspec.Struct, frozen=True):
    """The replaced segments, as a range of the list, and the indexes for the new ones."""

    begin: int
    end: int
    top: int
    """The highest index, which the last new segment gets."""
    room: int | None
    """Number of indexes, down from the top; None = as many as are needed."""


def faulty_part(surveys: Sequence[Survey], due: int, behind: Segment | None) -> ReplacedPart:
    """Return the part from the first segment that is damaged or has events of Kafka's, to the end.

    The first ``due`` segments are about to expire, and stay; ``behind`` is the segment that follows the list.
    """
    begin = next((i for i, s in enumerate(surveys) if i >= due and (s.retained or not s.sound)), len(surveys))
    # Behind the last segment there is no room: the next index is the pipeline's.
    begin = min(begin, max(0, len(surveys) - 1))
    return replaced_part(surveys, begin, len(surveys), behind)


def one_day(surveys: Sequence[Survey], day_ms: int, behind: Segment | None) -> ReplacedPart:
    """Return the segments whose buckets touch a UTC day; an empty part in their place if none does."""
    until = day_ms + DAY_MS
    begin = next((i for i, s in enumerate(surveys) if s.segment.end_ms > day_ms), len(surveys))
    end = next((i for i, s in enumerate(surveys) if i >= begin and s.segment.start_ms >= until), len(surveys))
    return replaced_part(surveys, begin, end, behind)


def replaced_part(surveys: Sequence[Survey], begin: int, end: int, behind: Segment | None) -> ReplacedPart:
    after = surveys[end].segment if end < len(surveys) else behind
    if end > begin:
        top = surveys[end - 1].segment.index
    elif after is not None:
        top = after.index - 1
    elif surveys:
        return ReplacedPart(begin, end, surveys[-1].segment.index, 0)
    else:
        # The pipeline may begin the log at 0 at any moment.
        top = -1
    return ReplacedPart(begin, end, top, None if begin == 0 else top - surveys[begin - 1].segment.index)


class RecordBounds(msgspec.Struct, frozen=True):
    """The bounds of Kafka's records that belong into the replaced part of a log."""

    above: Mapping[Partition, int]
    """Highest offset in front of the part."""
    below: Mapping[Partition, int]
    """Lowest offset behind it."""
    lowest: Mapping[Partition, int]
    """Lowest offset in the whole log: earlier records may have expired."""
    inside: Bounds
    """Offsets that are left inside the part."""
    horizon_ms: int
    not_before: int | None = None
    """Buckets that end by then belong to a lost neighbour, unless an event of the part comes before them."""
    not_after: int | None = None

    def admit(self, partition: Partition, offset: int, start_ms: int, span_ms: int) -> bool:
        """Return whether a record, with the bucket that it asks for, belongs into the part."""
        if offset <= self.above.get(partition, -1) or offset >= self.below.get(partition, offset + 1):
            return False
        end_ms = start_ms + span_ms
        if end_ms <= self.horizon_ms and offset < self.lowest.get(partition, offset + 1):
            return False
        low, high = self.inside.get(partition, (offset + 1, offset - 1))
        if self.not_before is not None and end_ms <= self.not_before and offset < low:
            return False
        return self.not_after is None or start_ms < self.not_after or offset <= high


def record_bounds(
    surveys: Sequence[Survey], part: ReplacedPart, horizon_ms: int, day_ms: int | None = None
) -> RecordBounds:
    """Return the bounds of a part's records; for a day, only those of the day where its neighbours have holes."""
    front, inside, back = surveys[: part.begin], surveys[part.begin : part.end], surveys[part.end :]
    above = {partition: high for partition, (_, high) in _joined(front).items()}
    below = {partition: low for partition, (low, _) in _joined(back).items()}
    lowest = {partition: low for partition, (low, _) in _joined(surveys).items()}
    bounds = RecordBounds(above, below, lowest, _joined(inside), horizon_ms)
    if day_ms is None:
        return bounds
    edges = inside or back[:1]
    begins = not front and bool(edges) and edges[0].segment.index == 0
    return msgspec.structs.replace(
        bounds,
        not_before=None if begins or (front and _whole(front, [*front, *edges[:1]])) else day_ms,
        not_after=None if inside and _whole(back, [*inside[-1:], *back]) else day_ms + DAY_MS,
    )


def _joined(surveys: Sequence[Survey]) -> dict[Partition, tuple[int, int]]:
    found: dict[Partition, tuple[int, int]] = {}
    for survey in surveys:
        for partition, (low, high) in survey.bounds.items():
            lowest, highest = found.get(partition, (low, high))
            found[partition] = min(low, lowest), max(high, highest)
    return found


def _whole(neighbours: Sequence[Survey], row: Sequence[Survey]) -> bool:
    """Return whether nothing is lost of a part's neighbours: each is sound, and the row lacks no index."""
    unbroken = all(b.segment.index == a.segment.index + 1 for a, b in pairwise(row))
    return unbroken and all(survey.sound for survey in neighbours)


def merged(
    old: Iterator[RestoredEvent], new: Iterator[RestoredEvent], carried: Mapping[Partition, int]
) -> Iterator[RestoredEvent]:
    """Merge events that are carried over with Kafka's records by their running-maximum times.

    Of one partition, the former come first: Kafka has dropped them, so their offsets are lower.
    """
    left = Counter(carried)
    a, b = next(old, None), next(new, None)
    while a is not None or b is not None:
        if b is None or (a is not None and (a.newest_ms <= b.newest_ms or left[b.partition] > 0)):
            assert a is not None
            left[a.partition] -= 1
            yield a
            a = next(old, None)
        else:
            yield b
            b = next(new, None)


class Buckets:
    """The buckets of new segments, by the pipeline's rule; when there is no ``room`` for more, the last one grows.

    An event that asks for a bucket before the end of the segment in front of them goes to that segment's bucket. Of the
    first and of the last possible bucket, ``lowest`` and ``highest`` are begin and length.
    """

    def __init__(
        self, front: Segment | None, room: int | None, lowest: tuple[int, int], highest: tuple[int, int]
    ) -> None:
        self._front, self._room, self._lowest, self._highest = front, room, lowest, highest
        self.made: list[tuple[int, int]] = []
        """Begin and end of each bucket."""

    def place(self, start_ms: int, span_ms: int) -> int:
        """Return the index of an event's bucket, given the one that it asks for."""
        if start_ms < self._lowest[0]:
            start_ms, span_ms = self._lowest
        if start_ms >= self._highest[0]:
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
    """Return (epoch, first, last) of all replaced events, in the order of the log.

    A position between two segments, such as the one after a gap, counts to the segment behind it. A segment whose row
    cannot be read has no known epoch: it is 0, and left out.
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


class SegmentDraft:
    """The new segments of one log, staged piece by piece as their events come; events are numbered from 1.

    A dry run has no ``staging``. ``staged`` is called when a piece is written, and not yet compared.
    """

    def __init__(
        self,
        name: str,
        buckets: Buckets,
        newest_ms: int,
        latest_ms: int,
        piece_bytes: int,
        staging: Staging | None,
        staged: Callable[[], None],
    ) -> None:
        self._name, self._buckets, self._piece_bytes, self._staging = name, buckets, piece_bytes, staging
        self._newest_ms, self._latest_ms, self._staged = newest_ms, latest_ms, staged
        self.parts: list[SegmentStage] = []
        self.events = self.low = self.high = 0

    def write(self, events: Iterator[RestoredEvent], has_room: bool) -> str:
        """Stage all events; return the reason if that is not possible, else nothing."""
        placed = ((self._buckets.place(event.start_ms, event.span_ms), event) for event in events)
        for at, group in groupby(placed, key=lambda pair: pair[0]):
            if not has_room:
                return NO_ROOM
            part = SegmentStage(self._staging, self._name, at, self._staged)
            self.parts.append(part)
            for entries in pieces(self._entries(event for _, event in group), self._piece_bytes):
                if not part.write(entries):
                    return DIFFERS
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
                events=part.events,
                bytes=part.bytes,
                newest_ms=part.newest_ms,
                raw_bytes=part.raw_bytes,
                state=PACKED,
                replaced=gone if i == 0 else (),
            )
            found.append(NewSegment(segment, i, part.pieces))
        return found

    def _entries(self, events: Iterable[RestoredEvent]) -> Iterator[NumberedRun]:
        """Yield runs of neighbours of one partition."""
        for partition, group in groupby(events, key=lambda event: event.partition):
            run: list[RestoredEvent] = []
            size = 0
            for event in group:
                run.append(event)
                size += len(event.value) + len(event.key or b"") + 16
                if len(run) == MERGED_EVENTS or size >= MERGED_BYTES:
                    yield self._entry(partition, run, size)
                    run, size = [], 0
            if run:
                yield self._entry(partition, run, size)

    def _entry(self, partition: Partition, events: Sequence[RestoredEvent], size: int) -> NumberedRun:
        label, first = str(partition), self.events + 1
        for e in events:
            low, high = fingerprint(label, e.offset, e.time_ms, e.key, e.headers, e.value, e.fields, numbered=True)
            self.low, self.high = self.low + low, self.high + high
        self.events += len(events)
        newest_ms = max(e.time_ms if e.fields is None else e.fields.ms for e in events)
        self._newest_ms = max(self._newest_ms, min(self._latest_ms, newest_ms))
        keys, rows = [e.key for e in events], [e.fields for e in events if e.fields is not None]
        offsets, times = [e.offset for e in events], [e.time_ms for e in events]
        run = Run.of(
            partition,
            offsets,
            times,
            keys[:1] if keys.count(keys[0]) == len(keys) else keys,
            [e.headers for e in events] if any(e.headers for e in events) else None,
            [e.value for e in events],
            TagColumns.of(rows, offsets, times) if rows else None,
        )
        return NumberedRun(first, self.events, self._newest_ms, run, size)

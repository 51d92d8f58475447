"""Upkeep of tags: erasing a source from them, and the copy of Kafka's records in their logs.

*Erasing* removes a source's events for good, while everything runs. Every shard begins a new epoch first, so that no
segment of an earlier one is written again. Then, tag by tag, the job stores up to where the source is erased, and
rewrites the segments without those events, the oldest first. Invariant: all other events keep their numbers, in the log
and in the tag, so cursors stay valid; the source's own numbers go on after the erased ones; and the next run completes
one that died.

*Numbering* of a rebuilt tag is gapless for every source and anchored where its live numbers begin. Invariant: the last
rebuilt event of a source has the number before its first live one, or, without one, the last that was given out; so no
live event is renumbered. The events before it are numbered downwards, without a gap, so one that was tagged later than
written may have a number below 1. The last numbers of sources are read before the registry of the log: a source with
live events by then has its first one in the log, and one without had come as far as was read.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

import msgspec

from tailrace.config.settings import Settings
from tailrace.config.values import milliseconds
from tailrace.errors import BadRequest, StoreError
from tailrace.log.event import Partition
from tailrace.log.pack import pieces
from tailrace.log.run import NumberedRun, Run, TagFields
from tailrace.log.segment import Segment
from tailrace.log.store import NewSegment, Staging
from tailrace.upkeep.copy import Body, RestoredEvent, SpooledRecord, ViewCopy
from tailrace.upkeep.examine import MOST_ODD, ExaminedEntry, ExaminedLog, Finding, read_logs, read_segment
from tailrace.upkeep.job import JobLease, buckets_of, failpoint, now_ms
from tailrace.upkeep.log_copy import LogCopy
from tailrace.upkeep.pack import SegmentStage
from tailrace.valkey.shards import Shards
from tailrace.views import tags
from tailrace.views.tags.model import Erasure, SourceProgress, erase_from, shrink_segment, timeuuid_ms, widen_neighbour
from tailrace.views.tags.store import VIEW, encode, progress_of, read_all_progress, read_erasures, tags_of
from tailrace.views.tags.write import TagsPlan

logger = logging.getLogger(__name__)

ERASED, UNREADABLE, MOVED = "cleaned", "unreadable", "moved"
"""Verdicts on a tag: the source is gone from it; or left, in part, since a run cannot be read, or was changed."""
STEPS = ("cleaned", "thin-staged", "thinned")
"""The failpoints of erasing from logs, in order."""


class TagCopy(ViewCopy):
    """The copy of Kafka's records in tags, wherever it rests."""

    refused: ClassVar[Mapping[str, str]] = {
        "day": "a tag is rebuilt as a whole, not a day of it: its numbers go on from day to day"
    }

    plan: TagsPlan

    def tags_of(self, shards: Shards, source: str) -> Iterable[str]:
        """Return the tags that have had events of a source; by default those with logs."""
        return tags_of(shards, source)

    def erased(self, shards: Shards, names: Collection[str] | None) -> Mapping[str, Mapping[str, Erasure]]:
        return read_erasures(shards, names)

    def names_of(self, shards: Shards, source: str) -> frozenset[str]:
        erased = [tag for tag, sources in read_erasures(shards).items() if source in sources]
        if not (names := frozenset([*erased, *self.tags_of(shards, source)])):
            raise BadRequest(f"no tag has, or had, events of the source {source!r}")
        return names

    def bring_back(self, shards: Shards, token: int, source: str, names: Iterable[str]) -> None:
        for tag in names:
            Staging(shards, self.view, token).record_erasure(tag, source, b"")


class TagLogCopy(TagCopy, LogCopy):
    def numbering(self, shards: Shards, name: str, now_ms: int) -> Anchor:
        return Anchor(read_all_progress(shards, name), now_ms + self.plan.future_ms)

    def check_numbers(self, shards: Shards, log: ExaminedLog, counted: dict[str, int]) -> Iterator[Finding]:
        progress = progress_of(shards, log.name, counted)
        issued = {source: each.number for source, each in progress if each.number != counted[source]}
        if any(number > counted[source] for source, number in issued.items()):
            # The shard may have gone on since the log was read: its log has these events by now.
            newest, now = log.log.segments[-1].index, read_logs(shards, self.view, [log.name])[0].log
            for segment in (segment for segment in now.segments if segment.index >= newest):
                for _, _, fields in _tag_fields(read_segment(shards, self.view, log.name, segment)):
                    if fields.source in issued and counted[fields.source] < fields.number <= issued[fields.source]:
                        counted[fields.source] = fields.number
        wrong = ((source, number) for source, number in issued.items() if counted[source] != number)
        for source, number in islice(wrong, MOST_ODD):
            detail = f"the last event has number {counted[source]}, and the shard has given out {number}"
            yield Finding("numbers", log.name, "", source, number, counted[source], detail)


def _tag_fields(entries: Iterable[ExaminedEntry]) -> Iterator[tuple[Partition, int, TagFields]]:
    """Yield partition, offset and fields of every event."""
    for entry in entries:
        for run in (each.run for each in entry.runs):
            if run.tag_columns is not None:
                for offset, fields in zip(run.offsets, run.tag_columns.rows(run.offsets, run.times), strict=True):
                    yield run.partition, offset, fields


class TagErasure(msgspec.Struct, frozen=True):
    tag: str
    verdict: str
    events: int
    segments: int
    """Segments that they were in."""


class SourceEvents(msgspec.Struct):
    marks: Mapping[Partition, int]
    """Marks of the tag's shard; events beyond them are not erased."""
    places: set[int] = set()
    """Indexes of the segments, or starts of the buckets, that they are in."""
    offsets: dict[Partition, int] = {}
    """Last offset of each partition."""
    number: int = 0
    """The highest."""
    events: int = 0
    unreadable: int = 0

    def add(self, place: int, partition: Partition, offset: int, number: int) -> None:
        self.events += 1
        self.places.add(place)
        self.offsets[partition] = max(offset, self.offsets.get(partition, offset))
        self.number = max(number, self.number)


class Erasing(ABC):
    """One run of the job that erases a source from one tag, or from all; it calls ``reached`` at each failpoint."""

    name = "cleanup"
    view = VIEW
    whole = True

    def __init__(
        self, settings: Settings, source: str, tag: str | None = None, *, reached: Callable[[str], None] = failpoint
    ) -> None:
        self._settings, self._source, self._tag, self._reached = settings, source, tag, reached
        self.erased: list[TagErasure] = []

    def look(self, shards: Shards) -> dict[str, object]:
        """Count the events that would be erased, and change nothing; raise BadRequest if no such tag has any."""
        for tag in self._wanted(shards):
            self._add(tag, ERASED, self._find(shards, tag), "would be erased")
        return self.facts()

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Erase the source; raise BadRequest if no such tag has its events, StaleUpkeep if another job took over."""
        wanted = self._wanted(shards)
        staging = Staging(shards, VIEW, lease.token)
        self._begin(staging)
        for tag in wanted:
            lease.check()
            found = self._find(shards, tag)
            verdict = UNREADABLE if found.unreadable else ERASED
            if found.events:
                erased = self._remember(shards, staging, tag, found)
                verdict = self._erase(shards, staging, lease, tag, found, erased)
            self._add(tag, verdict, found, "erased")

    @abstractmethod
    def _tags(self, shards: Shards) -> Iterable[str]:
        """Return the tags that have had events of the source."""

    def _begin(self, staging: Staging) -> None:
        """Prepare the shards."""
        return

    @abstractmethod
    def _find(self, shards: Shards, tag: str) -> SourceEvents:
        """Find the source's events in a tag."""

    @abstractmethod
    def _erase(
        self, shards: Shards, staging: Staging, lease: JobLease, tag: str, found: SourceEvents, erased: Erasure
    ) -> str:
        """Erase the events that were found; return the verdict."""

    def facts(self) -> dict[str, object]:
        return {
            "source": self._source,
            "tags": len(self.erased),
            "events": sum(each.events for each in self.erased),
            "segments": sum(each.segments for each in self.erased),
            "left": dict(Counter(each.verdict for each in self.erased if each.verdict != ERASED)),
        }

    def _wanted(self, shards: Shards) -> list[str]:
        """Return those of the source's tags that it is to be erased from; raise BadRequest if there is none."""
        found = [tag for tag in self._tags(shards) if self._tag is None or tag == self._tag]
        if not found:
            where = "no tag has" if self._tag is None else f"the tag {self._tag!r} has no"
            raise BadRequest(f"{where} events of the source {self._source!r}")
        return found

    def _remember(self, shards: Shards, staging: Staging, tag: str, found: SourceEvents) -> Erasure:
        """Store up to where the source is erased from a tag, before any event goes."""
        before = read_erasures(shards, [tag]).get(tag, {}).get(self._source, Erasure(0, {}))
        marks = {str(partition): max(end, found.marks.get(partition, end)) for partition, end in found.offsets.items()}
        erased = Erasure(max(before.number, found.number), {**before.marks, **marks})
        staging.record_erasure(tag, self._source, encode(erased))
        self._reached("cleaned")
        return erased

    def _add(self, tag: str, verdict: str, found: SourceEvents, deed: str) -> None:
        if not found.events and verdict == ERASED:
            return
        self.erased.append(TagErasure(tag, verdict, found.events, len(found.places)))
        logger.info("tag %r: %d event(s) of %r %s; %s", tag, found.events, self._source, deed, verdict)


def erasing(settings: Settings, source: str, tag: str | None, **options: Any) -> Erasing:
    """Return the job that erases a source, for where tags rest; raise BadRequest if there is no view of tags."""
    if settings.tags.store != "cassandra" or VIEW not in settings.pipeline.views:
        buckets_of(settings, tags.VIEW)
        return LogErasing(settings, source, tag, **options)
    from tailrace.views.tags.rows.upkeep import RowErasing

    return RowErasing(settings, source, tag, **options)


class _Unreadable(Exception):
    """A stored run that cannot be read."""


class LogErasing(Erasing):
    _opened: Sequence[tuple[int, Mapping[Partition, int]]] | None = None
    """The new epoch and the marks of each shard; None in a dry run."""
    _segments: Sequence[Segment] = ()
    """Segments of the tag that nothing writes any more."""

    def _begin(self, staging: Staging) -> None:
        self._opened = staging.reopen(now_ms() // 1000)

    def _tags(self, shards: Shards) -> Iterable[str]:
        return tags_of(shards, self._source)

    def _find(self, shards: Shards, tag: str) -> SourceEvents:
        log = read_logs(shards, VIEW, [tag])[0]
        epoch, marks = self._opened[log.shard] if self._opened else (1 << 62, {})
        self._segments = [segment for segment in log.log.segments if segment.epoch < epoch]
        found = SourceEvents(marks)
        for segment in self._segments:
            for entry in read_segment(shards, VIEW, tag, segment):
                found.unreadable += bool(entry.damage)
                for partition, offset, fields in _tag_fields([entry]):
                    if fields.source == self._source:
                        found.add(segment.index, partition, offset, fields.number)
        return found

    def _erase(
        self, shards: Shards, staging: Staging, lease: JobLease, tag: str, found: SourceEvents, erased: Erasure
    ) -> str:
        """Rewrite the segments with events of the source, the oldest first; return the verdict."""
        segments, remember_ms = list(self._segments), milliseconds(self._settings.upkeep.remember)
        for at, segment in enumerate(self._segments):
            if segment.index not in found.places:
                continue
            try:
                left = self._stage(shards, staging, tag, segment, erased)
            except _Unreadable as error:
                logger.error("tag %r, segment %d: %s; `tailrace rebuild tags` restores it", tag, segment.index, error)
                return UNREADABLE
            neighbour = widen_neighbour([s for s in segments if s.events], segment) if left is None else None
            self._reached("thin-staged")
            if staging.thin(tag, segment, left, neighbour, remember_ms) != "ok":
                return MOVED
            self._reached("thinned")
            if left is not None:
                segments[at] = left.segment
            else:
                segments[at] = msgspec.structs.replace(segment, events=0)
                segments = [s if neighbour is None or s.index != neighbour.index else neighbour for s in segments]
        return ERASED

    def _stage(
        self, shards: Shards, staging: Staging, tag: str, segment: Segment, erased: Erasure
    ) -> NewSegment | None:
        """Stage the rest of a segment; None if there is none."""
        stage = SegmentStage(staging, tag, segment.index)
        for part in pieces(self._rest(shards, tag, segment, erased), self._settings.upkeep.segment_bytes):
            if not stage.write(part):
                raise StoreError(f"what was staged for {tag!r} is not what was written: is the store sound?")
        if not stage.pieces:
            return None
        left = shrink_segment(segment, stage.first, stage.last, stage.events)
        left = msgspec.structs.replace(left, bytes=stage.bytes, raw_bytes=stage.raw_bytes)
        return NewSegment(left, segment.index, stage.pieces)

    def _rest(self, shards: Shards, tag: str, segment: Segment, erased: Erasure) -> Iterator[NumberedRun]:
        for entry in read_segment(shards, VIEW, tag, segment):
            if entry.damage:
                raise _Unreadable(entry.damage)
            for run in entry.runs:
                yield from erase_from(run, {self._source: erased})


class Anchor:
    """The ``Numbering`` of one tag, by its sources' progress, read before its log; no timeuuid beyond ``latest_ms``."""

    def __init__(self, progress: Mapping[str, SourceProgress], latest_ms: int) -> None:
        self._numbered_sources, self._latest_ms = progress.keys(), latest_ms
        self._top_ms = max((each.ms for each in progress.values()), default=SourceProgress().ms)
        """No event of the tag had a later timeuuid when its numbers were read."""
        self._ends = {source: each.number for source, each in progress.items()}
        """For each source the number of its last rebuilt event; 0 where nothing is said."""
        self._ceilings: dict[Partition, int] = {}
        """For each partition with live events the millisecond of the first one: no rebuilt event is later."""
        self._live: set[str] = set()
        self._front: dict[str, SourceProgress] = {}
        """Progress of sources in front of the rebuilt events."""
        self._segment: dict[str, SourceProgress] = {}
        self._ahead: dict[Partition, dict[int, int]] = {}
        """Milliseconds of timeuuids in the log that differ from the event's time, by offset."""
        self._counts: Counter[str] = Counter()
        self._new: dict[str, SourceProgress] = {}

    def begin(self, in_front: bool) -> None:
        if in_front:
            self._front |= self._segment
        self._segment = {}

    def see(self, run: Run, after: int, last: int | None, retained: int) -> None:
        assert run.tag_columns is not None
        partition, label, offsets, times = run.partition, str(run.partition), run.offsets, run.times
        for offset, time_ms, fields in zip(offsets, times, run.tag_columns.rows(offsets, times), strict=True):
            if last is not None and offset > last:
                self._pass(partition, fields)
            elif offset > after:
                self._segment[fields.source] = SourceProgress(fields.number, fields.seq, fields.ms, label)
                if offset >= retained and fields.ms != time_ms:
                    self._ahead.setdefault(partition, {})[offset] = fields.ms

    def pass_live(self, entries: Iterable[ExaminedEntry]) -> None:
        for partition, _, fields in _tag_fields(entries):
            self._pass(partition, fields)

    def _pass(self, partition: Partition, fields: TagFields) -> None:
        if fields.source not in self._live:
            self._live.add(fields.source)
            self._ends[fields.source] = fields.number - 1
        self._ceilings.setdefault(partition, fields.ms)

    def fields_of(self, record: SpooledRecord, body: Body) -> TagFields:
        """Return the fields of a record with its millisecond in the log, or its time if it is not there."""
        time_ms = record.time_ms
        if time_ms > self._top_ms:
            # If none of the next records comes near it, it is a time from the future.
            time_ms = max(self._top_ms, min(time_ms, record.newest_ms))
        return body.fields._replace(ms=self._ahead.get(record.partition, {}).get(record.offset, time_ms))

    def fits(self, events: Iterable[RestoredEvent]) -> bool:
        self._count(events)
        return all(
            last.number == self._ends.get(source, 0) - self._counts[source] for source, last in self._front.items()
        )

    def begin_anew(self, events: Iterable[RestoredEvent]) -> None:
        self._front = {}
        self._count(events)

    def _count(self, events: Iterable[RestoredEvent]) -> None:
        self._counts = Counter(event.fields.source for event in events if event.fields is not None)

    def numbered(self, events: Iterable[RestoredEvent]) -> Iterator[RestoredEvent]:
        """Yield events, in their order, with their numbers and milliseconds; the rule of the pipeline raises these."""
        last = dict(self._front)
        floors: dict[str, int] = {}
        for each in last.values():
            floors[each.partition] = max(each.ms, floors.get(each.partition, each.ms))
        begun: set[str] = set()
        for event in events:
            fields, label = event.fields, str(event.partition)
            assert fields is not None
            source = fields.source
            before = last.get(source, SourceProgress())
            number = before.number + 1 if source in begun else self._ends.get(source, 0) - self._counts[source] + 1
            begun.add(source)
            latest = min(self._latest_ms, self._ceilings.get(event.partition, self._latest_ms))
            ms = timeuuid_ms(fields.ms, floors.get(label, before.ms), [before], label, latest)
            floors[label] = ms
            last[source] = SourceProgress(number, fields.seq, ms, label)
            if source not in self._numbered_sources:
                self._new[source] = last[source]
            yield msgspec.structs.replace(event, fields=fields._replace(number=number, ms=ms))

    def first_numbers(self) -> dict[str, bytes]:
        return {source: each.stored() for source, each in self._new.items()}

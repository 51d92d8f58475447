"""A view's copy of Kafka's records, as audits and rebuilds see it, and the history that it is compared with.

A view says through ``View.copy`` where its copy rests: ``LogCopy`` is one in logs of Valkey. Audits and rebuilds work
on any ``ViewCopy``. The same value goes to Spark's tasks, so it holds settings and no connections.

``History`` reads with Spark, in one batch, the records that Kafka still has of those the view has applied. Invariant: a
record is in the history of a name if the pipeline would write it there, Kafka still has it, and the name's shard has
applied it. Topics that Kafka compacts, or that are not those which the view was made from, are left out as a whole and
reported. Tasks read Kafka themselves, as ranges of offsets. When Kafka drops records before they are read, the job
ends, and begins again with the ranges that there are then.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import msgspec
import pyarrow as pa

from tailrace.config.settings import Settings
from tailrace.config.values import milliseconds
from tailrace.driver.slice import Plan, RangeReader, RecordLimits, Slice, ViewPlan, Writer, make_plan, shared_out
from tailrace.driver.start import tasks
from tailrace.errors import BadRequest, PipelineError
from tailrace.kafka.broker import Broker, Topic, client_properties
from tailrace.log.event import Headers, Partition
from tailrace.log.run import Run, TagFields
from tailrace.log.segment import DAY_MS, day_text
from tailrace.upkeep.examine import Bounds, Erasures, Examined, ExaminedEntry, Finding, is_erased
from tailrace.upkeep.job import BucketSettings, matcher
from tailrace.upkeep.spark import collect
from tailrace.valkey.marks import NOTHING, read_generations, read_marks
from tailrace.valkey.shards import Shards

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Attempts of a job, in all, while Kafka drops the records that it reads."""

T = TypeVar("T")
MapRecords: TypeAlias = Callable[[Callable[[Iterator[Slice]], Iterator[pa.RecordBatch]], str], Any]
"""Returns the data frame of what tasks make of Kafka's records, given its schema."""

REBUILT, SAME, FEWER, MOVED, BROKEN = "rebuilt", "same", "fewer", "moved", "broken"
"""Verdicts on a log: it was replaced; or left, since nothing would change, since it has more than Kafka, since it
changed meanwhile, since its registry cannot be read at all."""
NO_ROOM, DIFFERS = "no-room", "differs"
"""Further reasons to leave it: there is no room for its events, or the store returned other bytes than were written."""


class ViewCopy(ABC):
    refused: ClassVar[Mapping[str, str]] = {}
    """Options of audits and rebuilds (``keys``, ``day``, ``source``) that make no sense here, and why."""
    outcome: ClassVar[type[Restored]]
    has_repeats: ClassVar[bool] = False
    """True if an event may be stored twice under one number; audits count such repeats."""

    def __init__(self, plan: ViewPlan, buckets: BucketSettings) -> None:
        self.plan, self.buckets = plan, buckets

    @property
    def view(self) -> str:
        return self.plan.name

    def kept_since(self, name: str, now_ms: int) -> int:
        """Return the time before which the log's events have expired; 0 if they are kept for ever."""
        keep = self.buckets.keep_of(name)
        return 0 if keep is None else now_ms - milliseconds(keep)

    def require(self, **options: object) -> None:
        """Raise BadRequest for an option that is set and makes no sense here."""
        for name, value in options.items():
            if value is not None and value is not False and name in self.refused:
                raise BadRequest(self.refused[name])

    @abstractmethod
    def is_written(self, shards: Shards) -> bool:
        """Return whether there is anything to compare."""

    def erased(self, shards: Shards, names: Collection[str] | None) -> Mapping[str, Mapping[str, Any]]:
        """Return the erasures of logs, by name and source."""
        return {}

    def names_of(self, shards: Shards, source: str) -> frozenset[str]:
        """Return the names of logs that have events of a source, or had them; raise BadRequest if there is none."""
        return frozenset()

    def bring_back(self, shards: Shards, token: int, source: str, names: Iterable[str]) -> None:
        """Forget that a source was erased from logs, since a rebuild has restored its events."""
        return

    @abstractmethod
    def examine(self, work: Assignment, shards: Shards, part: int, parts: int, now_ms: int) -> Iterator[Examined]:
        """Read all wanted logs of one part of the view, the parts together being the whole view."""

    @abstractmethod
    def explain(
        self, shards: Shards, sums: Sequence[Mapping[str, Any]], now_ms: int
    ) -> Iterator[tuple[Mapping[str, Any], Finding | None]]:
        """Yield sums that differ from Kafka's, each with its finding; None if events were dropped on purpose."""

    @abstractmethod
    def begin(self, shards: Shards, token: int | None, now_ms: int) -> RebuildStart:
        """Prepare the shards for a rebuild; without a token, for a dry run, change nothing."""

    @abstractmethod
    def rebuild(self, spark: Any, plan: RebuildPlan, records: MapRecords) -> Any:
        """Return the data frame of a rebuild's outcomes, given Kafka's records of the extent."""

    def numbering(self, shards: Shards, name: str, now_ms: int) -> Numbering | None:
        """Return the numbering of a log that is restored; None if it has no tag fields."""
        return None

    @abstractmethod
    def facts(self, rebuilt: Sequence[Any], left: Mapping[str, int]) -> dict[str, object]:
        """Return the sums of a rebuild, given outcomes of rebuilt logs and counts of the others by verdict."""


class Numbering(Protocol):
    """Numbers the events of one log with tag fields while it is restored, so that they fit the live events behind them.

    The log is read first (``begin``, ``see``, ``pass_live``), then the events that replace it are counted (``fits``, or
    ``begin_anew`` if they do not), then they are numbered.
    """

    def begin(self, in_front: bool) -> None:
        """Begin the next segment; if ``in_front``, the segments before it stay as they are."""

    def see(self, run: Run, after: int, last: int | None, retained: int) -> None:
        """Take note of a run of the log.

        It repeats earlier events up to the offset ``after``; after ``last`` they are live, not restored; Kafka has them
        from ``retained`` on.
        """

    def pass_live(self, entries: Iterable[ExaminedEntry]) -> None:
        """Take note of live events behind the replaced segments, in order."""

    def fields_of(self, record: SpooledRecord, body: Body) -> TagFields:
        """Return the tag fields of a record, not yet numbered."""

    def fits(self, events: Iterable[RestoredEvent]) -> bool:
        """Count the events to be numbered; return whether they follow the segments in front without a gap."""

    def begin_anew(self, events: Iterable[RestoredEvent]) -> None:
        """Count the events to be numbered when no segment stays in front of them."""

    def numbered(self, events: Iterable[RestoredEvent]) -> Iterator[RestoredEvent]:
        """Yield the counted events with their numbers and timestamps."""

    def first_numbers(self) -> Mapping[str, bytes]:
        """Return the stored last numbers of sources that the shard does not know yet."""


class Extent(msgspec.Struct, frozen=True):
    """The records that a job reads: from Kafka's first offset to the last one that any shard has applied."""

    ranges: dict[Partition, tuple[int, int]]
    shards: tuple[Bounds, ...]
    """The same for each shard, up to its own mark."""
    topics: dict[str, Topic]
    left_out: dict[str, str]
    """Topics and partitions that are not compared, and why."""


class WantedNames(msgspec.Struct, frozen=True):
    """The names that a job covers: those that match, and if names are given, only these."""

    pattern: str | None = None
    names: frozenset[str] | None = None

    def test(self) -> Callable[[str], bool]:
        matches, names = matcher(self.pattern), self.names
        return matches if names is None else lambda name: name in names and matches(name)


class Assignment(msgspec.Struct, frozen=True):
    """Input of every task of one job."""

    plan: Plan
    copy: ViewCopy
    extent: Extent
    wanted: WantedNames
    erased: Mapping[str, Erasures] = {}
    """By name of the log, the events that do not belong there although Kafka has them."""

    @property
    def view(self) -> str:
        return self.copy.view

    def writer(self) -> Writer:
        (writer,) = self.plan.make_writers()
        return writer

    def open(self) -> Shards:
        """Connect a task to the server processes that the marks were read from."""
        return Shards(self.plan.store, dict(self.plan.run_ids))


class RebuildStart(msgspec.Struct, frozen=True):
    marks: tuple[Mapping[Partition, int], ...] | None
    """Of each shard, the offsets up to which it is rebuilt; None = those of the moment when Kafka is read."""
    epochs: tuple[int, ...] = ()
    """Of each shard, the epoch of rebuilt segments: no segment of an earlier one is ever written again."""


class RebuildPlan(msgspec.Struct, frozen=True):
    work: Assignment
    start: RebuildStart
    token: int
    dry_run: bool
    now_ms: int
    day_ms: int | None
    """One UTC day; None = all of each log."""
    piece_bytes: int
    remember_ms: int


class Restored(msgspec.Struct, frozen=True):
    name: str
    verdict: str
    events: int = 0
    """In the new segments."""
    before: int = 0
    """Readable events of the old ones."""
    segments: int = 0
    replaced: int = 0


def arrow_batch(schema: str, rows: Iterable[tuple[object, ...]]) -> pa.RecordBatch:
    """Return rows as a task hands them to Spark, given their schema as Spark writes it."""
    types = {"string": pa.string(), "long": pa.int64(), "binary": pa.binary()}
    fields = [pa.field(name, types[kind]) for name, _, kind in (f.partition(" ") for f in schema.split(", "))]
    columns = list(zip(*rows, strict=True)) or [()] * len(fields)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, fields, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


class Body(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a record beside its coordinates and its time."""

    key: bytes | None
    headers: Headers
    value: bytes
    source: str = ""
    """If the log has tag fields: the event's source, its number there, and its tags."""
    seq: int = 0
    tags: tuple[str, ...] = ()

    @property
    def fields(self) -> TagFields:
        """The event's tag fields, not yet numbered."""
        return TagFields(self.source, self.seq, 0, 0, self.tags)


class SpooledRecord(msgspec.Struct, frozen=True, gc=False):
    """A record of Kafka on its way to its log."""

    partition: Partition
    offset: int
    time_ms: int
    newest_ms: int
    """Running maximum of the times of its partition in this log."""
    body: bytes
    """A ``Body``, encoded."""


class RestoredEvent(msgspec.Struct, frozen=True, gc=False):
    """An event on its way into a rebuilt log."""

    partition: Partition
    offset: int
    time_ms: int
    key: bytes | None
    headers: Headers
    value: bytes
    newest_ms: int
    """Running maximum of the times, which events are merged by."""
    start_ms: int
    """Begin of the bucket that it asks for."""
    span_ms: int
    fields: TagFields | None = None


encode_body = msgspec.msgpack.Encoder().encode
decode_body = msgspec.msgpack.Decoder(Body).decode


def may_have_dropped(sums: Mapping[str, Any], before_ms: int) -> bool:
    """Return whether events that are missing may have been dropped on purpose; surplus events never are."""
    return bool(sums["kafka"] > sums["view"] and sums["day"] * DAY_MS < before_ms)


def difference(sums: Mapping[str, Any], *, missing: str = "Kafka has more", extra: str = "Kafka has fewer") -> Finding:
    """Return the finding for sums that differ from Kafka's."""
    expected, found = sums["kafka"], sums["view"]
    kind, detail = "different", "as many as in Kafka, but not the same, or not with the same tags"
    if found != expected:
        kind, detail = ("missing", missing) if found < expected else ("extra", extra)
    return Finding(kind, sums["name"], day_text(sums["day"] * DAY_MS), sums["source"], expected, found, detail)


class History:
    """Kafka's past of one view; the events of the source ``brought_back`` count although it was erased."""

    def __init__(self, settings: Settings, spark: Any, copy: ViewCopy, brought_back: str | None = None) -> None:
        self._settings, self._spark, self._copy, self._brought_back = settings, spark, copy, brought_back
        self._broker = Broker(settings)

    def run(
        self,
        shards: Shards,
        wanted: WantedNames,
        job: Callable[[Assignment, MapRecords], Any],
        marks: Sequence[Mapping[Partition, int]] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> tuple[list[Any], Assignment]:
        """Run a Spark job over the history up to these marks, or those of this moment, as ``collect_past`` does.

        ``job`` returns the data frame of the job, given its tasks' input and Kafka's records.
        """

        def frame(work: Assignment) -> Any:
            ranges = {str(partition): (first, last + 1) for partition, (first, last) in work.extent.ranges.items()}
            return job(work, partial(map_records, self._settings, self._spark, ranges))

        begin = partial(self.assign, shards, wanted, marks)
        return collect_past(self._spark, begin, frame, self._has_moved, stopped)

    def assign(
        self, shards: Shards, wanted: WantedNames, marks: Sequence[Mapping[Partition, int]] | None = None
    ) -> Assignment:
        """Return the input of the tasks of a job, up to these marks or up to those of this moment.

        The marks are read before Kafka's bounds: a record that was applied by then was in Kafka.
        """
        marks = read_marks(shards, self._copy.view) if marks is None else marks
        generations = read_generations(shards.run_all([(0, ("HGETALL", shards.keys.topics()))])[0])
        topics = self._broker.topics()
        same = {name: t for name, t in topics.items() if generations.get(name, (0, ""))[1] == t.id}
        left_out = dict.fromkeys(topics.keys() - same.keys(), "not read by the pipeline yet")
        compacted = self._broker.compacted(same)
        left_out.update(compacted)
        ranges: dict[Partition, tuple[int, int]] = {}
        compared = [topic for name, topic in same.items() if name not in compacted]
        for (name, number), (first, end) in self._broker.bounds(compared).items():
            partition = Partition(name, number, generations[name][0])
            last = max(shard.get(partition, NOTHING) for shard in marks)
            if last >= end:
                left_out[f"{name}:{number}"] = f"applied up to {last}, but Kafka ends at {end}: it lost records"
            elif last >= first:
                ranges[partition] = first, last
        by_shard = tuple(
            {p: (first, shard[p]) for p, (first, _) in ranges.items() if shard.get(p, NOTHING) >= first}
            for shard in marks
        )
        extent = Extent(ranges, by_shard, {topic.name: topic for topic in compared}, left_out)
        plan = make_plan(self._settings, shards, [self._copy.plan], 0)
        erased = {
            name: {source: each for source, each in sources.items() if source != self._brought_back}
            for name, sources in self._copy.erased(shards, wanted.names).items()
        }
        return Assignment(plan, self._copy, extent, wanted, erased)

    def _has_moved(self, work: Assignment) -> bool:
        """Return whether Kafka no longer has all of the extent, or has other topics under its names."""
        extent, topics = work.extent, self._broker.topics()
        if any(topics.get(name) is None or topics[name].id != topic.id for name, topic in extent.topics.items()):
            return True
        bounds = self._broker.bounds(extent.topics.values())
        return any(
            bounds.get((partition.topic, partition.partition), (first + 1, 0))[0] > first
            for partition, (first, _) in extent.ranges.items()
        )


def collect_past(
    spark: Any,
    begin: Callable[[], T],
    job: Callable[[T], Any],
    has_moved: Callable[[T], bool],
    stopped: Callable[[], bool],
) -> tuple[list[Any], T]:
    """Run a job over Kafka's past, again if Kafka drops records that it was about to read.

    ``begin`` returns what there is to read now, ``job`` the data frame of the job over that, and ``has_moved`` whether
    Kafka no longer has all of it. PipelineError: Spark failed, or the job was stopped.
    """
    for attempt in range(ATTEMPTS):
        past = begin()
        try:
            return collect(spark, job(past), stopped), past
        except PipelineError as error:
            if attempt == ATTEMPTS - 1 or stopped() or not has_moved(past):
                raise
            logger.warning("%s; Kafka has dropped records meanwhile: once more", error)
    raise AssertionError


def map_records(
    settings: Settings,
    spark: Any,
    ranges: Mapping[str, tuple[int, int]],
    work: Callable[[Iterator[Slice]], Iterator[pa.RecordBatch]],
    schema: str,
    *,
    cut: bool = True,
) -> Any:
    """Return the data frame of what tasks make of Kafka's records; if ``cut``, several tasks may read a partition.

    ``ranges`` has of each partition, by its label, the first offset and the one behind the last.
    """
    limits = RecordLimits(settings.pipeline.max_event_bytes, settings.pipeline.max_depth)
    reader = RangeReader(client_properties(settings))
    parts = shared_out(ranges, tasks(settings, spark), cut=cut) or [{}]

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        mine = (parts[i] for batch in batches for i in batch.column(0).to_pylist())
        yield from work(records for part in mine for records in reader.whole(part, limits))

    return spark.range(0, len(parts), 1, len(parts)).mapInArrow(run, schema)


def replay(
    work: Assignment, slices: Iterable[Slice]
) -> Iterator[tuple[Slice, list[tuple[int, int, str, TagFields | None]]]]:
    """Yield the history of wanted names: slices, with row, shard, name and tag fields of each event in them.

    A record that belongs to several logs comes several times.
    """
    writer, wanted, erased = work.writer(), work.wanted.test(), work.erased
    for records in slices:
        last = [bounds.get(records.partition, (0, NOTHING))[1] for bounds in work.extent.shards]
        offsets, partition = records.offsets, str(records.partition)
        rows = [row for row in writer.named(records) if offsets[row[0]] <= last[row[1]] and wanted(row[2])]
        if erased:
            rows = [row for row in rows if not is_erased(erased.get(row[2]), row[3], partition, offsets[row[0]])]
        if rows:
            yield records, rows

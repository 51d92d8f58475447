"""History: what Kafka still has of what a view has applied, read with Spark in one batch.

Invariant: a record is in the history of a name if the pipeline would write it there, Kafka still has it, and the name's
shard has applied it. Topics whose past Kafka thins out, or that are not the ones which the view was made from, are left
out as a whole and named; what Kafka drops while it is read ends the job, which then begins again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import msgspec
import pyarrow as pa
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource

from tailrace.config import Settings
from tailrace.driver.job import make_plan
from tailrace.driver.one_pass import Plan
from tailrace.driver.slice import COLUMNS, Slice, View, slices
from tailrace.driver.source import reader_options, tasks
from tailrace.embedded.jars import cache_folder, fetch
from tailrace.errors import PipelineError
from tailrace.kafka.broker import ANSWER_S, Broker, Topic, client_properties
from tailrace.log.event import Source
from tailrace.upkeep.audit_ import Bounds
from tailrace.upkeep.job import matcher
from tailrace.upkeep.spark import begin_session, end_session
from tailrace.valkey.marks import NOTHING, Adopted, read_all_adopted, read_marks
from tailrace.valkey.shards import Shards
from tailrace.views.days.write import Days
from tailrace.views.tags.cleaned import Cleanings
from tailrace.views.tags.cleaned_ import read_cleaned
from tailrace.views.tags.model import Tagged
from tailrace.views.tags.store import VIEW as TAGS
from tailrace.views.tags.write import TagView

logger = logging.getLogger(__name__)

LOOK_S = 0.2
ATTEMPTS = 3
"""How often a job is begun in all when Kafka drops what it reads."""


class Extent(msgspec.Struct, frozen=True):
    """What is read: of each source the first offset that Kafka has, and the last one that any shard has applied."""

    ranges: dict[Source, tuple[int, int]]
    shards: tuple[Bounds, ...]
    """The same for each shard, up to its own mark."""
    topics: dict[str, Topic]
    left_out: dict[str, str]
    """Topics that are not compared, and why."""


class Wanted(msgspec.Struct, frozen=True):
    """Which names a job is about: those that match, and if names are given, only these."""

    pattern: str | None = None
    names: frozenset[str] | None = None

    def test(self) -> Callable[[str], bool]:
        """Return whether a name is wanted."""
        matches, names = matcher(self.pattern), self.names
        return matches if names is None else lambda name: name in names and matches(name)


class Assignment(msgspec.Struct, frozen=True):
    """What the tasks of one job must know."""

    plan: Plan
    view: str
    extent: Extent
    wanted: Wanted
    cleaned: dict[str, Cleanings] = {}
    """Of tags, the sources whose events are not expected there."""

    def make_view(self) -> View:
        """Make the view."""
        (view,) = self.plan.make_views()
        return view

    def open(self) -> Shards:
        """Connect a task to the server processes that the marks were read from."""
        return Shards(self.plan.store, dict(self.plan.run_ids))


class History:
    """Kafka's past of one view.

    Args:
        brought_back: A source of events that counts although it was taken out of tags.
    """

    def __init__(self, settings: Settings, spark: Any, view: str, brought_back: str | None = None) -> None:
        self._settings, self._spark, self.view, self._brought_back = settings, spark, view, brought_back
        self._broker = Broker(settings)
        self._admin = AdminClient(client_properties(settings))

    def extent(self, shards: Shards, marks: Sequence[Mapping[Source, int]] | None = None) -> Extent:
        """Return what there is to read now, up to these marks or up to those of this moment.

        The marks come first, and what Kafka has after them: what was applied by then, Kafka had.
        """
        marks = read_marks(shards, self.view) if marks is None else marks
        left_out: dict[str, str] = {}
        generations = _generations(shards)
        topics = self._broker.topics()
        known = {name: t for name, t in topics.items() if generations.get(name, (0, ""))[1] == t.id}
        left_out.update(dict.fromkeys(topics.keys() - known.keys(), "not read by the pipeline yet"))
        thinned = self._thinned(known)
        left_out.update(thinned)
        ranges: dict[Source, tuple[int, int]] = {}
        wanted = [topic for name, topic in known.items() if name not in thinned]
        for (name, partition), (first, end) in self._broker.bounds(wanted).items():
            source = Source(name, partition, generations[name][0])
            last = max(shard.get(source, NOTHING) for shard in marks)
            if last >= end:
                left_out[f"{name}:{partition}"] = f"applied up to {last}, but Kafka ends at {end}: it lost records"
            elif last >= first:
                ranges[source] = first, last
        by_shard = tuple(
            {s: (first, shard[s]) for s, (first, _) in ranges.items() if shard.get(s, NOTHING) >= first}
            for shard in marks
        )
        return Extent(ranges, by_shard, {topic.name: topic for topic in wanted}, left_out)

    def assign(self, shards: Shards, extent: Extent, wanted: Wanted) -> Assignment:
        """Return what the tasks of a job must know."""
        generations = {source.topic: source.generation for source in extent.ranges}
        plan = make_plan(self._settings, shards, (self.view,), 0, generations)
        cleaned: dict[str, Cleanings] = {}
        if self.view == TAGS:
            for tag, sources in read_cleaned(shards, wanted.names).items():
                cleaned[tag] = {pid: each for pid, each in sources.items() if pid != self._brought_back}
        return Assignment(plan, self.view, extent, wanted, cleaned)

    def records(self, extent: Extent) -> Any:
        """Return the records of an extent as a data frame of the pipeline's columns; None when there are none."""
        if not extent.ranges:
            return None
        starts: dict[str, dict[str, int]] = {}
        ends: dict[str, dict[str, int]] = {}
        for source, (first, last) in extent.ranges.items():
            starts.setdefault(source.topic, {})[str(source.partition)] = first
            ends.setdefault(source.topic, {})[str(source.partition)] = last + 1
        options = reader_options(self._settings, starts)
        del options["subscribePattern"], options["maxOffsetsPerTrigger"]
        most = tasks(self._settings, self._spark)
        options |= {
            "assign": json.dumps({topic: list(map(int, partitions)) for topic, partitions in starts.items()}),
            "endingOffsets": json.dumps(ends),
            "failOnDataLoss": "true",
            "minPartitions": str(most),
        }
        rows = self._spark.read.format("kafka").options(**options).load().selectExpr(*COLUMNS)
        return rows.coalesce(most) if len(extent.ranges) > most else rows

    def has_moved(self, extent: Extent) -> bool:
        """Return whether Kafka no longer has all of an extent, or has other topics under its names."""
        topics = self._broker.topics()
        if any(topics.get(name) is None or topics[name].id != topic.id for name, topic in extent.topics.items()):
            return True
        bounds = self._broker.bounds(extent.topics.values())
        return any(
            bounds.get((source.topic, source.partition), (first + 1, 0))[0] > first
            for source, (first, _) in extent.ranges.items()
        )

    def _thinned(self, topics: Iterable[str]) -> dict[str, str]:
        """Return the topics of which Kafka may drop single records, so that what is missing there is not lost."""
        resources = {name: ConfigResource(ConfigResource.Type.TOPIC, name) for name in topics}
        if not resources:
            return {}
        found: dict[str, str] = {}
        answers = self._admin.describe_configs(list(resources.values()), request_timeout=ANSWER_S)
        for name, resource in resources.items():
            try:
                if "compact" in (answers[resource].result()["cleanup.policy"].value or ""):
                    found[name] = "Kafka compacts it"
            except KafkaException as error:
                found[name] = f"Kafka does not say whether it compacts it: {error.args[0].str()}"
        return found


class Kept(msgspec.Struct, frozen=True):
    """What a slice has of the history of wanted names."""

    records: Slice
    rows: list[tuple[int, int, str]]
    """Row, shard and name of each record; a record that has several names comes several times."""
    tagged: Mapping[int, Tagged]
    """For the view of tags, what they are of each record's row."""


def kept(work: Assignment, batches: Iterable[pa.RecordBatch]) -> Iterator[Kept]:
    """Yield what there is of the history of wanted names, slice by slice."""
    view, wanted = work.make_view(), work.wanted.test()
    for batch in batches:
        for records in slices(batch, work.plan.generations, work.plan.limits):
            last = [bounds.get(records.source, (0, NOTHING))[1] for bounds in work.extent.shards]
            offsets = records.offsets
            tagged = view.tagged(records) if isinstance(view, TagView) else {}
            rows = [row for row in _named(view, records, tagged) if offsets[row[0]] <= last[row[1]] and wanted(row[2])]
            if work.cleaned:
                rows = [row for row in rows if not _is_cleaned(work, records, row, tagged)]
            if rows:
                yield Kept(records, rows, tagged)


def _named(view: View, records: Slice, tagged: Mapping[int, Tagged]) -> Iterator[tuple[int, int, str]]:
    """Yield row, shard and name of every record, as often as it has names."""
    if isinstance(view, TagView):
        return view.named(records, tagged)
    assert isinstance(view, Days)
    return view.named(records)


def _is_cleaned(work: Assignment, records: Slice, row: tuple[int, int, str], tagged: Mapping[int, Tagged]) -> bool:
    """Whether an event is of a source that was taken out of the tag, up to where it was."""
    at, _, tag = row
    gone = work.cleaned.get(tag, {}).get(tagged[at].pid)
    return gone is not None and gone.covers(str(records.source), records.offsets[at])


@contextmanager
def spark_for(settings: Settings, spark: Any = None) -> Iterator[Any]:
    """Give the session that was given, or one of our own, which ends with its JVM."""
    if spark is not None:
        yield spark
        return
    own = begin_session(settings, fetch("spark", cache_folder(settings.spark.jars)))
    try:
        yield own
    finally:
        end_session(own)


def collect(spark: Any, frame: Any, stopped: Callable[[], bool] = lambda: False) -> list[Any]:
    """Run a job and return its rows; give it up when ``stopped`` says so.

    Raises:
        PipelineError: It was given up, or Spark failed; the line of its message that says most is ours.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(frame.collect)
            try:
                while not wait([result], LOOK_S).done:
                    if stopped():
                        spark.sparkContext.cancelAllJobs()
            except BaseException:
                spark.sparkContext.cancelAllJobs()
                raise
            rows: list[Any] = result.result()
            return rows
    except (PySparkException, Py4JError) as error:
        if stopped():
            raise PipelineError("the job was given up before its end") from None
        lines = [line.strip() for line in str(error).splitlines()]
        ours = [line for line in lines if line.startswith("tailrace.errors.")]
        theirs = [line for line in lines if "Error: " in line or "Exception: " in line]
        told = ours or theirs or lines or [type(error).__name__]
        raise PipelineError(f"a Spark job of upkeep failed: {told[-1].partition(': ')[2] or told[-1]}") from error


def _generations(shards: Shards) -> dict[str, Adopted]:
    """Return generation and id of every topic that the pipeline has adopted."""
    (answer,) = shards.run_all([(0, ("HGETALL", shards.keys.topics()))])
    return read_all_adopted(answer)

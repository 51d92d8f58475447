"""History: the records that Kafka still has of those a view has applied, read with Spark in one batch.

Invariant: a record is in the history of a name if the pipeline would write it there, Kafka still has it, and the name's
shard has applied it. Topics that Kafka compacts, or that are not those which the view was made from, are left out as a
whole and reported. When Kafka drops records while they are read, the job ends, and begins again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource

from tailrace.config.settings import Settings
from tailrace.driver.plan import make_plan
from tailrace.driver.slice import COLUMNS, Slice, slices
from tailrace.driver.source import reader_options, tasks
from tailrace.errors import PipelineError
from tailrace.kafka.broker import ANSWER_S, Broker, client_properties
from tailrace.log.columns import TagFields
from tailrace.log.event import Partition
from tailrace.upkeep.copy import Assignment, Extent, ViewCopy, WantedNames
from tailrace.upkeep.examine import is_erased
from tailrace.upkeep.spark import ATTEMPTS, collect
from tailrace.valkey.marks import NOTHING, read_generations, read_marks
from tailrace.valkey.shards import Shards

logger = logging.getLogger(__name__)


class History:
    """Kafka's past of one view.

    Args:
        brought_back: A source of events that counts although it was erased.
    """

    def __init__(self, settings: Settings, spark: Any, copy: ViewCopy, brought_back: str | None = None) -> None:
        self._settings, self._spark, self._copy, self._brought_back = settings, spark, copy, brought_back
        self._broker = Broker(settings)
        self._admin = AdminClient(client_properties(settings))

    def run(
        self,
        shards: Shards,
        wanted: WantedNames,
        job: Callable[[Assignment, Any], Any],
        marks: Sequence[Mapping[Partition, int]] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> tuple[list[Any], Assignment]:
        """Run a Spark job over the history; again if Kafka drops records that it was about to read.

        Args:
            job: Returns the data frame of the job, given its tasks' input and Kafka's records.
            marks: Where the history ends, for each shard; None = at the marks of this moment.

        Raises:
            PipelineError: Spark failed, or the job was stopped.
        """
        for attempt in range(ATTEMPTS):
            extent = self.extent(shards, marks)
            try:
                work = self.assign(shards, extent, wanted)
                return collect(self._spark, job(work, self._records(extent)), stopped), work
            except PipelineError as error:
                if attempt == ATTEMPTS - 1 or stopped() or not self._has_moved(extent):
                    raise
                logger.warning("%s; Kafka has dropped records meanwhile: once more", error)
        raise AssertionError

    def extent(self, shards: Shards, marks: Sequence[Mapping[Partition, int]] | None = None) -> Extent:
        """Return the records to read, up to these marks or up to those of this moment.

        The marks are read before Kafka's bounds: a record that was applied by then was in Kafka.
        """
        marks = read_marks(shards, self._copy.view) if marks is None else marks
        (adopted,) = shards.run_all([(0, ("HGETALL", shards.keys.topics()))])
        generations = read_generations(adopted)
        topics = self._broker.topics()
        same = {name: t for name, t in topics.items() if generations.get(name, (0, ""))[1] == t.id}
        left_out = dict.fromkeys(topics.keys() - same.keys(), "not read by the pipeline yet")
        compacted = self._compacted(same)
        left_out.update(compacted)
        ranges: dict[Partition, tuple[int, int]] = {}
        wanted = [topic for name, topic in same.items() if name not in compacted]
        for (name, number), (first, end) in self._broker.bounds(wanted).items():
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
        return Extent(ranges, by_shard, {topic.name: topic for topic in wanted}, left_out)

    def assign(self, shards: Shards, extent: Extent, wanted: WantedNames) -> Assignment:
        """Return the input of the tasks of a job."""
        generations = {partition.topic: partition.generation for partition in extent.ranges}
        plan = make_plan(self._settings, shards, [self._copy.plan], 0, generations)
        erased = {
            name: {source: each for source, each in sources.items() if source != self._brought_back}
            for name, sources in self._copy.erased(shards, wanted.names).items()
        }
        return Assignment(plan, self._copy, extent, wanted, erased)

    def _records(self, extent: Extent) -> Any:
        """Return the records of an extent as a data frame of the pipeline's columns; None if there are none."""
        if not extent.ranges:
            return None
        starts: dict[str, dict[str, int]] = {}
        ends: dict[str, dict[str, int]] = {}
        for partition, (first, last) in extent.ranges.items():
            starts.setdefault(partition.topic, {})[str(partition.partition)] = first
            ends.setdefault(partition.topic, {})[str(partition.partition)] = last + 1
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

    def _has_moved(self, extent: Extent) -> bool:
        """Return whether Kafka no longer has all of an extent, or has other topics under its names."""
        topics = self._broker.topics()
        if any(topics.get(name) is None or topics[name].id != topic.id for name, topic in extent.topics.items()):
            return True
        bounds = self._broker.bounds(extent.topics.values())
        return any(
            bounds.get((partition.topic, partition.partition), (first + 1, 0))[0] > first
            for partition, (first, _) in extent.ranges.items()
        )

    def _compacted(self, topics: Iterable[str]) -> dict[str, str]:
        """Return the topics of which Kafka may drop single records: a record missing there is not lost."""
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


class HistorySlice(msgspec.Struct, frozen=True):
    """A slice's part of the history of wanted names."""

    records: Slice
    rows: list[tuple[int, int, str, TagFields | None]]
    """Row, shard, name and tag fields of each event; a record that belongs to several logs comes several times."""


def replay(work: Assignment, batches: Iterable[pa.RecordBatch]) -> Iterator[HistorySlice]:
    """Yield the history of wanted names, slice by slice."""
    writer, wanted, erased = work.writer(), work.wanted.test(), work.erased
    for batch in batches:
        for records in slices(batch, work.plan.generations, work.plan.limits):
            last = [bounds.get(records.partition, (0, NOTHING))[1] for bounds in work.extent.shards]
            offsets, partition = records.offsets, str(records.partition)
            rows = [row for row in writer.named(records) if offsets[row[0]] <= last[row[1]] and wanted(row[2])]
            if erased:
                rows = [row for row in rows if not is_erased(erased.get(row[2]), row[3], partition, offsets[row[0]])]
            if rows:
                yield HistorySlice(records, rows)

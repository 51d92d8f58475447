"""A view's copy of Kafka's records in logs of Valkey.

For a rebuild every shard begins a new epoch first, so that no segment of an earlier one is written again. Then one
Spark job reads Kafka up to the marks of that moment, gathers the records of each name, and restores log after log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar
from zlib import crc32

import msgspec
import pyarrow as pa

from tailrace.log.event import Partition
from tailrace.log.segment import DAY_MS
from tailrace.log.store import LogRegistry, Staging
from tailrace.upkeep import failpoint
from tailrace.upkeep.copy import (
    Assignment,
    Body,
    RebuildPlan,
    RebuildStart,
    Restored,
    SpooledRecord,
    ViewCopy,
    difference,
    encode_body,
    may_have_dropped,
)
from tailrace.upkeep.examine import Examined, ExaminedLog, Finding, examine, read_logs, walk_logs
from tailrace.upkeep.history import replay
from tailrace.upkeep.restore import Restorer
from tailrace.valkey.marks import read_marks
from tailrace.valkey.shards import Shards

RECORDS = "name string, source string, offset long, time long, body binary"
NEXT_RECORDS = 3
_RESTORED = "name string, verdict string, events long, before long, segments long, replaced long"
_ANY_EPOCH = 1 << 62
"""Above every epoch: a dry run counts all segments as replaceable."""


class LogCopy(ViewCopy):
    """One log for each name. A view whose logs have tag fields also has ``numbering`` and ``check_numbers``."""

    outcome = Restored
    refused: ClassVar[Mapping[str, str]] = {"source": "the events of this view have no sources of their own"}

    def check_numbers(self, shards: Shards, log: ExaminedLog, counted: dict[str, int]) -> Iterable[Finding]:
        """Compare the last number of each source in a log with the last number that its shard has given out."""
        return ()

    def is_written(self, shards: Shards) -> bool:
        return any(read_marks(shards, self.view)) or LogRegistry(shards, self.view).count() > 0

    def examine(self, work: Assignment, shards: Shards, part: int, parts: int, now_ms: int) -> Iterator[Examined]:
        wanted, count = work.wanted.test(), shards.options.shards
        shard, part, parts = part % count, part // count, parts // count

        def is_mine(name: str) -> bool:
            return crc32(name.encode()) // count % parts == part and wanted(name)

        logs = walk_logs(shards, self.view, shard, is_mine)
        return examine(shards, self.view, logs, work.extent.shards[shard], work.erased, self.check_numbers)

    def explain(
        self, shards: Shards, sums: Sequence[Mapping[str, Any]], now_ms: int
    ) -> Iterator[tuple[Mapping[str, Any], Finding | None]]:
        names = sorted({row["name"] for row in sums})
        logs = dict(zip(names, read_logs(shards, self.view, names), strict=True))
        for row in sums:
            log = logs[row["name"]]
            since_ms = log.horizon(None, now_ms)
            if log.has_dropped and row["day"] * DAY_MS > now_ms:
                # Records from the future: their times do not say when they were dropped.
                since_ms = 1 << 62
            if may_have_dropped(row, since_ms):
                yield row, None
            elif not log.listed and (log.log.segments or log.is_broken):
                yield row, Finding("unlisted", log.name, detail="there is a log, and the name is not listed")
            else:
                missing = "Kafka has more" if log.log.segments else "Kafka has it, and there is no such log"
                yield row, difference(row, missing=missing)

    def begin(self, shards: Shards, token: int | None, now_ms: int) -> RebuildStart:
        if token is None:
            return RebuildStart(None, (_ANY_EPOCH,) * shards.options.shards)
        opened = Staging(shards, self.view, token).reopen(now_ms // 1000)
        failpoint.reached("reopened")
        return RebuildStart(tuple(marks for _, marks in opened), tuple(epoch for epoch, _ in opened))

    def rebuild(self, spark: Any, plan: RebuildPlan, records: Any) -> Any:
        from pyspark.sql import Window
        from pyspark.sql.functions import coalesce, col, least, lit
        from pyspark.sql.functions import max as highest

        work, names = plan.work, sorted(plan.work.wanted.names or ())

        def restore(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from _restored(plan, batches)

        # Every name has a row of its own, so that a log of which Kafka has nothing is restored too.
        rows = spark.createDataFrame([(name, "", -1, 0, None) for name in names], RECORDS)
        if records is not None:
            rows = rows.unionAll(records.mapInArrow(lambda batches: route(work, batches), RECORDS))
        each = Window.partitionBy("name", "source").orderBy("offset")
        latest = plan.now_ms + work.writer().future_ms
        # A time that none of the next records comes near is one from the future; it must not hold back what follows.
        next_ones = coalesce(highest("time").over(each.rowsBetween(1, NEXT_RECORDS)), col("time"))
        in_order = (
            rows.repartition(2 * int(spark.sparkContext.defaultParallelism), "name")
            .withColumn("likely", least(col("time"), next_ones, lit(latest)))
            .withColumn("newest", highest("likely").over(each.rowsBetween(Window.unboundedPreceding, 0)))
            .drop("likely")
            .sortWithinPartitions("name", "newest", "source", "offset")
        )
        return in_order.mapInArrow(restore, _RESTORED)

    def facts(self, rebuilt: Sequence[Restored], left: Mapping[str, int]) -> dict[str, object]:
        return {
            "events": sum(each.events for each in rebuilt),
            "restored": sum(max(0, each.events - each.before) for each in rebuilt),
            "segments": sum(each.segments for each in rebuilt),
            "left": left,
        }


# In tasks.


def route(work: Assignment, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield Kafka's records with the names of their logs."""
    types = [pa.string(), pa.string(), pa.int64(), pa.int64(), pa.binary()]
    for found in replay(work, batches):
        records, rows = found.records, found.rows
        heads = records.headers
        bodies: dict[int, bytes] = {}
        for i, _, _, fields in rows:
            if i not in bodies:
                more = () if fields is None else (fields.source, fields.seq, fields.tags)
                head = heads[i] if heads is not None else []
                bodies[i] = encode_body(Body(records.keys[i], head, records.values[i] or b"", *more))
        at = [row[0] for row in rows]
        columns: list[list[object]] = [
            [row[2] for row in rows],
            [str(records.partition)] * len(rows),
            [records.offsets[i] for i in at],
            [records.times[i] for i in at],
            [bodies[i] for i in at],
        ]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, names=["name", "source", "offset", "time", "body"])


def outcome_batch(outcome: Restored) -> pa.RecordBatch:
    """Return an outcome as Spark takes it from a task."""
    fields = msgspec.structs.asdict(outcome)
    return pa.RecordBatch.from_arrays([pa.array([value]) for value in fields.values()], names=list(fields))


def _restored(plan: RebuildPlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Restore the logs whose records come, one after the other; yield the outcome of each."""
    shards = plan.work.open()
    try:
        restorer = Restorer(plan, shards)
        for name, rows in groupby(_rows(batches), key=lambda row: row[0]):
            yield outcome_batch(restorer.restore(name, (record for _, record in rows if record is not None)))
    finally:
        shards.close()


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, SpooledRecord | None]]:
    partitions: dict[str, Partition] = {}
    for batch in batches:
        columns = [column.to_pylist() for column in batch.columns]
        for name, source, offset, time_ms, body, newest in zip(*columns, strict=True):
            if not source:
                yield name, None
                continue
            partition = partitions.get(source) or partitions.setdefault(source, Partition.parse(source))
            yield name, SpooledRecord(partition, offset, time_ms, newest, body)

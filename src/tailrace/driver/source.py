"""The source of the query: topics, starting offsets, and the settings of Spark.

Invariant: a start names every partition that matches, at the lowest mark of all views, clipped to what Kafka still has;
what was clipped is reported as a gap. One partition is read by one task, in order, committed records only. Settings of
Spark that would break order or identity are refused.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tailrace.config.settings import Settings
from tailrace.errors import ConfigError
from tailrace.kafka.broker import Topic, topic_expressions
from tailrace.log.event import Partition
from tailrace.valkey.marks import NOTHING

FETCH_BUDGET = 128 << 20
LEAST_FETCHED, MOST_FETCHED = 1 << 20, 16 << 20
"""Bounds of the bytes that one consumer fetches ahead; a larger record is fetched all the same."""


class LostRange(msgspec.Struct, frozen=True):
    """Offsets that were not applied before Kafka dropped them: from ``first`` up to, not including, ``until``."""

    source: str
    first: int
    until: int


def starting_offsets(
    topics: Iterable[Topic],
    generations: Mapping[str, int],
    bounds: Mapping[tuple[str, int], tuple[int, int]],
    marks: Sequence[Mapping[Partition, int]],
) -> tuple[dict[str, dict[str, int]], list[LostRange]]:
    """Return where each partition is read from, and the ranges that Kafka no longer has.

    ``marks`` has, for each view, the offset up to which all of its shards have applied each source. A source that a
    view does not know begins at the earliest record; there is no gap before it.
    """
    starts: dict[str, dict[str, int]] = {}
    lost: list[LostRange] = []
    for topic in topics:
        for partition in topic.partitions:
            if (topic.name, partition) not in bounds:
                continue
            first, end = bounds[topic.name, partition]
            source = Partition(topic.name, partition, generations[topic.name])
            start = min((view.get(source, NOTHING) for view in marks), default=NOTHING) + 1
            known = [view[source] for view in marks if source in view]
            if known and min(known) + 1 < first:
                lost.append(LostRange(str(source), min(known) + 1, first))
            if start > max(end, first):
                # Kafka lost its own tail and gives these offsets out again: what it had under them stays in the views.
                lost.append(LostRange(str(source), max(end, first), start))
            starts.setdefault(topic.name, {})[str(partition)] = min(max(start, first), max(end, first))
    return starts, lost


def partitions_of(starts: Mapping[str, Mapping[str, int]]) -> int:
    """Return how many partitions are read from the start."""
    return sum(map(len, starts.values()))


def reader_options(
    settings: Settings, starts: Mapping[str, Mapping[str, int]], partitions: int | None = None
) -> dict[str, str]:
    """Return the options of Spark's Kafka reader, tuned: three times the rate of the defaults, and a short wait.

    Spark keeps a consumer for every partition, each with what it fetched ahead: they share a budget, since those of
    several queries, with 16 MiB each, have filled a heap of 1 GiB.
    """
    wanted, excluded = topic_expressions(settings)
    consumers = max(1, partitions if partitions is not None else partitions_of(starts))
    fetch_bytes = min(MOST_FETCHED, max(LEAST_FETCHED, FETCH_BUDGET // consumers))
    extra = {f"kafka.{name}": value for name, value in settings.kafka.properties.items()}
    return {
        "kafka.bootstrap.servers": settings.kafka.bootstrap,
        "subscribePattern": f"^(?!(?:{excluded})$){wanted}$",
        "startingOffsets": json.dumps(starts) if starts else "earliest",
        "failOnDataLoss": "false",
        "includeHeaders": "true",
        # A broker that is away, or a partition that is gone, ends the task and so the query, which then starts again.
        "kafkaConsumer.pollTimeoutMs": "20000",
        "kafka.request.timeout.ms": "10000",
        "kafka.default.api.timeout.ms": "15000",
        "maxOffsetsPerTrigger": str(settings.spark.max_records),
        "kafka.isolation.level": "read_committed",
        "kafka.max.poll.records": str(min(20_000, max(500, 100_000 // consumers))),
        "kafka.max.partition.fetch.bytes": str(fetch_bytes),
        "kafka.fetch.max.bytes": str(fetch_bytes),
        "kafka.fetch.max.wait.ms": "10",
        **extra,
    }


_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.locality.wait": "0",
    "spark.python.worker.reuse": "true",
    "spark.python.daemon.module": "tailrace.cli.worker",
    "spark.python.worker.faulthandler.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    # Idle triggers report too: the watermark moves on while nothing arrives.
    "spark.sql.streaming.noDataProgressEventInterval": "1s",
    "spark.sql.streaming.numRecentProgressUpdates": "10",
    "spark.sql.streaming.minBatchesToRetain": "10",
    "spark.sql.streaming.metricsEnabled": "false",
    # Whoever stops a query does not wait for a broker that is away; what is left of it is refused by its epoch.
    "spark.sql.streaming.stopTimeout": "4s",
    # The checkpoint is disposable and local. Hadoop's other way to write it starts a process for every file it touches.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    # Above the number of partitions a consumer is never thrown away between batches (100 partitions: 4.8 s -> 0.7 s).
    "spark.kafka.consumer.cache.capacity": "1024",
    # Those of a query that ended are given back after two minutes: each start has consumers of its own.
    "spark.kafka.consumer.cache.timeout": "2m",
    "spark.kafka.consumer.fetchedData.cache.timeout": "2m",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.cleaner.periodicGC.interval": "10min",
    "spark.log.level": "WARN",
}

_REFUSED = {
    "spark.speculation": "a second copy of a task is a second writer",
    "spark.sql.execution.pyspark.udf.tracebackWithLocals.enabled": "it prints local variables, secrets among them",
}


LIVE, SCANS = "live", "scans"
"""The pools of Spark's tasks: those of the query go before those of scans."""

_POOLS = f"""<?xml version="1.0"?>
<allocations>
  <pool name="{LIVE}"><schedulingMode>FIFO</schedulingMode><weight>100</weight><minShare>64</minShare></pool>
  <pool name="{SCANS}"><schedulingMode>FIFO</schedulingMode><weight>1</weight><minShare>0</minShare></pool>
</allocations>
"""


def session(settings: Settings, jars: Sequence[Path]) -> Any:
    """Start the Spark session of the pipeline."""
    # The executors' Python is this one: the same packages, the same version.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    for name, why in _REFUSED.items():
        if str(settings.spark.conf.get(name, "false")).lower() == "true":
            raise ConfigError(f"spark.conf.{name} cannot be on: {why}")
    builder = SparkSession.builder.master(settings.spark.master).appName("tailrace")
    conf = _SETTINGS | {
        "spark.driver.memory": settings.spark.driver_memory,
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -Dlog4j2.level=warn",
        "spark.jars": ",".join(map(str, jars)),
        "spark.scheduler.mode": "FAIR",
        "spark.scheduler.allocation.file": _pools().as_uri(),
    }
    if settings.spark.master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    else:
        # A cluster's executors must reach the driver under a name that the operator gives.
        conf.pop("spark.driver.host")
        conf.pop("spark.driver.bindAddress")
    for name, value in {**conf, **settings.spark.conf}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _pools() -> Path:
    """Write what Spark reads of its pools when it starts."""
    with tempfile.NamedTemporaryFile("w", prefix="tailrace-pools-", suffix=".xml", delete=False) as file:
        file.write(_POOLS)
    atexit.register(Path(file.name).unlink, missing_ok=True)
    return Path(file.name)


def tasks(settings: Settings, spark: Any) -> int:
    """Return how many tasks a batch is spread over: twice the cores, unless configured."""
    if settings.spark.tasks:
        return settings.spark.tasks
    if not settings.spark.master.startswith("local"):
        # Before its first job a cluster's executors are not there to be counted.
        spark.range(1).count()
    return 2 * int(spark.sparkContext.defaultParallelism)


def warm(spark: Any) -> None:
    """Run one empty batch of the pipeline's shape, so that the first record does not wait for workers and classes."""

    def nothing(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches

    columns = (
        "'' AS topic, 0 AS partition, id AS offset, id AS time, binary('') AS key, binary('') AS value, '' AS headers"
    )
    rows = spark.range(0, 1, 1, 1).selectExpr(*columns.split(", "))
    rows.mapInArrow(nothing, rows.schema).write.format("noop").mode("overwrite").save()

"""Spark's settings: what makes a small batch cheap, and what is refused because it breaks order or identity."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tailrace.config import Settings
from tailrace.errors import ConfigError

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.locality.wait": "0",
    "spark.python.worker.reuse": "true",
    "spark.python.daemon.module": "tailrace.driver.fork",
    "spark.python.worker.faulthandler.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    # Idle triggers report too: the frontier of time moves on while nothing arrives.
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

"""The start of a driver: the offsets at which each partition begins, and the Spark session with its settings.

Invariant: a start names every partition that matches, at the lowest mark of all views, clipped to what Kafka still has;
what was clipped is reported as a gap. Settings of Spark that would break order or identity are refused.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tailrace.config.settings import Settings
from tailrace.errors import ConfigError
from tailrace.kafka.broker import Topic
from tailrace.log.event import Partition
from tailrace.valkey.marks import NOTHING


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
) -> tuple[dict[Partition, int], list[LostRange]]:
    """Return where each partition is read from, and the ranges that Kafka no longer has.

    ``marks`` has, for each view, the offset up to which all of its shards have applied each partition. A partition that
    a view does not know begins at the earliest record; there is no gap before it.
    """
    starts: dict[Partition, int] = {}
    lost: list[LostRange] = []
    for topic in topics:
        for number in topic.partitions:
            if (topic.name, number) not in bounds:
                continue
            first, end = bounds[topic.name, number]
            partition = Partition(topic.name, number, generations[topic.name])
            start = min((view.get(partition, NOTHING) for view in marks), default=NOTHING) + 1
            known = [view[partition] for view in marks if partition in view]
            if known and min(known) + 1 < first:
                lost.append(LostRange(str(partition), min(known) + 1, first))
            if start > max(end, first):
                # Kafka lost its own tail and gives these offsets out again: what it had under them stays in the views.
                lost.append(LostRange(str(partition), max(end, first), start))
            starts[partition] = min(max(start, first), max(end, first))
    return starts, lost


_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.locality.wait": "0",
    "spark.python.worker.reuse": "true",
    "spark.python.daemon.module": "tailrace.worker",
    "spark.python.worker.faulthandler.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.cleaner.periodicGC.interval": "10min",
    "spark.log.level": "WARN",
}

_REFUSED = {
    "spark.python.worker.killOnIdleTimeout": "a hand that waits for records would be killed",
    "spark.speculation": "a second copy of a task is a second writer",
    "spark.sql.execution.pyspark.udf.tracebackWithLocals.enabled": "it prints local variables, secrets among them",
}


LIVE, SCANS = "live", "scans"
"""Spark's pools: hands go before scans."""

_POOLS = f"""<?xml version="1.0"?>
<allocations>
  <pool name="{LIVE}"><schedulingMode>FIFO</schedulingMode><weight>100</weight><minShare>64</minShare></pool>
  <pool name="{SCANS}"><schedulingMode>FIFO</schedulingMode><weight>1</weight><minShare>0</minShare></pool>
</allocations>
"""


def session(settings: Settings, *, hands: bool = False) -> Any:
    """Start a Spark session; with ``hands`` that of the pipeline, which has more slots than cores."""
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
        "spark.scheduler.mode": "FAIR",
        "spark.scheduler.allocation.file": _pools().as_uri(),
    }
    if hands and (local := re.fullmatch(r"local\[(\d+|\*)(,\d+)?\]", settings.spark.master)):
        # Slots for two shifts of every hand, which mostly wait, and for scans beside them.
        cores = os.cpu_count() or 1 if local[1] == "*" else int(local[1])
        builder = builder.master(f"local[{3 * cores + 2}{local[2] or ''}]")
        conf["spark.default.parallelism"] = str(cores)
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


def hand_count(settings: Settings, spark: Any) -> tuple[int, int]:
    """Return how many live hands there are, and how many more may catch up.

    Of either there are as many as cores, unless configured, on a cluster fewer: all take at most half of the slots, so
    that each can be relieved.
    """
    cores = _parallelism(settings, spark)
    if settings.spark.master.startswith("local"):
        live, half = settings.spark.hands or cores, (3 * cores + 2) // 2
    else:
        half = cores // 2
        live = settings.spark.hands or max(1, half - max(1, half // 4))
    return live, max(0, min(cores, half - live))


def tasks(settings: Settings, spark: Any) -> int:
    """Return how many tasks a job over the past is spread over: twice the cores."""
    return 2 * _parallelism(settings, spark)


def _parallelism(settings: Settings, spark: Any) -> int:
    if not settings.spark.master.startswith("local"):
        spark.range(1).count()  # before its first job a cluster's executors are not there to be counted
    return int(spark.sparkContext.defaultParallelism)

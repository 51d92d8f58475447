"""Spark's classes, loaded and checked once and kept in a file: a JVM that is given it starts with half the work.

Whatever starts Spark finds the file through ``SPARK_SUBMIT_OPTS``. A JVM that it does not fit passes it over, so it
changes how long a start takes and nothing else.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from tailrace.config.load import load
from tailrace.driver.source import session
from tailrace.embedded.jars import cache_folder, fetch
from tailrace.embedded.kafka import find_java
from tests.faults.rig import QUICK_JAVA

OPTIONS = "SPARK_SUBMIT_OPTS"


def keep_spark_classes(folder: Path) -> None:
    """See that the file is in the folder, and that all Sparks which this process starts from now on are given it."""
    installed = Path(str(find_spec("pyspark").origin)).stat().st_mtime_ns  # type: ignore[union-attr]
    file = folder / f"java-{find_java().version}-pyspark-{installed}.jsa"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            _make(file)
    if file.stat().st_size:
        os.environ[OPTIONS] = f"{QUICK_JAVA} {quote(f'-XX:SharedArchiveFile={file}')}"


def _make(file: Path) -> None:
    new = file.with_suffix(f".{os.getpid()}")
    subprocess.run(
        (sys.executable, "-m", __name__),
        env=os.environ | {OPTIONS: f"{QUICK_JAVA} {quote(f'-XX:ArchiveClassesAtExit={new}')}"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        check=False,
    )
    if not new.exists():  # a JVM that cannot do that: an empty file says so to the next one who asks
        new.touch()
    new.replace(file)


def _same(batches: Iterator[Any]) -> Iterator[Any]:
    yield from batches


def _load_classes() -> None:
    """Run a query and a batch of the pipeline's shape, and wait for the end of the JVM, which then writes the file."""
    spark = session(load(Path(os.devnull)), fetch("spark", cache_folder("")))
    columns = "id AS offset", "binary('') AS key", "'' AS headers", "timestamp_millis(id) AS time"
    rows = spark.range(0, 100, 1, 2).selectExpr(*columns)
    rows.mapInArrow(_same, rows.schema).write.format("noop").mode("overwrite").save()
    live = spark.readStream.format("rate").load().selectExpr("value AS offset", "timestamp AS time").coalesce(2)
    query = live.mapInArrow(_same, live.schema).writeStream.format("noop").trigger(processingTime="100 milliseconds")
    running = query.option("asyncProgressTrackingEnabled", "true").start()
    while not (running.lastProgress or {}).get("numInputRows"):
        running.awaitTermination(0.1)
    running.stop()
    jvm = spark.sparkContext._gateway.proc
    spark.stop()
    jvm.stdin.close()
    jvm.wait()


if __name__ == "__main__":
    _load_classes()

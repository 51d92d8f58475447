"""Spark that starts sooner: its classes, loaded and checked once, are kept in a file that every later JVM maps.

Whatever starts Spark finds the file through ``SPARK_SUBMIT_OPTS``. A JVM that it does not fit, or that comes before the
file is written, starts without it; nothing else changes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from tailrace.config.settings import load
from tailrace.driver.source import session
from tailrace.embedded.jars import cache_folder
from tailrace.embedded.kafka import find_java

QUICK_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Options of a JVM that starts sooner and never gets fast: right for runs of seconds."""

_OPTIONS = "SPARK_SUBMIT_OPTS"
_LONG_S = 600.0
"""Nobody writes the file for longer than this: whoever began has died."""


def use_spark_classes() -> subprocess.Popen[bytes] | None:
    """Let all Sparks that this process starts from now on use the file; return the process that writes it, if any."""
    installed = Path(str(find_spec("pyspark").origin))  # type: ignore[union-attr]
    which = sha256(f"{installed} {installed.stat().st_mtime_ns} {find_java()}".encode()).hexdigest()[:16]
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    file, begun = folder / f"spark-{which}.jsa", folder / f"spark-{which}.begun"
    os.environ[_OPTIONS] = f"{QUICK_JAVA} {quote(f'-XX:SharedArchiveFile={file}')}"
    if file.exists() or (begun.exists() and time.time() - begun.stat().st_mtime < _LONG_S):
        return None
    begun.touch()
    command = (sys.executable, "-m", __name__, str(file))
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _same(rows: Iterator[Any]) -> Iterator[Any]:
    yield from rows


def _write(file: Path) -> None:
    """Run jobs of the shapes that the pipeline and upkeep have; the JVM writes the file when it ends."""
    new = file.with_suffix(f".{os.getpid()}")
    os.environ[_OPTIONS] = f"{QUICK_JAVA} {quote(f'-XX:ArchiveClassesAtExit={new}')}"
    spark = session(load(Path(os.devnull)), hands=True)
    spark.sparkContext.parallelize([0], 1).mapPartitions(_same).collect()
    rows = spark.range(0, 100, 1, 2).selectExpr("id AS offset", "binary('') AS key", "timestamp_millis(id) AS time")
    rows.mapInArrow(_same, rows.schema).write.format("noop").mode("overwrite").save()
    jvm = spark.sparkContext._gateway.proc
    spark.stop()
    jvm.stdin.close()
    jvm.wait()
    if not new.exists():  # a JVM that cannot do that: an empty file says so
        new.touch()
    new.replace(file)


if __name__ == "__main__":
    _write(Path(sys.argv[1]))

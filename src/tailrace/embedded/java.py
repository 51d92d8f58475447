"""The Java runtime, and archives of loaded classes: a JVM that maps one starts in half the time.

An archive belongs to one Java and to certain jars. It is made once, in the background, and stays in the cache. A JVM
that it does not fit, or that comes before it is there, starts without it; nothing else changes.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any, Final

import msgspec

from tailrace.embedded.jars import LOCK, cache_folder
from tailrace.embedded.process import Part, Process
from tailrace.errors import PrerequisiteMissing

OLDEST_JAVA: Final = 17
QUICK_JAVA: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Options of a JVM that starts sooner and never gets fast: right where little happens in it."""


class Java(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    version: int

    def __str__(self) -> str:
        return f"Java {self.version} ({self.path})"


def find_java() -> Java:
    """Return the Java of ``JAVA_HOME``, else the first one on the path; PrerequisiteMissing if there is none to use."""
    advice = f"install Java {OLDEST_JAVA} or newer (for example OpenJDK {OLDEST_JAVA}), or point JAVA_HOME at one"
    home = os.environ.get("JAVA_HOME")
    path = shutil.which("java", path=str(Path(home, "bin"))) if home else shutil.which("java")
    if path is None:
        raise PrerequisiteMissing(f"no Java in {'JAVA_HOME=' + home if home else 'the PATH'}: {advice}")
    output = subprocess.run([path, "-version"], capture_output=True, text=True, check=False, timeout=30).stderr
    version = re.search(r'version "(?:1\.)?(\d+)', output)
    if version is None:
        raise PrerequisiteMissing(f"{path} does not say its version: {advice}")
    if int(version[1]) < OLDEST_JAVA:
        raise PrerequisiteMissing(f"{path} is Java {version[1]}: {advice}")
    return Java(path=path, version=int(version[1]))


def archive(name: str, java: str) -> Path:
    """Return the file of an archive, ``kafka`` or ``spark``, of a Java and of the jars in use."""
    runtime = Path(java).resolve()
    if name == "kafka":
        used = LOCK.read_text("utf-8")
    else:
        spark = Path(str(find_spec("pyspark").origin))  # type: ignore[union-attr]
        used = f"{spark} {spark.stat().st_mtime_ns}"
    facts = str(runtime), runtime.stat().st_mtime_ns, used
    return cache_folder() / f"{name}-{sha256(repr(facts).encode()).hexdigest()[:16]}.jsa"


def spark_environment(*options: str) -> dict[str, str]:
    """Return the variable that lets whatever starts Spark find the archive, and gives its JVM more options."""
    file = archive("spark", find_java().path)
    given = os.environ.get("SPARK_SUBMIT_OPTS", "")
    return {"SPARK_SUBMIT_OPTS": " ".join([*options, quote(f"-XX:SharedArchiveFile={file}"), given]).strip()}


def make_archives(log: Path) -> Process | None:
    """Begin to make the archives that are missing; return the process that does, if any."""
    java = find_java().path
    missing = [name for name in ("kafka", "spark") if not archive(name, java).exists()]
    command = (sys.executable, "-m", __name__, *missing)
    return Process(Part(name="archives", command=command, log=log)) if missing else None


def _make(name: str) -> None:
    """Make an archive, unless another process does."""
    file = archive(name, find_java().path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock, suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if file.exists():
            return
        new = file.with_suffix(".new")
        new.unlink(missing_ok=True)
        (_run_spark if name == "spark" else _run_kafka)(f"-XX:ArchiveClassesAtExit={new}", "-Xlog:disable")
        if not new.exists():  # a JVM that cannot do that: an empty file says so
            new.touch()
        new.replace(file)


def _run_kafka(*options: str) -> None:
    from tailrace.embedded.kafka import EmbeddedKafka

    with tempfile.TemporaryDirectory() as folder:
        part = EmbeddedKafka(Path(folder)).part()
        java, *others = part.command
        broker = Process(msgspec.structs.replace(part, command=(java, *options, *others)))
        broker.wait_ready()
        broker.stop()


def _run_spark(*options: str) -> None:
    """Run jobs of the shapes that the pipeline and upkeep have."""
    from pyspark.sql import SparkSession

    os.environ |= {"SPARK_SUBMIT_OPTS": " ".join((QUICK_JAVA, *map(quote, options))), "SPARK_LOCAL_IP": "127.0.0.1"}
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.parallelize([0], 1).mapPartitions(_same).collect()
    rows = spark.range(0, 100, 1, 2).selectExpr("id AS offset", "binary('') AS key", "timestamp_millis(id) AS time")
    rows.mapInArrow(_same, rows.schema).write.format("noop").mode("overwrite").save()
    jvm = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    spark.stop()
    jvm.stdin.close()
    jvm.wait()


def _same(rows: Any) -> Iterator[Any]:
    yield from rows


if __name__ == "__main__":
    os.nice(19)
    for each in sys.argv[1:]:
        _make(each)

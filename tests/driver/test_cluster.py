"""Nothing depends on local mode: the same pipeline on a standalone master with two workers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.process import Part, Process, free_port, tail
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.testing.installation import QUICK_JAVA, PipelineProcess, wait_for
from tests.faults.rig import Load, LoadedInstallation


def _spark(folder: Path, name: str, *arguments: str) -> Process:
    """Start one of Spark's own servers from the pyspark wheel."""
    script = Path(pyspark.__file__).parent / "bin" / "spark-class"
    environment = {
        "SPARK_NO_DAEMONIZE": "1",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(folder / name),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA,
        "PYSPARK_PYTHON": sys.executable,
        "PATH": os.environ["PATH"],
    }
    return Process(Part(name=name, command=(str(script), *arguments), log=folder / f"{name}.log", env=environment))


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    package = "org.apache.spark.deploy"
    at = ("--host", "127.0.0.1", "--webui-port", "0")
    parts = [_spark(tmp_path, "master", f"{package}.master.Master", "--port", str(port), *at)]
    for name in ("worker-1", "worker-2"):
        parts.append(_spark(tmp_path, name, f"{package}.worker.Worker", "--cores", "1", "--memory", "600m", *at, url))
    try:
        wait_for("two workers", lambda: tail(tmp_path / "master.log", 60).count("Registering worker") >= 2)
        yield url
    finally:
        for part in reversed(parts):
            part.kill()


@pytest.mark.timeout(300)
def test_the_pipeline_runs_on_a_master_with_two_workers(
    master: str, kafka: EmbeddedKafka, valkey_server: EmbeddedValkey, tmp_path: Path
) -> None:
    installation = LoadedInstallation(kafka, valkey_server.url, tmp_path)
    conf = {
        "spark.driver.extraJavaOptions": QUICK_JAVA,
        "spark.executor.extraJavaOptions": QUICK_JAVA,
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    topic = installation.topic("jobs", 4)
    load = Load(installation, topic, partitions=4).send(2_000)
    with PipelineProcess(installation, spark__master=master, spark__conf=json.dumps(conf)):
        installation.wait_stored(2_000)
        load.send(500)
        installation.check()
    executors = [path for path in tmp_path.glob("worker-*/app-*/*/stderr") if path.exists()]
    assert len(executors) >= 2

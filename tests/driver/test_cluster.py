"""Nothing depends on local mode: the same pipeline on a standalone master with two workers, and when one goes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pyspark
import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.process import Part, Process, free_port, tail
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.testing.installation import QUICK_JAVA, PipelineProcess, lives, wait_for
from tests.faults.rig import Load, LoadedInstallation


def _spark(folder: Path, name: str, *arguments: str) -> Process:
    """Start one of Spark's own servers from the pyspark wheel."""
    script = Path(pyspark.__file__).parent / "bin" / "spark-class"
    environment = {
        "SPARK_NO_DAEMONIZE": "1",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(folder / name),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": f"{QUICK_JAVA} -Dspark.decommission.enabled=true",
        "PYSPARK_PYTHON": sys.executable,
        "PATH": os.environ["PATH"],
    }
    return Process(Part(name=name, command=(str(script), *arguments), log=folder / f"{name}.log", env=environment))


class Cluster:
    """A master and two workers of one slot each, on this machine."""

    def __init__(self, folder: Path) -> None:
        self.url = f"spark://127.0.0.1:{(port := free_port())}"
        package = "org.apache.spark.deploy"
        at = ("--host", "127.0.0.1", "--webui-port", "0")
        worker = (f"{package}.worker.Worker", "--cores", "1", "--memory", "600m", *at, self.url)
        self._master = _spark(folder, "master", f"{package}.master.Master", "--port", str(port), *at)
        self._workers = [_spark(folder, name, *worker) for name in ("worker-1", "worker-2")]

    def close(self) -> None:
        for part in (*self._workers, self._master):
            part.kill()

    def at_work(self) -> tuple[Process, psutil.Process] | None:
        """Return a worker and its executor that a hand runs in, if there is one now."""
        for worker in self._workers:
            for executor in psutil.Process(worker.pid).children():
                if any(daemon.children() for daemon in executor.children() if lives(daemon)):
                    return worker, executor
        return None


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with closing(Cluster(tmp_path)) as made:
        wait_for("two workers", lambda: tail(tmp_path / "master.log", 60).count("Registering worker") >= 2)
        yield made


@pytest.mark.timeout(300)
def test_each_record_is_stored_once_though_an_executor_is_killed_and_a_worker_is_decommissioned(
    cluster: Cluster, kafka: EmbeddedKafka, valkey_server: EmbeddedValkey, tmp_path: Path
) -> None:
    installation = LoadedInstallation(kafka, valkey_server.url, tmp_path)
    conf = {
        "spark.driver.extraJavaOptions": QUICK_JAVA,
        "spark.executor.extraJavaOptions": QUICK_JAVA,
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.decommission.enabled": "true",
        "spark.ui.enabled": "true",
        "spark.ui.port": str(ui := free_port()),
    }
    topic = installation.topic("jobs", 4)
    load = Load(installation, topic, partitions=4).send(2_000)
    with PipelineProcess(installation, spark__master=cluster.url, spark__conf=json.dumps(conf)):
        installation.wait_stored(2_000)
        epoch = installation.status()["epoch"]
        assert "Tailrace: hand 0, shift" in _descriptions(ui)
        with load:
            _, executor = wait_for("a hand", cluster.at_work)
            executor.kill()
            _wait_more(installation, load)
            worker, executor = wait_for("a hand", cluster.at_work)
            os.kill(worker.pid, signal.SIGPWR)
            wait_for("the executor to leave", lambda: not lives(executor))
            _wait_more(installation, load)
        installation.check()
        status = installation.status()
        assert (status["epoch"], status["restarts"]) == (epoch, 0)
    executors = [path for path in tmp_path.glob("worker-*/app-*/*/stderr") if path.exists()]
    assert len(executors) >= 3


def _wait_more(installation: LoadedInstallation, load: Load) -> None:
    """Wait until records are stored that were sent after this call."""
    load.wait_more(1)
    installation.wait_stored(load.total)


def _descriptions(port: int) -> str:
    """Return how Spark's own pages describe the jobs."""
    at = f"http://127.0.0.1:{port}/api/v1/applications"
    [application] = httpx.get(at, timeout=60).json()
    return " ".join(
        job.get("description", "") for job in httpx.get(f"{at}/{application['id']}/jobs", timeout=60).json()
    )

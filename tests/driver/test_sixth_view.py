"""A view in one file outside of the package: ``examples/topic_counts.py``, run on the real parts beside the five."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from confluent_kafka import Producer

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.process import Part, Process, free_port, tail
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.testing.installation import wait_for
from tests.faults.rig import LoadedInstallation

ROOT = Path(__file__).parents[2]


class Counting:
    """The example's pipeline and service, as processes."""

    def __init__(self, installation: LoadedInstallation) -> None:
        self.installation = installation
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        paths = os.pathsep.join([str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
        env = installation.environment(serve__port=str(port), pipeline__views="days") | {"PYTHONPATH": paths}
        self._parts = {
            name: Part(
                name=name,
                command=(sys.executable, "-m", "topic_counts", name),
                log=installation.folder / f"{name}.log",
                env=env,
            )
            for name in ("run", "serve")
        }
        self._processes: dict[str, Process] = {}

    def start(self, name: str) -> None:
        self._processes[name] = Process(self._parts[name])

    def kill(self, name: str) -> None:
        self._processes.pop(name).kill()

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)

    def follow(self, topic: str, until: int, seen: int = 0) -> int:
        """Follow the count of a topic from one that was seen; return the last one."""

        def answers() -> bool:
            for name, process in self._processes.items():
                assert process.exit_code is None, tail(self._parts[name].log)
            try:
                return httpx.get(f"{self.url}/healthz").status_code == 200
            except httpx.TransportError:
                return False

        wait_for("the service", answers)
        headers = {"Accept": "application/x-ndjson", "Last-Event-ID": str(seen)}
        with httpx.stream("GET", f"{self.url}/v1/counts/{topic}", headers=headers, timeout=90) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                frame = json.loads(line or "{}")  # an empty line says that the service is still there
                if "records" in frame and (seen := frame["records"]) >= until:
                    return seen
        raise AssertionError("the feed ended")


@pytest.fixture
def counting(kafka: EmbeddedKafka, valkey_server: EmbeddedValkey, tmp_path: Path) -> Iterator[Counting]:
    with closing(Counting(LoadedInstallation(kafka, valkey_server.url, tmp_path))) as made:
        yield made


def test_a_sixth_view_counts_each_record_once_though_its_driver_is_killed(counting: Counting) -> None:
    installation = counting.installation
    topic = installation.topic("jobs", 3)
    producer = Producer({"bootstrap.servers": installation.kafka, "log_level": 0})

    def produce(count: int) -> None:
        for i in range(count):
            producer.produce(topic, b"{}", b"queue", partition=i % 3)
        producer.flush()

    counting.start("serve")
    counting.start("run")
    produce(100)
    assert counting.follow(topic, until=100) == 100
    counting.kill("run")
    produce(50)
    counting.start("run")
    assert counting.follow(topic, until=150, seen=100) == 150
    wait_for("the view of days", lambda: len(installation.view().get("queue", [])) >= 150)
    assert installation.counts("counts") == {"in": 150, "stored": 150, f"topic:{topic}": 150}
    status = wait_for("a report", lambda: httpx.get(f"{counting.url}/v1/status").json()["views"].get("counts"))
    assert status["unaccounted"] == 0

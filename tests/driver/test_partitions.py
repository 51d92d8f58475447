"""Partitions as Kafka really has them: without a leader for a while, and with records missing in the middle."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from tailrace.embedded import jars
from tailrace.embedded.java import find_java
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.process import HOST, Part, Process, free_port
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.log.event import Partition
from tailrace.testing.installation import QUICK_JAVA, PipelineProcess, wait_for
from tailrace.valkey.marks import lowest, read_marks
from tailrace.valkey.shards import StoreOptions
from tests.driver.test_crew import Place, alive, wait_tick
from tests.faults.rig import LoadedInstallation


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[EmbeddedKafka]:
    """A broker of the test's own: one that loses another would disturb the tests that share it."""
    broker = EmbeddedKafka(tmp_path / "own-kafka")
    broker.start(120)
    yield broker
    broker.stop()


@pytest.fixture
def second_broker(own_kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[Process]:
    """A broker that joins the first; what only it has is without a leader when it is stopped."""
    java = (find_java().path, *QUICK_JAVA.split(), "-Xmx256m", "-cp", os.pathsep.join(map(str, jars.fetch("kafka"))))
    port, settings = free_port(), tmp_path / "second.properties"
    first = (own_kafka.folder / "server.properties").read_text()
    own = {
        "process.roles": "broker",
        "node.id": "2",
        "log.dirs": str(tmp_path / "second"),
        "listeners": f"PLAINTEXT://{HOST}:{port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
    }
    lines = [line for line in first.splitlines() if line.split("=")[0] not in own]
    settings.write_text("\n".join([*lines, *(f"{name}={value}" for name, value in own.items())]) + "\n")
    identity = re.search(
        r"^cluster\.id=(\S+)", (own_kafka.folder / "data" / "meta.properties").read_text(), re.MULTILINE
    )
    assert identity is not None
    tool = ("kafka.tools.StorageTool", "format", "-t", identity[1], "-c", str(settings))
    subprocess.run([*java, *tool], check=True, capture_output=True)
    part = Part(name="second", command=(*java, "kafka.Kafka", str(settings)), log=tmp_path / "second.log")
    broker = Process(part)
    yield broker
    broker.kill()


def test_a_partition_without_a_leader_stops_nothing_but_itself_and_is_read_when_it_has_one_again(
    own_kafka: EmbeddedKafka, second_broker: Process, valkey_server: EmbeddedValkey, tmp_path: Path
) -> None:
    installation = LoadedInstallation(own_kafka, valkey_server.url, tmp_path)
    topic = f"{installation.prefix}.led"
    wait_for("the second broker", lambda: 2 in installation.admin.list_topics(timeout=5).brokers)
    # The first partition is on the first broker, the second one on the other.
    new = NewTopic(topic, 2, replica_assignment=[[1], [2]])
    installation.admin.create_topics([new])[topic].result(30)
    sent: set[str] = set()

    def send(count: int, partition: int) -> None:
        producer = Producer({"bootstrap.servers": installation.kafka, "log_level": 0})

        def kept(error: object, message: object) -> None:
            assert error is None
            sent.add(f"{topic}:{partition}:{message.offset()}")  # type: ignore[attr-defined]

        for _ in range(count):
            producer.produce(topic, b"{}", f"name-{partition}".encode(), partition=partition, on_delivery=kept)
        assert producer.flush(30) == 0

    def stored() -> set[str]:
        return {event for stream in installation.view().values() for event in stream}

    def leaderless() -> bool:
        listed = installation.admin.list_topics(topic, timeout=5).topics[topic].partitions
        return listed[1].leader < 0

    send(5, 0)
    send(5, 1)
    with PipelineProcess(installation, arguments=("--views", "days")) as pipeline:
        wait_for("all of it", lambda: stored() == sent)
        restarts = installation.status()["restarts"]
        second_broker.kill()
        wait_for("no leader", leaderless)
        send(10, 0)
        wait_for("what has a leader", lambda: stored() == sent)
        another = installation.topic("another", 1)
        producer = Producer({"bootstrap.servers": installation.kafka, "log_level": 0})
        producer.produce(another, b"{}", b"another")
        producer.flush(30)
        wait_for("a new topic", lambda: f"{another}:0:0" in stored())
        assert installation.status()["restarts"] == restarts
        # A start is no more held up by it than what runs.
        pipeline.kill()
        pipeline.start()
        send(10, 0)
        wait_for("what has a leader", lambda: len(stored()) == len(sent) + 1)
        back = Process(second_broker.part)
        try:
            wait_for("a leader", lambda: not leaderless())
            send(7, 1)
            wait_for("everything", lambda: stored() == {*sent, f"{another}:0:0"})
            assert installation.status()["restarts"] == restarts
        finally:
            back.kill()


def test_records_that_compaction_took_out_are_holes_that_nothing_waits_for(
    kafka: EmbeddedKafka, store: StoreOptions
) -> None:
    place = Place(kafka, store, 1)
    eager = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.001", "segment.ms": "100"}
    for kind, name, settings in (
        (ResourceType.BROKER, "1", {"log.cleaner.backoff.ms": "200"}),
        (ResourceType.TOPIC, place.topic, eager),
    ):
        changed = ConfigResource(kind, name)
        for key, value in settings.items():
            changed.add_incremental_config(ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET))
        place.admin.incremental_alter_configs([changed])[changed].result(30)

    def there() -> set[str]:
        consumer = Consumer({"bootstrap.servers": kafka.address, "group.id": "there", "enable.partition.eof": True})
        consumer.assign([TopicPartition(place.topic, 0, 0)])
        found = set()
        while (message := consumer.poll(10)) is not None and message.error() is None:
            found.add(f"{place.topic}:0:{message.offset()}")
        consumer.close()
        return found

    def compacted() -> bool:
        place.send(1)  # a segment is closed by the next record
        return len(there()) < len(place.sent) - 20

    place.send(50)  # of seven names
    wait_for("compaction", compacted, pause_s=0.5)
    place.sent = there()
    with place.crew(alive) as (crew, rota):
        rota.assign(place.all())
        last = 1 + max(int(event.rpartition(":")[2]) for event in place.sent)
        wait_tick("the end", crew, lambda said: said.done[Partition(place.topic, 0)] == last)
        wait_for("all marks", lambda: set(lowest(read_marks(place.writer.shards, "days")).values()) == {last - 1})
    place.check()

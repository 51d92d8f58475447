"""The embedded broker: what it acknowledged is there after any end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tailrace.embedded.java import find_java
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import EmbeddedError, PrerequisiteMissing

pytestmark = pytest.mark.jvm


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    broker = EmbeddedKafka(tmp_path_factory.mktemp("kafka"))
    broker.start()
    yield broker
    broker.kill()


def produce(kafka: EmbeddedKafka, topic: str, values: list[bytes], **settings: str | int) -> None:
    producer = Producer({"bootstrap.servers": kafka.address, "log_level": 0, **settings})
    for value in values:
        producer.produce(topic, value, partition=0, timestamp=1_000)
    assert producer.flush(30) == 0


def read(kafka: EmbeddedKafka, topic: str, count: int) -> list[tuple[bytes, int]]:
    """The first records of partition 0, with the kind of their timestamp."""
    consumer = Consumer({"bootstrap.servers": kafka.address, "group.id": "reader", "log_level": 0})
    consumer.assign([TopicPartition(topic, 0, 0)])
    records = consumer.consume(count, timeout=30)
    consumer.close()
    found = []
    for record in records:
        value = record.value()
        assert isinstance(value, bytes)
        found.append((value, record.timestamp()[0]))
    return found


def create(kafka: EmbeddedKafka, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.address, "log_level": 0})
    admin.create_topics([NewTopic(topic, 1)])[topic].result(30)


def test_records_survive_a_kill_and_a_restart_at_the_same_address(kafka: EmbeddedKafka) -> None:
    create(kafka, "jobs")
    values = [b"event %d" % number for number in range(100)]
    produce(kafka, "jobs", values[:50], acks="all")
    kafka.kill()
    assert kafka.pid is None
    kafka.start()
    produce(kafka, "jobs", values[50:], acks="all")
    kafka.stop()
    kafka.start()
    assert read(kafka, "jobs", 100) == [(value, TIMESTAMP_LOG_APPEND_TIME) for value in values]


def test_it_takes_large_records_in_transactions(kafka: EmbeddedKafka) -> None:
    create(kafka, "large")
    large = os.urandom(8 * 1024 * 1024)
    settings = {"transactional.id": "one", "message.max.bytes": 16_000_000, "log_level": 0}
    producer = Producer({"bootstrap.servers": kafka.address, **settings})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce("large", large, partition=0)
    producer.commit_transaction(30)
    assert read(kafka, "large", 1) == [(large, TIMESTAMP_LOG_APPEND_TIME)]


def test_writing_makes_no_topic(kafka: EmbeddedKafka) -> None:
    producer = Producer({"bootstrap.servers": kafka.address, "message.timeout.ms": 2_000, "log_level": 0})
    producer.produce("unknown", b"x")
    producer.flush(10)
    assert "unknown" not in AdminClient({"bootstrap.servers": kafka.address}).list_topics(timeout=10).topics


def test_it_says_why_it_does_not_start(tmp_path: Path) -> None:
    broker = EmbeddedKafka(tmp_path, memory="none")
    with pytest.raises(EmbeddedError, match="Invalid maximum heap size"):
        broker.start()
    assert broker.pid is None


def test_a_machine_without_java_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_java().version >= 17
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(PrerequisiteMissing, match="install Java 17 or newer"):
        find_java()


def test_an_old_java_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_402\"' >&2\n", encoding="utf-8")
    old.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(PrerequisiteMissing, match=r"is Java 8: install Java 17"):
        find_java()

"""The pipeline as it is run: a process of its own, on real parts. The tests share it; each has its own topic."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import NewPartitions

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.log.event import Partition
from tailrace.testing.installation import PipelineProcess, wait_for
from tailrace.valkey.marks import conserved, lowest, read_marks
from tests.faults.rig import Load, LoadedInstallation


class Rig:
    """A running pipeline and the names of what it reads."""

    def __init__(self, installation: LoadedInstallation, pipeline: PipelineProcess) -> None:
        self.installation, self.pipeline = installation, pipeline

    def producer(self, **properties: Any) -> Producer:
        return Producer({"bootstrap.servers": self.installation.kafka, "log_level": 0, **properties})

    def stream(self, name: str, count: int) -> list[str]:
        """Wait for so many events of a stream."""
        return wait_for(f"{count} events of {name}", lambda: _if_long(self.installation.view().get(name, []), count))  # type: ignore[no-any-return]


def _if_long(events: list[str], count: int) -> list[str]:
    return events if len(events) >= count else []


@pytest.fixture(scope="module")
def rig(kafka: EmbeddedKafka, valkey_server: EmbeddedValkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    installation = LoadedInstallation(kafka, valkey_server.url, tmp_path_factory.mktemp("job"))
    with PipelineProcess(installation, arguments=("--views", "days")) as pipeline:
        yield Rig(installation, pipeline)


def test_a_topic_created_while_it_runs_is_read_without_a_restart(rig: Rig) -> None:
    epoch = rig.installation.status()["epoch"]
    topic = rig.installation.topic("appears", 2)
    producer = rig.producer()
    for i in range(20):
        producer.produce(topic, b"{}", b"appears", partition=i % 2)
    producer.flush()
    assert sorted(rig.stream("appears", 20)) == sorted(f"{topic}:{p}:{o}" for p in (0, 1) for o in range(10))
    assert rig.installation.status()["epoch"] == epoch


def test_topics_that_do_not_match_and_dead_letters_are_not_read(rig: Rig) -> None:
    installation = rig.installation
    from confluent_kafka.admin import NewTopic

    other = f"other-{installation.prefix}"
    installation.admin.create_topics([NewTopic(other, 1, 1)])[other].result(30)
    topic = installation.topic("matches", 1)
    producer = rig.producer()
    producer.produce(other, b"{}", b"not-read")
    producer.produce(topic, b"poison", b"not-json")
    producer.produce(topic, b"{}", b"read")
    producer.flush()
    assert rig.stream("read", 1) == [f"{topic}:0:1"]
    letter = _first(installation, installation.dead_letters)
    assert (letter["id"], letter["reason"], letter["value"]) == (f"{topic}:0:0", "invalid-json", "poison")
    assert (letter["topic"], letter["partition"], letter["offset"]) == (topic, 0, 0)
    assert "not-read" not in installation.view()


def _first(installation: LoadedInstallation, topic: str) -> Any:
    consumer = Consumer(
        {
            "bootstrap.servers": installation.kafka,
            "group.id": "test",
            "isolation.level": "read_committed",
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    message = wait_for("a dead letter", lambda: _readable(consumer.poll(1)))
    consumer.close()
    return json.loads(message.value())


def _readable(message: Any) -> Any:
    return message if message is not None and not message.error() else None


def test_null_keys_tombstones_and_headers_are_normal_and_the_books_balance(rig: Rig) -> None:
    installation = rig.installation
    before = installation.counts()
    topic = installation.topic("normal", 1)
    producer = rig.producer()
    producer.produce(topic, b'{"n":1}', None)
    producer.produce(topic, None, b"normal")
    producer.produce(
        topic, b'{"n":12345678901234567890123}', b"normal", headers=[("a", b"1"), ("a", b"2"), ("b", None)]
    )
    producer.flush()
    assert rig.stream("normal", 1) == [f"{topic}:0:2"]

    def changed(field: str) -> int:
        return installation.counts().get(field, 0) - before.get(field, 0)

    wait_for("three records", lambda: changed("in") == 3)
    assert changed("stored") == changed("skipped:no-key") == changed("skipped:tombstone") == 1
    report = wait_for(
        "a report of it",
        lambda: (r := installation.status()).get("in") == installation.counts()["in"] and not r["unaccounted"] and r,
    )
    assert report["skipped"]["no-key"] >= 1
    assert report["lag"] == 0
    assert conserved(installation.counts()) == 0
    (frame,) = _frames(installation, "normal")
    assert frame["headers"] == {"a": ["1", "2"], "b": None}
    assert frame["data"] == {"n": 12345678901234567890123}


def _frames(installation: LoadedInstallation, name: str) -> list[Any]:
    import asyncio

    from tests.log.rig import rig as feeds

    async def read() -> list[Any]:
        async with feeds(installation.store) as opened:
            return [json.loads(f.data) for f in await opened.all(name, follow=False) if hasattr(f, "data")]

    return [frame for frame in asyncio.run(read()) if "id" in frame]


def test_records_of_an_aborted_transaction_are_never_shown(rig: Rig) -> None:
    topic = rig.installation.topic("transactions", 1)
    producer = rig.producer(**{"transactional.id": f"{rig.installation.prefix}-t"})
    producer.init_transactions(30)
    for commit in (True, False, True):
        producer.begin_transaction()
        for _ in range(3):
            producer.produce(topic, b"{}", b"aborted" if not commit else b"committed")
        producer.flush(30)  # they reach the log before it is decided what becomes of them
        producer.commit_transaction(30) if commit else producer.abort_transaction(30)
    assert rig.stream("committed", 6) == [f"{topic}:0:{o}" for o in (0, 1, 2, 8, 9, 10)]
    assert "aborted" not in rig.installation.view()


def test_a_topic_deleted_and_created_again_is_another_topic(rig: Rig) -> None:
    installation = rig.installation
    topic = installation.topic("again", 1)
    producer = rig.producer()
    for _ in range(5):
        producer.produce(topic, b"{}", b"again")
    producer.flush()
    rig.stream("again", 5)
    # What is deleted before the driver has seen it once cannot be told from what comes after it.
    topics = installation.store.keys.topics()
    wait_for("the driver to see it", lambda: installation.shards().client(0).hexists(topics, topic))
    installation.admin.delete_topics([topic])[topic].result(30)
    wait_for("the driver to miss it", lambda: "topic(s) deleted" in rig.pipeline.log)
    installation.topic("again", 1)
    producer = rig.producer()
    for _ in range(3):
        producer.produce(topic, b"{}", b"again")
    producer.flush()
    assert rig.stream("again", 8) == [f"{topic}:0:{i}" for i in range(5)] + [f"{topic}@1:0:{i}" for i in range(3)]


def test_what_kafka_dropped_while_the_pipeline_was_down_is_reported_as_a_gap(rig: Rig) -> None:
    installation = rig.installation
    topic = installation.topic("retained", 1)
    load = Load(installation, topic, partitions=1).send(50)

    def stored() -> set[str]:
        return {event for stream in installation.view().values() for event in stream if event.startswith(topic)}

    def level() -> bool:
        views = (lowest(read_marks(installation.shards(), view)) for view in ("intake", "days"))
        return all(marks.get(Partition(topic, 0)) == 49 for marks in views)

    wait_for("what came before, in all shards", level)
    rig.pipeline.kill()
    load.send(30)
    installation.admin.delete_records([TopicPartition(topic, 0, 70)])[TopicPartition(topic, 0)].result(30)
    rig.pipeline.start()
    load.send(20)
    wait_for("what is left", lambda: len(stored()) >= 80)
    assert stored() == {f"{topic}:0:{offset}" for offset in (*range(50), *range(70, 100))}
    gap = {"source": f"{topic}:0", "first": 50, "until": 70}
    assert [each for each in installation.status()["gaps"] if each["source"] == f"{topic}:0"] == [gap]


def test_a_time_in_nanoseconds_stops_nobody(rig: Rig) -> None:
    installation = rig.installation
    topic = installation.topic("nanoseconds", 1, **{"message.timestamp.after.max.ms": str(2**63 - 1)})
    producer = rig.producer()
    producer.produce(topic, b"{}", b"nanoseconds", timestamp=time.time_ns())
    producer.produce(topic, b"{}", b"after")
    producer.flush()
    assert rig.stream("after", 1) == [f"{topic}:0:1"]
    assert rig.stream("nanoseconds", 1) == [f"{topic}:0:0"]


def test_partitions_that_are_added_are_read_and_nothing_is_restarted(rig: Rig) -> None:
    installation = rig.installation
    before = installation.status()["epoch"]
    topic = installation.topic("grows", 1)
    producer = rig.producer()
    producer.produce(topic, b"{}", b"grows", partition=0)
    producer.flush()
    rig.stream("grows", 1)
    installation.admin.create_partitions([NewPartitions(topic, 3)])[topic].result(30)
    for partition in (1, 2):
        wait_for("the partition", partial(_sent, rig.producer(), topic, partition))
    assert sorted(rig.stream("grows", 3)) == [f"{topic}:{partition}:0" for partition in range(3)]
    assert installation.status()["epoch"] == before


def _sent(producer: Producer, topic: str, partition: int) -> bool:
    """Return whether a record could be written; a broker may not know a new partition yet."""
    outcomes: list[Any] = []
    try:
        producer.produce(topic, b"{}", b"grows", partition=partition, on_delivery=lambda e, _: outcomes.append(e))
    except KafkaException:
        return False
    producer.flush(10)
    return outcomes == [None]


def test_records_that_expire_under_a_paused_pipeline_are_a_gap_and_the_rest_is_read(rig: Rig) -> None:
    installation = rig.installation
    topic, other = installation.topic("expires", 1), installation.topic("stays", 1)
    load = Load(installation, topic, partitions=1).send(10)
    epoch = wait_for("the pipeline", lambda: installation.status().get("epoch"))

    def stored() -> set[str]:
        return {event for stream in installation.view().values() for event in stream if event.startswith(topic)}

    wait_for("the first", lambda: len(stored()) == 10)
    stopped: list[int] = []
    # A process that one of these forked just before it was stopped would read on.
    while new := {rig.pipeline.pid, *(process.pid for process in rig.pipeline.family())} - set(stopped):
        for pid in new:
            os.kill(pid, signal.SIGSTOP)
        stopped += new
    time.sleep(1)  # until the broker has answered the fetches that are under way: they would bring all of it
    load.send(2_000)
    installation.admin.delete_records([TopicPartition(topic, 0, 1_500)])[TopicPartition(topic, 0)].result(30)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    producer = rig.producer()
    producer.produce(other, b"{}", b"stays")
    producer.flush()
    wait_for("the rest", lambda: f"{topic}:0:2009" in stored())
    rig.stream("stays", 1)
    told = wait_for("the gap", lambda: [g for g in installation.status()["gaps"] if g["source"] == f"{topic}:0"])
    lost = {offset for gap in told for offset in range(gap["first"], gap["until"])}
    assert stored() == {f"{topic}:0:{offset}" for offset in range(2_010) if offset not in lost}
    assert lost <= set(range(10, 1_500))
    assert installation.status()["epoch"] == epoch

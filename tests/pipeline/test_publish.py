"""From the outbox to Kafka, each message once: on a real broker and a real Valkey."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.pipeline.publish import Publisher
from tailrace.stores.valkey import Shards, StoreOptions
from tests.writing import Record, Writer

_names = count()


class Outbox:
    """A store whose outboxes are filled by poisoned records, and the publishers that empty them."""

    def __init__(self, kafka: EmbeddedKafka, store: StoreOptions) -> None:
        number = next(_names)
        self.kafka, self.store = kafka, store
        self.topic, self.positions = f"dead-{number}", f"positions-{number}"
        self.writer = Writer(store, dead_letters=self.topic)

    def poison(self, first: int, n: int) -> None:
        self.writer.write([Record(first + i, f"k{i}".encode(), b"{", partition=i % 5) for i in range(n)])

    def publisher(self) -> Publisher:
        properties = {"bootstrap.servers": self.kafka.address, "log_level": 2}
        publisher = Publisher(
            Shards(self.store, dict(self.writer.shards.run_ids)),
            properties,
            self.positions,
            {self.topic: 2},
            poll_s=0.1,
        )
        publisher.start()
        return publisher

    def left(self) -> int:
        keys, shards = self.writer.shards.keys, self.writer.shards
        return sum(shards.read_all([(s, ("XLEN", keys.outbox(s))) for s in range(self.store.shards)]))

    def letters(self) -> list[str]:
        """The ids of all committed letters, in the order of their partitions."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.kafka.address,
                "group.id": "test",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
            }
        )
        consumer.assign([TopicPartition(self.topic, p, 0) for p in (0, 1)])
        found, ended = [], 0
        while ended < 2:
            message: Any = consumer.poll(10)
            assert message is not None
            if message.error():
                ended += 1
                continue
            letter = json.loads(message.value())
            assert dict(message.headers())["tailrace-id"].decode() == letter["id"]
            found.append(letter["id"])
        consumer.close()
        return found


@pytest.fixture
def outbox(kafka: EmbeddedKafka, store: StoreOptions) -> Outbox:
    return Outbox(kafka, store)


def _wait(condition: Callable[[], bool], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_each_letter_is_published_once(outbox: Outbox) -> None:
    outbox.poison(0, 40)
    publisher = outbox.publisher()
    _wait(lambda: outbox.left() == 0)
    outbox.poison(100, 10)
    _wait(lambda: outbox.left() == 0)
    publisher.stop()
    wanted = [f"jobs:{i % 5}:{i}" for i in range(40)] + [f"jobs:{i % 5}:{100 + i}" for i in range(10)]
    assert sorted(outbox.letters()) == sorted(wanted)


def test_a_publisher_that_died_before_it_emptied_the_outbox_is_continued_without_repeats(outbox: Outbox) -> None:
    outbox.poison(0, 20)
    first = outbox.publisher()
    _wait(lambda: outbox.left() == 0)
    first.stop()
    outbox.poison(100, 20)
    keys, shards = outbox.writer.shards.keys, outbox.writer.shards
    boxes = shards.read_all([(s, ("XRANGE", keys.outbox(s), "-", "+")) for s in range(outbox.store.shards)])
    second = outbox.publisher()
    _wait(lambda: outbox.left() == 0)
    second.stop()
    # As if it had died between its commit and the trim: what it published is in the outbox again.
    for shard, box in enumerate(boxes):
        shards.client(shard).delete(keys.outbox(shard))
        for entry_id, fields in box:
            flat = fields if isinstance(fields, list) else [part for pair in fields.items() for part in pair]
            shards.client(shard).execute_command("XADD", keys.outbox(shard), entry_id, *flat)
    third = outbox.publisher()
    _wait(lambda: outbox.left() == 0)
    third.stop()
    letters = outbox.letters()
    assert len(letters) == len(set(letters)) == 40


def test_a_second_publisher_fences_the_first_and_nothing_is_doubled(outbox: Outbox) -> None:
    first = outbox.publisher()
    outbox.poison(0, 20)
    _wait(lambda: outbox.left() == 0)
    second = outbox.publisher()
    for at in range(5):
        outbox.poison(100 * (at + 1), 10)
        _wait(lambda: outbox.left() == 0)
    second.stop()
    first.stop()
    letters = outbox.letters()
    assert len(letters) == len(set(letters)) == 70


def test_letters_filled_in_again_after_a_rollback_are_recognised(outbox: Outbox) -> None:
    outbox.poison(0, 15)
    publisher = outbox.publisher()
    _wait(lambda: outbox.left() == 0)
    publisher.stop()
    # Another epoch with the same records: what a store that lost its last second goes through.
    shards, keys = outbox.writer.shards, outbox.writer.shards.keys
    for shard in range(outbox.store.shards):
        client = shards.client(shard)
        client.delete(keys.marks(shard, "intake"))
        client.hincrby(keys.meta(shard), "epoch", 1)
    outbox.writer = Writer(outbox.store, dead_letters=outbox.topic)
    outbox.poison(0, 18)
    publisher = outbox.publisher()
    _wait(lambda: outbox.left() == 0)
    publisher.stop()
    letters = outbox.letters()
    assert len(letters) == len(set(letters)) == 18

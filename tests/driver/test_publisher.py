"""The publisher: what is in an outbox reaches Kafka once, whoever dies on the way and whatever the store forgets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tailrace.driver.publisher import BATCH, ID_HEADER, Publisher
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.valkey.shards import Shards, StoreOptions
from tests.writing import Record, Writer

PATIENCE_S = 60.0


class Post:
    """A store whose outbox goes to a dead-letter topic of its own."""

    def __init__(self, kafka: EmbeddedKafka, store: StoreOptions) -> None:
        self._kafka = kafka
        self._store = store
        self.topic = f"{store.prefix}.dead-letters"
        self.writer = Writer(store, dead_letters=self.topic)

    def refuse(self, first: int, count: int) -> list[str]:
        """Let the pipeline refuse some records; return their ids."""
        records = [Record(offset=first + i, value=b"{nope", key=b'"k%d"' % i) for i in range(count)]
        self.writer.write(records)
        return [record.id for record in records]

    def publisher(self, targets: dict[str, int] | None = None, dead_letters: str = "", **properties: Any) -> Publisher:
        return Publisher(
            Shards(self._store, self.writer.shards.run_ids),
            {"bootstrap.servers": self._kafka.address, "log_level": 0, **properties},
            f"{self._store.prefix}.positions",
            targets or {self.topic: 1},
            poll_s=0.1,
            dead_letters=dead_letters,
        )

    @contextmanager
    def publishing(self) -> Iterator[Publisher]:
        publisher = self.publisher()
        publisher.start()
        try:
            yield publisher
        finally:
            publisher.stop()
            assert not publisher.is_alive()

    def waiting(self) -> int:
        """Return how many messages the outboxes hold."""
        keys, shards = self.writer.shards.keys, self.writer.shards
        return sum(shards.run_all([(s, ("XLEN", keys.outbox(s))) for s in range(self._store.shards)]))

    def wait_empty(self) -> None:
        wait_for(lambda: not self.waiting())

    def letters(self) -> list[Mapping[str, Any]]:
        """Return the committed messages of the dead-letter topic, each with the id of its header."""
        consumer = Consumer(
            {
                "bootstrap.servers": self._kafka.address,
                "group.id": "reads letters",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
            }
        )
        consumer.assign([TopicPartition(self.topic, 0, 0)])
        found: list[Mapping[str, Any]] = []
        try:
            while True:
                message = consumer.poll(10)
                assert message is not None
                if (error := message.error()) is not None:
                    assert error.code() == KafkaError._PARTITION_EOF
                    return found
                header = dict(message.headers() or ())[ID_HEADER]
                assert isinstance(header, bytes)
                found.append({**json.loads(message.value() or b""), "header": header.decode()})
        finally:
            consumer.close()

    def ids(self) -> list[str]:
        return [letter["id"] for letter in self.letters()]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def post(kafka: EmbeddedKafka, store: StoreOptions) -> Post:
    return Post(kafka, store)


def test_a_refused_record_becomes_one_letter_with_its_coordinates_and_reason(post: Post) -> None:
    ids = post.refuse(0, 3)
    with post.publishing():
        post.wait_empty()
        ids += post.refuse(3, 2)
        post.wait_empty()
    letters = post.letters()
    assert [letter["id"] for letter in letters] == [letter["header"] for letter in letters] == ids
    assert {**letters[0], "time": ""} == {
        "id": "jobs:0:0",
        "topic": "jobs",
        "partition": 0,
        "offset": 0,
        "time": "",
        "reason": "invalid-json",
        "key": ['"k0"'],
        "bytes": 5,
        "value": "{nope",
        "header": "jobs:0:0",
    }


def test_more_letters_than_one_transaction_holds_keep_their_order(post: Post) -> None:
    ids = post.refuse(0, 2 * BATCH + 10)
    with post.publishing():
        post.wait_empty()
    assert post.ids() == ids


def test_a_letter_about_the_largest_record_is_small_enough_for_its_topic(post: Post) -> None:
    worst = Record(offset=0, key=b"\x01" * 900_000, value=b"\x00" * 900_000)
    post.writer.write([worst, Record(offset=1, value=b"{nope")])
    with post.publishing():
        post.wait_empty()
    assert post.ids() == ["jobs:0:0", "jobs:0:1"]


def test_a_publisher_that_dies_inside_a_transaction_leaves_no_letter_and_its_successor_sends_each_once(
    post: Post,
) -> None:
    ids = post.refuse(0, 20)
    dying = post.publisher()
    dying._begin()
    for shard, producer in dying._producers.items():
        producer.begin_transaction()
        producer.produce(post.topic, f"half sent by {shard}", headers=[(ID_HEADER, b"?")])
        producer.flush(10)
    with post.publishing():
        post.wait_empty()
    assert post.ids() == ids


def test_a_publisher_that_dies_before_it_empties_the_outbox_does_not_make_its_successor_send_again(post: Post) -> None:
    ids = post.refuse(0, 20)
    dying = post.publisher()
    dying._begin()
    keys, shards = post.writer.shards.keys, post.writer.shards
    boxes = shards.run_all([(s, ("DUMP", keys.outbox(s))) for s in range(4)])
    for shard in range(4):
        dying._publish(shard)
    assert not post.waiting()
    shards.run_all([(s, ("RESTORE", keys.outbox(s), 0, box, "REPLACE")) for s, box in enumerate(boxes) if box])
    assert post.waiting()
    with post.publishing():
        post.wait_empty()
    assert post.ids() == ids


def test_a_transaction_that_is_committed_while_the_successor_begins_is_not_sent_again(post: Post) -> None:
    ids = post.refuse(0, 20)
    dying = post.publisher()
    dying._begin()

    class Successor(Publisher):
        def _prepare_topics(self) -> None:
            super()._prepare_topics()
            for shard in range(4):
                dying._publish(shard)

    successor = post.publisher()
    successor.__class__ = Successor
    successor.start()
    try:
        post.wait_empty()
    finally:
        successor.stop()
    assert post.ids() == ids


def test_an_older_publisher_is_refused_and_says_so(post: Post) -> None:
    post.refuse(0, 1)
    with post.publishing() as older:
        post.wait_empty()
        with post.publishing() as newer:
            wait_for(lambda: len(newer._producers) == 4)
            ids = post.refuse(1, 20)
            wait_for(lambda: older.failure is not None or not post.waiting())
            post.wait_empty()
            assert newer.failure is None
    assert post.ids() == ["jobs:0:0", *ids]


def test_letters_that_a_rolled_back_store_holds_again_are_not_sent_again(post: Post) -> None:
    keys, shards = post.writer.shards.keys, post.writer.shards
    with post.publishing():
        ids = post.refuse(0, BATCH + 100)
        post.wait_empty()
    # The store forgets everything, begins a new epoch, and is filled again from Kafka. Without its memory of the last
    # epoch, the new one is another only from the next second on.
    time.sleep(1.1)
    for shard in range(4):
        mine: Any = shards.client(shard).keys(f"{keys.tag(shard)}:*")
        shards.client(shard).delete(*mine)
    post.writer = Writer(shards.options, dead_letters=post.topic)
    post.refuse(0, BATCH + 100)
    first = post.publisher()
    first._begin()
    home = next(s for s in range(4) if shards.client(s).xlen(keys.outbox(s)))
    assert first._publish(home) == BATCH
    assert post.waiting() == 100
    # A publisher that dies half-way leaves a position of the new epoch: the next one must look at the topic again.
    with post.publishing():
        more = post.refuse(BATCH + 100, 5)
        post.wait_empty()
    assert post.ids() == ids + more


def test_a_publisher_without_a_broker_waits_and_ends_when_it_is_told_to(post: Post, kafka: EmbeddedKafka) -> None:
    lost = post.publisher()
    lost._properties["bootstrap.servers"] = "127.0.0.1:1"
    lost.start()
    time.sleep(0.2)
    lost.stop()
    assert lost.failure is None


def test_headers_go_along_and_what_a_topic_would_not_take_is_a_dead_letter(post: Post, kafka: EmbeddedKafka) -> None:
    shards, small = post.writer.shards, f"{post.topic}.small"
    admin = AdminClient({"bootstrap.servers": kafka.address, "log_level": 0})
    admin.create_topics([NewTopic(small, 1, 1, config={"max.message.bytes": "20000"})])[small].result(30)
    headers = msgspec.msgpack.encode([("trace", b"7"), ("empty", None)])
    for number, (id_, value) in enumerate([("fits", b"1"), ("large", b"x" * 30_000), ("fits-too", b"2")], 1):
        entry: Any = {"e": "1", "i": id_, "t": small, "k": "k", "v": value, "h": headers}
        shards.client(0).xadd(shards.keys.outbox(0), entry, f"{number}-0")
    publisher = post.publisher(targets={post.topic: 1, small: 1}, dead_letters=post.topic)
    publisher.start()
    try:
        post.wait_empty()
    finally:
        publisher.stop()
    (letter,) = post.letters()
    assert (letter["id"], letter["reason"], letter["bytes"], letter["topic"]) == ("large", "too-large", 30_000, small)
    consumer = Consumer({"bootstrap.servers": kafka.address, "group.id": small, "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(small, 0, 0)])
    first = consumer.poll(20)
    consumer.close()
    assert first is not None
    assert (first.key(), first.value()) == (b"k", b"1")
    assert first.headers() == [("trace", b"7"), ("empty", None), (ID_HEADER, b"fits")]

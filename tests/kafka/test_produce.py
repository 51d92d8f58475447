"""Topics on a real broker: acknowledged records are there, refused ones are reported, and a topic may come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tailrace.config.settings import load
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import BrokerUnavailable, ConfigError, EventRefused, StoreUnavailable
from tailrace.kafka.produce import NewEvent, TopicWriter
from tailrace.valkey.shards import Nodes, Shards, StoreOptions, prepare

_names = count()


@pytest.fixture
def topic() -> str:
    return f"topics-{next(_names)}"


@asynccontextmanager
async def opened(kafka: str, store: StoreOptions, folder: Path, **flags: object) -> AsyncIterator[TopicWriter]:
    empty = folder / "tailrace.toml"
    empty.touch()
    settings = load(empty, {"kafka.bootstrap": kafka} | {key.replace("__", "."): value for key, value in flags.items()})
    nodes = Nodes(store)
    topics = TopicWriter(settings, nodes)
    try:
        yield topics
    finally:
        await topics.close()
        await nodes.close()


def end_of(kafka: EmbeddedKafka, topic: str, partitions: int) -> int:
    reader = Consumer({"bootstrap.servers": kafka.address, "group.id": "check"})
    try:
        return sum(reader.get_watermark_offsets(TopicPartition(topic, p), timeout=10)[1] for p in range(partitions))
    finally:
        reader.close()


async def test_events_of_concurrent_puts_are_all_written_and_each_put_gets_its_own(
    kafka: EmbeddedKafka, store: StoreOptions, tmp_path: Path, topic: str
) -> None:
    async with opened(kafka.address, store, tmp_path) as topics:
        puts = [[NewEvent(b"%d" % n, b"k%d" % (n % 7)) for n in range(p, p + 300)] for p in range(0, 3000, 300)]
        answers = await asyncio.gather(*(topics.put(topic, events) for events in puts))
    places = {(w.partition, w.offset) for answer in answers for w in answer}
    assert len(places) == 3000 == end_of(kafka, topic, 4)
    for events, answer in zip(puts, answers, strict=True):
        for key in {event.key for event in events}:
            mine = [w for event, w in zip(events, answer, strict=True) if event.key == key]
            assert len({w.partition for w in mine}) == 1
            assert [w.offset for w in mine] == sorted(w.offset for w in mine)


async def test_keys_go_where_the_java_client_puts_them(
    kafka: EmbeddedKafka, store: StoreOptions, tmp_path: Path, topic: str
) -> None:
    async with opened(kafka.address, store, tmp_path, kafka__new_topic_partitions=10) as topics:
        written = await topics.put(topic, [NewEvent(b"1", key) for key in (b"kafka", b"", b"1234567")])
    # murmur2 of these keys, as Java's Utils.toPositive(Utils.murmur2(key)) % 10 gives them
    assert [w.partition for w in written] == [_murmur2(key) % 10 for key in (b"kafka", b"", b"1234567")]


def _murmur2(data: bytes) -> int:
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = (0x9747B28C ^ len(data)) & mask
    whole = len(data) & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & mask
        k = (k ^ (k >> 24)) * m & mask
        h = (h * m & mask) ^ k
    if rest := data[whole:]:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ (h >> 13)) * m & mask
    return (h ^ (h >> 15)) & 0x7FFFFFFF


async def test_a_topic_that_was_deleted_and_made_again_takes_events_with_ids_of_the_next_generation(
    kafka: EmbeddedKafka, store: StoreOptions, tmp_path: Path, topic: str
) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.address})
    shards = Shards(store).open()
    prepare(shards)
    async with opened(kafka.address, store, tmp_path, kafka__new_topic_partitions=1) as topics:
        (first,) = await topics.put(topic, [NewEvent(b"1")])
        shards.call(0, "adopt", topic, topics._configs[topic][1].id)
        admin.delete_topics([topic])[topic].result(10)
        await asyncio.sleep(1.1)
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(10)
        (second,) = await topics.put(topic, [NewEvent(b"2")])
        assert (first.id, second.id) == (f"{topic}:0:0", f"{topic}@1:0:0")
        shards.call(0, "adopt", topic, topics._configs[topic][1].id)
        await asyncio.sleep(1.1)
        (third,) = await topics.put(topic, [NewEvent(b"3")])
        assert third.id == f"{topic}@1:0:1"
    shards.close()


async def test_what_the_topic_would_not_take_is_refused_before_anything_is_written(
    kafka: EmbeddedKafka, store: StoreOptions, tmp_path: Path, topic: str
) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.address})
    config = {"message.timestamp.type": "CreateTime", "max.message.bytes": "10000"}
    config["message.timestamp.after.max.ms"] = "60000"
    admin.create_topics([NewTopic(topic, 1, 1, config=config)])[topic].result(10)
    async with opened(kafka.address, store, tmp_path) as topics:
        with pytest.raises(EventRefused, match=r"event 2 .*max\.message\.bytes"):
            await topics.put(topic, [NewEvent(b"1"), NewEvent(b"x" * 10_000)])
        late = round(time.time() * 1000) + 120_000
        with pytest.raises(EventRefused, match=r"event 1 .*future"):
            await topics.put(topic, [NewEvent(b"1", time_ms=late), NewEvent(b"2")])
    assert end_of(kafka, topic, 1) == 0


async def test_a_topic_that_cannot_be_made_is_refused_with_the_brokers_reason(
    kafka: EmbeddedKafka, store: StoreOptions, tmp_path: Path, topic: str
) -> None:
    async with opened(kafka.address, store, tmp_path, kafka__new_topic_replication=3) as topics:
        with pytest.raises(EventRefused, match="replication"):
            await topics.put(topic, [NewEvent(b"1")])


async def test_nothing_is_written_while_the_generation_is_unknown(
    kafka: EmbeddedKafka, tmp_path: Path, topic: str
) -> None:
    nowhere = StoreOptions("valkey://127.0.0.1:1/0", timeout_s=0.5)
    async with opened(kafka.address, nowhere, tmp_path, kafka__new_topic_partitions=1) as topics:
        with pytest.raises(StoreUnavailable):
            await topics.put(topic, [NewEvent(b"1")])
    assert end_of(kafka, topic, 1) == 0


@pytest.mark.jvm
async def test_a_broker_that_hangs_or_is_killed_is_reported_in_time_and_comes_back_without_a_restart(
    store: StoreOptions, tmp_path: Path, topic: str
) -> None:
    own = EmbeddedKafka(tmp_path / "kafka", memory="256m")
    own.start(90)
    try:
        async with opened(own.address, store, tmp_path, kafka__new_topic_partitions=1) as topics:
            for _ in range(3):  # the last one is quick, so that all is still known when the broker hangs
                await topics.put(topic, [NewEvent(b"1")])
                await asyncio.sleep(0.6)
            await topics.put(topic, [NewEvent(b"1")])
            os.kill(own.pid or 0, signal.SIGSTOP)
            with pytest.raises(BrokerUnavailable, match=r"2 of 2 .* may be written or not"):
                await topics.put(topic, [NewEvent(b"2"), NewEvent(b"3")])
            own.kill()
            with pytest.raises(BrokerUnavailable, match="nothing was written"):
                await topics.put(topic, [NewEvent(b"4")])
            own.start(90)
            (written,) = await topics.put(topic, [NewEvent(b"5")])
            assert written.offset >= 1
            assert end_of(own, topic, 1) == written.offset + 1
    finally:
        own.stop()


async def test_a_property_that_no_client_knows_is_an_error_of_the_settings(store: StoreOptions, tmp_path: Path) -> None:
    async with opened("127.0.0.1:1", store, tmp_path, kafka__properties={"no.such.property": "1"}) as topics:
        with pytest.raises(ConfigError, match=r"no\.such\.property"):
            await topics.put("any", [NewEvent(b"1")])

"""Ranges of offsets as tasks read them from a real Kafka: all committed records, in order, and nothing else."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from tailrace.driver.slice import RangeReader, RecordLimits, shared_out
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import BrokerUnavailable
from tailrace.valkey.shards import StoreOptions
from tests.views.grep.rig import random_records
from tests.views.grep.site import Site


def read(site: Site, ranges: dict[str, tuple[int, int]], wanted: bytes | None = None) -> tuple[list[str], int]:
    """Return the ids of what is read, and the bytes."""
    passes = None if wanted is None else lambda _, value: wanted in value
    found: list[str] = []
    size = 0
    for records, read_bytes in RangeReader({"bootstrap.servers": site.kafka, "log_level": 0})(ranges, passes):
        size += read_bytes
        found += [] if records is None else [f"{records.partition}:{offset}" for offset in records.offsets]
    return found, size


def test_ranges_are_read_to_their_ends_whatever_lies_there(kafka: EmbeddedKafka, store: StoreOptions) -> None:
    site = Site(kafka.address, store)
    topic = site.topic("a", 2)
    producer = Producer({"bootstrap.servers": site.kafka, "transactional.id": site.name, "log_level": 0})
    producer.init_transactions(30)
    for commit in (True, False, True, False):
        producer.begin_transaction()
        for n in range(10):
            producer.produce(topic, b'{"n":%d}' % n, b"x", n % 2)
        producer.flush(30)
        producer.commit_transaction(30) if commit else producer.abort_transaction(30)
    there = site.records()
    ends = {f"{topic}:{p}": end for (_, p), (_, end) in site.broker.bounds(site.broker.topics().values()).items()}
    found, size = read(site, {label: (0, end) for label, end in ends.items()})
    assert sorted(found) == sorted(site.ids(there))
    assert size == sum(len(r.key or b"") + len(r.value or b"") for r in there)
    for first in range(0, ends[f"{topic}:0"], 3):
        inside = [r for r in there if r.partition == 0 and first <= r.offset < first + 5]
        assert read(site, {f"{topic}:0": (first, first + 5)})[0] == site.ids(inside)
    assert read(site, {f"{topic}:0": (0, ends[f"{topic}:0"])}, b"4")[0] == site.ids(
        [r for r in there if r.partition == 0 and b"4" in (r.value or b"")]
    )


def test_what_kafka_has_dropped_is_passed_over_and_what_it_never_had_is_nothing(
    kafka: EmbeddedKafka, store: StoreOptions
) -> None:
    site = Site(kafka.address, store)
    topic = site.topic("a", 1)
    site.put([r._replace(value=r.value or b"{}") for r in random_records(site.chance, topic, 0, 50)])
    site.forget(topic, 0, 20)
    assert read(site, {f"{topic}:0": (5, 30)})[0] == [f"{topic}:0:{offset}" for offset in range(20, 30)]
    assert read(site, {f"{topic}:0": (5, 15)})[0] == []
    assert read(site, {f"{topic}:0": (70, 80)})[0] == []


def test_a_range_that_must_be_whole_has_all_records_or_is_an_error(kafka: EmbeddedKafka, store: StoreOptions) -> None:
    site = Site(kafka.address, store)
    topic = site.topic("a", 1)
    records = [r._replace(value=r.value or b"{}") for r in random_records(site.chance, topic, 0, 50)]
    records[7], records[9] = records[7]._replace(value=None), records[9]._replace(value=b"no JSON")
    site.put(records)
    reader, label, limits = RangeReader({"bootstrap.servers": site.kafka, "log_level": 0}), f"{topic}:0", RecordLimits()
    parts = list(reader.whole({label: (5, 50)}, limits))
    offsets = [offset for part in parts for offset in part.offsets]
    assert offsets == list(range(5, 50))
    assert [value for part in parts for value in part.values] == [r.value for r in records[5:]]
    assert 9 in [part.offsets[i] for part in parts for i in part.poison]
    site.forget(topic, 0, 20)
    for lost in ((5, 30), (5, 15), (70, 80)):
        with pytest.raises(BrokerUnavailable):
            list(reader.whole({label: lost}, limits))
    (part,) = reader.whole({label: (20, 22)}, limits)
    assert part.offsets == [20, 21]


def test_a_range_that_may_be_cut_is_shared_by_all_tasks() -> None:
    ranges = {"t:0": (5, 95), "t:1": (0, 7), "t:2": (0, 3)}
    parts = shared_out(ranges, 4, cut=True)
    read = sorted((label, n) for part in parts for label, (first, until) in part.items() for n in range(first, until))
    assert read == sorted((label, n) for label, (first, until) in ranges.items() for n in range(first, until))
    assert len(parts) == 4
    assert max(sum(until - first for first, until in part.values()) for part in parts) <= 35
    assert shared_out({}, 4, cut=True) == []


def test_a_source_is_read_by_one_task_and_all_have_about_as_much() -> None:
    ranges = {f"t:{n}": (0, size) for n, size in enumerate((9, 1, 4, 4, 1, 1))}
    parts = shared_out(ranges, 3)
    assert {label: each for part in parts for label, each in part.items()} == ranges
    assert sorted(sum(until for _, until in part.values()) for part in parts) == [5, 6, 9]
    assert len(shared_out(ranges, 10)) == 6

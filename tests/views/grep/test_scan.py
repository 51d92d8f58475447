"""Scans of the past by a real Spark: complete, each match once, whoever stops in the middle; and never twice."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Producer

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import StaleDriver
from tailrace.http.service import now_ms
from tailrace.log.event import iso_time, shard_of
from tailrace.testing.installation import wait_for
from tailrace.valkey.shards import StoreOptions
from tailrace.views.grep import driver as module
from tailrace.views.grep.model import Search, SearchLife, Stretch, make_search
from tailrace.views.grep.store import pending_stretches
from tests.views.grep.rig import random_records, random_search, read_log
from tests.views.grep.site import Site, assert_same, ids
from tests.writing import NOON, Record

EACH = 200


@pytest.fixture
def site(kafka: EmbeddedKafka, store: StoreOptions, spark: Any) -> Site:
    return Site(kafka.address, store, spark=spark)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """About six chunks instead of one."""
    monkeypatch.setattr(module, "next_chunk", partial(module.next_chunk, most=EACH * 4 // 6))


def fill(site: Site) -> list[str]:
    """Two topics of two partitions; one has also records of transactions, some of which were aborted."""
    topics = [site.topic(name, 2) for name in ("a", "b")]
    for topic in topics:
        for partition in range(2):
            site.put(random_records(site.chance, topic, partition, EACH))
    producer = Producer({"bootstrap.servers": site.kafka, "transactional.id": site.name, "log_level": 0})
    producer.init_transactions(30)
    for commit in (True, False, True, False):
        producer.begin_transaction()
        for n in range(5):
            producer.produce(topics[0], json.dumps({"a": n}).encode(), b"x", 1, timestamp=NOON)
        producer.flush(30)
        producer.commit_transaction(30) if commit else producer.abort_transaction(30)
    return topics


async def asked_for(site: Site, search: Search, since_ms: int = 0) -> tuple[SearchLife, list[Stretch]]:
    """Ask for the past as a feed does; return the stretches."""
    async with site.serving() as serving:
        feed = await serving.open(search, start=iso_time(since_ms) if since_ms else "start")
        await feed.aclose()
        life = await serving.grep.searches.register(search, now_ms())
        stretches, _ = await serving.grep.searches.stretches(life)
        return life, stretches


async def logged(site: Site, life: SearchLife, stretches: list[Stretch]) -> list[str]:
    """Return what the logs of stretches have, the oldest first."""
    logs = [await read_log(site.store, stretch.name(life)) for stretch in reversed(stretches)]
    return [f"{source}:{offset}" for log in logs for source, offset in log]


async def test_a_stretch_over_topics_and_partitions_is_scanned_completely(site: Site, small_chunks: None) -> None:
    fill(site)
    searches = [random_search(site.chance) for _ in range(3)]
    lives = [await asked_for(site, search) for search in searches]
    assert site.scan() >= 6
    for search, (life, stretches) in zip(searches, lives, strict=True):
        assert_same(await logged(site, life, stretches), site.ids(site.offline(search)))
    assert pending_stretches(site.shards) == []
    chunks = site.scanner.chunks
    assert all(len(chunk.dues) == 3 for chunk in chunks), "who asks for the same past shares its chunks"
    size = sum(len(record.key or b"") + len(record.value or b"") for record in site.records())
    async with site.serving() as serving:
        for life, [stretch] in lives:
            assert await serving.grep.searches.read_bytes(life, stretch.number) == size


async def test_a_second_caller_gets_what_was_scanned_and_an_older_time_scans_only_what_lies_in_front(
    site: Site,
) -> None:
    topics = [site.topic("a", 2)]
    for partition in range(2):
        values = [json.dumps({"n": n}).encode() for n in range(100)]
        site.put([Record(n, b"k", value, NOON + 1000 * n, partition, topics[0]) for n, value in enumerate(values)])
    search = make_search(".*", {"n": {"$mod": [7, 0]}})
    site.live()
    async with site.serving() as serving:
        reading = asyncio.create_task(serving.all(search, start=iso_time(NOON + 60_000)))
        while not reading.done():
            await asyncio.to_thread(site.scan)
            await asyncio.sleep(0.05)
        assert_same(ids(reading.result()), site.ids(site.offline(search, NOON + 60_000)))
        read = [chunk.ranges for chunk in site.scanner.chunks]
        assert read == [{f"{topics[0]}:{p}": (60, 100) for p in range(2)}]
        jobs = site.spark.sparkContext.statusTracker().getJobIdsForGroup(None)
        for since in (60_000, 75_000):
            found = ids(await serving.all(search, start=iso_time(NOON + since)))
            assert_same(found, site.ids(site.offline(search, NOON + since)))
        assert site.scan() == 0
        assert site.spark.sparkContext.statusTracker().getJobIdsForGroup(None) == jobs
        reading = asyncio.create_task(serving.all(search, start=iso_time(NOON + 20_000)))
        while not reading.done():
            await asyncio.to_thread(site.scan)
            await asyncio.sleep(0.05)
        assert_same(ids(reading.result()), site.ids(site.offline(search, NOON + 20_000)))
        assert [chunk.ranges for chunk in site.scanner.chunks[1:]] == [{f"{topics[0]}:{p}": (20, 60) for p in range(2)}]


async def test_a_scan_that_is_stopped_in_the_middle_is_finished_by_the_next_driver(
    site: Site, small_chunks: None
) -> None:
    fill(site)
    search = make_search(".*", {"a": {"$exists": True}})
    life, stretches = await asked_for(site, search)
    [stretch] = stretches
    for _ in range(2):
        scanner, before = site.scanner, _marks(site, life, stretch)
        scanner.start()
        await asyncio.to_thread(wait_for, "some of it", lambda: _marks(site, life, stretch) != before)  # noqa: B023
        scanner.stop()
        assert scanner.failure is None
        site.drive()
        with pytest.raises(StaleDriver):
            scanner._advance(scanner.chunks[-1])  # the old driver, back from the dead
    assert pending_stretches(site.shards), "it was stopped before it was done"
    site.scan()
    assert_same(await logged(site, life, stretches), site.ids(site.offline(search)))


def _marks(site: Site, life: SearchLife, stretch: Stretch) -> list[bytes | None]:
    shard = shard_of(stretch.name(life), site.store.shards)
    key = site.shards.keys.marks(shard, "matches")
    [stored] = site.shards.run_all([(shard, ("HMGET", key, *map(stretch.mark, stretch.ranges)))])
    found: list[bytes | None] = stored
    return found


async def test_a_chunk_that_two_drivers_read_is_written_once(site: Site, small_chunks: None) -> None:
    fill(site)
    search = make_search(".*", {})
    life, stretches = await asked_for(site, search)
    old = site.scanner
    assert old.step()
    site.drive()
    failures: list[BaseException] = []

    def go_on() -> None:
        try:
            while old.step():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    site.scan()
    thread.join(60)
    assert not thread.is_alive()
    assert all("StaleDriver" in f"{failure!r} {failure}" for failure in failures), failures
    assert_same(await logged(site, life, stretches), site.ids(site.offline(search)))


@pytest.mark.parametrize("again", [False, True])
async def test_the_past_of_a_topic_that_is_gone_is_done_with(site: Site, again: bool) -> None:
    topics = fill(site)
    search = make_search(".*", {})
    life, stretches = await asked_for(site, search)
    site.drive()
    site.delete(topics[0])
    if again:
        site.topic("a", 2)
        site.put([Record(0, b"k", b'{"new":true}', NOON, 0, topics[0])])
    site.drive()  # the driver has noticed
    site.scan()
    assert pending_stretches(site.shards) == []
    found = await logged(site, life, stretches)
    assert_same(found, [event for event in site.ids(site.offline(search)) if event.startswith(topics[1])])


async def test_what_kafka_drops_before_it_is_scanned_is_passed_over(site: Site, small_chunks: None) -> None:
    topics = fill(site)
    search = make_search(".*", {})
    life, stretches = await asked_for(site, search)
    site.forget(topics[0], 0, EACH // 2 + 1)
    site.forget(topics[1], 1, EACH)
    site.scan()
    assert pending_stretches(site.shards) == []
    async with site.serving() as serving:
        lost = await serving.grep.searches.lost(life, stretches[0].number)
    assert [(each.source, each.first, each.until, each.reason) for each in lost] == [
        (f"{topics[0]}:0", 0, EACH // 2 + 1, "expired"),
        (f"{topics[1]}:1", 0, EACH, "expired"),
    ]
    assert_same(await logged(site, life, stretches), site.ids(site.offline(search)))

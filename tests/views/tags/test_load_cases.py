"""Behaviour cases of load (P): many readers follow tags while many sources are written; order and completeness.

Records are up to minutes old when they are written, so that partitions run ahead of each other and rows appear behind
their readers. A reader that breaks off goes on from its cursor; nobody gets a second try.
"""

# ruff: noqa: N802 cases have their ids in the names of their tests

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import msgspec
import pytest

from tailrace.driver.one_pass import Host
from tailrace.driver.slice import Plan
from tailrace.log.event import Partition
from tailrace.log.request import AnyFeed, EventFrame
from tailrace.valkey.marks import advance
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.rows.cassandra import disconnect
from tailrace.views.tags.settings import CassandraSettings
from tailrace.views.tags.store import VIEW, raise_floors
from tailrace.views.tags.write import TagsPlan
from tests.views.tags.reading import Reading, reading
from tests.views.tags.stored import MINUTE, TOPIC, Stored
from tests.views.tags.tagged import apart
from tests.writing import Record, batch

SPREAD = 3 * MINUTE
"""Milliseconds from the first events to the last, which are new."""


class Share(msgspec.Struct, frozen=True):
    """Load of one writer: a partition with sources of its own, in turns, with pauses."""

    partition: int
    sources: tuple[str, ...]
    each: int
    tags: tuple[str, ...]
    at_once: int = 25
    pause_s: float = 0.02

    @property
    def ids(self) -> list[str]:
        return [f"{TOPIC}:{self.partition}:{offset}" for offset in range(len(self.sources) * self.each)]


def write(plan: Plan, share: Share) -> None:
    """Write a share, as a task of its own does; and raise the floor of what is written to its end, as the driver."""
    host, chance = Host(plan), random.Random(share.partition)
    total, place = len(share.sources) * share.each, Partition(TOPIC, share.partition)
    begin, at = round(time.time() * 1000) - SPREAD, 0
    while at < total:
        end = min(total, at + chance.randint(1, share.at_once))
        records = [
            Record(
                offset,
                share.sources[offset % len(share.sources)].encode(),
                msgspec.json.encode({"tags": share.tags, "n": offset}),
                begin + SPREAD * offset // total,
                share.partition,
                TOPIC,
            )
            for offset in range(at, end)
        ]
        if chance.random() < 0.1:
            host.take(batch(records[: len(records) // 2 + 1]))  # a part that is written, and then again
        host.take(batch(records))
        at = end
        advance(host._shards, VIEW, plan.epoch, {place: at - 1})
        if chance.random() < 0.3:
            raise_floors(host._shards, plan.epoch, {place: begin + SPREAD * at // total})
        time.sleep(chance.random() * share.pause_s)
    host.close()
    cassandra = plan.of(TagsPlan).cassandra
    if cassandra is not None and multiprocessing.parent_process() is not None:
        disconnect(cassandra)


class Reader:
    """Follows tags, and holds what it gets against what it should; breaks off within so many events, if it does."""

    def __init__(self, feeds: Reading, tags: Sequence[str], *, within: int = 0, seed: int = 0) -> None:
        self._feeds, self._tags, self._within, self._chance = feeds, tags, within, random.Random(seed)
        self._break = self._chance.randint(1, within) if within else 0
        self._numbers: dict[str, int] = {}
        self._offsets: dict[str, int] = {}
        self.ids: list[str] = []
        self.opened = 0

    async def until(self, count: int) -> None:
        """Follow until so many events have come, and then a little longer."""
        cursor = ""
        while len(self.ids) < count:
            feed = await self._feeds.open(*self._tags, **({"after": cursor} if cursor else {"start": "start"}))
            self.opened += 1
            try:
                cursor = await self._follow(feed, cursor, count)
            finally:
                await feed.aclose()
        rest = await self._feeds.open(*self._tags, after=cursor, follow=False)
        async for frames in rest:
            for frame in frames:
                assert not isinstance(frame, EventFrame), f"more than {count}: {frame.data!r}"

    async def _follow(self, feed: AnyFeed, cursor: str, count: int) -> str:
        async for frames in feed:
            for frame in frames:
                if isinstance(frame, EventFrame):
                    self._take(json.loads(frame.data))
                    cursor = frame.cursor
                    if len(self.ids) == self._break:
                        self._break += self._chance.randint(1, self._within)
                        return cursor
            if len(self.ids) >= count:
                return cursor
        raise AssertionError("a feed that follows has ended")

    def _take(self, event: dict[str, Any]) -> None:
        pid = event["source"]
        self.ids.append(event["id"])
        assert event["offset"] > self._offsets.get(pid, -1), (self._tags, event)
        self._offsets[pid] = event["offset"]
        if len(self._tags) == 1:
            assert event["tag_seq"] == self._numbers.get(pid, 0) + 1, (self._tags, event)
            self._numbers[pid] = event["tag_seq"]


async def run(plan: Plan, shares: Sequence[Share], readers: Sequence[Reader]) -> None:
    """Write all shares at once, each in a thread, while the readers follow; each has to get everything."""
    wanted = sorted(event for share in shares for event in share.ids)
    failed: list[BaseException] = []

    def wrote(share: Share) -> None:
        try:
            write(plan, share)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=wrote, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    try:
        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            for reader in readers:
                group.create_task(reader.until(len(wanted)))
    finally:
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert failed == []
    for reader in readers:
        assert sorted(reader.ids) == wanted


@pytest.fixture(params=["valkey", "cassandra"])
def in_rows(request: pytest.FixtureRequest) -> CassandraSettings | None:
    """Options of Cassandra; None if events rest in Valkey."""
    return request.getfixturevalue("rows_store") if request.param == "cassandra" else None


@pytest.mark.slow
async def test_P_01_twenty_readers_of_one_tag_see_all_that_ten_writers_write(
    store: StoreOptions, in_rows: CassandraSettings | None
) -> None:
    stored = Stored(store, in_rows, batch=25)
    shares = [Share(p, (f"p{p}",), 200, ("red",)) for p in range(10)]
    async with reading(store, in_rows, bucket="minute") as feeds:
        await run(stored.driver.plan, shares, [Reader(feeds, ("red",), seed=i) for i in range(20)])
    stored.close()


@pytest.mark.slow
async def test_P_02_fifty_sources_in_three_tags_are_complete_and_in_order_for_twenty_readers(
    store: StoreOptions, in_rows: CassandraSettings | None
) -> None:
    stored = Stored(store, in_rows, batch=25, bucket="minute")
    tags = tuple(apart(store, 3))
    shares = [Share(p, tuple(f"p{p}-{i}" for i in range(5)), 100, tags, pause_s=0.1) for p in range(10)]
    async with reading(store, in_rows, bucket="minute") as feeds:
        readers = [Reader(feeds, (tags[i % 3],), within=1_500 * (i % 2), seed=i) for i in range(15)]
        readers += [Reader(feeds, (tags[i % 3], tags[(i + 1) % 3]), within=1_500 * (i % 2), seed=i) for i in range(5)]
        await run(stored.driver.plan, shares, readers)
        assert sum(reader.opened for reader in readers) >= len(readers) + 10
    counts = {tag: len(held) for tag, held in stored.held().items()}
    assert counts == dict.fromkeys(tags, 5_000)
    stored.close()


def write_node(plan: Plan, shares: Sequence[Share]) -> None:
    """A process that writes, one share after the other."""
    for share in shares:
        write(plan, share)


def read_node(store: StoreOptions, in_rows: CassandraSettings | None, tag: str, wanted: Sequence[str]) -> int:
    """A process with ten readers; returns how many had everything."""

    async def read() -> int:
        async with reading(store, in_rows, bucket="minute") as feeds:
            readers = [Reader(feeds, (tag,), within=400, seed=i) for i in range(10)]
            async with asyncio.timeout(90), asyncio.TaskGroup() as group:
                for reader in readers:
                    group.create_task(reader.until(len(wanted)))
        return sum(sorted(reader.ids) == wanted for reader in readers)

    return asyncio.run(read())


@pytest.mark.slow
def test_P_03_readers_in_two_processes_see_all_that_two_others_write(
    store: StoreOptions, in_rows: CassandraSettings | None
) -> None:
    stored = Stored(store, in_rows, bucket="minute")
    shares = [Share(p, (f"p{p}",), 40, ("red",), pause_s=0.05) for p in range(20)]
    wanted = sorted(event for share in shares for event in share.ids)
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as nodes:
        readers = [nodes.submit(read_node, store, in_rows, "red", wanted) for _ in range(2)]
        writers = [nodes.submit(write_node, stored.driver.plan, shares[i::2]) for i in range(2)]
        assert [writer.result(120) for writer in writers] == [None, None]
        assert [reader.result(120) for reader in readers] == [10, 10]
    stored.close()

"""Behaviour cases of live feeds (L): what there is, and then whatever is written, as it is written.

Cases that both stores can have run over both. A log in Valkey has the order in which events were written, and needs no
delay for it; rows come in the order of their timeuuids, as far as the delay lets it.
"""

# ruff: noqa: N802 cases have their ids in the names of their tests

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest

import tailrace
from tailrace.errors import UsageError
from tailrace.log import feed as log
from tailrace.log.event import iso_time
from tailrace.testing.installation import served
from tailrace.valkey.marks import read_marks
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.rows import cassandra as schema
from tailrace.views.tags.rows import feed as tag_rows_feed
from tailrace.views.tags.rows.cassandra import CassandraConnection
from tailrace.views.tags.rows.feed import CassandraTags
from tailrace.views.tags.settings import CassandraSettings
from tailrace.views.tags.store import VIEW, LevelReader, Levels
from tests.log.rig import controls, now_ms
from tests.views.tags.cases import DAY, HOUR, MINUTE, SECOND, World, in_turn, run
from tests.views.tags.reading import events
from tests.writing import Record, Writer, read_view


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feed yields one event at a time: it goes on only when its consumer asks again."""
    monkeypatch.setattr(log, "BATCH_BYTES", 1)
    monkeypatch.setattr(tag_rows_feed, "BATCH_BYTES", 1)


async def test_L_01_a_tag_without_events_is_followed_in_silence(world: World) -> None:
    async with world.reading(refresh="50ms") as read:
        follower = await read.follow("green")
        await follower.wait_for_control("caught-up")
        await follower.is_silent()
        assert controls(follower.frames) == ["caught-up"]
        world.write("a", "green")
        assert await follower.until(1) == ["a:1"]


async def test_L_02_a_consumer_gets_the_third_event_when_it_asks_for_it(world: World, small_batches: None) -> None:
    world.write("a", "green")
    async with world.reading() as read:
        pulled = await read.pull("green")
        assert await pulled.take(1) == ["a:1"]
        world.write("a", "green", count=2)
        assert await pulled.take(1) == ["a:2"]
        await asyncio.sleep(0.1)
        assert await pulled.take(1) == ["a:3"]


async def test_L_03_a_live_feed_begins_at_a_time_or_after_an_event_and_stays_open(world: World) -> None:
    begin = now_ms() - 10 * SECOND
    world.write("a", "green", count=4, at=begin, step=SECOND)
    async with world.reading() as read:
        second = events(await read.all("green"))[1]
        by_time = await read.follow("green", start=iso_time(begin + SECOND))
        by_place = await read.follow("green", after=second.cursor)
        assert await by_time.until(3) == run("a", 2, 4)
        assert await by_place.until(2) == run("a", 3, 4)
        world.write("a", "green")
        assert await by_time.until(4) == run("a", 2, 5)
        assert await by_place.until(3) == run("a", 3, 5)


@pytest.mark.parametrize("partition", [0, 1])
async def test_L_04_what_is_written_now_of_some_minutes_ago_is_delivered(world: World, partition: int) -> None:
    now = now_ms()
    world.begin(2)
    world.write("a", "green", at=now - 2 * DAY)
    world.write("a", "green", at=now - DAY)
    async with world.reading() as read:
        follower = await read.follow("green")
        assert await follower.until(2) == ["a:1", "a:2"]
        world.write(f"a{partition}", "green", at=now - 5 * MINUTE, partition=partition)
        world.write(f"a{partition}", "green", partition=partition)
        assert (await follower.until(4))[2:] == run(f"a{partition}", 1, 2)


async def test_L_05_the_delay_keeps_the_order_of_time_across_sources(world: World) -> None:
    """Of a log in Valkey the order is that of writing, which is each source's own."""
    world.begin(2)
    at = now_ms()
    world.write("p1", "green", at=at - SECOND)
    world.write("p1", "green", at=at)
    async with world.reading(delay="2s") as read:
        follower = await read.follow("green")
        world.write("p2", "green", at=at - 1, partition=1)
        found = await follower.until(3)
    assert found == (["p1:1", "p2:1", "p1:2"] if world.in_rows else ["p1:1", "p1:2", "p2:1"])


async def test_L_06_what_is_written_while_the_feed_is_drained_follows_in_order(world: World) -> None:
    world.write("a", "green", count=100)
    async with world.reading() as read:
        follower = await read.follow("green")
        assert await follower.until(100) == run("a", 1, 100)
        await follower.is_silent(0.2)
        for _ in range(10):
            await asyncio.to_thread(world.write, "a", "green", count=10)
        assert await follower.until(200) == run("a", 1, 200)
        await follower.is_silent(0.2)


async def test_L_07_looking_back_while_old_buckets_are_read_skips_nothing(world: World) -> None:
    world.bucket = "day"
    world.begin(2)
    now = now_ms()
    for partition, pid in enumerate("ab"):
        world.write(pid, "green", count=1_000, at=now - 1_000 * DAY, step=DAY, partition=partition)
    async with world.reading(back_track="20ms", back_track_period="max", long_back_track="off", page=50) as read:
        follower = await read.follow("green", start=iso_time(now - 1_001 * DAY))
        found = await follower.until(2_000, 60)
        world.write("a", "green")
        assert (await follower.until(2_001))[-1] == "a:1001"
    assert len(set(found)) == 2_000
    assert in_turn(found)


async def test_L_08_new_events_that_come_while_nobody_asks_wait(world: World, small_batches: None) -> None:
    now = now_ms()
    for hours in (5, 3, 1):
        world.write("a", "green", count=2, at=now - hours * HOUR)
    async with world.reading() as read:
        pulled = await read.pull("green")
        found = await pulled.take(2)
        world.write("a", "green", count=3)
        found += await pulled.take(2)
        await asyncio.sleep(0.1)
        world.write("a", "green", count=3)
        for _ in range(4):
            found += await pulled.take(2)
        assert found == run("a", 1, 12)


async def test_L_09_of_many_sources_those_with_earlier_timeuuids_come_first(world: World) -> None:
    """Of a log in Valkey the order is that of writing."""
    world.begin(2)
    now = now_ms()
    later = [world.draft(f"a{n}", "green", at=now + n, partition=0) for n in range(101, 201)]
    earlier = [world.draft(f"a{n}", "green", at=now + n, partition=1) for n in range(1, 71)]
    async with world.reading(delay="2s") as read:
        follower = await read.follow("green")
        world.writer.write(later)
        world.writer.write(earlier)
        found = await follower.until(170)
    first, second = [f"a{n}:1" for n in range(1, 71)], [f"a{n}:1" for n in range(101, 201)]
    assert found == (first + second if world.in_rows else second + first)


# Notifications.


async def test_L_10_a_notification_wakes_a_reader_long_before_the_refresh(world: World) -> None:
    async with world.reading(delay="0s", refresh="1h", back_track="off", long_back_track="off") as read:
        follower = await read.follow("green")
        await follower.wait_for_control("caught-up")
        for n in range(1, 11):
            world.write("a", "green", partition=n % 3)
            assert (await follower.until(n, 20))[-1] == f"a:{n}"


async def test_L_10_without_notifications_the_refresh_finds_what_is_written(
    store: StoreOptions, rows_store: CassandraSettings
) -> None:
    world = World(store, rows_store)
    async with world.reading(notify=False, refresh="200ms", back_track="off", long_back_track="off") as read:
        follower = await read.follow("green")
        world.write("a", "green", count=3)
        assert await follower.until(3) == run("a", 1, 3)
    world.close()


class CountedFloors(LevelReader):
    """Counts the looks."""

    looks = 0

    async def read(self, tags: Iterable[str]) -> dict[str, Levels]:
        self.looks += 1
        return await super().read(tags)


async def test_L_11_notifications_of_one_interval_are_folded_into_one_look(
    store: StoreOptions, rows_store: CassandraSettings
) -> None:
    world = World(store, rows_store)
    delay_ms = 2_000
    quiet: dict[str, Any] = {"refresh": "1h", "back_track": "off", "long_back_track": "off"}
    async with world.reading(delay=f"{delay_ms}ms", **quiet) as read, world.reading(delay="0s", **quiet) as other:
        followers = []
        counted = []
        for each in (read, other):
            assert isinstance(each.feeds, CassandraTags)
            views = each.feeds
            views._levels = CountedFloors(views._levels._nodes)
            counted.append(views._levels)
            followers.append(await each.follow("green" if each is read else "black"))
        await followers[0].wait_for_control("caught-up")
        before, begin = [each.looks for each in counted], now_ms()
        for _ in range(60):
            await asyncio.to_thread(world.write, "a", "green")
        assert await followers[0].until(60) == run("a", 1, 60)
        fold_ms = delay_ms // 20
        assert counted[0].looks - before[0] <= (now_ms() - begin) / fold_ms + 2
        assert counted[1].looks - before[1] <= 1, "what is told of one tag wakes no reader of another"
        world.write("b", "black")
        assert await followers[1].until(1, 20) == ["b:1"], "a first one passes at once"
    world.close()


# What is not shown, what is not kept, and what is off.


async def test_L_12_what_a_query_leaves_out_disturbs_no_numbers(world: World) -> None:
    """There are no adapters that would drop, double or change events; a feed's query is what leaves some out."""
    async with world.reading(gap_timeout="200ms") as read:
        follower = await read.follow("green", query={"n": {"$ne": 2}})
        for n in range(1, 6):
            world.write("a", "green", n=n % 3)
            world.write("a", n=n % 3)
        assert await follower.until(3) == ["a:1", "a:3", "a:4"]
        await follower.is_silent(0.4)
        cursor = events(follower.frames)[-1].cursor
        assert await read.current("green", after=cursor) == ["a:5"]


def test_L_13_the_table_of_tags_keeps_rows_as_long_as_is_said(rows_store: CassandraSettings) -> None:
    for keep in (timedelta(days=3, seconds=7), None, timedelta(hours=1)):
        schema.prepare(rows_store, keep)
        connection = CassandraConnection(rows_store).open()
        text = "SELECT default_time_to_live FROM system_schema.tables WHERE keyspace_name = %s AND table_name = %s"
        ((ttl,),) = connection.execute(text, (rows_store.keyspace, "tag_views"))
        connection.close()
        assert ttl == (0 if keep is None else keep.total_seconds())


async def test_L_14_where_nothing_is_tagged_feeds_say_so_and_everything_else_works(store: StoreOptions) -> None:
    driver = Writer(store, ("intake", "days"))
    driver.write([Record(n, value=b'{"tags":["green"]}') for n in range(3)])
    with served(store) as running:
        async with tailrace.connect(running.url) as river:
            for follow in (True, False):
                with pytest.raises(UsageError, match=r"nothing is tagged here: set tags\.paths") as refused:
                    await anext(aiter(river.tagged("green", follow=follow)))
                assert refused.value.code == "tags.off"
    assert await read_view(store) == {"queue/jobset": [f"jobs:0:{n}" for n in range(3)]}
    assert read_marks(driver.shards, VIEW) == [{}] * store.shards
    driver.host.close()
    driver.shards.close()

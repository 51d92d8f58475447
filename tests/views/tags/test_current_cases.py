"""Behaviour cases of current feeds (C): what was there when a feed began, in order, and then its end.

Cases that both stores can have run over both, written by the pipeline's own path. "Demand" is a consumer that pulls:
nothing is lost or doubled however slowly it does. What only a reader of rows meets, rows that another writer makes
visible late, is written by somebody else; of our own rows a reader sees none that the mark has not passed.
"""

# ruff: noqa: N802 cases have their ids in the names of their tests

from __future__ import annotations

import asyncio

import pytest

from tailrace.errors import RowsMissing
from tailrace.log import feed as log
from tailrace.log.event import iso_time
from tailrace.log.request import AnyFrame
from tailrace.log.timeuuid import ms_of, order
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.rows import feed as tag_rows_feed
from tailrace.views.tags.settings import CassandraSettings
from tests.log.rig import controls, now_ms
from tests.views.tags.cases import DAY, HOUR, SECOND, World, in_turn, run, shown, timeuuids
from tests.views.tags.reading import events, names
from tests.views.tags.stored import Died, dying


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feed yields one event at a time: it goes on only when its consumer asks again."""
    monkeypatch.setattr(log, "BATCH_BYTES", 1)
    monkeypatch.setattr(tag_rows_feed, "BATCH_BYTES", 1)


# Both stores.


async def test_C_01_a_tag_has_the_events_that_have_it_and_one_with_two_tags_is_in_both(
    world: World, small_batches: None
) -> None:
    begin = now_ms() - SECOND
    world.begin(2)
    for at, tags in enumerate([(), ("green", "apple"), (), ("green",)]):
        world.write("a", *tags, at=begin + at)
    world.write("b", "black", at=begin + 10, partition=1)
    world.write("b", "green", at=begin + 11, partition=1)
    world.settle()
    async with world.reading() as read:
        pulled = await read.pull("green", follow=False)
        assert await pulled.take(2) == ["a:1", "a:2"]
        assert await pulled.take(2) == ["b:1"]
        assert pulled.controls == ["caught-up", "end"]
        green, black, apple = [shown(await read.all(tag)) for tag in ("green", "black", "apple")]
        assert [(each["source"], each["seq"]) for each in green] == [("a", 1), ("a", 3), ("b", 1)]
        assert [each["id"] for each in black] == ["jobs:1:0"]
        assert [(each["id"], each["tags"]) for each in apple] == [("jobs:0:1", ["green", "apple"])]


async def test_C_02_a_tag_that_no_event_has_ends_at_once(world: World) -> None:
    world.write("a", "green")
    async with world.reading() as read:
        assert await read.current("black") == []


async def test_C_03_what_is_written_after_a_current_feed_began_is_not_in_it(world: World, small_batches: None) -> None:
    world.write("a", "green", count=3)
    async with world.reading() as read:
        pulled = await read.pull("green", follow=False)
        assert await pulled.take(2) == ["a:1", "a:2"]
        await asyncio.sleep(0.01)
        world.write("a", "green")
        assert await pulled.take(9) == ["a:3"]
        assert pulled.controls == ["caught-up", "end"]
        assert await read.current("green") == run("a", 1, 4)


async def test_C_04_a_start_at_a_millisecond_shows_all_of_that_millisecond(world: World) -> None:
    world.begin(2)
    second = now_ms() - HOUR
    world.write("a", "green", at=second - 1)
    world.write("a", "green", at=second, count=2)
    world.write("b", "green", at=second, partition=1)
    world.write("a", "green", at=second + 1)
    async with world.reading() as read:
        assert sorted(await read.current("green", start=iso_time(second))) == ["a:2", "a:3", "a:4", "b:1"]
        assert await read.current("green", start=iso_time(second + 1)) == ["a:4"]


async def test_C_05_the_exact_place_of_an_event_is_exclusive(world: World) -> None:
    world.begin(2)
    for at in range(4):
        world.write("a", "green", count=2, at=now_ms() - HOUR + at)
        world.write("b", "green", at=now_ms() - HOUR + at, partition=1)
    world.settle()
    async with world.reading() as read:
        frames = events(await read.all("green"))
        for at, frame in enumerate(frames, 1):
            assert await read.current("green", after=frame.cursor) == names(frames[at:])


async def test_C_06_every_event_has_a_time_that_is_not_in_the_future_and_does_not_fall(world: World) -> None:
    for _ in range(5):
        world.write("a", "green", count=3, at=now_ms() + DAY)  # what a record says of its time may be wrong
        world.write("b", "green", count=3, partition=1)
        world.settle()
    latest = now_ms() + SECOND  # as far ahead as tags.future_limit allows
    async with world.reading(delay="1100ms") as read:
        found = timeuuids(await read.all("green"))
    assert len(found) == 30
    assert all(0 < ms_of(each) <= latest for each in found)
    if world.in_rows:
        assert [order(each) for each in found] == sorted(map(order, found))


async def test_C_07_empty_buckets_between_are_passed_and_the_consumer_may_pause(
    world: World, small_batches: None
) -> None:
    today = now_ms()
    for days in (5, 5, 4, 2):
        world.write("a", "green", at=today - days * DAY)
    async with world.reading() as read:
        pulled = await read.pull("green", follow=False)
        assert await pulled.take(2) == ["a:1", "a:2"]
        await asyncio.sleep(0.1)
        assert await pulled.take(5) == ["a:3", "a:4"]
        assert pulled.controls == ["caught-up", "end"]


async def test_C_08_a_current_feed_over_rows_waits_the_delay_out_before_it_ends(world: World) -> None:
    """New events come when the delay is over, not before; the feed does not wait for a refresh.

    A log in Valkey needs no delay.
    """
    delay_ms = 600
    world.write("a", "green", count=3)
    async with world.reading(delay=f"{delay_ms}ms", refresh="1h", back_track="off", long_back_track="off") as read:
        feed = await read.open("green", follow=False)
        frames: list[AnyFrame] = []
        async for batch in feed:
            if world.in_rows and events(batch):
                assert now_ms() >= max(map(ms_of, timeuuids(batch))) + delay_ms
            frames += batch
    assert names(frames) == run("a", 1, 3)
    assert controls(frames) == ["caught-up", "end"]


@pytest.mark.parametrize("count", [1, 3, 4, 6, 7])
async def test_C_09_nothing_is_lost_where_a_page_ends(world: World, count: int) -> None:
    for _ in range(count):
        world.write("a", "green")
    async with world.reading(page=3) as read:
        assert await read.current("green") == run("a", 1, count)


async def test_C_10_events_of_several_buckets_come_in_order(world: World) -> None:
    now = now_ms()
    for hours in (7, 7, 3, 1, 1):
        world.write("a", "green", at=now - hours * HOUR, count=2)
    async with world.reading() as read:
        assert await read.current("green") == run("a", 1, 10)
        assert await read.current("green", start="-90m") == run("a", 7, 10)


async def test_C_14_a_start_in_an_old_bucket_shows_what_is_there_without_a_search(world: World) -> None:
    """The search for what may lie below the first event seen would take ten minutes here."""
    old = now_ms() - 3 * HOUR
    world.write("p1", "green", at=old - HOUR, count=9)
    world.write("p1", "green", at=old, count=2)
    async with world.reading(new_source_scan="10m") as read:
        assert await read.current("green", start=iso_time(old)) == ["p1:10", "p1:11"]


async def test_C_14_a_start_in_an_old_bucket_needs_no_search_where_somebody_else_writes(theirs: World) -> None:
    old = now_ms() - 3 * HOUR
    theirs.put("green", ("p1", 10, old), ("p1", 11, old + 1))
    async with theirs.reading(new_source_scan="10m") as read:
        assert await read.current("green", start=iso_time(old - HOUR)) == ["p1:10", "p1:11"]


async def test_C_15_old_days_and_a_full_bucket_of_two_sources(world: World) -> None:
    now = now_ms()
    world.begin(2)
    for days in (3, 2, 1):
        for partition, pid in enumerate("ab"):
            world.write(pid, "green", at=now - days * DAY, partition=partition)
    for partition, pid in enumerate("ab"):
        world.write(pid, "green", count=97, partition=partition)
    world.settle()
    async with world.reading() as read:
        found = await read.current("green")
    assert len(found) == len(set(found)) == 200
    assert in_turn(found)


async def test_C_16_a_slow_consumer_of_an_old_bucket_loses_and_repeats_nothing(
    world: World, small_batches: None
) -> None:
    for _ in range(11):
        world.write("a", "green", count=30, at=now_ms() - DAY)
    async with world.reading(page=50) as read:
        pulled = await read.pull("green", follow=False)
        found = []
        while part := await pulled.take(30):
            found += part
            await asyncio.sleep(0.02)
        assert found == run("a", 1, 330)
        cursor, again = "", list[str]()
        while frames := events(await read.all("green", limit=30, **({"after": cursor} if cursor else {}))):
            again += names(frames)
            cursor = frames[-1].cursor
        assert again == found


async def test_C_17_without_a_delay_thousands_of_one_bucket_come_in_order(world: World) -> None:
    world.begin(2)
    at = now_ms() - SECOND
    world.write("a", "green", count=2_510, at=at)
    world.write("b", "green", count=2_509, at=at, partition=1)
    async with world.reading(delay="0s") as read:
        frames = await read.all("green")
    assert len(names(frames)) == 5_019
    assert in_turn(names(frames))
    if world.in_rows:
        assert timeuuids(frames) == sorted(timeuuids(frames), key=order)


async def test_C_18_an_event_of_the_very_millisecond_in_which_a_feed_begins_is_in_it(world: World) -> None:
    world.write("a", "green", count=3)
    async with world.reading() as read:
        last = ms_of(timeuuids(await read.all("green"))[-1])
    async with world.reading(delay="0s", clock=lambda: last) as read:
        assert await read.current("green") == run("a", 1, 3)
    behind_ms = now_ms() - last + 1
    async with world.reading(delay="0s", clock=lambda: now_ms() - behind_ms) as read:
        assert await read.current("green") == run("a", 1, 3), "the clock of the reader is a little behind"


# Rows.


async def test_C_11_a_gap_holds_its_own_source_back_until_it_is_filled(theirs: World) -> None:
    """Others flow: what the case holds back as a whole is held here for the one source."""
    at = now_ms() - SECOND
    theirs.put("green", ("p1", 1, at), ("p1", 2, at + 1), ("p1", 4, at + 3), ("p2", 1, at + 4))
    async with theirs.reading(refresh="100ms") as read:
        follower = await read.follow("green", follow=False)
        assert await follower.until(3) == ["p1:1", "p1:2", "p2:1"]
        await follower.is_silent()
        theirs.put("green", ("p1", 3, at + 2))
        assert await follower.until(5) == ["p1:1", "p1:2", "p2:1", "p1:3", "p1:4"]
        await follower.end()
        assert controls(follower.frames) == ["caught-up", "end"]


async def test_C_11_of_our_own_rows_none_is_seen_before_all_below_it_are_written(
    store: StoreOptions, rows_store: CassandraSettings, theirs: World
) -> None:
    """A task died between the rows of its batch: no gap is seen, and nothing has to be waited for."""
    theirs.write("p1", "green", count=2)
    batch = [theirs.draft("p1", "green") for _ in range(4)]
    with pytest.raises(Died):
        dying(theirs.writer, "some rows").write(batch)
    async with theirs.reading(gap_timeout="10m") as read:
        frames = events(await read.all("green"))
        assert names(frames) == ["p1:1", "p1:2"]
        theirs.writer.another_task().write(batch)
        for at, frame in enumerate(frames, 1):
            assert names(frames[:at]) + await read.current("green", after=frame.cursor) == run("p1", 1, 6)


async def test_C_12_a_gap_that_is_not_filled_in_time_fails_and_says_what_is_missing(theirs: World) -> None:
    at = now_ms() - SECOND
    theirs.put("green", ("p1", 1, at), ("p1", 2, at + 1), ("p1", 4, at + 3), ("p2", 1, at + 4))
    async with theirs.reading(gap_timeout="500ms") as read:
        follower = await read.follow("green", follow=False)
        with pytest.raises(RowsMissing, match=r"tag 'green': 'p1' 3 not found in time") as caught:
            await follower.end()
        assert follower.names == ["p1:1", "p1:2", "p2:1"]
    assert (caught.value.tag, caught.value.missing) == ("green", {"p1": (3, 3)})


async def test_C_13_what_is_missing_is_found_in_earlier_buckets_when_all_of_it_is_there(theirs: World) -> None:
    now = now_ms() - SECOND
    theirs.put("green", ("p1", 1, now - 2 * HOUR), ("p1", 4, now))
    async with theirs.reading(refresh="100ms") as read:
        follower = await read.follow("green", follow=False)
        assert await follower.until(1) == ["p1:1"]
        theirs.put("green", ("p1", 2, now - HOUR), ("seen", 1, now + 1))
        assert sorted(await follower.until(3)) == ["p1:1", "p1:2", "seen:1"]
        await follower.is_silent()
        theirs.put("green", ("p1", 3, now - HOUR + 1))
        assert (await follower.until(5))[3:] == ["p1:3", "p1:4"]
        await follower.end()

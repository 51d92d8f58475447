"""Upkeep of what searches found: packed and swept while it is read, on a real store; feeds show the same as before."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tailrace import views
from tailrace.config.settings import Settings, load
from tailrace.errors import BadRequest
from tailrace.log.event import iso_time, shard_of
from tailrace.log.request import AnyFrame, EventFrame
from tailrace.log.segment import PACKED, SEALED, Log
from tailrace.log.store import LogRegistry, write_row
from tailrace.upkeep import pack, sweep
from tailrace.upkeep.audit import Auditing
from tailrace.upkeep.job import now_ms, run_job
from tailrace.upkeep.loop import jobs_of
from tailrace.upkeep.rebuild import Rebuilding
from tailrace.upkeep.spark import Spread
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.views.grep.feed import GrepFeeds
from tailrace.views.grep.model import Search, SearchLife, make_search
from tailrace.views.grep.store import VIEW
from tests.views.grep.rig import read_log, register
from tests.views.grep.site import Following, Site, controls, facts, ids, numbered
from tests.writing import DAY, NOON, Record, Writer

HOUR = DAY // 24
VIEWS = ("intake", "matches")


def settings_of(store: StoreOptions, **flags: object) -> Settings:
    given: dict[str, object] = {"valkey.url": store.url, "valkey.prefix": store.prefix, "valkey.shards": store.shards}
    return load(flags=given | {name.replace("__", "."): value for name, value in flags.items()})


def log_of(shards: Shards, name: str) -> Log:
    return LogRegistry(shards, VIEW).logs([name])[0].log


def grow_old(shards: Shards, name: str, ms: int) -> None:
    """Let a log be found so long ago: all its buckets, and the time before which none begins."""
    shard = shard_of(name, shards.options.shards)
    key = shards.keys.log(shard, VIEW, name)
    for segment in log_of(shards, name).segments:
        if segment.open:
            shards.run_all([(shard, ("HINCRBY", key, "b", -ms))])
        else:
            moved = msgspec.structs.replace(segment, start_ms=segment.start_ms - ms)
            shards.run_all([(shard, ("HSET", key, f"s{segment.index}", write_row(moved)))])
    [floor] = shards.run_all([(shard, ("HGET", key, "o"))])
    if floor is not None:
        shards.run_all([(shard, ("HSET", key, "o", int(floor) - ms))])


def packed(settings: Settings) -> dict[str, Any]:
    return dict(run_job(settings, pack.Packing(VIEW, pack.PackRules.of(settings, views.grep.VIEW))))


def swept(settings: Settings) -> dict[str, Any]:
    return dict(run_job(settings, sweep.Sweeping(VIEW, sweep.SweepRules.of(settings, views.grep.VIEW))))


def memory(shards: Shards, name: str) -> int:
    """Return what a log takes in the server."""
    shard = shard_of(name, shards.options.shards)
    keys = [shards.keys.log(shard, VIEW, name)]
    keys += [shards.keys.segment(shard, VIEW, s.index, name) for s in log_of(shards, name).segments]
    return sum(shards.run_all([(shard, ("MEMORY", "USAGE", key, "SAMPLES", 0)) for key in keys]))


def cursors(frames: Sequence[AnyFrame]) -> list[str]:
    return [frame.cursor for frame in frames if isinstance(frame, EventFrame)]


# Packing.


async def test_single_matches_become_pieces_of_a_thousand_with_the_same_numbers_in_a_tenth_of_the_memory(
    store: StoreOptions,
) -> None:
    settings = settings_of(store)
    writer = Writer(store, VIEWS)
    life = register(writer.shards, make_search("jobs", {"n": 1}))
    for i in range(2_500):
        writer.write([Record(i, value=b'{"n":%d}' % (i % 5 > 0), time=NOON + i)])
    name, before, plain = life.name, await read_log(store, life.name), memory(writer.shards, life.name)
    [segment] = log_of(writer.shards, name).segments
    assert packed(settings)["segments"] == 0  # it was found today, whatever the records' times are
    grow_old(writer.shards, name, 2 * DAY)
    assert packed(settings)["events"] == len(before) == 2_000
    [after] = log_of(writer.shards, name).segments
    assert after.state == PACKED
    assert (after.first, after.last, after.epoch) == (segment.first, segment.last, segment.epoch)
    key = writer.shards.keys.segment(shard_of(name, store.shards), VIEW, 0, name)
    assert writer.shards.run_all([(shard_of(name, store.shards), ("XLEN", key))]) == [2]
    assert await read_log(store, name) == before
    assert memory(writer.shards, name) < plain / 10


async def test_what_finds_much_is_packed_with_the_next_hour_and_what_finds_little_with_the_next_day(
    store: StoreOptions,
) -> None:
    settings = settings_of(store)
    writer = Writer(store, VIEWS)
    much, little = (register(writer.shards, make_search("jobs", {kind: True})) for kind in ("much", "little"))
    for i in range(2_400):  # six an hour are few, and four hundred are not
        few = b',"little":true' if i % 400 == 0 else b""
        writer.write([Record(i, value=b'{"much":true%s}' % few, time=NOON + i * HOUR // 400)])
    states = [(s.events, s.state) for s in log_of(writer.shards, much.name).segments]
    assert states == [(1_200, SEALED), (1_200, 0)]
    assert [s.events for s in log_of(writer.shards, little.name).segments] == [6]
    before = await read_log(store, much.name)
    assert packed(settings)["events"] == 1_200
    writer.write([Record(2_400, value=b'{"much":true}', time=NOON + 6 * HOUR)])
    assert await read_log(store, much.name) == [*before, ("jobs:0", 2_400)]
    starts = {s.start_ms for s in log_of(writer.shards, much.name).segments}
    assert len(starts) == 1, "buckets do not run ahead of the calendar"


async def test_a_feed_that_is_read_while_its_log_is_packed_shows_the_same_with_the_same_cursors(site: Site) -> None:
    topic = site.topic("a")
    search = make_search(topic, {"n": {"$mod": [3, 0]}})
    async with site.serving() as serving:
        following = Following(await serving.open(search, follow=True, window=1024))
        for first in range(0, 240, 8):
            numbered(site, topic, first, first + 8)
            await asyncio.to_thread(site.live)
        wanted = await following.until(80)
        shown = cursors(following.frames)
        await following.close()
        life = await _life(serving.grep, search)
        feed = await serving.open(search, after=shown[0], window=1024)
        batches = aiter(feed)
        frames = [*(await anext(batches))]
        grow_old(site.shards, life.name, 2 * DAY)
        assert (await asyncio.to_thread(packed, site.settings))["segments"] == 1
        async for some in batches:
            frames += some
        await feed.aclose()
        assert (ids(frames), cursors(frames)) == (wanted[1:], shown[1:])
        for at in range(0, 80, 9):
            again = await serving.all(search, after=shown[at])
            assert (ids(again), cursors(again)) == (wanted[at + 1 :], shown[at + 1 :])
        # What comes after it was packed goes on behind it.
        numbered(site, topic, 240, 249)
        await asyncio.to_thread(site.live)
        assert len(ids(await serving.all(search, after=shown[-1]))) == 3


@pytest.mark.parametrize("seed", range(3))
async def test_a_stretch_is_packed_while_it_is_still_scanned(site: Site, seed: int) -> None:
    chance = random.Random(seed)
    topic = site.topic("a", 2)
    for partition in range(2):
        numbered(site, topic, 0, 60, partition)
    search = make_search(topic, {"n": {"$mod": [2, 0]}})
    async with site.serving() as serving:
        following = Following(await serving.open(search, start="start", follow=False))
        life = await _life(serving.grep, search)
        [stretch], _ = await serving.grep.searches.stretches(life)
        reached = {source: first for source, (first, _) in stretch.ranges.items()}
        while any(reached[source] < until for source, (_, until) in stretch.ranges.items()):
            ranges = {}
            for source, (_, until) in stretch.ranges.items():
                end = min(until, reached[source] + chance.randrange(0, 15))
                if end > reached[source]:
                    ranges[source] = reached[source], end
                    reached[source] = end
            if ranges:
                await asyncio.to_thread(site.scanner.take, life, stretch, ranges)
            if chance.random() < 0.5:
                grow_old(site.shards, stretch.name(life), 2 * DAY)
                await asyncio.to_thread(packed, site.settings)
        await asyncio.to_thread(site.scan)
        await asyncio.to_thread(site.live)
        await following.saw("end")
        wanted = site.ids(site.offline(search))
        assert sorted(ids(following.frames)) == sorted(wanted)
        assert PACKED in {s.state for s in log_of(site.shards, stretch.name(life)).segments}
        again = await serving.all(search, start="start")
        assert (ids(again), cursors(again)) == (ids(following.frames), cursors(following.frames))


# Retention.


async def test_live_matches_go_after_their_time_and_readers_behind_them_are_told(site: Site) -> None:
    topic = site.topic("a")
    numbered(site, topic, 0, 10)
    site.live()
    search = make_search(topic, {})
    async with site.serving() as serving:
        with site.at_work():
            before = await serving.all(search, start="start")
        life = await _life(serving.grep, search)
        for first in (10, 20):
            numbered(site, topic, first, first + 10)
            await asyncio.to_thread(site.live)
            grow_old(site.shards, life.name, 4 * DAY)
        frames = await serving.all(search, start="start")
        assert ids(frames)[:10] == ids(before)
        shown = cursors(frames)
        assert (await asyncio.to_thread(swept, site.settings))["events"] == 10  # 8 days ago, and the others 4
        # Who stood there, who comes from the stretch before, and who asks for a time when they were, is told.
        for frames in (await serving.all(search, after=shown[12]), await serving.all(search, start="start")):
            [gap] = facts(frames, "gap")
            assert gap["reason"] == "expired"
            assert [int(each.rpartition(":")[2]) for each in ids(frames)][-10:] == list(range(20, 30))
        assert len(ids(await serving.all(search, start="start"))) == 20
        # Who stood behind them, or asks for a time after them, is not.
        for asked in ({"after": shown[19]}, {"after": shown[25]}, {"start": iso_time(now_ms() - HOUR)}):
            assert "gap" not in controls(await serving.all(search, **asked))
        grow_old(site.shards, life.name, 4 * DAY)
        assert (await asyncio.to_thread(swept, site.settings))["ended"] == 1
        frames = await serving.all(search, start="start")
        assert (ids(frames), [gap["reason"] for gap in facts(frames, "gap")]) == (ids(before), ["expired"])
        assert "gap" not in controls(await serving.all(search, start=iso_time(now_ms() - HOUR)))
        numbered(site, topic, 30, 31)
        await asyncio.to_thread(site.live)
        assert len(ids(await serving.all(search, after=shown[-1]))) == 1


async def test_what_was_found_in_old_records_is_kept_as_long_as_what_was_found_in_new_ones(
    store: StoreOptions,
) -> None:
    settings = settings_of(store)
    writer = Writer(store, VIEWS)
    life = register(writer.shards, make_search("jobs", {}))
    writer.write([Record(0, time=NOON - 300 * DAY), Record(1, time=now_ms())])
    assert swept(settings)["events"] == 0
    assert len(await read_log(store, life.name)) == 2


async def test_what_was_found_in_the_past_stays_as_long_as_the_search(site: Site) -> None:
    topic = site.topic("a")
    numbered(site, topic, 0, 10)
    search = make_search(topic, {})
    async with site.serving() as serving:
        with site.at_work():
            before = await serving.all(search, start="start")
        life = await _life(serving.grep, search)
        [stretch], _ = await serving.grep.searches.stretches(life)
        grow_old(site.shards, stretch.name(life), 100 * DAY)
        assert (await asyncio.to_thread(swept, site.settings))["segments"] == 0
        await asyncio.to_thread(packed, site.settings)
        again = await serving.all(search, start="start")
        assert (ids(again), cursors(again)) == (ids(before), cursors(before))


# What does not concern it.


def test_matches_are_not_compared_with_kafka_nor_made_again_from_it(store: StoreOptions) -> None:
    settings = settings_of(store, upkeep__audit_every="1d")
    for work in (Auditing, Rebuilding):
        with pytest.raises(BadRequest, match="holds what searches found, not what Kafka has"):
            work(settings, views.grep.VIEW)
    jobs = jobs_of(settings, views.VIEWS, Spread(settings))
    assert {*(jobs["pack"].views or ()), *(jobs["sweep"].views or ())} >= {"days", "matches"}
    assert jobs["audit"].views == ("days",)


def test_a_retention_that_breaks_the_promise_to_readers_is_warned_of(store: StoreOptions) -> None:
    assert not [w for w in settings_of(store).warnings() if "grep.retention" in w]
    [warning] = [w for w in settings_of(store, grep__retention="2h").warnings() if "grep.retention" in w]
    assert "grep.keep = '1d'" in warning


async def _life(grep: GrepFeeds, search: Search) -> SearchLife:
    return await grep.searches.register(search, now_ms())

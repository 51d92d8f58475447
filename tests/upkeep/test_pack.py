"""Packing, expiry and sealing on a real store: readers get the same events as before, and a gap for expired ones."""

from __future__ import annotations

import asyncio
import json
import random
import time

import pytest

from tailrace.errors import CursorGone, LeaseHeld, StaleUpkeep
from tailrace.log.event import iso_time, name_of_key
from tailrace.log.request import ControlFrame, EventFrame
from tailrace.log.segment import PACKED
from tailrace.upkeep.job import JobLease
from tailrace.valkey.shards import StoreOptions
from tests.log.rig import ids, rig
from tests.upkeep.past import Keeper
from tests.writing import DAY, NOON, Record, Writer, read_view


def _days(days: int, each: int, key: bytes = b"a") -> list[Record]:
    return [
        Record(d * each + i, key, b'{"day":%d,"n":%d}' % (d, i), time=NOON + d * DAY + i)
        for d in range(days)
        for i in range(each)
    ]


def test_packed_days_hold_the_same_events_in_few_pieces(any_store: StoreOptions) -> None:
    writer = Writer(any_store)
    records = _days(3, 400)
    for at in range(0, len(records), 7):
        writer.write(records[at : at + 7])
    before = asyncio.run(read_view(any_store))
    with Keeper(any_store) as keeper:
        outcome = keeper.pack()
        assert (outcome.segments, outcome.events, outcome.left) == (3, 1_200, {})
        assert 5 * outcome.bytes_after < outcome.bytes_before <= outcome.raw_bytes
        assert [s.state for s in keeper.log("a").segments] == [PACKED] * 3
        assert keeper.pack().segments == 0
    assert asyncio.run(read_view(any_store)) == before == {"a": [record.id for record in records]}


def test_a_segment_larger_than_a_group_is_packed_piece_by_piece(store: StoreOptions) -> None:
    chance = random.Random(1)
    records = [Record(i, b"a", b'{"n":%d,"x":"%s"}' % (i, chance.randbytes(90).hex().encode())) for i in range(20_000)]
    writer = Writer(store)
    for at in range(0, len(records), 500):
        writer.write(records[at : at + 500])
    with Keeper(store, piece_bytes=64 << 10) as keeper:
        assert keeper.log("a").segments[0].bytes > 512 << 10
        assert keeper.pack().events == 20_000
        shard = keeper.registry.logs(["a"])[0].shard
        assert keeper.shards.client(shard).xlen(keeper.shards.keys.segment(shard, "days", 0, "a")) == 40
    assert asyncio.run(read_view(store))["a"] == [record.id for record in records]


def test_what_comes_after_a_day_was_packed_goes_to_the_next_day_and_is_flagged(any_store: StoreOptions) -> None:
    writer = Writer(any_store)
    writer.write(_days(1, 10))
    with Keeper(any_store) as keeper:
        keeper.pack()
        packed = keeper.log("a").segments[0]
        writer.write([Record(10 + i, b"a", time=NOON - i * DAY) for i in range(3)])
        first, second = keeper.log("a").segments
        assert (first, second.start_ms, second.events) == (packed, packed.end_ms, 3)

    async def late() -> list[bool]:
        async with rig(any_store) as feeds:
            frames = await feeds.all("a", follow=False)
        return [json.loads(frame.data).get("late", False) for frame in frames if isinstance(frame, EventFrame)]

    assert asyncio.run(late()) == [False] * 10 + [True] * 3


def test_a_day_that_grew_while_it_was_packed_is_left_as_it_is(store: StoreOptions) -> None:
    writer = Writer(store)
    writer.write(_days(1, 10))

    def grow(step: str) -> None:
        if step == "checked":
            writer.write([Record(10, b"a")])

    with Keeper(store, reached=grow) as keeper:
        assert keeper.pack().left == {"moved": 1}
        assert keeper.log("a").segments[0].events == 11
    with Keeper(store) as keeper:
        assert keeper.pack().events == 11


def test_a_day_is_not_packed_before_its_time_by_either_clock(store: StoreOptions) -> None:
    now = round(time.time() * 1000)
    Writer(store).write([Record(0, b"a", time=now)])
    with Keeper(store, clock=lambda: now + 400 * DAY) as keeper:
        assert keeper.pack(DAY).left == {"early": 1}
    with Keeper(store, clock=lambda: now - 400 * DAY) as keeper:
        assert keeper.pack(DAY).segments == 0


async def test_cursors_taken_before_packing_yield_the_same_rest_after_it(any_store: StoreOptions) -> None:
    writer = Writer(any_store)
    records = _days(4, 30)
    for at in range(0, len(records), 4):
        await asyncio.to_thread(writer.write, records[at : at + 4])
    async with rig(any_store) as feeds:
        frames = [f for f in await feeds.all("a", follow=False) if isinstance(f, EventFrame)]
        with Keeper(any_store, piece_bytes=1024) as keeper:
            await asyncio.to_thread(keeper.pack)
        for i in range(0, len(frames), 3):
            rest = await feeds.all("a", after=frames[i].cursor, follow=False)
            assert [f for f in rest if isinstance(f, EventFrame)] == frames[i + 1 :]
        assert await feeds.ids("a", start="-45") == [r.id for r in records[-45:]]
        begin = records[70].time
        assert await feeds.ids("a", start=f"@{iso_time(begin)}") == [r.id for r in records[70:]]


async def test_a_cursor_into_what_expired_is_told_once_and_goes_on_at_the_first_event_left(
    any_store: StoreOptions,
) -> None:
    writer = Writer(any_store)
    records = _days(4, 5)
    writer.write(records)
    async with rig(any_store) as feeds:
        frames = [f for f in await feeds.all("a", follow=False) if isinstance(f, EventFrame)]
        with Keeper(any_store, clock=lambda: NOON + 12 * DAY) as keeper:
            keeper.pack()
            dropped = keeper.expire("a", 10 * DAY)
            assert (dropped.segments, dropped.events, dropped.ended) == (2, 10, False)
        for i in range(9):
            rest = await feeds.all("a", after=frames[i].cursor, follow=False)
            assert isinstance(rest[0], ControlFrame)
            facts = json.loads(rest[0].data)
            assert (facts["reason"], facts["from"]) == ("expired", frames[i].cursor)
            assert ids(rest) == [r.id for r in records[10:]]
        assert await feeds.ids("a", after=frames[9].cursor) == [r.id for r in records[10:]]
        untold = await feeds.all("a", after=frames[9].cursor, follow=False)
        assert not [f for f in untold if isinstance(f, ControlFrame) and f.name == "gap"]
        with pytest.raises(CursorGone, match="expired"):
            await feeds.open("a", after=frames[0].cursor, on_gap="fail")


async def test_a_stream_that_expired_as_a_whole_leaves_no_key_without_an_end(any_store: StoreOptions) -> None:
    writer = Writer(any_store)
    writer.write(_days(2, 5))
    async with rig(any_store) as feeds:
        frames = [f for f in await feeds.all("a", follow=False) if isinstance(f, EventFrame)]
        with Keeper(any_store) as keeper:
            keeper.pack()
            assert keeper.expire("a", DAY).ended
            assert not keeper.log("a").segments
            assert keeper.registry.count() == 0
            assert keeper.unowned() == []
            rest = await feeds.all("a", after=frames[3].cursor, follow=False)
            assert next(f.name for f in rest if isinstance(f, ControlFrame)) == "gap"
            assert await feeds.all("a", after=frames[9].cursor, follow=False)
            await asyncio.to_thread(writer.write, [Record(10, b"a", time=NOON)])
            assert keeper.log("a").segments[0].start_ms == NOON - NOON % DAY + 2 * DAY, "the floor outlives the stream"
            assert keeper.registry.count() == 1
            assert keeper.unowned() == []
        assert await feeds.ids("a", after=frames[9].cursor) == ["jobs:0:10"]


def test_a_live_day_is_not_expired_when_either_clock_is_wrong(any_store: StoreOptions) -> None:
    now = round(time.time() * 1000)
    Writer(any_store).write([Record(0, b"a", time=now - DAY), Record(1, b"a", time=now)])
    with Keeper(any_store, clock=lambda: now + 4000 * DAY) as keeper:
        assert keeper.expire("a", DAY).segments == 0
    with Keeper(any_store, clock=lambda: now - 4000 * DAY) as keeper:
        assert keeper.expire("a", 1).segments == 0


def test_a_terminal_event_seals_the_day_so_that_it_can_be_packed_at_once(any_store: StoreOptions) -> None:
    now = round(time.time() * 1000)
    today = now - now % DAY
    writer = Writer(any_store, seal_when={"state.kind": {"$in": ["finished", "failed"]}})
    done = b'{"state":{"kind":"finished"}}'
    records = [Record(i, b"a", time=today) for i in range(3)] + [Record(3, b"a", done, time=today)]
    writer.write([*records, Record(4, b"a", time=today), Record(5, b"b", time=today)])
    with Keeper(any_store) as keeper:
        assert keeper.pack(2 * DAY).events == 4
        first, second = keeper.log("a").segments
        assert (first.state, second.start_ms, second.events) == (PACKED, today + DAY, 1)
        writer.write([Record(6, b"a", done, time=today), Record(7, b"a", done, time=today)])
        assert keeper.pack(2 * DAY).segments == 0
        assert keeper.log("a").segments[-1].start_ms == today + DAY, "a seal never runs ahead of the calendar"
    assert asyncio.run(read_view(any_store))["a"] == [f"jobs:0:{i}" for i in (0, 1, 2, 3, 4, 6, 7)]


def test_a_day_is_sealed_by_what_lies_beside_a_value_too(store: StoreOptions) -> None:
    now = round(time.time() * 1000)
    key = b'["a",1e400]'
    records = [Record(i, key, time=now - now % DAY, headers=[("last", b"%d" % (i == 1))]) for i in range(3)]
    Writer(store, seal_when={"$topic": "jobs", "$headers.last": "1"}).write(records)
    with Keeper(store) as keeper:
        assert [segment.events for segment in keeper.log(name_of_key(key)).segments] == [2, 1]


def test_buckets_of_another_length_begin_where_the_current_one_ends(store: StoreOptions) -> None:
    hour = DAY // 24
    start = NOON - NOON % DAY
    Writer(store).write([Record(0, b"a", time=start + 9 * hour)])
    Writer(store, span_ms=hour).write(
        [Record(1, b"a", time=start + 10 * hour), Record(2, b"a", time=start + 25 * hour)],
    )
    Writer(store).write([Record(3, b"a", time=start + 27 * hour), Record(4, b"a", time=start + 50 * hour)])
    with Keeper(store) as keeper:
        found = [(s.start_ms - start, s.span_ms, s.events) for s in keeper.log("a").segments]
        assert found == [(0, DAY, 2), (25 * hour, hour, 2), (2 * DAY, DAY, 1)]
        assert keeper.pack().events == 5
    assert asyncio.run(read_view(store))["a"] == [f"jobs:0:{i}" for i in range(5)]


def test_two_never_hold_the_lease_and_the_older_one_can_change_nothing(any_store: StoreOptions) -> None:
    Writer(any_store).write(_days(2, 5))
    with Keeper(any_store) as slow:
        with pytest.raises(LeaseHeld, match="one"), JobLease(slow.shards, "two"):
            pass
        token = slow.lease.token
        slow.end_lease_early()
        with Keeper(any_store, owner="two") as quick:
            assert quick.lease.token > token
            with pytest.raises(StaleUpkeep):
                slow.pack()
            with pytest.raises(StaleUpkeep):
                slow.expire("a", 1)
            assert quick.pack().events == 10


async def test_a_read_takes_about_a_mebibyte_however_large_a_piece_is(store: StoreOptions) -> None:
    chance = random.Random(1)
    records = [Record(i, b"a", b'{"x":"%s"}' % chance.randbytes(400).hex().encode()) for i in range(6_000)]
    writer = Writer(store)
    for at in range(0, len(records), 100):
        await asyncio.to_thread(writer.write, records[at : at + 100])
    with Keeper(store, piece_bytes=4 << 20) as keeper:
        await asyncio.to_thread(keeper.pack)
        segment = keeper.log("a").segments[0]
        assert segment.raw_bytes > 4 << 20
    async with rig(store) as feeds:
        after, reads = 0, 0
        while after < segment.last:
            entries = await feeds.logs.read("a", segment, after, 500)
            assert sum(len(value) for entry in entries for value in entry.run.values) < (1 << 20) + (128 << 10)
            after, reads = entries[-1].last, reads + 1
        assert reads >= 4
        assert await feeds.ids("a") == [record.id for record in records]

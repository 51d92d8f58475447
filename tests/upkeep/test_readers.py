"""Readers of logs that were rebuilt, expired, forgotten and packed under them: the events and gaps they get."""

from __future__ import annotations

import asyncio
import json

import pytest

from tailrace.errors import CursorGone
from tailrace.log.event import iso_time
from tailrace.log.pack import pack
from tailrace.log.request import AnyFrame, ControlFrame, EventFrame
from tailrace.log.run import NumberedRun
from tailrace.log.segment import PACKED, Segment
from tailrace.log.store import NewSegment, PackedPiece
from tailrace.valkey.shards import StoreOptions
from tests.log.rig import Follower, Rig, ids, rig
from tests.upkeep.past import Keeper
from tests.writing import DAY, NOON, Record, Writer


def _days(days: int, each: int = 5) -> list[Record]:
    return [Record(d * each + i, b"a", time=NOON + d * DAY + i) for d in range(days) for i in range(each)]


def _replace(keeper: Keeper, day: int) -> None:
    """Rebuild one day from itself, as a repair does: new epoch, new numbers, the same events."""
    shard = keeper.registry.logs(["a"])[0].shard
    epoch, _ = keeper.staging.reopen(NOON // 1000)[shard]
    old = keeper.log("a").segments[day]
    entries: list[NumberedRun] = []
    number = 0
    for entry in keeper.registry.read_whole([("a", old)])[0]:
        n = len(entry.run)
        entries.append(NumberedRun(number + 1, number + n, entry.newest_ms, entry.run, entry.size))
        number += n
    stored = pack(entries)
    newest = entries[-1].newest_ms
    keeper.staging.stage([PackedPiece("a", old.index, number, number, newest, stored, True)])
    replaced = ((old.epoch, old.first, old.last), *old.replaced)
    new = Segment(
        old.index, old.start_ms, old.span_ms, epoch, 1, number, number, len(stored), newest, 1, PACKED, replaced
    )
    assert keeper.staging.replace("a", [old], [NewSegment(new, old.index, 1)], 60_000) == "ok"


def _gaps(frames: list[AnyFrame]) -> list[str]:
    return [json.loads(f.data)["reason"] for f in frames if isinstance(f, ControlFrame) and f.name == "gap"]


async def _frames(feeds: Rig) -> list[EventFrame]:
    return [f for f in await feeds.all("a", follow=False) if isinstance(f, EventFrame)]


async def test_a_stream_with_a_rebuilt_day_in_the_middle_is_read_to_its_end(any_store: StoreOptions) -> None:
    records = _days(4)
    Writer(any_store).write(records)
    wanted = [record.id for record in records]
    async with rig(any_store) as feeds:
        before = await _frames(feeds)
        with Keeper(any_store) as keeper:
            await asyncio.to_thread(_replace, keeper, 1)
        assert await feeds.ids("a") == wanted
        assert await feeds.ids("a", start="-15") == wanted[5:]
        assert await feeds.ids("a", until=before[-1].cursor) == wanted
        after = await _frames(feeds)
        for i, frame in enumerate(after):
            assert await feeds.ids("a", after=frame.cursor) == wanted[i + 1 :]
            assert await feeds.ids("a", until=frame.cursor) == wanted[: i + 1]
        for i, frame in enumerate(before):
            rest = await feeds.all("a", after=frame.cursor, follow=False)
            inside = 5 <= i < 9
            assert _gaps(rest) == (["rebuilt"] if inside else [])
            assert ids(rest) == (wanted[5:] if inside else wanted[i + 1 :])


async def test_what_expired_behind_a_rebuilt_day_is_told_to_readers_of_both_epochs(any_store: StoreOptions) -> None:
    records = _days(4)
    Writer(any_store).write(records)
    async with rig(any_store) as feeds:
        old = await _frames(feeds)
        with Keeper(any_store, clock=lambda: NOON + 12 * DAY) as keeper:
            await asyncio.to_thread(_replace, keeper, 1)
            new = await _frames(feeds)
            assert keeper.expire("a", 10 * DAY).events == 10
        for frame in (*old[:9], *new[5:9]):
            assert _gaps(await feeds.all("a", after=frame.cursor, follow=False)) == ["expired"]
            with pytest.raises(CursorGone, match="expired"):
                await feeds.open("a", after=frame.cursor, on_gap="fail")
        assert _gaps(await feeds.all("a", after=new[9].cursor, follow=False)) == []
        assert await feeds.ids("a", after=old[12].cursor) == [record.id for record in records[13:]]
        with Keeper(any_store) as keeper:
            assert keeper.expire("a", DAY).ended
        assert _gaps(await feeds.all("a", after=new[7].cursor, follow=False)) == ["expired"]


async def test_a_reader_goes_on_when_a_stream_that_was_forgotten_comes_back(store: StoreOptions) -> None:
    writer = Writer(store)
    writer.write(_days(3, 1))
    async with rig(store) as feeds:
        follower = Follower(await feeds.open("a", start="start"))
        await follower.until(3)
        with Keeper(store) as keeper:
            keeper.staging.expire([("a", DAY)], NOON + 100 * DAY, 1)
            await asyncio.sleep(0.1)
            assert keeper.log("a").expired.number == 0, "it is forgotten"
        await asyncio.to_thread(writer.write, [Record(3 + i, b"a", time=NOON + 50 * DAY) for i in range(2)])
        assert await follower.until(5) == [f"jobs:0:{i}" for i in range(5)]
        await follower.close()


async def test_an_event_that_packing_sent_to_a_much_later_day_is_found_by_its_time(store: StoreOptions) -> None:
    writer = Writer(store)
    writer.write(_days(4, 1))
    with Keeper(store) as keeper:
        keeper.pack()
    await asyncio.to_thread(writer.write, [Record(4, b"a", time=NOON + 1), Record(5, b"a", time=NOON + 9 * DAY)])
    async with rig(store) as feeds:
        window = {"start": f"@{iso_time(NOON)}", "until": iso_time(NOON + DAY // 2)}
        assert await feeds.ids("a", **window) == ["jobs:0:0", "jobs:0:4"]


async def test_the_last_events_are_found_while_their_day_is_packed(store: StoreOptions) -> None:
    writer = Writer(store)
    records = _days(2, 20)
    for record in records:
        writer.write([record])
    with Keeper(store) as keeper:
        async with rig(store) as feeds:
            read_back, once = feeds.logs.read_back, iter([True])

            async def then_pack(*args: object) -> list[NumberedRun]:
                found = await read_back(*args)  # type: ignore[arg-type]
                if next(once, False):
                    await asyncio.to_thread(keeper.pack)
                return found

            feeds.logs.read_back = then_pack  # type: ignore[assignment]
            assert await feeds.ids("a", start="-10") == [record.id for record in records[-10:]]


def test_a_record_from_the_far_future_does_not_keep_its_stream_for_ever(store: StoreOptions) -> None:
    Writer(store).write([Record(0, b"a", time=NOON * 1000)])
    with Keeper(store) as keeper:
        segment = keeper.log("a").segments[0]
        assert segment.newest_ms < NOON * 2
        shard = keeper.registry.logs(["a"])[0].shard
        past = {"b": NOON - 10 * DAY, "p": f"{segment.last} 1 {segment.bytes} {segment.newest_ms - 10 * DAY}"}
        keeper.shards.client(shard).hset(keeper.shards.keys.log(shard, "days", "a"), mapping=past)
        assert keeper.expire("a", DAY).ended


def test_a_damaged_registry_stops_nobody_else(store: StoreOptions) -> None:
    writer = Writer(store)
    writer.write([Record(i, name, time=NOON + i * DAY) for i, name in enumerate((b"a", b"b", b"a", b"b"))])
    with Keeper(store) as keeper:
        shard = keeper.registry.logs(["a"])[0].shard
        keeper.shards.client(shard).hset(keeper.shards.keys.log(shard, "days", "a"), mapping={b"s0": b"\xc1 no row"})
        assert keeper.pack().events == 2


async def test_whoever_begins_at_the_start_of_a_log_that_is_gone_gets_nothing_that_others_still_hold(
    store: StoreOptions,
) -> None:
    writer = Writer(store)
    async with rig(store) as feeds:
        follower = Follower(await feeds.open("a", start="start"))
        for day in range(2):
            writer.write([Record(day, b"a", time=NOON + 2 * day * DAY)])
            await follower.until(day + 1)
            with Keeper(store, clock=lambda: NOON + 10 * DAY) as keeper:
                assert keeper.expire("a", DAY).events == 1
            assert await feeds.ids("a", start="start") == []
        await follower.close()


async def test_a_log_of_many_small_buckets_is_read_whole_from_every_place(store: StoreOptions) -> None:
    records = _days(40, each=2)
    Writer(store).write(records)
    wanted = [record.id for record in records]
    async with rig(store) as feeds:
        frames = await _frames(feeds)
        assert [json.loads(frame.data)["id"] for frame in frames] == wanted
        for i, frame in enumerate(frames[::7]):
            assert await feeds.ids("a", after=frame.cursor) == wanted[7 * i + 1 :]
        with Keeper(store) as keeper:
            await asyncio.to_thread(_replace, keeper, 20)
        assert await feeds.ids("a", start="start") == wanted

"""The feed of logs on a real Valkey: starts, ends, resumes, several names, live."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from tailrace.api.requests import FeedParameters
from tailrace.errors import BadRequest, CursorError, CursorGone, StoreError, StreamNotFound
from tailrace.log.request import ControlFrame, EventFrame, Moved, make_request
from tailrace.valkey.shards import StoreOptions
from tests.log.rig import Follower, controls, ids, now_ms, rig
from tests.writing import DAY, NOON, Record, Writer


def _write(
    writer: Writer, n: int, key: bytes = b"a", first: int = 0, step: int = 1000, partition: int = 0
) -> list[str]:
    records = [Record(first + i, key, time=NOON + (first + i) * step, partition=partition) for i in range(n)]
    for at in range(0, n, 7):
        writer.write(records[at : at + 7])
    return [record.id for record in records]


async def test_a_feed_cut_after_every_event_and_resumed_gives_the_same_sequence(any_store: StoreOptions) -> None:
    wanted = _write(Writer(any_store), 60)
    async with rig(any_store) as feeds:
        frames = [f for f in await feeds.all("a", follow=False) if isinstance(f, EventFrame)]
        assert ids(list(frames)) == wanted
        for i, frame in enumerate(frames):
            assert await feeds.ids("a", after=frame.cursor) == wanted[i + 1 :]
            assert await feeds.ids("a", last_event_id=frame.cursor) == wanted[i + 1 :]


async def test_the_start_grammar_finds_its_place(store: StoreOptions) -> None:
    wanted = _write(Writer(store), 50)
    async with rig(store) as feeds:
        assert await feeds.ids("a") == wanted
        assert await feeds.ids("a", start="start") == wanted
        assert await feeds.ids("a", start="end") == []
        for count in (0, 1, 7, 8, 49, 50, 51, 1000):
            assert await feeds.ids("a", start=f"-{count}") == wanted[-count:] * bool(count)
        for i in (0, 1, 6, 7, 8, 33, 49):
            text = f"@{_iso(NOON + i * 1000)}"
            assert await feeds.ids("a", start=text) == wanted[i:], text
            assert await feeds.ids("a", start=_iso(NOON + i * 1000 - 1)) == wanted[i:]
        assert await feeds.ids("a", start=_iso(NOON + DAY)) == []
        assert await feeds.ids("a", until=_iso(NOON + 9_500)) == wanted[:10]
        assert await feeds.ids("a", start="-30", limit=5) == wanted[20:25]


async def test_a_time_finds_late_events_that_belong_to_it_and_leaves_older_ones_out(store: StoreOptions) -> None:
    writer = Writer(store)
    chance = random.Random(5)
    times = [NOON + i * 1000 + chance.randrange(-20_000, 20_000) for i in range(80)]
    for offset, time_ms in enumerate(times):
        writer.write([Record(offset, b"a", time=time_ms)])
    async with rig(store) as feeds:
        for i in range(0, 80, 9):
            since = NOON + i * 1000
            wanted = [f"jobs:0:{o}" for o, t in enumerate(times) if t >= since]
            frames = await feeds.all("a", start=_iso(since), follow=False)
            assert ids(frames) == wanted
            middle = [f for f in frames if isinstance(f, EventFrame)][len(wanted) // 2].cursor
            assert (
                ids(await feeds.all("a", start="-5s", last_event_id=middle, follow=False))
                == wanted[len(wanted) // 2 + 1 :]
            )


async def test_a_feed_says_when_it_has_caught_up_and_when_it_ends(store: StoreOptions) -> None:
    wanted = _write(Writer(store), 10)
    async with rig(store) as feeds:
        frames = await feeds.all("a", follow=False)
        assert controls(frames) == ["caught-up", "end"]
        assert isinstance(frames[-2], ControlFrame)
        assert controls(await feeds.all("a", start="start", limit=4)) == ["end"]
        end = frames[-1].cursor
        assert make_request(("a",), FeedParameters(), now_ms=now_ms(), last_event_id=end) is None
        assert await feeds.ids("a", after=end) == []
        follower = Follower(await feeds.open("a", start="start"))
        await follower.until(len(wanted))
        await asyncio.sleep(0.05)
        assert controls(follower.frames) == ["caught-up"]
        await follower.close()


async def test_a_limit_counts_what_was_sent_before_a_reconnect(store: StoreOptions) -> None:
    wanted = _write(Writer(store), 30)
    async with rig(store) as feeds:
        frames = [f for f in await feeds.all("a", start="start", limit=12) if isinstance(f, EventFrame)]
        assert ids(list(frames)) == wanted[:12]
        for i, frame in enumerate(frames):
            assert await feeds.ids("a", start="start", limit=12, last_event_id=frame.cursor) == wanted[i + 1 : 12]
            assert await feeds.ids("a", limit=12, after=frame.cursor) == wanted[i + 1 : i + 13]


async def test_events_arrive_live_while_a_feed_is_open(any_store: StoreOptions) -> None:
    writer = Writer(any_store)
    wanted = _write(writer, 20)
    async with rig(any_store) as feeds:
        followers = [Follower(await feeds.open("a", start=start)) for start in ("start", "end", "-3")]
        for first in range(20, 200, 20):
            wanted += await asyncio.to_thread(_write, writer, 20, b"a", first)
        assert await followers[0].until(200) == wanted
        assert await followers[1].until(180) == wanted[20:]
        assert await followers[2].until(183) == wanted[17:]
        assert feeds.hub.followed == 1
        for follower in followers:
            await follower.close()
        assert feeds.hub.followed == 0


async def test_readers_far_behind_the_shared_end_read_the_store_and_hand_over_exactly(store: StoreOptions) -> None:
    writer = Writer(store)
    wanted = _write(writer, 500)
    async with rig(store, ring_bytes=1) as feeds:
        follower = Follower(await feeds.open("a", start="start"))
        for first in range(500, 1500, 50):
            wanted += await asyncio.to_thread(_write, writer, 50, b"a", first)
        assert await follower.until(1500) == wanted
        await follower.close()


async def test_a_stream_that_does_not_exist_is_waited_for_or_refused(store: StoreOptions) -> None:
    writer = Writer(store)
    async with rig(store) as feeds:
        with pytest.raises(StreamNotFound, match="no stream is called 'a'"):
            await feeds.open("a", missing="fail")
        follower = Follower(await feeds.open("a"))
        await asyncio.sleep(0.05)
        assert controls(follower.frames) == ["caught-up"]
        wanted = await asyncio.to_thread(_write, writer, 10)
        assert await follower.until(10) == wanted
        await follower.close()


async def test_several_names_are_merged_by_time_and_resumed_from_one_cursor(any_store: StoreOptions) -> None:
    writer = Writer(any_store)
    wanted: list[str] = []
    for i in range(40):
        wanted += [Record(i, f"n{i % 3}".encode()).id]
        writer.write([Record(i, f"n{i % 3}".encode(), time=NOON + i * 1000)])
    async with rig(any_store) as feeds:
        names = ("n0", "n1", "n2")
        frames = [f for f in await feeds.all(*names, follow=False) if isinstance(f, EventFrame)]
        assert ids(list(frames)) == wanted
        for i in range(0, 40, 3):
            assert await feeds.ids(*names, after=frames[i].cursor) == wanted[i + 1 :]
        assert await feeds.ids(*names, start="-7") == wanted[-7:]
        follower = Follower(await feeds.open(*names, start="-2"))
        for i in range(40, 60):
            wanted.append(Record(i).id)
            await asyncio.to_thread(writer.write, [Record(i, f"n{i % 3}".encode(), time=NOON + i * 1000)])
        assert sorted(await follower.until(22)) == sorted(wanted[-22:])
        await follower.close()


async def test_the_cursor_advances_over_what_is_left_out(store: StoreOptions) -> None:
    writer = Writer(store)
    writer.write([Record(i, b"a", time=NOON) for i in range(5)])
    writer.write([Record(5, b"a", time=NOON + DAY)])
    writer.write([Record(i, b"a", time=NOON) for i in range(6, 12)])
    async with rig(store) as feeds:
        follower = Follower(await feeds.open("a", start=_iso(NOON + 1000)))
        assert await follower.until(1) == ["jobs:0:5"]
        await asyncio.sleep(0.1)
        moved = [frame for frame in follower.frames if isinstance(frame, Moved)]
        assert moved
        assert await feeds.ids("a", after=moved[-1].cursor) == []
        await follower.close()


async def test_a_feed_crosses_midnight_with_late_and_future_records(any_store: StoreOptions) -> None:
    writer = Writer(any_store)
    midnight = NOON + DAY // 2
    async with rig(any_store) as feeds:
        followers = [Follower(await feeds.open("a", start="start")) for _ in range(2)]
        wanted: list[str] = []
        for i in range(120):
            late = -7_200_000 if i % 7 == 3 else 0
            ahead = 400 * DAY * (i == 50)
            record = Record(i, b"a", time=midnight + (i - 40) * 60_000 + late + ahead)
            wanted.append(record.id)
            await asyncio.to_thread(writer.write, [record])
        for follower in followers:
            assert await follower.until(120) == wanted
            flags = [json.loads(f.data).get("late", False) for f in follower.frames if isinstance(f, EventFrame)]
            assert any(flags)
            assert not any(flags[:40])
            await follower.close()
        assert await feeds.ids("a") == wanted
        buckets = [segment.start_ms for segment in (await feeds.logs.log("a")).segments]
        assert buckets == sorted(set(buckets))


async def test_a_cursor_of_another_epoch_is_told_to_be_gone(store: StoreOptions) -> None:
    _write(Writer(store), 10)
    async with rig(store) as feeds:
        frames = await feeds.all("a", after="5.3", follow=False)
        assert controls(frames)[0] == "gap"
        gap = frames[0]
        assert isinstance(gap, ControlFrame)
        assert json.loads(gap.data)["reason"] == "store-rolled-back"
        assert len(ids(frames)) == 10
        with pytest.raises(CursorGone, match="on_gap=skip"):
            await feeds.open("a", after="5.3", on_gap="fail")


async def test_a_read_of_several_days_never_ends_early_while_others_come_and_go(store: StoreOptions) -> None:
    writer = Writer(store)
    for i in range(30):
        writer.write([Record(i, b"a", time=NOON + i * DAY // 5)])
    async with rig(store) as feeds:
        for _ in range(150):
            follower = Follower(await feeds.open("a", start="start"))
            assert len(await feeds.ids("a")) == 30
            await follower.close()


async def test_every_name_that_one_call_touched_is_told_at_once(store: StoreOptions) -> None:
    options = StoreOptions(store.url, prefix=store.prefix, shards=1)
    writer = Writer(options)
    async with rig(options) as feeds:
        followers = [Follower(await feeds.open(name)) for name in ("a", "b", "c")]
        await asyncio.sleep(0.2)
        refresh = asyncio.create_task(asyncio.sleep(4))
        await asyncio.to_thread(writer.write, [Record(i, key) for i, key in enumerate((b"a", b"b", b"c"))])
        for follower in followers:
            await follower.until(1)
        assert not refresh.done(), "they were found by the refresh, not told"
        refresh.cancel()
        for follower in followers:
            await follower.close()


async def test_a_feed_ends_at_the_cursor_it_was_asked_to_end_at(store: StoreOptions) -> None:
    wanted = _write(Writer(store), 20)
    async with rig(store) as feeds:
        frames = [f for f in await feeds.all("a", follow=False) if isinstance(f, EventFrame)]
        for begin, end in ((0, 9), (3, 4), (5, 5), (7, 2)):
            got = await feeds.all("a", after=frames[begin].cursor, until=frames[end].cursor)
            assert ids(got) == wanted[begin + 1 : end + 1]
            assert controls(got)[-1] == "end"


async def test_a_reader_takes_a_bounded_amount_of_what_is_held(store: StoreOptions) -> None:
    writer = Writer(store)
    value = json.dumps({"pad": random.Random(2).randbytes(50_000).hex()}).encode()
    async with rig(store) as feeds:
        feed = await feeds.open("a")
        for i in range(0, 120, 4):
            await asyncio.to_thread(writer.write, [Record(i + j, b"a", value) for j in range(4)])
        await asyncio.sleep(0.5)
        sizes: list[int] = []
        async for frames in feed:
            sizes.append(sum(len(f.data) for line in feed._lines for f in line.ahead if hasattr(f, "data") and f.data))
            if any(b'"offset":119,' in f.data for f in frames if isinstance(f, EventFrame)):
                break
        assert max(sizes) < 4 << 20
        await feed.aclose()


async def test_a_damaged_log_stops_its_own_readers_and_nobody_else(store: StoreOptions) -> None:
    writer = Writer(store)
    good = _write(writer, 10, b"good")
    _write(writer, 10, b"bad", first=10)
    async with rig(store) as feeds:
        followers = [Follower(await feeds.open(name, start="start")) for name in ("good", "bad")]
        await followers[1].until(10)
        shard = feeds.logs.shard_of("bad")
        keys, client = writer.shards.keys, writer.shards.client(shard)
        client.execute_command("XADD", keys.segment(shard, "days", 0, "bad"), "99999-1", "r", b"\x07junk", "t", 1)
        client.execute_command("HSET", keys.log(shard, "days", "bad"), "p", "99999 11 11 1")
        client.execute_command("XADD", keys.tail(shard), "*", "days", "bad")
        with pytest.raises(StoreError, match="rebuild the view"):
            await followers[1].until(11)
        good += await asyncio.to_thread(_write, writer, 20, b"good", 20)
        assert await followers[0].until(30) == good
        for follower in followers:
            await follower.close()


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"names": ()}, BadRequest),
        ({"names": tuple(f"n{i}" for i in range(201))}, BadRequest),
        ({"names": ("a", "a")}, BadRequest),
        ({"names": ("a",), "limit": -1}, BadRequest),
        ({"names": ("a",), "missing": "maybe"}, BadRequest),
        ({"names": ("a",), "on_gap": "maybe"}, BadRequest),
        ({"names": ("a",), "start": "soon"}, BadRequest),
        ({"names": ("a",), "until": "soon"}, BadRequest),
        ({"names": ("a",), "after": "soon"}, CursorError),
        ({"names": ("a", "b"), "last_event_id": "1.2"}, CursorError),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(parameters: dict[str, Any], error: type[Exception]) -> None:
    names, last_event_id = parameters.pop("names"), parameters.pop("last_event_id", None)
    with pytest.raises(error):
        make_request(names, FeedParameters(**parameters), now_ms=now_ms(), last_event_id=last_event_id)


def _iso(time_ms: int) -> str:
    from tailrace.log.event import iso_time

    return iso_time(time_ms)

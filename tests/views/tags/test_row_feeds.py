"""Feeds over rows of tags in a real Cassandra: what they yield, when, and from which cursor on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from uuid import UUID

import pytest

from tailrace.errors import BadRequest, CursorError, RowsMissing, StreamNotFound
from tailrace.log.request import ControlFrame
from tailrace.log.timeuuid import order
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.settings import CassandraSettings
from tests.log.rig import controls, now_ms
from tests.views.tags.reading import Follower, events, names, reading, request_of
from tests.views.tags.rows import HOUR, Rows


@pytest.fixture
def rows(store: StoreOptions, rows_store: CassandraSettings) -> Iterator[Rows]:
    made = Rows(store, rows_store)
    yield made
    made.close()


async def test_a_current_feed_gives_what_there_is_with_all_that_is_known_of_it_and_ends(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    rows.write("a", ["green"], 2)
    rows.write("b", ["green", "black"])
    rows.lift()
    async with reading(store, rows_store) as read:
        frames = await read.all("green")
        assert names(frames) == ["a:1", "a:2", "b:1"]
        assert controls(frames) == ["caught-up", "end"]
        first = json.loads(events(frames)[0].data)
        assert (first["id"], first["tag"], first["tags"], first["seq"]) == ("jobs:0:0", "green", ["green"], 0)
        assert first["data"]["n"] == 0
        assert json.loads(events(frames)[2].data)["tags"] == ["green", "black"]
        assert await read.names("black") == ["b:1"]
        assert controls(await read.all("apple")) == ["caught-up", "end"]


async def test_a_live_feed_is_woken_by_what_is_written_and_needs_no_refresh(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    async with reading(store, rows_store, refresh="10m", back_track="off", long_back_track="off") as read:
        follower = Follower(await read.open("green", start="start"))
        for n in range(1, 6):
            rows.write("a", ["green"], partition=n % 2)
            assert (await follower.until(n))[-1] == f"a:{n}"
        await follower.close()


async def test_c_08_what_was_just_written_comes_after_the_delay_and_then_the_feed_ends(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    rows.write("a", ["green"], 3)
    async with reading(store, rows_store, delay="1s") as read:
        frames = await read.all("green")
        assert names(frames) == ["a:1", "a:2", "a:3"]
        assert controls(frames) == ["caught-up", "end"]


@pytest.mark.parametrize("late_ms", [1, 900, 6_000, HOUR, 3 * HOUR])
async def test_rows_that_are_written_late_come_once_and_so_they_do_from_every_cursor(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows, late_ms: int
) -> None:
    """A partition lags: what it has lies behind everybody, up to three buckets."""
    rows.write("slow", ["green"], partition=1, age_ms=late_ms + 5_000)
    async with reading(store, rows_store) as read:
        follower = Follower(await read.open("green", start="start"))
        written = 1
        for n in range(4):
            rows.write(f"fast{n}", ["green"], 2, partition=0)
            rows.lift(0)
            await follower.until(written := written + 2)
            rows.write("slow", ["green"], 2, partition=1, age_ms=late_ms)
            rows.write(f"fast{n}", ["green"], partition=2)
            await follower.until(written := written + 3)
        rows.lift()
        got = events(follower.frames)
        await follower.close()
        shown = names(got)
        assert len(set(shown)) == len(shown) == written
        assert [name for name in shown if name.startswith("slow")] == [f"slow:{n}" for n in range(1, 10)]
        for i, frame in enumerate(got):
            rest = await read.names("green", after=frame.cursor)
            assert sorted(shown[: i + 1] + rest) == sorted(shown)
            assert [name for name in shown[: i + 1] + rest if name[:4] == "slow"] == [f"slow:{n}" for n in range(1, 10)]


async def test_a_feed_may_be_cut_off_and_resumed_at_any_time_while_late_rows_arrive(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    got: list[str] = []
    written = 0
    cursor = None
    async with reading(store, rows_store) as read:
        for n in range(12):
            feed = await read.open("green", **({"start": "start"} if cursor is None else {"last_event_id": cursor}))
            follower = Follower(feed)
            rows.write(f"p{n % 3}", ["green"], 3, partition=0)
            if n % 2:
                rows.lift(0)
            rows.write(f"q{n % 2}", ["green"], 2, partition=1 + n % 2, age_ms=(n % 5) * HOUR // 2)
            written += 5
            await follower.until(1 + n % 4)  # and no more
            got += names(follower.frames)
            cursor = events(follower.frames)[-1].cursor
            await follower.close()
        rows.lift()
        got += await read.names("green", after=cursor)
    assert len(got) == len(set(got)) == written
    for pid in ("p0", "p1", "p2", "q0", "q1"):
        mine = [name for name in got if name.startswith(pid)]
        assert mine == [f"{pid}:{n}" for n in range(1, len(mine) + 1)]


async def test_a_partition_that_is_new_is_read_from_where_it_begins(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    async with reading(store, rows_store) as read:
        follower = Follower(await read.open("green", start="start"))
        rows.write("a", ["green"], 3)
        await follower.until(3)
        rows.write("b", ["green"], 3, partition=7, age_ms=2 * HOUR)
        assert len(set(await follower.until(6))) == 6
        await follower.close()
        for i, frame in enumerate(events(follower.frames)):
            rows.lift()
            assert len(await read.names("green", after=frame.cursor)) == 5 - i


# Where a feed begins and ends.


async def test_a_feed_begins_at_the_end_at_a_time_or_with_the_last_events(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    rows.write("a", ["green"], 5, age_ms=2 * HOUR)
    rows.write("b", ["green"], 5, partition=1)
    rows.lift()
    async with reading(store, rows_store) as read:
        assert await read.names("green", start="-1h") == [f"b:{n}" for n in range(1, 6)]
        assert await read.names("green", start="-7") == ["a:4", "a:5", *(f"b:{n}" for n in range(1, 6))]
        assert await read.names("green", start="-2") == ["b:4", "b:5"]
        assert len(await read.names("green", start="-100")) == 10
        assert await read.names("green", start="start", until="-1h") == [f"a:{n}" for n in range(1, 6)]
        follower, last = Follower(await read.open("green", start="end")), Follower(await read.open("green", start="-1"))
        rows.write("c", ["green"], partition=1)
        assert await follower.until(1) == ["c:1"]
        assert await last.until(2) == ["b:5", "c:1"]
        await follower.close()
        await last.close()


async def test_late_rows_of_what_was_not_written_yet_follow_the_end_and_the_last_events(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    rows.write("slow", ["green"], partition=1, age_ms=HOUR)
    rows.write("fast", ["green"], 4)
    rows.lift(0)
    async with reading(store, rows_store) as read:
        end, last = Follower(await read.open("green", start="end")), Follower(await read.open("green", start="-2"))
        assert await last.until(2) == ["fast:3", "fast:4"]
        rows.write("slow", ["green"], partition=1, age_ms=HOUR // 2)
        assert await end.until(1) == ["slow:2"]
        assert await last.until(3) == ["fast:3", "fast:4", "slow:2"]
        rows.write("fast", ["green"])
        assert (await end.until(2))[-1] == (await last.until(4))[-1] == "fast:5"
        await end.close()
        await last.close()


async def test_a_limit_counts_over_reconnects_and_an_ended_request_stays_ended(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    rows.write("a", ["green"], 5)
    rows.lift()
    async with reading(store, rows_store) as read:
        frames = await read.all("green", limit=3)
        assert names(frames) == ["a:1", "a:2", "a:3"]
        again = await read.all("green", limit=3, last_event_id=events(frames)[0].cursor)
        assert names(again) == ["a:2", "a:3"]
        assert frames[-1].cursor.endswith("~end")
        assert request_of("green", own_cursors=True, last_event_id=frames[-1].cursor) is None


async def test_what_cannot_be_opened_is_refused(store: StoreOptions, rows_store: CassandraSettings, rows: Rows) -> None:
    rows.write("a", ["green"])
    async with reading(store, rows_store) as read:
        with pytest.raises(StreamNotFound):
            await read.open("green", "apple", missing="fail")
        with pytest.raises(BadRequest, match="at most 20 tags"):
            await read.open(*(f"t{n}" for n in range(21)))
        with pytest.raises(CursorError, match="damaged"):
            await read.open("green", after="u" + "A" * 30)
        with pytest.raises(CursorError, match=r"over 1 tag.*for 2"):
            await read.open("green", "b", after=events(await read.all("green"))[0].cursor)


async def test_a_cursor_is_at_the_end_when_nothing_comes_after_it(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    rows.write("a", ["green"], 2)
    async with reading(store, rows_store) as read:
        first, second = events(await read.all("green"))
        assert not await read.feeds.is_at_end(["green"], first.cursor)
        assert await read.feeds.is_at_end(["green"], second.cursor)


# Several tags.


async def test_an_event_of_several_tags_comes_once_and_of_all_of_them_only_if_it_has_them(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    for tags in (["a"], ["b"], ["a", "b"], ["c"], ["b", "c"], ["a", "b", "c"]):
        rows.write("p", tags)
    rows.lift()
    async with reading(store, rows_store) as read:
        frames = await read.all("a", "b", "c")
        numbers = [json.loads(frame.data)["seq"] for frame in events(frames)]
        assert sorted(numbers) == [0, 1, 2, 3, 4, 5]
        for i, frame in enumerate(events(frames)):
            rest = [json.loads(each.data)["seq"] for each in events(await read.all("a", "b", "c", after=frame.cursor))]
            assert sorted(numbers[: i + 1] + rest) == [0, 1, 2, 3, 4, 5]
        both = await read.all("b", "c", mode="all")
        assert [json.loads(frame.data)["seq"] for frame in events(both)] == [4, 5]
        asked = await read.all("a", "b", query={"n": {"$gte": 2}})
        assert sorted(json.loads(frame.data)["seq"] for frame in events(asked)) == [2, 4, 5]


# What somebody else writes.


async def test_c_11_a_gap_holds_its_own_source_until_the_missing_row_is_there(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    now = now_ms() - 5_000
    rows.put("green", ("p1", 1, now), ("p1", 2, now + 1), ("p1", 4, now + 4), ("p2", 1, now + 5))
    async with reading(store, rows_store, refresh="100ms") as read:
        follower = Follower(await read.open("green", start="start"))
        assert await follower.until(3) == ["p1:1", "p1:2", "p2:1"]
        rows.put("green", ("p1", 3, now + 3), ("p2", 2, now + 6))
        assert sorted((await follower.until(6))[3:]) == ["p1:3", "p1:4", "p2:2"]
        await follower.close()
        for i, frame in enumerate(events(follower.frames)):
            rest = await read.names("green", after=frame.cursor)
            assert sorted(names(follower.frames)[: i + 1] + rest) == ["p1:1", "p1:2", "p1:3", "p1:4", "p2:1", "p2:2"]


async def test_c_12_a_gap_that_is_not_filled_in_time_fails_with_what_is_missing_or_is_passed_over(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    now = now_ms() - 5_000
    rows.put("green", ("p1", 1, now), ("p1", 4, now + 4), ("p2", 1, now + 5))
    async with reading(store, rows_store, gap_timeout="300ms") as read:
        with pytest.raises(RowsMissing, match=r"'p1' 2 to 3 not found in time") as caught:
            await read.all("green")
        assert (caught.value.tag, caught.value.missing) == ("green", {"p1": (2, 3)})
    async with reading(store, rows_store, gap_timeout="300ms", on_missing="skip") as read:
        frames = await read.all("green")
        assert names(frames) == ["p1:1", "p2:1", "p1:4"]
        (gap,) = (json.loads(each.data) for each in frames if isinstance(each, ControlFrame) and each.name == "gap")
        assert (gap["tag"], gap["source"], gap["missing"], gap["reason"]) == ("green", "p1", [2, 3], "missing")
        assert str(caught.value.after) == gap["from"]
        with pytest.raises(RowsMissing):
            await read.all("green", on_gap="fail")


async def test_c_13_a_missing_row_is_found_as_many_buckets_back_as_it_lies(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    now = now_ms() - 5_000
    rows.put("green", ("p1", 1, now - 5 * HOUR), ("p1", 4, now))
    async with reading(store, rows_store, refresh="100ms") as read:
        follower = Follower(await read.open("green", start="start"))
        assert await follower.until(1) == ["p1:1"]
        rows.put("green", ("p1", 2, now - 4 * HOUR), ("p1", 3, now - 3 * HOUR))
        assert (await follower.until(4))[1:] == ["p1:2", "p1:3", "p1:4"]
        await follower.close()


async def test_b_08_late_rows_of_sources_that_nobody_knows_are_found_by_looking_back(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    now = now_ms() - 5_000
    rows.put("green", ("a", 1, now))
    async with reading(store, rows_store, refresh="10m", back_track="100ms", back_track_period="max") as read:
        follower = Follower(await read.open("green", start="start"))
        assert await follower.until(1) == ["a:1"]
        rows.put("green", ("c", 1, now - HOUR // 2), ("b", 1, now - HOUR // 4), ("c", 2, now - HOUR // 8))
        assert await follower.until(4) == ["a:1", "c:1", "b:1", "c:2"]
        await follower.close()


async def test_g_06_a_source_first_seen_in_the_middle_is_delivered_after_a_short_search(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    start = now_ms()
    async with reading(store, rows_store, refresh="10m", back_track="50ms") as read:
        follower = Follower(await read.open("green", start=f"@{_iso(start)}"))
        await asyncio.sleep(0.4)
        rows.put("green", ("p1", 11, now_ms() - 100))
        assert await follower.until(1) == ["p1:11"]
        await follower.close()


async def test_the_delay_follows_the_places_when_it_is_measured(
    store: StoreOptions, rows_store: CassandraSettings, rows: Rows
) -> None:
    async with reading(store, rows_store, delay="auto", refresh="10m") as read:
        follower = Follower(await read.open("green", start="start"))
        for n in range(1, 4):
            rows.write("a", ["green"])
            rows.write("b", ["green"], partition=1)
            await asyncio.sleep(0.05)
            rows.lift()
            assert len(await follower.until(2 * n)) == 2 * n
        await follower.close()
        frames = events(follower.frames)
        timeuuids = [json.loads(frame.data)["timeuuid"] for frame in frames]
        assert timeuuids == sorted(timeuuids, key=lambda text: order(UUID(text)))
        assert all("." not in frame.cursor for frame in frames)  # one timeuuid, and nothing above it


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

"""Behaviour cases of gaps (G): numbers of a source say that something is missing below what is seen.

All rows here are somebody else's, who says nothing of how far he has written: of the pipeline's own a reader sees none
before all below it. Only the source that misses something is held back; where a case holds all others too, they flow
here.
"""

# ruff: noqa: N802 cases have their ids in the names of their tests

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from tailrace.errors import RowsMissing
from tailrace.log.event import Partition, iso_time
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import make_timeuuid, ms_of
from tests.log.rig import controls, now_ms
from tests.views.tags.cases import HOUR, SECOND, World, in_turn, run
from tests.views.tags.reading import events, names

NEVER: dict[str, Any] = {"back_track": "off", "long_back_track": "off"}
"""Late rows are found by their numbers, and not by looking back."""


async def test_G_01_the_missing_one_and_what_it_held_follow_in_order_and_others_flow_meanwhile(theirs: World) -> None:
    at = now_ms() - SECOND
    theirs.put("green", ("p1", 1, at), ("p1", 2, at + 1), ("p1", 4, at + 3), ("p2", 1, at + 4))
    async with theirs.reading(refresh="50ms", **NEVER) as read:
        follower = await read.follow("green")
        assert await follower.until(3) == ["p1:1", "p1:2", "p2:1"]
        theirs.put("green", ("p2", 2, at + 5))
        assert (await follower.until(4))[-1] == "p2:2"
        theirs.put("green", ("p1", 3, at + 2))
        assert (await follower.until(6))[4:] == ["p1:3", "p1:4"]
        theirs.put("green", ("p1", 5, at + 6))
        assert (await follower.until(7))[-1] == "p1:5"
        assert "gap" not in controls(follower.frames)


async def test_G_02_of_several_missing_the_lowest_is_waited_for(theirs: World) -> None:
    at = now_ms() - SECOND
    theirs.put("green", ("p1", 1, at), ("p1", 2, at + 1), ("p1", 6, at + 5))
    async with theirs.reading(refresh="50ms", **NEVER) as read:
        follower = await read.follow("green")
        assert await follower.until(2) == ["p1:1", "p1:2"]
        theirs.put("green", ("p1", 4, at + 3), ("p1", 5, at + 4))
        theirs.put("green", ("p2", 1, at + 6))
        assert await follower.until(3) == ["p1:1", "p1:2", "p2:1"]
        await follower.is_silent()
        theirs.put("green", ("p1", 3, at + 2))
        assert (await follower.until(7))[3:] == run("p1", 3, 6)


async def test_G_02_what_is_held_is_in_every_cursor_since(theirs: World) -> None:
    """A cursor says what was known to be missing; before a gap is seen nobody knows of it, but of our own rows."""
    at = now_ms() - SECOND
    theirs.put("green", *[(pid, n, at + n) for pid in ("p1", "p2") for n in (1, 2, 6)])
    theirs.put("green", *[("p3", n, at + n) for n in range(1, 9)])
    async with theirs.reading(refresh="50ms", **NEVER) as read:
        follower = await read.follow("green")
        assert (await follower.until(12))[-2:] == ["p3:7", "p3:8"]
        theirs.put("green", *[("p1", n, at + n) for n in (3, 4, 5)])
        assert (await follower.until(16))[12:] == run("p1", 3, 6)
        theirs.put("green", *[("p2", n, at + n) for n in (3, 4, 5)])
        found = await follower.until(20)
        assert in_turn(found)
        for i, frame in enumerate(events(follower.frames), 1):
            if i >= 11:
                rest = await read.current("green", after=frame.cursor)
                assert sorted(found[:i] + rest) == sorted(found)
                assert in_turn(found[:i] + rest)


async def test_G_03_a_source_first_seen_in_the_middle_is_given_time_for_what_is_below(theirs: World) -> None:
    at = now_ms() - SECOND
    theirs.put("green", ("p1", 1, at), ("p2", 3, at + 3))
    async with theirs.reading(refresh="50ms", new_source_scan="1m", **NEVER) as read:
        follower = await read.follow("green")
        assert await follower.until(1) == ["p1:1"]
        theirs.put("green", ("p2", 2, at + 2))
        await follower.is_silent(0.2)
        theirs.put("green", ("p2", 1, at + 1))
        assert (await follower.until(4))[1:] == run("p2", 1, 3)
        theirs.put("green", ("p2", 4, at + 4), ("p2", 5, at + 5))
        assert (await follower.until(6))[4:] == run("p2", 4, 5)


async def test_G_04_what_is_below_the_first_seen_is_found_in_the_bucket_before(theirs: World) -> None:
    at = now_ms() - SECOND
    before = bucket_start(at, HOUR) - 1
    theirs.put("green", ("p1", 3, at))
    async with theirs.reading(refresh="50ms", new_source_scan="1m", **NEVER) as read:
        follower = await read.follow("green")
        theirs.put("green", ("p1", 1, before))
        assert await follower.until(1) == ["p1:1"]
        theirs.put("green", ("p1", 2, at - 1))
        assert await follower.until(3) == run("p1", 1, 3)


async def test_G_05_what_is_missing_appears_piece_by_piece_in_the_bucket_before(theirs: World) -> None:
    """Events that follow without a gap go out at once; they do not wait for the rest."""
    at = now_ms() - SECOND
    before = bucket_start(at, HOUR) - 10
    theirs.put("green", ("p1", 1, at - 2 * HOUR), ("p1", 4, at))
    async with theirs.reading(refresh="50ms", **NEVER) as read:
        follower = await read.follow("green")
        assert await follower.until(1) == ["p1:1"]
        theirs.put("green", ("p1", 3, before + 1))
        await follower.is_silent()
        theirs.put("green", ("p1", 2, before))
        assert await follower.until(4) == run("p1", 1, 4)


async def test_G_06_a_source_first_seen_in_the_middle_is_delivered_when_its_search_is_over(theirs: World) -> None:
    async with theirs.reading(refresh="50ms", **NEVER) as read:
        follower = await read.follow("green", start=iso_time(now_ms() - SECOND))
        await follower.wait_for_control("caught-up")
        theirs.put("green", ("p1", 11, now_ms()))
        assert await follower.until(1) == ["p1:11"]
        theirs.put("green", ("p1", 12, now_ms() + 1))
        assert await follower.until(2) == ["p1:11", "p1:12"]
        assert "gap" not in controls(follower.frames)


async def test_G_07_more_missing_than_is_searched_for_fails_at_once(theirs: World) -> None:
    at = now_ms() - SECOND
    theirs.put("green", ("p1", 1, at), ("p1", 10_000, at + 1))
    async with theirs.reading(gap_timeout="1h", **NEVER) as read:
        follower = await read.follow("green")
        with pytest.raises(RowsMissing) as caught:
            await follower.end()
        assert follower.names == ["p1:1"]
    ((first, last),) = caught.value.missing.values()
    assert last - first + 1 == 9_998


async def test_G_08_the_end_of_a_search_does_not_wait_for_the_refresh(theirs: World) -> None:
    at = now_ms() - SECOND
    theirs.put("green", ("p1", 2, at))
    async with theirs.reading(refresh="1h", offset_scan="0s", **NEVER) as read:
        follower = await read.follow("green", start=iso_time(at))
        assert await follower.until(1, 20) == ["p1:2"]


async def test_G_09_a_number_that_was_delivered_is_not_delivered_again(theirs: World) -> None:
    """No gap is reported: rows are read again as a matter of course."""
    at = now_ms() - SECOND
    theirs.put("green", ("p1", 1, at), ("p1", 2, at + 1))
    async with theirs.reading(refresh="50ms", back_track="50ms", long_back_track="off") as read:
        follower = await read.follow("green")
        assert await follower.until(2) == run("p1", 1, 2)
        theirs.put("green", ("p1", 1, at + 2), ("p1", 2, at + 3), ("p1", 2, at + 1), ("p1", 3, at + 4))
        assert await follower.until(3) == run("p1", 1, 3)
        await follower.is_silent()
        theirs.put("green", ("p1", 4, at + 5))
        assert await follower.until(4) == run("p1", 1, 4)


async def test_G_10_a_source_that_was_forgotten_is_new_again_and_nothing_of_it_is_repeated(theirs: World) -> None:
    """Sources are forgotten when there are too many of them, the least recent first, and not by their age."""
    at = now_ms() - SECOND
    theirs.put("green", *[(f"p{n}", 1, at + n) for n in range(5)])
    async with theirs.reading(refresh="50ms", known_sources=2, back_track="50ms", long_back_track="off") as read:
        follower = await read.follow("green")
        assert await follower.until(5) == [f"p{n}:1" for n in range(5)]
        await follower.is_silent()
        theirs.put("green", ("p0", 2, at + 10))
        assert (await follower.until(6))[-1] == "p0:2"
        theirs.put("green", ("p1", 2, at + 11), ("p0", 3, at + 12))
        assert sorted((await follower.until(8))[6:]) == ["p0:3", "p1:2"]
        await follower.is_silent()


@pytest.mark.parametrize("buckets", [2, 3, 50])
async def test_G_11_a_missing_event_is_found_however_many_buckets_back_it_lies(theirs: World, buckets: int) -> None:
    """The case gives it up when it is older than the bucket before; here every bucket between is looked into."""
    at = now_ms() - SECOND
    theirs.put("green", ("p1", 1, at - (buckets + 1) * HOUR), ("p1", 3, at))
    async with theirs.reading(refresh="50ms", **NEVER) as read:
        follower = await read.follow("green")
        assert await follower.until(1) == ["p1:1"]
        theirs.put("green", ("p1", 2, at - buckets * HOUR))
        assert await follower.until(3) == run("p1", 1, 3)


async def test_G_12_a_failed_feed_says_what_was_missing_and_where_it_was_searched(theirs: World) -> None:
    at = now_ms() - SECOND
    theirs.put("green", ("p1", 1, at), ("p1", 4, at + 4), ("p2", 1, at + 1), ("p2", 3, at + 6), ("p3", 1, at + 7))
    async with theirs.reading(gap_timeout="500ms", **NEVER) as read:
        follower = await read.follow("green")
        with pytest.raises(RowsMissing) as caught:
            await follower.end()
        error = caught.value
        assert error.tag == "green"
        assert error.missing == {"p1": (2, 3), "p2": (2, 2)}
        assert UUID(error.after) == make_timeuuid(at, 1, Partition("of-p1", 0))
        assert UUID(error.to) == make_timeuuid(at + 6, 3, Partition("of-p2", 0))
        assert sorted(follower.names) == ["p1:1", "p2:1", "p3:1"]
        # The last cursor is what a caller goes on from: all that was found by then, and all that was missing.
        theirs.put("green", ("p1", 2, at + 2), ("p1", 3, at + 3), ("p2", 2, at + 5))
        rest = await read.current("green", after=events(follower.frames)[-1].cursor)
        assert sorted(rest) == ["p1:2", "p1:3", "p1:4", "p2:2", "p2:3"]
        assert [name for name in rest if name.startswith("p1")] == run("p1", 2, 4)
        early = await read.current("green", start=iso_time(ms_of(UUID(error.after))))
        assert sorted(early) == sorted(follower.names + rest)


async def test_G_12_where_it_is_said_so_a_feed_goes_on_and_tells_what_it_passed_over(theirs: World) -> None:
    at = now_ms() - SECOND
    theirs.put("green", ("p1", 1, at), ("p1", 4, at + 4), ("p2", 1, at + 5))
    async with theirs.reading(gap_timeout="300ms", on_missing="skip", **NEVER) as read:
        frames = await read.all("green")
        assert names(frames) == ["p1:1", "p2:1", "p1:4"]
        assert controls(frames) == ["gap", "caught-up", "end"]
        late = await read.current("green", after=events(frames)[-1].cursor)
        theirs.put("green", ("p1", 2, at + 2))
        assert late == await read.current("green", after=events(frames)[-1].cursor) == []

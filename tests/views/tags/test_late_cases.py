"""Behaviour cases of events that appear late (B), and of the look ahead at a start (S), in rows of somebody else.

He says nothing of how far he has written: what appears behind a reader is missed by its number, or found by looking
back. What the pipeline itself writes late is in ``test_lagging``: there nothing needs to be searched for.
"""

# ruff: noqa: N802 cases have their ids in the names of their tests

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from pydantic import ValidationError

from tailrace.log.event import Partition, iso_time
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import last_of, make_timeuuid, ms_of
from tailrace.views.tags.rows.model import BEGIN, TagPosition
from tailrace.views.tags.rows.reading import Reading, ReadSettings
from tailrace.views.tags.rows.store import RowReader
from tailrace.views.tags.settings import CassandraSettings, TagsSettings
from tests.log.rig import now_ms
from tests.views.tags.cases import HOUR, MINUTE, SECOND, World, in_turn, run
from tests.views.tags.reading import events
from tests.views.tags.tag_store import event

SOON: dict[str, Any] = {"refresh": "50ms", "back_track": "off", "long_back_track": "off"}
"""Late rows are found by their numbers."""
BACK: dict[str, Any] = {"refresh": "1h", "back_track": "50ms", "long_back_track": "off"}
"""Late rows are found by looking back."""


# By their numbers.


async def test_B_01_what_lies_behind_is_found_when_what_follows_it_is_seen(theirs: World) -> None:
    at = now_ms() - 5 * SECOND
    theirs.put("green", ("p1", 1, at), ("p2", 1, at + 2 * SECOND))
    async with theirs.reading(**SOON) as read:
        follower = await read.follow("green")
        assert await follower.until(2) == ["p1:1", "p2:1"]
        theirs.put("green", ("p1", 2, at + SECOND), ("p1", 3, at + 3 * SECOND))
        assert (await follower.until(4))[2:] == ["p1:2", "p1:3"]


async def test_B_02_the_first_event_of_a_new_source_is_found_behind(theirs: World) -> None:
    at = now_ms() - 5 * SECOND
    theirs.put("green", ("a", 1, at))
    async with theirs.reading(**SOON, new_source_scan="10s") as read:
        follower = await read.follow("green")
        assert await follower.until(1) == ["a:1"]
        theirs.put("green", ("b", 1, at - SECOND), ("b", 2, at + SECOND))
        assert (await follower.until(3))[1:] == ["b:1", "b:2"]


async def test_B_03_the_next_event_of_a_known_source_is_found_behind(theirs: World) -> None:
    at = now_ms() - 5 * SECOND
    theirs.put("green", ("b", 1, at), ("a", 1, at + 2))
    async with theirs.reading(**SOON) as read:
        follower = await read.follow("green")
        assert await follower.until(2) == ["b:1", "a:1"]
        theirs.put("green", ("b", 2, at + 1), ("b", 3, at + 3))
        assert (await follower.until(4))[2:] == ["b:2", "b:3"]


@pytest.mark.parametrize("how", [SOON, BACK | {"back_track_period": "max"}], ids=["by number", "looking back"])
async def test_B_04_nothing_is_searched_for_before_the_start_of_the_feed(theirs: World, how: dict[str, Any]) -> None:
    at = now_ms() - 5 * SECOND
    theirs.put("green", ("a", 1, at))
    async with theirs.reading(**how) as read:
        after = events(await read.all("green"))[0].cursor
        by_place = await read.follow("green", after=after)
        by_time = await read.follow("green", start=iso_time(at))
        theirs.put("green", ("b", 1, at - 1), ("b", 2, at + 1))
        assert await by_place.until(1) == ["b:2"]
        assert await by_time.until(2) == ["a:1", "b:2"]
        theirs.put("green", ("b", 3, at + 2))
        assert await by_place.until(2) == ["b:2", "b:3"]
        await by_place.is_silent(0.2)
        await by_time.is_silent(0.1)


async def test_B_05_with_a_delay_what_is_written_late_takes_its_turn(theirs: World) -> None:
    theirs.put("green", *[("a", n, now_ms() - MINUTE + n) for n in range(1, 101)])
    async with theirs.reading(**SOON, delay="2s") as read:
        follower = await read.follow("green")
        assert await follower.until(100) == run("a", 1, 100)
        at = now_ms()
        theirs.put("green", *[("a", n, at + n) for n in range(101, 201)])
        theirs.put("green", ("b", 1, at))
        assert (await follower.until(201))[100:] == ["b:1", *run("a", 101, 200)]
        theirs.put("green", ("b", 2, now_ms()))
        assert (await follower.until(202))[-1] == "b:2"


# By looking back.


async def test_B_06_a_source_that_stays_silent_after_late_events_is_found_by_looking_back(theirs: World) -> None:
    at = now_ms() - 2 * MINUTE
    theirs.put("green", ("p1", 1, at), ("p1", 2, at + 1), ("p2", 1, at + 2 * MINUTE - SECOND))
    async with theirs.reading(**BACK, back_track_period="10m") as read:
        follower = await read.follow("green")
        assert await follower.until(3) == ["p1:1", "p1:2", "p2:1"]
        theirs.put("green", *[("p1", n, at + MINUTE + n) for n in (3, 4, 5)])
        assert (await follower.until(6))[3:] == run("p1", 3, 5)
        theirs.put("green", ("p2", 2, at + 2 * MINUTE), ("p1", 6, at + 2 * MINUTE + 1))
        assert (await follower.until(8))[6:] == ["p2:2", "p1:6"]


async def test_B_07_what_is_older_than_the_short_look_is_left_to_the_long_one(theirs: World) -> None:
    at = now_ms() - SECOND
    old = bucket_start(at, HOUR) - HOUR + MINUTE
    theirs.put("green", ("a", 1, at))
    short = BACK | {"back_track_period": "1m"}
    both = short | {"long_back_track": "500ms", "long_back_track_period": "max"}
    async with theirs.reading(**short) as one, theirs.reading(**both) as other:
        by_short, by_long = await one.follow("green"), await other.follow("green")
        assert await by_short.until(1) == await by_long.until(1) == ["a:1"]
        theirs.put("green", ("old", 1, old))
        theirs.put("green", ("new", 1, at - 1))
        assert await by_short.until(2) == ["a:1", "new:1"]
        assert sorted(await by_long.until(3)) == ["a:1", "new:1", "old:1"]
        await by_short.is_silent(0.2)


async def test_B_08_what_appears_in_the_bucket_before_needs_no_refresh(theirs: World) -> None:
    at = now_ms() - SECOND
    theirs.put("green", ("a", 1, at))
    async with theirs.reading(**BACK, back_track_period="max") as read:
        follower = await read.follow("green")
        assert await follower.until(1) == ["a:1"]
        theirs.put("green", ("b", 1, bucket_start(at, HOUR) - HOUR))
        assert await follower.until(2, 20) == ["a:1", "b:1"]
        theirs.put("green", ("a", 2, at + 1))
        assert await follower.until(3, 20) == ["a:1", "b:1", "a:2"]


async def test_B_09_a_source_that_was_never_seen_appears_minutes_behind(theirs: World) -> None:
    at = now_ms() - SECOND
    theirs.put("green", ("a", 1, at))
    async with theirs.reading(**BACK, back_track_period="10m") as read:
        follower = await read.follow("green")
        assert await follower.until(1) == ["a:1"]
        theirs.put("green", ("b", 1, at - 4 * MINUTE), ("b", 2, at - 3 * MINUTE))
        assert (await follower.until(3))[1:] == ["b:1", "b:2"]
        theirs.put("green", ("a", 2, at + 1), ("b", 3, at + 2))
        assert (await follower.until(5))[3:] == ["a:2", "b:3"]


async def test_B_10_what_is_found_together_comes_in_the_order_of_its_timeuuids(theirs: World) -> None:
    at = now_ms() - SECOND
    theirs.put("green", ("p1", 1, at))
    late = [("p2", 1, at - 4 * MINUTE), ("p3", 1, at - 3 * MINUTE), ("p2", 2, at - 2 * MINUTE), ("p3", 2, at - MINUTE)]
    async with theirs.reading(**BACK | {"back_track": "1s"}, back_track_period="max") as read:
        follower = await read.follow("green")
        assert await follower.until(1) == ["p1:1"]
        # Rows of one bucket that are written together appear together.
        theirs.bucket = "day" if bucket_start(late[0][2], HOUR) != bucket_start(at, HOUR) else "hour"
        theirs.put("green", *late)
        assert (await follower.until(5))[1:] == ["p2:1", "p3:1", "p2:2", "p3:2"]


async def test_B_11_late_events_of_many_sources_come_in_order_and_block_nobody(theirs: World) -> None:
    at = now_ms() - SECOND
    theirs.put("green", ("a", 1, at))
    async with theirs.reading(**BACK, back_track_period="max") as read:
        follower = await read.follow("green")
        await follower.until(1)
        for first, normal in ((1, 2), (6, 3)):
            minutes = 20 if first == 1 else 10
            theirs.put(
                "green",
                *[
                    (f"p{p}", n, at - minutes * MINUTE + n * SECOND + p)
                    for n in range(first, first + 5)
                    for p in range(10)
                ],
            )
            theirs.put("green", ("a", normal, at + normal))
            found = await follower.until((first // 5 + 1) * 50 + normal)
    assert len(found) == 103
    assert in_turn(found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"back_track": "off", "long_back_track": "2m"}, "back_track too"),
        ({"back_track": "2m", "long_back_track": "2m"}, "longer than back_track"),
        ({"back_track": "2m", "long_back_track": "1m"}, "longer than back_track"),
        ({"back_track_period": "off"}, "back_track_period"),
    ],
)
def test_B_12_looks_that_cannot_be_meant_are_refused(given: dict[str, str], message: str) -> None:
    """Periods need not be shorter than any other time: sources are forgotten by their number, not by their age."""
    with pytest.raises(ValidationError, match=message):
        TagsSettings(**given)  # type: ignore[arg-type]
    assert TagsSettings(back_track="off", long_back_track="off").back_track is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("period_ms", "back_ms"),
    [(None, 90 * MINUTE), (5_000, 5_000), (89 * MINUTE, 89 * MINUTE), (10 * HOUR, 90 * MINUTE)],
)
def test_B_13_a_look_back_goes_no_further_than_the_start_of_the_bucket_before(
    period_ms: int | None, back_ms: int
) -> None:
    """There is no time after which sources are forgotten, and which would bound it too."""
    at = bucket_start(now_ms(), HOUR) + 30 * MINUTE
    for reads in (
        ReadSettings(delay_ms=0, short_ms=10, short_period_ms=period_ms, long_ms=None),
        ReadSettings(delay_ms=0, short_ms=10, short_period_ms=1, long_ms=10, long_period_ms=period_ms),
    ):
        reading = _stands_at(at, reads)
        ((after, to),) = reading.searches(at + 1_000)
        assert (ms_of(after), ms_of(to)) == (at - back_ms - 1, at)
        assert reading.searches(at + 1_001) == []
        assert len(reading.searches(at + 1_010)) == 1
        assert len(reading.searches(at - 10 * HOUR)) == 1, "the clock was set back"
        assert reading.searches(at - 10 * HOUR + 9) == []
    never = _stands_at(at, ReadSettings(delay_ms=0, short_ms=None, long_ms=None))
    assert never.searches(at + 1_000 * HOUR) == []


def test_B_13_a_look_back_does_not_go_before_the_start_of_the_feed() -> None:
    at = bucket_start(now_ms(), HOUR) + 30 * MINUTE
    reading = _stands_at(
        at, ReadSettings(delay_ms=0, short_ms=10, short_period_ms=None), TagPosition(last_of(at - MINUTE))
    )
    ((after, _),) = reading.searches(at + 1_000)
    assert after == last_of(at - MINUTE)


def _stands_at(ms: int, reads: ReadSettings, start: TagPosition | None = None) -> Reading:
    """Return a reading that has passed an event of this millisecond."""
    reading = Reading(start or TagPosition(BEGIN), reads, from_beginning=start is None, now_ms=ms)
    place = Partition("theirs", 0)
    row = event("p", 1, make_timeuuid(ms, 0, place), place, 0)
    reading.begin({}, {}, ms)
    reading.levels.unmarked.add(place)
    assert len([*reading.take_page([row], ms), *reading.finish(ms)]) == 1
    return reading


# The look ahead at a start.

SCAN: dict[str, Any] = {**SOON, "new_source_scan": "1h"}
"""Whoever is not expected by his number waits for an hour."""


async def test_S_01_where_there_is_nothing_nothing_is_expected(theirs: World) -> None:
    async with theirs.reading(**SOON) as read:
        follower = await read.follow("green", start=iso_time(now_ms() - SECOND))
        await follower.wait_for_control("caught-up")
        theirs.put("green", ("p1", 1, now_ms()))
        assert await follower.until(1) == ["p1:1"]


async def test_S_02_the_lowest_number_after_the_start_is_expected_of_each_source(theirs: World) -> None:
    at = now_ms() - SECOND
    theirs.put("green", ("p2", 4, at - 1))
    # Numbers are what counts, and not the order in which their timeuuids happen to be.
    theirs.put("green", ("p2", 6, at + 1), ("p1", 1, at + 2), ("p2", 5, at + 3), ("p1", 2, at + 4), ("p2", 7, at + 5))
    async with theirs.reading(**SCAN) as read:
        found = await (await read.follow("green", start=iso_time(at))).until(5, 20)
    assert [name for name in found if name.startswith("p1")] == run("p1", 1, 2)
    assert [name for name in found if name.startswith("p2")] == run("p2", 5, 7)


async def test_S_03_what_is_scanned_is_after_the_start_and_up_to_the_end(
    theirs: World, rows_store: CassandraSettings
) -> None:
    at = now_ms() - SECOND
    put: list[tuple[str, int, int | UUID]] = [("p1", n, at + n) for n in range(1, 9)]
    theirs.put("green", *put, ("p2", 1, at + 3), ("p2", 2, at + 8))
    reader = RowReader(rows_store, page=2)
    after, to = make_timeuuid(at + 2, 2, Partition("of-p1", 0)), make_timeuuid(at + 6, 6, Partition("of-p1", 0))
    highest: dict[str, int] = {}
    async for rows in reader.row_keys("green", after, to):
        for row in rows:
            assert row.tag_seq > 2 or row.source == "p2"
            highest[row.source] = max(highest.get(row.source, 0), row.tag_seq)
    await reader.close()
    assert highest == {"p1": 6, "p2": 1}


async def test_S_04_every_bucket_from_the_start_is_read(theirs: World, rows_store: CassandraSettings) -> None:
    theirs.bucket = "minute"
    at = now_ms()
    theirs.put("green", *[("p1", 5 + n, at - (3 - n) * MINUTE) for n in range(3)], ("p2", 9, at - 2 * MINUTE))
    reader = RowReader(rows_store)
    lowest: dict[str, int] = {}
    async for rows in reader.row_keys("green", last_of(at - 4 * MINUTE), last_of(at)):
        for row in rows:
            lowest[row.source] = min(lowest.get(row.source, row.tag_seq), row.tag_seq)
    await reader.close()
    assert lowest == {"p1": 5, "p2": 9}
    async with theirs.reading(**SCAN) as read:
        follower = await read.follow("green", start=iso_time(at - 4 * MINUTE))
        found = await follower.until(4, 20)
    assert [name for name in found if name.startswith("p1")] == run("p1", 5, 7)
    assert sorted(found) == [*run("p1", 5, 7), "p2:9"]

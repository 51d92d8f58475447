"""Partitions that lag, clocks that step and timeuuids that are equal: feeds lose and repeat nothing, from any cursor.

The pipeline writes all of it. Readers are 50 ms behind the clock, which is the profile of low latency: no delay is long
enough for what is hours late, and none has to be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from uuid import UUID

import pytest

from tailrace.log.event import Partition
from tailrace.log.request import AnyFrame
from tailrace.log.timeuuid import ms_of, order
from tailrace.views.tags.store import raise_floors
from tailrace.views.tags.write import TagsWriter
from tests.log.rig import now_ms
from tests.views.tags.cases import HOUR, SECOND, Reading, World, in_turn, run, timeuuids
from tests.views.tags.reading import events, names
from tests.views.tags.stored import view_of
from tests.writing import Writer


class Clock:
    """A clock that can be set."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def __call__(self) -> int:
        return now_ms() + self.ahead_ms

    def seconds(self) -> float:
        return self() / 1000


async def check_every_cursor(read: Reading, frames: Iterable[AnyFrame], found: list[str]) -> None:
    """Check that a feed which begins after any of these events gives exactly the others."""
    for i, frame in enumerate(events(frames), 1):
        everything = found[:i] + await read.current("green", after=frame.cursor)
        assert sorted(everything) == sorted(found), f"from {frame.cursor}, after {found[i - 1]}"
        assert in_turn(everything)


@pytest.mark.parametrize("late_ms", [1, 40, 900, 6_000, HOUR, 3 * HOUR])
async def test_readers_begin_at_every_cursor_of_a_stream_while_late_events_arrive(world: World, late_ms: int) -> None:
    world.begin(3)
    world.write("slow", "green", at=now_ms() - late_ms - 5 * SECOND, partition=1)
    written = 1

    def more(n: int) -> int:
        world.write(f"fast{n}", "green", count=2)
        world.settle(0)
        world.write("slow", "green", count=2, at=now_ms() - late_ms, partition=1)
        world.write(f"other{n % 2}", "green", at=now_ms() - late_ms // 2, partition=2)
        return 5

    async with world.reading() as read:
        recorder = await read.follow("green")
        for n in range(4):
            written += more(n)
            await recorder.until(written - n % 3)  # cursors of places at which more was just written, too
        found = await recorder.until(written)
        cursors = [frame.cursor for frame in events(recorder.frames)]
        again = [await read.follow("green", after=cursor) for cursor in cursors]
        for n in range(4, 7):
            written += await asyncio.to_thread(more, n)
        for i, follower in enumerate(again, 1):
            everything = found[:i] + await follower.until(written - i)
            assert in_turn(everything)
            assert len(everything) == written
        found = await recorder.until(written)
        assert in_turn(found)


async def test_a_reader_is_cut_off_after_every_event_while_late_events_arrive(world: World) -> None:
    """Each goes on where the one before stopped: after one event, while the next ones are written."""
    world.begin(3)
    found: list[str] = []
    cursor = ""
    written = 0
    async with world.reading() as read:
        while len(found) < 40:
            while written < len(found) + 3:
                world.write(f"p{written % 3}", "green", at=now_ms() - (written % 3) * HOUR, partition=written % 3)
                written += 1
                if written % 4 == 0:
                    world.settle(0)
            follower = await read.follow("green", **({"after": cursor} if cursor else {}))
            await follower.until(1)
            first = events(follower.frames)[0]
            await follower.close()
            found += names([first])
            cursor = first.cursor
        world.settle()
        found += await read.current("green", after=cursor)
    assert len(found) == written
    assert in_turn(found)


async def test_a_source_that_moves_to_a_partition_that_lags_keeps_its_order(world: World) -> None:
    world.begin(2)
    async with world.reading() as read:
        follower = await read.follow("green")
        for n in range(1, 9):
            partition = n % 2
            world.write("p", "green", at=now_ms() - partition * HOUR, partition=partition)
            world.write(f"q{partition}", "green", at=now_ms() - partition * HOUR, partition=partition)
            await follower.until(2 * n - n % 3)
        found = await follower.until(16)
        assert in_turn(found)
        await check_every_cursor(read, follower.frames, found)


# Clocks.


async def test_times_of_records_step_by_an_hour_and_back(world: World) -> None:
    """A time from the future is cut, and one from the past is raised to what readers may have passed."""
    world.begin(2)
    async with world.reading() as read:
        follower = await read.follow("green")
        written = 0
        for step in (0, HOUR, -HOUR, 0, -HOUR, HOUR, 0):
            for partition in (0, 1):
                world.write(
                    f"p{partition}", "green", count=2, at=now_ms() + step * (1 - partition), partition=partition
                )
            written += 4
            world.settle(1)
            await follower.until(written)
        found = follower.names
        assert len(found) == written
        assert in_turn(found)
        assert max(map(ms_of, timeuuids(follower.frames))) <= now_ms() + SECOND
        await check_every_cursor(read, follower.frames, found)


async def test_a_timeuuid_that_is_ahead_of_the_clock_is_read_when_its_time_has_come(theirs: World) -> None:
    """No refresh is waited for: a producer whose clock is a little ahead makes such timeuuids all the time."""
    async with theirs.reading(refresh="1h", back_track="off", long_back_track="off") as read:
        follower = await read.follow("green")
        await follower.wait_for_control("caught-up")
        for n in range(1, 4):
            theirs.write("a", "green", at=now_ms() + 400)
            assert (await follower.until(n, 20))[-1] == f"a:{n}"


@pytest.mark.parametrize("steps", [(HOUR, 0), (-HOUR, 0), (HOUR, -HOUR, 0)])
async def test_the_clock_of_a_reader_steps_by_an_hour_and_back(world: World, steps: tuple[int, ...]) -> None:
    clock = Clock()
    world.begin(2)
    async with world.reading(clock=clock, refresh="100ms") as read:
        follower = await read.follow("green")
        written = 0
        for step in (0, *steps):
            clock.ahead_ms = step
            for partition in (0, 1):
                world.write(f"p{partition}", "green", count=2, at=now_ms() - partition * HOUR, partition=partition)
            written += 4
            world.settle(0)
            assert len(await follower.until(written)) == written
        found = follower.names
        assert in_turn(found)
        await check_every_cursor(read, follower.frames, found)


@pytest.mark.parametrize("steps", [(HOUR, 0), (-HOUR, 0), (HOUR, -HOUR, 0)])
async def test_the_clock_of_the_pipeline_steps_by_an_hour_and_back(theirs: World, steps: tuple[int, ...]) -> None:
    """Events written while it was ahead keep their timeuuids; later events come after them, and none is lost."""
    world, clock = theirs, Clock()
    world.begin(2)
    task = _task(world.writer, clock)
    async with world.reading(refresh="100ms") as read:
        follower = await read.follow("green")
        written = 0
        for step in (0, *steps):
            clock.ahead_ms = step
            for partition in (0, 1):
                task.write([world.draft(f"p{partition}", "green", at=clock(), partition=partition) for _ in range(2)])
            written += 4
            raise_floors(world.writer.shards, world.writer.epoch, {Partition("jobs", 0): clock()})
            assert len(await follower.until(written)) == written
        found = follower.names
        assert in_turn(found)
        await check_every_cursor(read, follower.frames, found)


def _task(driver: Writer, clock: Clock) -> Writer:
    task = driver.another_task()
    task.host._views = [view_of(driver, TagsWriter, clock=clock.seconds)]
    return task


# Equal timeuuids.


@pytest.mark.parametrize("page", [1, 2, 3, 500])
async def test_two_sources_interleave_in_one_millisecond(world: World, page: int) -> None:
    world.begin(2)
    at = now_ms() - SECOND
    for n in range(6):
        for partition, pid in enumerate("ab"):
            world.write(pid, "green", count=1 + n % 2, at=at, partition=partition)
    world.settle()
    async with world.reading(page=page) as read:
        frames = await read.all("green")
        found = names(frames)
        assert len(found) == 18
        assert in_turn(found)
        assert len(set(timeuuids(frames))) == 18
        assert {ms_of(each) for each in timeuuids(frames)} == {at}
        await check_every_cursor(read, frames, found)


@pytest.mark.parametrize("page", [1, 2, 500])
async def test_sources_of_somebody_else_have_the_very_same_timeuuids(theirs: World, page: int) -> None:
    """The same hundred nanoseconds, by nodes of other names, or the same to the last bit."""
    second = now_ms() // 1000 - 5
    ticks = [second * 10_000_000 + 0x01B21DD213814000 + n // 2 for n in range(8)]
    rows: list[tuple[str, int, UUID]] = []
    for number, tick in enumerate(ticks, 1):
        for pid, node in (("a", 0x0A0000000000), ("b", 0xF00000000000), ("c", 0xF00000000000), ("d", 0x7F0000000001)):
            # Two of one tick: by the order of Cassandra the second has the later node.
            fields = tick & 0xFFFFFFFF, tick >> 32 & 0xFFFF, tick >> 48 & 0x0FFF, 0x80, 0, node + number
            rows.append((pid, number, UUID(fields=fields, version=1)))
    theirs.put("green", *rows)
    assert len({made for _, _, made in rows}) == 3 * 8
    async with theirs.reading(page=page, refresh="50ms", offset_scan="10ms") as read:
        frames = await read.all("green")
        found = names(frames)
        assert in_turn(found)
        assert sorted(found) == sorted(name for pid in "abcd" for name in run(pid, 1, 8))
        assert timeuuids(frames) == sorted(timeuuids(frames), key=order)
        await check_every_cursor(read, frames, found)

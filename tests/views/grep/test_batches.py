"""Batches that many feeds of one search share: each is made once, and each feed sees what it would see alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tailrace.http.delivery import EVENT_STREAM, LINES, Encoding
from tailrace.log.event import Partition
from tailrace.log.hub import SegmentEntry
from tailrace.log.request import Batch, EventFrame
from tailrace.log.run import NumberedRun, Run
from tailrace.log.segment import Segment
from tailrace.views.grep.matches import BatchCache, BatchKey, MatchRun, PendingRun

DATA = [b'{"id":"t:0:%d","data":{"n":\n%d}}' % (n, n) for n in range(5)]


def key(first: int, last: int) -> BatchKey:
    return "log", 7, first, last, ""


@pytest.mark.parametrize("encoding", [EVENT_STREAM, LINES])
def test_a_batch_is_written_as_its_frames_are(encoding: Encoding) -> None:
    batch = Batch("3-0-17.", 9, "~@1760000000000", DATA)
    frames = [EventFrame(f"3-0-17.{9 + n}~@1760000000000", data) for n, data in enumerate(DATA)]
    assert list(batch) == frames
    assert [batch[n] for n in range(-5, 5)] == frames + frames
    assert batch[1:3] == frames[1:3]
    assert encoding.frames(batch) == encoding.frames(frames)
    assert encoding.frames(batch) is encoding.frames(batch), "it is written once"


async def test_of_many_who_want_the_same_one_makes_it() -> None:
    batches, made = BatchCache(1 << 20), list[Sequence[int]]()

    async def make(missing: Sequence[int]) -> list[Batch | None]:
        made.append(missing)
        await asyncio.sleep(0.01)
        return [Batch("1-0-7.", 1 + 5 * at, "", DATA) for at in missing]

    keys = [key(1, 5), key(6, 10)]
    found = await asyncio.gather(*(batches.all(keys, make) for _ in range(50)))
    assert made == [[0, 1]]
    assert all(one is other for each in found for one, other in zip(each, found[0], strict=True))
    assert (await batches.all([key(1, 5), key(11, 15)], make))[0] is found[0][0]
    assert made == [[0, 1], [1]]


async def test_when_who_makes_it_goes_away_or_fails_another_one_does() -> None:
    batches, begun = BatchCache(1 << 20), asyncio.Event()

    async def never(missing: Sequence[int]) -> list[Batch | None]:
        begun.set()
        await asyncio.sleep(60)
        return []

    async def fails(missing: Sequence[int]) -> list[Batch | None]:
        raise OSError("no")

    async def make(missing: Sequence[int]) -> list[Batch | None]:
        return [Batch("1-0-7.", 1, "", DATA)]

    first = asyncio.create_task(batches.all([key(1, 5)], never))
    await begun.wait()
    second = asyncio.create_task(batches.all([key(1, 5)], fails))
    third = asyncio.create_task(batches.all([key(1, 5)], make))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(OSError, match="no"):
        await second
    assert (await third)[0] is not None


async def test_what_cannot_be_made_is_asked_for_by_each_and_memory_is_bounded() -> None:
    batches, made = BatchCache(3000), list[int]()

    async def none(missing: Sequence[int]) -> list[Batch | None]:
        made.extend(missing)
        return [None for _ in missing]

    async def make(missing: Sequence[int]) -> list[Batch | None]:
        made.extend(missing)
        return [Batch("1-0-7.", 1, "", DATA) for _ in missing]

    assert await asyncio.gather(*(batches.all([key(1, 5)], none) for _ in range(3))) == [[None]] * 3
    assert len(made) == 3
    made.clear()
    for first in (1, 6, 11, 1):
        assert len((await batches.all([key(first, first + 4)], make))[0] or ()) == 5
    assert len(made) == 4, "the first was forgotten for the others"


def span(offsets: list[int], times: list[int], sizes: list[int]) -> MatchRun:
    run = Run.of(Partition("t", 0), offsets, times, [None], None, [b"%d" % size for size in sizes])
    segment = Segment(0, 0, 1, 7, 1, 100, 1, 1, 1, open=True)
    return MatchRun(SegmentEntry(segment, NumberedRun(11, 10 + len(offsets), max(times), run, 100)))


def test_a_span_tells_which_matches_are_wanted() -> None:
    found = span([3, 5, 9], [50, 70, 60], [1, 1, 1])
    assert found.wanted(0, None, None) is None
    assert found.wanted(3, 50, 70) is None
    assert found.wanted(4, None, None) == [False, True, True]
    assert found.wanted(10, None, None) == [False] * 3
    assert found.wanted(0, 60, None) == [False, True, True]
    assert found.wanted(0, None, 60) == [True, False, True]
    assert found.wanted(9, 55, 65) == [False, False, True]


def test_what_fits_is_counted_in_bytes_and_matches_that_are_wanted() -> None:
    found = span([1, 2, 3, 4], [1, 1, 1, 1], [10, 20, 30, 40])
    whole, some = PendingRun(found, 0, None), PendingRun(found, 0, [False, True, False, True])
    assert [whole.fit(size, None) for size in (9, 10, 30, 99, 100)] == [0, 1, 2, 3, 4]
    assert [whole.fit(None, most) for most in (0, 3, 9)] == [0, 3, 4]
    assert [some.fit(size, None) for size in (9, 20, 60)] == [1, 3, 4]
    assert [some.fit(None, most) for most in (0, 1, 2)] == [1, 3, 4]
    whole.at = 2
    assert (whole.fit(30, None), whole.size(2, 4), list(whole.rows(2, 4))) == (3, 70, [2, 3])
    assert (some.size(0, 4), list(some.rows(0, 4))) == (60, [1, 3])

"""A reader attached across midnight: the records' own times drive it, and some are late or ahead of their time."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tailrace.log.segment import DAY_MS
from tailrace.log.store import Logs
from tailrace.testing.installation import wait_for
from tailrace.valkey.shards import Nodes, StoreOptions
from tests.faults.follower import Follower
from tests.log.rig import rig
from tests.writing import NOON, Record, Writer

MIDNIGHT = NOON + DAY_MS // 2
NAME = "queue/jobset"


def _records(seed: int) -> list[Record]:
    """Return twenty seconds of records around midnight in two partitions, one in ten late, one in fifty far ahead."""
    chance = random.Random(seed)
    records: list[Record] = []
    for i in range(400):
        time_ms = MIDNIGHT - 10_000 + i * 50
        if chance.random() < 0.1:
            time_ms -= chance.choice([15_000, 7_200_000, 3 * DAY_MS])
        elif chance.random() < 0.02 and i > 300:
            time_ms += chance.choice([3_600_000, DAY_MS, 3_650 * DAY_MS])
        records.append(Record(offset=i // 2, partition=i % 2, time=time_ms, value=json.dumps({"n": i}).encode()))
    return records


def _has(reader: Follower, event: str) -> bool:
    return event in reader.events


def _pieces(records: list[Record], chance: random.Random) -> Iterator[list[Record]]:
    at = 0
    while at < len(records):
        size = chance.randrange(1, 30)
        yield records[at : at + size]
        at += size


@pytest.mark.parametrize("seed", range(4))
def test_a_reader_that_crosses_midnight_sees_every_event_once_and_in_order(store: StoreOptions, seed: int) -> None:
    records = _records(seed)
    writer = Writer(store)
    chance = random.Random(seed)
    with Follower(store, NAME) as early:
        halfway = None
        for piece in _pieces(records, chance):
            writer.write(sorted(piece, key=lambda record: (record.partition, record.offset)))
            if halfway is None and piece[-1].offset > len(records) // 4:
                wait_for("the reader to be past midnight", partial(_has, early, piece[-1].id))
                halfway = early.cursor
            time.sleep(chance.uniform(0, 0.02))
        wait_for("the reader to catch up", lambda: len(early.events) >= len(records), 20)
    assert not early.gaps
    assert sorted(early.events) == sorted(record.id for record in records)
    for partition in (0, 1):
        mine = [record.id for record in records if record.partition == partition]
        assert [event for event in early.events if event in set(mine)] == mine
    with Follower(store, NAME, after=halfway) as late:
        wait_for("the second half", lambda: late.events[-1:] == early.events[-1:])
    assert late.seen == [early.events[len(early.events) - len(late.events) :]]


def test_a_day_that_has_a_successor_is_complete_and_what_comes_late_is_flagged(store: StoreOptions) -> None:
    today = MIDNIGHT // DAY_MS
    times = [MIDNIGHT - 1, MIDNIGHT, MIDNIGHT - 1, MIDNIGHT + 1, MIDNIGHT - DAY_MS, MIDNIGHT + 3_650 * DAY_MS, MIDNIGHT]
    writer = Writer(store)
    for offset, time_ms in enumerate(times):
        writer.write([Record(offset=offset, time=time_ms)])

    async def read() -> tuple[list[tuple[int, int]], list[bool]]:
        nodes = await Nodes(store).open()
        try:
            segments = [(s.start_ms // DAY_MS, s.events) for s in (await Logs(nodes, "days").log(NAME)).segments]
        finally:
            await nodes.close()
        async with rig(store) as feeds:
            frames = [json.loads(frame.data) for frame in await feeds.all(NAME, follow=False) if hasattr(frame, "data")]
        return segments, [bool(frame.get("late")) for frame in frames if "id" in frame]

    segments, late = asyncio.run(read())
    limit = segments[-1][0]
    assert segments == [(today - 1, 1), (today, 4), (limit, 2)]
    assert today < limit <= (time.time() * 1000 + 600_000) // DAY_MS, "the future ends at the store's clock"
    assert late == [False, False, True, False, True, False, True]

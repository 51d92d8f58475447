"""The registry of searches on a real store: facts once stored do not change, and the bytes kept of records stay few."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tailrace.valkey.shards import Nodes, Shards, mapping
from tailrace.views.grep.model import SearchLife, make_search
from tailrace.views.grep.store import (
    KeptRecords,
    Searches,
    SearchRegistry,
    finish_stretch,
    keep_records,
    pending_stretches,
)

A, B = make_search("posts", {"a": 1}), make_search("posts", {"b": 1})
HOUR = 3_600_000


@asynccontextmanager
async def _services(shards: Shards, count: int) -> AsyncIterator[list[Searches]]:
    """The registry as several processes see it."""
    nodes = [await Nodes(shards.options).open() for _ in range(count)]
    try:
        yield [Searches(each) for each in nodes]
    finally:
        for each in nodes:
            await each.close()


async def test_a_life_begins_once_and_is_pinned_once_whoever_races(shards: Shards) -> None:
    async with _services(shards, 5) as services:
        lives = await asyncio.gather(*(each.register(s, 1000 + i) for i, each in enumerate(services) for s in (A, B)))
        by_search = {search.id: [life for life in lives if life.search == search] for search in (A, B)}
        life, other = (found[0] for found in by_search.values())
        assert all(found == [found[0]] * 5 for found in by_search.values())
        assert life.number != other.number
        assert await services[0].pins(life) is None
        pins = await asyncio.gather(*(each.pin(life, {"posts:0": i}) for i, each in enumerate(services)))
        assert len({pin["posts:0"] for pin in pins}) == 1
        assert await services[4].pins(life) == pins[0]
        assert await services[0].pin(life, {}) == pins[0]
        assert await services[0].pins(other) is None
        assert [await services[0].past(life.number) for life in (life, other)] == [A.id, B.id]
        assert await services[0].past(12345) is None


async def test_of_several_who_extend_the_past_one_does_and_the_others_look_again(shards: Shards) -> None:
    async with _services(shards, 4) as services:
        life = await services[0].register(A, 1)
        for seen in range(3):
            ranges = [{f"posts:{i}": (seen, 10)} for i in range(4)]
            took = await asyncio.gather(
                *(each.extend(life, seen, 5, 100 - seen, ranges[i]) for i, each in enumerate(services))
            )
            assert took.count(True) == 1
            stretches, done = await services[0].stretches(life)
            assert (len(stretches), done) == (seen + 1, set())
            assert stretches[-1].ranges == ranges[took.index(True)]
            assert stretches[-1].since_ms == 100 - seen
        assert not await services[0].extend(life, 2, 5, 0, {})
        numbers = [life.number, *(stretch.number for stretch in stretches)]
        assert len(set(numbers)) == 4, "logs never share a number"


async def test_stretches_are_scanned_in_the_order_they_were_asked_for_until_they_are_done(shards: Shards) -> None:
    async with _services(shards, 1) as (searches,):
        a, b = [await searches.register(search, 1) for search in (A, B)]
        assert pending_stretches(shards) == []
        for life, seen, ms in ((b, 0, 10), (a, 0, 20), (b, 1, 30)):
            assert await searches.extend(life, seen, ms, 0, {"posts:0": (ms, ms + 5)})
        asked = pending_stretches(shards)
        assert [(life.name, stretch.ranges["posts:0"][0]) for life, stretch in asked] == [
            *((b.name, 10), (a.name, 20), (b.name, 30))
        ]
        finish_stretch(shards, *asked[1])
        finish_stretch(shards, *asked[1])
        assert pending_stretches(shards) == [asked[0], asked[2]]
        assert (await searches.stretches(a))[1] == {asked[1][1].number}
        assert (await searches.stretches(b))[1] == set()
        assert set(await searches.stretch_marks(asked[0][1], 2)) == {"posts:0"}


async def test_what_somebody_waits_for_is_scanned_first(shards: Shards) -> None:
    async with _services(shards, 1) as (searches,):
        a, b = [await searches.register(search, 1) for search in (A, B)]
        for life, ms in ((a, 10), (b, 20)):
            assert await searches.extend(life, 0, ms, 0, {"posts:0": (0, 5)})
        assert [life for life, _ in pending_stretches(shards)] == [a, b]
        assert shards.call(0, "heartbeat", "process", b"{}", 1)[0] == b"ok"
        assert shards.call(0, "follow", "process", 1, b.search.id)[0] == b"ok"
        assert [life for life, _ in pending_stretches(shards)] == [b, a]


async def test_a_task_sees_every_search_that_was_registered_before_it_looked(shards: Shards) -> None:
    registry = SearchRegistry()
    assert not registry.refresh(shards)
    async with _services(shards, 1) as (searches,):
        lives: list[SearchLife] = []
        for i in range(20):
            lives.append(await searches.register(make_search("posts", {"n": i}), i))
            assert registry.refresh(shards)
            assert registry.lives == {life.name: life for life in lives}
            assert not registry.refresh(shards), "nothing has changed since"
        await searches.register(lives[3].search, 99)
        assert not registry.refresh(shards), "one that is known is no change"
        assert (await searches.end(lives[3].search.id, False)) == (lives[3].name, 0)
        assert registry.refresh(shards)
        assert lives[3].name not in registry.lives
        again = await searches.register(lives[3].search, 100)
        assert again.number > lives[-1].number
        assert registry.refresh(shards)
        assert registry.lives[again.name] == again
        assert lives[3].name not in registry.lives
        assert await searches.past(lives[3].number) == await searches.past(again.number) == again.search.id


# What is kept of matched records.


def _shelf(shards: Shards, shelf: str, shard: int = 1) -> list[tuple[int, int, bytes]]:
    [entries] = shards.run_all([(shard, ("XRANGE", shards.keys.kept(shard, shelf), "-", "+"))])
    found = []
    for entry, fields in entries:
        last, _, records = entry.partition(b"-")
        found.append((int(last), int(records), mapping(fields)[b"r"]))
    return found


def _bytes(shards: Shards, shelf: str, shard: int = 1) -> int:
    [size] = shards.run_all([(shard, ("HGET", f"{shards.keys.tag(shard)}:kept", shelf))])
    return int(size or 0)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_of_a_source_is_the_newest_that_fits_and_never_goes_back(shards: Shards, seed: int) -> None:
    chance = random.Random(seed)
    shelves: dict[str, list[tuple[int, int, bytes]]] = {"posts:0": [], "~7~posts:0": []}
    offset = 0
    for _ in range(150):
        shelf, most = chance.choice(list(shelves)), 1000
        offset = max(0, offset + chance.choice((1, 1, 5, 40, 0, -3, -200)))
        run = chance.randbytes(chance.choice((1, 50, 200, 400, 1000, 1001, 3000)))
        keep_records(shards, [KeptRecords(1, shelf, offset, 2, run)], most)
        model = shelves[shelf]
        if len(run) <= most and (not model or model[-1][0] < offset):
            model.append((offset, 2, run))
            while sum(len(kept) for _, _, kept in model) > most:
                del model[0]
        assert _shelf(shards, shelf) == model
        assert _bytes(shards, shelf) == sum(len(kept) for _, _, kept in model)
    assert all(shelves.values())


def test_records_that_are_too_large_to_be_kept_do_not_hinder_those_that_come_again(shards: Shards) -> None:
    large = [KeptRecords(1, "posts:0", offset, 1, bytes(2000)) for offset in (10, 20)]
    for _ in range(2):  # a task that was killed is run again from the start
        keep_records(shards, large, 1000)
    assert _shelf(shards, "posts:0") == []
    keep_records(shards, [KeptRecords(1, "posts:0", 5, 1, b"small")], 1000)
    assert _shelf(shards, "posts:0") == [(5, 1, b"small")]


def test_what_is_kept_goes_by_itself_and_begins_anew(shards: Shards) -> None:
    keep_records(shards, [KeptRecords(1, "posts:0", 100, 1, bytes(600))], 1000)
    key = shards.keys.kept(1, "posts:0")
    [left] = shards.run_all([(1, ("PTTL", key))])
    assert 0 < left <= HOUR
    shards.run_all([(1, ("PEXPIRE", key, 0))])
    assert _shelf(shards, "posts:0") == []
    keep_records(shards, [KeptRecords(1, "posts:0", 7, 1, bytes(500))], 1000)
    assert [last for last, _, _ in _shelf(shards, "posts:0")] == [7]
    assert _bytes(shards, "posts:0") == 500


def test_shelves_of_different_sources_and_shards_do_not_mix(shards: Shards) -> None:
    given: list[Any] = [(0, "posts:0"), (1, "posts:0"), (1, "posts:1"), (1, "~3~posts:0"), (1, "posts@1:0")]
    keep_records(shards, [KeptRecords(shard, shelf, 1, 1, f"{shard}{shelf}".encode()) for shard, shelf in given], 1000)
    assert [_shelf(shards, shelf, shard) for shard, shelf in given] == [
        [(1, 1, f"{shard}{shelf}".encode())] for shard, shelf in given
    ]

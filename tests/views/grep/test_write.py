"""The view of matches without Spark: whatever is replayed, split otherwise or run twice, a log has each match once."""

from __future__ import annotations

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tailrace.config.settings import Settings
from tailrace.driver.hooks import Start
from tailrace.log.event import Partition, home_of, shard_of
from tailrace.log.run import decode
from tailrace.valkey.shards import Shards, StoreOptions, mapping
from tailrace.views.grep import write
from tailrace.views.grep.driver import GrepDriver
from tailrace.views.grep.model import SearchLife, make_search
from tailrace.views.grep.write import GrepPlan, SearchSet
from tests.views.grep.rig import BEYOND, by_source, finds, random_records, random_search, read_log, register, source_of
from tests.writing import NOON, Record, Writer, batch

VIEWS = ("intake", "matches")
SOURCES = (("posts", 0), ("posts", 1), ("views", 0))
TOPICS = (".*", "posts", ("views",), ("posts", "views"), ("nothing",))


def kept(shards: Shards, source: str) -> dict[int, dict[str, Any]]:
    """Return what is kept of a source, as frames, by offset."""
    shard = home_of(Partition.parse(source), shards.options.shards)
    [entries] = shards.run_all([(shard, ("XRANGE", shards.keys.kept(shard, source), "-", "+"))])
    found: dict[int, dict[str, Any]] = {}
    for _, fields in entries:
        run = decode(mapping(fields)[b"r"])
        found |= zip(run.offsets, map(json.loads, run.frames(0)), strict=True)
    return found


class Replaying:
    """Sources whose records are delivered in batches, some of them again and cut in other ways."""

    def __init__(self, options: StoreOptions, seed: int) -> None:
        self.chance = random.Random(seed)
        runs = self.chance.choice((1, 2, 5, 500))
        self.writer = Writer(options, VIEWS, kept_bytes=1 << 20, window_runs=runs)
        self.options = options
        self.records = [random_records(self.chance, *source, 60) for source in SOURCES]
        self.reached = [0] * len(SOURCES)
        self.lives: list[tuple[SearchLife, list[int]]] = []
        """With how many records of each source there were when each was pinned."""

    def register(self) -> None:
        search = random_search(self.chance, self.chance.choice(TOPICS))
        self.lives.append((register(self.writer.shards, search), list(self.reached)))

    def deliver(self) -> None:
        """Deliver what comes next of some sources, most often with some of what came before."""
        parts: list[list[Record]] = []
        for i, records in enumerate(self.records):
            if self.chance.random() < 0.6:
                back = self.chance.choice((0, 0, 1, 5, 30))
                until = min(len(records), self.reached[i] + self.chance.choice((0, 1, 4, 12)))
                parts.append(records[max(0, self.reached[i] - back) : until])
                self.reached[i] = until
        self.apply(parts)

    def apply(self, parts: list[list[Record]]) -> None:
        mixed: list[Record] = []
        waiting = [list(part) for part in parts if part]
        while waiting:
            taken = self.chance.choice(waiting)
            n = self.chance.choice((1, 3, 100))
            mixed += taken[:n]
            del taken[:n]
            waiting = [part for part in waiting if part]
        if not mixed:
            return
        way = self.chance.random()
        if way < 0.2:  # two tasks at once: one of them was given up and is not dead
            with ThreadPoolExecutor(2) as pool:
                hosts = [self.writer.host, self.writer.another_task().host]
                list(pool.map(lambda host: host.take(batch(mixed)), hosts))
        else:
            if way < 0.5:
                self.writer = self.writer.another_task()
            self.writer.write(mixed)

    def finish(self) -> None:
        while any(reached < len(records) for reached, records in zip(self.reached, self.records, strict=True)):
            self.deliver()
        self.apply(self.records)


@pytest.mark.parametrize("seed", range(8))
async def test_every_log_has_every_match_once_and_in_order_whatever_is_replayed(store: StoreOptions, seed: int) -> None:
    rig = Replaying(store, seed)
    for _ in range(12):
        for _ in range(rig.chance.choice((0, 1, 2))):
            rig.register()
        rig.deliver()
    rig.finish()
    wanted: dict[str, set[int]] = {}
    anyone: dict[str, set[int]] = {}
    for life, reached in rig.lives:
        found = by_source(await read_log(store, life.name))
        for records, pin in zip(rig.records, reached, strict=True):
            source = source_of(records[0])
            matches = [record.offset for record in records if finds(life.search, record)]
            due = [record.offset for record in records[pin:] if finds(life.search, record)]
            offsets = found.pop(source, [])
            assert offsets == sorted(set(offsets)), "each once, in order"
            assert set(offsets) <= set(matches)
            assert offsets[len(offsets) - len(due) :] == due, "nothing that came after it was registered is missing"
            wanted.setdefault(source, set()).update(due)
            anyone.setdefault(source, set()).update(matches)
        assert not found
    for records in rig.records:
        source = source_of(records[0])
        shown = kept(rig.writer.shards, source)
        assert wanted.get(source, set()) <= shown.keys() <= anyone.get(source, set())
        for record in records:
            if record.offset in shown:
                frame = shown[record.offset]
                assert frame["id"] == record.id
                assert frame["data"] == json.loads(record.value or b"")


def _all_in_one_shard(shards: Shards, count: int) -> list[SearchLife]:
    """Searches whose logs are in one shard, all of which find a record whose x is 1."""
    found: dict[int, list[SearchLife]] = {}
    for i in range(10 * count):
        life = register(shards, make_search("posts", {"x": 1, f"no{i}": None}))
        mates = found.setdefault(shard_of(life.name, shards.options.shards), [])
        mates.append(life)
        if len(mates) == count:
            return mates
    raise AssertionError


def _last_matches(count: int, first: int = 0) -> list[Record]:
    return [
        Record(first + i, value=b'{"x":1}' if i == count - 1 else b'{"x":0}', topic="posts", time=NOON)
        for i in range(count)
    ]


async def test_matches_at_the_end_of_a_batch_that_must_be_cut_are_not_lost(store: StoreOptions) -> None:
    writer = Writer(store, VIEWS, window_runs=2)
    lives = _all_in_one_shard(writer.shards, 3)
    writer.write(_last_matches(8))
    assert [await read_log(store, life.name) for life in lives] == [[("posts:0", 7)]] * 3


async def test_matches_behind_a_mark_in_a_batch_that_must_be_cut_are_not_lost(store: StoreOptions) -> None:
    writer = Writer(store, VIEWS, window_runs=2)
    lives = _all_in_one_shard(writer.shards, 3)
    writer.write(_last_matches(8))
    writer.another_task().write([*_last_matches(8), *_last_matches(8, 8)])
    assert [await read_log(store, life.name) for life in lives] == [[("posts:0", 7), ("posts:0", 15)]] * 3


async def test_a_search_sees_nothing_of_other_topics_nor_tombstones_nor_poison(store: StoreOptions) -> None:
    writer = Writer(store, VIEWS)
    life = register(writer.shards, make_search("posts|p.*", {}))
    values = (b"{}", None, b"{", b"\xff", b'{"a":1}', b"[]", b"7")
    writer.write(Record(i, value=value, topic=topic) for topic in ("posts", "jobs") for i, value in enumerate(values))
    assert await read_log(store, life.name) == [("posts:0", offset) for offset in (0, 4, 5, 6)]


async def test_a_search_that_is_forgotten_gets_nothing_more_and_its_next_life_begins_anew(store: StoreOptions) -> None:
    writer = Writer(store, VIEWS)
    search = make_search("posts", {"x": 1})
    first = register(writer.shards, search)
    writer.write(_last_matches(3))
    assert writer.shards.call(0, "end", search.id, 0)[0] == b"ok"
    writer.write(_last_matches(3, 3))
    second = register(writer.shards, search)
    writer.write(_last_matches(3, 6))
    assert await read_log(store, first.name) == [("posts:0", 2)]
    assert ("posts:0", 8) in await read_log(store, second.name)


async def test_what_a_search_finds_does_not_depend_on_what_others_ask_for(store: StoreOptions) -> None:
    writer = Writer(store, VIEWS)
    alone = register(writer.shards, make_search("posts", {"b": 1}))
    writer.write([Record(0, value=BEYOND, topic="posts")])
    other = register(writer.shards, make_search("posts", {"a": {"$gt": 1}}))
    writer.write([Record(1, value=BEYOND, topic="posts")])
    assert await read_log(store, alone.name) == [("posts:0", 0), ("posts:0", 1)]
    assert await read_log(store, other.name) == []


@pytest.mark.parametrize("number", [math.nan, math.inf, 2**70, 1e300])
async def test_a_search_is_asked_as_it_was_registered(store: StoreOptions, number: float) -> None:
    writer = Writer(store, VIEWS)
    life = register(writer.shards, make_search("posts", {"a": {"$gte": number}}))
    values = (b"{}", b'{"a":null}', b'{"a":1}', b'{"a":%d}' % 2**80)
    writer.write(Record(i, value=value, topic="posts") for i, value in enumerate(values))
    found = [("posts:0", 3)] if number == 2**70 else []
    assert await read_log(store, life.name) == found


@pytest.mark.parametrize("waited_for", [False, True])
async def test_the_view_begins_at_the_end_unless_a_search_waits_for_what_came_before(
    store: StoreOptions, waited_for: bool
) -> None:
    writer = Writer(store, VIEWS)
    search = make_search("posts", {})
    if waited_for:  # as of a time when there was no topic, so its live matches begin with the first record
        register(writer.shards, search)
    start = Start(Settings(), writer.shards, writer.epoch)
    GrepDriver(GrepPlan()).begin(start, {"posts": 0}, {("posts", 0): (0, 3)})
    life = register(writer.shards, search)
    writer.write(_last_matches(5))
    assert await read_log(store, life.name) == [("posts:0", offset) for offset in range(0 if waited_for else 3, 5)]


async def test_nothing_is_kept_when_nothing_may_be(store: StoreOptions) -> None:
    writer = Writer(store, VIEWS)
    life = register(writer.shards, make_search("posts", {}))
    writer.write(_last_matches(3))
    assert len(await read_log(store, life.name)) == 3
    assert kept(writer.shards, "posts:0") == {}


@pytest.mark.parametrize("seed", range(30))
def test_of_what_passes_the_sieve_searches_find_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "PROBED", 3)
    chance = random.Random(seed)
    lives = [SearchLife(random_search(chance), number, 0) for number in range(chance.choice((1, 1, 2)))]
    whole, sifted = SearchSet(lives), SearchSet(lives)
    passes = sifted.sieve()
    records = [r for r in random_records(chance, "posts", 0, 200) if r.value is not None]
    [everything] = batch(records)
    healthy = [r for i, r in enumerate(records) if i not in everything.poison]  # scans look for poison afterwards
    left = [r for r in healthy if passes is None or passes(r.key, r.value or b"")]
    [everything] = batch(healthy)
    wanted = {name: [healthy[i].offset for i in rows] for name, rows in whole.find(everything).items()}
    found = sifted.find(batch(left)[0]) if left else {}
    assert {name: [left[i].offset for i in rows] for name, rows in found.items()} == wanted

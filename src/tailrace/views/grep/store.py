"""The registry of searches: which are alive, where their live matches begin, and which past is scanned for them.

Invariant: a search is registered before the ends of the partitions are listed, and what is listed is where its live
matches begin. A record beyond that was appended after the search was registered, so every task that is given the record
reads the search in the registry first; what lies before it is the business of stretches. Both are said once and stay.

What a search is over: the topics that the pipeline reads now, as sources, and where they stand in Kafka.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tailrace.errors import SearchFollowed, SearchNotFound, StaleDriver, TooManySearches
from tailrace.metrics import SearchFigures
from tailrace.valkey.keys import Keys
from tailrace.valkey.marks import NOTHING
from tailrace.valkey.nodes import Nodes
from tailrace.valkey.shards import Arg, Shards, mapping
from tailrace.views.grep.model import LostOffsets, Search, SearchLife, Stretch

VIEW = "matches"
PIECE_RUNS = 8
"""A packed piece has about a thousand matches: it stands for so many runs, and is not much larger."""
POPULAR_MS = 600_000
"""The windows in which connections are counted."""
HALF_LIFE = 144
"""Windows after which what was counted counts half. Both are those of ``searches.lua``."""

_encode = msgspec.json.Encoder().encode
_pins = msgspec.json.Decoder(dict[str, int]).decode
_ranges = msgspec.json.Decoder(tuple[int, dict[str, tuple[int, int]]]).decode


def encode_search(search: Search) -> str:
    """Return a search as the registry has it: exact also where JSON is not, since a query may ask for NaN."""
    return json.dumps(msgspec.to_builtins(search))


def decode_life(stored: bytes) -> SearchLife:
    """Read what the registry has under a search's id."""
    number, since, search = stored.split(b" ", 2)
    return SearchLife(msgspec.convert(json.loads(search), Search), int(number), int(since))


def decode_stretch(stored: bytes) -> Stretch:
    """Read an element of a life's list."""
    number, _, body = stored.split(b" ", 2)
    since_ms, ranges = _ranges(body)
    return Stretch(int(number), since_ms, ranges)


def usage(stored: bytes | float | None, window: int) -> float:
    """Return how much a search is used, as connections of the window that it is now."""
    return 0.0 if stored is None else float(2 ** (float(stored) - window / HALF_LIFE))


class Searches:
    """The registry as the service uses it."""

    def __init__(self, nodes: Nodes, most: int = 1 << 53, keep_ms: int = 0) -> None:
        self._nodes, self._keys, self._most, self._keep_ms = nodes, nodes.keys, most, keep_ms

    async def register(self, search: Search, now_ms: int) -> SearchLife:
        """Return the life of a search; it begins now if it has none.

        Raises:
            TooManySearches: As many are alive as may be, and each is followed, or was within what is promised.
        """
        answer = await self._call("register", search.id, encode_search(search), now_ms, self._most, self._keep_ms)
        if answer[0] == b"full":
            raise TooManySearches(self._most)
        return SearchLife(search, int(answer[0]), int(answer[1]))

    async def end(self, search: str, force: bool) -> tuple[str, int]:
        """End the life of a search, its scans among it; return the life, and how many connections followed it.

        Its logs are dropped by the watchdog of the pipeline.

        Raises:
            SearchNotFound: None that is alive has this id.
            SearchFollowed: Somebody follows it, and it was not forced.
        """
        answer = await self._call("end", search, int(force))
        if answer[0] == b"unknown":
            raise SearchNotFound(search)
        if answer[0] == b"followed":
            raise SearchFollowed(search, int(answer[1]))
        return answer[1].decode(), int(answer[2])

    async def pins(self, life: SearchLife) -> dict[str, int] | None:
        """Return where the live matches of a life begin; None if nobody has said so yet."""
        stored = await self._nodes.read(0, "HGET", self._keys.pins(), life.name)
        return None if stored is None else _pins(stored)

    async def pin(self, life: SearchLife, ends: Mapping[str, int]) -> dict[str, int]:
        """Say where the live matches of a life begin: where sources ended after it was registered."""
        return _pins(await self._call("pin", life.name, _encode(ends)))

    async def stretches(self, life: SearchLife) -> tuple[list[Stretch], set[int]]:
        """Return what was asked for of the past, in the order in which it was, and the numbers of what is scanned."""
        listed, done = await self._nodes.read_all(
            [
                (0, ("LRANGE", self._keys.stretches(life.name), 0, -1)),
                (0, ("SMEMBERS", self._keys.scanned(life.name))),
            ]
        )
        return [decode_stretch(stored) for stored in listed], {int(number) for number in done}

    async def extend(
        self, life: SearchLife, seen: int, now_ms: int, since_ms: int, ranges: Mapping[str, tuple[int, int]]
    ) -> bool:
        """Ask for a stretch of the past; False if another was asked for since ``seen`` of them were.

        Nothing is asked for in a life that is over: whoever leases it is told so.
        """
        answer = await self._call("extend", life.name, seen, now_ms, _encode((since_ms, ranges)))
        return bool(answer[0] != b"moved")

    async def read_bytes(self, life: SearchLife, number: int) -> int:
        """Return how many bytes were read for a stretch, about: a driver that dies may count a chunk twice."""
        return int(await self._nodes.read(0, "HGET", self._keys.read(life.name), number) or 0)

    async def lost(self, life: SearchLife, number: int) -> list[LostOffsets]:
        """Return what Kafka had dropped of a stretch before it was scanned; what abuts is one."""
        stored = mapping(await self._nodes.read(0, "HGETALL", self._keys.lost(life.name)))
        found: list[LostOffsets] = []
        for field, value in stored.items():
            stretch, source, first = field.decode().split(" ")
            until, _, reason = value.decode().partition(" ")
            if int(stretch) == number:
                found.append(LostOffsets(source, int(first), int(until), reason))
        merged: list[LostOffsets] = []
        for each in sorted(found, key=lambda each: (each.source, each.first)):
            last = merged[-1] if merged else None
            if last and (last.source, last.reason) == (each.source, each.reason) and last.until >= each.first:
                merged[-1] = msgspec.structs.replace(last, until=max(last.until, each.until))
            else:
                merged.append(each)
        return merged

    async def past(self, number: int) -> str | None:
        """Return whose life had a number, whether it is over or not."""
        stored = await self._nodes.read(0, "HGET", self._keys.past(), number)
        return None if stored is None else stored.decode()

    async def figures(self) -> SearchFigures:
        """Return how much there is of everything."""
        keys = self._keys
        commands: list[tuple[Arg, ...]] = [
            ("HLEN", keys.searches()),
            ("HVALS", keys.followers()),
            ("ZCARD", keys.scanning()),
            ("ZCARD", keys.processes()),
        ]
        alive, followers, scanned, processes = await self._nodes.read_all([(0, command) for command in commands])
        return SearchFigures(alive, sum(map(int, followers)), scanned, processes)

    async def position(self, search: str, client: str) -> str | None:
        """Return where a client that has a name was in a search."""
        stored = await self._nodes.read(0, "HGET", self._keys.positions(search), client)
        return None if stored is None else stored.decode()

    async def keep_position(self, search: str, client: str, cursor: str) -> None:
        """Keep where a client is in a search."""
        await self._call("place", search, client, cursor)

    async def stretch_marks(self, stretch: Stretch, shard: int) -> dict[str, int]:
        """Return the last offset scanned of each source of a stretch."""
        stored = await self._nodes.read(shard, *marks_command(self._keys, shard, stretch))
        return decode_marks(stretch.ranges, stored)

    async def live_marks(self, shard: int, sources: Sequence[str]) -> dict[str, int]:
        """Return the last offset of each source up to which a shard has all live matches."""
        if not sources:
            return {}
        return decode_marks(sources, await self._nodes.read(shard, "HMGET", self._keys.marks(shard, VIEW), *sources))

    async def _call(self, name: str, *args: Arg) -> Any:
        return await self._nodes.call(0, name, *args)


def marks_command(keys: Keys, shard: int, stretch: Stretch) -> tuple[Arg, ...]:
    """Return the command whose answer is the marks of a stretch's sources, in their order."""
    return ("HMGET", keys.marks(shard, VIEW), *map(stretch.mark, stretch.ranges))


def decode_marks(sources: Iterable[str], stored: Sequence[bytes | None]) -> dict[str, int]:
    """Read marks: the last offset of each source."""
    return {source: NOTHING if mark is None else int(mark) for source, mark in zip(sources, stored, strict=True)}


class SearchRegistry:
    """The registry as a task uses it: what is alive, read again when it has changed."""

    def __init__(self) -> None:
        self._version: bytes | None = None
        self.lives: dict[str, SearchLife] = {}
        """By the names of their logs."""

    def refresh(self, shards: Shards) -> bool:
        """Read what is alive; return whether it changed. Costs one small read when it did not."""
        keys = shards.keys
        [version] = shards.run_all([(0, ("GET", keys.searches_version()))])
        if version == self._version:
            return False
        # The version is read before: what changes between the two reads is read again next time.
        [stored] = shards.run_all([(0, ("HGETALL", keys.searches()))])
        self._version = version
        lives = [decode_life(value) for value in mapping(stored).values()]
        self.lives = {life.name: life for life in lives}
        return True


def pending_stretches(shards: Shards) -> list[tuple[SearchLife, Stretch]]:
    """Return the stretches that are to be scanned; none of a life that is over.

    Those that somebody waits for come first, and of them the first asked for.
    """
    keys = shards.keys
    [listed] = shards.run_all([(0, ("ZRANGE", keys.scanning(), 0, -1))])
    if not listed:
        return []
    [stored, followed] = shards.run_all([(0, ("HGETALL", keys.searches())), (0, ("HKEYS", keys.followers()))])
    lives = {life.name: life for life in map(decode_life, mapping(stored).values())}
    wanted = [entry.decode().split(" ") for entry in listed]
    names = list(dict.fromkeys(name for name, _ in wanted if name in lives))
    lists = shards.run_all([(0, ("LRANGE", keys.stretches(name), 0, -1)) for name in names])
    found = {
        (name, stretch.number): stretch
        for name, stored in zip(names, lists, strict=True)
        for stretch in map(decode_stretch, stored)
    }
    awaited = {search.decode() for search in followed}
    waiting = [(lives[name], found[name, int(n)]) for name, n in wanted if (name, int(n)) in found]
    return sorted(waiting, key=lambda each: each[0].search.id not in awaited)


def record_chunk(
    shards: Shards, epoch: int, life: SearchLife, stretch: Stretch, read_bytes: int, gone: Sequence[LostOffsets]
) -> None:
    """Note that a chunk was read for a stretch, how much it was, and what Kafka no longer had of it.

    Raises:
        StaleDriver: Another driver has the view by now.
    """
    parts = [part for each in gone for part in (each.source, each.first, each.until, each.reason)]
    answer = shards.call(0, "noted", VIEW, epoch, life.name, stretch.number, read_bytes, *parts)
    if answer[0] == b"stale":
        raise StaleDriver(VIEW, epoch, int(answer[1]))


def drop_shelf(shards: Shards, shard: int, shelf: str) -> None:
    """Keep nothing on a shelf any more."""
    keys = shards.keys
    shards.run_all([(shard, ("UNLINK", keys.kept(shard, shelf))), (shard, ("HDEL", keys.kept_sizes(shard), shelf))])


def finish_stretch(shards: Shards, life: SearchLife, stretch: Stretch) -> None:
    """Say that a stretch is scanned."""
    shards.call(0, "scanned", life.name, stretch.number)


class KeptRecords(msgspec.Struct, frozen=True):
    """A run of matched records that is kept for those who follow. ``shelf``: a source, or the mark of a stretch's."""

    shard: int
    shelf: str
    last: int
    records: int
    run: bytes


def keep_records(shards: Shards, kept: Sequence[KeptRecords], most_bytes: int, for_ms: int) -> None:
    """Keep what matched records say, up to so many bytes of each source; a run that is larger is left in Kafka."""
    # It would push out all others and then itself: a stream that has become empty refuses what comes again.
    fitting = [k for k in kept if len(k.run) <= most_bytes]
    shards.call_all([(k.shard, "keep", (k.shelf, most_bytes, for_ms, k.last, k.records, k.run)) for k in fitting])

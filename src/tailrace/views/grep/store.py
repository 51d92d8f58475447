"""The store of searches: the registry of those that are alive, and the leases of the connections that follow them.

Invariant: a search is registered first, then the ends of its partitions are read and pinned; neither changes again. A
record at or behind a pin was appended after the registration, so each task that gets the record finds the search in the
registry. Records before the pins are found by scanning stretches.

A lease lasts as long as its process is alive. A service process sends heartbeats, timed by the store's clock. A process
that was silent for too long is *buried*: its leases end, and the store refuses its old name from then on. A process
that was only paused learns this from its next heartbeat; it takes a new name and leases again what its connections
follow. If a user ends a search, its leases end, too; the processes learn it from their next heartbeats.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from tailrace.api.answers import SearchFigures
from tailrace.errors import (
    SearchEnded,
    SearchFollowed,
    SearchNotFound,
    StaleDriver,
    StoreUnavailable,
    TailraceError,
    TooManySearches,
)
from tailrace.log.cursor import FromEnd, FromLast, FromStart, FromTime
from tailrace.log.event import iso_time
from tailrace.valkey.keys import Keys
from tailrace.valkey.marks import NOTHING
from tailrace.valkey.shards import Arg, Command, Nodes, Shards, mapping
from tailrace.views.grep.model import GrepRequest, LostOffsets, Search, SearchCursor, SearchLife, Stretch

logger = logging.getLogger(__name__)

VIEW = "matches"
PIECE_RUNS = 8
"""Runs in one packed piece, which then has about a thousand matches."""
POPULAR_MS = 600_000
"""Length of a popularity window, in which each connection is counted once; as in ``searches.lua``."""
HALF_LIFE = 144
"""Windows after which a count has half its weight; as in ``searches.lua``."""
KEPT_MS = 3_600_000
"""Time that matched records are kept; after that feeds read them from Kafka."""
BEAT_S = 3.0
TRIES = 5
"""Attempts to take a lease while the process gets a new name."""

_encode = msgspec.json.Encoder().encode
_pins = msgspec.json.Decoder(dict[str, int]).decode
_ranges = msgspec.json.Decoder(tuple[int, dict[str, tuple[int, int]]]).decode


def encode_search(search: Search) -> str:
    """Return a search as text for the registry; JSON with NaN, which a query may contain."""
    return json.dumps(msgspec.to_builtins(search))


def decode_life(stored: bytes) -> SearchLife:
    number, since, search = stored.split(b" ", 2)
    return SearchLife(msgspec.convert(json.loads(search), Search), int(number), int(since))


def decode_stretch(stored: bytes) -> Stretch:
    number, _, body = stored.split(b" ", 2)
    since_ms, ranges = _ranges(body)
    return Stretch(int(number), since_ms, ranges)


def usage(stored: bytes | float | None, window: int) -> float:
    """Return the use of a search: its connections, weighted as of the current window."""
    return 0.0 if stored is None else float(2 ** (float(stored) - window / HALF_LIFE))


class Searches:
    """The service's client of the registry."""

    def __init__(self, nodes: Nodes, most: int = 1 << 53, keep_ms: int = 0) -> None:
        self._nodes, self._keys, self._most, self._keep_ms = nodes, nodes.keys, most, keep_ms
        self._call = partial(nodes.call, 0)

    async def register(self, search: Search, now_ms: int) -> SearchLife:
        """Return the life of a search; begin one if it has none.

        TooManySearches if the limit is reached, and every search has readers or had them within the promised time.
        """
        answer = await self._call("register", search.id, encode_search(search), now_ms, self._most, self._keep_ms)
        if answer[0] == b"full":
            raise TooManySearches(self._most)
        return SearchLife(search, int(answer[0]), int(answer[1]))

    async def end(self, search: str, force: bool) -> tuple[str, int]:
        """End the life of a search and its scans; return the life and the number of its connections.

        The pipeline's watchdog drops its logs. Raises SearchNotFound, or SearchFollowed without ``force``.
        """
        answer = await self._call("end", search, int(force))
        if answer[0] == b"unknown":
            raise SearchNotFound(search)
        if answer[0] == b"followed":
            raise SearchFollowed(search, int(answer[1]))
        return answer[1].decode(), int(answer[2])

    async def pins(self, life: SearchLife) -> dict[str, int] | None:
        """Return the offsets at which the live matches of a life begin; None if they are not pinned yet."""
        stored = await self._nodes.read(0, "HGET", self._keys.pins(), life.name)
        return None if stored is None else _pins(stored)

    async def pin(self, life: SearchLife, ends: Mapping[str, int]) -> dict[str, int]:
        """Pin the begin of a life's live matches to the ends of partitions, if it is not pinned; return the pins."""
        return _pins(await self._call("pin", life.name, _encode(ends)))

    async def stretches(self, life: SearchLife) -> tuple[list[Stretch], set[int]]:
        """Return the stretches of a life in the order of their requests, and the numbers of those scanned."""
        listed, done = await self._nodes.read_all(
            [(0, ("LRANGE", self._keys.stretches(life.name), 0, -1)), (0, ("SMEMBERS", self._keys.scanned(life.name)))]
        )
        return [decode_stretch(stored) for stored in listed], {int(number) for number in done}

    async def extend(
        self, life: SearchLife, seen: int, now_ms: int, since_ms: int, ranges: Mapping[str, tuple[int, int]]
    ) -> bool:
        """Request a stretch of the past; return False if there are other than ``seen`` stretches by now.

        For a life that has ended this does nothing; its lease reports the end.
        """
        answer = await self._call("extend", life.name, seen, now_ms, _encode((since_ms, ranges)))
        return bool(answer[0] != b"moved")

    async def read_bytes(self, life: SearchLife, number: int) -> int:
        """Return about how many bytes were read for a stretch: after a crash a chunk may count twice."""
        return int(await self._nodes.read(0, "HGET", self._keys.read(life.name), number) or 0)

    async def lost(self, life: SearchLife, number: int) -> list[LostOffsets]:
        """Return the offsets of a stretch that Kafka had dropped before the scan; adjacent ranges are merged."""
        stored = mapping(await self._nodes.read(0, "HGETALL", self._keys.lost(life.name)))
        found: list[LostOffsets] = []
        for name, value in stored.items():
            stretch, partition, first = name.decode().split(" ")
            until, _, reason = value.decode().partition(" ")
            if int(stretch) == number:
                found.append(LostOffsets(partition, int(first), int(until), reason))
        merged: list[LostOffsets] = []
        for each in sorted(found, key=lambda each: (each.source, each.first)):
            last = merged[-1] if merged else None
            if last and (last.source, last.reason) == (each.source, each.reason) and last.until >= each.first:
                merged[-1] = msgspec.structs.replace(last, until=max(last.until, each.until))
            else:
                merged.append(each)
        return merged

    async def past(self, number: int) -> str | None:
        """Return the id of the search that had a life of this number, ended or not."""
        stored = await self._nodes.read(0, "HGET", self._keys.past(), number)
        return None if stored is None else stored.decode()

    async def figures(self) -> SearchFigures:
        keys = self._keys
        counts = ("HLEN", keys.searches()), ("ZCARD", keys.scanning()), ("ZCARD", keys.processes())
        commands: list[Command] = [(0, command) for command in (*counts, ("HVALS", keys.followers()))]
        alive, scanned, processes, followers = await self._nodes.read_all(commands)
        return SearchFigures(alive, sum(map(int, followers)), scanned, processes)

    async def position(self, search: str, client: str) -> str | None:
        stored = await self._nodes.read(0, "HGET", self._keys.positions(search), client)
        return None if stored is None else stored.decode()

    async def keep_position(self, search: str, client: str, cursor: str) -> None:
        await self._call("place", search, client, cursor)

    async def stretch_marks(self, stretch: Stretch, shard: int) -> dict[str, int]:
        """Return the last scanned offset of each partition of a stretch."""
        stored = await self._nodes.read(shard, *marks_command(self._keys, shard, stretch))
        return decode_marks(stretch.ranges, stored)

    async def live_marks(self, shard: int, partitions: Sequence[str]) -> dict[str, int]:
        """Return the offset of each partition up to which a shard has all live matches."""
        if not partitions:
            return {}
        stored = await self._nodes.read(shard, "HMGET", self._keys.marks(shard, VIEW), *partitions)
        return decode_marks(partitions, stored)


def marks_command(keys: Keys, shard: int, stretch: Stretch) -> tuple[Arg, ...]:
    """Return the command that reads the marks of a stretch's partitions, in their order."""
    return ("HMGET", keys.marks(shard, VIEW), *map(stretch.mark, stretch.ranges))


def decode_marks(partitions: Iterable[str], stored: Sequence[bytes | None]) -> dict[str, int]:
    return {p: NOTHING if mark is None else int(mark) for p, mark in zip(partitions, stored, strict=True)}


class SearchRegistry:
    """A task's copy of the registry, read again when its version has changed."""

    def __init__(self) -> None:
        self._version: bytes | None = None
        self.lives: dict[str, SearchLife] = {}
        """Lives by the names of their logs."""

    def refresh(self, shards: Shards) -> bool:
        """Read the registry if it has changed; return whether it has. Costs one small read if not."""
        keys = shards.keys
        [version] = shards.run_all([(0, ("GET", keys.searches_version()))])
        if version == self._version:
            return False
        # The version is read first: a change between the two reads is read again next time.
        [stored] = shards.run_all([(0, ("HGETALL", keys.searches()))])
        self._version = version
        lives = [decode_life(value) for value in mapping(stored).values()]
        self.lives = {life.name: life for life in lives}
        return True


def pending_stretches(shards: Shards) -> list[tuple[SearchLife, Stretch]]:
    """Return the stretches to scan: those of searches with readers first, then in the order of requests."""
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
    with_readers = {search.decode() for search in followed}
    waiting = [(lives[name], found[name, int(n)]) for name, n in wanted if (name, int(n)) in found]
    return sorted(waiting, key=lambda each: each[0].search.id not in with_readers)


def record_chunk(
    shards: Shards, epoch: int, life: SearchLife, stretch: Stretch, read_bytes: int, gone: Sequence[LostOffsets]
) -> None:
    """Record the bytes read for a stretch in a chunk, and the offsets that Kafka no longer had."""
    parts = [part for each in gone for part in (each.source, each.first, each.until, each.reason)]
    answer = shards.call(0, "noted", VIEW, epoch, life.name, stretch.number, read_bytes, *parts)
    if answer[0] == b"stale":
        raise StaleDriver(VIEW, epoch, int(answer[1]))


def drop_shelf(shards: Shards, shard: int, shelf: str) -> None:
    keys = shards.keys
    shards.run_all([(shard, ("UNLINK", keys.kept(shard, shelf))), (shard, ("HDEL", keys.kept_sizes(shard), shelf))])


def finish_stretch(shards: Shards, life: SearchLife, stretch: Stretch) -> None:
    shards.call(0, "scanned", life.name, stretch.number)


class KeptRecords(msgspec.Struct, frozen=True):
    """A run of matched records to keep for feeds. ``shelf`` is a partition, or a partition's mark in a stretch."""

    shard: int
    shelf: str
    last: int
    records: int
    run: bytes


def keep_records(shards: Shards, kept: Sequence[KeptRecords], most_bytes: int) -> None:
    """Keep matched records, up to so many bytes per shelf; feeds read larger runs from Kafka."""
    # A larger run would push out all others and then itself.
    fitting = [k for k in kept if len(k.run) <= most_bytes]
    shards.call_all([(k.shard, "keep", (k.shelf, most_bytes, KEPT_MS, k.last, k.records, k.run)) for k in fitting])


class LeaseRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A connection's request as it is stored beside the lease."""

    life: int = 0
    """Life of the search; 0 for the current one."""
    start: str = ""
    window: int = 0
    client: str = ""
    since_ms: int = 0
    """Time of the request."""


@dataclass(eq=False)
class SearchLease:
    """The lease of one request, until it is released or a user ends the search. Feeds hand it on to each other."""

    leases: Leases
    search: str
    number: int
    request: LeaseRequest
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the lease ends without being released; a feed also uses it to wait for new events."""
    counted: int = 0
    """Popularity window in which the connection was counted when it began."""

    @classmethod
    async def take(cls, leases: Leases, request: GrepRequest, life: SearchLife) -> SearchLease:
        """Lease the search of a request, or raise SearchEnded if it has ended since it was registered."""
        given = request.parameters
        facts = LeaseRequest(life.number, _start_text(request), given.window, given.client or "")
        return await leases.take(life.search.id, facts)

    @property
    def is_held(self) -> bool:
        return self in self.leases

    def check(self) -> None:
        """Raise SearchEnded if the lease has ended."""
        if not self.is_held:
            raise SearchEnded(self.search)

    async def give_up(self) -> None:
        """Release the lease; a second call does nothing."""
        await self.leases.give_up(self)


class Leases:
    """The leases of this process, kept alive by ``run``."""

    def __init__(self, nodes: Nodes, clock: Callable[[], float] = time.time) -> None:
        self._call, self._clock = partial(nodes.call, 0), clock
        self.process = _new_name()
        self._registered = False
        self._leases: dict[int, SearchLease] = {}
        self._next = self._window = 0
        self._beating = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease: SearchLease) -> bool:
        return lease.number in self._leases

    async def take(self, search: str, request: LeaseRequest | None = None) -> SearchLease:
        """Lease a search for a connection, or raise SearchEnded if it has ended since it was registered."""
        self._next += 1
        request = msgspec.structs.replace(request or LeaseRequest(), since_ms=round(self._clock() * 1000))
        lease = self._leases[self._next] = SearchLease(self, search, self._next, request)
        try:
            for _ in range(TRIES):
                answer = await self._follow(lease)
                if answer == b"forgotten":
                    raise SearchEnded(search)
                if answer != b"buried":
                    return lease
                await self.beat()
            raise StoreUnavailable("the store keeps taking this process for dead: do its heartbeats reach valkey?")
        except BaseException:
            await self.give_up(lease)
            raise

    async def give_up(self, lease: SearchLease) -> None:
        if self._leases.pop(lease.number, None) is not None:
            with suppress(TailraceError):  # the lease ends with the process at the latest
                await self._call("unfollow", self.process, lease.number)

    async def run(self) -> None:
        """Send heartbeats until cancelled."""
        connected = False
        while True:
            try:
                await self.beat()
                connected = True
            except TailraceError as error:
                if connected:  # at first the store may not be prepared yet
                    logger.warning("heartbeat: %s", error)
            await asyncio.sleep(BEAT_S)

    async def beat(self) -> None:
        """Send a heartbeat; if the process was buried, register it under a new name."""
        facts = _encode({"feeds": len(self), "load": round(os.getloadavg()[0], 2)})
        async with self._beating:
            if self._registered:
                answer = await self._call("heartbeat", self.process, facts, 0)
                if answer[0] != b"buried":
                    self._window = int(answer[1])
                    for number in answer[2:]:
                        self._end(int(number))
                    return
                logger.warning("the store took this process for dead (silent for too long); its leases begin anew")
                self.process, self._registered = _new_name(), False
            # Connections that were counted under the old name are not counted again.
            for lease in self._leases.values():
                lease.counted = max(lease.counted, self._window)
            answer = await self._call("heartbeat", self.process, facts, 1)
            self._registered, self._window = True, int(answer[1])
            for lease in list(self._leases.values()):
                if lease.is_held:
                    await self._lease_anew(lease)

    async def _lease_anew(self, lease: SearchLease) -> None:
        answer = await self._follow(lease)
        if not lease.is_held:  # released meanwhile, perhaps before this call arrived
            await self._call("unfollow", self.process, lease.number)
        elif answer == b"forgotten":
            self._end(lease.number)

    def _end(self, number: int) -> None:
        if (lease := self._leases.pop(number, None)) is not None:
            lease.wake.set()

    async def _follow(self, lease: SearchLease) -> bytes:
        life, facts = lease.request.life or "", _encode(lease.request)
        answer = await self._call("follow", self.process, lease.number, lease.search, life, facts, lease.counted)
        if answer[0] == b"ok":
            lease.counted = int(answer[1])
        return bytes(answer[0])


def _new_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def _start_text(request: GrepRequest) -> str:
    match request.start:
        case FromTime(time_ms=time_ms):
            return iso_time(time_ms)
        case FromLast(count=count):
            return f"-{count}"
        case SearchCursor() as cursor:
            return str(cursor)
        case FromEnd():
            return "end"
        case FromStart():
            return "start"

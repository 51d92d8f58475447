"""Leases: which connections follow which searches. A lease lasts as long as its process is alive.

A service process sends heartbeats, timed by the store's clock. A process that was silent for too long is *buried*: its
leases end, and the store refuses its old name from then on. A process that was only paused learns this from its next
heartbeat; it takes a new name and leases again what its connections follow. If a user ends a search, its leases end,
too; the processes learn it from their next heartbeats.

A search without leases is kept for the time promised to readers that may return. After that it is a cache entry, of
which the least used are removed first. Invariants: the watchdog never ends a search that has leases or is within the
promised time; a life that has ended stays on a list until its logs are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from tailrace.config.settings import Settings
from tailrace.errors import SearchEnded, StoreUnavailable, TailraceError
from tailrace.log.cursor import FromEnd, FromLast, FromTime
from tailrace.log.event import iso_time
from tailrace.log.name import shard_of
from tailrace.valkey.shards import Arg, Nodes, Shards, mapping
from tailrace.views.grep.model import SearchLife, Stretch
from tailrace.views.grep.request import GrepRequest, SearchCursor
from tailrace.views.grep.store import VIEW, drop_shelf

logger = logging.getLogger(__name__)

BEAT_S = 3.0
SILENT_MS = 15_000
"""Silence after which a process is buried."""
AGAIN_MS = 300_000
"""Time after which logs are dropped a second time; no task works on one batch for so long."""
AT_ONCE = 100
"""Most searches that one call ends, and whose logs are dropped at once."""
TRIES = 5
"""Attempts to take a lease while the process gets a new name."""

_encode = msgspec.json.Encoder().encode


class LeaseRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A connection's request as it is stored beside the lease."""

    life: int = 0
    """Life of the search; 0 for the current one."""
    start: str = ""
    window: int = 0
    client: str = ""
    since_ms: int = 0
    """Time of the request."""


class _Lease(msgspec.Struct):
    search: str
    request: LeaseRequest
    ended: asyncio.Event
    """Set when the lease ends without being released."""
    counted: int = 0
    """Popularity window in which the connection was counted when it began."""


class Leases:
    """The leases of this process, kept alive by ``run``."""

    def __init__(self, nodes: Nodes, clock: Callable[[], float] = time.time) -> None:
        self._nodes, self._clock = nodes, clock
        self.process = _new_name()
        self._registered = False
        self._leases: dict[int, _Lease] = {}
        self._next = self._window = 0
        self._beating = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, number: int) -> bool:
        """Return whether a connection still has its lease."""
        return number in self._leases

    async def take(self, search: str, request: LeaseRequest | None = None, ended: asyncio.Event | None = None) -> int:
        """Lease a search for a connection; return its number. ``ended`` is set when a user ends the search.

        Raises:
            SearchEnded: The search has ended since it was registered.
        """
        self._next += 1
        number = self._next
        request = msgspec.structs.replace(request or LeaseRequest(), since_ms=round(self._clock() * 1000))
        self._leases[number] = _Lease(search, request, ended or asyncio.Event())
        try:
            for _ in range(TRIES):
                answer = await self._follow(number)
                if answer == b"forgotten":
                    raise SearchEnded(search)
                if answer != b"buried":
                    return number
                await self.beat()
        except BaseException:
            await self.give_up(number)
            raise
        await self.give_up(number)
        raise StoreUnavailable("the store keeps taking this process for dead: do its heartbeats reach valkey?")

    async def give_up(self, number: int) -> None:
        """Release a connection's lease."""
        if self._leases.pop(number, None) is not None:
            with suppress(TailraceError):  # the lease ends with the process at the latest
                await self._call("unfollow", self.process, number)

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
        facts = _encode({"feeds": len(self._leases), "load": round(os.getloadavg()[0], 2)})
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
            for number in list(self._leases):
                await self._lease_anew(number)

    async def _lease_anew(self, number: int) -> None:
        if number not in self._leases:
            return
        answer = await self._follow(number)
        if number not in self._leases:  # released meanwhile, perhaps before this call arrived
            await self._call("unfollow", self.process, number)
        elif answer == b"forgotten":
            self._end(number)

    def _end(self, number: int) -> None:
        if (lease := self._leases.pop(number, None)) is not None:
            lease.ended.set()

    async def _follow(self, number: int) -> bytes:
        lease = self._leases[number]
        life, facts = lease.request.life or "", _encode(lease.request)
        answer = await self._call("follow", self.process, number, lease.search, life, facts, lease.counted)
        if answer[0] == b"ok":
            lease.counted = int(answer[1])
        return bytes(answer[0])

    async def _call(self, name: str, *args: Arg) -> Any:
        return await self._nodes.call(0, name, *args)


def _new_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class Watchdog:
    """Ends the leases of dead processes and searches without readers, and drops the logs of ended lives.

    Args:
        keep_ms: Time that every search lives on without readers.
        popular_ms: Longest time that a search lives on without readers.
        idle: Number of searches that may live on between the two.
    """

    def __init__(
        self,
        shards: Shards,
        keep_ms: int,
        popular_ms: int = 0,
        idle: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._shards, self._keeping, self._clock = shards, (keep_ms, popular_ms, idle), clock

    @classmethod
    def of(cls, shards: Shards, settings: Settings) -> Watchdog:
        grep = settings.grep
        keep, popular = (round(each.total_seconds() * 1000) for each in (grep.keep, grep.keep_popular))
        return cls(shards, keep, popular, grep.idle)

    def look(self) -> tuple[list[str], list[str]]:
        """Do all of it once; return the buried processes and the ended lives."""
        buried = [name.decode() for name in self._shards.call(0, "bury", SILENT_MS)]
        for name in buried:
            logger.warning("service process %s is silent: its leases have ended", name)
        ended: list[str] = []
        while found := [life.decode() for life in self._shards.call(0, "forget", *self._keeping)]:
            ended += found
            if len(found) < AT_ONCE:
                break
        self._drop()
        return buried, ended

    def _drop(self) -> None:
        """Drop the logs of ended lives; and again a while later, since a running task may still have appended."""
        keys, now = self._shards.keys, round(self._clock() * 1000)
        waiting, again = self._shards.run_all([(0, ("HGETALL", keys.dropping())), (0, ("HGETALL", keys.dropped()))])
        # Scans wait meanwhile, so the rest is left for the next time.
        for life, numbers in list(mapping(waiting).items())[:AT_ONCE]:
            self._drop_life(life.decode(), [int(number) for number in numbers.split()])
            self._shards.run_all([(0, ("HSET", keys.dropped(), life, b"%d %s" % (now, numbers)))])
            self._shards.run_all([(0, ("HDEL", keys.dropping(), life))])
        for life, stored in mapping(again).items():
            dropped_ms, *stretches = map(int, stored.split())
            if not 0 <= now - dropped_ms < AGAIN_MS:
                self._drop_life(life.decode(), stretches)
                self._shards.run_all([(0, ("HDEL", keys.dropped(), life))])

    def _drop_life(self, life: str, stretches: list[int]) -> None:
        shards, keys = self._shards.options.shards, self._shards.keys
        if stretches:
            self._clear_shelves(stretches)
        self._shards.call(shard_of(life, shards), "drop", VIEW, life)
        for number in stretches:
            name = f"{life}.{number}"
            shard = shard_of(name, shards)
            begins = Stretch(number, 0, {}).mark("")
            [fields] = self._shards.run_all([(shard, ("HKEYS", keys.marks(shard, VIEW)))])
            marks = [field for field in fields if field.startswith(begins.encode())]
            self._shards.call(shard, "drop", VIEW, name, *marks)

    def _clear_shelves(self, stretches: list[int]) -> None:
        """Remove the kept records of stretches: they would expire, but their counted sizes would not."""
        keys, begins = self._shards.keys, tuple(Stretch(number, 0, {}).mark("").encode() for number in stretches)
        shards = range(self._shards.options.shards)
        for shard, shelves in enumerate(self._shards.run_all([(s, ("HKEYS", keys.kept_sizes(s))) for s in shards])):
            for shelf in [shelf for shelf in shelves if shelf.startswith(begins)]:
                drop_shelf(self._shards, shard, shelf.decode())


class SearchLease:
    """The lease of one request, until it is released or a user ends the search. Feeds hand it on to each other."""

    def __init__(self, leases: Leases, search: str, number: int, wake: asyncio.Event) -> None:
        self._leases, self._search, self._number = leases, search, number
        self.wake = wake
        """Set when the search ends; a feed also uses it to wait for new events."""

    @classmethod
    async def take(cls, leases: Leases, request: GrepRequest, life: SearchLife) -> SearchLease:
        """Lease the search of a request.

        Raises:
            SearchEnded: The search has ended since it was registered.
        """
        search, wake = life.search.id, asyncio.Event()
        return cls(leases, search, await leases.take(search, _lease_request(request, life), wake), wake)

    @property
    def is_held(self) -> bool:
        return self._number in self._leases

    def check(self) -> None:
        """Raise SearchEnded if the lease has ended."""
        if not self.is_held:
            raise SearchEnded(self._search)

    async def give_up(self) -> None:
        """Release the lease; a second call does nothing."""
        await self._leases.give_up(self._number)


def _lease_request(request: GrepRequest, life: SearchLife) -> LeaseRequest:
    """Return a request in the form that is stored beside its lease."""
    start = request.start
    if isinstance(start, FromTime):
        text = iso_time(start.time_ms)
    elif isinstance(start, FromLast):
        text = f"-{start.count}"
    elif isinstance(start, SearchCursor):
        text = str(start)
    else:
        text = "end" if isinstance(start, FromEnd) else "start"
    return LeaseRequest(life.number, text, request.window, request.client or "")

"""Leases: which connections follow which searches, for as long as the processes they are in are alive.

A service process says that it is alive by the store's clock. One that was silent for too long is *buried*: its leases
end, and whatever it says afterwards under its old name is refused. A process that was only paused finds that out with
its next heartbeat, takes another name, and leases anew what its connections still follow; so a lease never comes back
by itself. A search that is ended by hand ends its leases, too: the processes are told with their next heartbeats.

A search that nobody follows is kept for as long as is promised to readers that may come back; after that it is a cache,
of which the least used go first. Invariant: a search that is followed, or that was within the promise, is never ended
by the watchdog; and a life that is over leaves no log behind, since it stays on a list until its logs are dropped.

The lease of one request on its search: taken when it is opened, and handed on to whichever feed answers it.
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
from tailrace.valkey.nodes import Nodes
from tailrace.valkey.shards import Arg, Shards, mapping
from tailrace.views.grep.model import SearchLife, Stretch
from tailrace.views.grep.request import GrepRequest, SearchCursor
from tailrace.views.grep.store import VIEW, drop_shelf

logger = logging.getLogger(__name__)

BEAT_S = 3.0
SILENT_MS = 15_000
"""A process that was silent for so long is taken for dead."""
AGAIN_MS = 300_000
"""When logs are looked for that were dropped: no task works on one batch for so long."""
AT_ONCE = 100
"""Searches that one call ends at most, and whose logs one look drops."""
TRIES = 5
"""How often a lease is tried that meets a change of the process's name."""

_encode = msgspec.json.Encoder().encode


class LeaseRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a connection asks for, as it is kept beside its lease."""

    life: int = 0
    """The life of the search that it follows; 0 for whichever there is."""
    start: str = ""
    window: int = 0
    client: str = ""
    since_ms: int = 0
    """When it came."""


class _Lease(msgspec.Struct):
    search: str
    asked: LeaseRequest
    ended: asyncio.Event
    """Set when the lease ends without being given up."""
    counted: int = 0
    """The window that it was counted in as it began."""


class Leases:
    """The leases of this process. ``run`` keeps them alive."""

    def __init__(self, nodes: Nodes, clock: Callable[[], float] = time.time) -> None:
        self._nodes, self._clock = nodes, clock
        self.process = _new_name()
        self._began = False
        self._held: dict[int, _Lease] = {}
        self._next = self._window = 0
        self._beating = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, number: int) -> bool:
        """Whether a connection has its lease still; one whose search was ended by hand has not."""
        return number in self._held

    async def take(self, search: str, asked: LeaseRequest | None = None, ended: asyncio.Event | None = None) -> int:
        """Lease a search for a connection; return the connection's number. An event is set if the search is ended.

        Raises:
            SearchEnded: It was ended since it was registered.
        """
        self._next += 1
        number = self._next
        asked = msgspec.structs.replace(asked or LeaseRequest(), since_ms=round(self._clock() * 1000))
        self._held[number] = _Lease(search, asked, ended or asyncio.Event())
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
        raise StoreUnavailable("this process is taken for dead again and again: do its heartbeats reach valkey?")

    async def give_up(self, number: int) -> None:
        """End a connection's lease."""
        if self._held.pop(number, None) is not None:
            with suppress(TailraceError):  # it ends with the process at the latest
                await self._call("unfollow", self.process, number)

    async def run(self) -> None:
        """Say again and again that the process is alive."""
        met = False
        while True:
            try:
                await self.beat()
                met = True
            except TailraceError as error:
                if met:  # before, nobody has prepared the store yet
                    logger.warning("heartbeat: %s", error)
            await asyncio.sleep(BEAT_S)

    async def beat(self) -> None:
        """Say that the process is alive; if it was taken for dead, begin again under another name."""
        facts = _encode({"feeds": len(self._held), "load": round(os.getloadavg()[0], 2)})
        async with self._beating:
            if self._began:
                answer = await self._call("heartbeat", self.process, facts, 0)
                if answer[0] != b"buried":
                    self._window = int(answer[1])
                    for number in answer[2:]:
                        self._end(int(number))
                    return
                logger.warning("this process was taken for dead: it was silent for too long; its leases begin anew")
                self.process, self._began = _new_name(), False
            # What was counted under the old name is not counted again.
            for held in self._held.values():
                held.counted = max(held.counted, self._window)
            answer = await self._call("heartbeat", self.process, facts, 1)
            self._began, self._window = True, int(answer[1])
            for number in list(self._held):
                await self._lease_anew(number)

    async def _lease_anew(self, number: int) -> None:
        if number not in self._held:
            return
        answer = await self._follow(number)
        if number not in self._held:  # given up meanwhile, perhaps before this one arrived
            await self._call("unfollow", self.process, number)
        elif answer == b"forgotten":
            self._end(number)

    def _end(self, number: int) -> None:
        if (held := self._held.pop(number, None)) is not None:
            held.ended.set()

    async def _follow(self, number: int) -> bytes:
        held = self._held[number]
        life, facts = held.asked.life or "", _encode(held.asked)
        answer = await self._call("follow", self.process, number, held.search, life, facts, held.counted)
        if answer[0] == b"ok":
            held.counted = int(answer[1])
        return bytes(answer[0])

    async def _call(self, name: str, *args: Arg) -> Any:
        return await self._nodes.call(0, name, *args)


def _new_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class Watchdog:
    """Ends what nobody has a use for any more: leases of dead processes, and searches that nobody follows.

    Args:
        keep_ms: how long a search lives on without readers in any case.
        popular_ms: how long it does at most.
        idle: how many may live on between the two.
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
        """Return the watchdog that the configuration wants."""
        grep = settings.grep
        keep, popular = (round(each.total_seconds() * 1000) for each in (grep.keep, grep.keep_popular))
        return cls(shards, keep, popular, grep.idle)

    def look(self) -> tuple[list[str], list[str]]:
        """Look once; return the processes that were buried, and the lives that ended."""
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
        """Remove the logs of lives that are over; and again a while later: a task that is under way may append."""
        keys, now = self._shards.keys, round(self._clock() * 1000)
        left, late = self._shards.run_all([(0, ("HGETALL", keys.dropping())), (0, ("HGETALL", keys.dropped()))])
        # Scans wait meanwhile: the rest is dropped next time.
        for life, numbers in list(mapping(left).items())[:AT_ONCE]:
            self._drop_life(life.decode(), [int(number) for number in numbers.split()])
            self._shards.run_all([(0, ("HSET", keys.dropped(), life, b"%d %s" % (now, numbers)))])
            self._shards.run_all([(0, ("HDEL", keys.dropping(), life))])
        for life, stored in mapping(late).items():
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
        """Remove what was kept of records for stretches: it would expire, but its sizes would not."""
        keys, begins = self._shards.keys, tuple(Stretch(number, 0, {}).mark("").encode() for number in stretches)
        shards = range(self._shards.options.shards)
        for shard, shelves in enumerate(self._shards.run_all([(s, ("HKEYS", keys.kept_sizes(s))) for s in shards])):
            for shelf in [shelf for shelf in shelves if shelf.startswith(begins)]:
                drop_shelf(self._shards, shard, shelf.decode())


class SearchLease:
    """A lease that was taken. It is held until it is given up, or the search is ended by hand."""

    def __init__(self, leases: Leases, search: str, number: int, wake: asyncio.Event) -> None:
        self._leases, self._search, self._number = leases, search, number
        self.wake = wake
        """Set when the search is ended: a feed waits for this together with its own news."""

    @classmethod
    async def take(cls, leases: Leases, request: GrepRequest, life: SearchLife) -> SearchLease:
        """Lease the search of a request.

        Raises:
            SearchEnded: It was ended since it was registered.
        """
        search, wake = life.search.id, asyncio.Event()
        return cls(leases, search, await leases.take(search, _lease_request(request, life), wake), wake)

    @property
    def is_held(self) -> bool:
        """Whether it has not ended."""
        return self._number in self._leases

    def check(self) -> None:
        """Raise SearchEnded if it has ended."""
        if not self.is_held:
            raise SearchEnded(self._search)

    async def give_up(self) -> None:
        """End it; again does nothing."""
        await self._leases.give_up(self._number)


def _lease_request(request: GrepRequest, life: SearchLife) -> LeaseRequest:
    """Return what a request asks for, as it is kept beside its lease."""
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

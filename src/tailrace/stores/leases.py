"""Leases: which connections follow which searches, for as long as the processes they are in are alive.

A service process says that it is alive by the store's clock. One that was silent for too long is *buried*: its leases
end, and whatever it says afterwards under its old name is refused. A process that was only paused finds that out with
its next heartbeat, takes another name, and leases anew what its connections still follow; so a lease never comes back
by itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from contextlib import suppress
from typing import Any

import msgspec

from tailrace.errors import TailraceError
from tailrace.model.name import shard_of
from tailrace.model.search import Stretch
from tailrace.stores.functions import function
from tailrace.stores.nodes import Nodes
from tailrace.stores.searches import VIEW
from tailrace.stores.valkey import Arg, Shards

logger = logging.getLogger(__name__)

BEAT_S = 3.0
SILENT_MS = 15_000
"""A process that was silent for so long is taken for dead."""

_encode = msgspec.json.Encoder().encode


class Leases:
    """The leases of this process. ``run`` keeps them alive."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.process = _new_name()
        self._held: dict[int, str] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._held)

    async def take(self, search: str) -> int:
        """Lease a search for a connection; return the connection's number."""
        self._next += 1
        number = self._next
        self._held[number] = search
        await self._lease(number, search)
        return number

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
        if await self._call("heartbeat", self.process, facts) == b"buried":
            logger.warning("this process was taken for dead: it was silent for too long; its leases begin anew")
            self.process = _new_name()
            await self._call("heartbeat", self.process, facts)
            for number, search in list(self._held.items()):
                await self._lease(number, search)

    async def _lease(self, number: int, search: str) -> None:
        if await self._call("follow", self.process, number, search) == b"buried":
            await self.beat()  # which takes this lease, too

    async def _call(self, name: str, *args: Arg) -> Any:
        return await self._nodes.read(0, "FCALL", function(name), 1, self._nodes.keys.tag(0), *args)


def _new_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class Watchdog:
    """Ends what nobody has a use for any more: leases of dead processes, and searches that nobody has asked for."""

    def __init__(self, shards: Shards, kept_ms: int) -> None:
        self._shards, self._kept_ms = shards, kept_ms

    def look(self) -> tuple[list[str], list[str]]:
        """Look once; return the processes that were buried, and the lives that ended."""
        buried = [name.decode() for name in self._shards.call(0, "bury", SILENT_MS)]
        for name in buried:
            logger.warning("service process %s is silent: its leases have ended", name)
        [listed] = self._shards.run_all([(0, ("ZRANGE", self._shards.keys.used(), 0, 999))])
        ended: list[str] = []
        for search in listed:
            if answer := self._shards.call(0, "forget", search, self._kept_ms):
                life, *stretches = (part.decode() for part in answer)
                self._drop(life, [int(number) for number in stretches])
                ended.append(life)
        return buried, ended

    def _drop(self, life: str, stretches: list[int]) -> None:
        """Remove the logs of a life. If this is cut short they stay, unread, under names that are never used again."""
        shards, keys = self._shards.options.shards, self._shards.keys
        self._shards.call(shard_of(life, shards), "drop", VIEW, life)
        for number in stretches:
            name = f"{life}.{number}"
            shard = shard_of(name, shards)
            begins = Stretch(number, 0, {}).mark("")
            [fields] = self._shards.run_all([(shard, ("HKEYS", keys.marks(shard, VIEW)))])
            marks = [field for field in fields if field.startswith(begins.encode())]
            self._shards.call(shard, "drop", VIEW, name, *marks)

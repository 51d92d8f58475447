"""The asyncio client of the read side: plain commands on shards, wherever their node is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import valkey.asyncio
from valkey.asyncio.connection import BlockingConnectionPool, Connection, SSLConnection
from valkey.exceptions import ValkeyError

from tailrace.errors import StoreError, StoreUnavailable
from tailrace.stores.functions import function
from tailrace.stores.keys import Keys
from tailrace.stores.valkey import Address, Arg, StoreOptions, homes, translated


class Nodes:
    """Every node that holds a shard, for the service; the pipeline has ``Shards``."""

    def __init__(self, options: StoreOptions, connections: int = 64) -> None:
        self.options = options
        self.keys: Keys = options.keys
        self._limit = connections
        self._clients: dict[Address | None, valkey.asyncio.Valkey] = {}
        self._blocking: dict[tuple[int, str], valkey.asyncio.Valkey] = {}
        self._homes: list[Address | None] = []

    async def open(self) -> Nodes:
        """Find the node of every shard."""
        with translated():
            entry = self._client(None)
            info = await entry.info("cluster")
            clustered = int(info.get("cluster_enabled", 0))
            slots = await entry.execute_command("CLUSTER", "SLOTS") if clustered else None
            self._homes = homes(self.options, info, lambda: slots)
        return self

    async def close(self) -> None:
        """Close all connections."""
        for client in (*self._clients.values(), *self._blocking.values()):
            await client.aclose()
        self._clients.clear()
        self._blocking.clear()

    def groups(self) -> list[list[int]]:
        """Return the shards that one blocking command can wait for: all on a single server, one each in a cluster."""
        if self._homes and self._homes[0] is None:
            return [list(range(self.options.shards))]
        return [[shard] for shard in range(len(self._homes))]

    async def read(self, shard: int, *command: Arg) -> Any:
        """Run one command on the node of a shard."""
        return (await self.read_all([(shard, command)]))[0]

    async def read_all(self, commands: Sequence[tuple[int, tuple[Arg, ...]]]) -> list[Any]:
        """Run commands on shards, many in one round trip per node; answers in the order of the commands."""
        if not self._homes:
            await self.open()
        answers: list[Any] = [None] * len(commands)
        by_node: dict[Address | None, list[int]] = {}
        for i, (shard, _) in enumerate(commands):
            by_node.setdefault(self._homes[shard], []).append(i)
        with translated():
            try:
                for address, wanted in by_node.items():
                    pipeline = self._client(address).pipeline(transaction=False)
                    for i in wanted:
                        pipeline.execute_command(*commands[i][1])
                    for i, answer in zip(wanted, await pipeline.execute(), strict=True):
                        answers[i] = answer
            except ValkeyError:
                self._homes = []  # the shard may be on another node by now
                raise
        _heed_cancellation()
        return answers

    async def call(self, shard: int, name: str, *args: Arg) -> Any:
        """Call one of our functions.

        Raises:
            StoreUnavailable: Nobody has loaded them yet.
        """
        try:
            return await self.read(shard, "FCALL", function(name), 1, self.keys.tag(shard), *args)
        except StoreError as error:
            if "unction not found" not in str(error):
                raise
            raise StoreUnavailable("no pipeline of this version has prepared the store yet: is one running?") from None

    async def block(self, shard: int, who: str, command: tuple[Arg, ...], timeout_s: float) -> Any:
        """Run a blocking command for a shard, with time to block, on the connection of whoever blocks."""
        if not self._homes:
            await self.open()
        with translated():
            client = self._blocking.get((shard, who))
            if client is None:
                given = self.options.connection(self._homes[shard])
                given["socket_timeout"] = timeout_s + self.options.timeout_s
                client = self._blocking[shard, who] = _plain(given, 1)
            try:
                answer = await client.execute_command(*command)
            except ValkeyError:
                self._homes = []
                await self._blocking.pop((shard, who)).aclose()
                raise
        _heed_cancellation()
        return answer

    def _client(self, address: Address | None) -> valkey.asyncio.Valkey:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = _plain(self.options.connection(address), self._limit)
        return client


def _heed_cancellation() -> None:
    """Raise what ``asyncio.wait_for`` swallows before Python 3.12 when an answer and a cancellation come together.

    The driver uses it for every write; a third of all cancellations were lost.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _plain(given: dict[str, Any], limit: int) -> valkey.asyncio.Valkey:
    secure = "SSL" in getattr(given.pop("connection_class", None), "__name__", "")
    kind = SSLConnection if secure else Connection
    pool: Any = BlockingConnectionPool(connection_class=kind, max_connections=limit, timeout=30, **given)
    return valkey.asyncio.Valkey(connection_pool=pool)

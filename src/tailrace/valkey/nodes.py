"""The asyncio client of the service: commands and functions on shards and keys, each sent to the node that has it.

The pipeline and upkeep use ``shards.Shards``, which blocks and guards against restarted servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import valkey.asyncio
from valkey.asyncio.connection import BlockingConnectionPool, Connection, SSLConnection
from valkey.exceptions import ValkeyError

from tailrace.errors import StoreError, StoreUnavailable
from tailrace.valkey.keys import Keys
from tailrace.valkey.shards import (
    Address,
    Arg,
    Keyed,
    KeyedCall,
    Slots,
    StoreOptions,
    by_node,
    function,
    is_cluster,
    keyed_calls,
    translated,
)


class Nodes:
    """The nodes of the store."""

    def __init__(self, options: StoreOptions, connections: int = 64) -> None:
        self.options = options
        self.keys: Keys = options.keys
        self._limit = connections
        self._clients: dict[Address | None, valkey.asyncio.Valkey] = {}
        self._blocking: dict[tuple[int | str, str], valkey.asyncio.Valkey] = {}
        self._slots: Slots | None = None
        self._homes: list[Address | None] = []

    async def open(self) -> Nodes:
        """Find the node of every shard."""
        self._slots = None
        await self._resolve()
        return self

    async def close(self) -> None:
        """Close all connections."""
        for client in (*self._clients.values(), *self._blocking.values()):
            await client.aclose()
        self._clients.clear()
        self._blocking.clear()

    def groups(self) -> list[list[int]]:
        """Return the groups of shards that one blocking command can wait for: all on a single server, else one each."""
        if self._homes and self._homes[0] is None:
            return [list(range(self.options.shards))]
        return [[shard] for shard in range(len(self._homes))]

    async def read(self, shard: int, *command: Arg) -> Any:
        """Run one command on the node of a shard."""
        return (await self.read_all([(shard, command)]))[0]

    async def read_all(self, commands: Sequence[tuple[int, tuple[Arg, ...]]]) -> list[Any]:
        """Run commands on shards, in one round trip per node; answers in the order of the commands."""
        await self._resolve()
        return await self._run([(self._homes[shard], command) for shard, command in commands])

    async def read_keyed(self, commands: Sequence[Keyed]) -> list[Any]:
        """Run commands on the nodes of keys, in one round trip per node; answers in the order of the commands."""
        placed = (await self._resolve()).nodes_of(key for key, _ in commands)
        return await self._run([(address, command) for address, (_, command) in zip(placed, commands, strict=True)])

    async def call(self, shard: int, name: str, *args: Arg) -> Any:
        """Call a function of the library on a shard.

        Raises:
            StoreUnavailable: No pipeline has loaded the library yet.
        """
        with _missing_library():
            return await self.read(shard, "FCALL", function(name), 1, self.keys.tag(shard), *args)

    async def call_keyed(self, calls: Sequence[KeyedCall]) -> list[Any]:
        """Call functions of the library on the nodes of their keys; answers in the order of the calls.

        Raises:
            StoreUnavailable: No pipeline has loaded the library yet.
        """
        with _missing_library():
            return await self.read_keyed(keyed_calls(calls))

    async def block(self, shard: int, who: str, command: tuple[Arg, ...], timeout_s: float) -> Any:
        """Run a blocking command on a shard; each caller ``who`` has a connection of its own."""
        await self._resolve()
        return await self._block((shard, who), self._homes[shard], command, timeout_s)

    async def block_keyed(self, key: str, who: str, command: tuple[Arg, ...], timeout_s: float) -> Any:
        """Run a blocking command on the node of a key; the connection stays until ``end_block``."""
        (address,) = (await self._resolve()).nodes_of([key])
        return await self._block((key, who), address, command, timeout_s)

    async def end_block(self, key: str, who: str) -> None:
        """Close the connection of ``block_keyed``, if there is one."""
        client = self._blocking.pop((key, who), None)
        if client is not None:
            await client.aclose()

    async def _block(
        self, which: tuple[int | str, str], address: Address | None, command: tuple[Arg, ...], timeout_s: float
    ) -> Any:
        with translated():
            client = self._blocking.get(which)
            if client is None:
                arguments = self.options.connection(address)
                arguments["socket_timeout"] = timeout_s + self.options.timeout_s
                client = self._blocking[which] = _client_of(arguments, 1)
            try:
                answer = await client.execute_command(*command)
            except ValkeyError:
                self._slots = None
                if self._blocking.pop(which, None) is not None:
                    await client.aclose()
                raise
        _heed_cancellation()
        return answer

    async def _run(self, placed: Sequence[tuple[Address | None, tuple[Arg, ...]]]) -> list[Any]:
        answers: list[Any] = [None] * len(placed)
        with translated():
            try:
                for address, wanted in by_node(address for address, _ in placed).items():
                    pipeline = self._client(address).pipeline(transaction=False)
                    for i in wanted:
                        pipeline.execute_command(*placed[i][1])
                    for i, answer in zip(wanted, await pipeline.execute(), strict=True):
                        answers[i] = answer
            except ValkeyError:
                self._slots = None  # the keys may be on another node by now
                raise
        _heed_cancellation()
        return answers

    async def _resolve(self) -> Slots:
        slots = self._slots
        if slots is None or not slots.is_complete:
            with translated():
                entry = self._client(None)
                info = await entry.info("cluster")
                ranges = await entry.execute_command("CLUSTER", "SLOTS") if is_cluster(info) else None
            slots = Slots(ranges, self.options.host)
            self._homes = slots.nodes_of(self.keys.tag(shard) for shard in range(self.options.shards))
            self._slots = slots
        return slots

    def _client(self, address: Address | None) -> valkey.asyncio.Valkey:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = _client_of(self.options.connection(address), self._limit)
        return client


@contextmanager
def _missing_library() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        if "unction not found" not in str(error):
            raise
        raise StoreUnavailable("no pipeline of this version has prepared the store yet: is one running?") from None


def _heed_cancellation() -> None:
    """Raise CancelledError if ``asyncio.wait_for`` swallowed it, as it does before Python 3.12.

    The client waits that way for every write: without this, a third of all cancellations were lost.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _client_of(arguments: dict[str, Any], limit: int) -> valkey.asyncio.Valkey:
    secure = "SSL" in getattr(arguments.pop("connection_class", None), "__name__", "")
    kind = SSLConnection if secure else Connection
    pool: Any = BlockingConnectionPool(connection_class=kind, max_connections=limit, timeout=30, **arguments)
    return valkey.asyncio.Valkey(connection_pool=pool)

"""Clients of Valkey, one that blocks and one for asyncio, which find the node of each shard; and its Lua functions.

A shard is one hash tag, so all its keys are on one node. A client looks up the node of a shard, or of any other key,
and speaks plain protocol to it, on a single server and in a cluster alike. ``Shards`` blocks, for the pipeline and
upkeep; ``Nodes`` is for asyncio, in the service. The client library's exceptions become StoreUnavailable or StoreError.

Invariant: a connection of ``Shards`` is only used with the server process whose run_id was noted first. A restarted
server may have lost its last writes, and further writes would hide the loss for ever.

The version of the Lua library is a digest of its text and part of every function's name, so a new release never changes
the functions that a running driver of the old release calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import valkey
import valkey.asyncio
from valkey.asyncio import connection as aio
from valkey.connection import Connection, ConnectionPool, SSLConnection, parse_url
from valkey.crc import key_slot
from valkey.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError, ResponseError, ValkeyError

from tailrace.errors import StaleDriver, StoreChanged, StoreError, StoreMismatch, StoreUnavailable
from tailrace.valkey.keys import FORMAT, Keys

if TYPE_CHECKING:
    from tailrace.config.settings import Valkey

Address: TypeAlias = tuple[str, int]
SLOTS = 16384
CONNECTIONS = 64
"""Most connections of ``Nodes`` to one node, besides those that block."""


_PACKAGE = Path(__file__).parents[1]
_CORE = _PACKAGE / "valkey" / "functions"
_SOURCE = "\n".join(
    part.read_text("utf-8")
    for part in (
        *(_CORE / f"{name}.lua" for name in ("tailrace", "upkeep", "roll")),
        *sorted(_PACKAGE.glob("views/*/*.lua")),
        _CORE / "apply.lua",
    )
)
"""One library, so one text: the core functions, those of the views, and ``apply``, which calls what views define."""
VERSION = sha256(_SOURCE.encode()).hexdigest()[:10]
LIBRARY = f"tailrace_{VERSION}"
CODE = f"#!lua name={LIBRARY}\n" + _SOURCE.replace("VERSION", VERSION)


def function(name: str) -> str:
    """Return the loaded name of one of our functions."""
    return f"tailrace_{name}_{VERSION}"


Arg: TypeAlias = bytes | str | int
Call: TypeAlias = tuple[int, str, Sequence[Arg]]
"""Shard, function, arguments."""
Command: TypeAlias = tuple[int, tuple[Arg, ...]]
"""Shard, plain command."""
Keyed: TypeAlias = tuple[str, tuple[Arg, ...]]
"""Key whose node runs it, plain command."""
KeyedCall: TypeAlias = tuple[str, Sequence[str], Sequence[Arg]]
"""Function, keys that are all on one node, arguments."""


class StoreOptions(msgspec.Struct, frozen=True):
    """Address and division of the store; the driver hands them to Spark tasks."""

    url: str
    password: str = ""
    prefix: str = "tr"
    shards: int = 4
    timeout_s: float = 5.0

    @classmethod
    def of(cls, settings: Valkey) -> StoreOptions:
        password = settings.password.get_secret_value()
        return cls(settings.url, password, settings.prefix, settings.shards, settings.timeout.total_seconds())

    @property
    def keys(self) -> Keys:
        return Keys(self.prefix)

    @property
    def host(self) -> str:
        return str(self.connection().get("host", "127.0.0.1"))

    def connection(self, address: Address | None = None) -> dict[str, Any]:
        """Return the client's arguments for one node, or for the node that the URL names."""
        arguments: dict[str, Any] = dict(parse_url(self.url))
        if self.password:
            arguments["password"] = self.password
        if address is not None:
            arguments["host"], arguments["port"] = address
            arguments.pop("path", None)
        arguments.update(socket_timeout=self.timeout_s, socket_connect_timeout=self.timeout_s)
        return arguments


class Slots:
    """The node of each key, from the answer to CLUSTER SLOTS; None is the server that the URL names, if it is single.

    A node that the cluster reports without a host is at ``host``.
    """

    def __init__(self, ranges: Any, host: str) -> None:
        self._ranges: list[tuple[int, int, Address]] | None = None
        self.primaries: list[Address | None] = [None]
        """Every node that has keys."""
        self.is_complete = True
        """True if every slot is served; otherwise the clients ask again."""
        if ranges is not None:
            self._ranges = [(low, high, _address(primary, host)) for low, high, primary, *_ in ranges]
            self.primaries = list(dict.fromkeys(address for _, _, address in self._ranges))
            self.is_complete = sum(high - low + 1 for low, high, _ in self._ranges) == SLOTS

    def node_of(self, key: str) -> Address | None:
        """Return the node of a key, or raise StoreUnavailable if none serves its slot."""
        if self._ranges is None:
            return None
        slot = key_slot(key.encode())
        for low, high, address in self._ranges:
            if low <= slot <= high:
                return address
        raise StoreUnavailable(f"no node of the valkey cluster serves slot {slot}: is the cluster complete?")


def _address(primary: Any, host: str) -> Address:
    name = primary[0].decode() if isinstance(primary[0], bytes) else primary[0]
    return name or host, int(primary[1])


def by_node(addresses: Iterable[Address | None]) -> dict[Address | None, list[int]]:
    """Return the indices of the addresses that are equal, for each address."""
    indices: dict[Address | None, list[int]] = {}
    for i, address in enumerate(addresses):
        indices.setdefault(address, []).append(i)
    return indices


class _Client:
    """Base of both clients: the node of every shard."""

    def __init__(self, options: StoreOptions) -> None:
        self.options = options
        self.keys = options.keys
        self._slots: Slots | None = None
        self._homes: list[Address | None] = []

    def _learn(self, ranges: Any) -> Slots:
        """Take the answer to CLUSTER SLOTS; None from a single server."""
        slots = Slots(ranges, self.options.host)
        self._homes = [slots.node_of(self.keys.tag(shard)) for shard in range(self.options.shards)]
        self._slots = slots
        return slots


class Shards(_Client):
    """The blocking client: runs commands and functions on shards and keys, many in one round trip per node."""

    def __init__(self, options: StoreOptions, run_ids: MutableMapping[str, str] | None = None) -> None:
        super().__init__(options)
        self.sealed = run_ids is not None
        """True if nodes that were not noted are refused too: after a fail-over, one may be a replica that lags."""
        self.run_ids: MutableMapping[str, str] = {} if run_ids is None else run_ids
        """Address of each node -> run_id of its server process, noted at the first connection."""
        self._nodes: dict[Address | None, valkey.Valkey] = {}

    def open(self) -> Shards:
        with translated():
            self._slots = None
            self._resolve()
        return self

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()
        self._nodes.clear()

    def client(self, shard: int) -> valkey.Valkey:
        self._resolve()
        return self._node(self._homes[shard])

    def primaries(self) -> list[valkey.Valkey]:
        """Return a client of every node that has keys, with or without shards."""
        return [self._node(address) for address in self._resolve().primaries]

    def call(self, shard: int, name: str, *args: Arg) -> Any:
        return self.call_all([(shard, name, args)])[0]

    def call_all(self, calls: Sequence[Call]) -> list[Any]:
        """Call functions on shards, in order for each node, and return the answers in the order of the calls."""
        tag = self.keys.tag
        return self.run_all([(s, ("FCALL", function(name), 1, tag(s), *args)) for s, name, args in calls])

    def run_all(self, commands: Sequence[Command]) -> list[Any]:
        """Run plain commands on shards, in one round trip per node; answers in the order of the commands."""
        with translated():
            self._resolve()
            return self._run([(self._homes[shard], command) for shard, command in commands])

    def call_keyed(self, calls: Sequence[KeyedCall]) -> list[Any]:
        """Call functions on the nodes of their keys, in order for each node; answers in the order of the calls."""
        return self.run_keyed(keyed_calls(calls))

    def run_keyed(self, commands: Sequence[Keyed]) -> list[Any]:
        """Run plain commands on the nodes of keys, in one round trip per node; answers in the order of the commands."""
        with translated():
            slots = self._resolve()
            return self._run([(slots.node_of(key), command) for key, command in commands])

    def run_key(self, command: str, key: str, *args: Arg) -> Any:
        return self.run_keyed([(key, (command, key, *args))])[0]

    def _run(self, placed: Sequence[tuple[Address | None, tuple[Arg, ...]]]) -> list[Any]:
        answers: list[Any] = [None] * len(placed)
        try:
            for address, wanted in by_node(address for address, _ in placed).items():
                pipeline = self._node(address).pipeline(transaction=False)
                for i in wanted:
                    pipeline.execute_command(*placed[i][1])
                for i, answer in zip(wanted, pipeline.execute(), strict=True):
                    answers[i] = answer
        except ValkeyError:
            self._slots = None  # the keys may be on another node by now
            raise
        return answers

    def _node(self, address: Address | None) -> valkey.Valkey:
        node = self._nodes.get(address)
        if node is None:
            arguments = self.options.connection(address)
            kind = arguments.pop("connection_class", Connection)
            plain = SSLConnection if issubclass(kind, SSLConnection) else kind
            guarded = type("GuardedConnection", (_Guard, plain), {"shards": self})
            node = valkey.Valkey(connection_pool=ConnectionPool(connection_class=guarded, **arguments))
            self._nodes[address] = node
        return node

    def _resolve(self) -> Slots:
        if self._slots is None or not self._slots.is_complete:
            entry = self._node(None)
            info: Any = entry.info("cluster")
            return self._learn(entry.execute_command("CLUSTER", "SLOTS") if info.get("cluster_enabled") else None)
        return self._slots


class _Guard:
    """A connection that refuses a server process other than the one noted for its address."""

    shards: Shards

    def on_connect(self) -> None:
        super().on_connect()  # type: ignore[misc]
        me: Any = self
        me.send_command("INFO", "server")
        answer = me.read_response()
        lines = (answer.decode() if isinstance(answer, bytes) else answer).splitlines()
        run_id = next((line.removeprefix("run_id:") for line in lines if line.startswith("run_id:")), "")
        address = f"{me.host}:{me.port}"
        noted = self.shards.run_ids
        if address not in noted and not self.shards.sealed:
            noted[address] = run_id
        if noted.get(address) != run_id:
            me.disconnect()
            raise StoreChanged(address, noted.get(address, "no process that we knew"), run_id)


class Nodes(_Client):
    """The asyncio client: like ``Shards``, without its guard."""

    def __init__(self, options: StoreOptions) -> None:
        super().__init__(options)
        self._clients: dict[Address | None, valkey.asyncio.Valkey] = {}
        self._blocking: dict[tuple[str, str], valkey.asyncio.Valkey] = {}

    async def open(self) -> Nodes:
        self._slots = None
        await self._resolve()
        return self

    async def close(self) -> None:
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
        return (await self.read_all([(shard, command)]))[0]

    async def read_all(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands on shards, in one round trip per node; answers in the order of the commands."""
        await self._resolve()
        return await self._run([(self._homes[shard], command) for shard, command in commands])

    async def read_keyed(self, commands: Sequence[Keyed]) -> list[Any]:
        """Run commands on the nodes of keys, in one round trip per node; answers in the order of the commands."""
        slots = await self._resolve()
        return await self._run([(slots.node_of(key), command) for key, command in commands])

    async def read_key(self, command: str, key: str, *args: Arg) -> Any:
        return (await self.read_keyed([(key, (command, key, *args))]))[0]

    async def call(self, shard: int, name: str, *args: Arg) -> Any:
        """Call a function on a shard; StoreUnavailable if no pipeline has loaded the library yet."""
        with _missing_library():
            return await self.read(shard, "FCALL", function(name), 1, self.keys.tag(shard), *args)

    async def call_keyed(self, calls: Sequence[KeyedCall]) -> list[Any]:
        """Call functions on the nodes of their keys, as ``call`` does; answers in the order of the calls."""
        with _missing_library():
            return await self.read_keyed(keyed_calls(calls))

    async def follow(self, who: str, after: Mapping[str, str], count: int, wait_ms: int) -> list[tuple[str, Any]]:
        """Wait for entries after ids, by the keys of streams on one node; return the streams that have some, with them.

        Each caller ``who`` has a connection of its own for the first key, until ``end_follow``.
        """
        slots, first = await self._resolve(), next(iter(after))
        with translated():
            client = self._blocking.get((first, who))
            if client is None:
                arguments = self.options.connection(slots.node_of(first))
                arguments["socket_timeout"] = wait_ms / 1000 + self.options.timeout_s
                client = self._blocking[first, who] = _client_of(arguments, 1)
            try:
                streams = *after, *after.values()
                answer = await client.execute_command("XREAD", "COUNT", count, "BLOCK", wait_ms, "STREAMS", *streams)
            except ValkeyError:
                self._slots = None
                await self.end_follow(first, who)
                raise
        _heed_cancellation()
        found = answer.items() if isinstance(answer, dict) else answer or ()
        return [(key.decode(), entries) for key, entries in found]

    async def end_follow(self, key: str, who: str) -> None:
        """Close the connection of ``follow``, if there is one."""
        client = self._blocking.pop((key, who), None)
        if client is not None:
            await client.aclose()

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
        if self._slots is None or not self._slots.is_complete:
            with translated():
                entry = self._client(None)
                info = await entry.info("cluster")
                ranges = await entry.execute_command("CLUSTER", "SLOTS") if info.get("cluster_enabled") else None
            return self._learn(ranges)
        return self._slots

    def _client(self, address: Address | None) -> valkey.asyncio.Valkey:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = _client_of(self.options.connection(address), CONNECTIONS)
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
    kind = aio.SSLConnection if secure else aio.Connection
    pool: Any = aio.BlockingConnectionPool(connection_class=kind, max_connections=limit, timeout=30, **arguments)
    return valkey.asyncio.Valkey(connection_pool=pool)


def keyed_calls(calls: Sequence[KeyedCall]) -> list[Keyed]:
    """Return the commands that call functions on the nodes of their keys."""
    return [(keys[0], ("FCALL", function(name), len(keys), *keys, *args)) for name, keys, args in calls]


def mapping(answer: Any) -> dict[bytes, bytes]:
    """Return the fields of a hash or of a stream's entry as a dict, from a dict (RESP3) or a flat list (RESP2)."""
    return answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))


# The client library removes the error code from answers for which it has a class, so these are told by their class.
_TEMPORARY = (OutOfMemoryError, ReadOnlyError)
_TEMPORARY_CODES = ("MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "MISCONF", "NOREPLICAS")


@contextmanager
def translated() -> Iterator[None]:
    """Turn the client library's exceptions into StoreUnavailable and StoreError."""
    try:
        yield
    except (valkey.ConnectionError, valkey.TimeoutError, BusyLoadingError, OSError) as error:
        raise StoreUnavailable(f"valkey does not answer: {error}; is it running, and is valkey.url right?") from error
    except ValkeyError as error:
        # The client library puts the call and its data in front of the server's message.
        message = str(error).rpartition(" of pipeline caused error: ")[2]
        temporary = isinstance(error, ResponseError) and message.startswith(_TEMPORARY_CODES)
        if temporary or isinstance(error, _TEMPORARY):
            raise StoreUnavailable(f"valkey refuses calls for now: {message}") from None
        raise StoreError(f"valkey refused a call: {message}") from None


def load_functions(shards: Shards) -> None:
    """Load the Lua library on every node that lacks it, and note each node's run_id."""
    with translated():
        for node in shards.primaries():
            loaded = node.execute_command("FUNCTION", "LIST", "LIBRARYNAME", LIBRARY)
            if not loaded:
                node.execute_command("FUNCTION", "LOAD", "REPLACE", CODE)


def prepare(shards: Shards, now: Callable[[], float] = time.time) -> dict[int, int]:
    """Load the Lua library on every node and initialise every shard; return each shard's epoch.

    Notes each node's run_id: from here on, nodes that were restarted and nodes that are new are refused.
    """
    load_functions(shards)
    count = shards.options.shards
    with translated():
        infos: list[Any] = [shards.client(shard).info("server") for shard in range(count)]
    answers = shards.call_all(
        [(shard, "begin", (str(info["run_id"]), int(now()), count, FORMAT)) for shard, info in enumerate(infos)]
    )
    epochs: dict[int, int] = {}
    for shard, answer in enumerate(answers):
        if answer[0] == b"mismatch":
            raise _mismatch(answer[1:], count)
        epochs[shard] = int(answer[1])
    shards.sealed = True
    return epochs


def check_layout(shards: Shards) -> None:
    """Raise StoreMismatch if the store's number of shards or layout differs from the configuration's."""
    (stored,) = shards.run_all([(0, ("HMGET", shards.keys.meta(0), "shards", "format"))])
    count = shards.options.shards
    if stored[0] is not None and (int(stored[0]), int(stored[1])) != (count, FORMAT):
        raise _mismatch(stored, count)


def _mismatch(stored: Sequence[bytes], count: int) -> StoreMismatch:
    return StoreMismatch(
        f"the store has {int(stored[0])} shards (layout {int(stored[1])}), the configuration says {count} "
        f"(layout {FORMAT}): set valkey.shards back, or choose another valkey.prefix and rebuild"
    )


def enlist(shards: Shards, views: Sequence[str], now: Callable[[], float] = time.time) -> int:
    """Take over views: return a new driver epoch, which every shard requires from now on."""
    epoch = int(shards.call(0, "enlist", int(now())))
    fence(shards, views, epoch)
    return epoch


def fence(shards: Shards, views: Sequence[str], epoch: int) -> None:
    """Make every shard require this driver epoch, or raise StaleDriver if one requires a newer one."""
    calls: list[Call] = [(s, "fence", (view, epoch)) for view in views for s in range(shards.options.shards)]
    for (_, _, (view, _)), answer in zip(calls, shards.call_all(calls), strict=True):
        if answer[0] == b"stale":
            raise StaleDriver(str(view), epoch, int(answer[1]))

"""Valkey connections: which node a shard is on, and the guard against a server that is not the one we knew.

A shard is one hash tag, so it is on one node, and so is a key that belongs to no shard; we look the node up and speak
plain protocol to it, single server or cluster alike. Invariant: a guarded connection is only ever used with the server
process whose run_id was noted first. A restarted server may have lost its last writes, and writing on top of the hole
would hide it for ever.
Driver exceptions do not leave this file: they become StoreUnavailable or StoreError.

Which node a key is on: a single server has them all; the primaries of a cluster have ranges of slots.

The Lua functions that change a shard, and the version under which they are loaded.

The version is a digest of their text and part of every function's name, so a new release never changes what a running
driver of the old one calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import valkey.asyncio
from valkey.connection import Connection, ConnectionPool, SSLConnection, parse_url
from valkey.crc import key_slot
from valkey.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError, ResponseError, ValkeyError

import valkey
from tailrace.errors import StaleDriver, StoreChanged, StoreError, StoreMismatch, StoreUnavailable
from tailrace.valkey.keys import FORMAT, Keys

if TYPE_CHECKING:
    from tailrace.config.settings import Valkey


Address: TypeAlias = tuple[str, int]

SLOTS = 16384


class Slots:
    """The nodes that the keys are on, as one node said it; None is the server that the URL names.

    Args:
        ranges: The answer to CLUSTER SLOTS; None for a single server.
        host: The host of a node that the cluster has no name for.
    """

    def __init__(self, ranges: Any, host: str) -> None:
        self._ranges: list[tuple[int, int, Address]] | None = None
        self.primaries: list[Address | None] = [None]
        """Every node that has keys."""
        self.is_complete = True
        """Whether every slot is served; if not, it is worth asking again."""
        if ranges is not None:
            self._ranges = [(low, high, _address(primary, host)) for low, high, primary, *_ in ranges]
            self.primaries = list(dict.fromkeys(address for _, _, address in self._ranges))
            self.is_complete = sum(high - low + 1 for low, high, _ in self._ranges) == SLOTS

    def nodes_of(self, keys: Iterable[str]) -> list[Address | None]:
        """Return the node of each key.

        Raises:
            StoreUnavailable: No node serves the slot of one of them.
        """
        return [self._node_of(key) for key in keys]

    def _node_of(self, key: str) -> Address | None:
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


def _read_parts() -> Iterator[str]:
    """Yield the core functions, what each view has beside its Python, and ``apply``, which calls what views define."""
    package = files("tailrace")
    core = package / "valkey" / "functions"
    yield (core / "tailrace.lua").read_text()
    yield (core / "upkeep.lua").read_text()
    for view in sorted((package / "views").iterdir(), key=lambda each: each.name):
        if view.is_dir():
            for part in sorted(view.iterdir(), key=lambda each: each.name):
                if part.name.endswith(".lua"):
                    yield part.read_text()
    yield (core / "apply.lua").read_text()


# One library, so one text.
_SOURCE = "\n".join(_read_parts())

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
"""Key that says which node, plain command."""
KeyedCall: TypeAlias = tuple[str, Sequence[str], Sequence[Arg]]
"""Function, keys that are all on one node, arguments."""


def mapping(answer: Any) -> dict[bytes, bytes]:
    """Return fields and values of a hash, or of a stream's entry, in whichever form the client hands them over."""
    return answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))


class StoreOptions(msgspec.Struct, frozen=True):
    """How to reach the store and how it is divided; what a Spark task gets from its driver."""

    url: str
    password: str = ""
    prefix: str = "tr"
    shards: int = 4
    timeout_s: float = 5.0

    @classmethod
    def of(cls, settings: Valkey) -> StoreOptions:
        """Return the options that the configuration gives."""
        password = settings.password.get_secret_value()
        return cls(settings.url, password, settings.prefix, settings.shards, settings.timeout.total_seconds())

    @property
    def keys(self) -> Keys:
        """The key names of this installation."""
        return Keys(self.prefix)

    @property
    def host(self) -> str:
        """The host that the URL names."""
        return str(self.connection().get("host", "127.0.0.1"))

    def connection(self, address: Address | None = None) -> dict[str, Any]:
        """Return the client's arguments for one node, or for the node that the URL names."""
        given: dict[str, Any] = dict(parse_url(self.url))
        if self.password:
            given["password"] = self.password
        if address is not None:
            given["host"], given["port"] = address
            given.pop("path", None)
        given.update(socket_timeout=self.timeout_s, socket_connect_timeout=self.timeout_s)
        return given


class _Guard:
    """Connections that refuse a server process other than the one noted under their address."""

    shards: Shards

    def on_connect(self) -> None:
        super().on_connect()  # type: ignore[misc]
        me: Any = self
        me.send_command("INFO", "server")
        found = run_id_of(me.read_response())
        where = f"{me.host}:{me.port}"
        known = self.shards.run_ids
        if where not in known and not self.shards.sealed:
            known[where] = found
        if known.get(where) != found:
            me.disconnect()
            raise StoreChanged(where, known.get(where, "no process that we knew"), found)


def run_id_of(info: bytes | str) -> str:
    """Read the run_id from the answer to INFO."""
    text = info.decode() if isinstance(info, bytes) else info
    return next((line[7:] for line in text.splitlines() if line.startswith("run_id:")), "")


# The client takes the code off an answer for which it has a class, and only off those.
_FOR_NOW = (OutOfMemoryError, ReadOnlyError)


@contextmanager
def translated() -> Iterator[None]:
    """Turn the driver's exceptions into ours."""
    try:
        yield
    except (valkey.ConnectionError, valkey.TimeoutError, BusyLoadingError, OSError) as error:
        raise StoreUnavailable(f"valkey does not answer: {error}; is it running, and is valkey.url right?") from error
    except _FOR_NOW as error:
        raise StoreUnavailable(f"valkey refuses calls for now: {_said(error)}") from None
    except ResponseError as error:
        said = _said(error)
        if said.startswith(("MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "MISCONF", "NOREPLICAS")):
            raise StoreUnavailable(f"valkey refuses calls for now: {said}") from None
        raise StoreError(f"valkey refused a call: {said}") from None
    except ValkeyError as error:
        raise StoreError(f"valkey refused a call: {_said(error)}") from None


def _said(error: ValkeyError) -> str:
    """Return what the server said, without the call and its data, which the client puts in front."""
    return str(error).rpartition(" of pipeline caused error: ")[2]


class Shards:
    """The blocking client of the write side: calls functions on shards, many in one round trip per node."""

    def __init__(self, options: StoreOptions, run_ids: MutableMapping[str, str] | None = None) -> None:
        self.options = options
        self.keys = options.keys
        self.sealed = run_ids is not None
        """Whether a node that was not noted is refused too: after a fail-over it may be a replica that lags behind."""
        self.run_ids: MutableMapping[str, str] = {} if run_ids is None else run_ids
        """Address of each node -> the process that we deal with there; filled at the first connection."""
        self._nodes: dict[Address | None, valkey.Valkey] = {}
        self._slots: Slots | None = None
        self._homes: list[Address | None] = []

    def open(self) -> Shards:
        """Find the node of every shard."""
        with translated():
            self._slots = None
            self._resolve()
        return self

    def close(self) -> None:
        """Close all connections."""
        for node in self._nodes.values():
            node.close()
        self._nodes.clear()

    def client(self, shard: int) -> valkey.Valkey:
        """Return the plain client of the node that a shard is on."""
        self._resolve()
        return self._node(self._homes[shard])

    def primaries(self) -> list[valkey.Valkey]:
        """Return a client of every node that holds keys, also of one that has no shard."""
        return [self._node(address) for address in self._resolve().primaries]

    def call(self, shard: int, name: str, *args: Arg) -> Any:
        """Call one function on one shard."""
        return self.call_all([(shard, name, args)])[0]

    def call_all(self, calls: Sequence[Call]) -> list[Any]:
        """Call functions on shards, in order for each node, and return the answers in the order of the calls."""
        tag = self.keys.tag
        return self.run_all([(s, ("FCALL", function(name), 1, tag(s), *args)) for s, name, args in calls])

    def run_all(self, commands: Sequence[Command]) -> list[Any]:
        """Run plain commands on shards, many in one round trip per node; answers in the order of the commands."""
        with translated():
            self._resolve()
            return self._run([(self._homes[shard], command) for shard, command in commands])

    def call_keyed(self, calls: Sequence[KeyedCall]) -> list[Any]:
        """Call functions on the nodes of their keys, in order for each node; answers in the order of the calls."""
        return self.run_keyed(keyed_calls(calls))

    def run_keyed(self, commands: Sequence[Keyed]) -> list[Any]:
        """Run plain commands on the nodes of keys, many in one round trip per node; answers in their order."""
        with translated():
            placed = self._resolve().nodes_of(key for key, _ in commands)
            return self._run([(address, command) for address, (_, command) in zip(placed, commands, strict=True)])

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
            given = self.options.connection(address)
            kind = given.pop("connection_class", Connection)
            flavour = SSLConnection if issubclass(kind, SSLConnection) else kind
            guarded = type("GuardedConnection", (_Guard, flavour), {"shards": self})
            node = valkey.Valkey(connection_pool=ConnectionPool(connection_class=guarded, **given))
            self._nodes[address] = node
        return node

    def _resolve(self) -> Slots:
        if self._slots is None or not self._slots.is_complete:
            entry = self._node(None)
            info: Any = entry.info("cluster")
            ranges = entry.execute_command("CLUSTER", "SLOTS") if is_cluster(info) else None
            slots = Slots(ranges, self.options.host)
            self._homes = slots.nodes_of(self.keys.tag(shard) for shard in range(self.options.shards))
            self._slots = slots
        return self._slots


def is_cluster(info: dict[str, Any]) -> bool:
    """Read the answer to INFO cluster."""
    return bool(int(info.get("cluster_enabled", 0)))


def by_node(addresses: Iterable[Address | None]) -> dict[Address | None, list[int]]:
    """Return which of them are at each address."""
    found: dict[Address | None, list[int]] = {}
    for i, address in enumerate(addresses):
        found.setdefault(address, []).append(i)
    return found


def keyed_calls(calls: Sequence[KeyedCall]) -> list[Keyed]:
    """Return the commands that call functions with keys of their own."""
    return [(keys[0], ("FCALL", function(name), len(keys), *keys, *args)) for name, keys, args in calls]


# What a driver does before it writes.


def load_functions(shards: Shards) -> None:
    """Load the functions on every node that lacks them, and note each node's run_id."""
    with translated():
        for node in shards.primaries():
            loaded = node.execute_command("FUNCTION", "LIST", "LIBRARYNAME", LIBRARY)
            if not loaded:
                node.execute_command("FUNCTION", "LOAD", "REPLACE", CODE)


def prepare(shards: Shards, now: Callable[[], float] = time.time) -> dict[int, int]:
    """Load the functions on every node and begin every shard; return each shard's epoch.

    Notes each node's run_id: from here on, a node that was restarted or that was not there is refused.
    """
    load_functions(shards)
    with translated():
        ids = [run_id_of_client(shards, shard) for shard in range(shards.options.shards)]
    count = shards.options.shards
    answers = shards.call_all(
        [(shard, "begin", (ids[shard], int(now()), count, FORMAT)) for shard in range(count)],
    )
    epochs: dict[int, int] = {}
    for shard, answer in enumerate(answers):
        if answer[0] == b"mismatch":
            raise _mismatch(answer[1:], count)
        epochs[shard] = int(answer[1])
    shards.sealed = True
    return epochs


def check_layout(shards: Shards) -> None:
    """Raise StoreMismatch when the store is laid out otherwise than configured; changes nothing."""
    (stored,) = shards.run_all([(0, ("HMGET", shards.keys.meta(0), "shards", "format"))])
    count = shards.options.shards
    if stored[0] is not None and (int(stored[0]), int(stored[1])) != (count, FORMAT):
        raise _mismatch(stored, count)


def _mismatch(stored: Sequence[bytes], count: int) -> StoreMismatch:
    return StoreMismatch(
        f"the store has {int(stored[0])} shards (layout {int(stored[1])}), the configuration says {count} "
        f"(layout {FORMAT}): set valkey.shards back, or choose another valkey.prefix and rebuild"
    )


def run_id_of_client(shards: Shards, shard: int) -> str:
    """Return the run_id of the process that a shard's guarded connections are bound to."""
    info: Any = shards.client(shard).info("server")
    return str(info["run_id"])


def enlist(shards: Shards, views: Sequence[str], now: Callable[[], float] = time.time) -> int:
    """Take the views over: return a driver epoch that was never used, put into force on every shard."""
    epoch = int(shards.call(0, "enlist", int(now())))
    hold(shards, views, epoch)
    return epoch


def hold(shards: Shards, views: Sequence[str], epoch: int) -> None:
    """Put a driver epoch into force on every shard, or raise StaleDriver if a newer one is."""
    calls: list[Call] = [(s, "fence", (view, epoch)) for view in views for s in range(shards.options.shards)]
    for (_, _, (view, _)), answer in zip(calls, shards.call_all(calls), strict=True):
        if answer[0] == b"stale":
            raise StaleDriver(str(view), epoch, int(answer[1]))

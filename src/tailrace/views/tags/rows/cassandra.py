"""Cassandra connections: one for each process, and its errors as ours.

Every statement is prepared, idempotent and asks the consistency that is configured (a quorum by default) of the nodes
that hold the row. Driver exceptions do not leave this file: they become StoreUnavailable or StoreError.

The tables of tags in Cassandra: made or checked at a start.

``schema.cql`` is the whole truth about their columns: an existing table that differs is refused, with what differs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, Any, Final

import msgspec
from cassandra import (
    AuthenticationFailed,
    ConsistencyLevel,
    CoordinationFailure,
    DriverException,
    InvalidRequest,
    OperationTimedOut,
    Timeout,
    Unavailable,
)
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
from cassandra.connection import ConnectionException
from cassandra.policies import ConstantReconnectionPolicy, DCAwareRoundRobinPolicy, TokenAwarePolicy
from cassandra.protocol import ErrorMessage, IsBootstrappingErrorMessage, OverloadedErrorMessage, ServerError
from cassandra.query import tuple_factory

from tailrace.errors import StoreError, StoreMismatch, StoreUnavailable

if TYPE_CHECKING:
    from tailrace.views.tags.settings import CassandraSettings


PROTOCOL: Final = 4
"""The oldest in which a value can be left out; later ones only add checksums that are slow to make here."""
_FOR_NOW: Final = (
    OperationTimedOut,
    Timeout,
    Unavailable,
    CoordinationFailure,
    ConnectionException,
    OverloadedErrorMessage,
    IsBootstrappingErrorMessage,
    ServerError,
    OSError,
)


class CassandraOptions(msgspec.Struct, frozen=True):
    """How to reach Cassandra; what a Spark task gets from its driver."""

    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 9042
    keyspace: str = "tailrace"
    user: str = ""
    password: str = ""
    datacenter: str = ""
    replication: int = 1
    consistency: str = "QUORUM"
    timeout_s: float = 10.0

    @classmethod
    def of(cls, settings: CassandraSettings) -> CassandraOptions:
        """Return the options that the configuration gives."""
        return cls(
            hosts=tuple(settings.hosts),
            port=settings.port,
            keyspace=settings.keyspace,
            user=settings.user,
            password=settings.password.get_secret_value(),
            datacenter=settings.datacenter,
            replication=settings.replication,
            consistency=settings.consistency,
            timeout_s=settings.timeout.total_seconds(),
        )


class CassandraConnection:
    """The connections of one process to the cluster; safe for threads, and lost on a fork (see ``connected``)."""

    def __init__(self, options: CassandraOptions) -> None:
        self.options = options
        self.session: Any = None
        self._cluster: Any = None
        self._prepared: dict[str, Any] = {}
        self._lock = threading.Lock()

    def open(self) -> CassandraConnection:
        """Connect, unless that was done; blocks."""
        with self._lock:
            if self.session is None:
                self._connect()
        return self

    def close(self) -> None:
        """Close all connections; blocks."""
        with self._lock:
            cluster, self._cluster, self.session = self._cluster, None, None
            self._prepared.clear()
        if cluster is not None:
            cluster.shutdown()

    def prepared(self, text: str) -> Any:
        """Return a statement ready to be bound, in which ``$keyspace`` is ours; blocks the first time.

        Raises:
            StoreUnavailable: Nobody has made the tables yet.
        """
        found = self._prepared.get(text)
        if found is None:
            session = self.open().session
            with translated():
                found = session.prepare(self.text(text))
            found.is_idempotent = True
            self._prepared[text] = found
        return found

    def text(self, text: str, **more: str) -> str:
        """Return a statement with the name of our keyspace put in."""
        return Template(text).substitute(keyspace=f'"{self.options.keyspace}"', **more)

    def execute(self, text: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement that need not be prepared and return its rows; blocks."""
        session = self.open().session
        with translated():
            return list(session.execute(text, values or None))

    def _connect(self) -> None:
        options = self.options
        profile = ExecutionProfile(
            load_balancing_policy=TokenAwarePolicy(DCAwareRoundRobinPolicy(options.datacenter)),
            consistency_level=ConsistencyLevel.name_to_value[options.consistency],
            request_timeout=options.timeout_s,
            row_factory=tuple_factory,
        )
        cluster = Cluster(
            options.hosts,
            port=options.port,
            protocol_version=PROTOCOL,
            auth_provider=PlainTextAuthProvider(options.user, options.password) if options.user else None,
            execution_profiles={EXEC_PROFILE_DEFAULT: profile},
            reconnection_policy=ConstantReconnectionPolicy(1.0, max_attempts=None),
            connect_timeout=options.timeout_s,
            control_connection_timeout=options.timeout_s,
            compression=False,  # else it depends on which packages happen to be there, and so does what is too large
        )
        try:
            with translated():
                self.session = cluster.connect()
        except BaseException:
            cluster.shutdown()
            raise
        self._cluster = cluster


_connections: dict[tuple[int, CassandraOptions], CassandraConnection] = {}


def connected(options: CassandraOptions) -> CassandraConnection:
    """Return the connection of this process, made on first use; a forked process gets one of its own."""
    mine = os.getpid(), options
    if mine not in _connections:
        _connections[mine] = CassandraConnection(options)
    return _connections[mine].open()


def disconnect(options: CassandraOptions) -> None:
    """Close the connection of this process, if there is one; whoever has it may open it again."""
    found = _connections.pop((os.getpid(), options), None)
    if found is not None:
        found.close()


@contextmanager
def translated() -> Iterator[None]:
    """Turn the driver's exceptions into ours."""
    try:
        yield
    except NoHostAvailable as error:
        refused = next((e for e in error.errors.values() if isinstance(e, AuthenticationFailed)), None)
        if refused is not None:
            raise StoreError(f"cassandra refused the user: {refused}; see cassandra.user") from None
        raise StoreUnavailable(
            f"cassandra does not answer: {error}; is it running, and are cassandra.hosts and cassandra.port right?"
        ) from error
    except _FOR_NOW as error:
        raise StoreUnavailable(f"cassandra does not answer in time: {error}") from error
    except InvalidRequest as error:
        said = str(error)
        if "unconfigured table" in said or "does not exist" in said:
            raise StoreUnavailable(f"no pipeline has prepared cassandra yet ({said}): is one running?") from None
        raise StoreError(f"cassandra refused a call: {said}") from None
    except (DriverException, ErrorMessage) as error:
        raise StoreError(f"cassandra refused a call: {error}") from None


MOST_WINDOWS: Final = 50
"""Files of a table whose rows expire: one for each window of time, and all of them may be looked into."""
MOST_TTL: Final = 20 * 365 * 86_400
"""The longest time to live that Cassandra takes, in seconds."""
BUCKET_MARGIN: Final = timedelta(days=2)
"""How much longer than a row its bucket is listed."""

_UNITS: Final = (("MINUTES", 60, 3_600), ("HOURS", 3_600, 86_400), ("DAYS", 86_400, MOST_TTL))
"""Each with its seconds, and how many seconds a window in it has at most."""

logger = logging.getLogger(__name__)


def prepare(options: CassandraOptions, keep: timedelta | None = None) -> None:
    """Make the keyspace and the tables, or check those that are there, and let rows expire as configured.

    Args:
        options: The cluster and the keyspace.
        keep: How long a row lives after it was written; None is for ever. What was written before keeps its time.

    Raises:
        StoreMismatch: A table is there with other columns; nothing was changed.
    """
    connection = CassandraConnection(options).open()
    try:
        if not connection.execute(
            "SELECT keyspace_name FROM system_schema.keyspaces WHERE keyspace_name = %s", (options.keyspace,)
        ):
            where = f"'class': 'NetworkTopologyStrategy', '{options.datacenter}'"
            anywhere = "'class': 'SimpleStrategy', 'replication_factor'"
            strategy = f"{{{where if options.datacenter else anywhere}: {options.replication}}}"
            text = "CREATE KEYSPACE IF NOT EXISTS $keyspace WITH replication = $strategy"
            connection.execute(connection.text(text, strategy=strategy))
        missing = _compare(connection)
        for table, statement in _schema().items():
            if table in missing:
                connection.execute(connection.text(statement))
        _expire(connection, "tag_views", keep)
        _expire(connection, "tag_buckets", keep and keep + BUCKET_MARGIN)
    finally:
        connection.close()


def check(options: CassandraOptions) -> None:
    """Compare the tables with ours; changes nothing.

    Raises:
        StoreMismatch: A table has other columns.
        StoreUnavailable: There is none yet.
    """
    connection = CassandraConnection(options).open()
    try:
        missing = _compare(connection)
    finally:
        connection.close()
    if missing:
        raise StoreUnavailable(
            f"no pipeline has prepared cassandra yet (keyspace {options.keyspace!r} has no {', '.join(missing)}): "
            "is one running?"
        )


def _schema() -> dict[str, str]:
    """Return the statement that makes each table."""
    text = resources.files("tailrace.views.tags.rows").joinpath("schema.cql").read_text(encoding="utf-8")
    bare = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
    statements = [part.strip() for part in bare.split(";") if part.strip()]
    return {part.partition("$keyspace.")[2].partition(" ")[0]: part for part in statements}


def _columns(statement: str) -> dict[str, str]:
    """Return the columns that a statement makes, each with its type and its place in the key."""
    head, _, key = statement.partition("PRIMARY KEY (")
    lines = [line.strip().rstrip(",") for line in head.partition(" (\n")[2].splitlines()]
    partition, _, clustering = key.rpartition(")")[0].rpartition(")")[0].partition(")")
    kinds = {name.strip(): f"partition_key {i}" for i, name in enumerate(partition.strip("(").split(","))}
    kinds |= {name.strip(): f"clustering {i}" for i, name in enumerate(clustering.strip(", ").split(","))}
    pairs = (line.split(" ", 1) for line in lines if line)
    return {name: f"{kind} {kinds.get(name, 'regular -1')}" for name, kind in pairs}


def _compare(connection: CassandraConnection) -> list[str]:
    """Return the tables that are missing."""
    missing = []
    for table, statement in _schema().items():
        rows = connection.execute(
            "SELECT column_name, type, kind, position FROM system_schema.columns "
            "WHERE keyspace_name = %s AND table_name = %s",
            (connection.options.keyspace, table),
        )
        found = {name: f"{kind} {place} {position}" for name, kind, place, position in rows}
        wanted = _columns(statement)
        if not found:
            missing.append(table)
        elif found != wanted:
            others = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
            differences = [f"{name} ({found.get(name, 'missing')}, not {wanted.get(name, 'there')})" for name in others]
            raise StoreMismatch(
                f"table {connection.options.keyspace}.{table} of cassandra differs from ours in "
                f"{', '.join(differences)}: "
                "choose another cassandra.keyspace and rebuild, or drop the table"
            )
    return missing


def _expire(connection: CassandraConnection, table: str, keep: timedelta | None) -> None:
    """Set how long new rows of a table live, with as many files as there are windows, if that has changed."""
    (row,) = connection.execute(
        "SELECT default_time_to_live, compaction FROM system_schema.tables "
        "WHERE keyspace_name = %s AND table_name = %s",
        (connection.options.keyspace, table),
    )
    found, compaction = int(row[0]), dict(row[1])
    by_window = "TimeWindowCompactionStrategy" in compaction["class"]
    wanted = 0 if keep is None else min(max(1, round(keep.total_seconds())), MOST_TTL)
    if wanted:
        strategy = {"class": "TimeWindowCompactionStrategy", **_window(wanted)}
        is_set = by_window and all(compaction.get(name) == value for name, value in _window(wanted).items())
    else:
        strategy = {"class": "SizeTieredCompactionStrategy"}
        is_set = not by_window
    changes = []
    if found != wanted:
        changes.append(f"default_time_to_live = {wanted}")
    if not is_set:
        changes.append(f"compaction = {strategy}")  # as Python writes it, so does Cassandra
    if changes:
        logger.info("%s: %s", table, " and ".join(changes))
        text = f"ALTER TABLE $keyspace.{table} WITH {' AND '.join(changes)}"
        connection.execute(connection.text(text))


def _window(ttl_s: int) -> dict[str, str]:
    """Return the window of which a time to live has at most ``MOST_WINDOWS``."""
    window_s = -(-ttl_s // MOST_WINDOWS)
    unit, seconds = next((unit, s) for unit, s, most in _UNITS if window_s <= most)
    return {"compaction_window_unit": unit, "compaction_window_size": str(-(-window_s // seconds))}

"""Connections to Cassandra, and the tables of tags.

Each process has one connection. Every statement is prepared, idempotent, and uses the configured consistency (a quorum
by default). Driver exceptions do not leave this package: ``translated`` turns them into StoreUnavailable or StoreError.

``schema.cql`` defines the tables. A start creates missing tables, and refuses an existing one with other columns.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from importlib import resources
from typing import Any, Final

from cassandra import (
    AuthenticationFailed,
    ConsistencyLevel,
    DriverException,
    InvalidRequest,
    OperationTimedOut,
    RequestExecutionException,
)
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
from cassandra.connection import ConnectionException
from cassandra.policies import ConstantReconnectionPolicy, DCAwareRoundRobinPolicy, TokenAwarePolicy
from cassandra.protocol import ErrorMessage, IsBootstrappingErrorMessage, OverloadedErrorMessage, ServerError
from cassandra.query import tuple_factory

from tailrace.errors import StoreError, StoreMismatch, StoreUnavailable
from tailrace.views.tags.settings import CassandraSettings

PROTOCOL: Final = 4
"""The oldest protocol with unset values; later ones only add checksums, which are slow in Python."""
BY_WINDOW: Final = "TimeWindowCompactionStrategy"
MAX_WINDOWS: Final = 50
"""Time windows, one file each, of a table whose rows expire; a read may open all of them."""
MAX_TTL: Final = 20 * 365 * 86_400
"""The longest time to live that Cassandra takes, in seconds."""
BUCKET_MARGIN: Final = timedelta(days=2)
"""The entry of a bucket outlives its rows by this much."""

_UNITS: Final = (("MINUTES", 60, 3_600), ("HOURS", 3_600, 86_400), ("DAYS", 86_400, MAX_TTL))
"""Units of a window, each with its seconds, and the seconds of the longest window in it."""
_TEMPORARY: Final = (
    OperationTimedOut,
    RequestExecutionException,
    ConnectionException,
    OverloadedErrorMessage,
    IsBootstrappingErrorMessage,
    ServerError,
    OSError,
)

logger = logging.getLogger(__name__)


class CassandraConnection:
    """The connections of one process to the cluster; safe for threads, but not after a fork (see ``connected``)."""

    def __init__(self, options: CassandraSettings) -> None:
        self.options = options
        self.session: Any = None
        self._prepared: dict[str, Any] = {}
        self._lock = threading.Lock()

    def open(self) -> CassandraConnection:
        """Connect, unless that was done; blocks."""
        with self._lock:
            if self.session is None:
                self._connect()
        return self

    def close(self) -> None:
        with self._lock:
            session, self.session = self.session, None
            self._prepared.clear()
        if session is not None:
            session.cluster.shutdown()

    def prepared(self, text: str) -> Any:
        """Return a prepared statement; block the first time; raise StoreUnavailable while there are no tables."""
        statement = self._prepared.get(text)
        if statement is None:
            session = self.open().session
            with translated():
                statement = session.prepare(self.text(text))
            statement.is_idempotent = True
            self._prepared[text] = statement
        return statement

    def text(self, text: str) -> str:
        """Return a statement with our keyspace for ``$keyspace``."""
        return text.replace("$keyspace", f'"{self.options.keyspace}"')

    def execute(self, text: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement that is not prepared, with our keyspace for ``$keyspace``; return its rows; blocks."""
        session = self.open().session
        with translated():
            return list(session.execute(self.text(text), values or None))

    def _connect(self) -> None:
        options, timeout_s = self.options, self.options.timeout.total_seconds()
        profile = ExecutionProfile(
            load_balancing_policy=TokenAwarePolicy(DCAwareRoundRobinPolicy(options.datacenter)),
            consistency_level=ConsistencyLevel.name_to_value[options.consistency],
            request_timeout=timeout_s,
            row_factory=tuple_factory,
        )
        password = options.password.get_secret_value()
        cluster = Cluster(
            options.hosts,
            port=options.port,
            protocol_version=PROTOCOL,
            auth_provider=PlainTextAuthProvider(options.user, password) if options.user else None,
            execution_profiles={EXEC_PROFILE_DEFAULT: profile},
            reconnection_policy=ConstantReconnectionPolicy(1.0, max_attempts=None),
            connect_timeout=timeout_s,
            control_connection_timeout=timeout_s,
            compression=False,  # else it depends on the installed packages, and so does the largest frame
        )
        try:
            with translated():
                self.session = cluster.connect()
        except BaseException:
            cluster.shutdown()
            raise


_connections: dict[tuple[int, CassandraSettings], CassandraConnection] = {}


def connected(options: CassandraSettings) -> CassandraConnection:
    """Return the connection of this process, created on first use; a forked process gets its own."""
    key = os.getpid(), options
    if key not in _connections:
        _connections[key] = CassandraConnection(options)
    return _connections[key].open()


def disconnect(options: CassandraSettings) -> None:
    """Close the connection of this process, if there is one; its holders may open it again."""
    connection = _connections.pop((os.getpid(), options), None)
    if connection is not None:
        connection.close()


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
    except _TEMPORARY as error:
        raise StoreUnavailable(f"cassandra does not answer in time: {error}") from error
    except InvalidRequest as error:
        message = str(error)
        if "unconfigured table" in message or "does not exist" in message:
            raise StoreUnavailable(f"no pipeline has prepared cassandra yet ({message}): is one running?") from None
        raise StoreError(f"cassandra refused a call: {message}") from None
    except (DriverException, ErrorMessage) as error:
        raise StoreError(f"cassandra refused a call: {error}") from None


def prepare(options: CassandraSettings, keep: timedelta | None = None) -> None:
    """Create the keyspace and the tables, and let new rows live for ``keep``, None for ever; existing rows keep theirs.

    Raises StoreMismatch, before anything is changed, if an existing table has other columns.
    """
    with closing(CassandraConnection(options)) as connection:
        if not connection.execute(
            "SELECT keyspace_name FROM system_schema.keyspaces WHERE keyspace_name = %s", (options.keyspace,)
        ):
            by_datacenter = f"'class': 'NetworkTopologyStrategy', '{options.datacenter}'"
            simple = "'class': 'SimpleStrategy', 'replication_factor'"
            strategy = f"{{{by_datacenter if options.datacenter else simple}: {options.replication}}}"
            connection.execute(f"CREATE KEYSPACE IF NOT EXISTS $keyspace WITH replication = {strategy}")
        for statement in _missing_tables(connection):
            connection.execute(statement)
        _expire(connection, "tag_views", keep)
        _expire(connection, "tag_buckets", keep and keep + BUCKET_MARGIN)


def _schema() -> dict[str, str]:
    text = resources.files("tailrace.views.tags.rows").joinpath("schema.cql").read_text(encoding="utf-8")
    bare = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
    statements = [part.strip() for part in bare.split(";") if part.strip()]
    return {part.partition("$keyspace.")[2].partition(" ")[0]: part for part in statements}


def _columns(statement: str) -> dict[str, str]:
    """Return the columns of a statement, each with its type and its position in the key."""
    head, _, key = statement.partition("PRIMARY KEY (")
    lines = [line.strip().rstrip(",") for line in head.partition(" (\n")[2].splitlines()]
    partition, _, clustering = key.rpartition(")")[0].rpartition(")")[0].partition(")")
    kinds = {name.strip(): f"partition_key {i}" for i, name in enumerate(partition.strip("(").split(","))}
    kinds |= {name.strip(): f"clustering {i}" for i, name in enumerate(clustering.strip(", ").split(","))}
    pairs = (line.split(" ", 1) for line in lines if line)
    return {name: f"{kind} {kinds.get(name, 'regular -1')}" for name, kind in pairs}


def _missing_tables(connection: CassandraConnection) -> list[str]:
    """Return the statements that create the missing tables; raise StoreMismatch if one has other columns."""
    missing = []
    for table, statement in _schema().items():
        rows = connection.execute(
            "SELECT column_name, type, kind, position FROM system_schema.columns "
            "WHERE keyspace_name = %s AND table_name = %s",
            (connection.options.keyspace, table),
        )
        actual = {name: f"{kind} {part} {position}" for name, kind, part, position in rows}
        wanted = _columns(statement)
        if not actual:
            missing.append(statement)
        elif actual != wanted:
            others = sorted(name for name in actual.keys() | wanted.keys() if actual.get(name) != wanted.get(name))
            found = (f"{name} ({actual.get(name, 'missing')}, not {wanted.get(name, 'there')})" for name in others)
            raise StoreMismatch(
                f"table {connection.options.keyspace}.{table} of cassandra differs from ours in {', '.join(found)}: "
                "choose another cassandra.keyspace and rebuild, or drop the table"
            )
    return missing


def _expire(connection: CassandraConnection, table: str, keep: timedelta | None) -> None:
    """Set the time to live of new rows, and a compaction with one file for each time window, if that has changed."""
    (row,) = connection.execute(
        "SELECT default_time_to_live, compaction FROM system_schema.tables "
        "WHERE keyspace_name = %s AND table_name = %s",
        (connection.options.keyspace, table),
    )
    ttl, compaction = int(row[0]), dict(row[1])
    compaction["class"] = compaction["class"].rpartition(".")[2]
    wanted = 0 if keep is None else min(max(1, round(keep.total_seconds())), MAX_TTL)
    changes, strategy = [], {}
    if wanted:
        strategy = {"class": BY_WINDOW, **_window(wanted)}
    elif compaction["class"] == BY_WINDOW:
        strategy = {"class": "SizeTieredCompactionStrategy"}
    if ttl != wanted:
        changes.append(f"default_time_to_live = {wanted}")
    if not strategy.items() <= compaction.items():
        changes.append(f"compaction = {strategy}")  # Python and Cassandra write it alike
    if changes:
        logger.info("%s: %s", table, " and ".join(changes))
        connection.execute(f"ALTER TABLE $keyspace.{table} WITH {' AND '.join(changes)}")


def _window(ttl_s: int) -> dict[str, str]:
    """Return the compaction window, so that a time to live has at most ``MAX_WINDOWS``."""
    window_s = -(-ttl_s // MAX_WINDOWS)
    unit, seconds = next((unit, s) for unit, s, most in _UNITS if window_s <= most)
    return {"compaction_window_unit": unit, "compaction_window_size": str(-(-window_s // seconds))}

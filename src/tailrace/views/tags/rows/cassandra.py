"""Cassandra connections: one for each process, and its errors as ours.

Every statement is prepared, idempotent and asks the consistency that is configured (a quorum by default) of the nodes
that hold the row. Driver exceptions do not leave this file: they become StoreUnavailable or StoreError.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

from tailrace.errors import StoreError, StoreUnavailable

if TYPE_CHECKING:
    from tailrace.views.tags.settings import Cassandra

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
    def of(cls, settings: Cassandra) -> CassandraOptions:
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


class Connection:
    """The connections of one process to the cluster; safe for threads, and lost on a fork (see ``connected``)."""

    def __init__(self, options: CassandraOptions) -> None:
        self.options = options
        self.session: Any = None
        self._cluster: Any = None
        self._prepared: dict[str, Any] = {}
        self._lock = threading.Lock()

    def open(self) -> Connection:
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


_connections: dict[tuple[int, CassandraOptions], Connection] = {}


def connected(options: CassandraOptions) -> Connection:
    """Return the connection of this process, made on first use; a forked process gets one of its own."""
    mine = os.getpid(), options
    if mine not in _connections:
        _connections[mine] = Connection(options)
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

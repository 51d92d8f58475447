"""Fixtures of pytest: real servers, shared by all workers of a run, and a part of them that no other test has seen.

``kafka``, ``valkey_server``, ``valkey_cluster``, ``redis_server`` and ``cassandra_server`` are shared: a test that
kills, stops or empties a server takes ``own_valkey`` or ``own_cassandra``. ``store`` and ``rows_store`` are a key
prefix and a keyspace of the test's own; ``any_store`` runs a test on a single Valkey, on a cluster and on Redis.

The first process that needs a server starts it; the others find its ports in a file. A server ends with the process
that started it, so that process waits in ``SharedServers.close`` until nobody uses the server any more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from tailrace.config.settings import load
from tailrace.driver.start import session as begin_session
from tailrace.embedded.cassandra import EmbeddedCassandra
from tailrace.embedded.java import QUICK_JAVA, make_archives, spark_environment
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.process import EmbeddedServer, Process
from tailrace.embedded.valkey import EmbeddedValkey, start_cluster
from tailrace.upkeep.spark import end_session
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.rows import cassandra as schema
from tailrace.views.tags.rows.cassandra import disconnect
from tailrace.views.tags.settings import CassandraSettings

S = TypeVar("S", bound=EmbeddedServer)

MEMORY = Path("/dev/shm")
"""Folder that Linux keeps in memory: a server that syncs its files before it answers loses no time there."""

_POLL_S = 0.1

_numbers = count()
_sparks: list[Any] = []
_writer = pytest.StashKey[Process]()


class _Shared(msgspec.Struct):
    """The file of one kind of server."""

    owner: int
    """Process that started it."""
    ports: list[int]
    users: list[int]
    folder: str


class SharedServers:
    """The servers of one test run, in a folder that all its processes know. Call ``close`` at the end of each process.

    Args:
        folder: Where the servers keep their data, and what this class needs to know of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used: dict[str, Sequence[EmbeddedServer]] = {}

    def use(
        self, name: str, start: Callable[[Path], Sequence[S]], attach: Callable[[Path, Sequence[int]], Sequence[S]]
    ) -> Sequence[S]:
        """Return the servers of this name; start them if no living process has.

        Args:
            name: What they are called in this run.
            start: Start them on a folder that is theirs.
            attach: Make objects for servers that run on this folder at these ports, and start nothing.
        """
        with self._locked(name) as file:
            shared = _read(file)
            if shared is not None and _lives(shared.owner):
                servers = attach(Path(shared.folder), shared.ports)
                shared.users.append(os.getpid())
                self._used[name] = ()
            else:
                folder = self._folder / f"{name}-{os.getpid()}"
                servers = self._used[name] = start(folder)
                shared = _Shared(os.getpid(), [server.port for server in servers], [], str(folder))
            file.write_bytes(msgspec.json.encode(shared))
        return servers

    def close(self) -> None:
        """Let go of all servers; stop those that this process started when no other one uses them."""
        for name in self._used:
            with self._locked(name) as file:
                shared = _read(file)
                if shared is not None and os.getpid() in shared.users:
                    shared.users.remove(os.getpid())
                    file.write_bytes(msgspec.json.encode(shared))
        for name, servers in self._used.items():
            if servers:
                self._stop(name, servers)
        self._used.clear()

    def _stop(self, name: str, servers: Sequence[EmbeddedServer]) -> None:
        while True:
            with self._locked(name) as file:
                shared = _read(file)
                if shared is None or not any(map(_lives, shared.users)):
                    file.unlink(missing_ok=True)
                    break
            time.sleep(_POLL_S)
        for server in servers:
            server.stop()

    @contextmanager
    def _locked(self, name: str) -> Iterator[Path]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self._folder / f"{name}.json"


def _read(file: Path) -> _Shared | None:
    return msgspec.json.decode(file.read_bytes(), type=_Shared) if file.exists() else None


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


_servers = pytest.StashKey[SharedServers]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the servers' files in memory if there is room for them, and let every JVM start sooner."""
    os.environ.setdefault("JDK_JAVA_OPTIONS", QUICK_JAVA)
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop what this worker started, when the other workers no longer use it."""
    end_spark()
    if (servers := session.config.stash.get(_servers, None)) is not None:
        servers.close()
    if (writer := session.config.stash.get(_writer, None)) is not None:
        writer.wait()


def unique_name() -> str:
    """Return a name that no other test of this run has: letters and digits."""
    return f"{os.environ.get('PYTEST_XDIST_WORKER', 't')}n{next(_numbers)}"


@pytest.fixture(scope="session")
def servers(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> SharedServers:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder of its own in that of the run
        folder = folder.parent
    made = pytestconfig.stash[_servers] = SharedServers(folder / "servers")
    return made


def _single(servers: SharedServers, name: str, server_at: Callable[..., S], start_timeout: float) -> S:
    """Return the shared server of this name; ``server_at`` makes one of a folder, and of a port where it runs."""

    def start(folder: Path) -> Sequence[S]:
        server = server_at(folder)
        server.start(start_timeout)
        return [server]

    [server] = servers.use(name, start, lambda folder, ports: [server_at(folder, ports[0])])
    return server


@pytest.fixture(scope="session")
def valkey_server(servers: SharedServers) -> EmbeddedValkey:
    return _single(servers, "valkey", EmbeddedValkey, 60)


@pytest.fixture(scope="session")
def valkey_cluster(servers: SharedServers) -> Sequence[EmbeddedValkey]:
    """A cluster of three nodes."""

    def attach(folder: Path, ports: Sequence[int]) -> Sequence[EmbeddedValkey]:
        return [EmbeddedValkey(folder / f"node-{number}", port) for number, port in enumerate(ports)]

    return servers.use("cluster", lambda folder: start_cluster(folder, timeout=60), attach)


@pytest.fixture(scope="session")
def redis_server(servers: SharedServers) -> EmbeddedValkey:
    """A Redis with the settings of our Valkey."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("there is no redis-server on this machine; .ci/run says how to get one")
    server = _single(servers, "redis", partial(EmbeddedValkey, binary=Path(found)), 60)
    with server.client() as client:
        version = str(client.info("server")["redis_version"])
    if int(version.split(".")[0]) < 7:
        pytest.skip(f"functions need Redis 7 or newer; {found} is {version}")
    return server


@pytest.fixture(scope="session")
def quick_spark(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let every Spark that a test starts from now on start sooner."""
    os.environ |= spark_environment(QUICK_JAVA)
    if (writer := make_archives(tmp_path_factory.getbasetemp() / "archives.log")) is not None:
        pytestconfig.stash[_writer] = writer


@pytest.fixture
def spark(quick_spark: None) -> Any:
    """A Spark in this process, which all tests of a worker share; started again if a test has ended it."""
    from pyspark import SparkContext

    if not _sparks or SparkContext._active_spark_context is not _sparks[-1].sparkContext:
        quick = {"spark.driver.extraJavaOptions": QUICK_JAVA}
        settings = load(Path(os.devnull), {"spark.conf": quick, "spark.driver_memory": "512m"})
        _sparks.append(begin_session(settings))
    return _sparks[-1]


def end_spark() -> None:
    if _sparks:
        end_session(_sparks.pop())
        _sparks.clear()


@pytest.fixture(scope="session")
def kafka(servers: SharedServers, quick_spark: None) -> EmbeddedKafka:
    """A broker; a Spark that reads it starts sooner."""
    return _single(servers, "kafka", EmbeddedKafka, 120)


@pytest.fixture(scope="session")
def cassandra_server(servers: SharedServers) -> EmbeddedCassandra:
    # Hundreds of tests leave a keyspace each, and the node keeps their tables in its heap.
    return _single(servers, "cassandra", partial(EmbeddedCassandra, memory="1536m"), 180)


@pytest.fixture
def store(valkey_server: EmbeddedValkey) -> StoreOptions:
    """A part of the shared Valkey."""
    return StoreOptions(valkey_server.url, prefix=unique_name())


@pytest.fixture(params=["single", "cluster", "redis"])
def any_store(request: pytest.FixtureRequest) -> StoreOptions:
    """A part of a single server, of a cluster of three nodes and of Redis."""
    if request.param == "single":
        url = request.getfixturevalue("valkey_server").url
    elif request.param == "cluster":
        url = request.getfixturevalue("valkey_cluster")[0].url
    else:
        url = request.getfixturevalue("redis_server").url
    return StoreOptions(url, prefix=unique_name())


def _keyspace(node: EmbeddedCassandra) -> Iterator[CassandraSettings]:
    options = CassandraSettings(port=node.port, keyspace=unique_name(), timeout=timedelta(seconds=30))
    schema.prepare(options)
    yield options
    disconnect(options)


@pytest.fixture
def rows_store(cassandra_server: EmbeddedCassandra) -> Iterator[CassandraSettings]:
    """A keyspace of the shared Cassandra, with its tables."""
    yield from _keyspace(cassandra_server)


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    """A Valkey of the test's own, to be killed and damaged."""
    server = EmbeddedValkey(tmp_path / "own-valkey")
    server.start(30)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def _own_cassandra(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCassandra]:
    node = EmbeddedCassandra(tmp_path_factory.mktemp("a folder & more"))
    yield node
    node.kill()


@pytest.fixture
def own_cassandra(_own_cassandra: EmbeddedCassandra) -> EmbeddedCassandra:
    """A Cassandra of the module's own, to be killed and stopped; the next test finds it started again."""
    _own_cassandra.start(180)
    return _own_cassandra


@pytest.fixture
def own_rows_store(own_cassandra: EmbeddedCassandra) -> Iterator[CassandraSettings]:
    """A keyspace of the module's own Cassandra, with its tables."""
    yield from _keyspace(own_cassandra)

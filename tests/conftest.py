"""Real parts for all tests: one Valkey, one three-node cluster, one Redis, one Kafka and one Cassandra for the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tailrace.config.load import load
from tailrace.embedded.cassandra import EmbeddedCassandra
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey, start_cluster
from tailrace.upkeep.spark import spark_for
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.rows import cassandra as schema
from tailrace.views.tags.rows.cassandra import CassandraOptions, disconnect
from tests.http.parts import NO_BROKER, Running, Serve, Streams
from tests.spark_classes import keep_spark_classes
from tests.upkeep.past import Past, settings_for
from tests.views.folds.holding import Holder
from tests.writing import Writer

_prefixes = count()


MEMORY = Path("/dev/shm")
"""Where Linux keeps files in memory: there, what a server must have on disk before it answers costs no time."""


def pytest_configure(config: pytest.Config) -> None:
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", type=int, default=8, help="how often a driver is ended; in each way once at least")
    parser.addoption("--groups", type=int, default=3_000, help="groups of folds that must leave nothing behind")
    parser.addoption("--subscribers", type=int, default=500, help="clients that follow one search at once")
    parser.addoption("--searches", type=int, default=100, help="searches that are followed at once")


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path_factory.mktemp("valkey"))
    server.start(30)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def valkey_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EmbeddedValkey]]:
    nodes = start_cluster(tmp_path_factory.mktemp("cluster"))
    yield nodes
    for node in nodes:
        node.stop()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    """A Redis with the settings of our Valkey."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("there is no redis-server on this machine; .ci/run says how to get one")
    server = EmbeddedValkey(tmp_path_factory.mktemp("redis"), binary=Path(found))
    server.start(30)
    try:
        with server.client() as client:
            version = str(client.info("server")["redis_version"])
        if int(version.split(".")[0]) < 7:
            pytest.skip(f"functions need Redis 7 or newer; {found} is {version}")
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def quick_spark(pytestconfig: pytest.Config) -> None:
    """Let every Spark that a test starts from now on start sooner; the first time this takes a while itself."""
    assert pytestconfig.cache is not None
    keep_spark_classes(pytestconfig.cache.mkdir("spark"))


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory, quick_spark: None) -> Iterator[EmbeddedKafka]:
    """A broker; whoever has Spark read it starts that sooner."""
    broker = EmbeddedKafka(tmp_path_factory.mktemp("kafka"))
    broker.start(90)
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def cassandra_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCassandra]:
    node = EmbeddedCassandra(tmp_path_factory.mktemp("cassandra"))
    node.start(180)
    yield node
    node.stop()


@pytest.fixture
def store(valkey_server: EmbeddedValkey) -> StoreOptions:
    """A part of the session's Valkey that no other test has seen."""
    return StoreOptions(valkey_server.url, prefix=f"t{next(_prefixes)}")


@pytest.fixture(params=["single", "cluster", "redis"])
def any_store(request: pytest.FixtureRequest) -> StoreOptions:
    """The same, on a single server, on a cluster of three nodes and on Redis."""
    if request.param == "single":
        url = request.getfixturevalue("valkey_server").url
    elif request.param == "cluster":
        url = request.getfixturevalue("valkey_cluster")[0].url
    else:
        url = request.getfixturevalue("redis_server").url
    return StoreOptions(url, prefix=f"t{next(_prefixes)}")


@pytest.fixture
def rows_store(cassandra_server: EmbeddedCassandra) -> Iterator[CassandraOptions]:
    """A keyspace of the session's Cassandra that no other test has seen, with its tables."""
    options = CassandraOptions(port=cassandra_server.port, keyspace=f"t{next(_prefixes)}", timeout_s=30.0)
    schema.prepare(options)
    yield options
    disconnect(options)


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    """A Valkey of the test's own, to be killed and damaged."""
    server = EmbeddedValkey(tmp_path / "own-valkey")
    server.start(30)
    yield server
    server.stop()


@pytest.fixture
def streams(store: StoreOptions) -> Iterator[Streams]:
    made = Streams(store)
    yield made
    made.close()


@pytest.fixture
def holder(store: StoreOptions) -> Iterator[Holder]:
    made = Holder(store)
    yield made
    made.close()


@pytest.fixture
def serve(store: StoreOptions, tmp_path: Path) -> Iterator[Serve]:
    """Start a service with these settings on top."""
    with ExitStack() as stack:

        def start(**flags: object) -> Running:
            empty = tmp_path / "tailrace.toml"
            empty.touch()
            given: dict[str, object] = {"valkey.url": store.url, "valkey.prefix": store.prefix}
            given["kafka.bootstrap"] = NO_BROKER
            running = Running(load(empty, given | {key.replace("__", "."): value for key, value in flags.items()}))
            stack.callback(running.stop)
            return running

        yield start


@pytest.fixture
def service(serve: Serve) -> Running:
    return serve()


@pytest.fixture
def client(service: Running) -> Iterator[httpx.Client]:
    with service.client() as made:
        yield made


@pytest.fixture
def broker_client(serve: Serve, kafka: EmbeddedKafka) -> Iterator[httpx.Client]:
    """A client of a service that has a broker."""
    with serve(kafka__bootstrap=kafka.address, kafka__new_topic_partitions=2).client() as made:
        yield made


@pytest.fixture(scope="module")
def spark(kafka: EmbeddedKafka) -> Iterator[Any]:
    with spark_for(settings_for(kafka.address, StoreOptions("valkey://127.0.0.1:1/0"), [])) as session:
        yield session


@pytest.fixture
def past(kafka: EmbeddedKafka, store: StoreOptions, spark: Any) -> Callable[..., Past]:
    """Makes a topic and its view; ``past(2, days__keep="7d")`` has two partitions and a setting of its own."""

    def make(partitions: int = 2, writer: Writer | None = None, **flags: object) -> Past:
        return Past(kafka.address, store, spark, partitions, writer, **flags)

    return make

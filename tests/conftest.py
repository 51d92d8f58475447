"""Fixtures that tests of several folders use; the servers are in ``tailrace.testing.fixtures``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tailrace.config.settings import load
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.testing.installation import NO_BROKER, ServiceThread
from tailrace.valkey.shards import StoreOptions
from tests.examples import use_share
from tests.http.parts import Serve, Streams
from tests.upkeep.past import Past
from tests.views.folds.holding import Holder
from tests.writing import Writer

pytest_plugins = ["tailrace.testing.fixtures"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", type=int, default=6, help="how often a driver is ended; in each way once at least")
    parser.addoption("--groups", type=int, default=3_000, help="groups of folds that must leave nothing behind")
    parser.addoption("--subscribers", type=int, default=500, help="clients that follow one search at once")
    parser.addoption("--examples", type=float, default=1.0, help="part of its random examples that a property is shown")
    parser.addoption("--searches", type=int, default=100, help="searches that are followed at once")


def pytest_configure(config: pytest.Config) -> None:
    use_share(config.getoption("--examples"))


JVM = {"kafka", "cassandra_server", "own_cassandra", "quick_spark", "spark", "spread"}
"""Fixtures that start one."""

LONGEST = (
    "faults/test_driver",
    "faults/test_folds",
    "faults/test_driver_rows",
    "embedded/test_end_to_end",
    "faults/test_parts",
    "views/tags/test_upkeep_cases",
    "views/tags/test_row_upkeep",
    "views/tags/test_load_cases",
    "views/tags/test_killed_node",
    "embedded/test_cassandra",
    "views/tags/test_lagging",
    "driver/test_job",
    "driver/test_cluster",
    "driver/test_partitions",
    "kafka/test_produce",
    "upkeep/test_process",
    "views/tags/test_upkeep",
    "upkeep/test_interleaving",
    "upkeep/test_rebuild",
    "views/folds/test_tuning",
    "query/test_oracle",
    "http/test_upkeep",
    "http/test_service",
    "embedded/test_supervisor",
    "http/test_feeds",
    "cli/test_doctor",
    "views/folds/test_fold",
    "views/tags/test_feed",
    "demo/test_cars",
)
"""Files that take longest. They come first, so that at the end no worker has one for itself while the others wait."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts a JVM, and put the longest files first."""
    for item in items:
        used, values = set(getattr(item, "fixturenames", ())), getattr(item, "callspec", None)
        if used & JVM or (
            values is not None and any(isinstance(v, str) and v == "cassandra" for v in values.params.values())
        ):
            item.add_marker("jvm")
    ranks = {f"tests/{name}.py": rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))


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

        def start(**flags: object) -> ServiceThread:
            empty = tmp_path / "tailrace.toml"
            empty.touch()
            given: dict[str, object] = {"valkey.url": store.url, "valkey.prefix": store.prefix}
            given["kafka.bootstrap"] = NO_BROKER
            running = ServiceThread(
                load(empty, given | {key.replace("__", "."): value for key, value in flags.items()})
            )
            stack.callback(running.stop)
            return running

        yield start


@pytest.fixture
def service(serve: Serve) -> ServiceThread:
    return serve()


@pytest.fixture
def client(service: ServiceThread) -> Iterator[httpx.Client]:
    with service.client() as made:
        yield made


@pytest.fixture
def broker_client(serve: Serve, kafka: EmbeddedKafka) -> Iterator[httpx.Client]:
    """A client of a service that has a broker."""
    with serve(kafka__bootstrap=kafka.address, kafka__new_topic_partitions=2).client() as made:
        yield made


@pytest.fixture
def past(kafka: EmbeddedKafka, store: StoreOptions, spark: Any) -> Callable[..., Past]:
    """Makes a topic and its view; ``past(2, days__keep="7d")`` has two partitions and a setting of its own."""

    def make(partitions: int = 2, writer: Writer | None = None, **flags: object) -> Past:
        return Past(kafka.address, store, spark, partitions, writer, **flags)

    return make

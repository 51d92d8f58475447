"""A service over the session's Valkey, with keys of its own for every test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tailrace.config.load import load
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.valkey.shards import StoreOptions
from tests.serving.holding import Holder
from tests.serving.parts import NO_BROKER, Running, Serve, Streams


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

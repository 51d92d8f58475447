"""Real parts for audits and rebuilds: a Spark that reads Kafka, one for each file of tests, and views made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.upkeep.spark import spark_for
from tailrace.valkey.shards import StoreOptions
from tests.upkeep.past import Past, settings_for
from tests.writing import Writer


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

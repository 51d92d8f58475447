"""A site of its own for every test."""

from __future__ import annotations

import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.stores.valkey import StoreOptions
from tests.grep.site import Site


@pytest.fixture
def site(kafka: EmbeddedKafka, store: StoreOptions) -> Site:
    return Site(kafka.address, store)

"""A site of its own for every test, or a store with nothing but the functions in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.valkey.shards import Nodes, Shards, StoreOptions, prepare
from tests.views.grep.site import Site


@pytest.fixture
def site(kafka: EmbeddedKafka, store: StoreOptions) -> Site:
    return Site(kafka.address, store)


@pytest.fixture
def shards(any_store: StoreOptions) -> Iterator[Shards]:
    """A store, as the pipeline sees it."""
    opened = Shards(any_store).open()
    prepare(opened)
    yield opened
    opened.close()


@pytest.fixture
async def nodes(shards: Shards) -> AsyncIterator[Nodes]:
    """The same store, as the service sees it."""
    opened = await Nodes(shards.options).open()
    yield opened
    await opened.close()

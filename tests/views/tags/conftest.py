"""Fixtures of the tests of tags: stores with writer and readers, and a bare writer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.settings import CassandraSettings
from tests.views.tags.cases import World
from tests.views.tags.tagged import Tagger


@pytest.fixture(params=["valkey", "cassandra"])
def world(request: pytest.FixtureRequest, store: StoreOptions) -> Iterator[World]:
    """Either store, written by the pipeline."""
    made = World(store, request.getfixturevalue("rows_store") if request.param == "cassandra" else None)
    yield made
    made.close()


@pytest.fixture
def theirs(store: StoreOptions, rows_store: CassandraSettings) -> Iterator[World]:
    """Rows alone, which somebody else may write: without marks, so that only numbers say what is missing."""
    made = World(store, rows_store)
    yield made
    made.close()


@pytest.fixture
def tagger(store: StoreOptions) -> Iterator[Tagger]:
    """A writer of tagged events into Valkey."""
    made = Tagger(store)
    yield made
    made.close()

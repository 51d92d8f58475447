"""The first offsets of a view that begins at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tailrace.config.settings import Settings
from tailrace.driver.hooks import Start, begin_at_end
from tailrace.log.event import Partition
from tailrace.valkey.marks import lowest, read_marks
from tailrace.valkey.shards import Shards, StoreOptions, enlist, prepare

VIEW = "sessions"


@pytest.fixture
def shards(store: StoreOptions) -> Iterator[Shards]:
    found = Shards(store).open()
    prepare(found)
    yield found
    found.close()


def test_what_topics_have_when_it_first_begins_is_passed_over(shards: Shards) -> None:
    start = Start(Settings(), shards, enlist(shards, [VIEW]))
    begin_at_end(start, VIEW, {"laps": 0, "rigs": 1}, {("laps", 0): (0, 3), ("rigs", 0): (0, 0)})
    assert lowest(read_marks(shards, VIEW)) == {Partition("laps", 0, 0): 2}


def test_what_comes_to_an_empty_kafka_before_it_begins_again_is_read(shards: Shards) -> None:
    begin_at_end(Start(Settings(), shards, enlist(shards, [VIEW])), VIEW, {}, {})
    begin_at_end(Start(Settings(), shards, enlist(shards, [VIEW])), VIEW, {"laps": 0}, {("laps", 0): (0, 3)})
    assert lowest(read_marks(shards, VIEW)) == {}

"""Behaviour cases of upkeep (K), and those of recovery that are a rebuild here: in both stores, beside a real Kafka.

The journal is the topic, so to repair tags is to make them again from it; and an old layout is history that was not
tagged, or not yet.
"""

# ruff: noqa: N802 cases have their ids in the names of their tests

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tailrace.config.values import Where
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.kafka.broker import Broker
from tailrace.log.hub import Hub
from tailrace.log.store import Logs
from tailrace.upkeep.job import look_once, run_job
from tailrace.valkey.shards import Nodes, StoreOptions
from tailrace.views.tags.feed import open_store
from tailrace.views.tags.rows import store as tag_rows
from tailrace.views.tags.rows.cassandra import connected
from tailrace.views.tags.settings import CassandraSettings, TagRules
from tailrace.views.tags.store import VIEW
from tailrace.views.tags.upkeep import erasing
from tests.log.rig import now_ms
from tests.upkeep.past import HOUR, Keeper, RowPast, Seen, TagPast
from tests.views.tags.stored import Stored

Make = Callable[..., TagPast]


@pytest.fixture(params=["valkey", "cassandra"])
def in_rows(request: pytest.FixtureRequest) -> CassandraSettings | None:
    """Options of Cassandra; None if events rest in Valkey."""
    return request.getfixturevalue("rows_store") if request.param == "cassandra" else None


@pytest.fixture
def past(kafka: EmbeddedKafka, store: StoreOptions, in_rows: CassandraSettings | None) -> Make:
    """Makes a topic and its tags, which are at the path ``tags``."""

    def make(spark: Any = None, partitions: int = 1) -> TagPast:
        if in_rows is not None:
            return RowPast(kafka.address, store, in_rows, spark, partitions)
        return TagPast(kafka.address, store, spark, partitions, None, tags__paths=["tags"])

    return make


def clean(here: TagPast, source: str, tag: str | None = None, dry_run: bool = False) -> dict[str, int]:
    """Take a source out; return how many events of it each tag had."""
    work = erasing(here.settings, source, tag)
    if dry_run:
        look_once(here.settings, work)
    else:
        run_job(here.settings, work)
    return {each.tag: each.events for each in work.erased}


def truncate(here: TagPast) -> None:
    """Lose all that tags hold; numbers and marks stay."""
    if isinstance(here, RowPast):
        connection = connected(here.options)
        for table in ("tag_views", "tag_buckets"):
            connection.execute(connection.text(f"TRUNCATE $keyspace.{table}"))
        tag_rows._writers.clear()  # whoever recovers is another process, and knows nothing of buckets
        return
    for named in list(here.registry.walk()):
        segments = [here.segment_key(named.name, at)[1] for at in range(len(named.log.segments))]
        client = here.client(named.name)
        client.delete(here.log_key(named.name), *segments)
        client.zrem(here.names_key(named.name), named.name)


def of(events: list[Seen], *pids: str) -> list[Seen]:
    """Return the events of some sources, one after the other."""
    return [each for pid in pids for each in events if each.source == pid]


def bounds(here: TagPast) -> dict[Any, Any]:
    """Return where Kafka's partitions begin and end."""
    broker = Broker(here.settings)
    return broker.bounds([broker.topics()[here.topic]])


# Cleanup.


def test_K_02_the_tagged_events_of_one_source_vanish_and_those_of_others_and_the_topic_stay(past: Make) -> None:
    here = past()
    here.put([here.event(pid, "red", at=i) for i in range(10) for pid in ("p", "q")])
    before, journal = here.events("red"), bounds(here)
    assert clean(here, "p") == {"red": 10}
    assert here.events("red") == of(before, "q")
    assert bounds(here) == journal
    here.put([here.event("p", "red", at=HOUR)])
    assert here.numbers("red") == {"q": list(range(1, 11)), "p": [11]}


def test_K_03_several_sources_are_erased_from_all_their_tags_and_it_is_told_how_it_goes(
    past: Make, caplog: pytest.LogCaptureFixture
) -> None:
    here = past(partitions=2)
    pids = [f"p{i}" for i in range(6)]
    here.put([here.event(pid, "red", f"own-{pid}", at=i) for i in range(10) for pid in pids], at_once=60)
    with caplog.at_level(logging.INFO):
        for pid in pids[:4]:
            assert clean(here, pid) == {"red": 10, f"own-{pid}": 10}
    assert here.numbers("red") == {pid: list(range(1, 11)) for pid in pids[4:]}
    assert [len(here.events(f"own-{pid}")) for pid in pids] == [0, 0, 0, 0, 10, 10]
    assert sum("erased" in record.message for record in caplog.records) == 8


def test_K_05_a_dry_run_takes_nothing_out_and_says_of_each_tag_what_it_would(
    past: Make, caplog: pytest.LogCaptureFixture
) -> None:
    here = past()
    here.put([here.event(pid, "red", "blue", at=i) for i in range(5) for pid in ("p", "q")])
    before = here.events("red"), here.events("blue")
    with caplog.at_level(logging.INFO):
        assert clean(here, "p", dry_run=True) == {"red": 5, "blue": 5}
    assert sum("would be erased" in record.message for record in caplog.records) == 2
    assert (here.events("red"), here.events("blue")) == before


def test_K_06_what_was_erased_or_lost_is_made_again_as_it_was_and_each_time(past: Make, spark: Any) -> None:
    here = past(spark)
    here.put([here.event(pid, "red", at=i * 1_000) for i in range(10) for pid in ("p", "q", "r")], at_once=30)
    before = here.events("red")
    clean(here, "q")
    for _ in range(2):
        clean(here, "p")
        assert here.rebuild(source="p")["rebuilt"] == 1
        assert of(here.events("red"), "p", "q", "r") == of(before, "p", "r"), "only the one that was asked for"
    truncate(here)
    here.rebuild(source="q")
    assert of(here.events("red"), "p", "q", "r") == of(before, "p", "q", "r")


def test_R_03_what_was_lost_before_and_after_it_was_packed_is_made_again_and_numbered_on(
    past: Make, spark: Any
) -> None:
    here = past(spark)
    here.put([here.event("p", "red", "blue", at=i * 1_000) for i in range(4)])
    if not isinstance(here, RowPast):
        with Keeper(here.store, view=VIEW) as keeper:
            assert keeper.pack().segments == 2
    here.put([here.event("p", "red", "blue", at=HOUR + i * 1_000) for i in range(4)])
    before = here.events("red"), here.events("blue")
    truncate(here)
    assert here.events("red") == []
    here.writer = here.begin()
    assert here.rebuild()["rebuilt"] == 2
    assert (here.events("red"), here.events("blue")) == before
    here.put([here.event("p", "red", "blue", at=2 * HOUR + i * 1_000) for i in range(4)])
    assert here.numbers("red") == here.numbers("blue") == {"p": list(range(1, 13))}
    assert here.audit().clean


# Replays, listings, history.


def test_K_07_writing_on_changes_nothing_where_all_is_written_and_writes_all_where_nothing_is_known(
    store: StoreOptions, in_rows: CassandraSettings | None
) -> None:
    stored = Stored(store, in_rows)
    records = [stored.event(f"p{i % 3}", "red", *(["blue"] if i % 2 else []), at=i * 60_000) for i in range(90)]
    stored.driver.write(records)
    before = stored.held()
    for _ in range(2):
        stored.begin().write(records)
        assert stored.held() == before
    # Marks and numbers are lost with the store that they are in; rows in another are written over with the same.
    other = Stored(msgspec.structs.replace(store, prefix=f"{store.prefix}new"), in_rows)
    other.driver.write(records)
    assert other.held() == before
    other.check(records)
    for each in (stored, other):
        each.close()


def test_K_08_all_tags_are_those_ever_used_and_a_sources_are_only_its_own(past: Make) -> None:
    here = past()
    here.put([here.event("p", "red", "blue"), here.event("q", "blue", "gold"), here.event("r"), here.event("p", "red")])

    async def listed() -> list[str]:
        nodes = await Nodes(here.store).open()
        logs = Logs(nodes, VIEW)
        tags = open_store(here.settings, nodes, Hub(nodes, logs), logs, now_ms)
        try:
            return [held.tag for held in await tags.tags("", "", 10)]
        finally:
            await tags.close()
            await nodes.close()

    assert asyncio.run(listed()) == ["blue", "gold", "red"]
    assert clean(here, "p", dry_run=True) == {"red": 2, "blue": 1}
    assert clean(here, "q", dry_run=True) == {"blue": 1, "gold": 1}


def test_K_10_history_gets_tags_that_it_did_not_have_once_only_those_asked_for_and_also_without_its_beginning(
    past: Make, spark: Any
) -> None:
    here = past(spark)
    here.put([here.event(pid, "old", at=i * 1_000, n=i) for i in range(10) for pid in ("p", "q")])
    here.forget(0, 10)
    rules = {"big": Where({"n": {"$gte": 3}}), "even": Where({"n": {"$mod": [2, 0]}})}
    here.restart(rules=TagRules(rules), paths=())
    here.put([here.event("p", at=HOUR, n=10), here.event("q", at=HOUR, n=1)])
    assert here.numbers("big") == {"p": [1]}
    assert here.rebuild("big")["rebuilt"] == 1
    # The first five of each are no longer there; the rest have numbers up to the last assigned ones.
    assert here.numbers("big") == {"p": [-4, -3, -2, -1, 0, 1], "q": [-4, -3, -2, -1, 0]}
    assert here.numbers("even") == {"p": [1]}
    before = here.events("big")
    assert here.rebuild("big")["rebuilt"] == 0
    assert here.rebuild("even")["rebuilt"] == 1
    assert here.numbers("even") == {"p": [-1, 0, 1], "q": [-1, 0]}
    assert here.events("big") == before
    here.put([here.event("q", at=2 * HOUR, n=12)])
    assert here.numbers("big")["q"] == [-4, -3, -2, -1, 0, 1]

"""Tags in a Cassandra that is killed or stopped for a while: writers repeat, readers go on, nothing is lost."""

# ruff: noqa: N802 cases have their ids in the names of their tests

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import aclosing
from datetime import timedelta

import pytest

from tailrace.embedded.cassandra import EmbeddedCassandra
from tailrace.errors import StoreUnavailable
from tailrace.testing.fixtures import unique_name
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.rows import cassandra as schema
from tailrace.views.tags.rows.cassandra import CassandraConnection, disconnect
from tailrace.views.tags.rows.store import RowReader, RowWriter
from tailrace.views.tags.settings import CassandraSettings
from tests.views.tags.reading import Follower, reading
from tests.views.tags.rows import Rows
from tests.views.tags.stored import Stored
from tests.views.tags.test_rows import ALL, NOON, all_of, row
from tests.writing import Record, Writer


def fails(task: Writer, records: Sequence[Record]) -> bool:
    """Return True if Cassandra is not there to take records."""
    try:
        task.write(records)
    except StoreUnavailable:
        return True
    return False


def persist(task: Writer, records: Sequence[Record]) -> None:
    """Write until it succeeds, as Spark and the driver do."""
    deadline = time.monotonic() + 60
    while fails(task, records):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_W_24_a_write_that_fails_is_repeated_until_the_killed_node_is_back_and_nothing_is_lost_or_doubled(
    store: StoreOptions, own_rows_store: CassandraSettings, own_cassandra: EmbeddedCassandra
) -> None:
    stored = Stored(store, own_rows_store, batch=10)
    stored.driver.write(stored.events("p1", "red", 50))
    batch: list[Record] = []
    killer = threading.Timer(0.05, own_cassandra.kill)
    killer.start()
    try:
        while not fails(stored.driver, batch):
            batch = [stored.event(f"p{i % 7}", "red", "blue", at=i) for i in range(500)]
        assert fails(stored.driver, batch)
        assert fails(stored.driver.another_task(), batch)
    finally:
        killer.join()
        own_cassandra.start(180)
    persist(stored.driver, batch)
    stored.driver.write([stored.event(f"p{i % 7}", "red", "blue", at=i) for i in range(20)])
    stored.check()
    stored.close()


def test_W_24_a_write_that_was_given_up_and_comes_through_later_changes_nothing(
    store: StoreOptions, own_rows_store: CassandraSettings, own_cassandra: EmbeddedCassandra
) -> None:
    impatient = own_rows_store.model_copy(update={"timeout": timedelta(seconds=1.5)})
    stored = Stored(store, impatient, batch=5)
    stored.driver.write(stored.events("p1", "red", 5))
    batch = stored.events("p1", "red", 20)
    os.kill(own_cassandra.pid or 0, signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable):
            stored.driver.write(batch)
    finally:
        os.kill(own_cassandra.pid or 0, signal.SIGCONT)
    assert stored.mark("red") == 4
    persist(stored.driver.another_task(), batch)
    stored.check()
    stored.close()
    disconnect(impatient)


async def test_a_feed_outlives_its_store_and_loses_and_repeats_nothing(
    store: StoreOptions, own_rows_store: CassandraSettings, own_cassandra: EmbeddedCassandra
) -> None:
    rows = Rows(store, own_rows_store)
    async with reading(store, own_rows_store) as read:
        follower = Follower(await read.open("green", start="start"))
        rows.write("a", ["green"], 3)
        await follower.until(3)
        await asyncio.to_thread(own_cassandra.kill)
        await asyncio.sleep(2)
        own_cassandra.start(180)  # here: the node ends with the thread that started it
        await asyncio.to_thread(rows.write, "a", ["green"], 3)
        assert await follower.until(6, 60) == [f"a:{n}" for n in range(1, 7)]
        await follower.close()
    rows.close()


async def test_reader_and_writer_go_on_after_the_node_was_killed(own_cassandra: EmbeddedCassandra) -> None:
    node = own_cassandra
    options = CassandraSettings(port=node.port, keyspace=unique_name(), timeout=timedelta(seconds=10))
    with pytest.raises(StoreUnavailable, match="no pipeline has prepared cassandra yet"):
        await RowReader(options).open()
    schema.prepare(options)
    reader, out = RowReader(options), RowWriter(CassandraConnection(options).open())
    rows = [row(NOON + i, i) for i in range(3_000)]
    out.write(rows[:1_000])
    assert await all_of(reader.rows("green", *ALL)) == rows[:1_000]
    reader.page = 10
    async with aclosing(reader.rows("green", *ALL)) as pages:
        await anext(pages)
        node.kill()
        with pytest.raises(StoreUnavailable, match="cassandra does not answer"):
            await all_of(pages)
    with pytest.raises(StoreUnavailable):
        out.write(rows[1_000:2_000])
    with pytest.raises(StoreUnavailable):
        await reader.buckets("green")
    node.start(180)
    for attempt in range(30):
        try:
            out.write(rows[1_000:])
            assert await all_of(reader.rows("green", *ALL)) == rows
            break
        except StoreUnavailable:
            assert attempt < 29
            await asyncio.sleep(1)
    await reader.close()
    node.kill()
    with pytest.raises(StoreUnavailable, match=r"cassandra does not answer: .*cassandra\.hosts"):
        await RowReader(options).open()

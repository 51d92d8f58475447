"""The store changes under its writers: what they believed of it is checked before anything is written on top."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.errors import StaleDriver, StoreChanged, StoreError, StoreUnavailable
from tailrace.log.event import Partition
from tailrace.valkey.marks import advance
from tailrace.valkey.shards import StoreOptions, fence
from tests.writing import VIEWS, Record, Writer, read_view

NAMES = [f"name-{i}".encode() for i in range(40)]


def _records(first: int, count: int) -> list[Record]:
    return [Record(offset=first + i, key=NAMES[i % len(NAMES)]) for i in range(count)]


def _stored(options: StoreOptions) -> int:
    return sum(map(len, asyncio.run(read_view(options)).values()))


def test_a_task_does_not_write_to_a_server_that_was_restarted(own_valkey: EmbeddedValkey) -> None:
    options = StoreOptions(own_valkey.url)
    writer = Writer(options)
    writer.write(_records(0, 100))
    own_valkey.kill()
    own_valkey.start(30)
    with pytest.raises((StoreChanged, StoreUnavailable)):
        writer.write(_records(100, 100))
    with pytest.raises(StoreChanged, match="restarted"):
        writer.another_task().write(_records(100, 100))
    assert _stored(options) == 100
    successor = Writer(options)
    assert min(successor.epochs.values()) > max(writer.epochs.values())
    successor.write(_records(0, 200))
    assert _stored(options) == 200


def test_a_task_does_not_write_to_a_node_that_took_over_from_another(valkey_cluster: list[EmbeddedValkey]) -> None:
    options = StoreOptions(valkey_cluster[0].url, prefix="taken-over")
    writer = Writer(options)
    entry = valkey_cluster[0].address
    known = {where: run_id for where, run_id in writer.plan.run_ids.items() if where == entry}
    assert len(known) < len(writer.plan.run_ids)
    task = Writer(options, run_ids=known)
    with pytest.raises(StoreChanged, match="no process that we knew"):
        task.write(_records(0, 100))


def test_a_store_that_was_emptied_under_its_writers_is_not_written_on(own_valkey: EmbeddedValkey) -> None:
    options = StoreOptions(own_valkey.url)
    writer = Writer(options)
    writer.write(_records(0, 100))
    with own_valkey.client() as client:
        client.flushall()
    with pytest.raises(StoreError, match="emptied"):
        writer.write(_records(100, 100))
    with pytest.raises(StoreError, match="emptied"):
        advance(writer.shards, "days", writer.epoch, {Partition("jobs", 0): 199})
    Writer(options).write(_records(0, 200))
    assert _stored(options) == 200


def test_a_full_store_is_an_outage_that_says_nothing_of_the_data(own_valkey: EmbeddedValkey) -> None:
    options = StoreOptions(own_valkey.url)
    writer = Writer(options)
    with own_valkey.client() as client:
        client.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailable, match="maxmemory") as refused:
            writer.write([Record(offset=0, key=b"secret-name")])
        client.config_set("maxmemory", "0")
    assert "secret-name" not in str(refused.value)
    assert len(str(refused.value)) < 300
    writer.another_task().write([Record(offset=0)])
    assert _stored(options) == 1


def test_a_driver_that_was_overtaken_does_not_get_its_views_back(any_store: StoreOptions) -> None:
    overtaken, owner = Writer(any_store), Writer(any_store)
    with pytest.raises(StaleDriver, match=str(owner.epoch)):
        fence(overtaken.shards, VIEWS, overtaken.epoch)
    fence(owner.shards, VIEWS, owner.epoch)

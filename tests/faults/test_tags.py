"""Tags while the pipeline is killed: per tag and source every event once, in order, numbered without a gap."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.embedded.cassandra import EmbeddedCassandra
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.model.stamp import first_of, last_of
from tailrace.stores.cassandra import CassandraOptions
from tailrace.stores.marks import conserved
from tailrace.stores.row_reader import RowReader
from tests.faults.rig import Installation, Load, Pipeline, wait_for
from tests.tags.test_view import read_tags

RULES = {"all": {"n": {"$gte": 0}}, "third": {"n": {"$mod": [3, 0]}}, "long": {"pad": {"$regex": "x{100}"}}}
SETTINGS = {"tags__rules": json.dumps(RULES), "tags__source": '["who"]', "tags__bucket": "minute"}

Events = list[dict[str, Any]]


def _numbered(events: Events) -> None:
    """Check that each source's events have the numbers 1, 2, 3 in the order of their offsets."""
    numbers, offsets = dict[str, int](), dict[str, int]()
    for event in events:
        pid = event["source"]
        assert event["tag_seq"] == numbers.get(pid, 0) + 1, f"{pid}: {event['tag_seq']} after {numbers.get(pid, 0)}"
        assert event["offset"] > offsets.get(pid, -1)
        numbers[pid], offsets[pid] = event["tag_seq"], event["offset"]


def _killed_at_random(
    installation: Installation, kills: int, read: Callable[[], dict[str, Events]], **more: str
) -> None:
    chance = random.Random(time.time_ns())
    with Load(installation, installation.topic("carts")) as load:
        for i in range(kills):
            before = installation.counts("tags").get("stored", 0)
            pipeline = Pipeline(installation, f"pipeline-{i}", **SETTINGS, **more).start(wait=False)
            wait_for("its writes", lambda: installation.counts("tags").get("stored", 0) > before)  # noqa: B023
            time.sleep(chance.uniform(0, 1.5))
            pipeline.kill()
        with Pipeline(installation, "pipeline-last", **SETTINGS, **more):
            load.wait_more(100)
            load.finish()
            installation.check()

            def balanced() -> bool:
                counts = installation.counts("tags")
                return conserved(counts) == 0 and counts.get("events", 0) == load.total

            wait_for("the books of tags to balance", balanced)
    ids = {event for name in load.acknowledged.values() for event in name}
    found = read()
    assert {event["id"] for event in found["all"]} == ids
    for events in found.values():
        assert len({event["id"] for event in events}) == len(events)
        _numbered(events)
    thirds = {event["id"] for event in found["all"] if event["n"] % 3 == 0}
    assert {event["id"] for event in found["third"]} == thirds


@pytest.mark.timeout(900)
def test_a_driver_killed_while_it_tags_makes_no_gap_and_no_double(
    kafka: EmbeddedKafka, valkey_server: EmbeddedValkey, tmp_path: Path
) -> None:
    installation = Installation(kafka, valkey_server.url, tmp_path)

    def read() -> dict[str, Events]:
        found = asyncio.run(read_tags(installation.store))
        return {tag: [{**event, "n": event["data"]["n"]} for event in events] for tag, events in found.items()}

    _killed_at_random(installation, 2, read)


@pytest.mark.timeout(900)
def test_a_driver_killed_between_rows_and_mark_leaves_the_rows_that_it_would_have_written(
    kafka: EmbeddedKafka, valkey_server: EmbeddedValkey, cassandra_server: EmbeddedCassandra, tmp_path: Path
) -> None:
    installation = Installation(kafka, valkey_server.url, tmp_path)
    options = CassandraOptions(("127.0.0.1",), cassandra_server.port, keyspace=installation.prefix)
    more = {
        "tags__store": "cassandra",
        "cassandra__port": str(cassandra_server.port),
        "cassandra__keyspace": installation.prefix,
    }

    async def rows() -> dict[str, Events]:
        reader = await RowReader(options).open()
        try:
            found: dict[str, Events] = {}
            for tag in await reader.tags():
                async for page in reader.rows(tag, first_of(0), last_of(1 << 42)):
                    found.setdefault(tag, []).extend(
                        {
                            "id": f"{row.place}:{row.offset}",
                            "source": row.pid,
                            "tag_seq": row.tag_seq,
                            "offset": row.offset,
                            "n": json.loads(row.value or b"{}")["n"],
                        }
                        for row in page
                    )
            return found
        finally:
            await reader.close()

    _killed_at_random(installation, 2, lambda: asyncio.run(rows()), **more)

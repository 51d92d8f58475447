"""The tags of a load's events: per tag and source every event once, in order, numbered without a gap."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tailrace.log.event import Partition
from tailrace.log.name import shard_of
from tailrace.log.timeuuid import first_of, last_of
from tailrace.valkey.marks import conserved, read_marks
from tailrace.views.tags.rows.cassandra import CassandraConnection, CassandraOptions
from tailrace.views.tags.rows.reader import RowReader
from tests.faults.rig import Installation, Load, wait_for
from tests.views.tags.test_view import read_tags

RULES = {"all": {"n": {"$gte": 0}}, "third": {"n": {"$mod": [3, 0]}}, "long": {"pad": {"$regex": "x{100}"}}}

_BUCKETS = "SELECT start FROM $keyspace.tag_buckets WHERE tag_name = 'all'"
_NEWEST = (
    "SELECT topic, partition, offset FROM $keyspace.tag_views WHERE tag_name = 'all' AND timebucket = %s "
    "ORDER BY timestamp DESC LIMIT 20"
)

Events = list[dict[str, Any]]


class Tagged:
    """Events of a topic in three tags, whose rows rest in Cassandra if there is one."""

    def __init__(self, installation: Installation, topic: str, rows: CassandraOptions | None) -> None:
        self._installation, self._rows = installation, rows
        self.settings = {
            "tags__rules": json.dumps(RULES),
            "tags__topics": json.dumps([topic]),
            "tags__source": '["who"]',
            "tags__bucket": "minute",
        }
        if rows is not None:
            self._connection = CassandraConnection(rows)
            self.settings |= {
                "tags__store": "cassandra",
                "cassandra__port": str(rows.port),
                "cassandra__keyspace": rows.keyspace,
            }

    def rows_are_ahead(self) -> bool:
        """Whether there are rows now whose shard has not been told of them."""
        ask = self._connection
        marks = read_marks(self._installation.shards(), "tags")[shard_of("all", self._installation.store.shards)]
        buckets = [start for (start,) in ask.execute(ask.text(_BUCKETS))]
        newest = ask.execute(ask.text(_NEWEST), (max(buckets),)) if buckets else []
        return any(offset > marks.get(Partition(topic, partition), -1) for topic, partition, offset in newest)

    def check(self, load: Load) -> None:
        """Wait until the books balance; then compare what the tags hold with what Kafka acknowledged."""

        def balanced() -> bool:
            counts = self._installation.counts("tags")
            return conserved(counts) == 0 and counts.get("events", 0) == load.total

        wait_for("the books of tags to balance", balanced)
        found = asyncio.run(_in_valkey(self._installation) if self._rows is None else _in_cassandra(self._rows))
        ids = {event for name in load.acknowledged.values() for event in name}
        assert {event["id"] for event in found["all"]} == ids
        for events in found.values():
            assert len({event["id"] for event in events}) == len(events)
            _numbered(events)
        thirds = {event["id"] for event in found["all"] if event["n"] % 3 == 0}
        assert {event["id"] for event in found["third"]} == thirds

    def close(self) -> None:
        """Let go of Cassandra."""
        if self._rows is not None:
            self._connection.close()


def _numbered(events: Events) -> None:
    """Check that each source's events have the numbers 1, 2, 3 in the order of their offsets."""
    numbers, offsets = dict[str, int](), dict[str, int]()
    for event in events:
        pid = event["source"]
        assert event["tag_seq"] == numbers.get(pid, 0) + 1, f"{pid}: {event['tag_seq']} after {numbers.get(pid, 0)}"
        assert event["offset"] > offsets.get(pid, -1)
        numbers[pid], offsets[pid] = event["tag_seq"], event["offset"]


async def _in_valkey(installation: Installation) -> dict[str, Events]:
    found = await read_tags(installation.store)
    return {tag: [{**event, "n": event["data"]["n"]} for event in events] for tag, events in found.items()}


async def _in_cassandra(options: CassandraOptions) -> dict[str, Events]:
    reader = await RowReader(options).open()
    try:
        found: dict[str, Events] = {}
        for tag in await reader.tags():
            async for page in reader.rows(tag, first_of(0), last_of(1 << 42)):
                found.setdefault(tag, []).extend(
                    {
                        "id": f"{row.partition}:{row.offset}",
                        "source": row.source,
                        "tag_seq": row.tag_seq,
                        "offset": row.offset,
                        "n": json.loads(row.value or b"{}")["n"],
                    }
                    for row in page
                )
        return found
    finally:
        await reader.close()

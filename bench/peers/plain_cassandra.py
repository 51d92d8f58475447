"""Tags in Cassandra with a plain loop: one prepared insert per event and tag, each waited for.

It writes the same columns as Tailrace's table. It has no marks and no numbers that outlive it, and repeats on restart.
It stops after so many events as it is told, since it is slow.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter

from cassandra import ConsistencyLevel
from cassandra.cluster import Cluster

from bench.peers.bare import opened
from bench.peers.task import Watch, given

INSERT = """
INSERT INTO plain.tag_views (tag_name, timebucket, timestamp, persistence_id, tag_pid_sequence_nr, sequence_nr, topic,
  generation, partition, offset, time, key, value, tags) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
HOUR_MS = 3_600_000


def main() -> None:
    task, watch = given(), Watch()
    consumer = opened(task.bootstrap, task.topic, "plain-cassandra")
    cluster = Cluster(["127.0.0.1"], port=int(task.url))
    session = cluster.connect()
    insert = session.prepare(INSERT)
    insert.consistency_level = ConsistencyLevel.QUORUM
    numbers: Counter[tuple[str, str]] = Counter()
    paths = task.way.split(",")
    watch.begin()
    while watch.events < task.events:
        messages = consumer.consume(min(100, task.events - watch.events), timeout=5.0)
        for message in messages:
            value, source, time_ms = message.value() or b"", (message.key() or b"").decode(), message.timestamp()[1]
            event = json.loads(value)
            tags = [event[path] for path in paths]
            for tag in tags:
                numbers[tag, source] += 1
                key = tag, time_ms // HOUR_MS * HOUR_MS, uuid.uuid1(), source, numbers[tag, source]
                place = message.offset(), task.topic, 0, message.partition(), message.offset()
                session.execute(insert, (*key, *place, time_ms, message.key(), value, tags))
        watch.batch(len(messages), 0)
    watch.end()
    watch.tell(copies=numbers.total())
    consumer.close()
    cluster.shutdown()


if __name__ == "__main__":
    main()

"""Cost of tags: written by the pipeline into Valkey and into Cassandra, and read; beside a plain loop, in one run.

    write        the pipeline: Spark reads a topic, and every event goes to its tags, numbered; rows rest in Valkey
                 (appendfsync always) or in one node of Cassandra (commitlog_sync batch). `nothing` is the bare read of
                 the topic by Spark, without Python. `plain` is a Python consumer that does one insert per event and tag
                 with a prepared statement and waits for it: no numbers that outlive it, no marks, repeats on restart
    catch-up     all events of one tag, from the start, by a feed in this process, as the service opens it
    visible      from produced to received, 200 events/s through a live pipeline, by a feed in this process; for
                 Cassandra with several delays. `over ms` is what p99 has beyond the delay
    start        from nothing to the first event, and to the last, of a tag with ten years of buckets of an hour; with
                 the queries that it took. `asking` is what a reader without a registry of buckets does: it asks each

`events/s` are events, `copies/s` events times their tags. Each figure is the best of several runs over the same events,
which have about 330 bytes. CPU seconds are per million events, of all processes together: Spark, its Python workers or
the consumer, the broker, Valkey and Cassandra. `x plain` and `of nothing` are ratios within this run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from cassandra import ConsistencyLevel
from cassandra.cluster import Cluster
from confluent_kafka import Consumer, TopicPartition

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.ingest import Spark, nothing, produce
from bench.meter import cpu_seconds, report
from bench.servers import cassandra, plans_of, servers
from bench.tag_feeds import catch_up, given, start_from_nothing, visible
from tailrace.config.settings import Settings
from tailrace.driver.slice import Plan, make_plan
from tailrace.embedded.cassandra import EmbeddedCassandra
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.valkey.shards import Shards, StoreOptions, enlist, prepare
from tailrace.views.tags.rows.cassandra import CassandraConnection
from tailrace.views.tags.rows.cassandra import prepare as prepare_tables
from tailrace.views.tags.settings import CassandraSettings
from tailrace.views.tags.store import VIEW

Row: TypeAlias = dict[str, Any]

PATHS = ("cluster", "queue", "type")
"""Paths of the tags in events: three, seven and five different ones."""
PARTITIONS = 4
STORES = ("valkey", "cassandra")
KEYSPACE = "written"
TITLES = {
    "write": "Kafka to tags, events of about 330 bytes",
    "catch-up": "One tag from its start, by a feed in this process",
    "visible": "Produced to received by a feed in this process",
    "start": "From nothing to the first event of a tag",
}
READ = "cluster-0"
"""The tag that is read: of a third of all events."""

_INSERT = """
INSERT INTO plain.tag_views (tag_name, timebucket, timestamp, persistence_id, tag_pid_sequence_nr, sequence_nr, topic,
  generation, partition, offset, time, key, value, tags) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_HOUR_MS = 3_600_000

_runs = count()


class Bench(Spark):
    """The servers, a Spark that writes tags, and what was measured."""

    def __init__(
        self,
        options: argparse.Namespace,
        kafka: EmbeddedKafka,
        store: EmbeddedValkey,
        node: EmbeddedCassandra | None,
        folder: Path,
    ) -> None:
        super().__init__(kafka.address, store.url)
        self.options, self.kafka, self.store, self.node = options, kafka, store, node
        self.rows: list[Row] = []
        self.written: Settings = self.settings
        """Those of the last run."""
        self._way = "valkey", 1
        self._filled: set[str] = set()

    def tell(self, row: Row) -> None:
        """Note a row."""
        self.rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)

    def flags(self, store: str) -> Row:
        """Return settings whose keys are nobody else's."""
        flags: Row = {
            "kafka.bootstrap": self.kafka.address,
            "valkey.url": self.store.url,
            "valkey.prefix": f"tags{next(_runs)}",
            "pipeline.views": [VIEW],
            "tags.store": store,
        }
        if self.node is not None:
            flags |= {"cassandra.port": self.node.port, "cassandra.keyspace": KEYSPACE}
        return flags

    def _plan(self) -> tuple[Plan, Shards]:
        store, tags = self._way
        settings = self.written = given(self.flags(store) | {"tags.paths": PATHS[:tags]})
        shards = Shards(StoreOptions.of(settings.valkey)).open()
        prepare(shards)
        views = ("intake", VIEW)
        return make_plan(settings, shards, plans_of(settings, views), enlist(shards, views)), shards

    def everything(self) -> list[int]:
        """Return the processes whose time counts."""
        node = self.node.pid if self.node is not None else None
        return [*self.pids(), *(pid for pid in (self.kafka.pid, self.store.pid, node) if pid)]

    def topic(self, sources: int, events: int) -> str:
        """Return a topic with so many events of so many sources."""
        topic = f"s{sources}-e{events}"
        if topic not in self._filled:
            produce(self.kafka.address, topic, PARTITIONS, sources, events)
            self._filled.add(topic)
        return topic

    def empty(self) -> None:
        """Forget what was written."""
        self.store.client().flushall()
        if self.node is not None:
            connection = CassandraConnection(CassandraSettings(port=self.node.port, keyspace=KEYSPACE))
            # Not the list of buckets: tasks that are kept from run to run list each once.
            connection.execute(connection.text("TRUNCATE $keyspace.tag_views"))
            connection.close()

    def best(self, row: Row, run: Callable[[], tuple[float, int]], tags: int = 0) -> Row:
        """Run something several times; return its best. A run returns events per second, and their number."""
        rates, costs = [], []
        for again in range(self.options.repeat):
            if again:
                self.empty()
            before = cpu_seconds(self.everything())
            rate, events = run()
            rates.append(rate)
            costs.append((cpu_seconds(self.everything()) - before) * 1e6 / events)
        row |= {"events/s": round(max(rates)), "CPU s/M events": round(min(costs), 1)}
        if tags:
            row["copies/s"] = round(max(rates) * tags)
        return row

    # The jobs.

    def write(self) -> None:
        """Write tags into both stores, and read them."""
        options = self.options
        sources = [int(each) for each in options.sources.split(",")]
        bare = self.topic(sources[0], options.events)
        # A JVM compiles what it runs often.
        self._nothing(bare)
        self._through(bare, options.events)
        row = self.best({"job": "write", "store": "nothing", "sources": sources[0]}, partial(self._nothing, bare))
        nothing = row["events/s"]
        self.tell(row)
        plain: dict[int, int] = {}
        for tags in options.tags:
            if self.node is not None:
                row = {"job": "write", "store": "plain", "sources": sources[0], "tags": tags}
                self.best(row, partial(self._plain, bare, tags), tags)
                plain[tags] = row["events/s"]
                self.tell(row)
        for store in self.stores:
            events = options.events if store == "valkey" else options.rows
            for some in sources:
                for tags in options.tags:
                    self._way = store, tags
                    row = {"job": "write", "store": store, "sources": some, "tags": tags}
                    self.best(row, partial(self._through, self.topic(some, events), events), tags)
                    row["of nothing"] = round(row["events/s"] / nothing, 2)
                    if store == "cassandra":
                        row["x plain"] = round(row["events/s"] / plain[tags], 1)
                    self.tell(row)
                    if "catch-up" in options.jobs and tags == max(options.tags):
                        row = {"job": "catch-up", "store": store, "sources": some, "tags": 1}
                        settings = given(self.flags(store) | self._as_written())
                        self.tell(self._again(row, partial(catch_up, settings, READ)))
                    self.empty()

    @property
    def stores(self) -> tuple[str, ...]:
        """Those that there are."""
        return STORES if self.node is not None else STORES[:1]

    def _as_written(self) -> Row:
        return {"valkey.prefix": self.written.valkey.prefix, "tags.paths": PATHS, "tags.delay": "50ms"}

    def _again(self, row: Row, run: Callable[[], tuple[float, int]]) -> Row:
        """Read what is there several times."""
        rates, costs, found = [], [], 0
        for _ in range(self.options.repeat):
            before = cpu_seconds(self.everything())
            rate, found = run()
            rates.append(rate)
            costs.append((cpu_seconds(self.everything()) - before) * 1e6 / found)
        return row | {"events/s": round(max(rates)), "CPU s/M events": round(min(costs), 1), "events": found}

    def _nothing(self, topic: str) -> tuple[float, int]:
        return nothing(self.kafka.address, topic, PARTITIONS, self.options.events), self.options.events

    def _through(self, topic: str, events: int) -> tuple[float, int]:
        return self.run(topic, PARTITIONS, events), events

    def _plain(self, topic: str, tags: int) -> tuple[float, int]:
        """Insert every event into each of its tags, one by one, for some seconds."""
        assert self.node is not None
        prepare_tables(CassandraSettings(port=self.node.port, keyspace="plain"))
        cluster = Cluster(["127.0.0.1"], port=self.node.port, protocol_version=4)
        session = cluster.connect()
        insert = session.prepare(_INSERT)
        insert.consistency_level = ConsistencyLevel.QUORUM
        consumer = Consumer({"bootstrap.servers": self.kafka.address, "group.id": "plain", "enable.auto.commit": False})
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
        numbers: Counter[tuple[str, str]] = Counter()
        began, done = 0.0, 0
        while not began or time.perf_counter() - began < self.options.plain_seconds:
            for message in consumer.consume(100, timeout=5.0):
                began = began or time.perf_counter()
                value, pid, time_ms = message.value() or b"", (message.key() or b"").decode(), message.timestamp()[1]
                event = json.loads(value)
                its_tags = [event[path] for path in PATHS[:tags]]
                for tag in its_tags:
                    numbers[tag, pid] += 1
                    key = tag, time_ms // _HOUR_MS * _HOUR_MS, uuid.uuid1(), pid, numbers[tag, pid]
                    place = message.offset(), topic, 0, message.partition(), message.offset()
                    session.execute(insert, (*key, *place, time_ms, message.key(), value, its_tags))
                done += 1
        seconds = time.perf_counter() - began
        consumer.close()
        cluster.shutdown()
        return done / seconds, done

    def visible(self) -> None:
        """Follow what comes."""
        for store in self.stores:
            delays = self.options.delays.split(",") if store == "cassandra" else [""]
            readers = [{"tags.delay": delay} if delay else {} for delay in delays]
            for row in visible(self.spark, self.flags(store), readers, self.options.rate, self.options.seconds):
                self.tell({"job": "visible", "store": store} | row)
            self.empty()

    def start(self) -> None:
        """Begin at nothing."""
        if self.node is not None:
            for row in start_from_nothing(given(self.flags("cassandra") | {"tags.paths": PATHS})):
                self.tell({"job": "start", "store": "cassandra"} | row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200_000, help="that are written into Valkey")
    parser.add_argument("--rows", type=int, default=60_000, help="events that are written into Cassandra")
    parser.add_argument("--sources", default="500,50000")
    parser.add_argument("--tags", default="3,1", help="of each event, at most three")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--plain-seconds", type=float, default=4)
    parser.add_argument("--delays", default="50ms,5s,auto")
    parser.add_argument("--rate", type=int, default=200, help="of live events, in a second")
    parser.add_argument("--seconds", type=float, default=12, help="of live events")
    parser.add_argument("--only", default="", help="run these jobs alone, with commas between")
    parser.add_argument("--no-cassandra", action="store_true", help="measure Valkey alone")
    options = parser.parse_args()
    options.tags = [int(each) for each in options.tags.split(",")]
    options.jobs = set(options.only.split(",")) - {""} or set(TITLES)
    if unknown := options.jobs - set(TITLES):
        raise SystemExit(f"no such job: {', '.join(sorted(unknown))}; there are {', '.join(TITLES)}")
    with ExitStack() as stack:
        kafka, store, folder = stack.enter_context(servers())
        node = None if options.no_cassandra else stack.enter_context(cassandra(folder))
        bench = Bench(options, kafka, store, node, folder)
        if node is not None:
            prepare_tables(CassandraSettings(port=node.port, keyspace=KEYSPACE))
        if {"write", "catch-up"} & options.jobs:
            bench.write()
        if "visible" in options.jobs:
            bench.visible()
        if "start" in options.jobs:
            bench.start()
        bench.spark.stop()
        for job, title in TITLES.items():
            report([row for row in bench.rows if row["job"] == job], title)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Cost of tags: written by the pipeline into Valkey and into Cassandra, and read; beside others, in one run.

    write        the pipeline: Spark reads a topic, and every event goes to its tags, numbered; rows rest in Valkey
                 (appendfsync always) or in one node of Cassandra (commitlog_sync batch). `nothing` is the bare read of
                 the topic; `plain loop` one prepared insert per event and tag into the same Cassandra, each waited for;
                 `eventsourcing` the library of that name with its SQLite recorder, an aggregate per tag and source
    catch-up     all events of one tag, from the start, by a feed in this process, as the service opens it
    visible      from produced to received through a live pipeline, by a feed in this process; for Cassandra with
                 several delays
    start        from nothing to the first event, and to the last, of a tag with ten years of buckets of an hour; with
                 the queries that it took. `asking` is what a reader without a registry of buckets does: it asks each

CPU seconds are per million events (not rows), of all processes together: Spark, its Python workers or the peer, the
broker, Valkey and Cassandra. A tag is read back after each turn, and its events compared with what was sent.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.events import Sent, added, compare, produce
from bench.jobs import Bench, Check, Job, Outcome, chosen, main, numbers
from bench.lane import Lane, given
from bench.meter import Meter
from bench.peers.task import PEERS, Task, run_peer
from bench.servers import cassandra, servers
from bench.tag_feeds import catch_up, start_from_nothing, visible
from tailrace.embedded.cassandra import EmbeddedCassandra
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
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
JOBS = ("write", "catch-up", "visible", "start")
READ = "cluster-0"
"""The tag that is read: of a third of all events."""

_frame = re.compile(rb'"n": ?(\d+)')


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=int, default=100_000, help="that are written into Valkey")
    parser.add_argument("--rows", type=int, default=30_000, help="events that are written into Cassandra")
    parser.add_argument("--plain", type=int, default=1_500, help="events that the plain loop writes there")
    parser.add_argument("--sources", default="500,50000")
    parser.add_argument("--tags", default="3,1", help="of each event, at most three")
    parser.add_argument("--delays", default="50ms,5s")
    parser.add_argument("--rate", type=int, default=200, help="of live events, in a second")
    parser.add_argument("--seconds", type=float, default=8, help="of live events")
    parser.add_argument("--only", default="", help="run these jobs alone, with commas between")
    parser.add_argument("--no-cassandra", action="store_true", help="measure Valkey alone")


def run(bench: Bench) -> None:
    options = bench.options
    jobs = chosen(options.only, JOBS)
    with ExitStack() as stack:
        kafka, store, folder = stack.enter_context(servers())
        node = None if options.no_cassandra else stack.enter_context(cassandra(folder))
        bench.servers = {"Valkey": store.pid or 0, "Kafka": kafka.pid or 0}
        if node is None:
            bench.missing("cassandra", "left out")
        else:
            prepare_tables(CassandraSettings(port=node.port, keyspace=KEYSPACE))
            prepare_tables(CassandraSettings(port=node.port, keyspace="plain"))
        tagging = Tagging(bench, kafka, store, node, folder)
        if {"write", "catch-up"} & set(jobs):
            tagging.write("catch-up" in jobs)
        if "visible" in jobs:
            tagging.visible()
        if "start" in jobs and node is not None:
            for row in start_from_nothing(given(tagging.flags("cassandra") | {"tags.paths": PATHS})):
                bench.note(row.pop("case"), "cassandra", table="tags-start", **row)
        tagging.lane.stop()


class Tagging:
    """The servers, a Spark that writes tags, and the jobs."""

    def __init__(
        self, bench: Bench, kafka: EmbeddedKafka, store: EmbeddedValkey, node: EmbeddedCassandra | None, folder: Path
    ) -> None:
        self.bench, self.kafka, self.store, self.node, self.folder = bench, kafka, store, node, folder
        self.lane = Lane(kafka.address, store.url)
        self.stores = STORES if node is not None else STORES[:1]
        self._topics: dict[tuple[int, int], Sent] = {}

    def flags(self, store: str) -> Row:
        """Return settings whose keys are nobody else's."""
        flags = self.lane.flags(pipeline__views=[VIEW], tags__store=store)
        if self.node is not None:
            flags |= {"cassandra.port": self.node.port, "cassandra.keyspace": KEYSPACE}
        return flags

    def topic(self, sources: int, events: int) -> Sent:
        """Return a topic with so many events of so many sources."""
        if (sources, events) not in self._topics:
            topic = f"s{sources}-e{events}"
            self._topics[sources, events] = produce(self.kafka.address, topic, PARTITIONS, sources, events)
        return self._topics[sources, events]

    def empty(self) -> None:
        """Forget what was written."""
        self.store.client().flushall()
        if self.node is not None:
            connection = CassandraConnection(CassandraSettings(port=self.node.port, keyspace=KEYSPACE))
            # Not the list of buckets: tasks that are kept from run to run list each once.
            connection.execute(connection.text("TRUNCATE $keyspace.tag_views"))
            connection.close()

    def write(self, read: bool) -> None:
        """Write tags into both stores, beside others, and read one."""
        options = self.bench.options
        events = options.events
        first = self.topic(numbers(options.sources)[0], events)
        self.bench.warm(Job("", partial(self._through, "valkey", first, 1, False)))
        for sources in numbers(options.sources):
            for tags in numbers(options.tags):
                sent, apart = self.topic(sources, events), self.lane.pids
                jobs = [Job("nothing", partial(self._peer, "bare", sent, tags), apart)] if tags == 3 else []
                jobs.append(Job("**Valkey**", partial(self._through, "valkey", sent, tags, read)))
                if PEERS.exists():
                    jobs.append(Job("eventsourcing", partial(self._peer, "eventsourced", sent, tags), apart))
                if self.node is not None and sources == numbers(options.sources)[0]:
                    some = self.topic(sources, options.rows)
                    jobs.append(Job("**Cassandra**", partial(self._through, "cassandra", some, tags, read)))
                    few = some._replace(events=options.plain)
                    jobs.append(
                        Job("plain loop into Cassandra", partial(self._peer, "plain_cassandra", few, tags), apart)
                    )
                case = f"{tags} tag{'s' if tags > 1 else ''} each, {sources:,} sources"
                self.bench.rounds(case, jobs)
        if not PEERS.exists():
            self.bench.missing("eventsourcing", "not installed: `make peers`")

    def _through(self, store: str, sent: Sent, tags: int, read: bool, meter: Meter) -> Outcome:
        flags = self.flags(store) | {"tags.paths": PATHS[:tags]}
        shards = self.lane.run(meter, sent.topic, PARTITIONS, sent.events, [VIEW], flags)
        figures: Row = {}

        def check() -> Check:
            if not read:
                return Check(0)
            catching = Meter()
            with catching:
                came = catch_up(given(flags | {"tags.delay": "50ms"}), READ)
            figures["one tag read, events/s"] = round(len(came) / catching.seconds)
            by_name: dict[int, list[int]] = {}
            for frame in came:
                value = frame[frame.rindex(b'"data"') :]
                found = re.search(rb"jobset-(\d+)", value)
                by_name.setdefault(int(found[1]) if found else -1, []).append(int(_frame.search(value)[1]))  # type: ignore[index]
            wanted = {name: ns for name, ns in sent.by_name.items() if name % 3 == 0}
            return added(compare(ns, by_name.get(name, ())) for name, ns in wanted.items())

        def done() -> None:
            shards.close()
            self.empty()

        return Outcome(sent.events, check, figures, done)

    def _peer(self, module: str, sent: Sent, tags: int, meter: Meter) -> Outcome:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            url = str(self.node.port) if module == "plain_cassandra" and self.node else self.store.url
            task = Task(self.kafka.address, sent.topic, READ, sent.events, 0, url, folder, ",".join(PATHS[:tags]))
            answer = run_peer(meter, PEERS if module == "eventsourced" else sys.executable, module, task)
        figures = {}
        if "read_s" in answer:
            figures["one tag read, events/s"] = round(answer["read"] / max(answer["read_s"], 1e-6))
        copies, wanted = answer.get("copies"), answer["events"] * tags
        return Outcome(answer["events"], (lambda: Check.of_counts(copies, wanted)) if copies else None, figures)

    def visible(self) -> None:
        """Follow what comes."""
        options = self.bench.options
        for store in self.stores:
            delays = options.delays.split(",") if store == "cassandra" else [""]
            readers = [{"tags.delay": delay} if delay else {} for delay in delays]
            rows = visible(self.lane.spark, self.flags(store), readers, options.rate, options.seconds)
            for delay, row in zip(delays, rows, strict=True):
                name = f"**{store.capitalize()}**{f', delay {delay}' if delay else ''}"
                self.bench.note(f"{options.rate:,} events/s", name, table="tags-live", **row)
            self.empty()


if __name__ == "__main__":
    quick = {"events": 4_000, "rows": 1_000, "plain": 50, "sources": "50", "seconds": 1, "only": "write,catch-up"}
    sys.exit(main("tags", __doc__, options, quick, run))

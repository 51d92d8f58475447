"""Cost of folding: Tailrace, and others that come near it, over the same posts in one run.

    nothing      a Python consumer reads the topic and drops it: the bare Kafka read
    ours         the pipeline: Spark, open folds in Valkey with appendfsync always, emitter, publisher; exactly once
    seed         the article's way: a sorted set in the same Valkey, one ZADD and one SADD per event, and a poller
    quix-key     Quix Streams, session windows closed by the next event of their account: its last fold never comes
    quix         the same, closed by the time of their partition, which walks over all that are open; not by default
    bytewax      Bytewax, session windows
    streams      Kafka Streams, session windows, emitted when closed, exactly-once v2, two threads

    library      tailrace.Folder with its emitter, fed from memory 500 at a time, no Kafka and no Spark
    seed-memory  the article's algorithm, fed the same way

    late         folds of a live pipeline: when they were in Kafka, and at a consumer, after they were due
    idle         CPU of a pipeline that gets no events, without and with very many open folds

CPU seconds are of all processes together: Spark, its Python workers or the peer, the broker and Valkey. `folds` are
those that were written. Ours names the inputs of each fold, which are compared with the topic record by record; of the
others, folds are counted, and compared with those that the posts make: what is lost is still open, or was joined to
another. The files in bench/peers say what each cannot do.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import pipeline
from bench.events import create
from bench.fold_times import alive
from bench.jobs import Bench, Check, Job, Outcome, chosen, main
from bench.lane import Lane
from bench.meter import Meter
from bench.peers.posts import QUIET_MS, RATE, Post, folds_of, posts
from bench.peers.seed import AT_ONCE, POLL_S, SortedSetFolder
from bench.peers.streams import KafkaStreams
from bench.peers.task import PEERS, Task, run_peer
from bench.servers import servers
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.views.folds.write import Folder

FROM_KAFKA = ("nothing", "ours", "seed", "quix", "quix-key", "bytewax", "streams")
FROM_MEMORY = ("library", "seed-memory")
JOBS = (*FROM_KAFKA, *FROM_MEMORY, "late", "idle")
DEFAULT = ",".join(job for job in JOBS if job != "quix")

_runs = count()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=int, default=150_000)
    parser.add_argument("--accounts", type=int, default=10_000)
    parser.add_argument("--burst", type=int, default=20, help="posts of one burst, on average")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15, help="of live posts whose lateness counts")
    parser.add_argument("--idle", type=float, default=15, help="seconds without events")
    parser.add_argument("--pending", type=int, default=100_000, help="folds that are open meanwhile")
    parser.add_argument("--peers", type=Path, default=PEERS.parent.parent, help="the environment of the peers")
    parser.add_argument("--jobs", default=DEFAULT, help=f"run these alone, with commas between, of {', '.join(JOBS)}")


def run(bench: Bench) -> None:
    given = bench.options
    wanted = chosen(given.jobs, JOBS)
    with servers() as (kafka, store, folder):
        bench.servers = {"Valkey": store.pid or 0, "Kafka": kafka.pid or 0}
        folding = Folding(given, kafka, store, folder)
        lane = Lane(kafka.address, store.url) if "ours" in wanted else None
        jobs = folding.jobs(bench, lane, wanted)
        if lane is not None and not given.quick:
            bench.warm(next(job for job in jobs if job.name == "**ours**"))
        case = f"{given.events:,} posts of {given.accounts:,} accounts"
        bench.rounds(case, jobs)
        bench.rounds("without Kafka", folding.from_memory(wanted, lane))
        if lane is not None:
            lane.stop()
        if {"late", "idle"} & set(wanted):
            topics = create(kafka.address, "live", given.partitions), create(kafka.address, "pending", given.partitions)
            pids = [pid for pid in (kafka.pid, store.pid) if pid]
            for name, figures in alive(kafka.address, store.url, folder, pids, topics, given):
                bench.note(name, "**ours**", table="folds-live", **figures)


class Folding:
    """A topic full of posts, and the jobs that fold them."""

    def __init__(self, given: argparse.Namespace, kafka: EmbeddedKafka, store: EmbeddedValkey, folder: Path) -> None:
        self.given, self.kafka, self.store, self.folder = given, kafka, store, folder
        # The broker would stamp them with its own time, and seconds of posts would be one moment.
        self.topic = create(kafka.address, "posts", given.partitions, **{"message.timestamp.type": "CreateTime"})
        producer = Producer({"bootstrap.servers": kafka.address, "linger.ms": 20})
        # The last of them is of a moment ago.
        began = round(time.time() * 1000) - given.events * 1000 // RATE - 60_000
        for i, post in enumerate(self.posts()):
            if i % 10_000 == 0:
                producer.flush()
            producer.produce(self.topic, post.value, post.account.encode(), timestamp=began + post.at)
        producer.flush()
        self.expected = folds_of(self.posts())

    def posts(self) -> Iterator[Post]:
        return posts(self.given.events, self.given.accounts, self.given.burst)

    def jobs(self, bench: Bench, lane: Lane | None, wanted: list[str]) -> list[Job]:
        """Return the jobs that read the topic, as far as there is what they need."""
        runs: dict[str, Any] = {"nothing": self._nothing, "seed": partial(self._peer, sys.executable, "seed")}
        if lane is not None:
            bootstrap, url = self.kafka.address, self.store.url
            runs["ours"] = lambda meter: self._emptied(
                pipeline.fold(meter, lane.spark, bootstrap, url, self.topic, self.given.events)
            )
        python = self.given.peers / "bin" / "python"
        if python.exists():
            runs["quix"] = partial(self._peer, python, "quix", way="partition")
            runs["quix-key"] = partial(self._peer, python, "quix", way="key")
            runs["bytewax"] = partial(self._peer, python, "bytewax_flow")
        if "streams" in wanted:
            try:
                runs["streams"] = partial(self._streams, KafkaStreams(self.folder))
            except RuntimeError as error:
                bench.missing("streams", str(error))
        for name in set(wanted) & {"quix", "quix-key", "bytewax"} - runs.keys():
            bench.missing(name, "not installed: `make peers`")
        names = [name for name in FROM_KAFKA if name in wanted and name in runs]
        return [
            Job("**ours**" if name == "ours" else name, runs[name], lane.pids if lane and name != "ours" else ())
            for name in names
        ]

    def from_memory(self, wanted: list[str], lane: Lane | None) -> list[Job]:
        """Return the jobs that are fed from memory, by the clock on the wall: how many folds they make depends on how
        fast they are."""
        runs = {"library": self._library, "seed-memory": self._seed_in_memory}
        return [Job(name, run, lane.pids if lane else ()) for name, run in runs.items() if name in wanted]

    def _emptied(self, outcome: Outcome) -> Outcome:
        return outcome._replace(done=self.store.client().flushall)

    def _task(self, way: str) -> Task:
        output, state = create(self.kafka.address, f"folded-{next(_runs)}", 1), tempfile.mkdtemp(dir=self.folder)
        return Task(self.kafka.address, self.topic, output, self.given.events, QUIET_MS, self.store.url, state, way)

    def _nothing(self, meter: Meter) -> Outcome:
        answer = run_peer(meter, sys.executable, "bare", self._task(""))
        return Outcome(answer["events"], lambda: Check.of_counts(answer["events"], self.given.events))

    def _peer(self, python: str | Path, module: str, meter: Meter, way: str = "") -> Outcome:
        return self._counted(run_peer(meter, python, module, self._task(way)))

    def _streams(self, streams: KafkaStreams, meter: Meter) -> Outcome:
        return self._counted(streams.run(meter, self._task("")))

    def _counted(self, answer: dict[str, Any]) -> Outcome:
        check = partial(Check.of_counts, answer["folds"], self.expected)
        return self._emptied(Outcome(answer["events"], check, {"folds": answer["folds"]}))

    def _library(self, meter: Meter) -> Outcome:
        """Fold with the library, until the last fold is in the outbox."""
        made = [post.value for post in self.posts()]
        prefix = f"library{next(_runs)}"
        with Folder({"name": "posts", **pipeline.rule(QUIET_MS)}, self.store.url, prefix=prefix, emit=True) as folder:
            with meter:
                began = time.perf_counter()
                for begin in range(0, len(made), AT_ONCE):
                    folder.add_all(made[begin : begin + AT_ONCE])
                seconds = time.perf_counter() - began
                time.sleep(2 * QUIET_MS / 1000)
            meter.seconds = seconds
        folds = pipeline.emitted_folds(self.store.url, prefix, "posts", len(made))
        return self._emptied(Outcome(len(made), figures={"folds": folds}))

    def _seed_in_memory(self, meter: Meter) -> Outcome:
        """Fold with the article's algorithm; folded events go nowhere."""
        made = [post.value for post in self.posts()]
        folder = SortedSetFolder(self.store.url, f"memory{next(_runs)}")
        folds, polled = 0, time.perf_counter()
        with meter:
            for begin in range(0, len(made), AT_ONCE):
                now_ms = round(time.time() * 1000)
                folder.add([(value, now_ms) for value in made[begin : begin + AT_ONCE]])
                if time.perf_counter() - polled >= POLL_S:
                    polled = time.perf_counter()
                    folds += len(folder.poll(now_ms - QUIET_MS))
                    folder.remove()
        folds += len(folder.poll(float("inf")))
        folder.remove()
        return self._emptied(Outcome(len(made), figures={"folds": folds}))


if __name__ == "__main__":
    quick = {"events": 5_000, "accounts": 500, "seconds": 2, "idle": 2, "pending": 1_000, "jobs": "nothing,ours,seed"}
    sys.exit(main("folds", __doc__, options, quick, run))

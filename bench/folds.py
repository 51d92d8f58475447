"""Cost of folding: ours, and others that come near it, over the same posts in one run.

    nothing      a Python consumer reads the topic and drops it: the bare Kafka read
    ours         the pipeline: Spark, open folds in Valkey with appendfsync always, emitter, publisher; exactly once
    seed         a sorted set in the same Valkey, one ZADD and one SADD per event from Python, and a poller
    quix         Quix Streams, session windows that the time of their partition closes
    quix-key     the same, closed by the next event of their account alone: cheaper, but its last fold never comes
    bytewax      Bytewax, session windows

    library      tailrace.Folder with its emitter, fed from memory 500 at a time, no Kafka and no Spark
    seed-memory  the seed's algorithm, fed the same way

    late         folds of a live pipeline: when they were in Kafka, and at a consumer, after they were due
    idle         CPU of a pipeline that gets no events, without and with very many open folds

Each figure is the best of several runs over the same events. CPU seconds are of all processes together: Spark, its
Python workers or the peer, the broker and Valkey. `folds` says how many were written, and how many the posts make; the
files in bench/peers say what each cannot do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.ingest import Spark, nothing
from bench.meter import cpu_seconds, report
from bench.peers import ours
from bench.peers.live import alive
from bench.peers.posts import QUIET_MS, RATE, Post, folds_of, posts
from bench.peers.seed import AT_ONCE, POLL_S, SortedSetFolder
from bench.peers.task import Task
from bench.servers import servers
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.views.folds.write import Folder

ROOT = Path(__file__).parent.parent

FROM_MEMORY = ("library", "seed-memory")

_runs = count()


class Bench:
    """A broker with one topic full of posts, a Valkey, and the jobs that fold them."""

    def __init__(self, options: argparse.Namespace, kafka: EmbeddedKafka, store: EmbeddedValkey, folder: Path) -> None:
        self.options, self.kafka, self.store, self.folder = options, kafka, store, folder
        self.servers = [pid for pid in (kafka.pid, store.pid) if pid]
        self.topic = "posts"
        self.expected = folds_of(self.posts())
        self._admin = AdminClient({"bootstrap.servers": kafka.address})

    def posts(self) -> Iterator[Post]:
        return posts(self.options.events, self.options.accounts, self.options.burst)

    def fill(self) -> None:
        """Write the posts; the last of them is of a moment ago."""
        # The broker would stamp them with its own time, and seconds of posts would be one moment.
        self.create(self.topic, self.options.partitions, **{"message.timestamp.type": "CreateTime"})
        producer = Producer({"bootstrap.servers": self.kafka.address, "linger.ms": 20})
        began = round(time.time() * 1000) - self.options.events * 1000 // RATE - 60_000
        for i, post in enumerate(self.posts()):
            if i % 10_000 == 0:
                producer.flush()
            producer.produce(self.topic, post.value, post.account.encode(), timestamp=began + post.at)
        producer.flush()

    def create(self, topic: str, partitions: int, **config: str) -> str:
        self._admin.create_topics([NewTopic(topic, partitions, 1, config=config)])[topic].result(30)
        return topic

    def best(self, job: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a job several times and return its best figures. A run returns seconds, cpu and folds, if any.

        Those that are fed from memory fold by the clock on the wall, so what they make depends on how fast they are.
        """
        events = self.options.events
        tries = []
        for _ in range(self.options.repeat):
            tries.append(run())
            self.store.client().flushall()
        row = {
            "job": job,
            "events/s": round(max(events / each["seconds"] for each in tries)),
            "CPU s/M events": round(min(each["cpu"] for each in tries) * 1e6 / events, 2),
        }
        if folds := min(each.get("folds", 0) for each in tries):
            row["folds"] = f"{folds:,}" if job in FROM_MEMORY else f"{folds:,} of {self.expected:,}"
        print(json.dumps(row), file=sys.stderr, flush=True)
        return row

    def nothing(self) -> dict[str, Any]:
        """Read the topic and drop it."""
        pids = [os.getpid(), *self.servers]
        before = cpu_seconds(pids)
        rate = nothing(self.kafka.address, self.topic, self.options.partitions, self.options.events)
        return {"seconds": self.options.events / rate, "cpu": cpu_seconds(pids) - before}

    def ours(self, spark: Spark) -> dict[str, Any]:
        """Fold the topic with the pipeline, from the first batch to the last fold in Kafka."""
        pids = [*spark.pids(), *self.servers]
        return ours.fold(spark.spark, self.kafka.address, self.store.url, self.topic, self.options.events, pids)

    def peer(self, python: Path, module: str, way: str = "") -> dict[str, Any]:
        """Run a peer in its environment."""
        output = self.create(f"folded-{next(_runs)}", 1)
        state = tempfile.mkdtemp(dir=self.folder)
        events = self.options.events
        task = Task(self.kafka.address, self.topic, output, events, QUIET_MS, self.store.url, state, way)
        before = cpu_seconds(self.servers)
        command = [str(python), "-m", f"bench.peers.{module}", *task.arguments()]
        done = subprocess.run(command, cwd=ROOT, env=_bare(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{module} ended with {done.returncode}: {done.stderr[-2000:]}")
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if answer["events"] < events:
            raise SystemExit(f"{module} read {answer['events']:,} events of {events:,}: {done.stderr[-2000:]}")
        return answer | {"cpu": answer["cpu"] + cpu_seconds(self.servers) - before}

    def library(self) -> dict[str, Any]:
        """Fold with the library, from memory, by the clock on the wall; folded events stay in the outbox."""
        made = [post.value for post in self.posts()]
        prefix = f"library{next(_runs)}"
        pids = [os.getpid(), self.store.pid or 0]
        with Folder({"name": "posts", **ours.rule(QUIET_MS)}, self.store.url, prefix=prefix, emit=True) as folder:
            before, began = cpu_seconds(pids), time.perf_counter()
            for begin in range(0, len(made), AT_ONCE):
                folder.add_all(made[begin : begin + AT_ONCE])
            seconds = time.perf_counter() - began
            time.sleep(2 * QUIET_MS / 1000)
            cpu = cpu_seconds(pids) - before
        return {"seconds": seconds, "cpu": cpu, "folds": ours.emitted_folds(self.store.url, prefix, "posts", len(made))}

    def seed_in_memory(self) -> dict[str, Any]:
        """Fold with the seed's algorithm the same way; folded events go nowhere."""
        made = [post.value for post in self.posts()]
        folder = SortedSetFolder(self.store.url, f"memory{next(_runs)}")
        pids = [os.getpid(), self.store.pid or 0]
        before, began = cpu_seconds(pids), time.perf_counter()
        polled, folds = began, 0
        for begin in range(0, len(made), AT_ONCE):
            now_ms = round(time.time() * 1000)
            folder.add([(value, now_ms) for value in made[begin : begin + AT_ONCE]])
            if time.perf_counter() - polled >= POLL_S:
                polled = time.perf_counter()
                folds += len(folder.poll(now_ms - QUIET_MS))
                folder.remove()
        seconds = time.perf_counter() - began
        folds += len(folder.poll(float("inf")))
        folder.remove()
        return {"seconds": seconds, "cpu": cpu_seconds(pids) - before, "folds": folds}


def _bare() -> dict[str, str]:
    """Return the environment without what belongs to ours."""
    return {
        name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=400_000)
    parser.add_argument("--accounts", type=int, default=10_000)
    parser.add_argument("--burst", type=int, default=20, help="posts of one burst, on average")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20, help="of live posts whose lateness counts")
    parser.add_argument("--idle", type=float, default=20, help="seconds without events")
    parser.add_argument("--pending", type=int, default=100_000, help="folds that are open meanwhile")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="the environment of the peers")
    parser.add_argument("--jobs", default="", help="run these alone, with commas between")
    options = parser.parse_args()
    with servers() as (kafka, store, folder):
        rows = measure(options, Bench(options, kafka, store, folder))
    report(rows, f"Folding {options.events:,} posts of {options.accounts:,} accounts, best of {options.repeat}")
    return 0


def measure(options: argparse.Namespace, bench: Bench) -> list[dict[str, Any]]:
    """Run every job and return its figures."""
    wanted = set(options.jobs.split(",")) - {""}
    rows: list[dict[str, Any]] = []
    bench.fill()

    def run(jobs: dict[str, Callable[[], dict[str, Any]]]) -> None:
        rows.extend(bench.best(job, once) for job, once in jobs.items() if not wanted or job in wanted)

    if not wanted or wanted & {"nothing", "ours"}:
        spark = Spark(bench.kafka.address, bench.store.url)
        run({"nothing": bench.nothing, "ours": partial(bench.ours, spark)})
        spark.spark.stop()
    run(others(options.peers / "bin" / "python", bench))
    if not wanted or wanted & {"late", "idle"}:
        topics = bench.create("live", options.partitions), bench.create("pending", options.partitions)
        rows += alive(bench.kafka.address, bench.store.url, bench.folder, bench.servers, topics, options)
    return rows


def others(python: Path, bench: Bench) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the jobs that need no Spark, as far as there is what they need."""
    jobs: dict[str, Callable[[], dict[str, Any]]] = {"seed": partial(bench.peer, Path(sys.executable), "seed")}
    if python.exists():
        jobs["quix"] = partial(bench.peer, python, "quix", "partition")
        jobs["quix-key"] = partial(bench.peer, python, "quix", "key")
        jobs["bytewax"] = partial(bench.peer, python, "bytewax_flow")
    else:
        print(f"no {python}: going on without quix and bytewax; `make bench-folds` makes it.", file=sys.stderr)
    jobs["library"] = bench.library
    jobs["seed-memory"] = bench.seed_in_memory
    return jobs


if __name__ == "__main__":
    sys.exit(main())

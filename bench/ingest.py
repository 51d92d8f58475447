"""Speed and cost of records from Kafka into day streams, beside the bare read and a plain consumer.

    nothing   one Python consumer reads the topic and drops it: the bare Kafka read
    days      the pipeline: marks, runs, numbers, registry, tails, in Valkey with appendfsync always
    plain     a Python consumer that does one XADD * per event in pipelines of 500: fast to write, repeats on restart

Every turn reads the same topic from its start. CPU seconds are of all processes together: Spark, its Python workers or
the consumer, the broker and Valkey. Afterwards the streams are read, and their events compared with what was sent, one
by one (of 50,000 names, those of 2,000).
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import valkey

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.events import Sent, number_of, produce
from bench.jobs import Bench, Check, Job, Outcome, main, numbers
from bench.lane import Lane
from bench.meter import Meter
from bench.peers.task import Task, run_peer
from bench.servers import servers
from tailrace.log.store import LogRegistry
from tailrace.valkey.shards import Shards

_runs = count()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=int, default=150_000)
    parser.add_argument("--partitions", default="2,20,100")
    parser.add_argument("--names", default="500,50000")


def run(bench: Bench) -> None:
    given = bench.options
    with servers() as (kafka, store, _):
        lane = Lane(kafka.address, store.url)
        bench.servers = {"Valkey": store.pid or 0, "Kafka": kafka.pid or 0}
        for partitions in numbers(given.partitions):
            for names in numbers(given.names):
                sent = produce(kafka.address, f"p{partitions}-n{names}", partitions, names, given.events)
                days = Job("**days**", partial(_days, lane, sent))
                task = Task(kafka.address, sent.topic, "", sent.events, 0, store.url, "")
                plain = Job("plain", partial(_plain, task, sent), lane.pids)
                jobs = [Job("nothing", partial(read_bare, task), lane.pids)] if names == numbers(given.names)[0] else []
                if not bench.lines[1:] and not given.quick:
                    bench.warm(days)
                bench.rounds(f"{partitions} partitions, {names:,} names", [*jobs, days, plain])
        lane.stop()


def read_bare(task: Task, meter: Meter) -> Outcome:
    """Read a topic and drop it."""
    answer = run_peer(meter, sys.executable, "bare", task)
    return Outcome(answer["events"], lambda: Check.of_counts(answer["events"], task.events))


def _days(lane: Lane, sent: Sent, meter: Meter) -> Outcome:
    shards = lane.run(meter, sent.topic, sent.partitions, sent.events, ["days"], lane.flags())

    def check() -> Check:
        return sent.check(_stored(shards, sent))

    return Outcome(sent.events, check, done=partial(_drop, shards))


def _stored(shards: Shards, sent: Sent) -> dict[int, list[int]]:
    """Return the numbers of the events in the day streams of the names in the sample."""
    registry, found = LogRegistry(shards, "days"), dict[int, list[int]]()
    logs = registry.logs([f"queue-{name % 7}/jobset-{name}" for name in sent.sample()])
    for name, log in zip(sent.sample(), logs, strict=True):
        segments = [(log.name, segment) for segment in log.log.segments]
        found[name] = [
            number_of(value)
            for runs in registry.read_whole(segments)
            for numbered in runs
            for value in numbered.run.values
        ]
    return found


def _drop(shards: Shards) -> None:
    shards.run_all([(0, ("FLUSHALL",))])
    shards.close()


def _plain(task: Task, sent: Sent, meter: Meter) -> Outcome:
    prefix = f"plain{next(_runs)}"
    answer = run_peer(meter, sys.executable, "plain", task._replace(output=prefix))
    store: Any = valkey.Valkey.from_url(task.url)

    def check() -> Check:
        found = {}
        for name in sent.sample():
            entries = store.xrange(f"{prefix}:{sent.key(name).decode()}")
            found[name] = [number_of(fields[b"d"]) for _, fields in entries]
        return sent.check(found)

    return Outcome(answer["events"], check, done=store.flushall)


if __name__ == "__main__":
    quick = {"events": 5_000, "partitions": "2", "names": "50"}
    sys.exit(main("ingest", __doc__, options, quick, run))

"""Cost of one event while one thing grows: a curve each, with few points and few events.

    partitions    days, 500 names                       names         days, 4 partitions
    open folds    folds, so many groups open before      searches      matches of so many standing searches
    tags          tags in Valkey, so many different      streams       upkeep's walk over so many streams, per stream
    connections   one service process with so many feeds of one search, per event delivered; and its memory

All but the last two go through the live lane of the pipeline (Spark, hands, Valkey with appendfsync always). CPU
seconds are per million events, of all processes together. A flat curve is what one hopes for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.events import create, produce
from bench.jobs import Bench, Check, Job, Outcome, chosen, main, numbers
from bench.lane import Lane, given, plan_of
from bench.meter import Meter, cpu_seconds, memory_mib
from bench.pack import Filler
from bench.peers.posts import post
from bench.readers import Readers, Sender, sse
from bench.servers import environment, servers, stack, valkey
from bench.standing import events, queries
from tailrace.valkey.marks import read_counts
from tailrace.valkey.shards import Nodes, Shards, StoreOptions
from tailrace.views.folds.store import rules_of
from tailrace.views.grep.model import make_search
from tailrace.views.grep.store import Searches

CURVES = ("partitions", "names", "folds", "searches", "tags", "streams", "connections")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=int, default=60_000)
    parser.add_argument("--partitions", default="1,4,20,100,200")
    parser.add_argument("--names", default="1,100,1000,10000,100000")
    parser.add_argument("--folds", default="1000,10000,100000,1000000")
    parser.add_argument("--searches", default="1,10,100,1000,10000")
    parser.add_argument("--tags", default="1,100,10000,100000")
    parser.add_argument("--streams", default="10000,100000,300000")
    parser.add_argument("--connections", default="10,100,1000,10000")
    parser.add_argument("--only", default="", help=f"these curves alone, with commas between: {', '.join(CURVES)}")
    parser.set_defaults(repeat=1)


def run(bench: Bench) -> None:
    wanted = chosen(bench.options.only, CURVES)
    with servers() as (kafka, store, _):
        bench.servers = {"Valkey": store.pid or 0, "Kafka": kafka.pid or 0}
        lane = Lane(kafka.address, store.url)
        growing = Growing(bench, lane, kafka.address, store.url)
        for curve in wanted:
            if curve not in ("streams", "connections"):
                getattr(growing, curve)()
        lane.stop()
    if "streams" in wanted:
        _streams(bench)
    if "connections" in wanted:
        _connections(bench)


class Growing:
    """The curves that go through the live lane."""

    def __init__(self, bench: Bench, lane: Lane, bootstrap: str, url: str) -> None:
        self.bench, self.lane, self.bootstrap, self.url = bench, lane, bootstrap, url
        self.events: int = bench.options.events

    def _curve(self, curve: str, x: int, topic: str, partitions: int, view: str, **flags: Any) -> None:
        job = Job(view, partial(self._turn, topic, partitions, [view], self.lane.flags(**flags), x))
        self.bench.rounds(f"{x:,} {curve}", [job], table=f"scale-{curve.replace(' ', '-')}", x=x)

    def _turn(
        self, topic: str, partitions: int, views: list[str], flags: dict[str, Any], x: int, meter: Meter
    ) -> Outcome:
        # Every turn writes keys of its own.
        flags = flags | {"valkey.prefix": self.lane.flags()["valkey.prefix"]}
        shards = self.lane.run(meter, topic, partitions, self.events, views, flags)
        taken = sum(read_counts(shards, views[0]).values())
        return Outcome(self.events, done=partial(_drop, shards), figures={} if taken else {"note": "nothing written"})

    def partitions(self) -> None:
        for i, x in enumerate(numbers(self.bench.options.partitions)):
            topic = f"p{x}"
            produce(self.bootstrap, topic, x, 500, self.events)
            if not i and not self.bench.options.quick:
                self.bench.warm(Job("", partial(self._turn, topic, x, ["days"], self.lane.flags(), x)))
            self._curve("partitions", x, topic, x, "days")

    def names(self) -> None:
        for x in numbers(self.bench.options.names):
            produce(self.bootstrap, f"n{x}", 4, x, self.events)
            self._curve("names", x, f"n{x}", 4, "days")

    def tags(self) -> None:
        for x in numbers(self.bench.options.tags):
            produce(self.bootstrap, f"t{x}", 4, x, self.events)
            self._curve("tags", x, f"t{x}", 4, "tags", tags__paths=["jobset"], tags__source=["queue"])

    def searches(self) -> None:
        made, topic = events(min(self.events, 20_000)), create(self.bootstrap, "searched", 4)
        producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 20})
        for i in range(self.events):
            producer.produce(topic, made[i % len(made)], b'"shop"', i % 4)
            if i % 10_000 == 0:
                producer.flush()
        producer.flush()
        for x in numbers(self.bench.options.searches):
            distinct = [json.loads(each) for each in dict.fromkeys(json.dumps(query) for query in queries(2 * x))][:x]

            def turn(meter: Meter, distinct: list[Any] = distinct) -> Outcome:
                flags = self.lane.flags()
                plan_of(given(flags), ["matches"])[1].close()  # a pipeline has prepared the store
                asyncio.run(_register(flags, topic, distinct))
                shards = self.lane.run(meter, topic, 4, self.events, ["matches"], flags)
                return Outcome(self.events, done=partial(_drop, shards))

            self.bench.rounds(f"{x:,} searches", [Job("matches", turn)], table="scale-searches", x=x)

    def folds(self) -> None:
        """Open so many folds, then add events to some of them."""
        for x in numbers(self.bench.options.folds):
            chance, before, topic = random.Random(7), f"open{x}", f"more{x}"
            rule = {"group": ["account_id"], "collect": {"metrics": "keys metrics"}, "quiet": "1h"}
            for name, accounts in ((before, range(x)), (topic, [chance.randrange(x) for _ in range(self.events)])):
                create(self.bootstrap, name, 4)
                producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 20})
                for i, account in enumerate(accounts):
                    producer.produce(name, post(chance, account), f"account_{account}".encode(), account % 4)
                    if i % 10_000 == 0:
                        producer.flush()
                producer.flush()
            rules = {"open": {"topics": [before, topic], **rule}}

            def turn(meter: Meter, x: int = x, before: str = before, topic: str = topic, rules: Any = rules) -> Outcome:
                flags = self.lane.flags(folds__rules=rules, folds__begin="start")
                self.lane.run(Meter(), before, 4, x, ["folds"], flags).close()
                shards = self.lane.run(meter, topic, 4, self.events, ["folds"], flags)
                [rule] = rules_of(given(flags)).values()
                places = range(shards.options.shards)
                opened = sum(shards.run_all([(s, ("ZCARD", shards.keys.due(s, rule.key_suffix))) for s in places]))
                return Outcome(self.events, lambda: Check.of_counts(opened, x), done=partial(_drop, shards))

            self.bench.rounds(f"{x:,} open folds", [Job("folds", turn)], table="scale-folds", x=x)


async def _register(flags: dict[str, Any], topic: str, asked: list[Any]) -> None:
    nodes = await Nodes(StoreOptions.of(given(flags).valkey)).open()
    searches = Searches(nodes)
    for query in asked:
        await searches.register(make_search([topic], query), round(time.time() * 1000))
    await nodes.close()


def _drop(shards: Shards) -> None:
    shards.run_all([(0, ("FLUSHALL",))])
    shards.close()


def _streams(bench: Bench) -> None:
    """Let upkeep walk very many streams, none of which has something to do."""
    bench.servers = {}
    for x in numbers(bench.options.streams):
        with valkey() as (store, folder):
            filler = Filler(store.url)
            at = round(time.time() * 1000)
            for begin in range(0, x, 10_000):
                names = range(begin, min(x, begin + 10_000))
                keys = [b'["queue-%d","jobset-%d"]' % (i % 100, i) for i in names]
                filler.write(keys, [b'{"n":%d}' % i for i in names], at)
            filler.close()

            def walk(job: str, meter: Meter, folder: Path = folder, url: str = store.url, x: int = x) -> Outcome:
                with meter:
                    command = [sys.executable, "-m", "tailrace", job, "--dry-run", "-J"]
                    env = environment({"valkey.url": url})
                    subprocess.run(command, env=env, cwd=folder, stdout=subprocess.DEVNULL, check=True)
                return Outcome(x)

            memory: Any = store.client().info("memory")
            used = int(memory["used_memory"])
            jobs = [Job(job, partial(walk, job)) for job in ("pack", "sweep")]
            bench.rounds(f"{x:,} streams walked", jobs, table="scale-streams", x=x, unit="streams")
            bench.note(f"{x:,} streams walked", "in Valkey", table="scale-streams", x=x, **{"bytes each": used // x})


def _connections(bench: Bench) -> None:
    """Let one service process hold very many feeds of one search."""
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder, stack(Path(folder), {}) as running:
        create(running.bootstrap, "live", 4)
        sender, own = Sender(running.bootstrap, "live", 4, 20, events(1000)), [running.pids["service"]]
        for x in numbers(bench.options.connections):
            empty = memory_mib(own)
            feeds = sse(running.port, "/v1/grep", {"topics": "live", "q": {"n": {"$gte": -x}}}, each=x, stride=4)
            with Readers([feeds]) as readers:
                readers.wait(sender.send(20, 20), 60)
                before, mine = cpu_seconds([os.getpid()]), cpu_seconds(own)
                sent = sender.send(max(20, 200_000 // x // 10), max(4, min(1000, 20_000 // x)))
                [seen] = readers.wait(sent, 30)
                delivered = max(1, seen.events)
                figures = {
                    "cpu_per_m": round((cpu_seconds(own) - mine) * 1e6 / delivered, 2),
                    "with clients and Kafka": round((cpu_seconds([os.getpid()]) - before) * 1e6 / delivered, 2),
                    "KiB each": round(1024 * (memory_mib(own) - empty) / x),
                    "unit": "deliveries",
                    **seen.figures(),
                }
            bench.note(f"{x:,} connections", "service", table="scale-connections", x=x, **figures)
            time.sleep(2)


if __name__ == "__main__":
    quick = {
        "events": 2_000,
        "partitions": "1,4",
        "names": "1,100",
        "folds": "100",
        "searches": "10",
        "tags": "100",
        "streams": "1000",
        "connections": "10,50",
    }
    sys.exit(main("scale", __doc__, options, quick, run))

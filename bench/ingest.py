"""Speed of records from Kafka into day streams, in one run with the bare read and with a plain consumer.

    nothing   one Python consumer reads the topic and drops it: the bare Kafka read
    days      the pipeline: marks, runs, numbers, registry, tails, in Valkey with appendfsync always
    plain     a Python consumer that does one XADD * per event in pipelines of 500: fast to write, repeats on restart

Every figure is the best of several runs over the same records. CPU seconds are of all processes together: Spark, its
Python workers or the consumer, the broker and Valkey.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import valkey
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.meter import cpu_seconds, report
from bench.servers import plans_of, servers
from tailrace.config.settings import load
from tailrace.driver.crew import Crew, in_spark
from tailrace.driver.rota import Rota
from tailrace.driver.shift import Shift
from tailrace.driver.slice import Plan, make_plan
from tailrace.driver.source import hand_count, session
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.kafka.broker import client_properties
from tailrace.log.event import Partition
from tailrace.valkey.shards import Shards, StoreOptions, enlist, prepare

_runs = count()


def job_event(chance: random.Random, jobset: int, i: int) -> bytes:
    """Return an event of about 330 bytes, of which a job's id and a node differ from all others."""
    value = {
        "job_id": f"01hf{chance.getrandbits(80):020x}",
        "queue": f"queue-{jobset % 7}",
        "jobset": f"jobset-{jobset}",
        "type": ("submitted", "leased", "pending", "running", "succeeded")[i % 5],
        "cluster": f"cluster-{jobset % 3}",
        "node": f"node-{chance.randrange(200)}.example",
        "created": "2026-11-15T10:00:00.000Z",
        "resources": {"cpu": 4, "memory": "16Gi", "gpu": 0},
        "message": "Container started",
        "attempt": 1,
    }
    return json.dumps(value).encode()


def produce(bootstrap: str, topic: str, partitions: int, names: int, events: int) -> None:
    """Fill a topic with job events of about 330 bytes."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result()
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    chance = random.Random(1)
    for i in range(events):
        jobset = chance.randrange(names)
        key = json.dumps([f"queue-{jobset % 7}", f"jobset-{jobset}"]).encode()
        producer.produce(topic, key=key, value=job_event(chance, jobset, i))
        if i % 10_000 == 0:
            producer.poll(0)
    producer.flush()


class Spark:
    """Runs the pipeline's hands over one topic."""

    def __init__(self, bootstrap: str, url: str) -> None:
        self.settings = load(flags={"kafka.bootstrap": bootstrap, "valkey.url": url})
        self.spark = session(self.settings, hands=True)

    def run(self, topic: str, partitions: int, events: int) -> float:
        """Write the whole topic; return events per second."""
        plan, shards = self._plan()
        shift = Shift(plan, "intake", 0, 0, client_properties(self.settings), frozenset(), 1.0)
        rota = Rota(shards, "intake", plan.epoch, *hand_count(self.settings, self.spark))
        crew = Crew(in_spark(self.spark), rota, shift, 900.0)
        crew.tick()
        reported = (0, ("HMGET", shards.keys.hands("intake"), *(f"report:{hand}" for hand in rota.hands)))
        while None in shards.run_all([reported])[0]:  # until processes are there, as when records come to a pipeline
            time.sleep(0.02)
        began = time.perf_counter()
        rota.assign({Partition(topic, p): 0 for p in range(partitions)})
        while sum(crew.report().done.values()) < events:
            time.sleep(0.02)
            crew.tick()
        spent = time.perf_counter() - began
        crew.stop()
        shards.close()
        return events / spent

    def _plan(self) -> tuple[Plan, Shards]:
        flags = {"kafka.bootstrap": self.settings.kafka.bootstrap, "valkey.url": self.settings.valkey.url}
        settings = load(flags={**flags, "valkey.prefix": f"b{next(_runs)}"})
        shards = Shards(StoreOptions.of(settings.valkey)).open()
        prepare(shards)
        views = ("intake", "days")
        return make_plan(settings, shards, plans_of(settings, views), enlist(shards, views)), shards

    def pids(self) -> list[int]:
        gateway = self.spark.sparkContext._gateway
        return [gateway.proc.pid, os.getpid()]


def nothing(bootstrap: str, topic: str, partitions: int, events: int) -> float:
    """Read and drop; return events per second."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "nothing", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
    read, began = 0, time.perf_counter()
    while read < events:
        read += len(consumer.consume(10_000, timeout=0.1))
    spent = time.perf_counter() - began
    consumer.close()
    return read / spent


def plain(bootstrap: str, port: int, topic: str, partitions: int, events: int) -> float:
    """One XADD per event, ids from the server, 500 in a pipeline; return events per second."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "plain", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
    store = valkey.Valkey(port=port)
    prefix = f"plain{next(_runs)}"
    read, began = 0, time.perf_counter()
    while read < events:
        messages = consumer.consume(500, timeout=1.0)
        pipeline = store.pipeline(transaction=False)
        for message in messages:
            pipeline.execute_command("XADD", f"{prefix}:{message.key()!r}", "*", "d", message.value())
        pipeline.execute()
        read += len(messages)
    spent = time.perf_counter() - began
    consumer.close()
    return read / spent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=400_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--partitions", default="2,20,100")
    parser.add_argument("--names", default="500,50000")
    options = parser.parse_args()
    with servers() as (kafka, store, _):
        measure(options, kafka, store)
    return 0


def measure(options: argparse.Namespace, kafka: EmbeddedKafka, store: EmbeddedValkey) -> None:
    """Run every job over every topic and print the results."""
    spark = Spark(kafka.address, store.url)
    servers = [pid for pid in (kafka.pid, store.pid) if pid]
    rows: list[dict[str, Any]] = []
    events = options.events
    for partitions in map(int, options.partitions.split(",")):
        bare = 0.0
        for names in map(int, options.names.split(",")):
            topic = f"p{partitions}-n{names}"
            produce(kafka.address, topic, partitions, names, events)
            jobs: dict[str, tuple[list[int], Callable[[], float]]] = {}
            if not bare:
                jobs["nothing"] = ([os.getpid()], partial(nothing, kafka.address, topic, partitions, events))
            jobs["days"] = (spark.pids(), partial(spark.run, topic, partitions, events))
            jobs["plain"] = ([os.getpid()], partial(plain, kafka.address, store.port, topic, partitions, events))
            for kind, (pids, job) in jobs.items():
                rates, costs = [], []
                for _ in range(options.repeat):
                    before = cpu_seconds([*pids, *servers])
                    rates.append(job())
                    costs.append((cpu_seconds([*pids, *servers]) - before) * 1e6 / events)
                    store.client().flushall()
                if kind == "nothing":
                    bare = max(rates)
                rows.append(
                    {
                        "partitions": partitions,
                        "names": names,
                        "job": kind,
                        "events/s": round(max(rates)),
                        "CPU s/M events": round(min(costs), 2),
                        "of nothing": round(max(rates) / bare, 2),
                    }
                )
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    spark.spark.stop()
    report(rows, f"Kafka to day streams, {events:,} events of about 330 bytes, best of {options.repeat}")


if __name__ == "__main__":
    sys.exit(main())

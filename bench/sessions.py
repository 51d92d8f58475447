"""Cost of sessions: telemetry into Valkey, by the pipeline and by the writer library; and its viewers.

    nothing    a Python consumer reads the topic and drops it: the bare Kafka read
    pipeline   Spark reads the topic, and every sample goes into its session's stream, in bursts, exactly once
    writer     `tailrace.SessionWriter` in this process, from arrays, without Kafka and Spark
    viewers    one service process, a writer, and viewers of the RTA protocol, each part a process of its own:
               bench/viewers.py

Records have 20 channels of 100 samples each (`--each`), s16 and f32 by turns; `numbers` are in them as JSON, `base64`
as bytes. `MB/s` are bytes of samples, `stored` the bytes of a stream's entries per sample, compressed. Each figure of
the first three is the best of several runs over the same records. CPU seconds are of all processes together: Spark, its
Python workers or the writer, the broker and Valkey. `of nothing` is a ratio of records per second within this run.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.ingest import Spark, nothing
from bench.meter import cpu_seconds, report
from bench.servers import plans_of, servers
from bench.viewers import watch
from tailrace.config.settings import Settings, load
from tailrace.driver.slice import Plan, make_plan
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.valkey.shards import Shards, StoreOptions, enlist, prepare
from tailrace.views.sessions.burst import parse, unpack
from tailrace.views.sessions.writer import SessionWriter

Row: TypeAlias = dict[str, Any]

VIEW = "sessions"
TYPES = ("s16", "f32")
CHANNELS = [(number, TYPES[number % 2]) for number in range(1, 21)]
WIDTH = sum({"s16": 2, "f32": 4}[type_] for _, type_ in CHANNELS) / len(CHANNELS)
DIFFERENT = 100_000
"""Samples of a channel until they begin again: more than a burst has, so that it is not compressed to nothing."""
MS = 1_000_000
FIRST = 1_794_000_000_000 * MS
CONFIGURATION = {
    "CAR": {
        "channels": [
            {"id": number, "name": f"c{number}", "type": type_, "source": "periodic", "interval": MS}
            for number, type_ in CHANNELS
        ],
        "parameters": [
            {"id": f"c{number}:CAR", "name": f"c{number}", "desc": "one", "conv": "", "channels": [number]}
            for number, _ in CHANNELS
        ],
    }
}
TITLES = {
    "write": "Telemetry into Valkey, from records with 20 channels",
    "viewers": "Viewers of sessions in one service",
}

_runs = count()


def walk(chance: np.random.Generator, type_: str, samples: int) -> np.ndarray[Any, Any]:
    """Return what a sensor may give: a value that wanders, with noise in its last digits."""
    steps = np.cumsum(chance.normal(0, 3, samples)) + chance.normal(0, 1, samples)
    return steps.round().astype("<i2") if type_ == "s16" else (100 + steps).round(2).astype("<f4")


def _values(array: np.ndarray[Any, Any]) -> list[float]:
    return [value if isinstance(value, int) else round(value, 2) for value in array.tolist()]


@cache
def arrays(each: int) -> dict[int, list[bytes]]:
    """Return different samples of each channel, so many in each, as bytes."""
    chance = np.random.default_rng(1)
    return {n: [walk(chance, type_, each).tobytes() for _ in range(DIFFERENT // each)] for n, type_ in CHANNELS}


def templates(form: str, each: int) -> list[str]:
    """Return the JSON of different records, with places for their time and their session."""
    chance = np.random.default_rng(1)
    found = []
    for _ in range(DIFFERENT // each):
        parts = []
        for number, type_ in CHANNELS:
            array = walk(chance, type_, each)
            samples = (
                f'"values":{json.dumps(_values(array), separators=(",", ":"))}'
                if form == "numbers"
                else f'"data":"{base64.b64encode(array.tobytes()).decode()}"'
            )
            parts.append(f'{{"channel":{number},"start":%(start)d,"interval":{MS},{samples}}}')
        found.append(f'{{"type":"data","session":"%(session)s","periodic":[{",".join(parts)}]}}')
    return found


def produce(bootstrap: str, topic: str, partitions: int, records: int, form: str, each: int) -> int:
    """Fill a topic with the telemetry of one session in each partition; return the bytes of its records."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result()
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.kbytes": 1 << 20})
    bindings = [{"identifier": "bench-car", "channelOffset": 0}]
    for partition in range(partitions):
        opened = {"type": "open", "session": f"{topic}-{partition}", "json": {"configBindings": bindings}}
        value = json.dumps({**opened, "configs": {"bench-car": CONFIGURATION}})
        producer.produce(topic, value=value.encode(), partition=partition)
    variants, size = templates(form, each), 0
    for i in range(records):
        partition, start = i % partitions, FIRST + i // partitions * each * MS
        value = variants[i % len(variants)] % {"start": start, "session": f"{topic}-{partition}"}
        size += len(value)
        producer.produce(topic, value=value, partition=partition)
        if i % 100 == 0:
            producer.poll(0)
    producer.flush()
    return size


class Bench(Spark):
    """The servers, a Spark that writes sessions, and what was measured."""

    def __init__(self, options: argparse.Namespace, kafka: EmbeddedKafka, store: EmbeddedValkey, folder: Path) -> None:
        super().__init__(kafka.address, store.url)
        self.options, self.kafka, self.store = options, kafka, store
        self.rows: list[Row] = []
        self.topic = ""

    def tell(self, row: Row) -> None:
        """Note a row."""
        self.rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)

    def given(self) -> Settings:
        """Return settings whose keys are nobody else's."""
        return load(
            flags={
                "kafka.bootstrap": self.kafka.address,
                "valkey.url": self.store.url,
                "valkey.prefix": f"bench{next(_runs)}",
                "pipeline.views": [VIEW],
                "sessions.topics": [self.topic],
                "sessions.begin": "start",
            }
        )

    def _plan(self) -> tuple[Plan, Shards]:
        settings = self.given()
        shards = Shards(StoreOptions.of(settings.valkey)).open()
        prepare(shards)
        views = ("intake", VIEW)
        return make_plan(settings, shards, plans_of(settings, views), enlist(shards, views)), shards

    def everything(self) -> list[int]:
        """Return the processes whose time counts."""
        return [*self.pids(), *(pid for pid in (self.kafka.pid, self.store.pid) if pid)]

    def best(self, row: Row, run: Callable[[], float], samples: int) -> Row:
        """Run something several times; return its best. A run returns samples per second."""
        rates, costs = [], []
        for _ in range(self.options.repeat):
            self.store.client().flushall()
            before = cpu_seconds(self.everything())
            rates.append(run())
            costs.append((cpu_seconds(self.everything()) - before) * 1e6 / samples)
        rate = max(rates)
        return row | {
            "samples/s": round(rate),
            "MB/s": round(rate * WIDTH / 1e6, 1),
            "CPU s/M samples": round(min(costs), 3),
        }

    def write(self) -> None:
        """Write telemetry in both forms, and from memory."""
        partitions, each = self.options.partitions, self.options.each
        record: int = each * len(CHANNELS)
        for form in self.options.forms.split(","):
            samples = self.options.numbers if form == "numbers" else self.options.base64
            records = samples // record
            self.topic = f"{form}-{records}"
            size = produce(self.kafka.address, self.topic, partitions, records, form, each)
            total = records * record
            # The topic has one that opens each session.
            whole = records + partitions

            def through(kind: str, whole: int = whole) -> float:
                if kind == "nothing":
                    return record * nothing(self.kafka.address, self.topic, partitions, whole)
                return record * self.run(self.topic, partitions, whole)

            about = {"form": form, "bytes/sample in Kafka": round(size / total, 2)}
            bare = self.best({"job": "write", "by": "nothing", **about}, partial(through, "nothing"), total)
            self.tell(bare)
            row = self.best({"job": "write", "by": "pipeline", **about}, partial(through, "days"), total)
            self.tell(
                row | {"of nothing": round(row["samples/s"] / bare["samples/s"], 2), "stored": self.stored(total)}
            )
        for size in (each, 10 * each):
            samples = self.options.base64 // (size * len(CHANNELS)) * size * len(CHANNELS)
            arrays(size)
            row = {"job": "write", "by": "writer", "form": f"arrays of {size:,}"}
            row = self.best(row, partial(self._alone, samples, size), samples)
            self.tell(row | {"stored": self.stored(samples)})
        self.store.client().flushall()

    def stored(self, samples: int) -> float:
        """Return the bytes of all entries, per sample, when all samples are there, each once."""
        client: Any = self.store.client()
        size = found = 0
        for name in client.smembers("streams"):
            for _, fields in _entries(client, b"stream:" + name):
                size += len(fields[b"data"])
                found += sum(message.periodic_data.samples for message in parse(unpack(fields[b"data"])).data)
        if found != samples:
            raise SystemExit(f"{found} samples are in the streams, and {samples} were written")
        return round(size / samples, 2)

    def _alone(self, samples: int, each: int) -> float:
        """Write so many samples of one session, so many of a channel with one call."""
        prepared = arrays(each)
        json_ = {"configBindings": [{"identifier": "bench-car", "channelOffset": 0}]}
        with SessionWriter(self.store.url, stream="alone", writer="bench") as writer:
            writer.open("alone", json_, {"bench-car": CONFIGURATION})
            began = time.perf_counter()
            for turn in range(samples // (each * len(CHANNELS))):
                for number, _ in CHANNELS:
                    data = prepared[number][turn % len(prepared[number])]
                    writer.periodic(number, FIRST + turn * each * MS, MS, data=data)
            writer.flush()
            return samples / (time.perf_counter() - began)


def _entries(client: Any, key: bytes) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
    after = b"-"
    while page := client.xrange(key, after, count=100):
        yield from page
        after = b"(" + page[-1][0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=8_000_000, help="samples that are JSON numbers")
    parser.add_argument("--base64", type=int, default=24_000_000, help="samples that are bytes")
    parser.add_argument("--forms", default="numbers,base64")
    parser.add_argument("--each", type=int, default=100, help="samples of a channel in a record")
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--viewers", default="1,100", help="in all, of all sessions")
    parser.add_argument("--sessions", default="1,4", help="at the same time, each in a stream of its own")
    parser.add_argument("--one", type=float, default=0.2, help="the share of viewers of one channel in a mixed run")
    parser.add_argument("--rate", type=float, default=1.0, help="MB/s of all sessions together")
    parser.add_argument("--seconds", type=float, default=12, help="of viewing")
    parser.add_argument("--only", default="", help="run these jobs alone, with commas between: " + ", ".join(TITLES))
    options = parser.parse_args()
    jobs = set(options.only.split(",")) - {""} or set(TITLES)
    if unknown := jobs - set(TITLES):
        raise SystemExit(f"no such job: {', '.join(sorted(unknown))}; there are {', '.join(TITLES)}")
    rows: list[Row] = []
    if "write" in jobs:
        with servers() as (kafka, store, folder):
            bench = Bench(options, kafka, store, folder)
            bench.write()
            bench.spark.stop()
            rows += bench.rows
    if "viewers" in jobs:
        rows += watch(options)
    for job, title in TITLES.items():
        report([row for row in rows if row["job"] == job], title)
    return 0


if __name__ == "__main__":
    sys.exit(main())

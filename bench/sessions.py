"""Cost of sessions: telemetry into Valkey, by the pipeline and by the writer library; and its viewers.

    nothing         the bare read of the same topic
    pipeline        Spark reads the topic, and every sample goes into its session's stream, in bursts, exactly once
    SessionWriter   `tailrace.SessionWriter` in this process, from arrays, without Kafka and Spark
    viewers         one service process, a writer, and viewers of the RTA protocol, each part a process of its own:
                    bench/viewers.py

Records have 20 channels of 100 samples each (`--each`), s16 and f32 by turns; `numbers` are in them as JSON, `base64`
as bytes. `MB/s` are bytes of samples, `stored` the bytes of a stream's entries per sample, compressed. CPU seconds are
per million samples, of all processes together. Afterwards the samples in the streams are counted.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from confluent_kafka import Producer

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.events import create
from bench.jobs import Bench, Check, Job, Outcome, chosen, main
from bench.lane import Lane
from bench.meter import Meter
from bench.peers.task import Task, run_peer
from bench.servers import servers
from bench.viewers import watch
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.views.sessions.burst import parse, unpack
from tailrace.views.sessions.writer import SessionWriter

Row: TypeAlias = dict[str, Any]

VIEW = "sessions"
JOBS = ("write", "viewers")
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


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--numbers", type=int, default=6_000_000, help="samples that are JSON numbers")
    parser.add_argument("--base64", type=int, default=20_000_000, help="samples that are bytes")
    parser.add_argument("--forms", default="numbers,base64")
    parser.add_argument("--each", type=int, default=100, help="samples of a channel in a record")
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--viewers", default="1,100", help="in all, of all sessions")
    parser.add_argument("--sessions", default="1,4", help="at the same time, each in a stream of its own")
    parser.add_argument("--one", type=float, default=0.2, help="the share of viewers of one channel in a mixed run")
    parser.add_argument("--rate", type=float, default=1.0, help="MB/s of all sessions together")
    parser.add_argument("--seconds", type=float, default=8, help="of viewing")
    parser.add_argument("--only", default="", help="run these jobs alone, with commas between: " + ", ".join(JOBS))


def run(bench: Bench) -> None:
    jobs = chosen(bench.options.only, JOBS)
    if "write" in jobs:
        with servers() as (kafka, store, _):
            bench.servers = {"Valkey": store.pid or 0, "Kafka": kafka.pid or 0}
            lane = Lane(kafka.address, store.url)
            _write(bench, lane, kafka.address, store)
            lane.stop()
    if "viewers" in jobs:
        for case, row in watch(bench.options):
            bench.note(case, "**one service**", table="sessions-viewers", **row)


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
    create(bootstrap, topic, partitions)
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


def _write(bench: Bench, lane: Lane, bootstrap: str, store: EmbeddedValkey) -> None:
    """Write telemetry in both forms, and from memory."""
    given, each, record = bench.options, bench.options.each, bench.options.each * len(CHANNELS)
    for form in given.forms.split(","):
        records = (given.numbers if form == "numbers" else given.base64) // record
        topic = f"{form}-{records}"
        size = produce(bootstrap, topic, given.partitions, records, form, each)
        # The topic has one that opens each session.
        whole, samples = records + given.partitions, records * record
        task = Task(bootstrap, topic, "", whole, 0, store.url, "")
        pipeline = Job("**pipeline**", partial(_through, lane, store, task, given.partitions, samples))
        if form == given.forms.split(",")[0] and not given.quick:
            bench.warm(pipeline)
        case = f"{form}, {size / samples:.2f} bytes a sample in Kafka"
        bench.rounds(case, [Job("nothing", partial(_bare, task, samples), lane.pids), pipeline], unit="samples")
    jobs = []
    for size in (each, 10 * each):
        samples = given.base64 // (size * len(CHANNELS)) * size * len(CHANNELS)
        arrays(size)
        jobs.append(Job(f"**SessionWriter**, arrays of {size:,}", partial(_alone, store, samples, size), lane.pids))
    bench.rounds("from memory", jobs, unit="samples")


def _bare(task: Task, samples: int, meter: Meter) -> Outcome:
    run_peer(meter, sys.executable, "bare", task)
    return Outcome(samples)


def _through(lane: Lane, store: EmbeddedValkey, task: Task, partitions: int, samples: int, meter: Meter) -> Outcome:
    flags = lane.flags(pipeline__views=[VIEW], sessions__topics=[task.topic], sessions__begin="start")
    shards = lane.run(meter, task.topic, partitions, task.events, [VIEW], flags)
    shards.close()
    return _stored(store, samples, meter)


def _stored(store: EmbeddedValkey, samples: int, meter: Meter) -> Outcome:
    """Return the outcome, whose check counts the samples in all streams."""
    figures: Row = {"MB/s": round(samples * WIDTH / 1e6 / meter.seconds, 1)}

    def check() -> Check:
        client: Any = store.client()
        size = found = 0
        for name in client.smembers("streams"):
            for _, fields in _entries(client, b"stream:" + name):
                size += len(fields[b"data"])
                found += sum(message.periodic_data.samples for message in parse(unpack(fields[b"data"])).data)
        figures["stored, bytes/sample"] = round(size / samples, 2)
        return Check.of_counts(found, samples)

    return Outcome(samples, check, figures, store.client().flushall)


def _alone(store: EmbeddedValkey, samples: int, each: int, meter: Meter) -> Outcome:
    """Write so many samples of one session, so many of a channel with one call."""
    prepared = arrays(each)
    json_ = {"configBindings": [{"identifier": "bench-car", "channelOffset": 0}]}
    with SessionWriter(store.url, stream="alone", writer="bench") as writer:
        writer.open("alone", json_, {"bench-car": CONFIGURATION})
        with meter:
            for turn in range(samples // (each * len(CHANNELS))):
                for number, _ in CHANNELS:
                    data = prepared[number][turn % len(prepared[number])]
                    writer.periodic(number, FIRST + turn * each * MS, MS, data=data)
            writer.flush()
    return _stored(store, samples, meter)


def _entries(client: Any, key: bytes) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
    after = b"-"
    while page := client.xrange(key, after, count=100):
        yield from page
        after = b"(" + page[-1][0]


if __name__ == "__main__":
    quick = {"numbers": 100_000, "base64": 100_000, "viewers": "1,5", "sessions": "1", "one": 0, "seconds": 1}
    sys.exit(main("sessions", __doc__, options, quick, run))

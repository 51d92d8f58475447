"""Our pipeline alive: how late folds are, and what it costs to hold very many that are not due."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from confluent_kafka import Producer, TopicPartition

from bench.meter import cpu_seconds, percentile
from bench.peers.posts import QUIET_MS, RATE, post, posts
from bench.pipeline import Installation, Pipeline, reader

WARM_S = 15.0
"""A JVM compiles what it runs often: folds that are due so soon say nothing about the rest of the day."""
HOUR_MS = 3_600_000


class Ear(threading.Thread):
    """Hears every fold as it comes: its lateness in Kafka and at a consumer, and how many posts it has."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(daemon=True)
        self._brokers, self._topic = bootstrap, topic
        self.heard: list[tuple[float, float, float]] = []
        """When it was due, and how late it was in each place."""
        self.inputs = 0
        self._stopping = threading.Event()

    def run(self) -> None:
        consumer = reader(self._brokers)
        consumer.assign([TopicPartition(self._topic, 0, 0)])
        while not self._stopping.is_set():
            for message in consumer.consume(500, 0.1):
                now = time.time()
                if message.error():
                    continue
                fold = json.loads(message.value() or b"")
                due = datetime.fromisoformat(fold["due"]).timestamp()
                self.heard.append((due, message.timestamp()[1] / 1000 - due, now - due))
                self.inputs += fold["count"]
        consumer.close()

    def stop(self) -> None:
        """Stop hearing."""
        self._stopping.set()
        self.join(10)


def send(bootstrap: str, topic: str, seconds: float, accounts: int, burst: int) -> int:
    """Send posts at their own pace; return how many."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
    began, sent = time.time(), 0
    for one in posts(int(RATE * seconds), accounts, burst):
        pause = began + one.at / 1000 - time.time()
        if pause > 0.002:
            producer.poll(0)
            time.sleep(pause)
        producer.produce(topic, one.value, one.account.encode())
        sent += 1
    producer.flush()
    return sent


def late(pipeline: Pipeline, installation: Installation, topic: str, seconds: float, options: Any) -> dict[str, Any]:
    """Return how late the folds of live posts are."""
    ear = Ear(installation.bootstrap, installation.output("live"))
    pipeline.wait("the first marks", lambda: _begun(installation))
    ear.start()
    began = time.time()
    sent = send(installation.bootstrap, topic, WARM_S + seconds, options.accounts, options.burst)
    pipeline.wait(f"{sent:,} posts in folds", lambda: ear.inputs >= sent, 60)
    time.sleep(1)
    ear.stop()
    if ear.inputs != sent:
        raise SystemExit(f"late: {ear.inputs:,} posts are in folds, of {sent:,}")
    heard = [(kafka, at_reader) for due, kafka, at_reader in ear.heard if due >= began + WARM_S]
    in_kafka, received = [[1000 * one[i] for one in heard] for i in (0, 1)]
    return {
        "folds": len(heard),
        **_spread("in Kafka", in_kafka),
        **_spread("received", received),
    }


def _begun(installation: Installation) -> bool:
    shards = installation.shards
    return bool(shards.run_all([(0, ("EXISTS", shards.keys.status("folds")))])[0])


def _spread(what: str, values: Sequence[float]) -> dict[str, Any]:
    return {f"{what} p{share} ms": round(percentile(values, share / 100)) for share in (50, 99)}


def idle(pids: Sequence[int], seconds: float) -> dict[str, Any]:
    """Return what processes cost while nothing comes."""
    time.sleep(10)
    before = cpu_seconds(pids)
    time.sleep(seconds)
    return {"% of a core": round(100 * (cpu_seconds(pids) - before) / seconds, 1)}


def hold(pipeline: Pipeline, installation: Installation, topic: str, groups: int) -> None:
    """Let the pipeline hold this many open folds."""
    producer = Producer({"bootstrap.servers": installation.bootstrap, "linger.ms": 20})
    chance = random.Random(7)
    for account in range(groups):
        producer.produce(topic, post(chance, account), f"account_{account}".encode())
        if account % 10_000 == 0:
            producer.flush()
    producer.flush()
    pipeline.wait(f"{groups:,} open folds", lambda: installation.pending() >= groups)


def alive(
    bootstrap: str, url: str, folder: Path, servers: Sequence[int], topics: tuple[str, str], options: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the pipeline on two empty topics; yield how late it is, and what it costs idle."""
    live, pending = topics
    installation = Installation(bootstrap, url, {"live": (live, QUIET_MS), "pending": (pending, HOUR_MS)})
    with Pipeline(installation, folder / "pipeline.log") as pipeline:
        pids = [pipeline.pid, *servers]
        yield f"{RATE:,} posts/s", late(pipeline, installation, live, options.seconds, options)
        yield "idle, nothing open", idle(pids, options.idle)
        hold(pipeline, installation, pending, options.pending)
        yield f"idle, {options.pending:,} open", idle(pids, options.idle)

"""The pipeline as it is run, with its view of folds alone.

A rule has what others lack: a longest wait, a largest count and size, and the inputs of each fold, which is given out
exactly once.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from bench.jobs import Check, Outcome
from bench.lane import given
from bench.meter import Meter
from bench.peers.posts import QUIET_MS
from bench.servers import environment
from tailrace.driver.job import Driver
from tailrace.valkey.marks import read_counts
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.views import VIEWS
from tailrace.views.folds.store import rules_of

PATIENCE_S = 300.0

_installations = count()


def rule(quiet_ms: int) -> dict[str, Any]:
    """Return the rule, but for where it reads and writes."""
    return {"group": ["account_id"], "collect": {"metrics": "keys metrics"}, "quiet": f"{quiet_ms}ms"}


class Installation:
    """Settings, keys and topics of its own; ``rules`` says which topic each rule reads and how long it is quiet."""

    def __init__(self, bootstrap: str, url: str, rules: dict[str, tuple[str, int]]) -> None:
        self.bootstrap, self.rules = bootstrap, rules
        self.name = f"ours{next(_installations)}"
        self.flags: dict[str, Any] = {
            "kafka.bootstrap": bootstrap,
            "kafka.topics": [topic for topic, _ in rules.values()],
            "kafka.positions": f"{self.name}.positions",
            "kafka.dead_letters": f"{self.name}.dead-letters",
            "valkey.url": url,
            "valkey.prefix": self.name,
            "pipeline.views": ["folds"],
            "folds.begin": "start",
            "folds.rules": {
                name: {"topics": [topic], "output": self.output(name), **rule(quiet_ms)}
                for name, (topic, quiet_ms) in rules.items()
            },
        }
        self.settings = given(self.flags)
        self.shards = Shards(StoreOptions.of(self.settings.valkey))

    def output(self, rule: str) -> str:
        """Return the topic of a rule's folds."""
        return f"{self.name}.{rule}"

    def folded(self, rule: str) -> int:
        """Return how many events the rule has taken."""
        return read_counts(self.shards, "folds").get(f"input:{rule}", 0)

    def pending(self) -> int:
        """Return how many groups are open, and folds not published."""
        keys = self.shards.keys
        asked = [keys.outbox(s) for s in range(self.shards.options.shards)]
        commands: list[Any] = [(s, ("XLEN", key)) for s, key in enumerate(asked)]
        rules = rules_of(self.settings).values()
        commands += [(s, ("ZCARD", keys.due(s, rule.key_suffix))) for s in range(len(asked)) for rule in rules]
        return sum(map(int, self.shards.run_all(commands)))


def fold(meter: Meter, spark: Any, bootstrap: str, url: str, topic: str, events: int) -> Outcome:
    """Fold a whole topic, from the moment that the driver has begun until the last fold is in Kafka."""
    installation = Installation(bootstrap, url, {"posts": (topic, QUIET_MS)})
    stopping = threading.Event()
    job = threading.Thread(target=Driver(installation.settings, spark, VIEWS).run, args=(stopping,), daemon=True)
    with meter:
        job.start()
        try:
            _wait("a start", lambda: _prepared(installation), job)
            began = time.perf_counter()
            _wait("all posts folded", lambda: installation.folded("posts") >= events, job)
            _wait("all folds published", lambda: not installation.pending(), job)
            seconds = time.perf_counter() - began
        finally:
            stopping.set()
            job.join(60)
    meter.seconds = seconds
    folds = records(bootstrap, installation.output("posts"))

    def check() -> Check:
        """Compare the inputs that folds name with the records that there are."""
        seen: Counter[tuple[int, int]] = Counter()
        for record in folds:
            for source in record["inputs"]:
                for first, last in source["offsets"]:
                    seen.update((source["partition"], offset) for offset in range(first, last + 1))
        return Check(events, events - len(seen), seen.total() - len(seen))

    return Outcome(events, check, {"folds": len(folds)})


def emitted_folds(url: str, prefix: str, rule: str, events: int) -> int:
    """Return the number of folds that a rule emitted for so many events, once nothing is open."""
    shards = Shards(StoreOptions(url, prefix=prefix))
    counts: dict[str, int] = {}
    for view in ("folds", "publishers"):
        counts |= read_counts(shards, view)
    open_ = sum(shards.run_all([(s, ("ZCARD", shards.keys.due(s, rule))) for s in range(shards.options.shards)]))
    shards.close()
    if counts.get(f"input:{rule}") != events or open_:
        raise SystemExit(f"library: {counts} and {open_:,} open, of {events:,} events")
    return counts[f"emitted:{rule}"]


def _prepared(installation: Installation) -> bool:
    return bool(installation.shards.run_all([(0, ("EXISTS", installation.shards.keys.meta(0)))])[0])


def _wait(what: str, condition: Callable[[], object], job: threading.Thread) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline or not job.is_alive():
            raise SystemExit(f"ours: not within {PATIENCE_S:g} s, or the job ended: {what}")
        time.sleep(0.1)


def records(bootstrap: str, topic: str) -> list[dict[str, Any]]:
    """Return all folds of a topic with one partition."""
    consumer = reader(bootstrap)
    _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=10)
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[dict[str, Any]] = []
    while consumer.position([TopicPartition(topic, 0)])[0].offset < end:
        found += [json.loads(message.value() or b"") for message in consumer.consume(1000, 0.5) if not message.error()]
    consumer.close()
    return found


def reader(bootstrap: str) -> Consumer:
    """Return a consumer of what is committed."""
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "bench",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )


class Pipeline:
    """``tailrace run`` in a process of its own."""

    def __init__(self, installation: Installation, log: Path) -> None:
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tailrace", "run"],
                env=environment(installation.flags),
                cwd=log.parent,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.pid = self._process.pid

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def wait(self, what: str, condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + patience_s
        while not condition():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise SystemExit(
                    f"not within {patience_s:g} s: {what}; the pipeline said: {self._log.read_text()[-2000:]}"
                )
            time.sleep(0.1)

"""Base of the fault tests: the pipeline as a process of its own, a load that remembers what Kafka acknowledged, and
the comparison of that with what the view holds.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from itertools import count, islice
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, Producer

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.log.event import shard_of
from tailrace.testing.installation import Installation, PipelineProcess, wait_for
from tailrace.valkey.marks import conserved
from tests.writing import read_view

IDLE_SHARD = 3
"""The shard that no name of a load is in."""


class LoadedInstallation(Installation):
    """An installation that knows what was sent to it."""

    def __init__(self, kafka: EmbeddedKafka, valkey_url: str, folder: Path) -> None:
        super().__init__(kafka.address, valkey_url, folder)
        self.loads: list[Load] = []

    def view(self) -> dict[str, list[str]]:
        """Return the ids of every stream, in order."""
        return asyncio.run(read_view(self.store))

    def _loaded(self) -> dict[str, list[str]]:
        """Return the ids of every stream that is no rule's."""
        return {name: ids for name, ids in self.view().items() if not name.startswith("folds/")}

    def wait_stored(self, wanted: int) -> None:
        """Wait until the view has taken so many records."""

        def enough() -> bool:
            seen.append(self.counts().get("stored", 0))
            return seen[-1] >= wanted

        seen = [0]
        try:
            wait_for(f"{wanted} records stored", enough)
        except AssertionError as error:
            raise AssertionError(f"{error}; there were {seen[-1]}. The pipeline said:\n{self.log()}") from None

    def check(self) -> None:
        """Wait until everything acknowledged is in the view; then compare: each once, in order, and nothing else."""
        wanted: dict[str, set[str]] = {}
        for load in self.loads:
            for name, ids in load.acknowledged.items():
                wanted.setdefault(name, set()).update(ids)
        total = sum(map(len, wanted.values()))
        self.wait_stored(total)
        # Folds of a rule are a stream of the view, too, and counted with it.
        wait_for(f"{total} records in streams", lambda: sum(map(len, self._loaded().values())) >= total)
        view = self._loaded()
        assert view.keys() == wanted.keys(), f"other streams: {view.keys() ^ wanted.keys()}"
        for name, ids in view.items():
            assert len(ids) == len(set(ids)), f"{name}: stored twice"
            assert set(ids) == wanted[name], (
                f"{name}: {len(wanted[name] - set(ids))} lost, new {set(ids) - wanted[name]}"
            )
            assert_ordered(ids)
        wait_for("the books to balance", lambda: conserved(self.counts()) == 0)


def assert_ordered(ids: list[str]) -> None:
    """Check that the records of each partition are in the order of their offsets."""
    reached: dict[str, int] = {}
    for event in ids:
        source, _, offset = event.rpartition(":")
        assert int(offset) > reached.get(source, -1), f"{event} comes after offset {reached[source]}"
        reached[source] = int(offset)


class Standing:
    """An installation whose pipeline is left running from one test to the next, since a start takes long."""

    def __init__(self, installation: LoadedInstallation, **changes: str) -> None:
        self.installation = installation
        self._changes = changes
        self._started: list[PipelineProcess] = []

    def __enter__(self) -> Standing:
        return self

    def __exit__(self, *_: object) -> None:
        for pipeline in self._started:
            pipeline.__exit__()

    def pipeline(self, *, wait: bool = True) -> PipelineProcess:
        """Return the pipeline that runs; start one if the last test has ended it."""
        if self._started and self._started[-1].exit_code is None:
            return self._started[-1]
        return self.another(wait=wait)

    def another(self, *, wait: bool = True) -> PipelineProcess:
        """Start one more."""
        pipeline = PipelineProcess(self.installation, f"pipeline-{len(self._started):03d}", **self._changes)
        self._started.append(pipeline)
        return pipeline.start(wait=wait)


class Load:
    """Producers' work: records with unique values for many names and partitions, until ``finish``.

    Use as ``with``: it goes on in a thread. What Kafka acknowledged is in ``acknowledged``, by stream name.
    """

    def __init__(
        self, installation: LoadedInstallation, topic: str, *, partitions: int = 3, names: int = 50, rate: int = 400
    ) -> None:
        installation.loads.append(self)
        self.topic = topic
        self.acknowledged: dict[str, list[str]] = {}
        self.failures: list[str] = []
        self._partitions, self._rate = partitions, rate
        # One shard gets nothing, so that it lags behind the others at any moment: a start has something to replay.
        candidates = (f"set-{i}" for i in count())
        self._names = list(islice((name for name in candidates if shard_of(f"q/{name}", 4) != IDLE_SHARD), names))
        self._producer = Producer(
            {
                "bootstrap.servers": installation.kafka,
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 5,
                "delivery.timeout.ms": 120_000,
                "reconnect.backoff.max.ms": 500,
                "log_level": 0,
            }
        )
        self._chance = random.Random(topic)
        self._sent = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"load of {topic}", daemon=True)

    @property
    def total(self) -> int:
        """Number of records that Kafka has acknowledged."""
        return sum(map(len, list(self.acknowledged.values())))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Stop and wait for the last acknowledgement."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(150)
        assert not self.failures, self.failures[:3]

    def send(self, n: int) -> Load:
        """Write some records now, and wait for their acknowledgement."""
        for _ in range(n):
            self._produce()
            self._producer.poll(0)
        assert self._producer.flush(120) == 0
        assert not self.failures, self.failures[:3]
        return self

    def wait_more(self, n: int = 400) -> None:
        """Wait until Kafka has acknowledged some more records."""
        wanted = self.total + n
        wait_for(f"{n} more acknowledgements", lambda: self.total >= wanted)

    def _run(self) -> None:
        began, due = time.monotonic(), 0.0
        while not self._stopping.is_set():
            while due < (time.monotonic() - began) * self._rate and len(self._producer) < 50_000:
                self._produce()
                due += 1
            self._producer.poll(0)
            self._stopping.wait(0.02)
        self._producer.flush(140)

    def _produce(self) -> None:
        # Most records are of two names, so most streams are short and some are long.
        name = self._chance.choice(self._names[:2] if self._chance.random() < 0.9 else self._names)
        partition = self._chance.randrange(self._partitions)
        who = f"{partition}-{name}"
        value = {"n": self._sent, "pad": "x" * self._chance.randrange(200), "who": who}
        self._sent += 1

        def delivered(error: KafkaError | None, message: Any) -> None:
            if error is not None:
                self.failures.append(error.str())
            else:
                event = f"{self.topic}:{message.partition()}:{message.offset()}"
                self.acknowledged.setdefault(f"q/{name}", []).append(event)

        self._producer.produce(
            self.topic,
            json.dumps(value).encode(),
            json.dumps(["q", name]).encode(),
            partition=partition,
            on_delivery=delivered,
        )

"""What the fault tests share: the pipeline as a process of its own, a load that remembers what Kafka acknowledged, and
the comparison of that with what the view holds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec
import psutil
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.process import Part, Process, tail
from tailrace.errors import StoreChanged, StoreUnavailable
from tailrace.log.name import shard_of
from tailrace.testing.spark import QUICK_JAVA
from tailrace.valkey.marks import conserved, read_counts
from tailrace.valkey.shards import Shards, StoreOptions
from tests.writing import read_view

PATIENCE_S = 90.0
"""How long a condition is waited for; the machine may be busy with other things."""

IDLE_SHARD = 3
"""The shard that no name of a load is in."""

_installations = count()


def wait_for(what: str, condition: Callable[[], Any], patience_s: float = PATIENCE_S, pause_s: float = 0.1) -> Any:
    """Wait until a condition holds; return what it returned."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what}"
        time.sleep(pause_s)
    return found


class Installation:
    """A part of Kafka and of Valkey that belongs to one test: topics, keys and transactional ids of its own."""

    def __init__(self, kafka: EmbeddedKafka, valkey_url: str, folder: Path) -> None:
        self.kafka = kafka
        self.folder = folder
        self.prefix = f"f{os.getpid()}x{next(_installations)}"
        self.store = StoreOptions(valkey_url, prefix=self.prefix, timeout_s=2.0)
        self.dead_letters = f"{self.prefix}.dead-letters"
        self.admin = AdminClient({"bootstrap.servers": kafka.address, "log_level": 0})
        self.loads: list[Load] = []
        self._shards = Shards(self.store)

    def environment(self, **changes: str) -> dict[str, str]:
        """Return the settings of this installation as variables; ``spark__master="…"`` changes or adds one."""
        settings = {
            "kafka__bootstrap": self.kafka.address,
            "kafka__topics": rf"{self.prefix}\..*",
            "kafka__dead_letters": self.dead_letters,
            "kafka__positions": f"{self.prefix}.positions",
            "valkey__url": self.store.url,
            "valkey__prefix": self.prefix,
            "valkey__timeout": "2s",
            "spark__checkpoint": str(self.folder / "checkpoint"),
            "spark__conf": json.dumps({"spark.driver.extraJavaOptions": QUICK_JAVA}),
            "spark__driver_memory": "512m",
        }
        return {"TAILRACE_CONFIG": os.devnull} | {
            f"TAILRACE_{name.upper()}": value for name, value in (settings | changes).items()
        }

    def topic(self, name: str, partitions: int = 3, **config: str) -> str:
        """Create a topic that this installation's pipeline reads."""
        topic = f"{self.prefix}.{name}"
        self.admin.create_topics([NewTopic(topic, partitions, 1, config=config)])[topic].result(30)
        return topic

    def shards(self) -> Shards:
        """Return a connection to the server process that is there now."""
        try:
            self._shards.run_all([(0, ("PING",))])
        except (StoreChanged, StoreUnavailable):
            self._shards.close()
            self._shards = Shards(self.store)
        return self._shards

    def counts(self, view: str = "days") -> dict[str, int]:
        """Return the view's counters."""
        return read_counts(self.shards(), view)

    def status(self, view: str = "days") -> dict[str, Any]:
        """Return the driver's last report; empty if there is none."""
        shards = self.shards()
        found = shards.run_all([(0, ("GET", shards.keys.status(view)))])[0]
        return {} if found is None else msgspec.json.decode(found, type=dict[str, Any])

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

    def log(self, lines: int = 40) -> str:
        """Return the end of what the pipelines of this installation wrote."""
        return "\n".join(tail(file, lines) for file in sorted(self.folder.glob("pipeline*.log"))[-2:])

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


class Pipeline:
    """One ``tailrace run``, started, killed and started again."""

    def __init__(
        self, installation: Installation, name: str = "pipeline", arguments: Sequence[str] = (), **changes: str
    ) -> None:
        self._part = Part(
            name=name,
            command=(sys.executable, "-m", "tailrace", "run", *arguments),
            log=installation.folder / f"{name}.log",
            env=installation.environment(**changes) | {"PYTHONUNBUFFERED": "1"},
        )
        self._installation = installation
        self._process: Process | None = None

    def __enter__(self) -> Pipeline:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()

    def start(self, *, wait: bool = True) -> Pipeline:
        """Start the process; wait until its query has reported."""
        before = self._installation.status().get("epoch", 0)
        self._process = Process(self._part)
        if wait:
            wait_for("a report of the pipeline", lambda: self._reported(before))
        return self

    def _reported(self, before: int) -> bool:
        assert self.exit_code is None, f"it ended with {self.exit_code}:\n{tail(self._part.log)}"
        report = self._installation.status()
        return bool(report.get("epoch", 0) > before and report["state"] == "running")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        assert self._process is not None
        return self._process.exit_code

    @property
    def log(self) -> str:
        return self._part.log.read_text("utf-8", "replace")

    def signal(self, number: int) -> None:
        """Send a signal to the driver's Python process alone."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End the driver as ``kill -9`` does, and see that nothing of it stays."""
        family = self.family()
        self.signal(signal.SIGKILL)
        self.wait_end()
        self.wait_gone(family)

    def wait_gone(self, family: list[psutil.Process]) -> None:
        """Wait until nothing of a family of processes lives."""
        wait_for("the end of what the driver started", lambda: not any(map(lives, family)), 20)

    def wait_end(self, timeout: float = 60) -> int:
        """Wait for the process to end; return its exit code."""
        assert self._process is not None
        assert self._process.wait(timeout), f"still running after {timeout:g} s:\n{tail(self._part.log)}"
        assert self.exit_code is not None
        return self.exit_code

    def family(self) -> list[psutil.Process]:
        """Return everything the driver has started: the JVM, the daemon, its workers."""
        return list(psutil.Process(self.pid).children(recursive=True))

    def workers(self) -> list[psutil.Process]:
        """Return the Python workers, not the daemon they were forked from."""
        return [p for p in self.family() if lives(p) and _is_python_of_spark(p) and _is_python_of_spark(p.parent())]

    def jvm(self) -> psutil.Process:
        """Return Spark's own process."""
        return next(p for p in self.family() if lives(p) and p.name() == "java")


class Standing:
    """An installation whose pipeline is left running from one test to the next, since a start takes long."""

    def __init__(self, installation: Installation, **changes: str) -> None:
        self.installation = installation
        self._changes = changes
        self._started: list[Pipeline] = []

    def __enter__(self) -> Standing:
        return self

    def __exit__(self, *_: object) -> None:
        for pipeline in self._started:
            pipeline.__exit__()

    def pipeline(self, *, wait: bool = True) -> Pipeline:
        """Return the pipeline that runs; start one if the last test has ended it."""
        if self._started and self._started[-1].exit_code is None:
            return self._started[-1]
        return self.another(wait=wait)

    def another(self, *, wait: bool = True) -> Pipeline:
        """Start one more."""
        pipeline = Pipeline(self.installation, f"pipeline-{len(self._started):03d}", **self._changes)
        self._started.append(pipeline)
        return pipeline.start(wait=wait)


def lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_python_of_spark(process: psutil.Process | None) -> bool:
    # Spark's own command names the module too, among its settings.
    return "-m tailrace.cli.worker" in _command(process)


def _command(process: psutil.Process | None) -> str:
    try:
        return " ".join(process.cmdline()) if process is not None else ""
    except psutil.Error:
        return ""


class Load:
    """Producers' work: records with unique values for many names and partitions, until ``finish``.

    Use as ``with``: it goes on in a thread. What Kafka acknowledged is in ``acknowledged``, by stream name.
    """

    def __init__(
        self, installation: Installation, topic: str, *, partitions: int = 3, names: int = 50, rate: int = 400
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
                "bootstrap.servers": installation.kafka.address,
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
        """How many records Kafka has acknowledged."""
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

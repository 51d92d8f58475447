"""An installation of Tailrace for tests: its part of Kafka and of Valkey, and its pipeline as a process.

An installation has topics, keys and transactional ids of its own, so that many share the servers. A service for it is
``ServiceProcess(installation.store, …)``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import psutil
from confluent_kafka.admin import AdminClient, NewTopic

from tailrace.embedded.process import Part, Process, tail
from tailrace.errors import StoreChanged, StoreUnavailable
from tailrace.testing.spark import QUICK_JAVA
from tailrace.valkey.marks import read_counts
from tailrace.valkey.shards import Shards, StoreOptions

PATIENCE_S = 90.0
"""Seconds to wait for a condition; the machine may be busy with other things."""


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

    def __init__(self, kafka: str, valkey_url: str, folder: Path) -> None:
        self.kafka = kafka
        self.folder = folder
        self.prefix = f"f{os.getpid()}x{next(_installations)}"
        self.store = StoreOptions(valkey_url, prefix=self.prefix, timeout_s=2.0)
        self.dead_letters = f"{self.prefix}.dead-letters"
        self.admin = AdminClient({"bootstrap.servers": kafka, "log_level": 0})
        self._shards = Shards(self.store)

    def environment(self, **changes: str) -> dict[str, str]:
        """Return the settings of this installation as variables; ``spark__master="…"`` changes or adds one."""
        settings = {
            "kafka__bootstrap": self.kafka,
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

    def log(self, lines: int = 40) -> str:
        """Return the end of what the pipelines of this installation wrote."""
        return "\n".join(tail(file, lines) for file in sorted(self.folder.glob("pipeline*.log"))[-2:])


class PipelineProcess:
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

    def __enter__(self) -> PipelineProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()

    def start(self, *, wait: bool = True) -> PipelineProcess:
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

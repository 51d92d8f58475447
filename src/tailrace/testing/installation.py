"""An installation of Tailrace for tests: its part of Kafka and of Valkey, its pipeline and its service.

An installation has topics, keys and transactional ids of its own, so that many share the servers. Pipeline and service
are processes that can be killed; ``ServiceThread`` and ``served`` run a service in the test's own process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec
import psutil
from confluent_kafka.admin import AdminClient, NewTopic

from tailrace.config.settings import Settings, load
from tailrace.embedded.java import QUICK_JAVA as QUICK_JAVA
from tailrace.embedded.process import HOST, Part, Process, free_port, tail
from tailrace.errors import StoreChanged, StoreUnavailable
from tailrace.http.app import Server, create_app, listen
from tailrace.valkey.marks import read_counts
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.views import VIEWS

PATIENCE_S = 90.0
"""Seconds to wait for a condition; the machine may be busy with other things."""
NO_BROKER = "127.0.0.1:1"
"""An address at which nobody listens."""

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
            "spark__conf": json.dumps({"spark.driver.extraJavaOptions": QUICK_JAVA}),
            "spark__driver_memory": "512m",
            "spark__shift": "2s",  # so that tasks take over from each other in every test
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
        return read_counts(self.shards(), view)

    def status(self, view: str = "days") -> dict[str, Any]:
        """Return the driver's last report; empty if there is none."""
        shards = self.shards()
        found = shards.run_all([(0, ("GET", shards.keys.status(view)))])[0]
        return {} if found is None else msgspec.json.decode(found, type=dict[str, Any])

    def log(self, lines: int = 40) -> str:
        """Return the end of what the pipelines of this installation wrote."""
        return "\n".join(tail(file, lines) for file in sorted(self.folder.glob("pipeline*.log"))[-2:])


class CommandProcess:
    """A command of Tailrace as a process. Use as ``with``, or start and kill it."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, env: dict[str, str], **options: Any) -> None:
        command = (sys.executable, "-m", "tailrace", *arguments)
        self._part = Part(name=name, command=command, log=folder / f"{name}.log", env=env, **options)
        self._process: Process | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()

    def start(self) -> Self:
        """Start it, and wait until it answers."""
        self._process = Process(self._part)
        self._process.wait_ready()
        return self

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self.process.kill()

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid


class PipelineProcess(CommandProcess):
    """One ``tailrace run``, started, killed and started again."""

    def __init__(
        self, installation: Installation, name: str = "pipeline", arguments: Sequence[str] = (), **changes: str
    ) -> None:
        env = installation.environment(**changes) | {"PYTHONUNBUFFERED": "1"}
        super().__init__(name, ("run", *arguments), installation.folder, env)
        self._installation = installation

    def start(self, *, wait: bool = True) -> Self:
        """Start the process; wait until its query has reported."""
        before = self._installation.status().get("epoch", 0)
        super().start()
        if wait:
            wait_for("a report of the pipeline", lambda: self._reported(before))
        return self

    def _reported(self, before: int) -> bool:
        assert self.exit_code is None, f"it ended with {self.exit_code}:\n{tail(self._part.log)}"
        report = self._installation.status()
        return bool(report.get("epoch", 0) > before and report["state"] == "running")

    @property
    def exit_code(self) -> int | None:
        return self.process.exit_code

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
        wait_for("the end of what the driver started", lambda: not any(map(lives, family)), 20)

    def wait_end(self, timeout: float = 60) -> int:
        assert self.process.wait(timeout), f"still running after {timeout:g} s:\n{tail(self._part.log)}"
        assert self.exit_code is not None
        return self.exit_code

    def family(self) -> list[psutil.Process]:
        """Return everything the driver has started: the JVM, the daemon, its workers."""
        return list(psutil.Process(self.pid).children(recursive=True))

    def workers(self) -> list[psutil.Process]:
        """Return the Python workers, not the daemon they were forked from."""
        return [p for p in self.family() if lives(p) and _is_python_of_spark(p) and _is_python_of_spark(p.parent())]

    def jvm(self) -> psutil.Process:
        return next(p for p in self.family() if lives(p) and p.name() == "java")


def lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_python_of_spark(process: psutil.Process | None) -> bool:
    try:
        # Spark's own command names the module too, among its settings.
        return process is not None and "-m tailrace.worker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


class ServiceThread:
    """The service in a thread of its own, at a free port. The caller stops it."""

    def __init__(self, settings: Settings) -> None:
        app = create_app(settings, VIEWS)
        self.service = app.state.service
        self.server = Server(app)
        listener = listen(HOST, 0)
        self.port: int = listener.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        self._thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def client(self, **more: Any) -> httpx.Client:
        """Return a client; ``more`` are options of httpx."""
        # Nothing is encrypted here: no certificates are loaded, which takes longer than most tests.
        return httpx.Client(base_url=self.url, timeout=30, trust_env=False, verify=False, **more)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


@contextmanager
def served(store: StoreOptions, **settings: object) -> Iterator[ServiceThread]:
    """Run a service without a broker over a store; ``serve__retry="200ms"`` is the setting ``serve.retry``."""
    at: dict[str, object] = {"valkey.url": store.url, "valkey.prefix": store.prefix, "kafka.bootstrap": NO_BROKER}
    running = ServiceThread(load(Path(os.devnull), at | {name.replace("__", "."): v for name, v in settings.items()}))
    try:
        yield running
    finally:
        running.stop()


class ServiceProcess(CommandProcess):
    """``tailrace serve`` over a store, at a port that it has again when it is started again.

    Its log is ``name`` in the folder; ``serve__retry="200ms"`` is the setting ``serve.retry``.
    """

    def __init__(self, store: StoreOptions, folder: Path, name: str = "serve", **settings: object) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        at = {"valkey__url": store.url, "valkey__prefix": store.prefix, "kafka__bootstrap": NO_BROKER, **settings}
        env = {"TAILRACE_CONFIG": os.devnull} | {f"TAILRACE_{key.upper()}": str(value) for key, value in at.items()}
        super().__init__(name, ("serve", "--port", str(self.port)), folder, env, ready=self._answers)

    def stop(self) -> None:
        self.process.stop()
        assert self.process.exit_code == 0

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(line.split(" ")[1])

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=1, trust_env=False).is_success
        except httpx.TransportError:
            return False

"""The service for tests: in a thread of the test's process, or as a process that can be killed."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tailrace.config.settings import Settings, load
from tailrace.embedded.process import HOST, Part, Process, free_port
from tailrace.http.app import Server, create_app, listen
from tailrace.valkey.shards import StoreOptions
from tailrace.views import VIEWS

NO_BROKER = "127.0.0.1:1"
"""An address at which nobody listens."""


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
        """Stop it, and wait until it has ended."""
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


class ServiceProcess:
    """``tailrace serve``, at a port that it has again when it is started again. Use as ``with``, or start and kill it.

    Args:
        store: The store that it serves.
        folder: Where its log is written.
        name: Of the log.
        settings: More settings; ``serve__retry="200ms"`` is ``serve.retry``.
    """

    def __init__(self, store: StoreOptions, folder: Path, name: str = "serve", **settings: object) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        at = {"valkey__url": store.url, "valkey__prefix": store.prefix, "kafka__bootstrap": NO_BROKER, **settings}
        self._part = Part(
            name=name,
            command=(sys.executable, "-m", "tailrace", "serve", "--port", str(self.port)),
            log=folder / f"{name}.log",
            ready=self._answers,
            env={"TAILRACE_CONFIG": os.devnull} | {f"TAILRACE_{key.upper()}": str(value) for key, value in at.items()},
        )
        self._process: Process | None = None

    def __enter__(self) -> ServiceProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> ServiceProcess:
        """Start it, and wait until it answers."""
        self._process = Process(self._part)
        self._process.wait_ready()
        return self

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """Ask it to end, and wait until it has."""
        assert self._process is not None
        self._process.stop()
        assert self._process.exit_code == 0

    def metric(self, name: str) -> float:
        """Return one of its figures."""
        text = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(line.split(" ")[1])

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=1, trust_env=False).is_success
        except httpx.TransportError:
            return False

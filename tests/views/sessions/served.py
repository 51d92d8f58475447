"""A service of sessions over a real store: in this process, or as one of its own that can be killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tailrace.config.load import load
from tailrace.embedded.process import Part, Process, free_port
from tailrace.valkey.shards import StoreOptions
from tests.http.parts import NO_BROKER, Running


@contextmanager
def served(store: StoreOptions, folder: Path, **more: Any) -> Iterator[Running]:
    """Run a service with these settings on top."""
    empty = folder / "tailrace.toml"
    empty.touch()
    given: dict[str, Any] = {"valkey.url": store.url, "valkey.prefix": store.prefix, "kafka.bootstrap": NO_BROKER}
    running = Running(load(empty, given | {name.replace("__", "."): value for name, value in more.items()}))
    try:
        yield running
    finally:
        running.stop()


class Mortal:
    """``tailrace serve`` as a process, at a port that it has again when it is started again."""

    def __init__(self, store: StoreOptions, folder: Path, **more: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        given = {"valkey__url": store.url, "valkey__prefix": store.prefix, "kafka__bootstrap": NO_BROKER, **more}
        self._part = Part(
            name="serve",
            command=(sys.executable, "-m", "tailrace", "serve", "--port", str(self.port)),
            log=folder / "serve.log",
            ready=self._answers,
            env={"TAILRACE_CONFIG": os.devnull}
            | {f"TAILRACE_{key.upper()}": str(value) for key, value in given.items()},
        )
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = Process(self._part)
        self._process.wait_ready()

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        if self._process is not None:
            self._process.kill()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=1, trust_env=False).is_success
        except httpx.TransportError:
            return False

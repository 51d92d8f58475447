"""The service as a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

import httpx

from tailrace.embedded.process import Part, Process, free_port
from tests.views.grep.site import Site


class Served:
    """``tailrace serve`` as a process, at a port that it has again when it is started again. Use as ``with``."""

    def __init__(self, site: Site, folder: Path, name: str = "serve", **changes: object) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        given = {
            "kafka__bootstrap": site.kafka,
            "kafka__topics": rf"{site.name}\..*",
            "valkey__url": site.store.url,
            "valkey__prefix": site.store.prefix,
            "serve__retry": "200ms",
            **changes,
        }
        settings = {f"TAILRACE_{key.upper()}": str(value) for key, value in given.items()}
        self._part = Part(
            name=name,
            command=(sys.executable, "-m", "tailrace", "serve", "--port", str(self.port)),
            log=folder / f"{name}.log",
            ready=self._answers,
            env={"TAILRACE_CONFIG": os.devnull} | settings,
        )
        self._process: Process | None = None

    def __enter__(self) -> Served:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Served:
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
        """Return a figure of the process."""
        text = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(line.split(" ")[1])

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=1, trust_env=False).is_success
        except httpx.TransportError:
            return False

"""What the embedded servers have in common: a folder, a port, and a process that runs on them.

Invariant: while a server that was started lives, ``start`` starts no second one on its folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from tailrace.embedded.ports import HOST
from tailrace.embedded.process import Part, Process


class EmbeddedServer(ABC):
    """A server whose data lives in one folder."""

    start_s: ClassVar[float] = 30.0
    """How long it may take to come up, unless the caller says otherwise."""
    stop_s: ClassVar[float] = 10.0

    def __init__(self, folder: Path, port: int, log: Path) -> None:
        self.folder, self.port, self.log = folder, port, log
        self._process: Process | None = None

    @property
    def address(self) -> str:
        """``host:port`` for clients."""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process started by ``start``, while it runs."""
        return self._process.pid if self._process and self._process.exit_code is None else None

    @abstractmethod
    def part(self) -> Part:
        """Make the folder ready, and say how to run the server on it."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the server answers, and is the one of this folder."""

    def start(self, timeout: float | None = None) -> None:
        """Start the server and wait until it answers; it ends with the thread that called this.

        Raises:
            EmbeddedError: It did not come up; with the end of its log.
        """
        if self.pid is not None:
            return
        self._process = Process(self.part())
        self._process.wait_ready(self.start_s if timeout is None else timeout)

    def stop(self, timeout: float | None = None) -> None:
        """End the server cleanly."""
        if self._process:
            self._process.stop(self.stop_s if timeout is None else timeout)

    def kill(self) -> None:
        """End the server as ``kill -9`` does."""
        if self._process:
            self._process.kill()

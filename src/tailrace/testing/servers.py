"""Servers that all processes of a test run share.

The first process that needs a server starts it; the others find its ports in a file. A server ends with the process
that started it, so that process waits in ``close`` until nobody uses the server any more. Tests keep apart by topics,
key prefixes and keyspaces. A test that kills, stops or empties a server needs one of its own.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from tailrace.embedded.process import EmbeddedServer

S = TypeVar("S", bound=EmbeddedServer)

_POLL_S = 0.1


class _Shared(msgspec.Struct):
    """The file of one kind of server."""

    owner: int
    """Process that started it."""
    ports: list[int]
    users: list[int]
    folder: str


class SharedServers:
    """The servers of one test run, in a folder that all its processes know. Call ``close`` at the end of each process.

    Args:
        folder: Where the servers keep their data, and what this class needs to know of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used: dict[str, Sequence[EmbeddedServer]] = {}

    def use(
        self, name: str, start: Callable[[Path], Sequence[S]], attach: Callable[[Path, Sequence[int]], Sequence[S]]
    ) -> Sequence[S]:
        """Return the servers of this name; start them if no living process has.

        Args:
            name: What they are called in this run.
            start: Start them on a folder that is theirs.
            attach: Make objects for servers that run on this folder at these ports, and start nothing.
        """
        with self._locked(name) as file:
            shared = _read(file)
            if shared is not None and _lives(shared.owner):
                servers = attach(Path(shared.folder), shared.ports)
                shared.users.append(os.getpid())
                self._used[name] = ()
            else:
                folder = self._folder / f"{name}-{os.getpid()}"
                servers = self._used[name] = start(folder)
                shared = _Shared(os.getpid(), [server.port for server in servers], [], str(folder))
            file.write_bytes(msgspec.json.encode(shared))
        return servers

    def close(self) -> None:
        """Let go of all servers; stop those that this process started when no other one uses them."""
        for name in self._used:
            with self._locked(name) as file:
                shared = _read(file)
                if shared is not None and os.getpid() in shared.users:
                    shared.users.remove(os.getpid())
                    file.write_bytes(msgspec.json.encode(shared))
        for name, servers in self._used.items():
            if servers:
                self._stop(name, servers)
        self._used.clear()

    def _stop(self, name: str, servers: Sequence[EmbeddedServer]) -> None:
        while True:
            with self._locked(name) as file:
                shared = _read(file)
                if shared is None or not any(map(_lives, shared.users)):
                    file.unlink(missing_ok=True)
                    break
            time.sleep(_POLL_S)
        for server in servers:
            server.stop()

    @contextmanager
    def _locked(self, name: str) -> Iterator[Path]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self._folder / f"{name}.json"


def _read(file: Path) -> _Shared | None:
    return msgspec.json.decode(file.read_bytes(), type=_Shared) if file.exists() else None


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()

"""Child processes, their ports, and the embedded servers that run on a folder and a port.

Every child leads its own session, so a Ctrl-C in the terminal reaches the owner alone, and everything that the child
starts (Spark's JVM, Python workers, which change their process group) can be found and ended by session. On Linux the
kernel ends the child when the thread that started it ends, for whatever reason: start children from a long-lived
thread.

A chosen port is always below the range of ephemeral ports. Otherwise a client that keeps trying to reach a dead server
on this machine may get the server's port as its own, connect to itself, and keep the server from ever coming back.

Invariant: while a server that was started lives, ``start`` starts no second one on its folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Final

import msgspec
import psutil

from tailrace.errors import DirectoryInUse, EmbeddedError, PrerequisiteMissing

LOCK_FILE: Final = "lock"
_LOG_LIMIT: Final = 10 * 1024 * 1024

# PR_SET_PDEATHSIG must be set in the child. Python code between fork and exec (preexec_fn) may deadlock in a process
# with threads, and librdkafka has some; so a tiny interpreter sets it and becomes the command, with the same pid.
_SHIM: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A command to run, and a check that it serves."""

    name: str
    command: tuple[str, ...]
    log: Path
    """File for its output; kept across restarts."""
    ready: Callable[[], bool] | None = None
    """Returns whether it serves, within two seconds, without raising, in any thread. None: nobody waits for it."""
    at_once: bool = False
    """Whether it copes with parts before it that do not serve yet, so that a supervisor need not wait for them."""
    env: Mapping[str, str] = {}
    """Variables on top of the environment of this process."""
    ready_timeout: float = 60.0
    stop_timeout: float = 10.0


class Process:
    """A running part. The owner calls ``stop`` or ``kill``; both end its whole session."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.began = time.monotonic()
        part.log.parent.mkdir(parents=True, exist_ok=True)
        if part.log.exists() and part.log.stat().st_size > _LOG_LIMIT:
            part.log.replace(part.log.with_suffix(part.log.suffix + ".1"))
        shim = [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid())] if sys.platform == "linux" else []
        with part.log.open("ab") as log:
            self._popen = subprocess.Popen(
                [*shim, *part.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **part.env},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its session."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs, negative if a signal ended it."""
        return self._popen.poll()

    def signal(self, number: int) -> None:
        if self.exit_code is None:
            self._popen.send_signal(number)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end; return False if it still runs after the time-out."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)
        return self.exit_code is not None

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until it serves; EmbeddedError, with the end of its log, if it ended or was too slow, and was killed."""
        while self.part.ready and not self.part.ready():
            if problem := self.problem(timeout):
                self.kill()
                raise failure(self.part, problem)
            time.sleep(0.05)

    def problem(self, timeout: float | None = None) -> str | None:
        """Return why the part, which does not serve yet, will not; None while there is hope."""
        if self.exit_code is not None:
            return f"ended with exit code {self.exit_code} before it was ready"
        allowed = self.part.ready_timeout if timeout is None else timeout
        return f"was not ready after {allowed:g} s" if time.monotonic() - self.began > allowed else None

    def stop(self) -> None:
        """Ask it to end, and kill it after the part's time-out."""
        self.signal(signal.SIGTERM)
        self.wait(self.part.stop_timeout)
        self.kill()

    def kill(self) -> None:
        """Kill it, as ``kill -9`` does, and all that it started; also what it left behind when it ended itself."""
        self.signal(signal.SIGKILL)
        self._popen.wait()
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid != self.pid and os.getsid(pid) == self.pid:
                    os.kill(pid, signal.SIGKILL)


def failure(part: Part, what: str) -> EmbeddedError:
    """Return the error of a part that did not start, with the end of its log."""
    return EmbeddedError(f"{part.name} {what}. The end of {part.log}:\n{tail(part.log)}")


def tail(log: Path, lines: int = 20) -> str:
    """Return the last lines of a log, indented for a message."""
    try:
        with log.open("rb") as content:
            content.seek(max(0, log.stat().st_size - 16_384))
            text = content.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return "  (no log)"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or "  (empty)"


HOST: Final = "127.0.0.1"
_RANGE: Final = range(20_000, 32_000)


def is_free(port: int, host: str = HOST) -> bool:
    """Return whether a server could listen on the port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Servers set it too: without it, closing connections of the last run make a free port look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(taken: Iterable[int] = ()) -> int:
    avoided = set(taken)
    for port in random.sample(_RANGE, 200):
        if port not in avoided and is_free(port):
            return port
    raise PrerequisiteMissing(f"no free port found between {_RANGE.start} and {_RANGE.stop}: close what listens there")


def last_ports(file: Path) -> dict[str, int]:
    """Return the ports that were used last, by part; empty if the file has none."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return {name: port for name, port in stored.items() if isinstance(port, int)} if isinstance(stored, dict) else {}


def assign_ports(file: Path, wanted: dict[str, int]) -> dict[str, int]:
    """Choose a port for every part and store the choice, so that addresses survive a restart.

    A wanted port of 0 is the one that the part had last if that is free, else any free one. PrerequisiteMissing if a
    port that was configured by number is taken.
    """
    last = last_ports(file)
    chosen: dict[str, int] = {}
    for name, port in wanted.items():
        if port and not is_free(port):
            raise PrerequisiteMissing(
                f"port {port}, wanted for {name}, is taken on {HOST}: stop what listens there, "
                f"or set embedded.{name}_port"
            )
        chosen[name] = port or last_or_free(last.get(name), {*chosen.values(), *wanted.values()})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(chosen) + "\n", encoding="utf-8")
    return chosen


def last_or_free(last: int | None, taken: Collection[int]) -> int:
    """Return the port that was used last if it is free, else any free one."""
    return last if last and last not in taken and is_free(last) else free_port(taken)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder until this process ends, however it ends; DirectoryInUse if another process has locked it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            pid = lock.read().strip() or "?"
            raise DirectoryInUse(
                f"{folder.absolute()} is in use by process {pid}: stop that one (Ctrl-C in its terminal, or "
                f"kill {pid}), or choose another folder with --dir"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def lock_holder(folder: Path) -> int | None:
    """Return the id of the process that has locked a folder; None if none has, 0 if its id is unknown."""
    with contextlib.suppress(FileNotFoundError), (folder / LOCK_FILE).open(encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = lock.read().strip()
            return int(text) if text.isdigit() else 0
    return None


class EmbeddedServer(ABC):
    """A server whose data, settings and, by default, log live in one folder, which is created if it is missing.

    Clients connect to ``port``; 0 is a free one, chosen once.
    """

    name: ClassVar[str]

    def __init__(self, folder: Path, port: int = 0, *, log: Path | None = None) -> None:
        self.folder, self.port = folder.absolute(), port or free_port()
        self.log = log or self.folder / "logs" / f"{self.name}.log"
        self._process: Process | None = None

    @property
    def address(self) -> str:
        """``host:port`` for clients."""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.exit_code is None else None

    @abstractmethod
    def part(self) -> Part:
        """Prepare the folder (jars, settings, storage), and return the part that runs the server on it."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Return whether the server answers, and is the one of this folder."""

    def start(self, timeout: float | None = None) -> None:
        """Start the server, which ends with the calling thread, and wait until it answers; else EmbeddedError."""
        if self.pid is not None:
            return
        self._process = Process(self.part())
        self._process.wait_ready(timeout)

    def stop(self) -> None:
        if self._process:
            self._process.stop()

    def kill(self) -> None:
        if self._process:
            self._process.kill()

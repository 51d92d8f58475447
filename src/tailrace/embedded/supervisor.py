"""The supervisor: keeps the parts of one machine running, and ends all of them when it ends.

Parts start in order, each when the one before it serves. A part that dies later is started again after a pause, which
doubles with each death and starts over after a minute of health; every change of state is a line on the console and a
write of ``parts.json``. A signal drains the parts in reverse order, a second one kills them at once; nothing is left
behind. If the supervisor itself is killed, the kernel (Linux) ends the parts, but not the processes that they started.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from tailrace.embedded.process import Part, Process, failure
from tailrace.errors import DirectoryInUse

STATUS_FILE: Final = "parts.json"
LOCK_FILE: Final = "lock"
_POLL: Final = 0.1
_STYLES: Final = {"ready": "green", "died": "red", "slow": "red", "stopping": "yellow"}


class Supervisor:
    """Runs parts until a signal or ``stop``.

    Args:
        folder: The folder of ``parts.json``; the caller has locked it.
        parts: The parts in the order in which they start.
        console: The console that shows every change of state.
        backoff: The pauses between restarts.
    """

    def __init__(
        self, folder: Path, parts: Sequence[Part], console: Console, *, backoff: Backoff | None = None
    ) -> None:
        self._folder = folder
        self._children = [_Child(part) for part in parts]
        self._console = console
        self._backoff = backoff or Backoff()
        self._signals = 0
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()

    def stop(self) -> None:
        """Begin to drain; a second call kills everything at once. Call it in the loop that runs the supervisor."""
        self._signals += 1
        self._stopping.set()
        if self._signals > 1:
            self._hurry.set()

    async def run(self, ready: Callable[[], None] = lambda: None) -> int:
        """Start the parts, call ``ready`` when all of them serve, keep them running, and drain them at the end.

        Returns:
            0 after a drain, 130 if a second signal cut it short.

        Raises:
            EmbeddedError: A part did not come up the first time; the others are drained before.
        """
        async with self._signalled():
            keepers: list[asyncio.Task[None]] = []
            try:
                for child in self._children:
                    if not await self._first_start(child):
                        break
                    keepers.append(asyncio.create_task(self._keep(child)))
                else:
                    ready()
                    await self._stopping.wait()
            finally:
                for keeper in keepers:
                    keeper.cancel()
                await asyncio.gather(*keepers, return_exceptions=True)
                await self._drain()
        return 130 if self._hurry.is_set() else 0

    async def _first_start(self, child: _Child) -> bool:
        """Start a part; return False if a signal came before it served."""
        self._start(child)
        problem = await self._until_ready(child)
        if self._stopping.is_set():
            return False
        if problem:
            assert child.process is not None
            child.process.kill()
            raise failure(child.part, problem)
        return True

    async def _keep(self, child: _Child) -> None:
        while True:
            while child.runs:  # noqa: ASYNC110  a process that ends sets no event
                await asyncio.sleep(_POLL)
            assert child.process is not None
            child.process.sweep()
            healthy = time.monotonic() - child.ready_at if child.ready_at else 0.0
            child.pause = self._backoff.after(child.pause, healthy)
            child.restarts += 1
            self._announce(
                child,
                "died",
                f"died (exit {child.exit_code}), restarting in {child.pause:g} s; its log is {child.part.log}",
            )
            await asyncio.sleep(child.pause)
            self._start(child)
            problem = await self._until_ready(child)
            if problem and child.exit_code is None:
                self._announce(child, "slow", f"{problem}: ending it")
                child.process.kill()

    def _start(self, child: _Child) -> None:
        child.process = Process(child.part)
        child.ready_at = 0.0
        self._announce(child, "starting" if child.part.ready else "running", f"starting (pid {child.process.pid})")

    async def _until_ready(self, child: _Child) -> str | None:
        """Wait until a part serves; return the problem if it does not."""
        began = time.monotonic()
        while not self._stopping.is_set():
            if child.exit_code is not None:
                return f"ended with exit code {child.exit_code} before it was ready"
            if child.part.ready is None:
                child.ready_at = time.monotonic()
                return None
            if await asyncio.to_thread(child.part.ready):
                child.ready_at = time.monotonic()
                self._announce(child, "ready", f"ready after {child.ready_at - began:.1f} s")
                return None
            if time.monotonic() - began > child.part.ready_timeout:
                return f"was not ready after {child.part.ready_timeout:g} s"
            await asyncio.sleep(_POLL)
        return None

    async def _drain(self) -> None:
        for child in reversed(self._children):
            if child.process is None:
                continue
            if child.runs:
                self._announce(child, "stopping", "stopping")
                child.process.signal(child.part.stop_signal)
            deadline = time.monotonic() + child.part.stop_timeout
            while child.runs and not self._hurry.is_set() and time.monotonic() < deadline:  # noqa: ASYNC110  as above
                await asyncio.sleep(_POLL / 2)
            forced = child.runs
            child.process.kill()
            self._announce(child, "stopped", "killed" if forced else "stopped")

    @contextlib.asynccontextmanager
    async def _signalled(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _announce(self, child: _Child, state: str, text: str) -> None:
        child.state, child.since = state, datetime.now(UTC)
        self._console.print(f"{child.part.name:<9} {text}", style=_STYLES.get(state), highlight=False, soft_wrap=True)
        status = [
            {
                "name": each.part.name,
                "pid": each.process.pid if each.process and each.runs else None,
                "state": each.state,
                "restarts": each.restarts,
                "since": each.since.isoformat(timespec="milliseconds"),
            }
            for each in self._children
        ]
        fresh = self._folder / f"{STATUS_FILE}.new"
        fresh.write_text(json.dumps(status, indent=2) + "\n", encoding="utf-8")
        fresh.replace(self._folder / STATUS_FILE)


class _Child:
    """A part and its state."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.process: Process | None = None
        self.state = "waiting"
        self.restarts = 0
        self.since = datetime.now(UTC)
        self.ready_at = 0.0
        self.pause: float | None = None

    @property
    def exit_code(self) -> int | None:
        return self.process.exit_code if self.process else None

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.exit_code is None


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Pauses before a part is started again, in seconds."""

    first: float = 0.5
    most: float = 15.0
    forget: float = 60.0
    """Time of health after which a death counts as the first."""

    def after(self, previous: float | None, healthy: float) -> float:
        """Return the pause after a death: twice the previous one (None at first), or the first after long health."""
        return self.first if previous is None or healthy >= self.forget else min(previous * 2, self.most)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder: no other supervisor may use it until this process ends, however it ends.

    Raises:
        DirectoryInUse: Another process has locked it.
    """
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
    try:
        with (folder / LOCK_FILE).open(encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = lock.read().strip()
                return int(text) if text.isdigit() else 0
    except FileNotFoundError:
        pass
    return None

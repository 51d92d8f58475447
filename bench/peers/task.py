"""Task and answer of a peer, and how it is run. Uses nothing but Python, so that it works in any environment."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from bench.meter import Meter

ROOT = Path(__file__).parent.parent.parent
PEERS = ROOT / ".venv-peers" / "bin" / "python"
"""The environment of those that are no packages of ours."""


class Task(NamedTuple):
    """One run: every event of a topic is read once, and what is made of it goes to another topic, or to a store."""

    bootstrap: str
    topic: str
    output: str
    events: int
    quiet_ms: int
    url: str
    """A Valkey, for those who keep their state in one."""
    folder: str
    """An empty folder, for those who keep it in files."""
    way: str = ""
    """Which of its ways, for those who have several."""

    def arguments(self) -> list[str]:
        """Return what ``given`` reads."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in self._asdict().items()]


def given() -> Task:
    """Read the task of this process."""
    parser = argparse.ArgumentParser()
    for name in ("bootstrap", "topic", "output", "url", "folder", "way"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("events", "quiet-ms"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return Task(**vars(parser.parse_args()))


def run_peer(meter: Meter, python: str | Path, module: str, task: Task) -> dict[str, Any]:
    """Run a peer to its end; return its figures. What it took to load its libraries does not count."""
    bare = {
        name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
    }
    command = [str(python), "-m", f"bench.peers.{module}", *task.arguments()]
    return run_command(meter, command, bare, task.events)


def run_command(meter: Meter, command: list[str], environment: dict[str, str], events: int) -> dict[str, Any]:
    """Run a program that prints its figures as the last line."""
    with meter:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout:
        raise SystemExit(f"{command[:3]} ended with {done.returncode}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if answer["events"] < events:
        raise SystemExit(f"{command[:3]} read {answer['events']:,} events of {events:,}: {done.stderr[-2000:]}")
    meter.seconds = answer["seconds"]
    meter.cpu -= answer["before"]
    return answer


class Watch:
    """Counts events and folds. Time runs from the first event to the last one or the last fold, whichever is later; CPU
    time from the moment it is made, so that importing a library costs nothing."""

    def __init__(self) -> None:
        self.events = self.folds = 0
        self._cpu = _cpu_seconds()
        self._first = self._last = 0.0

    def begin(self) -> None:
        """Note that this is the first moment, before the first event."""
        self._first = time.perf_counter()

    def event(self) -> None:
        """Note an event."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self.events += 1

    def fold(self) -> None:
        """Note a fold."""
        self._last = time.perf_counter()
        self.folds += 1

    def batch(self, events: int, folds: int) -> None:
        """Note many at once, for those whose loop is their own."""
        self._first = self._first or time.perf_counter()
        self.events += events
        self.folds += folds

    def end(self) -> None:
        """Note that this is the last moment, whatever came last."""
        self._last = time.perf_counter()

    def tell(self, **more: float) -> None:
        """Print the figures."""
        figures: dict[str, float] = {
            "events": self.events,
            "folds": self.folds,
            "seconds": self._last - self._first,
            "before": self._cpu,
            **more,
        }
        print(json.dumps(figures), flush=True)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)

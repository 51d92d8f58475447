"""Task and answer of a peer. Uses nothing but Python, so that it runs in any environment."""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One run: every event of a topic becomes part of a fold, and the folds go to another topic."""

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
        return [f"--{name.replace('_', '-')}={value}" for name, value in vars(self).items()]


def given() -> Task:
    """Read the task of this process."""
    parser = argparse.ArgumentParser()
    for name in ("bootstrap", "topic", "output", "url", "folder", "way"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("events", "quiet-ms"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return Task(**vars(parser.parse_args()))


class Watch:
    """Counts events and folds. Time runs from the first event to the last one or the last fold, whichever is later; CPU
    time from the moment it is made, so that importing a library costs nothing."""

    def __init__(self) -> None:
        self.events = self.folds = 0
        self._cpu = _cpu_seconds()
        self._first = self._last = 0.0

    def event(self) -> None:
        """Note an event."""
        self._last = time.perf_counter()
        if not self.events:
            self._first = self._last
        self.events += 1

    def fold(self) -> None:
        """Note a fold."""
        self._last = time.perf_counter()
        self.folds += 1

    def batch(self, events: int, folds: int) -> None:
        """Note many at once, for those whose loop is their own."""
        if not self.events:
            self._first = time.perf_counter()
        self.events += events
        self.folds += folds

    def end(self) -> None:
        """Note that this is the last moment, whatever came last."""
        self._last = time.perf_counter()

    def tell(self) -> None:
        """Print the figures."""
        figures = {
            "events": self.events,
            "folds": self.folds,
            "seconds": self._last - self._first,
            "cpu": _cpu_seconds() - self._cpu,
        }
        print(json.dumps(figures), flush=True)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)

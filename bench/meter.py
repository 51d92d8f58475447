"""CPU time and memory of whole process trees."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil


def family(roots: Iterable[int], without: Iterable[int] = ()) -> set[psutil.Process]:
    """Return processes with all their descendants, each once, but for the trees of some."""
    found: set[psutil.Process] = set()
    for root in roots:
        try:
            process = psutil.Process(root)
            found |= {process, *process.children(recursive=True)}
        except psutil.NoSuchProcess:
            continue
    return found - family(without) if without else found


def cpu_seconds(roots: Iterable[int], without: Iterable[int] = ()) -> float:
    """Return the CPU time that processes and all their descendants, ended ones too, have used."""
    total = 0.0
    for process in family(roots, without):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def memory_mib(roots: Iterable[int], without: Iterable[int] = ()) -> float:
    """Return the memory of process trees: a page that several share is counted once (PSS)."""
    total = 0
    for process in family(roots, without):
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total / 1024


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of all values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Meter:
    """What this process and all that it started take while the meter is entered.

    Args:
        without: roots of trees that belong to another job.
        servers: those that all jobs use, by name; their part of the CPU time is kept apart, too. The memory of Kafka
            does not count, since it is the same for every job.
    """

    def __init__(self, without: Sequence[int] = (), servers: Mapping[str, int] | None = None) -> None:
        self._without, self._servers = without, dict(servers or {})
        self.seconds = self.cpu = self.peak_mib = 0.0
        self.parts: dict[str, float] = {}
        """CPU time of each server."""

    def __enter__(self) -> Meter:
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._before = {name: cpu_seconds([pid]) for name, pid in self._servers.items()}
        self._cpu, self._began = cpu_seconds([os.getpid()], self._without), time.perf_counter()
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self.cpu = cpu_seconds([os.getpid()], self._without) - self._cpu
        self.parts = {name: cpu_seconds([pid]) - self._before[name] for name, pid in self._servers.items()}
        self._done.set()
        self._sampler.join()

    def _sample(self) -> None:
        others = [*self._without, *(pid for name, pid in self._servers.items() if name == "Kafka")]
        while True:
            ended = self._done.wait(1.0)
            taken = memory_mib([os.getpid()], others)
            self.peak_mib = max(self.peak_mib, taken)
            if ended:
                return

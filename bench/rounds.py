"""Measurement of the cost of one event: passes over the same events, of which the best counts.

Uses nothing but Python, so that it runs in any environment.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

ROUNDS = 3


class Figures(TypedDict):
    """The best pass: how many events it took, and what one event cost."""

    events: int
    matched: int
    rate: float
    cpu: float


def best(match: Callable[[Any], int], events: Sequence[Any], seconds: float) -> Figures:
    """Pass over events for about so many seconds and tell the best of at least three passes.

    ``match`` tells how many queries an event matched. A pass is as many events from the first on as fit into a quarter
    of the time, and one at least, however long that takes; finding out how many warms everything up.
    """
    chosen = events[:1]
    # A pass that takes long may have been held up, so it is asked again.
    while len(chosen) < len(events) and min(_once(match, chosen)[1] for _ in range(2)) < seconds / 8:
        chosen = events[: 2 * len(chosen)]
    walls: list[float] = []
    cpus: list[float] = []
    matched = 0
    until = time.perf_counter() + seconds * 3 / 4
    gc.collect()
    while time.perf_counter() < until or len(walls) < ROUNDS:
        matched, wall, cpu = _once(match, chosen)
        walls.append(wall)
        cpus.append(cpu)
        if wall > seconds:
            break
    return {"events": len(chosen), "matched": matched, "rate": len(chosen) / min(walls), "cpu": min(cpus) / len(chosen)}


def _once(match: Callable[[Any], int], events: Sequence[Any]) -> tuple[int, float, float]:
    """Pass once; return what matched, seconds, and CPU seconds."""
    cpu, began = time.process_time(), time.perf_counter()
    matched = 0
    for event in events:
        matched += match(event)
    return matched, time.perf_counter() - began, time.process_time() - cpu

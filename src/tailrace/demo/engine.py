"""The engine of the samples: stories that overlap in time, and plans of what to send when.

A sample is a module of data with a function ``plan``. Its events are a pure function of the random numbers, and of the
clock where they carry a time, so the same seed repeats them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import count
from random import Random
from typing import Any

Event = tuple[str, dict[str, Any]]
"""A topic, and an event for ``River.put``."""
Plan = Iterable[tuple[float, Iterable[Event]]]
"""Steps without end: seconds to wait, then the events to send."""
Clock = Callable[[], datetime]
Line = tuple[float, str, list[str], dict[str, Any]]
"""An event of a story: seconds from its beginning, topic, key, and value without the time."""
STEP = 0.2
"""Seconds whose events are sent together."""


def now_text(clock: Clock) -> str:
    """Return the clock's time as in events: UTC with milliseconds."""
    return clock().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Stories:
    """Stories with numbers, which begin at random, ``rate`` per second on average, and overlap.

    A story yields its lines in the order of their seconds. Numbers rise and start over, so that keys are bounded: every
    key is a day stream of its own.
    """

    def __init__(
        self,
        random: Random,
        clock: Clock,
        rate: float,
        numbers: range,
        story: Callable[[Random, int], Iterable[Line]],
    ) -> None:
        self._random, self._clock, self._rate, self._numbers, self._story = random, clock, rate, numbers, story
        self._number, self._order = random.choice(numbers), count()
        self._next_at = random.expovariate(rate) if rate else float("inf")
        self._due: list[tuple[float, int, str, list[str], dict[str, Any]]] = []

    def until(self, seconds: float) -> Iterator[Event]:
        """Yield the events up to so many seconds from the beginning that were not yielded before, in order."""
        while self._next_at <= seconds:
            # Each story has its own random numbers, so that its length changes nothing for the next one.
            for after, topic, key, value in self._story(Random(self._random.getrandbits(64)), self._number):
                heapq.heappush(self._due, (self._next_at + after, next(self._order), topic, key, value))
            self._number = self._number + 1 if self._number + 1 in self._numbers else self._numbers[0]
            self._next_at += self._random.expovariate(self._rate)
        while self._due and self._due[0][0] <= seconds:
            _, _, topic, key, value = heapq.heappop(self._due)
            yield topic, {"key": key, "value": {"at": now_text(self._clock), **value}}

    def plan(self) -> Plan:
        """Return a plan with a step every STEP seconds; its events get the time at which they are taken."""
        return ((STEP, self.until(step * STEP)) for step in count(1)) if self._rate else ()

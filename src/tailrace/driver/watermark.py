"""How far time has come: what Spark has completed, where Kafka's topics end, and what the shards have applied.

Shared by the driver's threads. A broker that does not answer stops time, and nothing else.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from tailrace.driver.frontier import Course
from tailrace.kafka.broker import Broker, Topic
from tailrace.log.event import Source
from tailrace.views.folds.rule import Rule
from tailrace.views.folds.rules import reads


class Timing:
    """The course of all sources that one run of the query reads."""

    def __init__(
        self,
        broker: Broker,
        topics: Mapping[str, Topic],
        generations: Mapping[str, int],
        starts: Mapping[Source, int],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._broker, self._topics, self._generations, self._clock = broker, topics, generations, clock
        self._course = Course(starts)
        self._lock = threading.Lock()

    def watch(self, topics: Mapping[str, Topic]) -> None:
        """Take note of the topics that there are."""
        self._topics = topics

    def completed(self, batch: Batch) -> None:
        """Take note of a completed batch: where it ended, and where the topics ended when it began."""
        with self._lock:
            self._course.completed(batch.ends)
            if batch.latest:
                self._course.listed(batch.listed_ms, batch.latest)

    def passed(self, times: Mapping[Source, tuple[int, int]]) -> None:
        """Take note of running-maximum times and the offsets they hold up to."""
        with self._lock:
            self._course.passed(times)

    def reached(self) -> dict[Source, tuple[int, int]]:
        """Return the running-maximum time of each source, and the last offset, of what is completed."""
        with self._lock:
            found = ((source, self._course.reached(source)) for source in self._course.sources)
            return {source: reached for source, reached in found if reached is not None}

    def levels(self) -> tuple[set[Source], dict[Source, int]]:
        """Return all sources, and the times up to which those are certainly applied of which that can be said."""
        with self._lock:
            sources = set(self._course.sources)
            found = ((source, self._course.level_ms(source)) for source in sources)
            return sources, {source: ms for source, ms in found if ms is not None}

    def ask(self) -> None:
        """Ask Kafka where the topics end.

        Raises:
            BrokerUnavailable: It does not say.
        """
        clock_ms = round(self._clock() * 1000)
        ends = self._broker.ends(self._topics.values())
        with self._lock:
            self._course.listed(
                clock_ms, {Source(t, p, self._generations.get(t, 0)): end for (t, p), end in ends.items()}
            )

    def everywhere(self) -> int | None:
        """Return the time that all sources have passed."""
        with self._lock:
            return self._course.by_arrival(self._course.sources)

    def of_rule(self, rule: Rule, outputs: frozenset[str]) -> int | None:
        """Return the time that has come for a rule; None when it cannot be said."""
        with self._lock:
            sources = [s for s in self._course.sources if reads(rule, s.topic, outputs)]
            if not sources:
                return round(self._clock() * 1000)
            found = self._course.by_event(sources) if rule.clock == "event" else self._course.by_arrival(sources)
        return None if found is None else found - rule.windows.lateness_ms


class Batch(msgspec.Struct, frozen=True):
    """What Spark reports of a batch that is done."""

    facts: dict[str, Any] = {}
    ends: dict[Source, int] = {}
    latest: dict[Source, int] = {}
    """Where the topics ended, asked for after ``listed_ms``."""
    listed_ms: int = 0

    @classmethod
    def read(cls, progress: Any, generations: Mapping[str, int]) -> Batch:
        """Read a progress report; None is that of a query that has not done a batch yet."""
        if progress is None:
            return cls()
        facts: dict[str, Any] = progress if isinstance(progress, dict) else json.loads(progress.json)
        source = (facts.get("sources") or [{}])[0]
        ends = _offsets(source.get("endOffset"), generations)
        stamp = datetime.fromisoformat(facts["timestamp"].replace("Z", "+00:00"))
        latest = _offsets(source.get("latestOffset"), generations) or ends
        return cls(facts, ends, latest, round(stamp.timestamp() * 1000))


def _offsets(text: Any, generations: Mapping[str, int]) -> dict[Source, int]:
    # Spark says null, as text or not, while there is no topic.
    offsets = (json.loads(text) if isinstance(text, str) else text) or {}
    return {
        Source(topic, int(partition), generations.get(topic, 0)): int(offset)
        for topic, partitions in offsets.items()
        for partition, offset in partitions.items()
    }

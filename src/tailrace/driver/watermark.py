"""The watermark: the time up to which everything that the pipeline reads is applied.

Timers (quiet periods, idle sessions) use it as their ``now``. A pipeline that was down for ten minutes then acts as if
it had not been: time stands still with it. The driver's threads share one ``Timing``; a broker that does not answer
stops time, and nothing else.

Invariant: no record with a running-maximum time below the watermark is still to be applied, so the watermark of a set
of partitions never passes what one of them has yet to deliver.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from tailrace.kafka.broker import Broker, Topic
from tailrace.log.event import Partition

NEVER = 1 << 62
"""End of a partition that has no leader: nobody knows what it still has to deliver, so it passes no time."""
KEPT = 64
"""Listings that are remembered: a hand that is behind by more than so many is judged by the times of its records."""


class Listing(msgspec.Struct, frozen=True, order=True):
    """Ends of partitions (the offset after the last record), asked for after the clock was read."""

    clock_ms: int
    ends: dict[Partition, int]


class Course:
    """Progress of partitions: where they ended when, what is applied, and the times of its records."""

    def __init__(self, completed: Mapping[Partition, int]) -> None:
        self._completed = dict(completed)
        """Offset up to which, not including, everything is applied."""
        self._listings: list[Listing] = []
        self._newest: dict[Partition, list[tuple[int, int]]] = {}
        """Running-maximum times at offsets, in order; those beyond what is completed count later."""
        self._level: dict[Partition, tuple[int, int]] = {}
        """Of partitions that are applied to their end: that end, and when it was first seen to be so."""

        self._since: dict[frozenset[Partition], tuple[int, int]] = {}
        """Of sets of partitions, the time of their latest record, and since when time goes on from there by itself."""

    @property
    def partitions(self) -> Collection[Partition]:
        """Every partition of the newest listing."""
        return self._listings[-1].ends.keys() if self._listings else ()

    def completed(self, ends: Mapping[Partition, int]) -> None:
        """Take note that everything before these offsets is applied."""
        for partition, end in ends.items():
            self._completed[partition] = max(end, self._completed.get(partition, 0))

    def passed(self, times: Mapping[Partition, tuple[int, int]]) -> None:
        """Take note of running-maximum times: of each partition in milliseconds, and the offset that it holds up to."""
        for partition, (time_ms, offset) in times.items():
            known = self._newest.setdefault(partition, [])
            if not known or known[-1][1] < offset:
                known.append((time_ms, offset))
                del known[:-KEPT]

    def listed(self, clock_ms: int, ends: Mapping[Partition, int]) -> None:
        """Take note of where partitions end, asked for after the clock was read."""
        if any(known.clock_ms == clock_ms for known in self._listings):
            return  # told again
        insort(self._listings, Listing(clock_ms, dict(ends)), key=lambda listing: listing.clock_ms)
        del self._listings[:-KEPT]
        if self._listings[-1].clock_ms > clock_ms:
            return  # of an end that is no longer the end, perhaps
        for partition, end in ends.items():
            if self._completed.get(partition, 0) < end:
                self._level.pop(partition, None)
            elif self._level.get(partition, (None, 0))[0] != end:
                self._level[partition] = end, clock_ms

    def reached(self, partition: Partition) -> tuple[int, int] | None:
        """Return the running-maximum time of what is applied of a partition, and the offset of the last of it."""
        completed = self._completed.get(partition, 0)
        return next(((t, o) for t, o in reversed(self._newest.get(partition, ())) if o < completed), None)

    def level_ms(self, partition: Partition) -> int | None:
        """Return the latest time at which a partition ended no later than what is applied of it; None without one.

        Whatever is applied later was written after that time.
        """
        completed = self._completed.get(partition, 0)
        listings = reversed(self._listings)
        return next((known.clock_ms for known in listings if known.ends.get(partition, 0) <= completed), None)

    def by_arrival(self, partitions: Iterable[Partition]) -> int | None:
        """Return the time that all partitions have passed, or None when one has not begun.

        A partition that is applied to an end has passed the time at which that end was asked for.
        """
        lowest: int | None = None
        for partition in partitions:
            time_ms = self.level_ms(partition)
            if time_ms is None:
                reached = self.reached(partition)
                if reached is None:
                    return None
                time_ms = self._no_later(reached[0])
            lowest = time_ms if lowest is None else min(lowest, time_ms)
        return lowest

    def by_event(self, partitions: Iterable[Partition]) -> int | None:
        """Return the same by the times of the records alone.

        While partitions have more to deliver it is the lowest time that one of them has reached; then time goes on from
        the latest record, at the pace of the clock.
        """
        found = [(partition, self.reached(partition)) for partition in partitions]
        behind = [reached for partition, reached in found if partition not in self._level]
        if behind:
            return None if None in behind else self._no_later(min(reached[0] for reached in behind if reached))
        latest = max((reached[0] for _, reached in found if reached is not None), default=None)
        if latest is None:
            return None
        key = frozenset(partition for partition, _ in found)
        latest_then, since = self._since.get(key, (None, 0))
        if latest != latest_then:
            since = max(self._level[partition][1] for partition in key)
            self._since[key] = latest, since
        return self._no_later(latest) + self._listings[-1].clock_ms - since

    def _no_later(self, time_ms: int) -> int:
        """A record from the future moves no timer."""
        return min(time_ms, self._listings[-1].clock_ms) if self._listings else time_ms


class Timing:
    """The course of all partitions that one start reads."""

    def __init__(
        self,
        broker: Broker,
        topics: Mapping[str, Topic],
        generations: Mapping[str, int],
        starts: Mapping[Partition, int],
    ) -> None:
        self._broker, self._topics, self._generations = broker, topics, generations
        self._course = Course(starts)
        self._lock = threading.Lock()

    def watch(self, topics: Mapping[str, Topic]) -> None:
        self._topics = topics

    def completed(self, done: Mapping[Partition, int]) -> None:
        """Take note of offsets up to which, not including them, everything is applied."""
        with self._lock:
            self._course.completed(done)

    def passed(self, times: Mapping[Partition, tuple[int, int]]) -> None:
        """Take note of running-maximum times and the offsets they hold up to."""
        with self._lock:
            self._course.passed(times)

    def reached(self) -> dict[Partition, tuple[int, int]]:
        """Return the running-maximum time of each partition, and the last offset, of what is completed."""
        with self._lock:
            found = ((partition, self._course.reached(partition)) for partition in self._course.partitions)
            return {partition: reached for partition, reached in found if reached is not None}

    def levels(self) -> tuple[set[Partition], dict[Partition, int]]:
        """Return all partitions, and the times up to which those are certainly applied of which that can be said."""
        with self._lock:
            partitions = set(self._course.partitions)
            found = ((partition, self._course.level_ms(partition)) for partition in partitions)
            return partitions, {partition: ms for partition, ms in found if ms is not None}

    def ask(self) -> dict[Partition, int]:
        """Ask Kafka where the topics end, and return it; partitions without a leader are left out, and stop time.

        Raises:
            BrokerUnavailable: It does not say.
        """
        clock_ms = round(time.time() * 1000)
        topics = list(self._topics.values())
        listed = [Partition(t.name, p, self._generations.get(t.name, 0)) for t in topics for p in t.partitions]
        asked = self._broker.ends(self._broker.led(topics))
        ends = {each: end for each in listed if (end := asked.get((each.topic, each.partition))) is not None}
        with self._lock:
            self._course.listed(clock_ms, dict.fromkeys(listed, NEVER) | ends)
        return ends

    def everywhere(self) -> int | None:
        """Return the time that all partitions have passed."""
        with self._lock:
            return self._course.by_arrival(self._course.partitions)

    def watermark(self, reads: Callable[[str], bool], *, by_event: bool = False, lateness_ms: int = 0) -> int | None:
        """Return the time up to which everything of some topics is applied; None when it cannot be said.

        By the clock of the broker's listings, or by the times of the records alone. Of no topic at all it is the clock.
        """
        with self._lock:
            partitions = [each for each in self._course.partitions if reads(each.topic)]
            if not partitions:
                return round(time.time() * 1000)
            found = self._course.by_event(partitions) if by_event else self._course.by_arrival(partitions)
        return None if found is None else found - lateness_ms

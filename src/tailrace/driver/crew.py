"""The crew: the Spark jobs of all hands on the rota, and what they report.

Each shift is a Spark job of one task in a thread of its own, so that the end of one hand ends no other. ``tick`` starts
the jobs that are missing: for a hand whose shift has ended, and for one whose shift has lasted long enough, beside the
old job, which goes when the new one is ready. A hand that catches up leaves when the rota has nothing for it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from tailrace.driver.rota import Rota
from tailrace.driver.shift import HandReport, Shift, ShiftEnd, hand_task
from tailrace.driver.start import LIVE
from tailrace.errors import PipelineError, TailraceError
from tailrace.log.event import Partition
from tailrace.valkey.shards import Command, Shards, mapping

logger = logging.getLogger(__name__)

LEAVE_S = 3.0
"""Time that hands have to leave; their epoch shuts out who stays longer."""
SLOT_S = 10.0
"""A hand that catches up and has not begun after so long finds no slot: its partitions go back to live hands."""

_decode = msgspec.json.Decoder(HandReport).decode


class CrewReport(NamedTuple):
    """What the hands say of themselves, together."""

    done: dict[Partition, int]
    """Offset of each partition up to which, not including it, everything is applied to all views."""
    records: int = 0
    """Records taken since the start."""
    busy_s: Mapping[int, float] = MappingProxyType({})
    """Seconds that each hand was at work."""
    take_ms: float = 0.0
    """99th percentile of the latest takes, of the slowest hand."""
    held: int = 0
    """Partitions that hands read."""
    errors: Mapping[Partition, str] = MappingProxyType({})
    """Partitions that hands gave up, and why."""
    is_complete: bool = False
    """True if every hand is at work."""


class Crew:
    """The hands of one start.

    Args:
        work: does a shift to its end; ``in_spark`` as a Spark job.
        rota: which hands there are, and what they read.
        shift: what each shift is told, but for its hand and number.
        shift_s: length of a shift, give or take a fifth.
    """

    def __init__(self, work: Callable[[Shift], ShiftEnd], rota: Rota, shift: Shift, shift_s: float) -> None:
        self._work, self._rota, self._shift, self._shift_s = work, rota, shift, shift_s
        self._shards, self._spare = rota.shards, rota.spare
        self._number = 0
        self._jobs: dict[int, list[_Job]] = {}
        self._before: dict[tuple[int, int], HandReport] = {}
        """Last report of each attempt at a shift: those of attempts that ended count, too."""

    def tick(self) -> None:
        """Tell the hands that the driver lives, start the jobs that are missing, and raise what went wrong in one."""
        self._rota.post()
        now, wanted = time.monotonic(), self._rota.hands
        for hand in {*wanted, *self._jobs}:
            jobs = self._jobs.setdefault(hand, [])
            for job in [job for job in jobs if not job.is_alive()]:
                jobs.remove(job)
                self._rota.spare = self._spare
                if job.failure is not None:
                    raise job.failure
                logger.info("hand %d: shift %d ended: %s", hand, job.number, job.end.reason if job.end else "lost")
            if hand in wanted and (not jobs or (len(jobs) == 1 and now >= jobs[0].until)):
                self._begin(hand, now)
            elif hand >= self._rota.live and any(self._waits(job, hand, now) for job in jobs[:1]):
                self._rota.spare = 0

    def _waits(self, job: _Job, hand: int, now: float) -> bool:
        heard = any(each == hand and token // 1000 == job.number for each, token in self._before)
        return now - job.began > SLOT_S and not heard

    def _begin(self, hand: int, now: float) -> None:
        self._number += 1
        catching_up = hand >= self._rota.live
        shift = msgspec.structs.replace(self._shift, hand=hand, number=self._number, catching_up=catching_up)
        job = _Job(self._work, shift, now, self._shift_s * random.uniform(0.8, 1.2))
        self._jobs[hand].append(job)
        job.start()

    def report(self) -> CrewReport:
        key = self._shards.keys.hands(self._rota.name)
        stored, wanted = mapping(self._shards.run_all([(0, ("HGETALL", key))])[0]), self._rota.hands
        current: list[HandReport] = []
        for field, value in stored.items():
            if field.startswith(b"report:"):
                hand, found = int(field[7:]), _decode(value)
                self._before[hand, found.token] = found
                if hand in wanted:
                    current.append(found)
        busy_s = defaultdict[int, float](float)
        for (hand, _), each in self._before.items():
            busy_s[hand] += each.busy_s
        return CrewReport(
            read_done(self._shards, self._rota.name),
            sum(each.records for each in self._before.values()),
            busy_s,
            max((each.take_ms for each in current), default=0.0),
            sum(each.partitions for each in current),
            {Partition.parse(label): why for each in current for label, why in each.errors.items()},
            len(current) == len(wanted),
        )

    def stop(self) -> None:
        """Let all hands leave, and wait a little for them."""
        jobs = [job for each in self._jobs.values() for job in each]
        try:
            self._rota.post("stop", 1)
        except TailraceError as error:
            logger.warning("the hands cannot be told to leave (%s): their epoch shuts them out", error)
        until = time.monotonic() + LEAVE_S
        for job in jobs:
            job.join(max(0.0, until - time.monotonic()))


class _Job(threading.Thread):
    """The thread that waits for one shift."""

    def __init__(self, work: Callable[[Shift], ShiftEnd], shift: Shift, began: float, lasts_s: float) -> None:
        super().__init__(name=f"hand {shift.hand}, shift {shift.number}", daemon=True)
        self._work, self._shift = work, shift
        self.number, self.began, self.until = shift.number, began, began + lasts_s
        self.end: ShiftEnd | None = None
        self.failure: TailraceError | None = None

    def run(self) -> None:
        try:
            self.end = self._work(self._shift)
            self.failure = self.end.error
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self.failure = PipelineError(f"{self.name} failed: {lines[0]}")


def in_spark(spark: Any) -> Callable[[Shift], ShiftEnd]:
    """Return the function that does a shift as a Spark job of one task, and waits for its end."""
    context = spark.sparkContext

    def run(shift: Shift) -> ShiftEnd:
        context.setLocalProperty("spark.scheduler.pool", LIVE)
        context.setJobDescription(f"Tailrace: hand {shift.hand}, shift {shift.number}")
        [end] = context.parallelize([0], 1).mapPartitions(hand_task(shift)).collect()
        return end  # type: ignore[no-any-return]

    return run


def read_done(shards: Shards, rota: str) -> dict[Partition, int]:
    """Return the offset of each partition up to which, not including it, everything is applied to all views."""
    command: Command = 0, ("HGETALL", shards.keys.done(rota))
    return {Partition.parse(k.decode()): int(v) for k, v in mapping(shards.run_all([command])[0]).items()}

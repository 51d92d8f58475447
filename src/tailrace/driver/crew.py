"""The crew: the Spark jobs of all hands, the rota that they follow, and what they report.

Each shift is a Spark job of one task in a thread of its own, so that the end of one hand ends no other. ``tick`` starts
the jobs that are missing: for a hand whose shift has ended, and for one whose shift has lasted long enough, beside the
old job, which goes when the new one is ready. Invariant: a partition is on the rota only with an offset in ``done``
below which everything is applied to all views, and the rota gives it to one hand.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from tailrace.driver.shift import HandReport, Shift, ShiftEnd, hand_task
from tailrace.driver.source import LIVE
from tailrace.errors import PipelineError, StaleDriver, TailraceError
from tailrace.log.event import Partition
from tailrace.valkey.shards import Arg, Command, Shards, mapping

logger = logging.getLogger(__name__)

LEAVE_S = 3.0
"""Time that hands have to leave; their epoch shuts out who stays longer."""

_decode = msgspec.json.Decoder(HandReport).decode
_encode = msgspec.json.Encoder().encode


def shared_by(partitions: Sequence[Partition], hands: int, before: Mapping[Partition, int]) -> dict[Partition, int]:
    """Give each partition to one of so many hands: as few as possible change hands, and all have as many, plus one.

    Args:
        before: the hands that have had them until now.
    """
    most = -(-len(partitions) // hands)
    counts = Counter[int]()
    shared: dict[Partition, int] = {}
    for partition in sorted(partitions, key=str):
        hand = before.get(partition)
        if hand is not None and hand < hands and counts[hand] < most:
            shared[partition] = hand
            counts[hand] += 1
    for partition in sorted(set(partitions) - shared.keys(), key=str):
        hand = min(range(hands), key=lambda each: counts[each])
        shared[partition] = hand
        counts[hand] += 1
    return shared


class CrewReport(NamedTuple):
    """What the hands say of themselves, together."""

    done: dict[Partition, int]
    """Offset of each partition up to which, not including it, everything is applied to all views."""
    records: int = 0
    """Records taken since the start."""
    busy_s: float = 0.0
    take_ms: float = 0.0
    """99th percentile of the latest takes, of the slowest hand."""
    held: int = 0
    """Partitions that hands read."""
    errors: Mapping[Partition, str] = MappingProxyType({})
    """Partitions that hands gave up, and why."""


class Crew:
    """The hands of one start.

    Args:
        work: does a shift to its end; ``in_spark`` as a Spark job.
        shift: what each shift is told, but for its hand and number.
        hands: how many there are.
        shift_s: length of a shift, give or take a fifth.
    """

    def __init__(
        self, work: Callable[[Shift], ShiftEnd], shards: Shards, shift: Shift, hands: int, shift_s: float
    ) -> None:
        self._work, self._shards, self._shift, self._hands = work, shards, shift, hands
        self._shift_s = shift_s
        keys = shards.keys
        self._reports, self._done = keys.hands(shift.rota), keys.done(shift.rota)
        self._shared: dict[Partition, int] = {}
        self._version = 0
        self._number = 0
        self._jobs: dict[int, list[_Job]] = {hand: [] for hand in range(hands)}
        self._before: dict[tuple[int, int], HandReport] = {}
        """Last report of each shift: those of shifts that ended count, too."""
        self._post()

    def assign(self, starts: Mapping[Partition, int], gone: Sequence[Partition] = ()) -> None:
        """Put partitions on the rota, from offsets below which everything is applied, and take others off it."""
        kept = [partition for partition in self._shared if partition not in gone]
        self._shared = shared_by([*kept, *starts], self._hands, self._shared)
        self._version += 1
        fields: list[Arg] = ["version", self._version]
        for hand in range(self._hands):
            labels = [str(partition) for partition, each in self._shared.items() if each == hand]
            fields += [f"hand:{hand}", _encode(labels)]
        self._post(*fields, starts=starts, gone=gone)

    @property
    def partitions(self) -> Sequence[Partition]:
        """Partitions on the rota."""
        return list(self._shared)

    def _post(
        self, *fields: Arg, starts: Mapping[Partition, int] | None = None, gone: Sequence[Partition] = ()
    ) -> None:
        """Write to the rota, and be heard by the hands.

        Raises:
            StaleDriver: The rota is another driver's by now.
        """
        begins = [part for partition, offset in (starts or {}).items() for part in (str(partition), offset)]
        epoch = self._shift.plan.epoch
        head = self._shift.rota, epoch, len(starts or {}), *begins, len(gone), *map(str, gone)
        answer = self._shards.call(0, "post", *head, *fields)
        if answer[0] == b"stale":
            raise StaleDriver(self._shift.rota, epoch, int(answer[1]))

    def tick(self) -> None:
        """Tell the hands that the driver lives, start the jobs that are missing, and raise what went wrong in one."""
        self._post()
        now = time.monotonic()
        for hand, jobs in self._jobs.items():
            for job in [job for job in jobs if not job.is_alive()]:
                jobs.remove(job)
                if job.failure is not None:
                    raise job.failure
                logger.info("hand %d: shift %d ended: %s", hand, job.number, job.end.reason if job.end else "lost")
            if not jobs or (len(jobs) == 1 and now >= jobs[0].until):
                self._begin(hand, now)

    def _begin(self, hand: int, now: float) -> None:
        self._number += 1
        until = now + self._shift_s * random.uniform(0.8, 1.2)
        shift = msgspec.structs.replace(self._shift, hand=hand, number=self._number)
        job = _Job(self._work, shift, until)
        self._jobs[hand].append(job)
        job.start()

    def is_heard(self) -> bool:
        """Return True if every hand has rolled."""
        fields = [f"report:{hand}" for hand in range(self._hands)]
        return None not in self._shards.run_all([(0, ("HMGET", self._reports, *fields))])[0]

    def report(self) -> CrewReport:
        stored, done = self._shards.run_all([(0, ("HGETALL", self._reports)), (0, ("HGETALL", self._done))])
        current: list[HandReport] = []
        for field, value in mapping(stored).items():
            if field.startswith(b"report:"):
                found = _decode(value)
                self._before[int(field[7:]), found.shift] = found
                current.append(found)
        total = self._before.values()
        return CrewReport(
            {Partition.parse(label.decode()): int(offset) for label, offset in mapping(done).items()},
            sum(each.records for each in total),
            sum(each.busy_s for each in total),
            max((each.take_ms for each in current), default=0.0),
            sum(each.partitions for each in current),
            {Partition.parse(label): why for each in current for label, why in each.errors.items()},
        )

    def stop(self) -> None:
        """Let all hands leave, and wait a little for them."""
        jobs = [job for each in self._jobs.values() for job in each]
        try:
            self._post("stop", 1)
        except TailraceError as error:
            logger.warning("the hands cannot be told to leave (%s): their epoch shuts them out", error)
        until = time.monotonic() + LEAVE_S
        for job in jobs:
            job.join(max(0.0, until - time.monotonic()))


class _Job(threading.Thread):
    """The thread that waits for one shift."""

    def __init__(self, work: Callable[[Shift], ShiftEnd], shift: Shift, until: float) -> None:
        super().__init__(name=f"hand {shift.hand}, shift {shift.number}", daemon=True)
        self._work, self._shift = work, shift
        self.number, self.until = shift.number, until
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

"""A shift: one long Spark task, called a hand, that reads some partitions and applies their records as they come.

The driver writes a rota to the store, which says what each hand reads. A hand *rolls* several times a second: one call
that reports what it has applied and answers what it may read. Shifts end and another task takes over, with a baton:

    old hand   … take, take, roll: "relieved", advance, roll: leaving
    successor  connect, fetch, roll: "wait", roll: "wait", …              roll: "ok", take, take …

Invariants. A hand begins a partition at an offset below which everything is applied to all views. One hand reads a
partition by intention; two by accident (a paused process, a lost executor) change nothing, since shards refuse every
mark but their own. A hand never reads on after an error of a partition: it gives the partition up and says why.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import Consumer, KafkaError, TopicPartition

from tailrace.driver.one_pass import Host
from tailrace.driver.slice import Plan, Slice, make_slice
from tailrace.errors import PipelineError, StaleDriver, StoreError, TailraceError
from tailrace.kafka.broker import reader_properties
from tailrace.log.event import Partition
from tailrace.valkey.shards import Arg, Shards

logger = logging.getLogger(__name__)

BUSY_S, IDLE_S, WAITING_S = 0.1, 0.25, 0.005
"""Seconds between two rolls of a hand that has work, that has none, and that waits for another hand."""
ORPHANED_MS = 30_000
"""A hand leaves when its driver was not heard for so long."""
MOST, MOST_BYTES, AT_ONCE = 10_000, 8 << 20, 500
"""Approximate limits of one take: records, bytes of their values; and how many records are fetched in one call."""
FEW, PAUSE_S = 500, 0.01
"""With fewer records a hand waits for as long as its last take lasted, and so long at most: under load the next take
has more records at hardly more cost. The first record after a quiet time never waits."""
TAKES = 512
"""Takes whose durations are remembered for the report."""
COLLECT_S = 60.0
CONNECT_S = 5.0
"""For how long a successor waits until it is sent something of every partition, before it says that it is ready."""
NICENESS, RUNS = 10, 100
"""Of a hand that catches up: its priority in the system, and runs of one call to the store at most, so that those of
live hands come in between."""

_encode = msgspec.json.Encoder().encode


class Shift(msgspec.Struct, frozen=True):
    """Everything that a hand must know; pickled into its task."""

    plan: Plan
    rota: str
    """Name of the rota: the first view of the driver."""
    hand: int
    number: int
    """Rises with every shift of the driver."""
    kafka: dict[str, Any]
    timed: frozenset[str]
    """Views whose shards keep the time of everything up to a mark with every mark."""
    advance_s: float
    """Seconds between two moves of the marks of shards that had nothing."""
    catching_up: bool = False
    """True if the hand reads what is far behind, and yields to those that do not."""


class HandReport(msgspec.Struct):
    """The part of a hand's roll that people see."""

    records: int = 0
    """Records taken since the attempt began."""
    busy_s: float = 0.0
    take_ms: float = 0.0
    """99th percentile of the latest takes."""
    partitions: int = 0
    errors: dict[str, str] = {}
    """Partitions that the hand gave up, with the reason."""
    token: int = 0
    """Of the attempt: another one counts from zero."""


class ShiftEnd(NamedTuple):
    """How a shift ended: ``relieved``, ``replaced``, ``stop``, ``stale``, ``orphaned`` or ``failed``."""

    reason: str
    error: TailraceError | None = None


class RollAnswer(NamedTuple):
    """The answer to a roll; ``partitions`` is None when the hand knows them."""

    verdict: str
    version: str = ""
    """Version of the rota; with ``stale``, the epoch of the driver that has it."""
    age_ms: int = 0
    refused: int = 0
    partitions: frozenset[Partition] | None = None

    @classmethod
    def read(cls, answer: Sequence[Any]) -> RollAnswer:
        verdict = answer[0].decode()
        if len(answer) < 3:
            return cls(verdict, *(each.decode() for each in answer[1:]))
        version, age_ms = answer[1].decode(), int(answer[2])
        if len(answer) == 3:
            return cls(verdict, version, age_ms)
        labels = frozenset(Partition.parse(label.decode()) for label in answer[4])
        return cls(verdict, version, age_ms, int(answer[3]), labels)


def work(shift: Shift, attempt: int) -> ShiftEnd:
    """Do one shift; errors of ours come back as values, since Spark would make text of them."""
    gc.disable()  # the takes make no cycles: looking for them takes a third of the time
    try:
        hand = Hand(shift, attempt)
        try:
            return hand.run()
        finally:
            hand.close()
    except TailraceError as error:
        return ShiftEnd("failed", error)
    finally:
        gc.enable()


class Hand:
    """One task's connections and what it has applied."""

    def __init__(self, shift: Shift, attempt: int) -> None:
        self._shift, self._token = shift, shift.number * 1000 + attempt
        plan = shift.plan
        if shift.catching_up:
            plan = msgspec.structs.replace(plan, window_runs=min(plan.window_runs, RUNS))
        self._host = Host(plan)
        self._shards = Shards(shift.plan.store, dict(shift.plan.run_ids)).open()
        self._consumer = Consumer(_properties(shift))
        self._assigned: dict[tuple[str, int], Partition] = {}
        """What the consumer fetches."""
        self._fetched: list[Any] = []
        """Messages that came before the hand had the baton."""
        self._held: set[Partition] = set()
        """What the hand applies."""
        self._given_up: set[Partition] = set()
        """Partitions with errors, until the driver takes them off the rota."""
        self._done: dict[Partition, int] = {}
        self._changed: set[Partition] = set()
        """Partitions whose progress was not yet reported."""
        self._advanced: dict[Partition, int] = {}
        self._leader: dict[Partition, int] = {}
        self._version = ""
        self._refused = 0
        self._reports = True
        """True if the next roll says more than that the hand is alive."""
        self._report = HandReport(token=self._token)
        self._takes: list[float] = []
        self._resting_until = 0.0
        self._parent = os.getppid()

    def close(self) -> None:
        self._consumer.close()
        self._host.close()
        self._shards.close()

    def run(self) -> ShiftEnd:
        """Wait for the baton, then read and apply until there is a reason to leave."""
        ready, patience = False, time.monotonic() + CONNECT_S
        while (answer := self._roll(ready=ready)).verdict == "wait":
            if answer.partitions is not None:
                self._fetch(answer.partitions)
            if os.getppid() != self._parent:
                return ShiftEnd("orphaned")
            if ready:
                time.sleep(WAITING_S)
            else:
                self._fetched += self._consumer.consume(AT_ONCE, WAITING_S)
                heard = {(each.topic(), each.partition()) for each in self._fetched}
                ready = self._assigned.keys() <= heard or len(self._fetched) > MOST or time.monotonic() > patience
        if answer.verdict == "ok" and answer.partitions is None:  # they were known while it waited
            self._version = ""
            answer = self._roll()
        next_advance = next_collection = 0.0
        while answer.verdict == "ok" and answer.age_ms < ORPHANED_MS and os.getppid() == self._parent:
            if answer.partitions is not None:
                self._hold(answer.partitions)
            pause = WAITING_S if self._refused else BUSY_S if self._changed or self._reports else IDLE_S
            next_roll = time.monotonic() + pause
            while (now := time.monotonic()) < next_roll:
                idle = not self._changed
                if self._take(next_roll - now) and idle:
                    next_roll = min(next_roll, time.monotonic() + BUSY_S)
                if (now := time.monotonic()) >= next_advance:
                    self._advance()
                    next_advance = now + self._shift.advance_s
            if not self._changed and now >= next_collection:
                gc.collect()
                next_collection = now + COLLECT_S
            answer = self._roll()
        if answer.verdict == "stale":
            return ShiftEnd("stale", StaleDriver(self._shift.rota, self._shift.plan.epoch, int(answer.version)))
        if answer.verdict == "unready":
            return ShiftEnd("failed", StoreError("the rota is gone: the store was emptied under the pipeline"))
        if answer.verdict in ("replaced", "ok"):
            return ShiftEnd("orphaned" if answer.verdict == "ok" else "replaced")
        self._advance()
        self._roll(leaving=True)
        return ShiftEnd(answer.verdict)

    # What the hand reads.

    def _roll(self, *, ready: bool = False, leaving: bool = False, gave: Iterable[Partition] = ()) -> RollAnswer:
        shift, report = self._shift, self._report
        report.partitions = len(self._held)
        report.take_ms = sorted(self._takes)[len(self._takes) * 99 // 100] * 1000 if self._takes else 0.0
        given = [str(partition) for partition in gave]
        changed = {partition: self._done[partition] for partition in self._changed}
        flags: list[Arg] = [int(ready), int(leaving), int(self._refused > 0)]
        text = _encode(report) if changed or given or self._reports else b""
        arguments = [shift.rota, shift.plan.epoch, shift.hand, self._token, self._version, *flags, text, len(given)]
        progress = [part for partition, done in changed.items() for part in (str(partition), done)]
        answer = RollAnswer.read(self._shards.call(0, "roll", *arguments, *given, *progress))
        self._changed.clear()
        self._reports = False
        if answer.partitions is not None:
            self._version, self._refused = answer.version, answer.refused
        return answer

    def _fetch(self, wanted: Iterable[Partition]) -> None:
        """Let the consumer fetch these partitions and no others, new ones from where everything is applied."""
        places = {(each.topic, each.partition): each for each in wanted}
        old = [TopicPartition(*place) for place, each in self._assigned.items() if places.get(place) != each]
        new = [each for place, each in places.items() if self._assigned.get(place) != each]
        changed = {place for place, each in self._assigned.items() if places.get(place) != each}
        changed |= {(each.topic, each.partition) for each in new}
        self._fetched = [each for each in self._fetched if (each.topic(), each.partition()) not in changed]
        if old:
            self._consumer.incremental_unassign(old)
        if new:
            key = self._shards.keys.done(self._shift.rota)
            [starts] = self._shards.run_all([(0, ("HMGET", key, *map(str, new)))])
            begins = {each: int(start) for each, start in zip(new, starts, strict=True) if start is not None}
            self._done |= begins
            self._consumer.incremental_assign([TopicPartition(e.topic, e.partition, o) for e, o in begins.items()])
            for each in new:
                self._leader.pop(each, None)
            places = {place: each for place, each in places.items() if each not in new or each in begins}
        self._assigned = places

    def _hold(self, granted: frozenset[Partition]) -> None:
        """Read what the rota grants; give up the rest."""
        self._given_up &= granted
        wanted = set(granted) - self._given_up
        if gone := self._held - wanted:
            self._release(gone)
        self._fetch(wanted)
        self._held = set(self._assigned.values())
        self._reports = True
        for error in [label for label in self._report.errors if Partition.parse(label) not in self._given_up]:
            del self._report.errors[error]

    def _release(self, partitions: Iterable[Partition]) -> None:
        gone = set(partitions)
        self._held -= gone
        self._advance(gone)
        self._fetch(set(self._assigned.values()) - gone)
        self._roll(gave=gone)
        for partition in gone:
            self._advanced.pop(partition, None)
            self._host.forget(partition)

    # What the hand does with it.

    def _take(self, patience_s: float) -> int:
        """Wait for records, apply what has come, and return how many there were."""
        messages, self._fetched = self._fetched, []
        if not messages:
            message = self._consumer.poll(patience_s)
            if message is None:
                return 0
            messages = [message]
        self._drain(messages)
        if len(messages) < FEW and (pause := self._resting_until - time.monotonic()) > 0:
            time.sleep(pause)
            self._drain(messages)
        began = time.monotonic()
        taken, ends, failed = self._sorted(messages)
        if taken:
            self._host.take(taken)
        for records in taken:
            self._progress(records.partition, records.offsets[-1] + 1)
        for partition, end in ends.items():
            self._progress(partition, end)
        if failed:
            self._give_up(failed)
        count = sum(map(len, taken))
        took = time.monotonic() - began
        self._report.records += count
        self._report.busy_s += took
        if count:
            self._takes = [*self._takes[1 - TAKES :], took]
            self._resting_until = time.monotonic() + min(PAUSE_S, took)
        return count

    def _drain(self, messages: list[Any]) -> None:
        """Add what was fetched meanwhile, up to the limits of a take."""
        size = 0
        while len(messages) < MOST and size < MOST_BYTES:
            more = self._consumer.consume(AT_ONCE, 0)
            messages += more
            size += sum(len(each) for each in more)
            if len(more) < AT_ONCE:
                break

    def _sorted(self, messages: Iterable[Any]) -> tuple[list[Slice], dict[Partition, int], dict[Partition, str]]:
        """Return slices of what the hand holds, the ends that were reached, and the partitions with errors."""
        places: dict[tuple[str, int], list[Any]] = {}
        ends: dict[Partition, int] = {}
        failed: dict[Partition, str] = {}
        held = {place: partition for place, partition in self._assigned.items() if partition in self._held}
        for message in messages:
            place = message.topic(), message.partition()
            error = message.error()
            if error is None:
                if (taken := places.get(place)) is None:
                    taken = places[place] = []
                taken.append(message)
            elif place not in held:
                continue
            elif error.code() == KafkaError._PARTITION_EOF:
                ends[held[place]] = message.offset()
            elif not error.retriable():
                failed.setdefault(held[place], error.str())
        found = {held[place]: taken for place, taken in places.items() if place in held}
        for partition, taken in found.items():
            epoch, known = taken[-1].leader_epoch(), self._leader.get(partition)
            if epoch is not None and known is not None and epoch < known:
                failed[partition] = f"the leader epoch fell from {known} to {epoch}: the topic was created again"
            elif epoch is not None:
                self._leader[partition] = epoch
        for partition in failed:  # nothing of it is applied, so its end is not reached
            found.pop(partition, None)
            ends.pop(partition, None)
        limits = self._shift.plan.limits
        return [make_slice(partition, taken, limits) for partition, taken in found.items()], ends, failed

    def _progress(self, partition: Partition, done: int) -> None:
        if done > self._done.get(partition, -1):
            self._done[partition] = done
            self._changed.add(partition)

    def _give_up(self, failed: Mapping[Partition, str]) -> None:
        for partition, reason in failed.items():
            logger.warning("%s is given up at offset %d: %s", partition, self._done.get(partition, -1), reason)
            self._given_up.add(partition)
            self._report.errors[str(partition)] = reason
        self._release(failed)

    def _advance(self, partitions: Iterable[Partition] | None = None) -> None:
        """Raise the marks of shards that had nothing to what is applied."""
        ends = {
            partition: self._done[partition]
            for partition in (self._held if partitions is None else partitions)
            if self._done.get(partition, 0) > self._advanced.get(partition, 0)
        }
        if ends:
            self._host.advance({partition: end - 1 for partition, end in ends.items()}, self._shift.timed)
            self._advanced |= ends


def _properties(shift: Shift) -> dict[str, Any]:
    return reader_properties(shift.kafka, "tailrace-hands", 64 << 10 if shift.catching_up else 8 << 10) | {
        # An offset that Kafka no longer has must be told, never jumped over.
        "auto.offset.reset": "error",
        "fetch.wait.max.ms": 200,
        "fetch.error.backoff.ms": 100,
        # Live, a partition of which this many wait is fetched when they are taken, and not again and again while a take
        # lasts. With a lower number one record would keep its partition out of a fetch that waits for others.
        "queued.min.messages": 100_000 if shift.catching_up else 20,
        "fetch.message.max.bytes": 4 << 20,
        "fetch.max.bytes": 16 << 20,
        "fetch.queue.backoff.ms": 1,
    }


def hand_task(shift: Shift) -> Any:
    """Return the function that Spark runs in the one task of a shift's job."""

    def run(_: Iterator[Any]) -> Iterator[ShiftEnd]:
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:
            raise PipelineError("a shift runs in a task of Spark")
        if shift.catching_up:
            # Spark uses no process again whose task, like this one, has not read its input.
            os.nice(NICENESS)
        yield work(shift, context.attemptNumber())

    return run

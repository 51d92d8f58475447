"""Searches in the driver: the scanner of the past, and the watchdog that ends searches without readers.

Spark batch jobs read the past that searches request from Kafka, chunk by chunk, the oldest offsets first.

A chunk is a range of offsets of each partition; it is read once for all stretches that need it. Each stretch has a mark
per partition, as a view has, so reading a chunk again changes nothing. Invariant: the matches of a partition are
appended to a stretch's log in offset order, each once. When a stretch is marked as scanned, its log has all matches
that Kafka still had, and the offsets that Kafka had dropped are recorded.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from tailrace.config.settings import Settings
from tailrace.driver.hooks import Bounds, DriverRun, Loop, Start, Times, ViewDriver, begin_at_end
from tailrace.driver.one_pass import MAX_REFUSALS
from tailrace.driver.slice import Plan, RangeReader, Slice, shared_out
from tailrace.driver.start import SCANS
from tailrace.errors import BrokerUnavailable, PipelineError, StaleDriver, StoreError, TailraceError
from tailrace.kafka.broker import Broker, client_properties
from tailrace.log.event import Partition, home_of, poison, shard_of
from tailrace.log.segment import DAY_MS
from tailrace.valkey.marks import NOTHING, UNKNOWN_TOPIC, read_generations
from tailrace.valkey.shards import Shards, mapping
from tailrace.views.grep.model import LostOffsets, SearchLife, Stretch
from tailrace.views.grep.store import (
    VIEW,
    decode_marks,
    drop_shelf,
    finish_stretch,
    keep_records,
    marks_command,
    pending_stretches,
    record_chunk,
)
from tailrace.views.grep.write import GrepPlan, SearchSet, append_windows, kept_records

logger = logging.getLogger(__name__)

CHUNK, CHUNK_MOST = 100_000, 1_000_000
"""Offsets of the first chunk of a stretch, small so that its first matches come soon, and of the largest."""
EACH = 200_000
"""Offsets of one partition in a chunk: about half a second's work of one task, for which live records wait."""
DENSE = 4
"""Offsets per match below which the matched records are not kept."""
PAUSE_S = 0.2
WATCH_S = 5.0
"""Interval of the watchdog."""
SILENT_MS = 15_000
"""Silence after which a service process is buried."""
AGAIN_MS = 300_000
"""Time after which logs are dropped a second time; no task works on one take for so long."""
AT_ONCE = 100
"""Most searches that one call ends, and whose logs are dropped at once."""

Range = tuple[int, int]
GONE, LATER = 1 << 62, -1
"""Instead of a partition's first offset: its topic was deleted; this driver must not read it yet."""


class Scanner(threading.Thread):
    """The driver's loop over the stretches to scan. It ends with the start whose driver epoch it has."""

    def __init__(
        self, settings: Settings, spark: Any, plan: Plan, shards: Shards, generations: Mapping[str, int]
    ) -> None:
        super().__init__(name="scanner", daemon=True)
        self._settings, self._spark, self._plan, self._shards = settings, spark, plan, shards
        self._generations = generations
        self._watchdog = Watchdog.of(shards, settings)
        self._stopping = threading.Event()
        self.failure: TailraceError | None = None

    def stop(self) -> None:
        """End soon; a chunk under way is abandoned, and the next driver reads it again."""
        self._stopping.set()
        self._spark.sparkContext.cancelJobGroup(SCANS)
        self.join(10)
        self._shards.close()

    def run(self) -> None:
        context = self._spark.sparkContext
        context.setLocalProperty("spark.scheduler.pool", SCANS)
        context.setJobGroup(SCANS, "scan of the past for searches", interruptOnCancel=True)
        try:
            watched, pause = 0.0, PAUSE_S
            while not self._stopping.wait(pause):
                if time.monotonic() - watched >= WATCH_S:
                    watched = time.monotonic()
                    self._watchdog.look()
                pause = 0.0 if self.step() else PAUSE_S
        except TailraceError as error:
            self.failure = error
        except Exception as error:
            if not self._stopping.is_set():
                self.failure = PipelineError(f"a scan failed: {str(error).strip().splitlines()[0]}")

    def step(self) -> bool:
        """Scan one chunk; return whether there was anything to scan."""
        waiting = []
        for life, stretch in pending_stretches(self._shards):
            marks = self._marks(life, stretch)
            if _left(stretch, marks):
                waiting.append((life, stretch, marks))
            else:
                finish_stretch(self._shards, life, stretch)
        try:
            return bool(waiting) and self._scan(waiting)
        except BrokerUnavailable as error:
            logger.warning("a scan waits: %s", error)  # the driver looks after it
            return False

    def _scan(self, waiting: Sequence[tuple[SearchLife, Stretch, Mapping[str, int]]]) -> bool:
        """Scan one chunk of the stretches that can be read now; return whether there was anything."""
        before = self._begins({partition for _, stretch, marks in waiting for partition in _left(stretch, marks)})
        ready, passed = [], False
        for life, stretch, marks in waiting:
            gone = {s: (f, min(u, before[s])) for s, (f, u) in _left(stretch, marks).items() if before[s] > f}
            if gone:
                # Record the offsets that Kafka no longer has, and move the marks past them.
                lost = Chunk(gone, [DueRange(life, stretch, gone)])
                self._record(lost, before, 0, before)
                self._advance(lost)
                passed = True
            marks = {**marks, **{partition: until - 1 for partition, (_, until) in gone.items()}}
            ranges = {s: each for s, each in stretch.ranges.items() if before.get(s) != LATER}
            if _left(stretch := msgspec.structs.replace(stretch, ranges=ranges), marks):
                ready.append((life, stretch, marks))
        if not ready:
            return passed
        began = time.monotonic()
        chunk = next_chunk(ready)
        read_bytes = self._read(chunk)
        self._record(chunk, before, read_bytes, self._begins(chunk.ranges))
        self._advance(chunk)
        records = sum(until - first for first, until in chunk.ranges.values())
        logger.info(
            "scanned %d offsets for %d search(es) in %.1f s", records, len(chunk.dues), time.monotonic() - began
        )
        return True

    @cached_property
    def _broker(self) -> Broker:
        return Broker(self._settings)

    def _begins(self, partitions: Iterable[str]) -> dict[str, int]:
        return first_offsets(self._broker, self._shards, self._generations, partitions)

    def _record(self, chunk: Chunk, before: Mapping[str, int], read_bytes: int, after: Mapping[str, int]) -> None:
        """Record the bytes read and the offsets that Kafka had dropped; before the marks move to the chunk's end."""
        offsets = sum(until - first for first, until in chunk.ranges.values())
        for due in chunk.dues:
            share = sum(until - first for first, until in due.ranges.values())
            gone = [
                each
                for partition, wanted in due.ranges.items()
                for each in lost_offsets(partition, wanted, before[partition], after[partition])
            ]
            record_chunk(self._shards, self._plan.epoch, due.life, due.stretch, read_bytes * share // offsets, gone)
            for partition in due.ranges:
                if before[partition] < after[partition] == GONE:
                    # The last records read may be of a newer topic with this name: drop those that were kept.
                    home = home_of(Partition.parse(partition), self._plan.store.shards)
                    drop_shelf(self._shards, home, due.stretch.mark(partition))

    def _marks(self, life: SearchLife, stretch: Stretch) -> dict[str, int]:
        shard = shard_of(stretch.name(life), self._plan.store.shards)
        [stored] = self._shards.run_all([(shard, marks_command(self._shards.keys, shard, stretch))])
        return decode_marks(stretch.ranges, stored)

    def _read(self, chunk: Chunk) -> int:
        """Read a chunk in Spark's tasks; return the bytes of its records' keys and values."""
        context = self._spark.sparkContext
        parts = shared_out(chunk.ranges, 2 * context.defaultParallelism)
        read = RangeReader(client_properties(self._settings))
        try:
            return int(context.parallelize(parts, len(parts)).mapPartitions(scan(self._plan, chunk, read)).sum())
        except Exception as error:
            # Spark's error has the task's exception only as text.
            if "BrokerUnavailable" not in str(error) and "KafkaException" not in str(error):
                raise
            raise BrokerUnavailable(f"kafka failed a scan of {', '.join(sorted(chunk.ranges)[:3])}") from error

    def _advance(self, chunk: Chunk) -> None:
        """Move the marks to the ends of the ranges: the last offsets of a range may have no record."""
        calls = []
        for due in chunk.dues:
            shard = shard_of(due.stretch.name(due.life), self._plan.store.shards)
            parts = [
                part
                for partition, (_, until) in due.ranges.items()
                for part in (due.stretch.mark(partition), until - 1, "")
            ]
            calls.append((shard, "advance", (VIEW, self._plan.epoch, *parts)))
        for answer in self._shards.call_all(calls):
            if answer[0] == b"stale":
                raise StaleDriver(VIEW, self._plan.epoch, int(answer[1]))


class DueRange(msgspec.Struct, frozen=True):
    """The part of a chunk that a stretch needs: of each partition, the offsets from the first up to the second."""

    life: SearchLife
    stretch: Stretch
    ranges: dict[str, Range]


class Chunk(msgspec.Struct, frozen=True):
    """The ranges that one job reads, and the stretches that need them."""

    ranges: dict[str, Range]
    dues: list[DueRange]


def next_chunk(waiting: Sequence[tuple[SearchLife, Stretch, Mapping[str, int]]], most: int | None = None) -> Chunk:
    """Return the next chunk of the first stretch, shared with the others as far as it comes next for them, too.

    Each stretch comes with its marks. All partitions advance in proportion to what is left of them, so that they reach
    their ends together and records of about the same time are found at about the same time.
    """
    _, stretch, marks = waiting[0]
    left = _left(stretch, marks)
    whole = sum(until - first for first, until in left.values())
    if most is None:  # each chunk has a fixed cost, so chunks grow with the scan
        most = min(max(CHUNK, 2 * (stretch.records - whole)), CHUNK_MOST, EACH * len(left))
    ranges: dict[str, Range] = {}
    for partition, (first, until) in left.items():
        share = max(1, most * (until - first) // whole) if whole > most else until - first
        ranges[partition] = first, min(until, first + share)
    dues: list[DueRange] = []
    for life, each, marks in waiting:
        shared: dict[str, Range] = {}
        for partition, (first, until) in _left(each, marks).items():
            if partition in ranges and ranges[partition][0] <= first < ranges[partition][1]:
                shared[partition] = first, min(until, ranges[partition][1])
        if shared:
            dues.append(DueRange(life, each, shared))
    return Chunk(ranges, dues)


def _left(stretch: Stretch, marks: Mapping[str, int]) -> dict[str, Range]:
    left = {s: (max(first, marks.get(s, NOTHING) + 1), until) for s, (first, until) in stretch.ranges.items()}
    return {partition: (begin, until) for partition, (begin, until) in left.items() if begin < until}


Read = Callable[[Any, Callable[[bytes | None, bytes], bool] | None], Iterator[tuple[Slice | None, int]]]


def scan(plan: Plan, chunk: Chunk, read: Read) -> Callable[[Iterable[Any]], Iterator[int]]:
    """Return the function that Spark runs in every task of a chunk. It yields the number of bytes read.

    ``read`` yields slices of the records that pass the sieve; poison is checked here.
    """

    def run(parts: Iterable[Any]) -> Iterator[int]:
        total = 0
        gc.disable()  # records make no cycles: looking for them takes a fifth of the time
        try:
            with closing(_Task(plan, chunk)) as task:
                for part in parts:
                    for records, read_bytes in read(part, task.passes):
                        total += read_bytes
                        if records is not None:
                            task.take(records)
        finally:
            gc.enable()
        yield total

    return run


class _Task:
    """The stretches of one chunk in one task."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        self._plan, self._grep, self._dues = plan, plan.of(GrepPlan), chunk.dues
        self._shards = Shards(plan.store, dict(plan.run_ids))
        self._marks: dict[tuple[int, str], int] = {}
        self._searches = SearchSet([due.life for due in chunk.dues])
        self.passes = self._searches.sieve()

    def close(self) -> None:
        self._shards.close()

    def take(self, records: Slice) -> None:
        label, limits = str(records.partition), self._plan.limits
        found = self._searches.find(records)
        for due in self._dues:
            if label in due.ranges and due.life.name in found:
                first, until = due.ranges[label]
                rows = [i for i in found[due.life.name] if first <= records.offsets[i] < until]
                if rows := [
                    i for i in rows if not poison(records.values[i] or b"", limits.max_bytes, limits.max_depth)
                ]:
                    self._take(due, records, rows)

    def _take(self, due: DueRange, records: Slice, rows: list[int]) -> None:
        name = due.stretch.name(due.life)
        shard = shard_of(name, self._plan.store.shards)
        # Records that are close together are as cheap to read from Kafka.
        if self._grep.kept_bytes and records.offsets[rows[-1]] - records.offsets[rows[0]] >= DENSE * (len(rows) - 1):
            home = home_of(records.partition, self._plan.store.shards)
            shelf = due.stretch.mark(records.partition)
            most = self._grep.kept_bytes // len(due.stretch.ranges)  # a stretch keeps no more than a partition does
            keep_records(self._shards, [kept_records(records, {name: rows}, home, shelf)], most)
        for _ in range(MAX_REFUSALS):
            if self._append(due, records, shard, {name: rows}):
                return
        raise StoreError("marks keep moving during this scan: is another driver of the same epoch at work?")

    def _append(self, due: DueRange, records: Slice, shard: int, names: Mapping[str, list[int]]) -> bool:
        """Append the matches behind the mark; return False if the mark has moved meanwhile."""
        plan, partition = self._plan, due.stretch.mark(records.partition)
        mark = self._marks.get((shard, partition))
        if mark is None:
            [stored] = self._shards.run_all([(shard, ("HGET", self._shards.keys.marks(shard, VIEW), partition))])
            mark = self._marks[shard, partition] = NOTHING if stored is None else int(stored)
        for window in append_windows(shard, records, names, mark, plan.window_runs):
            head = (VIEW, plan.epoch, partition, mark, window.end, DAY_MS, self._grep.future_ms, plan.tail_length)
            answer = self._shards.call(shard, "apply", *head, *window.items)
            if answer[0] == b"stale":
                raise StaleDriver(VIEW, plan.epoch, int(answer[1]))
            if answer[0] != b"ok":
                del self._marks[shard, partition]
                return False
            mark = self._marks[shard, partition] = window.end
        return True


@dataclass(frozen=True)
class Watchdog:
    """Ends the leases of dead processes and searches without readers, and drops the logs of ended lives.

    A search without readers is kept for the time promised to readers that may return. After that it is a cache entry,
    of which the least used are removed first. Invariants: no search ends that has leases or is within the promised
    time; a life that has ended stays on a list until its logs are dropped.
    """

    shards: Shards
    keep_ms: int
    """Time that every search lives on without readers."""
    popular_ms: int = 0
    """Longest time that a search lives on without readers."""
    idle: int = 0
    """Number of searches that may live on between the two."""

    @classmethod
    def of(cls, shards: Shards, settings: Settings) -> Watchdog:
        grep = settings.grep
        keep, popular = (round(each.total_seconds() * 1000) for each in (grep.keep, grep.keep_popular))
        return cls(shards, keep, popular, grep.idle)

    def look(self) -> tuple[list[str], list[str]]:
        """Do all of it once; return the buried processes and the ended lives."""
        buried = [name.decode() for name in self.shards.call(0, "bury", SILENT_MS)]
        for name in buried:
            logger.warning("service process %s is silent: its leases have ended", name)
        ended: list[str] = []
        while found := [
            life.decode() for life in self.shards.call(0, "forget", self.keep_ms, self.popular_ms, self.idle)
        ]:
            ended += found
            if len(found) < AT_ONCE:
                break
        self._drop()
        return buried, ended

    def _drop(self) -> None:
        """Drop the logs of ended lives; and again a while later, since a running task may still have appended."""
        keys, now = self.shards.keys, round(time.time() * 1000)
        waiting, again = self.shards.run_all([(0, ("HGETALL", keys.dropping())), (0, ("HGETALL", keys.dropped()))])
        # Scans wait meanwhile, so the rest is left for the next time.
        for life, numbers in list(mapping(waiting).items())[:AT_ONCE]:
            self._drop_life(life.decode(), [int(number) for number in numbers.split()])
            self.shards.run_all([(0, ("HSET", keys.dropped(), life, b"%d %s" % (now, numbers)))])
            self.shards.run_all([(0, ("HDEL", keys.dropping(), life))])
        for life, stored in mapping(again).items():
            dropped_ms, *stretches = map(int, stored.split())
            if not 0 <= now - dropped_ms < AGAIN_MS:
                self._drop_life(life.decode(), stretches)
                self.shards.run_all([(0, ("HDEL", keys.dropped(), life))])

    def _drop_life(self, life: str, stretches: list[int]) -> None:
        shards, keys = self.shards.options.shards, self.shards.keys
        if stretches:
            self._clear_shelves(stretches)
        self.shards.call(shard_of(life, shards), "drop", VIEW, life)
        for number in stretches:
            name = f"{life}.{number}"
            shard = shard_of(name, shards)
            begins = Stretch(number, 0, {}).mark("")
            [fields] = self.shards.run_all([(shard, ("HKEYS", keys.marks(shard, VIEW)))])
            marks = [field for field in fields if field.startswith(begins.encode())]
            self.shards.call(shard, "drop", VIEW, name, *marks)

    def _clear_shelves(self, stretches: list[int]) -> None:
        """Remove the kept records of stretches: they would expire, but their counted sizes would not."""
        keys, begins = self.shards.keys, tuple(Stretch(number, 0, {}).mark("").encode() for number in stretches)
        shards = range(self.shards.options.shards)
        for shard, shelves in enumerate(self.shards.run_all([(s, ("HKEYS", keys.kept_sizes(s))) for s in shards])):
            for shelf in [shelf for shelf in shelves if shelf.startswith(begins)]:
                drop_shelf(self.shards, shard, shelf.decode())


class GrepDriver(ViewDriver):
    """Searches in the driver: where their view begins, and the scanner of the past."""

    times = Times.NONE

    def begin(self, start: Start, generations: Mapping[str, int], bounds: Bounds) -> None:
        """Begin at the end, unless a search waits for what has come meanwhile.

        The bounds are older than this look: a search that is registered after it begins behind them.
        """
        if not start.shards.run_all([(0, ("HLEN", start.shards.keys.searches()))])[0]:
            begin_at_end(start, self.name, generations, bounds)

    def loops(self, run: DriverRun) -> Sequence[Loop]:
        return [Scanner(run.start.settings, run.spark, run.plan, run.connect(), run.generations)]


def first_offsets(
    broker: Broker, shards: Shards, generations: Mapping[str, int], labels: Iterable[str]
) -> dict[str, int]:
    """Return the first offset that Kafka has of each partition; ``generations`` are those that this driver reads.

    GONE if its topic was deleted, even if a new topic has the name. LATER if the driver has not noticed the topic yet:
    it would read the records under another generation.

    Only the broker knows which topic has a name now, and only the store which generation that is. A service that meets
    a new topic before the driver does uses the generation that the topic will get.
    """
    partitions = {label: Partition.parse(label) for label in labels}
    if not partitions:
        return {}
    topics = broker.topics()
    # Read after the topics: a generation that is not stored by now belongs to none of them.
    [known] = shards.run_all([(0, ("HGETALL", shards.keys.topics()))])
    stored = read_generations(known)
    wanted = {partition.topic for partition in partitions.values()}
    firsts = broker.firsts(broker.led(topic for name, topic in topics.items() if name in wanted))
    found: dict[str, int] = {}
    for label, partition in partitions.items():
        topic = topics.get(partition.topic)
        generation, topic_id = stored.get(partition.topic, UNKNOWN_TOPIC)
        if topic is None or partition.generation < generation:
            found[label] = GONE
        elif partition.generation == generation and topic_id not in ("", topic.id):
            found[label] = GONE  # created again, which the driver has not noticed yet
        elif partition.generation == generation == generations.get(partition.topic, 0):
            found[label] = firsts.get((partition.topic, partition.partition), LATER)
        else:
            found[label] = LATER
    return found


def lost_offsets(partition: str, wanted: tuple[int, int], before: int, after: int) -> Iterator[LostOffsets]:
    """Yield the lost offsets of a range, given where Kafka began before and after it was read.

    Offsets dropped in between may have been read or not; they count as lost.
    """
    first, until = wanted
    for begins in (before, max(before, after)):
        if begins > first and first < until:
            yield LostOffsets(partition, first, min(until, begins), "deleted" if begins == GONE else "expired")
            first = min(until, begins)

"""Scans: what searches ask of the past, read from Kafka by Spark batch jobs, chunk by chunk, the oldest first.

A chunk is a range of offsets of each source, read once for all stretches that are due there. Each stretch keeps a mark
for each of its sources, as a view does: a chunk that is read again, by whomever, changes nothing. Invariant: matches of
a source are appended to a stretch's log in the order of their offsets, each once; when a stretch is said to be scanned,
its log has all of them that Kafka still had, and what Kafka had dropped is noted.

What Kafka has of the sources that are to be scanned: where each begins now, or that it is gone; and what was lost.

A source is one generation of a topic. Only the broker knows which topic has a name now, and only the store which
generation that is; a service that meets a topic before the driver does gives it the generation that it will get.

What a scan leaves out unread: records that lack a text which every search of the chunk needs.

Invariant: a record that some search matches passes. What passes is still asked. The texts are looked for in bytes that
are not decoded. Escapes may spell a name or a string otherwise, so whatever holds a backslash passes; what is no JSON
matches nothing, and it does not matter what becomes of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tailrace.config.settings import Settings
from tailrace.driver.hooks import Bounds, Loop, Run, Start, Times, ViewDriver, begin_at_end
from tailrace.driver.one_pass import MAX_REFUSALS
from tailrace.driver.plan import Plan
from tailrace.driver.ranges import RangeReader, shared_out
from tailrace.driver.slice import Slice
from tailrace.driver.source import SCANS
from tailrace.errors import BrokerUnavailable, PipelineError, StaleDriver, StoreError, TailraceError
from tailrace.kafka.broker import Broker, Topic, client_properties
from tailrace.log.event import Partition, home_of, poison
from tailrace.log.name import shard_of
from tailrace.log.segment import DAY_MS
from tailrace.query import prefilter
from tailrace.valkey.marks import NOTHING, UNKNOWN_TOPIC, TopicGeneration, read_generations
from tailrace.valkey.shards import Shards
from tailrace.views.grep.leases import Watchdog
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
from tailrace.views.grep.write import KEPT_MS, GrepPlan, SearchSet, append_windows, kept_records

GONE, LATER = 1 << 62, -1
"""Instead of the offset at which a source begins: its topic was deleted; this driver must not read it yet."""


class Availability:
    """Asks the broker and the store; ``generations`` are those under which this driver reads topics."""

    def __init__(self, broker: Broker, shards: Shards, generations: Mapping[str, int]) -> None:
        self._broker, self._shards, self._generations = broker, shards, generations

    def begins(self, labels: Iterable[str]) -> dict[str, int]:
        """Return the first offset that Kafka has of each source; GONE if its topic was deleted, whatever has its name.

        LATER if the driver has not noticed the topic yet: what is read of it would get another generation.
        """
        sources = {label: Partition.parse(label) for label in labels}
        if not sources:
            return {}
        topics = self._broker.topics()
        # Read after: a generation that is not there by now was given to none of these topics.
        known = self._known()
        wanted = {source.topic for source in sources.values()}
        firsts = self._broker.firsts([topic for name, topic in topics.items() if name in wanted])
        found: dict[str, int] = {}
        for label, source in sources.items():
            verdict = self._verdict(source, topics.get(source.topic), known)
            place = source.topic, source.partition
            found[label] = firsts.get(place, LATER) if verdict is None else verdict
        return found

    def _verdict(self, source: Partition, topic: Topic | None, known: Mapping[str, TopicGeneration]) -> int | None:
        """Return GONE or LATER; None if it can be read."""
        generation, topic_id = known.get(source.topic, UNKNOWN_TOPIC)
        if topic is None or source.generation < generation:
            return GONE
        if source.generation == generation and topic_id not in ("", topic.id):
            return GONE  # created again, which the driver has not noticed yet
        return None if source.generation == generation == self._generations.get(source.topic, 0) else LATER

    def _known(self) -> dict[str, TopicGeneration]:
        [stored] = self._shards.run_all([(0, ("HGETALL", self._shards.keys.topics()))])
        return read_generations(stored)


def lost_offsets(source: str, wanted: tuple[int, int], before: int, after: int) -> Iterator[LostOffsets]:
    """Yield what was lost of a range: Kafka began at ``before`` when it was to be read, and at ``after`` then.

    What Kafka dropped in between was perhaps read, and perhaps not: it is said to be lost.
    """
    first, until = wanted
    for begins in (before, max(before, after)):
        if begins > first and first < until:
            yield LostOffsets(source, first, min(until, begins), "deleted" if begins == GONE else "expired")
            first = min(until, begins)


logger = logging.getLogger(__name__)

CHUNK, CHUNK_MOST = 100_000, 1_000_000
"""Offsets of the first chunk of a stretch, so that its first matches come soon, and of any."""
EACH = 200_000
"""Offsets of one source in a chunk, about half a second's work of one task: what is live waits for it at most."""
DENSE = 4
"""Offsets for each match, below which what the records say is not kept."""
PAUSE_S = 0.2
WATCH_S = 5.0
"""How often it is looked for what nobody has a use for any more."""

Range = tuple[int, int]


class DueRange(msgspec.Struct, frozen=True):
    """What a stretch takes of a chunk: of each source, the offsets from the first up to the second."""

    life: SearchLife
    stretch: Stretch
    ranges: dict[str, Range]


class Chunk(msgspec.Struct, frozen=True):
    """What one job reads, and who takes what of it."""

    ranges: dict[str, Range]
    dues: list[DueRange]


def next_chunk(waiting: Sequence[tuple[SearchLife, Stretch, Mapping[str, int]]], most: int | None = None) -> Chunk:
    """Return the next chunk of the first stretch; the others take of it what comes next for them.

    Each stretch comes with its marks. All sources go forward in proportion to what is left of them, so that they come
    to the end together, and what was written at about the same time is found at about the same time.
    """
    _, stretch, marks = waiting[0]
    left = _left(stretch, marks)
    whole = sum(until - first for first, until in left.values())
    if most is None:  # each chunk has a cost of its own: the more there is, the larger they become
        most = min(max(CHUNK, 2 * (stretch.records - whole)), CHUNK_MOST, EACH * len(left))
    ranges: dict[str, Range] = {}
    for source, (first, until) in left.items():
        share = max(1, most * (until - first) // whole) if whole > most else until - first
        ranges[source] = first, min(until, first + share)
    dues: list[DueRange] = []
    for life, each, known in waiting:
        taken: dict[str, Range] = {}
        for source, (first, until) in _left(each, known).items():
            if source in ranges and ranges[source][0] <= first < ranges[source][1]:
                taken[source] = first, min(until, ranges[source][1])
        if taken:
            dues.append(DueRange(life, each, taken))
    return Chunk(ranges, dues)


def _left(stretch: Stretch, marks: Mapping[str, int]) -> dict[str, Range]:
    found: dict[str, Range] = {}
    for source, (first, until) in stretch.ranges.items():
        begin = max(first, marks.get(source, NOTHING) + 1)
        if begin < until:
            found[source] = begin, until
    return found


class Scanner(threading.Thread):
    """The driver's loop over what is to be scanned. It ends with the query whose driver epoch it has."""

    def __init__(self, settings: Settings, spark: Any, plan: Plan, shards: Shards) -> None:
        super().__init__(name="scanner", daemon=True)
        self._settings, self._spark, self._plan, self._shards = settings, spark, plan, shards
        self._watchdog = Watchdog.of(shards, settings)
        self._stopping = threading.Event()
        self._present: Availability | None = None
        self.failure: TailraceError | None = None

    def stop(self) -> None:
        """End soon; a chunk under way is given up, and read again by the next driver."""
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
            logger.warning("a scan waits: %s", error)  # the query knows best whether it can go on without the broker
            return False

    def _scan(self, waiting: Sequence[tuple[SearchLife, Stretch, Mapping[str, int]]]) -> bool:
        """Scan one chunk of what can be scanned now; return whether there was anything."""
        before = self._begins({source for _, stretch, marks in waiting for source in _left(stretch, marks)})
        ready, passed = [], False
        for life, stretch, marks in waiting:
            gone = {s: (f, min(u, before[s])) for s, (f, u) in _left(stretch, marks).items() if before[s] > f}
            if gone:
                self._pass_over(Chunk(gone, [DueRange(life, stretch, gone)]), before)
                passed = True
            known = {**marks, **{source: until - 1 for source, (_, until) in gone.items()}}
            ranges = {s: each for s, each in stretch.ranges.items() if before.get(s) != LATER}
            if _left(stretch := msgspec.structs.replace(stretch, ranges=ranges), known):
                ready.append((life, stretch, known))
        if not ready:
            return passed
        began = time.monotonic()
        chunk = next_chunk(ready)
        read_bytes = self._read(chunk)
        self._note(chunk, before, read_bytes, self._begins(chunk.ranges))
        self._advance(chunk)
        records = sum(until - first for first, until in chunk.ranges.values())
        logger.info(
            "scanned %d offsets for %d search(es) in %.1f s", records, len(chunk.dues), time.monotonic() - began
        )
        return True

    def _begins(self, sources: Iterable[str]) -> dict[str, int]:
        if self._present is None:
            self._present = Availability(Broker(self._settings), self._shards, self._plan.generations)
        return self._present.begins(sources)

    def _pass_over(self, chunk: Chunk, before: Mapping[str, int]) -> None:
        """Be done with what Kafka no longer has."""
        self._note(chunk, before, 0, before)
        self._advance(chunk)

    def _note(self, chunk: Chunk, before: Mapping[str, int], read_bytes: int, after: Mapping[str, int]) -> None:
        """Note what was read and what Kafka had dropped; before the chunk's marks move to its end."""
        offsets = sum(until - first for first, until in chunk.ranges.values())
        for due in chunk.dues:
            taken = sum(until - first for first, until in due.ranges.values())
            gone = [
                each
                for source, wanted in due.ranges.items()
                for each in lost_offsets(source, wanted, before[source], after[source])
            ]
            record_chunk(self._shards, self._plan.epoch, due.life, due.stretch, read_bytes * taken // offsets, gone)
            for source in due.ranges:
                if before[source] < after[source] == GONE:
                    # What was read last may be of another topic by this name; from Kafka it is not taken for this one.
                    home = home_of(Partition.parse(source), self._plan.store.shards)
                    drop_shelf(self._shards, home, due.stretch.mark(source))

    def _marks(self, life: SearchLife, stretch: Stretch) -> dict[str, int]:
        shard = shard_of(stretch.name(life), self._plan.store.shards)
        [stored] = self._shards.run_all([(shard, marks_command(self._shards.keys, shard, stretch))])
        return decode_marks(stretch.ranges, stored)

    def _read(self, chunk: Chunk) -> int:
        """Let tasks of Spark read a chunk; return how many bytes its records' keys and values have."""
        context = self._spark.sparkContext
        parts = shared_out(chunk.ranges, 2 * context.defaultParallelism)
        read = RangeReader(client_properties(self._settings))
        try:
            return int(context.parallelize(parts, len(parts)).mapPartitions(scan(self._plan, chunk, read)).sum())
        except Exception as error:
            # What a task raises comes as text inside of an error of Spark's.
            if "BrokerUnavailable" not in str(error) and "KafkaException" not in str(error):
                raise
            raise BrokerUnavailable(f"kafka failed a scan of {', '.join(sorted(chunk.ranges)[:3])}") from error

    def _advance(self, chunk: Chunk) -> None:
        """Move the marks to the ends of what was read: the last offsets of a range may have no record."""
        calls = []
        for due in chunk.dues:
            shard = shard_of(due.stretch.name(due.life), self._plan.store.shards)
            parts = [
                part for source, (_, until) in due.ranges.items() for part in (due.stretch.mark(source), until - 1, "")
            ]
            calls.append((shard, "advance", (VIEW, self._plan.epoch, *parts)))
        for answer in self._shards.call_all(calls):
            if answer[0] == b"stale":
                raise StaleDriver(VIEW, self._plan.epoch, int(answer[1]))


Read = Callable[[Any, Callable[[bytes | None, bytes], bool] | None], Iterator[tuple[Slice | None, int]]]


def scan(plan: Plan, chunk: Chunk, read: Read) -> Callable[[Iterable[Any]], Iterator[int]]:
    """Return the function that Spark runs in every task of a chunk.

    ``read`` makes slices of what the task is given, of records that may match; their poison is looked for here. The
    function yields how many bytes were read.
    """

    def run(parts: Iterable[Any]) -> Iterator[int]:
        task, total = _Task(plan, chunk), 0
        try:
            for part in parts:
                for records, read_bytes in read(part, task.passes):
                    total += read_bytes
                    if records is not None:
                        task.take(records)
        finally:
            task.close()
        yield total

    return run


class _Task:
    """The stretches of one chunk in one task."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        self._plan, self._grep, self._dues = plan, plan.of(GrepPlan), chunk.dues
        self._shards = Shards(plan.store, dict(plan.run_ids))
        self._marks: dict[tuple[int, str], int] = {}
        self._standing = SearchSet([due.life for due in chunk.dues])
        self.passes = prefilter(due.life.search.compiled() for due in chunk.dues)

    def close(self) -> None:
        self._shards.close()

    def take(self, records: Slice) -> None:
        label, limits = str(records.partition), self._plan.limits
        found = self._standing.find(records)
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
        # Matches that are close together are read from Kafka as well as from here.
        if self._grep.kept_bytes and records.offsets[rows[-1]] - records.offsets[rows[0]] >= DENSE * (len(rows) - 1):
            home = home_of(records.partition, self._plan.store.shards)
            shelf = due.stretch.mark(records.partition)
            most = self._grep.kept_bytes // len(due.stretch.ranges)  # a stretch keeps no more than a partition does
            keep_records(self._shards, [kept_records(records, {name: rows}, home, shelf)], most, KEPT_MS)
        for _ in range(MAX_REFUSALS):
            if self._append(due, records, shard, {name: rows}):
                return
        raise StoreError("marks keep moving under this scan: is another driver of the same epoch at work?")

    def _append(self, due: DueRange, records: Slice, shard: int, names: Mapping[str, list[int]]) -> bool:
        """Append what is not appended yet; False if another one was faster, and it must be cut again."""
        plan, source = self._plan, due.stretch.mark(records.partition)
        mark = self._marks.get((shard, source))
        if mark is None:
            [stored] = self._shards.run_all([(shard, ("HGET", self._shards.keys.marks(shard, VIEW), source))])
            mark = self._marks[shard, source] = NOTHING if stored is None else int(stored)
        for window in append_windows(shard, records, names, mark, plan.window_runs):
            head = (VIEW, plan.epoch, source, mark, window.end, DAY_MS, self._grep.future_ms, plan.tail_length)
            answer = self._shards.call(shard, "apply", *head, *window.items)
            if answer[0] == b"stale":
                raise StaleDriver(VIEW, plan.epoch, int(answer[1]))
            if answer[0] != b"ok":
                del self._marks[shard, source]
                return False
            mark = self._marks[shard, source] = window.end
        return True


class GrepDriver(ViewDriver):
    """Searches in the driver: where their view begins, and the scanner of the past."""

    times = Times.NONE

    def begin(self, start: Start, generations: Mapping[str, int], bounds: Bounds) -> None:
        """Begin at the end, unless a search waits for what has come meanwhile.

        The bounds are older than this look: a search that is registered after it begins behind them.
        """
        if not start.shards.run_all([(0, ("HLEN", start.shards.keys.searches()))])[0]:
            begin_at_end(start, self.name, generations, bounds)

    def loops(self, run: Run) -> Sequence[Loop]:
        """Return the scanner."""
        return [Scanner(run.start.settings, run.spark, run.plan, run.connect())]

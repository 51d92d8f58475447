"""Tags in either store, written by the pipeline's own path; read back as they rest, and tasks that die on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from tailrace.config.values import milliseconds
from tailrace.driver.slice import Window
from tailrace.log.event import Partition, shard_of
from tailrace.log.store import LogRegistry
from tailrace.log.timeuuid import make_timeuuid, ms_of, order
from tailrace.valkey.marks import NOTHING, advance, conserved, read_counts, read_marks
from tailrace.valkey.shards import Call, Shards, StoreOptions
from tailrace.views.tags.model import SourceProgress
from tailrace.views.tags.rows import store as tag_rows
from tailrace.views.tags.rows.cassandra import connected
from tailrace.views.tags.settings import CassandraSettings, TagsSettings
from tailrace.views.tags.store import VIEW, read_progress
from tailrace.views.tags.write import TagsPlan, TagsWriter
from tests.writing import NOON, Record, Writer

MINUTE = 60_000
HOUR = 60 * MINUTE
TOPIC = "carts"

_ROWS = (
    "SELECT tag_name, timebucket, timestamp, persistence_id, tag_pid_sequence_nr, sequence_nr, topic, generation, "
    "partition, offset, value, tags, WRITETIME(offset) FROM $keyspace.tag_views"
)
_BUCKETS = "SELECT tag_name, start FROM $keyspace.tag_buckets"


class Held(NamedTuple):
    """An event as a tag has it."""

    id: str
    source: str
    seq: int
    number: int
    timeuuid: UUID
    bucket_ms: int
    tags: tuple[str, ...]
    value: bytes


class Stored:
    """A topic whose events are tagged, the driver that writes them, and what the store holds of them.

    Args:
        store: Where marks and numbers are.
        rows: Where events rest, if not there too.
        options: Of ``TagsSettings``.
    """

    def __init__(self, store: StoreOptions, rows: CassandraSettings | None = None, **options: Any) -> None:
        self.store, self.rows = store, rows
        self.options = TagsPlan(TagsSettings(paths=("tags",), **options), cassandra=rows)
        self.driver = self.begin()
        self.records: list[Record] = []
        self._ends: dict[int, int] = {}

    def begin(self) -> Writer:
        """Begin a driver; one that was there is overtaken."""
        self.driver = Writer(self.store, ("intake", VIEW), tags=self.options)
        return self.driver

    def close(self) -> None:
        self.driver.host.close()
        self.driver.shards.close()

    def event(self, pid: str, *tags: str, at: int = 0, partition: int = 0, **data: object) -> Record:
        """Return the next event of a partition, so many milliseconds after noon."""
        offset = self._ends.get(partition, 0)
        self._ends[partition] = offset + 1
        value = msgspec.json.encode({"tags": tags, **data})
        record = Record(offset, pid.encode(), value, NOON + at, partition, TOPIC)
        self.records.append(record)
        return record

    def events(self, pid: str, tag: str, count: int, *, at: int = 0, partition: int = 0) -> list[Record]:
        """Return the next events of a source, a second apart."""
        return [self.event(pid, tag, at=at + i * 1_000, partition=partition) for i in range(count)]

    def settle(self) -> None:
        """Raise the marks of shards that had nothing, as the driver does once a second."""
        ends = {Partition(TOPIC, partition): end - 1 for partition, end in self._ends.items()}
        advance(self.driver.shards, VIEW, self.driver.epoch, ends)

    def lose(self) -> None:
        """Lose everything: marks, numbers, and what tags hold."""
        for node in self.driver.shards.primaries():
            if keys := list(node.scan_iter(f"{self.store.prefix}:*")):
                node.delete(*keys)
        if self.rows is not None:
            connection = connected(self.rows)
            for table in ("tag_views", "tag_buckets"):
                connection.execute(connection.text(f"TRUNCATE $keyspace.{table}"))
            tag_rows._writers.clear()  # the next to write is another process, which knows nothing of buckets

    # What there is.

    def held(self) -> dict[str, list[Held]]:
        """Return what rests in every tag, in its order."""
        return self._held_rows() if self.rows is not None else self._held_runs()

    def tag(self, tag: str) -> list[Held]:
        return self.held().get(tag, [])

    def numbers(self, tag: str) -> dict[str, list[int]]:
        """Return the numbers of each source in a tag, in the tag's order."""
        found: dict[str, list[int]] = {}
        for each in self.tag(tag):
            found.setdefault(each.source, []).append(each.number)
        return found

    def batches(self, tag: str) -> list[list[str]]:
        """Return the ids of rows that were written together, in the order of the writes: they have one write time."""
        found: dict[int, list[str]] = {}
        for row in sorted(self._rows(), key=lambda row: (row[-1], order(row[2]))):
            if row[0] == tag:
                found.setdefault(row[-1], []).append(f"{Partition(row[6], row[8], row[7])}:{row[9]}")
        return list(found.values())

    def progress(self, tag: str, pid: str) -> SourceProgress:
        """Return the progress of a source in a tag, from the shard."""
        ((found,),) = read_progress(self.driver.shards, [(self.shard(tag), tag, [pid])])
        return found

    def reset(self, tag: str, pid: str, number: SourceProgress) -> None:
        """Let the shard say otherwise."""
        keys, shard = self.store.keys, self.shard(tag)
        self.driver.shards.run_all([(shard, ("HSET", keys.numbers(shard, tag), pid, number.stored()))])

    def shard(self, tag: str) -> int:
        return shard_of(tag, self.store.shards)

    def mark(self, tag: str, partition: int = 0) -> int:
        """Return the mark of a partition in the shard of a tag."""
        return read_marks(self.driver.shards, VIEW)[self.shard(tag)].get(Partition(TOPIC, partition), NOTHING)

    def check(self, records: Iterable[Record] | None = None) -> None:
        """Compare all tags with the records: each event once, in order, numbered from 1 without a gap."""
        wanted: dict[str, set[str]] = {}
        for record in self.records if records is None else records:
            for tag in msgspec.json.decode(record.value or b"")["tags"]:
                wanted.setdefault(tag, set()).add(record.id)
        found = self.held()
        assert {tag: {each.id for each in held} for tag, held in found.items()} == wanted
        for tag, held in found.items():
            assert len(held) == len(wanted[tag]), tag
            last: dict[str, Held] = {}
            for each in held:
                before = last.get(each.source)
                assert each.number == (before.number + 1 if before else 1), (tag, each)
                assert before is None or order(before.timeuuid) < order(each.timeuuid), (tag, each)
                assert tag in each.tags
                last[each.source] = each
            for pid, each in last.items():
                assert self.progress(tag, pid).number == each.number, (tag, pid)
        counts = read_counts(self.driver.shards, VIEW)
        assert conserved(counts) == 0, counts
        assert counts.get("stored", 0) == sum(map(len, found.values()))

    def _held_runs(self) -> dict[str, list[Held]]:
        registry, found = LogRegistry(self.driver.shards, VIEW), dict[str, list[Held]]()
        for named in list(registry.walk()):
            held = found.setdefault(named.name, [])
            for segment in named.log.segments:
                for entry in registry.read_whole([(named.name, segment)])[0]:
                    run = entry.run
                    assert run.tag_columns is not None
                    notes = run.tag_columns.rows(run.offsets, run.times)
                    for offset, value, note in zip(run.offsets, run.values, notes, strict=True):
                        made = make_timeuuid(note.ms, offset, run.partition)
                        event = f"{run.partition}:{offset}"
                        held.append(
                            Held(event, note.source, note.seq, note.number, made, segment.start_ms, note.tags, value)
                        )
        return found

    def _held_rows(self) -> dict[str, list[Held]]:
        assert self.rows is not None
        connection = connected(self.rows)
        listed = set(connection.execute(connection.text(_BUCKETS)))
        found: dict[str, list[Held]] = {}
        for row in sorted(self._rows(), key=lambda row: (order(row[2]), row[3], row[4])):
            tag, bucket, made, pid, number, seq, topic, generation, partition, offset, value, tags, _ = row
            assert (tag, bucket) in listed
            assert bucket <= ms_of(made) < bucket + milliseconds(self.options.tags.span)
            event = f"{Partition(topic, partition, generation)}:{offset}"
            found.setdefault(tag, []).append(Held(event, pid, seq, number, made, bucket, tuple(tags), value))
        return found

    def _rows(self) -> list[tuple[Any, ...]]:
        assert self.rows is not None
        connection = connected(self.rows)
        return connection.execute(connection.text(_ROWS))


class Died(Exception):
    """Ends a task of these tests."""


STEPS = ("read", "some rows", "all rows", "some shards", "all shards")
"""Moments at which a task dies: after it read numbers, wrote rows, or had shards apply windows without an answer."""


class _View(TagsWriter):
    """Tags, in a task that dies on the way."""

    step = ""

    def store(self, windows: Sequence[Window]) -> None:
        if self.step == "read":
            raise Died
        if self.step == "some rows":
            # The later half: what is missing is in front of what is there.
            windows = [msgspec.structs.replace(window, rows=window.rows[len(window.rows) // 2 :]) for window in windows]
        super().store(windows)
        if self.step in ("some rows", "all rows"):
            raise Died


class _Shards(Shards):
    """The shards of a task that dies when some of them, or all, have applied their windows."""

    n_applied = 0

    def call_all(self, calls: Sequence[Call]) -> Any:
        if not any(name == "apply" for _, name, _ in calls):
            return super().call_all(calls)
        super().call_all(calls[: self.n_applied] if self.n_applied else calls)
        raise Died


def dying(driver: Writer, step: str, n_applied: int = 1) -> Writer:
    """Return a task that dies after a step; at "some shards", so many have applied their windows."""
    task = driver.another_task()
    view = view_of(driver, _View)
    assert isinstance(view, _View)
    view.step = step
    task.host._views = [view]
    if step.endswith("shards"):
        mortal = _Shards(driver.plan.store, dict(driver.plan.run_ids))
        mortal.n_applied = n_applied if step == "some shards" else 0
        task.host._shards = mortal
    return task


def interrupted(driver: Writer, act: Callable[[], object]) -> Writer:
    """Return a task in which something happens once, after it has read numbers and before it writes anything."""
    task = driver.another_task()
    left = [act]

    def clock() -> float:
        if left:
            left.pop()()
        return time.time()

    task.host._views = [view_of(driver, TagsWriter, clock=clock)]
    return task


def view_of(driver: Writer, form: type[TagsWriter], **changes: Any) -> TagsWriter:
    plan = driver.plan
    return form(plan.of(TagsPlan), plan, **changes)

"""Worlds of upkeep: a topic of a real Kafka and the view, tags or rows of its events, and whoever keeps them."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from itertools import count
from types import TracebackType
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tailrace.config.settings import Settings, load
from tailrace.kafka.broker import Broker
from tailrace.log.event import Partition, name_of_key, shard_of
from tailrace.log.segment import Log
from tailrace.log.store import ExpiredCounts, LogRegistry, Staging
from tailrace.log.timeuuid import ms_of
from tailrace.testing.installation import QUICK_JAVA
from tailrace.upkeep.audit import Audit, Auditing
from tailrace.upkeep.copy import History, RebuildPlan, RebuildStart, Restored, SpooledRecord, WantedNames, encode_body
from tailrace.upkeep.job import LOGS, JobLease, find_view, look_once, run_job
from tailrace.upkeep.log_copy import Restorer
from tailrace.upkeep.pack import Packer, PackOutcome, PackRules, due_segments
from tailrace.upkeep.rebuild import Rebuilding
from tailrace.valkey.marks import advance
from tailrace.valkey.shards import Shards, StoreOptions, prepare
from tailrace.view import View
from tailrace.views import VIEWS
from tailrace.views.tags.model import Tagger
from tailrace.views.tags.rows.model import RowKey, StoredRow
from tailrace.views.tags.rows.store import RowWalk, RowWriter, writer
from tailrace.views.tags.rows.upkeep import RowErasing
from tailrace.views.tags.settings import CassandraSettings
from tailrace.views.tags.upkeep import LogErasing, erasing
from tailrace.views.tags.write import TagsPlan
from tests.log.rig import Rig, rig
from tests.writing import DAY, NOON, Record, Writer, read_view


def now_ms() -> int:
    return round(time.time() * 1000)


class Keeper:
    """Holds the lease while it is entered."""

    def __init__(
        self,
        options: StoreOptions,
        *,
        owner: str = "one",
        piece_bytes: int = 512 << 10,
        clock: Callable[[], int] = now_ms,
        reached: Callable[[str], None] = lambda _: None,
        view: str = "days",
    ) -> None:
        self.shards = Shards(options).open()
        prepare(self.shards)
        self.registry = LogRegistry(self.shards, view)
        self.lease = JobLease(self.shards, owner)
        self._piece_bytes, self._clock, self._reached = piece_bytes, clock, reached

    def __enter__(self) -> Keeper:
        self.lease.__enter__()
        self.staging = Staging(self.shards, self.registry.view, self.lease.token)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lease.__exit__(kind, error, trace)
        self.shards.close()

    def end_lease_early(self) -> None:
        """As if the process had been paused for longer than its lease."""
        self.shards.call(0, "lease", LOGS, "one", 0, self.lease.token)

    def pack(self, after_ms: int = 0) -> PackOutcome:
        view, now, rules = self.registry.view, self._clock(), PackRules(after_ms, self._piece_bytes)
        walk = self.registry.walk()
        dues = [due for found in walk for due in due_segments(found.name, found.log, after_ms, now)]
        packer = Packer(self.shards, view, self.lease.token, rules, now, reached=self._reached)
        return packer.pack(dues)

    def expire(self, name: str, keep_ms: int) -> ExpiredCounts:
        return self.staging.expire([(name, keep_ms)], self._clock(), 60_000)[0]

    def log(self, name: str) -> Log:
        return self.registry.logs([name])[0].log

    def unowned(self) -> list[bytes]:
        """Keys of logs that no registry names and that do not end by themselves."""
        keys, view = self.shards.keys, self.registry.view
        owned: set[bytes] = set()
        for found in self.registry.walk():
            owned.add(keys.log(found.shard, view, found.name).encode())
            owned |= {keys.segment(found.shard, view, s.index, found.name).encode() for s in found.log.segments}
        stray: list[bytes] = []
        for node in self.shards.primaries():
            for key in node.scan_iter(f"{keys.prefix}:*"):
                kind = key.partition(b"}:")[2].partition(b":")[0]
                if (
                    kind in (b"log", b"seg", b"staged")
                    and key not in owned
                    and int(node.execute_command("PTTL", key)) < 0
                ):
                    stray.append(key)
        return stray


_topics = count()


def settings_for(kafka: str, store: StoreOptions, topics: Sequence[str], **flags: object) -> Settings:
    given = {name.replace("__", "."): value for name, value in flags.items()}
    at = {"kafka.bootstrap": kafka, "valkey.url": store.url, "valkey.prefix": store.prefix}
    quick = {"spark.conf": {"spark.driver.extraJavaOptions": QUICK_JAVA}, "spark.driver_memory": "512m"}
    return load(flags={**at, "kafka.topics": list(topics), "days.keep": "forever", **quick, **given})


class Past:
    """One topic, in Kafka and in a view."""

    view_name = "days"

    def __init__(
        self,
        kafka: str,
        store: StoreOptions,
        spark: Any,
        partitions: int = 2,
        writer: Writer | None = None,
        **flags: object,
    ) -> None:
        self.store, self.spark, self.kafka = store, spark, kafka
        self.topic = f"past-{os.getpid()}-{next(_topics)}"
        self.settings = settings_for(kafka, store, [self.topic], **flags)
        self.admin = AdminClient({"bootstrap.servers": kafka, "log_level": 0})
        any_time = {"message.timestamp.type": "CreateTime", "message.timestamp.after.max.ms": str(2**63 - 1)}
        kept = {**any_time, "retention.ms": "-1"}
        self.admin.create_topics([NewTopic(self.topic, partitions, 1, config=kept)])[self.topic].result(30)
        self.producer = Producer(
            {"bootstrap.servers": kafka, "log_level": 0, "linger.ms": 0, "enable.idempotence": True}
        )
        self.writer = writer or self.begin()
        self.shards = self.writer.shards
        self.keys = self.shards.keys
        self.registry = LogRegistry(self.shards, self.view_name)
        self._ends = [0] * partitions
        self.produced: list[Record] = []
        while self.topic not in (topics := Broker(self.settings).topics()):
            time.sleep(0.05)
        self.shards.call(0, "adopt", self.topic, topics[self.topic].id)

    def begin(self) -> Writer:
        """Begin a pipeline."""
        return Writer(self.store)

    def record(self, name: str, time_ms: int = NOON, partition: int = 0, value: bytes | None = None) -> Record:
        """Return the next record of a partition."""
        offset = self._ends[partition]
        self._ends[partition] += 1
        body = b'{"name":"%s","at":%d}' % (name.encode(), offset) if value is None else value
        headers = [("kind", b"x"), ("none", None)] if offset % 7 == 3 else None
        key = json.dumps(name.split("/")).encode() if "/" in name else name.encode()
        return Record(offset, key, body, time_ms, partition, self.topic, headers)

    def days(self, *names: str, days: int = 3, each: int = 4, first: int = 0) -> list[Record]:
        """Return records of several streams, day by day, spread over the partitions."""
        return [
            self.record(name, NOON + d * DAY + 1000 * i, i % len(self._ends))
            for d in range(first, first + days)
            for i in range(each)
            for name in names
        ]

    def produce(self, records: Sequence[Record]) -> None:
        """Write records to Kafka, and see that they are where they say they are."""
        deliveries: list[tuple[int, Any]] = []
        for r in records:
            headers: Any = r.headers or []

            def delivered(error: object, message: Any, offset: int = r.offset) -> None:
                deliveries.append((offset, error or message.offset()))

            place = {"partition": r.partition, "timestamp": r.time, "headers": headers}
            self.producer.produce(r.topic, r.value, r.key, on_delivery=delivered, **place)
        self.producer.flush()
        assert all(wanted == offset for wanted, offset in deliveries), deliveries
        self.produced += records

    def put(self, records: Sequence[Record], at_once: int = 10) -> Sequence[Record]:
        """Write records to Kafka and, as the pipeline does, to the view."""
        self.produce(records)
        for at in range(0, len(records), at_once):
            self.writer.write(records[at : at + at_once])
        return records

    def forget(self, partition: int, before: int) -> None:
        """Let Kafka drop the records of a partition before an offset."""
        place = TopicPartition(self.topic, partition, before)
        self.admin.delete_records([place])[place].result(30)

    def beside(self, partitions: int = 1) -> Past:
        """Return another topic of the same view."""
        return Past(self.kafka, self.store, self.spark, partitions, self.writer)

    def set(self, section: str, **changes: object) -> None:
        """Change settings."""
        changed = getattr(self.settings, section).model_copy(update=changes)
        self.settings = self.settings.model_copy(update={section: changed})

    @property
    def upkept(self) -> View:
        return find_view(self.settings, VIEWS, self.view_name)

    def audit(self, **changes: Any) -> Audit:
        work = Auditing(self.settings, self.upkept, spark=self.spark, **changes)
        run_job(self.settings, work, alone=False)
        return work.found

    def rebuild(self, name: str | None = None, day: int | None = None, **changes: Any) -> dict[str, Any]:
        """Rebuild; ``day`` is counted from the first one."""
        day_ms = None if day is None else NOON - NOON % DAY + day * DAY
        work = Rebuilding(self.settings, self.upkept, name=name, day_ms=day_ms, spark=self.spark, **changes)
        return dict(run_job(self.settings, work))

    @contextmanager
    def restorer(self, day: int | None = None, **changes: Any) -> Iterator[Restoring]:
        """Return the input of a rebuild's task, in this process: epochs, marks, and Kafka's records in their order."""
        history = History(self.settings, None, self.upkept.copy(self.settings))
        with Keeper(self.store, view=self.view_name) as keeper:
            opened = keeper.staging.reopen(round(time.time()))
            start = RebuildStart(tuple(marks for _, marks in opened), tuple(epoch for epoch, _ in opened))
            orders = RebuildPlan(
                work=history.assign(keeper.shards, WantedNames(), start.marks),
                start=start,
                token=keeper.lease.token,
                day_ms=None if day is None else NOON - NOON % DAY + day * DAY,
                dry_run=False,
                now_ms=round(time.time() * 1000),
                piece_bytes=self.settings.upkeep.segment_bytes,
                remember_ms=60_000,
            )
            yield Restoring(self, keeper.shards, msgspec.structs.replace(orders, **changes))

    def named(self, name: str) -> list[tuple[Record, tuple[Any, ...]]]:
        """Return the records of a stream, each with what its body has beside key, headers and value."""
        return [(r, ()) for r in self.produced if name_of_key(r.key) == name]

    def log(self, name: str) -> Log:
        return self.registry.logs([name])[0].log

    def segment_key(self, name: str, at: int = 0) -> tuple[Any, str]:
        """Return the client and the key of a segment."""
        named = self.registry.logs([name])[0]
        return self.client(name), self.keys.segment(named.shard, self.view_name, named.log.segments[at].index, name)

    def log_key(self, name: str) -> str:
        return self.keys.log(self.registry.logs([name])[0].shard, self.view_name, name)

    def names_key(self, name: str) -> str:
        return self.keys.names(self.registry.logs([name])[0].shard, self.view_name)

    def client(self, name: str) -> Any:
        return self.shards.client(self.registry.logs([name])[0].shard)

    def view(self) -> dict[str, list[str]]:
        return asyncio.run(read_view(self.store))


class Restoring:
    """Restores logs of a past under one lease."""

    def __init__(self, past: Past, shards: Shards, orders: RebuildPlan) -> None:
        self._past, self._shards, self.orders = past, shards, orders

    def records(self, name: str) -> list[SpooledRecord]:
        """Return what a job would bring of a name: what Kafka has and its shard has applied, merged by time."""
        bounds = self.orders.work.extent.shards[shard_of(name, self._shards.options.shards)]
        newest: dict[Partition, int] = {}
        found: list[SpooledRecord] = []
        erased = self.orders.work.erased.get(name, {})
        for r, more in sorted(self._past.named(name), key=lambda each: each[0].offset):
            source = Partition(r.topic, r.partition)
            first, last = bounds.get(source, (1, 0))
            is_erased = more and more[0] in erased and erased[more[0]].covers(str(source), r.offset)
            if first <= r.offset <= last and not is_erased:
                newest[source] = max(newest.get(source, 0), r.time)
                body = encode_body((r.key, r.headers or (), r.value, *more))
                found.append(SpooledRecord(source, r.offset, r.time, newest[source], body))
        return sorted(found, key=lambda r: (r.newest_ms, str(r.partition), r.offset))

    def restore(self, name: str, reached: Callable[[str], None] = lambda _: None) -> Restored:
        return Restorer(self.orders, self._shards, reached).restore(name, iter(self.records(name)))


def by_name(records: Iterable[Record]) -> dict[str, list[str]]:
    """Return the ids of records by the name of their stream."""
    found: dict[str, list[str]] = {}
    for record in records:
        found.setdefault(name_of_key(record.key), []).append(record.id)
    return found


MINUTE = 60_000
HOUR = 60 * MINUTE


class Seen(NamedTuple):
    """An event as its tag has it."""

    id: str
    source: str
    number: int
    ms: int
    tags: tuple[str, ...]


class TagPast(Past):
    """One topic, in Kafka and in tags; a source's events are all in one partition."""

    view_name = "tags"

    def begin(self) -> Writer:
        """Begin a pipeline with the present settings; one that was there is overtaken."""
        return Writer(self.store, views=("intake", "tags"), tags=TagsPlan.of(self.settings))

    def restart(self, **changes: object) -> None:
        """Change the settings of tags, and begin the pipeline anew."""
        self.set("tags", **changes)
        self.writer = self.begin()

    def put(self, records: Sequence[Record], at_once: int = 10) -> Sequence[Record]:
        """Write records to Kafka and to the tags, and let all shards know that they are applied, as the driver does."""
        super().put(records, at_once)
        ends = {Partition(self.topic, partition): end - 1 for partition, end in enumerate(self._ends) if end}
        advance(self.shards, "tags", self.writer.epoch, ends)
        return records

    def named(self, name: str) -> list[tuple[Record, tuple[Any, ...]]]:
        """Return the events of a tag by the present settings, each with what its body has of it."""
        tagger, found = Tagger(self.settings.tags), list[tuple[Record, tuple[Any, ...]]]()
        for r in self.produced:
            event = tagger.read(r.key, r.value or b"", r.offset)
            if not isinstance(event, str) and name in event.tags:
                found.append((r, (event.source, event.seq, event.tags)))
        return found

    def event(self, pid: str, *tags: str, at: int = 0, **more: object) -> Record:
        """Return the next event of a source, so many milliseconds after the first noon."""
        value = json.dumps({"tags": tags, **more}).encode()
        return self.record(pid, NOON + at, crc32(pid.encode()) % len(self._ends), value)

    def history(self, pids: Sequence[str], *tags: str, hours: int = 3, each: int = 4, first: int = 0) -> list[Record]:
        """Return events of several sources, hour by hour, in turns."""
        return [
            self.event(pid, *tags, at=hour * HOUR + i * MINUTE, n=i)
            for hour in range(first, first + hours)
            for i in range(each)
            for pid in pids
        ]

    def events(self, tag: str) -> list[Seen]:
        """Return what a tag has, in its order."""
        named = self.registry.logs([tag])[0]
        found: list[Seen] = []
        for segment in named.log.segments:
            for entry in self.registry.read_whole([(tag, segment)])[0]:
                run = entry.run
                assert run.tag_columns is not None
                rows = run.tag_columns.rows(run.offsets, run.times)
                for offset, note in zip(run.offsets, rows, strict=True):
                    found.append(Seen(f"{run.partition}:{offset}", note.source, note.number, note.ms, note.tags))
        return found

    def numbers(self, tag: str) -> dict[str, list[int]]:
        """Return the numbers of each source in a tag, in the tag's order."""
        found: dict[str, list[int]] = {}
        for each in self.events(tag):
            found.setdefault(each.source, []).append(each.number)
        return found

    def cleanup(self, source: str, tag: str | None = None, dry_run: bool = False, **changes: Any) -> LogErasing:
        work = LogErasing(self.settings, source, tag, **changes)
        if dry_run:
            look_once(self.settings, work)
        else:
            run_job(self.settings, work)
        return work


def tag_feeds(options: StoreOptions) -> AbstractAsyncContextManager[Rig]:
    """Plain feeds over the logs of tags: what their cursors lead to."""
    return rig(options, "tags")


class RowPast(TagPast):
    """One topic, in Kafka and in rows."""

    def __init__(
        self, kafka: str, store: StoreOptions, rows: CassandraSettings, spark: Any, partitions: int = 2, **flags: object
    ) -> None:
        self.options = rows
        at = {"cassandra__port": rows.port, "cassandra__keyspace": rows.keyspace, "cassandra__timeout": "30s"}
        given = {"tags__store": "cassandra", "tags__paths": ["tags"], **at, **flags}
        super().__init__(kafka, store, spark, partitions, None, **given)

    @property
    def rows_writer(self) -> RowWriter:
        return writer(self.options)

    def rows(self, tag: str) -> list[StoredRow]:
        """Return all rows of a tag, in order."""
        with RowWalk(self.options) as rows:
            return list(rows.rows(tag))

    def events(self, tag: str) -> list[Seen]:
        return [
            Seen(f"{row.partition}:{row.offset}", row.source, row.tag_seq, ms_of(row.timeuuid), row.tags)
            for row in self.rows(tag)
        ]

    def lose(self, *rows: RowKey) -> None:
        """Delete rows behind everybody's back."""
        self.rows_writer.delete(rows)

    def clean_rows(self, source: str, tag: str | None = None, dry_run: bool = False, **changes: Any) -> RowErasing:
        work = erasing(self.settings, source, tag, **changes)
        assert isinstance(work, RowErasing)
        if dry_run:
            look_once(self.settings, work)
        else:
            run_job(self.settings, work)
        return work

"""A topic of a real Kafka and the view of it, written by the pipeline's own host: what audits compare."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import msgspec
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tailrace.config.load import load
from tailrace.config.settings import Settings
from tailrace.kafka.broker import Broker
from tailrace.log.event import Partition
from tailrace.log.name import name_of_key, shard_of
from tailrace.log.segment import Log
from tailrace.log.store import LogRegistry
from tailrace.testing.spark import QUICK_JAVA
from tailrace.upkeep.audit import Audit, Auditing
from tailrace.upkeep.copy import RebuildPlan, RebuildStart, Restored, SpooledRecord, WantedNames, encode_body
from tailrace.upkeep.history import History
from tailrace.upkeep.job import find_view, run_job
from tailrace.upkeep.rebuild import Rebuilding
from tailrace.upkeep.restore import Restorer
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.view import View
from tailrace.views import VIEWS
from tests.upkeep.rig import Keeper
from tests.writing import DAY, NOON, Record, Writer, read_view

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
        told: list[tuple[int, Any]] = []
        for r in records:
            headers: Any = r.headers or []

            def delivered(error: object, message: Any, offset: int = r.offset) -> None:
                told.append((offset, error or message.offset()))

            place = {"partition": r.partition, "timestamp": r.time, "headers": headers}
            self.producer.produce(r.topic, r.value, r.key, on_delivery=delivered, **place)
        self.producer.flush()
        assert all(wanted == offset for wanted, offset in told), told
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
        """What a task of a rebuild has, in this process: epochs, marks, and Kafka's records in their order."""
        history = History(self.settings, None, self.upkept.copy(self.settings))
        with Keeper(self.store, view=self.view_name) as keeper:
            opened = keeper.staging.reopen(round(time.time()))
            start = RebuildStart(tuple(marks for _, marks in opened), tuple(epoch for epoch, _ in opened))
            extent = history.extent(keeper.shards, start.marks)
            orders = RebuildPlan(
                work=history.assign(keeper.shards, extent, WantedNames()),
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
        cleaned = self.orders.work.erased.get(name, {})
        for r, more in sorted(self._past.named(name), key=lambda each: each[0].offset):
            source = Partition(r.topic, r.partition)
            first, last = bounds.get(source, (1, 0))
            is_cleaned = more and more[0] in cleaned and cleaned[more[0]].covers(str(source), r.offset)
            if first <= r.offset <= last and not is_cleaned:
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

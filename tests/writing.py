"""The write path without Spark: the very host that runs in every task, fed with slices made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from tailrace.driver.one_pass import Host, IntakePlan
from tailrace.driver.slice import Plan, RecordLimits, Slice, ViewPlan, make_slice
from tailrace.log.event import Partition
from tailrace.log.store import Logs
from tailrace.valkey.shards import Nodes, Shards, StoreOptions, enlist, prepare
from tailrace.views.days.write import DaysPlan
from tailrace.views.folds.model import Rule
from tailrace.views.folds.write import FoldsPlan
from tailrace.views.grep.write import GrepPlan
from tailrace.views.sessions.write import SessionPlan
from tailrace.views.tags.write import TagsPlan

NOON = 1_789_200_000_000 - 1_789_200_000_000 % 86_400_000 + 43_200_000
"""A fixed noon, in the past for every test."""

DAY = 86_400_000
VIEWS = ("intake", "days")
LIMITS = RecordLimits()


class Record(NamedTuple):
    """A Kafka record as the source delivers it."""

    offset: int
    key: bytes | None = b'["queue","jobset"]'
    value: bytes | None = b'{"n":1}'
    time: int = NOON
    partition: int = 0
    topic: str = "jobs"
    headers: list[tuple[str, bytes | None]] | None = None

    @property
    def id(self) -> str:
        return f"{Partition(self.topic, self.partition)}:{self.offset}"


class Message(NamedTuple):
    """A record as the Kafka client hands it over."""

    record: Record

    def offset(self) -> int:
        return self.record.offset

    def timestamp(self) -> tuple[int, int]:
        return 1, self.record.time

    def key(self) -> bytes | None:
        return self.record.key

    def value(self) -> bytes | None:
        return self.record.value

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return self.record.headers


def batch(
    records: Sequence[Record], limits: RecordLimits = LIMITS, generations: Mapping[str, int] | None = None
) -> list[Slice]:
    """Return the records as a task takes them: a slice wherever the partition changes."""
    known = generations or {}
    return [
        make_slice(partition, [Message(record) for record in of_it], limits)
        for partition, of_it in groupby(records, lambda r: Partition(r.topic, r.partition, known.get(r.topic, 0)))
    ]


_PARTS = {"name_paths", "span_ms", "seal_when", "rules", "kept_bytes", "tags", "sessions"}


def _plan_of(
    view: str,
    *,
    name_paths: tuple[str, ...] | None = None,
    span_ms: int = DAY,
    seal_when: Mapping[str, Any] | None = None,
    rules: tuple[Rule, ...] = (),
    kept_bytes: int = 0,
    tags: TagsPlan | None = None,
    sessions: SessionPlan | None = None,
) -> ViewPlan:
    plans: dict[str, ViewPlan] = {
        "intake": IntakePlan(),
        "days": DaysPlan(name_paths, span_ms, dict(seal_when or {})),
        "folds": FoldsPlan(rules),
        "matches": GrepPlan(kept_bytes=kept_bytes),
        "tags": tags or TagsPlan(),
        "sessions": sessions or SessionPlan(),
    }
    return plans[view]


class Writer:
    """A driver and its tasks: takes the views over, then applies batches."""

    def __init__(
        self,
        options: StoreOptions,
        views: tuple[str, ...] = VIEWS,
        *,
        generations: Mapping[str, int] | None = None,
        **changes: Any,
    ) -> None:
        self.generations = generations
        self.shards = Shards(options).open()
        self.epochs = prepare(self.shards)
        self.epoch = enlist(self.shards, views)
        parts = {name: changes.pop(name) for name in list(changes) if name in _PARTS}
        plan = Plan(
            store=options,
            run_ids=dict(self.shards.run_ids),
            epoch=self.epoch,
            views=tuple(_plan_of(view, **parts) for view in views),
            limits=LIMITS,
            dead_letters="tailrace.dead-letters",
            window_bytes=256 << 10,
            window_runs=500,
            tail_length=10_000,
        )
        self.plan = msgspec.structs.replace(plan, **changes)
        self.host = Host(self.plan)

    def write(self, records: Iterable[Record]) -> None:
        self.host.take(batch(list(records), self.plan.limits, self.generations))

    def another_task(self) -> Writer:
        """The same driver's work in another process: same epoch, nothing remembered."""
        other = object.__new__(Writer)
        other.shards, other.epochs, other.epoch, other.plan = self.shards, self.epochs, self.epoch, self.plan
        other.generations = self.generations
        other.host = Host(self.plan)
        return other


async def read_view(options: StoreOptions) -> dict[str, list[str]]:
    """Return the event ids of every day stream, in order, read straight from the store."""
    nodes = await Nodes(options).open()
    try:
        logs = Logs(nodes, "days")
        found: dict[str, list[str]] = {}
        for name in await logs.names("", "", 100_000):
            ids: list[str] = []
            for segment in (await logs.log(name)).segments:
                after = segment.first - 1
                while entries := await logs.read(name, segment, after, 100):
                    for entry in entries:
                        assert entry.first > after
                        ids += [f"{entry.run.partition}:{offset}" for offset in entry.run.offsets]
                        after = entry.last
            found[name] = ids
        return found
    finally:
        await nodes.close()


__all__ = ["DAY", "NOON", "Record", "Writer", "batch", "read_view"]

"""Folding without Spark: the very view that runs in every task, the very emitter, and folding by the book."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.views.folds.collect import Collect
from tailrace.views.folds.model import Clump, Rule, Windows
from tailrace.views.folds.store import Emitter
from tests.writing import NOON, Record, Writer

RULE = Rule(
    name="accounts",
    topics=("posts",),
    group=(("account_id",),),
    collect=(Collect("metrics", "keys", ("metrics",)), Collect("posts", "set", ("id",))),
    windows=Windows(quiet_ms=1_000, max_wait_ms=5_000),
    output="folds.accounts",
)


def post(offset: int, account: str, at_ms: int, partition: int = 0, metrics: Sequence[str] = ("likes",)) -> Record:
    """Return a post whose metrics changed, so many milliseconds after noon."""
    value = {"id": f"post_{offset}", "account_id": account, "metrics": dict.fromkeys(metrics, offset)}
    return Record(
        offset=offset, value=json.dumps(value).encode(), time=NOON + at_ms, partition=partition, topic="posts"
    )


class Fold(NamedTuple):
    """A folded event, as far as tests compare them."""

    group: str
    inputs: tuple[tuple[int, int], ...]
    """Partition and offset of each."""
    reason: str
    due_ms: int
    """After noon."""


def expected(records: Iterable[Record], windows: Windows = RULE.windows) -> list[Fold]:
    """Fold by the book: every group's events in the order of time, partition and offset, one by one."""
    groups: dict[str, list[tuple[int, int, int]]] = {}
    newest: dict[int, int] = {}
    for r in sorted(records, key=lambda r: (r.partition, r.offset)):
        newest[r.partition] = max(r.time, newest.get(r.partition, r.time))
        group = json.loads(r.value or b"")["account_id"]
        groups.setdefault(group, []).append((newest[r.partition] - NOON, r.partition, r.offset))
    found: list[Fold] = []
    for group, events in groups.items():
        held: list[tuple[int, int, int]] = []
        for event in [*sorted(events), None]:
            due = windows.due(held[0][0], held[-1][0]) if held else 0
            if held and (event is None or event[0] >= due):
                inputs = tuple(sorted((p, o) for _, p, o in held))
                found.append(Fold(group, inputs, windows.reason(held[0][0], held[-1][0]), int(due)))
                held = []
            if event is not None:
                held.append(event)
    return sorted(found)


def inputs_of(clump: Clump) -> list[tuple[str, int]]:
    """Return the partition and the offset of each event of a fold, in order."""
    spans = [(partition, first, last) for partition, spans in sorted(clump.inputs.items()) for first, last in spans]
    return [(partition, offset) for partition, first, last in spans for offset in range(first, last + 1)]


def emitter(shards: Shards, rules: Sequence[Rule], watermark_ms: int) -> Emitter:
    """Return an emitter for which time has come so far after noon, and whose clock is far ahead of that."""
    return Emitter(
        shards, rules, lambda wanted: {r.name: NOON + watermark_ms for r in wanted}, clock=lambda: 2 * NOON / 1000
    )


class FoldRig:
    """A store that is written by tasks and emptied by emitters."""

    def __init__(self, options: StoreOptions, rules: Sequence[Rule] = (RULE,), **changes: Any) -> None:
        self.options, self.rules = options, tuple(rules)
        self.writer = Writer(options, ("intake", "folds"), rules=self.rules, **changes)
        self.shards = self.writer.shards

    def settle(self, watermark_ms: int) -> None:
        """Give out what is due."""
        emitter(self.shards, self.rules, watermark_ms).turn()

    def outbox(self) -> list[tuple[str, dict[str, Any]]]:
        """Return id and value of everything that waits to be published, shard by shard."""
        found = []
        for shard in range(self.options.shards):
            entries: Any = self.shards.client(shard).xrange(self.shards.keys.outbox(shard))
            for _, fields in entries:
                found.append((fields[b"i"].decode(), msgspec.json.decode(fields[b"v"])))
        return found

    def folds(self) -> list[Fold]:
        """Return all folds that were emitted; no id may be there twice."""
        entries = [value for _, value in self.outbox() if value.get("rule")]
        ids = [value["id"] for value in entries]
        assert len(ids) == len(set(ids)), "a fold was emitted twice"
        return sorted(map(self.read, entries))

    @staticmethod
    def read(value: dict[str, Any]) -> Fold:
        inputs = tuple(
            (place["partition"], offset)
            for place in value["inputs"]
            for first, last in place["offsets"]
            for offset in range(first, last + 1)
        )
        assert value["count"] == len(inputs)
        return Fold(value["group"]["account_id"], tuple(sorted(inputs)), value["reason"], _after_noon(value["due"]))

    def left(self) -> list[str]:
        """Return every key that belongs to a group."""
        found: list[Any] = []
        for node in self.shards.primaries():
            for kind in ("fold", "due", "closed"):
                keys: Any = node.keys(f"{self.options.prefix}:*:{kind}:*")
                found += keys
        return sorted(key.decode() for key in found)


def _after_noon(text: str) -> int:
    return round(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000) - NOON

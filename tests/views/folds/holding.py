"""Groups that hold folds, and the folds emitted from them: written and read as the pipeline does, without Spark."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec

from tailrace.config.settings import load
from tailrace.valkey.shards import Shards, StoreOptions, prepare
from tailrace.views.folds.model import NEVER, Input, Rule, RuleInput, RuleReader
from tailrace.views.folds.store import AppliedRule, FoldStore, GroupChange, rules_of
from tests.writing import NOON

RULES: dict[str, Any] = {
    "accounts": {
        "topics": ["posts"],
        "group": ["account_id"],
        "collect": {"metrics": "keys metrics", "posts": "set id"},
        "quiet": "5s",
    },
    "rows": {"topics": ["changes"], "group": ["table", "row.id"], "quiet": "1s", "max_wait": "3s", "clock": "event"},
}
SEED: list[dict[str, Any]] = [
    {"id": "post_1", "account_id": "account_1", "metrics": {"likes": 10, "shares": 5}},
    {"id": "post_2", "account_id": "account_1", "metrics": {"comments": 25, "impressions": 16}},
    {"id": "post_3", "account_id": "account_1", "metrics": {"likes": 5, "shares": 2}},
    {"id": "post_4", "account_id": "account_1", "metrics": {"comments": 33, "impressions": 8}},
    {"id": "post_5", "account_id": "account_2", "metrics": {"likes": 12, "shares": 15}},
    {"id": "post_6", "account_id": "account_2", "metrics": {"likes": 3, "shares": 1}},
]
SOURCE = "posts:0"


class Holder:
    """The pipeline's side of the store, for rules of a test."""

    def __init__(self, store: StoreOptions) -> None:
        self.shards = Shards(store).open()
        prepare(self.shards)
        self.rules: dict[str, Rule] = rules_of(load(None, {"folds.rules": RULES}))
        self._folds = FoldStore(self.shards)
        self._offset = 0

    def close(self) -> None:
        self.shards.close()

    def add(self, name: str, value: dict[str, Any], time_ms: int, watermark: float = NEVER) -> bytes:
        """Add an event to its group, as a task does; return the group."""
        rule = self.rules[name]
        taken = RuleReader(rule).read(msgspec.json.encode(value))
        assert isinstance(taken, RuleInput)
        shard = rule.shard(taken.group, self.shards.options.shards)
        folding = rule.folding
        while True:
            ((held,),), *_ = self._folds.read([(shard, rule, [taken.group])])
            clumps = folding.load(held.state) if held.state else []
            event = Input(time_ms, SOURCE, self._offset, taken.size, taken.extracts)
            assert not folding.absorb(clumps, [event], watermark)
            change = GroupChange(taken.group, held.version, folding.dump(clumps), folding.due(clumps), ())
            if not self._folds.settle(rule, 0, shard, [change]):
                self._offset += 1
                return taken.group

    def count(self, shard: int = 0, **fields: int) -> None:
        """Add to counters; ``__`` stands for a colon."""
        for field, n in fields.items():
            key = self.shards.keys.counts(shard, "folds")
            self.shards.run_all([(shard, ("HINCRBY", key, field.replace("__", ":"), n))])

    def put_in_force(self, rule: Rule, since_ms: int, **counts: int) -> None:
        text = msgspec.json.encode(AppliedRule(rule, since_ms, counts))
        self.shards.run_all([(0, ("HSET", self.shards.keys.rules(), rule.name, text))])

    def reach(self, name: str, watermark_ms: int) -> None:
        self._folds.publish_watermarks({name: watermark_ms})

    def outbox(self) -> list[dict[str, Any]]:
        """Return the folded events that wait to be published, each with topic and key of its record."""
        count = self.shards.options.shards
        answers = self.shards.run_all([(s, ("XRANGE", self.shards.keys.outbox(s), "-", "+")) for s in range(count)])
        found: list[dict[str, Any]] = []
        for entries in answers:
            for _, fields in entries:
                record = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
                value = msgspec.json.decode(record[b"v"])
                assert value["id"] == record[b"i"].decode().partition("#")[0]
                found.append(value | {"topic": record[b"t"].decode(), "key": msgspec.json.decode(record[b"k"])})
        return found

    def left(self, name: str) -> list[Any]:
        """Return every key that is left of a rule's groups."""
        keys, count = self.shards.keys, self.shards.options.shards
        kept = [key(s, self.rules[name].key_suffix) for s in range(count) for key in (keys.fold, keys.due)]
        there = self.shards.run_all([(i // 2, ("EXISTS", key)) for i, key in enumerate(kept)])
        return [key for key, exists in zip(kept, there, strict=True) if exists]


def hold(holder: Holder) -> None:
    """Add the events of the example, a second apart."""
    for i, value in enumerate(SEED):
        holder.add("accounts", value, NOON + i * 1000, watermark=NOON)


def flush(client: httpx.Client, body: Any, rule: str = "accounts", what: str = "flush") -> httpx.Response:
    """Ask for what a rule holds."""
    return client.post(f"/v1/folds/{rule}/{what}", content=body if isinstance(body, bytes) else json.dumps(body))


def rule_of(client: httpx.Client, name: str = "accounts") -> dict[str, Any]:
    """Return a rule's entry in the listing."""
    return next(rule for rule in client.get("/v1/folds").json()["folds"] if rule["name"] == name)

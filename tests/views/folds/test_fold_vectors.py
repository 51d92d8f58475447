"""Examples that other engines are tested with, and what our rule makes of them.

Each has the folds that the other one emits (``theirs``). Where ours are not the same, ``differs`` says why:
a gap of exactly ``quiet`` opens the next fold here, and continues the old one in some; an event that comes late is kept
here, and dropped in some. An engine that joins at exactly its gap has our folds with a ``quiet`` longer by one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import pytest

from tailrace.views.folds.collect import Collect
from tailrace.views.folds.model import (
    ClosedFold,
    Clump,
    Folding,
    Input,
    Rule,
    RuleInput,
    RuleReader,
    Windows,
)
from tailrace.views.folds.store import fold_record

Held: TypeAlias = "dict[bytes, list[Clump]]"

RULE = Rule(
    "vector",
    (),
    (("key",),),
    (Collect("items", "set", ("item",)), Collect("count", "count", ("item",))),
    Windows(1, 1),
)
LONG = 1_000_000


class At(NamedTuple):
    """An event, and the watermark when it comes: that of the one before unless it is given."""

    time: int
    item: int
    key: str = "k"
    watermark: int | None = None


class Tick(NamedTuple):
    """Time goes on without events."""

    watermark: int


class Fold(NamedTuple):
    """An emitted fold: its key, its items, when it was opened and due, and why it closed."""

    items: list[int]
    opened: int
    due: int
    key: str = "k"
    reason: str = "quiet"


class Vector(NamedTuple):
    """An example: windows, what happens, what we emit and still hold, and what the other engine emits."""

    windows: Windows
    steps: Sequence[At | Tick]
    ours: list[Fold]
    theirs: list[list[int]]
    held: tuple[str, ...] = ()
    differs: str = ""


STRICT = "a gap of exactly quiet opens the next fold"
KEPT = "a late event is kept, as one at the watermark"

VECTORS = {
    "V1 kafka streams, suppressed until windows close": Vector(
        Windows(5, LONG),
        [
            At(0, 1, "k1", 0),
            At(5, 2, "k1"),
            At(1, 3, "k1"),
            At(11, 4, "k2", 11),
            Tick(11),
            At(5, 5, "k1"),
            At(30, 6, "k1", 30),
            Tick(30),
        ],
        [Fold([1, 3, 2], 0, 10, "k1"), Fold([5], 11, 16, "k1"), Fold([4], 11, 16, "k2")],
        [[1, 3, 2], [4]],
        held=("k1",),
        differs=KEPT,
    ),
    "V2 kafka streams, an event joins two sessions": Vector(
        Windows(300_000, LONG),
        [At(0, 1, watermark=0), At(300_001, 2), At(150_000, 3), Tick(600_001)],
        [Fold([1, 3, 2], 0, 600_001)],
        [[1, 3, 2]],
    ),
    "V3 kafka streams, final results": Vector(
        Windows(300_000, LONG),
        [
            At(0, 1, watermark=0),
            At(300_001, 2, watermark=300_001),
            At(300_001, 3),
            At(600_002, 4, watermark=600_002),
            At(600_002, 5),
            At(600_002, 6),
            Tick(600_002),
        ],
        [Fold([1], 0, 300_000), Fold([2, 3], 300_001, 600_001)],
        [[1], [2, 3]],
        held=("k",),
    ),
    "V4 bytewax, exactly the gap": Vector(
        Windows(10_000, LONG),
        [At(0, 1, watermark=0), At(10_000, 2), Tick(LONG)],
        [Fold([1], 0, 10_000), Fold([2], 10_000, 20_000)],
        [[1, 2]],
        differs=STRICT,
    ),
    "V4 bytewax, exactly the gap, and a quiet that is longer by one": Vector(
        Windows(10_001, LONG),
        [At(0, 1, watermark=0), At(10_000, 2), Tick(LONG)],
        [Fold([1, 2], 0, 20_001)],
        [[1, 2]],
    ),
    "V4 bytewax, an event joins two sessions": Vector(
        Windows(10_000, LONG),
        [At(0, 1, watermark=0), At(20_000, 2), At(10_000, 3), Tick(LONG)],
        [Fold([1], 0, 10_000), Fold([3], 10_000, 20_000), Fold([2], 20_000, 30_000)],
        [[1, 3, 2]],
        differs=STRICT,
    ),
    "V4 bytewax, an event joins two sessions, and a quiet that is longer by one": Vector(
        Windows(10_001, LONG),
        [At(0, 1, watermark=0), At(20_000, 2), At(10_000, 3), Tick(LONG)],
        [Fold([1, 3, 2], 0, 30_001)],
        [[1, 3, 2]],
    ),
    "V4 bytewax, apart": Vector(
        Windows(10_000, LONG),
        [At(0, 1, watermark=0), At(20_000, 2), Tick(LONG)],
        [Fold([1], 0, 10_000), Fold([2], 20_000, 30_000)],
        [[1], [2]],
    ),
    "V5 beam, exactly the gap": Vector(
        Windows(10, LONG),
        [At(2, 1, watermark=0), At(9, 2), At(19, 3), Tick(29)],
        [Fold([1, 2], 2, 19), Fold([3], 19, 29)],
        [[1, 2], [3]],
    ),
    "V5 beam, an event joins two sessions": Vector(
        Windows(10, LONG),
        [At(2, 1, watermark=0), At(15, 2), At(10, 3), Tick(25)],
        [Fold([1, 3, 2], 2, 25)],
        [[1, 3, 2]],
    ),
    "V5 beam, two sessions of one key": Vector(
        Windows(10, LONG),
        [At(1, 1, watermark=0), At(2, 2), At(3, 3), At(20, 4), At(35, 5), At(27, 6), Tick(45)],
        [Fold([1, 2, 3], 1, 13), Fold([4, 6, 5], 20, 45)],
        [[1, 2, 3], [4, 6, 5]],
    ),
    "V8 flink, windows that touch": Vector(
        Windows(1, LONG),
        [At(0, 1, watermark=0), At(1, 2), At(2, 3), At(4, 4), At(5, 5), Tick(100)],
        [Fold([i], time, time + 1) for i, time in enumerate([0, 1, 2, 4, 5], 1)],
        [[1, 2, 3], [4, 5]],
        differs=STRICT,
    ),
    "V8 flink, windows that touch, and a quiet that is longer by one": Vector(
        Windows(2, LONG),
        [At(0, 1, watermark=0), At(1, 2), At(2, 3), At(4, 4), At(5, 5), Tick(100)],
        [Fold([1, 2, 3], 0, 4), Fold([4, 5], 4, 7)],
        [[1, 2, 3], [4, 5]],
    ),
    "V10 windmill, two events at most": Vector(
        Windows(1000, LONG, max_count=2),
        [At(i, i, watermark=i) for i in range(1, 6)],
        [Fold([1, 2], 1, 2, reason="max_count"), Fold([3, 4], 3, 4, reason="max_count")],
        [[1, 2], [3, 4]],
        held=("k",),
    ),
    "V10 windmill, the longest wait": Vector(
        Windows(5000, 2000),
        [At(0, 10, watermark=0), At(2500, 20, watermark=2500), At(2600, 30, watermark=2600), Tick(2600)],
        [Fold([10], 0, 2000, reason="max_wait")],
        [[10, 20]],
        held=("k",),
        differs="the event that finds the wait over opens the next fold, and is not the last of the old one",
    ),
    "V11 windmill, three pushes are one run": Vector(
        Windows(1000, LONG),
        [At(0, 1, watermark=0), At(100, 2, watermark=100), At(200, 3, watermark=200), Tick(1199), Tick(1200)],
        [Fold([1, 2, 3], 0, 1200)],
        [[1, 2, 3]],
    ),
    "V15 spark, timers": Vector(
        Windows(10_000, LONG),
        [At(0, 1, "key1", 0), At(5000, 2, "key2", 5000), Tick(5000), Tick(11_000), Tick(16_000)],
        [Fold([1], 0, 10_000, "key1"), Fold([2], 5000, 15_000, "key2")],
        [[1], [2]],
    ),
    "V15 spark, the late filter": Vector(
        Windows(10_000, LONG),
        [At(20_000, 1, watermark=20_000), At(9000, 2, watermark=20_000), Tick(30_000)],
        [Fold([2, 1], 20_000, 30_000)],
        [[1]],
        differs=KEPT,
    ),
}


def _play(vector: Vector) -> tuple[list[Fold], Held]:
    """Let the steps of an example happen; return what was emitted, in order, and what is still held."""
    reader, folding = RuleReader(RULE), Folding(RULE.collect, vector.windows)
    groups: Held = {}
    given: list[Fold] = []
    watermark = 0

    def emit(group: bytes, finished: Sequence[ClosedFold]) -> None:
        for fold in finished:
            values = json.loads(fold_record(RULE, group, fold, watermark).value)["values"]
            assert values["count"] == fold.clump.count == len(values["items"])
            given.append(Fold(values["items"], int(fold.clump.opened), fold.due, json.loads(group)[0], fold.reason))

    for offset, step in enumerate(vector.steps):
        watermark = watermark if step.watermark is None else step.watermark
        if isinstance(step, At):
            taken = reader.read(json.dumps({"key": step.key, "item": step.item}).encode())
            assert isinstance(taken, RuleInput)
            one = Input(step.time, "vectors:0", offset, taken.size, taken.extracts)
            emit(taken.group, folding.absorb(groups.setdefault(taken.group, []), [one], watermark))
        else:
            for group, clumps in groups.items():
                emit(group, folding.settle(clumps, watermark))
    return given, {group: clumps for group, clumps in groups.items() if clumps}


@pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)
def test_an_example_of_another_engine_gives_the_same_folds_or_says_why_not(vector: Vector) -> None:
    given, held = _play(vector)
    assert given == vector.ours
    assert {json.loads(group)[0] for group in held} == set(vector.held)
    assert (sorted(fold.items for fold in given) == sorted(vector.theirs)) == (not vector.differs)


SEED = (
    b'{"id": "post_1", "account_id": "account_1", "metrics": {"likes": 10, "shares": 5}}',
    b'{"id": "post_2", "account_id": "account_1", "metrics": {"comments": 25, "impressions": 16}}',
    b'{"id": "post_3", "account_id": "account_1", "metrics": {"likes": 5, "shares": 2}}',
    b'{"id": "post_4", "account_id": "account_1", "metrics": {"comments": 33, "impressions": 8}}',
    b'{"id": "post_5", "account_id": "account_2", "metrics": {"likes": 12, "shares": 15}}',
    b'{"id": "post_6", "account_id": "account_2", "metrics": {"likes": 3, "shares": 1}}',
)


def test_v16_six_posts_of_two_accounts_are_two_folds() -> None:
    rule = Rule(
        "accounts", "posts", (("account_id",),), (Collect("metrics", "keys", ("metrics",)),), Windows(1000, 10_000)
    )
    reader, folding = RuleReader(rule), rule.folding
    groups: Held = {}
    new = 0
    for offset, value in enumerate(SEED):
        taken = reader.read(value)
        assert isinstance(taken, RuleInput)
        new += taken.group not in groups
        one = Input(100 * offset, "posts:0", offset, taken.size, taken.extracts)
        assert not folding.absorb(groups.setdefault(taken.group, []), [one], 100 * offset)
    given = [
        json.loads(fold_record(rule, group, fold, fold.due).value)
        for group, clumps in groups.items()
        for fold in folding.settle(clumps, 2000)
    ]
    assert [fold["group"] | fold["values"] for fold in given] == [
        {"account_id": "account_1", "metrics": ["likes", "shares", "comments", "impressions"]},
        {"account_id": "account_2", "metrics": ["likes", "shares"]},
    ]
    assert [(fold["count"], fold["inputs"][0]["offsets"]) for fold in given] == [(4, [[0, 3]]), (2, [[4, 5]])]
    assert (len(SEED) - new, len(SEED) - len(given)) == (4, 4)
    assert not any(groups.values())

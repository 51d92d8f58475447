"""Folds in the store: tasks that add, emitters that emit, on a real Valkey, a cluster and Redis."""

from __future__ import annotations

import random
import threading
import time
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.log.event import Partition
from tailrace.valkey.marks import conserved, read_counts
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.views.folds.store import FoldStore
from tests.examples import examples
from tests.views.folds.rig import RULE, Fold, FoldRig, emitter, expected, post
from tests.writing import NOON, Record, Writer

_fresh = count()


def _history(seed: int, n: int, partitions: int, accounts: int) -> list[Record]:
    chance = random.Random(seed)
    clocks = [0] * partitions
    offsets = [0] * partitions
    found = []
    for _ in range(n):
        p = chance.randrange(partitions)
        clocks[p] += chance.choice((0, 10, 200, 400, 900, 1_000, 1_001, 3_000))
        late = chance.choice((0, 0, 0, 0, -500))
        found.append(post(offsets[p], f"account_{chance.randrange(accounts)}", max(0, clocks[p] + late), p))
        offsets[p] += 1
    return found


def _reached(records: list[Record], applied: dict[int, int]) -> int:
    """The true watermark: the lowest running-maximum time over the partitions that have more to deliver."""
    newest: dict[int, int] = {}
    more: set[int] = set()
    for r in records:
        if r.offset < applied.get(r.partition, 0):
            newest[r.partition] = max(r.time, newest.get(r.partition, r.time))
        else:
            more.add(r.partition)
    return min((newest.get(p, NOON) - NOON for p in more), default=10**9)


def test_six_events_become_the_two_folds_of_the_example(any_store: StoreOptions) -> None:
    rig = FoldRig(any_store)
    changed = (("likes", "shares"), ("comments", "impressions")) * 2 + (("likes", "shares"),) * 2
    accounts = ("account_1",) * 4 + ("account_2",) * 2
    rig.writer.write([post(i, accounts[i], 10 * i, metrics=changed[i]) for i in range(6)])
    rig.settle(999)
    assert rig.folds() == []
    rig.settle(2_000)
    values = {value["group"]["account_id"]: value for _, value in rig.outbox()}
    assert values["account_1"]["values"]["metrics"] == ["likes", "shares", "comments", "impressions"]
    assert values["account_2"]["values"]["metrics"] == ["likes", "shares"]
    assert [values[a]["count"] for a in sorted(values)] == [4, 2]
    assert {v["reason"] for v in values.values()} == {"quiet"}


@pytest.mark.parametrize(
    ("where", "taken"),
    [
        ({"metrics.likes": {"$gt": 5}}, {6, 7, 8, 9}),
        ({"id": {"$in": ["post_2", "post_3"]}}, {2, 3}),
        ({"$offset": {"$gte": 8}, "$topic": "posts", "$partition": 0}, {8, 9}),
        ({"$time": {"$lt": NOON + 20}, "$headers.trace": {"$exists": True}}, {0, 1}),
        ({"$key.0": "a", "$key": 3}, {3}),
    ],
)
def test_a_rule_folds_only_what_its_query_matches(store: StoreOptions, where: dict[str, Any], taken: set[int]) -> None:
    rig = FoldRig(store, [msgspec.structs.replace(RULE, where=where)])
    records = [
        post(i, "account_1", 10 * i)._replace(key=b'["a",%d]' % i, headers=[("trace", b"x")] if i < 5 else [])
        for i in range(10)
    ]
    rig.writer.write(records)
    rig.settle(10**9)
    assert rig.folds() == expected([r for r in records if r.offset in taken])
    assert read_counts(rig.shards, "folds")["skipped:filtered"] == 10 - len(taken)


@examples(25)
@given(seed=st.integers(0, 1 << 30), data=st.data())
def test_folds_are_the_same_however_records_are_split_and_partitions_interleaved(
    store: StoreOptions, seed: int, data: st.DataObject
) -> None:
    partitions = data.draw(st.integers(1, 3))
    records = _history(seed, data.draw(st.integers(1, 120)), partitions, data.draw(st.integers(1, 4)))
    rig = FoldRig(StoreOptions(store.url, prefix=f"{store.prefix}-{next(_fresh)}"))
    tasks = [rig.writer, rig.writer.another_task()]
    left = {p: [r for r in records if r.partition == p] for p in range(partitions)}
    applied = dict.fromkeys(left, 0)
    holders: dict[int, Writer] = {}
    chance = random.Random(seed)
    while any(left.values()):
        p = chance.choice([p for p, rs in left.items() if rs])
        n = chance.choice((1, 2, 5, 30))
        batch = left[p][:n]
        for _ in range(2 if chance.random() < 0.2 else 1):  # sometimes with a retry
            task = chance.choice(tasks)
            if holders.get(p) is not task:  # as when a hand is given a partition: it remembers nothing of it
                task.host.forget(Partition("posts", p))
                holders[p] = task
            task.write(batch)
        left[p] = left[p][n:]
        applied[p] += len(batch)
        if chance.random() < 0.6:
            rig.settle(_reached(records, applied))
    rig.settle(10**9)
    assert rig.folds() == expected(records)
    counts = read_counts(rig.shards, "folds")
    assert conserved(counts) == 0
    assert counts["input:accounts"] == len(records)
    assert counts["emitted:accounts"] == len(rig.folds())


def test_nothing_is_left_of_groups_that_have_settled(store: StoreOptions, pytestconfig: pytest.Config) -> None:
    rig, groups = FoldRig(store), pytestconfig.getoption("--groups")
    for begin in range(0, groups, 10_000):
        rig.writer.write([post(i, f"account_{i}", i) for i in range(begin, min(groups, begin + 10_000))])
    assert len([key for key in rig.left() if ":fold:" in key]) == store.shards
    rig.settle(10**9)
    assert read_counts(rig.shards, "folds")["emitted:accounts"] == groups
    quiet_s = RULE.windows.quiet_ms / 1000
    time.sleep(2 * quiet_s + 0.1)
    assert rig.left() == []


def test_tasks_that_touch_the_same_groups_at_once_lose_nothing(any_store: StoreOptions) -> None:
    rig = FoldRig(any_store)
    parts = [[post(i, f"account_{i % 5}", i, partition=p) for i in range(300)] for p in range(4)]

    def work(p: int) -> None:
        task = rig.writer.another_task()
        for at in range(0, 300, 20):
            task.write(parts[p][at : at + 20])

    threads = [threading.Thread(target=work, args=(p,)) for p in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rig.settle(10**6)
    assert rig.folds() == expected([r for part in parts for r in part])


def test_events_that_arrive_while_folds_are_emitted_open_the_next(any_store: StoreOptions) -> None:
    rig = FoldRig(any_store)
    records = [post(i, f"account_{i % 7}", 300 * i) for i in range(400)]
    stop = threading.Event()
    at = 0

    def emit() -> None:
        shards = Shards(any_store)
        while not stop.is_set():
            emitter(shards, (RULE,), records[max(0, at - 1)].time - NOON).turn()
        shards.close()

    threads = [threading.Thread(target=emit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for begin in range(0, 400, 8):
        rig.writer.write(records[begin : begin + 8])
        at = begin + 8
    stop.set()
    for thread in threads:
        thread.join()
    rig.settle(10**6)
    assert rig.folds() == expected(records)


def test_events_forever_do_not_starve_a_fold(store: StoreOptions) -> None:
    rig = FoldRig(store)
    for i in range(100):
        rig.writer.write([post(i, "account_1", 500 * i)])
        rig.settle(500 * i)
    found = rig.folds()
    assert {fold.reason for fold in found} == {"max_wait"}
    assert all(len(fold.inputs) == 10 for fold in found)


@pytest.mark.parametrize(("at_ms", "folds"), [(999, 1), (1_000, 2), (1_001, 2)])
def test_a_gap_of_exactly_quiet_opens_the_next_fold(store: StoreOptions, at_ms: int, folds: int) -> None:
    rig = FoldRig(store)
    rig.writer.write([post(0, "account_1", 0), post(1, "account_1", at_ms)])
    rig.settle(10**6)
    assert len(rig.folds()) == folds


def test_a_full_fold_goes_out_at_once(store: StoreOptions) -> None:
    windows = msgspec.structs.replace(RULE.windows, max_count=2)
    rig = FoldRig(store, [msgspec.structs.replace(RULE, windows=windows)])
    FoldStore(rig.shards).publish_watermarks({"accounts": NOON})
    rig.writer.write([post(i, "account_1", i) for i in range(5)])
    assert rig.folds() == [
        Fold("account_1", ((0, 0), (0, 1)), "max_count", 1),
        Fold("account_1", ((0, 2), (0, 3)), "max_count", 3),
    ]
    rig.settle(10**6)
    assert rig.folds()[-1] == Fold("account_1", ((0, 4),), "quiet", 1_004)


def test_a_shard_that_lost_its_writes_folds_again_what_it_had(store: StoreOptions) -> None:
    rig = FoldRig(store)
    records = [post(i, f"account_{i % 8}", 700 * i) for i in range(60)]
    rig.writer.write(records)
    rig.settle(20_000)
    lost = next(s for s in range(store.shards) if rig.shards.client(s).exists(rig.shards.keys.outbox(s)))
    tag = rig.shards.keys.tag(lost)
    for kind in ("marks:folds", "times:folds", "counts:folds", "frontier", "outbox", "number"):
        rig.shards.client(lost).delete(f"{tag}:{kind}")
    for kind in ("fold", "due", "closed"):
        rig.shards.client(lost).delete(f"{tag}:{kind}:{RULE.key_suffix}")
    rig.writer.another_task().write(records)
    rig.settle(10**9)
    assert rig.folds() == expected(records)


def test_events_that_are_folded_are_passed_on_once_unchanged_and_in_order(any_store: StoreOptions) -> None:
    rig = FoldRig(any_store, [msgspec.structs.replace(RULE, raw="posts.raw")])
    records = [
        post(i, f"account_{i % 5}", i)._replace(key=b"k%d" % i, headers=[("trace", b"%d" % i), ("empty", None)])
        for i in range(40)
    ]
    records[7] = records[7]._replace(value=b'{"no":"account"}')
    rig.writer.write(records[:25])
    rig.writer.another_task().write(records[10:])
    found: list[Any] = []
    for shard in range(any_store.shards):
        entries: Any = rig.shards.client(shard).xrange(rig.shards.keys.outbox(shard))
        found += entries
    passed = [fields for _, fields in found if fields[b"t"] == b"posts.raw"]
    wanted = [r for r in records if r.offset != 7]
    assert [f[b"i"].decode() for f in passed] == [f"raw:accounts:posts:0:{r.offset}" for r in wanted]
    assert [(f[b"k"], f[b"v"]) for f in passed] == [(r.key, r.value) for r in wanted]
    assert [msgspec.msgpack.decode(f[b"h"]) for f in passed] == [[list(h) for h in r.headers or ()] for r in wanted]
    assert read_counts(rig.shards, "folds")["skipped:no-group"] == 1

"""Rules that change while folds are open: nothing is lost, and what is pending is due by the rule in force."""

from __future__ import annotations

import msgspec
import pytest

from tailrace.errors import StaleDriver
from tailrace.valkey.shards import StoreOptions, enlist
from tailrace.views.folds.collect import Collect
from tailrace.views.folds.driver import enforce
from tailrace.views.folds.model import Rule
from tailrace.views.folds.store import Emitter, FoldStore, applied_rules
from tests.views.folds.rig import RULE, FoldRig, post
from tests.writing import NOON


def _with_quiet(quiet_ms: int) -> Rule:
    return msgspec.structs.replace(RULE, windows=msgspec.structs.replace(RULE.windows, quiet_ms=quiet_ms))


def test_other_windows_give_pending_folds_their_new_due_time(any_store: StoreOptions) -> None:
    rig = FoldRig(any_store)
    enforce(rig.shards, {"accounts": RULE}, NOON)
    rig.writer.write([post(i, f"account_{i}", 0) for i in range(300)])
    store = FoldStore(rig.shards)
    for quiet_ms in (4_000, 200):
        enforce(rig.shards, {"accounts": _with_quiet(quiet_ms)}, NOON)
        assert store.earliest([RULE]) == {"accounts": NOON + quiet_ms}
        assert applied_rules(rig.shards)["accounts"].rule.windows.quiet_ms == quiet_ms
    assert applied_rules(rig.shards)["accounts"].counts["input"] == 300
    assert rig.folds() == []
    rig.rules = (_with_quiet(200),)
    rig.settle(200)
    assert len(rig.folds()) == 300


def test_hands_at_work_take_over_other_windows_and_what_they_wrote_meanwhile_gets_its_due_time(
    any_store: StoreOptions,
) -> None:
    rig = FoldRig(any_store)
    enforce(rig.shards, {"accounts": RULE}, NOON)
    rig.writer.write([post(0, "account_0", 0)])
    late = [post(1, "account_1", 0)]
    enforce(rig.shards, {"accounts": _with_quiet(4_000)}, NOON, settled=False)
    rig.writer.write(late)
    store = FoldStore(rig.shards)
    assert store.earliest([RULE]) == {"accounts": NOON + 4_000}
    # A take that was under way writes by the windows that were.
    group = b'["account_1"]'
    [((shard, _),)] = [[(s, g) for s in range(4) for g in store.due(RULE, NOON + 10**6, 9)[s] if b"account_1" in g]]
    rig.shards.run_all([(shard, ("ZADD", rig.shards.keys.due(shard, RULE.key_suffix), NOON + 100, group))])
    enforce(rig.shards, {"accounts": _with_quiet(4_000)}, NOON)
    assert store.earliest([RULE]) == {"accounts": NOON + 4_000}
    assert applied_rules(rig.shards)["accounts"].settled


def test_the_same_rules_again_change_nothing(store: StoreOptions) -> None:
    rig = FoldRig(store)
    enforce(rig.shards, {"accounts": RULE}, NOON)
    before = applied_rules(rig.shards)
    enforce(rig.shards, {"accounts": RULE}, NOON + 1)
    assert applied_rules(rig.shards) == before


@pytest.mark.parametrize("gathers", [True, False])
def test_a_rule_that_gathers_something_else_or_is_gone_emits_what_it_held(
    any_store: StoreOptions, gathers: bool
) -> None:
    rig = FoldRig(any_store)
    enforce(rig.shards, {"accounts": RULE}, NOON)
    rig.writer.write([post(i, f"account_{i}", 0) for i in range(50)])
    other = msgspec.structs.replace(RULE, collect=(Collect("n", "count", ("id",)),))
    enforce(rig.shards, {"accounts": other} if gathers else {}, NOON)
    values = [value for _, value in rig.outbox()]
    assert len(values) == 50
    assert {value["reason"] for value in values} == {"flush"}
    assert all(value["values"]["metrics"] == ["likes"] for value in values)
    assert rig.left() == []
    assert list(applied_rules(rig.shards)) == (["accounts"] if gathers else [])


def test_the_emitter_of_a_driver_that_was_overtaken_emits_nothing(store: StoreOptions) -> None:
    rig = FoldRig(store)
    rig.writer.write([post(0, "account_1", 0)])
    old = Emitter(rig.shards, (RULE,), lambda rules: {"accounts": NOON + 10**6}, epoch=rig.writer.epoch)
    enlist(rig.shards, ("folds",), now=lambda: rig.writer.epoch + 1)
    with pytest.raises(StaleDriver):
        old.turn()
    assert rig.folds() == []
    rig.settle(10**6)
    assert len(rig.folds()) == 1

"""Emitters that are killed: every event is in exactly one fold, emitted once, when it was due."""

from __future__ import annotations

import signal

import pytest

from tailrace.valkey.shards import StoreOptions
from tests import forked
from tests.views.folds.rig import RULE, FoldRig, expected, post
from tests.writing import NOON, Record

CALLS = 5
"""Calls of one turn: earliest due times, publication of the watermark, due groups, their state, the change."""


def _records(first: int = 0, n: int = 60, at_ms: int = 0) -> list[Record]:
    return [post(i, f"account_{i % 9}", at_ms + 100 * (i - first), partition=0) for i in range(first, first + n)]


def _emit(store: StoreOptions, watermark_ms: int, call: int, when: str) -> int:
    arguments = [store.url, store.prefix, str(watermark_ms), str(call), when]
    return forked.run("tests.views.folds.mortal", *arguments).returncode


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", range(1, CALLS + 2))
def test_an_emitter_killed_at_a_step_neither_loses_nor_doubles(store: StoreOptions, call: int, when: str) -> None:
    rig = FoldRig(store)
    records = _records()
    rig.writer.write(records)
    killed = _emit(store, 4_000, call, when)
    assert killed == (-signal.SIGKILL if call <= CALLS + 1 else 0)
    more = _records(60, 60, at_ms=10_000)
    rig.writer.write(more)
    assert _emit(store, 10**6, 0, "never") == 0
    assert rig.folds() == expected(records + more)


def test_several_emitters_at_once_that_are_killed_and_replaced_emit_each_fold_once(store: StoreOptions) -> None:
    rig = FoldRig(store)
    records = _records(0, 400)
    for begin in range(0, 400, 100):
        rig.writer.write(records[begin : begin + 100])
        reached = str(records[begin + 99].time - NOON)
        calls = zip(("3", "4", "5", "5"), ("before", "after", "before", "after"), strict=True)
        arguments = [(store.url, store.prefix, reached, call, when) for call, when in calls]
        for emitter in [forked.begin("tests.views.folds.mortal", each, (0, 1, 2)) for each in arguments]:
            emitter.wait()
    rig.settle(10**6)
    assert rig.folds() == expected(records)


def test_a_fold_goes_out_within_a_tick_of_its_due_time_by_the_watermarks_clock(store: StoreOptions) -> None:
    rig = FoldRig(store)
    records = [post(i, f"account_{i}", 37 * i) for i in range(100)]
    rig.writer.write(records)
    for tick in range(0, 6_000, 100):
        rig.settle(tick)
    found = [value for _, value in rig.outbox()]
    assert len(found) == 100
    for value in found:
        due, emitted = value["due"], value["emitted"]
        assert 0 <= _ms(emitted) - _ms(due) <= 100
        assert _ms(due) == _ms(value["last"]) + RULE.windows.quiet_ms


def _ms(text: str) -> int:
    from datetime import datetime

    return round(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000)

"""Replays: the figures of a trial are those of the rule itself, in whatever parts the events come."""

from __future__ import annotations

import marshal
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.views.folds.collect import COLLECTORS, Collect
from tailrace.views.folds.model import OFFSET_BYTES, ClosedFold, Clump, Folding, Input, Windows
from tailrace.views.folds.tune import Figures, Trials, candidates, round_delays
from tests.views.folds.rig import inputs_of

_COLLECT = (Collect("seen", "set", ("a",)), Collect("newest", "last", ("b",)), Collect("total", "sum", ("c",)))
_windows = st.builds(
    lambda quiet, factor, count, size: Windows(quiet, quiet * factor, count, size),
    st.integers(1, 40),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(20, 400),
)
_events = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.sampled_from(["jobs:0", "jobs:1", "notes@2:0"]),
        st.none() | st.binary(max_size=3),
        st.none() | st.binary(max_size=30),
        st.none() | st.integers(-(2**70), 2**70),
    ),
    max_size=60,
)


def _inputs(events: Sequence[tuple[int, str, bytes | None, bytes | None, int | None]]) -> list[Input]:
    """Events of one group in order: each some milliseconds after the one before."""
    found: list[Input] = []
    time = 0
    for offset, (step, source, member, newest, number) in enumerate(events):
        time += step
        taken: tuple[Any, ...] = (None if member is None else (member,), newest, number)
        weighed = zip(_COLLECT, taken, strict=True)
        size = OFFSET_BYTES + sum(COLLECTORS[c.kind].weigh(t) for c, t in weighed if t is not None)
        found.append(Input(time, source, offset, size, taken))
    return sorted(found, key=lambda x: x[:3])


def replay(folding: Folding, inputs: Iterable[Input]) -> Iterator[ClosedFold]:
    """Yield the folds that the rule itself makes of one group's events, one by one in order."""
    clumps: list[Clump] = []
    for each in inputs:
        yield from folding.absorb(clumps, (each,), each.time)
    yield from folding.settle(clumps, math.inf)


def _figures(quiet_ms: int, groups: Sequence[tuple[Sequence[Input], Sequence[ClosedFold]]]) -> Figures:
    """Count what folds say of themselves, one by one."""
    figures = Figures()
    for inputs, folds in groups:
        times = {(x.partition, x.offset): x.time for x in inputs}
        before: ClosedFold | None = None
        for fold in folds:
            figures.reasons[fold.reason] = figures.reasons.get(fold.reason, 0) + 1
            if before is not None and before.reason == "quiet":
                figures.premature += fold.clump.opened - before.clump.last < 2 * quiet_ms
            before = fold
            delays = [fold.due - times[place] for place in inputs_of(fold.clump)]
            figures.inputs += len(delays)
            figures.waited_ms += sum(delays)
            for delay in delays:
                figures.delays[delay] = figures.delays.get(delay, 0) + 1
    figures.delays = round_delays(figures.delays)
    return figures


def _tried(windows: Sequence[Windows], groups: Sequence[Sequence[Input]], part: int = 10_000) -> list[Figures]:
    trials = Trials(_COLLECT, windows)
    for n, inputs in enumerate(groups):
        for at in range(0, len(inputs), part):
            some = inputs[at : at + part]
            rest = [(x.partition, x.offset, marshal.dumps(tuple(x.extracts))) for x in some]
            trials.feed(b"[%d]" % n, [x.time for x in some], [x.size for x in some], rest)
    return trials.end()


@given(st.lists(_windows, min_size=1, max_size=4), st.lists(_events, max_size=4), st.integers(1, 70))
@example([Windows(10, 10, 5, 30)], [[(1, "jobs:0", b"a", b"x" * 30, 2**65)] * 9], 4)
def test_trials_count_what_the_rule_emits(windows: list[Windows], events: list[Any], part: int) -> None:
    groups = [_inputs(each) for each in events]
    expected = [
        _figures(w.quiet_ms, [(inputs, list(replay(Folding(_COLLECT, w), inputs))) for inputs in groups])
        for w in windows
    ]
    assert _tried(windows, groups, part) == expected


@given(_windows, _events)
def test_a_replay_cuts_where_a_loop_over_the_events_would(windows: Windows, events: Any) -> None:
    roomy = Windows(windows.quiet_ms, windows.max_wait_ms, windows.max_count)
    inputs = _inputs(events)
    expected: list[list[int]] = []
    dues: list[int] = []
    held: list[Input] = []
    for x in [*inputs, None]:
        if held:
            due = min(held[-1].time + roomy.quiet_ms, held[0].time + roomy.max_wait_ms)
            full = len(held) == roomy.max_count
            if full or x is None or x.time >= due:
                expected.append([each.offset for each in held])
                dues.append(held[-1].time if full else due)
                held = []
        if x is not None:
            held.append(x)
    folds = list(replay(Folding(_COLLECT, roomy), inputs))
    assert [sorted(o for _, o in inputs_of(f.clump)) for f in folds] == [sorted(e) for e in expected]
    assert [f.due for f in folds] == dues


@given(_windows, _events, st.lists(st.integers(1, 20), min_size=1))
def test_a_replay_gives_the_folds_that_the_pipeline_gave_live(windows: Windows, events: Any, parts: list[int]) -> None:
    # Counts and sizes are taken in the order of arrival, so live folds are those of a replay only without their limits.
    folding = Folding(_COLLECT, Windows(windows.quiet_ms, windows.max_wait_ms))
    inputs = _inputs(events)
    live: list[ClosedFold] = []
    clumps: list[Clump] = []
    at = 0
    watermark: float = -math.inf
    while at < len(inputs):
        some = inputs[at : at + parts[at % len(parts)]]
        at += len(some)
        # Partitions are read one after the other: within a batch events are in the order of their source alone.
        live += folding.absorb(clumps, sorted(some, key=lambda x: (x.partition, x.time, x.offset)), watermark)
        watermark = some[-1].time
        live += folding.settle(clumps, watermark)
    live += folding.settle(clumps, math.inf)
    replayed = replay(folding, inputs)
    assert sorted(map(_shown, live)) == sorted(map(_shown, replayed))


def _shown(fold: ClosedFold) -> tuple[object, ...]:
    clump = fold.clump
    offsets = inputs_of(clump)
    values = [COLLECTORS[c.kind].result(state) for c, state in zip(_COLLECT, clump.states, strict=True)]
    return clump.head, fold.due, fold.reason, clump.opened, clump.last, offsets, values


@given(_windows, st.lists(_events, min_size=2, max_size=6), st.integers(1, 5))
def test_figures_of_parts_add_up_to_those_of_the_whole(windows: Windows, events: list[Any], at: int) -> None:
    groups = [_inputs(each) for each in events]
    (whole,) = _tried([windows], groups)
    (added,), (other,) = _tried([windows], groups[:at]), _tried([windows], groups[at:])
    added.merge(other)
    assert added == whole
    assert whole.inputs == sum(map(len, groups)) == sum(whole.delays.values())


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.99, 1.0]))
def test_percentiles_are_right_to_half_a_percent(delays: list[int], share: float) -> None:
    figures = Figures()
    figures.count(delays)
    figures.delays = round_delays(figures.delays)
    assert round_delays(figures.delays) == figures.delays
    exact = sorted(delays)[math.ceil(share * len(delays)) - 1]
    assert figures.percentile_ms(share) == pytest.approx(exact, rel=0.005)
    assert figures.mean_ms == pytest.approx(sum(delays) / len(delays))


def test_nothing_tried_has_no_ratio_and_no_delay() -> None:
    (figures,) = _tried([Windows(10, 100)], [])
    assert (figures.folds, figures.ratio, figures.mean_ms, figures.percentile_ms(0.5)) == (0, 0.0, 0.0, 0)


def test_many_different_delays_are_rounded_before_they_fill_the_memory() -> None:
    inputs = [Input(i * 7, "jobs:0", i, OFFSET_BYTES, (None, None, None)) for i in range(120_000)]
    (figures,) = _tried([Windows(10, 3_600_000, 1_000_000, 1 << 30)], [inputs], 10_000)
    assert (figures.inputs, figures.reasons) == (120_000, {"quiet": 1})
    assert len(figures.delays) < 3_000
    assert figures.percentile_ms(0.5) == pytest.approx(10 + 7 * 60_000, rel=0.005)


def test_candidates_lie_around_the_configured_window_which_is_always_one() -> None:
    windows = Windows(5_000, 60_000, 77, 4_096)
    found = candidates(windows)
    assert [w.quiet_ms for w in found] == [312, 625, 1_250, 2_500, 5_000, 10_000, 20_000, 40_000, 80_000]
    assert found[4] == windows
    assert all(w.max_wait_ms == round(12 * w.quiet_ms) for w in found)
    assert {(w.max_count, w.max_bytes) for w in found} == {(77, 4_096)}
    assert [w.quiet_ms for w in candidates(windows, [9_000, 100])] == [100, 5_000, 9_000]
    assert [w.quiet_ms for w in candidates(Windows(1, 10))] == [1, 2, 4, 8, 16]
    assert candidates(Windows(3, 3), [1]) == [Windows(1, 1), Windows(3, 3)]

"""The pure rule on random histories: however events are cut into batches, the folds are those of reading in order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tailrace.views.folds.collect import COLLECTORS, Collect
from tailrace.views.folds.model import (
    NEVER,
    ClosedFold,
    Clump,
    Folding,
    Input,
    Rule,
    RuleInput,
    RuleReader,
    Time,
    Windows,
    add_offset,
    unpack_offsets,
)
from tailrace.views.folds.store import fold_record
from tests.views.folds.rig import inputs_of

RULE = Rule(
    name="r",
    topics=(),
    group=(("g",),),
    collect=(
        Collect("keys", "keys", ("m",)),
        Collect("set", "set", ("s",)),
        Collect("items", "items", ("l",)),
        Collect("first", "first", ("s",)),
        Collect("last", "last", ("m", "a")),
        Collect("min", "min", ("s",)),
        Collect("max", "max", ("m", "b")),
        Collect("sum", "sum", ("m", "a")),
        Collect("count", "count", ("l",)),
        Collect("events", "events"),
    ),
    windows=Windows(10, 30),
)
DOCUMENTS = (
    b'{"g":1}',
    b'{"g":1,"m":{"a":0.1,"b":"x"},"s":1}',
    b'{"g":1,"m":{"b":2,"a":1e308},"s":1.0}',
    b'{"g":1,"m":{"a":-1e308,"c":[]},"s":"1","l":[1,"a"]}',
    b'{"g":1,"m":{"a":9007199254740993},"s":null,"l":["a",{}]}',
    b'{ "g": 1, "m": [], "s": {"k": 1, "j": 2}, "l": 3 }',
)
SOURCES = ("posts:0", "posts:1", "posts@1:10")
GROUP = b"[1]"


class Turn(NamedTuple):
    """One step of a pipeline: what it reads, how far its watermark lags, and whether what is due is emitted first."""

    slices: tuple[tuple[int, int], ...]
    stale: Time
    settle: bool


Reading: TypeAlias = tuple[Windows, dict[str, list[Input]], list[Turn]]


class Held:
    """The state of one group. Between any two steps there is nothing but the bytes of the store."""

    def __init__(self, folding: Folding) -> None:
        self.folding, self.state = folding, b""
        self.given: list[tuple[ClosedFold, Time]] = []

    def absorb(self, inputs: Sequence[Input], watermark: Time) -> None:
        clumps = self._load()
        self._keep(clumps, self.folding.absorb(clumps, inputs, watermark), watermark)

    def settle(self, watermark: Time) -> None:
        clumps = self._load()
        self._keep(clumps, self.folding.settle(clumps, watermark), watermark)
        if self.state:
            assert self.due() > watermark

    def due(self) -> int:
        return self.folding.due(self._load())

    def wait(self) -> None:
        """Let time go on, from due time to due time, until nothing is held; each time brings it nearer."""
        while self.state:
            self.settle(self.due())

    @property
    def folds(self) -> list[ClosedFold]:
        return [finished for finished, _ in self.given]

    def _load(self) -> list[Clump]:
        return self.folding.load(self.state) if self.state else []

    def _keep(self, clumps: list[Clump], finished: list[ClosedFold], watermark: Time) -> None:
        self.given += ((f, watermark) for f in finished)
        assert all(left.last <= right.opened for left, right in pairwise(clumps))
        self.state = self.folding.dump(clumps) if clumps else b""


_reader = RuleReader(RULE)
_taken = {document: _reader.read(document) for document in DOCUMENTS}


def _input(time: int, source: str, offset: int, document: bytes = DOCUMENTS[1]) -> Input:
    taken = _taken[document]
    assert isinstance(taken, RuleInput)
    return Input(time, source, offset, taken.size, taken.extracts)


def _fold(windows: Windows, members: Sequence[tuple[Time, Input]]) -> ClosedFold:
    """Return the fold of events that are given in order, with their times."""
    opened, last = members[0][0], members[-1][0]
    values = [COLLECTORS[c.kind].new() for c in RULE.collect]
    spans: dict[str, list[int]] = {}
    for _, x in members:
        add_offset(spans.setdefault(x.partition, [x.offset, x.offset, 0]), x.offset)
        for c, state, taken in zip(RULE.collect, values, x.extracts, strict=True):
            if taken is not None:
                COLLECTORS[c.kind].add(state, taken, x[:3])
    head, latest = min(x[:3] for _, x in members), max(x.time for _, x in members)
    clump = Clump(opened, last, head, latest, len(members), 0, spans, values)
    if len(members) == windows.max_count:
        return ClosedFold(clump, int(last), "max_count")
    quiet, longest = last + windows.quiet_ms, opened + windows.max_wait_ms
    return ClosedFold(clump, int(min(quiet, longest)), "quiet" if quiet <= longest else "max_wait")


def _in_order(windows: Windows, timed: Sequence[tuple[Time, Input]]) -> list[ClosedFold]:
    """Return the folds that one reader would find who sees all events in the order of time: what is right."""
    found: list[list[tuple[Time, Input]]] = []
    for time, x in sorted(timed, key=lambda pair: (pair[0], pair[1][:3])):
        fold = found[-1] if found else []
        if (
            not fold
            or len(fold) == windows.max_count
            or time >= min(fold[-1][0] + windows.quiet_ms, fold[0][0] + windows.max_wait_ms)
        ):
            found.append([])
        found[-1].append((time, x))
    return [_fold(windows, fold) for fold in found]


def _shown(folds: Sequence[ClosedFold]) -> list[tuple[Time, Time, bytes, str]]:
    """Return all there is to see of folds, in the order of time."""
    shown = []
    for fold in folds:
        message = fold_record(RULE, GROUP, fold, 0)
        shown.append((fold.clump.opened, fold.clump.last, message.value, message.id))
    return sorted(shown)


def _places(folds: Sequence[ClosedFold]) -> list[tuple[str, int]]:
    return sorted(place for fold in folds for place in inputs_of(fold.clump))


def _read(history: dict[str, list[Input]], turns: Sequence[Turn], held: Held) -> list[Input]:
    """Read a history as a pipeline does, turn by turn and then the rest; return it."""
    at = dict.fromkeys(history, 0)
    watermark = NEVER
    rest = Turn(tuple((i, 1000) for i in range(len(SOURCES))), 0, True)
    for turn in (*turns, rest):
        if turn.settle:
            held.settle(watermark)
        batch: list[Input] = []
        for which, n in turn.slices:
            source = SOURCES[which % len(history)]
            batch += history[source][at[source] : at[source] + n]
            at[source] = min(at[source] + n, len(history[source]))
        held.absorb(batch, watermark - turn.stale)
        reached = [
            history[source][at[source] - 1].time if at[source] else NEVER
            for source in history
            if at[source] < len(history[source])
        ]
        watermark = max(watermark, min(reached, default=NEVER))
    return [x for events in history.values() for x in events]


@st.composite
def _windows(draw: st.DrawFn, max_count: int = 10_000) -> Windows:
    return Windows(draw(st.sampled_from([1, 2, 9, 10, 40])), draw(st.sampled_from([1, 10, 25, 30, 60])), max_count)


def _gaps(windows: Windows) -> st.SearchStrategy[int]:
    quiet, longest = windows.quiet_ms, windows.max_wait_ms
    return st.sampled_from([0, 1, quiet // 2, quiet - 1, quiet, quiet + 1, longest - 1, longest, longest + 1])


def _history(windows: Windows, sources: int = 3, size: int = 25) -> st.SearchStrategy[dict[str, list[Input]]]:
    event = st.tuples(_gaps(windows), st.sampled_from(DOCUMENTS))

    def timed(parts: list[list[tuple[int, bytes]]]) -> dict[str, list[Input]]:
        return {source: list(_one_after_another(source, part)) for source, part in zip(SOURCES, parts, strict=False)}

    return st.lists(st.lists(event, max_size=size), min_size=1, max_size=sources).map(timed)


def _one_after_another(source: str, events: Sequence[tuple[int, bytes]]) -> Iterator[Input]:
    time = 0
    for offset, (gap, document) in enumerate(events):
        time += gap
        yield _input(time, source, offset, document)


def _turns(windows: Windows) -> st.SearchStrategy[list[Turn]]:
    slices = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 3, 8])), max_size=3).map(tuple)
    stale = st.sampled_from([0, 0, 1, windows.quiet_ms, windows.max_wait_ms, math.inf])
    return st.lists(st.builds(Turn, slices, stale, st.booleans()), max_size=15)


_readings = _windows().flatmap(lambda w: st.tuples(st.just(w), _history(w), _turns(w)))
_one_source = (
    st.integers(1, 4)
    .flatmap(_windows)
    .flatmap(lambda w: st.tuples(st.just(w), _history(w, sources=1, size=40), _turns(w)))
)


@settings(max_examples=250, deadline=None)
@given(_readings)
def test_batches_sources_and_a_lagging_watermark_do_not_change_the_folds(reading: Reading) -> None:
    windows, history, turns = reading
    held = Held(Folding(RULE.collect, windows))
    events = _read(history, turns, held)
    held.wait()
    assert _shown(held.folds) == _shown(_in_order(windows, [(x.time, x) for x in events]))


@settings(max_examples=200, deadline=None)
@given(
    _windows().flatmap(lambda w: st.tuples(st.just(w), _history(w, sources=2, size=12))),
    st.data(),
)
def test_events_may_come_in_any_order_that_the_watermark_allows(
    reading: tuple[Windows, dict[str, list[Input]]], data: st.DataObject
) -> None:
    windows, history = reading
    events = [x for part in history.values() for x in part]
    order = data.draw(st.permutations(events))
    held = Held(Folding(RULE.collect, windows))
    watermark = NEVER
    while order:
        n = data.draw(st.integers(1, len(order)))
        held.absorb(order[:n], watermark)
        order = order[n:]
        watermark = min((x.time for x in order), default=NEVER)
        if data.draw(st.booleans()):
            held.settle(watermark)
    held.wait()
    assert _shown(held.folds) == _shown(_in_order(windows, [(x.time, x) for x in events]))


@settings(max_examples=250, deadline=None)
@given(_readings)
def test_every_event_is_in_one_fold_and_no_fold_leaves_early_or_overlaps_another(reading: Reading) -> None:
    windows, history, turns = reading
    held = Held(Folding(RULE.collect, windows))
    events = _read(history, turns, held)
    held.wait()
    assert _places(held.folds) == sorted((x.partition, x.offset) for x in events)
    ids = [fold_record(RULE, GROUP, fold, 0).id for fold in held.folds]
    assert len(set(ids)) == len(ids)
    for fold, watermark in held.given:
        assert fold.due <= watermark
        assert fold.clump.last < fold.due <= fold.clump.opened + windows.max_wait_ms
        assert fold.due == windows.due(fold.clump.opened, fold.clump.last)
    spans = sorted((fold.clump.opened, fold.due) for fold in held.folds)
    assert all(due <= opened for (_, due), (opened, _) in pairwise(spans))


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 50), st.integers(1, 20), st.integers(1, 7), st.integers(0, 30))
def test_events_for_ever_every_half_quiet_cannot_starve_a_fold(quiet: int, times: int, n: int, lag: int) -> None:
    windows = Windows(quiet, quiet * times)
    held = Held(Folding(RULE.collect, windows))
    step = quiet // 2
    for i in range(0, 120, n):
        batch = [_input(step * j, SOURCES[0], j) for j in range(i, i + n)]
        held.absorb(batch, step * i)
        watermark = step * (i + n) - lag
        held.settle(watermark)
        assert not held.state or held.due() <= watermark + lag + windows.max_wait_ms
    assert all(fold.due == fold.clump.opened + windows.max_wait_ms for fold in held.folds)
    opened = [fold.clump.opened for fold in held.folds]
    assert all(b - a < windows.max_wait_ms + quiet for a, b in pairwise(opened))


_EARLY_NEIGHBOURS: Reading = (
    Windows(10, 25, 4),
    {SOURCES[0]: list(_one_after_another(SOURCES[0], [(n, DOCUMENTS[0]) for n in (0, 0, 0, 0, 0, 5, 10, 0, 1, 9, 0)]))},
    [],
)
"""The last two events are of one moment; the first of them fills the fold of the three before."""


@settings(max_examples=250, deadline=None)
@example(_EARLY_NEIGHBOURS)
@given(_one_source)
def test_a_full_fold_has_exactly_that_many_events_and_the_next_starts_afresh(reading: Reading) -> None:
    windows, history, turns = reading
    held = Held(Folding(RULE.collect, windows))
    events = _read(history, turns, held)
    held.wait()
    assert _shown(held.folds) == _shown(_in_order(windows, [(x.time, x) for x in events]))


@settings(max_examples=250, deadline=None)
@given(_readings, st.integers(1, 4), st.sampled_from([60, 200, 100_000]))
def test_no_fold_is_larger_than_allowed_whatever_the_order(reading: Reading, max_count: int, max_bytes: int) -> None:
    windows, history, turns = reading
    windows = Windows(windows.quiet_ms, windows.max_wait_ms, max_count, max_bytes)
    held = Held(Folding(RULE.collect, windows))
    events = _read(history, turns, held)
    held.wait()
    assert _places(held.folds) == sorted((x.partition, x.offset) for x in events)
    sizes = {(x.partition, x.offset): x.size for x in events}
    times = {(x.partition, x.offset): x.time for x in events}
    for fold, watermark in held.given:
        clump = fold.clump
        within = [times[place] for place in _places([fold])]
        assert (clump.opened, clump.last) == (min(within), max(within))
        assert clump.count == len(_places([fold])) <= max_count
        assert clump.size <= max_bytes or clump.count == 1
        assert clump.size <= sum(sizes[place] for place in _places([fold]))
        assert fold.reason in ("max_count", "max_bytes") or fold.due <= watermark
        assert fold.reason != "max_bytes" or clump.count < max_count
        assert fold.due >= clump.last >= clump.opened


@settings(max_examples=250, deadline=None)
@given(_readings, st.data())
def test_a_late_event_counts_as_one_at_the_watermark(reading: Reading, data: st.DataObject) -> None:
    windows, history, _ = reading
    order = data.draw(st.permutations([x for part in history.values() for x in part]))
    held = Held(Folding(RULE.collect, windows))
    watermark: Time = NEVER
    timed: list[tuple[Time, Input]] = []
    for x in order:
        watermark = max(watermark, data.draw(st.sampled_from([NEVER, x.time - 3, x.time, x.time + windows.quiet_ms])))
        held.absorb([x], watermark)
        timed.append((max(watermark, x.time), x))
    held.wait()
    assert _shown(held.folds) == _shown(_in_order(windows, timed))


def test_a_late_event_is_merged_into_the_open_fold_without_moving_its_time_back() -> None:
    held = Held(Folding(RULE.collect, Windows(10, 100)))
    held.absorb([_input(50, SOURCES[0], 0)], 45)
    held.absorb([_input(20, SOURCES[1], 0)], 55)
    held.settle(64)
    assert held.due() == 65
    held.wait()
    (fold,) = held.folds
    assert (fold.clump.opened, fold.clump.last, fold.clump.latest) == (50, 55, 50)
    assert fold_record(RULE, GROUP, fold, 0).id.startswith("r:posts:1:0#")


def test_a_late_event_of_a_fold_that_has_left_opens_one_at_the_watermark() -> None:
    held = Held(Folding(RULE.collect, Windows(10, 100)))
    held.absorb([_input(50, SOURCES[0], 0)], 50)
    held.settle(60)
    held.absorb([_input(51, SOURCES[1], 0)], 70)
    held.wait()
    assert [(f.clump.opened, f.due, f.reason) for f in held.folds] == [(50, 60, "quiet"), (70, 80, "quiet")]


@settings(max_examples=150, deadline=None)
@given(_readings, st.integers(0, 200))
def test_a_flush_emits_all_there_is(reading: Reading, watermark: int) -> None:
    windows, history, turns = reading
    held = Held(Folding(RULE.collect, windows))
    events = _read(history, turns, held)
    clumps = held.folding.load(held.state) if held.state else []
    flushed = held.folding.flush(clumps, watermark, "flush")
    assert not clumps
    assert _places([*held.folds, *flushed]) == sorted((x.partition, x.offset) for x in events)
    assert all((fold.reason == "flush") == (fold.due > watermark) for fold in flushed)


@settings(max_examples=250, deadline=None)
@given(_readings, st.lists(st.tuples(_windows(), st.sampled_from([1, 3, 10_000])), min_size=1, max_size=3), st.data())
def test_windows_may_change_while_folds_are_open(
    reading: Reading, later: list[tuple[Windows, int]], data: st.DataObject
) -> None:
    windows, history, turns = reading
    held = Held(Folding(RULE.collect, windows))
    rest, at = dict(history), 0
    for changed, max_count in later:
        n = data.draw(st.integers(0, 10))
        part = {source: events[:n] for source, events in rest.items()}
        rest = {source: events[n:] for source, events in rest.items()}
        watermark = min((events[0].time for events in rest.values() if events), default=NEVER)
        _read(part, turns, held)
        windows = Windows(changed.quiet_ms, changed.max_wait_ms, max_count)
        at = len(held.given)
        held.folding = Folding(RULE.collect, windows)
        held.settle(watermark)
    _read(rest, turns, held)
    held.wait()
    assert _places(held.folds) == sorted((x.partition, x.offset) for part in history.values() for x in part)
    for fold, _ in held.given[at:]:
        assert fold.reason == "max_count" or fold.due == windows.due(fold.clump.opened, fold.clump.last)


def test_a_shorter_wait_closes_what_is_older_than_it() -> None:
    held = Held(Folding(RULE.collect, Windows(10, 100)))
    held.absorb([_input(time, SOURCES[0], time) for time in range(0, 60, 5)], 0)
    held.folding = Folding(RULE.collect, Windows(10, 20))
    held.settle(55)
    ((fold, _),) = held.given
    assert (fold.clump.count, fold.due, fold.reason) == (12, 20, "max_wait")


def test_a_longer_quiet_joins_what_still_waits() -> None:
    held = Held(Folding(RULE.collect, Windows(10, 100)))
    held.absorb([_input(0, SOURCES[0], 0), _input(15, SOURCES[0], 1)], 0)
    held.folding = Folding(RULE.collect, Windows(20, 100))
    held.wait()
    assert [(f.clump.count, f.due) for f in held.folds] == [(2, 35)]


def test_an_event_that_does_not_fit_opens_the_next_fold_and_one_too_large_for_any_is_alone() -> None:
    weigh = Folding(RULE.collect, Windows(10, 100)).weigh
    small, large = (weigh(_input(0, "", 0, document).extracts) for document in (DOCUMENTS[0], DOCUMENTS[3]))
    assert small < large
    held = Held(Folding(RULE.collect, Windows(10, 100, max_bytes=2 * small + 1)))
    for i, document in enumerate([DOCUMENTS[0]] * 3 + [DOCUMENTS[3], DOCUMENTS[0]]):
        held.absorb([_input(i, SOURCES[0], i, document)], i)
    held.wait()
    assert [(f.clump.count, f.due, f.reason) for f in held.folds] == [
        (2, 2, "max_bytes"),
        (1, 3, "max_bytes"),
        (1, 3, "max_bytes"),
        (1, 14, "quiet"),
    ]


@pytest.mark.parametrize("times", [range(5), [0] * 5])
def test_full_folds_of_two_hold_two(times: Sequence[int]) -> None:
    held = Held(Folding(RULE.collect, Windows(10, 100, max_count=2)))
    for i, time in enumerate(times):
        held.absorb([_input(time, SOURCES[0], i)], NEVER)
    held.wait()
    assert [(f.clump.count, f.reason) for f in held.folds] == [(2, "max_count"), (2, "max_count"), (1, "quiet")]


@given(st.lists(st.tuples(st.integers(0, 1 << 62), st.integers(1, 5)), min_size=1))
@example([(3, 3), (9, 1), (6, 1)])
def test_offsets_are_read_back_in_order(some: list[tuple[int, int]]) -> None:
    offsets = list(dict.fromkeys(start + i for start, n in some for i in range(n)))
    spans = [offsets[0] + 1, offsets[0], 1]
    for offset in offsets[1:]:
        add_offset(spans, offset)
    ranges = unpack_offsets(spans)
    assert [offset for first, last in ranges for offset in range(first, last + 1)] == sorted(offsets)
    assert all(after > last + 1 for (_, last), (after, _) in pairwise(ranges))


def test_neighbours_are_one_run() -> None:
    spans = [6, 5, 1]
    for offset in (6, 7, 10):
        add_offset(spans, offset)
    assert spans == [11, 5, 3, 2, 1]

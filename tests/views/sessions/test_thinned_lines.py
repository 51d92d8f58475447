"""Thinning many lines at once leaves what thinning each of them leaves, sample by sample and cell by cell."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tailrace.views.sessions.samples import Series, State, StreamPosition, Thinning, between, step, thinned
from tests.examples import examples

EPOCH = 1_789_200_000_000_000_000
KINDS = ("f8", "f4", "i2", "u1", "O")

Sample = tuple[int, Any]
Given = list[tuple[str, list[Sample]]]
"""Series of lines, in order: a line may have several, and one may have no samples."""


class Plain:
    """Thinning as it is defined: a loop over entries, lines, cells and samples."""

    def __init__(self, thinning: Thinning) -> None:
        self.thinning = thinning
        self.cell: int | None = None
        self.held: dict[str, list[Sample]] = {}
        self.origin: StreamPosition | None = None

    def take(self, before: StreamPosition, newest: int | None, series: Given) -> Given:
        if newest is None:
            return []
        cell = max(newest // self.thinning.cell, newest // self.thinning.cell if self.cell is None else self.cell)
        is_new, held, out = cell != self.cell, dict(self.held), list[tuple[str, list[Sample]]]()
        kept: dict[str, list[Sample]] = {} if is_new else dict(self.held)
        for line, samples in by_line(series).items():
            left = self.left([*held.pop(line, []), *samples])
            if closed := [each for each in left if each[0] // self.thinning.cell < cell]:
                out.append((line, closed))
            if still := [each for each in left if each[0] // self.thinning.cell >= cell]:
                kept[line] = still
        if is_new:
            out += held.items()
        if is_new or self.origin is None:
            self.origin = before
        self.origin = self.origin if kept else None
        self.cell, self.held = cell, kept
        return out

    def left(self, samples: list[Sample]) -> list[Sample]:
        cells: dict[int, list[Sample]] = {}
        for sample in sorted(samples, key=lambda each: each[0]):
            cells.setdefault(sample[0] // self.thinning.cell, []).append(sample)
        return [found[at] for _, found in sorted(cells.items()) for at in sorted(self._chosen(found))]

    def _chosen(self, found: list[Sample]) -> set[int]:
        if self.thinning.keeps == "first":
            return {0}
        if any(isinstance(value, str) for _, value in found):
            return {0, len(found) - 1}
        numbers = [at for at, (_, value) in enumerate(found) if math.isfinite(value)]
        if not numbers:
            return {0}
        return {min(numbers, key=lambda at: found[at][1]), max(numbers, key=lambda at: found[at][1])}


def by_line(series: Given) -> dict[str, list[Sample]]:
    lines: dict[str, list[Sample]] = {}
    for line, samples in series:
        lines.setdefault(line, []).extend(samples)
    return lines


NUMBERS = st.one_of(st.integers(0, 4), st.sampled_from([math.nan, math.inf, -math.inf, -0.0, -0.5]))


@st.composite
def entries(draw: st.DrawFn) -> list[tuple[int | None, list[Series[str]]]]:
    """Entries with their newest times; lines whose numbers change their type, out of order, late, several series."""
    found: list[tuple[int | None, list[Series[str]]]] = []
    now = 0
    for _ in range(draw(st.integers(1, 6))):
        now += draw(st.integers(0, 25))
        series = []
        for line in draw(st.lists(st.sampled_from(["a", "b", "c", "d", "text"]), max_size=7)):
            times = draw(st.lists(st.integers(now - 30, now + 20), max_size=8))
            kind = "O" if line == "text" else draw(st.sampled_from(KINDS[:-1]))
            values = [f"v{t}" if kind == "O" else draw(NUMBERS if kind[0] == "f" else st.integers(0, 4)) for t in times]
            series.append(Series(line, np.array(times, np.int64) + EPOCH, np.array(values, kind)))
        newest = max((int(each.times.max()) for each in series if len(each.times)), default=None)
        found.append((newest if newest is None else newest + draw(st.integers(0, 15)), series))
    return found


def lines_of(series: Iterable[Series[str]]) -> list[tuple[str, list[tuple[int, str]]]]:
    """Lines and samples in their order; numbers as text, since some are not themselves."""
    return plain((each.line, list(zip(each.times.tolist(), each.values.tolist(), strict=True))) for each in series)


def plain(series: Iterable[tuple[str, list[Sample]]]) -> list[tuple[str, list[tuple[int, str]]]]:
    return [(line, [(t, v if isinstance(v, str) else str(float(v))) for t, v in samples]) for line, samples in series]


def samples_in(series: Iterable[Series[str]]) -> Given:
    return [(each.line, list(zip(each.times.tolist(), each.values.tolist(), strict=True))) for each in series]


THINNINGS = st.builds(Thinning, st.sampled_from(["extremes", "first"]), st.integers(1, 40))


@examples(150)
@given(entries(), THINNINGS)
def test_what_goes_out_and_what_is_held_is_what_a_loop_over_samples_finds(
    drawn: list[tuple[int | None, list[Series[str]]]], thinning: Thinning
) -> None:
    state, wanted = State[str](), Plain(thinning)
    for seq, (newest, series) in enumerate(drawn):
        before = StreamPosition(True, 1000, seq)
        out, state = step(thinning, state, before, newest, series)
        assert lines_of(out) == plain(wanted.take(before, newest, samples_in(series)))
        assert state.key == (wanted.cell, wanted.origin)
        assert lines_of(state.held) == plain(wanted.held.items())


@examples(60)
@given(entries(), THINNINGS)
def test_an_entry_that_is_thinned_alone_has_one_series_of_each_line_that_has_samples(
    drawn: list[tuple[int | None, list[Series[str]]]], thinning: Thinning
) -> None:
    for _, series in drawn:
        lines = by_line(samples_in(series)).items()
        wanted = [(line, Plain(thinning).left(samples)) for line, samples in lines if samples]
        assert lines_of(thinned(series, thinning)) == plain(wanted)


@examples(60)
@given(entries(), st.none() | st.integers(-40, 100), st.none() | st.integers(-40, 100))
def test_the_samples_between_two_times_are_those_of_each_series(
    drawn: list[tuple[int | None, list[Series[str]]]], since: int | None, until: int | None
) -> None:
    first, last = (-math.inf if since is None else EPOCH + since), (math.inf if until is None else EPOCH + until)
    for _, series in drawn:
        wanted = [
            (line, [each for each in samples if first <= each[0] <= last]) for line, samples in samples_in(series)
        ]
        found = between(series, None if since is None else EPOCH + since, None if until is None else EPOCH + until)
        assert lines_of(found) == plain(wanted)


def test_numbers_keep_their_type_beside_those_of_other_lines() -> None:
    times = np.array([EPOCH, EPOCH + 1], np.int64)
    series = [Series(kind, times, np.array(["x", "y"] if kind == "O" else [1, 2], kind)) for kind in KINDS]
    assert [each.values.dtype for each in thinned(series, Thinning("extremes", 10))] == [
        np.dtype(kind) for kind in KINDS
    ]

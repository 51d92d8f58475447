"""Thinning keeps what a picture needs, and a feed that was stopped anywhere goes on as if it had not been."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import BadRequest, CursorError
from tailrace.log.cursor import FromEnd, FromLast, FromStart
from tailrace.views.sessions.samples import (
    Series,
    StreamPosition,
    Thinner,
    Thinning,
    UnsentSamples,
    between,
    parse_thinning,
    thinned,
)
from tailrace.views.sessions.streams import (
    FromMoment,
    FromSessionCursor,
    SessionCursor,
    parse_session_start,
    parse_session_until,
)
from tests.examples import examples

EPOCH = 1_789_200_000_000_000_000
"""A time that no double can hold to the nanosecond."""


class Brought(msgspec.Struct, frozen=True):
    """Contents of an entry: times and values by line, and the newest time of its session."""

    place: StreamPosition
    lines: dict[str, list[tuple[int, Any]]]
    newest: int

    def series(self, floor: int | None = None) -> list[Series[str]]:
        found: list[Series[str]] = []
        for line, samples in self.lines.items():
            times = np.array([EPOCH + t for t, _ in samples], np.int64)
            values = np.array([v for _, v in samples], object if line == "text" else np.float64)
            found += between([Series(line, times, values)], floor, None)
        return found


VALUES = st.one_of(st.integers(-3, 3).map(float), st.just(math.nan), st.just(math.inf))


@st.composite
def sessions(draw: st.DrawFn) -> list[Brought]:
    """Some entries, mostly in the order of time, with some that are late and some that have nothing that is wanted."""
    entries, now = [], 0
    for seq in range(draw(st.integers(1, 12))):
        now += draw(st.integers(0, 25))
        lines: dict[str, list[tuple[int, Any]]] = {}
        for line in draw(st.sets(st.sampled_from(["a", "b", "text"]))):
            times = draw(st.lists(st.integers(max(0, now - 30), now + 30), min_size=1, max_size=6))
            lines[line] = [(t, f"v{t}" if line == "text" else draw(VALUES)) for t in sorted(times)]
        others = draw(st.integers(0, now + 30))
        newest = max([others, *(t for samples in lines.values() for t, _ in samples)])
        entries.append(Brought(StreamPosition(True, 1000, seq + 1), lines, EPOCH + newest))
    return entries


def flat(out: list[Series[str]]) -> dict[str, list[tuple[int, str]]]:
    """The samples of each line in the order in which they went out; NaN, which is not itself, as text."""
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for series in out:
        found[series.line] += [(int(t) - EPOCH, repr(v)) for t, v in zip(series.times, series.values, strict=True)]
    return dict(found)


def run(
    thinner: Thinner[str], entries: list[Brought], before: StreamPosition, held: UnsentSamples | None = None
) -> list[Any]:
    """Give the entries after a place to a thinner, as a feed does: those that were sent only build what was held."""
    out: list[Series[str]] = []
    last = before if held is None else held.after
    for entry in entries:
        if entry.place <= last:
            continue
        muted = held is not None and entry.place <= before
        went = thinner.take(last, entry.newest, entry.series(held.floor if muted and held else None))
        assert not (muted and went)
        out += went
        last = entry.place
    return out


@examples(60)
@given(sessions(), st.sampled_from(["extremes", "first"]), st.integers(1, 40))
def test_what_went_out_before_a_cursor_and_after_it_is_what_goes_out_without_a_stop(
    entries: list[Brought], keeps: Any, cell: int
) -> None:
    thinning, start = Thinning(keeps, cell), StreamPosition(True, 0, 0)
    whole: Thinner[str] = Thinner(thinning)
    everything = flat([*run(whole, entries, start), *whole.flush()])
    first: Thinner[str] = Thinner(thinning)
    out: list[Any] = []
    for at, entry in enumerate(entries):
        out += first.take(entries[at - 1].place if at else start, entry.newest, entry.series())
        cursor = SessionCursor.parse(str(SessionCursor(7, entry.place, first.unsent(entry.place))))
        second: Thinner[str] = Thinner(thinning, cursor.unsent)
        rest = run(second, entries, cursor.position, cursor.unsent)
        assert flat([*out, *rest, *second.flush()]) == everything


@examples(60)
@given(sessions(), st.integers(1, 40))
def test_a_cursor_of_a_thinned_feed_loses_nothing_for_one_that_is_not_thinned(
    entries: list[Brought], cell: int
) -> None:
    first: Thinner[str] = Thinner(Thinning("extremes", cell))
    last = StreamPosition(True, 0, 0)
    for entry in entries:
        first.take(last, entry.newest, entry.series())
        held, last = first.unsent(entry.place), entry.place
        assert held is not None
        second: Thinner[str] = Thinner(None, held)
        got = [
            s
            for e in entries
            if held.after < e.place <= last
            for s in second.take(last, e.newest, e.series(held.floor))
        ]
        assert sum(map(len, (s.times for s in first.flush()))) <= sum(map(len, (s.times for s in got)))
        first = Thinner(Thinning("extremes", cell), held)
        run(first, [e for e in entries if e.place <= last], last, held)


@examples(60)
@given(sessions(), st.sampled_from(["extremes", "first"]), st.integers(1, 40))
def test_what_is_thinned_entry_by_entry_before_comes_out_the_same(
    entries: list[Brought], keeps: Any, cell: int
) -> None:
    thinning, start = Thinning(keeps, cell), StreamPosition(True, 0, 0)
    one: Thinner[str] = Thinner(thinning)
    other: Thinner[str] = Thinner(thinning)
    out, before = run(one, entries, start), list[Series[str]]()
    for entry in entries:
        before += other.take(start, entry.newest, thinned(entry.series(), thinning))
    assert flat([*out, *one.flush()]) == flat([*before, *other.flush()])


@examples(60)
@given(sessions(), st.integers(1, 40))
def test_every_cell_that_has_numbers_shows_its_least_and_greatest(entries: list[Brought], cell: int) -> None:
    thinner: Thinner[str] = Thinner(Thinning("extremes", cell))
    shown = flat([*run(thinner, entries, StreamPosition(True, 0, 0)), *thinner.flush()])
    wanted: dict[tuple[str, int], list[float]] = defaultdict(list)
    for entry in entries:
        for line, samples in entry.lines.items():
            for t, value in samples if line != "text" else ():
                if math.isfinite(value):
                    wanted[line, (EPOCH + t) // cell].append(value)
    for (line, at), values in wanted.items():
        got = [float(v.split("(")[-1].rstrip(")")) for t, v in shown[line] if (EPOCH + t) // cell == at]
        finite = [value for value in got if math.isfinite(value)]
        assert (min(finite), max(finite)) == (min(values), max(values))


def test_extremes_keep_their_own_times_to_the_nanosecond() -> None:
    times = np.array([EPOCH + t for t in (1, 2, 3, 4, 20_000_000)], np.int64)
    thinner: Thinner[str] = Thinner(parse_thinning("20ms", None))
    [went] = thinner.take(StreamPosition(True, 0, 0), int(times[-1]), [Series("a", times, np.array([5, 1, 9, 1, 7]))])
    assert went.times.tolist() == [EPOCH + 2, EPOCH + 3]
    assert went.values.tolist() == [1, 9]
    assert thinner.flush()[0].times.tolist() == [EPOCH + 20_000_000]


def test_a_rate_keeps_the_first_sample_of_each_cell() -> None:
    times = EPOCH + np.arange(1000, dtype=np.int64) * 1_000_000
    thinner: Thinner[str] = Thinner(parse_thinning(None, 10))
    out = [
        *thinner.take(StreamPosition(True, 0, 0), int(times[-1]), [Series("a", times, np.arange(1000.0))]),
        *thinner.flush(),
    ]
    assert [int(v) for each in out for v in each.values] == list(range(0, 1000, 100))


def test_what_is_not_thinned_goes_out_as_it_came() -> None:
    thinner: Thinner[str] = Thinner(None)
    series = Series("a", np.array([3, 1, 2], np.int64), np.array([1.0, math.nan, 2.0]))
    assert thinner.take(StreamPosition(True, 0, 0), 3, [series]) == [series]
    assert thinner.unsent(StreamPosition(True, 1, 1)) is None


@pytest.mark.parametrize(
    ("pixel", "rate"), [("20", None), ("0s", None), ("2d", None), ("1s", 2.0), (None, 0.0), (None, 1e9)]
)
def test_thinning_that_cannot_be_meant_is_refused(pixel: str | None, rate: float | None) -> None:
    with pytest.raises(BadRequest):
        parse_thinning(pixel, rate)


PLACES = st.one_of(
    st.builds(StreamPosition.at_offset, st.integers(-1, 2**62)),
    st.builds(lambda ms, seq: StreamPosition(True, ms, seq), st.integers(0, 2**63), st.integers(0, 2**63)),
)


@given(
    st.integers(0, 2**62),
    st.tuples(PLACES, PLACES).map(sorted),
    st.none() | st.integers(-(2**62), 2**62),
    st.none() | st.integers(0, 2**40),
    st.none() | st.integers(-(2**62), 2**62),
    st.booleans(),
)
def test_a_cursor_is_read_back_as_it_was_written(
    number: int, places: list[StreamPosition], floor: int | None, sent: int | None, since: int | None, ended: bool
) -> None:
    held = None if floor is None else UnsentSamples(places[0], floor)
    cursor = SessionCursor(number, places[1], held, None if ended else sent, None if ended else since, ended)
    assert SessionCursor.parse(str(cursor)) == cursor
    assert parse_session_start(str(cursor), 0) == FromSessionCursor(cursor)


@pytest.mark.parametrize(
    "text", ["", "42", "42.7", "1-2", "42.1-2~", "42.1-2~1-3", "42.2-1~1-1~5", "42.1-1~x", "1.k1~@"]
)
def test_text_that_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(CursorError):
        SessionCursor.parse(text)


def test_a_start_is_read_as_everywhere_and_times_may_be_nanoseconds() -> None:
    assert parse_session_start("start", 0) == FromStart()
    assert parse_session_start("end", 0) == FromEnd()
    assert parse_session_start("-3", 0) == FromLast(3)
    assert parse_session_start("-1s", 5_000) == FromMoment(4_000_000_000)
    assert parse_session_start("1620129055000000001", 0) == FromMoment(1_620_129_055_000_000_001)
    assert parse_session_until("42.1-2", 0) == SessionCursor(42, StreamPosition(True, 1, 2))
    with pytest.raises(CursorError):
        parse_session_start("1789200000.42", 0)
    with pytest.raises(BadRequest):
        parse_session_until("soon", 0)

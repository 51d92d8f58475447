"""Numbering backwards from what is live: nothing live changes, no gap, and timeuuids that are in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.views.tags.rows.model import BackwardNumbering, NumberingEnd


def test_the_last_event_gets_the_number_before_the_first_live_one() -> None:
    assert NumberingEnd.of(7, None) == NumberingEnd(7)
    assert NumberingEnd.of(9, NumberingEnd(6, 50, "a:0")) == NumberingEnd(5, 50, "a:0")
    assert NumberingEnd.of(5, NumberingEnd(7, 50, "a:0")).number == 5, "6 was assigned after this was read"
    numbering = BackwardNumbering({"p": NumberingEnd(1)}, {})
    assert [numbering.give("p", "a:0", ms)[0] for ms in (9, 8, 7)] == [1, 0, -1]
    assert numbering.give("new", "a:0", 6) == (0, 6)


def test_timeuuids_stay_where_they_are_unless_something_comes_before_them() -> None:
    numbering = BackwardNumbering({"p": NumberingEnd(5, 40, "a:1")}, {"a:0": 50})
    assert numbering.next_ms("p", "a:1", 40) == 40, "along a partition, offsets order what is equal"
    assert numbering.give("p", "a:0", 45) == (5, 39), "between two, they do not"
    assert numbering.give("q", "a:0", 60) == (0, 39)
    assert numbering.give("q", "a:1", 60) == (-1, 38)


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.sampled_from(["a:0", "a:1"]), st.integers(0, 20)), max_size=40))
def test_numbers_have_no_gap_and_timeuuids_never_rise_towards_the_front(events: list[tuple[str, str, int]]) -> None:
    numbering = BackwardNumbering({pid: NumberingEnd(10) for pid in "pqr"}, {})
    numbers: dict[str, list[int]] = {}
    places: dict[str, int] = {}
    sources: dict[str, tuple[int, str]] = {}
    for pid, place, ms in events:
        number, assigned_ms = numbering.give(pid, place, ms)
        numbers.setdefault(pid, []).append(number)
        assert assigned_ms <= min(ms, places.get(place, ms))
        behind, where = sources.get(pid, (assigned_ms + 1, ""))
        assert assigned_ms < behind or (assigned_ms == behind and where == place)
        places[place], sources[pid] = assigned_ms, (assigned_ms, place)
    assert all(found == list(range(10, 10 - len(found), -1)) for found in numbers.values())

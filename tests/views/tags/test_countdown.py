"""Numbering backwards from what is live: nothing live changes, no gap, and stamps that are in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.views.tags.rows.numbering import BackwardNumbering, NumberingEnd, numbering_end


def test_the_last_event_gets_the_number_before_the_first_live_one() -> None:
    assert numbering_end(7, None) == NumberingEnd(7)
    assert numbering_end(9, NumberingEnd(6, 50, "a:0")) == NumberingEnd(5, 50, "a:0")
    assert numbering_end(5, NumberingEnd(7, 50, "a:0")).number == 5, "6 was given out after this was read"
    countdown = BackwardNumbering({"p": NumberingEnd(1)}, {})
    assert [countdown.give("p", "a:0", ms)[0] for ms in (9, 8, 7)] == [1, 0, -1]
    assert countdown.give("new", "a:0", 6) == (0, 6)


def test_stamps_stay_where_they_are_unless_something_comes_before_them() -> None:
    countdown = BackwardNumbering({"p": NumberingEnd(5, 40, "a:1")}, {"a:0": 50})
    assert countdown.next_ms("p", "a:1", 40) == 40, "along a partition, offsets order what is equal"
    assert countdown.give("p", "a:0", 45) == (5, 39), "between two, they do not"
    assert countdown.give("q", "a:0", 60) == (0, 39)
    assert countdown.give("q", "a:1", 60) == (-1, 38)


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.sampled_from(["a:0", "a:1"]), st.integers(0, 20)), max_size=40))
def test_numbers_have_no_gap_and_stamps_never_rise_towards_the_front(events: list[tuple[str, str, int]]) -> None:
    countdown = BackwardNumbering({pid: NumberingEnd(10) for pid in "pqr"}, {})
    numbers: dict[str, list[int]] = {}
    places: dict[str, int] = {}
    sources: dict[str, tuple[int, str]] = {}
    for pid, place, ms in events:
        number, given_ms = countdown.give(pid, place, ms)
        numbers.setdefault(pid, []).append(number)
        assert given_ms <= min(ms, places.get(place, ms))
        behind, where = sources.get(pid, (given_ms + 1, ""))
        assert given_ms < behind or (given_ms == behind and where == place)
        places[place], sources[pid] = given_ms, (given_ms, place)
    assert all(found == list(range(10, 10 - len(found), -1)) for found in numbers.values())

"""Numbers of rows: gaps, repeats, conflicts, and rows that come late for a reason."""

from __future__ import annotations

import pytest

from tailrace.views.tags.rows.model import MissingNumbers, NumberCheck


def take(numbers: NumberCheck, *rows: tuple[int, int]) -> list[bool]:
    """Give rows of one source: number and offset, in the order of their timeuuids; return which of them count."""
    found = [numbers.take("p", number, ms, ("a:0", offset)) for ms, (number, offset) in enumerate(rows)]
    for number, offset in rows:
        numbers.recall("p", number, ("a:0", offset))
    return found


def test_a_source_may_begin_anywhere_and_has_no_gap_after_that() -> None:
    numbers = NumberCheck()
    assert take(numbers, (-1, 1), (0, 2), (1, 3)) == [True] * 3
    assert (list(numbers.gaps()), numbers.ends(), list(numbers.conflicts())) == ([], {"p": 1}, [])


def test_numbers_that_are_missing_are_told_with_the_timeuuids_around_them() -> None:
    numbers = NumberCheck()
    take(numbers, (1, 1), (2, 2), (6, 6), (8, 8))
    assert list(numbers.gaps()) == [MissingNumbers("p", 3, 5, 1, 2), MissingNumbers("p", 7, 7, 2, 3)]


def test_a_row_written_twice_is_a_repeat_also_if_the_first_writing_was_not_complete() -> None:
    numbers = NumberCheck()
    assert take(numbers, (1, 1), (3, 3), (1, 1), (2, 2), (3, 3)) == [True, True, False, True, False]
    assert (list(numbers.gaps()), list(numbers.conflicts()), numbers.disordered()) == ([], [], [])
    assert numbers.is_repeat("p", 1)
    assert numbers.is_repeat("p", 3)


def test_two_events_under_one_number_are_a_conflict() -> None:
    numbers = NumberCheck()
    assert take(numbers, (1, 1), (2, 2), (3, 3), (2, 9)) == [True, True, True, False]
    assert list(numbers.conflicts()) == [("p", 2, [("a:0", 2), ("a:0", 9)])]
    assert not numbers.is_repeat("p", 2)


def test_a_number_after_a_higher_one_is_out_of_order() -> None:
    numbers = NumberCheck()
    assert take(numbers, (1, 1), (3, 3), (2, 2)) == [True] * 3
    assert numbers.disordered() == ["p"]


@pytest.mark.parametrize("room", [0, 2])
def test_more_missing_numbers_than_there_is_room_for_are_told_as_one_gap(room: int) -> None:
    numbers = NumberCheck(most_missing=room)
    take(numbers, (1, 1), (9, 9))
    assert list(numbers.gaps()) == [MissingNumbers("p", 2, 8, 0, 1)]

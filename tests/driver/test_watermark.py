"""The watermark: time that has certainly come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.driver.watermark import KEPT, NEVER, Course
from tailrace.log.event import Partition

A, B = Partition("a", 0), Partition("b", 0)


def test_time_is_the_clock_where_everything_is_applied() -> None:
    course = Course({A: 10, B: 0})
    course.listed(5_000, {A: 10, B: 0})
    assert course.by_arrival([A, B]) == 5_000


def test_a_source_that_is_behind_holds_time_at_its_last_applied_record() -> None:
    course = Course({A: 10, B: 6})
    course.passed({B: (300, 5)})
    course.listed(5_000, {A: 10, B: 10})
    assert course.by_arrival([A, B]) == 300
    course.completed({B: 10})
    assert course.by_arrival([A, B]) == 5_000


def test_a_source_of_which_nothing_is_applied_stops_time() -> None:
    course = Course({A: 10})
    course.listed(5_000, {A: 10, B: 10})
    assert course.by_arrival([A, B]) is None
    assert course.by_event([A, B]) is None


def test_under_steady_load_time_is_that_of_the_last_end_that_was_reached() -> None:
    course = Course({A: 0})
    for tick in range(5):
        course.listed(1_000 + 100 * tick, {A: 10 * tick})
    course.completed({A: 25})
    assert course.by_arrival([A]) == 1_200


def test_a_time_that_holds_beyond_what_is_completed_does_not_count_yet() -> None:
    course = Course({A: 5})
    course.passed({A: (300, 4)})
    course.passed({A: (900, 8)})
    course.listed(5_000, {A: 20})
    assert course.by_arrival([A]) == 300
    course.completed({A: 9})
    assert course.by_arrival([A]) == 900
    assert course.reached(A) == (900, 8)


def test_a_record_from_the_future_moves_no_timer() -> None:
    course = Course({A: 5})
    course.passed({A: (999_999, 4)})
    course.listed(5_000, {A: 20})
    assert course.by_arrival([A]) == 5_000
    assert course.by_event([A]) == 5_000


def test_by_events_time_stands_at_the_records_while_there_are_more_and_then_goes_on() -> None:
    course = Course({A: 5, B: 5})
    course.passed({A: (100, 4), B: (400, 4)})
    course.listed(50_000, {A: 8, B: 5})
    assert course.by_event([A, B]) == 100
    course.completed({A: 8})
    course.passed({A: (700, 7)})
    course.listed(50_100, {A: 8, B: 5})
    assert course.by_event([A, B]) == 700
    course.listed(53_100, {A: 8, B: 5})
    assert course.by_event([A, B]) == 3_700


def test_a_partition_without_a_leader_stops_its_own_time_alone() -> None:
    course = Course({A: 10, B: 10})
    course.passed({B: (300, 9)})
    course.listed(5_000, {A: 10, B: NEVER})
    assert (course.by_arrival([A]), course.by_arrival([A, B]), course.by_arrival([B])) == (5_000, 300, 300)
    course.listed(6_000, {A: 10, B: 10})
    assert course.by_arrival([A, B]) == 6_000


STEPS = ["write a", "write b", "list", "list without b", "apply a", "apply b"]


@given(st.data())
def test_nothing_that_is_still_to_be_applied_lies_before_the_watermark(data: st.DataObject) -> None:
    """Sources are written at the pace of a clock, listed now and then, and applied in batches, in any order."""
    clock, course = 0, Course({A: 0, B: 0})
    written: dict[Partition, list[int]] = {A: [], B: []}
    done = {A: 0, B: 0}
    for step in data.draw(st.lists(st.sampled_from(STEPS), max_size=80)):
        clock += data.draw(st.integers(1, 50))
        source = A if step.endswith("a") else B
        if step.startswith("write"):
            written[source].append(clock)
        elif step == "list":
            course.listed(clock, {s: len(times) for s, times in written.items()})
        elif step == "list without b":
            course.listed(clock, {A: len(written[A]), B: NEVER})
        elif done[source] < len(written[source]):
            done[source] = data.draw(st.integers(done[source] + 1, len(written[source])))
            course.passed({source: (written[source][done[source] - 1], done[source] - 1)})
            course.completed({source: done[source]})
        watermark = course.by_arrival([A, B])
        waiting = [time for s in written for time in written[s][done[s] :]]
        assert watermark is None or all(time >= watermark for time in waiting)


def test_only_so_many_listings_are_kept() -> None:
    course = Course({A: 0})
    for tick in range(10 * KEPT):
        course.listed(tick, {A: tick})
    assert len(course._listings) == KEPT

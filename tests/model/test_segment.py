"""Where a reader goes on: the rule behind exact resume, checked against a list of events that was really appended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.model.cursor import Position
from tailrace.model.segment import Segment, locate


@st.composite
def _logs(draw: st.DrawFn) -> tuple[list[Segment], list[Position]]:
    """A log and every place in it: numbers grow in an epoch, with holes where other names took some."""
    segments: list[Segment] = []
    places: list[Position] = []
    epoch, number = 100, 0
    for index in range(draw(st.integers(1, 6))):
        if index and draw(st.booleans()):
            epoch += draw(st.integers(1, 50))
            number = draw(st.integers(0, number))
        first = number = number + draw(st.integers(1, 5))
        number += draw(st.integers(0, 4))
        segments.append(Segment(index, index, epoch, first, number, number - first + 1, 0, 0))
        places += [Position(epoch, n) for n in range(first, number + 1)]
    return segments, places


def _rest(segments: list[Segment], after: Position) -> list[Position]:
    """What a reader gets that follows locate, segment by segment."""
    place = locate(segments, after)
    assert place.gap is None
    found: list[Position] = []
    for segment in segments[place.at :]:
        low = place.position.number + 1 if segment.epoch == place.position.epoch else segment.first
        found += [Position(segment.epoch, n) for n in range(max(low, segment.first), segment.last + 1)]
    return found


@given(_logs())
def test_every_place_is_followed_by_exactly_what_comes_after_it(log: tuple[list[Segment], list[Position]]) -> None:
    segments, places = log
    assert _rest(segments, Position.START) == places
    for i, place in enumerate(places):
        assert _rest(segments, place) == places[i + 1 :]


def _segment(index: int, epoch: int, first: int, last: int) -> Segment:
    return Segment(index, index, epoch, first, last, last - first + 1, 0, 0)


def test_a_place_beyond_what_survived_a_rollback_is_told_and_goes_on_in_the_new_epoch() -> None:
    segments = [_segment(0, 10, 1, 50), _segment(1, 20, 51, 60)]
    place = locate(segments, Position(10, 55))
    assert place.at == 1
    assert place.gap is not None
    assert (place.gap.reason, place.gap.to) == ("store-rolled-back", Position(20, 50))
    assert locate(segments, Position(10, 50)).gap is None


def test_an_epoch_that_was_lost_altogether_is_told() -> None:
    segments = [_segment(0, 10, 1, 50), _segment(1, 30, 51, 60)]
    place = locate(segments, Position(20, 55))
    assert place.gap is not None
    assert (place.at, place.gap.reason) == (1, "store-rolled-back")
    beyond = locate(segments, Position(40, 5))
    assert beyond.gap is not None
    assert beyond.position == Position(30, 60)


def test_a_place_in_an_expired_prefix_is_told_and_goes_on_at_the_first_event_left() -> None:
    segments = [_segment(3, 10, 40, 50), _segment(4, 10, 51, 60)]
    place = locate(segments, Position(10, 12))
    assert place.gap is not None
    assert (place.at, place.gap.reason, place.position) == (0, "expired", Position(10, 39))
    older = locate(segments, Position(5, 12))
    assert older.gap is not None
    assert older.gap.reason == "expired"


def test_a_reader_ahead_of_what_it_knows_of_the_log_waits() -> None:
    place = locate([_segment(0, 10, 1, 50)], Position(10, 55))
    assert (place.gap, place.position) == (None, Position(10, 55))


def test_nothing_exists_yet() -> None:
    assert locate([], Position.START).gap is None

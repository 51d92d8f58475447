"""The position at which a reader goes on: the rule behind exact resume, against a list of events that was appended."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tailrace.log.cursor import Position
from tailrace.log.segment import Log, Segment, SegmentPosition, locate


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
        segments.append(_segment(index, epoch, first, number))
        places += [Position(epoch, n) for n in range(first, number + 1)]
    return segments, places


def _rest(segments: list[Segment], after: Position) -> list[Position]:
    """Return the events that a reader gets by following locate, segment by segment."""
    place = locate(Log(segments), after)
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
    return Segment(index, index, 1, epoch, first, last, last - first + 1, 0, 0)


def test_a_place_beyond_what_survived_a_rollback_is_told_and_goes_on_in_the_new_epoch() -> None:
    segments = [_segment(0, 10, 1, 50), _segment(1, 20, 51, 60)]
    place = locate(Log(segments), Position(10, 55))
    assert place.at == 1
    assert place.gap is not None
    assert (place.gap.reason, place.gap.to) == ("store-rolled-back", Position(20, 50))
    assert locate(Log(segments), Position(10, 50)).gap is None


def test_an_epoch_that_was_lost_altogether_is_told() -> None:
    segments = [_segment(0, 10, 1, 50), _segment(1, 30, 51, 60)]
    place = locate(Log(segments), Position(20, 55))
    assert place.gap is not None
    assert (place.at, place.gap.reason) == (1, "store-rolled-back")
    beyond = locate(Log(segments), Position(40, 5))
    assert beyond.gap is not None
    assert beyond.position == Position(30, 60)


def test_a_place_in_an_expired_prefix_is_told_and_goes_on_at_the_first_event_left() -> None:
    log = Log([_segment(3, 10, 40, 50), _segment(4, 10, 51, 60)], Position(10, 35))
    place = locate(log, Position(10, 12))
    assert place.gap is not None
    assert (place.at, place.gap.reason, place.position) == (0, "expired", Position(10, 39))
    older = locate(log, Position(5, 12))
    assert older.gap is not None
    assert older.gap.reason == "expired"


def test_a_reader_that_had_read_all_that_expired_has_missed_nothing_though_numbers_have_holes() -> None:
    log = Log([_segment(3, 10, 40, 50), _segment(4, 20, 51, 60)], Position(10, 35))
    assert locate(log, Position(10, 35)).gap is None
    assert locate(Log(log.segments[1:], Position(10, 50)), Position(10, 50)).gap is None
    lost = locate(Log(log.segments[1:], Position(10, 50)), Position(10, 49)).gap
    assert lost is not None
    assert lost.to == Position(20, 50)


def test_a_log_that_expired_as_a_whole_tells_those_who_had_not_read_it_all() -> None:
    log = Log([], Position(10, 60))
    assert locate(log, Position(10, 60)).gap is None
    place = locate(log, Position(10, 59))
    assert place.gap is not None
    assert (place.gap.reason, place.position) == ("expired", Position(10, 60))
    assert locate(log, Position.START).gap is None


def test_a_reader_inside_what_was_rebuilt_is_told_and_gets_all_of_it_again() -> None:
    rebuilt = msgspec.structs.replace(_segment(1, 70, 1, 12), replaced=((10, 21, 30),))
    log = Log([_segment(0, 10, 1, 20), rebuilt, _segment(2, 10, 31, 40)])
    for number in (21, 25, 29):
        place = locate(log, Position(10, number))
        assert place.gap is not None
        assert (place.at, place.gap.reason, place.position) == (1, "rebuilt", Position(70, 0))
    assert locate(log, Position(10, 30)) == SegmentPosition(2, Position(10, 30))
    assert locate(log, Position(10, 20)) == SegmentPosition(0, Position(10, 20))
    assert locate(log, Position(70, 5)) == SegmentPosition(1, Position(70, 5))


def test_a_reader_ahead_of_what_it_knows_of_the_log_waits() -> None:
    place = locate(Log([_segment(0, 10, 1, 50)]), Position(10, 55))
    assert (place.gap, place.position) == (None, Position(10, 55))


def test_nothing_exists_yet() -> None:
    assert locate(Log(), Position.START).gap is None

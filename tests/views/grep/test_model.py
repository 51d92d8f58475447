"""Searches as data: what they are over, when two are the same, how their scans are cut, and the places of readers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.api.requests import GrepParameters
from tailrace.errors import BadRequest, CursorError, QueryError, TopicForbidden
from tailrace.log.cursor import Cursor, FromEnd, FromStart, FromTime, Position
from tailrace.query import QueryLimits, Record
from tailrace.views.grep.driver import next_chunk
from tailrace.views.grep.feed import PROGRESS_MS, ScanProgress
from tailrace.views.grep.model import (
    GrepRequest,
    Search,
    SearchCursor,
    SearchLife,
    Stretch,
    make_grep_request,
    make_search,
)
from tests.query.generators import queries, shuffled

NOW = 1_789_200_000_000
SEARCH = make_search("posts", {})


def _over(search: Search, *topics: str) -> list[bool]:
    return [topic in search.topic_filter() for topic in topics]


# What a search is over.


def test_names_are_names_whatever_a_regular_expression_would_make_of_them() -> None:
    search = make_search("a.b, c,a.b".replace(" ", ""), {})
    assert search.topics == ("a.b", "c")
    assert _over(search, "a.b", "axb", "c", "a", "b") == [True, False, True, False, False]


def test_a_regular_expression_is_for_the_whole_name() -> None:
    assert _over(make_search("orders-.*|posts", {}), "orders-eu", "my-orders-eu", "posts", "posts2") == [
        *(True, False, True, False)
    ]


@pytest.mark.parametrize("topics", ["", "  ", ".*"])
def test_a_search_that_names_no_topic_is_over_all_of_them(topics: str) -> None:
    assert _over(make_search(topics, {}), "a", "b-c.d", "") == [True, True, True]


@pytest.mark.parametrize("topics", ["(", "a{9999999}", "(?=a)", "\ud800"])
def test_topics_that_are_no_regular_expression_are_refused(topics: str) -> None:
    with pytest.raises(BadRequest, match="topics"):
        make_search(topics, {})


def _keyed(key: str, *keys: list[Any] | None) -> list[bool]:
    query = make_search("", {"a": 1}, key).compiled()
    return [query.matches({"a": 1}, Record("t", 0, 0, 0, found)) for found in keys]


def test_a_key_that_is_an_array_names_the_first_elements() -> None:
    assert _keyed('["a", 1]', ["a", 1], ["a", 1, "b"], ["a", 1.0], ["a"], ["a", "1"], [1, "a"], None) == [
        *(True, True, True, False, False, False, False)
    ]


def test_a_key_that_is_a_regular_expression_is_searched_for_in_every_element() -> None:
    assert _keyed("^ab", ["ab"], ["x", "abc"], ["xab"], [1], [], None) == [True, True, False, False, False, False]


def test_a_key_comes_on_top_of_the_query() -> None:
    assert not make_search("", {"a": 1}, '["x"]').compiled().matches({"a": 2}, Record("t", 0, 0, 0, ["x"]))


@pytest.mark.parametrize("key", ["[]", "[1", '["a"] x', "(", "[NaN]"])
def test_a_key_that_cannot_be_read_is_refused(key: str) -> None:
    with pytest.raises(BadRequest, match="key"):
        make_search("", {}, key)


def test_a_query_is_refused_for_what_it_is_and_for_its_size() -> None:
    with pytest.raises(QueryError):
        make_search("", {"$where": "1"})
    with pytest.raises(QueryError):
        make_search("", [])
    with pytest.raises(QueryError):
        make_search("", {"a": {"$in": [1, 2, 3]}}, limits=QueryLimits(in_members=2))
    assert make_search("", {"a": {"$in": [1, 2]}}, '["x"]', QueryLimits(in_members=2)).compiled().asks_record


def test_a_query_that_the_settings_allow_is_compiled_wherever_it_is_needed() -> None:
    limits = QueryLimits(regex_length=5_000, regex_size=10_000)
    search = make_search("", {"a": {"$regex": "x" * 1_500}}, '["k"]', limits)
    assert search.id
    assert search.compiled().matches({"a": "x" * 1_500}, {"key": ["k"]})


# When two searches are the same.


@given(queries(), st.integers(0, 1 << 32))
def test_searches_that_say_the_same_in_other_words_have_one_id(query: dict[str, Any], seed: int) -> None:
    other = shuffled(random.Random(seed), query)
    if make_search("", query).compiled().canonical == make_search("", other).compiled().canonical:
        assert make_search("b,a", query).id == make_search("a,b,a", other).id


def test_searches_that_differ_in_anything_have_different_ids() -> None:
    found = [
        make_search("a", {"x": 1}),
        make_search("a", {"x": 2}),
        make_search("b", {"x": 1}),
        make_search("a,b", {"x": 1}),
        make_search("(a)", {"x": 1}),
        make_search("a", {"x": 1}, '["k"]'),
        make_search("a", {"x": 1}, "k"),
    ]
    assert len({search.id for search in found}) == len(found)
    assert make_search("a", {"x": 1}, '["k"]').id == make_search("a", {"$key.0": "k", "x": 1}).id


def test_no_two_logs_of_a_search_share_a_name_nor_two_marks() -> None:
    lives = [SearchLife(SEARCH, number, 0) for number in (1, 2, 12)]
    stretches = [Stretch(number, 0, {}) for number in (1, 3, 23)]
    names = [life.name for life in lives] + [s.name(life) for life in lives for s in stretches]
    assert len(set(names)) == len(names)
    marks = [s.mark(source) for s in stretches for source in ("a:0", "a@1:0", "a-b:0", "a:1")]
    assert len(set(marks)) == len(marks)
    assert all(mark.startswith("~") for mark in marks)


# How a scan is cut.

_SOURCES = ("a:0", "a:1", "b:0", "b@1:0")


@st.composite
def _asked_for(draw: st.DrawFn) -> list[tuple[Stretch, dict[str, int]]]:
    """Stretches with what is scanned of them so far."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        ranges: dict[str, tuple[int, int]] = {}
        marks: dict[str, int] = {}
        for source in draw(st.lists(st.sampled_from(_SOURCES), unique=True, min_size=1)):
            first = draw(st.integers(0, 60))
            ranges[source] = first, first + draw(st.integers(0, 60))
            if draw(st.booleans()):
                marks[source] = draw(st.integers(-1, 120))
        found.append((Stretch(number + 1, 0, ranges), marks))
    return found


@settings(max_examples=300)
@given(_asked_for(), st.integers(1, 40))
def test_chunks_cover_what_is_left_of_every_stretch_once_and_in_order(
    asked_for: list[tuple[Stretch, dict[str, int]]], most: int
) -> None:
    life = SearchLife(SEARCH, 9, 0)
    left = {
        stretch.number: {
            source: (max(first, marks.get(source, -1) + 1), until)
            for source, (first, until) in stretch.ranges.items()
            if max(first, marks.get(source, -1) + 1) < until
        }
        for stretch, marks in asked_for
    }
    rounds = 0
    while any(left.values()):
        rounds += 1
        assert rounds <= 1000
        waiting = [(life, stretch, marks) for stretch, marks in asked_for if left[stretch.number]]
        chunk = next_chunk(waiting, most)
        first = waiting[0][1].number
        assert chunk.ranges
        assert sum(until - begin for begin, until in chunk.ranges.values()) <= most + len(_SOURCES)
        assert chunk.dues[0].stretch.number == first
        assert chunk.dues[0].ranges == chunk.ranges
        for due in chunk.dues:
            number = due.stretch.number
            marks = next(marks for stretch, marks in asked_for if stretch.number == number)
            for source, (begin, until) in due.ranges.items():
                low, high = left[number][source]
                assert begin == low < until <= high, "a stretch goes on where it was, and never beyond its end"
                assert chunk.ranges[source][0] <= begin
                assert until <= chunk.ranges[source][1], "and takes nothing that is not read"
                marks[source] = until - 1
                left[number] = {**left[number], source: (until, high)}
                if until == high:
                    del left[number][source]


def test_all_sources_of_a_stretch_come_to_their_end_together() -> None:
    stretch = Stretch(1, 0, {"a:0": (0, 1000), "b:0": (500, 510)})
    chunk = next_chunk([(SearchLife(SEARCH, 9, 0), stretch, {})], 101)
    assert chunk.ranges == {"a:0": (0, 100), "b:0": (500, 501)}


# Where a reader is, and what it asks for.

_number = st.integers(0, 10**12 - 1)
_states = st.builds(
    Cursor,
    st.builds(Position, _number, _number).map(lambda position: (position,)),
    st.none() | _number,
    st.none() | _number,
) | st.builds(Cursor, st.builds(Position, _number, _number).map(lambda position: (position,)), ended=st.just(True))


@given(st.builds(SearchCursor, _number, _number, _states))
def test_a_place_is_read_back_as_it_was_written(place: SearchCursor) -> None:
    assert SearchCursor.parse(str(place)) == place
    assert SearchCursor.parse(f" {place}\n") == place


@pytest.mark.parametrize(
    "text",
    ["", "1", "1-2", "1-2-", "1-2-3", "1.2", "1-2-3.", "-1-2-3.4", "1-2-3.4~x", "1-2-3.4,5.6", "1-2-3.4-5", "²-0-1.1"],
)
def test_anything_else_is_no_place(text: str) -> None:
    with pytest.raises(CursorError):
        SearchCursor.parse(text)


def _request(last_event_id: str | None = None, **given: Any) -> GrepRequest:
    request = make_grep_request(SEARCH, GrepParameters(**given), now_ms=NOW, last_event_id=last_event_id)
    assert request is not None
    return request


@pytest.mark.parametrize(
    "text", ["2026-09-12T08:00:00Z", "2026-09-12", "2026-09-12T08:00:00.5+02:00", "@2026-09-12", "-1h"]
)
def test_a_date_is_a_time_and_no_cursor(text: str) -> None:
    request = _request(start=text)
    assert isinstance(request.start, FromTime)
    assert request.since_ms == request.start.time_ms


def test_a_request_begins_where_it_says_or_at_the_end_when_it_follows() -> None:
    assert _request().start == FromEnd()
    assert _request(follow=False).start == _request(start="start").start == FromStart()
    assert _request(start="3-0-7.9").start == _request(after="3-0-7.9").start == SearchCursor.parse("3-0-7.9")


def test_a_request_that_is_continued_knows_what_it_has_sent_and_since_when() -> None:
    request = _request(last_event_id=f"3-5-7.9~4@{NOW}", limit=10, start="start")
    assert (request.sent, request.since_ms, request.resumed) == (4, NOW, True)
    assert make_grep_request(SEARCH, GrepParameters(), now_ms=NOW, last_event_id="3-5-7.9~end") is None


@pytest.mark.parametrize(
    "given",
    [
        {"start": "-1000000"},
        {"start": "1.2"},
        {"start": "soon"},
        {"limit": -1},
        {"window": 1023},
        {"window": (16 << 20) + 1},
        {"missing": "x"},
        {"on_gap": "x"},
        {"until": "soon"},
        {"client": "a b"},
    ],
)
def test_a_request_that_makes_no_sense_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        _request(**given)


# How far a scan is.


def test_progress_is_told_at_most_once_a_second_and_counts_nothing_outside_the_ranges() -> None:
    now = [NOW]
    progress = ScanProgress(Stretch(1, 0, {"a:0": (100, 200), "b:0": (0, 300)}), lambda: now[0])
    facts = [progress.facts({"a:0": -1, "b:0": -1}, 0, 0)]
    assert not progress.is_due()
    now[0] += PROGRESS_MS
    facts.append(progress.facts({"a:0": 149, "b:0": 49}, 1, 10))
    now[0] += 2 * PROGRESS_MS
    facts.append(progress.facts({"a:0": 1000, "b:0": 1000}, 7, 40))
    now[0] -= 86_400_000
    facts.append(progress.facts({"a:0": 1000, "b:0": 1000}, 7, 40))  # the clock was set back
    assert facts == [
        {"percent": 0.0, "records": 0, "of": 400, "bytes": 0, "matches": 0},
        {"percent": 25.0, "records": 100, "of": 400, "bytes": 10, "matches": 1, "seconds_left": 3.0},
        {"percent": 100.0, "records": 400, "of": 400, "bytes": 40, "matches": 7, "seconds_left": 0.0},
        {"percent": 100.0, "records": 400, "of": 400, "bytes": 40, "matches": 7},
    ]


def test_a_scan_of_nothing_is_done() -> None:
    facts = ScanProgress(Stretch(1, 0, {}), lambda: NOW).facts({}, 0, 0)
    assert facts["percent"] == 100.0


# Who may search some topics only.


def test_a_search_over_a_pattern_is_narrowed_to_what_is_allowed() -> None:
    search = make_search(".*-eu", {}).narrowed("orders-.*")
    assert _over(search, "orders-eu", "payments-eu", "orders-us") == [True, False, False]


def test_a_narrowed_search_is_another_one_than_the_whole_and_the_same_for_all_with_these_topics() -> None:
    whole = make_search(".*", {"a": 1})
    assert whole.narrowed("orders-.*").id != whole.id
    assert whole.narrowed("orders-.*").id == make_search(".*", {"a": {"$eq": 1}}).narrowed("orders-.*").id
    assert whole.narrowed("orders-.*").id != whole.narrowed("payments").id


def test_a_search_by_names_is_the_same_for_all_who_may_search_them() -> None:
    search = make_search("orders-eu,orders-us", {})
    assert search.narrowed("orders-.*") == search


def test_a_search_that_names_a_topic_which_is_not_allowed_is_refused() -> None:
    with pytest.raises(TopicForbidden, match="'payments'"):
        make_search("orders-eu,payments", {}).narrowed("orders-.*")

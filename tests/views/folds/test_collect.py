"""Collectors: whatever the order and the parts in which events are added, the result has the same bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.views.folds.collect import COLLECTORS, Collector, Position
from tests.examples import examples

SOURCES = ("a:0", "a:1", "b@2:0")
NUMBERS = {source: i for i, source in enumerate(SOURCES)}

_numbers = (
    st.integers(-20, 20)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0.1, -0.0, 1e308, -1e308, 5e-324, 2**53 + 1, 10**200])
)
_plain = st.none() | st.booleans() | _numbers | st.sampled_from(["", "a", "B", "é", "\U0001f600", '"\\\n'])
_json = st.recursive(
    _plain,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["likes", "a", "é", '"']), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def _events(draw: st.DrawFn, found: st.SearchStrategy[Any]) -> list[tuple[Position, bytes | None]]:
    """Events in order, each with what is at the path; the bytes are as some producer wrote them."""
    written = draw(st.lists(st.tuples(st.booleans(), st.booleans(), found), max_size=12))
    places = draw(
        st.lists(
            st.tuples(st.integers(0, 3), st.sampled_from(SOURCES), st.integers(0, 30)),
            min_size=len(written),
            max_size=len(written),
            unique=True,
        )
    )
    raws = [
        None if missing else json.dumps(value, ensure_ascii=escaped).encode() for missing, escaped, value in written
    ]
    return list(zip(sorted(places), raws, strict=True))


def _add(collector: Collector, state: Any, events: Sequence[tuple[Position, bytes | None]]) -> int:
    grown = 0
    for position, raw in events:
        taken = collector.extract(raw, b"null" if raw is None else raw)
        if taken is not None:
            growth = collector.add(state, taken, position)
            assert growth <= collector.weigh(taken)
            grown += growth
    return grown


def _gathered(kind: str, *raws: bytes | None) -> Any:
    collector = COLLECTORS[kind]
    state = collector.new()
    _add(collector, state, [((7, "a:0", i), raw) for i, raw in enumerate(raws)])
    return json.loads(collector.result(state))


@pytest.mark.parametrize("kind", COLLECTORS)
@examples(120)
@given(_events(_json | _numbers), st.data())
def test_parts_that_are_merged_in_any_order_give_the_same_bytes(
    kind: str, events: list[tuple[Position, bytes | None]], data: st.DataObject
) -> None:
    collector = COLLECTORS[kind]
    whole = collector.new()
    size = _add(collector, whole, events)

    shuffled = data.draw(st.permutations(events))
    parts: list[tuple[Any, int]] = []
    while shuffled:
        n = data.draw(st.integers(1, len(shuffled)))
        state = collector.new()
        grown = _add(collector, state, shuffled[:n])
        # A part may have rested in the store.
        parts.append((collector.load(collector.dump(state, NUMBERS), SOURCES), grown))
        shuffled = shuffled[n:]
    while len(parts) > 1:
        right, _ = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        left, grown = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        parts.append((left, grown + collector.merge(left, right)))
    ((merged, grown),) = parts or [(collector.new(), 0)]

    assert collector.result(merged) == collector.result(whole)
    assert grown == size
    json.loads(collector.result(merged))


@pytest.mark.parametrize("kind", COLLECTORS)
@examples(60)
@given(_events(_json))
def test_a_state_comes_back_from_the_store_as_it_was(kind: str, events: list[tuple[Position, bytes | None]]) -> None:
    collector = COLLECTORS[kind]
    state = collector.new()
    _add(collector, state, events)
    result = collector.result(state)
    dumped = collector.dump(state, NUMBERS)
    assert collector.load(dumped, SOURCES) == state
    assert collector.result(collector.load(dumped, SOURCES)) == result


@examples(300)
@given(st.lists(_numbers, max_size=30))
def test_a_sum_is_exact_for_integers_and_rounded_once_for_others(numbers: list[int | float]) -> None:
    collector = COLLECTORS["sum"]
    state = collector.new()
    _add(collector, state, [((0, "a:0", i), json.dumps(n).encode()) for i, n in enumerate(numbers)])
    found = json.loads(collector.result(state))
    exact = sum(map(Fraction, numbers), Fraction())
    if all(isinstance(n, int) for n in numbers):
        assert found == exact
        assert isinstance(found, int)
        return
    try:
        assert found == float(exact)
    except OverflowError:
        assert found is None
        return
    assert isinstance(found, float)
    if all(isinstance(n, float) and abs(n) < 1e300 for n in numbers):
        assert found == math.fsum(numbers)


def test_a_sum_may_leave_the_range_of_a_double_and_come_back() -> None:
    for numbers in permutations([b"1e308", b"1e308", b"-1e308", b"-1e308", b"0.5"]):
        assert _gathered("sum", *numbers) == 0.5


def test_a_sum_that_is_no_double_is_null() -> None:
    assert _gathered("sum", b"1e308", b"1e308") is None
    assert _gathered("sum", b"1" + b"0" * 299, b"1" + b"0" * 299) == 2 * 10**299


def test_a_sum_takes_nothing_but_numbers() -> None:
    assert _gathered("sum", b"1", None, b"null", b"true", b'"2"', b"[3]", b'{"a":4}', b"1e999", b"9" * 301) == 1
    assert _gathered("sum") == 0
    assert _gathered("sum", b"0.1", b"0.2") == 0.30000000000000004
    assert _gathered("sum", *[b"0.1"] * 10) == 1
    assert _gathered("sum", b"-0.0") == 0


def test_a_set_has_different_values_in_the_order_of_their_first_appearance() -> None:
    found = [b"2", b'"2"', b"2.0", b"true", b"null", b'{"b":1,"a":[1.0]}', b'{"a":[1],"b":1e0}', None, b'"\\u0032"']
    assert _gathered("set", *found) == [2, "2", True, None, {"a": [1], "b": 1}]
    assert _gathered("set") == []


def test_keys_are_those_of_objects_in_the_order_of_their_first_appearance() -> None:
    found = [b'{"likes":1,"shares":2}', b'["no"]', b'"no"', None, b"{}", b'{"a\\"b":0,"likes":0}']
    assert _gathered("keys", *found) == ["likes", "shares", 'a"b']


def test_items_are_those_of_arrays_in_the_order_of_their_first_appearance() -> None:
    assert _gathered("items", b'[3,"a",3.0]', b'{"no":1}', b"[]", b"null", None, b'[1,"a",[1]]') == [3, "a", 1, [1]]


def test_appearance_is_by_time_then_source_then_offset_then_place() -> None:
    collector = COLLECTORS["items"]
    state = collector.new()
    events: list[tuple[Position, bytes]] = [
        ((5, "a:0", 9), b'["late","e"]'),
        ((4, "b:0", 1), b'["d","c"]'),
        ((4, "a:1", 3), b'["b"]'),
        ((4, "a:1", 2), b'["a","late"]'),
        ((4, "b:0", 2), b'["c","d"]'),
    ]
    _add(collector, state, events)
    assert json.loads(collector.result(state)) == ["a", "late", "b", "d", "c", "e"]


def test_first_and_last_are_by_position_and_keep_the_bytes() -> None:
    events: list[tuple[Position, bytes | None]] = [
        ((5, "a:0", 0), b"1.50"),
        ((4, "b:0", 0), b'{ "x" : 1 }'),
        ((4, "a:0", 7), None),
        ((6, "a:0", 1), None),
        ((5, "a:1", 0), b"null"),
    ]
    for kind, wanted in (("first", b'{ "x" : 1 }'), ("last", b"null")):
        state = COLLECTORS[kind].new()
        _add(COLLECTORS[kind], state, events)
        assert COLLECTORS[kind].result(state) == wanted
    assert _gathered("first") is None
    assert _gathered("last", None) is None


def test_numbers_come_before_text_and_all_else_is_ignored() -> None:
    mixed = [b'"b"', b"10", b'"a"', b"9.5", b"-1", b"true", b"null", b"[0]", None, b"1e999", b'"\\u00e9"']
    assert _gathered("min", *mixed) == -1
    assert _gathered("max", *mixed) == "é"
    assert _gathered("max", b"9", b"10", b"1e1") in (10, 10.0)
    assert _gathered("min", b'"b"', b'"a"', b"true") == "a"
    assert _gathered("max", b"9007199254740993", b"9007199254740992.0") == 9007199254740993
    assert _gathered("min", b"null") is None
    assert _gathered("max") is None


@examples(150)
@given(st.lists(_numbers, min_size=1, max_size=12))
def test_the_smallest_and_the_largest_number_are_found(numbers: list[int | float]) -> None:
    raws = [json.dumps(n).encode() for n in numbers]
    assert _gathered("min", *raws) == min(numbers)
    assert _gathered("max", *raws) == max(numbers)


def test_a_count_is_of_events_that_have_something() -> None:
    assert _gathered("count", b"1", b"null", None, b"[]", b"1") == 4
    assert _gathered("count") == 0


def test_events_are_in_order_with_the_bytes_that_were_produced() -> None:
    collector = COLLECTORS["events"]
    state = collector.new()
    values = [b'{"b" : 1.10, "a":"\\u00e9", "b":2}', b" [ ] ", b"12345678901234567890123"]
    for i, value in zip([2, 0, 1], values, strict=True):
        collector.add(state, collector.extract(None, value), (10 - i, "a@1:3", i))
    assert collector.result(state) == (
        b'[{"id":"a@1:3:2","data":{"b" : 1.10, "a":"\\u00e9", "b":2}},'
        b'{"id":"a@1:3:1","data":12345678901234567890123},{"id":"a@1:3:0","data": [ ] }]'
    )

"""Sets of standing queries: numbers, equal queries, needs, and nothing left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tailrace.errors import QueryError
from tailrace.query import FilterSet, Record, compile_query
from tailrace.query.tree import Need, Present, Range, Text, Value, needs
from tailrace.query.value import Path

Json = dict[str, Any]


def test_queries_have_the_numbers_of_their_places_and_then_go_on() -> None:
    queries = FilterSet([{"a": 1}, {"b": 2}])
    assert queries.add({"a": 1}) == 2
    assert sorted(queries.match({"a": 1, "b": 3})) == [0, 2]
    assert len(queries) == 3


def test_a_number_is_not_used_again() -> None:
    queries = FilterSet([{"a": 1}])
    queries.remove(0)
    assert queries.add({"a": 1}) == 1
    assert list(queries.match({"a": 1})) == [1]


def test_a_number_that_is_not_there_cannot_be_removed() -> None:
    with pytest.raises(KeyError):
        FilterSet().remove(0)


def test_a_query_that_cannot_be_compiled_leaves_the_set_as_it_was() -> None:
    queries = FilterSet([{"a": 1}])
    with pytest.raises(QueryError):
        queries.add({"a": {"$foo": 1}})
    assert list(queries.match({"a": 1})) == [0]


def test_equal_queries_are_one() -> None:
    queries = FilterSet([{"a": 1, "b": 2}, {"b": {"$in": [2.0]}, "a": 1}, {"$and": [{"b": 2}, {"a": 1}]}])
    assert len(queries._distinct) == 1
    queries.remove(0)
    queries.remove(2)
    assert list(queries.match({"a": 1, "b": 2})) == [1]


def test_the_fields_of_a_set_are_those_of_its_queries() -> None:
    queries = FilterSet([{"a.b": 1}, {"c": 1, "$topic": "t"}])
    whole = queries.add({"$expr": {"$eq": ["$$ROOT", 1]}})
    assert queries.fields() is None
    queries.remove(whole)
    assert queries.fields() == frozenset({"a", "c"})
    queries.remove(0)
    assert queries.fields() == frozenset({"c"})


def test_the_record_is_looked_at_where_a_query_asks_for_it() -> None:
    queries = FilterSet(
        [{"$topic": "orders", "a": 1}, {"$headers.h": {"$exists": True}}, {"$topic": {"$ne": "orders"}}]
    )
    record = Record(topic="orders", partition=0, offset=1, time_ms=2, headers={"h": None})
    assert sorted(queries.match({"a": 1}, record)) == [0, 1]
    assert list(queries.match({"a": 1})) == [2]


def test_what_was_given_out_does_not_change_with_the_set() -> None:
    queries = FilterSet([{"a": 1}, {"a": 1}])
    given = queries.match({"a": 1})
    queries.add({"a": 1})
    assert list(given) == [0, 1]
    for number in queries.match({"a": 1}):
        queries.remove(number)
    assert len(queries) == 0


def test_queries_that_share_very_many_conditions_are_found() -> None:
    shared = {f"f{i}": 1 for i in range(200)}
    queries = FilterSet({**shared, "x": {"$ne": i}} for i in range(20))
    assert sorted(queries.match({**shared, "x": 7})) == [i for i in range(20) if i != 7]


def test_an_element_after_a_path_that_ends_with_a_dot_is_found() -> None:
    assert list(FilterSet([{"a.": {"$elemMatch": {"b": 1}}}]).match({"a": [{"b": 1}]})) == [0]


def test_one_number_written_in_two_ways_is_one_member() -> None:
    queries = FilterSet([{"a": {"$in": [2**1023, 2.0**1023]}}])
    assert list(queries.match({"a": 2**1023})) == [0]
    queries.remove(0)
    assert list(queries.match({"a": 2**1023})) == []


NEEDS: list[tuple[str, Json, list[Need]]] = [
    ("an equality is looked up", {"a": 1}, [Value(Path("a"), 1)]),
    ("so are alternatives", {"$or": [{"a": "x"}, {"b": 2}]}, [Value(Path("a"), "x"), Value(Path("b"), 2)]),
    ("two bounds are one range", {"a": {"$gt": 1, "$lt": 5}}, [Range(Path("a"), 1, 5)]),
    ("a pattern's text is looked for", {"a": {"$regex": "error.*"}}, [Text(Path("a"), "error")]),
    ("a short text is not", {"a": {"$regex": "er"}}, [Present(Path("a"))]),
    ("inside an element, by the path through the array", {"a": {"$elemMatch": {"b": 1}}}, [Value(Path("a.b"), 1)]),
    ("but not by digits: arrays have them for names", {"a": {"$elemMatch": {"0": 1}}}, [Present(Path("a"))]),
    ("what may be missing cannot be looked up", {"a": None}, []),
    ("nor what must be missing", {"a": {"$ne": 1}}, []),
    ("nor one of several of which one cannot", {"$or": [{"a": 1}, {"b": {"$ne": 1}}]}, []),
    ("nor NaN, which equals nothing in a dictionary", {"a": float("nan")}, [Present(Path("a"))]),
]


@pytest.mark.parametrize(("says", "query", "expected"), NEEDS, ids=[says for says, _, _ in NEEDS])
def test_needs(says: str, query: Json, expected: list[Need]) -> None:
    assert sorted(map(repr, needs(compile_query(query).tree, len))) == sorted(map(repr, expected))


def test_of_several_conditions_the_one_that_fewest_documents_meet_is_looked_up() -> None:
    queries = FilterSet({"kind": "order", "user": f"u{i}", "total": {"$gt": i}} for i in range(200))
    asked: list[int] = []
    for standing in queries._by_number.values():
        check = standing.check
        standing.check = lambda document, known, check=check: asked.append(1) or check(document, known)  # type: ignore
    assert list(queries.match({"kind": "order", "user": "u7", "total": 100})) == [7]
    assert len(asked) <= 8


def test_many_queries_under_one_value_are_told_apart_by_what_else_they_need() -> None:
    queries = FilterSet({"kind": "order", "$and": [{"a": i % 7}, {"b": i % 11}, {"c": i % 13}]} for i in range(500))
    document = {"kind": "order", "a": 3, "b": 4, "c": 5}
    assert list(queries.match(document)) == [i for i in range(500) if (i % 7, i % 11, i % 13) == (3, 4, 5)]


def test_queries_that_come_and_go_leave_nothing_behind() -> None:
    chance = random.Random(3)
    queries = FilterSet()
    shapes: list[Json] = [
        *({"a": i % 5, "b.c": f"x{i}"} for i in range(60)),
        *({"a": {"$gt": i, "$lt": i + 9}} for i in range(30)),
        *({"s": {"$regex": f"word{i}.*end"}} for i in range(30)),
        *({"$or": [{"a": i}, {"$topic": f"t{i}"}]} for i in range(30)),
        *({"a": {"$ne": i}, "$expr": {"$gt": ["$a", i]}} for i in range(10)),
        *({"items": {"$elemMatch": {"sku": i, "n": {"$gt": 1}}}} for i in range(20)),
    ]
    for _ in range(3):
        numbers = [queries.add(query) for query in chance.sample(shapes, len(shapes)) * 2]
        for number in chance.sample(numbers, len(numbers)):
            queries.remove(number)
    assert len(queries) == 0
    assert queries.fields() == frozenset()
    assert not queries._distinct
    assert not queries._leaves
    assert not queries._index._of_value
    assert not queries._index._of_record
    assert not queries._index._always

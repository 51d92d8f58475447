"""The compiled query: its identity, its fields, its limits, what it says and what it keeps to itself."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.errors import QueryError
from tailrace.query import QueryLimits, Record, compile_query

Json = dict[str, Any]

EQUAL: list[tuple[str, Json, Json]] = [
    ("conjuncts in any order", {"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ("an explicit equality", {"a": 1}, {"a": {"$eq": 1}}),
    ("one number written in two ways", {"a": 1}, {"a": 1.0}),
    ("a conjunction spelled out", {"a": 1, "b": 2}, {"$and": [{"b": 2}, {"$and": [{"a": 1}]}]}),
    ("operators of one path apart", {"a": {"$gt": 1, "$lt": 5}}, {"$and": [{"a": {"$lt": 5}}, {"a": {"$gt": 1}}]}),
    ("members of $in in any order, some twice", {"a": {"$in": [1, 2, 3]}}, {"a": {"$in": [3, 2.0, 1, 2]}}),
    ("an $in of one", {"a": {"$in": [1]}}, {"a": 1}),
    ("alternatives of one path", {"$or": [{"a": 1}, {"a": 2}]}, {"a": {"$in": [1, 2]}}),
    (
        "an $or inside an $or",
        {"$or": [{"a": 1}, {"$or": [{"b": 2}, {"c": 3}]}]},
        {"$or": [{"c": 3}, {"b": 2}, {"a": 1}]},
    ),
    ("$ne and the $not of $eq", {"a": {"$ne": 1}}, {"a": {"$not": {"$eq": 1}}}),
    ("$ne and the $nor of an equality", {"a": {"$ne": 1}}, {"$nor": [{"a": 1}]}),
    ("two $ne and a $nin", {"$and": [{"a": {"$ne": 1}}, {"a": {"$ne": 2}}]}, {"a": {"$nin": [2, 1]}}),
    ("a negation of a negation", {"a": {"$not": {"$not": {"$gt": 1}}}}, {"a": {"$gt": 1}}),
    ("$all and its equalities", {"a": {"$all": [1, 2]}}, {"$and": [{"a": 2}, {"a": 1}]}),
    ("a bound that another makes needless", {"$and": [{"a": {"$gt": 1}}, {"a": {"$gte": 5}}]}, {"a": {"$gte": 5}}),
    ("a bound that another takes in", {"$or": [{"a": {"$lt": 1}}, {"a": {"$lte": 1}}]}, {"a": {"$lte": 1}}),
    ("types by name and by number", {"a": {"$type": "number"}}, {"a": {"$type": [19, 1, "int", "long"]}}),
    ("bits as a mask and as positions", {"a": {"$bitsAllSet": 6}}, {"a": {"$bitsAllSet": [2, 1, 1]}}),
    ("options in any order", {"a": {"$regex": "x", "$options": "si"}}, {"a": {"$options": "is", "$regex": "x"}}),
    ("what is always so", {"a": {"$nin": []}}, {}),
    ("what is never so", {"a": {"$in": []}}, {"b": {"$all": []}, "c": 1}),
    ("a comment", {"a": 1, "$comment": "why"}, {"a": 1}),
    ("a time as text", {"$time": {"$gte": "1970-01-01T00:00:01Z"}}, {"$time": {"$gte": 1000}}),
]

DIFFERENT: list[tuple[str, Json, Json]] = [
    ("the order of a literal document's names", {"a": {"b": 1, "c": 2}}, {"a": {"c": 2, "b": 1}}),
    ("the order of an array", {"a": [1, 2]}, {"a": [2, 1]}),
    ("a boolean and a number", {"a": True}, {"a": 1}),
    ("not greater, and less or equal", {"a": {"$not": {"$gt": 5}}}, {"a": {"$lte": 5}}),
    ("one element for two bounds", {"a": {"$elemMatch": {"$gt": 1, "$lt": 5}}}, {"a": {"$gt": 1, "$lt": 5}}),
    ("bounds of two kinds", {"$and": [{"a": {"$gt": 1}}, {"a": {"$gt": "1"}}]}, {"a": {"$gt": "1"}}),
    ("a path and a document", {"a.b": 1}, {"a": {"b": 1}}),
    ("null and not there", {"a": None}, {"a": {"$exists": False}}),
    ("operators as a value", {"a": {"$ne": {"$gt": 1}}}, {"a": {"$not": {"$gt": 1}}}),
]


@pytest.mark.parametrize(("what", "one", "other"), EQUAL, ids=[what for what, _, _ in EQUAL])
def test_queries_that_mean_the_same_are_equal(what: str, one: Json, other: Json) -> None:
    assert compile_query(one).canonical == compile_query(other).canonical
    assert compile_query(one).digest == compile_query(other).digest
    assert compile_query(one) == compile_query(other)


@pytest.mark.parametrize(("what", "one", "other"), DIFFERENT, ids=[what for what, _, _ in DIFFERENT])
def test_queries_that_mean_something_else_are_not_equal(what: str, one: Json, other: Json) -> None:
    assert compile_query(one).digest != compile_query(other).digest


def test_a_canonical_form_can_be_compiled_when_values_look_like_operators() -> None:
    query = compile_query({"a": {"$nin": ["x"], "$ne": {"$gt": 1}}})
    again = compile_query(query.canonical)
    assert again == query
    assert not again.matches({"a": {"$gt": 1}})


def test_the_two_rules_for_null_are_two_queries() -> None:
    assert compile_query({"a.b": None}, mongo=8) != compile_query({"a.b": None}, mongo=9)


def test_a_query_needs_the_first_names_of_its_paths() -> None:
    query = compile_query(
        {
            "a.b": 1,
            "$or": [{"c": 1}, {"d": {"$elemMatch": {"x": 1}}}],
            "$topic": "t",
            "$expr": {"$gt": ["$e.f", {"$add": ["$g", 1]}]},
        }
    )
    assert query.fields() == frozenset({"a", "c", "d", "e", "g"})


def test_a_query_over_the_root_needs_every_field() -> None:
    assert compile_query({"$expr": {"$eq": ["$$ROOT", {}]}}).fields() is None


def test_what_was_given_may_change_afterwards() -> None:
    source: Json = {"a": {"$in": [1]}}
    query = compile_query(source)
    source["a"]["$in"].append(2)
    assert not query.matches({"a": 2})
    assert query.source == {"a": {"$in": [1]}}


def test_a_query_survives_pickling() -> None:
    query = compile_query({"a.0": {"$regex": "x+"}, "$expr": {"$lt": ["$b", 2]}, "c": {"$elemMatch": {"d": 1}}})
    again = pickle.loads(pickle.dumps(query))
    assert again == query
    assert again.matches({"a": ["xx"], "b": 1, "c": [{"d": 1}]})


@pytest.mark.parametrize("document", [None, 5, "text", [], [{"a": 1}], True])
def test_a_value_that_is_no_object_has_no_fields(document: Any) -> None:
    assert not compile_query({"a": 1}).matches(document)
    assert compile_query({"a": None}).matches(document)
    assert compile_query({}).matches(document)


def test_a_record_may_be_a_frame_or_any_object_with_its_names() -> None:
    query = compile_query(
        {"$topic": "orders", "$time": {"$gte": "2026-11-15T08:00:00Z"}, "$headers.trace": "t1", "$key.0": "k"}
    )
    time_ms = round(datetime(2026, 11, 15, 8, 0, 1, tzinfo=UTC).timestamp() * 1000)
    own: Json = {"topic": "orders", "partition": 3, "offset": 7, "key": ["k", 5], "headers": {"trace": "t1"}}
    assert query.matches({}, Record(time_ms=time_ms, **own))
    assert query.matches({}, {**own, "time": "2026-11-15T08:00:01.000Z"})
    assert query.matches({}, SimpleNamespace(**own, time=datetime(2026, 11, 15, 8, 0, 1, tzinfo=UTC)))
    assert not query.matches({}, {**own, "time": "2026-11-15T07:59:59.999Z"})
    assert not query.matches({})


def test_a_header_may_have_dots_in_its_name_and_values_need_be_no_json() -> None:
    record = Record("t", 0, 0, 0, None, {"x-trace.id": "7", "raw": b"7"})
    assert compile_query({"$headers.x-trace.id": "7"}).matches({}, record)
    assert not compile_query({"$headers.raw": ["7"]}).matches({}, record)


def test_halves_of_a_letter_are_the_letter() -> None:
    assert compile_query({"a": "\ud83d\ude00"}) == compile_query({"a": "😀"})


def test_a_field_of_the_value_is_not_one_of_the_record() -> None:
    assert not compile_query({"$topic": "orders"}).matches({"$topic": "orders", "topic": "orders"})


OVER: list[tuple[str, Json, QueryLimits]] = [
    ("nested too deeply", {"a": [[[1]]]}, QueryLimits(depth=3)),
    ("nested too deeply", {"$and": [{"$and": [{"a": 1}]}]}, QueryLimits(depth=4)),
    ("too many operators and paths", {"a": 1, "b": 1, "c": {"$gt": 1, "$lt": 2}}, QueryLimits(nodes=4)),
    ("$in at 'a'", {"a": {"$in": [1, 2, 3]}}, QueryLimits(in_members=2)),
    ("$nin at 'a'", {"a": {"$nin": [1, 2, 3]}}, QueryLimits(in_members=2)),
    ("$all at 'a'", {"a": {"$all": [1, 2, 3]}}, QueryLimits(in_members=2)),
    ("$regex at 'b'", {"a": {"$regex": "x"}, "b": {"$regex": "y"}}, QueryLimits(regexes=1)),
    ("$regex at 'a'", {"a": {"$regex": "xxxx"}}, QueryLimits(regex_length=3)),
    ("$regex at 'a'", {"a": {"$regex": "[ab]{900}"}}, QueryLimits(regex_size=500)),
    ("bytes", {"a": "x" * 100}, QueryLimits(bytes=50)),
    ("201 steps", {".".join(["a"] * 201): 1}, QueryLimits()),
    ("201 steps", {"$expr": "$" + ".".join(["a"] * 201)}, QueryLimits()),
]


@pytest.mark.parametrize(("says", "query", "limits"), OVER)
def test_what_is_over_a_limit_is_refused_and_the_message_says_which(
    says: str, query: Json, limits: QueryLimits
) -> None:
    with pytest.raises(QueryError, match=says.replace("$", r"\$")):
        compile_query(query, limits)


def test_a_query_nested_without_end_is_refused() -> None:
    query: Json = {}
    query["$and"] = [query]
    with pytest.raises(QueryError, match="nested too deeply"):
        compile_query(query)


def test_values_that_are_no_json_are_refused() -> None:
    for query in ({"a": object()}, {"a": {1, 2}}, {1: 2}, {"a": {2: 3}}, {"a": b"x"}, {"a": 10**5000}):
        with pytest.raises(QueryError):
            compile_query(query)


def test_an_error_names_operator_and_path_even_inside_an_element() -> None:
    with pytest.raises(QueryError) as refused:
        compile_query({"orders": {"$elemMatch": {"items.price": {"$gtt": 1}}}})
    assert refused.value.operator == "$gtt"
    assert refused.value.path == "orders.items.price"
    assert "did you mean $gt?" in str(refused.value)


def test_nothing_a_user_wrote_is_printed_or_shown_by_repr(capfd: pytest.CaptureFixture[str]) -> None:
    secret = "s3cret"
    for pattern in (f"({secret}", f"(?={secret})", f"{secret}{{1001}}", f"[{secret}-a]"):
        with pytest.raises(QueryError):
            compile_query({"a": {"$regex": pattern}})
    query = compile_query({"a": {"$regex": f"[ab]*a[ab]{{40}}{secret}"}})
    assert not query.matches({"a": "ab" * 50_000})
    assert secret not in repr(query)
    assert capfd.readouterr() == ("", "")


def test_an_explanation_has_the_parts_as_they_were_written() -> None:
    query = compile_query({"type": "paid", "total": {"$gt": 5, "$lt": 9}, "$or": [{"a.b": "x"}, {"$topic": "t"}]})
    found = query.explain({"type": "paid", "total": 12, "a": [{"b": "y"}, {"b": ["x"]}]})
    assert not found.matched
    paid, total, either = found.parts
    assert (paid.part, paid.matched, paid.found) == ({"type": "paid"}, True, ["paid"])
    assert [(part.part, part.matched) for part in total.parts] == [
        ({"total": {"$gt": 5}}, True),
        ({"total": {"$lt": 9}}, False),
    ]
    assert either.matched
    assert [part.matched for part in either.parts] == [True, False]
    assert either.parts[0].found == ["y", ["x"]]
    assert either.parts[1].found == []


def test_an_explanation_keeps_a_pattern_and_its_options_together() -> None:
    query = compile_query({"a": {"$regex": "x", "$options": "i", "$ne": "X"}})
    assert [part.part for part in query.explain({"a": "X"}).parts] == [
        {"a": {"$regex": "x", "$options": "i"}},
        {"a": {"$ne": "X"}},
    ]

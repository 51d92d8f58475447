"""The query language against tables of cases: our own, and those gathered from other projects where they are at hand.

A line of ``cases/*.jsonl`` says a rule, a query, some documents and the positions of those that match; ``mongo9``
gives the positions where the rule of MongoDB 9 for null differs. A line of ``cases/invalid.jsonl`` is a query that
may not compile, with texts that the message must name. Numbers that JSON has no words for are in this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tailrace.errors import QueryError
from tailrace.query import Query, Record, compile_query

Case: TypeAlias = dict[str, Any]

HERE = Path(__file__).parent / "cases"
GATHERED = Path(__file__).parents[3] / "shared" / "cases"
NAN, INFINITY = float("nan"), float("inf")

QUERY_OPERATORS = {
    *("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$nin", "$all", "$exists", "$type", "$regex", "$options"),
    *("$and", "$or", "$nor", "$not", "$comment", "$expr", "$mod", "$size", "$elemMatch"),
    *("$bitsAllSet", "$bitsAllClear", "$bitsAnySet", "$bitsAnyClear"),
}
METADATA = {"$topic", "$key", "$headers", "$time", "$partition", "$offset"}
EXPRESSION_OPERATORS = {
    *("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$cmp", "$and", "$or", "$not", "$literal", "$abs", "$add", "$ceil"),
    *("$divide", "$exp", "$floor", "$ln", "$log", "$log10", "$mod", "$multiply", "$pow", "$round", "$sqrt"),
    *("$subtract", "$trunc"),
}


def lines(path: Path) -> list[Case]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def gathered(name: str) -> list[Any]:
    """The gathered cases of a file, or one item that says why there are none."""
    path = GATHERED / name
    if not path.exists():
        return [pytest.param({}, marks=pytest.mark.skip(reason=f"no gathered cases beside the repository: {name}"))]
    return [pytest.param(row, id=f"{number}: {json.dumps(row['query'])}") for number, row in enumerate(lines(path), 1)]


MATCHES = [row for path in sorted(HERE.glob("*.jsonl")) if path.name != "invalid.jsonl" for row in lines(path)]
REFUSALS = lines(HERE / "invalid.jsonl")


def record_of(row: Case) -> Record | None:
    return Record(**row["record"]) if "record" in row else None


def matching(query: Query, docs: list[Any], record: Record | None = None) -> list[int]:
    return [position for position, doc in enumerate(docs) if query.matches(doc, record)]


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*(keys_of(member) for member in value.values()))
    return set().union(*(keys_of(member) for member in value)) if isinstance(value, list) else set()


def names_null(value: Any) -> bool:
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(names_null(member) for member in members)


@pytest.mark.parametrize("row", MATCHES, ids=lambda row: row["says"])
def test_a_query_matches_the_documents_that_the_rule_says(row: Case) -> None:
    query = compile_query(row["query"])
    assert matching(query, row["docs"], record_of(row)) == row["expected"]
    nine = compile_query(row["query"], mongo=9)
    assert matching(nine, row["docs"], record_of(row)) == row.get("mongo9", row["expected"]), "by the rule of 9"


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row["says"])
def test_a_query_is_refused_with_a_message_that_names_the_place(row: Case) -> None:
    with pytest.raises(QueryError) as refusal:
        compile_query(row["query"])
    assert [name for name in row["names"] if name not in str(refusal.value)] == []
    with pytest.raises(QueryError):
        compile_query(row["query"], mongo=9)


@pytest.mark.parametrize("row", gathered("mongo_match.jsonl"))
def test_a_gathered_query_matches_its_documents(row: Case) -> None:
    assert matching(compile_query(row["query"]), row["docs"]) == row["expected"]
    nine = matching(compile_query(row["query"], mongo=9), row["docs"])
    if row.get("mongo9_differs"):
        assert nine != row["expected"]
    elif not names_null(row["query"]):
        assert nine == row["expected"], "the rule of 9 is about null only"


@pytest.mark.parametrize("row", gathered("mongo_invalid.jsonl"))
def test_a_gathered_query_that_is_wrong_is_refused(row: Case) -> None:
    with pytest.raises(QueryError):
        compile_query(row["query"])


@pytest.mark.parametrize("operator", sorted(QUERY_OPERATORS))
def test_every_operator_has_cases_that_match_and_cases_that_do_not(operator: str) -> None:
    rows = [row for row in MATCHES if operator in keys_of(row["query"])]
    assert any(row["expected"] for row in rows)
    assert operator == "$comment" or any(len(row["expected"]) < len(row["docs"]) for row in rows)


@pytest.mark.parametrize("name", sorted(METADATA))
def test_every_kind_of_metadata_has_cases(name: str) -> None:
    assert any(key.split(".")[0] == name for row in MATCHES for key in keys_of(row["query"]))


@pytest.mark.parametrize("operator", sorted(EXPRESSION_OPERATORS))
def test_every_operator_of_expressions_has_cases(operator: str) -> None:
    assert any(operator in keys_of(row["query"]["$expr"]) for row in MATCHES if "$expr" in row["query"])


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"a": NAN}, [0, 5]),
        ({"a": {"$ne": NAN}}, [1, 2, 3, 4, 6, 7]),
        ({"a": {"$in": [NAN, "x"]}}, [0, 5, 7]),
        ({"a": {"$nin": [NAN]}}, [1, 2, 3, 4, 6, 7]),
        ({"a": {"$all": [NAN]}}, [0, 5]),
        ({"a": {"$gte": NAN}}, [0, 5]),
        ({"a": {"$lte": NAN}}, [0, 5]),
        ({"a": {"$gt": NAN}}, []),
        ({"a": {"$lt": NAN}}, []),
        ({"a": {"$gt": -INFINITY}}, [1, 2, 5]),
        ({"a": {"$lt": INFINITY}}, [2, 3, 5]),
        ({"a": {"$gte": INFINITY}}, [1]),
        ({"a": {"$lte": -INFINITY}}, [3]),
        ({"a": INFINITY}, [1]),
        ({"a": {"b": NAN}}, [6]),
        ({"a": {"$type": "double"}}, [0, 1, 3, 5]),
        ({"a": {"$mod": [1, 0]}}, [2, 5]),
        ({"a": {"$bitsAllSet": 0}}, [2, 5]),
        ({"$expr": {"$eq": ["$a", NAN]}}, [0]),
        ({"$expr": {"$lt": ["$a", NAN]}}, [4]),
        ({"$expr": {"$gt": ["$a", NAN]}}, [1, 2, 3, 5, 6, 7]),
        ({"$expr": "$a"}, [0, 1, 2, 3, 5, 6, 7]),
    ],
)
def test_what_is_no_number_equals_itself_and_has_no_order(query: Case, expected: list[int]) -> None:
    values: list[Any] = [NAN, INFINITY, 5, -INFINITY, None, [NAN, 7], {"b": NAN}, "x"]
    docs = [{} if value is None else {"a": value} for value in values]
    assert matching(compile_query(query), docs) == expected


@pytest.mark.parametrize("operand", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("operator", ["$size", "$type", "$bitsAllSet", "$bitsAllClear", "$bitsAnySet", "$bitsAnyClear"])
def test_an_operator_that_wants_an_integer_refuses_what_is_no_number(operator: str, operand: float) -> None:
    with pytest.raises(QueryError, match="price"):
        compile_query({"price": {operator: operand}})


@pytest.mark.parametrize("operand", [[NAN, 0], [INFINITY, 0], [2, NAN], [2, -INFINITY]])
def test_a_remainder_is_asked_of_finite_numbers(operand: list[float]) -> None:
    with pytest.raises(QueryError, match=r"\$mod"):
        compile_query({"price": {"$mod": operand}})

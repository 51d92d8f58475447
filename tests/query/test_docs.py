"""The reference of the query language says what is so: its examples are run.

A block of kind ``query`` has queries, each with events for which it holds (``yes``) and does not (``no``). What a table
has is told by its first line; what stands in backticks in it is run. Blocks of Python are doctests.
"""

from __future__ import annotations

import doctest
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.errors import QueryError
from tailrace.query import QueryLimits, Record, compile_query
from tests.query.test_cases import EXPRESSION_OPERATORS, METADATA, QUERY_OPERATORS

PAGE = (Path(__file__).parents[2] / "docs" / "query.md").read_text(encoding="utf-8")
HOLDS = {"yes": True, "no": False}

Json = dict[str, Any]
Row = list[str]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def tables(first: str) -> list[list[Row]]:
    """The rows of all tables with this first line, cell by cell."""
    found = re.findall(rf"^{re.escape(first)}\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [[[cell.strip() for cell in line.split("|")[1:-1]] for line in rows.splitlines()] for rows in found]


def table(first: str) -> list[Row]:
    [rows] = tables(first)
    return rows


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def values(cell: str) -> list[Any]:
    return [json.loads(text) for text in code(cell)]


def examples() -> Iterator[tuple[Json, list[Any], list[Any]]]:
    for block in blocks("query"):
        for example in block.strip().split("\n\n"):
            lines = dict(line.split(maxsplit=1) for line in example.splitlines())
            assert lines.keys() <= {"query", "yes", "no"}
            yes, no = (json.loads(f"[{lines.get(answer, '')}]") for answer in HOLDS)
            yield json.loads(lines["query"]), yes, no


@pytest.mark.parametrize(("query", "yes", "no"), list(examples()))
def test_an_example_holds_for_the_events_that_it_names(query: Json, yes: list[Any], no: list[Any]) -> None:
    compiled = compile_query(query)
    assert yes or no
    assert [event for event in yes if not compiled.matches(event)] == []
    assert [event for event in no if compiled.matches(event)] == []


def test_queries_hold_for_the_event_and_for_the_record_as_told() -> None:
    event, record = map(json.loads, blocks("json"))
    of_event, of_record = tables("| query | holds | |")
    for cell, holds, _ in of_event:
        [query] = values(cell)
        assert compile_query(query).matches(event) is HOLDS[holds], query
    for cell, holds, _ in of_record:
        [query] = values(cell)
        assert compile_query(query).matches({}, msgspec.convert(record, Record)) is HOLDS[holds], query


@pytest.mark.parametrize(("query", "event", "eight", "nine"), table("| query | event | 8 | 9 |"))
def test_null_means_in_both_versions_what_is_told(query: str, event: str, eight: str, nine: str) -> None:
    [asked], [of] = values(query), values(event)
    assert compile_query(asked, mongo=8).matches(of) is HOLDS[eight]
    assert compile_query(asked, mongo=9).matches(of) is HOLDS[nine]


def test_all_operators_and_fields_of_the_record_are_told() -> None:
    documented = {
        name
        for row in table("| operator | an element satisfies it if it | missing, null | arrays |")
        for name in code(row[0])
    }
    assert documented | {"$options"} == QUERY_OPERATORS
    assert {name for row in table("| | |") for name in code(row[1])} == EXPRESSION_OPERATORS
    assert {name for row in table("| field | |") for name in code(row[0])} == METADATA


@pytest.mark.parametrize("pattern", [each for row in table("| pattern | | instead |") for each in code(row[0])])
def test_a_pattern_is_refused_as_told(pattern: str) -> None:
    with pytest.raises(QueryError, match="RE2"):
        compile_query({"a": {"$regex": pattern}})


@pytest.mark.parametrize("row", table("| pattern | options | text | PCRE | here | |"))
def test_a_pattern_means_what_is_told(row: Row) -> None:
    [pattern], [text] = code(row[0]), values(row[2])
    query = compile_query({"a": {"$regex": pattern, "$options": "".join(code(row[1]))}})
    assert query.matches({"a": text}) is HOLDS[row[4]]
    assert row[3] != row[4]


@pytest.mark.parametrize(("query", "message"), table("| query | message |"))
def test_a_query_is_refused_with_the_message_that_is_told(query: str, message: str) -> None:
    [refused] = values(query)
    with pytest.raises(QueryError) as refusal:
        compile_query(refused)
    assert [str(refusal.value)] == code(message)


def test_all_limits_are_told() -> None:
    documented = {code(row[0])[0]: int(row[1].replace(",", "")) for row in table("| limit | default | of | why |")}
    assert documented == msgspec.to_builtins(QueryLimits())


@pytest.mark.parametrize(("written", "canonical"), table("| query | canonical |"))
def test_a_query_has_the_canonical_form_that_is_told(written: str, canonical: str) -> None:
    [form] = values(canonical)
    assert [compile_query(query).canonical for query in values(written)] == [form] * len(values(written))
    assert compile_query(form).canonical == form


@pytest.mark.parametrize(("query", "other", "event"), table("| query | and | differ for |"))
def test_queries_are_not_taken_for_equal_where_an_event_tells_them_apart(query: str, other: str, event: str) -> None:
    [one], [another], [of] = values(query), values(other), values(event)
    assert compile_query(one).digest != compile_query(another).digest
    assert compile_query(one).matches(of) is not compile_query(another).matches(of)


def test_the_session_in_python_goes_as_told() -> None:
    [session] = blocks("python")
    run = doctest.DocTestRunner(verbose=False)
    report: list[str] = []
    run.run(doctest.DocTestParser().get_doctest(session, {}, "query.md", None, 0), out=report.append)
    assert not report, "".join(report)
    assert run.tries > 15

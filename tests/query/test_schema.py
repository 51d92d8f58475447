"""The JSON Schema says what the compiler does, as far as a schema can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tailrace.errors import QueryError
from tailrace.query import compile_query
from tailrace.query.expression import ANY_NUMBER, OPERATORS
from tailrace.query.parse import _OPERATORS, RECORD_FIELDS
from tailrace.query.predicate import TYPES

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).parent / "cases"
SCHEMA: dict[str, Any] = json.loads((ROOT / "docs" / "query.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def cases(invalid: bool) -> list[Any]:
    files = [path for path in sorted(CASES.glob("*.jsonl")) if (path.stem == "invalid") is invalid]
    return [json.loads(line)["query"] for path in files for line in path.read_text().splitlines() if line.strip()]


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_the_schema_names_what_the_compiler_takes() -> None:
    found = SCHEMA["$defs"]
    assert set(found["operators"]["properties"]) == {*_OPERATORS, "$regex", "$options"}
    assert found["operators"]["properties"]["$type"]["anyOf"][0]["enum"] == [*TYPES, "number", *sorted(TYPES.values())]
    top = {"$and", "$or", "$nor", "$comment"}
    assert set(found["query"]["properties"]) == {*top, "$expr", *RECORD_FIELDS}
    assert set(found["element"]["properties"]) == top


def test_the_schema_counts_the_operands_of_expressions_as_the_compiler_does() -> None:
    found = dict(SCHEMA["$defs"]["operation"]["properties"])
    assert found.pop("$literal")
    assert found.keys() == OPERATORS.keys()
    for name, (least, most, _) in OPERATORS.items():
        several = found[name]["anyOf"][0] if "anyOf" in found[name] else found[name]
        assert ("anyOf" in found[name]) == (least <= 1), "one operand may stand without a list"
        assert (several["minItems"], several.get("maxItems", ANY_NUMBER)) == (least, most)


def test_every_query_of_the_cases_is_valid() -> None:
    refused = [query for query in cases(invalid=False) if not VALIDATOR.is_valid(query) and not _mixed(query)]
    assert refused == []


def test_most_of_what_the_compiler_refuses_is_not_valid() -> None:
    queries = cases(invalid=True)
    refused = [query for query in queries if not VALIDATOR.is_valid(query)]
    assert len(refused) > len(queries) * 0.85


@pytest.mark.parametrize(
    "query",
    [
        {"a": {"$gtt": 1}},
        {"$gt": 1},
        {"$and": []},
        {"a": {"$options": "i"}},
        {"a": {"$type": "strng"}},
        {"a": {"$elemMatch": {"$expr": 1}}},
        {"$expr": {"$function": {}}},
        {"$where": "1"},
    ],
)
def test_what_an_editor_should_underline_is_not_valid(query: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(query)
    with pytest.raises(QueryError):
        compile_query(query)


def _mixed(value: Any) -> bool:
    """Return True if a document has names with a dollar that MongoDB takes for data."""
    if isinstance(value, list):
        return any(map(_mixed, value))
    if not isinstance(value, dict):
        return False
    dollars = [name.startswith("$") for name in value]
    return "$unit" in value or (any(dollars) and not all(dollars)) or any(map(_mixed, value.values()))

"""The query language as a JSON Schema for editors, with a line on each operator.

The schema accepts every query that compiles, with one exception: it takes each name with a dollar for an operator, even
where MongoDB would take the document for a value. It cannot express every refusal: regular expressions that RE2 does
not support, invalid times, expressions that always fail, and limits.

``python -m tailrace.query.schema`` prints it.
"""

from __future__ import annotations

import json
from typing import Any

from tailrace.query.expression import ANY_NUMBER
from tailrace.query.expression import OPERATORS as EXPRESSIONS
from tailrace.query.parse import RECORD_FIELDS
from tailrace.query.predicate import TYPES

Schema = dict[str, Any]

_VALUE: Schema = {"$ref": "#/$defs/value"}
_VALUES: Schema = {"type": "array", "items": {"$ref": "#/$defs/literal"}}
_QUERIES: Schema = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/query"}}
_INNER: Schema = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/element"}}
_BITS: Schema = {
    "oneOf": [
        {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**63},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31}},
    ]
}
_TWO: Schema = {"minItems": 2, "maxItems": 2}
_TYPE: Schema = {"enum": [*TYPES, "number", *sorted(TYPES.values())]}

_OPERATORS: dict[str, tuple[str, Schema]] = {
    "$eq": ("Equal to the value, or an array that contains it; null also matches a missing field.", _VALUE),
    "$ne": ("Not equal to the value, and no array that contains it.", _VALUE),
    "$gt": ("Greater than a value of the same kind.", _VALUE),
    "$gte": ("Greater than or equal to a value of the same kind.", _VALUE),
    "$lt": ("Less than a value of the same kind.", _VALUE),
    "$lte": ("Less than or equal to a value of the same kind.", _VALUE),
    "$in": ("Equal to one of the values.", _VALUES),
    "$nin": ("Equal to none of the values.", _VALUES),
    "$all": (
        "An array that contains all of the values, or an element for each $elemMatch.",
        {
            "oneOf": [
                _VALUES,
                {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/elementMatch"}},
            ]
        },
    ),
    "$not": ("The operators do not match; a missing field included.", {"$ref": "#/$defs/operators"}),
    "$exists": ("Whether the field is present, null included.", {"examples": [True, False]}),
    "$type": (
        "A value of one of these BSON types.",
        {"anyOf": [_TYPE, {"type": "array", "minItems": 1, "items": _TYPE}]},
    ),
    "$regex": ("A string that contains a match of the regular expression (RE2).", {"type": "string"}),
    "$options": (
        "For $regex: i ignores case, m matches by line, s lets a dot match line breaks, x ignores blanks.",
        {"type": "string", "pattern": "^[imsux]*$"},
    ),
    "$mod": (
        "A number that leaves the remainder when divided: [divisor, remainder].",
        {"type": "array", "items": {"type": "number", "minimum": -(2**63), "exclusiveMaximum": 2**63}, **_TWO},
    ),
    "$size": ("An array of this length.", {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31}),
    "$elemMatch": (
        "An array with an element that matches all of it.",
        {"anyOf": [{"$ref": "#/$defs/element"}, {"$ref": "#/$defs/operators"}]},
    ),
    "$bitsAllSet": ("A whole number in which all of these bits are set.", _BITS),
    "$bitsAnySet": ("A whole number in which any of these bits is set.", _BITS),
    "$bitsAllClear": ("A whole number in which all of these bits are clear.", _BITS),
    "$bitsAnyClear": ("A whole number in which any of these bits is clear.", _BITS),
}

_RECORD = {
    "$topic": "The record's topic.",
    "$key": "The elements of the record's key.",
    "$headers": "The record's headers, by name.",
    "$time": "The record's time: milliseconds, or text such as 2026-11-15T08:00:00Z.",
    "$partition": "The record's partition.",
    "$offset": "The record's offset.",
}


def json_schema() -> Schema:
    """Return the schema of a query."""
    condition: Schema = {"$ref": "#/$defs/condition"}
    comment: Schema = {"description": "Ignored."}
    logic = {
        "$and": "All of the queries match.",
        "$or": "At least one of the queries matches.",
        "$nor": "None of the queries matches.",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A query of Tailrace",
        "description": "MongoDB's query language over JSON events.",
        "$ref": "#/$defs/query",
        "$defs": {
            "query": {
                "type": "object",
                "properties": {
                    **{name: {"description": text, **_QUERIES} for name, text in logic.items()},
                    "$expr": {"description": "A condition on the whole event.", "$ref": "#/$defs/expression"},
                    "$comment": comment,
                    **{name: {"description": _RECORD[name], **condition} for name in RECORD_FIELDS},
                },
                "patternProperties": {"^\\$(key|headers)\\.": condition, "^(?!\\$)": condition},
                "additionalProperties": False,
            },
            "element": {
                "type": "object",
                "properties": {
                    **{name: {"description": text, **_INNER} for name, text in logic.items()},
                    "$comment": comment,
                },
                "patternProperties": {"^(?!\\$)": condition},
                "additionalProperties": False,
            },
            "condition": {"anyOf": [{"$ref": "#/$defs/operators"}, {"$ref": "#/$defs/literal"}]},
            "operators": {
                "type": "object",
                "properties": {name: {"description": text, **schema} for name, (text, schema) in _OPERATORS.items()},
                "dependentRequired": {"$options": ["$regex"]},
                "additionalProperties": False,
                "minProperties": 1,
            },
            "elementMatch": {
                "type": "object",
                "properties": {"$elemMatch": _OPERATORS["$elemMatch"][1]},
                "required": ["$elemMatch"],
                "additionalProperties": False,
            },
            "literal": {
                "if": {"type": "object"},
                "then": {"propertyNames": {"pattern": "^(?!\\$)"}},
            },
            "value": {"description": "Any value."},
            "expression": {
                "anyOf": [
                    {"type": ["number", "boolean", "null"]},
                    {"type": "string", "pattern": "^([^$]|$|\\$[^$.]|\\$\\$(ROOT|CURRENT)(\\.|$)|\\$\\$REMOVE$)"},
                    {"type": "array", "items": {"$ref": "#/$defs/expression"}},
                    {"$ref": "#/$defs/operation"},
                    {
                        "type": "object",
                        "propertyNames": {"pattern": "^[^$.][^.]*$"},
                        "additionalProperties": {"$ref": "#/$defs/expression"},
                    },
                ]
            },
            "operation": {
                "type": "object",
                "properties": {
                    "$literal": {"description": "The value itself, not evaluated."},
                    **{name: _operands(least, most) for name, (least, most, _) in EXPRESSIONS.items()},
                },
                "additionalProperties": False,
                "minProperties": 1,
                "maxProperties": 1,
            },
        },
    }


def _operands(least: int, most: int) -> Schema:
    expression: Schema = {"$ref": "#/$defs/expression"}
    several: Schema = {"type": "array", "items": expression, "minItems": least}
    if most < ANY_NUMBER:
        several["maxItems"] = most
    return several if least > 1 else {"anyOf": [several, {"not": {"type": "array"}, **expression}]}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))

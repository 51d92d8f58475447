"""The query language: MongoDB's over JSON values, with ``$topic``, ``$key`` and the like for a record's metadata.

``compile_query`` checks a query and returns a ``Query``, whose ``matches`` tests one document after another.

    value       JSON values: order, equality and paths of decoded ones, fields and canonical form of encoded ones
    predicate   the test that an operator makes of one element; regular expressions
    tree        and, or, not; the canonical form; what a document needs to match
    expression  ``$expr``
    parse       from JSON to a compiled query; all refusals and limits
    filters     many queries for one document, and one query for many encoded values
"""

from tailrace.api.answers import Explanation
from tailrace.query.filters import FilterSet, ValueFilter, prefilter
from tailrace.query.parse import Query, QueryLimits, compile_query
from tailrace.query.predicate import compile_regex
from tailrace.query.value import Record

__all__ = [
    "Explanation",
    "FilterSet",
    "Query",
    "QueryLimits",
    "Record",
    "ValueFilter",
    "compile_query",
    "compile_regex",
    "prefilter",
]

"""The query language: MongoDB's over JSON values, with ``$topic``, ``$key`` and the like for a record's metadata.

``compile_query`` checks a query and returns a ``Query``, whose ``matches`` tests one document after another.

    value         JSON values: order and equality of decoded ones, fields and canonical form of encoded ones
    path          the elements that a dotted path finds in a document
    predicate     the test that an operator makes of one element; regular expressions
    tree          and, or, not; the canonical form
    expression    ``$expr``
    parse         from JSON to a tree; all refusals and limits
    filters       compiled queries: one, many at once, and on encoded values
    filter_index  the index behind ``FilterSet``
"""

from tailrace.api.answers import Explanation
from tailrace.query.filters import FilterSet, Query, ValueFilter, compile_query, prefilter
from tailrace.query.parse import QueryLimits
from tailrace.query.path import Record
from tailrace.query.predicate import compile_regex

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

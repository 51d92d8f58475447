"""The query language: MongoDB's, exactly, over JSON values.

``compile_query`` refuses what cannot be asked, and returns a ``Query`` that is asked of one document after another.

    order       values: kinds, equality, order
    path        what a dotted path finds in a document
    regex       regular expressions, and the text that each of their matches contains
    predicate   what an operator asks of one element
    tree        and, or, not; the canonical form
    expression  ``$expr``, with arithmetic
    parse       from JSON to a tree; all refusals
    limits      how large a query may be
    record      what lies beside the value
    query       the compiled query
    explain     which part of a query matched
    schema      the language as a JSON Schema
"""

from tailrace.query.parse import QueryLimits
from tailrace.query.path import Record
from tailrace.query.query import Explanation, Query, compile_query

__all__ = ["Explanation", "Query", "QueryLimits", "Record", "compile_query"]

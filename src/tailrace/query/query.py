"""Compiled queries. A query never changes and equals every other query with the same canonical form.

``Query.explain`` shows which parts of a query matched a document. It shows the parts as the author wrote them, not in
canonical form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

from tailrace.api.answers import Explanation
from tailrace.errors import QueryError
from tailrace.query.expression import Expr
from tailrace.query.order import MISSING
from tailrace.query.parse import UNLIMITED, Parser, QueryLimits, check_size
from tailrace.query.path import Check, Path, Record, record_fields
from tailrace.query.tree import Leaf, Node, canonical_query, has_operators, nodes

DEFAULT_LIMITS = QueryLimits()

_NOTHING: dict[str, Any] = {}


class Query:
    """A compiled query. Immutable; hashed and compared by its canonical form."""

    __slots__ = ("_check", "asks_record", "mongo", "source", "tree")

    def __init__(self, source: dict[str, Any], tree: Node, mongo: int) -> None:
        self.source, self.tree, self.mongo = source, tree, mongo
        self._check: Check | None = None  # made by the first ``matches``; a filter set makes its own
        self.asks_record = any(
            isinstance(node, Leaf) and node.path is not None and node.path.of_record for node in nodes(tree)
        )
        """True if the query tests the record's metadata."""

    def matches(self, document: Any, record: Record | Any = None) -> bool:
        """Return whether a document matches; a value that is no object has no fields, None no metadata."""
        if document.__class__ is not dict:
            document = dict(document) if isinstance(document, dict) else {}
        check = self._check
        if check is None:
            check = self._check = self.tree.check()
        return check(document, record_fields(record) if self.asks_record else _NOTHING)

    def explain(self, document: Any, record: Record | Any = None) -> Explanation:
        """Return which parts of the query, as written, match a document, and the elements at their paths."""

        def find(text: str) -> list[Any]:
            path = Path(text, self.mongo == 9)
            within = record_fields(record) if path.of_record else document
            found = path.elements(within, expand=False) if within.__class__ is dict else []
            return [value for value in found if value is not MISSING]

        def matches(part: dict[str, Any]) -> bool:
            return compile_query(part, UNLIMITED, self.mongo).matches(document, record)

        return explain(self.source, matches, find)

    @property
    def canonical(self) -> dict[str, Any]:
        """The canonical form: queries with equal forms match the same documents."""
        return canonical_query(self.tree)

    @property
    def digest(self) -> str:
        """Hash of the canonical form, which identifies the query."""
        return sha256(f"{self.mongo}{self.tree.key}".encode()).hexdigest()

    def fields(self) -> frozenset[str] | None:
        """Return the top-level fields of a document that the query reads; None if it reads them all."""
        found: set[str] = set()
        for node in nodes(self.tree):
            if isinstance(node, Expr):
                if node.fields is None:
                    return None
                found |= node.fields
            elif isinstance(node, Leaf) and node.path is not None and not node.path.of_record:
                found.add(node.path.steps[0])
        return frozenset(found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Query) and (self.mongo, self.tree.key) == (other.mongo, other.tree.key)

    def __hash__(self) -> int:
        return hash((self.mongo, self.tree.key))

    def __repr__(self) -> str:
        return f"Query({self.digest[:12]})"  # users' queries do not belong in a log

    def __reduce__(self) -> Any:
        return Query, (self.source, self.tree, self.mongo)


def compile_query(source: Any, limits: QueryLimits = DEFAULT_LIMITS, mongo: int = 8) -> Query:
    """Compile a query.

    Args:
        source: The query as decoded JSON; it is copied.
        limits: Limits of its size.
        mongo: The MongoDB version, 8 or 9, whose rule applies to null at the end of a path through an array.

    Raises:
        QueryError: The query is refused; the message names the operator and the path.
    """
    if mongo.__class__ is not int or mongo not in (8, 9):
        raise ValueError(f"mongo is 8 or 9, not {mongo!r}")
    plain = check_size(source, limits)
    try:
        return Query(plain, Parser(limits, nulls=mongo == 9).document(plain), mongo)
    except RecursionError:  # the caller is deep in the stack itself
        raise QueryError("the query is nested too deeply for what is left of the stack") from None


MAX_HITS = 10
"""Elements at a path that an explanation shows."""


def explain(
    source: dict[str, Any], matches: Callable[[dict[str, Any]], bool], find: Callable[[str], list[Any]]
) -> Explanation:
    """Explain a query: ``matches`` tests a part of it, ``find`` returns the elements at a path."""
    inner = [explain(part, matches, find) for part in _conditions(source)]
    path = next(iter(source)) if len(source) == 1 and not inner else "$and"
    found = find(path)[:MAX_HITS] if _is_path(path) else []
    return Explanation(source, matches(source), found, inner)


def _conditions(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the conditions of a part; none if it is a single condition."""
    if len(part) > 1:
        yield from ({name: operand} for name, operand in part.items() if name != "$comment")
        return
    for name, operand in part.items():
        if name in ("$and", "$or", "$nor"):
            yield from operand
        elif _is_path(name) and has_operators(operand) and len(operand.keys() - {"$options"}) > 1:
            for operator, value in operand.items():
                if operator == "$regex" and "$options" in operand:
                    yield {name: {operator: value, "$options": operand["$options"]}}
                elif operator != "$options":
                    yield {name: {operator: value}}
        elif _is_path(name) and has_operators(operand):
            [(operator, value), *_] = operand.items()
            if operator == "$not":
                yield {name: value}
            elif operator == "$all" and len(value) > 1:
                yield from ({name: {"$all": [member]}} for member in value)


def _is_path(name: str) -> bool:
    return name not in ("$and", "$or", "$nor", "$expr", "$comment")

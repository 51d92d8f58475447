"""A compiled query: asked of many documents, never changing, equal to every other of the same canonical form.

Which part of a query matched a document, and what was found where it did not.

A query is taken apart as it was written, not in its canonical form, so that its author knows the parts again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import msgspec

from tailrace.errors import QueryError
from tailrace.query.expression import Expr
from tailrace.query.order import MISSING
from tailrace.query.parse import UNLIMITED, Parser, QueryLimits, admitted
from tailrace.query.path import Check, Path, Record, fields_of
from tailrace.query.tree import Leaf, Node, has_operators, nodes, query

MOST_FOUND = 10
"""Elements that are shown of what a path found."""


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a query, and whether it held.

    ``found`` is what its path led to, at most so many elements; it is empty where nothing was there.
    """

    part: Any
    matched: bool
    found: list[Any] = []
    parts: list[Explanation] = []


def explained(
    source: dict[str, Any], ask: Callable[[dict[str, Any]], bool], find: Callable[[str], list[Any]]
) -> Explanation:
    """Explain a query: ``ask`` tells whether a part of it holds, ``find`` returns what a path leads to."""
    inner = [explained(part, ask, find) for part in _apart(source)]
    path = next(iter(source)) if len(source) == 1 and not inner else "$and"
    found = find(path)[:MOST_FOUND] if _is_path(path) else []
    return Explanation(source, ask(source), found, inner)


def _apart(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the conditions that a part is made of; none if it is one condition."""
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


DEFAULT_LIMITS = QueryLimits()

_NOTHING: dict[str, Any] = {}


class Query:
    """What ``compile_query`` returns. Immutable; hashed and compared by its canonical form."""

    __slots__ = ("_asks_record", "_check", "mongo", "source", "tree")

    def __init__(self, source: dict[str, Any], tree: Node, mongo: int) -> None:
        self.source, self.tree, self.mongo = source, tree, mongo
        self._check: Check | None = None  # made when it is first asked: in a set of many, another is
        self._asks_record = any(
            isinstance(node, Leaf) and node.path is not None and node.path.of_record for node in nodes(tree)
        )

    def matches(self, document: Any, record: Record | Any = None) -> bool:
        """Return whether a document passes. Fields of the record are missing where none is given.

        A value that is no JSON object has no fields.
        """
        if document.__class__ is not dict:
            document = dict(document) if isinstance(document, dict) else {}
        check = self._check
        if check is None:
            check = self._check = self.tree.check()
        return check(document, fields_of(record) if self._asks_record else _NOTHING)

    def explain(self, document: Any, record: Record | Any = None) -> Explanation:
        """Return which parts of it, as it was written, hold for a document, and what their paths found."""

        def find(text: str) -> list[Any]:
            path = Path(text, self.mongo == 9)
            within = fields_of(record) if path.of_record else document
            found = path.elements(within, expand=False) if within.__class__ is dict else []
            return [value for value in found if value is not MISSING]

        def ask(part: dict[str, Any]) -> bool:
            return compile_query(part, UNLIMITED, self.mongo).matches(document, record)

        return explained(self.source, ask, find)

    @property
    def canonical(self) -> dict[str, Any]:
        """A query that means the same, the same for all that are found to mean the same."""
        return query(self.tree)

    @property
    def digest(self) -> str:
        """The canonical form's hash, and so the query's identity."""
        return sha256(f"{self.mongo}{self.tree.key}".encode()).hexdigest()

    @property
    def asks_record(self) -> bool:
        """Whether it asks for more than the record's value."""
        return self._asks_record

    def fields(self) -> frozenset[str] | None:
        """Return the top-level fields of a document that it looks at; None if it needs them all."""
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
        return f"Query({self.digest[:12]})"  # what users search for is not for a log

    def __reduce__(self) -> Any:
        return Query, (self.source, self.tree, self.mongo)


def compile_query(source: Any, limits: QueryLimits = DEFAULT_LIMITS, mongo: int = 8) -> Query:
    """Compile a query.

    Args:
        source: the query as decoded JSON; it is copied.
        limits: how large it may be.
        mongo: whose rule holds for null at the end of a path through an array: MongoDB's until ``8``, or from ``9``.

    Raises:
        QueryError: the query is refused; the message names the operator and the path.
    """
    if mongo.__class__ is not int or mongo not in (8, 9):
        raise ValueError(f"mongo is 8 or 9, not {mongo!r}")
    plain = admitted(source, limits)
    try:
        return Query(plain, Parser(limits, nulls=mongo == 9).document(plain), mongo)
    except RecursionError:  # whoever calls is deep in the stack himself
        raise QueryError("the query is nested too deeply for what is left of the stack") from None

"""A compiled query: asked of many documents, never changing, equal to every other of the same canonical form."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from tailrace.errors import QueryError
from tailrace.query.explain import Explanation, explained
from tailrace.query.expression import Expr
from tailrace.query.limits import UNLIMITED, Limits, admitted
from tailrace.query.order import MISSING
from tailrace.query.parse import Parser
from tailrace.query.path import Check, Path
from tailrace.query.record import Record, fields_of
from tailrace.query.tree import Leaf, Node, nodes, query

DEFAULT_LIMITS = Limits()

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


def compile_query(source: Any, limits: Limits = DEFAULT_LIMITS, mongo: int = 8) -> Query:
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

"""Queries as trees: and, or, not, over tests of what a path finds.

Invariant: trees are made by the functions here and are in canonical form. Conjunctions and disjunctions are flat,
sorted and without repetition; what is always true or always false is said once; negations are not doubled; equalities
of one path that are alternatives are one ``$in``. Each node carries the canonical JSON of a query that means the same
(``key``), so that two trees mean the same if their keys are equal. MongoDB's logic has two values, so nothing is lost.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeAlias

import msgspec

from tailrace.query.order import kind
from tailrace.query.path import Check, One, Path
from tailrace.query.predicate import Equal, Exists, In, Ordered, Predicate

Sharing: TypeAlias = Callable[["Node"], Check]
"""Returns the function of a leaf, or of an ``$expr``, that several queries may have in common."""


class Node(msgspec.Struct, frozen=True):
    """Any part of a query."""

    key: str

    @property
    @abstractmethod
    def cost(self) -> int:
        """What testing it costs, roughly."""

    @abstractmethod
    def check(self, sharing: Sharing | None = None) -> Check:
        """Return the function that tests a document; ``sharing`` may make that of its leaves."""


class Several(Node, frozen=True):
    """Parts, of which the cheapest are tested first."""

    parts: tuple[Node, ...]

    @property
    def cost(self) -> int:
        return sum(part.cost for part in self.parts)

    def _checks(self, sharing: Sharing | None) -> list[Check]:
        return [part.check(sharing) for part in sorted(self.parts, key=lambda part: part.cost)]


class And(Several, frozen=True):
    """All of its parts; of none, everything."""

    def check(self, sharing: Sharing | None = None) -> Check:
        checks = self._checks(sharing)
        if len(checks) == 2:
            first, second = checks
            return lambda document, known: first(document, known) and second(document, known)

        def every(document: Any, known: dict[str, Any]) -> bool:
            for check in checks:  # noqa: SIM110
                if not check(document, known):
                    return False
            return True

        return every


class Or(Several, frozen=True):
    """Some of its parts; of none, nothing."""

    def check(self, sharing: Sharing | None = None) -> Check:
        checks = self._checks(sharing)

        def some(document: Any, known: dict[str, Any]) -> bool:
            for check in checks:  # noqa: SIM110
                if check(document, known):
                    return True
            return False

        return some


class Not(Node, frozen=True):
    """What its part is not."""

    part: Node

    @property
    def cost(self) -> int:
        return self.part.cost

    def check(self, sharing: Sharing | None = None) -> Check:
        check = self.part.check(sharing)
        return lambda document, known: not check(document, known)


class Leaf(Node, frozen=True):
    """A predicate on what a path finds; without a path, on the element itself."""

    path: Path | None
    predicate: Predicate

    @property
    def cost(self) -> int:
        return self.predicate.cost

    def check(self, sharing: Sharing | None = None) -> Check:
        if sharing is not None:
            return sharing(self)
        one = self.predicate.one()
        if self.path is None:
            return lambda element, known: one(element)
        return self.path.test(one, self.predicate.some(), self.predicate.expands)


_NOTHING: dict[str, Any] = {}


class Element(Predicate, frozen=True):
    """``$elemMatch``: an array with an element that passes.

    ``whole``: the tests are on the element itself; else on its members, and an array counts as a document that has its
    indices for names.
    """

    node: Node
    whole: bool
    expands: ClassVar[bool] = False
    cost: ClassVar[int] = 6

    def operators(self) -> dict[str, Any]:
        return {"$elemMatch": operators(self.node) if self.whole else query(self.node)}

    def one(self) -> One:
        check, whole = self.node.check(), self.whole

        def test(value: Any) -> bool:
            if value.__class__ is not list:
                return False
            for element in value:
                if not whole and element.__class__ is not dict:
                    if element.__class__ is not list:
                        continue
                    element = {str(index): item for index, item in enumerate(element)}
                if check(element, _NOTHING):
                    return True
            return False

        return test


encoded = json.JSONEncoder(separators=(",", ":")).encode
"""Returns JSON without blanks, the members of documents in their order."""


TRUE = And("{}", ())
FALSE = Or('{"$nor":[{}]}', ())


def leaf(path: Path | None, predicate: Predicate) -> Leaf:
    """Make the test of what a path finds."""
    found = encoded(predicate.operators())
    return Leaf(found if path is None else f"{{{encoded(path.text)}:{found}}}", path, predicate)


def equals(path: Path | None, values: Iterable[Any]) -> Node:
    """Make the test of an equality with one of the values; they are in canonical form."""
    known = {encoded(value): value for value in values}
    members = tuple(known[text] for text in sorted(known))
    if not members:
        return FALSE
    if len(members) == 1:
        return leaf(path, Equal(members[0]))
    return leaf(path, In(members, max(map(_depth, members))))


def conjunction(parts: Iterable[Node]) -> Node:
    """Make the node that holds if all of the parts do."""
    kept: dict[str, Node] = {}
    for part in parts:
        kept.update((inner.key, inner) for inner in (part.parts if isinstance(part, And) else (part,)))
    if FALSE.key in kept:
        return FALSE
    _bound(kept, tightest=True)
    # None of these values and none of those: none of all.
    excluded = [part.part for part in kept.values() if isinstance(part, Not) and _values(part.part) is not None]
    for one in _merged(excluded):
        for part in one.came:
            del kept[negation(part).key]
        joined = negation(one.joined)
        kept[joined.key] = joined
    found = tuple(kept[key] for key in sorted(kept))
    if len(found) == 1:
        return found[0]
    return And('{"$and":[' + ",".join(part.key for part in found) + "]}", found) if found else TRUE


def disjunction(parts: Iterable[Node]) -> Node:
    """Make the node that holds if some of the parts do."""
    kept: dict[str, Node] = {}
    for part in parts:
        kept.update((inner.key, inner) for inner in (part.parts if isinstance(part, Or) else (part,)))
    if TRUE.key in kept:
        return TRUE
    _bound(kept, tightest=False)
    for one in _merged([part for part in kept.values() if _values(part) is not None]):
        for part in one.came:
            del kept[part.key]
        kept[one.joined.key] = one.joined
    found = tuple(kept[key] for key in sorted(kept))
    if len(found) == 1:
        return found[0]
    return Or('{"$or":[' + ",".join(part.key for part in found) + "]}", found) if found else FALSE


def negation(part: Node) -> Node:
    """Make the node that holds if the part does not."""
    if isinstance(part, Not):
        return part.part
    if part.key == TRUE.key or part.key == FALSE.key:
        return FALSE if part.key == TRUE.key else TRUE
    if isinstance(part, Or):
        return Not('{"$nor":[' + ",".join(inner.key for inner in part.parts) + "]}", part)
    if isinstance(part, Leaf):
        found = encoded(_negated(part))
        return Not(found if part.path is None else f"{{{encoded(part.path.text)}:{found}}}", part)
    return Not('{"$nor":[' + part.key + "]}", part)


def nodes(node: Node) -> Iterator[Node]:
    """Yield a node and all that is below it, except what is inside ``$elemMatch``."""
    yield node
    for part in node.parts if isinstance(node, And | Or) else (node.part,) if isinstance(node, Not) else ():
        yield from nodes(part)


def _bound(parts: dict[str, Node], tightest: bool) -> None:
    """Leave one bound on a side of a path: what passes the tightest passes all, what passes the loosest, some."""
    sides: dict[tuple[Path | None, bool, int], list[tuple[Ordered, str]]] = {}
    for part in parts.values():
        if isinstance(part, Leaf) and isinstance(part.predicate, Ordered) and part.predicate.scalar:
            bound = part.predicate
            sides.setdefault((part.path, bound.below, kind(bound.value)), []).append((bound, part.key))
    for (_, below, _), bounds in sides.items():
        choose = min if below == tightest else max
        _, kept = choose(bounds, key=lambda each: (each[0].value, each[0].strict != each[0].below))
        for _, key in bounds:
            if key != kept:
                del parts[key]


class _Joined(msgspec.Struct):
    joined: Node
    came: list[Node]


def _merged(parts: list[Node]) -> Iterator[_Joined]:
    """Yield, for each path that has several equalities among these alternatives, the one that stands for them."""
    by_path: dict[Path | None, list[Node]] = {}
    for part in parts:
        assert isinstance(part, Leaf)
        by_path.setdefault(part.path, []).append(part)
    for path, alike in by_path.items():
        if len(alike) > 1:
            yield _Joined(equals(path, [value for part in alike for value in _values(part) or ()]), alike)


def _values(node: Node) -> tuple[Any, ...] | None:
    """The values of which an equality wants one; None for what is no equality, or none that ``$in`` could hold."""
    match node:
        case Leaf(predicate=Equal(value=value)) if not has_operators(value):
            return (value,)
        case Leaf(predicate=In(values=values)):
            return values
    return None


def has_operators(operand: Any) -> bool:
    """Whether a document holds operators: its first name tells, as in MongoDB."""
    return isinstance(operand, dict) and next(iter(operand), "").startswith("$")


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def query(node: Node) -> dict[str, Any]:
    """Return the canonical query of a node."""
    found: dict[str, Any] = json.loads(node.key)
    return found


def operators(node: Node) -> dict[str, Any]:
    """Return the canonical operator document of tests on an element itself."""
    if node.key == TRUE.key:
        return {"$nin": []}
    found: dict[str, Any] = {}
    origin: dict[str, Node] = {}
    left: list[Node] = []
    parts = list(node.parts) if isinstance(node, And) else [node]
    # Several equalities, or several elements, are what $all is for.
    for shape in (Equal, Element):
        alike = [part for part in parts if isinstance(part, Leaf) and isinstance(part.predicate, shape)]
        if len(alike) > 1 and "$all" not in found:
            found["$all"] = [_member(part.predicate) for part in alike]
            parts = [part for part in parts if part not in alike]
    for part in parts:
        own = _operators(part)
        if own.keys() & found.keys():
            left.append(part)
        else:
            found.update(own)
            origin.update(dict.fromkeys(own, part))
    if left:  # an operator twice: the rest goes where it may be named again
        if found.pop("$not", None) is not None:
            left.append(origin["$not"])
        found["$not"] = {"$not": operators(conjunction(left))}
    return found


def _member(predicate: Predicate) -> Any:
    return predicate.value if isinstance(predicate, Equal) else predicate.operators()


def _operators(part: Node) -> dict[str, Any]:
    if isinstance(part, Leaf):
        return part.predicate.operators()
    assert isinstance(part, Not)
    return _negated(part.part) if isinstance(part.part, Leaf) else {"$not": operators(part.part)}


def _negated(part: Leaf) -> dict[str, Any]:
    own = part.predicate.operators()
    match part.predicate:
        case Equal():
            return {"$ne": own["$eq"]}
        case In():
            return {"$nin": own["$in"]}
        case Exists():
            return {"$exists": False}
    return {"$not": own}

"""Queries as trees: and, or, not, over predicates on the elements that a path finds.

Invariant: trees are made by the functions here and are in canonical form. Conjunctions and disjunctions are flat,
sorted and without duplicates; constant parts are folded into TRUE or FALSE; there is no double negation; alternative
equalities of one path are one ``$in``. Each node has the canonical JSON of its query as its ``key``: trees with equal
keys match the same documents. MongoDB's logic has two values, so these rewritings change no result.

A *need* is a fact that a document must have for a tree to match, such as a value or a range at a path. Documents
without it need not be tested.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, ClassVar, TypeAlias

import msgspec

from tailrace.query.predicate import Equal, Exists, In, Ordered, Predicate, Regex, literal
from tailrace.query.value import KINDS, Check, ElementTest, Path, frozen, kind

CheckFactory: TypeAlias = Callable[["Node"], Check]
"""Returns the check of a leaf or an ``$expr``; several queries may share it."""


class Node(msgspec.Struct, frozen=True):
    key: str

    @property
    @abstractmethod
    def cost(self) -> int:
        """Rough cost of testing it."""

    @abstractmethod
    def check(self, sharing: CheckFactory | None = None) -> Check:
        """Return the function that tests a document; ``sharing``, if given, makes the checks of the leaves."""


class Compound(Node, frozen=True):
    """A node with parts; the cheapest are tested first."""

    parts: tuple[Node, ...]

    @property
    def cost(self) -> int:
        return sum(part.cost for part in self.parts)

    def _checks(self, sharing: CheckFactory | None) -> list[Check]:
        return [part.check(sharing) for part in sorted(self.parts, key=lambda part: part.cost)]


class And(Compound, frozen=True):
    """Matches if all parts do; without parts, always."""

    def check(self, sharing: CheckFactory | None = None) -> Check:
        checks = self._checks(sharing)
        if len(checks) == 2:
            first, second = checks
            return lambda document, context: first(document, context) and second(document, context)

        def every(document: Any, context: dict[str, Any]) -> bool:
            for check in checks:  # noqa: SIM110
                if not check(document, context):
                    return False
            return True

        return every


class Or(Compound, frozen=True):
    """Matches if any part does; without parts, never."""

    def check(self, sharing: CheckFactory | None = None) -> Check:
        checks = self._checks(sharing)

        def some(document: Any, context: dict[str, Any]) -> bool:
            for check in checks:  # noqa: SIM110
                if check(document, context):
                    return True
            return False

        return some


class Not(Node, frozen=True):
    """Matches if its part does not."""

    part: Node

    @property
    def cost(self) -> int:
        return self.part.cost

    def check(self, sharing: CheckFactory | None = None) -> Check:
        check = self.part.check(sharing)
        return lambda document, context: not check(document, context)


class Leaf(Node, frozen=True):
    """A predicate on the elements that a path finds; without a path, on the element itself."""

    path: Path | None
    predicate: Predicate

    @property
    def cost(self) -> int:
        return self.predicate.cost

    def check(self, sharing: CheckFactory | None = None) -> Check:
        if sharing is not None:
            return sharing(self)
        one = self.predicate.one()
        if self.path is None:
            return lambda element, context: one(element)
        return self.path.test(one, self.predicate.some(), self.predicate.expands)


_NOTHING: dict[str, Any] = {}


class Element(Predicate, frozen=True):
    """``$elemMatch``: an array with an element that matches.

    With ``whole``, the tests are on the element itself; else on its members, and an inner array counts as a document
    with its indices for names.
    """

    node: Node
    whole: bool
    expands: ClassVar[bool] = False
    cost: ClassVar[int] = 6

    def operators(self) -> dict[str, Any]:
        return {"$elemMatch": canonical_operators(self.node) if self.whole else canonical_query(self.node)}

    def one(self) -> ElementTest:
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
"""Returns compact JSON; members keep their order."""

TRUE = And("{}", ())
FALSE = Or('{"$nor":[{}]}', ())


def leaf(path: Path | None, predicate: Predicate) -> Leaf:
    return Leaf(_key(path, predicate.operators()), path, predicate)


def _key(path: Path | None, operators: dict[str, Any]) -> str:
    return encoded(operators) if path is None else f"{{{encoded(path.text)}:{encoded(operators)}}}"


def equals(path: Path | None, values: Iterable[Any]) -> Node:
    """Make the node that matches if an element equals one of the values, which are in canonical form."""
    distinct = {encoded(value): value for value in values}
    members = tuple(distinct[text] for text in sorted(distinct))
    if not members:
        return FALSE
    if len(members) == 1:
        return leaf(path, Equal(members[0]))
    return leaf(path, In(members, max(map(_depth, members))))


def conjunction(parts: Iterable[Node]) -> Node:
    by_key = _flat(parts, And)
    if FALSE.key in by_key:
        return FALSE
    _simplify_bounds(by_key, tightest=True)
    # "None of these" and "none of those" become one "none of all".
    excluded = [part.part for part in by_key.values() if isinstance(part, Not) and _values(part.part) is not None]
    for alike, merged in _merge_equalities(excluded):
        for part in alike:
            del by_key[negation(part).key]
        joined = negation(merged)
        by_key[joined.key] = joined
    return _compound(And, "$and", by_key) if by_key else TRUE


def disjunction(parts: Iterable[Node]) -> Node:
    by_key = _flat(parts, Or)
    if TRUE.key in by_key:
        return TRUE
    _simplify_bounds(by_key, tightest=False)
    for alike, merged in _merge_equalities([part for part in by_key.values() if _values(part) is not None]):
        for part in alike:
            del by_key[part.key]
        by_key[merged.key] = merged
    return _compound(Or, "$or", by_key) if by_key else FALSE


def _flat(parts: Iterable[Node], shape: type[Compound]) -> dict[str, Node]:
    """Return the parts by key, those of a part with the same shape instead of it."""
    found: dict[str, Node] = {}
    for part in parts:
        found.update((inner.key, inner) for inner in (part.parts if isinstance(part, shape) else (part,)))
    return found


def _compound(shape: type[Compound], operator: str, by_key: dict[str, Node]) -> Node:
    keys = sorted(by_key)
    parts = tuple(by_key[key] for key in keys)
    return parts[0] if len(parts) == 1 else shape(f'{{"{operator}":[{",".join(keys)}]}}', parts)


def negation(part: Node) -> Node:
    if isinstance(part, Not):
        return part.part
    if part.key == TRUE.key or part.key == FALSE.key:
        return FALSE if part.key == TRUE.key else TRUE
    if isinstance(part, Or):
        return Not('{"$nor":[' + ",".join(inner.key for inner in part.parts) + "]}", part)
    if isinstance(part, Leaf):
        return Not(_key(part.path, _negated(part)), part)
    return Not('{"$nor":[' + part.key + "]}", part)


def nodes(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it, except those inside ``$elemMatch``."""
    yield node
    for part in node.parts if isinstance(node, And | Or) else (node.part,) if isinstance(node, Not) else ():
        yield from nodes(part)


def _simplify_bounds(parts: dict[str, Node], tightest: bool) -> None:
    """Keep one upper and one lower bound of each path and kind: of a conjunction the tightest, else the loosest."""
    sides: dict[tuple[Path | None, bool, int], list[tuple[Ordered, str]]] = {}
    for part in parts.values():
        if isinstance(part, Leaf) and isinstance(part.predicate, Ordered) and part.predicate.scalar:
            bound = part.predicate
            sides.setdefault((part.path, bound.below, kind(bound.value)), []).append((bound, part.key))
    for (_, below, _), bounds in sides.items():
        choose = min if below == tightest else max
        _, chosen = choose(bounds, key=lambda each: (each[0].value, each[0].strict != each[0].below))
        for _, key in bounds:
            if key != chosen:
                del parts[key]


def _merge_equalities(parts: list[Node]) -> Iterator[tuple[list[Node], Node]]:
    """Yield, for each path that has several of these alternative equalities, the equalities and their union."""
    by_path: dict[Path | None, list[Node]] = {}
    for part in parts:
        assert isinstance(part, Leaf)
        by_path.setdefault(part.path, []).append(part)
    for path, alike in by_path.items():
        if len(alike) > 1:
            yield alike, equals(path, [value for part in alike for value in _values(part) or ()])


def _values(node: Node) -> tuple[Any, ...] | None:
    """Return the accepted values of an equality; None for other nodes, and for values that ``$in`` cannot hold."""
    match node:
        case Leaf(predicate=Equal(value=value)) if not has_operators(value):
            return (value,)
        case Leaf(predicate=In(values=values)):
            return values
    return None


def has_operators(operand: Any) -> bool:
    """Return whether a value is an operator document; as in MongoDB, its first name decides."""
    return isinstance(operand, dict) and next(iter(operand), "").startswith("$")


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def canonical_query(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node.key)
    return found


def canonical_operators(node: Node) -> dict[str, Any]:
    """Return the canonical operator document of tests on the element itself."""
    if node.key == TRUE.key:
        return {"$nin": []}
    found: dict[str, Any] = {}
    origin: dict[str, Node] = {}
    left: list[Node] = []
    parts = list(node.parts) if isinstance(node, And) else [node]
    # Several equalities, or several $elemMatch, are written as $all.
    for shape in (Equal, Element):
        alike = [part for part in parts if isinstance(part, Leaf) and isinstance(part.predicate, shape)]
        if len(alike) > 1 and "$all" not in found:
            members = [part.predicate for part in alike]
            found["$all"] = [each.value if isinstance(each, Equal) else each.operators() for each in members]
            parts = [part for part in parts if part not in alike]
    for part in parts:
        own = _operators(part)
        if own.keys() & found.keys():
            left.append(part)
        else:
            found.update(own)
            origin.update(dict.fromkeys(own, part))
    if left:  # an operator occurs twice: the rest goes into a double negation, where it may be named again
        if found.pop("$not", None) is not None:
            left.append(origin["$not"])
        found["$not"] = {"$not": canonical_operators(conjunction(left))}
    return found


def _operators(part: Node) -> dict[str, Any]:
    if isinstance(part, Leaf):
        return part.predicate.operators()
    assert isinstance(part, Not)
    return _negated(part.part) if isinstance(part.part, Leaf) else {"$not": canonical_operators(part.part)}


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


MIN_TEXT = 3
"""Shortest text that is worth searching for."""

_SCALARS = frozenset({KINDS[int], KINDS[str], KINDS[bool]})


class Need(msgspec.Struct, frozen=True):
    """A fact about the elements at a path."""

    path: Path


class Value(Need, frozen=True):
    """An element equals a scalar, given in its frozen form."""

    value: Hashable


class Range(Need, frozen=True):
    """An element is at least ``low``, and one at most ``high``: numbers or strings; None is no bound.

    In an array, two different elements may meet the two bounds.
    """

    low: Any
    high: Any


class Text(Need, frozen=True):
    """An element is a string that contains a text."""

    text: str


class Present(Need, frozen=True):
    """There is an element."""


Needs: TypeAlias = tuple[Need, ...]
"""Alternative needs: each match meets at least one."""
Price: TypeAlias = Callable[[Needs], float]
"""Expected cost of alternatives: the share of documents that meet one of them."""


def needs(node: Node, price: Price, prefix: Path | None = None) -> Needs:
    """Return the cheapest needs of which every match meets one; nothing if there are none.

    ``prefix`` is the path of the ``$elemMatch`` around the node.
    """
    match node:
        case And(parts=parts):
            found = [needed for part in parts if (needed := needs(part, price, prefix))]
            return min([*_intervals(parts, prefix), *found], key=price, default=())
        case Or(parts=parts):
            each = [needs(part, price, prefix) for part in parts]
            return tuple(dict.fromkeys(need for needed in each for need in needed)) if all(each) else ()
        case Leaf(path=path, predicate=predicate) if path is not None and not (prefix and path.digits):
            return _leaf_needs(_below(prefix, path), predicate, price)
    return ()


def _leaf_needs(path: Path, predicate: Predicate, price: Price) -> Needs:
    match predicate:
        case Equal(value=value):
            return _equality_needs(path, [value])
        case In(values=values):
            return _equality_needs(path, values)
        case Ordered(value=value, below=below, scalar=scalar):
            if not scalar:
                return () if value is None else (Present(path),)
            return (Range(path, None, value) if below else Range(path, value, None),)
        case Regex(pattern=pattern, options=options):
            text = literal(pattern, options)
            return (Text(path, text) if text is not None and len(text) >= MIN_TEXT else Present(path),)
        case Element(node=node, whole=whole) if not whole and not path.digits and path.steps[-1]:
            return needs(node, price, path) or (Present(path),)
    return (Present(path),)


def _equality_needs(path: Path, values: Iterable[Any]) -> Needs:
    if any(value is None for value in values):
        return ()  # a missing field equals null
    if all(kind(value) in _SCALARS and value == value for value in values):
        return tuple(dict.fromkeys(Value(path, frozen(value, 0)) for value in values))
    return (Present(path),)


def _intervals(parts: Iterable[Node], prefix: Path | None) -> Iterator[Needs]:
    """Yield the range of each path for which the parts of a conjunction have a lower and an upper bound."""
    lows: dict[Path, Any] = {}
    highs: dict[Path, Any] = {}
    for part in parts:
        match part:
            case Leaf(path=Path() as path, predicate=Ordered(scalar=True, value=value, below=below)):
                (highs if below else lows).setdefault(path, value)
    for path, low in lows.items():
        if path in highs and kind(low) == kind(highs[path]) and not (prefix and path.digits):
            yield (Range(_below(prefix, path), low, highs[path]),)


def _below(prefix: Path | None, path: Path) -> Path:
    """Join the path of an ``$elemMatch`` with one inside it, which has no digits.

    Digits would differ: inside ``$elemMatch`` an inner array counts as a document with its indices for names.
    """
    return path if prefix is None else Path(f"{prefix.text}.{path.text}", path.nulls)

"""What a document must have for a query to be worth asking: the *needs* of a query.

Invariant: a query matches only documents that meet at least one of its needs. The converse is not promised, so each
query that is found by its needs is still asked. A query without needs is asked of every document.

    And      the needs of one of its parts, the cheapest
    Or       the needs of all of its parts, if all have some
    Not      none: what a document lacks cannot be looked up
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeAlias

import msgspec

from tailrace.query.order import KINDS, frozen, kind
from tailrace.query.path import Path
from tailrace.query.predicate import Equal, In, Ordered, Predicate, Regex
from tailrace.query.regex import literal
from tailrace.query.tree import And, Element, Leaf, Node, Or

SHORTEST = 3
"""Letters that a text must have to be looked for."""

_SCALARS = frozenset({KINDS[int], KINDS[str], KINDS[bool]})


class Need(msgspec.Struct, frozen=True):
    """Something at a path."""

    path: Path


class Value(Need, frozen=True):
    """A scalar, by its frozen form."""

    value: Hashable


class Range(Need, frozen=True):
    """A number or a string not below ``low`` and not above ``high``; None is no bound. Bounds count as inside.

    In an array, one element may meet one bound and another the other.
    """

    low: Any
    high: Any


class Text(Need, frozen=True):
    """A string that contains a text."""

    text: str


class Present(Need, frozen=True):
    """Anything at all."""


Needs: TypeAlias = tuple[Need, ...]
Price: TypeAlias = Callable[[Needs], float]
"""What needs are expected to cost: the share of documents that meets one of them."""


def needs(node: Node, price: Price) -> Needs:
    """Return what a document must have one of for a query to match; nothing if there is no such thing."""
    return _needs(node, price, None)


def _needs(node: Node | _Interval, price: Price, prefix: Path | None) -> Needs:
    match node:
        case And(parts=parts):
            found = [needed for part in _ranges(parts) if (needed := _needs(part, price, prefix))]
            return min(found, key=price, default=())
        case Or(parts=parts):
            each = [_needs(part, price, prefix) for part in parts]
            return tuple(dict.fromkeys(need for needed in each for need in needed)) if all(each) else ()
        case _Interval(path=path, low=low, high=high) if not (prefix and path.digits):
            return (Range(_below(prefix, path), low, high),)
        case Leaf(path=path, predicate=predicate) if path is not None and not (prefix and path.digits):
            return _of_leaf(_below(prefix, path), predicate, price)
    return ()


def _of_leaf(path: Path, predicate: Predicate, price: Price) -> Needs:
    match predicate:
        case Equal(value=value):
            return _values(path, [value])
        case In(values=values):
            return _values(path, values)
        case Ordered(value=value, below=below, scalar=scalar):
            if not scalar:
                return () if value is None else (Present(path),)
            return (Range(path, None, value) if below else Range(path, value, None),)
        case Regex(pattern=pattern, options=options):
            text = literal(pattern, options)
            return (Text(path, text) if text is not None and len(text) >= SHORTEST else Present(path),)
        case Element(node=node, whole=whole) if not whole and not path.digits and path.steps[-1]:
            return _needs(node, price, path) or (Present(path),)
    return (Present(path),)


def _values(path: Path, values: Iterable[Any]) -> Needs:
    if any(value is None for value in values):
        return ()  # what is missing is null as well
    if all(kind(value) in _SCALARS and value == value for value in values):
        return tuple(dict.fromkeys(Value(path, frozen(value, 0)) for value in values))
    return (Present(path),)


def _below(prefix: Path | None, path: Path) -> Path:
    """Join the path of an ``$elemMatch`` with one inside it: its documents are found by walking on through the array.

    Only by names: an array inside the array counts as a document there, and has digits for names.
    """
    return path if prefix is None else Path(f"{prefix.text}.{path.text}", path.nulls)


class _Interval(msgspec.Struct, frozen=True):
    """Two bounds of one path, for looking up alone."""

    path: Path
    low: Any
    high: Any


def _ranges(parts: Iterable[Node]) -> list[Node | _Interval]:
    """Return the parts of a conjunction with the bounds of a path as one."""
    lows: dict[Path, Any] = {}
    highs: dict[Path, Any] = {}
    for part in parts:
        match part:
            case Leaf(path=Path() as path, predicate=Ordered(scalar=True, value=value, below=below)):
                (highs if below else lows).setdefault(path, value)
    both = [path for path in lows if path in highs and kind(lows[path]) == kind(highs[path])]
    return [*(_Interval(path, lows[path], highs[path]) for path in both), *parts]

"""The index of a filter set: for one document, it finds the few queries that can match.

A *need* is a fact that a document must have for a query to match, such as a value or a range at a path. Each query is
filed under the needs (one of which every match meets) that the fewest documents are expected to meet. If many queries
share a value, an inner index files them by another need. A lookup follows each path of an index once, and only if the
document has the path's first field.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from tailrace.query.path import Path
from tailrace.query.predicate import Equal, In, Ordered, Predicate, Regex, literal
from tailrace.query.tree import And, Element, Leaf, Node, Or
from tailrace.query.value import KINDS, MISSING, frozen, kind

MIN_TEXT = 3
"""Shortest text that is worth searching for."""

_SCALARS = frozenset({KINDS[int], KINDS[str], KINDS[bool]})
_NUMBERS = frozenset((int, float))


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


def needs(node: Node, price: Price) -> Needs:
    """Return the cheapest needs of which every match meets one; nothing if there are none."""
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
            return (Text(path, text) if text is not None and len(text) >= MIN_TEXT else Present(path),)
        case Element(node=node, whole=whole) if not whole and not path.digits and path.steps[-1]:
            return _needs(node, price, path) or (Present(path),)
    return (Present(path),)


def _values(path: Path, values: Iterable[Any]) -> Needs:
    if any(value is None for value in values):
        return ()  # a missing field equals null
    if all(kind(value) in _SCALARS and value == value for value in values):
        return tuple(dict.fromkeys(Value(path, frozen(value, 0)) for value in values))
    return (Present(path),)


def _below(prefix: Path | None, path: Path) -> Path:
    """Join the path of an ``$elemMatch`` with one inside it, which has no digits.

    Digits would differ: inside ``$elemMatch`` an inner array counts as a document with its indices for names.
    """
    return path if prefix is None else Path(f"{prefix.text}.{path.text}", path.nulls)


class _Interval(msgspec.Struct, frozen=True):
    """A lower and an upper bound of one path."""

    path: Path
    low: Any
    high: Any


def _ranges(parts: Iterable[Node]) -> list[Node | _Interval]:
    """Return the parts of a conjunction and, for each path with two bounds, their interval."""
    lows: dict[Path, Any] = {}
    highs: dict[Path, Any] = {}
    for part in parts:
        match part:
            case Leaf(path=Path() as path, predicate=Ordered(scalar=True, value=value, below=below)):
                (highs if below else lows).setdefault(path, value)
    both = [path for path in lows if path in highs and kind(lows[path]) == kind(highs[path])]
    return [*(_Interval(path, lows[path], highs[path]) for path in both), *parts]


T = TypeVar("T")


class RangeIndex(Generic[T]):
    """Ranges of one kind: those with a low bound sorted by it, the others by their high bound."""

    def __init__(self) -> None:
        self._lows: list[tuple[Any, int, Any, T]] = []
        self._highs: list[tuple[Any, int, T]] = []

    def __len__(self) -> int:
        return len(self._lows) + len(self._highs)

    def put(self, low: Any, high: Any, number: int, item: T) -> None:
        if low is not None:
            self._lows.insert(bisect_left(self._lows, (low, number)), (low, number, high, item))
        else:
            self._highs.insert(bisect_left(self._highs, (high, number)), (high, number, item))

    def drop(self, low: Any, high: Any, number: int) -> None:
        if low is not None:
            del self._lows[bisect_left(self._lows, (low, number))]
        else:
            del self._highs[bisect_left(self._highs, (high, number))]

    def find(self, least: Any, most: Any, found: dict[int, T]) -> None:
        """Add the items whose ranges may be met by values of which these are the least and the greatest."""
        if self._lows:
            rows = self._lows[: bisect_right(self._lows, most, key=_first)]
            found.update({number: item for _, number, high, item in rows if high is None or least <= high})
        if self._highs:
            above = self._highs[bisect_left(self._highs, least, key=_first) :]
            found.update({number: item for _, number, item in above})


def _first(row: tuple[Any, ...]) -> Any:
    return row[0]


FEW_TEXTS = 8
"""Number of texts up to which each is searched for by itself."""


class TextIndex(Generic[T]):
    """Items by a text; the time to find those whose text occurs in a string is linear in the string."""

    def __init__(self) -> None:
        self._items: dict[str, dict[int, T]] = {}
        self._lengths: dict[str, Counter[int]] = {}
        """First letters of texts -> number of texts by length."""

    def __len__(self) -> int:
        return len(self._items)

    def put(self, text: str, number: int, item: T) -> None:
        if text not in self._items:
            self._items[text] = {}
            self._lengths.setdefault(text[:MIN_TEXT], Counter())[len(text)] += 1
        self._items[text][number] = item

    def drop(self, text: str, number: int) -> None:
        del self._items[text][number]
        if not self._items[text]:
            del self._items[text]
            lengths = self._lengths[text[:MIN_TEXT]]
            lengths[len(text)] -= 1
            if not lengths[len(text)]:
                del lengths[len(text)]
            if not lengths:
                del self._lengths[text[:MIN_TEXT]]

    def find(self, value: str, found: dict[int, T]) -> None:
        if len(self._items) <= FEW_TEXTS:
            for text, items in self._items.items():
                if text in value:
                    found.update(items)
            return
        for at in range(len(value) - MIN_TEXT + 1):
            for length in self._lengths.get(value[at : at + MIN_TEXT], ()):
                if (items := self._items.get(value[at : at + length])) is not None:  # type: ignore[assignment]
                    found.update(items)


Plan: TypeAlias = Callable[[T, Price], Needs]
"""Returns an item's cheapest needs."""

MAX_BUCKET = 8
"""Items under one value up to which testing all is cheaper than an inner index."""

MAX_INDEX_DEPTH = 4
"""Nested indexes."""

_HIT_RATES: dict[type[Need], float] = {Text: 0.2, Range: 0.4, Present: 1.0}
"""Assumed share of documents that meet a need; for a range with two bounds, a quarter of it."""

_MAX_INNER_RATE = 0.6
"""An inner index ignores needs that a larger share of documents meets."""


class Index(Generic[T]):
    """Items by their needs. ``met`` are the needs that every document looked up in an inner index meets."""

    def __init__(self, plan: Plan[T], met: frozenset[Need] = frozenset()) -> None:
        self._plan, self._met = plan, met
        self._always: dict[int, T] = {}
        self._placed: dict[int, Needs] = {}
        self._of_value: dict[str, dict[Path, _PathIndex[T]]] = {}
        self._of_record: dict[str, dict[Path, _PathIndex[T]]] = {}

    def __len__(self) -> int:
        return len(self._placed)

    def add(self, number: int, item: T) -> None:
        """Add an item under a number of its own."""
        needed = self._plan(item, self._price)
        if self._met and (not needed or self._price(needed) > _MAX_INNER_RATE):
            needed = ()
        self._placed[number] = needed
        if not needed:
            self._always[number] = item
        for need in needed:
            at = self._heads(need.path).setdefault(need.path.steps[0], {})
            if need.path not in at:
                at[need.path] = _PathIndex(need.path, self._plan, self._met)
            at[need.path].put(need, number, item)

    def remove(self, number: int) -> None:
        """Remove an item."""
        self._always.pop(number, None)
        for need in self._placed.pop(number):
            heads, head = self._heads(need.path), need.path.steps[0]
            at = heads[head][need.path]
            at.drop(need, number)
            if at.is_empty:
                del heads[head][need.path]
                if not heads[head]:
                    del heads[head]

    def find(self, document: dict[str, Any], context: dict[str, Any], found: dict[int, T]) -> None:
        """Add the items, by number, that a document and its record's fields (``context``) may match."""
        found.update(self._always)
        for head in self._of_value.keys() & document.keys():
            for at in self._of_value[head].values():
                at.find(document, document, context, found)
        if context and self._of_record:
            for head in self._of_record.keys() & context.keys():
                for at in self._of_record[head].values():
                    at.find(context, document, context, found)

    def _heads(self, path: Path) -> dict[str, dict[Path, _PathIndex[T]]]:
        return self._of_record if path.of_record else self._of_value

    def _price(self, needed: Needs) -> float:
        if not self._met.isdisjoint(needed):
            return math.inf
        values = Counter(need.path for need in needed if isinstance(need, Value))
        price = sum(_share(need) for need in needed if not isinstance(need, Value))
        for path, count in values.items():
            at = self._heads(path).get(path.steps[0], {}).get(path)
            # The more values a path has in the index, the fewer documents have a given one.
            price += count / (count + 9 + (at.values if at is not None else 0))
        return price


def _share(need: Need) -> float:
    bounded = isinstance(need, Range) and need.low is not None and need.high is not None
    return _HIT_RATES[need.__class__] / (4 if bounded else 1)


class _PathIndex(Generic[T]):
    """The needs at one path."""

    def __init__(self, path: Path, plan: Plan[T], met: frozenset[Need]) -> None:
        self._path, self._plan, self._met = path, plan, met
        self._values: dict[Hashable, dict[int, T] | Index[T]] = {}
        self._present: dict[int, T] = {}
        self._texts: TextIndex[T] = TextIndex()
        self._numbers: RangeIndex[T] = RangeIndex()
        self._strings: RangeIndex[T] = RangeIndex()
        self._more = False
        """True if there are needs other than values."""

    @property
    def values(self) -> int:
        """Number of distinct values."""
        return len(self._values)

    @property
    def is_empty(self) -> bool:
        return not self._more and not self._values

    def put(self, need: Need, number: int, item: T) -> None:
        match need:
            case Value(value=value):
                self._put_value(need, value, number, item)
            case Range(low=low, high=high):
                self._ranges(need).put(low, high, number, item)
            case Text(text=text):
                self._texts.put(text, number, item)
            case _:
                self._present[number] = item
        self._update_more()

    def _update_more(self) -> None:
        self._more = bool(self._present or len(self._texts) or len(self._numbers) or len(self._strings))

    def _put_value(self, need: Need, value: Hashable, number: int, item: T) -> None:
        bucket = self._values.setdefault(value, {})
        if isinstance(bucket, Index):
            bucket.add(number, item)
            return
        bucket[number] = item
        if len(bucket) > MAX_BUCKET and len(self._met) < MAX_INDEX_DEPTH:
            inner: Index[T] = Index(self._plan, self._met | {need})
            for one, other in bucket.items():
                inner.add(one, other)
            self._values[value] = inner

    def drop(self, need: Need, number: int) -> None:
        match need:
            case Value(value=value):
                bucket = self._values[value]
                if isinstance(bucket, Index):
                    bucket.remove(number)
                else:
                    del bucket[number]
                if not len(bucket):
                    del self._values[value]
            case Range(low=low, high=high):
                self._ranges(need).drop(low, high, number)
            case Text(text=text):
                self._texts.drop(text, number)
            case _:
                del self._present[number]
        self._update_more()

    def _ranges(self, need: Range) -> RangeIndex[T]:
        bound = need.high if need.low is None else need.low
        return self._strings if bound.__class__ is str else self._numbers

    def find(
        self, within: dict[str, Any], document: dict[str, Any], context: dict[str, Any], found: dict[int, T]
    ) -> None:
        """Follow the path in ``within``, the document or the record's fields, and add the items found."""
        value: Any = within
        for step in self._path.steps:
            if value.__class__ is dict:
                value = value.get(step, MISSING)
            elif value.__class__ is list:
                self._each(self._path.elements(within, True), document, context, found)
                return
            else:
                return
        if value.__class__ is list:
            self._each([*value, value], document, context, found)
        elif value is not MISSING:
            self._one(value, document, context, found)
            if self._more and value.__class__ is str:
                self._strings.find(value, value, found)
            elif self._more and value.__class__ in _NUMBERS and value == value:
                self._numbers.find(value, value, found)

    def _each(
        self, values: Iterable[Any], document: dict[str, Any], context: dict[str, Any], found: dict[int, T]
    ) -> None:
        different: dict[Hashable, Any] = {}
        for value in values:
            if value.__class__ is dict or value.__class__ is list:
                found.update(self._present)
            elif value is not MISSING:
                different[frozen(value, 0)] = value
        for value in different.values():
            self._one(value, document, context, found)
        if self._more:
            # All elements at once: one may meet the low bound, another the high one.
            strings: list[Any] = [value for value in different.values() if value.__class__ is str]
            numbers: list[Any] = [
                value for value in different.values() if value.__class__ in _NUMBERS and value == value
            ]
            if strings:
                self._strings.find(min(strings), max(strings), found)
            if numbers:
                self._numbers.find(min(numbers), max(numbers), found)

    def _one(self, value: Any, document: dict[str, Any], context: dict[str, Any], found: dict[int, T]) -> None:
        """Add the items of one value, except those with ranges."""
        bucket = self._values.get(value if value.__class__ is str else frozen(value, 0))
        if bucket is not None:
            if bucket.__class__ is dict:
                found.update(bucket)
            else:
                bucket.find(document, context, found)  # type: ignore[union-attr]
        if self._more:
            if value.__class__ is str:
                self._texts.find(value, found)
            found.update(self._present)

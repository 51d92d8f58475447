"""The index of standing queries: by what they need, path by path.

A document is walked once for each path that any query needs, and only where it has the path's first field.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from tailrace.model.filters.cover import SHORTEST, Need, Present, Range, Text, Value
from tailrace.model.query.order import MISSING, frozen
from tailrace.model.query.path import Path

T = TypeVar("T")


class Index(Generic[T]):
    """What was put in under needs comes up for each document that meets one of them."""

    def __init__(self) -> None:
        self._heads: dict[str, dict[Path, _At[T]]] = {}

    def put(self, need: Need, number: int, item: T) -> None:
        """Add an item under a need; its number is its own."""
        at = self._heads.setdefault(need.path.steps[0], {})
        if need.path not in at:
            at[need.path] = _At(need.path)
        at[need.path].put(need, number, item)

    def drop(self, need: Need, number: int) -> None:
        """Remove an item from under a need."""
        head = need.path.steps[0]
        at = self._heads[head][need.path]
        at.drop(need, number)
        if at.empty:
            del self._heads[head][need.path]
            if not self._heads[head]:
                del self._heads[head]

    def find(self, document: dict[str, Any], found: dict[int, T]) -> None:
        """Add what comes up for a document, by number."""
        for head in self._heads.keys() & document.keys():
            for at in self._heads[head].values():
                at.find(document, found)

    def price(self, need: Need) -> float:
        """Return how much an item under this need is likely to cost: the share of documents that bring it up."""
        at = self._heads.get(need.path.steps[0], {}).get(need.path)
        return _PRICES[need.__class__] if at is None else at.price(need)


_PRICES: dict[type[Need], float] = {Value: 0.1, Text: 0.2, Range: 0.4, Present: 1.0}
"""The share of documents that is taken to meet a need of which nothing is known yet."""


class _At(Generic[T]):
    """All needs at one path."""

    def __init__(self, path: Path) -> None:
        self._path, self._steps = path, path.steps
        self._values: dict[Hashable, dict[int, T]] = {}
        self._present: dict[int, T] = {}
        self._texts: _Texts[T] = _Texts()
        self._ranges: dict[type, _Ranges[T]] = {float: _Ranges(), str: _Ranges()}
        self._bounded = self._worded = False

    @property
    def empty(self) -> bool:
        return not (self._values or self._present or self._bounded or self._worded)

    def put(self, need: Need, number: int, item: T) -> None:
        match need:
            case Value(value=value):
                self._values.setdefault(value, {})[number] = item
            case Range(low=low, high=high):
                self._ranges[_shape(low, high)].put(low, high, number, item)
            case Text(text=text):
                self._texts.put(text, number, item)
            case _:
                self._present[number] = item
        self._look()

    def drop(self, need: Need, number: int) -> None:
        match need:
            case Value(value=value):
                del self._values[value][number]
                if not self._values[value]:
                    del self._values[value]
            case Range(low=low, high=high):
                self._ranges[_shape(low, high)].drop(low, high, number)
            case Text(text=text):
                self._texts.drop(text, number)
            case _:
                del self._present[number]
        self._look()

    def _look(self) -> None:
        self._bounded = any(len(ranges) for ranges in self._ranges.values())
        self._worded = bool(len(self._texts))

    def price(self, need: Need) -> float:
        if isinstance(need, Value):
            # A path of many values tells more than one of few; a value that many asked for is likely a common one.
            return (1 + len(self._values.get(need.value, ()))) / (10 + len(self._values))
        return _PRICES[need.__class__]

    def find(self, document: dict[str, Any], found: dict[int, T]) -> None:
        value: Any = document
        for step in self._steps:
            if value.__class__ is dict:
                value = value.get(step, MISSING)
            elif value.__class__ is list:
                self._each(self._path.elements(document, True), found)
                return
            else:
                return
        if value.__class__ is list:
            self._each([*value, value], found)
        elif value is not MISSING:
            self._one(value, found, True)

    def _each(self, values: list[Any], found: dict[int, T]) -> None:
        seen: set[Hashable] = set()
        for value in values:
            if value.__class__ is dict or value.__class__ is list:
                found.update(self._present)
            elif value is not MISSING and (value, value.__class__) not in seen:
                seen.add((value, value.__class__))
                self._one(value, found, False)

    def _one(self, value: Any, found: dict[int, T], alone: bool) -> None:
        shape = value.__class__
        if shape is str:
            if self._values and (bucket := self._values.get(value)) is not None:
                found.update(bucket)
            if self._bounded:
                self._ranges[str].find(value, found, alone)
            if self._worded:
                self._texts.find(value, found)
        elif shape is int or shape is float:
            if self._values and (bucket := self._values.get(value)) is not None:
                found.update(bucket)
            if self._bounded and value == value:
                self._ranges[float].find(value, found, alone)
        elif shape is bool and (bucket := self._values.get(frozen(value, 0))) is not None:
            found.update(bucket)
        if self._present:
            found.update(self._present)


def _shape(low: Any, high: Any) -> type:
    return str if (low if low is not None else high).__class__ is str else float


class _Ranges(Generic[T]):
    """Bounds of one kind, sorted: those with a low one by it, the others by the high one."""

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

    def find(self, value: Any, found: dict[int, T], alone: bool) -> None:
        """Add those within whose bounds a value lies; within whose low bound, if other values may meet the high one."""
        rows = self._lows[: bisect_right(self._lows, value, key=_first)]
        if alone:
            found.update({number: item for _, number, high, item in rows if high is None or value <= high})
        else:
            found.update({number: item for _, number, _, item in rows})
        found.update({number: item for _, number, item in self._highs[bisect_left(self._highs, value, key=_first) :]})


def _first(row: tuple[Any, ...]) -> Any:
    return row[0]


class _Texts(Generic[T]):
    """Texts to be looked for in strings: one by one, or by their first letters when the string is the shorter list."""

    def __init__(self) -> None:
        self._items: dict[str, dict[int, T]] = {}
        self._starts: dict[str, list[str]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def put(self, text: str, number: int, item: T) -> None:
        if text not in self._items:
            self._items[text] = {}
            self._starts.setdefault(text[:SHORTEST], []).append(text)
        self._items[text][number] = item

    def drop(self, text: str, number: int) -> None:
        del self._items[text][number]
        if not self._items[text]:
            del self._items[text]
            start = text[:SHORTEST]
            self._starts[start].remove(text)
            if not self._starts[start]:
                del self._starts[start]

    def find(self, value: str, found: dict[int, T]) -> None:
        if len(self._items) <= len(value):
            for text, items in self._items.items():
                if text in value:
                    found.update(items)
            return
        for at in range(len(value) - SHORTEST + 1):
            for text in self._starts.get(value[at : at + SHORTEST], ()):
                if value.startswith(text, at):
                    found.update(self._items[text])

"""Queries by the bounds within which they need a value."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Ranges(Generic[T]):
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

    def find(self, least: Any, most: Any, found: dict[int, T]) -> None:
        """Add those whose bounds values from the least to the most may meet: one the low bound, another the high."""
        if self._lows:
            rows = self._lows[: bisect_right(self._lows, most, key=_first)]
            found.update({number: item for _, number, high, item in rows if high is None or least <= high})
        if self._highs:
            above = self._highs[bisect_left(self._highs, least, key=_first) :]
            found.update({number: item for _, number, item in above})


def _first(row: tuple[Any, ...]) -> Any:
    return row[0]

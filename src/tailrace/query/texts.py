"""Queries by a text that a string must contain: what a regular expression can be looked up by."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

from tailrace.query.needs import SHORTEST

T = TypeVar("T")


FEW = 8
"""Texts that are looked for one by one."""


class Texts(Generic[T]):
    """Texts to be looked for in strings: in proportion to the string, however many there are."""

    def __init__(self) -> None:
        self._items: dict[str, dict[int, T]] = {}
        self._lengths: dict[str, Counter[int]] = {}
        """How many texts of each length begin with some letters."""

    def __len__(self) -> int:
        return len(self._items)

    def put(self, text: str, number: int, item: T) -> None:
        if text not in self._items:
            self._items[text] = {}
            self._lengths.setdefault(text[:SHORTEST], Counter())[len(text)] += 1
        self._items[text][number] = item

    def drop(self, text: str, number: int) -> None:
        del self._items[text][number]
        if not self._items[text]:
            del self._items[text]
            lengths = self._lengths[text[:SHORTEST]]
            lengths[len(text)] -= 1
            if not lengths[len(text)]:
                del lengths[len(text)]
            if not lengths:
                del self._lengths[text[:SHORTEST]]

    def find(self, value: str, found: dict[int, T]) -> None:
        if len(self._items) <= FEW:
            for text, items in self._items.items():
                if text in value:
                    found.update(items)
            return
        for at in range(len(value) - SHORTEST + 1):
            for length in self._lengths.get(value[at : at + SHORTEST], ()):
                if (items := self._items.get(value[at : at + length])) is not None:  # type: ignore[assignment]
                    found.update(items)

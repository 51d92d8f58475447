"""Queries by a text that a string must contain: what a regular expression can be looked up by."""

from __future__ import annotations

from typing import Generic, TypeVar

from tailrace.model.filters.cover import SHORTEST

T = TypeVar("T")


class Texts(Generic[T]):
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

"""Dotted paths, and the elements that they find in a document.

A step goes through documents by key. Where an array is met with steps left, the walk goes on in each of its documents;
a step of digits is also an index of the array. Elements that are neither yield nothing; a document without the key
yields MISSING, and so does a scalar met on a way through documents alone.

A path that ends at an array it came to by key *expands* it for operators that look at values: each element, then the
array itself. An array that was come to by index is not expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec

from tailrace.model.query.order import MISSING

One: TypeAlias = Callable[[Any], bool]
"""Whether one element satisfies an operator."""

Some: TypeAlias = Callable[[list[Any]], bool]
"""Whether some element of a list does: the same as ``any(map(one, elements))``, perhaps faster."""

_get = dict.get


class Path(msgspec.Struct, frozen=True):
    """A dotted path. ``nulls`` has MongoDB 9's rule: what a walk cannot enter in an array counts as missing."""

    text: str
    nulls: bool = False

    @property
    def steps(self) -> tuple[str, ...]:
        """The names and indices that it goes through."""
        return tuple(self.text.split("."))

    @property
    def digits(self) -> bool:
        """Whether any step may be an index of an array."""
        return any(map(_is_index, self.steps))

    def elements(self, document: dict[str, Any], expand: bool) -> list[Any]:
        """Return all that the path finds, MISSING included.

        Each part of the document is visited at most once for each step, whatever its nesting and however many steps
        are digits.
        """
        steps, found = self.steps, list[Any]()
        documents: dict[int, dict[str, Any]] = {id(document): document}
        arrays: dict[int, list[Any]] = {}
        for number, step in enumerate(steps):
            last = number == len(steps) - 1
            next_documents: dict[int, dict[str, Any]] = {}
            next_arrays: dict[int, list[Any]] = {}

            def enter(value: Any, into: dict[int, Any] = next_documents, through: dict[int, Any] = next_arrays) -> bool:
                if value.__class__ is dict:
                    into[id(value)] = value
                elif value.__class__ is list:
                    through[id(value)] = value
                else:
                    return False
                return True

            for array in arrays.values():
                if last and not step:  # a path that ends with a dot ends at the array
                    found += _expanded(array, expand)
                    continue
                index = int(step) if _is_index(step) else -1
                indexed = 0 <= index < len(array)
                entered = [item for item in array if item.__class__ is dict]
                documents.update((id(item), item) for item in entered)
                if indexed and last:
                    found.append(array[index])
                elif (
                    (not indexed or not enter(array[index]))
                    and self.nulls
                    and not (array and len(entered) == len(array))
                ):
                    found.append(MISSING)
            for inner in documents.values():
                value = inner.get(step, MISSING)
                if last:
                    found += _expanded(value, expand)
                elif not enter(value):
                    found.append(MISSING)
            documents, arrays = next_documents, next_arrays
        return found

    def test(self, one: One, some: Some, expand: bool) -> Callable[[dict[str, Any]], bool]:
        """Return a function that tells whether any element of a document satisfies ``one``."""
        steps, elements, name = self.steps, self.elements, self.text

        def look(document: dict[str, Any]) -> bool:
            value = _get(document, name, MISSING)
            if value.__class__ is list and expand:
                return some(value) or one(value)
            return one(value)

        def walk(document: dict[str, Any]) -> bool:
            value: Any = document
            for step in steps:
                if value.__class__ is dict:
                    value = _get(value, step, MISSING)
                elif value.__class__ is list:
                    return some(elements(document, expand))
                else:
                    return one(MISSING)
            if value.__class__ is list and expand:
                return some(value) or one(value)
            return one(value)

        return look if len(steps) == 1 else walk


def _is_index(step: str) -> bool:
    return step.isascii() and step.isdigit() and (step == "0" or step[0] != "0") and len(step) < 10


def _expanded(value: Any, expand: bool) -> Iterable[Any]:
    return (*value, value) if expand and value.__class__ is list else (value,)

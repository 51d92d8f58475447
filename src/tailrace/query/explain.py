"""Which part of a query matched a document, and what was found where it did not.

A query is taken apart as it was written, not in its canonical form, so that its author knows the parts again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tailrace.query.tree import has_operators

MOST_FOUND = 10
"""Elements that are shown of what a path found."""


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a query, and whether it held.

    ``found`` is what its path led to, at most so many elements; it is empty where nothing was there.
    """

    part: Any
    matched: bool
    found: list[Any] = []
    parts: list[Explanation] = []


def explained(
    source: dict[str, Any], ask: Callable[[dict[str, Any]], bool], find: Callable[[str], list[Any]]
) -> Explanation:
    """Explain a query: ``ask`` tells whether a part of it holds, ``find`` returns what a path leads to."""
    inner = [explained(part, ask, find) for part in _apart(source)]
    path = next(iter(source)) if len(source) == 1 and not inner else "$and"
    found = find(path)[:MOST_FOUND] if _is_path(path) else []
    return Explanation(source, ask(source), found, inner)


def _apart(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the conditions that a part is made of; none if it is one condition."""
    if len(part) > 1:
        yield from ({name: operand} for name, operand in part.items() if name != "$comment")
        return
    for name, operand in part.items():
        if name in ("$and", "$or", "$nor"):
            yield from operand
        elif _is_path(name) and has_operators(operand) and len(operand.keys() - {"$options"}) > 1:
            for operator, value in operand.items():
                if operator == "$regex" and "$options" in operand:
                    yield {name: {operator: value, "$options": operand["$options"]}}
                elif operator != "$options":
                    yield {name: {operator: value}}
        elif _is_path(name) and has_operators(operand):
            [(operator, value), *_] = operand.items()
            if operator == "$not":
                yield {name: value}
            elif operator == "$all" and len(value) > 1:
                yield from ({name: {"$all": [member]}} for member in value)


def _is_path(name: str) -> bool:
    return name not in ("$and", "$or", "$nor", "$expr", "$comment")

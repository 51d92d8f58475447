"""What a scan leaves out unread: records that lack a text which every search of the chunk needs.

Invariant: a record that some search matches passes. What passes is still asked. The texts are looked for in bytes that
are not decoded. Escapes may spell a name or a string otherwise, so whatever holds a backslash passes; what is no JSON
matches nothing, and it does not matter what becomes of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from tailrace.query import Query
from tailrace.query.filters import Need, Needs, Text, Value, needs
from tailrace.query.tree import And

FEW = 4
"""Texts of which one is needed, and queries, at most: looking for more costs as much as asking."""


class Look(msgspec.Struct, frozen=True):
    """A text that stands in the value, or in the key."""

    text: bytes
    in_key: bool = False


Part = tuple[Look, ...]
"""Texts of which a record has one."""


def sift(queries: Iterable[Query]) -> Callable[[bytes | None, bytes], bool] | None:
    """Return a function that tells of a key and a value whether a query may match; None if all may."""
    each = {_parts(query) for query in queries}
    if not all(each) or not 0 < len(each) <= FEW:
        return None
    several = tuple(each)

    def passes(key: bytes | None, value: bytes) -> bool:
        for parts in several:
            for part in parts:
                for look in part:
                    within = (key or b"") if look.in_key else value
                    if look.text in within or b"\\" in within:
                        break
                else:
                    break  # it has none of these
            else:
                return True
        return False

    return passes


def _parts(query: Query) -> tuple[Part, ...]:
    """Return the parts of a query, all of which a record that it matches has; those of one text first."""
    found: set[Part] = set()
    for node in query.tree.parts if isinstance(query.tree, And) else (query.tree,):
        looks = [_look(need) for need in needs(node, _price)]
        if 0 < len(looks) <= FEW and None not in looks:
            found.add(tuple(dict.fromkeys(look for look in looks if look is not None)))
    return tuple(sorted(found, key=lambda part: (len(part), [-len(look.text) for look in part], part[0].text)))


def _price(needed: Needs) -> float:
    looks = [_look(need) for need in needed]
    return math.inf if None in looks else len(looks)


def _look(need: Need) -> Look | None:
    """Return what a record that meets a need has, if nothing in it is escaped; None where that is unknown."""
    path = need.path
    if not all(path.steps):
        return None
    in_key = path.of_record
    if in_key and (path.steps[0] != "$key" or not all(map(_is_index, path.steps[1:]))):
        return None
    match need:
        case Value(value=str(text)):
            wanted = text if in_key else f'"{text}"'  # a key that is no array is its own text
        case Text(text=text):
            wanted = text
        case _:
            names = [step for step in path.steps if not _is_index(step)]
            if in_key or not names:
                return None
            wanted = f'"{names[-1]}"'
    try:
        return Look(wanted.encode(), in_key)
    except UnicodeEncodeError:  # half a character: bytes that hold it are no text
        return None


def _is_index(step: str) -> bool:
    return step.isascii() and step.isdigit()

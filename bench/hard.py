"""Queries and documents that are meant to take long: each query is about as large as one may be.

A large document has a string of 100 kB or an array of 10,000 elements; a small one has a hundredth of that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias

from tailrace.query import QueryLimits

Pair: TypeAlias = tuple[dict[str, Any], dict[str, Any]]

LIMITS = QueryLimits()
LETTERS = 100_000
ELEMENTS = 10_000


def shrink() -> None:
    """Make small documents from here on, in this process."""
    global LETTERS, ELEMENTS
    LETTERS, ELEMENTS = LETTERS // 100, ELEMENTS // 100


def _of_a() -> dict[str, Any]:
    return {"a": "a" * LETTERS + "!"}


def _of_ab() -> dict[str, Any]:
    """Text in which automata find no rest."""
    chance = random.Random(8)
    return {"a": "".join(chance.choices("ab", k=LETTERS))}


def _numbers() -> dict[str, Any]:
    return {"a": [2 * i for i in range(ELEMENTS)]}


def _documents() -> dict[str, Any]:
    return {"a": [{"b": 2 * i, "c": [i, {"d": i}]} for i in range(ELEMENTS)]}


def _digits(depth: int, wide: int) -> dict[str, Any]:
    """Arrays of documents whose only key may be an index too, so that every second step can be taken in two ways."""
    inner: Any = 1
    for _ in range(depth):
        inner = [{"0": inner}] * wide
    return {"a": inner}


def _arrays(depth: int) -> dict[str, Any]:
    inner: Any = [1, 2]
    for _ in range(depth):
        inner = [inner, [inner]]
    return {"a": inner}


def _regex(pattern: str) -> dict[str, Any]:
    return {"a": {"$regex": pattern}}


def _tower(levels: int, operator: str) -> dict[str, Any]:
    """One operator inside the other."""
    inner: Any = "$a"
    for _ in range(levels):
        inner = {operator: [inner, "$a"]}
    return {"$expr": {"$lt": [inner, -1]}}


def _elements(levels: int) -> dict[str, Any]:
    inner: Any = {"$gt": 10**9}
    for _ in range(levels):
        inner = {"$elemMatch": inner}
    return {"a": inner}


ROOM = LIMITS.depth
WIDE = LIMITS.nodes * 9 // 20
"""Parts of a wide query: each is a path and an operator, and a few are left for what is around them."""

PAIRS: dict[str, Callable[[], Pair]] = {
    "regex (a+)+$": lambda: (_regex("(a+)+$"), _of_a()),
    "regex (a+)+(b|c)": lambda: (_regex("(a+)+(b|c)"), _of_a()),
    "regex (a|aa)+$": lambda: (_regex("(a|aa)+$"), _of_a()),
    "regex (.*a){20}b": lambda: (_regex("(.*a){20}b"), _of_a()),
    "regex (a|b)*a(a|b){200}c": lambda: (_regex("[ab]*a[ab]{200}c"), _of_ab()),
    "regex as large as may be": lambda: (_regex("[ab]*a[ab]{900}c"), _of_ab()),
    "regex over 10,000 strings": lambda: (_regex("(a+)+b.*c"), {"a": ["a" * 20 + "bd"] * ELEMENTS}),
    "$or of regexes": lambda: (
        {"$or": [_regex(f"[ab]*a[ab]{{{70 + i}}}c") for i in range(LIMITS.regexes)]},
        _of_ab(),
    ),
    "$in of 1,000": lambda: ({"a": {"$in": [2 * i + 1 for i in range(1_000)]}}, _numbers()),
    "$in of 1,000 documents": lambda: ({"a": {"$in": [{"b": i, "c": [i]} for i in range(1_000)]}}, _documents()),
    "$nin of 1,000 arrays": lambda: (
        {"a": {"$nin": [[i, 1] for i in range(1_000)]}},
        {"a": [[i, 2] for i in range(ELEMENTS)]},
    ),
    "$all of numbers": lambda: ({"a": {"$all": [2 * i for i in range(WIDE)]}}, _numbers()),
    "$all of documents": lambda: ({"a": {"$all": [{"b": 2 * i} for i in range(WIDE)]}}, _documents()),
    "digits, two ways each": lambda: ({"a" + ".0" * 60: 2}, _digits(40, 1)),
    "digits, two ways each, wide": lambda: ({"a" + ".0" * 12: 2}, _digits(8, 3)),
    "digits over arrays": lambda: ({"a" + ".0" * 190: 2}, _arrays(12)),
    "digits, $not": lambda: ({"a" + ".0" * 60: {"$not": {"$gt": 2}}}, _digits(40, 1)),
    "path over documents": lambda: ({"a.c.d": {"$lt": 0}}, _documents()),
    "wide $and over an array": lambda: ({"$and": [{"a": {"$ne": 2 * i + 1}} for i in range(WIDE)]}, _numbers()),
    "wide $or over an array": lambda: ({"$or": [{"a": {"$lt": -i}} for i in range(1, WIDE)]}, _numbers()),
    "wide $nor over documents": lambda: ({"$nor": [{"a.b": {"$lt": -i}} for i in range(1, WIDE)]}, _documents()),
    "wide $or of many paths": lambda: ({"$or": [{f"a.c.d{i}": {"$gt": 1}} for i in range(WIDE)]}, _documents()),
    "wide $nor of $mod": lambda: ({"$nor": [{"a": {"$mod": [2 * i, 1]}} for i in range(1, WIDE)]}, _numbers()),
    "wide $and of equal documents": lambda: (
        {"$and": [{"a": {"$ne": {"b": i, "c": [i, {"d": i}]}}} for i in range(1, WIDE, 2)]},
        _documents(),
    ),
    "$elemMatch of $or": lambda: (
        {"a": {"$elemMatch": {"$or": [{"b": {"$lt": -i}} for i in range(1, WIDE)]}}},
        _documents(),
    ),
    "$elemMatch inside one another": lambda: (_elements(ROOM - 4), _arrays(11)),
    "$expr tower of $add": lambda: (_tower(ROOM // 2 - 2, "$add"), {"a": 2**62}),
    "$expr tower of $multiply": lambda: (_tower(ROOM // 2 - 2, "$multiply"), {"a": 2**62}),
    "$expr tower of $pow": lambda: (_tower(ROOM // 2 - 2, "$pow"), {"a": 2**31}),
    "$expr wide, over documents": lambda: (
        {"$expr": {"$or": [{"$eq": ["$a.c.d", [i]]} for i in range(LIMITS.nodes // 5)]}},
        _documents(),
    ),
    "$expr wide, of many paths": lambda: (
        {"$expr": {"$or": [{"$eq": [f"$a.c.d{i}", [i]]} for i in range(LIMITS.nodes // 5)]}},
        _documents(),
    ),
    "$mod of large numbers": lambda: ({"a": {"$mod": [7, -1]}}, {"a": [10**4000] * 1_000}),
    "a deep document": lambda: ({"$expr": {"$eq": ["$a", "$c"]}}, _deep(400)),
    "a long path": lambda: ({".".join(["b"] * 190): 1}, _deep(400)),
}
"""Makers of a query and a document, by name."""


def _deep(levels: int) -> dict[str, Any]:
    inner: Any = 1
    for _ in range(levels):
        inner = {"b": inner}
    return {"a": inner, "b": inner, "c": inner}

"""Random documents, records and queries, for runs in bulk (from a seeded ``Random``) and for Hypothesis.

All draw from one small alphabet, so that a random query says something about a random document: about half of the
pairs match. Every query is valid. Regular expressions are ones on which RE2 and Python's ``re`` agree."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Json = Any
FIELDS = ("a", "b", "c", "0", "1")
SCALARS: tuple[Json, ...] = (None, True, False, 0, 1, -1, 2, 1.5, 2.0, "", "x", "xy", 1, "x", None, 2)
CONTAINERS: tuple[Json, ...] = ([], [1], [[1]], {}, {"a": 1}, [None], ["x", 2], [{"a": 1}], {"b": None}, [[]], [2, 1])
RARE: tuple[Json, ...] = (
    *(-0.0, 2**31, -(2**31) - 1, -(2**40), 2**53 + 1, -(2**63), 2**63, 2**64, 1e300, -2, 3, 7, 15, 0.5, 0.29, -2.5),
    *(math.nan, math.inf, -math.inf, "é", "X", "1"),
)
PATHS = ("a", "b", "c", "0", "a", "b", "a.b", "a.0", "a.1", "b.a", "b.0", "a.b.c", "a.0.b", "a.b.0", "c.1.a", "a.0.0")
TYPES = ("double", "string", "object", "array", "bool", "null", "int", "long", "number", "date")
CODES = (1, 2, 3, 4, 8, 10, 16, 18, 9, -1, 2.0)
PATTERNS = (("^x", ""), ("y", ""), ("", ""), ("x.?y", ""), ("[xy]+", ""), ("X", "i"), ("x y", "x"), ("(x|é)$", "m"))
TOPICS = ("posts", "views", "orders")
TIMES = (("1970-01-01T00:00:01Z", 1000), ("1970-01-01T02:00:02+02:00", 2000), ("1970-01-01T00:00:03.500Z", 3500))


def random_value(rng: random.Random, depth: int = 2) -> Json:
    """Any value of the alphabet, nested to the depth."""
    draw = rng.random()
    if draw < 0.03:
        return rng.choice(RARE)
    if depth == 0 or draw < 0.45:
        return rng.choice(SCALARS)
    if draw < 0.6:
        return copy.deepcopy(rng.choice(CONTAINERS))
    if draw < 0.8:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(FIELDS): random_value(rng, depth - 1) for _ in range(rng.randrange(4))}


def random_document(rng: random.Random) -> dict[str, Json]:
    """A document with up to five fields, three levels deep."""
    return {field: random_value(rng) for field in rng.sample(FIELDS, rng.randrange(6))}


def random_record(rng: random.Random) -> dict[str, Json]:
    """Return arguments of a ``Record`` that carries a document."""
    headers = {name: rng.choice(("x", "xy", "", None, ["x", "y"], [])) for name in ("h", "trace") if rng.random() < 0.6}
    return {
        "topic": rng.choice(TOPICS),
        "partition": rng.randrange(3),
        "offset": rng.randrange(100),
        "time_ms": rng.choice((999, 1000, 1001, 2000, 3500, 4000)),
        "key": rng.choice((None, ["x"], ["x", 1], [None, 2], [], [True])),
        "headers": headers,
    }


def random_query(rng: random.Random, near: Json = None, depth: int = 2, inside: bool = False) -> dict[str, Json]:
    """A valid query, about half as often true as false of the document that it is made near to.

    One for inside an ``$elemMatch`` has no ``$expr`` and no metadata.
    """
    query: dict[str, Json] = {}
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        key, operand = _clause(rng, near, depth, inside)
        query[key] = operand
    if rng.random() < 0.02:
        query["$comment"] = random_value(rng)
    return {} if rng.random() < 0.01 else query


def _clause(rng: random.Random, near: Json, depth: int, inside: bool) -> tuple[str, Json]:
    draw = rng.random()
    if depth and draw < 0.22:
        name = rng.choice(("$and", "$or", "$or", "$or", "$nor"))
        return name, [random_query(rng, near, depth - 1, inside) for _ in range(rng.choice((1, 2, 2, 3)))]
    if not inside and draw < 0.3:
        return "$expr", random_expression(rng)
    if not inside and draw < 0.37:
        return _metadata(rng)
    places = _places(near)
    if draw < 0.42:
        return _null_probe(rng, places)
    if places and draw < 0.96:
        path, value = rng.choice(places)
        return path, copy.deepcopy(value) if rng.random() < 0.1 else _fitting(rng, value, depth)
    path = rng.choice(PATHS)
    return path, _literal(rng) if rng.random() < 0.3 else random_operators(rng, depth)


def _null_probe(rng: random.Random, places: list[tuple[str, Json]]) -> tuple[str, Json]:
    """A question about null or absence, most often one step beyond an array."""
    arrays = [path for path, value in places if isinstance(value, list)] or list(PATHS)
    steps = rng.sample((".a", ".b", ".0", ".1", ".2"), rng.choice((1, 1, 2)))
    name, operand = rng.choice((("$eq", None), ("$ne", None), ("$in", [None, 7]), ("$gte", None), ("$exists", False)))
    return rng.choice(arrays) + "".join(steps), rng.choice((None, {name: copy.copy(operand)}))


def _places(doc: Json, prefix: str = "") -> list[tuple[str, Json]]:
    """The values in a document, each with a path that leads to it: over arrays by number, and straight through."""
    found: list[tuple[str, Json]] = []
    if isinstance(doc, dict):
        for key, value in doc.items():
            found += [(prefix + key, value), *_places(value, f"{prefix}{key}.")]
    elif isinstance(doc, list) and prefix:
        for place, value in enumerate(doc):
            found += [(prefix[:-1], value), (f"{prefix}{place}", value), *_places(value, f"{prefix}{place}.")]
            found += _places(value, prefix) if isinstance(value, dict) else []
    return found


def _fitting(rng: random.Random, value: Json, depth: int) -> dict[str, Json]:
    """Operators, most of which the value satisfies."""
    equals: list[Json] = [copy.deepcopy(value)]
    ways: list[dict[str, Json]] = [
        *({name: equals[0]} for name in ("$eq", "$gte", "$lte")),
        {"$in": _members(rng, depth) + equals},
        {"$exists": True},
        {"$not": random_operators(rng, max(depth - 1, 0))},
        {rng.choice(("$gt", "$lt")): _bound(rng, depth)},
        {"$all": equals},
        {"$type": [rng.choice(TYPES), "number", "string", rng.choice(TYPES)]},
    ]
    if isinstance(value, str):
        ways += [{"$regex": "^" + value}, {"$regex": value.upper(), "$options": "i"}] * 2
    if isinstance(value, int) and not isinstance(value, bool):
        ways += [
            {"$mod": [2, value % 2 if value >= 0 else -(-value % 2)]},
            {"$bitsAllSet": abs(value) & 3},
            _bit_test(rng),
        ]
    if isinstance(value, list):
        ways += [{"$size": len(value)}] * 2
    if isinstance(value, list) and value and depth:
        item = rng.choice(value)
        ways += [{"$elemMatch": _fitting(rng, item, depth - 1)}, {"$all": rng.sample(value, 1)}]
        if isinstance(item, dict):
            ways += [{"$elemMatch": random_query(rng, item, depth - 1, inside=True)}] * 3
    chosen = dict(rng.choice(ways))
    return chosen | _operator(rng, depth) if rng.random() < 0.1 and "$regex" not in chosen else chosen


def _bit_test(rng: random.Random) -> dict[str, Json]:
    return {rng.choice(("$bitsAllClear", "$bitsAnyClear", "$bitsAnySet")): _bits(rng, 0)}


def _literal(rng: random.Random) -> Json:
    """A value that stands for itself, never for operators."""
    return random_value(rng, rng.choice((0, 0, 1, 2)))


def random_operators(rng: random.Random, depth: int) -> dict[str, Json]:
    """An operator document of one to three operators."""
    operators: dict[str, Json] = {}
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        operators.update(_operator(rng, depth))
    return operators


def _operator(rng: random.Random, depth: int) -> dict[str, Json]:
    names = list(OPERATORS) if depth else [name for name in OPERATORS if name not in ("$elemMatch", "$not")]
    name = rng.choice(names)
    if name == "$regex":
        pattern, options = rng.choice(PATTERNS)
        return {"$regex": pattern, "$options": options} if options else {"$regex": pattern}
    return {name: OPERATORS[name](rng, depth)}


def _equal(rng: random.Random, depth: int) -> Json:
    """Return an operand of ``$eq``: also documents that look like operators, which are literal there and only there."""
    return {rng.choice(("$x", "$eq")): 1} if rng.random() < 0.05 else _literal(rng)


def _members(rng: random.Random, depth: int) -> list[Json]:
    members = [_literal(rng) for _ in range(rng.choice((0, 1, 2, 3, 4, 6)))]
    return members + rng.sample(members, 1) if members and rng.random() < 0.1 else members


def _all(rng: random.Random, depth: int) -> list[Json]:
    if depth and rng.random() < 0.3:
        return [{"$elemMatch": _elem_match(rng, depth)} for _ in range(rng.choice((1, 1, 2)))]
    return [_literal(rng) for _ in range(rng.choice((0, 1, 1, 1, 2)))]


def _elem_match(rng: random.Random, depth: int) -> dict[str, Json]:
    return random_operators(rng, depth - 1) if rng.random() < 0.5 else random_query(rng, None, depth - 1, inside=True)


def _type(rng: random.Random, depth: int) -> Json:
    kinds = [rng.choice(TYPES) if rng.random() < 0.7 else rng.choice(CODES) for _ in range(rng.choice((1, 2, 3)))]
    return kinds if rng.random() < 0.6 else kinds[0]


def _bits(rng: random.Random, depth: int) -> Json:
    return rng.choice((0, 1, 2, 3, 2.0, 5, [], [0], [1], [0, 1], [2, 0], [70], [1.0, 63]))


def _mod(rng: random.Random, depth: int) -> list[Json]:
    return [rng.choice((2, 3, -2, 1, 2.7, 4)), rng.choice((0, 0, 1, -1, 1.5))]


def _bound(rng: random.Random, depth: int) -> Json:
    return rng.choice((0, 1, -1, 1.5, "", "x", False, True, None, [], {}, [1])) if rng.random() < 0.7 else _literal(rng)


OPERATORS: dict[str, Callable[[random.Random, int], Json]] = {
    "$eq": _equal,
    "$ne": _equal,
    "$gt": _bound,
    "$gte": _bound,
    "$lt": _bound,
    "$lte": _bound,
    "$in": _members,
    "$nin": _members,
    "$exists": lambda rng, depth: rng.choice((True, True, False, 0, 1, None, "", [], math.nan)),
    "$type": _type,
    "$regex": lambda rng, depth: "",
    "$mod": _mod,
    "$size": lambda rng, depth: rng.choice((0, 1, 2, 3, 1.0)),
    "$all": _all,
    "$elemMatch": _elem_match,
    "$not": lambda rng, depth: random_operators(rng, depth - 1),
    "$bitsAllSet": _bits,
    "$bitsAnySet": _bits,
    "$bitsAllClear": _bits,
    "$bitsAnyClear": _bits,
}


def _metadata(rng: random.Random) -> tuple[str, Json]:
    name = rng.choice(("$topic", "$partition", "$offset", "$time", "$key", "$key.0", "$headers.h", "$headers.trace"))
    if name == "$topic":
        return name, rng.choice((rng.choice(TOPICS), {"$in": list(TOPICS[:2])}, {"$regex": "s$"}, {"$ne": "posts"}))
    if name == "$time":
        time = rng.choice(TIMES)[rng.randrange(2)]
        return name, rng.choice((time, {"$gte": time}, {"$lt": time}, {"$in": [time, 999]}, {"$not": {"$gt": time}}))
    if name in ("$partition", "$offset"):
        return name, {rng.choice(("$gt", "$lte", "$ne", "$eq")): rng.choice((0, 1, 50))}
    return name, _literal(rng) if rng.random() < 0.3 else random_operators(rng, 0)


def random_expression(rng: random.Random, depth: int = 2) -> Json:
    """An expression for ``$expr``; whatever in it is made of constants alone has a value."""
    if depth == 0 or rng.random() < 0.15:
        return _operand(rng)
    names = ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$cmp")
    draw = rng.random()
    if draw < 0.5:
        return {rng.choice(names): [_value_expression(rng, depth), _value_expression(rng, depth)]}
    if draw < 0.75:
        children = [random_expression(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 2, 3)))]
        return {rng.choice(("$and", "$or")): children}
    if draw < 0.85:
        return {"$not": [random_expression(rng, depth - 1)]}
    return _arithmetic(rng, depth)


def _value_expression(rng: random.Random, depth: int) -> Json:
    draw = rng.random()
    if draw < 0.25 and depth:
        return _arithmetic(rng, depth)
    if draw < 0.3:
        return [_operand(rng) for _ in range(rng.randrange(3))]
    if draw < 0.35:
        return {rng.choice(("a", "b")): _operand(rng)}
    return _operand(rng)


def _field(rng: random.Random) -> str:
    return rng.choice(("$a", "$b", "$c", "$a.b", "$a.0", "$b.a", "$$ROOT.a", "$$CURRENT.b", "$a.b.c"))


def _operand(rng: random.Random) -> Json:
    draw = rng.random()
    if draw < 0.55:
        return _field(rng)
    if draw < 0.6:
        return "$$ROOT"
    if draw < 0.7:
        return {"$literal": rng.choice(("$a", {"$x": 1}, random_value(rng)))}
    return random_value(rng, 0)


def _arithmetic(rng: random.Random, depth: int) -> Json:
    """Arithmetic that begins with a field, so that it cannot be refused for what its constants come to."""
    first = _arithmetic(rng, depth - 1) if depth and rng.random() < 0.3 else _field(rng)
    number = rng.choice((1, 2, -1, 0.5, 3, _field(rng)))
    name = rng.choice(("unary", "unary", "$add", "$multiply", "$subtract", "$divide", "$mod", "$pow", "$log", "$round"))
    if name == "unary":
        name = rng.choice(("$abs", "$ceil", "$floor", "$exp", "$ln", "$log10", "$sqrt", "$round", "$trunc"))
        return {name: first if rng.random() < 0.5 else [first]}
    if name in ("$add", "$multiply"):
        return {name: [first, number] + [rng.choice((1, -2, _field(rng))) for _ in range(rng.choice((0, 0, 1)))]}
    if name == "$round":
        return {rng.choice(("$round", "$trunc")): [first, rng.choice((0, 1, -1, 1.0))]}
    return {name: [first, rng.choice((2, 10, _field(rng))) if name == "$log" else number]}


def shuffled(rng: random.Random, query: dict[str, Json]) -> dict[str, Json]:
    """A query of the same meaning: conjuncts moved, split, joined and repeated, members and children reordered.

    ``$and`` is nested or taken apart, equality is written with ``$eq`` or without, ``$ne`` and ``$nin`` with ``$not``
    or without, comments come and go. What stands for itself (values to compare with, expressions) is left alone.
    """
    parts = [_respelled(rng, key, operand) for key, operand in _conjuncts(query) if key != "$comment"]
    if parts and rng.random() < 0.1:
        parts.append(copy.deepcopy(rng.choice(parts)))
    rng.shuffle(parts)
    inline: dict[str, Json] = {}
    apart: list[dict[str, Json]] = []
    for key, operand in parts:
        if key in inline or rng.random() < 0.2:
            if apart and key not in apart[-1] and rng.random() < 0.3:
                apart[-1][key] = operand
            else:
                apart.append({key: operand})
        else:
            inline[key] = operand
    items = list(inline.items()) + [("$comment", "x")] * (rng.random() < 0.05)
    if apart:
        items.insert(rng.randrange(len(items) + 1), ("$and", apart))
    return {"$and": [dict(items)]} if items and rng.random() < 0.05 else dict(items)


def _conjuncts(query: dict[str, Json]) -> list[tuple[str, Json]]:
    """The clauses of a query, those under ``$and`` among them, with the operators of a path taken apart."""
    found: list[tuple[str, Json]] = []
    for key, operand in query.items():
        if key == "$and":
            for child in operand:
                found.extend(_conjuncts(child))
        elif not key.startswith("$") and _has_operators(operand):
            found.extend((key, {name: operand[name] for name in unit}) for unit in _units(operand))
        else:
            found.append((key, operand))
    return found


def _units(operators: dict[str, Json]) -> list[tuple[str, ...]]:
    regex = ("$regex", "$options") if "$options" in operators else ("$regex",)
    return [regex if name == "$regex" else (name,) for name in operators if name != "$options"]


def _has_operators(operand: Json) -> bool:
    return isinstance(operand, dict) and bool(operand) and next(iter(operand)).startswith("$")


def _respelled(rng: random.Random, key: str, operand: Json) -> tuple[str, Json]:
    if key in ("$or", "$nor"):
        children = [shuffled(rng, child) for child in operand]
        return key, _reordered(rng, children)
    if key == "$expr":
        return key, copy.deepcopy(operand)
    if not _has_operators(operand):
        return key, {"$eq": operand} if rng.random() < 0.4 else operand
    if list(operand) == ["$eq"] and not _has_operators(operand["$eq"]) and rng.random() < 0.4:
        return key, operand["$eq"]
    return key, _shuffled_operators(rng, operand)


def _shuffled_operators(rng: random.Random, operators: dict[str, Json]) -> dict[str, Json]:
    changed: list[tuple[str, Json]] = []
    for name, operand in operators.items():
        if name in ("$in", "$nin", "$all") and not (name == "$all" and operand and _has_operators(operand[0])):
            changed.append((name, _reordered(rng, operand)))
        elif name == "$all":
            changed.append((name, [_shuffled_operators(rng, member) for member in _reordered(rng, operand)]))
        elif name in ("$ne", "$nin") and "$not" not in operators and rng.random() < 0.3:
            changed.append(("$not", {"$eq" if name == "$ne" else "$in": operand}))
        elif name == "$not" or (name == "$elemMatch" and _is_value_form(operand)):
            changed.append((name, _shuffled_operators(rng, operand)))
        elif name == "$elemMatch":
            changed.append((name, shuffled(rng, operand)))
        else:
            changed.append((name, operand))
    rng.shuffle(changed)
    return dict(changed)


def _is_value_form(operand: dict[str, Json]) -> bool:
    return _has_operators(operand) and next(iter(operand)) not in ("$and", "$or", "$nor", "$comment")


def _reordered(rng: random.Random, members: list[Json]) -> list[Json]:
    """The members in another order, one of them perhaps twice."""
    found = list(members)
    if found and rng.random() < 0.15:
        found.append(copy.deepcopy(rng.choice(found)))
    rng.shuffle(found)
    return found


KEYS: tuple[str, ...] = (
    *(*OPERATORS, *PATHS, "$and", "$or", "$nor", "$expr", "$comment", "$where", "$text", "$options", "$ref", "$x", "$"),
    *("", ".", "a.", ".a", "a..b", "\0", "$a.b", "$topic", "$headers", "$headers.", "$headers.h", "$key.0", "$time"),
    *("$add", "$subtract", "$divide", "$round", "$abs", "$cmp", "$log", "$pow", "$mod", "$literal"),
)
JUNK: tuple[Json, ...] = (
    *(None, True, False, 0, -1, 1.5, -0.0, math.nan, math.inf, -math.inf, 10**400, -(10**30), 2**63, 2**64, 1e300),
    *("", "$", "$$", "$$ROOT", "$a", "$a.", "(", "[", "a{9999}", "(?=x)", "\\", "\ud800", "\0", "x" * 70, "2024-13-01"),
    *([], {}, [[]], [{}], {"$": 1}, {"": 1}, {"$x": 1}, [{"$elemMatch": 1}], [0, 0], [math.nan, 1], [[1], {"$gt": 1}]),
)


def json_values() -> st.SearchStrategy[Json]:
    """Any JSON value at all: odd keys, deep nests, numbers that are none, integers without end, lone surrogates."""
    keys = st.sampled_from(KEYS) | st.text(st.characters(), max_size=4) | st.sampled_from(("\ud800", "$\udfff"))
    numbers = st.integers() | st.floats() | st.sampled_from((10**400, -(2**63), 2**64))
    leaves = st.none() | st.booleans() | numbers | st.text(st.characters(), max_size=6) | st.sampled_from(JUNK)
    return st.recursive(
        leaves.map(copy.deepcopy),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=20,
    )


def documents() -> st.SearchStrategy[dict[str, Json]]:
    """Documents over the fields of the queries, with values from within and without the alphabet."""
    leaves = st.sampled_from(SCALARS + RARE) | st.integers() | st.floats() | st.text(max_size=3)
    values = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
        max_leaves=8,
    )
    return st.dictionaries(st.sampled_from(FIELDS), values, max_size=4)


def queries() -> st.SearchStrategy[dict[str, Json]]:
    """Valid queries, drawn as ``random_query`` draws them but at Hypothesis's choice."""
    return st.randoms(use_true_random=False).map(lambda rng: random_query(rng, random_document(rng)))


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_names = _texts.filter(lambda text: not text.startswith("$"))
_values = st.recursive(
    _texts | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=6,
)


def written_queries() -> st.SearchStrategy[dict[str, Any]]:
    """Equalities of any values at any paths, and queries of all kinds."""
    return st.dictionaries(_names, _values, max_size=4) | queries().map(_written)


def _written(value: Any) -> Any:
    """The same without null and numbers that are none."""
    if isinstance(value, dict):
        return {name: _written(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_written(item) for item in value]
    return 1 if value is None or (isinstance(value, float) and not math.isfinite(value)) else value

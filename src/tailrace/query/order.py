"""MongoDB's order and equality of decoded JSON values.

Values of different kinds are never equal and are ordered by kind: missing, null, numbers, strings, documents, arrays,
booleans. Numbers compare as numbers (``1`` is ``1.0``), and a boolean is no number. Documents compare member by member
in written order, each by kind, then name, then value; if all are equal, the shorter document comes first.

``compare`` and ``size`` do not recurse, so that no nesting depth can exhaust the stack.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any, Final


class Missing:
    """The class of MISSING, which a path finds where there is no value."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()

KINDS: Final[dict[type, int]] = {Missing: 0, type(None): 1, int: 2, float: 2, str: 3, dict: 4, list: 5, bool: 6}
"""Rank of each kind; an operator can compare two values exactly if their kinds are equal."""

NUMBER: Final = KINDS[int]
OTHER: Final = 7
"""The kind of an object that is no JSON value; it equals only itself."""


def kind(value: Any) -> int:
    """Return the rank of a value's kind."""
    return KINDS.get(value.__class__, OTHER)


def fits_int64(value: int) -> bool:
    """Return whether a signed 64-bit integer holds a number."""
    return -(1 << 63) <= value < 1 << 63


def as_double(value: int) -> int | float:
    """Return an integer beyond 64 bits as a double if that is exact; else unchanged."""
    if fits_int64(value):
        return value
    try:
        double = float(value)
    except OverflowError:
        return value
    return double if double == value else value


def equal(left: Any, right: Any) -> bool:
    """Return whether MongoDB takes two values for equal."""
    if left.__class__ is right.__class__ is str:
        return bool(left == right)
    return compare(left, right) == 0


def compare(left: Any, right: Any) -> int:
    """Return -1, 0 or 1: the order of any two values."""
    open_pairs: list[tuple[Iterator[tuple[Any, Any]], bool, int]] = []
    while True:
        sign = _shallow(left, right)
        if sign:
            return sign
        if left.__class__ is dict:
            open_pairs.append((zip(left.items(), right.items(), strict=False), True, _sign(len(left), len(right))))
        elif left.__class__ is list:
            open_pairs.append((zip(left, right, strict=False), False, _sign(len(left), len(right))))
        while open_pairs:
            pairs, named, lengths = open_pairs[-1]
            pair = next(pairs, None)
            if pair is not None:
                break
            if lengths:
                return lengths
            open_pairs.pop()
        else:
            return 0
        left, right = pair
        if named:
            (left_name, left), (right_name, right) = pair
            sign = _sign(kind(left), kind(right)) or _sign(left_name, right_name)
            if sign:
                return sign


def _shallow(left: Any, right: Any) -> int:
    """Compare kinds and scalars; return 0 for two documents and for two arrays."""
    of = kind(left)
    sign = _sign(of, kind(right))
    if sign or left.__class__ in (dict, list):
        return sign
    if of == NUMBER and (left != left or right != right):
        return int(left == left) - int(right == right)  # NaN comes before every number
    if of == OTHER:
        return 0 if left is right else _sign(id(left), id(right))
    return 0 if left is right else _sign(left, right)


def _sign(left: Any, right: Any) -> int:
    return int(left > right) - int(left < right)


_NAN: Final = ("NaN",)
_BOOLEANS: Final = {True: ("true",), False: ("false",)}


def frozen(value: Any, depth: int) -> Hashable:
    """Return a hashable key; two values up to ``depth`` deep have equal keys exactly if they are equal.

    A part below ``depth`` gets a key that equals no other.
    """
    shape = value.__class__
    if shape is bool:
        return _BOOLEANS[value]
    if shape is list or shape is dict:
        if depth <= 0:
            return object()
        if shape is list:
            return ("[", *[frozen(item, depth - 1) for item in value])
        return ("{", *[(name, frozen(item, depth - 1)) for name, item in value.items()])
    if shape is float and value != value:
        return _NAN
    if shape is int and not fits_int64(value):
        # An attacker can choose integers beyond 64 bits that all have one hash in Python.
        number = as_double(value)
        return number if number.__class__ is float else ("int", hex(value))
    return value if shape in KINDS else object()


def size(value: Any, enough: float = math.inf) -> int:
    """Return the number of values inside a value, itself included; stop counting beyond ``enough``."""
    count, level = 1, [value]
    while level and count <= enough:
        inner: list[Any] = []
        for one in level:
            if one.__class__ is dict:
                inner += one.values()
            elif one.__class__ is list:
                inner += one
        count += len(inner)
        level = inner
    return count

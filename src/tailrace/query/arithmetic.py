"""Arithmetic of ``$expr``: on 64-bit whole numbers where they suffice, else on doubles; null with anything is null."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, Context, Decimal
from typing import Any, TypeAlias

Number: TypeAlias = int | float


MANY = 1 << 30
"""As many operands as there are."""


class Unreckonable(Exception):
    """An operation that has no result for these operands."""


def _needed(value: Any) -> Number:
    """Take an operand: a number, as a processor would hold it."""
    if value.__class__ is float:
        return float(value)
    if value.__class__ is not int:
        raise Unreckonable("needs numbers")
    return _held(value)


def _held(value: int) -> Number:
    """Return a whole number as such if 64 bits hold it, else as a double."""
    if -(1 << 63) <= value < 1 << 63:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _folding(combine: Callable[[Number, Number], Number], neutral: int) -> Callable[..., Number | None]:
    def reckon(*operands: Any) -> Number | None:
        found: Number = neutral
        for operand in operands:
            if operand is None:
                return None
            found = combine(found, _needed(operand))
            if found.__class__ is int:
                found = _held(int(found))
        return found

    return reckon


def _of_one(reckon: Callable[[Number], Number]) -> Callable[[Any], Number | None]:
    def guarded(operand: Any) -> Number | None:
        return None if operand is None else _finished(reckon, _needed(operand))

    return guarded


def _of_two(reckon: Callable[[Number, Number], Number]) -> Callable[[Any, Any], Number | None]:
    def guarded(left: Any, right: Any) -> Number | None:
        if left is None or right is None:
            return None
        return _finished(reckon, _needed(left), _needed(right))

    return guarded


def _finished(reckon: Callable[..., Number], *numbers: Number) -> Number:
    try:
        found = reckon(*numbers)
    except OverflowError:
        return math.inf
    return _held(found) if isinstance(found, int) else found


def _absolute(number: Number) -> Number:
    if number.__class__ is int and number == -(1 << 63):
        raise Unreckonable("has no result of 64 bits")
    return abs(number)


def _divide(left: Number, right: Number) -> Number:
    if not right:
        raise Unreckonable("cannot divide by zero")
    return left / right


def _mod(left: Number, right: Number) -> Number:
    if not right:
        raise Unreckonable("cannot divide by zero")
    if isinstance(left, int) and isinstance(right, int):
        return left % abs(right) if left >= 0 else -(-left % abs(right))
    return math.fmod(left, right) if math.isfinite(left) else math.nan


def _power(base: Number, exponent: Number) -> Number:
    if not base and exponent < 0:
        raise Unreckonable("cannot raise zero to a negative power")
    if isinstance(base, int) and isinstance(exponent, int) and (abs(base) <= 1 or 0 <= exponent <= 63):
        if exponent >= 0:
            return int(base**exponent)
        return base if exponent % 2 else 1
    try:
        found = float(base) ** float(exponent)
    except OverflowError:
        return -math.inf if base < 0 and exponent % 2 else math.inf
    return math.nan if isinstance(found, complex) else found


def _root(number: Number) -> Number:
    if number < 0:
        raise Unreckonable("has no root of a negative number")
    return math.sqrt(number)


def _logarithm(number: Number, base: Number) -> Number:
    if number <= 0 or base <= 0 or base == 1:
        raise Unreckonable("needs a positive number, and a positive base other than 1")
    return math.log(number) / math.log(base)


def _positive(reckon: Callable[[Number], Number]) -> Callable[[Number], Number]:
    def guarded(number: Number) -> Number:
        if number <= 0:
            raise Unreckonable("needs a positive number")
        return reckon(number)

    return guarded


def _to_whole(reckon: Callable[[Number], int]) -> Callable[[Number], Number]:
    return lambda number: reckon(number) if math.isfinite(number) else number


def _rounded(rounding: str) -> Callable[..., Number | None]:
    """Rounding to a decimal place, the units unless one is given; negative places are tens, hundreds, …"""

    def reckon(operand: Any, place: Any = 0) -> Number | None:
        if operand is None or place is None:
            return None
        number, to = _needed(operand), _needed(place)
        if not float(to).is_integer() or not -20 <= to <= 100:
            raise Unreckonable("needs a whole place from -20 to 100")
        if not math.isfinite(number):
            return number
        context = Context(prec=500)
        found = Decimal(number).quantize(Decimal(1).scaleb(-int(to)), rounding=rounding, context=context)
        return _held(int(found)) if isinstance(number, int) else float(found)

    return reckon


ARITHMETIC: dict[str, tuple[int, int, Callable[..., Any]]] = {
    "$abs": (1, 1, _of_one(_absolute)),
    "$add": (0, MANY, _folding(lambda left, right: left + right, 0)),
    "$ceil": (1, 1, _of_one(_to_whole(math.ceil))),
    "$divide": (2, 2, _of_two(_divide)),
    "$exp": (1, 1, _of_one(math.exp)),
    "$floor": (1, 1, _of_one(_to_whole(math.floor))),
    "$ln": (1, 1, _of_one(_positive(math.log))),
    "$log": (2, 2, _of_two(_logarithm)),
    "$log10": (1, 1, _of_one(_positive(math.log10))),
    "$mod": (2, 2, _of_two(_mod)),
    "$multiply": (0, MANY, _folding(lambda left, right: left * right, 1)),
    "$pow": (2, 2, _of_two(_power)),
    "$round": (1, 2, _rounded(ROUND_HALF_EVEN)),
    "$sqrt": (1, 1, _of_one(_root)),
    "$subtract": (2, 2, _of_two(lambda left, right: left - right)),
    "$trunc": (1, 2, _rounded(ROUND_DOWN)),
}
"""Each operator: the least and the most operands it takes, and how it is reckoned."""

"""``$expr``: MongoDB's expressions over the fields of one document: comparisons, logic and arithmetic.

Expressions differ from the rest of a query: values of any two kinds are ordered, a missing field comes before null, a
path maps over the documents of an array instead of searching them for a match, and digits in a path are names.
Arithmetic uses 64-bit integers where they suffice, else doubles; an operation on null gives null.

Where MongoDB would fail on a document (a string is added, the divisor is zero), the ``$expr`` does not match it. An
expression that fails for every document is refused when it is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, Context, Decimal
from typing import Any, NoReturn, TypeAlias

import msgspec

from tailrace.errors import QueryError
from tailrace.query.tree import CheckFactory, Node
from tailrace.query.value import MAX_STEPS, MISSING, Check, compare, fits_int64

Number: TypeAlias = int | float

ANY_NUMBER = 1 << 30
"""No limit on the number of operands."""
Scope: TypeAlias = dict[tuple[str, ...], Any]
"""Path -> its value in the document, so that each path is followed once; the empty path has the document itself."""

Evaluate: TypeAlias = Callable[[Scope], Any]
Make: TypeAlias = Callable[[list[Evaluate]], Evaluate]
"""Makes the evaluation of an operator from those of its operands."""


class ArithmeticFailure(Exception):
    """An operation has no result for these operands."""


class Expr(Node, frozen=True):
    source: Any

    @property
    def cost(self) -> int:
        return 20

    def check(self, sharing: CheckFactory | None = None) -> Check:
        if sharing is not None:
            return sharing(self)
        value = compile_expression(self.source, lambda: None).value

        def test(document: Any, context: dict[str, Any]) -> bool:
            try:
                return _true(value({(): document}))
            except ArithmeticFailure:
                return False

        return test

    @property
    def fields(self) -> frozenset[str] | None:
        """Top-level fields that the expression reads; None for all."""
        return compile_expression(self.source, lambda: None).fields


class Expression(msgspec.Struct, frozen=True):
    """A compiled expression. ``fields`` are the top-level ones that it reads; None for all."""

    value: Evaluate
    fields: frozenset[str] | None = frozenset()
    constant: bool = True


def compile_expression(source: Any, count: Callable[[], None]) -> Expression:
    """Compile an expression and call ``count`` for each of its parts; QueryError if it is refused."""
    count()
    if isinstance(source, str) and source.startswith("$"):
        return _path(source)
    if isinstance(source, list):
        items = [compile_expression(item, count) for item in source]
        values = [item.value for item in items]
        # A missing value in a list is null.
        return _over(items, lambda scope: [_or_null(value(scope)) for value in values])
    if isinstance(source, dict):
        if any(name.startswith("$") for name in source):
            return _operator(source, count)
        return _document(source, count)
    return Expression(lambda scope: source)


def _operator(source: dict[str, Any], count: Callable[[], None]) -> Expression:
    if len(source) != 1:
        _refuse(next(name for name in source if name.startswith("$")), "must be the only name in its document")
    [(name, operand)] = source.items()
    if name == "$literal":
        return Expression(lambda scope: operand)
    least, most, make = OPERATORS.get(name) or _refuse(name, "is not supported in $expr")
    listed = operand if isinstance(operand, list) else [operand]
    if not least <= len(listed) <= most:
        wanted = f"{least}" if least == most else f"{least} or more" if most == ANY_NUMBER else f"{least} to {most}"
        _refuse(name, f"takes {wanted} operand{'s' if most > 1 else ''}, not {len(listed)}")
    operands = [compile_expression(item, count) for item in listed]
    found = _over(operands, make([item.value for item in operands]))
    if found.constant:
        try:
            value = found.value({(): {}})
        except ArithmeticFailure as error:
            _refuse(name, str(error))
        return Expression(lambda scope: value)
    return found


def _document(source: dict[str, Any], count: Callable[[], None]) -> Expression:
    for name in source:
        if not name or "." in name:
            _refuse("$expr", f"names a field {name[:60]!r}: names in it may not be empty or have dots")
    items = [compile_expression(item, count) for item in source.values()]
    members = list(zip(source, [item.value for item in items], strict=True))

    def make(scope: Scope) -> dict[str, Any]:
        found = {name: value(scope) for name, value in members}
        return {name: value for name, value in found.items() if value is not MISSING}

    return _over(items, make)


def _over(operands: list[Expression], value: Evaluate) -> Expression:
    fields: frozenset[str] | None = frozenset()
    for operand in operands:
        fields = None if fields is None or operand.fields is None else fields | operand.fields
    return Expression(value, fields, all(operand.constant for operand in operands))


def _path(source: str) -> Expression:
    variable, _, rest = source[2:].partition(".") if source.startswith("$$") else ("CURRENT", "", source[1:])
    if variable == "REMOVE" and not rest:
        return Expression(lambda scope: MISSING)
    if variable not in ("ROOT", "CURRENT"):
        _refuse("$expr", f"has a variable {source[:60]!r}: only $$ROOT, $$CURRENT and $$REMOVE are known")
    if not rest and source.startswith("$$") and not source.endswith("."):
        return Expression(lambda scope: scope[()], None, False)
    steps = tuple(rest.split("."))
    if any(not step or step.startswith("$") or "\0" in step for step in steps):
        _refuse("$expr", f"has a path {source[:60]!r}: its names may not be empty or begin with a dollar")
    if len(steps) > MAX_STEPS:
        _refuse("$expr", f"has a path of {len(steps):,} steps; {MAX_STEPS} are allowed")

    def find(scope: Scope) -> Any:
        if steps not in scope:
            scope[steps] = _follow(scope[()], steps)
        return scope[steps]

    return Expression(find, frozenset(steps[:1]), False)


def _follow(value: Any, steps: tuple[str, ...]) -> Any:
    for number, step in enumerate(steps):
        if value.__class__ is list:
            rest = steps[number:]
            found = [_follow(item, rest) for item in value if item.__class__ is dict]
            return [item for item in found if item is not MISSING]
        if value.__class__ is not dict:
            return MISSING
        value = value.get(step, MISSING)
    return value


def _or_null(value: Any) -> Any:
    return None if value is MISSING else value


def _true(value: Any) -> bool:
    """Return whether a value counts as true: all do except false, null, zero and MISSING."""
    return not (value is None or value is MISSING or value is False or (value == 0 and value.__class__ is not str))


def _comparison(holds: Callable[[int], Any]) -> Make:
    def make(operands: list[Evaluate]) -> Evaluate:
        left, right = operands
        return lambda scope: holds(compare(left(scope), right(scope)))

    return make


def _numeric(compute: Callable[..., Any]) -> Make:
    def make(operands: list[Evaluate]) -> Evaluate:
        return lambda scope: compute(*[_or_null(value(scope)) for value in operands])

    return make


def _logic(holds: Callable[[Iterable[bool]], bool]) -> Make:
    return lambda operands: lambda scope: holds(_true(value(scope)) for value in operands)


def _number(value: Any) -> Number:
    if value.__class__ is float:
        return float(value)
    if value.__class__ is not int:
        raise ArithmeticFailure("needs numbers")
    return _machine_number(value)


def _machine_number(value: int) -> Number:
    """Return an integer unchanged if 64 bits hold it, else as a double."""
    if fits_int64(value):
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _folding(combine: Callable[[Number, Number], Number], neutral: int) -> Make:
    def compute(*operands: Any) -> Number | None:
        found: Number = neutral
        for operand in operands:
            if operand is None:
                return None
            found = combine(found, _number(operand))
            if found.__class__ is int:
                found = _machine_number(int(found))
        return found

    return _numeric(compute)


def _strict(compute: Callable[..., Number]) -> Make:
    """Return the operator that computes numbers; null if an operand is null, infinity on overflow."""

    def guarded(*operands: Any) -> Number | None:
        if any(operand is None for operand in operands):
            return None
        numbers = [_number(operand) for operand in operands]
        try:
            result = compute(*numbers)
        except OverflowError:
            return math.inf
        return _machine_number(result) if isinstance(result, int) else result

    return _numeric(guarded)


def _absolute(number: Number) -> Number:
    if number.__class__ is int and number == -(1 << 63):
        raise ArithmeticFailure("has no result of 64 bits")
    return abs(number)


def _divide(left: Number, right: Number) -> Number:
    if not right:
        raise ArithmeticFailure("cannot divide by zero")
    return left / right


def _mod(left: Number, right: Number) -> Number:
    if not right:
        raise ArithmeticFailure("cannot divide by zero")
    if isinstance(left, int) and isinstance(right, int):
        return left % abs(right) if left >= 0 else -(-left % abs(right))
    return math.fmod(left, right) if math.isfinite(left) else math.nan


def _power(base: Number, exponent: Number) -> Number:
    if not base and exponent < 0:
        raise ArithmeticFailure("cannot raise zero to a negative power")
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
        raise ArithmeticFailure("has no root of a negative number")
    return math.sqrt(number)


def _logarithm(number: Number, base: Number) -> Number:
    if number <= 0 or base <= 0 or base == 1:
        raise ArithmeticFailure("needs a positive number, and a positive base other than 1")
    return math.log(number) / math.log(base)


def _positive(compute: Callable[[Number], Number]) -> Callable[[Number], Number]:
    def guarded(number: Number) -> Number:
        if number <= 0:
            raise ArithmeticFailure("needs a positive number")
        return compute(number)

    return guarded


def _to_whole(compute: Callable[[Number], int]) -> Callable[[Number], Number]:
    return lambda number: compute(number) if math.isfinite(number) else number


def _rounded(rounding: str) -> Callable[..., Number]:
    """Return the function that rounds to a decimal place, by default to units; negative places are tens, hundreds, …"""

    def compute(number: Number, place: Number = 0) -> Number:
        if not float(place).is_integer() or not -20 <= place <= 100:
            raise ArithmeticFailure("needs a whole place from -20 to 100")
        if not math.isfinite(number):
            return number
        context = Context(prec=500)
        found = Decimal(number).quantize(Decimal(1).scaleb(-int(place)), rounding=rounding, context=context)
        return int(found) if isinstance(number, int) else float(found)

    return compute


OPERATORS: dict[str, tuple[int, int, Make]] = {
    "$cmp": (2, 2, _comparison(lambda sign: sign)),
    "$eq": (2, 2, _comparison(lambda sign: sign == 0)),
    "$ne": (2, 2, _comparison(lambda sign: sign != 0)),
    "$gt": (2, 2, _comparison(lambda sign: sign > 0)),
    "$gte": (2, 2, _comparison(lambda sign: sign >= 0)),
    "$lt": (2, 2, _comparison(lambda sign: sign < 0)),
    "$lte": (2, 2, _comparison(lambda sign: sign <= 0)),
    "$and": (0, ANY_NUMBER, _logic(all)),
    "$or": (0, ANY_NUMBER, _logic(any)),
    "$not": (1, 1, _logic(lambda values: not any(values))),
    "$abs": (1, 1, _strict(_absolute)),
    "$add": (0, ANY_NUMBER, _folding(lambda left, right: left + right, 0)),
    "$ceil": (1, 1, _strict(_to_whole(math.ceil))),
    "$divide": (2, 2, _strict(_divide)),
    "$exp": (1, 1, _strict(math.exp)),
    "$floor": (1, 1, _strict(_to_whole(math.floor))),
    "$ln": (1, 1, _strict(_positive(math.log))),
    "$log": (2, 2, _strict(_logarithm)),
    "$log10": (1, 1, _strict(_positive(math.log10))),
    "$mod": (2, 2, _strict(_mod)),
    "$multiply": (0, ANY_NUMBER, _folding(lambda left, right: left * right, 1)),
    "$pow": (2, 2, _strict(_power)),
    "$round": (1, 2, _strict(_rounded(ROUND_HALF_EVEN))),
    "$sqrt": (1, 1, _strict(_root)),
    "$subtract": (2, 2, _strict(lambda left, right: left - right)),
    "$trunc": (1, 2, _strict(_rounded(ROUND_DOWN))),
}
"""Operator -> least and most operands, and its evaluation."""


def _refuse(operator: str, what: str) -> NoReturn:
    raise QueryError(what, operator[:60], "" if operator == "$expr" else "$expr")

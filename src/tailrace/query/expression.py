"""``$expr``: MongoDB's expressions over the fields of one document: comparisons, logic and arithmetic.

Expressions have another logic than the rest of a query: values of any two kinds are ordered, a missing field comes
before null, a path does not look into arrays for a match but maps over their documents, and digits in it are names.

Where MongoDB would fail while it reads a document (a string is added, zero is divided by), the ``$expr`` does not hold
for that document. An expression that fails whatever the document is refused when it is compiled.

Arithmetic of ``$expr``: on 64-bit whole numbers where they suffice, else on doubles; null with anything is null.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, Context, Decimal
from typing import Any, NoReturn, TypeAlias

import msgspec

from tailrace.errors import QueryError
from tailrace.query.order import MISSING, compare
from tailrace.query.path import LONGEST, Check
from tailrace.query.tree import Node, Sharing

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


Scope: TypeAlias = dict[tuple[str, ...], Any]
"""What paths are known to find in a document; the empty one, the document itself. So each is followed once."""

Evaluate: TypeAlias = Callable[[Scope], Any]


class Expr(Node, frozen=True):
    """A condition on the document as a whole."""

    source: Any

    @property
    def cost(self) -> int:
        return 20

    def check(self, sharing: Sharing | None = None) -> Check:
        if sharing is not None:
            return sharing(self)
        value = checked(self.source, lambda: None).value

        def test(document: Any, known: dict[str, Any]) -> bool:
            try:
                return _true(value({(): document}))
            except Unreckonable:
                return False

        return test

    @property
    def fields(self) -> frozenset[str] | None:
        """The top-level fields that it needs; None if it needs the document."""
        return checked(self.source, lambda: None).fields


class Expression(msgspec.Struct, frozen=True):
    """A compiled expression. ``fields`` are those that it reads; None for all."""

    value: Evaluate
    fields: frozenset[str] | None = frozenset()
    constant: bool = True


def checked(source: Any, count: Callable[[], None]) -> Expression:
    """Compile an expression, or refuse it; ``count`` is called once for each part of it."""
    count()
    if isinstance(source, str) and source.startswith("$"):
        return _path(source)
    if isinstance(source, list):
        items = [checked(item, count) for item in source]
        values = [item.value for item in items]
        # A list has no holes: what is missing is null in it.
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
    given = operand if isinstance(operand, list) else [operand]
    if not least <= len(given) <= most:
        wanted = f"{least}" if least == most else f"{least} or more" if most == MANY else f"{least} to {most}"
        _refuse(name, f"takes {wanted} operand{'s' if most > 1 else ''}, not {len(given)}")
    operands = [checked(item, count) for item in given]
    found = _over(operands, make([item.value for item in operands]))
    if found.constant:
        try:
            value = found.value({(): {}})
        except Unreckonable as error:
            _refuse(name, str(error))
        return Expression(lambda scope: value)
    return found


def _document(source: dict[str, Any], count: Callable[[], None]) -> Expression:
    for name in source:
        if not name or "." in name:
            _refuse("$expr", f"names a field {name[:60]!r}: names in it may not be empty or have dots")
    items = [checked(item, count) for item in source.values()]
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
    if len(steps) > LONGEST:
        _refuse("$expr", f"has a path of {len(steps):,} steps; {LONGEST} are allowed")

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
    """Whether a value counts as true: all do but false, null, zero and what is missing."""
    return not (value is None or value is MISSING or value is False or (value == 0 and value.__class__ is not str))


def _comparison(holds: Callable[[int], Any]) -> Callable[[list[Evaluate]], Evaluate]:
    def make(operands: list[Evaluate]) -> Evaluate:
        left, right = operands
        return lambda scope: holds(compare(left(scope), right(scope)))

    return make


def _numeric(reckon: Callable[..., Any]) -> Callable[[list[Evaluate]], Evaluate]:
    def make(operands: list[Evaluate]) -> Evaluate:
        return lambda scope: reckon(*[_or_null(value(scope)) for value in operands])

    return make


def _all(operands: list[Evaluate]) -> Evaluate:
    return lambda scope: all(_true(value(scope)) for value in operands)


def _any(operands: list[Evaluate]) -> Evaluate:
    return lambda scope: any(_true(value(scope)) for value in operands)


def _not(operands: list[Evaluate]) -> Evaluate:
    [value] = operands
    return lambda scope: not _true(value(scope))


OPERATORS: dict[str, tuple[int, int, Callable[[list[Evaluate]], Evaluate]]] = {
    "$cmp": (2, 2, _comparison(lambda sign: sign)),
    "$eq": (2, 2, _comparison(lambda sign: sign == 0)),
    "$ne": (2, 2, _comparison(lambda sign: sign != 0)),
    "$gt": (2, 2, _comparison(lambda sign: sign > 0)),
    "$gte": (2, 2, _comparison(lambda sign: sign >= 0)),
    "$lt": (2, 2, _comparison(lambda sign: sign < 0)),
    "$lte": (2, 2, _comparison(lambda sign: sign <= 0)),
    "$and": (0, MANY, _all),
    "$or": (0, MANY, _any),
    "$not": (1, 1, _not),
    **{name: (least, most, _numeric(reckon)) for name, (least, most, reckon) in ARITHMETIC.items()},
}


def _refuse(operator: str, what: str) -> NoReturn:
    raise QueryError(what, operator[:60], "" if operator == "$expr" else "$expr")

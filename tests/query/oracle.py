"""A second reading of the query language, slow and plain: the judge of the matcher in property tests.

``holds`` interprets the query document as it stands, once for every document, with nothing prepared and nothing
remembered. It takes the query to be valid. It shares no code with the matcher and was written without reading it,
from the manual and the behaviour of MongoDB 8 (and of 9, for null on a path that runs through an array).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, Context, Decimal
from functools import partial
from typing import Any


class Missing:
    """Value of a path that leads nowhere: less than null, and equal to it in a query (not in ``$expr``)."""


MISSING = Missing()

Elements = Callable[[bool], Iterator[Any]]
"""The elements that an operator sees; asked with true, those of a final array come before the array itself."""

LOGICAL = ("$and", "$or", "$nor", "$comment", "$expr")
ORDERS = {"$eq": operator.eq, "$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}
TYPES = {type(None): "null", bool: "bool", str: "string", dict: "object", list: "array"}
TYPE_CODES = {1: "double", 2: "string", 3: "object", 4: "array", 8: "bool", 10: "null", 16: "int", 18: "long"}
RANKS = {Missing: 0, type(None): 1, int: 2, float: 2, str: 3, dict: 4, list: 5, bool: 6}
NO_TIMES = ("$regex", "$options", "$type")
FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE, "u": re.UNICODE}


def holds(query: dict[str, Any], doc: Any, record: dict[str, Any] | None = None, mongo: int = 8) -> bool:
    """Return True if the document (and the record that carried it) satisfies the query."""
    metadata = {"$time" if name == "time_ms" else "$" + name: value for name, value in (record or {}).items()}
    return _query(query, doc if isinstance(doc, dict) else {}, metadata, mongo)


def _query(query: dict[str, Any], doc: dict[str, Any], metadata: dict[str, Any], mongo: int) -> bool:
    return all(_clause(key, operand, doc, metadata, mongo) for key, operand in query.items())


def _clause(key: str, operand: Any, doc: dict[str, Any], metadata: dict[str, Any], mongo: int) -> bool:
    if key == "$comment":
        return True
    if key in ("$and", "$or", "$nor"):
        answers = [_query(child, doc, metadata, mongo) for child in operand]
        return all(answers) if key == "$and" else any(answers) == (key == "$or")
    if key == "$expr":
        try:
            return _truth(evaluate(operand, doc))
        except Unfit:
            return False
    steps = key.split(".")
    root = metadata if key.startswith("$") else doc
    operators = operand if _has_operators(operand) else {"$eq": operand}
    if steps[0] == "$time":
        operators = _in_millis(operators)
    return _operators(operators, lambda expand: _walk(root, steps, expand, mongo), mongo)


def _has_operators(operand: Any) -> bool:
    return isinstance(operand, dict) and bool(operand) and next(iter(operand)).startswith("$")


def _in_millis(operand: Any) -> Any:
    """Return a condition on the time of a record, with every time that is written out turned into milliseconds."""
    if isinstance(operand, str):
        time = datetime.fromisoformat(operand)
        return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
    if isinstance(operand, list):
        return [_in_millis(member) for member in operand]
    if isinstance(operand, dict):
        return {key: value if key in NO_TIMES else _in_millis(value) for key, value in operand.items()}
    return operand


def _walk(doc: dict[str, Any], steps: list[str], expand: bool, mongo: int) -> Iterator[Any]:
    key, *rest = steps
    value = doc.get(key, MISSING)
    if isinstance(value, list):
        yield from _walk_array(value, rest, expand, mongo, by_key=True)
    elif not rest:
        yield value
    elif isinstance(value, dict):
        yield from _walk(value, rest, expand, mongo)
    else:
        yield MISSING


def _walk_array(array: list[Any], steps: list[str], expand: bool, mongo: int, by_key: bool) -> Iterator[Any]:
    """Walk the rest of the path from an array, which was reached by a key or by its place in another array."""
    if not steps:
        if expand:
            yield from array
        yield array
        return
    step, *rest = steps
    for place, element in enumerate(array):
        if isinstance(element, dict):
            yield from _walk(element, steps, expand, mongo)
        if step == str(place):
            if not rest:
                yield element
            elif isinstance(element, dict):
                yield from _walk(element, rest, expand, mongo)
            elif isinstance(element, list):
                yield from _walk_array(element, rest, expand, mongo, by_key=False)
    if mongo >= 9 and _leads_nowhere(array, step, rest, by_key):
        yield MISSING


def _leads_nowhere(array: list[Any], step: str, rest: list[str], by_key: bool) -> bool:
    """MongoDB 9: whether an array on the way counts as a missing field (as well).

    A step that is a name leads nowhere from any element that is no document, and from an empty array. A step that is a
    number leads nowhere only if no element is a document and none at that place ends the path or is an array. An
    array that was itself reached by a number is judged by its elements alone.
    """
    if not step.isdecimal():
        return any(not isinstance(element, dict) for element in array) or (by_key and not array)
    if not by_key or any(isinstance(element, dict) for element in array):
        return False
    return not any(step == str(place) and (not rest or isinstance(item, list)) for place, item in enumerate(array))


def _operators(operators: dict[str, Any], elements: Elements, mongo: int) -> bool:
    return all(_operator(name, operand, operators, elements, mongo) for name, operand in operators.items())


def _operator(name: str, operand: Any, siblings: dict[str, Any], elements: Elements, mongo: int) -> bool:
    if name in ("$ne", "$nin"):
        return not _operator("$eq" if name == "$ne" else "$in", operand, siblings, elements, mongo)
    if name == "$not":
        return not _operators(operand, elements, mongo)
    if name == "$options":
        return True
    if name == "$exists":
        return _truth(operand) == any(element is not MISSING for element in elements(True))
    if name == "$all":
        nested = bool(operand) and isinstance(operand[0], dict) and next(iter(operand[0]), "") == "$elemMatch"
        members = operand if nested else [{"$eq": member} for member in operand]
        return bool(members) and all(_operators(member, elements, mongo) for member in members)
    if name == "$elemMatch":
        return any(_elem_match(operand, element, mongo) for element in elements(False))
    if name == "$size":
        return any(isinstance(element, list) and len(element) == operand for element in elements(False))
    return any(_satisfies(element, name, operand, siblings) for element in elements(True))


def _elem_match(operand: dict[str, Any], array: Any, mongo: int) -> bool:
    if not isinstance(array, list):
        return False
    if _has_operators(operand) and next(iter(operand)) not in LOGICAL:
        return any(_operators(operand, partial(lambda item, _: iter([item]), item), mongo) for item in array)
    documents = [item for item in array if isinstance(item, dict)]
    documents += [{str(place): value for place, value in enumerate(item)} for item in array if isinstance(item, list)]
    return any(_query(operand, document, {}, mongo) for document in documents)


def _satisfies(element: Any, name: str, operand: Any, siblings: dict[str, Any]) -> bool:
    """Return True if one element satisfies one operator that looks at elements one by one."""
    if name == "$in":
        return any(_satisfies(element, "$eq", member, siblings) for member in operand)
    if element is MISSING:
        return operand is None and name in ("$eq", "$gte", "$lte")
    if name in ORDERS:
        alike = RANKS[type(element)] == RANKS[type(operand)] and _is_nan(element) == _is_nan(operand)
        return alike and ORDERS[name](compare(element, operand), 0)
    if name == "$type":
        return any(_is_type(element, kind) for kind in (operand if isinstance(operand, list) else [operand]))
    if name == "$regex":
        flags = sum(FLAGS[letter] for letter in set(siblings.get("$options", "")))
        return isinstance(element, str) and re.search(operand, element, flags) is not None
    number = _whole(element)
    if name == "$mod":
        divisor, remainder = map(math.trunc, operand)
        return number is not None and _remainder(number, divisor) == remainder
    if number is None or number != element:
        return False
    # Every place over 63 is the sign, as it is in an integer without end.
    places = map(int, operand) if isinstance(operand, list) else (bit for bit in range(63) if int(operand) >> bit & 1)
    right = [(number >> place & 1) == name.endswith("Set") for place in places]
    return all(right) if name.startswith("$bitsAll") else any(right)


def _is_type(element: Any, kind: Any) -> bool:
    name = kind if isinstance(kind, str) else TYPE_CODES.get(kind, "")
    if not _is_number(element):
        return name == TYPES[type(element)]
    whole = _whole(element) if isinstance(element, int) else None
    return name in ("number", "double" if whole is None else "int" if -(2**31) <= whole < 2**31 else "long")


def _whole(value: Any) -> int | None:
    """A number without its fraction, if it is one that a 64-bit integer can hold."""
    if not _is_number(value) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return math.trunc(value) if -(2**63) <= math.trunc(value) < 2**63 else None


def _remainder(number: int, divisor: int) -> int:
    return abs(number) % abs(divisor) * (1 if number >= 0 else -1)


def _truth(value: Any) -> bool:
    return not _is_null(value) and value is not False and not (_is_number(value) and value == 0)


def _is_number(value: Any) -> bool:
    return RANKS[type(value)] == 2


def _is_null(value: Any) -> bool:
    return value is None or value is MISSING


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def compare(left: Any, right: Any) -> int:
    """The total order of values: by type, then by value; NaN comes before all other numbers."""
    if RANKS[type(left)] != RANKS[type(right)]:
        return compare(RANKS[type(left)], RANKS[type(right)])
    if left is None or left is MISSING:
        return 0
    if isinstance(left, dict):  # field by field: the type of the value, the name, the value
        left, right = ([[RANKS[type(value)], key, value] for key, value in doc.items()] for doc in (left, right))
    if isinstance(left, list):
        orders = (compare(one, other) for one, other in zip(left, right, strict=False))
        return next((order for order in orders if order), compare(len(left), len(right)))
    if _is_nan(left) or _is_nan(right):
        return _is_nan(right) - _is_nan(left)
    return int(left > right) - int(left < right)


class Unfit(Exception):
    """An expression that has no value for this document: it divides by zero, or meets a type that it cannot take."""


def evaluate(expression: Any, doc: Any) -> Any:
    """The value of an aggregation expression."""
    if isinstance(expression, str) and expression.startswith("$"):
        steps = expression.removeprefix("$").removeprefix("$ROOT").removeprefix("$CURRENT").split(".")
        return _get(doc, [step for step in steps if step])
    if isinstance(expression, list):
        return [None if value is MISSING else value for value in (evaluate(member, doc) for member in expression)]
    if not isinstance(expression, dict):
        return expression
    if not _has_operators(expression):
        fields = [(key, evaluate(member, doc)) for key, member in expression.items()]
        return {key: value for key, value in fields if value is not MISSING}
    ((name, operand),) = expression.items()
    if name == "$literal":
        return operand
    return _operation(name, (evaluate(one, doc) for one in (operand if isinstance(operand, list) else [operand])))


def _get(value: Any, steps: list[str]) -> Any:
    if not steps:
        return value
    if isinstance(value, dict):
        return _get(value.get(steps[0], MISSING), steps[1:])
    if isinstance(value, list):
        found = [_get(item, steps) for item in value if isinstance(item, dict)]
        return [item for item in found if item is not MISSING]
    return MISSING


def _operation(name: str, arguments: Iterator[Any]) -> Any:
    """The value of an operation; arguments are evaluated from the left, and only until it is known."""
    if name in ("$and", "$or"):
        return all(map(_truth, arguments)) if name == "$and" else any(map(_truth, arguments))
    if name == "$not":
        return not _truth(next(arguments))
    if name in ("$cmp", "$ne") or name in ORDERS:
        order = compare(next(arguments), next(arguments))
        return order if name == "$cmp" else order != 0 if name == "$ne" else ORDERS[name](order, 0)
    if name in ("$add", "$multiply"):
        result: Any = 0 if name == "$add" else 1
        for argument in arguments:
            if _is_null(argument):
                return None
            result = _computed(name, [result, argument])
        return result
    values = list(arguments)
    if name in ("$round", "$trunc") and not _is_null(values[0]):
        _computed(name, values[:1])  # asked for its number before its places
    return None if any(map(_is_null, values)) else _computed(name, values)


def _computed(name: str, numbers: list[Any]) -> Any:
    """A number as MongoDB computes it: what 64 bits do not hold is a double, and doubles have infinities."""
    fits, compute = ARITHMETIC[name]
    if not all(map(_is_number, numbers)) or not fits(*numbers):
        raise Unfit
    try:
        return _narrow(compute(*map(_narrow, numbers)))
    except OverflowError:
        return math.inf
    except ValueError:
        return math.nan


def _narrow(number: Any) -> Any:
    return number if _whole(number) is not None else float(number)


def _pow(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and 0 <= exponent <= 64:
        return base**exponent
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return -math.inf if base < 0 and exponent % 2 == 1 else math.inf


def _round(mode: str, value: Any, places: Any = 0) -> Any:
    if not math.isfinite(value) or (isinstance(value, int) and places >= 0):
        return value
    return type(value)(Decimal(value).quantize(Decimal(1).scaleb(-int(places)), mode, Context(prec=999)))


ARITHMETIC: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "$add": (lambda *_: True, operator.add),
    "$multiply": (lambda *_: True, operator.mul),
    "$subtract": (lambda *_: True, operator.sub),
    "$divide": (lambda _, divisor: divisor != 0, lambda number, divisor: float(number) / float(divisor)),
    "$mod": (lambda _, by: by != 0, lambda n, by: _remainder(n, by) if isinstance(n + by, int) else math.fmod(n, by)),
    "$pow": (lambda base, exponent: base != 0 or not exponent < 0, _pow),
    "$log": (lambda n, base: not n <= 0 and not base <= 0 and base != 1, lambda n, base: math.log(n) / math.log(base)),
    "$ln": (lambda n: not n <= 0, math.log),
    "$log10": (lambda n: not n <= 0, math.log10),
    "$sqrt": (lambda n: not n < 0, math.sqrt),
    "$exp": (lambda _: True, math.exp),
    "$abs": (lambda n: isinstance(n, float) or n != -(2**63), abs),
    "$ceil": (lambda _: True, lambda n: math.ceil(n) if math.isfinite(n) else n),
    "$floor": (lambda _: True, lambda n: math.floor(n) if math.isfinite(n) else n),
    "$round": (lambda _, places=0: _whole(places) == places and -20 <= places <= 100, partial(_round, ROUND_HALF_EVEN)),
    "$trunc": (lambda _, places=0: _whole(places) == places and -20 <= places <= 100, partial(_round, ROUND_DOWN)),
}

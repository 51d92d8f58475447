"""JSON values: MongoDB's order and equality of decoded ones; fields and canonical form of encoded ones.

Values of different kinds are never equal and are ordered by kind: missing, null, numbers, strings, documents, arrays,
booleans. Numbers compare as numbers (``1`` is ``1.0``), and a boolean is no number. Documents compare member by member
in written order, each by kind, then name, then value; if all are equal, the shorter document comes first. ``compare``
and ``size`` do not recurse, so that no nesting depth can exhaust the stack.

Some fields of an encoded value are read without decoding the rest. Invariant: two values have the same canonical form
exactly if they are the same JSON value. ``1``, ``1.0`` and ``1e0`` are the same; ``1``, ``"1"`` and ``true`` are not;
the order of an object's keys does not matter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, TypeAlias, TypedDict

import msgspec


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


FieldPath: TypeAlias = tuple[str, ...]
"""The keys that lead from an object to a value inside it."""

CACHE_SIZE = 100_000
"""Canonical forms cached per process; the cache is emptied when it is full."""

_PLAIN = re.compile(rb'"[^"\\]*"|0|-?[1-9]\d{0,18}|true|false|null')
"""Values that are their own canonical form, as most are."""

_NUMBER = re.compile(rb"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?")

_UNSUPPORTED_NAME = re.compile(r'["\\\x00-\x1f]')
"""Characters that msgspec does not allow in a field's name."""

_MAX_TYPED_FIELDS = 12
"""With more fields than these, picking them out costs about as much as decoding all."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_typed_dict: Any = TypedDict


def document_reader(fields: frozenset[str] | None) -> Callable[[bytes], Any]:
    """Return a function that decodes these top-level fields of a value, where present; None stands for all fields.

    The function may decode more than these fields, and decodes a value that is no object as a whole. It reads integers
    exactly, up to Python's limit of 4,300 digits, and takes the last of several members with one name. It raises
    ValueError if the value is no JSON, or if a requested field holds invalid UTF-8 or a number beyond a float's range,
    such as ``1e400``. It does not check the other fields.
    """
    # msgspec does not match names beyond ASCII.
    if fields is None or len(fields) > _MAX_TYPED_FIELDS or not all(map(str.isascii, fields)):
        return _decode
    decode = msgspec.json.Decoder(_typed_dict("Fields", dict.fromkeys(sorted(fields), Any), total=False)).decode

    def read(value: bytes) -> Any:
        try:
            return decode(value)
        except msgspec.ValidationError:  # no object; or a number out of range, which is refused again
            return _decode(value)

    return read


def field_reader(names: Sequence[str]) -> Callable[[bytes], Sequence[bytes | None]]:
    """Return a function that returns these top-level fields of a value, undecoded; None for those that it lacks."""
    if any(map(_UNSUPPORTED_NAME.search, names)):
        return lambda value: [follow(value, (name,)) for name in names]
    attributes = [(f"f{i}", msgspec.Raw, msgspec.Raw()) for i in range(len(names))]
    renamed = {f"f{i}": name for i, name in enumerate(names)}
    decode = msgspec.json.Decoder(msgspec.defstruct("Fields", attributes, rename=renamed)).decode
    nothing: tuple[None, ...] = (None,) * len(names)

    def read(value: bytes) -> Sequence[bytes | None]:
        try:
            found = decode(value)
        except ValueError:
            return nothing
        return [bytes(raw) or None for raw in msgspec.structs.astuple(found)]

    return read


def split_path(path: str) -> FieldPath:
    """Return the keys of a dotted path."""
    return tuple(path.split("."))


def follow(raw: bytes | None, path: Sequence[str]) -> bytes | None:
    """Return the value at a path inside a value, undecoded; None if there is none."""
    for step in path:
        if raw is None:
            return None
        found = members(raw).get(step)
        raw = None if found is None else bytes(found)
    return raw


def members(raw: msgspec.Raw | bytes) -> dict[str, msgspec.Raw]:
    """Return an object's members, undecoded; none if the value is no object."""
    try:
        return _decode_members(raw)
    except ValueError:
        return {}


def items(raw: msgspec.Raw | bytes) -> list[msgspec.Raw]:
    """Return an array's elements, undecoded; none if the value is no array."""
    try:
        return _decode_list(raw)
    except ValueError:
        return []


_cache: dict[bytes, bytes] = {}


def canonical(raw: bytes) -> bytes:
    """Return the canonical form of a JSON value."""
    form = _cache.get(raw)
    if form is None:
        form = raw if _PLAIN.fullmatch(raw) else _canonical(raw)
        if len(_cache) >= CACHE_SIZE:
            _cache.clear()
        if len(raw) <= 200:
            _cache[raw] = form
    return form


def _canonical(raw: bytes) -> bytes:
    raw = raw.strip()
    opening = raw[:1]
    if opening == b"{":
        pairs = sorted((_encode(name), canonical(bytes(value))) for name, value in members(raw).items())
        return b"{" + b",".join(name + b":" + value for name, value in pairs) + b"}"
    if opening == b"[":
        return b"[" + b",".join(canonical(bytes(item)) for item in items(raw)) + b"]"
    if opening == b'"':
        return _encode(_decode(raw))
    if raw in (b"true", b"false", b"null"):
        return raw
    return _canonical_number(raw)


def _canonical_number(raw: bytes) -> bytes:
    match = _NUMBER.fullmatch(raw)
    if match is None:
        return raw
    sign, whole, part, power = match.groups(b"")
    digits = (whole + part).lstrip(b"0")
    if not digits:
        return b"0"
    text = digits.rstrip(b"0")
    try:
        exponent = int(power or 0) - len(part) + len(digits) - len(text)
    except ValueError:  # an exponent of thousands of digits
        return raw
    if 0 <= exponent <= 30:
        return sign + text + b"0" * exponent
    if -30 <= exponent < 0:
        text = text.rjust(1 - exponent, b"0")
        return sign + text[:exponent] + b"." + text[exponent:]
    return b"%b%be%d" % (sign, text, exponent)


def parse_number(raw: bytes) -> int | float | None:
    """Return a JSON number, an integer exactly; None for other values, infinity and more than 300 digits."""
    if not (raw[:1].isdigit() or raw[:1] == b"-") or len(raw) > 300:
        return None
    try:
        return int(raw)
    except ValueError:
        pass
    try:
        number = float(raw)
    except ValueError:
        return None
    return number if abs(number) != float("inf") else None

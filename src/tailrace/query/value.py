"""JSON values as bytes: reading some of their fields without decoding the rest, and their canonical form.

Invariant: two values have the same canonical form exactly if they are the same JSON value. ``1``, ``1.0`` and ``1e0``
are the same; ``1``, ``"1"`` and ``true`` are not; the order of an object's keys does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypedDict

import msgspec

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
    kind = raw[:1]
    if kind == b"{":
        pairs = sorted((_encode(name), canonical(bytes(value))) for name, value in members(raw).items())
        return b"{" + b",".join(name + b":" + value for name, value in pairs) + b"}"
    if kind == b"[":
        return b"[" + b",".join(canonical(bytes(item)) for item in items(raw)) + b"]"
    if kind == b'"':
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

"""JSON values: what is found at a path, without decoding the rest, and the canonical form in which values are compared.

Invariant: two values have the same canonical form exactly when they are the same JSON value. ``1``, ``1.0`` and ``1e0``
are; ``1``, ``"1"`` and ``true`` are not; the order of an object's keys does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

Path: TypeAlias = tuple[str, ...]

CACHED = 100_000
"""Canonical forms remembered in one process; the memory is emptied when it is full."""

_PLAIN = re.compile(rb'"[^"\\]*"|0|-?[1-9]\d{0,18}|true|false|null')
"""Values that are their own canonical form, as most are."""

_NUMBER = re.compile(rb"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?")

_AWKWARD = re.compile(r'["\\\x00-\x1f]')
"""What msgspec allows in no field's name."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def steps(path: str) -> Path:
    """Return the steps of a dotted path."""
    return tuple(path.split("."))


def members(raw: msgspec.Raw | bytes) -> dict[str, msgspec.Raw]:
    """Return an object's members, undecoded; none of what is no object."""
    try:
        return _decode_members(raw)
    except ValueError:
        return {}


def items(raw: msgspec.Raw | bytes) -> list[msgspec.Raw]:
    """Return an array's elements, undecoded; none of what is no array."""
    try:
        return _decode_list(raw)
    except ValueError:
        return []


def fields(names: Sequence[str]) -> Callable[[bytes], Sequence[bytes | None]]:
    """Return a function that takes a value and returns those of its members, undecoded; None for those it lacks."""
    if any(map(_AWKWARD.search, names)):
        return lambda value: [follow(value, (name,)) for name in names]
    wanted = [(f"f{i}", msgspec.Raw, msgspec.Raw()) for i in range(len(names))]
    renamed = {f"f{i}": name for i, name in enumerate(names)}
    decode = msgspec.json.Decoder(msgspec.defstruct("Fields", wanted, rename=renamed)).decode
    nothing: tuple[None, ...] = (None,) * len(names)

    def take(value: bytes) -> Sequence[bytes | None]:
        try:
            found = decode(value)
        except ValueError:
            return nothing
        return [bytes(raw) or None for raw in msgspec.structs.astuple(found)]

    return take


def follow(raw: bytes | None, path: Sequence[str]) -> bytes | None:
    """Return what a path leads to inside a value, undecoded; None if it leads nowhere."""
    for step in path:
        if raw is None:
            return None
        found = members(raw).get(step)
        raw = None if found is None else bytes(found)
    return raw


_known: dict[bytes, bytes] = {}


def canonical(raw: bytes) -> bytes:
    """Return the canonical form of one JSON value."""
    found = _known.get(raw)
    if found is None:
        found = raw if _PLAIN.fullmatch(raw) else _canonical(raw)
        if len(_known) >= CACHED:
            _known.clear()
        if len(raw) <= 200:
            _known[raw] = found
    return found


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
    return _number(raw)


def _number(raw: bytes) -> bytes:
    found = _NUMBER.fullmatch(raw)
    if found is None:
        return raw
    sign, whole, part, power = found.groups(b"")
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


def number_of(raw: bytes) -> int | float | None:
    """Return a JSON number, an integer exactly; None for what is no number, or none that can be reckoned with."""
    if not (raw[:1].isdigit() or raw[:1] == b"-") or len(raw) > 300:
        return None
    try:
        return int(raw)
    except ValueError:
        pass
    try:
        found = float(raw)
    except ValueError:
        return None
    return found if abs(found) != float("inf") else None

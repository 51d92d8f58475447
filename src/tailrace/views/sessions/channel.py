"""Channels of a session, and the packing of their samples into buffers.

Invariant: ``unpack_values(channel, pack_values(channel.type, values))`` equals ``values``, rounded only where the type
is a float. A value that the type cannot hold is refused, never clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.errors import BadRequest

Array: TypeAlias = npt.NDArray[Any]

WIDTHS: dict[str, int] = {"u8": 1, "s8": 1, "u16": 2, "s16": 2, "u32": 4, "s32": 4, "f32": 4, "3f32": 12, "f64": 8}
"""Bytes of one sample of each type; ``3f32`` is three numbers."""
MAX_CHANNEL = (1 << 32) - 1
"""Highest number of a channel."""

_KINDS = {
    "u8": "u1",
    "s8": "i1",
    "u16": "u2",
    "s16": "i2",
    "u32": "u4",
    "s32": "i4",
    "f32": "f4",
    "3f32": "f4",
    "f64": "f8",
}

_DTYPES = {
    (name, big): np.dtype((">" if big else "<") + kind) for name, kind in _KINDS.items() for big in (False, True)
}


class BadSample(BadRequest):
    """Samples that do not fit their channel's type. ``reason`` is short and stable, for counters and dead letters."""

    code = "sample.invalid"

    def __init__(self, reason: str, what: str = "") -> None:
        self.reason, self.what = reason, what
        super().__init__(f"{reason}: {what}" if what else reason)

    def __reduce__(self) -> tuple[type[BadSample], tuple[str, str]]:
        return type(self), (self.reason, self.what)


class Channel(msgspec.Struct, frozen=True):
    id: int
    """Number in the session: the configuration's number plus the offset of the binding."""
    name: str = ""
    type: str = "f64"
    source: str = "row"
    interval: int = 0
    """Nanoseconds between samples; 0 if there is no fixed rate."""
    big_endian: bool = False

    @property
    def width(self) -> int:
        """Bytes of one sample."""
        return WIDTHS[self.type]

    @property
    def is_integer(self) -> bool:
        """True if samples are integers, which can be shifted and masked."""
        return "f" not in self.type


def pack_values(type_: str, values: Sequence[Any] | Array, big_endian: bool = False) -> bytes:
    """Pack raw values into a buffer.

    Values are numbers; None, in a float only, is NaN. Those of ``3f32`` are lists of three, or a flat list.

    Raises:
        BadSample: A value is no number, no integer, or out of the type's range.
    """
    dtype = _DTYPES.get((type_, big_endian))
    if dtype is None:
        raise BadSample("bad-type", f"no channel has the type {type_!r}: one of {', '.join(WIDTHS)}")
    if type_ == "3f32":
        values = _flat(values)
    array = _floats(values, dtype) if dtype.kind == "f" else _integers(values, dtype)
    if type_ == "3f32" and array.size % 3:
        raise BadSample("bad-width", f"{array.size} numbers are no whole samples of three")
    return array.tobytes()


def unpack_values(channel: Channel, buffer: bytes) -> Array:
    """Return the raw values of a buffer, in native byte order; those of ``3f32`` as rows of three.

    Raises:
        BadSample: The buffer does not end with a whole sample.
    """
    if len(buffer) % channel.width:
        raise BadSample(
            "bad-width", f"channel {channel.id}: {len(buffer)} bytes are no whole samples of {channel.type}"
        )
    array: Array = np.frombuffer(buffer, _DTYPES[channel.type, channel.big_endian])
    if channel.big_endian:
        array = array.astype(array.dtype.newbyteorder("="))
    return array.reshape(-1, 3) if channel.type == "3f32" else array


def _flat(values: Sequence[Any] | Array) -> Sequence[Any] | Array:
    if isinstance(values, np.ndarray):
        return values.reshape(-1)
    if list not in set(map(type, values)) and tuple not in set(map(type, values)):
        return values
    if any(not isinstance(each, list | tuple) or len(each) != 3 for each in values):
        raise BadSample("bad-width", "a sample of 3f32 is a list of three numbers")
    return [number for each in values for number in each]


def _floats(values: Sequence[Any] | Array, dtype: np.dtype[Any]) -> Array:
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "iuf" or values.ndim != 1:
            raise BadSample("not-a-number", f"an array of {values.dtype} and {values.ndim} dimensions")
    else:
        _only(values, (int, float, type(None)))
    try:
        wide = np.asarray(values, np.float64)
    except OverflowError:
        raise BadSample("out-of-range", "a number is too large for a float") from None
    with np.errstate(over="ignore"):
        array = wide.astype(dtype)
    if dtype.itemsize == 4 and not np.array_equal(np.isinf(array), np.isinf(wide)):
        raise BadSample("out-of-range", "a number is too large for a float of 32 bits")
    return array


def _integers(values: Sequence[Any] | Array, dtype: np.dtype[Any]) -> Array:
    if not isinstance(values, np.ndarray):
        kinds = _only(values, (int, float))
        try:
            values = np.asarray(values, np.float64 if float in kinds else np.int64)
        except OverflowError:
            raise _beyond(dtype) from None
    if values.dtype.kind not in "iuf" or values.ndim != 1:
        raise BadSample("not-an-integer", f"an array of {values.dtype} and {values.ndim} dimensions")
    if not values.size:
        return values.astype(dtype)
    if values.dtype.kind == "f" and not (np.isfinite(values).all() and (values == np.trunc(values)).all()):
        raise BadSample("not-an-integer", "a number with a fraction, or none at all")
    limits = np.iinfo(dtype)
    if values.min() < limits.min or values.max() > limits.max:
        raise _beyond(dtype)
    return values.astype(dtype)


def _only(values: Sequence[Any], allowed: tuple[type, ...]) -> set[type]:
    kinds = set(map(type, values))
    for kind in kinds:
        if kind is bool or not issubclass(kind, (*allowed, np.integer, np.floating)):
            name = "null" if kind is type(None) else kind.__name__
            raise BadSample("not-a-number", f"{name} among the values")
    return {float} if any(issubclass(kind, float | np.floating) for kind in kinds) else set()


def _beyond(dtype: np.dtype[Any]) -> BadSample:
    limits = np.iinfo(dtype)
    return BadSample("out-of-range", f"a number is not from {limits.min} to {limits.max}")

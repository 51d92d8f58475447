"""Samples as a program gives them to the writer library, and what a record has of them.

Invariant: what comes out is a copy, since a program may use its arrays again before all is in the stream; and it is of
the right kind, since what were refused only when it is sent would keep all the rest from being sent. Whatever is not
raises ValueError or TypeError.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tailrace.views.sessions.samples import WIDTHS
from tailrace.views.sessions.telemetry import LAST, Type

Values: TypeAlias = Sequence[float | None] | npt.NDArray[Any]
Times: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]

_MOST_CHANNEL = (1 << 32) - 1


def channel_of(number: int) -> int:
    """Return the number of a channel."""
    if not 0 <= index(number) <= _MOST_CHANNEL:
        raise ValueError(f"{number} is no number of a channel")
    return index(number)


def times_of(times: Times) -> Any:
    """Return times: a list of integers, or an array of them."""
    if not isinstance(times, np.ndarray):
        return [index(time) for time in times]
    if times.ndim != 1 or times.dtype.kind not in "iu" or (times.size and int(times.max()) > LAST):
        raise ValueError(f"times are integers of nanoseconds in a row, not an array of {times.dtype} like this one")
    return times.astype(np.int64)


def values_of(values: Values | None) -> Any:
    """Return values: a list, or an array."""
    if values is None:
        return None
    return values.copy() if isinstance(values, np.ndarray) else list(values)


def bytes_of(data: bytes | None) -> bytes | None:
    """Return samples as bytes."""
    if data is None:
        return None
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"samples as bytes are wanted, not {type(data).__name__}")
    return bytes(data)


def type_of(name: Type) -> Type:
    """Return the type of samples."""
    if name not in WIDTHS:
        raise ValueError(f"no channel has the type {name!r}: one of {', '.join(WIDTHS)}")
    return name

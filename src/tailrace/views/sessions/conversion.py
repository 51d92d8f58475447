"""Conversions: from the raw number of a sample to the value that a person reads.

The steps are those of the configuration, in this order: shift, mask, the conversion itself, offset. Each is taken once,
on raw numbers as they were sampled. What the format leaves open is settled here:

- Shift and mask work on integers of up to 32 bits; those of a float are not applied. To the right a sign is kept, to
  the left bits beyond the 32nd are lost. A mask with every bit of the channel's width changes nothing; any other gives
  the bits that it leaves, as a number without a sign.
- A rational is ``(c1 x² + c2 x + c3) / (c4 x² + c5 x + c6)`` in floats of 64 bits, without the terms whose coefficient
  is 0. Where the divisor is 0 the value is infinite or not a number.
- A table that is interpolated is a line between neighbours; one that is not has, up to the next entry, the value of the
  entry at or below. Both have the first value below the first entry, and the last one above the last.
- A text is that of the key that equals the number, otherwise the default; it takes no offset.
- A formula is not computed: the number passes as it is, with shift, mask and offset.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

UNIT = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
"""The coefficients of a rational that changes nothing."""
MISPRINTED_UNIT = (0.0, 1.0, 0.0, 0.0, 1.0, 0.0)
"""What published documents give as those coefficients. As a formula it is x / x: 1 everywhere but at 0."""

_ALL_BITS = 0xFFFF_FFFF


class Rational(msgspec.Struct, frozen=True):
    """A quotient of two quadratics."""

    coefficients: tuple[float, float, float, float, float, float] = UNIT

    def values(self, raw: Array) -> Array:
        """Return the quotient for each number; the numbers themselves if it changes nothing."""
        if self.coefficients == UNIT:
            return raw
        c1, c2, c3, c4, c5, c6 = self.coefficients
        x = raw.astype(np.float64)
        with np.errstate(all="ignore"):
            quotient = _quadratic(x, c1, c2, c3) / _quadratic(x, c4, c5, c6)
        return np.full(x.shape, quotient) if quotient.ndim < x.ndim else quotient


class Table(msgspec.Struct, frozen=True):
    """A look-up table, its raw numbers rising."""

    raw: tuple[float, ...]
    calibrated: tuple[float, ...]
    interpolated: bool = False

    def values(self, raw: Array) -> Array:
        """Return what the table gives for each number; not a number for what is none."""
        x = raw.astype(np.float64)
        if self.interpolated:
            return np.interp(x, self.raw, self.calibrated)
        at = np.searchsorted(np.asarray(self.raw), x, "right") - 1
        found = np.asarray(self.calibrated)[np.maximum(at, 0)]
        return np.where(np.isnan(x), np.nan, found)


class Text(msgspec.Struct, frozen=True):
    """Names of numbers."""

    names: dict[float, str]
    default: str = ""

    def values(self, raw: Array) -> list[str]:
        """Return the name of each number."""
        distinct, at = np.unique(raw, return_inverse=True)
        known = [self.names.get(number, self.default) for number in distinct.tolist()]
        return [known[i] for i in at.reshape(-1).tolist()]


class Formula(msgspec.Struct, frozen=True):
    """Code in a language that is not ours."""

    code: str

    def values(self, raw: Array) -> Array:
        """Return the numbers as they are."""
        return raw


class Conversion(msgspec.Struct, frozen=True):
    """All steps from a parameter's raw numbers to its values."""

    how: Rational | Table | Text | Formula = Rational()
    shift: int = 0
    """Bits to the right, or to the left if it is below 0."""
    mask: int = _ALL_BITS
    offset: float = 0.0

    @property
    def kind(self) -> str:
        """What it is called in configurations."""
        return type(self.how).__name__.lower()

    @property
    def is_computed(self) -> bool:
        """Whether what ``convert`` returns are the values that the configuration means."""
        return not isinstance(self.how, Formula)

    def convert(self, raw: Array) -> Array | list[str]:
        """Return the values of raw numbers, one for each; texts if it is a conversion to text."""
        values = self.how.values(_bits(raw, self.shift, self.mask))
        return values + self.offset if self.offset and not isinstance(values, list) else values


def _bits(raw: Array, shift: int, mask: int) -> Array:
    if raw.dtype.kind not in "iu":
        return raw
    every = _ALL_BITS if shift < 0 else (1 << 8 * raw.dtype.itemsize) - 1
    if shift > 0:
        raw = raw.astype(np.int64) >> min(shift, 63)
    elif shift < 0:
        moved = raw.astype(np.int64) << min(-shift, 32)
        raw = moved.astype(np.int32) if raw.dtype.kind == "i" else moved & _ALL_BITS
    return raw if mask & every == every else raw.astype(np.int64) & mask


def _quadratic(x: Array, a: float, b: float, c: float) -> Array:
    """Return the sum of the terms that there are: of each number, or one for all if it is the same."""
    total: Array = np.asarray(c, np.float64)
    if b:
        total = b * x + c if c else b * x
    return total + a * (x * x) if a else total

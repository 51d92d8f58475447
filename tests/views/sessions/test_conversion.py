"""Conversions: each step once, in its order, on raw numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tailrace.views.sessions.configuration import (
    MISPRINTED_UNIT,
    UNIT,
    Conversion,
    Formula,
    LookupTable,
    Rational,
    TextTable,
)


def _converted(conversion: Conversion, raw: Sequence[float], type_: str = "f8") -> list[float]:
    found = conversion.convert(np.array(raw, type_))
    assert isinstance(found, np.ndarray)
    values: list[float] = found.tolist()
    return values


def test_with_nothing_said_numbers_are_what_they_were() -> None:
    for type_ in ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "f8"):
        raw = np.array([0, 1, 100], type_)
        assert Conversion().convert(raw) is raw
    assert Conversion(Rational(UNIT)).kind == "rational"


_small = st.integers(-1000, 1000)


@given(st.tuples(_small, _small, _small, _small, _small, _small), st.lists(st.integers(-1000, 1000), min_size=1))
def test_a_rational_is_the_exact_quotient_rounded_once(coefficients: tuple[int, ...], raw: list[int]) -> None:
    c1, c2, c3, c4, c5, c6 = coefficients
    assume(all(c4 * x * x + c5 * x + c6 for x in raw))
    how = Rational(tuple(map(float, coefficients)))  # type: ignore[arg-type]
    wanted = [float(Fraction(c1 * x * x + c2 * x + c3, c4 * x * x + c5 * x + c6)) for x in raw]
    assert _converted(Conversion(how), raw, "i4") == wanted


def test_the_whole_range_of_32_bits_is_converted_without_loss() -> None:
    raw = [0, 1, 2**31, 2**32 - 1]
    assert _converted(Conversion(Rational((0, 1, 1, 0, 0, 1))), raw, "u4") == [1, 2, 2**31 + 1, 2**32]
    assert _converted(Conversion(Rational((0, 2, 0, 0, 0, 1))), raw, "u4") == [0, 2, 2**32, 2**33 - 2]


def test_terms_without_a_coefficient_do_not_count_even_at_infinity() -> None:
    values = _converted(Conversion(Rational((0, 2, 1, 0, 0, 1))), [math.inf, -math.inf])
    assert values == [math.inf, -math.inf]


def test_where_the_divisor_is_0_the_value_is_infinite_or_not_a_number() -> None:
    values = _converted(Conversion(Rational((0, 0, 1, 0, 1, 0))), [0.0, 2.0])
    assert values == [math.inf, 0.5]
    odd = _converted(Conversion(Rational(MISPRINTED_UNIT)), [5.0, 0.0])
    assert odd[0] == 1.0
    assert math.isnan(odd[1])


TABLE = LookupTable((0.0, 10.0, 20.0), (0.0, 100.0, 50.0))


@pytest.mark.parametrize(
    ("raw", "stepped", "between"),
    [(-5, 0, 0), (0, 0, 0), (5, 0, 50), (9.99, 0, 99.9), (10, 100, 100), (15, 100, 75), (20, 50, 50), (99, 50, 50)],
)
def test_a_table_steps_or_is_interpolated_and_ends_in_its_first_and_last_values(
    raw: float, stepped: float, between: float
) -> None:
    assert _converted(Conversion(TABLE), [raw]) == [stepped]
    line = Conversion(LookupTable(TABLE.raw, TABLE.calibrated, interpolated=True))
    assert _converted(line, [raw]) == [pytest.approx(between)]


def test_what_is_no_number_is_none_in_a_table_either() -> None:
    for interpolated in (False, True):
        (value,) = _converted(Conversion(LookupTable((0.0, 1.0), (5.0, 6.0), interpolated)), [math.nan])
        assert math.isnan(value)


def test_a_text_is_that_of_the_equal_key_or_the_default_and_takes_no_offset() -> None:
    gears = Conversion(TextTable({0.0: "N", 1.0: "1", 255.0: "R"}, "?"), offset=5)
    assert gears.convert(np.array([1, 0, 255, 7, 1], "u1")) == ["1", "N", "R", "?", "1"]
    assert gears.convert(np.array([1.0, math.nan, 1.5])) == ["1", "?", "?"]
    assert gears.convert(np.array([], "u1")) == []
    assert gears.kind == "text"


def test_a_formula_is_not_computed_and_says_so() -> None:
    conversion = Conversion(Formula("x * 2"), shift=1, offset=0.5)
    assert _converted(conversion, [4, 6], "u2") == [2.5, 3.5]
    assert conversion.kind == "formula"
    assert Conversion(TABLE).kind == "table"


@pytest.mark.parametrize(
    ("type_", "shift", "mask", "raw", "wanted"),
    [
        ("u1", 4, 0xFFFFFFFF, 0xAB, 0x0A),
        ("u1", 4, 0x3, 0xAB, 0x2),
        ("u2", 0, 0x00FF, 0xABCD, 0xCD),
        ("u2", -8, 0xFFFFFFFF, 0xABCD, 0xABCD00),
        ("u4", -8, 0xFFFFFFFF, 0xABCDEF01, 0xCDEF0100),
        ("u4", 31, 0xFFFFFFFF, 0xFFFFFFFF, 1),
        ("u4", 32, 0xFFFFFFFF, 0xFFFFFFFF, 0),
        ("u4", 99, 0xFFFFFFFF, 0xFFFFFFFF, 0),
        ("u4", -99, 0xFFFFFFFF, 0xFFFFFFFF, 0),
        ("u4", 0, 0x80000000, 0xFFFFFFFF, 0x80000000),
        ("i2", 0, 0xFFFFFFFF, -1, -1),
        ("i2", 0, 0xFFFF, -1, -1),
        ("i2", 4, 0xFFFFFFFF, -32, -2),
        ("i2", 4, 0xF, -32, 0xE),
        ("i2", 0, 0xFF, -1, 0xFF),
        ("i4", 40, 0xFFFFFFFF, -1, -1),
        ("i4", -1, 0xFFFFFFFF, -(2**31), 0),
        ("i4", -1, 0xFFFFFFFF, 2**30, -(2**31)),
    ],
)
def test_shift_comes_before_mask_and_a_sign_stays_unless_bits_are_masked_out(
    type_: str, shift: int, mask: int, raw: int, wanted: int
) -> None:
    assert _converted(Conversion(shift=shift, mask=mask), [raw], type_) == [wanted]


def test_floats_are_neither_shifted_nor_masked() -> None:
    assert _converted(Conversion(shift=3, mask=1), [2.5, -7.0], "f4") == [2.5, -7.0]


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1), st.integers(0, 15), st.integers(1, 2**16 - 1))
def test_all_steps_are_taken_once_in_their_order(raw: list[int], shift: int, mask: int) -> None:
    conversion = Conversion(Rational((0, 3, 1, 0, 0, 2)), shift, mask, offset=10.0)
    assert _converted(conversion, raw, "u2") == [(3 * (x >> shift & mask) + 1) / 2 + 10 for x in raw]


def test_three_numbers_of_a_sample_are_converted_each() -> None:
    raw = np.array([[1, 2, 3], [4, 5, 6]], "f4")
    found = Conversion(Rational((0, 2, 0, 0, 0, 1)), offset=1.0).convert(raw)
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [[3, 5, 7], [9, 11, 13]]

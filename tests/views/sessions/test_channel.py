"""Channels: numbers become bytes and come back the same, or are refused with a reason."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.views.sessions.telemetry import WIDTHS, BadSample, Channel, pack_values, unpack_values

FORMATS = {"u8": "B", "s8": "b", "u16": "H", "s16": "h", "u32": "I", "s32": "i", "f32": "f", "f64": "d"}
LIMITS = {"u8": (0, 255), "s8": (-128, 127), "u16": (0, 2**16 - 1), "s16": (-(2**15), 2**15 - 1)}
LIMITS |= {"u32": (0, 2**32 - 1), "s32": (-(2**31), 2**31 - 1)}


@given(st.sampled_from(sorted(LIMITS)), st.booleans(), st.data())
def test_integers_are_the_bytes_that_struct_makes_of_them_and_come_back(
    type_: str, big: bool, data: st.DataObject
) -> None:
    values = data.draw(st.lists(st.integers(*LIMITS[type_]), max_size=20))
    buffer = pack_values(type_, values, big)
    assert buffer == struct.pack(f"{'>' if big else '<'}{len(values)}{FORMATS[type_]}", *values)
    back = unpack_values(Channel(1, type=type_, big_endian=big), buffer)
    assert back.tolist() == values
    assert back.dtype.isnative
    assert pack_values(type_, [float(value) for value in values], big) == buffer
    assert pack_values(type_, np.array(values, np.int64), big) == buffer


@given(st.lists(st.floats() | st.integers(-(2**53), 2**53) | st.none(), max_size=20), st.booleans())
def test_floats_come_back_and_none_is_not_a_number(values: list[float | None], big: bool) -> None:
    plain = [math.nan if value is None else float(value) for value in values]
    buffer = pack_values("f64", values, big)
    back = unpack_values(Channel(1, big_endian=big), buffer)
    assert np.array_equal(back, np.array(plain, np.float64), equal_nan=True)
    assert len(buffer) == 8 * len(values)


@given(st.lists(st.floats(width=32), max_size=20))
def test_floats_of_32_bits_come_back(values: list[float]) -> None:
    buffer = pack_values("f32", values)
    assert np.array_equal(unpack_values(Channel(1, type="f32"), buffer), np.array(values, np.float32), equal_nan=True)


def test_a_sample_of_three_numbers_is_a_list_of_three_or_its_numbers_in_a_row() -> None:
    nested = pack_values("3f32", [[1, 2.5, None], (4, 5, 6)])
    assert nested[:8] == struct.pack("<ff", 1, 2.5)
    assert pack_values("3f32", [1, 2.5, None, 4, 5, 6]) == nested
    assert pack_values("3f32", np.array([[1, 2.5, math.nan], [4, 5, 6]])) == nested
    back = unpack_values(Channel(1, type="3f32"), nested)
    assert back.shape == (2, 3)
    assert back[1].tolist() == [4, 5, 6]


@pytest.mark.parametrize(("type_", "width"), WIDTHS.items())
def test_a_buffer_is_whole_samples_of_the_channels_width(type_: str, width: int) -> None:
    channel = Channel(7, type=type_)
    assert channel.width == width
    assert len(unpack_values(channel, bytes(3 * width))) == 3
    if width > 1:
        with pytest.raises(BadSample, match="bad-width: channel 7"):
            unpack_values(channel, bytes(3 * width - 1))


@pytest.mark.parametrize(
    ("reason", "type_", "values"),
    [
        ("out-of-range", "u8", [256]),
        ("out-of-range", "u8", [-1]),
        ("out-of-range", "u8", [255.0, 256.0]),
        ("out-of-range", "s16", [40_000]),
        ("out-of-range", "u32", [2**32]),
        ("out-of-range", "s32", [10**30]),
        ("out-of-range", "u16", np.array([-1])),
        ("out-of-range", "f32", [1e39]),
        ("out-of-range", "f32", [3.5e38, math.inf]),
        ("out-of-range", "f64", [10**400]),
        ("not-an-integer", "u8", [1.5]),
        ("not-an-integer", "s32", [math.nan]),
        ("not-an-integer", "s32", [math.inf]),
        ("not-an-integer", "u8", np.array([True])),
        ("not-a-number", "u8", [None]),
        ("not-a-number", "u8", [True, 1]),
        ("not-a-number", "u8", ["1"]),
        ("not-a-number", "f64", ["1"]),
        ("not-a-number", "f64", [False]),
        ("not-a-number", "f64", [[1.0]]),
        ("not-a-number", "f64", np.array(["1"])),
        ("not-a-number", "f32", np.zeros((2, 2))),
        ("not-a-number", "3f32", [[1, 2, "3"]]),
        ("bad-width", "3f32", [[1, 2]]),
        ("bad-width", "3f32", [[1, 2, 3], 4]),
        ("bad-width", "3f32", [1, 2, 3, 4]),
        ("bad-type", "f16", [1.0]),
    ],
)
def test_what_a_type_cannot_hold_is_refused_with_a_reason(reason: str, type_: str, values: list[float]) -> None:
    with pytest.raises(BadSample) as caught:
        pack_values(type_, values)
    assert str(caught.value).startswith(f"{reason}: ")


def test_infinity_is_a_number_where_it_was_given_as_one() -> None:
    assert unpack_values(Channel(1, type="f32"), pack_values("f32", [math.inf, -math.inf])).tolist() == [
        math.inf,
        -math.inf,
    ]

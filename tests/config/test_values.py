"""Durations and sizes: how they are written, and that they read back."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.values import format_duration, format_size, parse_duration, parse_size


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=36_500)))
def test_a_duration_that_is_printed_reads_back(value: timedelta) -> None:
    assert parse_duration(format_duration(value)) == value


@given(st.integers(min_value=0, max_value=2**60))
def test_a_size_that_is_printed_reads_back(value: int) -> None:
    assert parse_size(format_size(value)) == value


@given(st.text(max_size=8) | st.from_regex(r"[0-9.]{0,4}(ms|us|[dhmskKMGiB]){0,3}", fullmatch=True))
def test_text_is_a_unit_value_or_refused_and_never_anything_else(text: str) -> None:
    for parse in (parse_duration, parse_size):
        with suppress(ValueError):
            assert isinstance(parse(text), timedelta | int)


@pytest.mark.parametrize(
    ("text", "value"),
    [("5m", 300), ("15s", 15), ("250ms", 0.25), ("1h30m", 5400), ("2d", 172_800), ("1.5s", 1.5), ("0s", 0)],
)
def test_durations_are_read(text: str, value: float) -> None:
    assert parse_duration(text) == timedelta(seconds=value)


@pytest.mark.parametrize("text", ["", "5", "m", "5 m", "5m5m", "5s5m", "-5s", "5min", "PT5M"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("64KiB", 65_536), ("1MiB", 2**20), ("10MB", 10**7), ("0.5kB", 500), ("12", 12), (12, 12), ("1gib", 2**30)],
)
def test_sizes_are_read(text: str | int, value: int) -> None:
    assert parse_size(text) == value

from __future__ import annotations

import contextlib
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import BadRequest, CursorError
from tailrace.log.cursor import (
    MAX_CURSOR_BYTES,
    MAX_NAMES,
    Cursor,
    FromCursor,
    FromEnd,
    FromLast,
    FromStart,
    FromTime,
    Position,
    parse_start,
)
from tailrace.log.event import parse_time

NOW = 1_800_000_000_000
_number = st.integers(0, 10**15)
_positions = st.lists(st.builds(Position, _number, _number), min_size=1, max_size=6).map(tuple)
_cursors = st.builds(Cursor, _positions, st.none() | _number, st.none() | _number) | st.builds(
    Cursor, _positions, ended=st.just(True)
)


@st.composite
def _with_ahead(draw: st.DrawFn) -> Cursor:
    """Cursors of feeds that sent something before its turn."""
    cursor = draw(_cursors)
    ahead = []
    for position in cursor.positions:
        steps = draw(st.lists(st.integers(1, 1000), max_size=6))
        ends = list(accumulate(steps, initial=position.number))[1:]
        ahead.append(tuple(zip(ends[::2], ends[1::2], strict=False)))
    return msgspec.structs.replace(cursor, ahead=tuple(ahead) if any(ahead) else ())


@given(_cursors | _with_ahead())
def test_a_cursor_is_read_back_as_it_was_written(cursor: Cursor) -> None:
    assert Cursor.parse(str(cursor), len(cursor.positions)) == cursor


def test_the_longest_feed_has_a_cursor_within_the_limit() -> None:
    positions = tuple(Position(1_789_200_000, 10**11 + i) for i in range(MAX_NAMES))
    assert len(str(Cursor(positions, 10**9, NOW))) <= MAX_CURSOR_BYTES


@given(st.text(max_size=40))
def test_any_text_is_a_cursor_or_a_cursor_error(text: str) -> None:
    with contextlib.suppress(CursorError):
        assert Cursor.parse(text, 1).positions


@pytest.mark.parametrize(
    "text", ["", "1", ".5", "1.2.3", "1.2,", "a.b", "1.2~x", "1.2~", "-1.2", "１.２", "1.2~@", "1.2+3", "1.2+9-4"]
)
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(CursorError):
        Cursor.parse(text, 1)


def test_what_was_seen_ahead_is_counted_from_the_place() -> None:
    cursor = Cursor.parse("17.42+3-9+20-20,.57~7", 2)
    assert cursor.ahead == (((45, 51), (62, 62)), ())
    assert str(cursor) == "17.42+3-9+20-20,.57~7"


def test_a_cursor_of_another_feed_is_refused_with_both_counts() -> None:
    with pytest.raises(CursorError, match=r"over 2 stream.*request is for 1"):
        Cursor.parse("1.2,.3", 1)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("start", FromStart()),
        ("end", FromEnd()),
        ("-10", FromLast(10)),
        ("-1h", FromTime(NOW - 3_600_000)),
        ("@-1h30m", FromTime(NOW - 5_400_000)),
        ("-250ms", FromTime(NOW - 250)),
        ("2026-11-15", FromTime(1_794_700_800_000)),
        ("2026-11-15T08:00:00Z", FromTime(1_794_729_600_000)),
        ("@2026-11-15T08:00", FromTime(1_794_729_600_000)),
        ("2026-11-15T09:00:00+01:00", FromTime(1_794_729_600_000)),
        ("2026-11-15T08:00:00.250Z", FromTime(1_794_729_600_250)),
        ("17.4", FromCursor(Cursor((Position(17, 4),)))),
    ],
)
def test_the_start_grammar(text: str, start: object) -> None:
    assert parse_start(text, 1, NOW) == start


@pytest.mark.parametrize("text", ["", "begin", "-", "-x", "2026-13-01", "2026-11-15T25:00Z", "@", "-99999999", "1h"])
def test_what_is_no_start_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_start(text, 1, NOW)


def test_a_time_in_the_future_is_a_time() -> None:
    assert parse_time("2030-01-01", NOW) > NOW

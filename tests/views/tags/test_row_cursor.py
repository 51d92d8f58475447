from __future__ import annotations

import contextlib
import re
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import CursorError
from tailrace.log.cursor import MAX_CURSOR_BYTES, Cursor, parse_state
from tailrace.log.event import Partition
from tailrace.log.timeuuid import first_of, last_of, make_timeuuid
from tailrace.views.tags.rows.model import (
    BEGIN,
    MAX_TAGS,
    OpenSource,
    Reached,
    TagPosition,
    hashed,
    hashed_partition,
    join_cursor,
    parse_positions,
    room_for,
)

NOW = 1_800_000_000_000
PLACE = Partition("jobs", 3)
_ms = st.integers(0, 1 << 42)
_timeuuids = (
    st.builds(make_timeuuid, _ms, st.integers(0, 1 << 44), st.just(PLACE)) | st.builds(last_of, _ms) | st.just(BEGIN)
)
_reached = st.builds(Reached, st.text().map(hashed), st.integers(0, 1 << 44), _ms)
_open = st.builds(OpenSource, st.text().map(hashed), st.integers(-(1 << 20), 1 << 40), _ms, st.integers(0, 1 << 40))
_parts = st.builds(
    TagPosition, _timeuuids, st.lists(_reached, max_size=3).map(tuple), st.lists(_open, max_size=3).map(tuple)
)
_count = st.none() | st.integers(0, 10**15)
_states = st.builds(Cursor, st.just(()), _count, _count) | st.just(Cursor((), ended=True))


@given(st.lists(_parts, min_size=1, max_size=4).map(tuple), _states)
def test_a_cursor_is_read_back_as_it_was_written(positions: tuple[TagPosition, ...], state: Cursor) -> None:
    text = join_cursor(map(str, positions), state.suffix)
    assert parse_positions(text, len(positions)) == positions
    _, tilde, tail = text.partition("~")
    assert (parse_state(tail, text) if tilde else (None, None, False)) == (state.sent, state.since_ms, state.ended)
    assert re.fullmatch(r"[A-Za-z0-9_.,~@-]+", text)


@pytest.mark.parametrize("tags", [1, 2, 7, MAX_TAGS])
def test_as_much_as_there_is_room_for_has_its_size(tags: int) -> None:
    ahead = tuple(Reached(hashed_partition(PLACE), 1 << 43, NOW + 1_000_000_000) for _ in range(room_for(tags) // 2))
    held = tuple(OpenSource(hashed("x"), 1 << 40, 0, 1 << 40) for _ in range(room_for(tags) - len(ahead)))
    position = str(TagPosition(make_timeuuid(NOW, 1 << 43, PLACE), ahead, held))
    assert room_for(tags) >= 4
    assert len(join_cursor([position] * tags, Cursor((), 10**15, NOW).suffix)) <= MAX_CURSOR_BYTES


def test_a_cursor_with_nothing_ahead_is_one_timeuuid() -> None:
    assert len(join_cursor([str(TagPosition(make_timeuuid(NOW, 41, PLACE)))], "")) == 23


@given(st.text(max_size=60) | st.text("uAQg.ro_-~,0129abc", max_size=60).map(lambda text: "u" + text))
def test_any_text_is_a_cursor_or_a_cursor_error(text: str) -> None:
    with contextlib.suppress(CursorError):
        _, tilde, tail = text.strip().partition("~")
        state = Cursor((), *parse_state(tail, text)) if tilde else Cursor(())
        assert join_cursor(map(str, parse_positions(text, 1)), state.suffix) == text.strip()


GOOD = join_cursor([str(TagPosition(make_timeuuid(NOW, 41, PLACE), (Reached(hashed("p"), 5, NOW + 1),)))], "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "u",
        "17.4",
        GOOD[1:],
        GOOD + "x" * 20,
        GOOD + ".",
        GOOD + "~",
        GOOD + "~x",
        GOOD + "~@",
        GOOD.replace("_", "_0", 1),
        GOOD + ".q" + hashed("p") + "0_0",
        "u" + str(TagPosition(UUID("d029cd0c-d515-4c8f-8564-26054b614559"))),
        "u" + str(TagPosition(first_of(NOW))) + ".r" + hashed("p") + "05_1",
        GOOD * 200,
    ],
)
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(CursorError):
        parse_positions(text, 1)


def test_a_cursor_of_another_feed_is_refused_with_both_counts() -> None:
    with pytest.raises(CursorError, match=r"over 1 tag.*request is for 2"):
        parse_positions(GOOD, 2)


def test_other_starts_are_not_taken_for_a_cursor() -> None:
    for text in ("start", "end", "-10", "-1h", "2026-11-15T08:00:00Z", "1789200000.42", str(UUID(int=0))):
        with pytest.raises(CursorError, match="feed over tags"):
            parse_positions(text, 1)

"""Event streams: the same frames however the bytes were cut, and nothing from a frame that was not finished."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.client import connection
from tailrace.client.connection import SseFrame, SseReader
from tailrace.errors import TooLarge

TEXT = st.text(st.characters(blacklist_characters="\r\n\0", blacklist_categories=["Cs"]), max_size=12)
FRAMES = st.lists(
    st.builds(
        SseFrame,
        id=TEXT,
        event=st.sampled_from(["message", "caught-up", "gap", "end"]),
        data=st.none() | st.lists(TEXT, min_size=1, max_size=3).map(lambda lines: "\n".join(lines).encode()),
    ),
    max_size=6,
)


def written(frames: list[SseFrame], newline: str, heartbeat: bool) -> bytes:
    lines = []
    for frame in frames:
        lines += [f"id: {frame.id}"]
        lines += [f"event: {frame.event}"] if frame.event != "message" else []
        lines += [f"data: {part}" for part in frame.data.decode().split("\n")] if frame.data is not None else []
        lines += [""]
        lines += [": alive", ""] if heartbeat else []
    return "".join(line + newline for line in lines).encode()


def cut(body: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(body) + 1) for place in places), len(body)]
    return [body[start:stop] for start, stop in itertools.pairwise(edges)]


@given(FRAMES, st.sampled_from(["\n", "\r", "\r\n"]), st.booleans(), st.booleans(), st.lists(st.integers(0, 10_000)))
def test_frames_are_the_same_however_the_bytes_are_cut(
    frames: list[SseFrame], newline: str, heartbeat: bool, mark: bool, places: list[int]
) -> None:
    reader = SseReader()
    body = b"\xef\xbb\xbf" * mark + written(frames, newline, heartbeat)
    read = [frame for chunk in cut(body, places) for frame in reader.feed(chunk)]
    # The last line end of a CR stream may be half of a CRLF; either way the frame is whole.
    assert read == frames


@given(FRAMES.filter(bool), st.integers(1, 10_000))
def test_a_frame_that_was_cut_off_never_counts(frames: list[SseFrame], lost: int) -> None:
    whole, last = written(frames[:-1], "\n", False), written(frames[-1:], "\n", False)
    body = whole + last[: max(0, len(last) - lost)]
    assert SseReader().feed(body) == frames[:-1]


def test_a_comment_is_no_frame_and_a_lone_id_moves_the_cursor() -> None:
    assert SseReader().feed(b": alive\n\n\n\nid: 7.1\n\n") == [SseFrame("7.1", "message", None)]


def test_the_wish_to_wait_is_kept_in_seconds() -> None:
    reader = SseReader()
    assert reader.feed(b"retry: 2500\n\nretry: soon\n\n") == []
    assert reader.retry == 2.5


def test_fields_are_read_as_the_standard_says() -> None:
    body = b"data\nid:a\nunknown: x\n\nid: b\0\ndata:  two\n\nid: c\nevent: gap\ndata: {}\n\n"
    assert SseReader().feed(body) == [
        SseFrame("a", "message", b""),
        SseFrame(None, "message", b" two"),
        SseFrame("c", "gap", b"{}"),
    ]


def test_a_frame_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_FRAME_BYTES", 100)
    reader = SseReader()
    assert reader.feed(b"data: " + b"x" * 90) == []
    with pytest.raises(TooLarge):
        reader.feed(b"xxxxxxxxxx")

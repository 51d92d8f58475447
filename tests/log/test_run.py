from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.log.event import Partition
from tailrace.log.run import Run, decode, encode
from tests.writing import DAY, NOON

_rows = st.lists(
    st.tuples(
        st.integers(1, 1000),
        st.integers(NOON - DAY, NOON + DAY),
        st.none() | st.binary(max_size=12),
        st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=2),
        st.binary(max_size=600),
    ),
    min_size=1,
    max_size=12,
)


def _run(rows: list[tuple[int, int, bytes | None, list[tuple[str, bytes | None]], bytes]]) -> Run:
    offsets, at = [], 0
    for step, *_ in rows:
        at += step
        offsets.append(at)
    return Run.of(
        Partition("topic", 3, 1),
        offsets,
        [row[1] for row in rows],
        [row[2] for row in rows],
        [row[3] for row in rows],
        [row[4] for row in rows],
    )


@given(_rows)
def test_a_stored_run_has_the_same_records_with_the_same_bytes(
    rows: list[tuple[int, int, bytes | None, list[tuple[str, bytes | None]], bytes]],
) -> None:
    run = decode(encode(_run(rows)))
    assert run == _run(rows)
    assert run.times == [row[1] for row in rows]
    assert run.values == [row[4] for row in rows]
    assert run.partition == Partition("topic", 3, 1)
    assert run.offsets[0] == rows[0][0]


def test_a_frame_is_one_line_of_json_with_the_value_as_it_was_produced() -> None:
    value = b'{"b": 1.10,\r\n "a": 123456789012345678901234567890, "b": [] }'
    run = Run.of(Partition("jobs", 0), [42], [NOON], [b'["q","j"]'], [[("h", b"1"), ("h", b"2"), ("x", None)]], [value])
    (frame,) = run.frames(NOON - NOON % DAY)
    assert b"\n" not in frame
    assert b'"data":{"b": 1.10, "a": 123456789012345678901234567890, "b": [] }}' in frame
    shown = json.loads(frame)
    assert shown["id"] == "jobs:0:42"
    assert shown["key"] == ["q", "j"]
    assert shown["headers"] == {"h": ["1", "2"], "x": None}
    assert shown["time"].endswith("T12:00:00.000Z")
    assert "late" not in shown


def test_a_record_stored_after_its_day_is_late_and_carries_its_generation() -> None:
    run = Run.of(Partition("jobs", 1, 2), [7, 9], [NOON - DAY, NOON], [b"k"], None, [b"1", b"2"])
    late, fine = (json.loads(frame) for frame in run.frames(NOON - NOON % DAY))
    assert late["late"] is True
    assert "late" not in fine
    assert late["id"] == "jobs@2:1:7"


def test_a_run_of_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown codec"):
        decode(b"\x07abc")

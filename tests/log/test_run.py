from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.log.event import Partition
from tailrace.log.pack import digest, pack, unpack
from tailrace.log.run import NumberedRun, Run, TagColumns, TagFields, decode, encode
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


_field = st.builds(
    TagFields,
    st.sampled_from(["cart-1", "cart-2", 'a "name"']),
    st.integers(-5, 1 << 40),
    st.integers(1, 1 << 40),
    st.integers(NOON - 10, NOON + 10),
    st.sampled_from([("a",), ("a", "b"), ("ü",)]),
)


@st.composite
def _tagged_runs(draw: st.DrawFn) -> list[Run]:
    offset, runs = 0, list[Run]()
    for _ in range(draw(st.integers(1, 4))):
        fields = draw(st.lists(_field, min_size=1, max_size=5))
        offsets = list(range(offset, offset + len(fields)))
        times = draw(st.lists(st.integers(NOON - 10, NOON + 10), min_size=len(fields), max_size=len(fields)))
        if draw(st.booleans()):
            fields = [field._replace(seq=offset) for field, offset in zip(fields, offsets, strict=True)]
        values = [b"{}"] * len(fields)
        runs.append(
            Run.of(Partition("t", 0), offsets, times, [None], None, values, TagColumns.of(fields, offsets, times))
        )
        offset += len(fields) + draw(st.integers(0, 2))
    return runs


def _tag_fields(runs: list[Run]) -> list[TagFields]:
    return [field for run in runs if run.tag_columns for field in run.tag_columns.rows(run.offsets, run.times)]


@given(_tagged_runs())
def test_tag_fields_are_the_same_after_they_were_stored_and_packed(runs: list[Run]) -> None:
    entries, number = list[NumberedRun](), 0
    for run in runs:
        entries.append(NumberedRun(number + 1, number + len(run), NOON, run, 100))
        number += len(run)
    assert _tag_fields([decode(encode(run)) for run in runs]) == _tag_fields(runs)
    packed = list(unpack(pack(entries)))
    assert _tag_fields([entry.run for entry in packed]) == _tag_fields(runs)
    assert digest(packed) == digest(entries)


@given(_tagged_runs())
def test_a_changed_number_changes_the_digest(runs: list[Run]) -> None:
    run = runs[0]
    rows = _tag_fields([run])
    rows[0] = rows[0]._replace(number=rows[0].number + 1)
    other = Run.of(
        run.partition, run.offsets, run.times, run.keys, None, run.values, TagColumns.of(rows, run.offsets, run.times)
    )
    assert digest([NumberedRun(1, len(run), NOON, run, 1)]) != digest([NumberedRun(1, len(run), NOON, other, 1)])

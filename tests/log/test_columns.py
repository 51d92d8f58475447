"""Notes: what a tag knows of its events survives its columns, and packing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.log.event import Partition
from tailrace.log.pack import digest, pack, unpack
from tailrace.log.run import NumberedRun, Run, TagColumns, TagFields, decode, encode
from tests.writing import NOON

_note = st.builds(
    TagFields,
    st.sampled_from(["cart-1", "cart-2", 'a "name"']),
    st.integers(-5, 1 << 40),
    st.integers(1, 1 << 40),
    st.integers(NOON - 10, NOON + 10),
    st.sampled_from([("a",), ("a", "b"), ("ü",)]),
)


@st.composite
def _runs(draw: st.DrawFn) -> list[Run]:
    offset, runs = 0, list[Run]()
    for _ in range(draw(st.integers(1, 4))):
        notes = draw(st.lists(_note, min_size=1, max_size=5))
        offsets = list(range(offset, offset + len(notes)))
        times = draw(st.lists(st.integers(NOON - 10, NOON + 10), min_size=len(notes), max_size=len(notes)))
        if draw(st.booleans()):
            notes = [note._replace(seq=offset) for note, offset in zip(notes, offsets, strict=True)]
        values = [b"{}"] * len(notes)
        runs.append(
            Run.of(Partition("t", 0), offsets, times, [None], None, values, TagColumns.of(notes, offsets, times))
        )
        offset += len(notes) + draw(st.integers(0, 2))
    return runs


def _notes(runs: list[Run]) -> list[TagFields]:
    return [note for run in runs if run.tag_columns for note in run.tag_columns.rows(run.offsets, run.times)]


@given(_runs())
def test_notes_are_the_same_after_they_were_stored_and_packed(runs: list[Run]) -> None:
    entries, number = list[NumberedRun](), 0
    for run in runs:
        entries.append(NumberedRun(number + 1, number + len(run), NOON, run, 100))
        number += len(run)
    assert _notes([decode(encode(run)) for run in runs]) == _notes(runs)
    packed = list(unpack(pack(entries)))
    assert _notes([entry.run for entry in packed]) == _notes(runs)
    assert digest(packed) == digest(entries)


@given(_runs())
def test_a_changed_number_changes_the_digest(runs: list[Run]) -> None:
    run = runs[0]
    rows = _notes([run])
    rows[0] = rows[0]._replace(number=rows[0].number + 1)
    other = Run.of(
        run.partition, run.offsets, run.times, run.keys, None, run.values, TagColumns.of(rows, run.offsets, run.times)
    )
    assert digest([NumberedRun(1, len(run), NOON, run, 1)]) != digest([NumberedRun(1, len(run), NOON, other, 1)])

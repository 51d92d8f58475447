"""Packs: the same events with the same numbers and bytes, in any grouping."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.log.event import Headers, Partition
from tailrace.log.pack import digest, pack, pieces, unpack
from tailrace.log.run import NumberedRun, Run
from tests.writing import DAY, NOON

_headers = st.lists(st.tuples(st.text(max_size=4), st.none() | st.binary(max_size=4)), max_size=2)
_record = st.tuples(
    st.integers(1, 50),
    st.integers(NOON - DAY, NOON + DAY),
    st.sampled_from([None, b"k", b'["a","b"]']),
    _headers,
    st.binary(max_size=80),
)


@st.composite
def _segments(draw: st.DrawFn) -> list[NumberedRun]:
    """Runs of a log: several sources, numbers with holes, the running-maximum time growing."""
    entries: list[NumberedRun] = []
    number = draw(st.integers(0, 10**12))
    newest = NOON
    reached: dict[Partition, int] = {}
    for _ in range(draw(st.integers(1, 8))):
        source = draw(st.sampled_from([Partition("a", 0), Partition("a", 1), Partition("b", 0, 2)]))
        records = draw(st.lists(_record, min_size=1, max_size=6))
        offsets = []
        for step, *_ in records:
            reached[source] = reached.get(source, -1) + step
            offsets.append(reached[source])
        number += draw(st.sampled_from([0, 0, 0, 1, 7]))
        newest = max(newest, *(record[1] for record in records))
        keys = [record[2] for record in records]
        carried: list[Headers] | None = [record[3] for record in records] if draw(st.booleans()) else None
        run = Run.of(source, offsets, [r[1] for r in records], keys, carried, [r[4] for r in records])
        entries.append(NumberedRun(number + 1, number + len(run), newest, run, draw(st.integers(1, 40_000))))
        number += len(run)
    return entries


def _events(entries: list[NumberedRun]) -> list[object]:
    found: list[object] = []
    for entry in entries:
        run = entry.run
        keys = run.keys * len(run) if len(run.keys) == 1 else run.keys
        headers = run.headers or [[]] * len(run)
        numbers = range(entry.first, entry.last + 1)
        found += zip(
            numbers, [run.partition] * len(run), run.offsets, run.times, keys, headers, run.values, strict=True
        )
    return found


@given(_segments(), st.integers(1, 60_000))
def test_a_packed_segment_has_the_same_events_with_the_same_numbers_and_bytes(
    entries: list[NumberedRun], size: int
) -> None:
    parts = list(pieces(entries, size))
    assert [entry for part in parts for entry in part] == entries
    back = [entry for part in parts for entry in unpack(pack(part))]
    assert _events(back) == _events(entries)
    assert digest(back) == digest(entries)
    assert len(back) <= len(entries)
    newest = [entry.newest_ms for entry in back]
    assert newest == sorted(newest)
    assert newest[-1] == entries[-1].newest_ms


@given(_segments(), st.data())
def test_a_change_in_any_event_changes_the_digest(entries: list[NumberedRun], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(entries) - 1))
    run = entries[at].run
    values = [*run.values]
    values[-1] += b"x"
    changed = [*entries]
    changed[at] = NumberedRun(
        entries[at].first,
        entries[at].last,
        entries[at].newest_ms,
        Run(run.topic, run.partition_id, run.generation, run.steps, run.ticks, run.keys, run.headers, values),
        1,
    )
    assert digest(changed) != digest(entries)
    assert digest(entries[:-1]) != digest(entries)


def test_a_damaged_piece_is_refused() -> None:
    run = Run.of(Partition("a", 0), list(range(50)), [NOON] * 50, [b"k"], None, [b"v" * 40] * 50)
    stored = bytearray(pack([NumberedRun(1, 50, NOON, run, 2_000)]))
    stored[-1] ^= 1
    with pytest.raises(Exception, match=r"[Cc]hecksum|corrupt|[Rr]estored data"):
        list(unpack(bytes(stored)))

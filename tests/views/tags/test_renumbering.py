"""The rules by which tags are numbered anew, and by which a source is erased from them."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tailrace.log.cursor import Position
from tailrace.log.event import Partition
from tailrace.log.run import NumberedRun, Run, TagColumns, TagFields
from tailrace.log.segment import PACKED, Log, Segment, locate
from tailrace.upkeep.copy import RestoredEvent
from tailrace.upkeep.rebuild import replaced
from tailrace.views.tags.model import Erasure, SourceProgress, erase_from, shrink_segment, widen_neighbour
from tailrace.views.tags.upkeep import Anchor

LATEST = 1_000
_events = st.lists(st.tuples(st.sampled_from("pqr"), st.integers(0, 1), st.integers(0, 2_000)), min_size=1, max_size=30)


def _event(pid: str, partition: int, offset: int, ms: int) -> RestoredEvent:
    note = TagFields(pid, offset, 0, ms, ("red",))
    return RestoredEvent(Partition("jobs", partition), offset, ms, None, [], b"", ms, 0, 1, note)


@given(_events, st.dictionaries(st.sampled_from("pqr"), st.integers(0, 40)), st.integers(0, 10))
def test_rebuilt_events_are_numbered_up_to_the_live_ones_and_timeuuids_never_fall(
    drawn: list[tuple[str, int, int]], ends: dict[str, int], split: int
) -> None:
    events = [_event(pid, partition, i, ms) for i, (pid, partition, ms) in enumerate(drawn)]
    progress = {pid: SourceProgress(end) for pid, end in ends.items()}
    anchor = Anchor(progress, LATEST)
    anchor.begin_anew(events)
    made = list(anchor.numbered(events))
    pids = {pid for pid, _, _ in drawn}
    for pid in pids:
        numbers = [e.fields.number for e in made if e.fields is not None and e.fields.source == pid]
        end = ends.get(pid, 0)
        assert numbers == list(range(end - len(numbers) + 1, end + 1))
    for partition in range(2):
        times_ms = [e.fields.ms for e in made if e.fields is not None and e.partition.partition == partition]
        assert times_ms == sorted(times_ms)
    for pid in pids:
        mine = [(e.fields.ms, e.partition) for e in made if e.fields is not None and e.fields.source == pid]
        assert all(a[0] < b[0] if a[1] != b[1] else a[0] <= b[0] for a, b in pairwise(mine))
    # What was made once is made the same again, also from the middle: timeuuids and numbers are those that are there.
    again = Anchor(progress, 10**9)
    for e in made[:split]:
        assert e.fields is not None
        note = TagColumns.of([e.fields], [e.offset], [e.time_ms])
        again.see(Run.of(e.partition, [e.offset], [e.time_ms], [None], None, [b""], note), -1, None, 1 << 62)
    again.begin(in_front=True)
    rest = made[split:]
    assert again.fits(rest)
    assert list(again.numbered(rest)) == rest


@given(st.lists(st.sampled_from("pqr"), min_size=1, max_size=12), st.integers(0, 12))
def test_what_is_left_of_a_run_has_the_numbers_and_notes_that_it_had(pids: list[str], mark: int) -> None:
    source, n = Partition("jobs", 0), len(pids)
    notes = [TagFields(pid, i, i + 1, 100 + i, ("red", pid)) for i, pid in enumerate(pids)]
    offsets, times = list(range(10, 10 + n)), list(range(100, 100 + n))
    keys: list[bytes | None] = [pid.encode() for pid in pids]
    values = [str(i).encode() for i in range(n)]
    run = Run.of(source, offsets, times, keys, None, values, TagColumns.of(notes, offsets, times))
    left = erase_from(NumberedRun(51, 50 + n, 7, run, 100 * n), {"p": Erasure(9, {str(source): 10 + mark})})
    found = [
        (number, offset, note, value)
        for entry in left
        for number, offset, note, value in zip(
            range(entry.first, entry.last + 1),
            entry.run.offsets,
            entry.run.tag_columns.rows(entry.run.offsets, entry.run.times) if entry.run.tag_columns else (),
            entry.run.values,
            strict=True,
        )
    ]
    wanted = [(51 + i, 10 + i, note, values[i]) for i, note in enumerate(notes) if note.source != "p" or i > mark]
    assert found == wanted


def _segment(index: int, epoch: int, first: int, last: int) -> Segment:
    return Segment(index, index, 1, epoch, first, last, last - first + 1, 0, 0, state=PACKED)


def test_places_of_what_was_erased_lead_to_what_is_left_behind_them() -> None:
    one, two, three, live = (
        _segment(0, 10, 5, 20),
        _segment(1, 10, 25, 40),
        _segment(2, 10, 45, 60),
        _segment(3, 20, 70, 80),
    )
    expired = Position(10, 3)
    two = shrink_segment(two, 28, 35, 4)
    assert two.replaced == ((10, 25, 27), (10, 36, 40))
    last = widen_neighbour([one, two], three)
    assert last is not None
    assert (last.index, last.replaced) == (1, ((10, 25, 27), (10, 36, 60)))
    log = Log([one, last, live], expired)
    for number, at in ((6, 0), (20, 0), (26, 1), (30, 1), (37, 1), (45, 1), (60, 1)):
        found = locate(log, Position(10, number))
        assert (found.at, found.position, found.gap) == (at, Position(10, number), None)
    first = widen_neighbour([two, three], one)
    assert first is not None
    assert (first.index, first.replaced) == (1, ((10, 5, 27), (10, 36, 40)))
    assert locate(Log([first, three], expired), Position(10, 6)).gap is None
    assert widen_neighbour([live], three) is None
    again = shrink_segment(last, 30, 30, 1)
    assert again.replaced == ((10, 25, 29), (10, 31, 60))
    rebuilt = replaced([], [one, again], expired)
    assert rebuilt == ((10, 4, 60),)
    older = msgspec.structs.replace(one, replaced=((3, 1, 9),))
    assert shrink_segment(older, 5, 10, 3).replaced == ((10, 11, 20), (3, 1, 9))

"""Cleaned sources: whose events were taken out of a tag for good, and up to where.

Invariant: what is covered is neither expected of the tag nor brought back to it; what the source writes later is kept,
and numbered after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TypeAlias

import msgspec

from tailrace.log.run import Entry, Run
from tailrace.log.segment import PACKED, Segment
from tailrace.views.tags.note import Note, Notes


class Cleaned(msgspec.Struct, frozen=True):
    """Up to where the events of one source were taken out of one tag."""

    number: int
    """That of the last one."""
    marks: dict[str, int]
    """Of each partition that it was written to, the last offset."""

    def covers(self, place: str, offset: int) -> bool:
        """Return whether an event of the source is one of them."""
        return offset <= self.marks.get(place, -1)


Cleanings: TypeAlias = Mapping[str, Cleaned]
"""Those of one tag, by source."""


def without(entry: Entry, gone: Cleanings) -> list[Entry]:
    """Return what is left of an entry without the events that are covered; each keeps its number in the log."""
    run, notes = entry.run, entry.run.notes
    if notes is None or not gone.keys() & set(notes.pids):
        return [entry]
    offsets, times, place = run.offsets, run.times, str(run.source)
    rows = notes.rows(offsets, times)
    kept = [
        row.pid not in gone or not gone[row.pid].covers(place, offset)
        for row, offset in zip(rows, offsets, strict=True)
    ]
    if all(kept):
        return [entry]
    found: list[Entry] = []
    for is_kept, group in groupby(range(len(rows)), key=kept.__getitem__):
        if is_kept:
            found.append(_part(entry, rows, offsets, times, list(group)))
    return found


def _part(entry: Entry, rows: list[Note], offsets: list[int], times: list[int], at: list[int]) -> Entry:
    run = entry.run
    begin, end = at[0], at[-1] + 1
    part = Run.of(
        run.source,
        offsets[begin:end],
        times[begin:end],
        run.keys if len(run.keys) == 1 else run.keys[begin:end],
        None if run.headers is None else run.headers[begin:end],
        run.values[begin:end],
        Notes.of(rows[begin:end], offsets[begin:end], times[begin:end]),
    )
    size = entry.size * (end - begin) // len(rows)
    return Entry(entry.first + begin, entry.first + end - 1, entry.newest_ms, part, size)


def thinned(segment: Segment, first: int, last: int, events: int) -> Segment:
    """Return a segment of which so many events are left, between these numbers; it knows which were at its ends."""
    out = [each for each in segment.replaced if each[0] == segment.epoch]
    begin = min([segment.first, *(one for _, one, _ in out)])
    end = max([segment.last, *(two for _, _, two in out)])
    taken: list[tuple[int, int, int]] = []
    if begin < first:
        taken.append((segment.epoch, begin, first - 1))
    if last < end:
        taken.append((segment.epoch, last + 1, end))
    rest = [each for each in segment.replaced if each[0] != segment.epoch]
    return msgspec.structs.replace(
        segment, first=first, last=last, events=events, state=PACKED, replaced=(*taken, *rest), open=False
    )


def beside(segments: Sequence[Segment], gone: Segment) -> Segment | None:
    """Return the neighbour of a segment that has nothing left, as it is when it knows of it; None if it has none."""
    same = [each for each in segments if each.epoch == gone.epoch and each.index != gone.index and not each.open]
    if not same:
        return None
    before = [each for each in same if each.index < gone.index]
    near = before[-1] if before else same[0]
    wider = msgspec.structs.replace(
        near,
        first=min(near.first, gone.first),
        last=max(near.last, gone.last),
        replaced=(*near.replaced, *gone.replaced),
    )
    known = thinned(wider, near.first, near.last, near.events)
    return msgspec.structs.replace(known, state=near.state)

"""The low-water stamp of a reader of a tag, and what was taken beyond it: what its cursor says.

Invariant: the stamp only rises; whatever was taken beyond it is named, by its place or by its source, and what lies
below it is not.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from uuid import UUID

from tailrace.views.tags.rows.cursor import Open, Part, Reached, hashed, hashed_place
from tailrace.views.tags.rows.tag_gaps import Hold, TagRow
from tailrace.views.tags.stamp import last_of, ms_of, order


class LowWater:
    """Where a reader that begins now would have to begin."""

    def __init__(self, start: Part) -> None:
        self.stamp, self.order = start.low, order(start.low)
        self._reached = {each.place: (each.offset, last_of(each.ms)) for each in start.reached}
        self._beyond: dict[str, tuple[int, UUID]] = {}
        self.open = {each.pid: each for each in start.open}
        """Sources that were open at the start, and were not seen since; by the hash of their name."""

    def __len__(self) -> int:
        """How much is named."""
        return len(self._reached) + len(self._beyond) + len(self.open)

    def opened(self, pid: str) -> Open | None:
        """Return what the start said of a source that was open."""
        return self.open.get(hashed(pid)) if self.open else None

    def given(self, pid: str) -> tuple[int, UUID] | None:
        """Return the number and the stamp of the last event of a source that is named."""
        return self._beyond.get(pid) if self._beyond else None

    def names(self, row: TagRow, marked: bool) -> bool:
        """Whether an event's place, or its source where places have no marks, is named."""
        return hashed_place(row.place) in self._reached if marked else row.pid in self._beyond

    def take(self, row: TagRow) -> None:
        """Name the place of an event that was taken, if it has marks."""
        if row.stamp == self.stamp or order(row.stamp) <= self.order:
            return
        key = hashed_place(row.place)
        before = self._reached.get(key)
        if before is None or row.offset >= before[0]:
            self._reached[key] = row.offset, row.stamp

    def give(self, row: TagRow) -> None:
        """Name the source of an event that goes out, where its place has no marks."""
        stamp = row.stamp
        before = self._beyond.get(row.pid)
        if before is not None:
            stamp = max(stamp, before[1], key=order)
        if order(stamp) > self.order:
            self._beyond[row.pid] = row.tag_seq, stamp

    def rise(self, stamp: UUID, looked: bool) -> None:
        """Raise it, and name no longer what lies below; what was open at the start not before that was looked for."""
        place = order(stamp)
        if place <= self.order:
            return
        self.stamp, self.order = stamp, place
        if self._reached:
            self._reached = {key: each for key, each in self._reached.items() if order(each[1]) > place}
        if self._beyond:
            self._beyond = {pid: each for pid, each in self._beyond.items() if order(each[1]) > place}
        if self.open and looked:
            self.settle()

    def settle(self) -> None:
        """Name no longer what was open below it at the start, and was not found."""
        if self.open:
            self.open = {pid: each for pid, each in self.open.items() if order(last_of(each.since_ms)) > self.order}

    def part(self, holds: Collection[Hold[Any]]) -> Part:
        """Return the cursor's part, with what is held."""
        if not (self._reached or self._beyond or self.open or holds):
            return Part(self.stamp)
        reached = (Reached(key, offset, ms_of(stamp)) for key, (offset, stamp) in self._reached.items())
        named = dict(self.open)
        for pid, (number, stamp) in self._beyond.items():
            named[hashed(pid)] = Open(hashed(pid), number, ms_of(stamp))
        for hold in holds:
            # Where no number says what was delivered, nothing of a millisecond in which something was is looked for.
            since_ms = ms_of(hold.after) + (1 if hold.first and not hold.number else 0)
            named[hashed(hold.pid)] = Open(hashed(hold.pid), hold.number, since_ms, hold.first)
        return Part(self.stamp, tuple(reached), tuple(named.values()))

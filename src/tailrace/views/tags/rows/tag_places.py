"""The places that a tag's rows come from, as far as their marks and floors are known to its reader.

A row is there for good, *committed*, if its place's mark covers it, or if its place is known to have no marks since
somebody else writes there; of a place that may have some and of which none were read, nothing is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID

from tailrace.log.event import Source
from tailrace.views.tags.rows.tag_gaps import TagRow
from tailrace.views.tags.stamp import last_of, order


class Places:
    """What was read last of marks and floors."""

    def __init__(self) -> None:
        self._marks: Mapping[Source, int] | None = None
        self.floors: Mapping[Source, int] = {}
        self.others: set[Source] = set()
        """Those that are known to have no marks: somebody else writes there."""

    def renew(self, marks: Mapping[Source, int], floors: Mapping[Source, int]) -> None:
        """Take what was read anew."""
        self._marks, self.floors = marks, floors

    def again_from(self, marks: Mapping[Source, int], position: UUID, start: UUID) -> UUID:
        """Return after which stamp something may have been added: at the floors noted of places that have moved since.

        A place that is new has nothing below the lowest of all floors: whoever writes sees to that.
        """
        known, after = self._marks, position
        if known is None:
            return after
        lowest = min(self.floors.values(), default=None)
        for place, mark in marks.items():
            if known.get(place) == mark:
                continue
            floor = self.floors.get(place) if place in known else lowest
            if floor is None:
                return start
            after = min(after, last_of(floor - 1), key=order)
        return max(after, start, key=order)

    def low(self, start: UUID) -> UUID | None:
        """Return the last stamp below all floors; the start if some place has none, None if nobody has any."""
        if self._marks is not None and not self.floors.keys() >= self._marks.keys():
            return start
        lowest = min(self.floors.values(), default=None)
        return None if lowest is None else last_of(lowest - 1)

    def is_marked(self, place: Source) -> bool:
        """Whether a place has marks."""
        return place in self.floors or (self._marks is not None and place in self._marks)

    def is_committed(self, row: TagRow) -> bool:
        """Whether a row is there for good."""
        mark = self._marks.get(row.place) if self._marks else None
        if mark is not None:
            return row.offset <= mark
        return row.place in self.others and row.place not in self.floors

    def strangers(self, rows: Iterable[TagRow]) -> set[Source]:
        """Return the places of some rows of which it is not known whether they have marks."""
        return {row.place for row in rows if row.place not in self.others and not self.is_marked(row.place)}

"""The sources of a tag that its reader knows: what was the last event delivered of each.

As many are remembered as there is room for. Of one that was forgotten, or that was delivered before the reader began,
it is only known up to which offset of its place everything was delivered.
"""

from __future__ import annotations

from collections import OrderedDict
from uuid import UUID

import msgspec

from tailrace.log.event import Source
from tailrace.views.tags.rows.cursor import Part, hashed_place
from tailrace.views.tags.rows.tag_gaps import TagRow


class Last(msgspec.Struct, frozen=True, gc=False):
    """The last event of a source that was delivered."""

    number: int
    stamp: UUID
    place: Source
    offset: int


class KnownSources:
    """What is known of sources."""

    def __init__(self, start: Part, most: int) -> None:
        """``most``: how many are remembered."""
        self._most = most
        self._last: OrderedDict[str, Last] = OrderedDict()
        self._resumed = {each.place: each.offset for each in start.reached}
        """Up to which offset what belongs to sources that are not known was delivered before."""

    def __contains__(self, pid: str) -> bool:
        return pid in self._last

    def get(self, pid: str) -> Last | None:
        """Return the last event of a source; None if it is not known."""
        return self._last.get(pid)

    def is_new(self, row: TagRow) -> bool:
        """Whether a row of a source that is not known was not delivered before."""
        return row.offset > self._resumed.get(hashed_place(row.place), -1)

    def expect(self, row: TagRow, after: UUID) -> None:
        """Know a source by the event that it will begin with, after a stamp."""
        self._last[row.pid] = Last(row.tag_seq - 1, after, row.place, -1)

    def meet(self, row: TagRow) -> None:
        """Know a source by an event that was delivered before."""
        self._last[row.pid] = Last(row.tag_seq, row.stamp, row.place, row.offset)

    def deliver(self, row: TagRow) -> None:
        """Note that an event is delivered; if they get too many, the source is forgotten that was silent longest."""
        last = self._last.get(row.pid)
        if last is not None and last.place != row.place:
            self._resume_after(last)
        self.meet(row)
        self._last.move_to_end(row.pid)
        if len(self._last) > self._most:
            self._resume_after(self._last.popitem(last=False)[1])

    def _resume_after(self, last: Last) -> None:
        key = hashed_place(last.place)
        self._resumed[key] = max(self._resumed.get(key, -1), last.offset)

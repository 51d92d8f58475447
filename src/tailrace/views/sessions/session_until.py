"""Up to where a feed of a session reads: a time of samples, or a place that a cursor names.

A place in the stream may have been trimmed, and come from Kafka: then it has an offset, too, which is looked up before
Kafka is read. Of a place in the middle of a write that is the offset at which the write ends.
"""

from __future__ import annotations

from tailrace.views.sessions.cursor import Place, SessionCursor
from tailrace.views.sessions.ledger import spot_of
from tailrace.views.sessions.streams import LiveSessions, Located

GRACE_NS = 1_000_000_000
"""How long after its time a live feed still waits for what was under way."""


class Until:
    """The end of a request, if it has one."""

    def __init__(self, until: int | SessionCursor | None) -> None:
        self.time = until if isinstance(until, int) else None
        """Samples after it (ns) are left out."""
        self._cursor = until if isinstance(until, SessionCursor) else None
        self._in_kafka: Place | None = None

    async def look_up(self, live: LiveSessions, located: Located) -> None:
        """Find where the place is in Kafka: a part of the session's life will be read from there."""
        cursor = self._cursor
        if cursor is None or cursor.number != located.number or not cursor.place.in_stream:
            return
        spot = await spot_of(live, located, cursor.place.entry)
        self._in_kafka = None if spot is None else Place.at_offset(spot.high)

    def is_reached(self, number: int, place: Place, upcoming: Place | None) -> bool:
        """Whether everything up to the end was read by whoever is at a place of a life, and what comes is beyond it."""
        if self._cursor is None or self._cursor.number != number:
            return self._cursor is not None and self._cursor.number < number
        end, next_end = self._end_for(place), None if upcoming is None else self._end_for(upcoming)
        is_beyond = upcoming is not None and next_end is not None and upcoming > next_end
        return (end is not None and place >= end) or is_beyond

    def _end_for(self, place: Place) -> Place | None:
        """Return the end as it compares with a place; None if it is not known where it is in Kafka."""
        end = None if self._cursor is None else self._cursor.place
        return self._in_kafka if end is not None and end.in_stream and not place.in_stream else end

    def left_ns(self, now_ms: int) -> int | None:
        """Return how long a live feed still waits; None if it has no time at which it ends."""
        return None if self.time is None else self.time + GRACE_NS - now_ms * 1_000_000

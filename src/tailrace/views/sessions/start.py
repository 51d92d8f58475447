"""Where a feed of a session begins: the place, what was held there, and whether Kafka is read before the stream."""

from __future__ import annotations

import msgspec

from tailrace.log.cursor import FromEnd, FromLast
from tailrace.valkey.entry_id import BEGINNING, EntryId
from tailrace.views.sessions.cursor import FromMoment, FromPlace, Held, Place, SessionCursor, SessionStart
from tailrace.views.sessions.ledger import Spot, spot_of
from tailrace.views.sessions.life import Life, SessionParts
from tailrace.views.sessions.reader import Lost, last_entries
from tailrace.views.sessions.retained import Hole, Retained, source_of
from tailrace.views.sessions.session_end import is_of_another
from tailrace.views.sessions.shown import range_end
from tailrace.views.sessions.streams import LiveSessions, Located

NEAR_MS = 200
"""How near to a time its place is looked for; what is before it is read, and left out."""


class Beginning(msgspec.Struct, frozen=True):
    """Where a feed begins."""

    place: Place
    """Up to here everything was sent, but for what was held."""
    held: Held | None = None
    past: Retained | None = None
    lost: Lost | None = None
    """What is known to be gone already."""
    is_over: bool = False
    """Whether this is a life before the one that the session has now."""

    @property
    def origin(self) -> Place:
        """After which place it is read."""
        return self.place if self.held is None else self.held.after


async def beginning(parts: SessionParts, life: Life, start: SessionStart) -> Beginning:
    """Find where a request begins in the life of a session that was joined."""
    located, live = life.located, parts.live
    if isinstance(start, FromPlace):
        return await _resumed(parts, life, start.cursor)
    gone = await live.trimmed(located.stream, located.number)
    end = Place.of(max(life.target, gone or BEGINNING, located.position))
    if isinstance(start, FromEnd) or (isinstance(start, FromLast) and not start.count):
        return Beginning(end)
    if isinstance(start, FromLast):
        count = start.count + 1
        found = await last_entries(live, located.stream, located.number, count, located.position, life.target)
        before = found[-1] if len(found) == count else max(located.position, gone or BEGINNING)
        return Beginning(Place.of(before))
    if isinstance(start, FromMoment):
        first = None if gone is None else await life.first_time()
        if gone is None or (first is not None and start.time >= first):  # the stream has it
            return Beginning(Place.of(max(await _before(parts, life, start.time), gone or BEGINNING)))
    past = await _trimmed(parts, located, None)
    if past is not None:
        return Beginning(Place.at_offset((located.opened or 0) - 1), past=past)
    return Beginning(Place.of(located.position))


async def _before(parts: SessionParts, life: Life, time: int) -> EntryId:
    """Return a place that has every sample at or after a time behind it, and not much else.

    Our writers say in every write how far the session's range has grown, before its samples. So if that has not reached
    the time, nothing has up to there, however late some samples are. Of what others write all is read.
    """
    located, live = life.located, parts.live
    low, high = located.position, life.target[0]
    while located.order and high - low[0] > NEAR_MS:
        middle = (low[0] + high) // 2
        for entry in await live.read(located.stream, (middle, 0), 4, located.number):
            end = range_end(entry.data, parts.container)
            if end is not None:
                break
        else:
            end = None
        if end is not None and end < time and entry.id > low:
            low = entry.id
        else:
            high = middle
    return low


async def _resumed(parts: SessionParts, life: Life, cursor: SessionCursor) -> Beginning:
    located, live = life.located, parts.live
    place, is_over = cursor.place, cursor.number != located.number
    if not place.in_stream:
        past = None if is_over else await _trimmed(parts, located, cursor.origin.major)
        if past is not None:
            return Beginning(place, cursor.held, past)
        to = Place.of(located.position)
        return Beginning(to, lost=Lost(place, to, "life-over" if is_over else "trimmed"), is_over=is_over)
    if is_over and await is_of_another(parts, life, cursor.number):
        to = Place.of(located.position)
        return Beginning(to, lost=Lost(place, to, "life-over"))
    end = max(life.target, await live.last_given(located.stream))
    if place.entry > end and not is_over:
        to = Place.of(life.target)
        return Beginning(to, lost=Lost(place, to, "store-rolled-back"))
    found = None if is_over else await _in_kafka(parts, located, cursor)
    return found or Beginning(place, cursor.held, is_over=is_over)


async def overtaken(parts: SessionParts, life: Life, cursor: SessionCursor, lost: Lost) -> Beginning | None:
    """Return where a feed goes on that trimming has overtaken: as if it came back now, with its cursor.

    None if what is lost has to be told: it is not in Kafka, or nobody knows where.
    """
    located = life.located
    is_ours = lost.reason == "trimmed" and not lost.possible and not lost.back and lost.after.in_stream
    if not is_ours or located.number != life.number:
        return None
    found = await parts.live.get(located.identity)
    is_same = found is not None and (found.stream, found.number) == (located.stream, located.number)
    return await _in_kafka(parts, found if found is not None and is_same else located, cursor)


async def _in_kafka(parts: SessionParts, located: Located, cursor: SessionCursor) -> Beginning | None:
    """Return where a cursor of the stream is in Kafka, if the stream has lost what comes after it, and Kafka had it.

    What was held may be looked for further back than it was: all samples from its time on lie behind its first place.
    """
    live, source, place, held = parts.live, source_of(located), cursor.place, cursor.held
    gone = await live.trimmed(located.stream, located.number)
    if parts.archive is None or source is None or gone is None or cursor.origin.entry >= gone:
        return None
    spot = await spot_of(live, located, place.entry)
    if spot is None:
        return None
    first_lost = _first_lost(cursor, spot)
    after = spot.low if held is None else min(spot.low, await _at_or_before(live, located, held.after))
    hole: Hole | None = None
    if spot.end is not None and spot.end >= gone:
        # The stream has the rest of that write; Kafka is read for what was held of others alone.
        if first_lost.in_stream:
            return None
        hole = Hole(spot.low, Lost(first_lost, Place.of(gone), "trimmed"))
    elif not spot.is_exact:
        hole = Hole(spot.low, Lost(first_lost, Place.at_offset(spot.high), "trimmed", back=True))
    past = Retained(parts.archive, live, located, source, after, BEGINNING if hole else place.entry, hole)
    begin = Place.at_offset(spot.low) if hole is None else place
    return Beginning(begin, None if held is None else Held(Place.at_offset(after), held.floor), past)


def _first_lost(cursor: SessionCursor, spot: Spot) -> Place:
    """Return after which place something is lost; of what was held, too, unless that is before what nobody knows."""
    if cursor.held is None or spot.begin is None or cursor.origin > Place.of(spot.begin):
        return cursor.origin
    return Place.at_offset(spot.low)


async def _at_or_before(live: LiveSessions, located: Located, place: Place) -> int:
    if not place.in_stream:
        return place.major
    spot = await spot_of(live, located, place.entry)
    return (located.opened or 0) - 1 if spot is None else spot.low


async def _trimmed(parts: SessionParts, located: Located, after: int | None) -> Retained | None:
    """Return what reads the part that was trimmed; None if nothing was, or Kafka never had it."""
    source = source_of(located)
    if parts.archive is None or source is None or located.opened is None:
        return None
    if await parts.live.trimmed(located.stream, located.number) is None:
        return None
    return Retained(parts.archive, parts.live, located, source, located.opened - 1 if after is None else after)

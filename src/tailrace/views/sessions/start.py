"""Where a feed of a session begins: the place, what was held there, and whether Kafka is read before the stream.

How it is known that a session is over, and which lives it had: by what entries say that are still there.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from tailrace.errors import BadBurst
from tailrace.log.cursor import FromEnd, FromLast
from tailrace.valkey.entry_id import BEGINNING, END, EntryId, before
from tailrace.views.sessions.burst import parse, unpack
from tailrace.views.sessions.cursor import (
    FromMoment,
    FromSessionCursor,
    SessionCursor,
    SessionStart,
    StreamPosition,
    UnsentSamples,
)
from tailrace.views.sessions.life import SessionLife, SessionParts
from tailrace.views.sessions.reader import (
    Hole,
    LostStretch,
    Retained,
    Spot,
    entry_at,
    first_entries,
    first_entry,
    last_entries,
    source_of,
    spot_of,
)
from tailrace.views.sessions.samples import range_end
from tailrace.views.sessions.streams import LiveSessions, Located, state_of
from tailrace.views.sessions.telemetry import CLOSED


class _Called(msgspec.Struct):
    identity: str | None = None


_decode = msgspec.json.Decoder(_Called).decode


async def is_closed(parts: SessionParts, life: SessionLife, until: EntryId) -> bool | None:
    """Whether the last entry of a life says that it is over; None if there is none any more."""
    stream = life.located.stream
    newest = await last_entries(parts.live, stream, life.number, 1, BEGINNING, until)
    entry = await entry_at(parts.live, stream, newest[0]) if newest else None
    return None if entry is None else any(state_of(text) in CLOSED for text in _said(entry.data, parts.container))


async def is_whole(parts: SessionParts, life: SessionLife) -> bool:
    """Whether all that a life had was read, as far as can be known: another one has its place."""
    live, stream = parts.live, life.located.stream
    if life.state in CLOSED:
        return True
    closed = await is_closed(parts, life, await live.tail(stream))
    if closed is None:
        return await live.trimmed(stream, life.number) is not None
    return closed or life.located.number == life.number


async def is_of_another(parts: SessionParts, life: SessionLife, number: int) -> bool:
    """Whether what the stream has under a number is no earlier life of this session: it has to say that it is."""
    first = await first_entry(parts.live, life.located.stream, number, BEGINNING)
    return first is not None and not await _is_called(parts, life, number, first)


async def life_between(
    parts: SessionParts, life: SessionLife, begin: EntryId, later: Located
) -> tuple[int, EntryId] | None:
    """Return the first life of the session after this one and before another one: its number, and the place before it.

    Lives of a session follow each other, and each has a higher number than the one before. Of one that was trimmed
    nobody knows where it began: then the place is the one up to which the life before it was read.
    """
    stream = life.located.stream
    if later.stream != stream or later.position <= begin:
        return None
    found = await first_entries(parts.live, stream, begin, later.position)
    for number in sorted(found):
        if life.number < number < later.number and await _is_called(parts, life, number, found[number]):
            is_trimmed = await parts.live.trimmed(stream, number) is not None
            return number, begin if is_trimmed else before(found[number])
    return None


async def _is_called(parts: SessionParts, life: SessionLife, number: int, first: EntryId) -> bool:
    """Whether the first or the last entry that there is of a life says that it is of this session."""
    live, located = parts.live, life.located
    last = await last_entries(live, located.stream, number, 1, BEGINNING, END)
    for at in (first, *last):
        entry = await entry_at(live, located.stream, at)
        identity = None if entry is None else _identity(entry.data, parts.container)
        if identity is not None:
            return identity == located.identity
    return False


def _identity(block: bytes, container: str) -> str | None:
    for text in _said(block, container):
        with suppress(msgspec.DecodeError, RecursionError):
            return _decode(text).identity
    return None


def _said(block: bytes, container: str) -> list[str]:
    """Return the Session JSONs in a block."""
    try:
        messages = parse(unpack(block, container)).data
    except BadBurst:
        return []
    return [each.session_json for each in messages if each.WhichOneof("data") == "session_json"]


NEAR_MS = 200
"""How near to a time its place is looked for; what is before it is read, and left out."""


class Beginning(msgspec.Struct, frozen=True):
    """Where a feed begins."""

    place: StreamPosition
    """Up to here everything was sent, but for what was held."""
    held: UnsentSamples | None = None
    past: Retained | None = None
    lost: LostStretch | None = None
    """What is known to be gone already."""
    is_over: bool = False
    """Whether this is a life before the one that the session has now."""

    @property
    def origin(self) -> StreamPosition:
        """After which place it is read."""
        return self.place if self.held is None else self.held.after


async def beginning(parts: SessionParts, life: SessionLife, start: SessionStart) -> Beginning:
    """Find where a request begins in the life of a session that was joined."""
    located, live = life.located, parts.live
    if isinstance(start, FromSessionCursor):
        return await _resumed(parts, life, start.cursor)
    gone = await live.trimmed(located.stream, located.number)
    end = StreamPosition.of(max(life.target, gone or BEGINNING, located.position))
    if isinstance(start, FromEnd) or (isinstance(start, FromLast) and not start.count):
        return Beginning(end)
    if isinstance(start, FromLast):
        count = start.count + 1
        found = await last_entries(live, located.stream, located.number, count, located.position, life.target)
        before = found[-1] if len(found) == count else max(located.position, gone or BEGINNING)
        return Beginning(StreamPosition.of(before))
    if isinstance(start, FromMoment):
        first = None if gone is None else await life.first_time()
        if gone is None or (first is not None and start.time >= first):  # the stream has it
            return Beginning(StreamPosition.of(max(await _before(parts, life, start.time), gone or BEGINNING)))
    past = await _trimmed(parts, located, None)
    if past is not None:
        return Beginning(StreamPosition.at_offset((located.opened or 0) - 1), past=past)
    return Beginning(StreamPosition.of(located.position))


async def _before(parts: SessionParts, life: SessionLife, time: int) -> EntryId:
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


async def _resumed(parts: SessionParts, life: SessionLife, cursor: SessionCursor) -> Beginning:
    located, live = life.located, parts.live
    place, is_over = cursor.position, cursor.number != located.number
    if not place.in_stream:
        past = None if is_over else await _trimmed(parts, located, cursor.origin.major)
        if past is not None:
            return Beginning(place, cursor.unsent, past)
        to = StreamPosition.of(located.position)
        return Beginning(to, lost=LostStretch(place, to, "life-over" if is_over else "trimmed"), is_over=is_over)
    if is_over and await is_of_another(parts, life, cursor.number):
        to = StreamPosition.of(located.position)
        return Beginning(to, lost=LostStretch(place, to, "life-over"))
    end = max(life.target, await live.last_generated_id(located.stream))
    if place.entry > end and not is_over:
        to = StreamPosition.of(life.target)
        return Beginning(to, lost=LostStretch(place, to, "store-rolled-back"))
    found = None if is_over else await _in_kafka(parts, located, cursor)
    return found or Beginning(place, cursor.unsent, is_over=is_over)


async def overtaken(
    parts: SessionParts, life: SessionLife, cursor: SessionCursor, lost: LostStretch
) -> Beginning | None:
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
    live, source, place, held = parts.live, source_of(located), cursor.position, cursor.unsent
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
        hole = Hole(spot.low, LostStretch(first_lost, StreamPosition.of(gone), "trimmed"))
    elif not spot.is_exact:
        hole = Hole(spot.low, LostStretch(first_lost, StreamPosition.at_offset(spot.high), "trimmed", back=True))
    past = Retained(parts.archive, live, located, source, after, BEGINNING if hole else place.entry, hole)
    begin = StreamPosition.at_offset(spot.low) if hole is None else place
    return Beginning(begin, None if held is None else UnsentSamples(StreamPosition.at_offset(after), held.floor), past)


def _first_lost(cursor: SessionCursor, spot: Spot) -> StreamPosition:
    """Return after which place something is lost; of what was held, too, unless that is before what nobody knows."""
    if cursor.unsent is None or spot.begin is None or cursor.origin > StreamPosition.of(spot.begin):
        return cursor.origin
    return StreamPosition.at_offset(spot.low)


async def _at_or_before(live: LiveSessions, located: Located, place: StreamPosition) -> int:
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

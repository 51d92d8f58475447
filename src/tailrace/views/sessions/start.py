"""The begin of a feed in a session's life: finds the position of a request and sets the life to it.

The stream has the newest entries of a life. If older ones were trimmed, and Kafka still has their records, the life is
set to read Kafka first; the feed sees only the position and the samples that it still has to send.
"""

from __future__ import annotations

import msgspec

from tailrace.log.cursor import FromEnd, FromLast
from tailrace.log.entry_id import BEGINNING, EntryId
from tailrace.views.sessions.cursor import (
    FromMoment,
    FromSessionCursor,
    SessionCursor,
    SessionStart,
    StreamPosition,
    UnsentSamples,
)
from tailrace.views.sessions.ledger import OffsetBounds, offset_bounds
from tailrace.views.sessions.life import SessionLife
from tailrace.views.sessions.reader import Hole, KafkaReader, LostStretch, partition_of
from tailrace.views.sessions.samples import range_end
from tailrace.views.sessions.streams import LiveSessions, Located

NEAR_MS = 200
"""Precision of the search for the position of a time; earlier samples are read, and left out."""


class Beginning(msgspec.Struct, frozen=True):
    """The begin of a feed."""

    position: StreamPosition
    """Everything up to here was sent, except the unsent samples."""
    unsent: UnsentSamples | None = None
    kafka: KafkaReader | None = None
    """Reader of the trimmed part that comes before the stream."""
    lost: LostStretch | None = None
    """A stretch that is known to be gone."""
    is_over: bool = False
    """True if this is an earlier life than the session's present one."""

    @property
    def origin(self) -> StreamPosition:
        """The position after which reading begins."""
        return self.position if self.unsent is None else self.unsent.after


async def begin_life(life: SessionLife, start: SessionStart) -> Beginning:
    """Set a life that was joined to the begin of a request."""
    if isinstance(start, FromSessionCursor):
        begin = await _resumed(life, start.cursor)
    else:
        begin = await _started(life, start)
    if begin.is_over:
        await life.turn(start.cursor.number if isinstance(start, FromSessionCursor) else 0, begin.origin)
    else:
        await life.begin(begin.origin, begin.kafka)
    return begin


async def recover_lost(life: SessionLife, cursor: SessionCursor, lost: LostStretch) -> Beginning | None:
    """Set a life that trimming has overtaken to the records in Kafka, as if the feed resumed now with its cursor.

    None if the lost stretch has to be reported: it is not in Kafka, or at unknown offsets.
    """
    located, live = life.located, life.parts.live
    is_ours = lost.reason == "trimmed" and not lost.possible and not lost.back and lost.after.in_stream
    if not is_ours or located.number != life.number:
        return None
    found = await live.get(located.identity)
    is_same = found is not None and (found.stream, found.number) == (located.stream, located.number)
    begin = await _in_kafka(life, found if found is not None and is_same else located, cursor)
    if begin is not None:
        await life.begin(begin.origin, begin.kafka)
    return begin


async def _started(life: SessionLife, start: SessionStart) -> Beginning:
    located, live = life.located, life.parts.live
    trimmed = await live.trimmed(located.stream, located.number)
    if isinstance(start, FromEnd) or (isinstance(start, FromLast) and not start.count):
        return Beginning(StreamPosition.of(max(life.target, trimmed or BEGINNING, located.position)))
    if isinstance(start, FromLast):
        count = start.count + 1
        entries = await live.last_entries(located.stream, located.number, count, located.position, life.target)
        before = entries[-1] if len(entries) == count else max(located.position, trimmed or BEGINNING)
        return Beginning(StreamPosition.of(before))
    if isinstance(start, FromMoment):
        first = None if trimmed is None else await life.first_time()
        if trimmed is None or (first is not None and start.time >= first):  # the stream has it
            return Beginning(StreamPosition.of(max(await _before(life, start.time), trimmed or BEGINNING)))
    after = (located.opened or 0) - 1
    kafka = await _trimmed_part(life, after)
    if kafka is not None:
        return Beginning(StreamPosition.at_offset(after), kafka=kafka)
    return Beginning(StreamPosition.of(located.position))


async def _before(life: SessionLife, time: int) -> EntryId:
    """Return an entry shortly before the first sample at or after a time.

    Tailrace's writers put the grown range of the session into every write, before its samples. So if the range has not
    reached the time, no sample has up to there, however late some samples are. Other streams are read from the start.
    """
    located, live = life.located, life.parts.live
    low, high = located.position, life.target[0]
    while located.order and high - low[0] > NEAR_MS:
        middle = (low[0] + high) // 2
        for entry in await live.read(located.stream, (middle, 0), 4, located.number):
            end = range_end(entry.data, life.parts.container)
            if end is not None:
                break
        else:
            end = None
        if end is not None and end < time and entry.id > low:
            low = entry.id
        else:
            high = middle
    return low


async def _resumed(life: SessionLife, cursor: SessionCursor) -> Beginning:
    located = life.located
    position, is_over = cursor.position, cursor.number != located.number
    first = StreamPosition.of(located.position)
    if not position.in_stream:
        kafka = None if is_over else await _trimmed_part(life, cursor.origin.major)
        if kafka is not None:
            return Beginning(position, cursor.unsent, kafka)
        lost = LostStretch(position, first, "life-over" if is_over else "trimmed")
        return Beginning(first, lost=lost, is_over=is_over)
    if is_over and await life.has_foreign_entries(cursor.number):
        return Beginning(first, lost=LostStretch(position, first, "life-over"))
    end = max(life.target, await life.parts.live.last_generated_id(located.stream))
    if position.entry > end and not is_over:
        to = StreamPosition.of(life.target)
        return Beginning(to, lost=LostStretch(position, to, "store-rolled-back"))
    begin = None if is_over else await _in_kafka(life, located, cursor)
    return begin or Beginning(position, cursor.unsent, is_over=is_over)


async def _in_kafka(life: SessionLife, located: Located, cursor: SessionCursor) -> Beginning | None:
    """Return the position in Kafka of a cursor of the stream, if entries after it were trimmed and Kafka had them.

    Unsent samples may be read from further back than needed: all of them are after the offset where they begin.
    """
    archive, live, partition = life.parts.archive, life.parts.live, partition_of(located)
    position, unsent = cursor.position, cursor.unsent
    trimmed = await live.trimmed(located.stream, located.number)
    if archive is None or partition is None or trimmed is None or cursor.origin.entry >= trimmed:
        return None
    bounds = await offset_bounds(live, located, position.entry)
    if bounds is None:
        return None
    lost_after = _lost_after(cursor, bounds)
    after = bounds.low if unsent is None else min(bounds.low, await _offset_before(live, located, unsent.after))
    hole: Hole | None = None
    if bounds.end is not None and bounds.end >= trimmed:
        # The stream has the rest of that write; Kafka is read for the unsent samples of earlier ones alone.
        if lost_after.in_stream:
            return None
        hole = Hole(bounds.low, LostStretch(lost_after, StreamPosition.of(trimmed), "trimmed"))
    elif not bounds.is_exact:
        lost = LostStretch(lost_after, StreamPosition.at_offset(bounds.high), "trimmed", back=True)
        hole = Hole(bounds.low, lost)
    kafka = KafkaReader(archive, live, located, partition, after, BEGINNING if hole else position.entry, hole)
    begin = StreamPosition.at_offset(bounds.low) if hole is None else position
    in_kafka = None if unsent is None else UnsentSamples(StreamPosition.at_offset(after), unsent.floor)
    return Beginning(begin, in_kafka, kafka)


def _lost_after(cursor: SessionCursor, bounds: OffsetBounds) -> StreamPosition:
    """Return the position after which samples are lost: unsent ones too, unless they are before the unknown records."""
    if cursor.unsent is None or bounds.begin is None or cursor.origin > StreamPosition.of(bounds.begin):
        return cursor.origin
    return StreamPosition.at_offset(bounds.low)


async def _offset_before(live: LiveSessions, located: Located, position: StreamPosition) -> int:
    if not position.in_stream:
        return position.major
    bounds = await offset_bounds(live, located, position.entry)
    return (located.opened or 0) - 1 if bounds is None else bounds.low


async def _trimmed_part(life: SessionLife, after: int) -> KafkaReader | None:
    """Return the reader of the trimmed part after an offset; None if nothing was trimmed, or it never was in Kafka."""
    archive, live, located, partition = life.parts.archive, life.parts.live, life.located, partition_of(life.located)
    if archive is None or partition is None or await live.trimmed(located.stream, located.number) is None:
        return None
    return KafkaReader(archive, live, located, partition, after)

"""One life of a session as a feed reads it: first the trimmed part from Kafka, then its stream, to the live end.

A feed does not know which of the two it reads. Invariant: items come in the order of their positions, each once, and
each has the position before it; a ``LostStretch`` stands where some are gone.

A session that is closed and opened again has several lives, each with a higher number than the one before.

``begin_life`` finds the position of a request and sets the life to it. The stream has the newest entries of a life. If
older ones were trimmed, and Kafka still has their records, the life is set to read Kafka first; the feed sees only the
position and the samples that it still has to send.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import reduce
from typing import TypeVar

import msgspec

from tailrace.log.cursor import BEGINNING, END, EntryId, FromEnd, FromLast, before
from tailrace.views.sessions.burst import parts_of
from tailrace.views.sessions.configuration import Binding, Channels, bindings_in, identifiers
from tailrace.views.sessions.model import merge_session_json
from tailrace.views.sessions.reader import (
    Archive,
    Hole,
    KafkaReader,
    LostStretch,
    StreamHub,
    StreamPiece,
    StreamReader,
    Tap,
    partition_of,
)
from tailrace.views.sessions.samples import (
    Content,
    Line,
    Lines,
    LineSeries,
    StreamPosition,
    Thinner,
    Thinning,
    UnsentSamples,
    content_of,
    step,
    thinned,
)
from tailrace.views.sessions.streams import (
    FromMoment,
    FromSessionCursor,
    LiveSessions,
    Located,
    OffsetBounds,
    SessionCursor,
    SessionRequest,
    SessionStart,
    StreamEntry,
    offset_bounds,
    state_of,
)
from tailrace.views.sessions.telemetry import CLOSED

AGAIN_S = 1.0
"""Interval of requests for a configuration that is not published yet."""
LARGE = 16 << 10
"""Compressed bytes of an entry after which other tasks may run."""

T = TypeVar("T")

_fields = msgspec.json.Decoder(dict[str, object]).decode


class SessionParts(msgspec.Struct, frozen=True):
    hub: StreamHub
    archive: Archive | None = None
    container: str = "auto"
    on_unread: Callable[[], object] | None = None
    """Called for each unreadable entry, per viewer."""

    @property
    def live(self) -> LiveSessions:
        return self.hub.live


class LifeItem(msgspec.Struct, frozen=True):
    before: StreamPosition
    position: StreamPosition
    content: Content
    entry: StreamEntry | None = None
    """The entry, if it is shared by all viewers."""


class SessionLife:
    """A life of a session, read from some position on. Close ``stack`` when it is left."""

    def __init__(
        self, parts: SessionParts, located: Located, tap: Tap, target: EntryId, request: SessionRequest
    ) -> None:
        self.parts, self.located = parts, located
        self.target = target
        """End of the stream when it was joined."""
        self.thinning: Thinning | None = None
        """Thinning that all viewers with the same one share; see ``SessionRequest.shared_thinning``."""
        self.state = located.state
        """State of the session at ``position``."""
        self.stack = AsyncExitStack()
        self.position = StreamPosition.of(target)
        """Position after the last item."""
        self._selection = request.selection
        self._end = request.until if isinstance(request.until, SessionCursor) else None
        self._end_in_kafka: StreamPosition | None = None
        self._stream = StreamReader(parts.live, tap, located.number, target)
        self._kafka: KafkaReader | None = None
        self._ahead: deque[StreamPiece | LostStretch] = deque()
        self._bindings: tuple[Binding, ...] = ()
        self._channels = Channels()
        self._missing: frozenset[str] = frozenset()
        """Configurations that are not in the channels yet."""
        self._lines = Lines(self._selection, self._channels)
        self._loaded_at = 0.0

    @classmethod
    async def join(
        cls, parts: SessionParts, located: Located, request: SessionRequest, waiter: asyncio.Event, is_latest: bool
    ) -> SessionLife:
        """Follow the stream of a session: read its end first, its hash then, until both are of the same life.

        Without ``is_latest`` this very life is meant, even if there is a later one: then all of it is in the stream,
        and the end is read after that. BadRequest if its configuration is known, and lacks a requested channel.
        """
        while True:
            async with AsyncExitStack() as stack:
                tap = await stack.enter_async_context(parts.hub.follow(located.stream, waiter))
                target = max(tap.head, await parts.live.tail(located.stream))
                found = await parts.live.get(located.identity)
                is_same = found is not None and (found.stream, found.number) == (located.stream, located.number)
                if found is not None and not is_same and not is_latest:
                    found, target = None, max(target, await parts.live.tail(located.stream))
                if found is None or is_same:
                    life = cls(parts, found or located, tap, target, request)
                    await life._bind(life.located.merged or life.located.json)
                    life.stack = stack.pop_all()
                    return life
            located = found

    @property
    def number(self) -> int:
        return self._stream.number

    @property
    def behind(self) -> int:
        return self._stream.behind

    @property
    def is_read(self) -> bool:
        """True if everything that is known of was returned."""
        return self._kafka is None and not self._ahead and self._stream.is_at_end

    @property
    def has_ahead(self) -> bool:
        """True if the next item needs no I/O."""
        return bool(self._ahead)

    def is_past(self, entry: EntryId) -> bool:
        """Return True if everything up to an entry was returned."""
        return self._kafka is None and not self._ahead and self._stream.reached >= entry

    def is_past_end(self, position: StreamPosition) -> bool:
        """Return True if a feed at a position has everything up to the requested end, or the next item is beyond it."""
        end = self._end
        if end is None or end.number != self.number:
            return end is not None and end.number < self.number
        head = self._ahead[0] if self._ahead else None
        last = self._end_near(position)
        if last is not None and position >= last:
            return True
        if not isinstance(head, StreamPiece):
            return False
        last = self._end_near(head.position)
        return last is not None and head.position > last

    def _end_near(self, position: StreamPosition) -> StreamPosition | None:
        """Return the requested end for a comparison with a position; None if its offset in Kafka is unknown."""
        end = None if self._end is None else self._end.position
        return self._end_in_kafka if end is not None and end.in_stream and not position.in_stream else end

    # Reading.

    async def begin(self, position: StreamPosition, kafka: KafkaReader | None = None) -> None:
        """Read on after a position, from Kafka first if a reader of the trimmed part is given."""
        self.position, self._kafka = position, kafka
        self._stream.reached = position.entry
        self._ahead.clear()
        end = self._end
        if kafka is not None and end is not None and end.number == self.located.number and end.position.in_stream:
            bounds = await offset_bounds(self.parts.live, self.located, end.position.entry)
            self._end_in_kafka = None if bounds is None else StreamPosition.at_offset(bounds.high)

    async def turn(self, number: int, position: StreamPosition) -> None:
        """Read on with another life in the same stream, after a position."""
        self._stream.number, self.state = number, ""
        await self.begin(position)

    async def fill(self) -> LostStretch | None:
        """Read ahead if nothing is ahead; return the lost stretch that comes next, if one does."""
        while not self._ahead:
            if self._kafka is not None:
                self._ahead.extend(await self._kafka.next())
                if not self._ahead:
                    self._stream.reached = max(self._stream.reached, self._kafka.seam_entry)
                    self._ahead.append(StreamPiece(StreamPosition.of(self._stream.reached)))
                    self._kafka = None
                continue
            reached = self._stream.reached
            self._ahead.extend(await self._stream.next())
            if self._stream.reached == reached or self._stream.is_at_end:
                break
        head = self._ahead[0] if self._ahead else None
        return head if isinstance(head, LostStretch) else None

    async def next(self) -> LifeItem | LostStretch | None:
        await self.fill()
        if not self._ahead:
            return None
        piece = self._ahead.popleft()
        if isinstance(piece, LostStretch):
            self.position = piece.move(self.position)
            return piece
        is_incomplete = self._bindings and not self._channels.complete
        if is_incomplete and asyncio.get_running_loop().time() >= self._loaded_at + AGAIN_S:
            await self._load()
        before, self.position = self.position, piece.position
        entry, shared = piece.entry, None
        if entry is None:
            content = _joined([self._content(block, "block") for block in piece.blocks])
        else:
            shared = entry if self._stream.is_shared(entry) else None
            content = self._content(entry.data) if shared is None else self._shared_content(shared)
            if len(entry.data) > LARGE:
                await asyncio.sleep(0)
        if content.unread:
            if self.parts.on_unread is not None:
                self.parts.on_unread()
            return LostStretch(before, self.position, "unreadable")
        if content.json is not None:
            self.state = state_of(content.json) or self.state
            await self._bind(content.json)
        return LifeItem(before, self.position, content, shared)

    def put_back(self, lost: LostStretch) -> None:
        self._ahead.appendleft(lost)

    def drop(self) -> int:
        """Go to the live end; return the number of skipped bytes."""
        ahead = (each.entry for each in self._ahead if isinstance(each, StreamPiece))
        skipped = self._stream.behind + sum(len(entry.data) for entry in ahead if entry is not None)
        self._ahead.clear()
        self._kafka = None
        self.position = StreamPosition.of(self._stream.skip())
        return skipped

    async def first_time(self) -> int | None:
        """Return the approximate time of the first samples in the stream; None if it has none."""
        located = self.located
        for entry in await self.parts.live.read(located.stream, located.position, 8, located.number):
            content = self._content(entry.data)
            times = [int(each.times.min()) for each in content.series if len(each.times)]
            if times or content.newest is not None:
                return min(times, default=content.newest)
        return None

    # Decoding.

    async def _bind(self, json: str | None) -> None:
        """Load the configurations in a Session JSON, if it has any; BadRequest if a requested channel is in none."""
        try:
            bindings = bindings_in(_fields(json)) if json else ()
        except (msgspec.DecodeError, RecursionError):
            return
        if bindings and bindings != self._bindings:
            self._bindings = bindings
            await self._load()

    async def _load(self) -> None:
        self._loaded_at = asyncio.get_running_loop().time()
        live = self.parts.live
        self._channels = await live.channels(self._bindings)
        self._missing = frozenset(live.catalogue.missing(identifiers(self._bindings)))
        self._lines = Lines(self._selection, self._channels)

    def _content(self, block: bytes, container: str = "") -> Content:
        return content_of(block, container or self.parts.container, self._channels, self._lines)

    def _shared_content(self, entry: StreamEntry) -> Content:
        def decode(entry: StreamEntry) -> Content:
            content = self._content(entry.data)
            if self.thinning is None:
                return content
            return msgspec.structs.replace(content, series=tuple(thinned(content.series, self.thinning)))

        return self.parts.hub.form(entry, self._key, decode, lambda content: content.size)

    def thin(self, item: LifeItem, thinner: Thinner[Line]) -> Sequence[LineSeries]:
        """Thin the samples of an item and return the output, computed once for all viewers in the same state."""
        content, thinning, state = item.content, self.thinning, thinner.state
        if thinning is None:
            return thinner.take(item.before, content.newest, content.series)
        out, thinner.state = self.shared(
            item,
            (item.before, state.key),
            lambda: step(thinning, state, item.before, content.newest, content.series),
            lambda output: 2 * content.size if output else 0,
        )
        return out

    def shared(self, item: LifeItem, form: Hashable, make: Callable[[], T], size_of: Callable[[T], int]) -> T:
        """Return a form of an item, computed once for all viewers if its entry is shared."""
        if item.entry is None:
            return make()
        return self.parts.hub.form(item.entry, (*self._key, form), lambda _: make(), size_of)

    @property
    def _key(self) -> tuple[Hashable, ...]:
        return "shown", self._selection, self._bindings, self._missing, self.thinning

    # The lives of the session.

    async def is_closed(self, until: EntryId) -> bool | None:
        """Return True if the last entry of this life closes it; None if it has no entry any more."""
        live, stream = self.parts.live, self.located.stream
        newest = await live.last_entries(stream, self.number, 1, BEGINNING, until)
        entry = await live.entry(stream, newest[0]) if newest else None
        return None if entry is None else any(state_of(text) in CLOSED for text in self._jsons(entry))

    async def is_whole(self) -> bool:
        """Return True if all of this life was read, as far as can be known: a later one has taken its name."""
        live, stream = self.parts.live, self.located.stream
        if self.state in CLOSED:
            return True
        closed = await self.is_closed(await live.tail(stream))
        if closed is None:
            return await live.trimmed(stream, self.number) is not None
        return closed or self.located.number == self.number

    async def has_foreign_entries(self, number: int) -> bool:
        """Return True if the stream has entries of a number that do not say that they are of this session."""
        first = await self.parts.live.first_entry(self.located.stream, number, BEGINNING)
        return first is not None and not await self._is_own(number, first)

    async def life_between(self, begin: EntryId, later: Located) -> tuple[int, EntryId] | None:
        """Return the session's first life between this one and a later one: its number, and the position before it.

        Nobody knows where a trimmed life began: then the position is ``begin``, up to which this one was read.
        """
        live, stream = self.parts.live, self.located.stream
        if later.stream != stream or later.position <= begin:
            return None
        firsts = await live.first_entries(stream, begin, later.position)
        for number in sorted(firsts):
            if self.number < number < later.number and await self._is_own(number, firsts[number]):
                is_trimmed = await live.trimmed(stream, number) is not None
                return number, begin if is_trimmed else before(firsts[number])
        return None

    async def _is_own(self, number: int, first: EntryId) -> bool:
        """Return True if the first or the last entry of a number names this session."""
        live, stream = self.parts.live, self.located.stream
        last = await live.last_entries(stream, number, 1, BEGINNING, END)
        for at in (first, *last):
            entry = await live.entry(stream, at)
            for text in [] if entry is None else self._jsons(entry):
                with suppress(msgspec.DecodeError, RecursionError):
                    identity = _decode_identity(text).identity
                    if identity is not None:
                        return identity == self.located.identity
                    break
        return False

    def _jsons(self, entry: StreamEntry) -> list[str]:
        return parts_of("session_json", entry.data, self.parts.container)


class _IdentityField(msgspec.Struct):
    identity: str | None = None


_decode_identity = msgspec.json.Decoder(_IdentityField).decode


def _joined(contents: list[Content]) -> Content:
    if len(contents) == 1:
        return contents[0]
    newest = [each.newest for each in contents if each.newest is not None]
    return Content(
        reduce(merge_session_json, (each.json for each in contents), None),
        next((each.range for each in reversed(contents) if each.range is not None), None),
        tuple(series for each in contents for series in each.series),
        tuple(event for each in contents for event in each.events),
        max(newest, default=None),
    )


NEAR_MS = 200
"""Precision of the search for the position of a time; earlier samples are read, and left out."""


class Beginning(msgspec.Struct, frozen=True):
    position: StreamPosition
    """Everything up to here was sent, except the unsent samples."""
    unsent: UnsentSamples | None = None
    kafka: KafkaReader | None = None
    """Reader of the trimmed part that comes before the stream."""
    lost: LostStretch | None = None
    is_over: bool = False
    """True if this is an earlier life than the session's present one."""

    @property
    def origin(self) -> StreamPosition:
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
            if ranges := parts_of("time_range", entry.data, life.parts.container):
                break
        else:
            ranges = []
        if ranges and ranges[0].end_time < time and entry.id > low:
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
    elif bounds.low != bounds.high:
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

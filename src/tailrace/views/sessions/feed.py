"""The feed of a session: decoded samples, from anywhere, then live; thinned if that is wanted; exact when resumed.

Invariant: from any cursor a feed yields exactly the samples and events after it, each once, or says which stretch is
gone; what it had held back when it stopped, since its cell was open, it reads again. The end of the stream is taken
before the session's hash is read, and writers write the hash before the stream, so nothing lies between the two: where
live began is told with ``caught-up``.

Up to where a feed of a session reads: a time of samples, or a place that a cursor names.

A place in the stream may have been trimmed, and come from Kafka: then it has an offset, too, which is looked up before
Kafka is read. Of a place in the middle of a write that is the offset at which the write ends.

How a feed of a session waits: for what its stream brings, and until it is time to look at the session itself.

What the next frame of a session's feed is made of: entries in a row, joined while a viewer catches up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import msgspec

from tailrace.errors import SessionNotFound
from tailrace.log.cursor import FromStart
from tailrace.log.request import AnyFrame, ControlFrame, EventFrame, Moved
from tailrace.valkey.entry_id import BEGINNING, EntryId, id_text
from tailrace.views.sessions.cursor import FromSessionCursor, SessionCursor, SessionStart, StreamPosition, UnsentSamples
from tailrace.views.sessions.life import LifeItem, SessionLife, SessionParts
from tailrace.views.sessions.model import merge_session_json
from tailrace.views.sessions.reader import LostStretch, spot_of
from tailrace.views.sessions.request import Line, Selection, SessionRequest
from tailrace.views.sessions.samples import LineSeries, SampleFrame, as_json
from tailrace.views.sessions.start import Beginning, beginning, is_closed, is_whole, life_between, overtaken
from tailrace.views.sessions.streams import LiveSessions, Located
from tailrace.views.sessions.telemetry import CLOSED
from tailrace.views.sessions.thinning import Thinner, between

GRACE_NS = 1_000_000_000
"""How long after its time a live feed still waits for what was under way."""


class Until:
    """The end of a request, if it has one."""

    def __init__(self, until: int | SessionCursor | None) -> None:
        self.time = until if isinstance(until, int) else None
        """Samples after it (ns) are left out."""
        self._cursor = until if isinstance(until, SessionCursor) else None
        self._in_kafka: StreamPosition | None = None

    async def look_up(self, live: LiveSessions, located: Located) -> None:
        """Find where the place is in Kafka: a part of the session's life will be read from there."""
        cursor = self._cursor
        if cursor is None or cursor.number != located.number or not cursor.position.in_stream:
            return
        spot = await spot_of(live, located, cursor.position.entry)
        self._in_kafka = None if spot is None else StreamPosition.at_offset(spot.high)

    def is_reached(self, number: int, place: StreamPosition, upcoming: StreamPosition | None) -> bool:
        """Whether everything up to the end was read by whoever is at a place of a life, and what comes is beyond it."""
        if self._cursor is None or self._cursor.number != number:
            return self._cursor is not None and self._cursor.number < number
        end, next_end = self._end_for(place), None if upcoming is None else self._end_for(upcoming)
        is_beyond = upcoming is not None and next_end is not None and upcoming > next_end
        return (end is not None and place >= end) or is_beyond

    def _end_for(self, place: StreamPosition) -> StreamPosition | None:
        """Return the end as it compares with a place; None if it is not known where it is in Kafka."""
        end = None if self._cursor is None else self._cursor.position
        return self._in_kafka if end is not None and end.in_stream and not place.in_stream else end

    def left_ns(self, now_ms: int) -> int | None:
        """Return how long a live feed still waits; None if it has no time at which it ends."""
        return None if self.time is None else self.time + GRACE_NS - now_ms * 1_000_000


LOOK_S = 5.0
"""After so long a silence it is looked whether the session is still the one that is followed."""
ENDING_S = 1.0
"""The same, while it seems to be over."""


class Wait:
    """The patience of one feed."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        """Set when there may be something."""
        self._clock = asyncio.get_running_loop().time
        self._looked = self._clock()
        self._ending_since: float | None = None

    async def happens(self, timeout_s: float, left_ns: int | None = None) -> bool:
        """Wait until there may be something, but not for longer than the request lasts; return whether there is."""
        if left_ns is not None:
            timeout_s = min(timeout_s, max(0.05, left_ns / 1e9))
        try:
            async with asyncio.timeout(timeout_s):
                await self.wake.wait()
        except TimeoutError:
            return False
        return True

    async def is_due(self, left_ns: int | None) -> bool:
        """Wait until there may be something; return whether the session is to be looked at."""
        left_s = self._looked + (LOOK_S if self._ending_since is None else ENDING_S) - self._clock()
        if left_s > 0 and await self.happens(left_s, left_ns):
            return False
        self._looked = self._clock()  # also beside others in the stream that are never silent
        return True

    def was_long(self) -> bool:
        """Whether the session has seemed to be over for long; from the first time on that this is asked."""
        self._ending_since = self._clock() if self._ending_since is None else self._ending_since
        return self._clock() - self._ending_since >= LOOK_S

    def begin_anew(self) -> None:
        """Begin with another life of the session."""
        self._ending_since = None


Span: TypeAlias = tuple[int, int]

JOINED_SAMPLES, JOINED_ENTRIES = 20_000, 64
"""What one frame has at most of several entries; an entry is not divided."""


class Joined:
    """What the next frame is made of."""

    def __init__(self) -> None:
        self.json: str | None = None
        self.range: Span | None = None
        self.series: list[LineSeries] = []
        self.events: list[dict[str, Any]] = []
        self.samples = self.entries = 0
        self.whole: tuple[LifeItem, Hashable] | None = None
        """If it is what one entry brings, and all of that: the entry, and what was held before it."""

    @property
    def is_full(self) -> bool:
        return self.samples >= JOINED_SAMPLES or self.entries >= JOINED_ENTRIES

    def add(self, series: Sequence[LineSeries]) -> None:
        self.series += series
        self.samples += sum(len(each.times) for each in series)

    def happened(self, events: Iterable[dict[str, Any]], since: int | None, until: int | None) -> None:
        """Add the events between two times."""
        for event in events:
            time = int(event["time"])
            if (since is None or time >= since) and (until is None or time <= until):
                self.events.append(event)


def together(one: Span | None, other: Span | None) -> Span | None:
    """Return the time from the first to the last of both."""
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])


BATCH_BYTES, BATCH_ENTRIES = 256 << 10, 512
"""After so much the reader has its turn, also when there is nothing to show."""
POLL_S = 0.5
"""How often it is looked whether a session is there that somebody waits for."""

_encode = msgspec.json.Encoder().encode

Form = Callable[[SampleFrame, str], bytes]


class SessionFeeds:
    """Opens feeds of sessions."""

    def __init__(self, parts: SessionParts, clock: Callable[[], int]) -> None:
        self.parts = parts
        self._clock = clock

    async def open(self, request: SessionRequest, form: Form = as_json) -> SessionFeed:
        """Check the request against what exists and find its start. Raises before anything is sent.

        Raises:
            SessionNotFound: There is no such session, and the caller would not wait.
            BadRequest: It has no channel that was asked for.
            CursorGone: The start is gone, and the caller asked to be told.
        """
        feed = SessionFeed(self.parts, request, form, self._clock)
        await feed.begin()
        return feed


class SessionFeed:
    """An open feed: ``async for`` yields batches of frames until it ends; ``aclose`` ends it early."""

    def __init__(self, parts: SessionParts, request: SessionRequest, form: Form, clock: Callable[[], int]) -> None:
        self._parts, self._request, self._form, self._clock = parts, request, form, clock
        self._selection, self._until = Selection(request.channels, request.raw), Until(request.until)
        self._life: SessionLife | None = None
        self._thinner: Thinner[Line] = Thinner(request.thinning)
        self._held: UnsentSamples | None = None
        """What the feed that is resumed here had not sent, of entries up to ``_place``."""
        self._place = StreamPosition.of(BEGINNING)
        self._joined = Joined()
        self._sent = request.sent
        self._range: Span | None = None
        """As it was last shown: it only grows."""
        self._resumed_range: Span | None = None
        """What the session's range was when the feed was resumed: about what the viewer has seen before."""
        self._announced = request.resumed
        self._next_life: tuple[Located, EntryId] | None = None
        """A life after this one, of which only what was not sent is left to send; that is not behind the place."""
        self._unsaid: list[AnyFrame] = []
        self._over = ""
        """Why there will be no more of the session."""
        self._ended = self._moved = self._dropping = False
        self._wait = Wait()

    @property
    def cursor(self) -> str:
        """Where the feed stands; empty while there is no session."""
        return "" if self._life is None else str(self._cursor())

    @property
    def behind(self) -> int:
        """How many bytes a viewer that had caught up is behind the end of its stream."""
        return self._life.reader.behind if self._life is not None and self._announced else 0

    def stop(self) -> None:
        """End soon, without a word."""
        self._ended = True
        self._wait.wake.set()

    def drop(self) -> None:
        """Go on at the live end, and say so: the viewer is too slow."""
        self._dropping = True
        self._wait.wake.set()

    async def begin(self) -> None:
        """Join the session, if there is one, and read its first stretch."""
        try:
            located = await self._parts.live.get(self._request.identity)
            if located is None or located.json is None:
                if self._request.missing == "fail":
                    raise SessionNotFound(
                        f"no session is called {self._request.identity!r}: see the list of sessions, or wait for it "
                        "with missing=wait"
                    )
                return
            await self._join(located, self._request.start)
            while self._life is not None and (lost := await self._life.fill()) is not None:
                if (begin := await overtaken(self._parts, self._life, self._cursor(), lost)) is not None:
                    await self._go_back(self._life, begin)
                elif self._request.on_gap == "fail":
                    raise lost.error(self._request.identity)
                else:
                    break
        except BaseException:
            await self.aclose()
            raise

    def __aiter__(self) -> AsyncGenerator[list[AnyFrame], None]:
        return self._batches()

    async def aclose(self) -> None:
        """Stop following."""
        self._ended = True
        if self._life is not None:
            await self._life.stack.aclose()

    async def _batches(self) -> AsyncGenerator[list[AnyFrame], None]:
        try:
            while not self._ended:
                self._wait.wake.clear()
                if self._life is None and not await self._appears():
                    continue
                frames = await self._gather()
                frames += await self._controls()
                if frames:
                    yield frames
                elif self._life is not None and not self._life.is_read:
                    await asyncio.sleep(0)  # there is more to read, and so far nothing to show
                elif not self._ended and await self._wait.is_due(self._until.left_ns(self._clock())):
                    await self._look()
        finally:
            await self.aclose()

    # Where it begins.

    async def _appears(self) -> bool:
        located = await self._parts.live.get(self._request.identity)
        if located is not None and located.json is not None:
            await self._join(located, self._request.start)
            return True
        if not self._request.follow:
            self._announced = self._ended = True
            self._unsaid.append(ControlFrame("end", "", _encode({"reason": "caught-up", "events": 0})))
            return True
        await self._wait.happens(POLL_S, self._until.left_ns(self._clock()))
        return False

    async def _join(self, located: Located, start: SessionStart, is_latest: bool = True) -> None:
        """Follow the session from where a request begins: its latest life, or this one, if there is a later one."""
        life = await SessionLife.join(self._parts, located, self._selection, self._wait.wake, is_latest)
        self._life = life
        begin = await beginning(self._parts, life, start)
        if begin.is_over:
            # What is left of the life that is over comes first, if it was in this stream.
            await self._expect(life, life.located)
            life.turn(start.cursor.number if isinstance(start, FromSessionCursor) else 0, begin.origin)
        else:
            life.begin(begin.origin, begin.past)
            self._resumed_range = life.located.span if isinstance(start, FromSessionCursor) else None
        await self._begin_at(life, begin)
        if begin.lost is not None:
            self._unsaid.append(self._lose(begin.lost))
        if begin.lost is not None or not isinstance(start, FromSessionCursor | FromStart):
            self._describe(life.located)

    async def _begin_at(self, life: SessionLife, begin: Beginning) -> None:
        life.thinning = self._request.shared_thinning(begin.held)
        self._place, self._held = begin.place, begin.held
        self._thinner = Thinner(self._request.thinning, begin.held)
        if begin.past is not None:
            await self._until.look_up(self._parts.live, life.located)

    async def _go_back(self, life: SessionLife, begin: Beginning) -> None:
        """Read on from Kafka what trimming has taken from the stream; what was joined has gone out, or comes again."""
        self._joined = Joined()
        life.begin(begin.origin, begin.past)
        await self._begin_at(life, begin)

    def _describe(self, located: Located) -> None:
        """Show the session as it is: whoever begins in the middle has not seen it."""
        self._range = together(located.span, self._range)
        shown = SampleFrame(located.identity, str(self._place), located.merged or located.json, self._range)
        self._unsaid.append(self._frame(shown))

    async def _described(self) -> list[AnyFrame]:
        """Show the session as it is now: whoever missed something may not have seen it."""
        found = await self._parts.live.get(self._request.identity)
        if found is not None and self._life is not None and found.number == self._life.number:
            self._describe(found)
        frames, self._unsaid = self._unsaid, []
        return frames

    # What goes out.

    async def _gather(self) -> list[AnyFrame]:
        """Return what there is, in as few frames as it fits into."""
        life, limit = self._life, self._request.limit
        frames, self._unsaid = self._unsaid, []
        if life is None or self._ended:
            return frames
        if self._dropping:
            return frames + await self._drop(life)
        size = taken = 0
        while size < BATCH_BYTES and taken < BATCH_ENTRIES and (limit is None or self._sent < limit):
            taken += 1
            lost = await life.fill()
            if self._is_past_until():
                break
            if lost is not None:
                self._held = None if lost.back else self._held  # all that is left of it was read again
                frames += self._frames()
                if frames and self._request.on_gap == "fail":
                    break  # what precedes the gap goes out first
                if (begin := await overtaken(self._parts, life, self._cursor(), lost)) is not None:
                    await self._go_back(life, begin)
                    continue
            piece = await life.next()
            if isinstance(piece, LifeItem):
                self._take(piece)
            if not isinstance(piece, LifeItem) or self._joined.is_full or not life.has_ahead:
                frames += self._frames()
                size += len(frames[-1].data) if frames and isinstance(frames[-1], EventFrame) else 0
            if isinstance(piece, LostStretch):
                if frames and self._request.on_gap == "fail":
                    life.put_back(piece)
                    break
                frames += [*self._flushed(), self._lose(piece), *await self._described()]
            elif piece is None:
                break
        frames += self._frames()
        if self._moved:
            self._moved = False
            frames.append(Moved(self.cursor))
        return frames

    def _take(self, piece: LifeItem) -> None:
        request, joined, content = self._request, self._joined, piece.content
        if piece.place.in_stream and not piece.before.in_stream:
            joined.add(self._thinner.flush())  # so that no cell lies on both sides of the seam, which may move
        is_seen = piece.place <= self._place
        since = request.since
        if is_seen and self._held is not None:
            since = self._held.floor if since is None else max(since, self._held.floor)
        until = self._until.time
        series = between(content.series, since, until)
        joined.entries += 1
        life = self._life
        if is_seen or since is not None or until is not None or life is None or life.thinning != request.thinning:
            joined.whole = None
            joined.add(self._thinner.take(piece.before, content.newest, series))
        else:
            joined.whole = (piece, self._thinner.state.key) if joined.entries == 1 else None
            joined.add(life.thinned(piece, self._thinner))
        if not is_seen:
            self._place = piece.place
            joined.json = merge_session_json(joined.json, content.json)
            if content.range is not None:
                grown = together(content.range, joined.range or self._range or self._resumed_range)
                joined.range = None if grown == self._range else grown
            joined.happened(content.events, request.since, until)

    def _frames(self) -> list[AnyFrame]:
        """Return the frame of what was joined, if it shows anything."""
        if not self._is_rebuilt or not (self._joined.entries or self._joined.series):
            return []
        joined, self._joined = self._joined, Joined()
        self._range = joined.range or self._range
        position = str(self._place)
        shown = SampleFrame(
            self._request.identity, position, joined.json, joined.range, tuple(joined.series), tuple(joined.events)
        )
        self._moved = shown.is_empty
        return [] if shown.is_empty else [self._frame(shown, joined.whole)]

    def _frame(self, shown: SampleFrame, whole: tuple[LifeItem, Hashable] | None = None) -> EventFrame:
        self._sent += 1
        cursor, form, life = self.cursor, self._form, self._life
        if whole is None or life is None:
            return EventFrame(cursor, form(shown, cursor))
        piece, held = whole
        how = form, cursor, shown.range, piece.before, held
        return EventFrame(cursor, life.shared(piece, how, lambda: form(shown, cursor), len))

    def _lose(self, lost: LostStretch) -> AnyFrame:
        if self._request.on_gap == "fail":
            raise lost.error(self._request.identity)
        self._place = lost.moves(self._place)
        return ControlFrame("gap", self.cursor, _encode(lost.facts(self._request.identity)))

    async def _drop(self, life: SessionLife) -> list[AnyFrame]:
        self._dropping = False
        before, missed = self._place, life.drop()
        self._place, self._held = max(self._place, life.place), None
        self._thinner, self._joined = Thinner(self._request.thinning), Joined()
        facts = {"from": str(before), "to": str(self._place), "bytes": missed, "reason": "slow"}
        return [ControlFrame("dropped", self.cursor, _encode(facts)), *await self._described()]

    # When it is over.

    async def _controls(self) -> list[AnyFrame]:
        """Say that the feed has caught up, that another life began, or that it has ended."""
        life, request, frames = self._life, self._request, list[AnyFrame]()
        if life is None or self._ended:
            return frames
        if self._next_life is not None and life.is_read and life.is_past(self._next_life[1]):
            return await self._turn(life, self._next_life[0])
        if self._over:
            return self._flushed() + self._end(self._over)
        if not self._announced and self._next_life is None and life.is_past(life.target):
            self._announced = True
            frames.append(ControlFrame("caught-up", self.cursor, _encode({"position": id_text(life.target)})))
        if request.limit is not None and self._sent >= request.limit:
            return frames + self._end("limit")
        if self._is_past_until():
            return frames + self._end("until")
        if self._announced and life.is_read and self._is_late():
            return frames + self._flushed() + self._end("until")
        if life.is_read and life.state in CLOSED:
            frames += await self._closes(life)
        if not self._ended and not request.follow and self._next_life is None and life.is_past(life.target):
            frames += self._flushed() + self._end("caught-up")
        return frames

    def _is_past_until(self) -> bool:
        life = self._life
        return life is not None and self._until.is_reached(life.number, self._place, life.upcoming)

    def _is_late(self) -> bool:
        left = self._until.left_ns(self._clock())
        return left is not None and left <= 0

    def _flushed(self) -> list[AnyFrame]:
        """Return what was held back, since no more of it comes."""
        self._joined.add(self._thinner.flush())
        return self._frames()

    def _end(self, reason: str) -> list[AnyFrame]:
        self._ended = True
        cursor = msgspec.structs.replace(self._cursor(), ended=True)
        return [ControlFrame("end", str(cursor), _encode({"reason": reason, "events": self._sent}))]

    async def _closes(self, life: SessionLife) -> list[AnyFrame]:
        """End if the session is closed and everything was sent. Its hash may say so before the stream does."""
        live = self._parts.live
        until = await live.tail(life.located.stream)
        found = await live.get(self._request.identity)
        if found is not None and found.number != life.number:
            end = await self._expect(life, found)
            return await self._turn(life, found) if life.is_past(end) else []
        if not life.is_past(until) or (found is not None and found.state not in CLOSED):
            return []
        closed = await is_closed(self._parts, life, until)
        if not self._wait.was_long() and closed is False:
            return []
        return [*self._flushed(), *self._end(life.state)]

    async def _look(self) -> None:
        """See whether the session is still the one that is followed."""
        life = self._life
        if life is None or self._next_life is not None:
            return
        until = await self._parts.live.tail(life.located.stream)
        found = await self._parts.live.get(self._request.identity)
        if found is None:
            self._over = "expired" if life.is_past(until) else ""
        elif found.number != life.number:
            await self._expect(life, found)
        elif found.state in CLOSED:
            life.state = found.state

    async def _expect(self, life: SessionLife, later: Located) -> EntryId:
        """Go on with another life when this one was read: since the other's hash is there, it is in the stream up to
        the place that is returned.
        """
        end = await self._parts.live.tail(life.located.stream)
        self._next_life = later, end
        return end

    async def _turn(self, life: SessionLife, found: Located) -> list[AnyFrame]:
        """Go on with another life of the session."""
        frames, before = self._flushed(), life.number
        between = await life_between(self._parts, life, self._place.entry, found)
        number, position = (found.number, found.position) if between is None else between
        if not await is_whole(self._parts, life):
            frames.append(self._lose(LostStretch(self._place, StreamPosition.of(position), "life-over")))
        self._thinner, self._held = Thinner(self._request.thinning), None
        self._wait.begin_anew()
        self._range = self._resumed_range = None
        if between is not None:
            self._place = StreamPosition.of(position)
            life.turn(number, self._place)
            await self._expect(life, found)
        else:
            await life.stack.aclose()
            self._place, self._life, self._next_life = StreamPosition.of(BEGINNING), None, None
            await self._join(found, FromStart(), is_latest=False)
        facts = {"before": before, "number": number, "position": id_text(position)}
        return [*frames, ControlFrame("life", self.cursor, _encode(facts))]

    @property
    def _is_rebuilt(self) -> bool:
        """Whether what was held has been read again; before that, nothing is sent, and it is still what it was."""
        life = self._life
        return life is None or self._held is None or life.place >= self._place or life.is_read

    def _cursor(self) -> SessionCursor:
        assert self._life is not None
        held = self._thinner.unsent(self._place) if self._is_rebuilt else self._held
        sent = self._sent if self._request.limit is not None else None
        return SessionCursor(self._life.number, self._place, held, sent, self._request.since)

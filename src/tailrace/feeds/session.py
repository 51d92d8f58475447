"""The feed of a session: decoded samples, from anywhere, then live; thinned if that is wanted; exact when resumed.

Invariant: from any cursor a feed yields exactly the samples and events after it, each once, or says which stretch is
gone; what it had held back when it stopped, since its cell was open, it reads again. The end of the stream is taken
before the session's hash is read, and writers write the hash before the stream, so nothing lies between the two: where
live began is told with ``caught-up``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable

import msgspec

from tailrace.errors import CursorGone, SessionNotFound
from tailrace.feeds.frame import AnyFrame, Control, Frame, Moved
from tailrace.feeds.joined import Joined, Span, together
from tailrace.feeds.session_end import is_closed, is_whole, life_between
from tailrace.feeds.session_life import Life, Piece, SessionParts
from tailrace.feeds.session_reader import Lost
from tailrace.feeds.session_request import SessionRequest
from tailrace.feeds.session_start import beginning
from tailrace.model.cursor import FromStart
from tailrace.model.entry_id import BEGINNING, id_text
from tailrace.model.selection import Line, Selection
from tailrace.model.session_cursor import FromPlace, Held, Place, SessionCursor, SessionStart
from tailrace.model.shown import Shown, as_json
from tailrace.model.telemetry import CLOSED
from tailrace.model.thinning import Thinner, Thinning
from tailrace.stores.live import Located

BATCH_BYTES, BATCH_ENTRIES = 256 << 10, 512
"""After so much the reader has its turn, also when there is nothing to show."""
POLL_S = 0.5
"""How often it is looked whether a session is there that somebody waits for."""
LOOK_S = 5.0
"""After so long a silence it is looked whether the session is still the one that is followed."""
GRACE_NS = 1_000_000_000
"""How long after ``until`` a live feed still waits for what was under way."""

_encode = msgspec.json.Encoder().encode

Form = Callable[[Shown, str], bytes]


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
        self._selection = Selection(request.channels, request.raw)
        self._life: Life | None = None
        self._thinner: Thinner[Line] = Thinner(request.thinning)
        self._held: Held | None = None
        """What the feed that is resumed here had not sent, of entries up to ``_place``."""
        self._place = Place.of(BEGINNING)
        self._joined = Joined()
        self._sent = request.sent
        self._range: Span | None = None
        """As it was last shown: it only grows."""
        self._resumed_range: Span | None = None
        """What the session's range was when the feed was resumed: about what the viewer has seen before."""
        self._announced = request.resumed
        self._next_life: Located | None = None
        """The life after this one, of which only what was not sent is left to send."""
        self._unsaid: list[AnyFrame] = []
        self._over = ""
        """Why there will be no more of the session."""
        self._ended = self._moved = self._dropping = False
        self._quiet_since: float | None = None
        self._looked = asyncio.get_running_loop().time()
        self._wake = asyncio.Event()

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
        self._wake.set()

    def drop(self) -> None:
        """Go on at the live end, and say so: the viewer is too slow."""
        self._dropping = True
        self._wake.set()

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
            lost = await self._life.fill() if self._life is not None else None
            if lost is not None and self._request.on_gap == "fail":
                raise self._gone(lost)
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
                self._wake.clear()
                if self._life is None and not await self._appears():
                    continue
                frames = await self._gather()
                frames += await self._controls()
                if frames:
                    yield frames
                elif not self._ended:
                    await self._wait()
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
            self._unsaid.append(Control("end", "", _encode({"reason": "caught-up", "events": 0})))
            return True
        await self._happens(POLL_S)
        return False

    async def _join(self, located: Located, start: SessionStart) -> Life:
        """Follow the session from where a request begins."""
        life = await Life.join(self._parts, located, self._selection, self._wake)
        self._life = life
        begin = await beginning(self._parts, life, start)
        if begin.is_over:
            # What is left of the life that is over comes first, if it was in this stream.
            self._next_life = life.located
            life.turn(start.cursor.number if isinstance(start, FromPlace) else 0, begin.origin)
        else:
            life.begin(begin.origin, begin.past)
            self._resumed_range = life.located.span if isinstance(start, FromPlace) else None
        life.thinning = self._thinned_before(begin.held)
        self._place, self._held = begin.place, begin.held
        self._thinner = Thinner(self._request.thinning, begin.held)
        if begin.lost is not None:
            self._unsaid.append(self._lose(begin.lost))
        if begin.lost is not None or not isinstance(start, FromPlace | FromStart):
            self._describe(life.located)
        return life

    def _thinned_before(self, held: Held | None) -> Thinning | None:
        """Return how samples may be thinned before any are left out; only whole cells may be left out afterwards."""
        request, thinning = self._request, self._request.thinning
        if thinning is None or request.since is not None or isinstance(request.until, int):
            return None
        return thinning if held is None or held.floor % thinning.cell == 0 else None

    def _describe(self, located: Located) -> None:
        """Show the session as it is: whoever begins in the middle has not seen it."""
        self._range = together(located.span, self._range)
        shown = Shown(located.identity, str(self._place), located.merged or located.json, self._range)
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
            if self._is_past_until():
                break
            taken += 1
            lost = await life.fill()
            if lost is not None and self._request.on_gap == "fail" and (frames or self._joined.entries):
                break  # what precedes the gap goes out first
            piece = await life.next()
            if isinstance(piece, Piece):
                self._take(piece)
            if not isinstance(piece, Piece) or self._joined.is_full or not life.has_ahead:
                frames += self._frames()
                size += len(frames[-1].data) if frames and isinstance(frames[-1], Frame) else 0
            if isinstance(piece, Lost):
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

    def _take(self, piece: Piece) -> None:
        request, joined, content = self._request, self._joined, piece.content
        if piece.place.in_stream and not piece.before.in_stream:
            joined.add(self._thinner.flush())  # so that no cell lies on both sides of the seam, which may move
        is_seen = piece.place <= self._place
        since = request.since
        if is_seen and self._held is not None:
            since = self._held.floor if since is None else max(since, self._held.floor)
        until = request.until if isinstance(request.until, int) else None
        series = [each.since(since).until(until) for each in content.series]
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
            joined.json = content.json if content.json is not None else joined.json
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
        shown = Shown(
            self._request.identity, position, joined.json, joined.range, tuple(joined.series), tuple(joined.events)
        )
        self._moved = shown.is_empty
        return [] if shown.is_empty else [self._frame(shown, joined.whole)]

    def _frame(self, shown: Shown, whole: tuple[Piece, Hashable] | None = None) -> Frame:
        self._sent += 1
        cursor, form, life = self.cursor, self._form, self._life
        if whole is None or life is None:
            return Frame(cursor, form(shown, cursor))
        piece, held = whole
        how = form, cursor, shown.range, piece.before, held
        return Frame(cursor, life.shared(piece, how, lambda: form(shown, cursor), len))

    def _lose(self, lost: Lost) -> AnyFrame:
        if self._request.on_gap == "fail":
            raise self._gone(lost)
        self._place = lost.to if lost.reason == "store-rolled-back" else max(self._place, lost.to)
        facts = {"session": self._request.identity, "from": str(lost.after), "to": str(lost.to), "reason": lost.reason}
        return Control("gap", self.cursor, _encode(facts | ({"possible": True} if lost.possible else {})))

    def _gone(self, lost: Lost) -> CursorGone:
        name, after, to = self._request.identity, str(lost.after), str(lost.to)
        return CursorGone(name, after, to, lost.reason, f"session {name!r}: what came after {after}")

    async def _drop(self, life: Life) -> list[AnyFrame]:
        self._dropping = False
        before, missed = self._place, life.drop()
        self._place, self._held = max(self._place, life.place), None
        self._thinner, self._joined = Thinner(self._request.thinning), Joined()
        facts = {"from": str(before), "to": str(self._place), "bytes": missed, "reason": "slow"}
        return [Control("dropped", self.cursor, _encode(facts)), *await self._described()]

    # When it is over.

    async def _controls(self) -> list[AnyFrame]:
        """Say that the feed has caught up, that another life began, or that it has ended."""
        life, request, frames = self._life, self._request, list[AnyFrame]()
        if life is None or self._ended:
            return frames
        if self._next_life is not None and life.is_read:
            return await self._turn(life, self._next_life)
        if self._over:
            return self._flushed() + self._end(self._over)
        if not self._announced and self._next_life is None and life.is_past(life.target):
            self._announced = True
            frames.append(Control("caught-up", self.cursor, _encode({"position": id_text(life.target)})))
        if request.limit is not None and self._sent >= request.limit:
            return frames + self._end("limit")
        if self._is_past_until():
            return frames + self._end("until")
        if self._announced and life.is_read and self._is_late():
            return frames + self._flushed() + self._end("until")
        if life.is_read and life.state in CLOSED:
            frames += await self._closes(life)
        if not self._ended and not request.follow and life.is_past(life.target):
            frames += self._flushed() + self._end("caught-up")
        return frames

    def _is_past_until(self) -> bool:
        until = self._request.until
        return (
            isinstance(until, SessionCursor)
            and self._life is not None
            and ((until.number == self._life.number and self._place >= until.place) or until.number < self._life.number)
        )

    def _is_late(self) -> bool:
        until = self._request.until
        return isinstance(until, int) and self._clock() * 1_000_000 >= until + GRACE_NS

    def _flushed(self) -> list[AnyFrame]:
        """Return what was held back, since no more of it comes."""
        self._joined.add(self._thinner.flush())
        return self._frames()

    def _end(self, reason: str) -> list[AnyFrame]:
        self._ended = True
        cursor = msgspec.structs.replace(self._cursor(), ended=True)
        return [Control("end", str(cursor), _encode({"reason": reason, "events": self._sent}))]

    async def _closes(self, life: Life) -> list[AnyFrame]:
        """End if the session is closed and everything was sent. Its hash may say so before the stream does."""
        live = self._parts.live
        until = await live.tail(life.located.stream)
        found = await live.get(self._request.identity)
        if found is not None and found.number != life.number:
            return await self._turn(life, found)
        if not life.is_past(until) or (found is not None and found.state not in CLOSED):
            return []
        closed = await is_closed(self._parts, life, until)
        clock = asyncio.get_running_loop().time()
        self._quiet_since = clock if self._quiet_since is None else self._quiet_since
        if closed is False and clock - self._quiet_since < LOOK_S:
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
            self._next_life = found
        elif found.state in CLOSED:
            life.state = found.state

    async def _turn(self, life: Life, found: Located) -> list[AnyFrame]:
        """Go on with another life of the session."""
        frames, before = self._flushed(), life.number
        between = await life_between(self._parts, life, self._place.entry, found)
        number, position = (found.number, found.position) if between is None else between
        if not await is_whole(self._parts, life):
            frames.append(self._lose(Lost(self._place, Place.of(position), "life-over")))
        self._thinner, self._held, self._quiet_since = Thinner(self._request.thinning), None, None
        self._range = self._resumed_range = None
        if between is not None:
            self._place, self._next_life = Place.of(position), found
            life.turn(number, self._place)
        else:
            await life.stack.aclose()
            self._place, self._life, self._next_life = Place.of(BEGINNING), None, None
            joined = await self._join(found, FromStart())  # there may be a later one already
            number, position = joined.number, joined.located.position
        facts = {"before": before, "number": number, "position": id_text(position)}
        return [*frames, Control("life", self.cursor, _encode(facts))]

    async def _wait(self) -> None:
        clock = asyncio.get_running_loop().time
        left = self._looked + (LOOK_S if self._quiet_since is None else 1.0) - clock()
        if left <= 0 or not await self._happens(left):  # others in the stream may never be silent
            self._looked = clock()
            await self._look()

    async def _happens(self, timeout_s: float) -> bool:
        until = self._request.until
        if isinstance(until, int):
            left_ns = until + GRACE_NS - self._clock() * 1_000_000
            timeout_s = min(timeout_s, max(0.05, left_ns / 1e9))
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    @property
    def _is_rebuilt(self) -> bool:
        """Whether what was held has been read again; before that, nothing is sent, and it is still what it was."""
        life = self._life
        return life is None or life.place >= self._place or life.is_read

    def _cursor(self) -> SessionCursor:
        assert self._life is not None
        held = self._thinner.held(self._place) if self._is_rebuilt else self._held
        sent = self._sent if self._request.limit is not None else None
        return SessionCursor(self._life.number, self._place, held, sent, self._request.since)

"""The feed of a search: what the past has, oldest first, then live; exact when resumed.

A search has one log for each stretch of the past that was scanned for it, and one for what matches live. A feed reads
them one after the other, the oldest stretch first. Invariant: live matches before the offsets at which the search's
life was pinned are not shown, since the past has them; what the past was asked for ends exactly there. So each match
is shown once, whichever log it is in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress

import msgspec

from tailrace.errors import BrokerUnavailable, CursorGone, TailraceError
from tailrace.log.cursor import Position
from tailrace.log.feed import LogReader
from tailrace.log.request import AnyFrame, ControlFrame, Moved
from tailrace.log.segment import Gap
from tailrace.views.grep.leases import SearchLease
from tailrace.views.grep.model import SearchLife
from tailrace.views.grep.parts import Parts, Progress
from tailrace.views.grep.request import LIVE, GrepRequest, SearchPlace
from tailrace.views.grep.window import Showing

LEAST_WAIT_S, WAIT_S = 0.05, 0.5
"""How long a feed waits before it looks whether a scan is done, or the end is reached."""
UNTIL_GRACE_MS = 1000
LOOK_MS = 5000
"""How often a feed that waits for the end of a topic looks whether the topic is still there."""
KEEP_MS = 1000
"""How often the place of a client that has a name is kept."""

_encode = msgspec.json.Encoder().encode


class GrepFeed:
    """An open feed: ``async for`` yields batches of frames until it ends; ``aclose`` ends it early."""

    def __init__(
        self,
        parts: Parts,
        lease: SearchLease,
        request: GrepRequest,
        life: SearchLife,
        pins: dict[str, int],
        ends: dict[str, int],
        part: int,
        position: Position,
        gap: Gap | None,
    ) -> None:
        self._parts, self._lease, self._request = parts, lease, request
        self._life, self._pins, self._ends = life, pins, ends
        self._part, self._start = part, position
        self._showing = Showing(parts, request, life, pins)
        if gap is not None:
            self._showing.add(gap)
        self._announced = request.resumed
        self._reached = self._closing = False
        self._looked_ms = self._opened_ms = parts.clock()
        self._ended = False
        self._wake = lease.wake
        self._following = AsyncExitStack()
        self._reader: LogReader
        self._behind, self._kept_ms = "", 0
        self._progress: Progress | None = None

    @property
    def cursor(self) -> str:
        """Where the feed stands."""
        return self._showing.cursor

    async def begin(self) -> None:
        """Follow the log of the part that it begins with."""
        try:
            await self._open(self._part, self._start)
            if self._showing.is_empty:  # a gap is said first
                # Who comes back before anything has come begins here, and not at a later end.
                await self._keep(self.cursor)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop following, and give the lease up."""
        self._ended = True
        await self._following.aclose()
        with suppress(TailraceError):
            if self._behind and self._lease.is_held:
                await self._keep("", at_last=True)
        await self._lease.give_up()

    def __aiter__(self) -> AsyncIterator[Sequence[AnyFrame]]:
        return self._batches()

    async def _batches(self) -> AsyncIterator[Sequence[AnyFrame]]:
        while not self._ended:
            before = self.cursor if self._request.client is not None else ""
            if frames := await self._next():
                yield frames
                # Whoever asks for more has taken this batch, but has perhaps not sent it all: who comes back by his
                # name gets it again rather than not at all.
                await self._keep(before)

    async def _keep(self, cursor: str, at_last: bool = False) -> None:
        """Keep where a client that has a name is, now and then."""
        client, now = self._request.client, self._parts.clock()
        if client is None:
            return
        self._behind = cursor or self._behind
        if at_last or not 0 <= now - self._kept_ms < KEEP_MS:  # the clock may be set back
            self._kept_ms = now
            await self._parts.searches.keep_position(self._life.search.id, client, self._behind)

    async def _next(self) -> Sequence[AnyFrame]:
        request, showing = self._request, self._showing
        if showing.is_ready:
            return await showing.show()
        self._lease.check()
        if showing.is_full:
            return self._end("limit")
        if not showing.is_empty:
            return await showing.show()
        self._wake.clear()
        # Whether more may come is asked before it is looked: what came in between is seen by the look.
        last = await self._is_last()
        pieces = await self._reader.next()
        if last and not pieces and (self._part != LIVE or not self._announced or self._is_closing()):
            # What the hub holds may be older than the answer: only the store knows whether this is the end.
            await self._open(self._part, self._reader.position)
            pieces = await self._reader.next()
        if pieces:
            for piece in pieces:
                showing.add(piece)
            return [Moved(self.cursor)] if showing.is_empty else await showing.show()
        if not last:
            return await self._wait()
        if self._part != LIVE:
            return await self._leave()
        frames: list[AnyFrame] = []
        if not self._announced:
            self._announced = True
            frames.append(ControlFrame("caught-up", self.cursor))
        if not self._is_closing():
            return frames or await self._wait()
        if request.follow and not self._closing:
            # What was written by then may still be on its way.
            self._closing, self._reached = True, False
            self._ends = await self._parts.ends(request.search)
            return frames
        return [*frames, *self._end("until" if request.until_ms is not None else "caught-up")]

    async def _is_last(self) -> bool:
        """Whether all that is to come in this part, of what there was when the feed began, is in its log by now."""
        if self._part != LIVE:
            stretch, done = await self._parts.stretch(self._life, self._part)
            self._progress = self._progress or Progress(stretch, self._parts.clock)
            return done
        if self._reached:
            return True
        shard = self._parts.logs.shard_of(self._life.name)
        marks = await self._parts.searches.live_marks(shard, list(self._ends))
        self._ends = {source: end for source, end in self._ends.items() if marks[source] < end - 1}
        if self._ends and not 0 <= self._parts.clock() - self._looked_ms < LOOK_MS:
            self._looked_ms = self._parts.clock()
            with suppress(BrokerUnavailable):
                current = await self._parts.ends(self._request.search)
                self._ends = {source: end for source, end in self._ends.items() if source in current}
        self._reached = not self._ends
        return self._reached

    async def _leave(self) -> list[AnyFrame]:
        """Go on with the next part, after saying what was lost of this one. Who is cut off before hears it again."""
        behind = await self._parts.after(self._life, self._part)
        frames: list[AnyFrame] = []
        for lost in await self._parts.searches.lost(self._life, self._part):
            if self._request.on_gap == "fail":
                place = msgspec.structs.replace(self._showing.place.cursor, positions=(Position.START,))
                first, known = f"{lost.source}:{lost.first}", SearchPlace(self._life.number, behind, place)
                what = f"search {self._life.search.id}: {first} up to offset {lost.until - 1}"
                raise CursorGone(self._life.search.id, first, str(known), lost.reason, what)
            frames.append(ControlFrame("gap", self.cursor, _encode(lost)))
        await self._open(behind, Position.START)
        self._progress = None
        return [*frames, Moved(self.cursor)]

    async def _wait(self) -> list[AnyFrame]:
        # Once all that there was is shown, the hub tells when there is more: thousands who wait must cost nothing.
        settled = self._part == LIVE and self._reached and self._announced and self._request.until_ms is None
        with suppress(TimeoutError):
            async with asyncio.timeout(None if settled else self._pause_s()):
                await self._wake.wait()
        if self._part == LIVE or self._progress is None:
            return []
        told = await self._parts.progress(self._life, self._progress)
        return [] if told is None else [ControlFrame("progress", self.cursor, _encode(told))]

    def _pause_s(self) -> float:
        """Return how long to wait: who has not waited for long looks more often, so that what is short stays short."""
        waited_s = (self._parts.clock() - self._opened_ms) / 1000
        return min(WAIT_S, max(LEAST_WAIT_S, waited_s / 10))

    async def _open(self, part: int, position: Position) -> None:
        await self._following.aclose()
        self._following = AsyncExitStack()
        name = self._life.name
        if part != LIVE:
            stretch, _ = await self._parts.stretch(self._life, part)
            name = stretch.name(self._life)
        channel = await self._following.enter_async_context(self._parts.hub.follow(name, self._wake))
        self._part = part
        self._showing.enter(part, name, position)
        if part == LIVE and position == Position.START:
            gap = await self._parts.swept(self._life, self._request.since_ms)
            if gap is not None:
                self._showing.add(gap)
                position = gap.to
        self._reader = LogReader(self._parts.logs, name, position, channel)

    def _end(self, reason: str) -> list[AnyFrame]:
        self._ended = True
        return [self._showing.end(reason)]

    def _is_closing(self) -> bool:
        """Whether the feed ends once everything that is there was shown."""
        until = self._request.until_ms
        return not self._request.follow or (until is not None and self._parts.clock() >= until + UNTIL_GRACE_MS)

"""The feed of a search: what the past has, oldest first, then live; exact when resumed.

A search has one log for each stretch of the past that was scanned for it, and one for what matches live. A feed reads
them one after the other, the oldest stretch first. Invariant: live matches before the offsets at which the search's
life was pinned are not shown, since the past has them; what the past was asked for ends exactly there. So each match
is shown once, whichever log it is in.

Opens feeds of searches: registers them, pins them, asks for the past that they need, and finds their start.

The newest matches of a search: since when a feed has to begin to show the last so many of them.

The past is asked for in growing pieces, the latest first, until it has so many, or until there is no more of it; each
piece is a stretch like any other, so what one reader had scanned is there for the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from heapq import heappush, heapreplace

import msgspec

from tailrace.config.units import format_duration
from tailrace.errors import BrokerUnavailable, CursorError, CursorGone, TailraceError, TooFarBack
from tailrace.kafka.broker import Topic
from tailrace.log.cursor import FromEnd, FromLast, FromStart, FromTime, Position
from tailrace.log.event import iso_time
from tailrace.log.feed import LogReader
from tailrace.log.request import AnyFrame, ControlFrame, Moved
from tailrace.log.segment import Gap
from tailrace.log.store import Logs
from tailrace.views.grep.history import ScanProgress, SearchHistory
from tailrace.views.grep.leases import SearchLease
from tailrace.views.grep.model import SearchLife, Stretch
from tailrace.views.grep.request import LIVE, GrepRequest, SearchCursor
from tailrace.views.grep.window import MatchWindow

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
        history: SearchHistory,
        lease: SearchLease,
        request: GrepRequest,
        life: SearchLife,
        pins: dict[str, int],
        ends: dict[str, int],
        part: int,
        position: Position,
        gap: Gap | None,
    ) -> None:
        self._history, self._lease, self._request = history, lease, request
        self._life, self._pins, self._ends = life, pins, ends
        self._part, self._start = part, position
        self._showing = MatchWindow(history, request, life, pins)
        if gap is not None:
            self._showing.add(gap)
        self._announced = request.resumed
        self._reached = self._closing = False
        self._looked_ms = self._opened_ms = history.clock()
        self._ended = False
        self._wake = lease.wake
        self._following = AsyncExitStack()
        self._reader: LogReader
        self._behind, self._kept_ms = "", 0
        self._progress: ScanProgress | None = None

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
        client, now = self._request.client, self._history.clock()
        if client is None:
            return
        self._behind = cursor or self._behind
        if at_last or not 0 <= now - self._kept_ms < KEEP_MS:  # the clock may be set back
            self._kept_ms = now
            await self._history.searches.keep_position(self._life.search.id, client, self._behind)

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
            self._ends = await self._history.ends(request.search)
            return frames
        return [*frames, *self._end("until" if request.until_ms is not None else "caught-up")]

    async def _is_last(self) -> bool:
        """Whether all that is to come in this part, of what there was when the feed began, is in its log by now."""
        if self._part != LIVE:
            stretch, done = await self._history.stretch(self._life, self._part)
            self._progress = self._progress or ScanProgress(stretch, self._history.clock)
            return done
        if self._reached:
            return True
        shard = self._history.logs.shard_of(self._life.name)
        marks = await self._history.searches.live_marks(shard, list(self._ends))
        self._ends = {source: end for source, end in self._ends.items() if marks[source] < end - 1}
        if self._ends and not 0 <= self._history.clock() - self._looked_ms < LOOK_MS:
            self._looked_ms = self._history.clock()
            with suppress(BrokerUnavailable):
                current = await self._history.ends(self._request.search)
                self._ends = {source: end for source, end in self._ends.items() if source in current}
        self._reached = not self._ends
        return self._reached

    async def _leave(self) -> list[AnyFrame]:
        """Go on with the next part, after saying what was lost of this one. Who is cut off before hears it again."""
        behind = await self._history.next_part(self._life, self._part)
        frames: list[AnyFrame] = []
        for lost in await self._history.searches.lost(self._life, self._part):
            if self._request.on_gap == "fail":
                place = msgspec.structs.replace(self._showing.place.cursor, positions=(Position.START,))
                first, known = f"{lost.source}:{lost.first}", SearchCursor(self._life.number, behind, place)
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
        told = await self._history.progress(self._life, self._progress)
        return [] if told is None else [ControlFrame("progress", self.cursor, _encode(told))]

    def _pause_s(self) -> float:
        """Return how long to wait: who has not waited for long looks more often, so that what is short stays short."""
        waited_s = (self._history.clock() - self._opened_ms) / 1000
        return min(WAIT_S, max(LEAST_WAIT_S, waited_s / 10))

    async def _open(self, part: int, position: Position) -> None:
        await self._following.aclose()
        self._following = AsyncExitStack()
        name = self._life.name
        if part != LIVE:
            stretch, _ = await self._history.stretch(self._life, part)
            name = stretch.name(self._life)
        channel = await self._following.enter_async_context(self._history.hub.follow(name, self._wake))
        self._part = part
        self._showing.enter(part, name, position)
        if part == LIVE and position == Position.START:
            gap = await self._history.expired_gap(self._life, self._request.since_ms)
            if gap is not None:
                self._showing.add(gap)
                position = gap.to
        self._reader = LogReader(self._history.logs, name, position, channel)

    def _end(self, reason: str) -> list[AnyFrame]:
        self._ended = True
        return [self._showing.end(reason)]

    def _is_closing(self) -> bool:
        """Whether the feed ends once everything that is there was shown."""
        until = self._request.until_ms
        return not self._request.follow or (until is not None and self._history.clock() >= until + UNTIL_GRACE_MS)


AGES_MS = tuple(1000 * seconds for seconds in (60, 600, 3_600, 6 * 3_600, 86_400, 7 * 86_400))
"""How far back it is looked, one after the other; then everything that there is."""
STEP = 50
"""Runs that are read at once."""


class NewestFeed:
    """A feed of the last ``count`` matches and of what follows them, as ``GrepFeed`` is one.

    Until it is known where they begin it has no cursor: who is cut off before asks anew. It looks no further back than
    ``floor_ms``.
    """

    def __init__(
        self,
        history: SearchHistory,
        lease: SearchLease,
        life: SearchLife,
        pins: Mapping[str, int],
        topics: Sequence[Topic],
        count: int,
        floor_ms: int,
        until_ms: int | None,
        open_since: Callable[[int], Awaitable[GrepFeed]],
    ) -> None:
        self._history, self._lease, self._life, self._pins, self._topics = history, lease, life, pins, topics
        self._count, self._floor_ms, self._until_ms, self._open_since = count, floor_ms, until_ms, open_since
        self._now_ms, self._tried_ms = history.clock(), life.since_ms
        self._found: GrepFeed | None = None

    @property
    def cursor(self) -> str:
        """Where the feed stands; empty while it looks."""
        return "" if self._found is None else self._found.cursor

    async def aclose(self) -> None:
        """Stop looking, and following."""
        if self._found is not None:
            await self._found.aclose()
        await self._lease.give_up()

    async def __aiter__(self) -> AsyncIterator[Sequence[AnyFrame]]:
        progress: ScanProgress | None = None
        while isinstance(stretch := await self.look(), Stretch):
            if progress is None or progress.stretch.number != stretch.number:
                progress = ScanProgress(stretch, self._history.clock)
            await asyncio.sleep(WAIT_S)
            self._lease.check()
            if told := await self._history.progress(self._life, progress):
                yield [ControlFrame("progress", "", msgspec.json.encode(told))]
        self._found = await self._open_since(stretch)
        yield [Moved(self._found.cursor)]
        async for frames in self._found:
            yield frames

    async def look(self) -> int | Stretch:
        """Return the time at which the last matches begin, or the stretch that has to be scanned before it is known."""
        history, life = self._history, self._life
        while True:
            stretches, done = await history.searches.stretches(life)
            for stretch in stretches:
                if stretch.number not in done:
                    return stretch
            reached_ms = min([self._tried_ms, *(stretch.since_ms for stretch in stretches)])
            times = await self._times(stretches, reached_ms)
            if len(times) >= self._count:
                return times[0]
            if reached_ms <= self._floor_ms:
                return self._floor_ms
            ages = (self._now_ms - age_ms for age_ms in AGES_MS)
            floor_ms = self._floor_ms
            self._tried_ms = next((since_ms for since_ms in ages if floor_ms < since_ms < reached_ms), floor_ms)
            await history.request_past(life, self._pins, self._topics, self._tried_ms)

    async def _times(self, stretches: Sequence[Stretch], since_ms: int) -> list[int]:
        """Return the times of the newest matches, as a heap: the oldest of them is the first.

        Older ones than what was asked for are there, too, where times go back; not all of them, so they do not count.
        """
        newest: list[int] = []
        for part, name in ((LIVE, self._life.name), *((s.number, s.name(self._life)) for s in stretches)):
            pins = self._pins if part == LIVE else {}
            await _newest(self._history.logs, name, self._count, pins, (since_ms, self._until_ms), newest)
        return newest


async def _newest(
    logs: Logs, name: str, count: int, pins: Mapping[str, int], between: tuple[int, int | None], newest: list[int]
) -> None:
    """Add the newest times of a log to a heap of at most ``count``.

    It is read backwards as long as something newer may come: no event is newer than the newest one up to its place,
    which each run carries.
    """
    since_ms, until_ms = between
    for segment in reversed((await logs.log(name)).segments):
        before = segment.last
        while before >= segment.first:
            entries = await logs.read_back(name, segment, before, STEP)
            for entry in entries:
                if entry.newest_ms < since_ms or (len(newest) == count and entry.newest_ms <= newest[0]):
                    return
                pin = pins.get(str(entry.run.partition), 0)
                for offset, time_ms in zip(entry.run.offsets, entry.run.times, strict=True):
                    if offset < pin or time_ms < since_ms or (until_ms is not None and time_ms > until_ms):
                        continue
                    if len(newest) < count:
                        heappush(newest, time_ms)
                    elif time_ms > newest[0]:
                        heapreplace(newest, time_ms)
            if not entries:
                break
            before = entries[-1].first - 1


class GrepFeeds:
    """Opens feeds of searches."""

    def __init__(self, history: SearchHistory, reach: timedelta | None = None) -> None:
        """``reach`` is how far back a search may go."""
        self.history, self._reach = history, reach

    async def open(self, request: GrepRequest) -> GrepFeed | NewestFeed:
        """Register the search, pin it, ask for the past that it needs, and find the start. Raises before all else."""
        history = self.history
        request = await self._known(request)
        floor_ms = self._floor_ms(request)
        await history.topics.topics(request.search.topic_pattern(), request.missing)
        life = await history.searches.register(request.search, history.clock())
        # Listed again: what was created, and read, before the search was registered belongs to the past.
        topics = await history.topics.topics(request.search.topic_pattern())
        pins = await history.searches.pins(life)
        if pins is None:
            pins = await history.searches.pin(life, await history.topics.ends(topics))
        lease = await SearchLease.take(history.leases, request, life)
        try:
            if not isinstance(request.start, FromLast):
                return await self._feed(request, lease, life, pins, topics)
            return NewestFeed(
                history,
                lease,
                life,
                pins,
                topics,
                request.start.count,
                floor_ms,
                request.until_ms,
                lambda ms: self._feed(starting_at(request, ms), lease, life, pins, topics),
            )
        except BaseException:
            await lease.give_up()
            raise

    def _floor_ms(self, request: GrepRequest) -> int:
        """Return the earliest time that a search may ask for; 0 for the start.

        Raises:
            TooFarBack: This one begins earlier.
        """
        if self._reach is None:
            return 0
        floor_ms = self.history.clock() - round(self._reach.total_seconds() * 1000)
        if isinstance(request.start, FromStart):
            raise TooFarBack("start", format_duration(self._reach))
        if isinstance(request.start, FromTime) and request.start.time_ms < floor_ms:
            raise TooFarBack(iso_time(request.start.time_ms), format_duration(self._reach))
        return floor_ms

    async def _feed(
        self, request: GrepRequest, lease: SearchLease, life: SearchLife, pins: dict[str, int], topics: list[Topic]
    ) -> GrepFeed:
        """Open the feed of a search that is registered, pinned and leased."""
        history = self.history
        gap = None
        if isinstance(request.start, SearchCursor):
            part, position, gap = await self._resumed(life, request.start)
        elif isinstance(request.start, FromEnd):
            part, position = LIVE, (await history.logs.log(life.name)).end
        else:
            since_ms = request.start.time_ms if isinstance(request.start, FromTime) else 0
            await history.request_past(life, pins, topics, since_ms)
            part = await history.first_part(life, since_ms)
            position = await history.position_before(life, part, since_ms)
        ends = await history.topics.ends(topics)
        feed = GrepFeed(history, lease, request, life, pins, ends, part, position, gap)
        await feed.begin()
        return feed

    async def _known(self, request: GrepRequest) -> GrepRequest:
        """Return the request of a client that has a name as one that begins where the client was, if it is known."""
        if request.client is None or isinstance(request.start, SearchCursor):
            return request
        stored = await self.history.searches.position(request.search.id, request.client)
        if stored is None:
            return request
        place = SearchCursor.parse(stored)
        return msgspec.structs.replace(request, start=place, since_ms=place.cursor.since_ms)

    async def _resumed(self, life: SearchLife, place: SearchCursor) -> tuple[int, Position, Gap | None]:
        position = place.cursor.positions[0]
        if place.life == life.number:
            stretches, _ = await self.history.searches.stretches(life)
            if place.part != LIVE and place.part not in {stretch.number for stretch in stretches}:
                raise CursorError(f"cursor {place}: this search has no such part")
            return place.part, position, None
        if await self.history.searches.past(place.life) not in (None, life.search.id):
            raise CursorError(f"cursor {place} is of another search")
        # The search was forgotten and has begun anew: what matched in between is not known.
        return LIVE, Position.START, Gap(position, Position.START, "expired")


def starting_at(request: GrepRequest, time_ms: int) -> GrepRequest:
    """Return a request as one that begins at a time; 0 is the start."""
    start = FromTime(time_ms) if time_ms else FromStart()
    return msgspec.structs.replace(request, start=start, since_ms=time_ms or None)

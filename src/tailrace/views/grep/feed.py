"""Opens feeds of searches: registers them, pins them, asks for the past that they need, and finds their start.

The newest matches of a search: since when a feed has to begin to show the last so many of them.

The past is asked for in growing pieces, the latest first, until it has so many, or until there is no more of it; each
piece is a stretch like any other, so what one reader had scanned is there for the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from heapq import heappush, heapreplace

import msgspec

from tailrace.config.units import format_duration
from tailrace.errors import CursorError, TooFarBack
from tailrace.kafka.broker import Topic
from tailrace.log.cursor import (
    FromEnd,
    FromLast,
    FromStart,
    FromTime,
    Position,
)
from tailrace.log.event import iso_time
from tailrace.log.request import AnyFrame, ControlFrame, Moved
from tailrace.log.segment import Gap
from tailrace.log.store import Logs
from tailrace.views.grep.leases import SearchLease
from tailrace.views.grep.matches import WAIT_S, GrepFeed
from tailrace.views.grep.model import SearchLife, Stretch
from tailrace.views.grep.parts import Parts, Progress
from tailrace.views.grep.request import LIVE, GrepRequest, SearchPlace

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
        parts: Parts,
        lease: SearchLease,
        life: SearchLife,
        pins: Mapping[str, int],
        topics: Sequence[Topic],
        count: int,
        floor_ms: int,
        until_ms: int | None,
        open_since: Callable[[int], Awaitable[GrepFeed]],
    ) -> None:
        self._parts, self._lease, self._life, self._pins, self._topics = parts, lease, life, pins, topics
        self._count, self._floor_ms, self._until_ms, self._open_since = count, floor_ms, until_ms, open_since
        self._now_ms, self._tried_ms = parts.clock(), life.since_ms
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
        progress: Progress | None = None
        while isinstance(stretch := await self.look(), Stretch):
            if progress is None or progress.stretch.number != stretch.number:
                progress = Progress(stretch, self._parts.clock)
            await asyncio.sleep(WAIT_S)
            self._lease.check()
            if told := await self._parts.progress(self._life, progress):
                yield [ControlFrame("progress", "", msgspec.json.encode(told))]
        self._found = await self._open_since(stretch)
        yield [Moved(self._found.cursor)]
        async for frames in self._found:
            yield frames

    async def look(self) -> int | Stretch:
        """Return the time at which the last matches begin, or the stretch that has to be scanned before it is known."""
        parts, life = self._parts, self._life
        while True:
            stretches, done = await parts.searches.stretches(life)
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
            await parts.reach(life, self._pins, self._topics, self._tried_ms)

    async def _times(self, stretches: Sequence[Stretch], since_ms: int) -> list[int]:
        """Return the times of the newest matches, as a heap: the oldest of them is the first.

        Older ones than what was asked for are there, too, where times go back; not all of them, so they do not count.
        """
        newest: list[int] = []
        for part, name in ((LIVE, self._life.name), *((s.number, s.name(self._life)) for s in stretches)):
            pins = self._pins if part == LIVE else {}
            await _newest(self._parts.logs, name, self._count, pins, (since_ms, self._until_ms), newest)
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

    def __init__(self, parts: Parts, reach: timedelta | None = None) -> None:
        """``reach`` is how far back a search may go."""
        self.parts, self._reach = parts, reach

    async def open(self, request: GrepRequest) -> GrepFeed | NewestFeed:
        """Register the search, pin it, ask for the past that it needs, and find the start. Raises before all else."""
        parts = self.parts
        request = await self._known(request)
        floor_ms = self._floor_ms(request)
        await parts.searched.topics(request.search, request.missing)
        life = await parts.searches.register(request.search, parts.clock())
        # Listed again: what was created, and read, before the search was registered belongs to the past.
        topics = await parts.searched.topics(request.search)
        pins = await parts.searches.pins(life)
        if pins is None:
            pins = await parts.searches.pin(life, await parts.searched.ends(topics))
        lease = await SearchLease.take(parts.leases, request, life)
        try:
            if not isinstance(request.start, FromLast):
                return await self._feed(request, lease, life, pins, topics)
            return NewestFeed(
                parts,
                lease,
                life,
                pins,
                topics,
                request.start.count,
                floor_ms,
                request.until_ms,
                lambda ms: self._feed(since(request, ms), lease, life, pins, topics),
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
        floor_ms = self.parts.clock() - round(self._reach.total_seconds() * 1000)
        if isinstance(request.start, FromStart):
            raise TooFarBack("start", format_duration(self._reach))
        if isinstance(request.start, FromTime) and request.start.time_ms < floor_ms:
            raise TooFarBack(iso_time(request.start.time_ms), format_duration(self._reach))
        return floor_ms

    async def _feed(
        self, request: GrepRequest, lease: SearchLease, life: SearchLife, pins: dict[str, int], topics: list[Topic]
    ) -> GrepFeed:
        """Open the feed of a search that is registered, pinned and leased."""
        parts = self.parts
        gap = None
        if isinstance(request.start, SearchPlace):
            part, position, gap = await self._resumed(life, request.start)
        elif isinstance(request.start, FromEnd):
            part, position = LIVE, (await parts.logs.log(life.name)).end
        else:
            since_ms = request.start.time_ms if isinstance(request.start, FromTime) else 0
            await parts.reach(life, pins, topics, since_ms)
            part = await parts.oldest(life, since_ms)
            position = await parts.before(life, part, since_ms)
        ends = await parts.searched.ends(topics)
        feed = GrepFeed(parts, lease, request, life, pins, ends, part, position, gap)
        await feed.begin()
        return feed

    async def _known(self, request: GrepRequest) -> GrepRequest:
        """Return the request of a client that has a name as one that begins where the client was, if it is known."""
        if request.client is None or isinstance(request.start, SearchPlace):
            return request
        stored = await self.parts.searches.position(request.search.id, request.client)
        if stored is None:
            return request
        place = SearchPlace.parse(stored)
        return msgspec.structs.replace(request, start=place, since_ms=place.cursor.since_ms)

    async def _resumed(self, life: SearchLife, place: SearchPlace) -> tuple[int, Position, Gap | None]:
        position = place.cursor.positions[0]
        if place.life == life.number:
            stretches, _ = await self.parts.searches.stretches(life)
            if place.part != LIVE and place.part not in {stretch.number for stretch in stretches}:
                raise CursorError(f"cursor {place}: this search has no such part")
            return place.part, position, None
        if await self.parts.searches.past(place.life) not in (None, life.search.id):
            raise CursorError(f"cursor {place} is of another search")
        # The search was forgotten and has begun anew: what matched in between is not known.
        return LIVE, Position.START, Gap(position, Position.START, "expired")


def since(request: GrepRequest, time_ms: int) -> GrepRequest:
    """Return a request as one that begins at a time; 0 is the start."""
    start = FromTime(time_ms) if time_ms else FromStart()
    return msgspec.structs.replace(request, start=start, since_ms=time_ms or None)

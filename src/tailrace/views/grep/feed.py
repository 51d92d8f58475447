"""Opens feeds of searches: registers them, pins them, asks for the past that they need, and finds their start."""

from __future__ import annotations

from datetime import timedelta

import msgspec

from tailrace.config.units import format_duration
from tailrace.errors import CursorError, TooFarBack
from tailrace.kafka.broker import Topic
from tailrace.log.cursor import FromEnd, FromLast, FromStart, FromTime, Position
from tailrace.log.event import iso_time
from tailrace.log.feed import end_of
from tailrace.log.segment import Gap
from tailrace.views.grep.grep_request import LIVE, GrepRequest, Place
from tailrace.views.grep.lease import Lease
from tailrace.views.grep.matches import GrepFeed
from tailrace.views.grep.model import Life
from tailrace.views.grep.newest import NewestFeed
from tailrace.views.grep.parts import Parts


class Grep:
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
        lease = await Lease.take(parts.leases, request, life)
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
        self, request: GrepRequest, lease: Lease, life: Life, pins: dict[str, int], topics: list[Topic]
    ) -> GrepFeed:
        """Open the feed of a search that is registered, pinned and leased."""
        parts = self.parts
        gap = None
        if isinstance(request.start, Place):
            part, position, gap = await self._resumed(life, request.start)
        elif isinstance(request.start, FromEnd):
            part, position = LIVE, await end_of(parts.logs, life.name)
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
        if request.client is None or isinstance(request.start, Place):
            return request
        stored = await self.parts.searches.position(request.search.id, request.client)
        if stored is None:
            return request
        place = Place.parse(stored)
        return msgspec.structs.replace(request, start=place, since_ms=place.cursor.since_ms)

    async def _resumed(self, life: Life, place: Place) -> tuple[int, Position, Gap | None]:
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

"""The newest matches of a search: since when a feed has to begin to show the last so many of them.

The past is asked for in growing pieces, the latest first, until it has so many, or until there is no more of it; each
piece is a stretch like any other, so what one reader had scanned is there for the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from heapq import heappush, heapreplace

import msgspec

from tailrace.kafka.broker import Topic
from tailrace.log.request import AnyFrame, Control, Moved
from tailrace.log.store import Logs
from tailrace.views.grep.grep_request import LIVE
from tailrace.views.grep.lease import Lease
from tailrace.views.grep.matches import WAIT_S, GrepFeed
from tailrace.views.grep.model import Life, Stretch
from tailrace.views.grep.parts import Parts
from tailrace.views.grep.progress import Progress

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
        lease: Lease,
        life: Life,
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
                yield [Control("progress", "", msgspec.json.encode(told))]
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
                pin = pins.get(str(entry.run.source), 0)
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

"""Feeds of searches: the matches of the past, oldest first, then the live ones; exact when resumed.

A life has one log for each stretch of the past that was scanned for it, and one for its live matches. A feed reads them
one after another, the oldest stretch first. Invariant: every match is sent once. The latest stretch ends at the pins of
the life, and a feed skips live matches before the pins, since the stretches have them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from heapq import heappush, heapreplace

import msgspec

from tailrace.config.values import format_duration
from tailrace.errors import BrokerUnavailable, CursorError, CursorGone, TailraceError, TooFarBack
from tailrace.kafka.broker import Topic
from tailrace.log.cursor import FromEnd, FromLast, FromStart, FromTime, Position
from tailrace.log.event import iso_time
from tailrace.log.feed import LogReader, past_until
from tailrace.log.request import AnyFrame, ControlFrame, Moved
from tailrace.log.segment import Gap
from tailrace.log.store import Logs
from tailrace.views.grep.history import ScanProgress, SearchHistory
from tailrace.views.grep.leases import SearchLease
from tailrace.views.grep.model import SearchLife, Stretch
from tailrace.views.grep.request import LIVE, GrepRequest, SearchCursor
from tailrace.views.grep.window import MatchWindow

LEAST_WAIT_S, WAIT_S = 0.05, 0.5
"""Pause before a feed checks again whether a scan is done or the end is reached."""
LOOK_MS = 5000
"""Interval at which a feed that waits for the end of a topic checks that the topic still exists."""
KEEP_MS = 1000
"""Interval at which a named client's position is stored."""

AGES_MS = tuple(1000 * seconds for seconds in (60, 600, 3_600, 6 * 3_600, 86_400, 7 * 86_400))
"""Ages to which a search for the newest matches extends, one after another; then to the start."""
STEP = 50
"""Runs to read at once."""

_encode = msgspec.json.Encoder().encode


class GrepFeeds:
    """Opens feeds of searches. ``reach`` is how far back a search may go."""

    def __init__(self, history: SearchHistory, reach: timedelta | None = None) -> None:
        self.history, self._reach = history, reach

    async def open(self, request: GrepRequest) -> GrepFeed | NewestFeed:
        """Register and lease the search, request the past that it needs, and find the start.

        All errors of the request are raised here, before the first frame.
        """
        history = self.history
        request = await self._resume_client(request)
        floor_ms = self._floor_ms(request)
        await history.topics.topics(request.search.topic_filter(), request.missing)
        life = await history.searches.register(request.search, history.clock())
        # Listed again: a topic created before the registration belongs to the past.
        topics = await history.topics.topics(request.search.topic_filter())
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
        """Return the earliest time that a search may request; 0 for the start.

        Raises:
            TooFarBack: The request begins earlier.
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
        """Open the feed of a search that is registered and leased."""
        history = self.history
        gap = None
        if isinstance(request.start, SearchCursor):
            part, position, gap = await self._resume(life, request.start)
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

    async def _resume_client(self, request: GrepRequest) -> GrepRequest:
        """Return the request of a named client with its stored position as the start, if there is one."""
        if request.client is None or isinstance(request.start, SearchCursor):
            return request
        stored = await self.history.searches.position(request.search.id, request.client)
        if stored is None:
            return request
        cursor = SearchCursor.parse(stored)
        return msgspec.structs.replace(request, start=cursor, since_ms=cursor.cursor.since_ms)

    async def _resume(self, life: SearchLife, cursor: SearchCursor) -> tuple[int, Position, Gap | None]:
        """Return the part and the position of a cursor, and the gap if the cursor is of an earlier life."""
        position = cursor.cursor.positions[0]
        if cursor.life == life.number:
            stretches, _ = await self.history.searches.stretches(life)
            if cursor.part != LIVE and cursor.part not in {stretch.number for stretch in stretches}:
                raise CursorError(f"cursor {cursor}: this search has no such part")
            return cursor.part, position, None
        if await self.history.searches.past(cursor.life) not in (None, life.search.id):
            raise CursorError(f"cursor {cursor} is of another search")
        # The search had ended and was registered again: the matches in between are unknown.
        return LIVE, Position.START, Gap(position, Position.START, "expired")


def starting_at(request: GrepRequest, time_ms: int) -> GrepRequest:
    """Return a request with another start time; 0 is the start."""
    start = FromTime(time_ms) if time_ms else FromStart()
    return msgspec.structs.replace(request, start=start, since_ms=time_ms or None)


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
        self._window = MatchWindow(history, request, life, pins)
        if gap is not None:
            self._window.add(gap)
        self._caught_up = request.resumed
        self._at_ends = self._closing = False
        self._checked_ms = self._opened_ms = history.clock()
        self._ended = False
        self._wake = lease.wake
        self._following = AsyncExitStack()
        self._reader: LogReader
        self._acknowledged, self._kept_ms = "", 0
        self._progress: ScanProgress | None = None

    @property
    def cursor(self) -> str:
        """Cursor after the last frame."""
        return self._window.cursor

    async def begin(self) -> None:
        """Open the log of the first part."""
        try:
            await self._open(self._part, self._start)
            if self._window.is_empty:  # no gap to report first
                # A client that returns before the first event resumes here, not at a later end.
                await self._keep(self.cursor)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop following and release the lease."""
        self._ended = True
        await self._following.aclose()
        with suppress(TailraceError):
            if self._acknowledged and self._lease.is_held:
                await self._keep("", at_last=True)
        await self._lease.give_up()

    def __aiter__(self) -> AsyncIterator[Sequence[AnyFrame]]:
        return self._batches()

    async def _batches(self) -> AsyncIterator[Sequence[AnyFrame]]:
        while not self._ended:
            before = self.cursor if self._request.client is not None else ""
            if frames := await self._next():
                yield frames
                # The caller has taken the batch, but may not have sent it all. So store the cursor before it: a client
                # that returns by its name gets the batch again rather than not at all.
                await self._keep(before)

    async def _keep(self, cursor: str, at_last: bool = False) -> None:
        """Store the position of a named client, from time to time."""
        client, now = self._request.client, self._history.clock()
        if client is None:
            return
        self._acknowledged = cursor or self._acknowledged
        if at_last or not 0 <= now - self._kept_ms < KEEP_MS:  # the clock may be set back
            self._kept_ms = now
            await self._history.searches.keep_position(self._life.search.id, client, self._acknowledged)

    async def _next(self) -> Sequence[AnyFrame]:
        request, window = self._request, self._window
        if window.is_ready:
            return await window.show()
        self._lease.check()
        if window.is_full:
            return self._end("limit")
        if not window.is_empty:
            return await window.show()
        self._wake.clear()
        # First ask whether more may come, then read: the read sees what came in between.
        last = await self._is_last()
        pieces = await self._reader.next()
        if last and not pieces and (self._part != LIVE or not self._caught_up or self._is_closing()):
            # The hub may be behind that answer: only the store can tell that this is the end.
            await self._open(self._part, self._reader.position)
            pieces = await self._reader.next()
        if pieces:
            for piece in pieces:
                window.add(piece)
            return [Moved(self.cursor)] if window.is_empty else await window.show()
        if not last:
            return await self._wait()
        if self._part != LIVE:
            return await self._enter_next_part()
        frames: list[AnyFrame] = []
        if not self._caught_up:
            self._caught_up = True
            frames.append(ControlFrame("caught-up", self.cursor))
        if not self._is_closing():
            return frames or await self._wait()
        if request.follow and not self._closing:
            # Records written until now may still be on their way.
            self._closing, self._at_ends = True, False
            self._ends = await self._history.ends(request.search)
            return frames
        return [*frames, *self._end("until" if request.until_ms is not None else "caught-up")]

    async def _is_last(self) -> bool:
        """Return whether the part's log is complete: a scanned stretch, or live up to the ends at the feed's start."""
        if self._part != LIVE:
            stretch, done = await self._history.stretch(self._life, self._part)
            self._progress = self._progress or ScanProgress(stretch, self._history.clock)
            return done
        if self._at_ends:
            return True
        shard = self._history.logs.shard_of(self._life.name)
        marks = await self._history.searches.live_marks(shard, list(self._ends))
        self._ends = {partition: end for partition, end in self._ends.items() if marks[partition] < end - 1}
        if self._ends and not 0 <= self._history.clock() - self._checked_ms < LOOK_MS:
            self._checked_ms = self._history.clock()
            with suppress(BrokerUnavailable):
                current = await self._history.ends(self._request.search)
                self._ends = {partition: end for partition, end in self._ends.items() if partition in current}
        self._at_ends = not self._ends
        return self._at_ends

    async def _enter_next_part(self) -> list[AnyFrame]:
        """Report the offsets that this stretch lost, and enter the next part. A reader cut off before gets it again."""
        part = await self._history.next_part(self._life, self._part)
        frames: list[AnyFrame] = []
        for lost in await self._history.searches.lost(self._life, self._part):
            if self._request.on_gap == "fail":
                start = msgspec.structs.replace(self._window.position.cursor, positions=(Position.START,))
                first, after = f"{lost.source}:{lost.first}", SearchCursor(self._life.number, part, start)
                what = f"search {self._life.search.id}: {first} up to offset {lost.until - 1}"
                raise CursorGone(self._life.search.id, first, str(after), lost.reason, what)
            frames.append(ControlFrame("gap", self.cursor, _encode(lost)))
        await self._open(part, Position.START)
        self._progress = None
        return [*frames, Moved(self.cursor)]

    async def _wait(self) -> list[AnyFrame]:
        # Once the feed has caught up, only the hub wakes it: thousands of waiting feeds must cost nothing.
        settled = self._part == LIVE and self._at_ends and self._caught_up and self._request.until_ms is None
        with suppress(TimeoutError):
            async with asyncio.timeout(None if settled else self._pause_s()):
                await self._wake.wait()
        if self._part == LIVE or self._progress is None:
            return []
        facts = await self._history.progress(self._life, self._progress)
        return [] if facts is None else [ControlFrame("progress", self.cursor, _encode(facts))]

    def _pause_s(self) -> float:
        """Return the pause before the next check: short at first, so that short scans show their end at once."""
        waited_s = (self._history.clock() - self._opened_ms) / 1000
        return min(WAIT_S, max(LEAST_WAIT_S, waited_s / 10))

    async def _open(self, part: int, position: Position) -> None:
        await self._following.aclose()
        self._following = AsyncExitStack()
        name = self._life.name
        if part != LIVE:
            stretch, _ = await self._history.stretch(self._life, part)
            name = stretch.name(self._life)
        live_end = await self._following.enter_async_context(self._history.hub.follow(name, self._wake))
        self._part = part
        self._window.enter(part, name, position)
        if part == LIVE and position == Position.START:
            gap = await self._history.expired_gap(self._life, self._request.since_ms)
            if gap is not None:
                self._window.add(gap)
                position = gap.to
        self._reader = LogReader(self._history.logs, name, position, live_end)

    def _end(self, reason: str) -> list[AnyFrame]:
        self._ended = True
        return [self._window.end(reason)]

    def _is_closing(self) -> bool:
        """Return whether the feed ends when it has caught up."""
        return not self._request.follow or past_until(self._request.until_ms, self._history.clock())


class NewestFeed:
    """A feed of the last ``count`` matches and those after them, with the interface of ``GrepFeed``.

    It requests growing stretches of the past, latest first, until they have ``count`` matches or reach ``floor_ms``.
    Until the start is found it has no cursor, and a reader that is cut off must begin again.
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
        self._feed: GrepFeed | None = None

    @property
    def cursor(self) -> str:
        """Cursor after the last frame; empty until the start is found."""
        return "" if self._feed is None else self._feed.cursor

    async def aclose(self) -> None:
        """Stop the search for the start, or the feed, and release the lease."""
        if self._feed is not None:
            await self._feed.aclose()
        await self._lease.give_up()

    async def __aiter__(self) -> AsyncIterator[Sequence[AnyFrame]]:
        progress: ScanProgress | None = None
        while isinstance(start := await self.find_start(), Stretch):
            if progress is None or progress.stretch.number != start.number:
                progress = ScanProgress(start, self._history.clock)
            await asyncio.sleep(WAIT_S)
            self._lease.check()
            if facts := await self._history.progress(self._life, progress):
                yield [ControlFrame("progress", "", _encode(facts))]
        self._feed = await self._open_since(start)
        yield [Moved(self._feed.cursor)]
        async for frames in self._feed:
            yield frames

    async def find_start(self) -> int | Stretch:
        """Return the time at which the last matches begin, or the stretch whose scan must end before that is known."""
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
        """Return the times of the newest matches since a time, as a heap with the oldest first.

        Older matches may be in the logs, too, where times go back; but not all of them, so they do not count.
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

    The log is read backwards as long as it may have newer events: each run has the newest time up to it.
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

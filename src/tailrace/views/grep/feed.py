"""Feeds of searches: the matches of the past, oldest first, then the live ones; exact when resumed.

A life has one log for each stretch of the past that was scanned for it, and one for its live matches. A feed reads them
one after another, the oldest stretch first. Invariants: each stretch ends where a later one begins, and the latest ends
at the pins of the life, where live matches begin; so nothing is scanned twice. Every match is sent once: a feed skips
live matches before the pins, since the stretches have them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from heapq import heappush, heapreplace
from math import inf
from typing import Any

import msgspec

from tailrace.config.values import format_duration
from tailrace.errors import BrokerUnavailable, CursorError, CursorGone, SearchEnded, TailraceError, TooFarBack
from tailrace.kafka.broker import BrokerTopics, Topic
from tailrace.log.cursor import FromEnd, FromLast, FromStart, FromTime, Position
from tailrace.log.event import iso_time
from tailrace.log.feed import LEAST_WAIT_S, LogReader, OpenFeed, before_time
from tailrace.log.hub import Hub, woken
from tailrace.log.request import AnyFrame, ControlFrame, Moved
from tailrace.log.segment import Gap
from tailrace.log.store import Logs
from tailrace.views.grep.matches import MatchWindow, Payloads
from tailrace.views.grep.model import LIVE, GrepRequest, SearchCursor, SearchLife, Stretch
from tailrace.views.grep.store import Leases, Searches, SearchLease

WAIT_S = 0.5
"""Longest pause before a feed checks again whether a scan is done or the end is reached."""
LOOK_MS = 5000
"""Interval at which a feed that waits for the end of a topic checks that the topic still exists."""
KEEP_MS = 1000
"""Interval at which a named client's position is stored."""
PROGRESS_MS = 1000
"""Interval of progress frames."""
AGES_MS = tuple(1000 * seconds for seconds in (60, 600, 3_600, 6 * 3_600, 86_400, 7 * 86_400))
"""Ages to which a search for the newest matches extends, one after another; then to the start."""
STEP = 50
"""Runs to read at once."""

_encode = msgspec.json.Encoder().encode


@dataclass
class GrepFeeds:
    """Opens feeds of searches, and has what all of them share."""

    hub: Hub
    logs: Logs
    searches: Searches
    topics: BrokerTopics
    payloads: Payloads
    leases: Leases
    clock: Callable[[], int]
    reach: timedelta | None = None
    """Limit of how far back a search may go."""

    async def open(self, request: GrepRequest) -> GrepFeed:
        """Register and lease the search and find its start; all errors of the request are raised here."""
        request = await self._resume_client(request)
        floor_ms = self._floor_ms(request)
        wanted = request.search.topic_filter()
        await self.topics.topics(wanted, request.parameters.missing)
        life = await self.searches.register(request.search, self.clock())
        # Listed again: a topic created before the registration belongs to the past.
        topics = await self.topics.topics(wanted)
        pins = await self.searches.pins(life)
        if pins is None:
            pins = await self.searches.pin(life, await self.topics.ends(topics))
        lease = await SearchLease.take(self.leases, request, life)
        return await GrepFeed(SearchHistory(self, life, pins, topics, lease), request, floor_ms).begin()

    def _floor_ms(self, request: GrepRequest) -> int:
        """Return the earliest time that a search may request, 0 for the start; TooFarBack if it begins earlier."""
        if self.reach is None:
            return 0
        floor_ms = self.clock() - round(self.reach.total_seconds() * 1000)
        if isinstance(request.start, FromStart):
            raise TooFarBack("start", format_duration(self.reach))
        if isinstance(request.start, FromTime) and request.start.time_ms < floor_ms:
            raise TooFarBack(iso_time(request.start.time_ms), format_duration(self.reach))
        return floor_ms

    async def _resume_client(self, request: GrepRequest) -> GrepRequest:
        """Return the request of a named client with its stored position as the start, if there is one."""
        client = request.parameters.client
        if client is None or isinstance(request.start, SearchCursor):
            return request
        stored = await self.searches.position(request.search.id, client)
        if stored is None:
            return request
        cursor = SearchCursor.parse(stored)
        return msgspec.structs.replace(request, start=cursor, since_ms=cursor.cursor.since_ms)


@dataclass(frozen=True)
class SearchHistory:
    """The parts of a life, for one reader: stretches of the past by their numbers, and LIVE."""

    feeds: GrepFeeds
    life: SearchLife
    pins: Mapping[str, int]
    topics: Sequence[Topic]
    lease: SearchLease

    async def stretches(self) -> tuple[list[Stretch], set[int]]:
        return await self.feeds.searches.stretches(self.life)

    async def stretch(self, part: int) -> tuple[Stretch, bool]:
        """Return a stretch, and whether it is completely scanned."""
        stretches, done = await self.stretches()
        for stretch in stretches:
            if stretch.number == part:
                return stretch, part in done
        raise SearchEnded(self.life.search.id)  # stretches end only with their life

    async def log_name(self, part: int) -> str:
        return self.life.name if part == LIVE else (await self.stretch(part))[0].name(self.life)

    async def request_past(self, since_ms: int) -> None:
        """Request the scan of the time since then, as far as no stretch covers it yet."""
        feeds = self.feeds
        starts: dict[str, int] | None = None
        while True:
            stretches, _ = await self.stretches()
            if any(stretch.since_ms <= since_ms for stretch in stretches):
                return
            starts = starts if starts is not None else await feeds.topics.at_time(list(self.topics), since_ms)
            lowest = dict(self.pins)
            for stretch in stretches:
                lowest |= {partition: first for partition, (first, _) in stretch.ranges.items()}
            ranges = {p: (starts[p], until) for p, until in lowest.items() if p in starts and starts[p] < until}
            if not ranges or await feeds.searches.extend(self.life, len(stretches), feeds.clock(), since_ms, ranges):
                return

    async def first_part(self, since_ms: int) -> int:
        """Return the part where a feed since a time begins: the newest that reaches back to it, or the oldest."""
        part, until_ms = LIVE, None
        for stretch in (await self.stretches())[0]:
            if until_ms is not None and until_ms <= since_ms:
                break
            part, until_ms = stretch.number, stretch.since_ms
        return part

    async def next_part(self, part: int) -> int:
        """Return the part after a stretch."""
        numbers = [LIVE, *(stretch.number for stretch in (await self.stretches())[0])]
        if part not in numbers:
            raise SearchEnded(self.life.search.id)
        return numbers[numbers.index(part) - 1]

    async def position_before(self, part: int, since_ms: int) -> Position:
        """Return a position in a part before every match since a time, and little else."""
        name = await self.log_name(part)
        if not since_ms or (part == LIVE and await self.expired_gap(since_ms) is not None):
            return Position.START  # the feed reports the gap there
        return await before_time(self.feeds.logs, name, since_ms)

    async def expired_gap(self, since_ms: int | None) -> Gap | None:
        """Return the gap that retention has made at the start of the live log, if it may hold matches since a time."""
        logs, name = self.feeds.logs, self.life.name
        log = await logs.log(name)
        if log.segments:
            gone, to = log.segments[0].index > 0, log.segments[0].before
            until_ms = log.segments[0].start_ms
        else:
            gone, to = log.expired != Position.START, log.expired
            until_ms = await logs.floor(name)
        if not gone or (since_ms is not None and since_ms >= until_ms):
            return None
        return Gap(Position.START, to, "expired")

    async def resume(self, cursor: SearchCursor) -> tuple[int, Position, Gap | None]:
        """Return the part and the position of a cursor, and the gap if the cursor is of an earlier life."""
        position = cursor.cursor.positions[0]
        if cursor.life == self.life.number:
            stretches, _ = await self.stretches()
            if cursor.part != LIVE and cursor.part not in {stretch.number for stretch in stretches}:
                raise CursorError(f"cursor {cursor}: this search has no such part")
            return cursor.part, position, None
        if await self.feeds.searches.past(cursor.life) not in (None, self.life.search.id):
            raise CursorError(f"cursor {cursor} is of another search")
        # The search had ended and was registered again: the matches in between are unknown.
        return LIVE, Position.START, Gap(position, Position.START, "expired")

    async def progress(self, progress: ScanProgress, cursor: str) -> list[AnyFrame]:
        """Return a progress frame; none if the last one was sent a moment ago."""
        if not progress.is_due():
            return []
        searches, logs = self.feeds.searches, self.feeds.logs
        stretch, name = progress.stretch, progress.stretch.name(self.life)
        marks = await searches.stretch_marks(stretch, logs.shard_of(name))
        matches = sum(segment.events for segment in (await logs.log(name)).segments)
        facts = progress.facts(marks, matches, await searches.read_bytes(self.life, stretch.number))
        return [ControlFrame("progress", cursor, _encode(facts))]


class GrepFeed(OpenFeed):
    """An open feed of a search that is registered and leased. It has no cursor until its start is found."""

    def __init__(self, history: SearchHistory, request: GrepRequest, floor_ms: int) -> None:
        feeds = history.feeds
        super().__init__(request, feeds.clock, request.until_ms)
        self._history, self._request, self._feeds, self._lease = history, request, feeds, history.lease
        self._newest = NewestMatches(history, request, floor_ms) if isinstance(request.start, FromLast) else None
        """The search for the start, if it begins with the last matches and they are not known yet."""
        self._window: MatchWindow
        self._ends: dict[str, int] = {}
        """Ends of the partitions that the live log has not reached yet."""
        self._part = LIVE
        self._at_ends = self._closing = False
        self._checked_ms = self._opened_ms = 0
        self._wake = history.lease.wake
        self._reader: LogReader
        self._acknowledged, self._kept_ms = "", 0
        self._progress: ScanProgress | None = None
        self._pending: list[AnyFrame] = []

    async def _begin(self) -> None:
        self._checked_ms = self._opened_ms = self._clock()
        if self._newest is not None:
            return
        feeds, history, start, gap = self._feeds, self._history, self._request.start, None
        if isinstance(start, SearchCursor):
            part, position, gap = await history.resume(start)
        elif isinstance(start, FromEnd):
            part, position = LIVE, (await feeds.logs.log(history.life.name)).end
        else:
            since_ms = start.time_ms if isinstance(start, FromTime) else 0
            await history.request_past(since_ms)
            part = await history.first_part(since_ms)
            position = await history.position_before(part, since_ms)
        self._ends = await feeds.topics.ends(list(history.topics))
        self._window = MatchWindow(feeds.payloads, self._request, history.life, history.pins)
        if gap is not None:
            self._window.add(gap)
        await self._enter(part, position)
        if self._window.is_empty:  # no gap to report first
            # A client that returns before the first event resumes here, not at a later end.
            await self._keep(self.cursor)

    async def _find_start(self, newest: NewestMatches) -> list[AnyFrame]:
        start = await newest.find_start()
        if isinstance(start, Stretch):
            if self._progress is None or self._progress.stretch.number != start.number:
                self._progress = ScanProgress(start, self._clock)
            return []
        self._newest = self._progress = None
        begin = FromTime(start) if start else FromStart()
        self._request = msgspec.structs.replace(self._request, start=begin, since_ms=start or None)
        await self._begin()
        return [Moved(self.cursor)]

    def _cursor_text(self, ended: bool = False) -> str:
        return "" if self._newest is not None else self._window.cursor(ended)

    async def aclose(self) -> None:
        """Stop following and release the lease."""
        await super().aclose()
        with suppress(TailraceError):
            if self._acknowledged and self._lease.is_held:
                await self._keep("", at_last=True)
        await self._lease.give_up()

    async def __aiter__(self) -> AsyncGenerator[Sequence[AnyFrame], None]:
        before = self.cursor
        async for frames in super().__aiter__():
            yield frames
            # The caller has taken the batch, but may not have sent it all. So store the cursor before it: a client
            # that returns by its name gets the batch again rather than not at all.
            await self._keep(before)
            before = self.cursor

    async def _keep(self, cursor: str, at_last: bool = False) -> None:
        """Store the position of a named client, from time to time."""
        client, now = self._request.parameters.client, self._clock()
        self._acknowledged = cursor or self._acknowledged
        if client is None or not self._acknowledged:
            return
        if at_last or not 0 <= now - self._kept_ms < KEEP_MS:  # the clock may be set back
            self._kept_ms = now
            await self._feeds.searches.keep_position(self._history.life.search.id, client, self._acknowledged)

    async def _next(self) -> Sequence[AnyFrame]:
        if self._pending:
            frames, self._pending = self._pending, []
            return frames
        if self._newest is not None:
            return await self._find_start(self._newest)
        window = self._window
        if window.is_ready:
            return await window.show()
        self._lease.check()
        if window.room == 0:
            return self._end("limit")
        if not window.is_empty:
            return await window.show()
        self._wake.clear()
        # First ask whether more may come, then read: the read sees what came in between.
        last = await self._is_last()
        pieces = await self._reader.next()
        if last and not pieces and (self._part != LIVE or not self._caught_up or self._is_over):
            # The hub may be behind that answer: only the store can tell that this is the end.
            await self._enter(self._part, self._reader.position)
            pieces = await self._reader.next()
        if pieces:
            for piece in pieces:
                window.add(piece)
            return [Moved(self.cursor)] if window.is_empty else await window.show()
        if not last:
            return []
        if self._part != LIVE:
            return await self._enter_next_part()
        frames = [] if self._caught_up else self._catch_up()
        if not self._is_over:
            return frames
        if self._parameters.follow and not self._closing:
            # Records written until now may still be on their way.
            self._closing, self._at_ends = True, False
            self._ends = await self._current_ends()
            return frames or await self._next()
        return [*frames, *self._end("until" if self._until_ms is not None else "caught-up")]

    async def _is_last(self) -> bool:
        """Return whether the part's log is complete: a scanned stretch, or live up to the ends at the feed's start."""
        if self._part != LIVE:
            stretch, done = await self._history.stretch(self._part)
            self._progress = self._progress or ScanProgress(stretch, self._feeds.clock)
            return done
        if self._at_ends:
            return True
        shard = self._feeds.logs.shard_of(self._history.life.name)
        marks = await self._feeds.searches.live_marks(shard, list(self._ends))
        self._ends = {partition: end for partition, end in self._ends.items() if marks[partition] < end - 1}
        if self._ends and not 0 <= self._feeds.clock() - self._checked_ms < LOOK_MS:
            self._checked_ms = self._feeds.clock()
            with suppress(BrokerUnavailable):
                current = await self._current_ends()
                self._ends = {partition: end for partition, end in self._ends.items() if partition in current}
        self._at_ends = not self._ends
        return self._at_ends

    async def _current_ends(self) -> dict[str, int]:
        topics = self._feeds.topics
        return await topics.ends(await topics.topics(self._request.search.topic_filter()))

    async def _enter_next_part(self) -> list[AnyFrame]:
        """Report the offsets that this stretch lost, and enter the next part. A reader cut off before gets it again."""
        life, part = self._history.life, await self._history.next_part(self._part)
        frames: list[AnyFrame] = []
        for lost in await self._feeds.searches.lost(life, self._part):
            if self._is_strict:
                self._window.enter(part, "", Position.START)
                first = f"{lost.source}:{lost.first}"
                what = f"search {life.search.id}: {first} up to offset {lost.until - 1}"
                raise CursorGone(life.search.id, first, self.cursor, lost.reason, what)
            frames.append(ControlFrame("gap", self.cursor, _encode(lost)))
        await self._enter(part, Position.START)
        self._progress = None
        return [*frames, Moved(self.cursor)]

    async def _wait(self) -> None:
        # Once the feed has caught up, only the hub wakes it: thousands of waiting feeds must cost nothing.
        settled = self._part == LIVE and self._at_ends and self._caught_up and self._until_ms is None
        # The pause is short at first, so that short scans show their end at once.
        pause_s = min(WAIT_S, max(LEAST_WAIT_S, (self._clock() - self._opened_ms) / 10_000))
        await woken(self._wake, inf if settled else pause_s)
        self._lease.check()
        if self._progress is not None and (self._part != LIVE or self._newest is not None):
            self._pending = await self._history.progress(self._progress, self.cursor)

    async def _enter(self, part: int, position: Position) -> None:
        await self._stack.aclose()
        name = await self._history.log_name(part)
        live_end = await self._stack.enter_async_context(self._feeds.hub.follow(name, self._wake))
        self._part = part
        self._window.enter(part, name, position)
        if part == LIVE and position == Position.START:
            gap = await self._history.expired_gap(self._request.since_ms)
            if gap is not None:
                self._window.add(gap)
                position = gap.to
        self._reader = LogReader(self._feeds.logs, name, position, live_end)

    def _end(self, reason: str) -> list[AnyFrame]:
        self._sent = self._window.sent
        return super()._end(reason)


class NewestMatches:
    """The search for the start of a feed that begins with the last matches.

    It requests growing stretches of the past, latest first, until they have enough matches or reach ``floor_ms``.
    """

    def __init__(self, history: SearchHistory, request: GrepRequest, floor_ms: int) -> None:
        assert isinstance(request.start, FromLast)
        self._history, self._count, self._until_ms = history, request.start.count, request.until_ms
        self._floor_ms, self._now_ms, self._tried_ms = floor_ms, history.feeds.clock(), history.life.since_ms

    async def find_start(self) -> int | Stretch:
        """Return the time at which the last matches begin, or the stretch whose scan must end before that is known."""
        while True:
            stretches, done = await self._history.stretches()
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
            self._tried_ms = max(self._floor_ms, next((since_ms for since_ms in ages if since_ms < reached_ms), 0))
            await self._history.request_past(self._tried_ms)

    async def _times(self, stretches: Sequence[Stretch], since_ms: int) -> list[int]:
        """Return the times of the newest matches since a time, as a heap with the oldest first.

        Older matches may be in the logs, too, where times go back; but not all of them, so they do not count.
        """
        history, newest = self._history, list[int]()
        parts = [(history.life.name, history.pins), *((stretch.name(history.life), {}) for stretch in stretches)]
        for name, pins in parts:
            await _newest(history.feeds.logs, name, self._count, pins, (since_ms, self._until_ms), newest)
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


class ScanProgress:
    """The progress frames of one scan for one reader."""

    def __init__(self, stretch: Stretch, clock: Callable[[], int]) -> None:
        self.stretch, self._clock = stretch, clock
        self._sent_ms = 0
        self._first: tuple[int, int] | None = None
        """Time and scanned offsets of the first frame."""

    def is_due(self) -> bool:
        """Return whether to send a frame; also if the clock was set back."""
        return not 0 <= self._clock() - self._sent_ms < PROGRESS_MS

    def facts(self, marks: Mapping[str, int], matches: int, read_bytes: int) -> dict[str, Any]:
        now = self._sent_ms = self._clock()
        scanned, whole = self.stretch.passed(marks), self.stretch.records
        self._first = self._first or (now, scanned)
        facts: dict[str, Any] = {
            "percent": self.stretch.percent(scanned),
            "records": scanned,
            "of": whole,
            "bytes": read_bytes,
            "matches": matches,
        }
        done, took = scanned - self._first[1], now - self._first[0]
        if done > 0 and took > 0:
            facts["seconds_left"] = round((whole - scanned) * took / done / 1000, 1)
        return facts

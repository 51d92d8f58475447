"""The history of a search: the stretches of the past that readers requested, and the live log.

Each stretch ends where a later one begins, and the latest ends at the pins, where live matches begin. So nothing is
scanned twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tailrace.errors import SearchEnded
from tailrace.kafka.broker import BrokerTopics, Topic
from tailrace.log.cursor import Position
from tailrace.log.feed import before_time
from tailrace.log.hub import Hub
from tailrace.log.segment import Gap
from tailrace.log.store import Logs
from tailrace.views.grep.leases import Leases
from tailrace.views.grep.match_run import BatchCache
from tailrace.views.grep.model import Search, SearchLife, Stretch
from tailrace.views.grep.payloads import Payloads
from tailrace.views.grep.request import LIVE
from tailrace.views.grep.store import Searches


class SearchHistory:
    """Reads and extends the parts of lives: stretches by their numbers, and LIVE. Also carries what feeds share."""

    def __init__(
        self,
        hub: Hub,
        logs: Logs,
        searches: Searches,
        topics: BrokerTopics,
        payloads: Payloads,
        leases: Leases,
        clock: Callable[[], int],
    ) -> None:
        self.hub, self.logs, self.searches, self.topics, self.payloads = hub, logs, searches, topics, payloads
        self.leases, self.clock = leases, clock
        self.batches = BatchCache(payloads.memory_bytes // 4)

    async def ends(self, search: Search) -> dict[str, int]:
        """Return the end offset of each partition of a search."""
        return await self.topics.ends(await self.topics.topics(search.topic_filter()))

    async def request_past(
        self, life: SearchLife, pins: Mapping[str, int], topics: Sequence[Topic], since_ms: int
    ) -> None:
        """Request the scan of the time since then, as far as no stretch covers it yet."""
        starts: dict[str, int] | None = None
        while True:
            stretches, _ = await self.searches.stretches(life)
            if any(stretch.since_ms <= since_ms for stretch in stretches):
                return
            starts = starts if starts is not None else await self.topics.at_time(list(topics), since_ms)
            lowest = dict(pins)
            for stretch in stretches:
                lowest |= {partition: first for partition, (first, _) in stretch.ranges.items()}
            ranges = {p: (starts[p], until) for p, until in lowest.items() if p in starts and starts[p] < until}
            if not ranges or await self.searches.extend(life, len(stretches), self.clock(), since_ms, ranges):
                return

    async def first_part(self, life: SearchLife, since_ms: int) -> int:
        """Return the part where a feed since a time begins: the newest that reaches back to it, or the oldest."""
        stretches, _ = await self.searches.stretches(life)
        part, until_ms = LIVE, None
        for stretch in stretches:
            if until_ms is not None and until_ms <= since_ms:
                break
            part, until_ms = stretch.number, stretch.since_ms
        return part

    async def position_before(self, life: SearchLife, part: int, since_ms: int) -> Position:
        """Return a position in a part before every match since a time, and little else."""
        if part != LIVE:
            stretch, _ = await self.stretch(life, part)
            return await before_time(self.logs, stretch.name(life), since_ms) if since_ms else Position.START
        if not since_ms or await self.expired_gap(life, since_ms) is not None:
            return Position.START  # the feed reports the gap there
        return await before_time(self.logs, life.name, since_ms)

    async def next_part(self, life: SearchLife, part: int) -> int:
        """Return the part after a stretch."""
        stretches, _ = await self.searches.stretches(life)
        numbers = [LIVE, *(stretch.number for stretch in stretches)]
        if part not in numbers:
            raise SearchEnded(life.search.id)
        return numbers[numbers.index(part) - 1]

    async def expired_gap(self, life: SearchLife, since_ms: int | None) -> Gap | None:
        """Return the gap that retention has made at the start of the live log, if it may hold matches since a time."""
        log = await self.logs.log(life.name)
        if log.segments:
            gone, to = log.segments[0].index > 0, log.segments[0].before
            until_ms = log.segments[0].start_ms
        else:
            gone, to = log.expired != Position.START, log.expired
            until_ms = await self.logs.floor(life.name)
        if not gone or (since_ms is not None and since_ms >= until_ms):
            return None
        return Gap(Position.START, to, "expired")

    async def stretch(self, life: SearchLife, part: int) -> tuple[Stretch, bool]:
        """Return a stretch, and whether it is completely scanned."""
        stretches, done = await self.searches.stretches(life)
        for stretch in stretches:
            if stretch.number == part:
                return stretch, part in done
        raise SearchEnded(life.search.id)  # stretches end only with their life

    async def progress(self, life: SearchLife, progress: ScanProgress) -> dict[str, Any] | None:
        """Return the facts of a progress frame; None if the last one was sent a moment ago."""
        if not progress.is_due():
            return None
        stretch, name = progress.stretch, progress.stretch.name(life)
        marks = await self.searches.stretch_marks(stretch, self.logs.shard_of(name))
        matches = sum(segment.events for segment in (await self.logs.log(name)).segments)
        return progress.facts(marks, matches, await self.searches.read_bytes(life, stretch.number))


PROGRESS_MS = 1000
"""Interval of progress frames."""


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
        """Return the facts of the next frame."""
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

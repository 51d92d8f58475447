"""The parts of a search's life: the stretches of the past that were asked for, oldest first, and what is live.

Ranges of stretches abut, so that nothing is scanned twice; the last of them ends where live matches begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tailrace.errors import SearchEnded
from tailrace.kafka.broker import Topic
from tailrace.kafka.topics import BrokerTopics
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
    """What feeds of searches are made from, and what they ask of the parts of a life."""

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
        """Return where each source of a search ends now."""
        return await self.topics.ends(await self.topics.topics(search.topic_pattern()))

    async def request_past(
        self, life: SearchLife, pins: Mapping[str, int], topics: Sequence[Topic], since_ms: int
    ) -> None:
        """Ask for what is not scanned yet of the time since then; ranges abut, so nothing is scanned twice."""
        wanted: dict[str, int] | None = None
        while True:
            stretches, _ = await self.searches.stretches(life)
            if any(stretch.since_ms <= since_ms for stretch in stretches):
                return
            wanted = wanted if wanted is not None else await self.topics.at_time(list(topics), since_ms)
            lowest = dict(pins)
            for stretch in stretches:
                lowest |= {source: first for source, (first, _) in stretch.ranges.items()}
            ranges = {s: (wanted[s], until) for s, until in lowest.items() if s in wanted and wanted[s] < until}
            if not ranges or await self.searches.extend(life, len(stretches), self.clock(), since_ms, ranges):
                return

    async def first_part(self, life: SearchLife, since_ms: int) -> int:
        """Return the part that a request since a time begins with: the last one that ends after it."""
        stretches, _ = await self.searches.stretches(life)
        part, until_ms = LIVE, None
        for stretch in stretches:
            if until_ms is not None and until_ms <= since_ms:
                break
            part, until_ms = stretch.number, stretch.since_ms
        return part

    async def position_before(self, life: SearchLife, part: int, since_ms: int) -> Position:
        """Return a place in a part that has every match since a time behind it, and little else."""
        if part != LIVE:
            stretch, _ = await self.stretch(life, part)
            return await before_time(self.logs, stretch.name(life), since_ms) if since_ms else Position.START
        if not since_ms or await self.expired_gap(life, since_ms) is not None:
            return Position.START  # what is gone is said there
        return await before_time(self.logs, life.name, since_ms)

    async def next_part(self, life: SearchLife, part: int) -> int:
        """Return the part that follows another one."""
        stretches, _ = await self.searches.stretches(life)
        numbers = [LIVE, *(stretch.number for stretch in stretches)]
        if part not in numbers:
            raise SearchEnded(life.search.id)
        return numbers[numbers.index(part) - 1]

    async def expired_gap(self, life: SearchLife, since_ms: int | None) -> Gap | None:
        """Return what retention has removed of the live matches since a time, if it may have removed any of them."""
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
        """Return a stretch, and whether it is scanned."""
        stretches, done = await self.searches.stretches(life)
        for found in stretches:
            if found.number == part:
                return found, part in done
        raise SearchEnded(life.search.id)  # they only go with their life

    async def progress(self, life: SearchLife, progress: ScanProgress) -> dict[str, Any] | None:
        """Return what there is to tell of a scan; None if its reader was told lately."""
        if not progress.is_due():
            return None
        stretch, name = progress.stretch, progress.stretch.name(life)
        marks = await self.searches.stretch_marks(stretch, self.logs.shard_of(name))
        matches = sum(segment.events for segment in (await self.logs.log(name)).segments)
        return progress.tell(marks, matches, await self.searches.read_bytes(life, stretch.number))


PROGRESS_MS = 1000


class ScanProgress:
    """The progress of one scan as one reader is told of it."""

    def __init__(self, stretch: Stretch, clock: Callable[[], int]) -> None:
        self.stretch, self._clock = stretch, clock
        self._told_ms = 0
        self._began: tuple[int, int] | None = None

    def is_due(self) -> bool:
        """Whether it is time to tell; also if the clock was set back."""
        return not 0 <= self._clock() - self._told_ms < PROGRESS_MS

    def tell(self, marks: Mapping[str, int], matches: int, read_bytes: int) -> dict[str, Any] | None:
        """Return what there is to tell: percent, records scanned and in all, their bytes, matches, seconds left."""
        if not self.is_due():
            return None
        now = self._told_ms = self._clock()
        scanned, whole = self.stretch.passed(marks), self.stretch.records
        self._began = self._began or (now, scanned)
        told: dict[str, Any] = {
            "percent": self.stretch.percent(scanned),
            "records": scanned,
            "of": whole,
            "bytes": read_bytes,
            "matches": matches,
        }
        done, took = scanned - self._began[1], now - self._began[0]
        if done > 0 and took > 0:
            told["seconds_left"] = round((whole - scanned) * took / done / 1000, 1)
        return told

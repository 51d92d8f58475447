"""The parts of a search's life: the stretches of the past that were asked for, oldest first, and what is live.

Ranges of stretches abut, so that nothing is scanned twice; the last of them ends where live matches begin.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

from tailrace.errors import SearchEnded
from tailrace.kafka.broker import Topic
from tailrace.log.cursor import Position
from tailrace.log.event import Partition
from tailrace.log.feed import before_time
from tailrace.log.hub import Hub, SegmentEntry
from tailrace.log.request import Batch
from tailrace.log.segment import Gap
from tailrace.log.store import Logs
from tailrace.views.grep.leases import Leases
from tailrace.views.grep.model import Search, SearchLife, Stretch
from tailrace.views.grep.payloads import Payloads
from tailrace.views.grep.request import LIVE
from tailrace.views.grep.store import Searched, Searches


class Span:
    """Consecutive matches: their coordinates and times, and what the records' values take up to the end of each.

    Columns are made when they are first asked for: who only counts needs none.
    """

    def __init__(self, piece: SegmentEntry) -> None:
        self._run = piece.entry.run
        self.source: Partition = self._run.partition
        self.epoch, self.first = piece.segment.epoch, piece.entry.first
        """The epoch of the log, and the number of the first match."""
        self._length = len(self._run)

    def __len__(self) -> int:
        return self._length

    @cached_property
    def offsets(self) -> list[int]:
        """Each record's offset."""
        return self._run.offsets

    @cached_property
    def times(self) -> list[int]:
        """Each record's own time."""
        return self._run.times

    @cached_property
    def ends(self) -> list[int]:
        """Bytes of all values up to the end of each."""
        return list(accumulate(map(int, self._run.values)))

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        return min(self.times), max(self.times)

    def position(self, at: int) -> Position:
        """Return the place after one of its matches."""
        return Position(self.epoch, self.first + at)

    def wanted(self, pin: int, since_ms: int | None, until_ms: int | None) -> list[bool] | None:
        """Return which of its matches are at a pin or behind it, and between two times; None for all of them."""
        since = since_ms if since_ms is not None and since_ms > self._bounds[0] else None
        until = until_ms if until_ms is not None and until_ms < self._bounds[1] else None
        if since is None and until is None:
            if pin <= self._run.steps[0]:
                return None
            known = [True] * len(self)
        else:
            known = [
                (since is None or time_ms >= since) and (until is None or time_ms <= until) for time_ms in self.times
            ]
        before = bisect_left(self.offsets, pin)
        known[:before] = [False] * before
        return known


class Ahead:
    """What a request has before it of a span: from ``at`` on, and of that what it wants."""

    __slots__ = ("_ends", "at", "marked", "span")

    def __init__(self, span: Span, at: int, marked: list[bool] | None) -> None:
        self.span, self.at, self.marked = span, at, marked
        self._ends: list[int] | None = None

    @property
    def ends(self) -> list[int]:
        """Bytes of all that is wanted up to the end of each: what is not wanted is not fetched, and takes no room."""
        if self.marked is None:
            return self.span.ends
        if self._ends is None:
            ends = self.span.ends
            sizes = (end - before for before, end in zip([0, *ends], ends, strict=False))
            self._ends = list(accumulate(size * wanted for size, wanted in zip(sizes, self.marked, strict=True)))
        return self._ends

    def fit(self, most_bytes: int | None, most: int | None) -> int:
        """Return how far one can go with so many bytes, and so many matches, that are wanted; None is no bound."""
        end = len(self.span)
        if most_bytes is not None:
            before = self.ends[self.at - 1] if self.at else 0
            end = bisect_right(self.ends, before + most_bytes, self.at)
        if most is None:
            return end
        if self.marked is None:
            return min(end, self.at + most)
        left = most
        for at in range(self.at, end):
            if self.marked[at]:
                if not left:
                    return at
                left -= 1
        return end

    def size(self, begin: int, end: int) -> int:
        """Return the bytes of what is wanted between two places."""
        return self.ends[end - 1] - (self.ends[begin - 1] if begin else 0) if end > begin else 0

    def rows(self, begin: int, end: int) -> range | list[int]:
        """Return what is wanted between two places."""
        return range(begin, end) if self.marked is None else [at for at in range(begin, end) if self.marked[at]]


Key: TypeAlias = tuple[str, int, int, int, str]
"""The log, the epoch, the numbers of the first and the last match, and how its cursors end."""


MOST_MATCHES = 100_000
"""Matches whose coordinates are held."""


class Batches:
    """What feeds of a process have made lately, up to so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._size = most_bytes, 0
        self._known: OrderedDict[Key, Batch] = OrderedDict()
        self._making: dict[Key, asyncio.Event] = {}
        self._spans: OrderedDict[tuple[str, int, int, int], Span] = OrderedDict()
        self._matches = 0

    def span(self, name: str, piece: SegmentEntry) -> Span:
        """Return a stored run of a log as a span."""
        key = name, piece.segment.epoch, piece.entry.first, piece.entry.last
        span = self._spans.get(key)
        if span is None:
            span = self._spans[key] = Span(piece)
            self._matches += len(span)
            while self._matches > MOST_MATCHES and len(self._spans) > 1:
                self._matches -= len(self._spans.popitem(last=False)[1])
        return span

    async def all(
        self, keys: Sequence[Key], make: Callable[[Sequence[int]], Awaitable[Sequence[Batch | None]]]
    ) -> list[Batch | None]:
        """Return the batches of some keys; ``make`` makes those, by their indices, that nobody has made yet.

        None where it cannot be made. Of many who want the same at the same time one makes it, and the others wait.
        """
        while True:
            found = [self._known.get(key) for key in keys]
            missing = [at for at, batch in enumerate(found) if batch is None]
            if not missing:
                return found
            under_way = self._making.get(keys[missing[0]])
            if under_way is None:
                break
            await under_way.wait()
        made = asyncio.Event()
        mine = [keys[at] for at in missing if self._making.setdefault(keys[at], made) is made]
        try:
            for at, batch in zip(missing, await make(missing), strict=True):
                found[at] = batch
                if batch is not None and keys[at] not in self._known:
                    self._known[keys[at]] = batch
                    self._size += batch.size
        finally:
            for key in mine:
                del self._making[key]
            made.set()
        while self._size > self._most and self._known:
            self._size -= self._known.popitem(last=False)[1].size
        return found


class Parts:
    """What feeds of searches are made from, and what they ask of the parts of a life."""

    def __init__(
        self,
        hub: Hub,
        logs: Logs,
        searches: Searches,
        searched: Searched,
        payloads: Payloads,
        leases: Leases,
        clock: Callable[[], int],
    ) -> None:
        self.hub, self.logs, self.searches, self.searched, self.payloads = hub, logs, searches, searched, payloads
        self.leases, self.clock = leases, clock
        self.batches = Batches(payloads.memory_bytes // 4)

    async def ends(self, search: Search) -> dict[str, int]:
        """Return where each source of a search ends now."""
        return await self.searched.ends(await self.searched.topics(search))

    async def reach(self, life: SearchLife, pins: Mapping[str, int], topics: Sequence[Topic], since_ms: int) -> None:
        """Ask for what is not scanned yet of the time since then; ranges abut, so nothing is scanned twice."""
        wanted: dict[str, int] | None = None
        while True:
            stretches, _ = await self.searches.stretches(life)
            if any(stretch.since_ms <= since_ms for stretch in stretches):
                return
            wanted = wanted if wanted is not None else await self.searched.at_time(list(topics), since_ms)
            lowest = dict(pins)
            for stretch in stretches:
                lowest |= {source: first for source, (first, _) in stretch.ranges.items()}
            ranges = {s: (wanted[s], until) for s, until in lowest.items() if s in wanted and wanted[s] < until}
            if not ranges or await self.searches.extend(life, len(stretches), self.clock(), since_ms, ranges):
                return

    async def oldest(self, life: SearchLife, since_ms: int) -> int:
        """Return the part that a request since a time begins with: the last one that ends after it."""
        stretches, _ = await self.searches.stretches(life)
        part, until_ms = LIVE, None
        for stretch in stretches:
            if until_ms is not None and until_ms <= since_ms:
                break
            part, until_ms = stretch.number, stretch.since_ms
        return part

    async def before(self, life: SearchLife, part: int, since_ms: int) -> Position:
        """Return a place in a part that has every match since a time behind it, and little else."""
        if part != LIVE:
            stretch, _ = await self.stretch(life, part)
            return await before_time(self.logs, stretch.name(life), since_ms) if since_ms else Position.START
        if not since_ms or await self.swept(life, since_ms) is not None:
            return Position.START  # what is gone is said there
        return await before_time(self.logs, life.name, since_ms)

    async def after(self, life: SearchLife, part: int) -> int:
        """Return the part that follows another one."""
        stretches, _ = await self.searches.stretches(life)
        numbers = [LIVE, *(stretch.number for stretch in stretches)]
        if part not in numbers:
            raise SearchEnded(life.search.id)
        return numbers[numbers.index(part) - 1]

    async def swept(self, life: SearchLife, since_ms: int | None) -> Gap | None:
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

    async def progress(self, life: SearchLife, progress: Progress) -> dict[str, Any] | None:
        """Return what there is to tell of a scan; None if its reader was told lately."""
        if not progress.is_due():
            return None
        stretch, name = progress.stretch, progress.stretch.name(life)
        marks = await self.searches.stretch_marks(stretch, self.logs.shard_of(name))
        matches = sum(segment.events for segment in (await self.logs.log(name)).segments)
        return progress.tell(marks, matches, await self.searches.read_bytes(life, stretch.number))


EVERY_MS = 1000


class Progress:
    """The progress of one scan as one reader is told of it."""

    def __init__(self, stretch: Stretch, clock: Callable[[], int]) -> None:
        self.stretch, self._clock = stretch, clock
        self._told_ms = 0
        self._began: tuple[int, int] | None = None

    def is_due(self) -> bool:
        """Whether it is time to tell; also if the clock was set back."""
        return not 0 <= self._clock() - self._told_ms < EVERY_MS

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

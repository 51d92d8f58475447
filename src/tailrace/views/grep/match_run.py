"""Runs of matches."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

from tailrace.log.cursor import Position
from tailrace.log.event import Partition
from tailrace.log.hub import SegmentEntry
from tailrace.log.request import Batch


class MatchRun:
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


class PendingRun:
    """What a request has before it of a span: from ``at`` on, and of that what it wants."""

    __slots__ = ("_ends", "at", "marked", "span")

    def __init__(self, span: MatchRun, at: int, marked: list[bool] | None) -> None:
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


BatchKey: TypeAlias = tuple[str, int, int, int, str]
"""The log, the epoch, the numbers of the first and the last match, and how its cursors end."""


MAX_CACHED_MATCHES = 100_000
"""Matches whose coordinates are held."""


class BatchCache:
    """What feeds of a process have made lately, up to so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._size = most_bytes, 0
        self._known: OrderedDict[BatchKey, Batch] = OrderedDict()
        self._making: dict[BatchKey, asyncio.Event] = {}
        self._spans: OrderedDict[tuple[str, int, int, int], MatchRun] = OrderedDict()
        self._matches = 0

    def span(self, name: str, piece: SegmentEntry) -> MatchRun:
        """Return a stored run of a log as a span."""
        key = name, piece.segment.epoch, piece.entry.first, piece.entry.last
        span = self._spans.get(key)
        if span is None:
            span = self._spans[key] = MatchRun(piece)
            self._matches += len(span)
            while self._matches > MAX_CACHED_MATCHES and len(self._spans) > 1:
                self._matches -= len(self._spans.popitem(last=False)[1])
        return span

    async def all(
        self, keys: Sequence[BatchKey], make: Callable[[Sequence[int]], Awaitable[Sequence[Batch | None]]]
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

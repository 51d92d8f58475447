"""Runs of matches as feeds read them, and a cache of the batches made from them.

The log of a search holds only coordinates, times and sizes of the records that matched; ``payloads`` has their values.
"""

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
    """Consecutive matches of one partition. Columns are decoded when first used: a count needs none."""

    def __init__(self, piece: SegmentEntry) -> None:
        self._run = piece.entry.run
        self.partition: Partition = self._run.partition
        self.epoch, self.first = piece.segment.epoch, piece.entry.first
        """Epoch of the log and number of the first match."""
        self._length = len(self._run)

    def __len__(self) -> int:
        return self._length

    @cached_property
    def offsets(self) -> list[int]:
        return self._run.offsets

    @cached_property
    def times(self) -> list[int]:
        return self._run.times

    @cached_property
    def ends(self) -> list[int]:
        """Running total of the values' sizes."""
        return list(accumulate(map(int, self._run.values)))

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        return min(self.times), max(self.times)

    def position(self, at: int) -> Position:
        """Return the position after one of its matches."""
        return Position(self.epoch, self.first + at)

    def wanted(self, pin: int, since_ms: int | None, until_ms: int | None) -> list[bool] | None:
        """Return a mask of the matches from offset ``pin`` on and between two times; None if it is all of them."""
        since = since_ms if since_ms is not None and since_ms > self._bounds[0] else None
        until = until_ms if until_ms is not None and until_ms < self._bounds[1] else None
        if since is None and until is None:
            if pin <= self._run.steps[0]:
                return None
            mask = [True] * len(self)
        else:
            mask = [
                (since is None or time_ms >= since) and (until is None or time_ms <= until) for time_ms in self.times
            ]
        before = bisect_left(self.offsets, pin)
        mask[:before] = [False] * before
        return mask


class PendingRun:
    """The rest of a run that a feed has not sent: the matches from ``at`` on that are in the mask."""

    __slots__ = ("_ends", "at", "mask", "run")

    def __init__(self, run: MatchRun, at: int, mask: list[bool] | None) -> None:
        self.run, self.at, self.mask = run, at, mask
        self._ends: list[int] | None = None

    @property
    def ends(self) -> list[int]:
        """Running total of the sizes of the matches in the mask: the others are not fetched."""
        if self.mask is None:
            return self.run.ends
        if self._ends is None:
            ends = self.run.ends
            sizes = (end - before for before, end in zip([0, *ends], ends, strict=False))
            self._ends = list(accumulate(size * wanted for size, wanted in zip(sizes, self.mask, strict=True)))
        return self._ends

    def fit(self, most_bytes: int | None, most: int | None) -> int:
        """Return the end of the rows that fit into so many bytes and matches; None is no bound."""
        end = len(self.run)
        if most_bytes is not None:
            before = self.ends[self.at - 1] if self.at else 0
            end = bisect_right(self.ends, before + most_bytes, self.at)
        if most is None:
            return end
        if self.mask is None:
            return min(end, self.at + most)
        left = most
        for at in range(self.at, end):
            if self.mask[at]:
                if not left:
                    return at
                left -= 1
        return end

    def size(self, begin: int, end: int) -> int:
        """Return the total size of the matches in a range of rows."""
        return self.ends[end - 1] - (self.ends[begin - 1] if begin else 0) if end > begin else 0

    def rows(self, begin: int, end: int) -> range | list[int]:
        """Return the rows of a range that are in the mask."""
        return range(begin, end) if self.mask is None else [at for at in range(begin, end) if self.mask[at]]


BatchKey: TypeAlias = tuple[str, int, int, int, str]
"""Log, epoch, numbers of the first and the last match, and the suffix of its cursors."""

MAX_CACHED_MATCHES = 100_000
"""Matches whose coordinates are cached."""


class BatchCache:
    """The latest runs and batches of all feeds of a process, which many feeds may share."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._size = most_bytes, 0
        self._batches: OrderedDict[BatchKey, Batch] = OrderedDict()
        self._making: dict[BatchKey, asyncio.Event] = {}
        self._runs: OrderedDict[tuple[str, int, int, int], MatchRun] = OrderedDict()
        self._matches = 0

    def run(self, name: str, piece: SegmentEntry) -> MatchRun:
        """Return an entry of a log as a run of matches."""
        key = name, piece.segment.epoch, piece.entry.first, piece.entry.last
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = MatchRun(piece)
            self._matches += len(run)
            while self._matches > MAX_CACHED_MATCHES and len(self._runs) > 1:
                self._matches -= len(self._runs.popitem(last=False)[1])
        return run

    async def all(
        self, keys: Sequence[BatchKey], make: Callable[[Sequence[int]], Awaitable[Sequence[Batch | None]]]
    ) -> list[Batch | None]:
        """Return the batches of keys; ``make`` gets the indices of those that are missing and returns them.

        A batch that cannot be made is None. If several feeds want one batch at the same time, one makes it and the
        others wait.
        """
        while True:
            found = [self._batches.get(key) for key in keys]
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
                if batch is not None and keys[at] not in self._batches:
                    self._batches[keys[at]] = batch
                    self._size += batch.size
        finally:
            for key in mine:
                del self._making[key]
            made.set()
        while self._size > self._most and self._batches:
            self._size -= self._batches.popitem(last=False)[1].size
        return found

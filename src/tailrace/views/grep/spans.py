"""Spans: matches of one stored run, as every feed of the search reads them.

A span is of the log, not of a request: it is made once, and shared by all who come to it. What a request makes of it,
which matches it wants and how far it is, is an ``Ahead``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cached_property
from itertools import accumulate

from tailrace.log.cursor import Position
from tailrace.log.event import Source
from tailrace.log.hub import Piece


class Span:
    """Consecutive matches: their coordinates and times, and what the records' values take up to the end of each.

    Columns are made when they are first asked for: who only counts needs none.
    """

    def __init__(self, piece: Piece) -> None:
        self._run = piece.entry.run
        self.source: Source = self._run.source
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

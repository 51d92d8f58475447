"""What the next frame of a session's feed is made of: entries in a row, joined while a viewer catches up."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias

from tailrace.views.sessions.life import Piece
from tailrace.views.sessions.shown import LineSeries

Span: TypeAlias = tuple[int, int]

JOINED_SAMPLES, JOINED_ENTRIES = 20_000, 64
"""What one frame has at most of several entries; an entry is not divided."""


class Joined:
    """What the next frame is made of."""

    def __init__(self) -> None:
        self.json: str | None = None
        self.range: Span | None = None
        self.series: list[LineSeries] = []
        self.events: list[dict[str, Any]] = []
        self.samples = self.entries = 0
        self.whole: tuple[Piece, Hashable] | None = None
        """If it is what one entry brings, and all of that: the entry, and what was held before it."""

    @property
    def is_full(self) -> bool:
        return self.samples >= JOINED_SAMPLES or self.entries >= JOINED_ENTRIES

    def add(self, series: Sequence[LineSeries]) -> None:
        self.series += series
        self.samples += sum(len(each.times) for each in series)

    def happened(self, events: Iterable[dict[str, Any]], since: int | None, until: int | None) -> None:
        """Add the events between two times."""
        for event in events:
            time = int(event["time"])
            if (since is None or time >= since) and (until is None or time <= until):
                self.events.append(event)


def together(one: Span | None, other: Span | None) -> Span | None:
    """Return the time from the first to the last of both."""
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])

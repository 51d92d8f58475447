"""How far the scan of a stretch of the past is: told at most once a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tailrace.views.grep.model import Stretch

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

"""The job that sweeps a view: drops segments that are older than the retention time, log by log, the oldest first.

Our clock decides which logs are worth a call; the store's function checks again, by the earlier of the two clocks.
Invariant: a segment is dropped only when its bucket and its newest event are older than the retention time of its name;
if the clocks disagree by more than a little, nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import takewhile

import msgspec

from tailrace.config.settings import Settings
from tailrace.config.values import milliseconds
from tailrace.errors import StoreError
from tailrace.log.segment import Log, Segment
from tailrace.log.store import EXPIRE_AT_ONCE, ExpiredCounts, LogRegistry, Staging
from tailrace.upkeep.job import EVERYTHING, LATER, JobLease, Scope, buckets_of
from tailrace.valkey.shards import Shards
from tailrace.view import View

PAGE = 500
"""Logs in one round trip."""
SKEW_MS = 300_000
"""Limit of the difference between the store's clock and ours."""


class SweepRules(msgspec.Struct, frozen=True):
    """Retention time of a view's segments, and how long their former ranges are remembered."""

    keep_of: Callable[[str], timedelta | None]
    remember_ms: int = 30 * 86_400_000

    @classmethod
    def of(cls, settings: Settings, view: View) -> SweepRules:
        return cls(buckets_of(settings, view).keep_of, milliseconds(settings.upkeep.remember))


class Sweeping:
    """One run of the job; ``facts`` has the work so far, also after a failure. Progress is in names."""

    name = "sweep"

    def __init__(self, view: str, rules: SweepRules, scope: Scope = EVERYTHING) -> None:
        self.view, self.whole, self._rules, self._scope = view, scope.whole, rules, scope
        self._dropped = {"segments": 0, "events": 0, "bytes": 0, "ended": 0}
        self._later = 0

    def facts(self) -> dict[str, object]:
        """Return the figures for reports; ``ended`` counts the logs that are gone."""
        return {**self._dropped, "left": {LATER: self._later}} if self._later else {**self._dropped}

    def look(self, shards: Shards) -> dict[str, object]:
        """Count the segments that would be dropped, and change nothing; StoreError if the clocks disagree."""
        now_ms = compare_clocks(shards, self._scope.clock)
        for found in LogRegistry(shards, self.view).walk(self._scope.wanted):
            keep = self._rules.keep_of(found.name)
            gone = over(found.log, now_ms - milliseconds(keep)) if keep is not None else ()
            if gone:
                events, size = sum(s.events for s in gone), sum(s.bytes for s in gone)
                self._add(ExpiredCounts(len(gone), events, size, len(gone) == len(found.log.segments)))
        return self.facts()

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Drop all segments older than their retention time; StoreError, and none dropped, if the clocks disagree."""
        now_ms = compare_clocks(shards, self._scope.clock)
        registry, staging = LogRegistry(shards, self.view), Staging(shards, self.view, lease.token)
        total = registry.count()
        page: list[tuple[str, int]] = []
        for number, found in enumerate(registry.walk(self._scope.wanted), 1):
            keep = self._rules.keep_of(found.name)
            if keep is not None and over(found.log, now_ms - milliseconds(keep), most=1):
                page.append((found.name, milliseconds(keep)))
            if len(page) == PAGE:
                self._expire(staging, page, now_ms)
                page = []
            if number % PAGE == 0:
                lease.check()
                if self._scope.stopped():
                    self._later = max(1, total - number)
                    return
                self._scope.progress(min(number, total), total)
        self._expire(staging, page, now_ms)
        self._scope.progress(total, total)

    def _expire(self, staging: Staging, page: Sequence[tuple[str, int]], now_ms: int) -> None:
        """Drop old segments of some logs; a log with more than one call drops is called again."""
        while page:
            dropped = staging.expire(page, now_ms, self._rules.remember_ms)
            for each in dropped:
                self._add(each)
            both = zip(page, dropped, strict=True)
            page = [asked for asked, each in both if each.segments >= EXPIRE_AT_ONCE and not each.ended]

    def _add(self, dropped: ExpiredCounts) -> None:
        for field, n in msgspec.structs.asdict(dropped).items():
            self._dropped[field] += n


def over(log: Log, since_ms: int, most: int | None = None) -> Sequence[Segment]:
    """Return a log's oldest segments with nothing of this time or later, up to the first that has some."""
    return list(takewhile(lambda s: max(s.end_ms, s.newest_ms) <= since_ms, log.segments[:most]))


def compare_clocks(shards: Shards, clock: Callable[[], int]) -> int:
    """Return the time of our clock; StoreError if one of the store disagrees, since we cannot know which is wrong."""
    answers = shards.run_all([(shard, ("TIME",)) for shard in range(shards.options.shards)])
    now_ms = clock()
    for shard, (seconds, micros) in enumerate(answers):
        apart = (int(seconds) * 1000 + int(micros) // 1000 - now_ms) / 1000
        if abs(apart) * 1000 > SKEW_MS:
            raise StoreError(
                f"the clock of valkey (shard {shard}) is {abs(apart):,.0f} s {'ahead of' if apart > 0 else 'behind'} "
                "ours, so nothing is dropped by age: set both machines' clocks right"
            )
    return now_ms

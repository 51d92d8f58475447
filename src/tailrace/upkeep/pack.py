"""The job that packs a view: finds the segments that are due, and packs them, here or on Spark's executors.

One walk over the registries counts the work, and decides whether it is worth a Spark session; a second one does it, a
batch at a time, so memory does not grow with the view. Invariant: nothing is remembered between runs. A packed segment
is no longer due, so the next run continues one that was killed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import msgspec

from tailrace.config.settings import Settings
from tailrace.log.segment import DAY_MS
from tailrace.log.store import PAGE, LogRegistry, Staging
from tailrace.upkeep.job import EVERYTHING, LATER, JobLease, Scope, Throttle, buckets_of, milliseconds
from tailrace.upkeep.packer import (
    GROUP_BYTES,
    GROUP_SEGMENTS,
    UNLIMITED,
    DueSegment,
    Packer,
    PackOutcome,
    due_segments,
    groups,
)
from tailrace.upkeep.spark import PackPlan, Spread
from tailrace.valkey.shards import Shards
from tailrace.view import View

logger = logging.getLogger(__name__)


BATCH_SEGMENTS = 4_000
BATCH_BYTES = 64 << 20
"""Limits of one Spark job, in segments and stored bytes; a run can be stopped between two jobs."""


class PackRules(msgspec.Struct, frozen=True):
    """When and how a view's segments are packed."""

    after_ms: int
    piece_bytes: int = 256 << 10
    piece_events: int = UNLIMITED
    spark_from: int = 256 << 20
    per_hour: float = 0
    bytes_per_second: float = 0

    @classmethod
    def of(cls, settings: Settings, view: View) -> PackRules:
        """Return the rules that the configuration has for a view."""
        u = settings.upkeep
        after_ms = milliseconds(buckets_of(settings, view).pack_after)
        events = view.piece_events or UNLIMITED
        return cls(after_ms, u.segment_bytes, events, u.spark_from, u.buckets_per_hour, u.bytes_per_second)

    def at_once(self, segments: int, size: int) -> tuple[int, int]:
        """Return the segments and stored bytes to pack at once: at most these, and about one minute of the pace."""
        if self.per_hour:
            segments = max(1, min(segments, int(self.per_hour / 60)))
        if self.bytes_per_second:
            size = min(size, round(60 * self.bytes_per_second))
        return segments, size


class DueTotals(msgspec.Struct, frozen=True):
    """Totals of the segments that are due."""

    segments: int = 0
    days: int = 0
    """UTC days in which they begin."""
    events: int = 0
    bytes: int = 0


class _Stopped(Exception):
    """Ends the run; the rest is for the next one."""


class Packing:
    """One run of the job; ``outcome`` has the work so far, also after a failure.

    Args:
        spread: Spark for large amounts; None = pack all in this process.
        throttle: The pace; runs can share it.
        scope: Its progress is in stored bytes.
    """

    name = "pack"

    def __init__(
        self,
        view: str,
        rules: PackRules,
        scope: Scope = EVERYTHING,
        *,
        spread: Spread | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        self.view, self.whole, self._rules, self._spread = view, scope.whole, rules, spread
        self._scope, self._stopped = scope, scope.stopped
        self._now_ms = scope.clock()
        self._throttle = throttle or Throttle(rules.per_hour, rules.bytes_per_second)
        self.found = DueTotals()
        self.outcome = PackOutcome()
        self._bytes_done = 0

    def facts(self) -> dict[str, object]:
        """Return the figures for reports."""
        o = self.outcome
        return {
            "segments": o.segments,
            "days": self.found.days,
            "events": o.events,
            "bytes_before": o.bytes_before,
            "bytes_after": o.bytes_after,
            "raw_bytes": o.raw_bytes,
            "left": o.left,
        }

    def look(self, shards: Shards) -> dict[str, object]:
        """Count the segments that are due, and change nothing."""
        segments = events = size = 0
        days: set[int] = set()
        for due in self._due(shards):
            segments, events, size = segments + 1, events + due.segment.events, size + due.segment.bytes
            days.add(due.segment.start_ms // DAY_MS)
        self.found = DueTotals(segments, len(days), events, size)
        return {"segments": segments, "days": len(days), "events": events, "bytes_before": size}

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Pack all segments that are due.

        Raises:
            StaleUpkeep: Another process has taken over.
            StoreChanged: The server was restarted.
        """
        try:
            self.look(shards)
            if not self.found.segments:
                return
            spark = self._spread if self._spread is not None and self.found.bytes >= self._rules.spark_from else None
            if spark is not None and spark.start(self._stopped):
                self._pack_there(shards, lease, spark)
            else:
                self._pack_here(shards, lease)
        except _Stopped:
            later = self.found.segments - self.outcome.segments - sum(self.outcome.left.values())
            self.outcome += PackOutcome(left={LATER: max(1, later)})

    def _due(self, shards: Shards) -> Iterator[DueSegment]:
        for number, found in enumerate(LogRegistry(shards, self.view).walk(self._scope.wanted), 1):
            if number % PAGE == 0 and self._stopped():
                raise _Stopped
            yield from due_segments(found.name, found.log, self._rules.after_ms, self._now_ms)

    def _pack_here(self, shards: Shards, lease: JobLease) -> None:
        def check() -> None:
            lease.check()
            if self._stopped():
                raise _Stopped

        packer = Packer(
            LogRegistry(shards, self.view),
            Staging(shards, self.view, lease.token),
            piece_bytes=self._rules.piece_bytes,
            piece_events=self._rules.piece_events,
            after_ms=self._rules.after_ms,
            clock=lambda: self._now_ms,
            throttle=self._throttle,
            check=check,
        )
        for group in groups(self._due(shards), *self._rules.at_once(GROUP_SEGMENTS, GROUP_BYTES)):
            self._add(group, [packer.pack(group)])

    def _pack_there(self, shards: Shards, lease: JobLease, spark: Spread) -> None:
        per_hour, bytes_per_second = self._throttle.share(spark.parts)
        plan = PackPlan(
            store=shards.options,
            run_ids=dict(shards.run_ids),
            token=lease.token,
            view=self.view,
            piece_bytes=self._rules.piece_bytes,
            piece_events=self._rules.piece_events,
            after_ms=self._rules.after_ms,
            now_ms=self._now_ms,
            per_hour=per_hour,
            bytes_per_second=bytes_per_second,
        )
        segments, size = self._rules.at_once(BATCH_SEGMENTS, BATCH_BYTES)
        for batch in groups(self._due(shards), max(segments, spark.parts), size):
            lease.check()
            if self._stopped():
                raise _Stopped
            shares = spark.pack(plan, batch, self._stopped)
            if not shares:
                raise _Stopped
            self._add(batch, [share.outcome for share in shares])
            for share in shares:
                if share.error is not None:
                    raise share.error

    def _add(self, dues: Iterable[DueSegment], outcomes: Iterable[PackOutcome]) -> None:
        self.outcome = sum(outcomes, self.outcome)
        self._bytes_done += sum(due.segment.bytes for due in dues)
        self._scope.progress(min(self._bytes_done, self.found.bytes), self.found.bytes)

"""The job that packs a view: finds the segments that are due, and packs them, here or on Spark's executors.

One walk over the registries counts the work, and decides whether it is worth a Spark session; a second one does it, a
batch at a time, so memory does not grow with the view. Invariant: nothing is remembered between runs. A packed segment
is no longer due, so the next run continues one that was killed.

Each Spark task packs its share with the same packer as the process itself, over connections that its Python worker
keeps from task to task. Invariant: a task that ends in any way, even twice, leaves every log as it was or packed. A
failure comes back as a value, beside the work done before it, so nothing has to be read out of Spark's own messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from tailrace.config.settings import Settings
from tailrace.errors import PipelineError, TailraceError
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
from tailrace.upkeep.spark import LOOK_S, begin_session, end_session, reason_of, step_back, supervise
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.view import View

logger = logging.getLogger(__name__)

EXECUTORS_S = 60.0
"""Limit of the wait for a cluster's first executor."""
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

        packer = _packer(shards, self.view, lease.token, self._rules, self._now_ms, self._throttle, check)
        for group in groups(self._due(shards), *self._rules.at_once(GROUP_SEGMENTS, GROUP_BYTES)):
            self._add(group, [packer.pack(group)])

    def _pack_there(self, shards: Shards, lease: JobLease, spark: Spread) -> None:
        per_hour, bytes_per_second = self._throttle.share(spark.parts)
        rules = msgspec.structs.replace(self._rules, per_hour=per_hour, bytes_per_second=bytes_per_second)
        plan = PackPlan(shards.options, dict(shards.run_ids), lease.token, self.view, rules, self._now_ms)
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


def _packer(
    shards: Shards,
    view: str,
    token: int,
    rules: PackRules,
    now_ms: int,
    throttle: Throttle,
    check: Callable[[], None] = lambda: None,
) -> Packer:
    return Packer(
        LogRegistry(shards, view),
        Staging(shards, view, token),
        piece_bytes=rules.piece_bytes,
        piece_events=rules.piece_events,
        after_ms=rules.after_ms,
        clock=lambda: now_ms,
        throttle=throttle,
        check=check,
    )


class PackPlan(msgspec.Struct, frozen=True):
    """Input of the tasks of one run."""

    store: StoreOptions
    run_ids: dict[str, str]
    token: int
    view: str
    rules: PackRules
    """With the pace of one task."""
    now_ms: int


class Share(msgspec.Struct, frozen=True):
    """The result of one task."""

    outcome: PackOutcome
    error: TailraceError | None = None
    """The error that ended it early."""


class _Worker:
    """The state of a Python worker of Spark's between tasks."""

    current: _Worker | None = None

    def __init__(self, plan: PackPlan) -> None:
        self.plan = plan
        self._shards = Shards(plan.store, dict(plan.run_ids))
        self.throttle = Throttle(plan.rules.per_hour, plan.rules.bytes_per_second)
        self.packer = _packer(self._shards, plan.view, plan.token, plan.rules, plan.now_ms, self.throttle)

    @classmethod
    def of(cls, plan: PackPlan) -> _Worker:
        if cls.current is None or cls.current.plan != plan:
            cls.end()
            step_back()
            cls.current = cls(plan)
        return cls.current

    @classmethod
    def end(cls) -> None:
        if cls.current is not None:
            cls.current._shards.close()
            cls.current = None


def pack_share(plan: PackPlan, dues: Sequence[DueSegment]) -> Share:
    """Pack some segments in a Python worker."""
    outcome = PackOutcome()
    try:
        worker = _Worker.of(plan)
        for group in groups(dues):
            outcome += worker.packer.pack(group)
        # The next share may go to another worker, which does not know this one's debts.
        worker.throttle.wait()
    except TailraceError as error:
        _Worker.end()
        return Share(outcome, error)
    return Share(outcome)


class Spread:
    """A Spark session that starts when work is to be spread, and ends with ``stop`` or at the end of ``with``.

    Belongs to one thread.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._spark: Any = None
        self.parts = 1
        """Number of tasks that work side by side."""

    def __enter__(self) -> Spread:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Start the session; return whether there is one, and log the reason if not."""
        if self._spark is not None:
            return True
        try:
            self._spark = begin_session(self._settings)
            context = self._spark.sparkContext
            if not self._settings.spark.master.startswith("local"):
                self._wait(lambda c: c.parallelize([0], 1).count(), stopped, EXECUTORS_S)
            self.parts = max(1, int(context.defaultParallelism))
        except Exception as error:
            reason = reason_of(error)
            self.stop()
            logger.warning("Spark cannot be used (%s): working in this process instead", reason)
            return False
        return True

    def pack(self, plan: PackPlan, dues: Sequence[DueSegment], stopped: Callable[[], bool]) -> list[Share]:
        """Pack segments on the executors; give up running tasks when ``stopped`` says so.

        Raises:
            PipelineError: Spark itself failed; the work of tasks until then stays.
        """
        shares = divided(dues, self.parts)
        work = partial(pack_share, plan)
        found: list[Share] = self._wait(lambda c: c.parallelize(shares, len(shares)).map(work).collect(), stopped)
        return found

    def stop(self) -> None:
        """End the session, if there is one."""
        spark, self._spark = self._spark, None
        end_session(spark)

    def _wait(self, work: Callable[[Any], Any], stopped: Callable[[], bool], most_s: float = float("inf")) -> Any:
        """Do something with Spark's context; nothing comes back if it was stopped."""
        context, waited = self._spark.sparkContext, 0.0

        def is_over() -> bool:
            nonlocal waited
            waited += LOOK_S
            return stopped() or waited > most_s

        try:
            return supervise(context, partial(work, context), is_over)
        except Exception as error:
            if waited > most_s:
                raise PipelineError(f"no executor came within {most_s:.0f} s: are there free cores?") from None
            if stopped():
                return []
            reason = reason_of(error)
            self.stop()
            raise PipelineError(f"a Spark job of upkeep failed: {reason}") from None


def divided(dues: Sequence[DueSegment], parts: int) -> list[list[DueSegment]]:
    """Divide segments into at most ``parts`` shares of about the same size, each in order."""
    shares: list[tuple[int, list[DueSegment]]] = [(0, []) for _ in range(parts)]
    for group in groups(dues, max(1, min(GROUP_SEGMENTS, len(dues) // parts))):
        least = min(range(parts), key=lambda i: shares[i][0])
        size, share = shares[least]
        shares[least] = size + sum(due.segment.bytes for due in group) + len(group), share + group
    return [share for _, share in shares if share]

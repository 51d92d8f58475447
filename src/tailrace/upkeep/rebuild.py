"""Rebuilds: restores from Kafka the events that a view has lost, while the pipeline and all readers go on.

An audit finds the names with faults; without any, nothing is done. Then one Spark job restores them. Invariant: a
rebuild that dies is begun again from the beginning, and its finished part stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tailrace.config.settings import Settings
from tailrace.errors import StoreError, StreamNotFound
from tailrace.upkeep.audit import Auditor
from tailrace.upkeep.copy import MOVED, REBUILT, Assignment, RebuildPlan, RebuildStart, Restored, WantedNames
from tailrace.upkeep.history import History
from tailrace.upkeep.job import JobLease, milliseconds, now_ms
from tailrace.upkeep.replacement import DIFFERS
from tailrace.upkeep.spark import ATTEMPTS, spark_for
from tailrace.valkey.shards import Shards
from tailrace.view import View

logger = logging.getLogger(__name__)


class Rebuilding:
    """One run of a rebuild; ``facts`` has the work so far, also after a failure.

    Args:
        name: One stream; None = all of them.
        day_ms: Begin of the one UTC day to restore; None = all days.
        source: Only logs with events of this source; its erased events come back.
        spark: A session that has Kafka's connector; one is started, and ended, without it.

    Raises:
        BadRequest: The view has no copy of Kafka's records, or an option makes no sense for it.
    """

    name = "rebuild"
    whole = True
    """Every run leaves its report, also one of a single name."""

    def __init__(
        self,
        settings: Settings,
        view: View,
        *,
        name: str | None = None,
        day_ms: int | None = None,
        source: str | None = None,
        spark: Any = None,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self._copy = view.copy(settings)
        self._copy.require(day=day_ms, source=source)
        self.view = view.name
        self._settings, self._name, self._day_ms = settings, name, day_ms
        self._source, self._spark, self._clock = source, spark, clock
        self._names = 0
        self.restored: dict[str, Restored] = {}
        """The outcome for every log with faults, by name."""

    def facts(self) -> dict[str, object]:
        """Return the figures for reports."""
        outcomes = self.restored.values()
        rebuilt = [each for each in outcomes if each.verdict == REBUILT]
        left: dict[str, int] = {}
        for each in outcomes:
            if each.verdict != REBUILT:
                left[each.verdict] = left.get(each.verdict, 0) + 1
        return {"names": self._names, "rebuilt": len(rebuilt), **self._copy.facts(rebuilt, left)}

    def look(self, shards: Shards) -> dict[str, object]:
        """Return what would be done, and change nothing."""
        self._rebuild(shards, None)
        return self.facts()

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Restore the logs with faults.

        Raises:
            StreamNotFound: Neither the view nor Kafka has the stream.
            StaleUpkeep: Another process has taken over.
            PipelineError: Spark failed; logs that were restored until then stay so.
        """
        self._rebuild(shards, lease)

    def _rebuild(self, shards: Shards, lease: JobLease | None) -> None:
        requested = None if self._name is None else frozenset([self._name])
        if self._source is not None and requested is None:
            requested = self._copy.names_of(shards, self._source)
        with spark_for(self._settings, self._spark) as spark:
            auditor = Auditor(self._settings, spark, self._copy, self._clock, brought_back=self._source)
            suspects, self._names = auditor.suspects(shards, WantedNames(names=requested))
            if self._name is not None and not self._names:
                raise StreamNotFound(self._name)
            if suspects:
                self._restore(spark, shards, frozenset(suspects), lease)
        if lease is not None and self._source is not None:
            lease.check()
            self._copy.bring_back(shards, lease.token, self._source, requested or ())

    def _restore(self, spark: Any, shards: Shards, names: frozenset[str], lease: JobLease | None) -> None:
        """Restore logs; those that changed meanwhile once more."""
        if lease is not None:
            lease.check()
        token = None if lease is None else lease.token
        start = self._copy.begin(shards, token, self._clock())
        history = History(self._settings, spark, self._copy, self._source)
        for _ in range(ATTEMPTS):
            rows, _work = history.run(
                shards,
                WantedNames(names=names),
                lambda work, records: self._copy.rebuild(spark, self._plan(work, start, token), records),
                start.marks,
            )
            self.restored |= {row.name: self._copy.outcome(*row) for row in rows}
            names = frozenset(name for name in names if self.restored[name].verdict == MOVED)
            if not names:
                break
        if wrong := [each.name for each in self.restored.values() if each.verdict == DIFFERS]:
            raise StoreError(f"what was staged for {wrong[0]!r} is not what was written: is the store sound?")

    def _plan(self, work: Assignment, start: RebuildStart, token: int | None) -> RebuildPlan:
        upkeep = self._settings.upkeep
        return RebuildPlan(
            work=work,
            start=start,
            token=token or 0,
            dry_run=token is None,
            now_ms=self._clock(),
            day_ms=self._day_ms,
            piece_bytes=upkeep.segment_bytes,
            remember_ms=milliseconds(upkeep.remember),
        )

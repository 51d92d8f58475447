"""The driver's report: moves the marks of shards that had nothing, keeps the books, and says how far the pipeline is.

Once a second, after completed batches. What it finds is stored for the service to show; the books are checked whenever
nothing is under way: in = stored + skipped + dead letters, per view.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tailrace.driver.hooks import Start, Times, ViewDriver
from tailrace.driver.source import LostRange
from tailrace.driver.watermark import CompletedBatch, Timing
from tailrace.log.event import Partition
from tailrace.valkey.marks import advance, conserved, read_counts, read_times
from tailrace.valkey.shards import mapping

logger = logging.getLogger(__name__)

EXPIRES_S = 10
KEPT_GAPS = 1000
SHOWN_GAPS = 20


class Report:
    """The report of one run of the query, stored once a second."""

    def __init__(
        self,
        start: Start,
        views: Sequence[ViewDriver],
        lost: Sequence[LostRange],
        restarts: int,
        generations: Mapping[str, int],
        timing: Timing,
        failure: str = "",
    ) -> None:
        self._start, self._shards, self._views = start, start.shards, views
        self._restarts, self._generations, self._timing = restarts, generations, timing
        self._failure = failure
        """Why the query was started again, if it was."""
        # The view that knows best how far time has come; of those that know as much, the last.
        self._timed = max(reversed(views), key=lambda view: view.times.value).name
        self._doubted: dict[str, tuple[int, int]] = {}
        self._ends: dict[Partition, int] = {}
        self._told: dict[Partition, int] = {}
        self._record(lost)
        self._gaps = self._recorded()
        self.make(None)

    def make(self, progress: Any) -> None:
        """Take a progress report of Spark's and store ours."""
        batch = CompletedBatch.read(progress, self._generations)
        # The times first: what they hold up to may be completed by what comes next, and not the other way round.
        self._timing.passed(read_times(self._shards, self._timed))
        self._timing.completed(batch)
        self._advance(batch.ends)
        for view in self._views:
            view.tick(self._start, self._timing)
        self._ends.update(batch.ends)
        keys, count = self._shards.keys, self._shards.options.shards
        self._waiting = sum(self._shards.run_all([(s, ("XLEN", keys.outbox(s))) for s in range(count)]))
        lag = sum(max(0, end - batch.ends.get(partition, 0)) for partition, end in batch.latest.items())
        for view in self._views:
            self._store(view, batch.facts, len(batch.latest), lag)

    def _advance(self, ends: Mapping[Partition, int]) -> None:
        """Move the marks of shards that had nothing.

        They go to the end of what is completed, or, where a view keeps times with its marks, to the last offset whose
        time is known.
        """
        moved = {partition: end - 1 for partition, end in ends.items() if self._ends.get(partition) != end and end > 0}
        reached = {s: (t, o) for s, (t, o) in self._timing.reached().items() if self._told.get(s) != o}
        offsets = {partition: offset for partition, (_, offset) in reached.items()}
        times = {partition: time_ms for partition, (time_ms, _) in reached.items()}
        for view in self._views:
            if view.times is Times.MARKS:
                advance(self._shards, view.name, self._start.epoch, offsets, times)
                self._told |= offsets
            else:
                advance(self._shards, view.name, self._start.epoch, moved)

    def _store(self, driver: ViewDriver, facts: Mapping[str, Any], partitions: int, lag: int) -> None:
        view = driver.name
        counts = read_counts(self._shards, view)
        unaccounted = conserved(counts)
        doubt = unaccounted, counts.get("in", 0)
        if unaccounted and not lag and self._doubted.get(view) == doubt:
            # Twice the same with nothing coming in: no batch was at work between the reads of the shards.
            logger.error("view %s: %d record(s) came in and are neither stored, skipped nor dead", view, unaccounted)
        self._doubted[view] = doubt
        reached = self._timing.everywhere()
        status = {
            "view": view,
            "epoch": self._start.epoch,
            "state": "running" if facts else "starting",
            "batch_id": facts.get("batchId", -1),
            "batch_ms": (facts.get("durationMs") or {}).get("triggerExecution", 0),
            "rate": facts.get("processedRowsPerSecond") or 0.0,
            "lag": lag,
            "sources": partitions,
            "in": counts.get("in", 0),
            "stored": counts.get("stored", 0),
            "dead": counts.get("dead", 0),
            "skipped": {f.removeprefix("skipped:"): n for f, n in counts.items() if f.startswith("skipped:")},
            "expired": counts.get("expired", 0),
            "unaccounted": unaccounted,
            "frontier_ms": reached,
            "updated_ms": round(time.time() * 1000),
            "restarts": self._restarts,
            "failure": self._failure,
            "outbox": self._waiting,
            "gaps": self._gaps,
        }
        status |= driver.status(self._start, counts)
        self._shards.run_all(
            [(0, ("SET", self._shards.keys.status(view), msgspec.json.encode(status), "EX", EXPIRES_S))]
        )

    def _record(self, lost: Sequence[LostRange]) -> None:
        key = self._shards.keys.gaps()
        for gap in lost:
            logger.error(
                "%s: offsets %d to %d were dropped by Kafka before they were applied", gap.source, gap.first, gap.until
            )
            facts = ("source", gap.source, "first", gap.first, "until", gap.until)
            self._shards.run_all([(0, ("XADD", key, "MAXLEN", "~", KEPT_GAPS, "*", *facts))])

    def _recorded(self) -> list[LostRange]:
        """Return the latest gaps of all starts, the newest first: a restart does not make one whole."""
        key = self._shards.keys.gaps()
        entries = self._shards.run_all([(0, ("XREVRANGE", key, "+", "-", "COUNT", SHOWN_GAPS))])[0]
        found: list[LostRange] = []
        for _, flat in entries:
            fields = mapping(flat)
            found.append(LostRange(fields[b"source"].decode(), int(fields[b"first"]), int(fields[b"until"])))
        return found

"""The driver's report: moves the marks of shards that had nothing, keeps the books, and says how far the pipeline is.

Once a second, after completed batches. What it finds is stored for the service to show; the books are checked whenever
nothing is under way: in = stored + skipped + dead letters, per view.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from tailrace.model.event import Source
from tailrace.model.frontier import Progress, frontier
from tailrace.pipeline.source import LostRange
from tailrace.stores.marks import advance, conserved, read_counts, read_times
from tailrace.stores.valkey import Shards

logger = logging.getLogger(__name__)

EXPIRES_S = 10
KEPT_GAPS = 1000
SHOWN_GAPS = 20


class Report:
    """What one run of the query has to report."""

    def __init__(
        self,
        shards: Shards,
        views: Sequence[str],
        epoch: int,
        lost: Sequence[LostRange],
        restarts: int,
        generations: Mapping[str, int],
        failure: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._shards, self._views, self._epoch, self._clock = shards, views, epoch, clock
        self._restarts, self._generations = restarts, generations
        self._failure = failure
        """Why the query was started again, if it was."""
        self._doubted: dict[str, tuple[int, int]] = {}
        self._ends: dict[Source, int] = {}
        self._record(lost)
        self._gaps = self._recorded()
        self.make(None)

    def make(self, progress: Any) -> None:
        """Take a progress report of Spark's and store ours."""
        facts = _read(progress)
        ends = self._sources(facts.get("endOffset"))
        moved = {source: end - 1 for source, end in ends.items() if self._ends.get(source) != end and end > 0}
        for view in self._views:
            advance(self._shards, view, self._epoch, moved)
        self._ends.update(ends)
        latest = self._sources(facts.get("latestOffset")) or ends
        keys, count = self._shards.keys, self._shards.options.shards
        self._waiting = sum(self._shards.run_all([(s, ("XLEN", keys.outbox(s))) for s in range(count)]))
        lag = sum(max(0, end - ends.get(source, 0)) for source, end in latest.items())
        for view in self._views:
            self._store(view, facts, ends, latest, lag)

    def _store(
        self, view: str, facts: Mapping[str, Any], ends: Mapping[Source, int], latest: Mapping[Source, int], lag: int
    ) -> None:
        counts = read_counts(self._shards, view)
        unaccounted = conserved(counts)
        doubt = unaccounted, counts.get("in", 0)
        if unaccounted and not lag and self._doubted.get(view) == doubt:
            # Twice the same with nothing coming in: no batch was at work between the reads of the shards.
            logger.error("view %s: %d record(s) came in and are neither stored, skipped nor dead", view, unaccounted)
        self._doubted[view] = doubt
        times = read_times(self._shards, view)
        listed_ms = facts.get("listed_ms", 0)
        # A record from the future moves nobody's clock.
        reached = frontier(
            Progress(ends.get(s, 0) - 1, end, listed_ms, min(times[s], listed_ms) if s in times else None)
            for s, end in latest.items()
        )
        status = {
            "view": view,
            "epoch": self._epoch,
            "state": "running" if facts else "starting",
            "batch_id": facts.get("batchId", -1),
            "batch_ms": (facts.get("durationMs") or {}).get("triggerExecution", 0),
            "rate": facts.get("processedRowsPerSecond") or 0.0,
            "lag": lag,
            "sources": len(latest),
            "in": counts.get("in", 0),
            "stored": counts.get("stored", 0),
            "dead": counts.get("dead", 0),
            "skipped": {f.removeprefix("skipped:"): n for f, n in counts.items() if f.startswith("skipped:")},
            "expired": counts.get("expired", 0),
            "unaccounted": unaccounted,
            "frontier_ms": reached,
            "updated_ms": round(self._clock() * 1000),
            "restarts": self._restarts,
            "failure": self._failure,
            "outbox": self._waiting,
            "gaps": self._gaps,
        }
        self._shards.run_all(
            [(0, ("SET", self._shards.keys.status(view), msgspec.json.encode(status), "EX", EXPIRES_S))]
        )

    def _sources(self, text: Any) -> dict[Source, int]:
        # Spark says null, as text or not, while there is no topic.
        offsets = (json.loads(text) if isinstance(text, str) else text) or {}
        return {
            Source(topic, int(partition), self._generations.get(topic, 0)): int(offset)
            for topic, partitions in offsets.items()
            for partition, offset in partitions.items()
        }

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
            fields = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
            found.append(LostRange(fields[b"source"].decode(), int(fields[b"first"]), int(fields[b"until"])))
        return found


def _read(progress: Any) -> dict[str, Any]:
    """Return Spark's report as plain values, with the time at which it listed the ends of the topics."""
    if progress is None:
        return {}
    facts: dict[str, Any] = progress if isinstance(progress, dict) else json.loads(progress.json)
    source = (facts.get("sources") or [{}])[0]
    stamp = datetime.fromisoformat(facts["timestamp"].replace("Z", "+00:00"))
    listed = {"listed_ms": round(stamp.timestamp() * 1000)}
    return {**facts, **{k: source.get(k) for k in ("endOffset", "latestOffset", "numInputRows")}, **listed}

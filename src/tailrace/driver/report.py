"""The driver's report: keeps the books, and says how far the pipeline is.

Once a second. What it finds is stored for the service to show; the books are checked whenever
nothing is under way: in = stored + skipped + dead letters, per view.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tailrace.driver.crew import Crew, CrewReport
from tailrace.driver.hooks import Start, ViewDriver
from tailrace.driver.start import LostRange
from tailrace.driver.watermark import Timing
from tailrace.errors import BrokerUnavailable
from tailrace.log.event import Partition
from tailrace.valkey.marks import conserved, read_counts, read_times
from tailrace.valkey.shards import mapping

logger = logging.getLogger(__name__)

EXPIRES_S = 10
KEPT_GAPS = 1000
SHOWN_GAPS = 20


class Report:
    """The report of one start, stored once a second."""

    def __init__(
        self,
        start: Start,
        views: Sequence[ViewDriver],
        lost: Sequence[LostRange],
        restarts: int,
        timing: Timing,
        failure: str = "",
    ) -> None:
        self._start, self._shards, self._views = start, start.shards, views
        self._restarts, self._timing = restarts, timing
        self._failure = failure
        """Why there was another start, if there was."""
        # The view that knows best how far time has come; of those that know as much, the last.
        self._timed = max(reversed(views), key=lambda view: view.times.value).name
        self._doubted: dict[str, tuple[int, int]] = {}
        self._ends: dict[Partition, int] = {}
        self.lags: dict[Partition, int] = {}
        """Records of each partition that were still to be applied when the last report was made."""
        self._state = "starting"
        self._made, self._counted = time.monotonic(), CrewReport({})
        self._gaps: list[LostRange] = []
        self.record(lost)
        self._publish(CrewReport({}), 0)

    def make(self, hands: Crew, partitions: int) -> CrewReport:
        """Store what the hands say, and the books, for the service to show; return what the hands say."""
        # The times first: what they hold up to may be completed by what comes next, and not the other way round.
        self._timing.passed(read_times(self._shards, self._timed))
        crew = hands.report()
        self._timing.completed(crew.done)
        try:
            self._ends = self._timing.ask()
        except BrokerUnavailable as error:
            logger.warning("%s", error)  # the hands go on when it is back; time waits for it
        for view in self._views:
            view.tick(self._start, self._timing)
        self.lags = {each: max(0, end - crew.done.get(each, 0)) for each, end in self._ends.items()}
        if crew.is_complete and crew.held >= partitions:  # later, one may be on its way from hand to hand
            self._state = "running"
        self._publish(crew, partitions)
        return crew

    def _publish(self, crew: CrewReport, partitions: int) -> None:
        now, before = time.monotonic(), self._counted
        seconds = max(now - self._made, 1e-3)
        self._made, self._counted = now, crew
        figures = {
            "state": self._state,
            "rate": round((crew.records - before.records) / seconds, 1),
            "busy": round((sum(crew.busy_s.values()) - sum(before.busy_s.values())) / seconds, 3),
            "take_ms": round(crew.take_ms, 1),
            "lag": sum(self.lags.values()),
            "sources": partitions,
        }
        keys, count = self._shards.keys, self._shards.options.shards
        figures["outbox"] = sum(self._shards.run_all([(s, ("XLEN", keys.outbox(s))) for s in range(count)]))
        for view in self._views:
            self._store(view, figures)

    def _store(self, driver: ViewDriver, figures: Mapping[str, Any]) -> None:
        view = driver.name
        counts = read_counts(self._shards, view)
        unaccounted = conserved(counts)
        doubt = unaccounted, counts.get("in", 0)
        if unaccounted and not figures["lag"] and self._doubted.get(view) == doubt:
            # Twice the same with nothing coming in: no hand was at work between the reads of the shards.
            logger.error("view %s: %d record(s) came in and are neither stored, skipped nor dead", view, unaccounted)
        self._doubted[view] = doubt
        reached = self._timing.everywhere()
        status = {
            "view": view,
            "epoch": self._start.epoch,
            **figures,
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
            "gaps": self._gaps,
        }
        status |= driver.status(self._start, counts)
        self._shards.run_all(
            [(0, ("SET", self._shards.keys.status(view), msgspec.json.encode(status), "EX", EXPIRES_S))]
        )

    def record(self, lost: Sequence[LostRange]) -> None:
        """Keep ranges that Kafka dropped before they were applied."""
        key = self._shards.keys.gaps()
        for gap in lost:
            logger.error(
                "%s: offsets %d to %d were dropped by Kafka before they were applied", gap.source, gap.first, gap.until
            )
            facts = ("source", gap.source, "first", gap.first, "until", gap.until)
            self._shards.run_all([(0, ("XADD", key, "MAXLEN", "~", KEPT_GAPS, "*", *facts))])
        self._gaps = self._recorded()

    def _recorded(self) -> list[LostRange]:
        """Return the latest gaps of all starts, the newest first: a restart does not make one whole."""
        key = self._shards.keys.gaps()
        entries = self._shards.run_all([(0, ("XREVRANGE", key, "+", "-", "COUNT", SHOWN_GAPS))])[0]
        found: list[LostRange] = []
        for _, flat in entries:
            fields = mapping(flat)
            found.append(LostRange(fields[b"source"].decode(), int(fields[b"first"]), int(fields[b"until"])))
        return found

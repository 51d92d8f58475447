"""Every metric of Tailrace in one file, so that a dashboard can be written from it: name, labels, what it counts.

The service counts what it does itself. What the pipeline does it learns from the reports that the driver leaves in the
store, and shows them unchanged: a scrape of one service shows the whole installation.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Report = Mapping[str, Any]
"""The last report of a view's driver, as it is stored."""


class Metrics:
    """The metrics of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        given: dict[str, Any] = {"registry": self.registry}
        self.feeds_open = Gauge("tailrace_feeds_open", "Feeds that are open now", **given)
        self.streams_followed = Gauge("tailrace_streams_followed", "Streams that some feed follows now", **given)
        self.frames = Counter("tailrace_feed_frames", "Frames given to clients: events and control frames", **given)
        self.bytes = Counter("tailrace_feed_bytes", "Bytes given to clients of feeds, heartbeats included", **given)
        self.slow_closes = Counter("tailrace_feed_slow_closes", "Feeds closed since the client took no bytes", **given)
        self.put_events = Counter("tailrace_put_events", "Events that Kafka has acknowledged", **given)
        self.put_seconds = Histogram(
            "tailrace_put_seconds", "From the last byte of a request to the acknowledgement of its events", **given
        )
        self.errors = Counter("tailrace_http_errors", "Problems answered, by their code", ["code"], **given)
        self._pipeline = _Pipeline()
        self.registry.register(self._pipeline)
        ProcessCollector(registry=self.registry)

    def text(self, views: Iterable[str], reports: Mapping[str, Report]) -> bytes:
        """Return everything in Prometheus's text format, with these reports of the pipeline."""
        self._pipeline.views, self._pipeline.reports = tuple(views), reports
        return generate_latest(self.registry)


class _Shown(NamedTuple):
    field: str
    name: str
    help: str
    kind: Literal["gauge", "counter"] = "gauge"
    factor: float = 1.0


_UP = "tailrace_pipeline_up", "Whether the view's driver has reported within the last ten seconds"
_SKIPPED = "tailrace_pipeline_records_skipped", "Records that the view has no use for, by reason"
_FRONTIER = (
    "tailrace_pipeline_frontier_lag_seconds",
    "How far the time that all sources have passed is behind the clock",
)
_REPORTED = (
    _Shown("rate", "tailrace_pipeline_records_per_second", "Records applied per second, in the last batch"),
    _Shown("lag", "tailrace_pipeline_lag_records", "Records in Kafka that are not applied yet"),
    _Shown("sources", "tailrace_pipeline_sources", "Partitions that are read"),
    _Shown("batch_ms", "tailrace_pipeline_batch_seconds", "How long the last batch took", factor=0.001),
    _Shown("in", "tailrace_pipeline_records_in", "Records that came in", "counter"),
    _Shown("stored", "tailrace_pipeline_records_stored", "Records stored in the view", "counter"),
    _Shown("dead", "tailrace_pipeline_records_dead", "Poison records, sent to the dead letters", "counter"),
    _Shown("unaccounted", "tailrace_pipeline_records_unaccounted", "In - stored - skipped - dead; 0 when at rest"),
    _Shown("restarts", "tailrace_pipeline_restarts", "How often the query was started again", "counter"),
)


class _Pipeline(Collector):
    """What the drivers have reported. A view without a report is only shown as not up."""

    def __init__(self) -> None:
        self.views: tuple[str, ...] = ()
        self.reports: Mapping[str, Report] = {}

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(*_UP, labels=["view"])
        for view in self.views:
            up.add_metric([view], float(view in self.reports))
        yield up
        for shown in _REPORTED:
            family = (CounterMetricFamily if shown.kind == "counter" else GaugeMetricFamily)(
                shown.name, shown.help, labels=["view"]
            )
            for view, report in self.reports.items():
                if isinstance(value := report.get(shown.field), int | float):
                    family.add_metric([view], value * shown.factor)
            yield family
        skipped = CounterMetricFamily(*_SKIPPED, labels=["view", "reason"])
        frontier = GaugeMetricFamily(*_FRONTIER, labels=["view"])
        for view, report in self.reports.items():
            for reason, count in (report.get("skipped") or {}).items():
                skipped.add_metric([view, reason], count)
            if isinstance(reached := report.get("frontier_ms"), int | float):
                frontier.add_metric([view], max(0.0, time.time() - reached / 1000))
        yield skipped
        yield frontier

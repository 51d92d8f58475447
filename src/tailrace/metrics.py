"""Every metric of Tailrace in one file, with name, labels and help, so that a dashboard can be written from it.

The service counts its own work. For the pipeline and upkeep it shows the reports and counters that they leave in the
store, unchanged: a scrape of one service shows the whole installation.
"""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.api.answers import FoldRule, SearchFigures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Report = Mapping[str, Any]
"""Last report of a view's driver, or of an upkeep job, as stored."""
Kind = Literal["gauge", "counter"]


class Metrics:
    """The metrics of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self.feeds_open = Gauge("tailrace_feeds_open", "Feeds that are open now", **own)
        self.streams_followed = Gauge("tailrace_streams_followed", "Streams that some feed follows now", **own)
        self.frames = Counter("tailrace_feed_frames", "Frames given to clients: events and control frames", **own)
        self.bytes = Counter("tailrace_feed_bytes", "Bytes given to clients of feeds, heartbeats included", **own)
        self.slow_closes = Counter("tailrace_feed_slow_closes", "Feeds closed since the client took no bytes", **own)
        self.viewers_open = Gauge("tailrace_viewers_open", "WebSockets of sessions that are open now", **own)
        self.viewer_bytes = Counter("tailrace_viewer_bytes", "Bytes given to viewers of sessions", **own)
        self.viewer_drops = Counter(
            "tailrace_viewer_dropped_bursts", "Messages left out for viewers that were too far behind", **own
        )
        self.viewer_slow_closes = Counter(
            "tailrace_viewer_slow_closes", "Viewers closed since they took no bytes, or were too far behind", **own
        )
        self.bursts_unread = Counter(
            "tailrace_session_bursts_unread", "Messages of sessions, per viewer, that could not be read", **own
        )
        self.put_events = Counter("tailrace_put_events", "Events that Kafka has acknowledged", **own)
        self.put_seconds = Histogram(
            "tailrace_put_seconds", "From the last byte of a request to the acknowledgement of its events", **own
        )
        self.errors = Counter("tailrace_http_errors", "Problems answered, by their code", ["code"], **own)
        self._pipeline, self._upkeep = _Pipeline(), _Upkeep()
        self.registry.register(self._pipeline)
        self.registry.register(self._upkeep)

    def register(self, collectors: Iterable[Collector]) -> None:
        """Add the metrics of the views, and then those of the process."""
        for collector in collectors:
            self.registry.register(collector)
        ProcessCollector(registry=self.registry)

    def text(self, views: Iterable[str], reports: Mapping[str, Report], runs: Sequence[JobRun] = ()) -> bytes:
        """Return all metrics in Prometheus's text format, with these reports of the pipeline and of upkeep."""
        self._pipeline.views, self._pipeline.reports = tuple(views), reports
        self._upkeep.runs = runs
        return generate_latest(self.registry)


class FigureCollector(Collector, ABC):
    """Metrics whose figures are read from the store before each scrape; None if the store does not answer."""

    figures: Any = None


class _Field(NamedTuple):
    field: str
    name: str
    help: str
    kind: Kind = "gauge"
    factor: float = 1.0


_REPORTED = (
    _Field("rate", "tailrace_pipeline_records_per_second", "Records applied per second"),
    _Field("lag", "tailrace_pipeline_lag_records", "Records in Kafka that are not applied yet"),
    _Field("sources", "tailrace_pipeline_sources", "Partitions that are read"),
    _Field("take_ms", "tailrace_pipeline_take_seconds", "99th percentile of the latest takes of a hand", factor=0.001),
    _Field("busy", "tailrace_pipeline_busy_hands", "Hands that were at work, on average over the last second"),
    _Field("in", "tailrace_pipeline_records_in", "Records that came in", "counter"),
    _Field("stored", "tailrace_pipeline_records_stored", "Records stored in the view", "counter"),
    _Field("dead", "tailrace_pipeline_records_dead", "Poison records, sent to the dead letters", "counter"),
    _Field("expired", "tailrace_expired_events", "Events dropped because their retention was over", "counter"),
    _Field("unaccounted", "tailrace_pipeline_records_unaccounted", "In - stored - skipped - dead; 0 when at rest"),
    _Field("restarts", "tailrace_pipeline_restarts", "How often the pipeline began again at the marks", "counter"),
)


def _family(
    kind: Kind, name: str, about: str, labels: list[str], samples: Iterable[tuple[list[str], float | None]]
) -> Metric:
    """Return a metric with those samples, each by the values of its labels, that are not None."""
    family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, about, labels=labels)
    for values, sample in samples:
        if sample is not None:
            family.add_metric(values, sample)
    return family


def _behind(time_ms: float) -> float:
    return max(0.0, time.time() - time_ms / 1000)


class _Pipeline(Collector):
    """The reports of the drivers. A view without a report is only shown as not up."""

    def __init__(self) -> None:
        self.views: tuple[str, ...] = ()
        self.reports: Mapping[str, Report] = {}

    def collect(self) -> Iterator[Metric]:
        about = "Whether the view's driver has reported within the last ten seconds"
        up = [([view], float(view in self.reports)) for view in self.views]
        yield _family("gauge", "tailrace_pipeline_up", about, ["view"], up)
        for field, name, about, kind, factor in _REPORTED:
            found = [([view], value * factor) for view, value in self._numbers(field)]
            yield _family(kind, name, about, ["view"], found)
        about = "Records that the view has no use for, by reason"
        skipped = [
            ([view, reason], count)
            for view, report in self.reports.items()
            for reason, count in (report.get("skipped") or {}).items()
        ]
        yield _family("counter", "tailrace_pipeline_records_skipped", about, ["view", "reason"], skipped)
        about = "How far the watermark, the time that all partitions have passed, is behind the clock"
        lags = [([view], _behind(reached)) for view, reached in self._numbers("frontier_ms")]
        yield _family("gauge", "tailrace_pipeline_frontier_lag_seconds", about, ["view"], lags)

    def _numbers(self, field: str) -> Iterator[tuple[str, float]]:
        for view, report in self.reports.items():
            if isinstance(value := report.get(field), int | float):
                yield view, value


class JobRun(NamedTuple):
    """The last run of an upkeep job over a view."""

    job: str
    view: str
    report: Report
    succeeded_ms: int | None
    """End of the last run that did not fail."""
    effective: Report | None
    """Report of the last run that changed something."""


def _age(run: JobRun) -> float | None:
    return None if run.succeeded_ms is None else _behind(run.succeeded_ms)


def _took(run: JobRun) -> float | None:
    started, ended = run.report.get("started_ms"), run.report.get("ended_ms")
    return (ended - started) / 1000 if started and ended else None


def _ratio(run: JobRun) -> float | None:
    report = run.effective or {}
    raw, stored = report.get("raw_bytes"), report.get("bytes_after")
    return raw / stored if raw and stored else None


def _findings(run: JobRun) -> float | None:
    findings = run.report.get("findings")
    return findings if findings is None or isinstance(findings, int | float) else float(len(findings))


class _JobGauge(NamedTuple):
    name: str
    help: str
    value: Callable[[JobRun], float | None]
    job: str = ""
    """The only job that has the metric; then its only label is the view."""


_OF_RUNS = (
    _JobGauge(
        "tailrace_upkeep_last_success_timestamp_seconds",
        "When the job's last run that did not fail ended; missing while none is known",
        lambda run: None if run.succeeded_ms is None else run.succeeded_ms / 1000,
    ),
    _JobGauge("tailrace_upkeep_last_duration_seconds", "How long the job's last run took", _took),
    _JobGauge("tailrace_upkeep_failed", "1 if the job's last run failed", lambda run: bool(run.report.get("error"))),
    _JobGauge("tailrace_pack_age_seconds", "How long ago a pack last ended without a failure", _age, "pack"),
    _JobGauge("tailrace_pack_ratio", "Raw bytes per stored byte, in the last pack that packed any", _ratio, "pack"),
    _JobGauge(
        "tailrace_pack_saved_bytes",
        "Stored bytes that the last pack made free",
        lambda run: run.report.get("bytes_before", 0) - run.report.get("bytes_after", 0),
        "pack",
    ),
    _JobGauge("tailrace_pack_segments", "Segments in the last pack", lambda run: run.report.get("segments", 0), "pack"),
    _JobGauge("tailrace_audit_findings", "Findings of the last audit", _findings, "audit"),
)


class _Upkeep(Collector):
    """The reports of the upkeep jobs. A job without a report is not shown."""

    def __init__(self) -> None:
        self.runs: Sequence[JobRun] = ()

    def collect(self) -> Iterator[Metric]:
        for name, about, value_of, job in _OF_RUNS:
            found = [([run.job, run.view], value_of(run)) for run in self.runs if job in ("", run.job)]
            if job:
                found = [([view], value) for (_, view), value in found]
            yield _family("gauge", name, about, ["view"] if job else ["job", "view"], found)
        about = "Segments that the last pack left as they were, by reason"
        packs = [run for run in self.runs if run.job == "pack"]
        left = [
            ([run.view, reason], count) for run in packs for reason, count in (run.report.get("left") or {}).items()
        ]
        yield _family("gauge", "tailrace_pack_left", about, ["view", "reason"], left)


_OF_FOLDS: tuple[tuple[str, str, Kind, Callable[[FoldRule], float | None]], ...] = (
    ("tailrace_fold_inputs", "Events that the rule has folded", "counter", lambda f: f.input),
    ("tailrace_fold_new", "Events whose group had no open fold", "counter", lambda f: f.new),
    (
        "tailrace_fold_premature",
        "Folds that would have been one with the fold before, had the quiet period been twice as long",
        "counter",
        lambda f: f.premature,
    ),
    ("tailrace_fold_pending", "Groups with open folds", "gauge", lambda f: f.pending),
    ("tailrace_fold_ratio", "1 - emitted folds per event; missing before the first one", "gauge", lambda f: f.ratio),
    (
        "tailrace_fold_frontier_lag_seconds",
        "How far the watermark of the rule's folds is behind the clock; only while it has open folds",
        "gauge",
        lambda f: _behind(f.frontier_ms) if f.pending and f.frontier_ms is not None else None,
    ),
)


class FoldMetrics(FigureCollector):
    """Metrics of fold rules."""

    figures: Sequence[FoldRule] | None

    def collect(self) -> Iterator[Metric]:
        rules = self.figures or ()
        for name, about, kind, value_of in _OF_FOLDS:
            yield _family(kind, name, about, ["rule"], [([rule.name], value_of(rule)) for rule in rules])
        emitted = [([rule.name, reason], count) for rule in rules for reason, count in rule.reasons.items()]
        yield _family("counter", "tailrace_fold_emitted", "Emitted folds, by reason", ["rule", "reason"], emitted)


_OF_SEARCHES = {
    "alive": ("tailrace_searches", "Searches that the pipeline matches against every record"),
    "followers": ("tailrace_search_followers", "Connections that follow a search, of all service processes"),
    "scanning": ("tailrace_search_scans", "Stretches of the past that are still to be scanned"),
    "processes": ("tailrace_service_processes", "Service processes with a recent heartbeat"),
}


class SearchMetrics(FigureCollector):
    """Metrics of searches."""

    figures: SearchFigures | None

    def collect(self) -> Iterator[Metric]:
        for field, (name, about) in _OF_SEARCHES.items():
            yield _family("gauge", name, about, [], [([], getattr(self.figures, field, None))])


class ReaderFigures(NamedTuple):
    """Lag of a named reader of tags."""

    reader: str
    tags: str
    lag_s: float


class ReaderMetrics(FigureCollector):
    """Metrics of named readers of tags."""

    figures: Sequence[ReaderFigures] | None

    def collect(self) -> Iterator[Metric]:
        about = "Age of the last event that a named reader of tags has read; 0 if nothing follows it"
        found = [([each.reader, each.tags], each.lag_s) for each in self.figures or ()]
        yield _family("gauge", "tailrace_tag_reader_lag_seconds", about, ["reader", "tags"], found)

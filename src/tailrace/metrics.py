"""Every metric of Tailrace in one file, so that a dashboard can be written from it: name, labels, what it counts.

The service counts what it does itself. What the pipeline and upkeep do it learns from the reports and counters that
they leave in the store, and shows them unchanged: a scrape of one service shows the whole installation.
"""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Report = Mapping[str, Any]
"""The last report of a view's driver, or of an upkeep job, as it is stored."""


class JobRun(NamedTuple):
    """The last run of an upkeep job over a view, and what is known of those before it."""

    job: str
    view: str
    report: Report
    succeeded_ms: int | None
    """When the last run that did not fail ended."""
    effective: Report | None
    """What the last run counted that changed something."""


class FoldFigures(NamedTuple):
    """What the store says of one rule of folds."""

    rule: str
    input: int
    new: int
    premature: int
    pending: int
    reasons: Mapping[str, int]
    """Folds given out, by reason."""
    ratio: float | None
    frontier_ms: int | None


class SearchFigures(NamedTuple):
    """What there is of searches."""

    alive: int = 0
    followers: int = 0
    scanning: int = 0
    processes: int = 0


class ReaderFigures(NamedTuple):
    """How far a named reader of tags is behind."""

    reader: str
    tags: str
    lag_s: float


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
        self.viewers_open = Gauge("tailrace_viewers_open", "WebSockets of sessions that are open now", **given)
        self.viewer_bytes = Counter("tailrace_viewer_bytes", "Bytes given to viewers of sessions", **given)
        self.viewer_drops = Counter(
            "tailrace_viewer_dropped_bursts", "Messages left out for viewers that were too far behind", **given
        )
        self.viewer_slow_closes = Counter(
            "tailrace_viewer_slow_closes", "Viewers closed since they took no bytes, or were too far behind", **given
        )
        self.bursts_unread = Counter(
            "tailrace_session_bursts_unread", "Messages of sessions, per viewer, that could not be read", **given
        )
        self.put_events = Counter("tailrace_put_events", "Events that Kafka has acknowledged", **given)
        self.put_seconds = Histogram(
            "tailrace_put_seconds", "From the last byte of a request to the acknowledgement of its events", **given
        )
        self.errors = Counter("tailrace_http_errors", "Problems answered, by their code", ["code"], **given)
        self._pipeline, self._upkeep = _Pipeline(), _Upkeep()
        self.registry.register(self._pipeline)
        self.registry.register(self._upkeep)

    def register(self, collectors: Iterable[Collector]) -> None:
        """Show the metrics of the views, and then those of the process."""
        for collector in collectors:
            self.registry.register(collector)
        ProcessCollector(registry=self.registry)

    def text(self, views: Iterable[str], reports: Mapping[str, Report], runs: Sequence[JobRun] = ()) -> bytes:
        """Return everything in Prometheus's text format, with these reports of the other parts."""
        self._pipeline.views, self._pipeline.reports = tuple(views), reports
        self._upkeep.runs = runs
        return generate_latest(self.registry)


class Figures(Collector, ABC):
    """Metrics whose figures are read from the store before each scrape."""

    figures: Any = None
    """None while they are not known."""


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
    _Shown("expired", "tailrace_expired_events", "Events that were dropped with days kept long enough", "counter"),
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


def _age(run: JobRun) -> float | None:
    return None if run.succeeded_ms is None else max(0.0, time.time() - run.succeeded_ms / 1000)


def _took(run: JobRun) -> float | None:
    started, ended = run.report.get("started_ms"), run.report.get("ended_ms")
    return (ended - started) / 1000 if started and ended else None


def _ratio(run: JobRun) -> float | None:
    packed = run.effective or {}
    return (
        packed["raw_bytes"] / packed["bytes_after"] if packed.get("raw_bytes") and packed.get("bytes_after") else None
    )


def _findings(run: JobRun) -> float | None:
    found = run.report.get("findings")
    return found if found is None or isinstance(found, int | float) else float(len(found))


class _Drawn(NamedTuple):
    name: str
    help: str
    value: Callable[[JobRun], float | None]
    job: str = ""
    """The only job that has it; its label is then the view alone."""


_OF_RUNS = (
    _Drawn(
        "tailrace_upkeep_last_success_timestamp_seconds",
        "When the job's last run that did not fail ended; missing while none is known",
        lambda run: None if run.succeeded_ms is None else run.succeeded_ms / 1000,
    ),
    _Drawn("tailrace_upkeep_last_duration_seconds", "How long the job's last run took", _took),
    _Drawn("tailrace_upkeep_failed", "Whether the job's last run failed", lambda run: bool(run.report.get("error"))),
    _Drawn("tailrace_pack_age_seconds", "How long ago a pack last ended without a failure", _age, "pack"),
    _Drawn("tailrace_pack_ratio", "Raw bytes per stored byte, in the last pack that packed something", _ratio, "pack"),
    _Drawn(
        "tailrace_pack_saved_bytes",
        "Stored bytes that the last pack made free",
        lambda run: run.report.get("bytes_before", 0) - run.report.get("bytes_after", 0),
        "pack",
    ),
    _Drawn(
        "tailrace_pack_segments",
        "Segments that the last pack packed",
        lambda run: run.report.get("segments", 0),
        "pack",
    ),
    _Drawn("tailrace_audit_findings", "What the last audit found to be wrong", _findings, "audit"),
)
_LEFT = "tailrace_pack_left", "Segments that the last pack left as they were, by reason"


class _Upkeep(Collector):
    """What the jobs of upkeep have reported. A job without a report is not shown."""

    def __init__(self) -> None:
        self.runs: Sequence[JobRun] = ()

    def collect(self) -> Iterator[Metric]:
        for drawn in _OF_RUNS:
            family = GaugeMetricFamily(drawn.name, drawn.help, labels=["view"] if drawn.job else ["job", "view"])
            for run in self.runs:
                if drawn.job in ("", run.job) and (value := drawn.value(run)) is not None:
                    family.add_metric([run.view] if drawn.job else [run.job, run.view], value)
            yield family
        left = GaugeMetricFamily(*_LEFT, labels=["view", "reason"])
        for run in self.runs:
            for reason, count in (run.report.get("left") or {}).items() if run.job == "pack" else ():
                left.add_metric([run.view, reason], count)
        yield left


_OF_FOLDS: tuple[tuple[str, str, Literal["gauge", "counter"], Callable[[FoldFigures], float | None]], ...] = (
    ("tailrace_fold_inputs", "Events that the rule has folded", "counter", lambda f: f.input),
    ("tailrace_fold_new", "Events whose group held nothing when they came", "counter", lambda f: f.new),
    (
        "tailrace_fold_premature",
        "Folds that would have been one with the fold before, had the quiet period been twice as long",
        "counter",
        lambda f: f.premature,
    ),
    ("tailrace_fold_pending", "Groups that hold folds", "gauge", lambda f: f.pending),
    ("tailrace_fold_ratio", "1 - folds given out per event; missing before the first one", "gauge", lambda f: f.ratio),
    (
        "tailrace_fold_frontier_lag_seconds",
        "How far the time at which the rule's folds were last settled is behind the clock; only while it holds some",
        "gauge",
        lambda f: max(0.0, time.time() - f.frontier_ms / 1000) if f.pending and f.frontier_ms is not None else None,
    ),
)
_EMITTED = "tailrace_fold_emitted", "Folds given out, by reason"


class FoldMetrics(Figures):
    """What the rules of folds have done, and what they hold."""

    figures: Sequence[FoldFigures] | None

    def collect(self) -> Iterator[Metric]:
        for name, about, kind, value_of in _OF_FOLDS:
            family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, about, labels=["rule"])
            for figures in self.figures or ():
                if (value := value_of(figures)) is not None:
                    family.add_metric([figures.rule], value)
            yield family
        emitted = CounterMetricFamily(*_EMITTED, labels=["rule", "reason"])
        for figures in self.figures or ():
            for reason, count in figures.reasons.items():
                emitted.add_metric([figures.rule, reason], count)
        yield emitted


_OF_SEARCHES = {
    "alive": ("tailrace_searches", "Searches that the pipeline asks of every record"),
    "followers": ("tailrace_search_followers", "Connections that follow a search, of all service processes"),
    "scanning": ("tailrace_search_scans", "Stretches of the past that are still to be scanned"),
    "processes": ("tailrace_service_processes", "Service processes that have said lately that they are alive"),
}


class SearchMetrics(Figures):
    """What there is of searches; nothing is shown while it is not known."""

    figures: SearchFigures | None

    def collect(self) -> Iterator[Metric]:
        for field, (name, about) in _OF_SEARCHES.items():
            family = GaugeMetricFamily(name, about)
            if self.figures is not None:
                family.add_metric([], getattr(self.figures, field))
            yield family


_READER_LAG = (
    "tailrace_tag_reader_lag_seconds",
    "How old the last event of a named reader of tags is; 0 when there is nothing behind it",
)


class ReaderMetrics(Figures):
    """How far readers of tags that have a name are behind."""

    figures: Sequence[ReaderFigures] | None

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(*_READER_LAG, labels=["reader", "tags"])
        for figures in self.figures or ():
            family.add_metric([figures.reader, figures.tags], figures.lag_s)
        yield family

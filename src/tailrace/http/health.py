"""Health: which parts answer, and the last reports of the pipeline and of the upkeep jobs.

Every question has a time limit, and answers are shared for a moment, so asking often costs little. Drivers and jobs
leave their reports in the store, and the service only reads them. Readiness does not depend on upkeep: without it
everything is served, and takes more memory.
"""

from __future__ import annotations

import asyncio
import time
from collections import ChainMap
from collections.abc import Awaitable, Mapping
from datetime import timedelta
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec

from tailrace.api.answers import JobStatus, PartStatus, Readiness, Status
from tailrace.errors import TailraceError
from tailrace.http.service import Service, now_ms
from tailrace.log.event import iso_time
from tailrace.metrics import JobRun
from tailrace.valkey.shards import mapping

LATE = 2
"""Intervals without a run that make a job overdue."""

_HEAD = frozenset({"job", "view", "started_ms", "ended_ms", "error", "succeeded_ms", "effective"})
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class UpkeepReports:
    """Reads the reports that upkeep jobs leave."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def jobs(self) -> list[JobStatus]:
        """Return every job that has run or that should run, by view and name."""
        runs = {(run.job, run.view): run.report for run in await self.runs()}
        schedule = self._schedule()
        return [
            self._job(job, view, runs.get((job, view), {}), schedule.get((job, view)))
            for job, view in sorted(schedule.keys() | runs.keys(), key=lambda key: key[::-1])
        ]

    async def runs(self) -> list[JobRun]:
        """Return the last run of every job that has left a report that can be read."""
        nodes = self._service.nodes
        answer = await nodes.read(0, "HGETALL", nodes.keys.upkeep())
        pairs = mapping(answer).items()
        return [run for field, stored in sorted(pairs) if (run := _run(field, stored))]

    def _schedule(self) -> dict[tuple[str, str], timedelta]:
        """Return how often each job runs over each view."""
        upkeep, views = self._service.settings.upkeep, self._service.log_views
        found = {("pack", view): upkeep.pack_every for view in views}
        found |= {("sweep", view): upkeep.sweep_every for view in views}
        found |= {("audit", view): upkeep.audit_every for view in self._service.audited_views}
        for view, part in self._service.parts.items():
            found |= {(job, view): every for job, every in part.intervals().items()}
        return {key: every for key, every in found.items() if every is not None}

    def _job(self, job: str, view: str, report: Mapping[str, Any], every: timedelta | None) -> JobStatus:
        started, ended = report.get("started_ms"), report.get("ended_ms")
        since = ended or started or round(self._service.started * 1000)
        return JobStatus(
            job=job,
            view=view,
            started=iso_time(started) if started else None,
            ended=iso_time(ended) if ended else None,
            seconds=(ended - started) / 1000 if started and ended else None,
            error=report.get("error") or None,
            overdue=every is not None and now_ms() - since > LATE * every.total_seconds() * 1000,
            figures={name: value for name, value in report.items() if name not in _HEAD},
        )


def _run(field: bytes, stored: bytes) -> JobRun | None:
    job, _, view = field.decode().partition(":")
    try:
        report = _decode(stored)
    except msgspec.DecodeError:
        return None
    return JobRun(job, view, report, report.get("succeeded_ms"), report.get("effective"))


VERSION = version("tailrace")
LIMIT_S = 3.0
SHARED_S = 0.5
STALE_MS = 10_000
INTAKE = "intake"
"""The view that every pipeline has."""

T = TypeVar("T")


class Health:
    """Asks the parts how they are."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._upkeep = UpkeepReports(service)
        self._shared: tuple[float, asyncio.Task[tuple[list[PartStatus], dict[str, dict[str, Any]]]]] | None = None

    async def readiness(self) -> Readiness:
        """Return whether Valkey, Kafka and the pipeline of every configured view are there."""
        parts, _ = await self._inspect()
        return Readiness(ready=all(part.state == "up" for part in parts), parts=parts)

    async def status(self) -> Status:
        """Return the status of the whole installation."""
        service = self._service
        (parts, reports), jobs, *members = await asyncio.gather(
            self._inspect(),
            _or_nothing(self._upkeep.jobs(), list[JobStatus]()),
            *(_or_nothing(part.status(), dict[str, Any]()) for part in service.parts.values()),
        )
        facts: dict[str, Any] = {
            "version": VERSION,
            "uptime_s": round(time.time() - service.started),
            "connections": service.connections,
            "max_connections": service.settings.serve.connections,
            "views": list(service.settings.pipeline.views),
        }
        for part in service.parts.values():
            facts |= part.facts()
        return Status(service=facts, parts=parts, views=reports, upkeep=jobs, **dict(ChainMap(*members)))

    async def metrics(self) -> bytes:
        """Return all metrics."""
        shown = [part for part in self._service.parts.values() if part.collector is not None]
        reports, runs, *figures = await asyncio.gather(
            _or_nothing(self._reports(), dict[str, dict[str, Any]]()),
            _or_nothing(self._upkeep.runs(), list[JobRun]()),
            *(_or_nothing(part.figures(), None) for part in shown),
        )
        for part, values in zip(shown, figures, strict=True):
            assert part.collector is not None
            part.collector.figures = values
        return self._service.metrics.text(self._views, reports, runs)

    @property
    def _wanted(self) -> tuple[str, ...]:
        """The views that a pipeline has to write."""
        return self._service.views

    @property
    def _views(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((INTAKE, *self._wanted)))

    async def _inspect(self) -> tuple[list[PartStatus], dict[str, dict[str, Any]]]:
        if self._shared is None or time.monotonic() - self._shared[0] > SHARED_S:
            self._shared = time.monotonic(), asyncio.create_task(self._ask())
        return await asyncio.shield(self._shared[1])

    async def _ask(self) -> tuple[list[PartStatus], dict[str, dict[str, Any]]]:
        reports: dict[str, dict[str, Any]] = {}
        kafka, valkey = await asyncio.gather(
            _part("kafka", self._kafka()),
            _part("valkey", self._valkey(reports)),
        )
        return [kafka, valkey, self._pipeline(reports, valkey)], reports

    async def _kafka(self) -> str:
        return f"{await self._service.topics.ping()} broker(s)"

    async def _valkey(self, reports: dict[str, dict[str, Any]]) -> str:
        nodes = self._service.nodes
        reports.update(await self._reports())
        await nodes.read_all([(shard, ("PING",)) for shard in range(nodes.options.shards)])
        return f"{nodes.options.shards} shard(s)"

    async def _reports(self) -> dict[str, dict[str, Any]]:
        """Return the reports that are no older than they may be."""
        nodes = self._service.nodes
        answers = await nodes.read_all([(0, ("GET", nodes.keys.status(view))) for view in self._views])
        found = {view: _decode(answer) for view, answer in zip(self._views, answers, strict=True) if answer}
        oldest = now_ms() - STALE_MS
        return {view: report for view, report in found.items() if report.get("updated_ms", 0) >= oldest}

    def _pipeline(self, reports: dict[str, dict[str, Any]], valkey: PartStatus) -> PartStatus:
        wanted = self._wanted
        silent = [view for view in wanted if view not in reports]
        starting = [view for view in wanted if view in reports and reports[view].get("state") != "running"]
        if not silent and not starting:
            return PartStatus(name="pipeline", state="up", detail=f"{', '.join(wanted)} reported")
        if not silent:
            why = reports[starting[0]].get("failure") or "its query has not reported yet"
            return PartStatus(name="pipeline", state="down", detail=f"{', '.join(starting)} starting: {why}")
        if valkey.state == "down":
            return PartStatus(name="pipeline", state="down", detail="unknown while valkey does not answer")
        detail = f"no report of {', '.join(silent)} in the last {STALE_MS // 1000} s: is `tailrace run` running?"
        return PartStatus(name="pipeline", state="down", detail=detail)


async def _part(name: str, question: Awaitable[str]) -> PartStatus:
    try:
        return PartStatus(name=name, state="up", detail=await asyncio.wait_for(question, LIMIT_S))
    except TimeoutError:
        return PartStatus(name=name, state="down", detail=f"no answer within {LIMIT_S:g} s")
    except TailraceError as error:
        return PartStatus(name=name, state="down", detail=str(error))


async def _or_nothing(question: Awaitable[T], nothing: T) -> T:
    try:
        return await asyncio.wait_for(question, LIMIT_S)
    except (TailraceError, TimeoutError):
        return nothing

"""Upkeep as the service sees it: the report that each job left of its last run, and whether the next one is overdue.

The jobs write their reports into the store, and the service only reads them. Nothing here is a part of readiness.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
from pydantic import BaseModel, Field

from tailrace.http.service import Service, now_ms
from tailrace.log.event import iso_time
from tailrace.metrics import Run
from tailrace.valkey.shards import mapping

PERIODIC = ("pack", "sweep", "audit")
"""The jobs that run by themselves, each every so often."""
SESSIONS = {"trim": "trim_every", "abandon": "trim_every", "forget": "forget_every"}
"""Those of telemetry sessions, and which setting says how often."""
LATE = 2
"""Intervals without a run after which a job is overdue."""

_HEAD = frozenset({"job", "view", "started_ms", "ended_ms", "error", "succeeded_ms", "effective"})
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Job(BaseModel):
    """The last run of an upkeep job over a view."""

    job: str = Field(examples=["pack"])
    view: str = Field(examples=["days"])
    started: str | None = Field(description="When the last run began; null when none has left a report.")
    ended: str | None
    seconds: float | None = Field(description="How long it took.")
    error: str | None = Field(description="Why it failed; null when it did not.")
    overdue: bool = Field(description="Whether twice its interval has passed since.")
    figures: dict[str, Any] = Field(description="What it counted.")


class Upkeep:
    """Reads the reports."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def jobs(self) -> list[Job]:
        """Return every job that has run or that should run, by view and name."""
        runs = {(run.job, run.view): run.report for run in await self.runs()}
        jobs = (*PERIODIC, *SESSIONS)
        wanted = {(job, view) for job in jobs for view in self._views(job) if self._every(job) is not None}
        return [
            self._job(job, view, runs.get((job, view), {}))
            for job, view in sorted(wanted | runs.keys(), key=lambda key: key[::-1])
        ]

    async def runs(self) -> list[Run]:
        """Return the last run of every job that has left a report that can be read."""
        nodes = self._service.nodes
        answer = await nodes.read(0, "HGETALL", nodes.keys.upkeep())
        pairs = mapping(answer).items()
        return [run for field, stored in sorted(pairs) if (run := _run(field, stored))]

    def _views(self, job: str) -> tuple[str, ...]:
        settings = self._service.settings
        if job in SESSIONS:
            return ("sessions",) if settings.sessions.is_used else ()
        return settings.audited_views if job == "audit" else settings.log_views

    def _every(self, job: str) -> timedelta | None:
        settings, found = self._service.settings, None
        if job in SESSIONS:
            found = getattr(settings.sessions, SESSIONS[job])
        elif job in PERIODIC:
            found = getattr(settings.upkeep, f"{job}_every")
        return found

    def _job(self, job: str, view: str, report: Mapping[str, Any]) -> Job:
        started, ended = report.get("started_ms"), report.get("ended_ms")
        every = self._every(job) if view in self._views(job) else None
        since = ended or started or round(self._service.started * 1000)
        return Job(
            job=job,
            view=view,
            started=iso_time(started) if started else None,
            ended=iso_time(ended) if ended else None,
            seconds=(ended - started) / 1000 if started and ended else None,
            error=report.get("error") or None,
            overdue=every is not None and now_ms() - since > LATE * every.total_seconds() * 1000,
            figures={name: value for name, value in report.items() if name not in _HEAD},
        )


def _run(field: bytes, stored: bytes) -> Run | None:
    job, _, view = field.decode().partition(":")
    try:
        report = _decode(stored)
    except msgspec.DecodeError:
        return None
    return Run(job, view, report, report.get("succeeded_ms"), report.get("effective"))

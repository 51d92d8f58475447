"""Health: which parts answer, and what the pipeline and upkeep last reported of themselves.

Every question has a time limit, and the answers are shared for a moment: asking often costs little. Being ready does
not depend on upkeep: without it everything is served, and takes more memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from importlib.metadata import version
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, Field

from tailrace.errors import TailraceError
from tailrace.http.service import Service, now_ms
from tailrace.http.upkeep import Job, Upkeep
from tailrace.metrics import FoldFigures, ReaderFigures, Run
from tailrace.views.folds.routes import figures
from tailrace.views.tags.readers import reader_figures

VERSION = version("tailrace")
LIMIT_S = 3.0
SHARED_S = 0.5
STALE_MS = 10_000
INTAKE = "intake"
"""The view that every pipeline has: it owns what all views share."""

T = TypeVar("T")

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Part(BaseModel):
    """One part of the installation, as seen from this service."""

    name: str = Field(examples=["kafka"])
    state: Literal["up", "down"]
    detail: str


class Readiness(BaseModel):
    """Whether everything answers."""

    ready: bool
    parts: list[Part]


class Folding(BaseModel):
    """A rule of folds at a glance."""

    rule: str
    pending: int = Field(description="Groups that hold folds.")
    ratio: float | None = Field(description="1 - emitted / input; null before the first event.")


class Searching(BaseModel):
    """Searches at a glance."""

    alive: int = Field(description="Searches that the pipeline asks of every record.")
    followers: int = Field(description="Connections that follow one.")
    scanning: int = Field(description="Stretches of the past that are still to be scanned.")
    processes: int = Field(description="Service processes that are alive.")


class Status(BaseModel):
    """The whole installation at a glance."""

    service: dict[str, Any]
    parts: list[Part]
    views: dict[str, dict[str, Any]] = Field(description="The last report of each view's driver.")
    upkeep: list[Job] = Field(description="The last run of each upkeep job; empty while valkey does not answer.")
    folds: list[Folding] = Field(description="The rules of folds; empty while valkey does not answer.")
    searches: Searching | None = Field(description="Searches; null while valkey does not answer.")


class Health:
    """Asks the parts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._upkeep = Upkeep(service)
        self._searches = service.searches
        self._asked: tuple[float, asyncio.Task[tuple[list[Part], dict[str, dict[str, Any]]]]] | None = None

    async def readiness(self) -> Readiness:
        """Return whether Valkey, Kafka and the pipeline of every configured view are there."""
        parts, _ = await self._look()
        return Readiness(ready=all(part.state == "up" for part in parts), parts=parts)

    async def status(self) -> Status:
        """Return everything that is known."""
        service = self._service
        (parts, reports), jobs, folds, searches = await asyncio.gather(
            self._look(),
            _or_nothing(self._upkeep.jobs(), list[Job]()),
            _or_nothing(figures(service), list[FoldFigures]()),
            _or_nothing(self._searches.figures(), None),
        )
        facts = {
            "version": VERSION,
            "uptime_s": round(time.time() - service.started),
            "connections": service.connections,
            "max_connections": service.settings.serve.connections,
            "streams_followed": service.hub.followed if service.hub else 0,
            "views": list(service.settings.pipeline.views),
        }
        rules = [Folding(rule=each.rule, pending=each.pending, ratio=each.ratio) for each in folds]
        searching = None if searches is None else Searching(**searches._asdict())
        return Status(service=facts, parts=parts, views=reports, upkeep=jobs, folds=rules, searches=searching)

    async def metrics(self) -> bytes:
        """Return all metrics."""
        reports, runs, folds, searches, readers = await asyncio.gather(
            _or_nothing(self._reports(), dict[str, dict[str, Any]]()),
            _or_nothing(self._upkeep.runs(), list[Run]()),
            _or_nothing(figures(self._service), list[FoldFigures]()),
            _or_nothing(self._searches.figures(), None),
            _or_nothing(reader_figures(self._service), list[ReaderFigures]()),
        )
        metrics, hub = self._service.metrics, self._service.hub
        metrics.streams_followed.set(hub.followed if hub else 0)
        return metrics.text(self._views, reports, runs, folds, searches, readers)

    @property
    def _wanted(self) -> tuple[str, ...]:
        """The views that somebody has to write."""
        return self._service.settings.live_views

    @property
    def _views(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((INTAKE, *self._wanted)))

    async def _look(self) -> tuple[list[Part], dict[str, dict[str, Any]]]:
        if self._asked is None or time.monotonic() - self._asked[0] > SHARED_S:
            self._asked = time.monotonic(), asyncio.create_task(self._ask())
        return await asyncio.shield(self._asked[1])

    async def _ask(self) -> tuple[list[Part], dict[str, dict[str, Any]]]:
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

    def _pipeline(self, reports: dict[str, dict[str, Any]], valkey: Part) -> Part:
        wanted = self._wanted
        silent = [view for view in wanted if view not in reports]
        starting = [view for view in wanted if view in reports and reports[view].get("state") != "running"]
        if not silent and not starting:
            return Part(name="pipeline", state="up", detail=f"{', '.join(wanted)} reported")
        if not silent:
            why = reports[starting[0]].get("failure") or "its query has not reported yet"
            return Part(name="pipeline", state="down", detail=f"{', '.join(starting)} starting: {why}")
        if valkey.state == "down":
            return Part(name="pipeline", state="down", detail="unknown while valkey does not answer")
        detail = f"no report of {', '.join(silent)} in the last {STALE_MS // 1000} s: is `tailrace run` running?"
        return Part(name="pipeline", state="down", detail=detail)


async def _part(name: str, question: Awaitable[str]) -> Part:
    try:
        return Part(name=name, state="up", detail=await asyncio.wait_for(question, LIMIT_S))
    except TimeoutError:
        return Part(name=name, state="down", detail=f"no answer within {LIMIT_S:g} s")
    except TailraceError as error:
        return Part(name=name, state="down", detail=str(error))


async def _or_nothing(question: Awaitable[T], nothing: T) -> T:
    try:
        return await asyncio.wait_for(question, LIMIT_S)
    except (TailraceError, TimeoutError):
        return nothing

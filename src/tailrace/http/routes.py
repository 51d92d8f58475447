"""The URLs that belong to no view: put events, status, health, metrics.

A put writes all of its events or none. Its body is lines of JSON, or one array; the first byte tells which. A value
goes to Kafka as it was written, digit for digit and key for key. Invariant: an event that is accepted here is never
poison to the pipeline.

Health says which parts answer, and reads the reports that the pipeline and the upkeep jobs leave in the store. Every
question has a time limit, and answers are shared for a moment, so asking often costs little. Readiness does not depend
on upkeep: without it everything is served, and takes more memory.
"""

from __future__ import annotations

import asyncio
import time
from collections import ChainMap
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from html import escape
from importlib.metadata import version
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from tailrace.api.answers import JobStatus, PartStatus, PutResult, Readiness, Status
from tailrace.api.requests import Parameters, PutEvent
from tailrace.errors import BadRequest, EventRefused, TailraceError
from tailrace.http.openapi import Responses, answer, body, schema, text
from tailrace.http.routing import Here, Routes, Topic, body_of
from tailrace.http.service import Service, now_ms
from tailrace.kafka.produce import TURN_EVENTS, NewEvent
from tailrace.log.event import iso_time, parse_time, poison
from tailrace.metrics import CONTENT_TYPE, JobRun
from tailrace.valkey.shards import mapping

VERSION = version("tailrace")
LIMIT_S = 3.0
SHARED_S = 0.5
STALE_MS = 10_000
INTAKE = "intake"
"""The view that every pipeline has."""
LATE = 2
"""Intervals without a run that make a job overdue."""
_HEAD = frozenset({"job", "view", "started_ms", "ended_ms", "error", "succeeded_ms", "effective"})
_decode_report = msgspec.json.Decoder(dict[str, Any]).decode
MAX_COMPLAINTS = 5
_POISON = {
    "oversize": "is larger than pipeline.max_event_bytes",
    "too-deep": "nests deeper than pipeline.max_depth",
    "invalid-utf8": "is not UTF-8",
}
_decode_event = msgspec.json.Decoder(PutEvent).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
# Numbers inside a key keep their digits, too: two spellings of a number are two keys.
_decode_key = msgspec.json.Decoder(list, float_hook=Decimal).decode
_encode_key = msgspec.json.Encoder(decimal_format="number").encode

T = TypeVar("T")


async def read_events(service: Service, body: bytes) -> list[NewEvent]:
    """Read the events of a body. One bad event refuses all of them; the error says which lines, and why."""
    pipeline = service.settings.pipeline
    events: list[NewEvent] = []
    complaints: list[str] = []
    bad = 0
    for number, (place, line) in enumerate(_texts(body)):
        if number % TURN_EVENTS == TURN_EVENTS - 1:
            await asyncio.sleep(0)
        try:
            events.append(read_event(line, pipeline.max_event_bytes, pipeline.max_depth))
        except EventRefused as error:
            bad += 1
            if bad <= MAX_COMPLAINTS:
                complaints.append(f"{place}: {error}")
    if bad:
        more = f"; and {bad - MAX_COMPLAINTS} more" if bad > MAX_COMPLAINTS else ""
        raise EventRefused(f"nothing was written. {'; '.join(complaints)}{more}")
    return events


def _texts(body: bytes) -> Iterator[tuple[str, bytes]]:
    if body.lstrip()[:1] == b"[":
        try:
            elements = _decode_array(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise EventRefused(f"nothing was written. The body is no JSON array: {error}") from None
        for number, element in enumerate(elements, 1):
            yield f"event {number}", bytes(element)
        return
    for number, line in enumerate(body.split(b"\n"), 1):
        if line and not line.isspace():
            yield f"line {number}", line


def read_event(text: bytes, max_bytes: int, max_depth: int) -> NewEvent:
    """Read one event, or raise EventRefused with the reason."""
    try:
        event = _decode_event(text)
        key = None if isinstance(event.key, msgspec.UnsetType) else _key(bytes(event.key).strip())
    except msgspec.ValidationError as error:
        raise EventRefused(str(error).replace("`", "'")) from None
    except msgspec.DecodeError as error:
        raise EventRefused(f"it is no JSON object on one line ({error})") from None
    except RecursionError:
        raise EventRefused(f"it {_POISON['too-deep']}") from None
    except UnicodeError:
        raise EventRefused("it is not UTF-8") from None
    value = bytes(event.value).strip()
    if reason := poison(value, max_bytes, max_depth):
        raise EventRefused(f"its value {_POISON.get(reason, 'is ' + reason)}")
    headers = [(name, None if v is None else v.encode()) for name, v in (event.headers or {}).items()]
    return NewEvent(value, key, headers or None, _time_ms(event.time))


def _key(text: bytes) -> bytes | None:
    if text == b"null":
        return None
    if text[:1] == b'"':
        return _decode_text(text).encode()
    if text[:1] == b"[":
        return _encode_key(_decode_key(text))
    raise EventRefused("its key is a list, a string or null")


def _time_ms(given: int | str | None) -> int | None:
    if given is None:
        return None
    time_ms = _moment(given) if isinstance(given, str) else given
    if not 0 < time_ms < 2**53:
        raise EventRefused(f"its time {given} is out of range: after 1970, in milliseconds if it is a number")
    return time_ms


def _moment(text: str) -> int:
    with suppress(BadRequest):
        if text[:1].isdigit():  # an age, which feeds take, depends on when it is read
            return parse_time(text, 0)
    raise EventRefused(f"its time {text[:80]!r} is no time: write 2026-11-15T08:00:00Z, or milliseconds since 1970")


class Health:
    """Asks the parts how they are, and reads the reports of drivers and upkeep jobs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._views = tuple(dict.fromkeys((INTAKE, *service.views)))
        self._shared: tuple[float, asyncio.Task[tuple[list[PartStatus], dict[str, dict[str, Any]]]]] | None = None

    async def readiness(self) -> Readiness:
        """Return whether Valkey, Kafka and the pipeline of every configured view are there."""
        parts, _ = await self._inspect()
        return Readiness(ready=all(part.state == "up" for part in parts), parts=parts)

    async def status(self) -> Status:
        service = self._service
        (parts, reports), jobs, *members = await asyncio.gather(
            self._inspect(),
            _or_nothing(self._jobs(), list[JobStatus]()),
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
        shown = [part for part in self._service.parts.values() if part.collector is not None]
        reports, runs, *figures = await asyncio.gather(
            _or_nothing(self._reports(), dict[str, dict[str, Any]]()),
            _or_nothing(self._runs(), list[JobRun]()),
            *(_or_nothing(part.figures(), None) for part in shown),
        )
        for part, values in zip(shown, figures, strict=True):
            assert part.collector is not None
            part.collector.figures = values
        return self._service.metrics.text(self._views, reports, runs)

    async def _inspect(self) -> tuple[list[PartStatus], dict[str, dict[str, Any]]]:
        if self._shared is None or time.monotonic() - self._shared[0] > SHARED_S:
            self._shared = time.monotonic(), asyncio.create_task(self._ask())
        return await asyncio.shield(self._shared[1])

    async def _ask(self) -> tuple[list[PartStatus], dict[str, dict[str, Any]]]:
        reports: dict[str, dict[str, Any]] = {}
        kafka, valkey = await asyncio.gather(_part("kafka", self._kafka()), _part("valkey", self._valkey(reports)))
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
        found = {view: _decode_report(answer) for view, answer in zip(self._views, answers, strict=True) if answer}
        oldest = now_ms() - STALE_MS
        return {view: report for view, report in found.items() if report.get("updated_ms", 0) >= oldest}

    def _pipeline(self, reports: dict[str, dict[str, Any]], valkey: PartStatus) -> PartStatus:
        wanted = self._service.views
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

    async def _jobs(self) -> list[JobStatus]:
        """Return every job that has run or that should run, by view and name."""
        runs = {(run.job, run.view): run.report for run in await self._runs()}
        schedule = self._schedule()
        return [
            self._job(job, view, runs.get((job, view), {}), schedule.get((job, view)))
            for job, view in sorted(schedule.keys() | runs.keys(), key=lambda key: key[::-1])
        ]

    async def _runs(self) -> list[JobRun]:
        """Return the last run of every job that has left a report that can be read."""
        nodes = self._service.nodes
        answer = await nodes.read(0, "HGETALL", nodes.keys.upkeep())
        pairs = mapping(answer).items()
        return [run for field, stored in sorted(pairs) if (run := _run(field, stored))]

    def _schedule(self) -> dict[tuple[str, str], timedelta]:
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
        report = _decode_report(stored)
    except msgspec.DecodeError:
        return None
    return JobRun(job, view, report, report.get("succeeded_ms"), report.get("effective"))


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


topics = Routes("topics")
operations = Routes("operations", guarded=False)
ROUTERS = (topics.router, operations.router)

PUT_BODY = body(
    {
        "application/x-ndjson": {
            "schema": schema(PutEvent),
            "example": '{"key":["nightly","backup"],"value":{"state":"started"}}\n',
        },
        "application/json": {"schema": {"type": "array", "items": schema(PutEvent)}},
    },
    "Events as lines of JSON, or one JSON array. One bad event refuses the whole request.",
)
ICON = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#14507a"/>'
    b'<path d="M2 6q3-3 6 0t6 0M2 11q3-3 6 0t6 0" fill="none" stroke="#fff" stroke-width="1.6"/></svg>'
)
READY: Responses = answer(Readiness)
READY[503] = {**READY[200], "description": "A part does not answer."}


async def _health(request: Request) -> Health:
    found: Health = request.app.state.health
    return found


Asked = Annotated[Health, Depends(_health)]


@topics.post("/v1/topics/{topic}", 400, 404, 413, 422, 503, body=PUT_BODY)
async def put_events(request: Request, service: Here, topic: Topic, parameters: Parameters) -> PutResult:
    """Write events to a topic; answers when the broker has acknowledged all of them.

    A new topic is created with LogAppendTime, or with CreateTime when events carry a `time`.
    """
    async with body_of(service, request) as content:
        began = time.perf_counter()
        written = await service.topics.put(topic, await read_events(service, content))
    service.metrics.put_events.inc(len(written))
    service.metrics.put_seconds.observe(time.perf_counter() - began)
    return PutResult(written)


@operations.get("/v1/status", 503)
async def status(health: Asked) -> Status:
    """Return rates, lag, take time and health of every part."""
    return await health.status()


@operations.get("/healthz", response_class=PlainTextResponse)
async def alive() -> Response:
    """Say that the process is alive."""
    return PlainTextResponse("ok\n")


@operations.get("/readyz", responses=READY)
async def ready(health: Asked) -> Response:
    """Say whether Valkey, Kafka and the pipeline answer, and which of them does not."""
    found = await health.readiness()
    status, headers = 200 if found.ready else 503, {"Cache-Control": "no-store"}
    return Response(msgspec.json.encode(found), status, headers, "application/json")


@operations.get("/metrics", responses=text("text/plain"), response_class=PlainTextResponse)
async def metrics(health: Asked) -> Response:
    """Return all metrics in Prometheus's text format."""
    return Response(await health.metrics(), headers={"Content-Type": CONTENT_TYPE})


@operations.get("/favicon.ico", responses=text("image/svg+xml"))
async def favicon() -> Response:
    """Show the icon of the pages."""
    return Response(ICON, media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"})


@operations.get("/", response_class=JSONResponse)
async def root(request: Request) -> Response:
    """List what is served."""
    listed = request.app.state.listed | {"GET /openapi.json": "This API."}
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"service": "tailrace", "routes": listed})
    rows = "".join(f"<tr><td><code>{escape(url)}</code><td>{escape(summary)}" for url, summary in listed.items())
    return HTMLResponse(
        f"<!doctype html><meta charset=utf-8><title>Tailrace</title><h1>Tailrace</h1><table>{rows}</table>"
    )

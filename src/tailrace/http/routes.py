"""URLs that belong to no view: writing to topics, health, metrics, and the list of all URLs."""

from __future__ import annotations

import time
from html import escape
from typing import Annotated

import msgspec
from fastapi import Depends, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from tailrace.api.answers import PutResult, Readiness, Status
from tailrace.api.requests import Parameters, PutEvent
from tailrace.http.health import Health
from tailrace.http.openapi import Responses, answer, body, schema, text
from tailrace.http.puts import body_of, read_events
from tailrace.http.request import Here, Topic
from tailrace.http.routing import Routes
from tailrace.metrics import CONTENT_TYPE

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
    """Return rates, lag, batch time and health of every part."""
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

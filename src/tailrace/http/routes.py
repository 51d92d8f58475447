"""URLs that belong to no view: writing to topics, health, metrics, and the list of all URLs."""

from __future__ import annotations

import time
from html import escape
from typing import Annotated

import msgspec
from fastapi import Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel

from tailrace.http.health import Readiness, Status
from tailrace.http.openapi import PUT_BODY
from tailrace.http.puts import body_of, read_events
from tailrace.http.request import Asked, Here, NoQuery, Topic
from tailrace.http.routing import Routes
from tailrace.metrics import CONTENT_TYPE

topics = Routes("topics")
operations = Routes("operations", guarded=False)
ROUTERS = (topics.router, operations.router)

_encode = msgspec.json.Encoder().encode


class Written(BaseModel):
    """Where an event was written."""

    id: str
    topic: str
    partition: int
    offset: int


class Put(BaseModel):
    """The events of a put, in the order of the request."""

    events: list[Written]


@topics.post("/v1/topics/{topic}", 400, 404, 413, 422, 503, responses={200: {"model": Put}}, openapi_extra=PUT_BODY)
async def put_events(request: Request, service: Here, topic: Topic, query: Annotated[NoQuery, Query()]) -> Response:
    """Write events to a topic; answers when the broker has acknowledged all of them.

    A new topic is created with LogAppendTime, or with CreateTime when events carry a `time`.
    """
    async with body_of(service, request) as body:
        began = time.perf_counter()
        written = await service.topics.put(topic, await read_events(service, body))
    service.metrics.put_events.inc(len(written))
    service.metrics.put_seconds.observe(time.perf_counter() - began)
    return Response(_encode({"events": written}), media_type="application/json")


@operations.get("/v1/status", 503)
async def status(health: Asked) -> Status:
    """Return rates, lag, batch time and health of every part."""
    return await health.status()


@operations.get("/healthz", response_class=PlainTextResponse)
async def alive() -> Response:
    """Say that the process is alive."""
    return PlainTextResponse("ok\n")


@operations.get(
    "/readyz",
    responses={200: {"model": Readiness}, 503: {"model": Readiness, "description": "A part does not answer."}},
)
async def ready(health: Asked) -> Response:
    """Say whether Valkey, Kafka and the pipeline answer, and which of them does not."""
    found = await health.readiness()
    return JSONResponse(found.model_dump(), 200 if found.ready else 503, {"Cache-Control": "no-store"})


@operations.get(
    "/metrics",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    response_class=PlainTextResponse,
)
async def metrics(health: Asked) -> Response:
    """Return all metrics in Prometheus's text format."""
    return Response(await health.metrics(), headers={"Content-Type": CONTENT_TYPE})


@operations.get("/")
async def root(request: Request) -> Response:
    """List what is served."""
    listed = request.app.state.listed | {"GET /openapi.json": "This API."}
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"service": "tailrace", "routes": listed})
    rows = "".join(f"<tr><td><code>{escape(url)}</code><td>{escape(summary)}" for url, summary in listed.items())
    return HTMLResponse(
        f"<!doctype html><meta charset=utf-8><title>Tailrace</title><h1>Tailrace</h1><table>{rows}</table>"
    )

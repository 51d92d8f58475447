"""The application: settings and views in, a service on a port out; and the URLs that belong to no view."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from html import escape
from typing import Annotated
from urllib.parse import quote
from uuid import uuid4

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.api.answers import PutResult, Readiness, Status
from tailrace.api.requests import Parameters, PutEvent
from tailrace.config.settings import Settings
from tailrace.http.health import VERSION, Health
from tailrace.http.openapi import ABOUT, Responses, answer, body, describe, schema, text
from tailrace.http.problems import Problems, problem_of
from tailrace.http.puts import read_events
from tailrace.http.routing import Here, Routes, Topic, body_of
from tailrace.http.server import Server, listen, raise_file_limit
from tailrace.http.service import Service
from tailrace.metrics import CONTENT_TYPE
from tailrace.view import View

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


logger = logging.getLogger(__name__)

_ID = re.compile(rb"[!-~]{1,128}")
_ANSWERS = ("http.response.start", "websocket.http.response.start", "websocket.accept")


class Edge:
    """The outermost layer of the application: every request passes it.

    Routes are matched on the path as it was sent, and each part is decoded once after the match: an escaped slash
    inside a name never divides it. So every name has one address, and no address means two names. Every answer has a
    request id. An unexpected error becomes a problem without details; its log line has the same id. A WebSocket that
    is not accepted is answered like any other request.
    """

    def __init__(self, app: ASGIApp, problems: Problems) -> None:
        self._app = app
        self._problems = problems

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        raw = scope.get("raw_path")
        scope["path"] = raw.decode("ascii") if raw else quote(scope["path"])
        request_id = next((v for k, v in scope["headers"] if k == b"x-request-id" and _ID.fullmatch(v)), b"")
        request_id = request_id or uuid4().hex.encode()
        started = False

        async def sender(message: Message) -> None:
            nonlocal started
            if message["type"] in _ANSWERS:
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            elif message["type"] == "websocket.close" and not started:  # the router found no route
                refusal = self._problems.unrouted(HTTPConnection(scope), HTTPException(404))
                await refusal(scope, receive, sender)
                return
            await send(message)

        try:
            await self._app(scope, receive, sender)
        except Exception as error:
            logger.exception("request %s: %s %s", request_id.decode(), scope.get("method", "GET"), scope["path"])
            if started:
                raise  # the server closes the connection, so the client sees that the answer is cut
            await self._problems.answer(problem_of(error))(scope, receive, sender)


SPARE_FILES = 256
"""Open files besides one for each connection: sockets to Valkey and Kafka, libraries, logs."""


def create_app(settings: Settings, views: Sequence[View]) -> FastAPI:
    """Return the application. Its lifespan opens the service and closes it; ``app.state.service`` is the service."""
    service = Service(settings, views)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="Tailrace",
        version=VERSION,
        description=ABOUT,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.health = Health(service)
    problems = Problems(service.metrics, settings.serve.retry.total_seconds())
    problems.install(app)
    routers = [router for view in views if (router := view.routes()) is not None]
    routers += ROUTERS
    for router in routers:
        app.include_router(router)
    app.state.listed = {
        f"{method} {route.path}": route.summary
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods or ()
    }
    describe(app)
    app.add_middleware(Edge, problems=problems)
    return app


def main(settings: Settings, views: Sequence[View]) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code."""
    raise_file_limit(settings.serve.connections + SPARE_FILES)
    listener = listen(settings.serve.host, settings.serve.port)
    app = create_app(settings, views)
    ping_s = settings.sessions.ping.total_seconds()
    server = Server(app, app.state.service.drain, settings.serve.client_bytes, ping_s)
    host, port = listener.getsockname()[:2]
    logger.info("serving on http://%s:%d", host, port)
    try:
        server.run(sockets=[listener])
    except SystemExit as ended:  # uvicorn could not start the application
        return int(ended.code or 1)
    return 0

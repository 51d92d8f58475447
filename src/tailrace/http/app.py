"""The application: settings and views in, a service on a port out; and the URLs that belong to no view.

The server is uvicorn, with a farewell to open feeds and a limit on what waits for a client that does not read. On
SIGTERM or Ctrl-C open feeds are told to connect again, WebSockets by their close code; requests under way get their
answers, and the process ends with code 0 within ``DRAIN_S`` and a little.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from html import escape
from typing import Annotated, Any

import msgspec
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from tailrace.api.answers import PutResult, Readiness, Status
from tailrace.api.requests import Parameters, PutEvent
from tailrace.config.settings import Settings
from tailrace.errors import PrerequisiteMissing
from tailrace.http.health import VERSION, Health
from tailrace.http.openapi import ABOUT, Responses, answer, body, describe, schema, text
from tailrace.http.problems import Edge, Problems
from tailrace.http.puts import read_events
from tailrace.http.routing import Here, Routes, Topic, body_of
from tailrace.http.service import Service
from tailrace.http.sse import ABORT
from tailrace.metrics import CONTENT_TYPE
from tailrace.view import View

logger = logging.getLogger(__name__)

DRAIN_S = 4
BACKLOG = 2048
FRAME_BYTES = 256 << 10
"""Largest message of a client of a WebSocket: a subscription to tens of thousands of channels fits."""
FAREWELL_S = 2.0
"""Seconds that a client has to read the close frame."""
PING_S = 20.0
"""Seconds between pings on WebSockets where no view says how many."""
SPARE_FILES = 256
"""Open files besides one for each connection: sockets to Valkey and Kafka, libraries, logs."""

_quiet = logging.getLogger(f"{__name__}.websockets")
_quiet.setLevel(logging.WARNING)  # no line for each connection, as for requests

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


def create_app(settings: Settings, views: Sequence[View]) -> FastAPI:
    """Return the application. Its lifespan opens the service and closes it; ``app.state.service`` is the service."""
    service = Service(settings, views)

    @contextlib.asynccontextmanager
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


class Protocol(HttpToolsProtocol):
    """Gives each request a function that drops its connection; a close would wait for the client to read."""

    buffer_bytes = HIGH_WATER_LIMIT
    """Unsent bytes that make a send wait."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self.buffer_bytes)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][ABORT] = self.transport.abort


class SocketProtocol(WebSocketsSansIOProtocol):
    """The same for WebSockets; a WebSocket that is closed goes, even if the client does not read."""

    buffer_bytes = HIGH_WATER_LIMIT

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.logger = _quiet
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=self.buffer_bytes)

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            self.scope["state"][ABORT] = self.transport.abort

    async def send(self, message: Any) -> None:
        await self.writable.wait()
        if self.close_sent:
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True  # a refusal is an answer; uvicorn would log an error for each
        if message["type"] == "websocket.close":
            self.loop.call_later(self.close_timeout + FAREWELL_S, self.transport.abort)

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.loop.call_later(FAREWELL_S, self.transport.abort)


class Server(uvicorn.Server):
    """A server that drains before it closes, and ends with code 0 on a signal."""

    def __init__(self, app: FastAPI) -> None:
        self._service: Service = app.state.service
        client_bytes = self._service.settings.serve.client_bytes
        pings = [part.ping.total_seconds() for part in self._service.parts.values() if part.ping is not None]
        ping_s = min(pings, default=PING_S)
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=type("BoundedProtocol", (Protocol,), {"buffer_bytes": client_bytes}),
                ws=type("BoundedSocket", (SocketProtocol,), {"buffer_bytes": client_bytes}),
                ws_max_size=FRAME_BYTES,
                ws_ping_interval=ping_s,
                ws_ping_timeout=ping_s,
                ws_per_message_deflate=False,
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=DRAIN_S,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            self._captured_signals.clear()  # uvicorn would raise the signal again


def listen(host: str, port: int) -> socket.socket:
    """Bind the address, before anything else is started."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise PrerequisiteMissing(
            f"cannot listen on {host}:{port} ({error.strerror or error}): "
            "stop what uses it, or choose another serve.host or serve.port"
        ) from None
    listener.setblocking(False)
    return listener


def raise_file_limit(wanted: int) -> None:
    """Raise the limit of open files to ``wanted``, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    goal = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < goal:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))


def main(settings: Settings, views: Sequence[View]) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code."""
    raise_file_limit(settings.serve.connections + SPARE_FILES)
    listener = listen(settings.serve.host, settings.serve.port)
    server = Server(create_app(settings, views))
    host, port = listener.getsockname()[:2]
    logger.info("serving on http://%s:%d", host, port)
    try:
        server.run(sockets=[listener])
    except SystemExit as ended:  # uvicorn could not start the application
        return int(ended.code or 1)
    return 0

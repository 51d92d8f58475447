"""The application: settings and views in, a service on a port out.

The server is uvicorn, with a farewell to open feeds and a limit on what waits for a client that does not read. On
SIGTERM or Ctrl-C open feeds are told to connect again, WebSockets by their close code; requests under way get their
answers, and the process ends with code 0 within ``DRAIN_S`` and a little.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import re
import resource
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from tailrace.config.settings import Settings
from tailrace.errors import PrerequisiteMissing, TailraceError
from tailrace.http.delivery import ABORT
from tailrace.http.openapi import ABOUT, PROBLEM_TYPE, describe
from tailrace.http.routes import ROUTERS, VERSION, Health
from tailrace.http.service import Service, problem, problem_of
from tailrace.metrics import Metrics
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
COLLECT_AFTER = 50_000
"""New objects after which Python looks for cycles, of which feeds make few: after 700, its default, a service with two
hundred busy feeds would do little else."""

_ROUTING = {404: "route.not_found", 405: "route.method_not_allowed"}
_ID = re.compile(rb"[!-~]{1,128}")
_ANSWERS = ("http.response.start", "websocket.http.response.start", "websocket.accept")
_quiet = logging.getLogger(f"{__name__}.websockets")
_quiet.setLevel(logging.WARNING)  # no line for each connection, as for requests


class Problems:
    """Turns errors into answers, and counts them."""

    def __init__(self, metrics: Metrics, retry_s: float) -> None:
        self._metrics = metrics
        self._retry_after = str(max(1, math.ceil(retry_s)))

    def answer(self, document: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
        self._metrics.errors.labels(document["code"]).inc()
        more = {"Cache-Control": "no-store", **(headers or {})}
        if document["retryable"]:
            more.setdefault("Retry-After", self._retry_after)
        if document["status"] == 413:
            more["Connection"] = "close"  # the rest of the body is not read
        return Response(msgspec.json.encode(document), document["status"], more, PROBLEM_TYPE)

    async def refused(self, request: Request, error: Exception) -> Response:
        return self.unrouted(request, error) if isinstance(error, HTTPException) else self.answer(problem_of(error))

    def unrouted(self, request: HTTPConnection, error: HTTPException) -> Response:
        """Return the answer to a request, or a WebSocket, that no route takes."""
        status, path = error.status_code, request.scope["path"]
        detail = {
            404: f"nothing is served at {path}: the root page lists what is; a / inside a name is written %2F",
            405: f"{request.scope.get('method', 'GET')} is not for {path}; the header Allow says what is",
        }.get(status, str(error.detail))
        code = _ROUTING.get(status, f"http.{status}")
        return self.answer(problem(code, HTTPStatus(status).phrase, status, detail), dict(error.headers or {}))


class Edge:
    """The outermost layer of the application: every request passes it.

    Routes are matched on the path as it was sent, and each part is decoded once after the match: an escaped slash
    inside a name never divides it. So every name has one address, and no address means two names. Every answer has a
    request id. An unexpected error becomes a problem without details; its log line has the same id. A WebSocket that
    is not accepted is answered like any other request.
    """

    def __init__(self, app: ASGIApp, problems: Problems) -> None:
        self._app, self._problems = app, problems

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
    app.add_exception_handler(TailraceError, problems.refused)
    app.add_exception_handler(HTTPException, problems.refused)
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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_client_bytes(self.config))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][ABORT] = self.transport.abort


class SocketProtocol(WebSocketsSansIOProtocol):
    """The same for WebSockets; a WebSocket that is closed goes, even if the client does not read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.logger = _quiet
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=_client_bytes(self.config))

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


def _client_bytes(config: uvicorn.Config) -> int:
    """Return how many unsent bytes make a send wait."""
    found: int = config.app.state.service.settings.serve.client_bytes  # type: ignore[union-attr]
    return found


class Server(uvicorn.Server):
    """A server that drains before it closes, and ends with code 0 on a signal."""

    def __init__(self, app: FastAPI) -> None:
        self._service: Service = app.state.service
        pings = [part.ping.total_seconds() for part in self._service.parts.values() if part.ping is not None]
        ping_s = min(pings, default=PING_S)
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=Protocol,
                ws=SocketProtocol,
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
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    try:
        server.run(sockets=[listener])
    except SystemExit as ended:  # uvicorn could not start the application
        return int(ended.code or 1)
    return 0

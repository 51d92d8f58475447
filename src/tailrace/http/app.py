"""The application: settings in, a service on a port out.

The server: uvicorn, told how to say goodbye and how to drop a client that does not read.

On SIGTERM or Ctrl-C open feeds are told to connect again, WebSockets by their close code, requests under way get their
answers, and the process ends with code 0 within ``DRAIN_S`` and a little.

The edge: what every request passes first, whatever it asks for.

Routes are matched on the path as it was sent, and each part is decoded once after the match: an escaped slash inside a
name never divides it, so every name has one address and no address means two names. Every answer carries a request id.
An error that nobody expected becomes a problem without details; its log line carries the same id. A WebSocket that is
not accepted is answered like any other request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from tailrace.config.settings import Settings
from tailrace.errors import PrerequisiteMissing
from tailrace.http.health import VERSION, Health
from tailrace.http.openapi import ABOUT, describe
from tailrace.http.problems import Problems, problem_of
from tailrace.http.routes import ROUTERS
from tailrace.http.service import Service
from tailrace.http.sse import ABORT
from tailrace.view import View

DRAIN_S = 4
BACKLOG = 2048
FRAME_BYTES = 256 << 10
"""What a client may say in one message of a WebSocket: a subscription to tens of thousands of channels fits."""
FAREWELL_S = 2.0
"""How long a client that is told that it is over may take to take note."""


_quiet = logging.getLogger(f"{__name__}.websockets")
_quiet.setLevel(logging.WARNING)  # no line for each connection, as for requests


class Protocol(HttpToolsProtocol):
    """Gives each request the means to drop its connection: closing it would first wait for the client to read."""

    buffer_bytes = HIGH_WATER_LIMIT
    """Unsent bytes from which on a send waits."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self.buffer_bytes)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][ABORT] = self.transport.abort


class SocketProtocol(WebSocketsSansIOProtocol):
    """The same for WebSockets; and one that is over is over, whether or not the client reads."""

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
    """A server that drains before it closes, and for which being asked to end is no failure."""

    def __init__(self, app: Any, drain: Callable[[], None], client_bytes: int, ping_s: float = 20.0) -> None:
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
        self._drain = drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            self._captured_signals.clear()  # else it would kill itself with the signal that it has obeyed


def listen(host: str, port: int) -> socket.socket:
    """Take the address to serve at, before anything else is started."""
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
    """Let the process have as many connections as it may have, if the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    goal = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < goal:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))


logger = logging.getLogger(__name__)

_ID = re.compile(rb"[!-~]{1,128}")
_ANSWERS = ("http.response.start", "websocket.http.response.start", "websocket.accept")


class Edge:
    """The outermost layer of the application."""

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
            elif message["type"] == "websocket.close" and not started:  # how the router says that there is nothing
                nothing = self._problems.unrouted(HTTPConnection(scope), HTTPException(404))
                await nothing(scope, receive, sender)
                return
            await send(message)

        try:
            await self._app(scope, receive, sender)
        except Exception as error:
            logger.exception("request %s: %s %s", request_id.decode(), scope.get("method", "GET"), scope["path"])
            if started:
                raise  # the server closes the connection, so that nobody takes a part for the whole
            await self._problems.answer(problem_of(error))(scope, receive, sender)


SPARE_FILES = 256
"""Files besides one for each connection: sockets to Valkey and Kafka, libraries, logs."""


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
    except SystemExit as ended:  # how uvicorn says that the application did not start
        return int(ended.code or 1)
    return 0

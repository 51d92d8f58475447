"""The application: settings and views in, a service on a port out."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import quote
from uuid import uuid4

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.config.settings import Settings
from tailrace.http.health import VERSION, Health
from tailrace.http.openapi import ABOUT, describe
from tailrace.http.problems import Problems, problem_of
from tailrace.http.routes import ROUTERS
from tailrace.http.server import Server, listen, raise_file_limit
from tailrace.http.service import Service
from tailrace.view import View

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

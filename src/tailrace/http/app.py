"""The application: settings in, a service on a port out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from tailrace.config import Settings
from tailrace.http import routes
from tailrace.http.edge import Edge
from tailrace.http.health import VERSION, Health
from tailrace.http.openapi import ABOUT, describe
from tailrace.http.problems import Problems
from tailrace.http.server import Server, listen, raise_file_limit
from tailrace.http.service import Service
from tailrace.views.days.routes import Largest
from tailrace.views.tags.readers import watch

logger = logging.getLogger(__name__)

SPARE_FILES = 256
"""Files besides one for each connection: sockets to Valkey and Kafka, libraries, logs."""


def create_app(settings: Settings) -> FastAPI:
    """Return the application. Its lifespan opens the parts and closes them; ``app.state.service`` has them."""
    service = Service(settings)
    largest = Largest(service.nodes, service.days)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running(), largest:
            watching = asyncio.create_task(watch(service), name="readers of tags")
            try:
                yield
            finally:
                watching.cancel()

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
    app.state.largest = largest
    app.state.health = Health(service)
    problems = Problems(service.metrics, settings.serve.retry.total_seconds())
    problems.install(app)
    routes.install(app)
    describe(app)
    app.add_middleware(Edge, problems=problems)
    return app


def main(settings: Settings) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code."""
    raise_file_limit(settings.serve.connections + SPARE_FILES)
    listener = listen(settings.serve.host, settings.serve.port)
    app = create_app(settings)
    ping_s = settings.sessions.ping.total_seconds()
    server = Server(app, app.state.service.drain, settings.serve.client_bytes, ping_s)
    host, port = listener.getsockname()[:2]
    logger.info("serving on http://%s:%d", host, port)
    try:
        server.run(sockets=[listener])
    except SystemExit as ended:  # how uvicorn says that the application did not start
        return int(ended.code or 1)
    return 0

"""The server: uvicorn, told how to say goodbye and how to drop a client that does not read.

On SIGTERM or Ctrl-C open feeds are told to connect again, requests under way get their answers, and the process ends
with code 0 within ``DRAIN_S`` and a little.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tailrace.errors import PrerequisiteMissing
from tailrace.serving.sse import ABORT

DRAIN_S = 4
BACKLOG = 2048


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


class Server(uvicorn.Server):
    """A server that drains before it closes, and for which being asked to end is no failure."""

    def __init__(self, app: Any, drain: Callable[[], None], client_bytes: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=type("BoundedProtocol", (Protocol,), {"buffer_bytes": client_bytes}),
                ws="none",
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

"""The server: uvicorn, with a farewell to open feeds and a limit on what waits for a client that does not read.

On SIGTERM or Ctrl-C open feeds are told to connect again, WebSockets by their close code; requests under way get their
answers, and the process ends with code 0 within ``DRAIN_S`` and a little.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from tailrace.errors import PrerequisiteMissing
from tailrace.http.sse import ABORT

DRAIN_S = 4
BACKLOG = 2048
FRAME_BYTES = 256 << 10
"""Largest message of a client of a WebSocket: a subscription to tens of thousands of channels fits."""
FAREWELL_S = 2.0
"""Seconds that a client has to read the close frame."""


_quiet = logging.getLogger(f"{__name__}.websockets")
_quiet.setLevel(logging.WARNING)  # no line for each connection, as for requests


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

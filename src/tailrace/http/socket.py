"""WebSockets: a conversation in which neither side waits for the other.

A WebSocket that is not accepted is refused like any other request, with a status and a problem document. After that
one coroutine sends messages, and another one reads what the client sends. Invariant: memory for a client is one
message, plus the buffer of the server's transport; a send that takes longer than ``serve.send_timeout`` drops the
connection and its buffer, since a client that does not read reads no farewell either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect

from tailrace.api.feeds import Closing
from tailrace.errors import TailraceError
from tailrace.http.routing import refuse_foreign, refuse_partial
from tailrace.http.service import Service
from tailrace.http.sse import ABORT, SlowClientError

logger = logging.getLogger(__name__)

_REASON_BYTES = 123
"""Size of the reason in a close frame."""


class Speaker(Protocol):
    """Our side of a WebSocket."""

    @property
    def closing(self) -> Closing:
        """The close frame to send after the last message."""

    def messages(self) -> AsyncGenerator[bytes | str, None]:
        """Yield messages until the conversation ends or is stopped."""

    def hear(self, frame: bytes | str) -> Closing | None:
        """Take a message of the client; return the close frame if it cannot be used."""

    def stop(self) -> None:
        """Yield no more messages."""


def admit(service: Service, websocket: WebSocket, origins: Iterable[str]) -> None:
    """Raise AccessDenied for a page of another origin, or a user who may not do everything."""
    refuse_foreign(websocket.headers.getlist("origin"), websocket.headers.get("host", ""), origins)
    refuse_partial(service.settings, websocket)


async def converse(service: Service, websocket: WebSocket, speaker: Speaker, subprotocol: str | None = None) -> None:
    """Accept a WebSocket and send on it until one side ends. Raises Overloaded before it is accepted."""
    metrics, send_timeout_s = service.metrics, service.settings.serve.send_timeout.total_seconds()
    with service.admitted(speaker), metrics.viewers_open.track_inprogress():
        try:
            await websocket.accept(subprotocol)
        except WebSocketDisconnect:
            return
        hearing = asyncio.create_task(_hear(websocket, speaker), name="hears a viewer")
        closing: Closing | None = None
        try:
            async with aclosing(speaker.messages()) as messages:
                async for message in messages:
                    if hearing.done():
                        break
                    await _send(websocket, message, send_timeout_s)
                    metrics.viewer_bytes.inc(len(message))
            closing = await hearing if hearing.done() else speaker.closing
        except WebSocketDisconnect:
            pass
        except SlowClientError:
            metrics.viewer_slow_closes.inc()
            logger.info("closed a viewer: the client took no bytes for %g s", send_timeout_s)
            if (abort := websocket.scope.get("state", {}).get(ABORT)) is not None:
                abort()
        except TailraceError as error:
            metrics.errors.labels(error.code).inc()
            closing = Closing(1013 if error.retryable else 1011, str(error))
        except Exception:
            logger.exception("a viewer failed")
            closing = Closing(1011, "something went wrong in the service; its log says what")
        finally:
            if not hearing.done():
                hearing.cancel()
                await asyncio.wait({hearing})
        if closing is not None:
            await _close(websocket, closing)


async def _hear(websocket: WebSocket, speaker: Speaker) -> Closing | None:
    """Read from the client until it goes (None), or until it sends what cannot be used."""
    closing: Closing | None = None
    while closing is None:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            break
        binary = message.get("bytes")
        closing = speaker.hear(message.get("text", "") if binary is None else binary)
    speaker.stop()
    return closing


async def _send(websocket: WebSocket, message: bytes | str, timeout_s: float) -> None:
    kind = "bytes" if isinstance(message, bytes) else "text"
    try:
        async with asyncio.timeout(timeout_s):
            await websocket.send({"type": "websocket.send", kind: message})
    except TimeoutError:
        raise SlowClientError from None


async def _close(websocket: WebSocket, closing: Closing) -> None:
    reason = closing.reason.encode()[:_REASON_BYTES].decode(errors="ignore")
    try:
        async with asyncio.timeout(1.0):
            await websocket.close(closing.code, reason)
    except (TimeoutError, WebSocketDisconnect, RuntimeError):
        if (abort := websocket.scope.get("state", {}).get(ABORT)) is not None:
            abort()

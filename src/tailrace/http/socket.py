"""WebSockets: who may open one, how it is refused, and a conversation in which neither side waits for the other.

Before a WebSocket is accepted it is refused like any other request, with a status and a problem document. After that
there are two coroutines: one pulls what is to be sent, the other hears what the client says. Invariant: what is held
for a client is one message, plus what the server's transport buffers; a send that takes longer than
``serve.send_timeout`` drops the connection with all that waits in it, since who does not read reads no farewell.

Who may do what: users as a proxy names them in a header, and the topics that each may search.

Whoever may search all topics may do everything. Of the others, searches are narrowed to their topics and all else is
refused, since streams, folds, sessions and listings know no topics. Without ``serve.user_header`` nobody is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Protocol
from urllib.parse import urlsplit

from fastapi import Request
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket, WebSocketDisconnect

from tailrace.api.answers import Closing
from tailrace.config.settings import Settings
from tailrace.config.units import compile_pattern
from tailrace.errors import AccessDenied, TailraceError
from tailrace.http.service import Service
from tailrace.http.sse import ABORT, SlowClientError

EVERYTHING = ""
"""The topics of whoever may search all of them."""
ALL = ".*"
"""How ``serve.topics_by_user`` writes it."""


def topics_of(settings: Settings, request: HTTPConnection) -> str:
    """Return the regular expression of the topics that the user of a request may search; empty for all.

    Raises:
        AccessDenied: Nobody is named, or one who may not do anything.
    """
    serve = settings.serve
    if not serve.user_header:
        return EVERYTHING
    named = request.headers.getlist(serve.user_header)
    if len(named) != 1 or not named[0]:
        raise AccessDenied(f"a request needs the header {serve.user_header} once: it comes from a proxy that knows you")
    for users, topics in serve.topics_by_user.items():
        if compile_pattern(users).fullmatch(named[0]):
            return EVERYTHING if topics == ALL else topics
    raise AccessDenied(f"user {named[0][:80]!r} has no topics: see serve.topics_by_user")


async def everything(request: Request) -> None:
    """Refuse whoever may not do everything. A dependency of routes."""
    refuse_partial(request.app.state.service.settings, request)


def refuse_partial(settings: Settings, request: HTTPConnection) -> None:
    """Refuse whoever may not do everything; a WebSocket too, by the header that it was opened with."""
    if topics_of(settings, request) != EVERYTHING:
        raise AccessDenied("you may search, with /v1/grep, and nothing else: see serve.topics_by_user")


logger = logging.getLogger(__name__)

_PORTS = {"http": 80, "https": 443}
_REASON_BYTES = 123
"""What fits into a close frame."""


class Speaker(Protocol):
    """What is said on a WebSocket."""

    @property
    def closing(self) -> Closing:
        """How it ended, when all was said."""

    def messages(self) -> AsyncGenerator[bytes | str, None]:
        """What is sent, until it is over or was stopped."""

    def hear(self, frame: bytes | str) -> Closing | None:
        """Take what the client said; return how the connection ends if that cannot be used."""

    def stop(self) -> None:
        """Say no more."""


def admit(service: Service, websocket: WebSocket, origins: Iterable[str]) -> None:
    """Refuse a WebSocket that a page of somewhere else opens, or a user who may not do everything.

    Raises:
        AccessDenied: As said.
    """
    refuse_foreign(websocket.headers.getlist("origin"), websocket.headers.get("host", ""), origins)
    refuse_partial(service.settings, websocket)


def refuse_foreign(given: list[str], host: str, origins: Iterable[str]) -> None:
    """Refuse the origin of a page that is neither ours nor configured. A program has none, and may."""
    if not given:
        return
    origin = given[0].rstrip("/").lower()
    if len(given) == 1 and (origin in {known.lower() for known in origins} or _is_at(origin, host)):
        return
    raise AccessDenied(f"pages of {given[0][:80]!r} may not open WebSockets here: see sessions.origins")


def _is_at(origin: str, host: str) -> bool:
    try:
        page, here = urlsplit(origin), urlsplit(f"//{host.lower()}")
        port = _PORTS.get(page.scheme)
        return bool(page.hostname and port) and (page.hostname, page.port or port) == (here.hostname, here.port or port)
    except ValueError:
        return False


async def converse(service: Service, websocket: WebSocket, speaker: Speaker, subprotocol: str | None = None) -> None:
    """Accept a WebSocket and speak on it until one side ends.

    Raises:
        Overloaded: Before it is accepted, if as many are open as may be.
    """
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
                    await _give(websocket, message, send_timeout_s)
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
    """Hear the client until it goes (None), or until it says what cannot be used."""
    closing: Closing | None = None
    while closing is None:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            break
        said = message.get("bytes")
        closing = speaker.hear(message.get("text", "") if said is None else said)
    speaker.stop()
    return closing


async def _give(websocket: WebSocket, message: bytes | str, timeout_s: float) -> None:
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

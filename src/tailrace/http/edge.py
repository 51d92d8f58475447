"""The edge: what every request passes first, whatever it asks for.

Routes are matched on the path as it was sent, and each part is decoded once after the match: an escaped slash inside a
name never divides it, so every name has one address and no address means two names. Every answer carries a request id.
An error that nobody expected becomes a problem without details; its log line carries the same id. A WebSocket that is
not accepted is answered like any other request.
"""

from __future__ import annotations

import logging
import re
from urllib.parse import quote
from uuid import uuid4

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.http.problems import Problems, problem_of

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

"""Problems: every error leaves the service as ``application/problem+json`` (RFC 9457), with a stable code.

An error that Tailrace raises on purpose says what happened and what to do. Any other error is for the log: the client
learns only that it happened.
"""

from __future__ import annotations

import logging
import math
import re
from http import HTTPStatus
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.errors import TailraceError, UsageError
from tailrace.http.openapi import PROBLEM_TYPE
from tailrace.metrics import Metrics

logger = logging.getLogger(__name__)

_ROUTING = {404: "route.not_found", 405: "route.method_not_allowed"}
_ID = re.compile(rb"[!-~]{1,128}")
_ANSWERS = ("http.response.start", "websocket.http.response.start", "websocket.accept")


def problem_of(error: Exception) -> dict[str, Any]:
    """Return the members of an error's problem document; facts that a caller can use are members of their own."""
    if not isinstance(error, TailraceError):
        return _document("internal", "Internal error", 500, "something went wrong in the service; its log says what")
    title = re.sub(r"(?<!^)(?=[A-Z])", " ", type(error).__name__).capitalize()
    document = _document(error.code, title, error.status, str(error), error.retryable)
    facts = vars(error) if isinstance(error, UsageError) else {}
    return {**{name: value for name, value in facts.items() if isinstance(value, str | int)}, **document}


def _document(code: str, title: str, status: int, detail: str, retryable: bool = False) -> dict[str, Any]:
    kind = f"urn:tailrace:{code}"
    return {"type": kind, "title": title, "status": status, "detail": detail, "code": code, "retryable": retryable}


class Problems:
    """Turns errors into answers, and counts them."""

    def __init__(self, metrics: Metrics, retry_s: float) -> None:
        self._metrics = metrics
        self._retry_after = str(max(1, math.ceil(retry_s)))

    def install(self, app: FastAPI) -> None:
        app.add_exception_handler(TailraceError, self._refused)
        app.add_exception_handler(HTTPException, self._refused)

    def answer(self, document: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
        self._metrics.errors.labels(document["code"]).inc()
        more = {"Cache-Control": "no-store", **(headers or {})}
        if document["retryable"]:
            more.setdefault("Retry-After", self._retry_after)
        if document["status"] == 413:
            more["Connection"] = "close"  # the rest of the body is not read
        return Response(msgspec.json.encode(document), document["status"], more, PROBLEM_TYPE)

    async def _refused(self, request: Request, error: Exception) -> Response:
        return self.unrouted(request, error) if isinstance(error, HTTPException) else self.answer(problem_of(error))

    def unrouted(self, request: HTTPConnection, error: HTTPException) -> Response:
        """Return the answer to a request, or a WebSocket, that no route takes."""
        status, path = error.status_code, request.scope["path"]
        detail = {
            404: f"nothing is served at {path}: the root page lists what is; a / inside a name is written %2F",
            405: f"{request.scope.get('method', 'GET')} is not for {path}; the header Allow says what is",
        }.get(status, str(error.detail))
        code = _ROUTING.get(status, f"http.{status}")
        return self.answer(_document(code, HTTPStatus(status).phrase, status, detail), dict(error.headers or {}))


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

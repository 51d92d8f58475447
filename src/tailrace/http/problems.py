"""Problems: every error leaves the service in one form, application/problem+json (RFC 9457), with a stable code.

What Tailrace raises on purpose says what happened and what to do. Anything else is ours to find in the log: the client
is told that it happened and nothing more.
"""

from __future__ import annotations

import math
import re
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from tailrace.errors import BadRequest, TailraceError, UsageError
from tailrace.metrics import Metrics

MEDIA_TYPE = "application/problem+json"

_ROUTING = {404: "route.not_found", 405: "route.method_not_allowed"}
_encode = msgspec.json.Encoder().encode


class Problem(BaseModel):
    """What went wrong, and whether the same request may succeed later."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["urn:tailrace:stream.not_found"])
    title: str = Field(examples=["Stream not found"])
    status: int = Field(examples=[404])
    detail: str = Field(description="What, where, and what to do about it.")
    code: str = Field(description="Stable; programs may rely on it.", examples=["stream.not_found"])
    retryable: bool = Field(description="Whether the same request may succeed later.")


def problem_of(error: Exception) -> dict[str, Any]:
    """Return the members of an error's problem document; facts that a caller can use are members of their own."""
    if not isinstance(error, TailraceError):
        return _document("internal", "Internal error", 500, "something went wrong in the service; its log says what")
    title = re.sub(r"(?<!^)(?=[A-Z])", " ", type(error).__name__).capitalize()
    document = _document(error.code, title, error.status, str(error), error.retryable)
    facts = vars(error) if isinstance(error, UsageError) else {}
    return {**{name: value for name, value in facts.items() if isinstance(value, str | int)}, **document}


def problem_json(error: Exception) -> bytes:
    """Return an error's problem document."""
    return _encode(problem_of(error))


def _document(code: str, title: str, status: int, detail: str, retryable: bool = False) -> dict[str, Any]:
    kind = f"urn:tailrace:{code}"
    return {"type": kind, "title": title, "status": status, "detail": detail, "code": code, "retryable": retryable}


class Problems:
    """Turns errors into answers, and counts them."""

    def __init__(self, metrics: Metrics, retry_s: float) -> None:
        self._metrics = metrics
        self._retry_after = str(max(1, math.ceil(retry_s)))

    def install(self, app: FastAPI) -> None:
        """Answer the errors of an app."""
        app.add_exception_handler(TailraceError, self._tailrace)
        app.add_exception_handler(RequestValidationError, self._validation)
        app.add_exception_handler(HTTPException, self._routing)

    def answer(self, document: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
        """Return the response of a problem document."""
        self._metrics.errors.labels(document["code"]).inc()
        more = dict(headers or {})
        if document["retryable"]:
            more.setdefault("Retry-After", self._retry_after)
        if document["status"] == 413:
            more["Connection"] = "close"  # what is left of the body is not read
        return Response(_encode(document), document["status"], {"Cache-Control": "no-store", **more}, MEDIA_TYPE)

    async def _tailrace(self, request: Request, error: Exception) -> Response:
        return self.answer(problem_of(error))

    async def _validation(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        said = "; ".join(dict.fromkeys(map(_complaint, error.errors())))
        return self.answer(problem_of(BadRequest(said)))

    async def _routing(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return self.unrouted(request, error)

    def unrouted(self, request: HTTPConnection, error: HTTPException) -> Response:
        """Return the answer to a request, or a WebSocket, that no route takes."""
        status, path = error.status_code, request.scope["path"]
        detail = {
            404: f"nothing is served at {path}: the root page lists what is; a / inside a name is written %2F",
            405: f"{request.scope.get('method', 'GET')} is not for {path}; the header Allow says what is",
        }.get(status, str(error.detail))
        code = _ROUTING.get(status, f"http.{status}")
        return self.answer(_document(code, HTTPStatus(status).phrase, status, detail), dict(error.headers or {}))


def _complaint(found: dict[str, Any]) -> str:
    place, *names = found["loc"]
    what = "header" if place == "header" else "parameter"
    name = str(names[0]) if names else "?"
    if found["type"] == "extra_forbidden":
        return f"unknown {what} {name!r}"
    if found["type"] == "missing":
        return f"{what} {name!r} is missing"
    return f"{what} {name!r}: {str(found['msg'])[:1].lower()}{found['msg'][1:]}, not {str(found.get('input'))[:80]!r}"

"""Parameters: what a request says in its path, query and headers, refused by name where it cannot be meant.

What handlers are given: the parts of the service, and the header that continues a feed.

Problems: every error leaves the service in one form, application/problem+json (RFC 9457), with a stable code.

What Tailrace raises on purpose says what happened and what to do. Anything else is ours to find in the log: the client
is told that it happened and nothing more.
"""

from __future__ import annotations

import math
import re
from http import HTTPStatus
from typing import Annotated, Any, Literal
from urllib.parse import unquote_to_bytes

import msgspec
from fastapi import Depends, FastAPI, Header, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from tailrace.config.settings import Settings
from tailrace.errors import BadRequest, TailraceError, UsageError
from tailrace.http.health import Health
from tailrace.http.service import Service, now_ms
from tailrace.log import request as feeds
from tailrace.metrics import Metrics
from tailrace.query import QueryLimits


def decoded(part: str) -> str:
    """Decode a part of the path, once."""
    try:
        text = unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise BadRequest(f"{part[:80]!r} in the path is not UTF-8 when it is decoded") from None
    if not text:
        raise BadRequest("the path has an empty name")
    return text


Topic = Annotated[str, Path(description="Name of a topic."), AfterValidator(decoded)]


class NoQuery(BaseModel):
    """No parameters."""

    model_config = ConfigDict(extra="forbid")


class FeedQuery(NoQuery):
    """What every feed takes."""

    start: str | None = Field(
        None,
        alias="from",
        description="Where to begin: `start`, `end`, `-N` (the last N), a time, an age like `-1h`, or a cursor. "
        "Default: `end` when following, else `start`.",
    )
    since: str | None = Field(None, description="The same as `from`.")
    after: str | None = Field(None, description="A cursor: a new request that begins after it.")
    until: str | None = Field(None, description="End after this time or cursor.")
    limit: int | None = Field(None, ge=0, description="End after so many events; those sent before a resume count.")
    follow: bool = Field(True, description="Whether to wait for more at the end of what exists.")
    missing: Literal["wait", "fail"] = Field("wait", description="What to do about a stream that does not exist yet.")
    on_gap: Literal["skip", "fail"] = Field("skip", description="What to do about events that are gone.")
    format: Literal["sse", "ndjson"] | None = Field(None, description="Overrides the header Accept.")

    def request(self, names: tuple[str, ...], last_event_id: str | None) -> feeds.FeedRequest | None:
        """Return the request to the feed; None when it has ended before."""
        if self.start is not None and self.since is not None:
            raise BadRequest("from and since are the same parameter: give one of them")
        return feeds.make_request(
            names,
            now_ms=now_ms(),
            start=self.since if self.start is None else self.start,
            after=self.after,
            last_event_id=last_event_id,
            until=self.until,
            limit=self.limit,
            follow=self.follow,
            missing=self.missing,
            on_gap=self.on_gap,
        )


def limits_of(settings: Settings) -> QueryLimits:
    """Return how large a query may be."""
    return QueryLimits(**{name: getattr(settings.grep, name) for name in QueryLimits.__struct_fields__})


def refuse_repeats(request: Request) -> None:
    """Refuse a parameter that is given twice, where only one of them could count."""
    keys = [key for key, _ in request.query_params.multi_items() if key not in ("name", "tag")]
    if repeated := next((key for key in keys if keys.count(key) > 1), None):
        raise BadRequest(f"parameter {repeated!r} is given twice")


async def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


async def _health(request: Request) -> Health:
    found: Health = request.app.state.health
    return found


Here = Annotated[Service, Depends(_service)]
Asked = Annotated[Health, Depends(_health)]
LastEventId = Annotated[
    str | None,
    Header(
        description="The last cursor that was received: continues the same request. `from` is not evaluated again, and "
        "`limit` counts what was sent before."
    ),
]


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

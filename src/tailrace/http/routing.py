"""Routes: a view lists its URLs with decorators, and this file adds what every URL has.

A handler takes its query parameters as a struct and returns its answer as one; both are described in
``/openapi.json``. A value that cannot be meant is refused by name. Every GET also answers HEAD.

A proxy names the user in a header, and the settings say which topics each user may search. A user of all topics may do
everything. For other users searches are narrowed to their topics, and every other URL but those for operators is
refused, since streams, folds, sessions and lists know no topics. Without ``serve.user_header`` everybody may do
everything.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import unquote_to_bytes, urlsplit

import msgspec
from fastapi import APIRouter, Depends, Header, Path, Request, Response
from pydantic import AfterValidator
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from tailrace.api.requests import FeedParameters, Parameters
from tailrace.config.settings import Settings
from tailrace.config.values import compile_pattern
from tailrace.errors import AccessDenied, BadRequest, TooLarge
from tailrace.http.delivery import FeedResponse
from tailrace.http.openapi import Responses, answer, parameters, problems
from tailrace.http.service import Service, ViewService

FEED_PROBLEMS = (400, 404, 410, 503)
EVERYTHING = ""
"""The topics of a user who may search all of them; ``serve.topics_by_user`` writes ``.*``."""

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])
P = TypeVar("P", bound=Parameters)

_PORTS = {"http": 80, "https": 443}
_WORDS = {"yes": True, "on": True, "no": False, "off": False}
_RESERVE_STEP = 1 << 20
_encode = msgspec.json.Encoder().encode


class Routes:
    """The URLs of one subject. Decorate handlers with ``get``, ``post``, ``feed``, ``route`` and ``websocket``."""

    def __init__(self, tag: str, *, guarded: bool = True, headers: Mapping[str, str] | None = None) -> None:
        self.router = APIRouter()
        self._tag, self._guarded, self._headers = tag, guarded, headers

    def get(self, path: str, *statuses: int, **options: Any) -> Callable[[F], F]:
        """Answer GET and HEAD; see ``route``."""
        return self.route("GET", path, *statuses, **options)

    def post(self, path: str, *statuses: int, **options: Any) -> Callable[[F], F]:
        """Answer POST; see ``route``."""
        return self.route("POST", path, *statuses, **options)

    def feed(self, path: str, responses: Responses, method: str = "GET", **options: Any) -> Callable[[F], F]:
        """Answer with a feed; see ``route``."""
        options |= {"response_class": FeedResponse, "status_code": 200}
        return self.route(method, path, *FEED_PROBLEMS, responses=responses, **options)

    def route(
        self,
        method: str,
        path: str,
        *statuses: int,
        responses: Responses | None = None,
        body: Mapping[str, Any] | None = None,
        narrowed: bool = False,
        **options: Any,
    ) -> Callable[[F], F]:
        """Decorate the handler of a URL.

        ``statuses`` are those of the problems that it may answer with, ``responses`` its other answers if it does not
        return a struct, and ``options`` those of FastAPI. A ``narrowed`` handler itself limits what a user may see.
        """
        options.setdefault("response_class", Response)
        options["dependencies"] = [Depends(everything)] if self._guarded and not narrowed else []
        failures = problems(*statuses, *((403,) if self._guarded else ()))

        def add(handler: F) -> F:
            hints = get_type_hints(handler, include_extras=True)
            extra = dict(body or {})
            for hint in hints.values():
                if isinstance(hint, type) and issubclass(hint, Parameters):
                    extra["parameters"] = parameters(hint)
            shape = hints["return"]
            shown = answer(shape) if issubclass(shape, msgspec.Struct) else responses or {}
            endpoint = _endpoint(handler, hints, self._headers)
            self.router.add_api_route(
                path,
                endpoint,
                methods=[method],
                tags=[self._tag],
                operation_id=handler.__name__,
                summary=(handler.__doc__ or "").partition("\n")[0].strip(),
                responses={**shown, **failures},
                response_model=None,
                openapi_extra=extra,
                **options,
            )
            if method == "GET":
                self.router.add_api_route(
                    path,
                    endpoint,
                    methods=["HEAD"],
                    include_in_schema=False,
                    response_model=None,
                    dependencies=options["dependencies"],
                )
            return handler

        return add

    def websocket(self, path: str) -> Callable[[F], F]:
        """Decorate the handler of a WebSocket; a plain GET of the same path has a handler of its own."""

        def add(handler: F) -> F:
            self.router.routes.append(WebSocketRoute(path, handler))
            return handler

        return add


def _endpoint(handler: F, hints: Mapping[str, Any], headers: Mapping[str, str] | None) -> Callable[..., Any]:
    """Return a handler as FastAPI takes it: its parameters are read from the URL, and a struct becomes JSON."""

    @wraps(handler)
    async def endpoint(**arguments: Any) -> Response:
        found: Response | msgspec.Struct = await handler(**arguments)
        if isinstance(found, Response):
            return found
        return Response(_encode(found), media_type="application/json", headers=headers)

    signature = inspect.signature(handler)
    endpoint.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[each.replace(annotation=_argument(hints[name])) for name, each in signature.parameters.items()],
        return_annotation=Response,
    )
    return endpoint


def _argument(hint: Any) -> Any:
    if not (isinstance(hint, type) and issubclass(hint, Parameters)):
        return hint

    async def read(request: Request) -> Parameters:
        return read_parameters(hint, request.query_params)

    return Annotated[hint, Depends(read)]


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
LastEventId = Annotated[
    str | None,
    Header(
        description="The last cursor that was received: continues the same request. `from` is not evaluated again, and "
        "`limit` counts what was sent before."
    ),
]


async def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


Here = Annotated[Service, Depends(_service)]


def part(view: str, kind: type[ViewService]) -> Any:
    """Return the dependency of handlers on the part of a view."""

    async def found(service: Here) -> ViewService:
        return service.part_of(view, kind)

    return Depends(found)


def read_parameters(kind: type[P], query: QueryParams) -> P:
    """Read the query parameters of a URL; BadRequest if one is unknown, missing, unreadable, or repeated in a feed."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    complaints: list[str] = []
    for name in query:
        field = fields.get(name)
        if field is None:
            complaints += [f"unknown parameter {name!r}"] if kind.__struct_config__.forbid_unknown_fields else []
            continue
        texts = query.getlist(name)
        value: Any = texts if _is_list(field.type) else texts[-1]
        if value is not texts and len(texts) > 1 and issubclass(kind, FeedParameters):
            raise BadRequest(f"parameter {name!r} is given twice")
        if isinstance(field.default, bool):
            value = _WORDS.get(texts[-1].lower(), value)
        try:
            values[field.name] = msgspec.convert(value, field.type, strict=False)
        except msgspec.ValidationError as error:
            reason = str(error).replace("`", "'")
            complaints.append(f"parameter {name!r}: {reason[:1].lower()}{reason[1:]}, not {texts[-1][:80]!r}")
    missing = [name for name, field in fields.items() if field.required and name not in query]
    complaints += [f"parameter {name!r} is missing" for name in missing]
    if complaints:
        raise BadRequest("; ".join(complaints))
    return kind(**values)


def _is_list(kind: Any) -> bool:
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return get_origin(kind) is list


def read_body(kind: type[P], body: bytes) -> P:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error).replace("`", "'")) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body cannot be read: {error}") from None


@asynccontextmanager
async def body_of(service: Service, request: Request) -> AsyncIterator[bytes]:
    """Read a body up to ``serve.max_body``, and reserve its memory while the caller uses it."""
    limit = service.settings.serve.max_body
    too_large = TooLarge(f"a request has at most {limit} bytes (serve.max_body): send the events in several requests")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise BadRequest("the body is compressed (Content-Encoding): send it as it is")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    body = bytearray()
    with ExitStack() as reservations:
        reserved = 0
        try:
            async with asyncio.timeout(service.settings.serve.send_timeout.total_seconds()):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise too_large
                    if len(body) > reserved:
                        step = max(_RESERVE_STEP, len(body) - reserved)
                        reservations.enter_context(service.holding(step))
                        reserved += step
        except TimeoutError:
            raise BadRequest("the body did not arrive in time: send fewer events at once") from None
        except ClientDisconnect:
            raise BadRequest("the client went away before its body had arrived") from None
        yield bytes(body)


def topics_of(settings: Settings, request: HTTPConnection) -> str:
    """Return a regular expression of the topics that the user may search, empty for all; AccessDenied without any."""
    serve = settings.serve
    if not serve.user_header:
        return EVERYTHING
    named = request.headers.getlist(serve.user_header)
    if len(named) != 1 or not named[0]:
        raise AccessDenied(f"a request needs the header {serve.user_header} once: it comes from a proxy that knows you")
    for users, topics in serve.topics_by_user.items():
        if compile_pattern(users).fullmatch(named[0]):
            return EVERYTHING if topics == ".*" else topics
    raise AccessDenied(f"user {named[0][:80]!r} has no topics: see serve.topics_by_user")


async def everything(request: HTTPConnection) -> None:
    """Refuse a user who may not do everything. A dependency of routes."""
    if topics_of(request.app.state.service.settings, request) != EVERYTHING:
        raise AccessDenied("you may search, with /v1/grep, and nothing else: see serve.topics_by_user")


async def admit(websocket: WebSocket, origins: Iterable[str]) -> None:
    """Raise AccessDenied for a page of another origin, or a user (by the header) who may not do everything."""
    refuse_foreign(websocket.headers.getlist("origin"), websocket.headers.get("host", ""), origins)
    await everything(websocket)


def refuse_foreign(sent: list[str], host: str, origins: Iterable[str]) -> None:
    """Refuse a page whose origin is neither ours nor configured. A program sends no origin and is let in."""
    if not sent:
        return
    origin = sent[0].rstrip("/").lower()
    if len(sent) > 1 or not (origin in {each.lower() for each in origins} or _is_at(origin, host)):
        raise AccessDenied(f"pages of {sent[0][:80]!r} may not open WebSockets here: see sessions.origins")


def _is_at(origin: str, host: str) -> bool:
    try:
        page, here = urlsplit(origin), urlsplit(f"//{host.lower()}")
        port = _PORTS.get(page.scheme)
        return bool(page.hostname and port) and (page.hostname, page.port or port) == (here.hostname, here.port or port)
    except ValueError:
        return False

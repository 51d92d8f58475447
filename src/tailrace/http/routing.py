"""Route declarations: a view lists its URLs with decorators, and this file adds what every URL has.

A handler takes its query parameters as a struct and returns its answer as one; both are described in
``/openapi.json``. Every GET also answers HEAD. Every URL but those for operators is refused to users who may not see
everything; searches narrow what they show instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from starlette.routing import WebSocketRoute

from tailrace.api.requests import Parameters
from tailrace.http.access import everything
from tailrace.http.openapi import Responses, answer, parameters, problems
from tailrace.http.request import read_parameters
from tailrace.http.sse import FeedResponse

FEED_PROBLEMS = (400, 404, 410, 503)

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])

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

        Args:
            method: of HTTP.
            path: with parameters in braces.
            statuses: of the problems that it may answer with.
            responses: its other answers, if it does not return a struct.
            body: the description of its body.
            narrowed: the handler itself narrows what a user may see.
            options: of FastAPI's routes.
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

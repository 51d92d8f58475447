"""Route declarations: a view lists its URLs with decorators, and this file adds what every URL has.

Every GET also answers HEAD. Every URL but those for operators is refused to users who may not see everything; searches
narrow what they show instead.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Depends
from starlette.routing import WebSocketRoute

from tailrace.http.openapi import FEED_PROBLEMS, Responses, problems
from tailrace.http.socket import everything
from tailrace.http.sse import FeedResponse

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])


class Routes:
    """The URLs of one subject. Decorate handlers with ``get``, ``post``, ``delete`` and ``websocket``."""

    def __init__(self, tag: str, *, guarded: bool = True) -> None:
        self.router = APIRouter()
        self._tag, self._guarded = tag, guarded

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
        narrowed: bool = False,
        **options: Any,
    ) -> Callable[[F], F]:
        """Decorate the handler of a URL.

        Args:
            method: of HTTP.
            path: with parameters in braces.
            statuses: of the problems that it may answer with.
            responses: its other answers, as OpenAPI describes them.
            narrowed: the handler itself narrows what a user may see.
            options: of FastAPI's routes.
        """
        dependencies = [Depends(everything)] if self._guarded and not narrowed else []
        failures = problems(*statuses, *((403,) if self._guarded else ()))

        def add(endpoint: F) -> F:
            self.router.add_api_route(
                path,
                endpoint,
                methods=[method],
                tags=[self._tag],
                operation_id=endpoint.__name__,
                summary=(endpoint.__doc__ or "").partition("\n")[0].strip(),
                responses={**(responses or {}), **failures},
                dependencies=dependencies,
                **options,
            )
            if method == "GET":
                self.router.add_api_route(
                    path,
                    endpoint,
                    methods=["HEAD"],
                    include_in_schema=False,
                    response_model=None,
                    dependencies=dependencies,
                )
            return endpoint

        return add

    def websocket(self, path: str) -> Callable[[F], F]:
        """Decorate the handler of a WebSocket; a plain GET of the same path has a handler of its own."""

        def add(endpoint: F) -> F:
            self.router.routes.append(WebSocketRoute(path, endpoint))
            return endpoint

        return add

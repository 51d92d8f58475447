"""The connection to a service, for every call and every feed of a client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

import httpx
import msgspec

from tailrace.api.requests import FeedParameters
from tailrace.client.answers import SseFrame, error_of, read_event
from tailrace.client.following import Feed, FeedKeywords
from tailrace.errors import BadRequest, Unavailable

DEFAULT_URL = "http://127.0.0.1:7070"
LARGEST_PAGE = 1_000
LONGEST_ADDRESS = 4_096
"""Bytes of parameters in an address; proxies take not many more, so longer ones go in a body."""
LONGEST_SEARCH = 600.0
"""Seconds to wait for the largest of very many streams, and for a flush of very many groups."""

T = TypeVar("T")


class Connection:
    """A service, as an asynchronous context manager that owns the connections to it."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 10.0, silence: float = 45.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequest(f"{url!r} is not the address of a service: write it as {DEFAULT_URL}")
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._feeds: WeakSet[Feed[Any]] = WeakSet()
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(timeout, read=silence, pool=None),
            follow_redirects=True,
            limits=httpx.Limits(max_connections=None),
            # A proxy of the environment cannot reach a service on this machine.
            trust_env=parts.hostname not in ("127.0.0.1", "localhost", "::1"),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every feed and connection."""
        for feed in list(self._feeds):
            await feed.aclose()
        await self._http.aclose()

    async def call(self, method: str, path: str, patience: float = 30.0, **options: Any) -> bytes:
        """Send a request; return the body of the answer, or raise the error that it is."""
        timeout = httpx.Timeout(max(self.timeout, 30.0), read=max(self.timeout, patience))
        try:
            response = await self._http.request(method, path, timeout=timeout, **options)
        except httpx.TransportError as error:
            if method == "POST" and not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                unknown = "what was sent last may have taken effect or not"
                raise Unavailable(f"{self.url} did not answer ({_reason(error)}): {unknown}") from None
            raise self._unreachable(error) from None
        if response.status_code >= 400:
            raise error_of(response.status_code, response.content)
        return response.content

    def _feed(
        self,
        path: str,
        kind: type[FeedParameters],
        options: FeedKeywords,
        *,
        decode: Callable[[SseFrame], Any] = read_event,
        long_in_body: bool = False,
        **more: Any,
    ) -> Feed[Any]:
        """Make a feed.

        Args:
            path: its URL.
            kind: its parameters.
            options: those that every feed has.
            decode: reads a frame with an event.
            long_in_body: the URL takes parameters that are long in a body, with ``q`` as JSON.
            more: those that its view adds.
        """
        fields: dict[str, Any] = {**options, **more}
        on_control = fields.pop("on_control", None)
        parameters = kind(**fields)
        if parameters.after is not None and parameters.start is not None:
            raise BadRequest("give either after= (a cursor) or start=, not both")
        query = {name: value for name, value in msgspec.to_builtins(parameters).items() if value is not None}
        body = None
        if long_in_body and len(str(httpx.QueryParams(query))) > LONGEST_ADDRESS:
            body, query = msgspec.json.encode({**query, "q": msgspec.Raw(query["q"].encode())}), {}
        feed = Feed(self, path, query, decode=decode, body=body, cursor=parameters.after, on_control=on_control)
        self._feeds.add(feed)
        return feed

    async def _pages(self, path: str, query: dict[str, str | int], limit: int | None) -> AsyncIterator[bytes]:
        """Yield page after page; the caller stops when it has enough."""
        query["limit"] = LARGEST_PAGE if limit is None else max(1, min(limit, LARGEST_PAGE))
        after: str | int | None = ""
        while after is not None:
            page = await self.call("GET", path, params=query)
            yield page
            after = query["after"] = msgspec.json.decode(page, type=_Page).next  # type: ignore[assignment]

    async def _listed(
        self, path: str, query: dict[str, str | int], limit: int | None, read: Callable[[bytes], list[T]]
    ) -> list[T]:
        """Return up to ``limit`` rows of a list; ``read`` takes them from a page."""
        found: list[T] = []
        async for page in self._pages(path, query, limit):
            found += read(page)
            if limit is not None and len(found) >= limit:
                break
        return found[:limit]

    def _unreachable(self, error: httpx.TransportError) -> Unavailable:
        return Unavailable(
            f"no service answers at {self.url} ({_reason(error)}): is `tailrace up` or `tailrace serve` running?"
        )


class _Page(msgspec.Struct):
    next: str | int | None = None


def _reason(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__

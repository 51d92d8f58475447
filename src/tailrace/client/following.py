"""Feeds of the client: one request that goes on over any number of disconnects.

Invariant: a feed yields exactly what the service has after its cursor, in order, each event once, over any number of
disconnects, restarts and timeouts; ``feed.cursor`` is always the position after the last event that was handed out.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict

import httpx

from tailrace.api.feeds import Control, Event
from tailrace.client.answers import SseFrame, SseReader, error_of, failure, read_control
from tailrace.errors import TailraceError, Unavailable, UsageError

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from tailrace.client.connection import Connection

    T = TypeVar("T", default=Event)
else:
    from typing import TypeVar

    T = TypeVar("T")

logger = logging.getLogger("tailrace.client")  # the one that commands show

FIRST_WAIT = 0.25
LONGEST_WAIT = 30.0


class FeedKeywords(TypedDict, total=False):
    """Keywords of every feed.

    ``after``: a cursor; begin with the event after it. ``start``: ``start``, ``end``, ``-N``, a time, ``-1h`` or a
    cursor; ``end`` when following, else ``start``. ``until``: a time; events up to and including it are sent.
    ``limit``: end after so many events. ``follow``: wait for new events, or end at the last one there is. ``missing``:
    ``wait`` for a stream that does not exist yet, or ``fail``. ``on_gap``: ``skip`` what is gone, or ``fail``.
    ``on_control``: called with each control frame: caught-up, gap, progress, problem, end.
    """

    after: str | None
    start: str | None
    until: str | None
    limit: int | None
    follow: bool
    missing: str
    on_gap: str
    on_control: Callable[[Control], None] | None


class Feed(Generic[T]):
    """The events, or bursts, of one request: an asynchronous iterable, and a context manager that closes it.

    Iterating again after a ``break`` goes on where it stopped. One task at a time may iterate.
    """

    def __init__(
        self,
        connection: Connection,
        path: str,
        query: Mapping[str, Any],
        *,
        decode: Callable[[SseFrame], T],
        body: bytes | None = None,
        cursor: str | None = None,
        on_control: Callable[[Control], None] | None = None,
    ) -> None:
        self.cursor = cursor
        """Position after the last event handed out: resume there with ``after=``."""
        self.total: int | None = None
        """Number of events, as the service said at the end; None before."""
        self.on_control = on_control
        self._decode = decode
        self._connection, self._path, self._query, self._body = connection, path, query, body
        self._reached: str | None = None  # cursor of the last frame read, which may be ahead of ``cursor``
        self._waiting: deque[SseFrame] = deque()
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._reader = SseReader()
        self._retry: float | None = None
        self._failures = 0
        self._met = False
        self._since = 0.0
        self._ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection; the next iteration reads again what was not handed out."""
        self._waiting.clear()
        if self._reached is not None:
            self._reached = self.cursor
        await self._disconnect()

    def __aiter__(self) -> AsyncIterator[T]:
        return self._events()

    async def _events(self) -> AsyncIterator[T]:
        async for item in self.frames():
            if not isinstance(item, Control):
                yield item

    async def frames(self) -> AsyncIterator[T | Control]:
        """Yield events and control frames alike."""
        while frame := await self._next():
            if frame.event == "message":
                yield self._decode(frame)
            else:
                yield self._control(frame)

    async def lines(self) -> AsyncIterator[list[bytes]]:
        """Yield the events as the JSON text the service sent, as many at a time as have arrived."""
        while frame := await self._next():
            batch: list[bytes] = []
            while frame is not None and frame.event == "message":
                batch.append(frame.data or b"null")
                frame = self._take()
            if batch:
                yield batch
            if frame is not None:
                self._control(frame)

    async def count(self) -> int:
        """Read to the end and return how many events there were; a feed with ``count=True`` has only the number."""
        async for _ in self.frames():
            pass
        return self.total or 0

    def _control(self, frame: SseFrame) -> Control:
        control = read_control(frame)
        if control.kind == "end":
            self.total = control.data.get("events")
        if control.kind == "gap":
            logger.warning("gap: %s", control.data)
        if self.on_control is not None:
            self.on_control(control)
        if control.kind == "problem":
            error = failure(control.data)
            if not error.retryable and control.data.get("status", 0) < 500:
                self._ended = True
                raise error
        return control

    async def _next(self) -> SseFrame | None:
        while True:
            if frame := self._take():
                return frame
            if self._ended:
                await self._disconnect()
                return None
            await self._read()

    def _take(self) -> SseFrame | None:
        while self._waiting:
            frame = self._waiting.popleft()
            self.cursor = frame.id or self.cursor
            if frame.data is not None:
                self._ended = self._ended or frame.event == "end"
                return frame
        return None

    async def _read(self) -> None:
        try:
            if self._chunks is None:
                await self._connect()
            if self._chunks is None:
                return
            frames = self._reader.feed(await anext(self._chunks))
        except StopAsyncIteration:
            await self._lost(Unavailable(f"{self._connection.url} closed the connection"))
        except httpx.TransportError as error:
            await self._lost(self._connection._unreachable(error))
        else:
            self._retry = self._reader.retry or self._retry
            for frame in frames:
                self._failures = 0
                self._reached = frame.id or self._reached
            self._waiting.extend(frames)

    async def _connect(self) -> None:
        self._since = self._since or time.monotonic()
        headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity", "Cache-Control": "no-store"}
        if self._reached is not None:
            headers["Last-Event-ID"] = self._reached
        if self._body is not None:
            headers["Content-Type"] = "application/json"
        request = self._connection._http.build_request(
            "GET" if self._body is None else "POST",
            self._path,
            params=self._query or None,
            headers=headers,
            content=self._body,
        )
        response = self._response = await self._connection._http.send(request, stream=True)
        if response.status_code == 204:
            self._ended = True
            return
        if response.status_code != 200:
            error = error_of(response.status_code, await response.aread())
            if not error.retryable and response.status_code < 500:
                await self._disconnect()
                raise error
            if (wait := response.headers.get("retry-after", "")).isdigit():
                self._retry = float(wait)
            await self._lost(error)
            return
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            await self._disconnect()
            raise UsageError(
                f"{self._connection.url} answers {kind or 'nothing'}, not an event stream: is it a Tailrace service?"
            )
        self._met = True
        self._reader = SseReader()
        self._chunks = response.aiter_raw()

    async def _lost(self, error: TailraceError) -> None:
        await self._disconnect()
        if not self._met and time.monotonic() - self._since >= self._connection.timeout:
            raise error
        wait = (self._retry or FIRST_WAIT) * 2 ** min(self._failures, 10)
        wait = min(wait, max(LONGEST_WAIT, self._retry or 0.0)) * (1 + random.random() / 2)
        self._failures += 1
        logger.info("%s; connecting again in %.1f s", error, wait)
        await asyncio.sleep(wait)

    async def _disconnect(self) -> None:
        response, self._response, self._chunks = self._response, None, None
        if response is not None:
            await response.aclose()

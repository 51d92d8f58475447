"""The Python side of the HTTP contract: follow feeds, put events, list streams, without knowing that connections break.

    async with tailrace.connect("http://127.0.0.1:7070") as river:
        async for event in river.tail("jobs/nightly", after=cursor):
            ...

Invariant: a feed yields exactly what the service has after its cursor, in order, each event once, over any number of
disconnects, restarts and timeouts; ``feed.cursor`` is always the place after the last event that was handed out.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeAlias
from urllib.parse import quote, urlsplit
from weakref import WeakSet

import httpx
import msgspec

from tailrace.errors import BadRequest, TailraceError, Unavailable, UsageError
from tailrace.sse_reader import Frame, SseReader
from tailrace.wire import Control, Coordinates, Day, Event, Stream, decode_event, error_of, failure

logger = logging.getLogger(__name__)

DEFAULT_URL = "http://127.0.0.1:7070"
BATCH_EVENTS = 1_000
BATCH_BYTES = 2**20
LARGEST_PAGE = 1_000
LONGEST_SEARCH = 600.0
"""Seconds to wait for the largest of very many streams."""
FIRST_WAIT = 0.25
LONGEST_WAIT = 30.0

Query: TypeAlias = list[tuple[str, str | int | float | bool | None]]


def connect(url: str = DEFAULT_URL, *, token: str | None = None, timeout: float = 10.0, silence: float = 45.0) -> River:
    """Name a service; the connection is made by the first call.

    Args:
        url: where the service is.
        token: sent as a bearer token, for a proxy in front of the service.
        timeout: seconds for one call, and for the first contact of a feed.
        silence: seconds without a byte, heartbeats included, after which a feed connects again.
    """
    return River(url, token=token, timeout=timeout, silence=silence)


class River:
    """A service, as an asynchronous context manager that owns the connections to it."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 10.0, silence: float = 45.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequest(f"{url!r} is not the address of a service: write it as {DEFAULT_URL}")
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._feeds: WeakSet[Feed] = WeakSet()
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

    def tail(
        self,
        *names: str,
        after: str | None = None,
        start: str | None = None,
        until: str | None = None,
        limit: int | None = None,
        follow: bool = True,
        missing: str = "wait",
        on_gap: str = "skip",
        on_control: Callable[[Control], None] | None = None,
    ) -> Feed:
        """Follow the day streams of some names, merged by time.

        Args:
            names: the streams.
            after: a cursor; begin with the event after it.
            start: ``start``, ``end``, ``-N``, a time, ``-1h`` or a cursor; ``end`` when following, else ``start``.
            until: a time; events up to and including it are sent.
            limit: end after so many events.
            follow: wait for new events, or end at the last one there is.
            missing: ``wait`` for a stream that does not exist yet, or ``fail``.
            on_gap: ``skip`` what is gone, telling ``on_control``, or ``fail``.
            on_control: called with each control frame: caught-up, gap, progress, problem, end.
        """
        if not names:
            raise BadRequest("name at least one stream to follow")
        if after is not None and start is not None:
            raise BadRequest("give either after= (a cursor) or start=, not both")
        asked = {"after": after, "from": start, "until": until, "limit": limit}
        query: Query = [("name", name) for name in names]
        query += [(key, value) for key, value in asked.items() if value is not None]
        query += [("follow", follow), ("missing", missing), ("on_gap", on_gap)]
        feed = Feed(self, "/v1/streams/events", query, cursor=after, on_control=on_control)
        self._feeds.add(feed)
        return feed

    async def put(
        self,
        topic: str,
        events: Iterable[Mapping[str, object]] | AsyncIterable[Mapping[str, object]],
        *,
        batch: int = BATCH_EVENTS,
    ) -> list[Coordinates]:
        """Write events to a topic and return their coordinates, once the broker has acknowledged all of them.

        Each event is ``{"key": …, "value": …, "headers": {…}, "time": "…Z"}``, of which only ``value`` is needed.
        They are sent in batches, in order; when one fails, those before it are written.
        """
        written: list[Coordinates] = []
        lines: list[bytes] = []
        size = 0
        async for event in _each(events):
            line = msgspec.json.encode(event)
            if lines and (len(lines) >= batch or size + len(line) > BATCH_BYTES):
                written += msgspec.json.decode(await self.put_lines(topic, lines), type=_Written).events
                lines, size = [], 0
            lines.append(line)
            size += len(line) + 1
        if lines:
            written += msgspec.json.decode(await self.put_lines(topic, lines), type=_Written).events
        return written

    async def put_lines(self, topic: str, lines: Iterable[bytes]) -> bytes:
        """Write one batch of events that are JSON already; return the answer as it came."""
        headers = {"Content-Type": "application/x-ndjson"}
        return await self._call(
            "POST", f"/v1/topics/{_segment(topic)}", content=b"\n".join(lines) + b"\n", headers=headers
        )

    async def streams(
        self, prefix: str | None = None, limit: int | None = None, *, top: int | None = None, memory: bool = False
    ) -> list[Stream]:
        """List the day streams in the order of their names, or the largest ones.

        Args:
            prefix: only names that begin with this.
            limit: so many at most.
            top: the largest ones instead, so many of them, the largest first; the service looks at every stream.
            memory: with ``top``, also ask what each of them takes in the server.
        """
        if top is not None and limit is not None:
            raise BadRequest("give either limit= or top=, not both")
        if memory and top is None:
            raise BadRequest("memory= is only for the largest streams: give top= too")
        query: dict[str, str | int] = {"prefix": prefix} if prefix else {}
        if top is not None:
            query |= {"top": top} | ({"memory": "true"} if memory else {})
            answer = await self._call("GET", "/v1/streams", patience=LONGEST_SEARCH, params=query)
            return msgspec.json.decode(answer, type=_Streams).streams
        found: list[Stream] = []
        while limit is None or len(found) < limit:
            query["limit"] = LARGEST_PAGE if limit is None else min(limit - len(found), LARGEST_PAGE)
            page = msgspec.json.decode(await self._call("GET", "/v1/streams", params=query), type=_Streams)
            found += page.streams
            if page.next is None:
                break
            query["after"] = page.next
        return found[:limit]

    async def days(self, name: str) -> list[Day]:
        """List the days of a stream, the oldest first."""
        answer = await self._call("GET", f"/v1/streams/{_segment(name)}/days")
        return msgspec.json.decode(answer, type=_Days).days

    async def status(self) -> dict[str, Any]:
        """Rates, lag, batch time and health of every part."""
        answer: dict[str, Any] = msgspec.json.decode(await self._call("GET", "/v1/status"))
        return answer

    async def _call(self, method: str, path: str, patience: float = 30.0, **options: Any) -> bytes:
        timeout = httpx.Timeout(max(self.timeout, 30.0), read=max(self.timeout, patience))
        try:
            response = await self._http.request(method, path, timeout=timeout, **options)
        except httpx.TransportError as error:
            if method == "POST" and not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                unknown = "what was sent last may have been written or not"
                raise Unavailable(f"{self.url} did not answer ({_said(error)}): {unknown}") from None
            raise self._unreachable(error) from None
        if response.status_code >= 400:
            raise error_of(response.status_code, response.content)
        return response.content

    def _unreachable(self, error: httpx.TransportError) -> Unavailable:
        return Unavailable(
            f"no service answers at {self.url} ({_said(error)}): is `tailrace up` or `tailrace serve` running?"
        )


class Feed:
    """What one request yields: an asynchronous iterable of events, and a context manager that closes it.

    Iterating again after a ``break`` goes on where it stopped. One task at a time may iterate.
    """

    def __init__(
        self,
        river: River,
        path: str,
        query: Query,
        *,
        cursor: str | None = None,
        on_control: Callable[[Control], None] | None = None,
    ) -> None:
        self.cursor = cursor
        """The place after the last event handed out: resume there with ``after=``."""
        self.on_control = on_control
        self._river, self._path, self._query = river, path, query
        self._reached: str | None = None  # what has been read, which may be ahead of what was handed out
        self._waiting: deque[Frame] = deque()
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
        """Let the connection go; what was read and not handed out is read again by the next iteration."""
        self._waiting.clear()
        if self._reached is not None:
            self._reached = self.cursor
        await self._disconnect()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events()

    async def _events(self) -> AsyncIterator[Event]:
        async for item in self.frames():
            if isinstance(item, Event):
                yield item

    async def frames(self) -> AsyncIterator[Event | Control]:
        """Yield events and control frames alike."""
        while frame := await self._next():
            if frame.event == "message":
                yield decode_event(frame)
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

    def _control(self, frame: Frame) -> Control:
        control = Control.of(frame)
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

    async def _next(self) -> Frame | None:
        while True:
            if frame := self._take():
                return frame
            if self._ended:
                await self._disconnect()
                return None
            await self._read()

    def _take(self) -> Frame | None:
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
            await self._lost(Unavailable(f"{self._river.url} closed the connection"))
        except httpx.TransportError as error:
            await self._lost(self._river._unreachable(error))
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
        request = self._river._http.build_request("GET", self._path, params=self._query, headers=headers)
        response = self._response = await self._river._http.send(request, stream=True)
        if response.status_code == 204:
            self._ended = True
            return
        if response.status_code != 200:
            error = error_of(response.status_code, await response.aread())
            if not error.retryable and response.status_code < 500:
                await self._disconnect()
                raise error
            if (asked := response.headers.get("retry-after", "")).isdigit():
                self._retry = float(asked)
            await self._lost(error)
            return
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            await self._disconnect()
            raise UsageError(
                f"{self._river.url} answers {kind or 'nothing'}, not an event stream: is it a Tailrace service?"
            )
        self._met = True
        self._reader = SseReader()
        self._chunks = response.aiter_raw()

    async def _lost(self, error: TailraceError) -> None:
        await self._disconnect()
        if not self._met and time.monotonic() - self._since >= self._river.timeout:
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


class _Written(msgspec.Struct):
    events: list[Coordinates]


class _Streams(msgspec.Struct):
    streams: list[Stream]
    next: str | None = None


class _Days(msgspec.Struct):
    days: list[Day]


async def _each(
    events: Iterable[Mapping[str, object]] | AsyncIterable[Mapping[str, object]],
) -> AsyncIterator[Mapping[str, object]]:
    if isinstance(events, AsyncIterable):
        async for event in events:
            yield event
    else:
        for event in events:
            yield event


def _segment(name: str) -> str:
    """A name as one segment of a path; dots too, since ``.`` and ``..`` would be resolved away."""
    return quote(name, safe="").replace(".", "%2E")


def _said(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__

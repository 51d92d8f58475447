"""Feeds over HTTP, as an event stream (for browsers) or as lines of JSON.

Two coroutines meet in a small buffer. One reads the feed while there is room; the other sends: at once when the line
was quiet, else after ``coalesce_wait`` or ``coalesce_bytes``. Invariants: a client takes at most ``coalesce_bytes`` and
one batch of the feed in memory, plus the buffer of the server's transport. A send that takes longer than
``send_timeout`` ends the connection, and the client resumes at its last whole frame; no send is larger than
``coalesce_bytes``, so a slow client that makes progress is left alone. A frame is whole or absent and has no line break
inside, so a stream that was cut anywhere can be read up to its last whole frame. A cursor is the same text in both
forms.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tailrace.api.requests import FeedParameters
from tailrace.errors import TailraceError
from tailrace.http.problems import problem_json
from tailrace.http.service import LogService, Service, now_ms
from tailrace.log.request import AnyFeed, AnyFrame, Batch, ControlFrame, EventFrame, make_request


class Encoding(Protocol):
    """A form of frames on the wire."""

    media_type: str
    heartbeat: bytes

    def opening(self, retry_ms: int, cursor: str | None) -> bytes:
        """Return the first bytes, with the cursor where a new request begins."""
        ...

    def frames(self, frames: Sequence[AnyFrame]) -> bytes:
        """Encode frames."""
        ...

    def problem(self, document: bytes) -> bytes:
        """Return the last bytes of a feed that failed."""
        ...

    def farewell(self, retry_ms: int) -> bytes:
        """Return the last bytes of a feed that the service ends."""
        ...


class EventStream:
    """text/event-stream. Frames without ``data`` move a browser's last event id and are not dispatched."""

    media_type = "text/event-stream; charset=utf-8"
    heartbeat = b": \n\n"

    def opening(self, retry_ms: int, cursor: str | None) -> bytes:
        start = b"" if cursor is None else b"id: %b\n\n" % cursor.encode("ascii")
        return b"retry: %d\n\n%b" % (retry_ms, start)

    def frames(self, frames: Sequence[AnyFrame]) -> bytes:
        if isinstance(frames, Batch):
            return _encode_batch(frames, self.media_type, b"id: ", b"\ndata: ", b"\n\n")
        out: list[bytes] = []
        for frame in frames:
            cursor = frame.cursor.encode("ascii")
            if isinstance(frame, EventFrame):
                out.append(b"id: %b\ndata: %b\n\n" % (cursor, one_line(frame.data)))
            elif isinstance(frame, ControlFrame):
                place = b"id: %b\n" % cursor if cursor else b""
                out.append(b"%bevent: %b\ndata: %b\n\n" % (place, frame.name.encode(), one_line(frame.data)))
            else:
                out.append(b"id: %b\n\n" % cursor)
        return b"".join(out)

    def problem(self, document: bytes) -> bytes:
        return b"event: problem\ndata: %b\n\n" % one_line(document)

    def farewell(self, retry_ms: int) -> bytes:
        # All clients get it at the same moment; they must not come back at the same moment.
        return b"retry: %d\n\n" % round(retry_ms * random.uniform(0.5, 1.5))


class NdjsonEncoding:
    """application/x-ndjson. Events carry their ``cursor``; a line with an ``event`` member is about the feed itself.

    An empty line is a heartbeat.
    """

    media_type = "application/x-ndjson"
    heartbeat = b"\n"

    def opening(self, retry_ms: int, cursor: str | None) -> bytes:
        return b""

    def frames(self, frames: Sequence[AnyFrame]) -> bytes:
        if isinstance(frames, Batch):
            return _encode_batch(frames, self.media_type, b'{"cursor":"', b'",', b"\n", 1)
        out: list[bytes] = []
        for frame in frames:
            cursor = frame.cursor.encode("ascii")
            if isinstance(frame, EventFrame):
                out.append(b'{"cursor":"%b",%b\n' % (cursor, one_line(frame.data)[1:]))
            elif isinstance(frame, ControlFrame):
                place = b',"cursor":"%b"' % cursor if cursor else b""
                out.append(b'{"event":"%b"%b%b\n' % (frame.name.encode(), place, _more(frame.data)))
            else:
                out.append(b'{"event":"moved","cursor":"%b"}\n' % cursor)
        return b"".join(out)

    def problem(self, document: bytes) -> bytes:
        return b'{"event":"problem"%b\n' % _more(document)

    def farewell(self, retry_ms: int) -> bytes:
        return b""


def _encode_batch(batch: Batch, form: str, before: bytes, between: bytes, behind: bytes, skip: int = 0) -> bytes:
    """Encode a batch; all feeds that send it share the bytes."""
    written = batch.written.get(form)
    if written is None:
        head, tail = before + batch.head.encode("ascii"), batch.tail.encode("ascii") + between
        out = [
            b"%b%d%b%b%b" % (head, number, tail, one_line(data)[skip:], behind)
            for number, data in enumerate(batch.data, batch.first)
        ]
        written = batch.written[form] = b"".join(out)
    return written


def one_line(document: bytes) -> bytes:
    """Return a JSON document without line breaks, which JSON has only between tokens."""
    if b"\n" in document or b"\r" in document:
        return document.translate(None, b"\r\n")
    return document


def _more(document: bytes) -> bytes:
    """Return the members of an object and its end, to follow other members."""
    rest = one_line(document)[1:].lstrip()
    return rest if rest == b"}" else b"," + rest


EVENT_STREAM = EventStream()
LINES = NdjsonEncoding()


def choose(accept: str, wanted: str | None) -> Encoding:
    """Return the form for a request: that of ``format=``, else the preferred one of Accept, else SSE."""
    if wanted is not None:
        return LINES if wanted == "ndjson" else EVENT_STREAM
    lines, events = _preference(accept, "application", "x-ndjson"), _preference(accept, "text", "event-stream")
    return LINES if lines > events else EVENT_STREAM


def _preference(accept: str, kind: str, subtype: str) -> tuple[float, int]:
    """Return the quality of a media type in Accept, and how exactly it is named."""
    best = (-1, 0.0)
    for part in accept.split(","):
        name, *options = (piece.strip().lower() for piece in part.split(";"))
        exactness = {f"{kind}/{subtype}": 2, f"{kind}/*": 1, "*/*": 0}.get(name)
        if exactness is not None:
            quality = next((_number(o[2:]) for o in options if o.startswith("q=")), 1.0)
            best = max(best, (exactness, quality))
    exactness, quality = best
    return (quality, exactness)


def _number(text: str) -> float:
    try:
        return min(1.0, max(0.0, float(text)))
    except ValueError:
        return 0.0


logger = logging.getLogger(__name__)

ABORT = "tailrace.abort"
"""Key in the scope's state of the function that drops a connection and its buffer."""

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "Vary": "Accept"}


class SlowClientError(Exception):
    """A client took no bytes for ``serve.send_timeout``."""


class FeedResponse(Response):
    """The answer to a request for a feed. It opens the feed itself, so a failure before the first byte is a problem."""

    media_type = "text/event-stream"

    def __init__(
        self,
        service: Service,
        open_feed: Callable[[], Awaitable[AnyFeed]],
        encoding: Encoding,
        resumed: bool = False,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._service, self._open, self._encoding, self._resumed = service, open_feed, encoding, resumed
        self.init_headers({"Content-Type": encoding.media_type, **_HEADERS})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivery = _Delivery(self._service, self._encoding, send)
        with self._service.admitted(delivery):
            feed = await self._open()
            try:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                if scope["method"] == "HEAD":
                    await send({"type": "http.response.body", "body": b""})
                else:
                    abort = scope.get("state", {}).get(ABORT)
                    await delivery.run(feed, None if self._resumed else feed.cursor or None, receive, abort)
            finally:
                await feed.aclose()


class Resumable(Protocol):
    """A request for a feed, as far as its answer cares."""

    @property
    def resumed(self) -> bool:
        """True if it continues an earlier request."""


R = TypeVar("R", bound=Resumable)


def answer_feed(
    request: Request,
    service: Service,
    wanted: R | None,
    format: str | None,
    open_feed: Callable[[R], Awaitable[AnyFeed]],
) -> Response:
    """Return the answer to a request for a feed; 204 if ``wanted`` is None, since it has ended before."""
    if wanted is None:
        return Response(status_code=204)
    encoding = choose(request.headers.get("accept", ""), format)
    return FeedResponse(service, lambda: open_feed(wanted), encoding, wanted.resumed)


def follow_logs(
    request: Request,
    view: LogService,
    names: tuple[str, ...],
    parameters: FeedParameters,
    last_event_id: str | None,
) -> Response:
    """Return the answer to a request for a feed over logs of a view."""
    wanted = make_request(names, parameters, now_ms=now_ms(), last_event_id=last_event_id)
    return answer_feed(request, view.service, wanted, parameters.format, view.open)


class _Delivery:
    """One feed on its way to one client."""

    def __init__(self, service: Service, encoding: Encoding, send: Send) -> None:
        serve = service.settings.serve
        self._metrics = service.metrics
        self._encoding = encoding
        self._send = send
        self._limit = serve.coalesce_bytes
        self._wait_s = serve.coalesce_wait.total_seconds()
        self._heartbeat_s = serve.heartbeat.total_seconds()
        self._send_timeout_s = serve.send_timeout.total_seconds()
        self._retry_ms = round(serve.retry.total_seconds() * 1000)
        self._parts: list[bytes] = []
        self._size = 0
        self._over = False
        """True if nothing more is read from the feed."""
        self._gone = False
        self._filled = asyncio.Event()
        self._full = asyncio.Event()
        self._room = asyncio.Event()

    def stop(self) -> None:
        """End soon, with a farewell that lets the client come back."""
        if not self._over:
            self._last(self._encoding.farewell(self._retry_ms))

    async def run(self, feed: AnyFeed, cursor: str | None, receive: Receive, abort: Callable[[], None] | None) -> None:
        """Deliver until the feed ends, the client goes, or the service stops."""
        pulling = asyncio.create_task(self._pull(feed))
        listening = asyncio.create_task(self._listen(receive))
        try:
            await self._write(self._encoding.opening(self._retry_ms, cursor))
        except SlowClientError:
            self._metrics.slow_closes.inc()
            logger.info("closed a feed: the client took no bytes for %g s", self._send_timeout_s)
            if abort is not None:
                abort()
                await asyncio.wait({listening}, timeout=1.0)
        finally:
            self._over = True
            for task in (pulling, listening):
                while not task.done():  # a cancellation that coincides with an answer of the store may be lost
                    task.cancel()
                    await asyncio.wait({task}, timeout=0.5)

    async def _pull(self, feed: AnyFeed) -> None:
        try:
            async for frames in feed:
                if self._over:
                    return
                self._metrics.frames.inc(len(frames))
                self._add(self._encoding.frames(frames))
                while self._size >= self._limit:
                    self._room.clear()
                    await self._room.wait()
        except TailraceError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("a feed failed")
            self._fail(error)
        else:
            self._last(b"")

    def _fail(self, error: Exception) -> None:
        if not self._over:
            document = problem_json(error)
            self._metrics.errors.labels(getattr(error, "code", "internal")).inc()
            self._last(self._encoding.problem(document))

    def _last(self, chunk: bytes) -> None:
        self._over = True
        self._add(chunk)
        self._full.set()

    def _add(self, chunk: bytes) -> None:
        self._parts.append(chunk)
        self._size += len(chunk)
        self._filled.set()
        if self._size >= self._limit:
            self._full.set()

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = self._over = True
        self._filled.set()
        self._full.set()

    async def _write(self, opening: bytes) -> None:
        clock = asyncio.get_running_loop().time
        await self._send_chunk(opening)
        sent = clock()
        while not self._gone:
            if not await self._wait_for(self._filled, self._heartbeat_s):
                await self._send_chunk(self._encoding.heartbeat)
                continue
            pause = sent + self._wait_s - clock()
            if pause > 0 and not self._full.is_set():
                await self._wait_for(self._full, pause)
            over = self._over
            chunk = b"".join(self._parts)
            self._parts.clear()
            self._size = 0
            self._filled.clear()
            self._full.clear()
            self._room.set()
            for start in range(0, len(chunk), self._limit):
                await self._send_chunk(chunk[start : start + self._limit])
            if over:
                await self._send_chunk(b"", more=False)
                return
            sent = clock()

    async def _send_chunk(self, chunk: bytes, more: bool = True) -> None:
        if not chunk and more:
            return
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._send({"type": "http.response.body", "body": chunk, "more_body": more})
        except TimeoutError:
            raise SlowClientError from None
        self._metrics.bytes.inc(len(chunk))

    @staticmethod
    async def _wait_for(event: asyncio.Event, timeout_s: float) -> bool:
        if event.is_set():
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()
        return event.is_set()

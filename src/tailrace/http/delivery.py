"""Feeds and WebSockets on their way to a client, who may be slow.

A feed is an event stream (for browsers) or lines of JSON. Two coroutines meet in a small buffer. One reads the feed
while there is room; the other sends: at once when the line was quiet, else after ``coalesce_wait`` or
``coalesce_bytes``. Invariants: a client takes at most ``coalesce_bytes`` and one batch of the feed in memory, plus the
buffer of the server's transport. A send that takes longer than ``send_timeout`` ends the connection, and the client
resumes at its last whole frame; no send is larger than ``coalesce_bytes``, so a slow client that makes progress is left
alone. A frame is whole or absent and has no line break inside, so a stream that was cut anywhere can be read up to its
last whole frame. A cursor is the same text in both forms.

A WebSocket is a conversation in which neither side waits for the other. One that is not accepted is refused like any
other request, with a status and a problem document. After that one coroutine sends messages, and another one reads
what the client sends. Memory for a client is one message, plus the buffer of the server's transport; a slow client's
connection is dropped with its buffer, since a client that does not read reads no farewell either.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from tailrace.api.answers import Closing
from tailrace.api.requests import FeedParameters
from tailrace.errors import TailraceError
from tailrace.http.service import LogService, Service, now_ms, problem_of
from tailrace.log.hub import woken
from tailrace.log.request import AnyFeed, AnyFrame, AnyRequest, Batch, ControlFrame, EventFrame, make_request

logger = logging.getLogger(__name__)

ABORT = "tailrace.abort"
"""Key in the scope's state of the function that drops a connection and its buffer."""

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "Vary": "Accept"}
_REASON_BYTES = 123
"""Size of the reason in a close frame."""

R = TypeVar("R", bound=AnyRequest)


class Encoding(ABC):
    """A form of frames on the wire. An event is ``before``, its cursor, ``between``, its JSON, ``behind``."""

    media_type: str
    heartbeat: bytes
    before: bytes
    between: bytes
    behind: bytes
    skipped = 0
    """Bytes of the JSON that ``between`` replaces."""
    moved: bytes
    """Form of a frame that only moves the cursor."""

    def opening(self, retry_ms: int, cursor: str | None) -> bytes:
        """Return the first bytes, with the cursor where a new request begins."""
        return b""

    def frames(self, frames: Sequence[AnyFrame]) -> bytes:
        """Encode frames; all feeds that send the same batch share its bytes."""
        if isinstance(frames, Batch):
            written = frames.written.get(self.media_type)
            if written is None:
                written = frames.written[self.media_type] = self._batch(frames)
            return written
        before, between, behind, skipped = self.before, self.between, self.behind, self.skipped
        out: list[bytes] = []
        for frame in frames:
            cursor = frame.cursor.encode("ascii")
            if isinstance(frame, EventFrame):
                out.append(b"%b%b%b%b%b" % (before, cursor, between, one_line(frame.data)[skipped:], behind))
            elif isinstance(frame, ControlFrame):
                out.append(self.control(cursor, frame.name, frame.data))
            else:
                out.append(self.moved % cursor)
        return b"".join(out)

    def _batch(self, batch: Batch) -> bytes:
        head, tail = self.before + batch.head.encode("ascii"), batch.tail.encode("ascii") + self.between
        behind, skipped = self.behind, self.skipped
        out = [
            b"%b%d%b%b%b" % (head, number, tail, one_line(data)[skipped:], behind)
            for number, data in enumerate(batch.data, batch.first)
        ]
        return b"".join(out)

    @abstractmethod
    def control(self, cursor: bytes, name: str, document: bytes) -> bytes:
        """Encode a frame about the feed itself; it may have no cursor."""

    def farewell(self, retry_ms: int) -> bytes:
        """Return the last bytes of a feed that the service ends."""
        return b""


class EventStream(Encoding):
    """text/event-stream. Frames without ``data`` move a browser's last event id and are not dispatched."""

    media_type = "text/event-stream; charset=utf-8"
    heartbeat = b": \n\n"
    before, between, behind = b"id: ", b"\ndata: ", b"\n\n"
    moved = b"id: %b\n\n"

    def opening(self, retry_ms: int, cursor: str | None) -> bytes:
        start = b"" if cursor is None else self.moved % cursor.encode("ascii")
        return b"retry: %d\n\n%b" % (retry_ms, start)

    def control(self, cursor: bytes, name: str, document: bytes) -> bytes:
        place = b"id: %b\n" % cursor if cursor else b""
        return b"%bevent: %b\ndata: %b\n\n" % (place, name.encode(), one_line(document))

    def farewell(self, retry_ms: int) -> bytes:
        # All clients get it at the same moment; they must not come back at the same moment.
        return b"retry: %d\n\n" % round(retry_ms * random.uniform(0.5, 1.5))


class NdjsonEncoding(Encoding):
    """application/x-ndjson. Events carry their ``cursor``; a line with an ``event`` member is about the feed itself.

    An empty line is a heartbeat.
    """

    media_type = "application/x-ndjson"
    heartbeat = b"\n"
    before, between, behind = b'{"cursor":"', b'",', b"\n"
    moved = b'{"event":"moved","cursor":"%b"}\n'
    skipped = 1

    def control(self, cursor: bytes, name: str, document: bytes) -> bytes:
        place = b',"cursor":"%b"' % cursor if cursor else b""
        members = one_line(document)[1:].lstrip()
        comma = b"" if members == b"}" else b","
        return b'{"event":"%b"%b%b%b\n' % (name.encode(), place, comma, members)


def one_line(document: bytes) -> bytes:
    """Return a JSON document without line breaks, which JSON has only between tokens."""
    if b"\n" in document or b"\r" in document:
        return document.translate(None, b"\r\n")
    return document


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
    exactness, quality = -1, 0.0
    for part in accept.split(","):
        name, *options = (piece.strip().lower() for piece in part.split(";"))
        named = {f"{kind}/{subtype}": 2, f"{kind}/*": 1, "*/*": 0}.get(name)
        if named is not None:
            wanted = next((_number(o[2:]) for o in options if o.startswith("q=")), 1.0)
            exactness, quality = max((exactness, quality), (named, wanted))
    return quality, exactness


def _number(text: str) -> float:
    with suppress(ValueError):
        return min(1.0, max(0.0, float(text)))
    return 0.0


class SlowClientError(Exception):
    """A client took no bytes for ``serve.send_timeout``."""


async def send_in(timeout_s: float, send: Send, message: Message) -> None:
    """Send a message, or raise SlowClientError if it takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            await send(message)
    except TimeoutError:
        raise SlowClientError from None


def abort(scope: Scope) -> None:
    """Drop a connection and its buffer."""
    scope["state"][ABORT]()


class FeedResponse(Response):
    """The answer to a request for a feed. It opens the feed itself, so a failure before the first byte is a problem."""

    media_type = "text/event-stream"

    def __init__(
        self, service: Service, open_feed: Callable[[], Awaitable[AnyFeed]], encoding: Encoding, resumed: bool = False
    ) -> None:
        self.status_code, self.background = 200, None
        self._service, self._open, self._encoding, self._resumed = service, open_feed, encoding, resumed
        self._metrics, serve = service.metrics, service.settings.serve
        self._limit = serve.coalesce_bytes
        self._wait_s = serve.coalesce_wait.total_seconds()
        self._heartbeat_s = serve.heartbeat.total_seconds()
        self._send_timeout_s = serve.send_timeout.total_seconds()
        self._retry_ms = round(serve.retry.total_seconds() * 1000)
        self._send: Send
        self._parts: list[bytes] = []
        self._size = 0
        self._over = False
        """True if nothing more is read from the feed."""
        self._gone = False
        self._filled, self._full, self._room = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.init_headers({"Content-Type": encoding.media_type, **_HEADERS})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        with self._service.admitted(self.stop):
            feed = await self._open()
            try:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                if scope["method"] == "HEAD":
                    await send({"type": "http.response.body", "body": b""})
                else:
                    await self._deliver(feed, None if self._resumed else feed.cursor or None, scope, receive)
            finally:
                await feed.aclose()

    def stop(self) -> None:
        """End soon, with a farewell that lets the client come back."""
        if not self._over:
            self._last(self._encoding.farewell(self._retry_ms))

    async def _deliver(self, feed: AnyFeed, cursor: str | None, scope: Scope, receive: Receive) -> None:
        """Deliver until the feed ends, the client goes, or the service stops."""
        pulling = asyncio.create_task(self._pull(feed))
        listening = asyncio.create_task(self._listen(receive))
        try:
            await self._write(self._encoding.opening(self._retry_ms, cursor))
        except SlowClientError:
            self._metrics.slow_closes.inc()
            logger.info("closed a feed: the client took no bytes for %g s", self._send_timeout_s)
            abort(scope)
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
            self._metrics.errors.labels(getattr(error, "code", "internal")).inc()
            self._last(self._encoding.control(b"", "problem", msgspec.json.encode(problem_of(error))))

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
            if not await woken(self._filled, self._heartbeat_s):
                await self._send_chunk(self._encoding.heartbeat)
                continue
            pause = sent + self._wait_s - clock()
            if pause > 0 and not self._full.is_set():
                await woken(self._full, pause)
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
        message = {"type": "http.response.body", "body": chunk, "more_body": more}
        await send_in(self._send_timeout_s, self._send, message)
        self._metrics.bytes.inc(len(chunk))


def answer_feed(
    request: Request, service: Service, wanted: R | None, open_feed: Callable[[R], Awaitable[AnyFeed]]
) -> Response:
    """Return the answer to a request for a feed; 204 if ``wanted`` is None, since it has ended before."""
    if wanted is None:
        return Response(status_code=204)
    encoding = choose(request.headers.get("accept", ""), wanted.parameters.format)
    return FeedResponse(service, lambda: open_feed(wanted), encoding, bool(request.headers.get("last-event-id")))


def follow_logs(
    request: Request, view: LogService, names: tuple[str, ...], parameters: FeedParameters, last_event_id: str | None
) -> Response:
    """Return the answer to a request for a feed over logs of a view."""
    wanted = make_request(names, parameters, now_ms=now_ms(), last_event_id=last_event_id)
    return answer_feed(request, view.service, wanted, view.open)


class Speaker(Protocol):
    """Our side of a WebSocket."""

    @property
    def closing(self) -> Closing:
        """The close frame to send after the last message."""

    def messages(self) -> AsyncGenerator[bytes | str, None]:
        """Yield messages until the conversation ends or is stopped."""

    def hear(self, frame: bytes | str) -> Closing | None:
        """Take a message of the client; return the close frame if it cannot be used."""

    def stop(self) -> None:
        """Yield no more messages."""


async def converse(service: Service, websocket: WebSocket, speaker: Speaker, subprotocol: str | None = None) -> None:
    """Accept a WebSocket and send on it until one side ends. Raises Overloaded before it is accepted."""
    metrics, send_timeout_s = service.metrics, service.settings.serve.send_timeout.total_seconds()
    with service.admitted(speaker.stop), metrics.viewers_open.track_inprogress():
        try:
            await websocket.accept(subprotocol)
        except WebSocketDisconnect:
            return
        hearing = asyncio.create_task(_hear(websocket, speaker), name="hears a viewer")
        closing: Closing | None = None
        try:
            async with aclosing(speaker.messages()) as messages:
                async for message in messages:
                    if hearing.done():
                        break
                    kind = "bytes" if isinstance(message, bytes) else "text"
                    await send_in(send_timeout_s, websocket.send, {"type": "websocket.send", kind: message})
                    metrics.viewer_bytes.inc(len(message))
            closing = await hearing if hearing.done() else speaker.closing
        except WebSocketDisconnect:
            pass
        except SlowClientError:
            metrics.viewer_slow_closes.inc()
            logger.info("closed a viewer: the client took no bytes for %g s", send_timeout_s)
            abort(websocket.scope)
        except TailraceError as error:
            metrics.errors.labels(error.code).inc()
            closing = Closing(1013 if error.retryable else 1011, str(error))
        except Exception:
            logger.exception("a viewer failed")
            closing = Closing(1011, "something went wrong in the service; its log says what")
        finally:
            if not hearing.done():
                hearing.cancel()
                await asyncio.wait({hearing})
        if closing is not None:
            await _close(websocket, closing)


async def _hear(websocket: WebSocket, speaker: Speaker) -> Closing | None:
    """Read from the client until it goes (None), or until it sends what cannot be used."""
    closing: Closing | None = None
    while closing is None:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            break
        binary = message.get("bytes")
        closing = speaker.hear(message.get("text", "") if binary is None else binary)
    speaker.stop()
    return closing


async def _close(websocket: WebSocket, closing: Closing) -> None:
    reason = closing.reason.encode()[:_REASON_BYTES].decode(errors="ignore")
    try:
        async with asyncio.timeout(1.0):
            await websocket.close(closing.code, reason)
    except (TimeoutError, WebSocketDisconnect, RuntimeError):
        abort(websocket.scope)

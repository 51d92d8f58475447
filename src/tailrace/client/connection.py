"""The connection to a service, for every call and every feed of a client.

A feed is one request that goes on over any number of disconnects. Invariant: it yields exactly what the service has
after its cursor, in order, each event once, over any number of disconnects, restarts and timeouts; ``feed.cursor`` is
always the position after the last event that was handed out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypedDict
from urllib.parse import quote, urlsplit
from weakref import WeakSet

import httpx
import msgspec

from tailrace import errors
from tailrace.api.answers import Control, Event
from tailrace.api.requests import FeedParameters
from tailrace.errors import BadRequest, QueryError, TailraceError, TooLarge, Unavailable, UsageError

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", bound=msgspec.Struct, default=Event)
else:
    from typing import TypeVar

    T = TypeVar("T")

logger = logging.getLogger("tailrace.client")  # the one that commands show

DEFAULT_URL = "http://127.0.0.1:7070"
LARGEST_PAGE = 1_000
LONGEST_ADDRESS = 4_096
"""Bytes of parameters in an address; proxies take not many more, so longer ones go in a body."""
LONGEST_SEARCH = 600.0
"""Seconds to wait for the largest of very many streams, and for a flush of very many groups."""
FIRST_WAIT = 0.25
LONGEST_WAIT = 30.0
MAX_FRAME_BYTES = 64 * 2**20

R = TypeVar("R")


class _Page(Protocol):
    @property
    def next(self) -> str | int | None: ...


P = TypeVar("P", bound=_Page)


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


class SseFrame(NamedTuple):
    """One block of the stream; ``id`` is None where it has none, ``data`` is None where it only moves the cursor."""

    id: str | None
    event: str
    data: bytes | None


class SseReader:
    """Collects chunks and returns the frames that they complete: the same however the bytes are split into chunks.

    A frame that was not finished with an empty line is not a frame: its id never counts, so resuming after the last
    whole one repeats and skips nothing.
    """

    def __init__(self) -> None:
        self.retry: float | None = None
        """Seconds that the server asked to wait before connecting again."""
        self._rest = b""
        self._after_cr = False
        self._began = False

    def feed(self, chunk: bytes) -> list[SseFrame]:
        """Add bytes and return the frames that are now whole.

        Raises:
            TooLarge: a frame that does not end.
        """
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        text = self._rest + chunk if self._rest else chunk
        if not self._began:
            if b"\xef\xbb\xbf".startswith(text):
                self._rest = text
                return []
            self._began = True
            text = text.removeprefix(b"\xef\xbb\xbf")
        end = text.rfind(b"\n\n")
        if end < 0:
            if len(text) > MAX_FRAME_BYTES:
                raise TooLarge(f"a frame of more than {MAX_FRAME_BYTES} bytes: this is not an event stream of Tailrace")
            self._rest = text
            return []
        self._rest = text[end + 2 :]
        return [frame for block in text[:end].split(b"\n\n") if (frame := self._read(block)) is not None]

    def _read(self, block: bytes) -> SseFrame | None:
        if block.startswith(b"id: "):  # the shape of nearly every frame, read without a loop
            first = block.find(b"\n")
            if first > 0 and block.startswith(b"data: ", first + 1) and block.find(b"\n", first + 1) < 0:
                name = block[4:first]
                if b"\0" not in name:
                    return SseFrame(name.decode("utf-8", "replace"), "message", block[first + 7 :])
        id_, event, data = None, "", None
        for line in block.split(b"\n"):
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                data = value if data is None else data + b"\n" + value
            elif field == b"id" and b"\0" not in value:
                id_ = value.decode("utf-8", "replace")
            elif field == b"event":
                event = value.decode("utf-8", "replace")
            elif field == b"retry" and value.isdigit():
                self.retry = int(value) / 1000
        if data is None and id_ is None:
            return None
        return SseFrame(id_, event or "message", data)


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
        kind: type[T],
        body: bytes | None = None,
        cursor: str | None = None,
        on_control: Callable[[Control], None] | None = None,
    ) -> None:
        self.cursor = cursor
        """Position after the last event handed out: resume there with ``after=``."""
        self.total: int | None = None
        """Number of events, as the service said at the end; None before."""
        self.on_control = on_control
        self._decoder = msgspec.json.Decoder(kind, strict=False)  # times of bursts are numbers as text
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

    async def __aexit__(self, *ended: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection; the next iteration reads again what was not handed out."""
        self._waiting.clear()
        if self._reached is not None:
            self._reached = self.cursor
        await self._disconnect()

    async def __aiter__(self) -> AsyncIterator[T]:
        async for item in self.frames():
            if not isinstance(item, Control):
                yield item

    async def frames(self) -> AsyncIterator[T | Control]:
        """Yield events and control frames alike."""
        while frame := await self._next():
            if frame.event == "message":
                yield read_frame(frame, self._decoder)
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


class Connection:
    """A service, as an asynchronous context manager that owns the connections to it."""

    def __init__(
        self, url: str = DEFAULT_URL, *, token: str | None = None, timeout: float = 10.0, silence: float = 45.0
    ) -> None:
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

    async def __aexit__(self, *ended: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
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
        parameters_kind: type[FeedParameters],
        options: FeedKeywords,
        *,
        kind: type[msgspec.Struct] = Event,
        long_in_body: bool = False,
        **more: Any,
    ) -> Feed[Any]:
        """Make a feed whose parameters are those of every feed (``options``) and those that its view adds (``more``).

        With ``long_in_body`` the URL takes parameters that are long in a body, with ``q`` as JSON.
        """
        fields: dict[str, Any] = {**options, **more}
        on_control = fields.pop("on_control", None)
        parameters = parameters_kind(**fields)
        if parameters.after is not None and parameters.start is not None:
            raise BadRequest("give either after= (a cursor) or start=, not both")
        query = {name: value for name, value in msgspec.to_builtins(parameters).items() if value is not None}
        body = None
        if long_in_body and len(str(httpx.QueryParams(query))) > LONGEST_ADDRESS:
            body, query = msgspec.json.encode({**query, "q": msgspec.Raw(query["q"].encode())}), {}
        feed = Feed(self, path, query, kind=kind, body=body, cursor=parameters.after, on_control=on_control)
        self._feeds.add(feed)
        return feed

    async def _get(self, path: str, kind: type[R], patience: float = 30.0, **query: str | int | None) -> R:
        """Return an answer; parameters that are None are left out."""
        given = {name: value for name, value in query.items() if value is not None}
        return msgspec.json.decode(await self.call("GET", path, patience, params=given), type=kind)

    async def _post(self, path: str, kind: type[R], body: Mapping[str, object], patience: float = 30.0) -> R:
        return msgspec.json.decode(
            await self.call("POST", path, patience, content=msgspec.json.encode(body)), type=kind
        )

    async def _pages(self, path: str, kind: type[P], limit: int | None, prefix: str | None = None) -> AsyncIterator[P]:
        """Yield page after page; the caller stops when it has enough."""
        size = LARGEST_PAGE if limit is None else max(1, min(limit, LARGEST_PAGE))
        page = await self._get(path, kind, prefix=prefix or None, limit=size)
        yield page
        while page.next is not None:
            page = await self._get(path, kind, prefix=prefix or None, limit=size, after=page.next)
            yield page

    async def _listed(
        self, path: str, kind: type[P], rows: Callable[[P], list[R]], limit: int | None, prefix: str | None = None
    ) -> list[R]:
        found: list[R] = []
        async for page in self._pages(path, kind, limit, prefix):
            found += rows(page)
            if limit is not None and len(found) >= limit:
                break
        return found[:limit]

    def _unreachable(self, error: httpx.TransportError) -> Unavailable:
        return Unavailable(
            f"no service answers at {self.url} ({_reason(error)}): is `tailrace up` or `tailrace serve` running?"
        )


def _reason(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__


def document_of(query: Mapping[str, object]) -> str:
    """Return a query as JSON; refuse values that JSON does not have."""
    try:
        text = json.dumps(
            query, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=msgspec.to_builtins
        )
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise QueryError(f"the query cannot be written as JSON: {error}") from None
    return text


def as_segment(name: str) -> str:
    """Return a name as one segment of a path. Dots are escaped: ``.`` and ``..`` would be resolved away."""
    return quote(name, safe="").replace(".", "%2E")


# What the service sent: event streams, frames of a feed, and problems as the errors that they are.


_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def read_frame(frame: SseFrame, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode the data of a frame, an event or a burst, and set its ``cursor``."""
    try:
        found = decoder.decode(frame.data or b"null")
    except msgspec.DecodeError as error:
        wrong = f"the frame after cursor {frame.id} is no {decoder.type.__name__.lower()} ({error})"
        raise BadRequest(f"{wrong}: is this a Tailrace service?") from None
    msgspec.structs.force_setattr(found, "cursor", frame.id or "")
    return found


def read_control(frame: SseFrame) -> Control:
    """Read a frame that has an event name."""
    try:
        data = _decode_object(frame.data or b"{}")
    except msgspec.DecodeError:
        data = {}
    return Control(frame.event, data, frame.id)


def _tree(kind: type[TailraceError]) -> dict[str, type[TailraceError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            found |= _tree(child)
    return found


_CLASSES = _tree(TailraceError)
_DOCUMENT = frozenset({"type", "title", "status", "detail", "code", "retryable", "args"})


def failure(problem: dict[str, Any], status: int = 0) -> TailraceError:
    """Return the error of a problem document, with its further members as attributes."""
    kind = _CLASSES.get(str(problem.get("code", "")))
    passing = status >= 500 or status in (408, 425, 429) or problem.get("retryable") is True
    if kind is None:
        kind = Unavailable if passing else UsageError
    error = kind.__new__(kind)
    detail = problem.get("detail") or problem.get("title") or f"the service answered {status or 'with a problem'}"
    Exception.__init__(error, str(detail))
    if kind in (Unavailable, UsageError) and problem.get("code"):
        # A newer service may have codes that this release has no class for.
        setattr(error, "code", str(problem["code"]))  # noqa: B010
    for name, value in problem.items():
        if name.isidentifier() and name not in _DOCUMENT and not name.startswith("_"):
            setattr(error, name, value)
    return error


def error_of(status: int, body: bytes) -> TailraceError:
    try:
        problem = _decode_object(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = {}
    return failure(problem, status)

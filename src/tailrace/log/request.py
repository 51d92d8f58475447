"""A feed's contract: the request that opens it, checked before the first byte, and the frames that it yields.

Frames do not depend on the transport: SSE, WebSocket, HTTP and the command line write the same ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal, Protocol

import msgspec

from tailrace.api.requests import FeedParameters
from tailrace.errors import BadRequest
from tailrace.log.cursor import MAX_NAMES, Cursor, FromCursor, FromEnd, FromStart, FromTime, Start, parse_start
from tailrace.log.event import parse_time


class AnyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a feed of any view: the parameters, and what is parsed of them."""

    parameters: FeedParameters
    sent: int = 0
    """Events that the request sent before it was resumed; they count towards the limit."""
    resumed: bool = False
    """True if this continues an earlier request (``Last-Event-ID``)."""


class FeedRequest(AnyRequest, frozen=True, kw_only=True):
    """A request for a feed over one or several names; times are milliseconds."""

    names: tuple[str, ...]
    start: Start
    until_ms: int | None = None
    until: Cursor | None = None
    since_ms: int | None = None
    """Time at which the request began, if it began at one: older events are left out."""


def make_request(
    names: tuple[str, ...], parameters: FeedParameters, *, now_ms: int, last_event_id: str | None = None
) -> FeedRequest | None:
    """Read the parameters of a feed. None when the request has ended before (HTTP answers 204)."""
    if not names or len(names) > MAX_NAMES:
        raise BadRequest(f"a feed is over 1 to {MAX_NAMES} names; this one has {len(names)}")
    if len(set(names)) != len(names):
        raise BadRequest("a name is given twice: each event is sent once, so name each stream once")
    check_options(parameters)
    sent, since_ms, resumed = 0, None, False
    begin: Start
    if last_event_id:
        cursor = Cursor.parse(last_event_id, len(names))
        if cursor.ended:
            return None
        begin, sent, since_ms, resumed = FromCursor(cursor), cursor.sent or 0, cursor.since_ms, True
    elif parameters.after:
        begin = FromCursor(Cursor.parse(parameters.after, len(names)))
    elif start := parameters.beginning:
        begin = parse_start(start, len(names), now_ms)
        since_ms = begin.time_ms if isinstance(begin, FromTime) else None
    else:
        begin = FromEnd() if parameters.follow else FromStart()
    until_ms, until_cursor = _until(parameters.until, len(names), now_ms)
    return FeedRequest(
        parameters=parameters,
        names=names,
        start=begin,
        until_ms=until_ms,
        until=until_cursor,
        sent=sent,
        since_ms=since_ms,
        resumed=resumed,
    )


def check_options(parameters: FeedParameters, counted: str = "events") -> None:
    """Refuse values that no feed takes; a struct that was not read from a URL may have them."""
    _ = parameters.beginning
    if parameters.limit is not None and parameters.limit < 0:
        raise BadRequest(f"limit={parameters.limit}: a count of {counted}, 0 or more")
    if parameters.missing not in ("wait", "fail"):
        raise BadRequest(f"missing={parameters.missing!r}: wait or fail")
    if parameters.on_gap not in ("skip", "fail"):
        raise BadRequest(f"on_gap={parameters.on_gap!r}: skip or fail")


def _until(text: str | None, names: int, now_ms: int) -> tuple[int | None, Cursor | None]:
    if not text:
        return None, None
    try:
        return parse_time(text, now_ms), None
    except BadRequest:
        start = parse_start(text, names, now_ms)
        if isinstance(start, FromCursor):
            return None, start.cursor
        raise BadRequest(f"cannot read until={text[:80]!r}: a time, or a cursor up to which to read") from None


ControlName = Literal["caught-up", "gap", "progress", "life", "dropped", "problem", "end"]


class EventFrame(msgspec.Struct, frozen=True, gc=False):
    """An event as JSON, with the cursor that resumes exactly after it."""

    cursor: str
    data: bytes


class ControlFrame(msgspec.Struct, frozen=True):
    """A message about the feed itself. ``data`` is JSON; ``cursor`` is the feed's, empty if it has none yet."""

    name: ControlName
    cursor: str
    data: bytes = b"{}"


class Moved(msgspec.Struct, frozen=True):
    """The cursor advanced without an event: everything up to it was filtered out."""

    cursor: str


AnyFrame = EventFrame | ControlFrame | Moved


class Batch(Sequence[EventFrame]):
    """Consecutive events, whose cursors differ in the number alone. Several feeds may yield the same batch.

    A transport caches the bytes that it made of a batch in ``written``, under the name of its format.
    """

    __slots__ = ("data", "first", "head", "size", "tail", "written")

    def __init__(self, head: str, first: int, tail: str, data: Sequence[bytes]) -> None:
        self.head, self.first, self.tail, self.data = head, first, tail, data
        self.size = 2 * sum(map(len, data)) + 200 * len(data)
        """Approximate bytes of memory, with one entry in ``written``."""
        self.written: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        number = range(self.first, self.first + len(self.data))[at]
        return EventFrame(f"{self.head}{number}{self.tail}", self.data[at])

    def __iter__(self) -> Iterator[EventFrame]:
        for number, data in enumerate(self.data, self.first):
            yield EventFrame(f"{self.head}{number}{self.tail}", data)


class AnyFeed(Protocol):
    """An open feed: ``async for`` yields batches of frames until it ends; ``aclose`` ends it early."""

    @property
    def cursor(self) -> str:
        """Cursor after the last frame; empty while there is none."""

    def __aiter__(self) -> AsyncIterator[Sequence[AnyFrame]]: ...

    async def aclose(self) -> None:
        """Stop following."""

"""Requests for feeds of searches, and the cursors of these feeds.

17-0-1789200000.42      life 17, live log, after event 42 of epoch 1789200000
17-23-1789200000.42~7   life 17, log of stretch 23, after event 42; seven events were sent before
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from tailrace.api.requests import WINDOW_BYTES, GrepParameters
from tailrace.errors import BadRequest, CursorError
from tailrace.log.cursor import Cursor, FromCursor, FromEnd, FromLast, FromStart, FromTime, parse_start
from tailrace.log.event import parse_time
from tailrace.log.request import check_options
from tailrace.views.grep.model import Search

LIVE = 0
"""The part of a life that is not a stretch: its live log."""

LEAST_WINDOW, MOST_WINDOW = 1 << 10, 16 << 20

_CLIENT_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)

# The dot distinguishes a cursor from a date.
_CURSOR = re.compile(r"(\d{1,12})-(\d{1,12})-(\d+\..+)", re.ASCII | re.DOTALL)


class SearchCursor(msgspec.Struct, frozen=True):
    """The position of a reader: a life, a part of it, and a cursor in the part's log."""

    life: int
    part: int
    cursor: Cursor

    def __str__(self) -> str:
        return f"{self.life}-{self.part}-{self.cursor}"

    @classmethod
    def parse(cls, text: str) -> SearchCursor:
        """Parse the text of a cursor; raise CursorError if it is none."""
        match = _CURSOR.fullmatch(text.strip())
        if match is None:
            raise CursorError(f"cannot read cursor {text[:80]!r}: expected the id of an event of this search")
        return cls(int(match[1]), int(match[2]), Cursor.parse(match[3], 1))


class GrepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a feed of one search."""

    search: Search
    start: FromStart | FromEnd | FromLast | FromTime | SearchCursor
    since_ms: int | None = None
    until_ms: int | None = None
    limit: int | None = None
    sent: int = 0
    follow: bool = True
    count: bool = False
    missing: Literal["wait", "fail"] = "wait"
    on_gap: Literal["skip", "fail"] = "skip"
    window: int = WINDOW_BYTES
    """Bytes of events to fetch at once; at least one event is fetched."""
    resumed: bool = False
    client: str | None = None
    """Name under which the reader's position is stored."""


def make_grep_request(
    search: Search, parameters: GrepParameters, *, now_ms: int, last_event_id: str | None = None
) -> GrepRequest | None:
    """Check the parameters and make a request; None if the feed had ended at this cursor (HTTP answers 204)."""
    check_options(parameters)
    window, client, start = parameters.window, parameters.client, parameters.beginning
    if not LEAST_WINDOW <= window <= MOST_WINDOW:
        raise BadRequest(f"window={window}: bytes, from {LEAST_WINDOW} to {MOST_WINDOW}")
    if client is not None and not _CLIENT_NAME.fullmatch(client):
        raise BadRequest(f"client={client[:80]!r}: a name of letters, digits, '.', '_' and '-', at most 100")
    begin: FromStart | FromEnd | FromLast | FromTime | SearchCursor
    sent, since_ms, resumed = 0, None, False
    if last_event_id:
        begin = SearchCursor.parse(last_event_id)
        if begin.cursor.ended:
            return None
        sent, since_ms, resumed = begin.cursor.sent or 0, begin.cursor.since_ms, True
    elif parameters.after or (start and _CURSOR.fullmatch(start)):
        begin = SearchCursor.parse(parameters.after or start or "")
        since_ms = begin.cursor.since_ms
    elif start:
        found = parse_start(start, 1, now_ms)
        if isinstance(found, FromCursor):
            raise BadRequest(
                f"from={start[:80]!r}: a search begins at start, end, a time, an age like -1h, -N for the last N, or a "
                "cursor of its own"
            )
        begin = FromEnd() if found == FromLast(0) else found
        since_ms = found.time_ms if isinstance(found, FromTime) else None
    else:
        begin = FromEnd() if parameters.follow else FromStart()
    return GrepRequest(
        search=search,
        start=begin,
        since_ms=since_ms,
        until_ms=parse_time(parameters.until, now_ms) if parameters.until else None,
        limit=parameters.limit,
        sent=sent,
        follow=parameters.follow,
        count=parameters.count,
        missing=parameters.missing,
        on_gap=parameters.on_gap,
        window=window,
        resumed=resumed,
        client=client,
    )

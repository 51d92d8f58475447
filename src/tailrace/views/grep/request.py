"""What is asked of a search's feed, checked before its first byte; and the cursors of such feeds.

17-0-1789200000.42      the seventeenth life of any search, live, after the event of this number
17-23-1789200000.42~7   … in the stretch of the past that has the number 23, seven events were sent before
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
"""The part of a search that is no stretch of the past."""


LEAST_WINDOW, MOST_WINDOW = 1 << 10, 16 << 20


_CLIENT_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)


# The point tells it from a date.
_CURSOR = re.compile(r"(\d{1,12})-(\d{1,12})-(\d+\..+)", re.ASCII | re.DOTALL)


class SearchCursor(msgspec.Struct, frozen=True):
    """Where a reader of a search is: in which life, in which part of it, and where in the part's log."""

    life: int
    part: int
    cursor: Cursor

    def __str__(self) -> str:
        return f"{self.life}-{self.part}-{self.cursor}"

    @classmethod
    def parse(cls, text: str) -> SearchCursor:
        """Read what ``str`` wrote; anything else is a CursorError."""
        found = _CURSOR.fullmatch(text.strip())
        if found is None:
            raise CursorError(f"cannot read cursor {text[:80]!r}: expected the id of an event of this search")
        return cls(int(found[1]), int(found[2]), Cursor.parse(found[3], 1))


class GrepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A feed of one search. Times are milliseconds."""

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
    """Bytes of events that are fetched at once; one is always."""
    resumed: bool = False
    client: str | None = None
    """A name under which the reader's place is kept."""


def make_grep_request(
    search: Search, parameters: GrepParameters, *, now_ms: int, last_event_id: str | None = None
) -> GrepRequest | None:
    """Read the parameters. None when the request has ended before (HTTP answers 204)."""
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

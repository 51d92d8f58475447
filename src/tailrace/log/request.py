"""Requests: what a reader asks of a feed, checked before its first byte."""

from __future__ import annotations

from typing import Literal

import msgspec

from tailrace.errors import BadRequest
from tailrace.log.cursor import (
    MAX_NAMES,
    Cursor,
    FromCursor,
    FromEnd,
    FromStart,
    FromTime,
    Start,
    parse_start,
    parse_time,
)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A feed over one or several names. All of the start grammar is resolved; times are milliseconds."""

    names: tuple[str, ...]
    start: Start
    until_ms: int | None = None
    until: Cursor | None = None
    limit: int | None = None
    sent: int = 0
    """Events that the same request sent before it was resumed; they count towards the limit."""
    since_ms: int | None = None
    """Events older than this are left out: the request began at a time."""
    follow: bool = True
    missing: Literal["wait", "fail"] = "wait"
    on_gap: Literal["skip", "fail"] = "skip"
    resumed: bool = False
    """Whether this continues an earlier request (``Last-Event-ID``): what exists was announced before."""


def make_request(
    names: tuple[str, ...],
    *,
    now_ms: int,
    start: str | None = None,
    after: str | None = None,
    last_event_id: str | None = None,
    until: str | None = None,
    limit: int | None = None,
    follow: bool = True,
    missing: str = "wait",
    on_gap: str = "skip",
) -> Request | None:
    """Read the parameters that every feed takes. None when the request has ended before (HTTP answers 204)."""
    if not names or len(names) > MAX_NAMES:
        raise BadRequest(f"a feed is over 1 to {MAX_NAMES} names; this one has {len(names)}")
    if len(set(names)) != len(names):
        raise BadRequest("a name is given twice: each event is sent once, so name each stream once")
    check_manner(limit, missing, on_gap)
    sent, since_ms, resumed = 0, None, False
    begin: Start
    if last_event_id:
        cursor = Cursor.parse(last_event_id, len(names))
        if cursor.ended:
            return None
        begin, sent, since_ms, resumed = FromCursor(cursor), cursor.sent or 0, cursor.since_ms, True
    elif after:
        begin = FromCursor(Cursor.parse(after, len(names)))
    elif start:
        begin = parse_start(start, len(names), now_ms)
        since_ms = begin.time_ms if isinstance(begin, FromTime) else None
    else:
        begin = FromEnd() if follow else FromStart()
    until_ms, until_cursor = _until(until, len(names), now_ms)
    return Request(
        names=names,
        start=begin,
        until_ms=until_ms,
        until=until_cursor,
        limit=limit,
        sent=sent,
        since_ms=since_ms,
        follow=follow,
        missing=missing,  # type: ignore[arg-type]
        on_gap=on_gap,  # type: ignore[arg-type]
        resumed=resumed,
    )


def check_manner(limit: int | None, missing: str, on_gap: str, counted: str = "events") -> None:
    """Refuse what no feed takes."""
    if limit is not None and limit < 0:
        raise BadRequest(f"limit={limit}: a count of {counted}, 0 or more")
    if missing not in ("wait", "fail"):
        raise BadRequest(f"missing={missing!r}: wait or fail")
    if on_gap not in ("skip", "fail"):
        raise BadRequest(f"on_gap={on_gap!r}: skip or fail")


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

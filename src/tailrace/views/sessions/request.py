"""Requests for the feed of a session: what a viewer asks for, checked before the first byte."""

from __future__ import annotations

from typing import Literal

import msgspec

from tailrace.errors import BadRequest
from tailrace.log.cursor import FromEnd, FromStart
from tailrace.log.request import check_manner
from tailrace.views.sessions.cursor import (
    FromMoment,
    FromPlace,
    Held,
    SessionCursor,
    SessionStart,
    parse_session_start,
    parse_session_until,
)
from tailrace.views.sessions.selection import is_pattern
from tailrace.views.sessions.thinning import Thinning, parse_thinning

MOST_CHANNELS, MOST_PATTERNS = 1_000, 50
"""Names of channels in one request, and patterns among them: each is tried with every channel."""


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A feed of one session. All of the start grammar is resolved; times are nanoseconds."""

    identity: str
    start: SessionStart
    channels: tuple[str, ...] = ()
    """Ids, names, parameters or patterns; none for all."""
    raw: bool = False
    thinning: Thinning | None = None
    until: int | SessionCursor | None = None
    limit: int | None = None
    sent: int = 0
    """Bursts that the same request sent before it was resumed; they count towards the limit."""
    since: int | None = None
    """Samples older than this are left out: the request began at a time."""
    follow: bool = True
    missing: Literal["wait", "fail"] = "wait"
    on_gap: Literal["skip", "fail"] = "skip"
    resumed: bool = False
    """Whether this continues an earlier request (``Last-Event-ID``)."""

    def thinned_before(self, held: Held | None) -> Thinning | None:
        """Return how samples may be thinned before any are left out; only whole cells may be left out afterwards."""
        thinning = self.thinning
        if thinning is None or self.since is not None or isinstance(self.until, int):
            return None
        return thinning if held is None or held.floor % thinning.cell == 0 else None


def make_session_request(
    identity: str,
    *,
    now_ms: int,
    channels: str | None = None,
    raw: bool = False,
    pixel: str | None = None,
    rate: float | None = None,
    start: str | None = None,
    after: str | None = None,
    last_event_id: str | None = None,
    until: str | None = None,
    limit: int | None = None,
    follow: bool = True,
    missing: str = "wait",
    on_gap: str = "skip",
) -> SessionRequest | None:
    """Read the parameters of a feed. None when the request has ended before (HTTP answers 204)."""
    check_manner(limit, missing, on_gap, "bursts")
    names = tuple(dict.fromkeys(name for part in (channels or "").split(",") if (name := part.strip())))
    if channels is not None and not names:
        raise BadRequest("channels= has no names in it: leave it out for all channels")
    if len(names) > MOST_CHANNELS:
        raise BadRequest(
            f"{len(names)} names of channels, at most {MOST_CHANNELS}: a pattern, such as *:Chassis, is one"
        )
    if (patterns := sum(map(is_pattern, names))) > MOST_PATTERNS:
        raise BadRequest(f"{patterns} patterns of channels, at most {MOST_PATTERNS}: take fewer, or names")
    sent, since, resumed = 0, None, False
    begin: SessionStart
    if last_event_id:
        cursor = SessionCursor.parse(last_event_id)
        if cursor.ended:
            return None
        begin, sent, since, resumed = FromPlace(cursor), cursor.sent or 0, cursor.since, True
    elif after:
        cursor = SessionCursor.parse(after)
        begin, since = FromPlace(cursor), cursor.since
    elif start:
        begin = parse_session_start(start, now_ms)
        since = begin.time if isinstance(begin, FromMoment) else None
    else:
        begin = FromEnd() if follow else FromStart()
    return SessionRequest(
        identity=identity,
        start=begin,
        channels=names,
        raw=raw,
        thinning=parse_thinning(pixel, rate),
        until=parse_session_until(until, now_ms) if until else None,
        limit=limit,
        sent=sent,
        since=since,
        follow=follow,
        missing=missing,  # type: ignore[arg-type]
        on_gap=on_gap,  # type: ignore[arg-type]
        resumed=resumed,
    )

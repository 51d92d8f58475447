"""Requests for the feed of a session, checked before the first byte, and the selection of its lines.

A line is a channel converted by one parameter: a channel with several parameters has several lines, one without
parameters has one, and raw samples have one for each channel. A viewer selects lines by channel id, name, parameter or
pattern. Invariant: a value is converted exactly once, by the conversion of its line's parameter, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate
from typing import Literal

import msgspec

from tailrace.api.requests import SessionFeedParameters
from tailrace.errors import BadRequest
from tailrace.log.cursor import FromEnd, FromStart
from tailrace.log.request import check_options
from tailrace.views.sessions.configuration import Channels, Conversion
from tailrace.views.sessions.cursor import (
    FromMoment,
    FromSessionCursor,
    SessionCursor,
    SessionStart,
    UnsentSamples,
    parse_session_start,
    parse_session_until,
)
from tailrace.views.sessions.thinning import Thinning, parse_thinning

LISTED = 50
"""Limit of the names listed in the error for an unknown one."""


class Line(msgspec.Struct, frozen=True):
    """A channel converted by one of its parameters."""

    channel: int
    name: str
    unit: str = ""
    conversion: Conversion | None = msgspec.field(default=None)

    def __hash__(self) -> int:
        return hash((self.channel, self.name))


class Selection(msgspec.Struct, frozen=True):
    """The lines that a viewer asked for."""

    names: tuple[str, ...] = ()
    """Ids, names, parameters or patterns; empty for all."""
    raw: bool = False

    def lines(self, channels: Channels) -> Lines:
        """Return the selected lines of the known channels.

        Raises:
            BadRequest: All configurations are known, and none has one of the names.
        """
        return Lines(self, channels)


class Lines:
    """The selected lines of a session."""

    def __init__(self, selection: Selection, channels: Channels) -> None:
        self._matcher = _NameMatcher(selection.names)
        self._lines: dict[int, tuple[Line, ...]] = {}
        """By channel; one without configuration is added with its first samples."""
        used: set[str] = set()
        every: list[str] = []
        for line, called in _all(selection, channels):
            every.append(line.name)
            found = self._matcher.matches(called)
            used |= found
            wanted = (line,) if found or not selection.names else ()
            self._lines[line.channel] = self._lines.get(line.channel, ()) + wanted
        unknown = [name for name in selection.names if name not in used]
        if unknown and channels.complete:
            more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
            raise BadRequest(
                f"no channel of the session is called {unknown[0][:80]!r}: there are {', '.join(every[:LISTED])}{more}"
            )

    def of(self, channel: int) -> tuple[Line, ...]:
        """Return the selected lines of a channel."""
        found = self._lines.get(channel)
        if found is None:
            name = str(channel)
            is_wanted = self._matcher.is_all or self._matcher.matches((name,))
            found = self._lines[channel] = (Line(channel, name),) if is_wanted else ()
        return found


def _all(selection: Selection, channels: Channels) -> Iterator[tuple[Line, tuple[str, ...]]]:
    """Yield every line of the configured channels, with all of its names."""
    for channel in sorted(channels, key=lambda each: each.id):
        own = (str(channel.id), channel.name)
        parameters = channels.parameters_of(channel.id)
        if selection.raw or not parameters:
            called = tuple(name for parameter in parameters for name in (parameter.id, parameter.name))
            name = channel.name or (parameters[0].id if parameters else str(channel.id))
            yield Line(channel.id, name), (*own, *called)
            continue
        for parameter in parameters:
            line = Line(channel.id, parameter.id, parameter.unit, parameter.conversion)
            yield line, (*own, parameter.id, parameter.name)


class _NameMatcher:
    """Matches names: exact ones by look-up, patterns one by one."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.is_all = not names
        self._names = frozenset(names)
        self._patterns = [(name, re.compile(translate(name))) for name in names if is_pattern(name)]

    def matches(self, called: tuple[str, ...]) -> frozenset[str]:
        """Return the requested names and patterns that match one of a line's names."""
        found = self._names.intersection(called)
        return found | {name for name, wanted in self._patterns if any(wanted.match(each) for each in called if each)}


def is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


MOST_CHANNELS, MOST_PATTERNS = 1_000, 50
"""Limits of names in one request, and of patterns among them: each is matched with every channel."""


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the feed of one session, with the start grammar resolved; times are nanoseconds."""

    identity: str
    start: SessionStart
    channels: tuple[str, ...] = ()
    """Ids, names, parameters or patterns; empty for all."""
    raw: bool = False
    thinning: Thinning | None = None
    until: int | SessionCursor | None = None
    limit: int | None = None
    sent: int = 0
    """Bursts sent before the request was resumed; they count towards the limit."""
    since: int | None = None
    """Samples before this time are left out: the request began at a time."""
    follow: bool = True
    missing: Literal["wait", "fail"] = "wait"
    on_gap: Literal["skip", "fail"] = "skip"
    resumed: bool = False
    """True if this continues an earlier request (``Last-Event-ID``)."""

    def shared_thinning(self, unsent: UnsentSamples | None) -> Thinning | None:
        """Return the thinning that viewers may share, before samples are left out; only whole cells may be, then."""
        thinning = self.thinning
        if thinning is None or self.since is not None or isinstance(self.until, int):
            return None
        return thinning if unsent is None or unsent.floor % thinning.cell == 0 else None


def make_session_request(
    identity: str, parameters: SessionFeedParameters, *, now_ms: int, last_event_id: str | None = None
) -> SessionRequest | None:
    """Parse the parameters of a feed; None if the request has ended before (HTTP answers 204)."""
    check_options(parameters, "bursts")
    channels = parameters.channels
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
        begin, sent, since, resumed = FromSessionCursor(cursor), cursor.sent or 0, cursor.since, True
    elif parameters.after:
        cursor = SessionCursor.parse(parameters.after)
        begin, since = FromSessionCursor(cursor), cursor.since
    elif start := parameters.beginning:
        begin = parse_session_start(start, now_ms)
        since = begin.time if isinstance(begin, FromMoment) else None
    else:
        begin = FromEnd() if parameters.follow else FromStart()
    return SessionRequest(
        identity=identity,
        start=begin,
        channels=names,
        raw=parameters.raw,
        thinning=parse_thinning(parameters.pixel, parameters.rate),
        until=parse_session_until(parameters.until, now_ms) if parameters.until else None,
        limit=parameters.limit,
        sent=sent,
        since=since,
        follow=parameters.follow,
        missing=parameters.missing,
        on_gap=parameters.on_gap,
        resumed=resumed,
    )

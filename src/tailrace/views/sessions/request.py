"""Requests for the feed of a session, checked before the first byte, and its cursors.

A cursor is a viewer's position in a session, with the samples not yet sent there and the state of the request:

    42.1789200000000-3                            of life 42 everything up to this entry was sent
    42.1789200000000-1~1789200000000-3~17892…     thinned: of the entries up to the second one everything before this
                                                  time (ns) was sent; later samples are in entries after the first one
    42.k1234                                      the same in the part that is read from Kafka: up to this offset
    …~n7   …~@1789200000000000000   …~end         seven bursts were sent; the feed began at this time (ns); it has ended

The life is the session's number in its stream: a session that was closed and opened again has another one. Invariant:
``parse(str(cursor)) == cursor``; a cursor means the same position for ever, or one that is known to be gone.

A line is a channel converted by one parameter: a channel with several parameters has several lines, one without
parameters has one, and raw samples have one for each channel. A viewer selects lines by channel id, name, parameter or
pattern. Invariant: a value is converted exactly once, by the conversion of its line's parameter, or not at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import timedelta
from fnmatch import translate
from typing import Literal

import msgspec

from tailrace.api.requests import SessionFeedParameters
from tailrace.config.values import parse_duration
from tailrace.errors import BadRequest, CursorError
from tailrace.log.cursor import (
    MAX_CURSOR_BYTES,
    EntryId,
    FromCursor,
    FromEnd,
    FromLast,
    FromStart,
    FromTime,
    parse_id,
    parse_start,
)
from tailrace.log.event import parse_time
from tailrace.log.request import check_options
from tailrace.views.sessions.configuration import Channels, Conversion

_POSITION = r"(?:k-?\d{1,19}|\d{1,20}-\d{1,20})"
_STATE = r"~(end)|~(?=[n@])(?:n(\d{1,16}))?(?:@(-?\d{1,19}))?"
_CURSOR = re.compile(rf"(\d{{1,19}})\.({_POSITION})(?:~({_POSITION})~(-?\d{{1,19}}))?(?:{_STATE})?", re.ASCII)
_LIKE_A_CURSOR = re.compile(rf"\d+\.{_POSITION}", re.ASCII)
_NS = re.compile(r"\d{16,19}", re.ASCII)


class StreamPosition(msgspec.Struct, frozen=True, order=True):
    """The position after an entry of a stream, or after an offset in Kafka; the latter precedes every entry."""

    in_stream: bool
    major: int
    minor: int = 0

    def __str__(self) -> str:
        return f"{self.major}-{self.minor}" if self.in_stream else f"k{self.major}"

    @property
    def entry(self) -> EntryId:
        """Id of the entry; BEGINNING for an offset in Kafka."""
        return (self.major, self.minor) if self.in_stream else (0, 0)

    @classmethod
    def of(cls, entry: EntryId) -> StreamPosition:
        return cls(True, *entry)

    @classmethod
    def at_offset(cls, offset: int) -> StreamPosition:
        return cls(False, offset)

    @classmethod
    def parse(cls, text: str) -> StreamPosition:
        """Parse a text that the grammar has checked."""
        return cls.at_offset(int(text[1:])) if text.startswith("k") else cls.of(parse_id(text))


class UnsentSamples(msgspec.Struct, frozen=True):
    """The samples that a thinned feed still held: those from ``floor`` (ns) on, in entries after ``after``."""

    after: StreamPosition
    floor: int


class SessionCursor(msgspec.Struct, frozen=True):
    """A position in the feed of a session, and the state of its request."""

    number: int
    """Life of the session."""
    position: StreamPosition
    unsent: UnsentSamples | None = None
    sent: int | None = None
    """Bursts sent so far, if the request has a limit."""
    since: int | None = None
    """Time (ns) at which the request began, if it began at one."""
    ended: bool = False

    def __str__(self) -> str:
        unsent = self.unsent
        body = str(self.position) if unsent is None else f"{unsent.after}~{self.position}~{unsent.floor}"
        count = "" if self.sent is None else f"n{self.sent}"
        since = "" if self.since is None else f"@{self.since}"
        state = "end" if self.ended else count + since
        return f"{self.number}.{body}~{state}" if state else f"{self.number}.{body}"

    @property
    def origin(self) -> StreamPosition:
        """The position after which reading resumes."""
        return self.position if self.unsent is None else self.unsent.after

    def renewed(self) -> SessionCursor:
        """Return the same position for a new request: it counts from zero, but keeps the time of its begin."""
        return SessionCursor(self.number, self.position, self.unsent, None, self.since)

    @classmethod
    def parse(cls, text: str) -> SessionCursor:
        """Parse a cursor; raise CursorError for anything else."""
        if len(text) > MAX_CURSOR_BYTES:
            raise CursorError(f"a cursor has at most {MAX_CURSOR_BYTES} bytes; this one has {len(text)}")
        found = _CURSOR.fullmatch(text.strip())
        if found is None:
            raise CursorError(
                f"cannot read cursor {text[:80]!r}: expected the id of a frame of a session, such as 42.1789200000000-3"
            )
        number, first, second, floor, ended, sent, since = found.groups()
        position, unsent = StreamPosition.parse(first), None
        if second is not None:
            unsent = UnsentSamples(position, int(floor))
            position = StreamPosition.parse(second)
            if unsent.after > position:
                raise CursorError(f"cannot read cursor {text[:80]!r}: its first position is behind its second")
        count, time = (None if text is None else int(text) for text in (sent, since))
        return cls(int(number), position, unsent, count, time, ended is not None)


class FromMoment(msgspec.Struct, frozen=True):
    """Samples at or after a time, in nanoseconds."""

    time: int


class FromSessionCursor(msgspec.Struct, frozen=True):
    """Everything after a cursor."""

    cursor: SessionCursor


SessionStart = FromStart | FromEnd | FromLast | FromMoment | FromSessionCursor


def parse_session_start(text: str, now_ms: int) -> SessionStart:
    """Parse ``start | end | -N | TIME | -1h | CURSOR``; a time may be nanoseconds, as in frames."""
    exact = _parse_exact(text.strip())
    if exact is not None:
        return FromMoment(exact) if isinstance(exact, int) else FromSessionCursor(exact)
    start = parse_start(text, 1, now_ms)
    if isinstance(start, FromTime):
        return FromMoment(start.time_ms * 1_000_000)
    if isinstance(start, FromCursor):
        raise CursorError(f"{text[:80]!r} is no cursor of a session: take the id of one of its frames")
    return start


def parse_session_until(text: str, now_ms: int) -> int | SessionCursor:
    """Parse the end of a request: a time, in nanoseconds if it is a number, or a cursor."""
    exact = _parse_exact(text.strip())
    try:
        return parse_time(text.strip(), now_ms) * 1_000_000 if exact is None else exact
    except BadRequest:
        raise BadRequest(f"cannot read until={text[:80]!r}: a time, or a cursor up to which to read") from None


def _parse_exact(text: str) -> int | SessionCursor | None:
    """Parse nanoseconds, or a cursor of a session; None if a text looks like neither."""
    if _NS.fullmatch(text):
        return int(text)
    return SessionCursor.parse(text) if _LIKE_A_CURSOR.match(text) else None


LISTED = 50
"""Limit of the names listed in the error for an unknown one."""


class Line(msgspec.Struct, frozen=True):
    """A channel converted by one of its parameters."""

    channel: int
    name: str
    unit: str = ""
    conversion: Conversion | None = None

    def __hash__(self) -> int:
        return hash((self.channel, self.name))


class Selection(msgspec.Struct, frozen=True):
    names: tuple[str, ...] = ()
    """Ids, names, parameters or patterns; empty for all."""
    raw: bool = False


class Lines:
    """The selected lines of the known channels; BadRequest if all are known, and none has one of the names."""

    def __init__(self, selection: Selection, channels: Channels) -> None:
        self._names = frozenset(selection.names)
        self._patterns = [(name, re.compile(translate(name))) for name in selection.names if is_pattern(name)]
        self._lines: dict[int, tuple[Line, ...]] = {}
        """By channel; one without configuration is added with its first samples."""
        used: set[str] = set()
        every: list[str] = []
        for line, called in _all(selection, channels):
            every.append(line.name)
            found = self._matches(called)
            used |= found
            wanted = (line,) if found or not self._names else ()
            self._lines[line.channel] = self._lines.get(line.channel, ()) + wanted
        unknown = [name for name in selection.names if name not in used]
        if unknown and channels.complete:
            more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
            raise BadRequest(
                f"no channel of the session is called {unknown[0][:80]!r}: there are {', '.join(every[:LISTED])}{more}"
            )

    def of(self, channel: int) -> tuple[Line, ...]:
        found = self._lines.get(channel)
        if found is None:
            is_wanted = not self._names or self._matches((str(channel),))
            found = self._lines[channel] = (Line(channel, str(channel)),) if is_wanted else ()
        return found

    def _matches(self, called: tuple[str, ...]) -> frozenset[str]:
        """Return the requested names, looked up, and patterns, tried one by one, that match one of a line's names."""
        found = self._names.intersection(called)
        return found | {name for name, wanted in self._patterns if any(wanted.match(each) for each in called if each)}


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


def is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


SECOND = 1_000_000_000
LONGEST_CELL = 86_400 * SECOND
MOST_PER_SECOND = 1_000_000


class Thinning(msgspec.Struct, frozen=True):
    """The rule of a cell, and the length of cells in nanoseconds."""

    keeps: Literal["extremes", "first"]
    cell: int


def parse_thinning(pixel: str | None, rate: float | None) -> Thinning | None:
    """Parse ``pixel=20ms`` or ``rate=10``; None if samples are not thinned."""
    if pixel is not None and rate is not None:
        raise BadRequest("pixel and rate are two ways to thin samples: give one of them")
    if pixel is not None:
        try:
            cell = parse_duration(pixel) // timedelta(microseconds=1) * 1000
        except ValueError as error:
            raise BadRequest(f"pixel={pixel[:80]!r}: {error}") from None
        if not 0 < cell <= LONGEST_CELL:
            raise BadRequest(f"pixel={pixel[:80]!r}: a duration over 0 and up to a day")
        return Thinning("extremes", cell)
    if rate is not None:
        if not SECOND / LONGEST_CELL <= rate <= MOST_PER_SECOND:
            raise BadRequest(f"rate={rate}: samples per second, from once a day to {MOST_PER_SECOND:,}")
        return Thinning("first", math.ceil(SECOND / rate))
    return None


MOST_CHANNELS, MOST_PATTERNS = 1_000, 50
"""Limits of names in one request, and of patterns among them: each is matched with every channel."""


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the feed of one session, with the start grammar resolved; times are nanoseconds."""

    identity: str
    start: SessionStart
    selection: Selection = Selection()
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
        selection=Selection(names, parameters.raw),
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

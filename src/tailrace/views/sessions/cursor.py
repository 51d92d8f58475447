"""Cursors of session feeds: where a viewer stopped in a session's stream, and what was open there.

    42.1789200000000-3                            of life 42 everything up to this entry was sent
    42.1789200000000-1~1789200000000-3~17892…     thinned: of the entries up to the second one everything before this
                                                  time (ns) was sent; what is later is in entries after the first one
    42.k1234                                      the same, of the part that is read from Kafka: up to this offset
    …~n7   …~@1789200000000000000   …~end         seven bursts were sent; it began at this time (ns); it has ended

The life is the number that the session has in its stream: one that was closed and opened again has another. Invariant:
``parse(str(cursor)) == cursor``; a cursor means the same place for ever, or one that is known to be gone.
"""

from __future__ import annotations

import re

import msgspec

from tailrace.errors import BadRequest, CursorError
from tailrace.log.cursor import (
    MAX_CURSOR_BYTES,
    FromCursor,
    FromEnd,
    FromLast,
    FromStart,
    FromTime,
    parse_start,
    parse_time,
)
from tailrace.valkey.entry_id import EntryId

_PLACE = r"(?:k-?\d{1,19}|\d{1,20}-\d{1,20})"
_CURSOR = re.compile(rf"(\d{{1,19}})\.({_PLACE})(?:~({_PLACE})~(-?\d{{1,19}}))?(?:~(.+))?", re.ASCII)
_STATE = re.compile(r"(?=.)(?:n(\d{1,16}))?(?:@(-?\d{1,19}))?", re.ASCII)
_NS = re.compile(r"\d{16,19}", re.ASCII)


class StreamPosition(msgspec.Struct, frozen=True, order=True):
    """After an entry of a stream, or after an offset in Kafka, which is before every entry."""

    in_stream: bool
    major: int
    minor: int = 0

    def __str__(self) -> str:
        return f"{self.major}-{self.minor}" if self.in_stream else f"k{self.major}"

    @property
    def entry(self) -> EntryId:
        """The id of the entry; before all of them while it is in Kafka."""
        return (self.major, self.minor) if self.in_stream else (0, 0)

    @classmethod
    def of(cls, entry: EntryId) -> StreamPosition:
        """Return the place after an entry."""
        return cls(True, *entry)

    @classmethod
    def at_offset(cls, offset: int) -> StreamPosition:
        """Return the place after an offset."""
        return cls(False, offset)

    @classmethod
    def parse(cls, text: str) -> StreamPosition:
        """Read what ``str`` wrote and the grammar has checked."""
        if text.startswith("k"):
            return cls(False, int(text[1:]))
        major, _, minor = text.partition("-")
        return cls(True, int(major), int(minor))


class UnsentSamples(msgspec.Struct, frozen=True):
    """What a thinned feed had not sent at its place: samples from ``floor`` (ns) on, in entries after ``after``."""

    after: StreamPosition
    floor: int


class SessionCursor(msgspec.Struct, frozen=True):
    """A place in the feed of a session, and the state of its request."""

    number: int
    """Which life of the session."""
    place: StreamPosition
    held: UnsentSamples | None = None
    sent: int | None = None
    """How many bursts the request had sent, when it has a limit."""
    since: int | None = None
    """The time (ns) at which the request began, when it began at one."""
    ended: bool = False

    def __str__(self) -> str:
        held = self.held
        body = str(self.place) if held is None else f"{held.after}~{self.place}~{held.floor}"
        return f"{self.number}.{body}{self._suffix()}"

    def _suffix(self) -> str:
        if self.ended:
            return "~end"
        count = "" if self.sent is None else f"n{self.sent}"
        since = "" if self.since is None else f"@{self.since}"
        return f"~{count}{since}" if count or since else ""

    @property
    def origin(self) -> StreamPosition:
        """After which place it is read on."""
        return self.place if self.held is None else self.held.after

    def renewed(self) -> SessionCursor:
        """Return the same place for a new request: what was sent is counted anew, when it began is not."""
        return SessionCursor(self.number, self.place, self.held, None, self.since)

    @classmethod
    def parse(cls, text: str) -> SessionCursor:
        """Read a cursor; anything else is a CursorError."""
        if len(text) > MAX_CURSOR_BYTES:
            raise CursorError(f"a cursor has at most {MAX_CURSOR_BYTES} bytes; this one has {len(text)}")
        found = _CURSOR.fullmatch(text.strip())
        state = None if found is None or found[5] in (None, "end") else _STATE.fullmatch(found[5])
        if found is None or (state is None and found[5] not in (None, "end")):
            raise CursorError(
                f"cannot read cursor {text[:80]!r}: expected the id of a frame of a session, such as 42.1789200000000-3"
            )
        first, held = StreamPosition.parse(found[2]), None
        place = first
        if found[3] is not None:
            place = StreamPosition.parse(found[3])
            held = UnsentSamples(first, int(found[4]))
            if first > place:
                raise CursorError(f"cannot read cursor {text[:80]!r}: its first place is behind its second")
        sent, since = (None, None) if state is None else state.groups()
        return cls(
            int(found[1]),
            place,
            held,
            None if sent is None else int(sent),
            None if since is None else int(since),
            found[5] == "end",
        )


class FromMoment(msgspec.Struct, frozen=True):
    """Samples at or after a time, in nanoseconds."""

    time: int


class FromSessionCursor(msgspec.Struct, frozen=True):
    """After a cursor."""

    cursor: SessionCursor


SessionStart = FromStart | FromEnd | FromLast | FromMoment | FromSessionCursor


def parse_session_start(text: str, now_ms: int) -> SessionStart:
    """Read ``start | end | -N | TIME | -1h | CURSOR``; a time may be nanoseconds, as frames have them."""
    text = text.strip()
    if _NS.fullmatch(text):
        return FromMoment(int(text))
    if is_session_cursor(text):
        return FromSessionCursor(SessionCursor.parse(text))
    start = parse_start(text, 1, now_ms)
    if isinstance(start, FromTime):
        return FromMoment(start.time_ms * 1_000_000)
    if isinstance(start, FromCursor):
        raise CursorError(f"{text[:80]!r} is no cursor of a session: take the id of one of its frames")
    return start


def parse_session_until(text: str, now_ms: int) -> int | SessionCursor:
    """Read where a request ends: a time, in nanoseconds if it is a number, or a cursor."""
    text = text.strip()
    if _NS.fullmatch(text):
        return int(text)
    if is_session_cursor(text):
        return SessionCursor.parse(text)
    try:
        return parse_time(text, now_ms) * 1_000_000
    except BadRequest:
        raise BadRequest(f"cannot read until={text[:80]!r}: a time, or a cursor up to which to read") from None


def is_session_cursor(text: str) -> bool:
    """Whether a text is meant as a cursor of a session, and not as another start."""
    return re.match(rf"\d+\.{_PLACE}", text, re.ASCII) is not None

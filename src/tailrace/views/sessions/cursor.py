"""Cursors of session feeds: a viewer's position in a session, and the samples not yet sent there.

    42.1789200000000-3                            of life 42 everything up to this entry was sent
    42.1789200000000-1~1789200000000-3~17892…     thinned: of the entries up to the second one everything before this
                                                  time (ns) was sent; later samples are in entries after the first one
    42.k1234                                      the same in the part that is read from Kafka: up to this offset
    …~n7   …~@1789200000000000000   …~end         seven bursts were sent; the feed began at this time (ns); it has ended

The life is the session's number in its stream: a session that was closed and opened again has another one. Invariant:
``parse(str(cursor)) == cursor``; a cursor means the same position for ever, or one that is known to be gone.
"""

from __future__ import annotations

import re

import msgspec

from tailrace.errors import BadRequest, CursorError
from tailrace.log.cursor import MAX_CURSOR_BYTES, FromCursor, FromEnd, FromLast, FromStart, FromTime, parse_start
from tailrace.log.entry_id import EntryId
from tailrace.log.event import parse_time

_POSITION = r"(?:k-?\d{1,19}|\d{1,20}-\d{1,20})"
_CURSOR = re.compile(rf"(\d{{1,19}})\.({_POSITION})(?:~({_POSITION})~(-?\d{{1,19}}))?(?:~(.+))?", re.ASCII)
_STATE = re.compile(r"(?=.)(?:n(\d{1,16}))?(?:@(-?\d{1,19}))?", re.ASCII)
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
        if text.startswith("k"):
            return cls(False, int(text[1:]))
        major, _, minor = text.partition("-")
        return cls(True, int(major), int(minor))


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
        return f"{self.number}.{body}{self._suffix()}"

    def _suffix(self) -> str:
        if self.ended:
            return "~end"
        count = "" if self.sent is None else f"n{self.sent}"
        since = "" if self.since is None else f"@{self.since}"
        return f"~{count}{since}" if count or since else ""

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
        state = None if found is None or found[5] in (None, "end") else _STATE.fullmatch(found[5])
        if found is None or (state is None and found[5] not in (None, "end")):
            raise CursorError(
                f"cannot read cursor {text[:80]!r}: expected the id of a frame of a session, such as 42.1789200000000-3"
            )
        first, unsent = StreamPosition.parse(found[2]), None
        position = first
        if found[3] is not None:
            position = StreamPosition.parse(found[3])
            unsent = UnsentSamples(first, int(found[4]))
            if first > position:
                raise CursorError(f"cannot read cursor {text[:80]!r}: its first position is behind its second")
        sent, since = (None, None) if state is None else state.groups()
        return cls(
            int(found[1]),
            position,
            unsent,
            None if sent is None else int(sent),
            None if since is None else int(since),
            found[5] == "end",
        )


class FromMoment(msgspec.Struct, frozen=True):
    """Samples at or after a time, in nanoseconds."""

    time: int


class FromSessionCursor(msgspec.Struct, frozen=True):
    """Everything after a cursor."""

    cursor: SessionCursor


SessionStart = FromStart | FromEnd | FromLast | FromMoment | FromSessionCursor


def parse_session_start(text: str, now_ms: int) -> SessionStart:
    """Parse ``start | end | -N | TIME | -1h | CURSOR``; a time may be nanoseconds, as in frames."""
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
    """Parse the end of a request: a time, in nanoseconds if it is a number, or a cursor."""
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
    """Return True if a text looks like a cursor of a session, and not like another start."""
    return re.match(rf"\d+\.{_POSITION}", text, re.ASCII) is not None

"""Cursors: the text with which a reader of any feed resumes. Starts: the text that says where a request begins.

    1789200000.42              one log: epoch and number of the last event seen
    1789200000.42,.57,0.0      several logs in request order; an epoch equal to the one before is left out
    1789200000.42+3-9,.57      in the first log the events 45 to 51 were seen too, those between were not
    1789200000.42~7            the request has a limit and has sent seven events
    1789200000.42~@1789200000  the request began at a time, in milliseconds: older events are left out
    1789200000.42~end          the request has ended: resuming with it returns nothing more

Invariant: ``parse(str(cursor)) == cursor`` for every cursor, and a cursor means the same position for ever, or one that
is known to be gone. ``0.0`` is the position before everything.
"""

from __future__ import annotations

import re
from typing import ClassVar, TypeAlias

import msgspec

from tailrace.errors import BadRequest, CursorError
from tailrace.log.event import find_time

MAX_CURSOR_BYTES = 4096
MAX_NAMES = 200
_POSITION = re.compile(r"(\d{0,16})\.(\d{1,16})((?:\+\d{1,16}-\d{1,16})*)", re.ASCII)
_RANGE = re.compile(r"\+(\d+)-(\d+)", re.ASCII)
_STATE = re.compile(r"(?=.)(\d{1,16})?(?:@(-?\d{1,16}))?", re.ASCII)


class Position(msgspec.Struct, frozen=True):
    """A position in one log: after the event with this number, in this epoch."""

    epoch: int = 0
    number: int = 0

    START: ClassVar[Position]

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


Position.START = Position()

EntryId: TypeAlias = tuple[int, int]
"""A position in a Valkey stream: the id of an entry, milliseconds and a sequence number within the millisecond."""
BEGINNING: EntryId = (0, 0)
"""Id below that of every entry."""
END: EntryId = ((1 << 64) - 1, (1 << 64) - 1)


def parse_id(text: bytes | str) -> EntryId:
    """Read the id of an entry, or raise ValueError."""
    ms, _, seq = (text.decode() if isinstance(text, bytes) else text).partition("-")
    return int(ms), int(seq or 0)


def id_text(entry: EntryId) -> str:
    """Return the text of an id, as Valkey writes it."""
    return f"{entry[0]}-{entry[1]}"


def before(entry: EntryId) -> EntryId:
    """Return the greatest id below another one."""
    ms, seq = entry
    return (ms, seq - 1) if seq else (ms - 1, END[1]) if ms else BEGINNING


Ranges = tuple[tuple[int, int], ...]
"""Ranges of numbers, first and last, in order and apart from each other."""


class Cursor(msgspec.Struct, frozen=True):
    """A position in a feed over one or several logs."""

    positions: tuple[Position, ...]
    sent: int | None = None
    """Number of events that a request with a limit has sent."""
    since_ms: int | None = None
    """Time at which the request began, if it began at one."""
    ended: bool = False
    ahead: tuple[Ranges, ...] = ()
    """For each log the events seen beyond its position, in the same epoch; empty if no log has any."""

    def __str__(self) -> str:
        parts: list[str] = []
        last_epoch = None
        for at, position in enumerate(self.positions):
            text = f".{position.number}" if position.epoch == last_epoch else str(position)
            if self.ahead and self.ahead[at]:
                text += "".join(f"+{low - position.number}-{high - position.number}" for low, high in self.ahead[at])
            parts.append(text)
            last_epoch = position.epoch
        return ",".join(parts) + self.suffix

    @property
    def suffix(self) -> str:
        """State of the request, which follows the positions."""
        if self.ended:
            return "~end"
        if self.sent is None and self.since_ms is None:
            return ""
        count = "" if self.sent is None else str(self.sent)
        return f"~{count}" if self.since_ms is None else f"~{count}@{self.since_ms}"

    def last_seen(self, at: int) -> Position:
        """Return the position after the last event seen of one of the logs."""
        ahead = self.ahead[at] if self.ahead else ()
        return Position(self.positions[at].epoch, ahead[-1][1]) if ahead else self.positions[at]

    @classmethod
    def parse(cls, text: str, names: int) -> Cursor:
        """Read a cursor of a feed over ``names`` logs, or raise CursorError."""
        if len(text) > MAX_CURSOR_BYTES:
            raise CursorError(f"a cursor has at most {MAX_CURSOR_BYTES} bytes; this one has {len(text)}")
        body, tilde, tail = text.strip().partition("~")
        sent, since_ms, ended = parse_state(tail, text) if tilde else (None, None, False)
        positions: list[Position] = []
        ahead: list[Ranges] = []
        for part in body.split(","):
            match = _POSITION.fullmatch(part)
            if match is None or (not match[1] and not positions):
                raise CursorError(f"cannot read cursor {text[:80]!r}: expected EPOCH.NUMBER, as in the id of an event")
            epoch = int(match[1]) if match[1] else positions[-1].epoch
            number = int(match[2])
            positions.append(Position(epoch, number))
            ranges = tuple((number + int(low), number + int(high)) for low, high in _RANGE.findall(match[3]))
            ends = [number, *(end for both in ranges for end in both)]
            if ends != sorted(ends):
                raise CursorError(f"cannot read cursor {text[:80]!r}: its ranges are not in order")
            ahead.append(ranges)
        if len(positions) != names:
            raise CursorError(f"the cursor is of a feed over {len(positions)} stream(s), the request is for {names}")
        return cls(tuple(positions), sent, since_ms, ended, tuple(ahead) if any(ahead) else ())


def parse_state(tail: str, cursor: str) -> tuple[int | None, int | None, bool]:
    """Read the part of a cursor after ``~``; return events sent, start time, and whether the request has ended."""
    if tail == "end":
        return None, None, True
    state = _STATE.fullmatch(tail)
    if state is None:
        raise CursorError(f"cannot read cursor {cursor[:80]!r}: after ~ comes a count, @ and a time, or 'end'")
    sent, since = state.groups()
    return None if sent is None else int(sent), None if since is None else int(since), False


class FromStart(msgspec.Struct, frozen=True):
    """Begin before everything that exists."""


class FromEnd(msgspec.Struct, frozen=True):
    """Begin after everything that exists now."""


class FromLast(msgspec.Struct, frozen=True):
    """Begin with the last ``count`` events that exist now."""

    count: int


class FromTime(msgspec.Struct, frozen=True):
    """Begin with the first event at or after a time."""

    time_ms: int


class FromCursor(msgspec.Struct, frozen=True):
    """Begin after a cursor."""

    cursor: Cursor


Start = FromStart | FromEnd | FromLast | FromTime | FromCursor
MAX_LAST = 100_000
"""Most events that ``-N`` may ask for, over all names: all their positions are looked up before the first is sent."""


def parse_start(text: str, names: int, now_ms: int) -> Start:
    """Read ``start | end | -N | TIME | -1h | CURSOR``; ``@`` may stand before a time."""
    text = text.strip()
    if text == "start":
        return FromStart()
    if text == "end":
        return FromEnd()
    if re.fullmatch(r"-\d{1,7}", text, re.ASCII):
        count = int(text[1:])
        if count * names > MAX_LAST:
            raise BadRequest(f"from={text} over {names} name(s): at most {MAX_LAST} events in all; use a time")
        return FromLast(count)
    time_ms = find_time(text.removeprefix("@"), now_ms)
    if time_ms is not None:
        return FromTime(time_ms)
    if _POSITION.match(text) and not text.startswith("@"):
        return FromCursor(Cursor.parse(text, names))
    raise BadRequest(f"cannot read start {text[:80]!r}: start, end, -N, a time, an age like -1h, or a cursor")

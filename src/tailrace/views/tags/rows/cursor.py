"""Cursors of feeds over rows of tags: where a reader stopped, and what was open or already delivered beyond.

    uEQ-mgAAAHrGAgICAgICAgA                         one tag: everything up to a stamp is delivered
    uEQ-mg…AgA,EQ-mg…AgQ~7                          two tags in request order; seven events were sent before
    uEQ-mg…AgA.rq83vEjRWeJ01z_3k                    beyond that stamp a place is delivered up to an offset
    uEQ-mg…AgA.oq83vEjRWeJ03_-kz_0                  a source is delivered up to a number; what follows may be late

A part is the low-water stamp of its tag; then what lies above it. A place or a source is named by a hash of 64 bits, so
that no name makes a cursor long. Invariant: ``parse(str(cursor)) == cursor``; only letters, digits and ``-_.,~@``
occur; a reader that begins at a cursor delivers exactly what the one that gave it out had not.

Gaps: the events of a source that came before the ones below them, and how long these are waited for.

Numbers of a source in a tag have no gap: 1, 2, 3, or from further below if events were tagged later than written. So
what is missing is known by its number. Invariant: a source whose numbers have a gap is held back, and nothing else is;
of what is held nothing is given out before all below it is, or before the wait for it is over.

How the rows of a tag are read: how far behind the clock, how long what is missing is waited for, and the limits.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Generic, Protocol, TypeVar
from uuid import UUID

import msgspec

from tailrace.errors import CursorError
from tailrace.log.cursor import MAX_CURSOR_BYTES, Cursor
from tailrace.log.event import Partition
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import first_of, ms_of

MAX_TAGS = 20
"""Tags of one feed, so that each has room in the cursor."""
BEGIN = first_of(-(1 << 53))
"""Before every stamp."""

_ENTRY = 42
"""Bytes that something above the low-water stamp takes, at most."""
_STAMP = 23
_STATE = 40

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_PART = re.compile(r"[A-Za-z0-9_-]{22}(?:\.[ro][A-Za-z0-9_-]{11}[0-9a-z_-]+)*", re.ASCII)
_REACHED = re.compile(r"r([A-Za-z0-9_-]{11})([0-9a-z]{1,10})_(-?[0-9a-z]{1,10})", re.ASCII)
_OPEN = re.compile(r"o([A-Za-z0-9_-]{11})(-?[0-9a-z]{1,10})_(-?[0-9a-z]{1,10})_([0-9a-z]{1,10})", re.ASCII)


class Reached(msgspec.Struct, frozen=True):
    """Everything of a place up to an offset is delivered, or belongs to a source that is open."""

    partition: str
    """The hash of its name."""
    offset: int
    ms: int
    """No stamp of that is later than this millisecond."""


class OpenSource(msgspec.Struct, frozen=True):
    """A source of which something is missing below what was seen, or of which more is delivered than the stamp says."""

    source: str
    """The hash of its name."""
    number: int
    """Of its last event that was delivered; what follows is wanted. With ``first`` 0 says that nothing was."""
    since_ms: int
    """What is missing has this millisecond or a later one."""
    first: int = 0
    """When it was seen for the first time with this number, numbers below it need not exist; 0 = it was known."""


class TagPosition(msgspec.Struct, frozen=True):
    """A place in the rows of one tag."""

    low: UUID
    reached: tuple[Reached, ...] = ()
    open: tuple[OpenSource, ...] = ()

    def __str__(self) -> str:
        text = _packed(self.low.bytes)
        if not self.reached and not self.open:
            return text
        low_ms = ms_of(self.low)
        for place in self.reached:
            text += f".r{place.partition}{_written(place.offset)}_{_written(place.ms - low_ms)}"
        for pid in self.open:
            since = _written(pid.since_ms - low_ms)
            text += f".o{pid.source}{_written(pid.number)}_{since}_{_written(pid.first)}"
        return text

    @classmethod
    def parse(cls, text: str) -> TagPosition:
        """Read what ``str`` wrote; anything else is a ValueError."""
        if not _PART.fullmatch(text):
            raise ValueError
        stamp, *entries = text.split(".")
        low = UUID(bytes=urlsafe_b64decode(stamp + "=="))
        low_ms = ms_of(low)
        reached: list[Reached] = []
        sources: list[OpenSource] = []
        for entry in entries:
            if found := _REACHED.fullmatch(entry):
                reached.append(Reached(found[1], int(found[2], 36), low_ms + int(found[3], 36)))
            elif found := _OPEN.fullmatch(entry):
                since_ms = low_ms + int(found[3], 36)
                sources.append(OpenSource(found[1], int(found[2], 36), since_ms, int(found[4], 36)))
            else:
                raise ValueError
        part = cls(low, tuple(reached), tuple(sources))
        if low.version != 1 or str(part) != text:
            raise ValueError
        return part


class TagCursor(msgspec.Struct, frozen=True):
    """A place in a feed over one or several tags, and the state of its request."""

    parts: tuple[TagPosition, ...]
    sent: int | None = None
    since_ms: int | None = None
    ended: bool = False

    def __str__(self) -> str:
        return written(map(str, self.parts), self.suffix)

    @property
    def suffix(self) -> str:
        """What follows the parts: the state of the request."""
        return Cursor((), self.sent, self.since_ms, self.ended).suffix

    @classmethod
    def parse(cls, text: str, tags: int) -> TagCursor:
        """Read a cursor of a feed over so many tags; anything else is a CursorError."""
        if len(text) > MAX_CURSOR_BYTES:
            raise CursorError(f"a cursor has at most {MAX_CURSOR_BYTES} bytes; this one has {len(text)}")
        body, tilde, state = text.strip().partition("~")
        if not is_tag_cursor(body):
            raise CursorError(f"cannot read cursor {text[:80]!r}: expected the id of an event of a feed over tags")
        try:
            parts = tuple(TagPosition.parse(part) for part in body[1:].split(","))
        except (ValueError, OverflowError):
            raise CursorError(
                f"cannot read cursor {text[:80]!r}: it is damaged; take the id of an event as it was sent"
            ) from None
        if len(parts) != tags:
            raise CursorError(f"the cursor is of a feed over {len(parts)} tag(s), the request is for {tags}")
        read = Cursor.parse(f"0.0{tilde}{state}", 1)
        return cls(parts, read.sent, read.since_ms, read.ended)


def is_tag_cursor(text: str) -> bool:
    """Whether a text is meant as a cursor of a feed over tags, and not as another start."""
    return text.startswith("u") and len(text) > 22


def written(parts: Iterable[str], suffix: str) -> str:
    """Return the text of a cursor from the texts of its parts."""
    return f"u{','.join(parts)}{suffix}"


def room_for(tags: int) -> int:
    """Return how much may be above the low-water stamp of each of so many tags, for the cursor to have its size."""
    return (MAX_CURSOR_BYTES - _STATE - _STAMP * tags) // (_ENTRY * tags)


@lru_cache(20_000)
def hashed(name: str) -> str:
    """Return the hash under which a cursor names a source, or a place."""
    return _packed(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest())


@lru_cache(10_000)
def hashed_partition(place: Partition) -> str:
    """Return the hash under which a cursor names a place."""
    return hashed(str(place))


def _packed(given: bytes) -> str:
    return urlsafe_b64encode(given).decode().rstrip("=")


def _written(number: int) -> str:
    sign, number = ("-", -number) if number < 0 else ("", number)
    text = ""
    while True:
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
        if not number:
            return sign + text


class TagRow(Protocol):
    """An event in a tag, as it lies in the store; what else it has is its reader's matter."""

    @property
    def source(self) -> str: ...
    @property
    def tag_seq(self) -> int: ...
    @property
    def timeuuid(self) -> UUID: ...
    @property
    def partition(self) -> Partition: ...
    @property
    def offset(self) -> int: ...


R = TypeVar("R", bound=TagRow)


class GapTimeouts(msgspec.Struct, frozen=True):
    """How long what is missing is waited for."""

    gap_ms: int = 10_000
    first_ms: int = 100
    """For what may lie below the first event of a source that is seen."""
    most: int = 5_000
    """Numbers that are searched for; more are not waited for at all."""


class HeldSource(Generic[R]):
    """What is held of one source."""

    def __init__(self, pid: str, number: int, after: UUID, first: int, now_ms: int) -> None:
        self.source = pid
        self.number = number
        """Of its last event that was given out; 0 = none."""
        self.after = after
        """What is missing lies after this stamp."""
        self.first = first
        """Numbers below this one need not exist: it was the first that was seen. 0 = the source was known."""
        self._since_ms = now_ms
        self._rows: dict[int, tuple[R, int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    @property
    def lowest(self) -> R:
        """The event with the lowest number."""
        return self._rows[min(self._rows)][0]

    @property
    def missing(self) -> tuple[int, int]:
        """The first and the last number that is missing below the lowest event."""
        return self.number + 1, min(self._rows) - 1

    @property
    def is_lenient(self) -> bool:
        """Whether what is missing below the lowest event need not exist."""
        return min(self._rows) <= self.first

    def add(self, row: R, now_ms: int) -> None:
        """Hold one more."""
        self._rows[row.tag_seq] = row, now_ms

    def next(self) -> R | None:
        """Take out the event whose turn it is, if it is there."""
        found = self._rows.pop(self.number + 1, None)
        if found is None:
            return None
        self.number += 1
        self.after = found[0].timeuuid
        return found[0]

    def wait_again(self) -> None:
        """Wait for the next gap: since what follows it was seen."""
        self._since_ms = min((seen_ms for _, seen_ms in self._rows.values()), default=self._since_ms)

    def set_back(self, now_ms: int) -> None:
        """Wait no longer than from now on, if the clock was set back."""
        self._since_ms = min(self._since_ms, now_ms)

    def pass_over(self) -> None:
        """Wait no longer for what is missing below the lowest event."""
        self.number = min(self._rows) - 1

    def deadline_ms(self, waits: GapTimeouts) -> int:
        """Return when what is missing is waited for no longer."""
        first, last = self.missing
        if last - first >= waits.most:
            return self._since_ms
        return self._since_ms + (waits.first_ms if self.is_lenient else waits.gap_ms)


LEAST_LAG_MS, MOST_LAG_MS = 50, 5_000
"""Between these the delay lies when it is measured."""


class ReadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a tag is read."""

    delay_ms: int | None = 5_000
    """How far behind the clock; None = as far as the places are."""
    future_ms: int = 1_000
    """How far ahead of the clock a stamp can be, unless a clock was set."""
    span_ms: int = 3_600_000
    """How long a bucket is."""
    waits: GapTimeouts = GapTimeouts()
    short_ms: int | None = 1_000
    """How often it looks back a little; None = never."""
    short_period_ms: int | None = 5_000
    """How far; None = to the start of the bucket before, which is as far as it ever looks."""
    long_ms: int | None = 120_000
    long_period_ms: int | None = None
    known: int = 100_000
    """Sources whose numbers are remembered."""
    held: int = 10_000
    """Events that are held, over all sources; no more are read then."""
    room: int = 32
    """What the cursor may name above its low-water stamp; no more is read then."""

    def to_ms(self, now_ms: int, floors: Collection[int]) -> int:
        """Return up to which millisecond is read, given the floors of all places."""
        if max(floors, default=now_ms) > now_ms + self.future_ms:
            # A clock was set, ours or theirs: all there is, or it would have to wait until this one is there too.
            return max(floors)
        if self.delay_ms is not None:
            return now_ms - self.delay_ms
        behind_ms = now_ms - min(floors) + 1 if floors else 0
        return now_ms - min(max(behind_ms, LEAST_LAG_MS), MOST_LAG_MS)


class BacktrackSchedule:
    """When it is looked back again, and how far."""

    def __init__(self, reads: ReadSettings, now_ms: int) -> None:
        self._reads = reads
        self._short_due = now_ms + (reads.short_ms or 0)
        self._long_due = now_ms + (reads.long_ms or 0)

    @property
    def due_ms(self) -> int | None:
        """When it is time again; None = never."""
        return None if self._reads.short_ms is None else self._short_due

    def since_ms(self, at_ms: int, now_ms: int) -> int | None:
        """Return from which millisecond on to look, where reading is at one; None if it is not time."""
        reads = self._reads
        if not _is_over(self._short_due, reads.short_ms, now_ms):
            return None
        self._short_due = now_ms + (reads.short_ms or 0)
        period_ms = reads.short_period_ms
        if _is_over(self._long_due, reads.long_ms, now_ms):
            self._long_due = now_ms + (reads.long_ms or 0)
            period_ms = reads.long_period_ms
        furthest_ms = bucket_start(at_ms, reads.span_ms) - reads.span_ms
        return furthest_ms if period_ms is None else max(furthest_ms, at_ms - period_ms)


def _is_over(due_ms: int, every_ms: int | None, now_ms: int) -> bool:
    """Whether a turn is over: also when it can only have begun before the clock was set back."""
    return every_ms is not None and not due_ms - every_ms <= now_ms < due_ms

"""Cursors of feeds over rows: for each tag the position to resume at.

    uEQ-mgAAAHrGAgICAgICAgA                         one tag: everything up to a timeuuid is delivered
    uEQ-mg…AgA,EQ-mg…AgQ~7                          two tags in request order; seven events were sent before
    uEQ-mg…AgA.rq83vEjRWeJ01z_3k                    beyond the timeuuid, a partition is delivered up to an offset
    uEQ-mg…AgA.oq83vEjRWeJ03_-kz_0                  a source is delivered up to a number; later ones may be missing

A position is the low timeuuid of its tag, followed by what is delivered above it. It names partitions and sources by
a hash of 64 bits, so that no name makes a cursor long. Invariant: ``parse(str(cursor)) == cursor``; only letters,
digits and ``-_.,~@`` occur; a reader that resumes at a cursor delivers exactly the rest.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from uuid import UUID

import msgspec

from tailrace.errors import CursorError
from tailrace.log.cursor import MAX_CURSOR_BYTES, Cursor
from tailrace.log.event import Partition
from tailrace.log.timeuuid import first_of, ms_of

MAX_TAGS = 20
"""Tags of one feed, so that each has room in the cursor."""
BEGIN = first_of(-(1 << 53))
"""Timeuuid before all events."""

_ENTRY_BYTES = 42
"""Longest text of one partition or source above the low timeuuid."""
_TIMEUUID_BYTES = 23
_STATE_BYTES = 40

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_PART = re.compile(r"[A-Za-z0-9_-]{22}(?:\.[ro][A-Za-z0-9_-]{11}[0-9a-z_-]+)*", re.ASCII)
_REACHED = re.compile(r"r([A-Za-z0-9_-]{11})([0-9a-z]{1,10})_(-?[0-9a-z]{1,10})", re.ASCII)
_OPEN = re.compile(r"o([A-Za-z0-9_-]{11})(-?[0-9a-z]{1,10})_(-?[0-9a-z]{1,10})_([0-9a-z]{1,10})", re.ASCII)


class Reached(msgspec.Struct, frozen=True):
    """A partition whose events up to an offset are delivered, or belong to open sources."""

    partition: str
    """Hash of its name."""
    offset: int
    ms: int
    """Latest millisecond of these events' timeuuids."""


class OpenSource(msgspec.Struct, frozen=True):
    """A source with missing numbers, or with events delivered above the low timeuuid."""

    source: str
    """Hash of its name."""
    number: int
    """Number of its last delivered event; 0, if ``first`` is set, means none."""
    since_ms: int
    """Missing events have this millisecond or a later one."""
    first: int = 0
    """If set: the lowest number seen of a source that was not known; lower numbers need not exist."""


class TagPosition(msgspec.Struct, frozen=True):
    """A position in the rows of one tag: everything up to ``low`` is delivered, and the events that it lists."""

    low: UUID
    reached: tuple[Reached, ...] = ()
    open: tuple[OpenSource, ...] = ()

    def __str__(self) -> str:
        text = _packed(self.low.bytes)
        if not self.reached and not self.open:
            return text
        low_ms = ms_of(self.low)
        for each in self.reached:
            text += f".r{each.partition}{_base36(each.offset)}_{_base36(each.ms - low_ms)}"
        for source in self.open:
            since = _base36(source.since_ms - low_ms)
            text += f".o{source.source}{_base36(source.number)}_{since}_{_base36(source.first)}"
        return text

    @classmethod
    def parse(cls, text: str) -> TagPosition:
        """Read the result of ``str``; raise ValueError for anything else."""
        if not _PART.fullmatch(text):
            raise ValueError
        head, *entries = text.split(".")
        low = UUID(bytes=urlsafe_b64decode(head + "=="))
        low_ms = ms_of(low)
        reached: list[Reached] = []
        sources: list[OpenSource] = []
        for entry in entries:
            if match := _REACHED.fullmatch(entry):
                reached.append(Reached(match[1], int(match[2], 36), low_ms + int(match[3], 36)))
            elif match := _OPEN.fullmatch(entry):
                since_ms = low_ms + int(match[3], 36)
                sources.append(OpenSource(match[1], int(match[2], 36), since_ms, int(match[4], 36)))
            else:
                raise ValueError
        position = cls(low, tuple(reached), tuple(sources))
        if low.version != 1 or str(position) != text:
            raise ValueError
        return position


class TagCursor(msgspec.Struct, frozen=True):
    """The positions of a feed over one or several tags, and the state of its request."""

    positions: tuple[TagPosition, ...]
    sent: int | None = None
    since_ms: int | None = None
    ended: bool = False

    def __str__(self) -> str:
        return join_cursor(map(str, self.positions), Cursor((), self.sent, self.since_ms, self.ended).suffix)

    @classmethod
    def parse(cls, text: str, tags: int) -> TagCursor:
        """Read a cursor of a feed over ``tags`` tags; raise CursorError for anything else."""
        if len(text) > MAX_CURSOR_BYTES:
            raise CursorError(f"a cursor has at most {MAX_CURSOR_BYTES} bytes; this one has {len(text)}")
        body, tilde, state = text.strip().partition("~")
        if not is_tag_cursor(body):
            raise CursorError(f"cannot read cursor {text[:80]!r}: expected the id of an event of a feed over tags")
        try:
            positions = tuple(TagPosition.parse(part) for part in body[1:].split(","))
        except (ValueError, OverflowError):
            raise CursorError(
                f"cannot read cursor {text[:80]!r}: it is damaged; take the id of an event as it was sent"
            ) from None
        if len(positions) != tags:
            raise CursorError(f"the cursor is of a feed over {len(positions)} tag(s), the request is for {tags}")
        read = Cursor.parse(f"0.0{tilde}{state}", 1)
        return cls(positions, read.sent, read.since_ms, read.ended)


def is_tag_cursor(text: str) -> bool:
    """Return True if a text looks like a cursor of a feed over rows."""
    return text.startswith("u") and len(text) > 22


def join_cursor(positions: Iterable[str], state: str) -> str:
    """Return the text of a cursor, from the texts of its positions and of the request's state."""
    return f"u{','.join(positions)}{state}"


def room_for(tags: int) -> int:
    """Return how many entries each of ``tags`` tags may have above its low timeuuid, within the size of a cursor."""
    return (MAX_CURSOR_BYTES - _STATE_BYTES - _TIMEUUID_BYTES * tags) // (_ENTRY_BYTES * tags)


@lru_cache(20_000)
def hashed(name: str) -> str:
    """Return the hash by which a cursor names a source or a partition."""
    return _packed(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest())


@lru_cache(10_000)
def hashed_partition(partition: Partition) -> str:
    """Return the hash by which a cursor names a partition."""
    return hashed(str(partition))


def _packed(data: bytes) -> str:
    return urlsafe_b64encode(data).decode().rstrip("=")


def _base36(number: int) -> str:
    sign, number = ("-", -number) if number < 0 else ("", number)
    text = ""
    while True:
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
        if not number:
            return sign + text

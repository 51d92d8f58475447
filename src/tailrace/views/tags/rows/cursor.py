"""Cursors of feeds over rows of tags: where a reader stopped, and what was open or already delivered beyond.

    uEQ-mgAAAHrGAgICAgICAgA                         one tag: everything up to a stamp is delivered
    uEQ-mg…AgA,EQ-mg…AgQ~7                          two tags in request order; seven events were sent before
    uEQ-mg…AgA.rq83vEjRWeJ01z_3k                    beyond that stamp a place is delivered up to an offset
    uEQ-mg…AgA.oq83vEjRWeJ03_-kz_0                  a source is delivered up to a number; what follows may be late

A part is the low-water stamp of its tag; then what lies above it. A place or a source is named by a hash of 64 bits, so
that no name makes a cursor long. Invariant: ``parse(str(cursor)) == cursor``; only letters, digits and ``-_.,~@``
occur; a reader that begins at a cursor delivers exactly what the one that gave it out had not.
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
from tailrace.log.event import Source
from tailrace.views.tags.stamp import first_of, ms_of

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

    place: str
    """The hash of its name."""
    offset: int
    ms: int
    """No stamp of that is later than this millisecond."""


class Open(msgspec.Struct, frozen=True):
    """A source of which something is missing below what was seen, or of which more is delivered than the stamp says."""

    pid: str
    """The hash of its name."""
    number: int
    """Of its last event that was delivered; what follows is wanted. With ``first`` 0 says that nothing was."""
    since_ms: int
    """What is missing has this millisecond or a later one."""
    first: int = 0
    """When it was seen for the first time with this number, numbers below it need not exist; 0 = it was known."""


class Part(msgspec.Struct, frozen=True):
    """A place in the rows of one tag."""

    low: UUID
    reached: tuple[Reached, ...] = ()
    open: tuple[Open, ...] = ()

    def __str__(self) -> str:
        text = _packed(self.low.bytes)
        if not self.reached and not self.open:
            return text
        low_ms = ms_of(self.low)
        for place in self.reached:
            text += f".r{place.place}{_written(place.offset)}_{_written(place.ms - low_ms)}"
        for pid in self.open:
            since = _written(pid.since_ms - low_ms)
            text += f".o{pid.pid}{_written(pid.number)}_{since}_{_written(pid.first)}"
        return text

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read what ``str`` wrote; anything else is a ValueError."""
        if not _PART.fullmatch(text):
            raise ValueError
        stamp, *entries = text.split(".")
        low = UUID(bytes=urlsafe_b64decode(stamp + "=="))
        low_ms = ms_of(low)
        reached: list[Reached] = []
        sources: list[Open] = []
        for entry in entries:
            if found := _REACHED.fullmatch(entry):
                reached.append(Reached(found[1], int(found[2], 36), low_ms + int(found[3], 36)))
            elif found := _OPEN.fullmatch(entry):
                since_ms = low_ms + int(found[3], 36)
                sources.append(Open(found[1], int(found[2], 36), since_ms, int(found[4], 36)))
            else:
                raise ValueError
        part = cls(low, tuple(reached), tuple(sources))
        if low.version != 1 or str(part) != text:
            raise ValueError
        return part


class TagCursor(msgspec.Struct, frozen=True):
    """A place in a feed over one or several tags, and the state of its request."""

    parts: tuple[Part, ...]
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
            parts = tuple(Part.parse(part) for part in body[1:].split(","))
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
def hashed_place(place: Source) -> str:
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

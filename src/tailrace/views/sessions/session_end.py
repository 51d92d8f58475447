"""How it is known that a session is over, and which lives it had: by what entries say that are still there."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from tailrace.errors import BadBurst
from tailrace.valkey.entry_id import BEGINNING, END, EntryId, before
from tailrace.views.sessions.block import unpack
from tailrace.views.sessions.burst import parse
from tailrace.views.sessions.life import Life, SessionParts
from tailrace.views.sessions.reader import entry_at, first_entries, first_entry, last_entries
from tailrace.views.sessions.streams import Located, state_of
from tailrace.views.sessions.telemetry import CLOSED


class _Called(msgspec.Struct):
    identity: str | None = None


_decode = msgspec.json.Decoder(_Called).decode


async def is_closed(parts: SessionParts, life: Life, until: EntryId) -> bool | None:
    """Whether the last entry of a life says that it is over; None if there is none any more."""
    stream = life.located.stream
    newest = await last_entries(parts.live, stream, life.number, 1, BEGINNING, until)
    entry = await entry_at(parts.live, stream, newest[0]) if newest else None
    return None if entry is None else any(state_of(text) in CLOSED for text in _said(entry.data, parts.container))


async def is_whole(parts: SessionParts, life: Life) -> bool:
    """Whether all that a life had was read, as far as can be known: another one has its place."""
    live, stream = parts.live, life.located.stream
    if life.state in CLOSED:
        return True
    closed = await is_closed(parts, life, await live.tail(stream))
    if closed is None:
        return await live.trimmed(stream, life.number) is not None
    return closed or life.located.number == life.number


async def is_of_another(parts: SessionParts, life: Life, number: int) -> bool:
    """Whether what the stream has under a number is no earlier life of this session: it has to say that it is."""
    first = await first_entry(parts.live, life.located.stream, number, BEGINNING)
    return first is not None and not await _is_called(parts, life, number, first)


async def life_between(parts: SessionParts, life: Life, begin: EntryId, later: Located) -> tuple[int, EntryId] | None:
    """Return the first life of the session after this one and before another one: its number, and the place before it.

    Lives of a session follow each other, and each has a higher number than the one before. Of one that was trimmed
    nobody knows where it began: then the place is the one up to which the life before it was read.
    """
    stream = life.located.stream
    if later.stream != stream or later.position <= begin:
        return None
    found = await first_entries(parts.live, stream, begin, later.position)
    for number in sorted(found):
        if life.number < number < later.number and await _is_called(parts, life, number, found[number]):
            is_trimmed = await parts.live.trimmed(stream, number) is not None
            return number, begin if is_trimmed else before(found[number])
    return None


async def _is_called(parts: SessionParts, life: Life, number: int, first: EntryId) -> bool:
    """Whether the first or the last entry that there is of a life says that it is of this session."""
    live, located = parts.live, life.located
    last = await last_entries(live, located.stream, number, 1, BEGINNING, END)
    for at in (first, *last):
        entry = await entry_at(live, located.stream, at)
        identity = None if entry is None else _identity(entry.data, parts.container)
        if identity is not None:
            return identity == located.identity
    return False


def _identity(block: bytes, container: str) -> str | None:
    for text in _said(block, container):
        with suppress(msgspec.DecodeError, RecursionError):
            return _decode(text).identity
    return None


def _said(block: bytes, container: str) -> list[str]:
    """Return the Session JSONs in a block."""
    try:
        messages = parse(unpack(block, container)).data
    except BadBurst:
        return []
    return [each.session_json for each in messages if each.WhichOneof("data") == "session_json"]

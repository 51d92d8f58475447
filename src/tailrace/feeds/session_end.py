"""How it is known that a session is over: by its last entry, as far as that is still there."""

from __future__ import annotations

from tailrace.errors import BadBurst
from tailrace.feeds.session_life import ENDED, Life, SessionParts
from tailrace.feeds.session_reader import entry_at, last_entries
from tailrace.model.block import unpack
from tailrace.model.burst import parse
from tailrace.stores.live import BEGINNING, EntryId, state_of


async def is_closed(parts: SessionParts, life: Life, until: EntryId) -> bool | None:
    """Whether the last entry of a life says that it is over; None if there is none any more."""
    stream = life.located.stream
    newest = await last_entries(parts.live, stream, life.number, 1, BEGINNING, until)
    entry = await entry_at(parts.live, stream, newest[0]) if newest else None
    return None if entry is None else _is_closing(entry.data, parts.container)


async def is_whole(parts: SessionParts, life: Life) -> bool:
    """Whether all that a life had was read, as far as can be known: another one has its place."""
    live, stream = parts.live, life.located.stream
    if life.state in ENDED:
        return True
    closed = await is_closed(parts, life, await live.tail(stream))
    if closed is None:
        return await live.trimmed(stream, life.number) is not None
    return closed or life.located.number == life.number


def _is_closing(block: bytes, container: str) -> bool:
    try:
        messages = parse(unpack(block, container)).data
    except BadBurst:
        return False
    return any(state_of(each.session_json) in ENDED for each in messages if each.WhichOneof("data") == "session_json")

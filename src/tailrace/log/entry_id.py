"""Ids of the entries of a Valkey stream, as tuples that compare in the order of the stream."""

from __future__ import annotations

from typing import TypeAlias

EntryId: TypeAlias = tuple[int, int]
"""Milliseconds, and a sequence number within the millisecond."""

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

"""The ids of a stream's entries: places in it that compare as they follow each other."""

from __future__ import annotations

from typing import TypeAlias

EntryId: TypeAlias = tuple[int, int]
"""Milliseconds, and a number among those of one millisecond."""

BEGINNING: EntryId = (0, 0)
"""Before every entry."""
END: EntryId = ((1 << 64) - 1, (1 << 64) - 1)


def parse_id(text: bytes | str) -> EntryId:
    """Read the id of an entry; ValueError if it is none."""
    ms, _, seq = (text.decode() if isinstance(text, bytes) else text).partition("-")
    return int(ms), int(seq or 0)


def id_text(entry: EntryId) -> str:
    """Return the id of an entry as the store writes it."""
    return f"{entry[0]}-{entry[1]}"


def before(entry: EntryId) -> EntryId:
    """Return the id right before that of an entry."""
    ms, seq = entry
    return (ms, seq - 1) if seq else (ms - 1, END[1]) if ms else BEGINNING

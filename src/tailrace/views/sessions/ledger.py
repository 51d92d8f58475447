"""The ledger of a stream: the writes of its entries, which map positions in the stream to offsets in Kafka.

Beside each stream, a second one has an entry for each write: its id is that of the write's last entry, and its fields
are the writer, the writer's marks before and after, and the write's first entry. Upkeep trims the ledger later than the
stream. Invariant: a writer's records up to the mark of a write are in entries up to its last one, and all others are in
later entries.
"""

from __future__ import annotations

import msgspec

from tailrace.log.entry_id import BEGINNING, EntryId, before, id_text, parse_id
from tailrace.valkey.keys import LEDGER_WHOLE
from tailrace.valkey.shards import mapping
from tailrace.views.sessions.streams import LiveSessions, Located

PAGE = 100
"""Writes in one read."""


class Seam(msgspec.Struct, frozen=True):
    """The border of a write: all records of a writer up to an offset are in entries up to this one, and no others."""

    offset: int
    entry: EntryId


class OffsetBounds(msgspec.Struct, frozen=True):
    """The offset of a position in a stream, exact between two writes, bounded within one."""

    low: int
    """The records of the session's life up to this one are in entries up to the position."""
    high: int
    """Those after this one are in entries after it; those between the two may be on either side."""
    begin: EntryId | None = None
    """The entry before the first one that may have records between the two, if it is known."""
    end: EntryId | None = None
    """The last entry that may have such records, if there are any."""

    @property
    def is_exact(self) -> bool:
        return self.low == self.high


class _LedgerWrite(msgspec.Struct, frozen=True):
    first: EntryId
    last: EntryId
    seen: int
    mark: int


async def seam_after(live: LiveSessions, located: Located, trimmed: EntryId) -> Seam | None:
    """Return the first seam at or after a trimmed entry; None if the stream has no mark of the session's writer."""
    # The mark first: a write that is in the stream by then, and not in the ledger afterwards, was trimmed as a whole.
    mark = await _mark(live, located)
    write = await _write_from(live, located, id_text(trimmed))
    if write is not None:
        return Seam(write.mark, write.last)
    return None if mark is None else Seam(mark, trimmed)


async def offset_bounds(live: LiveSessions, located: Located, position: EntryId) -> OffsetBounds | None:
    """Return the offset of a position among the records of the session's writer; None if it is unknown."""
    opened = located.opened or 0
    if position <= located.position:
        return OffsetBounds(opened - 1, opened - 1)
    mark = await _mark(live, located)
    write = await _write_from(live, located, f"({id_text(position)}")
    # Last: a range that is complete now was complete when it was read.
    complete = await _complete_from(live, located)
    if mark is None or complete is None:
        return None
    is_known = position >= before(complete)
    if write is None:
        return OffsetBounds(mark, mark) if is_known else None
    seen = max(write.seen, opened - 1)
    if position >= write.first:
        return OffsetBounds(seen, write.mark, before(write.first), write.last)
    return OffsetBounds(seen, seen) if is_known else OffsetBounds(opened - 1, seen, None, before(write.first))


def first_of_write(last: EntryId, first: bytes | None) -> EntryId:
    """Parse the first entry of a write; BEGINNING if the ledger lacks it: then any position may be within the write."""
    if first is None:
        return BEGINNING
    return parse_id(first) if b"-" in first else (last[0], last[1] - int(first))


async def _mark(live: LiveSessions, located: Located) -> int | None:
    key = live.keys.stream_marks(located.stream)
    (mark,) = await live.nodes.read_keyed([(key, ("HGET", key, located.writer))])
    return None if mark is None else int(mark)


async def _complete_from(live: LiveSessions, located: Located) -> EntryId | None:
    """Return the id from which on the ledger has every write; None if it is empty."""
    ledger, trimmed = live.keys.ledger(located.stream), live.keys.trimmed(located.stream)
    noted, first = await live.nodes.read_keyed(
        [(trimmed, ("HGET", trimmed, LEDGER_WHOLE)), (ledger, ("XRANGE", ledger, "-", "+", "COUNT", 1))]
    )
    if noted is not None:
        return parse_id(noted)
    return parse_id(first[0][0]) if first else None


async def _write_from(live: LiveSessions, located: Located, begin: str) -> _LedgerWrite | None:
    """Return the writer's first write in the ledger from an id on."""
    key, writer = live.keys.ledger(located.stream), located.writer.encode()
    while True:
        (writes,) = await live.nodes.read_keyed([(key, ("XRANGE", key, begin, "+", "COUNT", PAGE))])
        for entry, answer in writes:
            fields = mapping(answer)
            if fields[b"w"] == writer:
                last = parse_id(entry)
                first = first_of_write(last, fields.get(b"a"))
                return _LedgerWrite(first, last, int(fields[b"f"]), int(fields[b"m"]))
        if len(writes) < PAGE:
            return None
        begin = f"({writes[-1][0].decode()}"

"""Where the entries of a stream are in Kafka: what the ledger beside the stream says of places in it.

Each write has a row, by the id of its last entry: whose it is, from which offset to which it goes, and which is its
first entry. Rows stay for longer than entries do. All entries of a write are made in one step, so no others lie among
them; but they are not cut along records, so of a place in the middle of a write no offset is known. Invariant: what the
ledger has forgotten is never taken for what was not there.
"""

from __future__ import annotations

import msgspec

from tailrace.valkey.entry_id import BEGINNING, EntryId, before, id_text, parse_id
from tailrace.valkey.keys import LEDGER_WHOLE
from tailrace.valkey.shards import mapping
from tailrace.views.sessions.streams import LiveSessions, Located

PAGE = 100
"""Writes of a ledger that are looked at, at once."""


class Seam(msgspec.Struct, frozen=True):
    """Everything of a writer up to an offset is in entries up to this one, and nothing else of it is."""

    offset: int
    entry: EntryId


class Spot(msgspec.Struct, frozen=True):
    """Where a place of a stream is among a writer's records."""

    low: int
    """The records of the session's life up to this one are in entries up to the place."""
    high: int
    """Those after this one are in entries after it; of those between the two nobody knows."""
    begin: EntryId | None = None
    """The place before the first entry that those between the two may be in, if that is known."""
    end: EntryId | None = None
    """The last entry that they may be in, if there are any."""

    @property
    def is_exact(self) -> bool:
        return self.low == self.high


class _Write(msgspec.Struct, frozen=True):
    first: EntryId
    last: EntryId
    seen: int
    mark: int


def first_of(last: EntryId, noted: bytes | None) -> EntryId:
    """Return the first entry of a write as the ledger notes it; without that, everything may be in the middle."""
    if noted is None:
        return BEGINNING
    return parse_id(noted) if b"-" in noted else (last[0], last[1] - int(noted))


async def seam_behind(live: LiveSessions, located: Located, gone: EntryId) -> Seam | None:
    """Return the first seam at or behind an entry; None if the stream knows nothing of the session's writer."""
    # The mark first: what is in the stream by then, and not in the ledger afterwards, was trimmed as a whole.
    mark = await _mark(live, located)
    write = await _write_from(live, located, id_text(gone))
    if write is not None:
        return Seam(write.mark, write.last)
    return None if mark is None else Seam(mark, gone)


async def spot_of(live: LiveSessions, located: Located, place: EntryId) -> Spot | None:
    """Return where a place in the stream is among the records of the session's writer; None if nobody knows."""
    opened = located.opened or 0
    if place <= located.position:
        return Spot(opened - 1, opened - 1)
    mark = await _mark(live, located)
    write = await _write_from(live, located, f"({id_text(place)}")
    # Afterwards: what is whole by now was so when it was read.
    whole = await _whole_from(live, located)
    if mark is None or whole is None:
        return None
    is_known = place >= before(whole)
    if write is None:
        return Spot(mark, mark) if is_known else None
    seen = max(write.seen, opened - 1)
    if place >= write.first:
        return Spot(seen, write.mark, before(write.first), write.last)
    return Spot(seen, seen) if is_known else Spot(opened - 1, seen, None, before(write.first))


async def _mark(live: LiveSessions, located: Located) -> int | None:
    key = live.keys.stream_marks(located.stream)
    (mark,) = await live.nodes.read_keyed([(key, ("HGET", key, located.writer))])
    return None if mark is None else int(mark)


async def _whole_from(live: LiveSessions, located: Located) -> EntryId | None:
    """Return from which id on the ledger has every write; None if it has none at all."""
    ledger, trimmed = live.keys.ledger(located.stream), live.keys.trimmed(located.stream)
    noted, first = await live.nodes.read_keyed(
        [(trimmed, ("HGET", trimmed, LEDGER_WHOLE)), (ledger, ("XRANGE", ledger, "-", "+", "COUNT", 1))]
    )
    if noted is not None:
        return parse_id(noted)
    return parse_id(first[0][0]) if first else None


async def _write_from(live: LiveSessions, located: Located, begin: str) -> _Write | None:
    """Return the writer's first write in a range of the ledger that begins here."""
    key, writer = live.keys.ledger(located.stream), located.writer.encode()
    while True:
        (writes,) = await live.nodes.read_keyed([(key, ("XRANGE", key, begin, "+", "COUNT", PAGE))])
        for entry, answer in writes:
            fields = mapping(answer)
            if fields[b"w"] == writer:
                last = parse_id(entry)
                return _Write(first_of(last, fields.get(b"a")), last, int(fields[b"f"]), int(fields[b"m"]))
        if len(writes) < PAGE:
            return None
        begin = f"({writes[-1][0].decode()}"

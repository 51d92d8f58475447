"""A reader of one session in its stream: what comes next, from the shared tap or from the store.

Invariant: the entries that a reader returns are the session's, each once and in order, from its place on; where some
were trimmed away, it returns that in their place. What was trimmed is asked before and after the store is read, and if
the answers differ it is read again, so a trim between two reads hides nothing. Where somebody else may have cut the
stream is asked after it was read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator

import msgspec

from tailrace.errors import CursorGone, StoreUnavailable
from tailrace.valkey.entry_id import BEGINNING, END, EntryId, before, id_text, parse_id
from tailrace.valkey.shards import mapping
from tailrace.views.sessions.cursor import Place
from tailrace.views.sessions.hub import Tap
from tailrace.views.sessions.streams import Entry, LiveSessions, entry_of, number_of

AT_ONCE = 32
"""Entries that a reader takes at once."""
PAGE, NEAR_PAGES = 32, 8
"""Entries that are looked at together with what they say, and how often."""
WEIGHED, WEIGHED_BYTES = 1_000, 4 << 20
"""Entries, and bytes of them, of which the store is asked at once whose they are."""
TRIES = 5
"""How often a read that a trim has crossed is begun again."""


class Lost(msgspec.Struct, frozen=True):
    """A stretch that is gone."""

    after: Place
    to: Place
    reason: str
    possible: bool = False
    """Somebody else trimmed the stream: whether the session had anything there, nobody knows."""
    back: bool = False
    """It begins in the stream, and what comes after it is in Kafka."""

    def moves(self, place: Place) -> Place:
        """Return the place of whoever was told."""
        return self.to if self.back or self.reason == "store-rolled-back" else max(place, self.to)

    def facts(self, identity: str) -> dict[str, object]:
        """Return what a reader of the session is told."""
        facts = {"session": identity, "from": str(self.after), "to": str(self.to), "reason": self.reason}
        return facts | ({"possible": True} if self.possible else {})

    def error(self, identity: str) -> CursorGone:
        """Return it as what a reader gets that wants no gaps."""
        after, to = str(self.after), str(self.to)
        return CursorGone(identity, after, to, self.reason, f"session {identity!r}: what came after {after}")


class SessionReader:
    """One life of a session, one place in its stream."""

    def __init__(self, live: LiveSessions, tap: Tap, number: int, place: EntryId) -> None:
        self.number = number
        self.looked = place
        """Up to where everything of the session was returned."""
        self._live, self._tap = live, tap
        self._era = tap.era
        self._ours = False

    @property
    def is_at_end(self) -> bool:
        """Whether everything was returned that the tap knows of."""
        return self._era == self._tap.era and self.looked >= self._tap.head

    @property
    def behind(self) -> int:
        """How many bytes of the session are held that were not returned."""
        return self._tap.behind(self.looked, self.number)

    def holds(self, entry: Entry) -> bool:
        """Whether an entry is one that the tap holds for all."""
        return entry.id > self._tap.base

    def skip(self) -> EntryId:
        """Go to the end, and return the place there."""
        self.looked = max(self.looked, self._tap.head)
        return self.looked

    async def next(self) -> list[Entry | Lost]:
        """Return what follows, and move behind it; nothing at the end."""
        tap = self._tap
        if tap.era != self._era:
            self._era, lost = tap.era, Lost(Place.of(self.looked), Place.of(tap.base), "store-rolled-back")
            self.looked = tap.base
            return [lost]
        held = tap.after(self.looked, self.number)
        if held is None:
            return await self._from_store()
        few = held[:AT_ONCE]
        self.looked = few[-1].id if len(few) < len(held) else max(self.looked, tap.head)
        return list(few)

    async def _from_store(self) -> list[Entry | Lost]:
        stream, head = self._tap.stream, self._tap.head
        for _ in range(TRIES):
            gone = await self._live.trimmed(stream, self.number) or BEGINNING
            begin = max(self.looked, gone)
            entries, reached = await self._live.scan(stream, begin, AT_ONCE, self.number, head)
            since, gone = gone, await self._live.trimmed(stream, self.number) or BEGINNING
            if since == gone:
                break
        else:  # trimmed all the time: what lies before the last of it may be there in part
            begin = max(self.looked, gone)
            entries = [entry for entry in entries if entry.id > gone]
        found: list[Entry | Lost] = []
        if gone > self.looked:
            found.append(Lost(Place.of(self.looked), Place.of(gone), "trimmed"))
        self.looked = max(reached, begin)
        cut = await self._cut(begin)
        if cut is None:
            return [*found, *entries]
        self.looked = max(self.looked, before(cut))
        earlier, later = [e for e in entries if e.id < cut], [e for e in entries if e.id >= cut]
        after = Place.of(earlier[-1].id if earlier else begin)
        return [*found, *earlier, Lost(after, Place.of(before(cut)), "trimmed", possible=True), *later]

    async def _cut(self, place: EntryId) -> EntryId | None:
        """Return where the stream begins, if somebody else has cut it behind a place.

        Our trimming notes, in the same call, up to where the beginning of the stream is its doing: a later write that
        is in the ledger alone was cut by somebody else. Of a stream without a ledger it is only known how many entries
        it had.
        """
        stream, live = self._tap.stream, self._live
        first = await live.first(stream)
        if first is None or first <= place:
            return None
        if await self._is_ours():
            return first if await live.noted(stream, place, first) else None
        key = live.keys.stream(stream)
        (answer,) = await live.nodes.read_keyed([(key, ("XINFO", "STREAM", key))])
        facts = mapping(answer)
        return first if int(facts.get(b"entries-added", 0)) > int(facts[b"length"]) else None

    async def _is_ours(self) -> bool:
        """Whether the stream is one that we write or trim."""
        if not self._ours:
            live, stream = self._live, self._tap.stream
            marks, trimmed = live.keys.stream_marks(stream), live.keys.trimmed(stream)
            (there,) = await live.nodes.read_keyed([(marks, ("EXISTS", marks, trimmed))])
            self._ours = bool(there)
        return self._ours


async def first_entry(live: LiveSessions, stream: str, number: int, begin: EntryId) -> EntryId | None:
    """Return the first entry of a session after a place; None if there is none."""
    async for entry, whose in _heads(live, stream, begin, END):
        if whose == number:
            return entry
    return None


async def first_entries(live: LiveSessions, stream: str, begin: EntryId, until: EntryId) -> dict[int, EntryId]:
    """Return the first entry of each session that there is between two places, by the session's number."""
    found: dict[int, EntryId] = {}
    async for entry, whose in _heads(live, stream, begin, until):
        found.setdefault(whose, entry)
    return found


async def last_entries(
    live: LiveSessions, stream: str, number: int, count: int, begin: EntryId, until: EntryId
) -> list[EntryId]:
    """Return the last entries of a session between two places, the latest first; at most ``count``."""
    key, found, last = live.keys.stream(stream), list[EntryId](), until
    edge = id_text(until)
    for _ in range(NEAR_PAGES):
        command = ("XREVRANGE", key, edge, f"({id_text(begin)}", "COUNT", PAGE)
        (answers,) = await live.nodes.read_keyed([(key, command)])
        entries = [entry_of(answer) for answer in answers]
        found += [entry.id for entry in entries if entry.number == number]
        if len(found) >= count or len(answers) < PAGE:
            return found[:count]
        last = entries[-1].id
        edge = f"({id_text(last)}"
    # It has said little of late, and others much: what they said need not come here.
    older: deque[EntryId] = deque(maxlen=count - len(found))
    async for entry, whose in _heads(live, stream, begin, last):
        if whose == number and entry < last:
            older.append(entry)
    return [*found, *reversed(older)]


async def entry_at(live: LiveSessions, stream: str, entry: EntryId) -> Entry | None:
    """Return one entry; None if it is gone."""
    key, where = live.keys.stream(stream), id_text(entry)
    (answers,) = await live.nodes.read_keyed([(key, ("XRANGE", key, where, where))])
    return entry_of(answers[0]) if answers else None


async def _heads(live: LiveSessions, stream: str, after: EntryId, until: EntryId) -> AsyncIterator[tuple[EntryId, int]]:
    """Yield the entries between two places, each with the number of its session, but without what it says."""
    keys = [live.keys.stream(stream), live.keys.stream_tag(stream)]
    while after < until:
        try:
            (flat,) = await live.nodes.call_keyed([("weigh", keys, [id_text(after), WEIGHED, WEIGHED_BYTES])])
            found = [(parse_id(flat[i]), number_of(flat[i + 1])) for i in range(0, len(flat), 3)]
        except StoreUnavailable:  # nobody of ours has written here, and loaded our functions
            found = [(entry.id, entry.number) for entry in await live.read(stream, after, PAGE)]
        if not found:
            return
        for entry, number in found:
            if entry <= until:
                yield entry, number
        after = found[-1][0]

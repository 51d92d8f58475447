"""A reader of one session in its stream: what comes next, from the shared tap or from the store.

Invariant: the entries that a reader returns are the session's, each once and in order, from its place on; where some
were trimmed away, it returns that in their place. What was trimmed is asked before and after the store is read, and if
the answers differ it is read again, so a trim between two reads hides nothing. Where somebody else may have cut the
stream is asked after it was read.

The part of a session that was trimmed from its stream, read from Kafka as far as that still has it.

The records of the session's life are read again, from the one that opened it, and recorded as the pipeline records
them; or only those after some offset. They end at a **seam**: the ledger beside the stream says of a write that reaches
beyond what was trimmed up to which offset it goes, and which is its last entry; so Kafka is read up to that offset, and
the stream after that entry. If more was trimmed meanwhile, the seam is moved on. Invariant: each sample is in exactly
one of the two parts; what Kafka no longer has is told as lost, in its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from tailrace.errors import BrokerUnavailable, CursorGone, StoreUnavailable
from tailrace.kafka.consume import KafkaRecord, Records
from tailrace.log.event import Partition, poison
from tailrace.valkey.entry_id import BEGINNING, END, EntryId, before, id_text, parse_id
from tailrace.valkey.keys import LEDGER_WHOLE
from tailrace.valkey.shards import mapping
from tailrace.views.sessions.cursor import StreamPosition
from tailrace.views.sessions.hub import Tap
from tailrace.views.sessions.model import PROGRAM, Session
from tailrace.views.sessions.recording import Catalogue, Recorder
from tailrace.views.sessions.streams import LiveSessions, Located, StreamEntry, entry_of, number_of
from tailrace.views.sessions.telemetry import Refused, head, identity_of, parse

AT_ONCE = 32
"""Entries that a reader takes at once."""
PAGE, NEAR_PAGES = 32, 8
"""Entries that are looked at together with what they say, and how often."""
WEIGHED, WEIGHED_BYTES = 1_000, 4 << 20
"""Entries, and bytes of them, of which the store is asked at once whose they are."""
TRIES = 5
"""How often a read that a trim has crossed is begun again."""


class LostStretch(msgspec.Struct, frozen=True):
    """A stretch that is gone."""

    after: StreamPosition
    to: StreamPosition
    reason: str
    possible: bool = False
    """Somebody else trimmed the stream: whether the session had anything there, nobody knows."""
    back: bool = False
    """It begins in the stream, and what comes after it is in Kafka."""

    def moves(self, place: StreamPosition) -> StreamPosition:
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

    def holds(self, entry: StreamEntry) -> bool:
        """Whether an entry is one that the tap holds for all."""
        return entry.id > self._tap.base

    def skip(self) -> EntryId:
        """Go to the end, and return the place there."""
        self.looked = max(self.looked, self._tap.head)
        return self.looked

    async def next(self) -> list[StreamEntry | LostStretch]:
        """Return what follows, and move behind it; nothing at the end."""
        tap = self._tap
        if tap.era != self._era:
            self._era, lost = (
                tap.era,
                LostStretch(StreamPosition.of(self.looked), StreamPosition.of(tap.base), "store-rolled-back"),
            )
            self.looked = tap.base
            return [lost]
        held = tap.after(self.looked, self.number)
        if held is None:
            return await self._from_store()
        few = held[:AT_ONCE]
        self.looked = few[-1].id if len(few) < len(held) else max(self.looked, tap.head)
        return list(few)

    async def _from_store(self) -> list[StreamEntry | LostStretch]:
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
        found: list[StreamEntry | LostStretch] = []
        if gone > self.looked:
            found.append(LostStretch(StreamPosition.of(self.looked), StreamPosition.of(gone), "trimmed"))
        self.looked = max(reached, begin)
        cut = await self._cut(begin)
        if cut is None:
            return [*found, *entries]
        self.looked = max(self.looked, before(cut))
        earlier, later = [e for e in entries if e.id < cut], [e for e in entries if e.id >= cut]
        after = StreamPosition.of(earlier[-1].id if earlier else begin)
        return [*found, *earlier, LostStretch(after, StreamPosition.of(before(cut)), "trimmed", possible=True), *later]

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
            return first if await live.has_untrimmed_write(stream, place, first) else None
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


async def entry_at(live: LiveSessions, stream: str, entry: EntryId) -> StreamEntry | None:
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


class Archive(msgspec.Struct, frozen=True):
    """How Kafka is read again."""

    records: Records
    is_current: Callable[[Partition], Awaitable[bool]]
    """Whether a source is what Kafka has under its name now."""
    max_bytes: int = 1 << 20
    max_depth: int = 200


class Hole(msgspec.Struct, frozen=True):
    """What is left out, since nobody knows whether it was read before: from an offset on, to where what is lost ends.

    If that is a place in the stream, nothing more is read from Kafka.
    """

    low: int
    lost: LostStretch


class Told(msgspec.Struct, frozen=True):
    """What one record of the session became: the blocks of its bursts; none if it was of another session."""

    place: StreamPosition
    blocks: tuple[bytes, ...] = ()


def source_of(located: Located) -> Partition | None:
    """Return the partition that a session comes from; None if it comes from several, or from no Kafka."""
    if located.opened is None or located.shared or located.writer.startswith(PROGRAM):
        return None
    try:
        return Partition.parse(located.writer)
    except ValueError:
        return None


class Retained:
    """Reads the trimmed part of one life of a session."""

    def __init__(
        self,
        archive: Archive,
        live: LiveSessions,
        located: Located,
        source: Partition,
        after: int,
        least: EntryId = BEGINNING,
        hole: Hole | None = None,
    ) -> None:
        """Begin.

        Args:
            archive: how Kafka is read.
            live: where the session is.
            located: the session.
            source: the partition that it comes from.
            after: the offset of the last record that was read before; that before the opening one if none was.
            least: the seam lies not before this entry, also if less was trimmed.
            hole: what is left out.
        """
        self._archive, self._live, self._located, self._source = archive, live, located, source
        self._after, self._least, self._hole = after, least, hole
        self._seam: Seam | None = None
        self._over = self._ended = False
        self._catalogue = Catalogue()
        self._recorder: Recorder | None = None

    @property
    def entry(self) -> EntryId:
        """The entry after which the stream goes on, when everything was read."""
        return BEGINNING if self._seam is None else self._seam.entry

    async def next(self) -> list[Told | LostStretch]:
        """Return what the next records became; nothing when everything up to the seam was read."""
        if self._ended:
            return []
        while self._seam is None or self._after >= self._seam.offset:
            located = self._located
            gone = max(await self._live.trimmed(located.stream, located.number) or BEGINNING, self._least)
            if gone <= self.entry:
                return []
            now = await self._live.get(located.identity)
            is_shared = now is not None and now.number == located.number and now.shared
            seam = None if is_shared else await seam_behind(self._live, located, gone)
            if seam is None:
                self._seam = Seam(self._after, gone)
                return [LostStretch(StreamPosition.at_offset(self._after), StreamPosition.of(gone), "trimmed")]
            self._seam = seam
            if self._over:
                self._after = max(self._after, seam.offset)
        hole = self._hole
        if hole is None:
            return await self._read(self._seam.offset)
        if self._after < hole.low:
            return await self._read(hole.low)
        self._hole, to = None, hole.lost.to
        if to.in_stream:
            self._seam, self._ended = Seam(self._after, to.entry), True
        else:
            self._after = to.major
        return [hole.lost]

    async def _read(self, last: int) -> list[Told | LostStretch]:
        archive, source = self._archive, self._source
        after = StreamPosition.at_offset(self._after)
        if not await archive.is_current(source):
            return self._lost(after, last, "deleted")
        try:
            stretch = await archive.records.read(source, self._after + 1, last)
        except BrokerUnavailable:
            if await archive.is_current(source):
                raise
            return self._lost(after, last, "deleted")
        if not await archive.is_current(source):
            return self._lost(after, last, "deleted")
        found: list[Told | LostStretch] = []
        if stretch.first > self._after + 1:
            found.append(LostStretch(after, StreamPosition.at_offset(stretch.first - 1), "expired"))
        if self._recorder is None:
            self._recorder = await self._begin(is_whole=not found)
        for record in stretch.records:
            blocks = self._record(record)
            if blocks:
                found.append(Told(StreamPosition.at_offset(record.offset), blocks))
        self._after = last if self._over else stretch.reached
        found.append(Told(StreamPosition.at_offset(self._after)))
        return found

    def _lost(self, after: StreamPosition, last: int, reason: str) -> list[Told | LostStretch]:
        self._after = last
        return [LostStretch(after, StreamPosition.at_offset(last), reason)]

    async def _begin(self, is_whole: bool) -> Recorder:
        located = self._located
        merged = located.merged or located.json or "{}"
        position, opened = id_text(located.position), located.opened or 0
        now = Session(
            located.identity,
            located.stream,
            located.number,
            position,
            "open",
            merged,
            merged,
            located.writer,
            opened,
            0,
        )
        # What its channels are is known from how it is now: configurations never change.
        wanted = self._catalogue.missing(each.identifier for each in now.bindings)
        stored = {name: await self._live.config(name) for name in wanted}
        self._catalogue.learn({name: text for name, text in stored.items() if text is not None})
        known = {} if is_whole and self._after == opened - 1 else {located.identity: now}
        return Recorder(located.stream, located.writer, known, {}, self._catalogue)

    def _record(self, record: KafkaRecord) -> tuple[bytes, ...]:
        """Return what a record says, as the pipeline has written it."""
        assert self._recorder is not None
        identity, value = self._located.identity, record.value
        if self._over or not value or poison(value, self._archive.max_bytes, self._archive.max_depth):
            return ()
        try:
            first = head(value)
            if first.type != "config" and identity_of(first.session, record.key) != identity:
                return ()
            parsed, faults = parse(value)
        except Refused:
            return ()
        self._recorder.take(record.offset, record.time_ms, identity, parsed, faults)
        session = self._recorder.session(identity)
        self._over = session is not None and session.is_closed
        return tuple(block for named, block in self._recorder.write().entries if named == identity)


LEDGER_PAGE = 100
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
        (writes,) = await live.nodes.read_keyed([(key, ("XRANGE", key, begin, "+", "COUNT", LEDGER_PAGE))])
        for entry, answer in writes:
            fields = mapping(answer)
            if fields[b"w"] == writer:
                last = parse_id(entry)
                return _Write(first_of(last, fields.get(b"a")), last, int(fields[b"f"]), int(fields[b"m"]))
        if len(writes) < LEDGER_PAGE:
            return None
        begin = f"({writes[-1][0].decode()}"

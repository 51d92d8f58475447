"""The two readers of a session's life: ``StreamReader`` reads its stream, ``KafkaReader`` the part trimmed from there.

Both return pieces in the order of their positions, each once, and a ``LostStretch`` where some are gone.

``StreamReader`` takes entries from the hub's tap, or from the store if it is further back. It reads the trim notes of
the session before and after the entries, and again if they differ, so a trim between two reads hides nothing. It checks
after the read whether another program has cut the stream.

``KafkaReader`` reads the records of the life again, from the opening one or after some offset, and records them as the
pipeline does. It ends at a **seam**: the first write in the ledger that reaches beyond the trimmed entries has the
offset up to which Kafka is read, and the entry after which the stream continues. If more was trimmed meanwhile, the
seam moves on. Invariant: each sample is in exactly one of the two parts; records that Kafka has deleted are a lost
stretch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from tailrace.errors import BrokerUnavailable, CursorGone
from tailrace.kafka.broker import KafkaRecord, Records
from tailrace.log.entry_id import BEGINNING, EntryId, before, id_text
from tailrace.log.event import Partition, poison
from tailrace.valkey.shards import mapping
from tailrace.views.sessions.cursor import StreamPosition
from tailrace.views.sessions.hub import Tap
from tailrace.views.sessions.ledger import Seam, seam_after
from tailrace.views.sessions.model import PROGRAM, Session
from tailrace.views.sessions.recording import Catalogue, Recorder
from tailrace.views.sessions.streams import LiveSessions, Located, StreamEntry
from tailrace.views.sessions.telemetry import Refused, head, identity_of, parse

AT_ONCE = 32
"""Entries in one read of a stream."""
TRIES = 5
"""Attempts of a read that a trim has crossed."""


class StreamPiece(msgspec.Struct, frozen=True):
    """The next part of a life: an entry of the stream, or the blocks of a record in Kafka, none if it has no part."""

    position: StreamPosition
    """Position after it."""
    entry: StreamEntry | None = None
    blocks: tuple[bytes, ...] = ()


class LostStretch(msgspec.Struct, frozen=True):
    """A part of a life that is gone."""

    after: StreamPosition
    to: StreamPosition
    reason: str
    possible: bool = False
    """True if another program trimmed the stream: it is unknown whether the session had anything there."""
    back: bool = False
    """True if it begins in the stream, and reading continues in Kafka."""

    def move(self, position: StreamPosition) -> StreamPosition:
        """Return a reader's position after the stretch."""
        return self.to if self.back or self.reason == "store-rolled-back" else max(position, self.to)

    def facts(self, identity: str) -> dict[str, object]:
        """Return the fields of the control frame."""
        facts = {"session": identity, "from": str(self.after), "to": str(self.to), "reason": self.reason}
        return facts | ({"possible": True} if self.possible else {})

    def error(self, identity: str) -> CursorGone:
        """Return the error for a reader that wants no gaps."""
        after, to = str(self.after), str(self.to)
        return CursorGone(identity, after, to, self.reason, f"session {identity!r}: what came after {after}")


class StreamReader:
    """Reads one life of a session from its stream."""

    def __init__(self, live: LiveSessions, tap: Tap, number: int, position: EntryId) -> None:
        self.number = number
        self.reached = position
        """Everything of the session up to this entry was returned."""
        self._live, self._tap = live, tap
        self._era = tap.era
        self._ours = False

    @property
    def is_at_end(self) -> bool:
        return self._era == self._tap.era and self.reached >= self._tap.head

    @property
    def behind(self) -> int:
        """Buffered bytes of the session that were not returned."""
        return self._tap.behind(self.reached, self.number)

    def is_shared(self, entry: StreamEntry) -> bool:
        """Return True if an entry is in the tap's buffer."""
        return entry.id > self._tap.base

    def skip(self) -> EntryId:
        """Go to the end, and return the position there."""
        self.reached = max(self.reached, self._tap.head)
        return self.reached

    async def next(self) -> list[StreamPiece | LostStretch]:
        """Return the next pieces; none at the end."""
        tap = self._tap
        if tap.era != self._era:
            lost = LostStretch(StreamPosition.of(self.reached), StreamPosition.of(tap.base), "store-rolled-back")
            self._era, self.reached = tap.era, tap.base
            return [lost]
        buffered = tap.after(self.reached, self.number)
        if buffered is None:
            return await self._from_store()
        entries = buffered[:AT_ONCE]
        self.reached = entries[-1].id if len(entries) < len(buffered) else max(self.reached, tap.head)
        return _pieces(entries)

    async def _from_store(self) -> list[StreamPiece | LostStretch]:
        stream, head = self._tap.stream, self._tap.head
        for _ in range(TRIES):
            trimmed = await self._live.trimmed(stream, self.number) or BEGINNING
            begin = max(self.reached, trimmed)
            entries, reached = await self._live.scan(stream, begin, AT_ONCE, self.number, head)
            former, trimmed = trimmed, await self._live.trimmed(stream, self.number) or BEGINNING
            if former == trimmed:
                break
        else:  # trimmed all the time: of the entries up to the last trimmed one only some may be left
            begin = max(self.reached, trimmed)
            entries = [entry for entry in entries if entry.id > trimmed]
        found: list[StreamPiece | LostStretch] = []
        if trimmed > self.reached:
            found.append(LostStretch(StreamPosition.of(self.reached), StreamPosition.of(trimmed), "trimmed"))
        self.reached = max(reached, begin)
        cut = await self._cut(begin)
        if cut is None:
            return found + _pieces(entries)
        self.reached = max(self.reached, before(cut))
        earlier, later = [e for e in entries if e.id < cut], [e for e in entries if e.id >= cut]
        after = StreamPosition.of(earlier[-1].id if earlier else begin)
        lost = LostStretch(after, StreamPosition.of(before(cut)), "trimmed", possible=True)
        return [*found, *_pieces(earlier), lost, *_pieces(later)]

    async def _cut(self, position: EntryId) -> EntryId | None:
        """Return the first entry of the stream, if another program has cut it after a position.

        Upkeep notes, in the call that trims, how far it has trimmed the beginning of the stream: a later write that is
        in the ledger alone was cut by another program. A stream without a ledger has only a count of entries.
        """
        stream, live = self._tap.stream, self._live
        first = await live.first(stream)
        if first is None or first <= position:
            return None
        if await self._is_ours():
            return first if await live.has_untrimmed_write(stream, position, first) else None
        key = live.keys.stream(stream)
        (answer,) = await live.nodes.read_keyed([(key, ("XINFO", "STREAM", key))])
        facts = mapping(answer)
        return first if int(facts.get(b"entries-added", 0)) > int(facts[b"length"]) else None

    async def _is_ours(self) -> bool:
        """Return True if Tailrace writes or trims the stream."""
        if not self._ours:
            live, stream = self._live, self._tap.stream
            marks, trimmed = live.keys.stream_marks(stream), live.keys.trimmed(stream)
            (there,) = await live.nodes.read_keyed([(marks, ("EXISTS", marks, trimmed))])
            self._ours = bool(there)
        return self._ours


def _pieces(entries: list[StreamEntry]) -> list[StreamPiece | LostStretch]:
    return [StreamPiece(StreamPosition.of(entry.id), entry) for entry in entries]


class Archive(msgspec.Struct, frozen=True):
    """Access to the records in Kafka."""

    records: Records
    is_current: Callable[[Partition], Awaitable[bool]]
    """Returns True if a partition is of the topic that Kafka has under this name now."""
    max_bytes: int = 1 << 20
    max_depth: int = 200


class Hole(msgspec.Struct, frozen=True):
    """Records that are skipped after an offset, since it is unknown which of them were read before.

    If the lost stretch ends in the stream, nothing more is read from Kafka.
    """

    low: int
    lost: LostStretch


def partition_of(located: Located) -> Partition | None:
    """Return the partition of a session's records; None if they come from several, or not from Kafka."""
    if located.opened is None or located.shared or located.writer.startswith(PROGRAM):
        return None
    try:
        return Partition.parse(located.writer)
    except ValueError:
        return None


class KafkaReader:
    """Reads the trimmed part of one life of a session.

    Args:
        archive: access to Kafka.
        live: reader of the stream.
        located: the session.
        partition: partition of its records.
        after: offset of the last record that was read before; that before the opening one if none was.
        least: an entry that the seam is not before, even if less was trimmed.
        hole: records to skip.
    """

    def __init__(
        self,
        archive: Archive,
        live: LiveSessions,
        located: Located,
        partition: Partition,
        after: int,
        least: EntryId = BEGINNING,
        hole: Hole | None = None,
    ) -> None:
        self._archive, self._live, self._located, self._partition = archive, live, located, partition
        self._after, self._least, self._hole = after, least, hole
        self._seam: Seam | None = None
        self._closed = self._ended = False
        self._catalogue = Catalogue()
        self._recorder: Recorder | None = None

    @property
    def seam_entry(self) -> EntryId:
        """Entry after which the stream continues, once everything was read."""
        return BEGINNING if self._seam is None else self._seam.entry

    async def next(self) -> list[StreamPiece | LostStretch]:
        """Return the next pieces; none at the seam."""
        if self._ended:
            return []
        while self._seam is None or self._after >= self._seam.offset:
            located = self._located
            trimmed = max(await self._live.trimmed(located.stream, located.number) or BEGINNING, self._least)
            if trimmed <= self.seam_entry:
                return []
            now = await self._live.get(located.identity)
            is_shared = now is not None and now.number == located.number and now.shared
            seam = None if is_shared else await seam_after(self._live, located, trimmed)
            if seam is None:
                self._seam = Seam(self._after, trimmed)
                return [LostStretch(StreamPosition.at_offset(self._after), StreamPosition.of(trimmed), "trimmed")]
            self._seam = seam
            if self._closed:
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

    async def _read(self, last: int) -> list[StreamPiece | LostStretch]:
        archive, partition = self._archive, self._partition
        after = StreamPosition.at_offset(self._after)
        stretch = None
        if await archive.is_current(partition):
            try:
                stretch = await archive.records.read(partition, self._after + 1, last)
            except BrokerUnavailable:
                if await archive.is_current(partition):
                    raise
        if stretch is None or not await archive.is_current(partition):
            self._after = last
            return [LostStretch(after, StreamPosition.at_offset(last), "deleted")]
        found: list[StreamPiece | LostStretch] = []
        if stretch.first > self._after + 1:
            found.append(LostStretch(after, StreamPosition.at_offset(stretch.first - 1), "expired"))
        if self._recorder is None:
            self._recorder = await self._make_recorder(is_whole=not found)
        for record in stretch.records:
            if blocks := self._record(self._recorder, record):
                found.append(StreamPiece(StreamPosition.at_offset(record.offset), blocks=blocks))
        self._after = last if self._closed else stretch.reached
        found.append(StreamPiece(StreamPosition.at_offset(self._after)))
        return found

    async def _make_recorder(self, is_whole: bool) -> Recorder:
        located, live = self._located, self._live
        merged, opened = located.merged or located.json or "{}", located.opened or 0
        identity, stream, writer, position = located.identity, located.stream, located.writer, id_text(located.position)
        now = Session(identity, stream, located.number, position, "open", merged, merged, writer, opened, 0)
        # The present JSON has the right configurations: they never change.
        wanted = self._catalogue.missing(each.identifier for each in now.bindings)
        stored = {name: await live.config(name) for name in wanted}
        self._catalogue.learn({name: text for name, text in stored.items() if text is not None})
        known = {} if is_whole and self._after == opened - 1 else {identity: now}
        return Recorder(stream, writer, known, {}, self._catalogue)

    def _record(self, recorder: Recorder, record: KafkaRecord) -> tuple[bytes, ...]:
        """Return the blocks that the pipeline has written for a record."""
        identity, value = self._located.identity, record.value
        if self._closed or not value or poison(value, self._archive.max_bytes, self._archive.max_depth):
            return ()
        try:
            first = head(value)
            if first.type != "config" and identity_of(first.session, record.key) != identity:
                return ()
            parsed, faults = parse(value)
        except Refused:
            return ()
        recorder.take(record.offset, record.time_ms, identity, parsed, faults)
        session = recorder.session(identity)
        self._closed = session is not None and session.is_closed
        return tuple(block for owner, block in recorder.write().entries if owner == identity)

"""The part of a session that was trimmed from its stream, read from Kafka as far as that still has it.

The records of the session's life are read again, from the one that opened it, and recorded as the pipeline records
them. They end at a **seam**: the ledger beside the stream says of a write that reaches beyond what was trimmed up to
which offset it goes, and which is its last entry; so Kafka is read up to that offset, and the stream after that entry.
If more was trimmed meanwhile, the seam is moved on. Invariant: each sample is in exactly one of the two parts; what
Kafka no longer has is told as lost, in its place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from tailrace.errors import BrokerUnavailable
from tailrace.feeds.session_reader import Lost
from tailrace.model.catalogue import Catalogue
from tailrace.model.entry_id import BEGINNING, EntryId, id_text, parse_id
from tailrace.model.event import Source
from tailrace.model.poison import poison
from tailrace.model.recording import Recorder
from tailrace.model.session import PROGRAM, Session
from tailrace.model.session_cursor import Place
from tailrace.model.telemetry import Refused, head, identity_of, parse
from tailrace.stores.live import LiveSessions, Located
from tailrace.stores.records import Records, Stored
from tailrace.stores.valkey import mapping

PAGE = 100
"""Writes of a ledger that are looked at, at once."""


class Archive(msgspec.Struct, frozen=True):
    """How Kafka is read again."""

    records: Records
    is_current: Callable[[Source], Awaitable[bool]]
    """Whether a source is what Kafka has under its name now."""
    max_bytes: int = 1 << 20
    max_depth: int = 200


class Told(msgspec.Struct, frozen=True):
    """What one record of the session became: the blocks of its bursts; none if it was of another session."""

    place: Place
    blocks: tuple[bytes, ...] = ()


class Seam(msgspec.Struct, frozen=True):
    """Everything of a writer up to an offset is in entries up to this one, and nothing else of it is."""

    offset: int
    entry: EntryId


def source_of(located: Located) -> Source | None:
    """Return the partition that a session comes from; None if it comes from no Kafka."""
    if located.opened is None or located.writer.startswith(PROGRAM):
        return None
    try:
        return Source.parse(located.writer)
    except ValueError:
        return None


class Retained:
    """Reads the trimmed part of one life of a session."""

    def __init__(self, archive: Archive, live: LiveSessions, located: Located, source: Source, after: int) -> None:
        """``after``: the offset of the last record that was read before; that before the opening one if none was."""
        self._archive, self._live, self._located, self._source = archive, live, located, source
        self._after = after
        self._seam: Seam | None = None
        self._over = False
        self._catalogue = Catalogue()
        self._recorder: Recorder | None = None

    @property
    def entry(self) -> EntryId:
        """The entry after which the stream goes on, when everything was read."""
        return BEGINNING if self._seam is None else self._seam.entry

    async def next(self) -> list[Told | Lost]:
        """Return what the next records became; nothing when everything up to the seam was read."""
        while self._seam is None or self._after >= self._seam.offset:
            located = self._located
            gone = await self._live.trimmed(located.stream, located.number)
            if gone is None or gone <= self.entry:
                return []
            seam = await seam_behind(self._live, located, gone)
            if seam is None:
                self._seam = Seam(self._after, gone)
                return [Lost(Place.at_offset(self._after), Place.of(gone), "trimmed")]
            self._seam = seam
            if self._over:
                self._after = max(self._after, seam.offset)
        return await self._read(self._seam)

    async def _read(self, seam: Seam) -> list[Told | Lost]:
        archive, source = self._archive, self._source
        after = Place.at_offset(self._after)
        if not await archive.is_current(source):
            return self._lost(after, seam, "deleted")
        try:
            stretch = await archive.records.read(source, self._after + 1, seam.offset)
        except BrokerUnavailable:
            if await archive.is_current(source):
                raise
            return self._lost(after, seam, "deleted")
        if not await archive.is_current(source):
            return self._lost(after, seam, "deleted")
        found: list[Told | Lost] = []
        if stretch.first > self._after + 1:
            found.append(Lost(after, Place.at_offset(stretch.first - 1), "expired"))
        if self._recorder is None:
            self._recorder = await self._begin(is_whole=not found)
        for record in stretch.records:
            blocks = self._record(record)
            if blocks:
                found.append(Told(Place.at_offset(record.offset), blocks))
        self._after = seam.offset if self._over else stretch.reached
        found.append(Told(Place.at_offset(self._after)))
        return found

    def _lost(self, after: Place, seam: Seam, reason: str) -> list[Told | Lost]:
        self._after = seam.offset
        return [Lost(after, Place.at_offset(seam.offset), reason)]

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
        return Recorder(located.stream, located.writer, known, frozenset(), self._catalogue)

    def _record(self, record: Stored) -> tuple[bytes, ...]:
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


async def seam_behind(live: LiveSessions, located: Located, gone: EntryId) -> Seam | None:
    """Return the first seam behind an entry that was trimmed; None if the stream knows nothing of its writer."""
    stream, writer = located.stream, located.writer
    marks = live.keys.stream_marks(stream)
    # The mark first: what is in the stream by then, and not in the ledger afterwards, was trimmed as a whole.
    (mark,) = await live.nodes.read_keyed([(marks, ("HGET", marks, writer))])
    key, begin = live.keys.ledger(stream), id_text(gone)
    while True:
        (writes,) = await live.nodes.read_keyed([(key, ("XRANGE", key, begin, "+", "COUNT", PAGE))])
        for entry, answer in writes:
            fields = mapping(answer)
            if fields[b"w"].decode() == writer:
                return Seam(int(fields[b"m"]), parse_id(entry))
        if len(writes) < PAGE:
            return None if mark is None else Seam(int(mark), gone)
        begin = f"({writes[-1][0].decode()}"

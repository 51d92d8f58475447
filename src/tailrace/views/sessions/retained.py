"""The part of a session that was trimmed from its stream, read from Kafka as far as that still has it.

The records of the session's life are read again, from the one that opened it, and recorded as the pipeline records
them; or only those after some offset. They end at a **seam**: the ledger beside the stream says of a write that reaches
beyond what was trimmed up to which offset it goes, and which is its last entry; so Kafka is read up to that offset, and
the stream after that entry. If more was trimmed meanwhile, the seam is moved on. Invariant: each sample is in exactly
one of the two parts; what Kafka no longer has is told as lost, in its place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from tailrace.errors import BrokerUnavailable
from tailrace.kafka.consume import Records, Stored
from tailrace.log.event import Source, poison
from tailrace.valkey.entry_id import BEGINNING, EntryId, id_text
from tailrace.views.sessions.catalogue import Catalogue
from tailrace.views.sessions.cursor import Place
from tailrace.views.sessions.ledger import Seam, seam_behind
from tailrace.views.sessions.model import PROGRAM, Session
from tailrace.views.sessions.reader import Lost
from tailrace.views.sessions.recording import Recorder
from tailrace.views.sessions.streams import LiveSessions, Located
from tailrace.views.sessions.telemetry import Refused, head, identity_of, parse


class Archive(msgspec.Struct, frozen=True):
    """How Kafka is read again."""

    records: Records
    is_current: Callable[[Source], Awaitable[bool]]
    """Whether a source is what Kafka has under its name now."""
    max_bytes: int = 1 << 20
    max_depth: int = 200


class Hole(msgspec.Struct, frozen=True):
    """What is left out, since nobody knows whether it was read before: from an offset on, to where what is lost ends.

    If that is a place in the stream, nothing more is read from Kafka.
    """

    low: int
    lost: Lost


class Told(msgspec.Struct, frozen=True):
    """What one record of the session became: the blocks of its bursts; none if it was of another session."""

    place: Place
    blocks: tuple[bytes, ...] = ()


def source_of(located: Located) -> Source | None:
    """Return the partition that a session comes from; None if it comes from several, or from no Kafka."""
    if located.opened is None or located.shared or located.writer.startswith(PROGRAM):
        return None
    try:
        return Source.parse(located.writer)
    except ValueError:
        return None


class Retained:
    """Reads the trimmed part of one life of a session."""

    def __init__(
        self,
        archive: Archive,
        live: LiveSessions,
        located: Located,
        source: Source,
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

    async def next(self) -> list[Told | Lost]:
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
                return [Lost(Place.at_offset(self._after), Place.of(gone), "trimmed")]
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

    async def _read(self, last: int) -> list[Told | Lost]:
        archive, source = self._archive, self._source
        after = Place.at_offset(self._after)
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
        found: list[Told | Lost] = []
        if stretch.first > self._after + 1:
            found.append(Lost(after, Place.at_offset(stretch.first - 1), "expired"))
        if self._recorder is None:
            self._recorder = await self._begin(is_whole=not found)
        for record in stretch.records:
            blocks = self._record(record)
            if blocks:
                found.append(Told(Place.at_offset(record.offset), blocks))
        self._after = last if self._over else stretch.reached
        found.append(Told(Place.at_offset(self._after)))
        return found

    def _lost(self, after: Place, last: int, reason: str) -> list[Told | Lost]:
        self._after = last
        return [Lost(after, Place.at_offset(last), reason)]

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

"""The readers of sessions: the hub, which reads each stream once for all, and the two readers of a session's life.

A stream can only be read as a whole. So ``StreamHub`` reads it once, by a connection that blocks at its end, and its
newest entries are buffered for the followers of any of its sessions. A follower that is further back reads the store
itself, so a slow one slows nobody. Invariant: the buffer of a tap is one unbroken range of the stream, after ``base``
up to ``head``; positions of two eras do not compare, and an era ends when the stream begins anew.

``StreamReader`` reads a life from its stream, and ``KafkaReader`` the part trimmed from there. Both return pieces in
the order of their positions, each once, and a ``LostStretch`` where some are gone. ``StreamReader`` takes entries from
the hub's tap, or from the store if it is further back. It reads the trim notes of the session before and after the
entries, and again if they differ, so a trim between two reads hides nothing. It checks after the read whether another
program has cut the stream.

``KafkaReader`` reads the records of the life again, from the opening one or after some offset, and records them as the
pipeline does. It ends at a **seam**: the first write in the ledger that reaches beyond the trimmed entries has the
offset up to which Kafka is read, and the entry after which the stream continues. If more was trimmed meanwhile, the
seam moves on. Invariant: each sample is in exactly one of the two parts; records that Kafka has deleted are a lost
stretch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import msgspec

from tailrace.errors import BrokerUnavailable, CursorGone, StoreUnavailable, TailraceError
from tailrace.kafka.broker import KafkaRecord, Records
from tailrace.log.cursor import BEGINNING, EntryId, before, id_text
from tailrace.log.event import Partition, poison
from tailrace.log.hub import woken
from tailrace.valkey.shards import mapping
from tailrace.views.sessions.configuration import Catalogue
from tailrace.views.sessions.model import PROGRAM, Recorder, Session
from tailrace.views.sessions.samples import StreamPosition
from tailrace.views.sessions.streams import PAGE, LiveSessions, Located, Seam, StreamEntry, entry_of, seam_after
from tailrace.views.sessions.telemetry import Refused, head, identity_of, parse

logger = logging.getLogger(__name__)

BLOCK_MS = 1000
CHECK_S = 5.0
"""Silence after which the hub checks that the stream is still the same."""
OPEN_S = 10.0
"""Limit of a follower's wait for the position of a stream's end."""
OVERHEAD = 500
"""Estimate of the memory of an entry beside its bytes."""

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


class _Line:
    """Entries in order, with cumulative sizes, searched by bisection."""

    def __init__(self) -> None:
        self._entries: list[StreamEntry] = []
        self._ends: list[int] = []
        """Bytes up to the end of each entry, dropped ones included."""
        self._first = 0
        """Index of the first entry that is not dropped."""

    def __bool__(self) -> bool:
        return self._first < len(self._entries)

    def append(self, entry: StreamEntry) -> None:
        self._entries.append(entry)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(entry.data))

    def drop(self) -> StreamEntry:
        gone = self._entries[self._first]
        self._first += 1
        if self._first >= 64 and 2 * self._first >= len(self._entries):
            self._entries, self._ends, self._first = self._entries[self._first :], self._ends[self._first :], 0
        return gone

    def after(self, position: EntryId, most: int | None) -> list[StreamEntry]:
        begin = self._find(position)
        return self._entries[begin : None if most is None else begin + most]

    def size_after(self, position: EntryId) -> int:
        begin = self._find(position)
        if begin == len(self._entries):
            return 0
        return self._ends[-1] - self._ends[begin] + len(self._entries[begin].data)

    def _find(self, position: EntryId) -> int:
        return bisect_right(self._entries, position, self._first, key=attrgetter("id"))


_NO_ENTRIES = _Line()


class Tap:
    """The live end of one stream, shared by its followers."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.era = 0
        """Number of times that the stream began anew."""
        self.waiters: set[asyncio.Event] = set()
        self.opened = asyncio.Event()
        """Set when the end of the stream is known: from then on ``head`` is a position in it."""
        self._lines: dict[int, _Line] = {}
        """The entries of ``_all`` by session."""
        self.restart(BEGINNING)

    def after(self, position: EntryId, number: int | None = None, most: int | None = None) -> list[StreamEntry] | None:
        """Return the buffered entries after a position, of one session or of all; None if the store must be read.

        The answer is complete up to ``head``, even if others have the last entries, unless it has ``most`` entries.
        """
        return None if position < self.base else self._line(number).after(position, most)

    def behind(self, position: EntryId, number: int | None = None) -> int:
        return self._line(number).size_after(position)

    def _line(self, number: int | None) -> _Line:
        return self._all if number is None else self._lines.get(number, _NO_ENTRIES)

    def restart(self, position: EntryId) -> None:
        """Empty the buffer; begin after a position."""
        self._all, self._size = _Line(), 0
        self._lines.clear()
        self.base = self.head = position

    def add(self, entries: Iterable[StreamEntry], limit: int) -> None:
        """Buffer newer entries and drop the oldest ones over the limit."""
        for entry in entries:
            if entry.id > self.head:
                self._all.append(entry)
                self._lines.setdefault(entry.number, _Line()).append(entry)
                self._size += len(entry.data) + OVERHEAD
                self.head = entry.id
        while self._size > limit and self._all:
            gone = self._all.drop()
            gone.forms.clear()
            line = self._lines[gone.number]
            line.drop()
            if not line:
                del self._lines[gone.number]
            self._size -= len(gone.data) + OVERHEAD
            self.base = gone.id

    def wake(self) -> None:
        for waiter in self.waiters:
            waiter.set()


class StreamHub:
    """The shared readers of a process; ``ring_bytes`` limits the buffered entries, and the forms made of them."""

    def __init__(self, live: LiveSessions, ring_bytes: int = 64 << 20) -> None:
        self.live = live
        self._ring_bytes = ring_bytes
        self._forms: deque[tuple[dict[Hashable, Any], Hashable, int]] = deque()
        self._forms_size = 0
        self._interned: WeakValueDictionary[Hashable, Hashable] = WeakValueDictionary()
        self.taps: dict[str, Tap] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}

    async def aclose(self) -> None:
        readers = list(self._readers.values())
        self._readers.clear()
        self.taps.clear()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    def form(
        self, entry: StreamEntry, form: Hashable, make: Callable[[StreamEntry], T], size_of: Callable[[T], int]
    ) -> T:
        """Return the result of ``make`` for an entry, computed once for all who ask for the same form."""
        forms: dict[Hashable, Any] = entry.forms
        if form in forms:
            cached: T = forms[form]
            return cached
        result = make(entry)
        size = size_of(result) + OVERHEAD
        forms[form] = result
        self._forms.append((forms, form, size))
        self._forms_size += size
        while self._forms_size > self._ring_bytes and self._forms:
            oldest, name, freed = self._forms.popleft()
            oldest.pop(name, None)
            self._forms_size -= freed
        return result

    def one(self, value: H) -> H:
        """Intern a value, so that forms that contain it compare by identity."""
        found: Any = self._interned.setdefault(value, value)
        return cast("H", found)

    @contextlib.asynccontextmanager
    async def follow(self, stream: str, waiter: asyncio.Event) -> AsyncIterator[Tap]:
        """Follow a stream: ``waiter`` is set whenever its tap changes. StoreUnavailable if the store is silent."""
        tap = self.taps.get(stream)
        if tap is None:
            tap = self.taps[stream] = Tap(stream)
            self._readers[stream] = asyncio.create_task(self._read(tap), name=f"stream {stream}")
        tap.waiters.add(waiter)
        try:
            if not await woken(tap.opened, OPEN_S):
                raise StoreUnavailable("valkey does not say where a stream ends; is it running?")
            yield tap
        finally:
            tap.waiters.discard(waiter)
            if not tap.waiters and self.taps.get(stream) is tap:
                del self.taps[stream]
                self._readers.pop(stream).cancel()

    async def _read(self, tap: Tap) -> None:
        key, reader = self.live.keys.stream(tap.stream), f"sessions {id(tap)}"
        try:
            while True:
                try:
                    await self._advance(tap, key, reader)
                except TailraceError as error:
                    logger.warning("stream %s: %s", tap.stream, error)
                    await asyncio.sleep(0.5)
                except Exception:
                    logger.exception("stream %s cannot be read", tap.stream)
                    await asyncio.sleep(0.5)
        finally:
            await self.live.nodes.end_follow(key, reader)

    async def _advance(self, tap: Tap, key: str, reader: str) -> None:
        if not tap.opened.is_set():
            # Not the last entry: a stream may have been trimmed to nothing.
            tap.restart(await self.live.last_generated_id(tap.stream))
            tap.opened.set()
        clock = asyncio.get_running_loop().time
        read_at = clock()
        while True:
            answer = await self.live.nodes.follow(reader, {key: id_text(tap.head)}, PAGE, BLOCK_MS)
            gone = await self.live.trimmed(tap.stream) if answer else None
            if gone is not None and tap.head < gone <= await self.live.last_generated_id(tap.stream):
                tap.restart(gone)  # entries were trimmed before they were read: followers ask the store
            # No await from here until the followers are woken: they see a tap before or after the change.
            for _, entries in answer:
                tap.add(map(entry_of, entries), max(1 << 16, self._ring_bytes // max(1, len(self.taps))))
                read_at = clock()
            if answer:
                tap.wake()
            elif clock() - read_at >= CHECK_S:
                await self._check(tap)
                read_at = clock()

    async def _check(self, tap: Tap) -> None:
        """Begin a new era if the stream began anew: its ids may be lower than those read, and would never be seen."""
        if (
            await self.live.tail(tap.stream) < tap.head
            and BEGINNING < await self.live.last_generated_id(tap.stream) < tap.head
        ):
            tap.era += 1
            tap.restart(BEGINNING)
            tap.wake()


TRIES = 5
"""Attempts of a read that a trim has crossed."""


class StreamPiece(msgspec.Struct, frozen=True):
    """The next part of a life: an entry of the stream, or the blocks of a record in Kafka, none if it has no part."""

    position: StreamPosition
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
        more = {"possible": True} if self.possible else {}
        return {"session": identity, "from": str(self.after), "to": str(self.to), "reason": self.reason, **more}

    def error(self, identity: str) -> CursorGone:
        """Return the error for a reader that wants no gaps."""
        after, to = str(self.after), str(self.to)
        return CursorGone(identity, after, to, self.reason, f"session {identity!r}: what came after {after}")


class StreamReader:
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
        entries = buffered[:PAGE]
        self.reached = entries[-1].id if len(entries) < len(buffered) else max(self.reached, tap.head)
        return _pieces(entries)

    async def _from_store(self) -> list[StreamPiece | LostStretch]:
        stream, head = self._tap.stream, self._tap.head
        for _ in range(TRIES):
            trimmed = await self._live.trimmed(stream, self.number) or BEGINNING
            begin = max(self.reached, trimmed)
            entries, reached = await self._live.scan(stream, begin, PAGE, self.number, head)
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
    records: Records
    is_current: Callable[[Partition], Awaitable[bool]]
    """Returns True if a partition is of the topic that Kafka has under this name now."""
    max_bytes: int = 1 << 20
    max_depth: int = 200


class Hole(msgspec.Struct, frozen=True):
    """Records to skip after an offset, as some were read before; all the rest if the stretch ends in the stream."""

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


@dataclass(slots=True)
class KafkaReader:
    _archive: Archive
    _live: LiveSessions
    _located: Located
    _partition: Partition
    _after: int
    """Offset of the last record that was read before; that before the opening one if none was."""
    _least: EntryId = BEGINNING
    """An entry that the seam is not before, even if less was trimmed."""
    _hole: Hole | None = None
    _seam: Seam | None = None
    _closed: bool = False
    _ended: bool = False
    _catalogue: Catalogue = field(default_factory=Catalogue)
    _recorder: Recorder | None = None

    @property
    def seam_entry(self) -> EntryId:
        """Entry after which the stream continues, once everything was read."""
        return BEGINNING if self._seam is None else self._seam.entry

    async def next(self) -> list[StreamPiece | LostStretch]:
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
        located = self._located
        merged, opened = located.merged or located.json or "{}", located.opened or 0
        identity, stream, writer, position = located.identity, located.stream, located.writer, id_text(located.position)
        now = Session(identity, stream, located.number, position, "open", merged, merged, writer, opened, 0)
        # The present JSON has the right configurations: they never change.
        await self._live.learn(self._catalogue, now.bindings)
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

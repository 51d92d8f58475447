"""Where the numbers of a rebuilt tag end: what is live behind it, and what is left of it in front.

Invariant: how far sources have come is read before the registry of the log is. So a source that has live events by
then has its first one in the log, and one that has none there had come as far as was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct as Layout
from tempfile import TemporaryFile
from typing import IO, Any

import msgspec

from tailrace.log.event import Source
from tailrace.log.run import Run
from tailrace.upkeep.examine import Held
from tailrace.upkeep.restore import Event
from tailrace.valkey.shards import Shards, mapping
from tailrace.views.tags.model import Numbered
from tailrace.views.tags.renumber import Ends, counted, renumbered

PAGE = 1000


class Record(msgspec.Struct, frozen=True, gc=False):
    """A record of Kafka on its way to its log."""

    source: Source
    offset: int
    time_ms: int
    newest_ms: int
    """The running maximum of the times of its source and name."""
    body: bytes
    """Key, headers, value and what its tags are: ``restore.encode_body``."""


class Anchor:
    """What one log of a tag is numbered by while it is restored."""

    def __init__(self, shards: Shards, shard: int, tag: str) -> None:
        known = read_all_numbers(shards, shard, tag)
        self._numbers = {pid: each.number for pid, each in known.items()}
        self._top_ms = max((each.ms for each in known.values()), default=Numbered().ms)
        """No event of the tag had a later stamp by then."""
        self._stamps: dict[Source, int] = {}
        self._passed: set[str] = set()
        self._front: dict[str, Numbered] = {}
        self._segment: dict[str, Numbered] = {}
        self._ahead: dict[Source, dict[int, int]] = {}
        self._counts: dict[str, int] = {}
        self._known = known.keys()
        self.new: dict[str, Numbered] = {}
        """How far sources have come with what was numbered that had come nowhere."""

    # What is there.

    def begin(self, in_front: bool) -> None:
        """Go on to the next segment; all before it, if it says so, stands in front of what is replaced."""
        if in_front:
            self._front |= self._segment
        self._segment = {}

    def see(self, run: Run, after: int, last: int | None, retained: int) -> None:
        """Take note of a run of the log: of events after an offset, and of live ones after the last that is restored.

        Args:
            retained: The first offset that Kafka has.
        """
        assert run.notes is not None
        source, label, offsets, times = run.source, str(run.source), run.offsets, run.times
        for offset, time_ms, note in zip(offsets, times, run.notes.rows(offsets, times), strict=True):
            if last is not None and offset > last:
                self._pass(source, note.pid, note.number, note.ms)
            elif offset > after:
                self._segment[note.pid] = Numbered(note.number, note.seq, note.ms, label)
                if offset >= retained and note.ms != time_ms:
                    self._ahead.setdefault(source, {})[offset] = note.ms

    def pass_live(self, held: Iterable[Held]) -> None:
        """Take note of live events behind what is replaced, in their order."""
        for each in held:
            for entry in each.entries:
                run = entry.run
                for note in run.notes.rows(run.offsets, run.times) if run.notes is not None else ():
                    self._pass(run.source, note.pid, note.number, note.ms)

    def _pass(self, source: Source, pid: str, number: int, ms: int) -> None:
        if pid not in self._passed:
            self._passed.add(pid)
            self._numbers[pid] = number - 1
        self._stamps.setdefault(source, ms)

    # What comes in its place.

    def stamp_of(self, record: Record) -> int:
        """Return the millisecond of the stamp that an event has in the log, or its time if it is not there.

        A time that is after all stamps, and that none of the next records comes near, is one from the future.
        """
        time_ms = record.time_ms
        if time_ms > self._top_ms:
            time_ms = max(self._top_ms, min(time_ms, record.newest_ms))
        return self._ahead.get(record.source, {}).get(record.offset, time_ms)

    def fits(self, events: Iterable[Event]) -> bool:
        """Count what is to be numbered; return whether it follows what stands in front of it without a gap."""
        self._counts = counted(events)
        return self._ends().fits(self._counts, self._front)

    def begin_anew(self, events: Iterable[Event]) -> None:
        """Count what is to be numbered when nothing stands in front of it."""
        self._front = {}
        self._counts = counted(events)

    def numbered(self, events: Iterable[Event], latest_ms: int) -> Iterator[Event]:
        """Yield the events that were counted, with numbers and stamps."""
        for event in renumbered(events, self._ends(), self._counts, self._front, latest_ms):
            note = event.note
            if note is not None and note.pid not in self._known:
                self.new[note.pid] = Numbered(note.number, note.seq, note.ms, str(event.source))
            yield event

    def _ends(self) -> Ends:
        return Ends(self._numbers, self._stamps)


def read_all_numbers(shards: Shards, shard: int, tag: str) -> dict[str, Numbered]:
    """Return how far every source has come in a tag, each at some moment before this returns."""
    found: dict[str, Numbered] = {}
    cursor: Any = b"0"
    while True:
        command = "HSCAN", shards.keys.numbers(shard, tag), cursor, "COUNT", PAGE
        cursor, page = shards.run_all([(shard, command)])[0]
        found |= {pid.decode(): Numbered.parse(stored) for pid, stored in mapping(page).items()}
        if int(cursor) == 0:
            return found


class Spool:
    """Kafka's records of one log, kept in a file that has no name: they come once, and are read more than once."""

    _head = Layout("<I")

    def __init__(self, records: Iterable[Record]) -> None:
        self._file: IO[bytes] = TemporaryFile(buffering=1 << 20)  # noqa: SIM115 it is closed with us
        encode = msgspec.msgpack.Encoder().encode
        for record in records:
            stored = encode(record)
            self._file.write(self._head.pack(len(stored)) + stored)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Record]:
        """Yield the records from the first one on. One iteration at a time."""
        decode = msgspec.msgpack.Decoder(Record).decode
        self._file.seek(0)
        while head := self._file.read(self._head.size):
            yield decode(self._file.read(*self._head.unpack(head)))

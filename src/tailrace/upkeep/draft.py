"""The new segments of a log that is restored: staged piece by piece as their events come, each checked as it is stored.

Invariant: no more than one piece is in memory; the events of a segment are numbered on from those of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from tailrace.log.event import Source
from tailrace.log.pack import MERGED_BYTES, MERGED_EVENTS, pack, pieces
from tailrace.log.run import Entry, Run
from tailrace.log.segment import PACKED, Segment
from tailrace.log.store import Piece, Rebuilt
from tailrace.upkeep.audit_ import fingerprint, noted
from tailrace.upkeep.rebuild_ import Buckets, Event
from tailrace.views.tags.note import Notes

NO_ROOM, DIFFERS = "no-room", "differs"
"""Why events cannot be staged: there is no place for them, or what is stored is not what was written."""


class _Part(msgspec.Struct):
    """A new segment as it grows."""

    first: int
    last: int = 0
    newest_ms: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    pieces: int = 0


class Draft:
    """The new segments of one log, staged piece by piece as their events come; the number of each is counted from 1."""

    def __init__(
        self,
        name: str,
        buckets: Buckets,
        newest_ms: int,
        latest_ms: int,
        piece_bytes: int,
        stage: Callable[[Piece, Sequence[Entry]], bool] | None,
    ) -> None:
        self._name, self._buckets, self._piece_bytes, self._stage = name, buckets, piece_bytes, stage
        self._newest_ms, self._latest_ms = newest_ms, latest_ms
        self.parts: list[_Part] = []
        self.events = self.low = self.high = 0

    def write(self, events: Iterator[Event], has_room: bool) -> str:
        """Stage all events; return why that is not possible, or nothing."""
        placed = ((self._buckets.place(event.start_ms, event.span_ms), event) for event in events)
        for at, group in groupby(placed, key=lambda pair: pair[0]):
            if not has_room:
                return NO_ROOM
            part = _Part(self.events + 1)
            self.parts.append(part)
            for entries in pieces(self._entries(event for _, event in group), self._piece_bytes):
                end = entries[-1]
                part.last, part.newest_ms = end.last, end.newest_ms
                part.raw_bytes += sum(entry.size for entry in entries)
                if self._stage is not None:
                    stored = pack(entries)
                    n = end.last - entries[0].first + 1
                    is_first = part.pieces == 0
                    piece = Piece(self._name, at, end.last, n, end.newest_ms, stored, is_first, len(stored))
                    part.bytes += len(stored)
                    if not self._stage(piece, entries):
                        return DIFFERS
                part.pieces += 1
        return ""

    def segments(self, epoch: int, top: int, gone: tuple[tuple[int, int, int], ...]) -> list[Rebuilt]:
        """Return the new segments, the last one with the highest index."""
        found: list[Rebuilt] = []
        lowest = top - len(self.parts) + 1
        for i, (part, (start, end)) in enumerate(zip(self.parts, self._buckets.made, strict=True)):
            segment = Segment(
                index=lowest + i,
                start_ms=start,
                span_ms=end - start,
                epoch=epoch,
                first=part.first,
                last=part.last,
                events=part.last - part.first + 1,
                bytes=part.bytes,
                newest_ms=part.newest_ms,
                raw_bytes=part.raw_bytes,
                state=PACKED,
                replaced=gone if i == 0 else (),
            )
            found.append(Rebuilt(segment, i, part.pieces))
        return found

    def _entries(self, events: Iterable[Event]) -> Iterator[Entry]:
        """Make runs of neighbours of one source."""
        for source, group in groupby(events, key=lambda event: event.source):
            run: list[Event] = []
            size = 0
            for event in group:
                run.append(event)
                size += len(event.value) + len(event.key or b"") + 16
                if len(run) == MERGED_EVENTS or size >= MERGED_BYTES:
                    yield self._entry(source, run, size)
                    run, size = [], 0
            if run:
                yield self._entry(source, run, size)

    def _entry(self, source: Source, events: Sequence[Event], size: int) -> Entry:
        label, first = str(source), self.events + 1
        for e in events:
            note = () if e.note is None else noted(e.note.pid, e.note.seq, e.note.tags, e.note.number)
            low, high = fingerprint(label, e.offset, e.time_ms, e.key, e.headers, e.value, note)
            self.low, self.high = self.low + low, self.high + high
        self.events += len(events)
        newest_ms = max(e.time_ms if e.note is None else e.note.ms for e in events)
        self._newest_ms = max(self._newest_ms, min(self._latest_ms, newest_ms))
        keys, notes = [e.key for e in events], [e.note for e in events if e.note is not None]
        offsets, times = [e.offset for e in events], [e.time_ms for e in events]
        run = Run.of(
            source,
            offsets,
            times,
            keys[:1] if keys.count(keys[0]) == len(keys) else keys,
            [e.headers for e in events] if any(e.headers for e in events) else None,
            [e.value for e in events],
            Notes.of(notes, offsets, times) if notes else None,
        )
        return Entry(first, self.events, self._newest_ms, run, size)

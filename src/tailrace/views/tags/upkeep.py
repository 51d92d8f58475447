"""The job that takes a source out of tags for good, while everything runs.

Every shard begins a new epoch first, so that what exists now is never written again. Then it is remembered, tag by
tag, up to where the source is taken out, and its segments are written anew without those events, the oldest first.
Invariant: all other events keep their numbers, in the log and in the tag, so cursors stay what they are; the source's
own numbers go on after those that were taken out; and a run that dies is completed by the next.

What it is to take a source out of tags for good, wherever its events rest: which tags, and what became of each.

Numbering the events of a rebuilt tag: gapless for every source, and anchored where its live numbers begin.

Invariant: the last rebuilt event of a source has the number before its first live one, or the last that it was given,
if there is none yet; so nothing live is ever renumbered. Those in front of it are numbered downwards, without a gap. An
event that got its tag later than it was written may therefore have a number below 1.

Where the numbers of a rebuilt tag end: what is live behind it, and what is left of it in front.

Invariant: how far sources have come is read before the registry of the log is. So a source that has live events by
then has its first one in the log, and one that has none there had come as far as was read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from struct import Struct as Layout
from tempfile import TemporaryFile
from typing import IO, Any

import msgspec

from tailrace.config.settings import Settings
from tailrace.errors import BadRequest, StoreError
from tailrace.log.event import Partition
from tailrace.log.pack import digest, pack, pieces
from tailrace.log.run import NumberedRun, Run
from tailrace.log.segment import Segment
from tailrace.log.store import NewSegment, PackedPiece, Staging
from tailrace.upkeep import failpoint
from tailrace.upkeep.examine import ExaminedEntry, look, read_held
from tailrace.upkeep.job import JobLease, milliseconds, now_ms, require_copy
from tailrace.upkeep.replacement import RestoredEvent
from tailrace.valkey.shards import Shards, mapping
from tailrace.views.tags.model import Erasure, SourceProgress, erase_from, shrink_segment, timeuuid_ms, widen_neighbour
from tailrace.views.tags.store import VIEW, encode, read_erasures, tags_of

logger = logging.getLogger(__name__)

CLEANED, UNREADABLE, MOVED = "cleaned", "unreadable", "moved"
"""What became of a tag: the source is gone from it; left, in part, since a run cannot be read, or was changed."""


class Cleanup(msgspec.Struct, frozen=True):
    """What became of one tag."""

    tag: str
    verdict: str
    events: int
    """Of the source, that were taken out."""
    segments: int
    """That they were in."""


class TakingOut:
    """One run of the job; what became of each tag is in ``cleaned``.

    Args:
        source: Whose events are taken out.
        tag: Out of one tag; None = out of all.
    """

    name = "cleanup"
    view = VIEW
    whole = True

    def __init__(self, source: str, tag: str | None, reached: Callable[[str], None]) -> None:
        self._source, self._tag, self._reached = source, tag, reached
        self.cleaned: list[Cleanup] = []

    def facts(self) -> dict[str, object]:
        """What was done, for reports."""
        left: dict[str, int] = {}
        for each in self.cleaned:
            if each.verdict != CLEANED:
                left[each.verdict] = left.get(each.verdict, 0) + 1
        return {
            "source": self._source,
            "tags": len(self.cleaned),
            "events": sum(each.events for each in self.cleaned),
            "segments": sum(each.segments for each in self.cleaned),
            "left": left,
        }

    def _asked(self, tags: Iterable[str]) -> list[str]:
        """Return those of a source's tags that it is to be taken out of.

        Raises:
            BadRequest: There is none.
        """
        found = [tag for tag in tags if self._tag is None or tag == self._tag]
        if not found:
            where = "no tag has" if self._tag is None else f"the tag {self._tag!r} has no"
            raise BadRequest(f"{where} events of the source {self._source!r}")
        return found

    def _note(self, done: Cleanup, told: str) -> None:
        if not done.events and done.verdict == CLEANED:
            return
        self.cleaned.append(done)
        logger.info("tag %r: %d event(s) of %r %s; %s", done.tag, done.events, self._source, told, done.verdict)


STEPS = ("cleaned", "thin-staged", "thinned")
"""The failpoints, in order."""


class _Found(msgspec.Struct):
    """What a tag has of the source."""

    segments: dict[int, int]
    """Events, by the index of their segment."""
    places: dict[Partition, int]
    """The last offset of each partition."""
    number: int = 0
    unreadable: int = 0

    @property
    def events(self) -> int:
        return sum(self.segments.values())


class Cleaning(TakingOut):
    """One run of the job; what became of each tag is in ``cleaned``.

    Args:
        source: Whose events are taken out.
        tag: Out of one tag; None = out of all.

    Raises:
        BadRequest: There are no tags in Valkey.
    """

    def __init__(
        self,
        settings: Settings,
        source: str,
        tag: str | None = None,
        *,
        clock: Callable[[], int] = now_ms,
        reached: Callable[[str], None] = failpoint.reached,
    ) -> None:
        require_copy(settings, VIEW)
        super().__init__(source, tag, reached)
        self._clock = clock
        self._piece_bytes = settings.upkeep.segment_bytes
        self._remember_ms = milliseconds(settings.upkeep.remember)

    def look(self, shards: Shards) -> dict[str, object]:
        """Count what would be taken out, and change nothing.

        Raises:
            BadRequest: No such tag has events of the source.
        """
        for tag in self._asked(tags_of(shards, self._source)):
            found = self._find(shards, tag, look(shards, VIEW, [tag])[0].log.segments)
            self._note(Cleanup(tag, CLEANED, found.events, len(found.segments)), "would be taken out")
        return self.facts()

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Take the source out.

        Raises:
            BadRequest: No such tag has events of the source.
            StaleUpkeep: Another process has taken over.
        """
        tags = self._asked(tags_of(shards, self._source))
        staging = Staging(shards, VIEW, lease.token)
        opened = staging.reopen(self._clock() // 1000)
        for tag in tags:
            lease.check()
            seen = look(shards, VIEW, [tag])[0]
            epoch, marks = opened[seen.shard]
            old = [segment for segment in seen.log.segments if segment.epoch < epoch]
            found = self._find(shards, tag, old)
            if found.events:
                before = read_erasures(shards, [tag]).get(tag, {}).get(self._source, Erasure(0, {}))
                places = {str(place): max(last, marks.get(place, last)) for place, last in found.places.items()}
                gone = Erasure(max(before.number, found.number), {**before.marks, **places})
                staging.record_erasure(tag, self._source, encode(gone))
                self._reached("cleaned")
                verdict = self._clean(shards, staging, tag, old, found, gone)
            else:
                verdict = UNREADABLE if found.unreadable else CLEANED
            self._note(Cleanup(tag, verdict, found.events, len(found.segments)), "taken out")

    # What there is.

    def _find(self, shards: Shards, tag: str, segments: Sequence[Segment]) -> _Found:
        """Look for the source's events in a tag."""
        found = _Found({}, {})
        for segment in segments:
            for held in read_held(shards, VIEW, tag, segment):
                found.unreadable += bool(held.damage)
                for entry in held.entries:
                    run = entry.run
                    if run.tag_columns is None or self._source not in run.tag_columns.sources:
                        continue
                    for offset, note in zip(run.offsets, run.tag_columns.rows(run.offsets, run.times), strict=True):
                        if note.source == self._source:
                            found.segments[segment.index] = found.segments.get(segment.index, 0) + 1
                            found.places[run.partition] = max(offset, found.places.get(run.partition, offset))
                            found.number = note.number
        return found

    # What becomes of it.

    def _clean(
        self, shards: Shards, staging: Staging, tag: str, old: Sequence[Segment], found: _Found, gone: Erasure
    ) -> str:
        """Write the segments that have some anew, the oldest first."""
        segments = list(old)
        for at, segment in enumerate(old):
            if segment.index not in found.segments:
                continue
            try:
                left = self._stage(shards, staging, tag, segment, gone)
            except _Unreadable as error:
                logger.error("tag %r, segment %d: %s; `tailrace rebuild tags` restores it", tag, segment.index, error)
                return UNREADABLE
            neighbour = widen_neighbour([s for s in segments if s.events], segment) if left is None else None
            self._reached("thin-staged")
            if staging.thin(tag, segment, left, neighbour, self._remember_ms) != "ok":
                return MOVED
            self._reached("thinned")
            if left is not None:
                segments[at] = left.segment
            else:
                segments[at] = msgspec.structs.replace(segment, events=0)
                segments = [s if neighbour is None or s.index != neighbour.index else neighbour for s in segments]
        return CLEANED

    def _stage(self, shards: Shards, staging: Staging, tag: str, segment: Segment, gone: Erasure) -> NewSegment | None:
        """Write what is left of a segment aside; None if nothing is."""
        first = last = events = size = raw = count = 0
        for part in pieces(self._left(shards, tag, segment, gone), self._piece_bytes):
            stored, end = pack(part), part[-1]
            n = sum(len(entry.run) for entry in part)
            piece = PackedPiece(tag, segment.index, end.last, n, end.newest_ms, stored, count == 0, len(stored))
            staging.stage([piece])
            if digest(staging.read_staged([piece])[0]) != digest(part):
                raise StoreError(f"what was staged for {tag!r} is not what was written: is the store sound?")
            first, last, count = first or part[0].first, end.last, count + 1
            events, size, raw = events + n, size + len(stored), raw + sum(entry.size for entry in part)
        if not count:
            return None
        left = msgspec.structs.replace(shrink_segment(segment, first, last, events), bytes=size, raw_bytes=raw)
        return NewSegment(left, segment.index, count)

    def _left(self, shards: Shards, tag: str, segment: Segment, gone: Erasure) -> Iterator[NumberedRun]:
        for held in read_held(shards, VIEW, tag, segment):
            if held.damage:
                raise _Unreadable(held.damage)
            for entry in held.entries:
                yield from erase_from(entry, {self._source: gone})


class _Unreadable(Exception):
    """A stored run that cannot be read."""


class Ends(msgspec.Struct, frozen=True):
    """What comes behind the rebuilt events."""

    numbers: Mapping[str, int]
    """For each source the number of its last rebuilt event; 0 where nothing is said."""
    stamps: Mapping[Partition, int]
    """For each partition that has live events the stamp of its first one, in milliseconds: none before it is later."""

    def fits(self, counts: Mapping[str, int], front: Mapping[str, SourceProgress]) -> bool:
        """Return whether numbers go on without a gap from what stands in front of the rebuilt events."""
        return all(known.number == self.numbers.get(pid, 0) - counts.get(pid, 0) for pid, known in front.items())


def counted(events: Iterable[RestoredEvent]) -> dict[str, int]:
    """Return how many events each source has."""
    found: dict[str, int] = {}
    for event in events:
        assert event.note is not None
        found[event.note.source] = found.get(event.note.source, 0) + 1
    return found


def renumbered(
    events: Iterable[RestoredEvent],
    ends: Ends,
    counts: Mapping[str, int],
    front: Mapping[str, SourceProgress],
    latest_ms: int,
) -> Iterator[RestoredEvent]:
    """Yield events, in their order, with their numbers and stamps.

    The stamp that an event asks for, its own from before or its time, is raised by the rule that it was made by.

    Args:
        counts: How many of them each source has.
        front: How far sources have come in front of them.
        latest_ms: Where times from the future are cut.
    """
    known = dict(front)
    floors: dict[str, int] = {}
    for each in front.values():
        floors[each.partition] = max(each.ms, floors.get(each.partition, each.ms))
    begun: set[str] = set()
    for event in events:
        note, label = event.note, str(event.source)
        assert note is not None
        pid = note.source
        before = known.get(pid, SourceProgress())
        number = before.number + 1 if pid in begun else ends.numbers.get(pid, 0) - counts[pid] + 1
        begun.add(pid)
        latest = min(latest_ms, ends.stamps.get(event.source, latest_ms))
        ms = timeuuid_ms(note.ms, floors.get(label, before.ms), [before], label, latest)
        floors[label] = ms
        known[pid] = SourceProgress(number, note.seq, ms, label)
        yield msgspec.structs.replace(event, note=note._replace(number=number, ms=ms))


PAGE = 1000


class SpooledRecord(msgspec.Struct, frozen=True, gc=False):
    """A record of Kafka on its way to its log."""

    source: Partition
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
        self._top_ms = max((each.ms for each in known.values()), default=SourceProgress().ms)
        """No event of the tag had a later stamp by then."""
        self._stamps: dict[Partition, int] = {}
        self._passed: set[str] = set()
        self._front: dict[str, SourceProgress] = {}
        self._segment: dict[str, SourceProgress] = {}
        self._ahead: dict[Partition, dict[int, int]] = {}
        self._counts: dict[str, int] = {}
        self._known = known.keys()
        self.new: dict[str, SourceProgress] = {}
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
        assert run.tag_columns is not None
        source, label, offsets, times = run.partition, str(run.partition), run.offsets, run.times
        for offset, time_ms, note in zip(offsets, times, run.tag_columns.rows(offsets, times), strict=True):
            if last is not None and offset > last:
                self._pass(source, note.source, note.number, note.ms)
            elif offset > after:
                self._segment[note.source] = SourceProgress(note.number, note.seq, note.ms, label)
                if offset >= retained and note.ms != time_ms:
                    self._ahead.setdefault(source, {})[offset] = note.ms

    def pass_live(self, held: Iterable[ExaminedEntry]) -> None:
        """Take note of live events behind what is replaced, in their order."""
        for each in held:
            for entry in each.entries:
                run = entry.run
                for note in run.tag_columns.rows(run.offsets, run.times) if run.tag_columns is not None else ():
                    self._pass(run.partition, note.source, note.number, note.ms)

    def _pass(self, source: Partition, pid: str, number: int, ms: int) -> None:
        if pid not in self._passed:
            self._passed.add(pid)
            self._numbers[pid] = number - 1
        self._stamps.setdefault(source, ms)

    # What comes in its place.

    def stamp_of(self, record: SpooledRecord) -> int:
        """Return the millisecond of the stamp that an event has in the log, or its time if it is not there.

        A time that is after all stamps, and that none of the next records comes near, is one from the future.
        """
        time_ms = record.time_ms
        if time_ms > self._top_ms:
            time_ms = max(self._top_ms, min(time_ms, record.newest_ms))
        return self._ahead.get(record.source, {}).get(record.offset, time_ms)

    def fits(self, events: Iterable[RestoredEvent]) -> bool:
        """Count what is to be numbered; return whether it follows what stands in front of it without a gap."""
        self._counts = counted(events)
        return self._ends().fits(self._counts, self._front)

    def begin_anew(self, events: Iterable[RestoredEvent]) -> None:
        """Count what is to be numbered when nothing stands in front of it."""
        self._front = {}
        self._counts = counted(events)

    def numbered(self, events: Iterable[RestoredEvent], latest_ms: int) -> Iterator[RestoredEvent]:
        """Yield the events that were counted, with numbers and stamps."""
        for event in renumbered(events, self._ends(), self._counts, self._front, latest_ms):
            note = event.note
            if note is not None and note.source not in self._known:
                self.new[note.source] = SourceProgress(note.number, note.seq, note.ms, str(event.source))
            yield event

    def _ends(self) -> Ends:
        return Ends(self._numbers, self._stamps)


def read_all_numbers(shards: Shards, shard: int, tag: str) -> dict[str, SourceProgress]:
    """Return how far every source has come in a tag, each at some moment before this returns."""
    found: dict[str, SourceProgress] = {}
    cursor: Any = b"0"
    while True:
        command = "HSCAN", shards.keys.numbers(shard, tag), cursor, "COUNT", PAGE
        cursor, page = shards.run_all([(shard, command)])[0]
        found |= {pid.decode(): SourceProgress.parse(stored) for pid, stored in mapping(page).items()}
        if int(cursor) == 0:
            return found


class Spool:
    """Kafka's records of one log, kept in a file that has no name: they come once, and are read more than once."""

    _head = Layout("<I")

    def __init__(self, records: Iterable[SpooledRecord]) -> None:
        self._file: IO[bytes] = TemporaryFile(buffering=1 << 20)  # noqa: SIM115 it is closed with us
        encode = msgspec.msgpack.Encoder().encode
        for record in records:
            stored = encode(record)
            self._file.write(self._head.pack(len(stored)) + stored)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[SpooledRecord]:
        """Yield the records from the first one on. One iteration at a time."""
        decode = msgspec.msgpack.Decoder(SpooledRecord).decode
        self._file.seek(0)
        while head := self._file.read(self._head.size):
            yield decode(self._file.read(*self._head.unpack(head)))

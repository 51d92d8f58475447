"""Restoring one log from Kafka's records: reads what is left of it, writes what belongs there aside, checks, replaces.

Everything is streamed: of a log, no more than one piece and the offsets that its segments begin and end with are in
memory. Invariant: up to the one atomic step that replaces its segments a log is as it was, and what is staged ends by
itself. Whoever does it twice finds it done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from tailrace.model.audit import Checker, fingerprint, horizon, prints
from tailrace.model.bucket import bucket_start
from tailrace.model.event import Headers, Source
from tailrace.model.name import shard_of
from tailrace.model.pack import MERGED_BYTES, MERGED_EVENTS, digest, pack, pieces
from tailrace.model.rebuild import Buckets, Event, Limits, Stretch, Survey, limits, merged, one_day, replaced, whole_log
from tailrace.model.run import Entry, Run
from tailrace.model.segment import PACKED, Segment
from tailrace.settings import Days
from tailrace.stores.staging import Piece, Rebuilt, Staging
from tailrace.stores.valkey import Shards
from tailrace.upkeep import failpoint
from tailrace.upkeep.examine import Seen, look, read_held
from tailrace.upkeep.history import Assignment
from tailrace.upkeep.job import milliseconds
from tailrace.upkeep.sweep import over

STEPS = ("reopened", "rebuilt-staged", "rebuilt-checked", "replaced")
"""The failpoints of a rebuild, in order."""

REBUILT, SAME, FEWER, NO_ROOM = "rebuilt", "same", "fewer", "no-room"
MOVED, DIFFERS, BROKEN = "moved", "differs", "broken"
"""What became of a log: replaced; left since nothing would change, since it has more than Kafka, since a day has no
place between its neighbours, since it was changed meanwhile, since what was staged is not what was written, since its
registry cannot be read at all."""


class Orders(msgspec.Struct, frozen=True):
    """What a rebuild is to do."""

    work: Assignment
    days: Days
    token: int
    epochs: tuple[int, ...]
    """For each shard the epoch of what is rebuilt: everything of an earlier one is never written again."""
    day_ms: int | None
    """One UTC day; None = all of each log."""
    dry_run: bool
    now_ms: int
    piece_bytes: int
    remember_ms: int


class Record(msgspec.Struct, frozen=True, gc=False):
    """A record of Kafka on its way to its log."""

    source: Source
    offset: int
    time_ms: int
    newest_ms: int
    """The running maximum of the times of its source and name."""
    body: bytes
    """Key, headers and value: ``encode_body``."""


class Restored(msgspec.Struct, frozen=True):
    """What became of one log."""

    name: str
    verdict: str
    events: int = 0
    """In the new segments."""
    before: int = 0
    """That could be read of the old ones."""
    segments: int = 0
    replaced: int = 0


encode_body = msgspec.msgpack.Encoder().encode
_body = msgspec.msgpack.Decoder(tuple[bytes | None, Headers, bytes]).decode


class Restorer:
    """Restores logs of one view in one task."""

    def __init__(self, orders: Orders, shards: Shards, reached: Callable[[str], None] = failpoint.reached) -> None:
        self._orders, self._shards, self._reached = orders, shards, reached
        self._view, self._span_ms = orders.work.view, orders.work.plan.span_ms
        self._staging = Staging(shards, self._view, orders.token)

    def restore(self, name: str, records: Iterator[Record]) -> Restored:
        """Restore a log, given Kafka's records of it in the order of their running-maximum times."""
        orders, shard = self._orders, shard_of(name, self._shards.options.shards)
        seen, epoch = look(self._shards, self._view, [name])[0], orders.epochs[shard]
        if seen.is_broken:
            return Restored(name, BROKEN)
        if done := [s for s in seen.log.segments if s.epoch == epoch]:
            return Restored(name, REBUILT, sum(s.events for s in done), 0, len(done))
        behind = next((s for s in seen.log.segments if s.epoch > epoch), None)
        old = self._old(seen, epoch, behind)
        surveys = self._survey(name, shard, old)
        keep = orders.days.keep_of(name)
        keep_ms = None if keep is None else milliseconds(keep)
        if orders.day_ms is None:
            due = 0 if keep_ms is None else min(len(over(seen.log, keep_ms, orders.now_ms)), len(old))
            stretch = whole_log(surveys, due, behind)
        else:
            stretch = one_day(surveys, orders.day_ms, behind)
        since = horizon(seen.log, seen.has_dropped, seen.floor_ms, keep_ms, orders.now_ms)
        bounds = limits(surveys, stretch, since, orders.day_ms)
        inside = surveys[stretch.begin : stretch.end]
        draft = _Draft(
            name,
            self._buckets(surveys, stretch, behind, since),
            surveys[stretch.begin - 1].segment.newest_ms if stretch.begin else 0,
            orders.now_ms + orders.work.plan.future_ms,
            orders.piece_bytes,
            None if orders.dry_run else self._stage,
        )
        carried = self._carried(name, shard, surveys, stretch)
        verdict = draft.write(merged(carried, self._admitted(records, bounds), _added(inside)), stretch.room != 0)
        if not verdict:
            verdict = self._decide(seen, inside, draft)
        if not verdict:
            gone = [survey.segment for survey in inside]
            first = replaced([s.segment for s in surveys[: stretch.begin]], gone, seen.log.expired)
            verdict = self._replace(name, gone, draft.segments(epoch, stretch.top, first))
        if verdict != REBUILT:
            self._staging.discard(name, range(len(draft.parts)))
        before = sum(survey.events for survey in inside)
        return Restored(name, verdict, draft.events, before, len(draft.parts), len(inside))

    def _decide(self, seen: Seen, inside: Sequence[Survey], draft: _Draft) -> str:
        """Return what becomes of the log if it is not to be replaced; nothing if it is."""
        sums = [sum(column) for column in zip(*((s.events, s.low, s.high) for s in inside), strict=True)] or [0, 0, 0]
        listed = seen.listed or not seen.log.segments
        if sums == [draft.events, draft.low, draft.high] and listed and all(s.sound for s in inside):
            return SAME
        if self._orders.day_ms is not None and draft.events < sums[0]:
            return FEWER
        return REBUILT if self._orders.dry_run else ""

    def _replace(self, name: str, gone: Sequence[Segment], made: Sequence[Rebuilt]) -> str:
        self._reached("rebuilt-checked")
        answer = self._staging.replace(name, gone, made, self._orders.remember_ms)
        self._reached("replaced")
        return REBUILT if answer == "ok" else MOVED

    def _stage(self, piece: Piece, entries: Sequence[Entry]) -> bool:
        """Write a piece aside; return whether it is there as it was written."""
        self._staging.stage([piece])
        self._reached("rebuilt-staged")
        return digest(self._staging.staged([piece])[0]) == digest(entries)

    # What is there.

    def _old(self, seen: Seen, epoch: int, behind: Segment | None) -> list[Segment]:
        """Return the segments that are never written again; one whose row cannot be read as far as its key tells."""
        old = [s for s in seen.log.segments if s.epoch < epoch]
        for index in seen.broken:
            if behind is None or index < behind.index:
                near = min(old, key=lambda s: (s.index > index, abs(s.index - index)), default=None)
                place = (near.start_ms, near.span_ms, near.newest_ms) if near else (0, self._span_ms, 0)
                bare = Segment(index, place[0], place[1], 0, 1, 0, 0, 0, place[2])
                held = list(read_held(self._shards, self._view, seen.name, bare, entries=False))
                events, last = sum(each.events for each in held), held[-1].last if held else 0
                old.append(msgspec.structs.replace(bare, last=last, events=events))
        return sorted(old, key=lambda segment: segment.index)

    def _survey(self, name: str, shard: int, segments: Sequence[Segment]) -> list[Survey]:
        bounds = self._orders.work.extent.shards[shard]
        checker, found = Checker(name), list[Survey]()
        reached: dict[Source, int] = {}
        for segment in segments:
            checker.begin(segment)
            has_retained, events, low, high = False, 0, 0, 0
            offsets: dict[Source, tuple[int, int]] = {}
            carried: dict[Source, int] = {}
            for held in read_held(self._shards, self._view, name, segment):
                for entry in checker.take(held):
                    source = entry.run.source
                    first, last = bounds.get(source, (1 << 62, None))
                    for offset, _, its_low, its_high in prints(entry.run, reached.get(source, -1) + 1, last):
                        events, low, high = events + 1, low + its_low, high + its_high
                        offsets[source] = offsets.get(source, (offset, 0))[0], offset
                        reached[source] = offset
                        if offset >= first:
                            has_retained = True
                        else:
                            carried[source] = carried.get(source, 0) + 1
            sound = checker.end() and segment.epoch > 0
            found.append(Survey(segment, sound, has_retained, events, low, high, offsets, carried))
        return found

    def _carried(self, name: str, shard: int, surveys: Sequence[Survey], stretch: Stretch) -> Iterator[Event]:
        """Yield the events of a stretch that Kafka no longer has."""
        bounds = self._orders.work.extent.shards[shard]
        reached = {s: high for survey in surveys[: stretch.begin] for s, (_, high) in survey.bounds.items()}
        newest_ms = 0
        for survey in surveys[stretch.begin : stretch.end]:
            if not survey.carried:
                continue
            for held in read_held(self._shards, self._view, name, survey.segment):
                for entry in held.entries:
                    run, source = entry.run, entry.run.source
                    times, keys = run.times, run.keys
                    for i, offset in enumerate(run.offsets):
                        if offset <= reached.get(source, -1):
                            continue
                        reached[source] = offset
                        if offset >= bounds.get(source, (1 << 62, 0))[0]:
                            continue
                        newest_ms = max(newest_ms, times[i])
                        key = keys[0] if len(keys) == 1 else keys[i]
                        headers = run.headers[i] if run.headers is not None else []
                        place = survey.segment.start_ms, survey.segment.span_ms
                        yield Event(source, offset, times[i], key, headers, run.values[i], newest_ms, *place)

    def _admitted(self, records: Iterable[Record], bounds: Limits) -> Iterator[Event]:
        """Yield the records that go into the stretch."""
        span = self._span_ms
        for r in records:
            start = bucket_start(r.newest_ms, span)
            if bounds.admit(r.source, r.offset, start, span):
                yield Event(r.source, r.offset, r.time_ms, *_body(r.body), r.newest_ms, start, span)

    def _buckets(self, surveys: Sequence[Survey], stretch: Stretch, behind: Segment | None, horizon_ms: int) -> Buckets:
        """Return the buckets there may be.

        What was applied went to no later one than the last that is replaced; and a log that has dropped its oldest ones
        gets none of them back for what came late.
        """
        inside = [s.segment for s in surveys[stretch.begin : stretch.end] if s.segment.epoch]
        after = surveys[stretch.end].segment if stretch.end < len(surveys) else behind
        day_ms, future_ms = self._orders.day_ms, self._orders.work.plan.future_ms
        highest = bucket_start(self._orders.now_ms + future_ms, self._span_ms), self._span_ms
        if last := inside[-1] if inside else after:
            highest = last.start_ms, last.span_ms
        lowest = bucket_start(horizon_ms, self._span_ms), self._span_ms
        if surveys and horizon_ms == surveys[0].segment.start_ms:
            lowest = horizon_ms, surveys[0].segment.span_ms
        if day_ms is not None:
            lowest = (inside[0].start_ms, inside[0].span_ms) if inside else (day_ms, self._span_ms)
        return Buckets(surveys[stretch.begin - 1].segment if stretch.begin else None, stretch.room, lowest, highest)


def _added(surveys: Sequence[Survey]) -> dict[Source, int]:
    """Return how many events of each source are carried over."""
    found: dict[Source, int] = {}
    for survey in surveys:
        for source, n in survey.carried.items():
            found[source] = found.get(source, 0) + n
    return found


class _Part(msgspec.Struct):
    """A new segment as it grows."""

    first: int
    last: int = 0
    newest_ms: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    pieces: int = 0


class _Draft:
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
            low, high = fingerprint(label, e.offset, e.time_ms, e.key, e.headers, e.value)
            self.low, self.high = self.low + low, self.high + high
        self.events += len(events)
        self._newest_ms = max(self._newest_ms, min(self._latest_ms, max(e.time_ms for e in events)))
        keys = [e.key for e in events]
        run = Run.of(
            source,
            [e.offset for e in events],
            [e.time_ms for e in events],
            keys[:1] if keys.count(keys[0]) == len(keys) else keys,
            [e.headers for e in events] if any(e.headers for e in events) else None,
            [e.value for e in events],
        )
        return Entry(first, self.events, self._newest_ms, run, size)

"""Restoring one log from Kafka's records: reads what is left of it, writes what belongs there aside, checks, replaces.

Everything is streamed: of a log, no more than one piece and the offsets that its segments begin and end with are in
memory. Invariant: up to the one atomic step that replaces its segments a log is as it was, and what is staged ends by
itself. Whoever does it twice finds it done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from tailrace.log.columns import TagFields
from tailrace.log.event import Headers, Partition
from tailrace.log.name import shard_of
from tailrace.log.pack import digest
from tailrace.log.run import NumberedRun
from tailrace.log.segment import Segment, bucket_start
from tailrace.log.store import NewSegment, PackedPiece, Staging
from tailrace.upkeep import failpoint
from tailrace.upkeep.examine import Checker, ExaminedLog, horizon, look, prints, read_held
from tailrace.upkeep.job import BucketSettings, milliseconds
from tailrace.upkeep.replacement import (
    Buckets,
    ReplacedSegments,
    RestoredEvent,
    SegmentDraft,
    StretchBounds,
    Survey,
    all_of_it,
    limits,
    merged,
    one_day,
    replaced,
    whole_log,
)
from tailrace.upkeep.spark import Assignment
from tailrace.upkeep.sweep import over
from tailrace.valkey.shards import Shards
from tailrace.views.tags.model import erase_from
from tailrace.views.tags.store import VIEW as TAGS
from tailrace.views.tags.upkeep import Anchor, Spool, SpooledRecord
from tailrace.views.tags.write import TagsPlan

STEPS = ("reopened", "rebuilt-staged", "rebuilt-checked", "replaced")
"""The failpoints of a rebuild, in order."""

REBUILT, SAME, FEWER, MOVED, BROKEN = "rebuilt", "same", "fewer", "moved", "broken"
"""What became of a log: replaced; left since nothing would change, since it has more than Kafka, since it was changed
meanwhile, since its registry cannot be read at all; or, as the draft says, since a day has no place between its
neighbours, since what was staged is not what was written."""


class RebuildPlan(msgspec.Struct, frozen=True):
    """What a rebuild is to do."""

    work: Assignment
    section: BucketSettings
    token: int
    epochs: tuple[int, ...]
    """For each shard the epoch of what is rebuilt: everything of an earlier one is never written again."""
    day_ms: int | None
    """One UTC day; None = all of each log."""
    dry_run: bool
    now_ms: int
    piece_bytes: int
    remember_ms: int


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


class Body(msgspec.Struct, frozen=True, array_like=True):
    """What a record has beside its coordinates and its time."""

    key: bytes | None
    headers: Headers
    value: bytes
    pid: str = ""
    """Of a tag: whose event it is, its number there, and its tags."""
    seq: int = 0
    tags: tuple[str, ...] = ()


encode_body = msgspec.msgpack.Encoder().encode
_body = msgspec.msgpack.Decoder(Body).decode


class Restorer:
    """Restores logs of one view in one task."""

    def __init__(self, orders: RebuildPlan, shards: Shards, reached: Callable[[str], None] = failpoint.reached) -> None:
        self._orders, self._shards, self._reached = orders, shards, reached
        view = orders.work.make_view()
        self._view, self._span_ms, self._future_ms = orders.work.view, view.span_ms, view.future_ms
        self._staging = Staging(shards, self._view, orders.token)

    def restore(self, name: str, records: Iterable[SpooledRecord]) -> Restored:
        """Restore a log, given Kafka's records of it in the order of their running-maximum times."""
        orders, shard = self._orders, shard_of(name, self._shards.options.shards)
        # How far a tag has come is read before its log: what comes in between is found there.
        anchor = Anchor(self._shards, shard, name) if self._view == TAGS else None
        seen, epoch = look(self._shards, self._view, [name])[0], orders.epochs[shard]
        if seen.is_broken:
            return Restored(name, BROKEN)
        if done := [s for s in seen.log.segments if s.epoch == epoch]:
            return Restored(name, REBUILT, sum(s.events for s in done), 0, len(done))
        behind = next((s for s in seen.log.segments if s.epoch > epoch), None)
        old = self._old(seen, epoch, behind)
        keep = orders.section.keep_of(name)
        keep_ms = None if keep is None else milliseconds(keep)
        due = 0 if keep_ms is None else min(len(over(seen.log, keep_ms, orders.now_ms)), len(old))
        surveys = self._survey(name, shard, old, due, anchor)
        since = horizon(seen.log, seen.has_dropped, seen.floor_ms, keep_ms, orders.now_ms)
        stretch = whole_log(surveys, due, behind) if orders.day_ms is None else one_day(surveys, orders.day_ms, behind)
        if anchor is None:
            events = self._events(name, shard, surveys, stretch, since, records, None)
        else:
            with Spool(records) as spool:
                for segment in seen.log.segments:
                    if segment.epoch > epoch:
                        anchor.pass_live(read_held(self._shards, self._view, name, segment))
                if not anchor.fits(self._events(name, shard, surveys, stretch, since, spool, anchor)):
                    stretch = all_of_it(surveys, behind)
                    anchor.begin_anew(self._events(name, shard, surveys, stretch, since, spool, anchor))
                events = self._events(name, shard, surveys, stretch, since, spool, anchor)
                latest_ms = orders.now_ms + orders.work.plan.of(TagsPlan).options.future_ms
                numbered = anchor.numbered(events, latest_ms)
                return self._write(seen, surveys, stretch, behind, since, numbered, anchor)
        return self._write(seen, surveys, stretch, behind, since, events)

    def _events(
        self,
        name: str,
        shard: int,
        surveys: Sequence[Survey],
        stretch: ReplacedSegments,
        horizon_ms: int,
        records: Iterable[SpooledRecord],
        anchor: Anchor | None,
    ) -> Iterator[RestoredEvent]:
        """Yield what belongs into a stretch, in its order."""
        bounds = limits(surveys, stretch, horizon_ms, self._orders.day_ms)
        inside = surveys[stretch.begin : stretch.end]
        carried = self._carried(name, shard, surveys, stretch)
        return merged(carried, self._admitted(records, bounds, anchor), _added(inside))

    def _write(
        self,
        seen: ExaminedLog,
        surveys: Sequence[Survey],
        stretch: ReplacedSegments,
        behind: Segment | None,
        horizon_ms: int,
        events: Iterator[RestoredEvent],
        anchor: Anchor | None = None,
    ) -> Restored:
        """Write what belongs into a stretch aside, and put it there."""
        name, orders, inside = seen.name, self._orders, surveys[stretch.begin : stretch.end]
        epoch = orders.epochs[seen.shard]
        draft = SegmentDraft(
            name,
            self._buckets(surveys, stretch, behind, horizon_ms),
            surveys[stretch.begin - 1].segment.newest_ms if stretch.begin else 0,
            orders.now_ms + self._future_ms,
            orders.piece_bytes,
            None if orders.dry_run else self._stage,
        )
        verdict = draft.write(events, stretch.room != 0)
        if not verdict:
            verdict = self._decide(seen, inside, draft)
        if not verdict:
            if anchor is not None:
                self._staging.restore_numbers(name, {pid: each.stored() for pid, each in anchor.new.items()})
            gone = [survey.segment for survey in inside]
            first = replaced([s.segment for s in surveys[: stretch.begin]], gone, seen.log.expired)
            verdict = self._replace(name, gone, draft.segments(epoch, stretch.top, first))
        if verdict != REBUILT:
            self._staging.discard(name, range(len(draft.parts)))
        before = sum(survey.events for survey in inside)
        return Restored(name, verdict, draft.events, before, len(draft.parts), len(inside))

    def _decide(self, seen: ExaminedLog, inside: Sequence[Survey], draft: SegmentDraft) -> str:
        """Return what becomes of the log if it is not to be replaced; nothing if it is."""
        sums = [sum(column) for column in zip(*((s.events, s.low, s.high) for s in inside), strict=True)] or [0, 0, 0]
        listed = seen.listed or not seen.log.segments
        if sums == [draft.events, draft.low, draft.high] and listed and all(s.sound for s in inside):
            return SAME
        if self._orders.day_ms is not None and draft.events < sums[0]:
            return FEWER
        return REBUILT if self._orders.dry_run else ""

    def _replace(self, name: str, gone: Sequence[Segment], made: Sequence[NewSegment]) -> str:
        self._reached("rebuilt-checked")
        answer = self._staging.replace(name, gone, made, self._orders.remember_ms)
        self._reached("replaced")
        return REBUILT if answer == "ok" else MOVED

    def _stage(self, piece: PackedPiece, entries: Sequence[NumberedRun]) -> bool:
        """Write a piece aside; return whether it is there as it was written."""
        self._staging.stage([piece])
        self._reached("rebuilt-staged")
        return digest(self._staging.read_staged([piece])[0]) == digest(entries)

    # What is there.

    def _old(self, seen: ExaminedLog, epoch: int, behind: Segment | None) -> list[Segment]:
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

    def _survey(
        self, name: str, shard: int, segments: Sequence[Segment], due: int, anchor: Anchor | None
    ) -> list[Survey]:
        bounds, gone = self._orders.work.extent.shards[shard], self._orders.work.erasures.get(name)
        checker, found = Checker(name), list[Survey]()
        reached: dict[Partition, int] = {}
        in_front = True
        for i, segment in enumerate(segments):
            checker.begin(segment)
            if anchor is not None:
                anchor.begin(in_front)
            has_retained, events, low, high = False, 0, 0, 0
            offsets: dict[Partition, tuple[int, int]] = {}
            carried: dict[Partition, int] = {}
            for held in read_held(self._shards, self._view, name, segment):
                for entry in checker.take(held):
                    source = entry.run.partition
                    first, last = bounds.get(source, (1 << 62, None))
                    after = reached.get(source, -1)
                    if anchor is not None:
                        anchor.see(entry.run, after, last, first)
                    for offset, _, its_low, its_high in prints(entry.run, after + 1, last, numbered=True, gone=gone):
                        events, low, high = events + 1, low + its_low, high + its_high
                        offsets[source] = offsets.get(source, (offset, 0))[0], offset
                        reached[source] = offset
                        if offset >= first:
                            has_retained = True
                        else:
                            carried[source] = carried.get(source, 0) + 1
            sound = checker.end() and segment.epoch > 0
            in_front = in_front and (i < due or (sound and not has_retained))
            found.append(Survey(segment, sound, has_retained, events, low, high, offsets, carried))
        return found

    def _carried(
        self, name: str, shard: int, surveys: Sequence[Survey], stretch: ReplacedSegments
    ) -> Iterator[RestoredEvent]:
        """Yield the events of a stretch that Kafka no longer has."""
        bounds, gone = self._orders.work.extent.shards[shard], self._orders.work.erasures.get(name, {})
        reached = {s: high for survey in surveys[: stretch.begin] for s, (_, high) in survey.bounds.items()}
        newest_ms = 0
        for survey in surveys[stretch.begin : stretch.end]:
            if not survey.carried:
                continue
            for held in read_held(self._shards, self._view, name, survey.segment):
                for entry in (part for whole in held.entries for part in erase_from(whole, gone)):
                    run, source = entry.run, entry.run.partition
                    times, keys = run.times, run.keys
                    notes = run.tag_columns.rows(run.offsets, times) if run.tag_columns is not None else None
                    for i, offset in enumerate(run.offsets):
                        if offset <= reached.get(source, -1):
                            continue
                        reached[source] = offset
                        if offset >= bounds.get(source, (1 << 62, 0))[0]:
                            continue
                        note = notes[i] if notes is not None else None
                        newest_ms = max(newest_ms, times[i] if note is None else note.ms)
                        key = keys[0] if len(keys) == 1 else keys[i]
                        headers = run.headers[i] if run.headers is not None else []
                        place = survey.segment.start_ms, survey.segment.span_ms
                        yield RestoredEvent(
                            source, offset, times[i], key, headers, run.values[i], newest_ms, *place, note
                        )

    def _admitted(
        self, records: Iterable[SpooledRecord], bounds: StretchBounds, anchor: Anchor | None
    ) -> Iterator[RestoredEvent]:
        """Yield the records that go into the stretch."""
        span = self._span_ms
        for r in records:
            start = bucket_start(r.newest_ms, span)
            if not bounds.admit(r.source, r.offset, start, span):
                continue
            body, note = _body(r.body), None
            if anchor is not None:
                ms = anchor.stamp_of(r)
                note, start = TagFields(body.pid, body.seq, 0, ms, body.tags), bucket_start(max(r.newest_ms, ms), span)
            content = body.key, body.headers, body.value
            yield RestoredEvent(r.source, r.offset, r.time_ms, *content, r.newest_ms, start, span, note)

    def _buckets(
        self, surveys: Sequence[Survey], stretch: ReplacedSegments, behind: Segment | None, horizon_ms: int
    ) -> Buckets:
        """Return the buckets there may be.

        What was applied went to no later one than the last that is replaced; and a log that has dropped its oldest ones
        gets none of them back for what came late.
        """
        inside = [s.segment for s in surveys[stretch.begin : stretch.end] if s.segment.epoch]
        after = surveys[stretch.end].segment if stretch.end < len(surveys) else behind
        day_ms, future_ms = self._orders.day_ms, self._future_ms
        highest = bucket_start(self._orders.now_ms + future_ms, self._span_ms), self._span_ms
        if last := inside[-1] if inside else after:
            highest = last.start_ms, last.span_ms
        lowest = bucket_start(horizon_ms, self._span_ms), self._span_ms
        if surveys and horizon_ms == surveys[0].segment.start_ms:
            lowest = horizon_ms, surveys[0].segment.span_ms
        if day_ms is not None:
            lowest = (inside[0].start_ms, inside[0].span_ms) if inside else (day_ms, self._span_ms)
        return Buckets(surveys[stretch.begin - 1].segment if stretch.begin else None, stretch.room, lowest, highest)


def _added(surveys: Sequence[Survey]) -> dict[Partition, int]:
    """Return how many events of each source are carried over."""
    found: dict[Partition, int] = {}
    for survey in surveys:
        for source, n in survey.carried.items():
            found[source] = found.get(source, 0) + n
    return found

"""Restoring one log from Kafka's records: reads the rest of it, stages the right events aside, checks, replaces.

Everything is streamed: of a log, no more than one piece and the offsets that its segments begin and end with are in
memory. Invariant: up to the one atomic step that replaces its segments a log is as it was, and staged pieces expire by
themselves. A second restore finds the log restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import Struct as Layout
from tempfile import TemporaryFile
from typing import IO

import msgspec

from tailrace.log.event import Partition
from tailrace.log.name import shard_of
from tailrace.log.pack import digest
from tailrace.log.run import NumberedRun
from tailrace.log.segment import Segment, bucket_start
from tailrace.log.store import NewSegment, PackedPiece, Staging
from tailrace.upkeep import failpoint
from tailrace.upkeep.copy import (
    BROKEN,
    FEWER,
    MOVED,
    REBUILT,
    SAME,
    Numbering,
    RebuildPlan,
    Restored,
    SpooledRecord,
    decode_body,
)
from tailrace.upkeep.examine import Checker, ExaminedLog, horizon, is_erased, look, prints, read_held
from tailrace.upkeep.job import milliseconds
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
from tailrace.upkeep.sweep import over
from tailrace.valkey.shards import Shards

STEPS = ("reopened", "rebuilt-staged", "rebuilt-checked", "replaced")
"""The failpoints of a rebuild, in order."""


class Restorer:
    """Restores logs of one view in one task."""

    def __init__(self, plan: RebuildPlan, shards: Shards, reached: Callable[[str], None] = failpoint.reached) -> None:
        self._plan, self._shards, self._reached = plan, shards, reached
        writer = plan.work.writer()
        self._view, self._span_ms, self._future_ms = plan.work.view, writer.span_ms, writer.future_ms
        self._staging = Staging(shards, self._view, plan.token)

    def restore(self, name: str, records: Iterable[SpooledRecord]) -> Restored:
        """Restore a log, given Kafka's records of it in the order of their running-maximum times."""
        plan, shard = self._plan, shard_of(name, self._shards.options.shards)
        # The last numbers of sources are read before the log: events that come in between are found there.
        numbering = plan.work.copy.numbering(plan.work, self._shards, name, plan.now_ms)
        log, epoch = look(self._shards, self._view, [name])[0], plan.start.epochs[shard]
        if log.is_broken:
            return Restored(name, BROKEN)
        if done := [s for s in log.log.segments if s.epoch == epoch]:
            return Restored(name, REBUILT, sum(s.events for s in done), 0, len(done))
        behind = next((s for s in log.log.segments if s.epoch > epoch), None)
        old = self._old(log, epoch, behind)
        keep = plan.work.copy.buckets.keep_of(name)
        keep_ms = None if keep is None else milliseconds(keep)
        due = 0 if keep_ms is None else min(len(over(log.log, keep_ms, plan.now_ms)), len(old))
        surveys = self._survey(name, shard, old, due, numbering)
        since = horizon(log.log, log.has_dropped, log.floor_ms, keep_ms, plan.now_ms)
        stretch = whole_log(surveys, due, behind) if plan.day_ms is None else one_day(surveys, plan.day_ms, behind)
        if numbering is None:
            events = self._events(name, shard, surveys, stretch, since, records, None)
            return self._write(log, surveys, stretch, behind, since, events, None)
        with Spool(records) as spool:
            for segment in log.log.segments:
                if segment.epoch > epoch:
                    numbering.pass_live(read_held(self._shards, self._view, name, segment))
            if not numbering.fits(self._events(name, shard, surveys, stretch, since, spool, numbering)):
                stretch = all_of_it(surveys, behind)
                numbering.begin_anew(self._events(name, shard, surveys, stretch, since, spool, numbering))
            events = numbering.numbered(self._events(name, shard, surveys, stretch, since, spool, numbering))
            return self._write(log, surveys, stretch, behind, since, events, numbering)

    def _events(
        self,
        name: str,
        shard: int,
        surveys: Sequence[Survey],
        stretch: ReplacedSegments,
        horizon_ms: int,
        records: Iterable[SpooledRecord],
        numbering: Numbering | None,
    ) -> Iterator[RestoredEvent]:
        """Yield the right events of a stretch, in order."""
        bounds = limits(surveys, stretch, horizon_ms, self._plan.day_ms)
        counts: dict[Partition, int] = {}
        for survey in surveys[stretch.begin : stretch.end]:
            for partition, n in survey.carried.items():
                counts[partition] = counts.get(partition, 0) + n
        carried = self._carried(name, shard, surveys, stretch)
        return merged(carried, self._admitted(records, bounds, numbering), counts)

    def _write(
        self,
        log: ExaminedLog,
        surveys: Sequence[Survey],
        stretch: ReplacedSegments,
        behind: Segment | None,
        horizon_ms: int,
        events: Iterator[RestoredEvent],
        numbering: Numbering | None,
    ) -> Restored:
        """Stage the right events of a stretch, and put them in its place."""
        name, plan, inside = log.name, self._plan, surveys[stretch.begin : stretch.end]
        epoch = plan.start.epochs[log.shard]
        draft = SegmentDraft(
            name,
            self._buckets(surveys, stretch, behind, horizon_ms),
            surveys[stretch.begin - 1].segment.newest_ms if stretch.begin else 0,
            plan.now_ms + self._future_ms,
            plan.piece_bytes,
            None if plan.dry_run else self._stage,
        )
        verdict = draft.write(events, stretch.room != 0)
        if not verdict:
            verdict = self._decide(log, inside, draft)
        if not verdict:
            if numbering is not None:
                self._staging.restore_numbers(name, numbering.first_numbers())
            gone = [survey.segment for survey in inside]
            first = replaced([s.segment for s in surveys[: stretch.begin]], gone, log.log.expired)
            verdict = self._replace(name, gone, draft.segments(epoch, stretch.top, first))
        if verdict != REBUILT:
            self._staging.discard(name, range(len(draft.parts)))
        before = sum(survey.events for survey in inside)
        return Restored(name, verdict, draft.events, before, len(draft.parts), len(inside))

    def _decide(self, log: ExaminedLog, inside: Sequence[Survey], draft: SegmentDraft) -> str:
        """Return the verdict if the log is not to be replaced; nothing if it is."""
        sums = [sum(column) for column in zip(*((s.events, s.low, s.high) for s in inside), strict=True)] or [0, 0, 0]
        listed = log.listed or not log.log.segments
        if sums == [draft.events, draft.low, draft.high] and listed and all(s.sound for s in inside):
            return SAME
        if self._plan.day_ms is not None and draft.events < sums[0]:
            return FEWER
        return REBUILT if self._plan.dry_run else ""

    def _replace(self, name: str, gone: Sequence[Segment], made: Sequence[NewSegment]) -> str:
        self._reached("rebuilt-checked")
        answer = self._staging.replace(name, gone, made, self._plan.remember_ms)
        self._reached("replaced")
        return REBUILT if answer == "ok" else MOVED

    def _stage(self, piece: PackedPiece, entries: Sequence[NumberedRun]) -> bool:
        """Stage a piece; return whether the store has it as it was written."""
        self._staging.stage([piece])
        self._reached("rebuilt-staged")
        return digest(self._staging.read_staged([piece])[0]) == digest(entries)

    # The log as it is.

    def _old(self, log: ExaminedLog, epoch: int, behind: Segment | None) -> list[Segment]:
        """Return the segments that are never written again, also those whose rows can only be guessed."""
        old = [s for s in log.log.segments if s.epoch < epoch]
        for index in log.broken:
            if behind is None or index < behind.index:
                near = min(old, key=lambda s: (s.index > index, abs(s.index - index)), default=None)
                place = (near.start_ms, near.span_ms, near.newest_ms) if near else (0, self._span_ms, 0)
                bare = Segment(index, place[0], place[1], 0, 1, 0, 0, 0, place[2])
                held = list(read_held(self._shards, self._view, log.name, bare, entries=False))
                events, last = sum(each.events for each in held), held[-1].last if held else 0
                old.append(msgspec.structs.replace(bare, last=last, events=events))
        return sorted(old, key=lambda segment: segment.index)

    def _survey(
        self, name: str, shard: int, segments: Sequence[Segment], due: int, numbering: Numbering | None
    ) -> list[Survey]:
        bounds, erased = self._plan.work.extent.shards[shard], self._plan.work.erased.get(name)
        checker, found = Checker(name), list[Survey]()
        reached: dict[Partition, int] = {}
        in_front = True
        for i, segment in enumerate(segments):
            checker.begin(segment)
            if numbering is not None:
                numbering.begin(in_front)
            has_retained, events, low, high = False, 0, 0, 0
            offsets: dict[Partition, tuple[int, int]] = {}
            carried: dict[Partition, int] = {}
            for held in read_held(self._shards, self._view, name, segment):
                for entry in checker.take(held):
                    partition = entry.run.partition
                    first, last = bounds.get(partition, (1 << 62, None))
                    after = reached.get(partition, -1)
                    if numbering is not None:
                        numbering.see(entry.run, after, last, first)
                    for offset, _, its_low, its_high in prints(
                        entry.run, after + 1, last, numbered=True, erased=erased
                    ):
                        events, low, high = events + 1, low + its_low, high + its_high
                        offsets[partition] = offsets.get(partition, (offset, 0))[0], offset
                        reached[partition] = offset
                        if offset >= first:
                            has_retained = True
                        else:
                            carried[partition] = carried.get(partition, 0) + 1
            sound = checker.end() and segment.epoch > 0
            in_front = in_front and (i < due or (sound and not has_retained))
            found.append(Survey(segment, sound, has_retained, events, low, high, offsets, carried))
        return found

    def _carried(
        self, name: str, shard: int, surveys: Sequence[Survey], stretch: ReplacedSegments
    ) -> Iterator[RestoredEvent]:
        """Yield the events of a stretch that Kafka no longer has."""
        bounds, erased = self._plan.work.extent.shards[shard], self._plan.work.erased.get(name)
        reached = {s: high for survey in surveys[: stretch.begin] for s, (_, high) in survey.bounds.items()}
        newest_ms = 0
        for survey in surveys[stretch.begin : stretch.end]:
            if not survey.carried:
                continue
            bucket = survey.segment.start_ms, survey.segment.span_ms
            runs = (
                entry.run
                for held in read_held(self._shards, self._view, name, survey.segment)
                for entry in held.entries
            )
            for run in runs:
                partition, label, times, keys = run.partition, str(run.partition), run.times, run.keys
                retained = bounds.get(partition, (1 << 62, 0))[0]
                rows = run.tag_columns.rows(run.offsets, times) if run.tag_columns is not None else None
                for i, offset in enumerate(run.offsets):
                    fields = rows[i] if rows is not None else None
                    if offset <= reached.get(partition, -1) or is_erased(erased, fields, label, offset):
                        continue
                    reached[partition] = offset
                    if offset >= retained:
                        continue
                    newest_ms = max(newest_ms, times[i] if fields is None else fields.ms)
                    key = keys[0] if len(keys) == 1 else keys[i]
                    headers = run.headers[i] if run.headers is not None else []
                    content = key, headers, run.values[i]
                    yield RestoredEvent(partition, offset, times[i], *content, newest_ms, *bucket, fields)

    def _admitted(
        self, records: Iterable[SpooledRecord], bounds: StretchBounds, numbering: Numbering | None
    ) -> Iterator[RestoredEvent]:
        """Yield the records that belong into the stretch."""
        span = self._span_ms
        for r in records:
            start = bucket_start(r.newest_ms, span)
            if not bounds.admit(r.partition, r.offset, start, span):
                continue
            body, fields = decode_body(r.body), None
            if numbering is not None:
                fields = numbering.fields_of(r, body)
                start = bucket_start(max(r.newest_ms, fields.ms), span)
            content = body.key, body.headers, body.value
            yield RestoredEvent(r.partition, r.offset, r.time_ms, *content, r.newest_ms, start, span, fields)

    def _buckets(
        self, surveys: Sequence[Survey], stretch: ReplacedSegments, behind: Segment | None, horizon_ms: int
    ) -> Buckets:
        """Return the buckets that new segments may have.

        Applied events went to no later bucket than the last replaced one; and a log that has dropped its oldest buckets
        gets none of them back for late events.
        """
        inside = [s.segment for s in surveys[stretch.begin : stretch.end] if s.segment.epoch]
        after = surveys[stretch.end].segment if stretch.end < len(surveys) else behind
        day_ms, future_ms = self._plan.day_ms, self._future_ms
        highest = bucket_start(self._plan.now_ms + future_ms, self._span_ms), self._span_ms
        if last := inside[-1] if inside else after:
            highest = last.start_ms, last.span_ms
        lowest = bucket_start(horizon_ms, self._span_ms), self._span_ms
        if surveys and horizon_ms == surveys[0].segment.start_ms:
            lowest = horizon_ms, surveys[0].segment.span_ms
        if day_ms is not None:
            lowest = (inside[0].start_ms, inside[0].span_ms) if inside else (day_ms, self._span_ms)
        return Buckets(surveys[stretch.begin - 1].segment if stretch.begin else None, stretch.room, lowest, highest)


class Spool:
    """Kafka's records of one log in a temporary file: they come once, and are read more than once."""

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

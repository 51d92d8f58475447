"""A view's copy of Kafka's records in logs of Valkey: how it is compared, and how its logs are restored.

For a rebuild every shard begins a new epoch first, so that no segment of an earlier one is written again. Then one
Spark job reads Kafka up to the marks of that moment, gathers the records of each name, and restores log after log:
reads the rest of a log, stages the right events aside, checks them, and replaces its segments.

Everything is streamed: of a log, no more than one piece and the offsets that its segments begin and end with are in
memory. Invariant: up to the one atomic step that replaces its segments a log is as it was, and staged pieces expire by
themselves. A second restore finds the log restored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from struct import Struct as Layout
from tempfile import TemporaryFile
from typing import IO, Any, ClassVar
from zlib import crc32

import msgspec
import pyarrow as pa

from tailrace.driver.slice import Slice
from tailrace.log.event import Partition
from tailrace.log.segment import DAY_MS, Segment, bucket_start
from tailrace.log.store import LogRegistry, Staging
from tailrace.upkeep.copy import (
    BROKEN,
    FEWER,
    MOVED,
    REBUILT,
    SAME,
    Assignment,
    Body,
    MapRecords,
    Numbering,
    RebuildPlan,
    RebuildStart,
    Restored,
    RestoredEvent,
    SpooledRecord,
    ViewCopy,
    arrow_batch,
    decode_body,
    difference,
    encode_body,
    may_have_dropped,
    replay,
)
from tailrace.upkeep.examine import (
    Checker,
    Examined,
    ExaminedLog,
    Finding,
    examine,
    is_erased,
    prints,
    read_logs,
    read_segment,
)
from tailrace.upkeep.job import failpoint
from tailrace.upkeep.rebuild import (
    Buckets,
    ReplacedPart,
    SegmentDraft,
    Survey,
    faulty_part,
    merged,
    one_day,
    record_bounds,
    replaced,
    replaced_part,
)
from tailrace.upkeep.sweep import over
from tailrace.valkey.marks import read_marks
from tailrace.valkey.shards import Shards

STEPS = ("reopened", "rebuilt-staged", "rebuilt-checked", "replaced")
"""The failpoints of a rebuild, in order."""


class Restorer:
    """Restores logs of one view in one task."""

    def __init__(self, plan: RebuildPlan, shards: Shards, reached: Callable[[str], None] = failpoint) -> None:
        self.plan, self.shards, self.reached = plan, shards, reached
        self.writer = plan.work.writer()

    def restore(self, name: str, records: Iterable[SpooledRecord]) -> Restored:
        """Restore a log, given Kafka's records of it in the order of their running-maximum times."""
        plan = self.plan
        # The last numbers of sources are read before the log: events that come in between are found there.
        numbering = plan.work.copy.numbering(self.shards, name, plan.now_ms)
        log = read_logs(self.shards, plan.work.view, [name])[0]
        if log.is_broken:
            return Restored(name, BROKEN)
        if done := [s for s in log.log.segments if s.epoch == plan.start.epochs[log.shard]]:
            return Restored(name, REBUILT, sum(s.events for s in done), 0, len(done))
        return _LogRestorer(self, log, numbering).restore(records)


class _LogRestorer:
    def __init__(self, restorer: Restorer, log: ExaminedLog, numbering: Numbering | None) -> None:
        plan, writer = restorer.plan, restorer.writer
        self._plan, self._shards, self._reached = plan, restorer.shards, restorer.reached
        self._log, self._numbering = log, numbering
        self._name, self._view, self._epoch = log.name, plan.work.view, plan.start.epochs[log.shard]
        self._span_ms, self._latest_ms = writer.span_ms, plan.now_ms + writer.future_ms
        self._staging = Staging(self._shards, self._view, plan.token)
        self._bounds, self._erased = plan.work.extent.shards[log.shard], plan.work.erased.get(log.name)
        self._behind = next((s for s in log.log.segments if s.epoch > self._epoch), None)
        kept_ms = plan.work.copy.kept_since(log.name, plan.now_ms)
        self._horizon_ms = log.horizon(kept_ms)
        old = self._old()
        self._due = min(len(over(log.log, kept_ms)), len(old))
        self._surveys = self._survey(old)

    def restore(self, records: Iterable[SpooledRecord]) -> Restored:
        """Replace the part of the log that needs it."""
        surveys, behind, day_ms, numbering = self._surveys, self._behind, self._plan.day_ms, self._numbering
        part = faulty_part(surveys, self._due, behind) if day_ms is None else one_day(surveys, day_ms, behind)
        if numbering is None:
            return self._write(part, self._events(part, records))
        with Spool(records) as spool:
            for segment in self._log.log.segments:
                if segment.epoch > self._epoch:
                    numbering.pass_live(read_segment(self._shards, self._view, self._name, segment))
            if not numbering.fits(self._events(part, spool)):
                part = replaced_part(surveys, 0, len(surveys), behind)
                numbering.begin_anew(self._events(part, spool))
            return self._write(part, numbering.numbered(self._events(part, spool)))

    def _old(self) -> list[Segment]:
        """Return the segments that are never written again, also those whose rows can only be guessed."""
        old = [s for s in self._log.log.segments if s.epoch < self._epoch]
        for index in self._log.broken:
            if self._behind is None or index < self._behind.index:
                unknown = Segment(index, 0, self._span_ms, 0, 1, 0, 0, 0, 0)
                near = min(old, key=lambda s: (s.index > index, abs(s.index - index)), default=unknown)
                bare = Segment(index, near.start_ms, near.span_ms, 0, 1, 0, 0, 0, near.newest_ms)
                entries = list(read_segment(self._shards, self._view, self._name, bare, entries=False))
                events, last = sum(each.events for each in entries), entries[-1].last if entries else 0
                old.append(msgspec.structs.replace(bare, last=last, events=events))
        return sorted(old, key=lambda segment: segment.index)

    def _survey(self, segments: Sequence[Segment]) -> list[Survey]:
        checker, found, numbering = Checker(self._name), list[Survey](), self._numbering
        reached: dict[Partition, int] = {}
        in_front = True
        for i, segment in enumerate(segments):
            checker.begin(segment)
            if numbering is not None:
                numbering.begin(in_front)
            has_retained, events, low, high = False, 0, 0, 0
            offsets: dict[Partition, tuple[int, int]] = {}
            carried: Counter[Partition] = Counter()
            for entry in read_segment(self._shards, self._view, self._name, segment):
                for run in (each.run for each in checker.take(entry)):
                    partition = run.partition
                    first, last = self._bounds.get(partition, (1 << 62, None))
                    after = reached.get(partition, -1)
                    if numbering is not None:
                        numbering.see(run, after, last, first)
                    for offset, _, *sums in prints(run, after + 1, last, numbered=True, erased=self._erased):
                        events, low, high = events + 1, low + sums[0], high + sums[1]
                        offsets[partition] = offsets.get(partition, (offset, 0))[0], offset
                        reached[partition] = offset
                        if offset >= first:
                            has_retained = True
                        else:
                            carried[partition] += 1
            sound = checker.end() and segment.epoch > 0
            in_front = in_front and (i < self._due or (sound and not has_retained))
            found.append(Survey(segment, sound, has_retained, events, low, high, offsets, carried))
        return found

    def _events(self, part: ReplacedPart, records: Iterable[SpooledRecord]) -> Iterator[RestoredEvent]:
        """Yield the right events of the replaced part, in order."""
        counts: Counter[Partition] = Counter()
        for survey in self._surveys[part.begin : part.end]:
            counts.update(survey.carried)
        return merged(self._carried(part), self._admitted(part, records), counts)

    def _carried(self, part: ReplacedPart) -> Iterator[RestoredEvent]:
        """Yield the events of the replaced part that Kafka no longer has."""
        reached = {s: high for survey in self._surveys[: part.begin] for s, (_, high) in survey.bounds.items()}
        newest_ms = 0
        for segment in (survey.segment for survey in self._surveys[part.begin : part.end] if survey.carried):
            entries = read_segment(self._shards, self._view, self._name, segment)
            for run in (each.run for entry in entries for each in entry.runs):
                partition, label, times, keys = run.partition, str(run.partition), run.times, run.keys
                retained = self._bounds.get(partition, (1 << 62, 0))[0]
                rows = run.tag_columns.rows(run.offsets, times) if run.tag_columns is not None else None
                for i, offset in enumerate(run.offsets):
                    fields = rows[i] if rows is not None else None
                    if offset <= reached.get(partition, -1) or is_erased(self._erased, fields, label, offset):
                        continue
                    reached[partition] = offset
                    if offset >= retained:
                        continue
                    newest_ms = max(newest_ms, times[i] if fields is None else fields.ms)
                    key = keys[0] if len(keys) == 1 else keys[i]
                    content = key, run.headers[i] if run.headers is not None else [], run.values[i]
                    bucket = segment.start_ms, segment.span_ms
                    yield RestoredEvent(partition, offset, times[i], *content, newest_ms, *bucket, fields)

    def _admitted(self, part: ReplacedPart, records: Iterable[SpooledRecord]) -> Iterator[RestoredEvent]:
        """Yield the records that belong into the replaced part."""
        bounds = record_bounds(self._surveys, part, self._horizon_ms, self._plan.day_ms)
        span = self._span_ms
        for r in records:
            start = bucket_start(r.newest_ms, span)
            if not bounds.admit(r.partition, r.offset, start, span):
                continue
            body, fields = decode_body(r.body), None
            if self._numbering is not None:
                fields = self._numbering.fields_of(r, body)
                start = bucket_start(max(r.newest_ms, fields.ms), span)
            content = body.key, body.headers, body.value
            yield RestoredEvent(r.partition, r.offset, r.time_ms, *content, r.newest_ms, start, span, fields)

    def _buckets(self, part: ReplacedPart) -> Buckets:
        """Return the buckets that new segments may have.

        Applied events went to no later bucket than the last replaced one; and a log that has dropped its oldest buckets
        gets none of them back for late events.
        """
        surveys, day_ms, span = self._surveys, self._plan.day_ms, self._span_ms
        inside = [s.segment for s in surveys[part.begin : part.end] if s.segment.epoch]
        after = surveys[part.end].segment if part.end < len(surveys) else self._behind
        highest = bucket_start(self._latest_ms, span), span
        if last := inside[-1] if inside else after:
            highest = last.start_ms, last.span_ms
        lowest = bucket_start(self._horizon_ms, span), span
        if surveys and self._horizon_ms == surveys[0].segment.start_ms:
            lowest = self._horizon_ms, surveys[0].segment.span_ms
        if day_ms is not None:
            lowest = (inside[0].start_ms, inside[0].span_ms) if inside else (day_ms, span)
        return Buckets(surveys[part.begin - 1].segment if part.begin else None, part.room, lowest, highest)

    def _write(self, part: ReplacedPart, events: Iterator[RestoredEvent]) -> Restored:
        """Stage the right events of the replaced part, and put them in its place."""
        surveys, plan = self._surveys, self._plan
        inside, front = surveys[part.begin : part.end], [s.segment for s in surveys[: part.begin]]
        newest_ms = front[-1].newest_ms if front else 0
        draft = SegmentDraft(
            self._name,
            self._buckets(part),
            newest_ms,
            self._latest_ms,
            plan.piece_bytes,
            None if plan.dry_run else self._staging,
            lambda: self._reached("rebuilt-staged"),
        )
        verdict = draft.write(events, part.room != 0) or self._decide(inside, draft)
        if not verdict:
            if self._numbering is not None:
                self._staging.restore_numbers(self._name, self._numbering.first_numbers())
            gone = [survey.segment for survey in inside]
            new = draft.segments(self._epoch, part.top, replaced(front, gone, self._log.log.expired))
            self._reached("rebuilt-checked")
            answer = self._staging.replace(self._name, gone, new, plan.remember_ms)
            self._reached("replaced")
            verdict = REBUILT if answer == "ok" else MOVED
        if verdict != REBUILT:
            self._staging.discard(self._name, range(len(draft.parts)))
        before = sum(survey.events for survey in inside)
        return Restored(self._name, verdict, draft.events, before, len(draft.parts), len(inside))

    def _decide(self, inside: Sequence[Survey], draft: SegmentDraft) -> str:
        """Return the verdict if the log is not to be replaced; nothing if it is."""
        sums = [sum(column) for column in zip(*((s.events, s.low, s.high) for s in inside), strict=True)] or [0, 0, 0]
        listed = self._log.listed or not self._log.log.segments
        if sums == [draft.events, draft.low, draft.high] and listed and all(s.sound for s in inside):
            return SAME
        if self._plan.day_ms is not None and draft.events < sums[0]:
            return FEWER
        return REBUILT if self._plan.dry_run else ""


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


RECORDS = "name string, source string, offset long, time long, body binary"
NEXT_RECORDS = 3
_RESTORED = "name string, verdict string, events long, before long, segments long, replaced long"
_ANY_EPOCH = 1 << 62
"""Above every epoch: a dry run counts all segments as replaceable."""


class LogCopy(ViewCopy):
    """One log for each name. A view whose logs have tag fields also has ``numbering`` and ``check_numbers``."""

    outcome = Restored
    refused: ClassVar[Mapping[str, str]] = {"source": "the events of this view have no sources of their own"}

    def check_numbers(self, shards: Shards, log: ExaminedLog, counted: dict[str, int]) -> Iterable[Finding]:
        """Compare the last number of each source in a log with the last number that its shard has given out."""
        return ()

    def is_written(self, shards: Shards) -> bool:
        return any(read_marks(shards, self.view)) or LogRegistry(shards, self.view).count() > 0

    def examine(self, work: Assignment, shards: Shards, part: int, parts: int, now_ms: int) -> Iterator[Examined]:
        wanted, count = work.wanted.test(), shards.options.shards
        shard, part, parts = part % count, part // count, parts // count

        def is_mine(name: str) -> bool:
            return crc32(name.encode()) // count % parts == part and wanted(name)

        pages = LogRegistry(shards, self.view).pages(shard, is_mine)
        logs = (log for names in pages for log in read_logs(shards, self.view, names))
        return examine(shards, self.view, logs, work.extent.shards[shard], work.erased, self.check_numbers)

    def explain(
        self, shards: Shards, sums: Sequence[Mapping[str, Any]], now_ms: int
    ) -> Iterator[tuple[Mapping[str, Any], Finding | None]]:
        names = sorted({row["name"] for row in sums})
        logs = dict(zip(names, read_logs(shards, self.view, names), strict=True))
        for row in sums:
            log = logs[row["name"]]
            since_ms = log.horizon(0)
            if log.has_dropped and row["day"] * DAY_MS > now_ms:
                # Records from the future: their times do not say when they were dropped.
                since_ms = 1 << 62
            if may_have_dropped(row, since_ms):
                yield row, None
            elif not log.listed and (log.log.segments or log.is_broken):
                yield row, Finding("unlisted", log.name, detail="there is a log, and the name is not listed")
            else:
                missing = "Kafka has more" if log.log.segments else "Kafka has it, and there is no such log"
                yield row, difference(row, missing=missing)

    def begin(self, shards: Shards, token: int | None, now_ms: int) -> RebuildStart:
        if token is None:
            return RebuildStart(None, (_ANY_EPOCH,) * shards.options.shards)
        opened = Staging(shards, self.view, token).reopen(now_ms // 1000)
        failpoint("reopened")
        return RebuildStart(tuple(marks for _, marks in opened), tuple(epoch for epoch, _ in opened))

    def rebuild(self, spark: Any, plan: RebuildPlan, records: MapRecords) -> Any:
        from pyspark.sql import Window
        from pyspark.sql.functions import coalesce, col, least, lit
        from pyspark.sql.functions import max as highest

        work, names = plan.work, sorted(plan.work.wanted.names or ())

        def restore(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from _restored(plan, batches)

        # Every name has a row of its own, so that a log of which Kafka has nothing is restored too.
        rows = spark.createDataFrame([(name, "", -1, 0, None) for name in names], RECORDS)
        rows = rows.unionAll(records(lambda slices: route(work, slices), RECORDS))
        each = Window.partitionBy("name", "source").orderBy("offset")
        latest = plan.now_ms + work.writer().future_ms
        # A time that none of the next records comes near is one from the future; it must not hold back what follows.
        next_ones = coalesce(highest("time").over(each.rowsBetween(1, NEXT_RECORDS)), col("time"))
        in_order = (
            rows.repartition(2 * int(spark.sparkContext.defaultParallelism), "name")
            .withColumn("likely", least(col("time"), next_ones, lit(latest)))
            .withColumn("newest", highest("likely").over(each.rowsBetween(Window.unboundedPreceding, 0)))
            .drop("likely")
            .sortWithinPartitions("name", "newest", "source", "offset")
        )
        return in_order.mapInArrow(restore, _RESTORED)

    def facts(self, rebuilt: Sequence[Restored], left: Mapping[str, int]) -> dict[str, object]:
        return {
            "events": sum(each.events for each in rebuilt),
            "restored": sum(max(0, each.events - each.before) for each in rebuilt),
            "segments": sum(each.segments for each in rebuilt),
            "left": left,
        }


def route(work: Assignment, slices: Iterable[Slice]) -> Iterator[pa.RecordBatch]:
    """Yield Kafka's records with the names of their logs."""
    for records, rows in replay(work, slices):
        partition, heads = str(records.partition), records.headers
        bodies: dict[int, bytes] = {}
        for i, _, _, fields in rows:
            if i not in bodies:
                more = () if fields is None else (fields.source, fields.seq, fields.tags)
                head = heads[i] if heads is not None else []
                bodies[i] = encode_body(Body(records.keys[i], head, records.values[i] or b"", *more))
        named = ((name, partition, records.offsets[i], records.times[i], bodies[i]) for i, _, name, _ in rows)
        yield arrow_batch(RECORDS, named)


def _restored(plan: RebuildPlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Restore the logs whose records come, one after the other; yield the outcome of each."""
    with closing(plan.work.open()) as shards:
        restorer = Restorer(plan, shards)
        for name, rows in groupby(_rows(batches), key=lambda row: row[0]):
            outcome = restorer.restore(name, (record for _, record in rows if record is not None))
            yield arrow_batch(_RESTORED, [msgspec.structs.astuple(outcome)])


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, SpooledRecord | None]]:
    partitions: dict[str, Partition] = {}
    for batch in batches:
        columns = [column.to_pylist() for column in batch.columns]
        for name, source, offset, time_ms, body, newest in zip(*columns, strict=True):
            if not source:
                yield name, None
                continue
            partition = partitions.get(source) or partitions.setdefault(source, Partition.parse(source))
            yield name, SpooledRecord(partition, offset, time_ms, newest, body)

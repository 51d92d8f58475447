"""Upkeep of tags in Cassandra: the audit of their rows, their rebuild from Kafka, and erasing a source from them.

*An audit* compares rows with Kafka as that of logs does, and checks the numbers of each source. The last numbers of
sources are read before the marks, and the marks before the rows: so the rows up to the marks have at least those
numbers, and rows written since do not look like faults.

*A rebuild* reads the marks first. Then one Spark job puts the rows of each tag beside Kafka's records, event by event,
and restores the tag from its last event backwards, so that numbers are anchored at its live end. Invariant: an event's
right row is written before its wrong ones are deleted, and no key belongs to two events; so a rebuild that dies leaves
every event with a row, and the next one finds the same rows to be right. Rows beyond the marks are not touched, nor is
a row that is right.

*Erasing* first stores, tag by tag, up to where the source is erased, then deletes its rows by their keys. Invariant:
rows beyond the marks stay, and so do rows of other sources; the source's numbers go on after the erased ones; and the
next run completes one that died.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby, islice
from typing import Any, ClassVar, NamedTuple
from zlib import crc32

import msgspec
import pyarrow as pa

from tailrace.config.values import milliseconds
from tailrace.errors import StaleDriver, StaleUpkeep
from tailrace.log.event import Partition, shard_of
from tailrace.log.run import TagFields
from tailrace.log.segment import DAY_MS, bucket_start, day_text
from tailrace.log.store import Staging
from tailrace.log.timeuuid import make_timeuuid, ms_of
from tailrace.upkeep.copy import (
    ATTEMPTS,
    REBUILT,
    SAME,
    Assignment,
    Body,
    MapRecords,
    RebuildPlan,
    RebuildStart,
    Restored,
    arrow_batch,
    decode_body,
    difference,
)
from tailrace.upkeep.examine import MOST_ODD, Erasures, Examined, Finding, Tally, fingerprint
from tailrace.upkeep.job import LOGS, JobLease, failpoint
from tailrace.upkeep.log_copy import NEXT_RECORDS, RECORDS, route
from tailrace.valkey.marks import NOTHING, parse_marks, read_marks
from tailrace.valkey.shards import Shards
from tailrace.views.tags.model import Erasure
from tailrace.views.tags.rows.cassandra import connected
from tailrace.views.tags.rows.model import BackwardNumbering, NumberCheck, NumberingEnd, RowKey, StoredRow
from tailrace.views.tags.rows.store import RowWalk, RowWriter, writer
from tailrace.views.tags.settings import CassandraSettings
from tailrace.views.tags.store import VIEW, progress_of, raise_floors, read_all_progress, read_floors, tags_of
from tailrace.views.tags.upkeep import ERASED, Erasing, SourceEvents, TagCopy
from tailrace.views.tags.write import TagsPlan

STEPS = ("cleaned", "rows-deleted")
"""The failpoints of erasing, in order."""
AT_ONCE = 2_000
"""Rows that are written or deleted at once."""
MOST_LATE = 100_000
"""Rows of repeated numbers that a task examines; each further one counts as an event."""
NUMBERING, ROW, RECORD = range(3)
"""Kinds of items: a part of the tag's numbering, an existing row, a record of Kafka."""
_ITEMS = "name string, kind long, source string, offset long, time long, timeuuid_ms long, body binary"
_RESTORED = (
    "name string, verdict string, events long, before long, segments long, replaced long, added long, written long"
)

_encode = msgspec.msgpack.Encoder().encode


class RestoredRows(Restored, frozen=True):
    """Outcome for one tag, up to the marks: rows before, buckets written to, rows deleted."""

    added: int = 0
    """Events that had no row."""
    written: int = 0


class TagRowCopy(TagCopy):
    refused: ClassVar[Mapping[str, str]] = {
        **TagCopy.refused,
        "keys": "the tags rest in Cassandra (tags.store): they have no keys that could be nobody's",
    }
    outcome = RestoredRows
    has_repeats = True

    def tags_of(self, shards: Shards, source: str) -> Iterable[str]:
        with RowWalk(_store(self.plan)) as rows:
            return list(tags_of(shards, source, rows.tags()))

    def is_written(self, shards: Shards) -> bool:
        return any(read_marks(shards, self.view))

    def examine(self, work: Assignment, shards: Shards, part: int, parts: int, now_ms: int) -> Iterator[Examined]:
        wanted = work.wanted.test()
        with RowWalk(_store(self.plan)) as rows:
            for tag in rows.tags():
                if crc32(tag.encode()) % parts == part and wanted(tag):
                    yield examine(work, shards, rows, tag, self.kept_since(tag, now_ms))

    def explain(
        self, shards: Shards, sums: Sequence[Mapping[str, Any]], now_ms: int
    ) -> Iterator[tuple[Mapping[str, Any], Finding | None]]:
        extra = "Kafka has fewer, or there are rows of one event under several numbers"
        return ((row, difference(row, extra=extra)) for row in sums)

    def begin(self, shards: Shards, token: int | None, now_ms: int) -> RebuildStart:
        if token is not None:
            _level(shards)
        return RebuildStart(tuple(read_marks(shards, self.view)))

    def rebuild(self, spark: Any, plan: RebuildPlan, records: MapRecords) -> Any:
        from pyspark.sql import Window
        from pyspark.sql.functions import coalesce, col, least, lit, when
        from pyspark.sql.functions import max as highest
        from pyspark.sql.functions import min as lowest

        work, names = plan.work, sorted(plan.work.wanted.names or ())
        parts, options = 2 * int(spark.sparkContext.defaultParallelism), self.plan

        def existing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            mine = [tag for batch in batches for i in batch.column(0).to_pylist() for tag in names[i::parts]]
            yield from _surveyed(plan, _store(options), mine)

        items = spark.range(0, parts, 1, parts).mapInArrow(existing, _ITEMS)
        columns = "name", f"{RECORD}L AS kind", "source", "offset", "time", "CAST(NULL AS LONG) AS timeuuid_ms", "body"
        routed = records(lambda slices: route(work, slices), RECORDS)
        items = items.unionAll(routed.selectExpr(*columns))
        one = Window.partitionBy("name", "source", "offset")
        along = Window.partitionBy("name", "source").orderBy("offset")
        latest = lit(plan.now_ms + options.future_ms)
        # A time that none of the next records comes near is one from the future; it must not hold back what follows.
        # There are up to two items for each.
        next_ones = coalesce(highest("time").over(along.rowsBetween(1, 2 * NEXT_RECORDS)), col("time"))
        # An existing timeuuid stays. A new one is no later than the next existing one.
        behind = lowest("has").over(along.rangeBetween(1, Window.unboundedFollowing))
        in_order = (
            items.repartition(parts, "name")
            .withColumn("has", lowest(when(col("kind") == ROW, col("timeuuid_ms"))).over(one))
            .withColumn("asked", coalesce(col("has"), least(col("time"), next_ones, latest, behind)))
            .withColumn("newest", highest("asked").over(along.rangeBetween(Window.unboundedPreceding, 0)))
            .select("name", "kind", "source", "offset", "time", "newest", "body")
            .sortWithinPartitions(
                col("name"),
                (col("source") != "").cast("int"),
                col("newest").desc(),
                col("source").desc(),
                col("offset").desc(),
                col("kind"),
            )
        )
        return in_order.mapInArrow(lambda batches: _restored(plan, options, batches), _RESTORED)

    def facts(self, rebuilt: Sequence[RestoredRows], left: Mapping[str, int]) -> dict[str, object]:
        return {
            "events": sum(each.events for each in rebuilt),
            "restored": sum(each.added for each in rebuilt),
            "written": sum(each.written for each in rebuilt),
            "deleted": sum(each.replaced for each in rebuilt),
        }


def _store(options: TagsPlan) -> CassandraSettings:
    assert options.cassandra is not None
    return options.cassandra


def examine(work: Assignment, shards: Shards, rows: RowWalk, tag: str, since_ms: int) -> Examined:
    """Read the rows of a tag, and compare their numbers with the shard's; before ``since_ms`` rows may have expired."""
    shard = shard_of(tag, shards.options.shards)
    issued = {source: each.number for source, each in read_all_progress(shards, tag).items()}
    (answer,) = shards.run_all([(shard, ("HGETALL", shards.keys.marks(shard, VIEW)))])
    marks, bounds, erased = parse_marks(answer), work.extent.shards[shard], work.erased.get(tag, {})

    def is_visible(row: RowKey) -> bool:
        """Return whether readers see a row: its partition's mark has passed it, and it was not erased."""
        return row.offset <= marks.get(row.partition, row.offset) and not _is_erased(erased, row)

    numbers, tally, repeats = NumberCheck(), Tally[tuple[str, int]](), 0
    late: list[tuple[str, int, tuple[str, int], tuple[int, int]]] = []
    for row in filter(is_visible, rows.rows(tag)):
        label = str(row.partition)
        first, last = bounds.get(row.partition, (0, NOTHING))
        is_compared, day = first <= row.offset <= last, (label, row.time_ms // DAY_MS)
        sums = row_print(row) if is_compared else (0, 0)
        counts = numbers.take(row.source, row.tag_seq, ms_of(row.timeuuid), (label, row.offset))
        if not counts and len(late) < MOST_LATE:
            late.append((row.source, row.tag_seq, day, sums))
        elif is_compared:
            tally.add(day, *sums)
    if late:
        for each in filter(is_visible, rows.narrow(tag)):
            numbers.recall(each.source, each.tag_seq, (str(each.partition), each.offset))
    for source, number, day, sums in late:
        if numbers.is_repeat(source, number):
            repeats += 1
        elif any(sums):
            tally.add(day, *sums)
    findings = [
        *islice(_misnumbered(tag, numbers, since_ms), MOST_ODD),
        *islice(_miscounted(shards, tag, numbers.ends(), issued, since_ms), MOST_ODD),
    ]
    days = len({bucket.start_ms // DAY_MS for bucket in rows.buckets(tag)})
    return Examined(tag, days, tally, findings, repeats)


def row_print(row: StoredRow) -> tuple[int, int]:
    fields = TagFields(row.source, row.seq, 0, 0, row.tags)
    return fingerprint(str(row.partition), row.offset, row.time_ms, row.key, row.headers, row.value or b"", fields)


def _is_erased(erased: Erasures, row: RowKey) -> bool:
    return row.source in erased and erased[row.source].covers(str(row.partition), row.offset)


def _misnumbered(tag: str, numbers: NumberCheck, since_ms: int) -> Iterator[Finding]:
    """Yield numbers that are missing, that two events have, or that are not in the order of timeuuids."""
    for source, number, events in numbers.conflicts():
        ids = ", ".join(f"{label}:{offset}" for label, offset in events[:3])
        yield Finding("conflict", tag, "", source, 1, len(events), f"number {number} is that of {ids}")
    for gap in numbers.gaps():
        if gap.before_ms < since_ms:
            continue  # they may have expired
        detail = f"number {gap.last + 1} comes after {gap.first - 1}"
        yield Finding("numbers", tag, day_text(gap.ms), gap.source, gap.first, gap.last + 1, detail)
    for source in numbers.disordered():
        yield Finding("order", tag, "", source, detail="its numbers are not in the order of their timeuuids")


def _miscounted(
    shards: Shards, tag: str, ends: Mapping[str, int], issued: Mapping[str, int], since_ms: int
) -> Iterator[Finding]:
    """Yield sources whose last row has another number than the last that the shard has given out."""
    wrong = [source for source, last in ends.items() if last != issued.get(source, 0)]
    for source, now in progress_of(shards, tag, wrong):
        last, before = ends[source], issued.get(source, 0)
        # The shard may have gone on since its numbers were read, and the rows with it.
        if before <= last <= now.number or (last < before and now.ms < since_ms):
            continue
        if not now.partition:
            continue  # another program wrote it: the shard has given out no number
        detail = f"the last row has number {last}, and the shard has given out {now.number}"
        yield Finding("numbers", tag, "", source, now.number, last, detail)


def _level(shards: Shards) -> None:
    """Raise the floors of each partition to the highest that it has in any shard.

    Rebuilt rows get no timeuuid after the floor of their partition in the tag's shard, since future rows may get that
    one; but a shard without records of a partition for long may have a floor that is long past.
    """
    times: dict[Partition, int] = {}
    for floors in read_floors(shards, range(shards.options.shards)):
        times |= {partition: max(ms, times.get(partition, ms)) for partition, ms in floors.items()}
    epoch = 0
    for _ in range(ATTEMPTS):
        try:
            raise_floors(shards, epoch, times)
            return
        except StaleDriver as error:  # floors are raised in the name of the running driver
            epoch = error.stored
    raise StaleDriver(VIEW, 0, epoch)


class RestoreItem(NamedTuple):
    """One row of the Spark job; a tag's items come in the order in which it is restored."""

    kind: int
    partition: str
    offset: int
    time_ms: int
    ms: int
    """The millisecond that it asks for in its timeuuid."""
    body: bytes


class ExistingRow(RowKey, frozen=True, kw_only=True, array_like=True):
    prints: tuple[int, int]
    carried: tuple[int, Body] | None
    """Time and contents, if Kafka no longer has the record."""


_decode_row = msgspec.msgpack.Decoder(ExistingRow).decode
_decode_numbering = msgspec.msgpack.Decoder(BackwardNumbering).decode


def survey(plan: RebuildPlan, shards: Shards, rows: RowWalk, tag: str) -> Iterator[tuple[Any, ...]]:
    """Yield the items of a tag's rows and of its numbering."""
    shard = shard_of(tag, shards.options.shards)
    # The last numbers of sources are read first: those that were given out by then have their rows.
    issued = {source: each.number for source, each in read_all_progress(shards, tag).items()}
    (floors,) = read_floors(shards, [shard])
    ceilings = {str(partition): ms for partition, ms in floors.items()}
    assert plan.start.marks is not None
    marks, bounds = plan.start.marks[shard], plan.work.extent.shards[shard]
    live: dict[str, NumberingEnd] = {}
    for row in rows.rows(tag):
        label, ms = str(row.partition), ms_of(row.timeuuid)
        if row.offset > marks.get(row.partition, NOTHING):
            first = live.get(row.source)
            if first is None or row.tag_seq < first.number:
                live[row.source] = NumberingEnd(row.tag_seq, ms, label)
            ceilings[label] = min(ms, ceilings.get(label, ms))
            continue
        carried = None
        if row.offset < bounds.get(row.partition, (1 << 62, 0))[0]:
            carried = row.time_ms, Body(row.key, row.headers, row.value or b"", row.source, row.seq, row.tags)
        key = {name: getattr(row, name) for name in RowKey.__struct_fields__}
        existing = ExistingRow(**key, prints=row_print(row), carried=carried)
        yield tag, ROW, label, row.offset, None, ms, _encode(existing)
    yield tag, NUMBERING, "", NOTHING, None, None, _encode(BackwardNumbering({}, ceilings))
    for source in issued.keys() | live.keys():
        end = NumberingEnd.of(issued.get(source, 0), live.get(source))
        yield tag, NUMBERING, "", NOTHING, None, None, _encode(BackwardNumbering({source: end}, {}))


class RowRestorer:
    def __init__(self, plan: RebuildPlan, options: TagsPlan, shards: Shards) -> None:
        self._plan, self._shards = plan, shards
        self._span_ms = milliseconds(options.tags.span)
        # Not the writer of this process: it believes buckets to be listed, and the listing may be lost.
        self._writer = None if plan.dry_run else RowWriter(connected(_store(options)), options.tags.batch)

    def restore(self, tag: str, items: Iterable[RestoreItem]) -> RestoredRows:
        """Restore a tag, given its numbering, and then the items of each event, the last event first."""
        erased = self._plan.work.erased.get(tag, {})
        since_ms = self._plan.work.copy.kept_since(tag, self._plan.now_ms) or -(1 << 62)
        numbering = BackwardNumbering({}, {})
        events = before = added = written = deleted = 0
        buckets: set[int] = set()
        new: list[StoredRow] = []
        old: list[RowKey] = []
        for (label, offset), group in groupby(items, key=lambda item: (item.partition, item.offset)):
            if not label:
                for part in (_decode_numbering(item.body) for item in group):
                    numbering.ends |= part.ends
                    numbering.ceilings |= part.ceilings
                continue
            existing, event, ms = _sort_out(group, erased)
            before += len(existing)
            row = right = None
            # An event without a row whose millisecond has expired gets none.
            if event is not None and (existing or numbering.next_ms(event[1].source, label, ms) >= since_ms):
                number, ms = numbering.give(event[1].source, label, ms)
                row = self._row(tag, Partition.parse(label), offset, number, ms, *event)
                events += 1
                added += not existing
                same = [each for each in existing if each.clustering == row.clustering]
                right = next((each for each in same if each.prints == row_print(row)), None)
                if right is None:
                    new.append(row)
                    buckets.add(row.bucket_ms)
            for each in existing:
                # A row that is overwritten under its own key must not be deleted.
                is_in_place = row is not None and each.bucket_ms == row.bucket_ms and each.clustering == row.clustering
                if each is not right and not (right is None and is_in_place):
                    old.append(each)
            if len(new) + len(old) >= AT_ONCE:
                written, deleted = written + len(new), deleted + len(old)
                self._change(tag, new, old)
                new, old = [], []
        written, deleted = written + len(new), deleted + len(old)
        self._change(tag, new, old)
        verdict = REBUILT if written or deleted else SAME
        return RestoredRows(tag, verdict, events, before, len(buckets), deleted, added, written)

    def _row(
        self, tag: str, partition: Partition, offset: int, number: int, ms: int, time_ms: int, body: Body
    ) -> StoredRow:
        return StoredRow(
            tag=tag,
            bucket_ms=bucket_start(ms, self._span_ms),
            span_ms=self._span_ms,
            timeuuid=make_timeuuid(ms, offset, partition),
            tag_seq=number,
            partition=partition,
            offset=offset,
            time_ms=time_ms,
            **msgspec.structs.asdict(body),
        )

    def _change(self, tag: str, new: Sequence[StoredRow], old: Sequence[RowKey]) -> None:
        """Write the right rows, then delete the wrong ones."""
        if self._writer is None or not (new or old):
            return
        shard = shard_of(tag, self._shards.options.shards)
        answer = self._shards.call(shard, "fence", LOGS, self._plan.token)
        if answer[0] == b"stale":
            raise StaleUpkeep(self._plan.token, int(answer[1]))
        self._writer.write(new)
        failpoint("rows-written")
        self._writer.delete(old)
        failpoint("rows-deleted")


def _sort_out(group: Iterable[RestoreItem], erased: Erasures) -> tuple[list[ExistingRow], tuple[int, Body] | None, int]:
    """Return an event's rows, its time and contents if it belongs to the tag, and the millisecond that it asks for.

    It belongs there if Kafka has its record, or if Kafka no longer has it and it was not erased.
    """
    items = list(group)
    existing = [_decode_row(item.body) for item in items if item.kind == ROW]
    events = [(item.time_ms, decode_body(item.body)) for item in items if item.kind == RECORD]
    if not events:
        kept = [row for row in existing if not _is_erased(erased, row)]
        events = [row.carried for row in sorted(kept, key=lambda row: row.tag_seq) if row.carried is not None]
    return existing, events[-1] if events else None, items[-1].ms


def _surveyed(plan: RebuildPlan, store: CassandraSettings, tags: list[str]) -> Iterator[pa.RecordBatch]:
    if not tags:
        return
    with closing(plan.work.open()) as shards, RowWalk(store) as rows:
        for tag in tags:
            items = survey(plan, shards, rows, tag)
            while chunk := list(_some(items)):
                yield arrow_batch(_ITEMS, chunk)


def _some(items: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield the next items, up to about a mebibyte."""
    size = 0
    for item in items:
        yield item
        size += 200 + len(item[-1])
        if size > 1 << 20:
            return


def _restored(plan: RebuildPlan, options: TagsPlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Restore the tags whose items come, one after the other; yield the outcome of each."""
    with closing(plan.work.open()) as shards:
        restorer = RowRestorer(plan, options, shards)
        items = (item for batch in batches for item in zip(*(c.to_pylist() for c in batch.columns), strict=True))
        for tag, group in groupby(items, key=lambda item: item[0]):
            outcome = restorer.restore(tag, (RestoreItem(*item) for _, *item in group))
            yield arrow_batch(_RESTORED, [msgspec.structs.astuple(outcome)])


class RowErasing(Erasing):
    def look(self, shards: Shards) -> dict[str, object]:
        with RowWalk(self._settings.cassandra) as self._rows:
            return super().look(shards)

    def run(self, shards: Shards, lease: JobLease) -> None:
        with RowWalk(self._settings.cassandra) as self._rows:
            super().run(shards, lease)

    def _tags(self, shards: Shards) -> Iterable[str]:
        return tags_of(shards, self._source, self._rows.tags())

    def _find(self, shards: Shards, tag: str) -> SourceEvents:
        found = SourceEvents(read_marks(shards, VIEW)[shard_of(tag, shards.options.shards)])
        for row in self._covered(tag, found.marks):
            found.add(row.bucket_ms, row.partition, row.offset, row.tag_seq)
        return found

    def _erase(
        self, shards: Shards, staging: Staging, lease: JobLease, tag: str, found: SourceEvents, erased: Erasure
    ) -> str:
        """Delete the source's rows up to the marks."""
        store = writer(self._settings.cassandra, self._settings.tags.batch)
        covered = self._covered(tag, found.marks)
        while some := list(islice(covered, AT_ONCE)):
            lease.check()
            store.delete(some)
            self._reached("rows-deleted")
        return ERASED

    def _covered(self, tag: str, marks: Mapping[Partition, int]) -> Iterator[RowKey]:
        for row in self._rows.narrow(tag):
            if row.source == self._source and row.offset <= marks.get(row.partition, NOTHING):
                yield row

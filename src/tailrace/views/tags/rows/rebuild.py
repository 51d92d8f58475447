"""The copy of Kafka's records in rows of Cassandra, and its rebuild: rows become what Kafka and the rules say.

The marks are read first. Then one Spark job puts the rows of each tag beside Kafka's records, event by event, and
restores the tag from its last event backwards, so that numbers are anchored at its live end. Invariant: an event's
right row is written before its wrong ones are deleted, and no key belongs to two events; so a rebuild that dies leaves
every event with a row, and the next one finds the same rows to be right. Rows beyond the marks are not touched, nor is
a row that is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, NamedTuple
from uuid import UUID
from zlib import crc32

import msgspec
import pyarrow as pa

from tailrace.errors import StaleDriver, StaleUpkeep
from tailrace.log.event import Partition, shard_of
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import make_timeuuid, ms_of
from tailrace.upkeep.copy import (
    REBUILT,
    SAME,
    Assignment,
    Body,
    RebuildPlan,
    RebuildStart,
    Restored,
    decode_body,
    difference,
)
from tailrace.upkeep.examine import Erasures, Examined, Finding, fingerprint
from tailrace.upkeep.job import LOGS, failpoint, milliseconds
from tailrace.upkeep.log_copy import NEXT_RECORDS, RECORDS, outcome_batch, route
from tailrace.upkeep.spark import ATTEMPTS
from tailrace.valkey.marks import NOTHING, parse_mark_time, read_marks
from tailrace.valkey.shards import Shards, mapping
from tailrace.views.tags.rows.cassandra import CassandraOptions, connected
from tailrace.views.tags.rows.model import RowKey, StoredRow
from tailrace.views.tags.rows.store import RowWalk, RowWriter
from tailrace.views.tags.rows.upkeep import examine, row_print
from tailrace.views.tags.store import VIEW, raise_floors, read_all_progress, tags_of
from tailrace.views.tags.upkeep import TagCopy
from tailrace.views.tags.write import TagsPlan

AT_ONCE = 2_000
"""Rows that are written or deleted at once."""
END, CEILING, ROW, RECORD = range(4)
"""Kinds of items: the end of a source, the ceiling of a partition, an existing row, a record of Kafka."""
_ITEMS = "name string, kind int, source string, offset long, time long, stamp long, body binary"
_RESTORED = (
    "name string, verdict string, events long, before long, segments long, replaced long, added long, written long"
)


class RestoredRows(Restored, frozen=True):
    """Outcome for one tag, up to the marks: rows before, buckets written to, rows deleted."""

    added: int = 0
    """Events that had no row."""
    written: int = 0


class TagRowCopy(TagCopy):
    """Tags in rows of Cassandra."""

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
        for row in sums:
            extra = "Kafka has fewer, or there are rows of one event under several numbers"
            yield row, difference(row, extra=extra)

    def begin(self, shards: Shards, token: int | None, now_ms: int) -> RebuildStart:
        if token is not None:
            _level(shards)
        return RebuildStart(tuple(read_marks(shards, self.view)))

    def rebuild(self, spark: Any, plan: RebuildPlan, records: Any) -> Any:
        from pyspark.sql import Window
        from pyspark.sql.functions import coalesce, col, least, lit, when
        from pyspark.sql.functions import max as highest
        from pyspark.sql.functions import min as lowest

        work, names = plan.work, sorted(plan.work.wanted.names or ())
        parts, options = 2 * int(spark.sparkContext.defaultParallelism), self.plan

        def existing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            mine = [tag for batch in batches for i in batch.column(0).to_pylist() for tag in names[i::parts]]
            yield from _surveyed(plan, _store(options), mine)

        def restore(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from _restored(plan, options, batches)

        items = spark.range(0, parts, 1, parts).mapInArrow(existing, _ITEMS)
        if records is not None:
            columns = "name", f"{RECORD} AS kind", "source", "offset", "time", "CAST(NULL AS LONG) AS stamp", "body"
            routed = records.mapInArrow(lambda batches: route(work, batches), RECORDS)
            items = items.unionAll(routed.selectExpr(*columns))
        one = Window.partitionBy("name", "source", "offset")
        along = Window.partitionBy("name", "source").orderBy("offset")
        latest = lit(plan.now_ms + options.future_ms)
        # A time that none of the next records comes near is one from the future; it must not hold back what follows.
        # There are up to two items for each.
        next_ones = coalesce(highest("time").over(along.rowsBetween(1, 2 * NEXT_RECORDS)), col("time"))
        # An existing timestamp stays. A new one is no later than the next existing one.
        behind = lowest("has").over(along.rangeBetween(1, Window.unboundedFollowing))
        in_order = (
            items.repartition(parts, "name")
            .withColumn("has", lowest(when(col("kind") == ROW, col("stamp"))).over(one))
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
        return in_order.mapInArrow(restore, _RESTORED)

    def facts(self, rebuilt: Sequence[RestoredRows], left: Mapping[str, int]) -> dict[str, object]:
        return {
            "events": sum(each.events for each in rebuilt),
            "restored": sum(each.added for each in rebuilt),
            "written": sum(each.written for each in rebuilt),
            "deleted": sum(each.replaced for each in rebuilt),
        }


def _store(options: TagsPlan) -> CassandraOptions:
    assert options.cassandra is not None
    return options.cassandra


def _level(shards: Shards) -> None:
    """Raise the floors of each partition to the highest that it has in any shard.

    Rebuilt rows get no timestamp after the floor of their partition in the tag's shard, since future rows may get that
    one; but a shard without records of a partition for long may have a floor that is long past.
    """
    times: dict[Partition, int] = {}
    for answer in shards.run_all([(s, ("HGETALL", shards.keys.times(s, VIEW))) for s in range(shards.options.shards)]):
        for label, stored in mapping(answer).items():
            partition, ms = Partition.parse(label.decode()), parse_mark_time(stored)[0]
            times[partition] = max(ms, times.get(partition, ms))
    epoch = 0
    for _ in range(ATTEMPTS):
        try:
            raise_floors(shards, epoch, times)
            return
        except StaleDriver as error:  # floors are raised in the name of the running driver
            epoch = error.stored
    raise StaleDriver(VIEW, 0, epoch)


class NumberingEnd(msgspec.Struct, frozen=True):
    """The end of a source's rebuilt events, and the live event after them."""

    number: int = 0
    """Number of the last rebuilt event."""
    ms: int | None = None
    """Millisecond of the first live event; None if there is none."""
    partition: str = ""
    """Partition of the first live event, as text."""


def numbering_end(last_given: int, live: NumberingEnd | None) -> NumberingEnd:
    """Return the end of a source's rebuilt events.

    Args:
        last_given: Last number of the source's progress, read before its rows.
        live: The first of its rows beyond the marks, with its own number. Rows that are not applied yet are written in
            any order, so it need not be the first that will exist; but then no number beyond the marks was given.
    """
    if live is None:
        return NumberingEnd(last_given)
    return NumberingEnd(min(last_given, live.number - 1), live.ms, live.partition)


class BackwardNumbering:
    """Gives numbers and timeuuids to the rebuilt events of one tag, the last one first.

    Invariant: the last event of a source gets the number before its first live one, or the last number that was given;
    the events before it are numbered downwards without a gap. So nothing live is renumbered. No timeuuid is after that
    of the next event of its partition or of its source; between two partitions it is at least a millisecond before it,
    since their offsets say nothing about each other.

    Args:
        ends: The end of each source; a source without one has no number yet.
        ceilings: For each partition, as text, the latest millisecond of a rebuilt event.
    """

    def __init__(self, ends: Mapping[str, NumberingEnd], ceilings: Mapping[str, int]) -> None:
        self._ends, self._ceilings = dict(ends), dict(ceilings)

    def next_ms(self, source: str, partition: str, ms: int) -> int:
        """Return the millisecond that ``give`` would return."""
        end = self._ends.get(source, NumberingEnd())
        ms = min(ms, self._ceilings.get(partition, ms))
        if end.ms is not None:
            ms = min(ms, end.ms if end.partition == partition else end.ms - 1)
        return ms

    def give(self, source: str, partition: str, ms: int) -> tuple[int, int]:
        """Return number and millisecond of the event before those numbered so far; it asks for a millisecond."""
        ms, number = self.next_ms(source, partition, ms), self._ends.get(source, NumberingEnd()).number
        self._ends[source] = NumberingEnd(number - 1, ms, partition)
        self._ceilings[partition] = ms
        return number, ms


class RestoreItem(NamedTuple):
    """One row of the Spark job; a tag's items come in the order in which it is restored."""

    kind: int
    partition: str
    offset: int
    time_ms: int
    ms: int
    """The millisecond that it asks for its timestamp."""
    body: bytes


class ExistingRow(msgspec.Struct, frozen=True, array_like=True):
    """A row of the store."""

    source: str
    number: int
    timeuuid: UUID
    bucket_ms: int
    prints: tuple[int, int]
    carried: tuple[int, Body] | None = None
    """Time and contents, if Kafka no longer has the record."""


_encode = msgspec.msgpack.Encoder().encode
_decode_row = msgspec.msgpack.Decoder(ExistingRow).decode
_decode_end = msgspec.msgpack.Decoder(tuple[str, NumberingEnd]).decode
_decode_ceiling = msgspec.msgpack.Decoder(tuple[str, int]).decode


def survey(plan: RebuildPlan, shards: Shards, rows: RowWalk, tag: str) -> Iterator[tuple[Any, ...]]:
    """Yield the items of a tag's rows, of its ends and of its ceilings.

    The last numbers of sources are read first: those that were given out by then have their rows.
    """
    shard = shard_of(tag, shards.options.shards)
    issued = {source: each.number for source, each in read_all_progress(shards, shard, tag).items()}
    (answer,) = shards.run_all([(shard, ("HGETALL", shards.keys.times(shard, VIEW)))])
    ceilings = {label.decode(): parse_mark_time(stored)[0] for label, stored in mapping(answer).items()}
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
        existing = ExistingRow(row.source, row.tag_seq, row.timeuuid, row.bucket_ms, row_print(row), carried)
        yield tag, ROW, label, row.offset, None, ms, _encode(existing)
    for source in issued.keys() | live.keys():
        end = numbering_end(issued.get(source, 0), live.get(source))
        yield tag, END, "", NOTHING, None, None, _encode((source, end))
    for label, ms in ceilings.items():
        yield tag, CEILING, "", NOTHING, None, None, _encode((label, ms))


class _Wanted(NamedTuple):
    """An event that belongs to a tag."""

    time_ms: int
    body: Body
    prints: tuple[int, int]

    @classmethod
    def of(cls, partition: str, offset: int, time_ms: int, body: Body) -> _Wanted:
        prints = fingerprint(partition, offset, time_ms, body.key, body.headers, body.value, body.fields)
        return cls(time_ms, body, prints)


class RowRestorer:
    """Restores tags in one task."""

    def __init__(self, plan: RebuildPlan, options: TagsPlan, shards: Shards) -> None:
        self._plan, self._shards = plan, shards
        self._span_ms = options.span_ms
        # Not the writer of this process: it believes buckets to be listed, and the listing may be lost.
        self._writer = None if plan.dry_run else RowWriter(connected(_store(options)), options.batch)
        self._partitions: dict[str, Partition] = {}

    def restore(self, tag: str, items: Iterable[RestoreItem]) -> RestoredRows:
        """Restore a tag, given its ends and ceilings, and then the items of each event, the last event first."""
        erased = self._plan.work.erased.get(tag, {})
        keep = self._plan.work.copy.buckets.keep_of(tag)
        since_ms = -(1 << 62) if keep is None else self._plan.now_ms - milliseconds(keep)
        ends: dict[str, NumberingEnd] = {}
        ceilings: dict[str, int] = {}
        countdown: BackwardNumbering | None = None
        events = before = added = written = deleted = 0
        buckets: set[int] = set()
        new: list[StoredRow] = []
        old: list[RowKey] = []
        for (label, offset), group in groupby(items, key=lambda item: (item.partition, item.offset)):
            if not label:
                for item in group:
                    if item.kind == END:
                        ends.update([_decode_end(item.body)])
                    elif item.kind == CEILING:
                        ceilings.update([_decode_ceiling(item.body)])
                continue
            countdown = countdown or BackwardNumbering(ends, ceilings)
            existing, event, ms = _sort_out(label, offset, group, erased)
            before += len(existing)
            row = right = None
            # An event without a row whose timestamp has expired gets none.
            if event is not None and (existing or countdown.next_ms(event.body.source, label, ms) >= since_ms):
                row = self._row(tag, label, offset, ms, event, countdown)
                events += 1
                added += not existing
                right = next((each for each in existing if _is(each, row) and each.prints == event.prints), None)
                if right is None:
                    new.append(row)
                    buckets.add(row.bucket_ms)
            for each in existing:
                # A row that is overwritten under its own key must not be deleted.
                over = right is None and row is not None and _is(each, row) and each.bucket_ms == row.bucket_ms
                if each is not right and not over:
                    old.append(_key(tag, self._partition(label), offset, each))
            if len(new) + len(old) >= AT_ONCE:
                written, deleted = written + len(new), deleted + len(old)
                self._change(tag, new, old)
                new, old = [], []
        written, deleted = written + len(new), deleted + len(old)
        self._change(tag, new, old)
        verdict = REBUILT if written or deleted else SAME
        return RestoredRows(tag, verdict, events, before, len(buckets), deleted, added, written)

    def _row(
        self, tag: str, label: str, offset: int, ms: int, event: _Wanted, countdown: BackwardNumbering
    ) -> StoredRow:
        """Return the right row of an event."""
        body, partition = event.body, self._partition(label)
        number, ms = countdown.give(body.source, label, ms)
        return StoredRow(
            tag=tag,
            bucket_ms=bucket_start(ms, self._span_ms),
            span_ms=self._span_ms,
            timeuuid=make_timeuuid(ms, offset, partition),
            source=body.source,
            tag_seq=number,
            seq=body.seq,
            partition=partition,
            offset=offset,
            time_ms=event.time_ms,
            key=body.key,
            headers=body.headers,
            value=body.value,
            tags=body.tags,
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

    def _partition(self, label: str) -> Partition:
        return self._partitions.get(label) or self._partitions.setdefault(label, Partition.parse(label))


def _sort_out(
    partition: str, offset: int, group: Iterable[RestoreItem], erased: Erasures
) -> tuple[list[ExistingRow], _Wanted | None, int]:
    """Return an event's rows, the event if it belongs to the tag, and the timestamp that it asks for.

    It belongs there if Kafka has its record, or if Kafka no longer has it and it was not erased.
    """
    existing: list[ExistingRow] = []
    event: _Wanted | None = None
    asked = 0
    for item in group:
        asked = item.ms
        if item.kind == ROW:
            existing.append(_decode_row(item.body))
        else:
            event = _Wanted.of(partition, offset, item.time_ms, decode_body(item.body))
    if event is None:
        for each in sorted(existing, key=lambda row: row.number):
            is_erased = each.source in erased and erased[each.source].covers(partition, offset)
            if each.carried is not None and not is_erased:
                event = _Wanted.of(partition, offset, *each.carried)
    return existing, event, asked


def _is(existing: ExistingRow, row: StoredRow) -> bool:
    return (existing.timeuuid, existing.source, existing.number) == (row.timeuuid, row.source, row.tag_seq)


def _key(tag: str, partition: Partition, offset: int, row: ExistingRow) -> RowKey:
    return RowKey(
        tag=tag,
        bucket_ms=row.bucket_ms,
        timeuuid=row.timeuuid,
        source=row.source,
        tag_seq=row.number,
        partition=partition,
        offset=offset,
    )


# In tasks.


def _surveyed(plan: RebuildPlan, store: CassandraOptions, tags: list[str]) -> Iterator[pa.RecordBatch]:
    types = [pa.string(), pa.int32(), pa.string(), pa.int64(), pa.int64(), pa.int64(), pa.binary()]
    names = [field.partition(" ")[0] for field in _ITEMS.split(", ")]
    if not tags:
        return
    shards = plan.work.open()
    try:
        with RowWalk(store) as rows:
            for tag in tags:
                items = survey(plan, shards, rows, tag)
                while chunk := list(_some(items)):
                    columns = zip(*chunk, strict=True)
                    arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
                    yield pa.RecordBatch.from_arrays(arrays, names=names)
    finally:
        shards.close()


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
    shards = plan.work.open()
    try:
        restorer = RowRestorer(plan, options, shards)
        for tag, rows in groupby(_items(batches), key=lambda row: row[0]):
            yield outcome_batch(restorer.restore(tag, (item for _, item in rows)))
    finally:
        shards.close()


def _items(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, RestoreItem]]:
    for batch in batches:
        for tag, *item in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield tag, RestoreItem(*item)

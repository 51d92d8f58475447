"""Rebuilds of tags that rest in Cassandra: rows become what Kafka and the present configuration say, while all goes on.

An audit says which tags something is wrong with. Then the marks are read, and one Spark job puts the rows of each tag
beside Kafka's records, event by event, and restores it from its last event backwards, so that numbers are anchored at
its live end. Invariant: what lies beyond the marks is not touched, nor is a row that is right; a rebuild that dies is
begun again, and comes to the same.

Restoring the rows of one tag in Cassandra: given what is there and what Kafka has, event by event, the last first.

Invariant: an event's right row is written before its wrong ones are deleted, and no key is of two events; so whoever
dies in between leaves every event with a row, and whoever begins again finds the same to be right. Rows beyond the
marks are not touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pyarrow as pa

from tailrace.config.settings import Settings
from tailrace.errors import PipelineError, StaleDriver, StaleUpkeep
from tailrace.log.event import Headers, Partition
from tailrace.log.name import shard_of
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import make_timeuuid, ms_of
from tailrace.upkeep import failpoint
from tailrace.upkeep.audit import Auditor
from tailrace.upkeep.examine import fingerprint, noted
from tailrace.upkeep.job import WHAT, JobLease, milliseconds
from tailrace.upkeep.rebuild import NEXT_RECORDS, RECORDS, Rebuilding, listed, routed
from tailrace.upkeep.restore import REBUILT, SAME, Body, Restored
from tailrace.upkeep.spark import ATTEMPTS, Assignment, History, WantedNames, collect, spark_for
from tailrace.valkey.marks import NOTHING, parse_mark_time, read_marks
from tailrace.valkey.shards import Shards, mapping
from tailrace.views.tags.model import Erasures
from tailrace.views.tags.rows.cassandra import connected
from tailrace.views.tags.rows.numbering import BackwardNumbering, NumberingEnd, numbering_end
from tailrace.views.tags.rows.store import RowKey, RowWriter, StoredRow
from tailrace.views.tags.rows.upkeep import RowAuditor, Rows, rests_in, tags_of
from tailrace.views.tags.store import VIEW, raise_floors, tag_options
from tailrace.views.tags.upkeep import read_all_numbers
from tailrace.views.tags.write import TagsPlan

STEPS = ("rows-written", "rows-deleted")
"""The failpoints, in order."""
AT_ONCE = 2_000
"""Rows that are written, or deleted, before the next are looked at."""

END, CEILING, ROW, RECORD = range(4)
"""What an item is: what comes behind a source, or a partition; a row that is there; a record of Kafka."""


class RowRebuildPlan(msgspec.Struct, frozen=True):
    """What a rebuild of rows is to do."""

    work: Assignment
    marks: tuple[dict[Partition, int], ...]
    """Of each shard, up to where its rows are rebuilt: read before anything else."""
    token: int
    dry_run: bool
    now_ms: int
    keep_ms: int | None

    @property
    def since_ms(self) -> int:
        """The time before which rows have expired."""
        return -(1 << 62) if self.keep_ms is None else self.now_ms - self.keep_ms


class RestoreItem(NamedTuple):
    """What is known of a tag, in the order in which it is restored."""

    kind: int
    source: str
    offset: int
    time_ms: int
    ms: int
    """The millisecond that it asks for its stamp."""
    body: bytes


class ExistingRow(msgspec.Struct, frozen=True, array_like=True):
    """A row that is there."""

    source: str
    number: int
    timeuuid: UUID
    bucket_ms: int
    prints: tuple[int, int]
    carried: tuple[int, Body] | None = None
    """Time and contents, if Kafka no longer has the record."""


class RestoredRows(Restored, frozen=True):
    """What became of one tag, up to the marks: rows that were there before, buckets written to, rows deleted."""

    added: int = 0
    """Events that had no row."""
    written: int = 0


_encode = msgspec.msgpack.Encoder().encode
_body = msgspec.msgpack.Decoder(Body).decode
_standing = msgspec.msgpack.Decoder(ExistingRow).decode
_end = msgspec.msgpack.Decoder(tuple[str, NumberingEnd]).decode
_ceiling = msgspec.msgpack.Decoder(tuple[str, int]).decode


def survey(
    orders: RowRebuildPlan, shards: Shards, rows: Rows, tag: str
) -> Iterator[tuple[int, str, int, int | None, bytes]]:
    """Yield kind, partition, offset, stamp and body of what is there of a tag: its rows, and what comes behind them.

    How far sources have come is read first: what was given out by then has its rows.
    """
    shard = shard_of(tag, shards.options.shards)
    given = {pid: each.number for pid, each in read_all_numbers(shards, shard, tag).items()}
    (answer,) = shards.run_all([(shard, ("HGETALL", shards.keys.times(shard, VIEW)))])
    ceilings = {place.decode(): parse_mark_time(stored)[0] for place, stored in mapping(answer).items()}
    marks, bounds = orders.marks[shard], orders.work.extent.shards[shard]
    live: dict[str, NumberingEnd] = {}
    for row in rows.rows(tag):
        place, ms = str(row.partition), ms_of(row.timeuuid)
        if row.offset > marks.get(row.partition, NOTHING):
            first = live.get(row.source)
            if first is None or row.tag_seq < first.number:
                live[row.source] = NumberingEnd(row.tag_seq, ms, place)
            ceilings[place] = min(ms, ceilings.get(place, ms))
            continue
        head, value = row.headers, row.value or b""
        note = noted(row.source, row.seq, row.tags)
        prints = fingerprint(place, row.offset, row.time_ms, row.key, head, value, note)
        carried = None
        if row.offset < bounds.get(row.partition, (1 << 62, 0))[0]:
            carried = row.time_ms, Body(row.key, head, value, row.source, row.seq, row.tags)
        standing = ExistingRow(row.source, row.tag_seq, row.timeuuid, row.bucket_ms, prints, carried)
        yield ROW, place, row.offset, ms, _encode(standing)
    for pid in given.keys() | live.keys():
        yield END, "", NOTHING, None, _encode((pid, numbering_end(given.get(pid, 0), live.get(pid))))
    for place, ms in ceilings.items():
        yield CEILING, "", NOTHING, None, _encode((place, ms))


class _Wanted(NamedTuple):
    """An event that a tag is to have."""

    source: str
    seq: int
    time_ms: int
    key: bytes | None
    headers: Headers
    value: bytes
    tags: tuple[str, ...]
    prints: tuple[int, int]


class RowRestorer:
    """Restores tags in one task."""

    def __init__(
        self, orders: RowRebuildPlan, shards: Shards, reached: Callable[[str], None] = failpoint.reached
    ) -> None:
        self._orders, self._shards, self._reached = orders, shards, reached
        self._span_ms = orders.work.plan.of(TagsPlan).options.span_ms
        # Not the writer of this process: it believes buckets to be listed, and the listing may be what was lost.
        self._writer = (
            None
            if orders.dry_run
            else RowWriter(connected(rests_in(orders.work)), orders.work.plan.of(TagsPlan).options.batch)
        )
        self._places: dict[str, Partition] = {}

    def restore(self, tag: str, items: Iterable[RestoreItem]) -> RestoredRows:
        """Restore a tag, given what comes behind it, and then what there is of each event, the last first."""
        gone = self._orders.work.erasures.get(tag, {})
        ends: dict[str, NumberingEnd] = {}
        ceilings: dict[str, int] = {}
        countdown: BackwardNumbering | None = None
        events = before = added = written = deleted = 0
        buckets: set[int] = set()
        new: list[StoredRow] = []
        old: list[RowKey] = []
        for (source, offset), group in groupby(items, key=lambda item: (item.source, item.offset)):
            if not source:
                for item in group:
                    if item.kind == END:
                        pid, end = _end(item.body)
                        ends[pid] = end
                    elif item.kind == CEILING:
                        place, ms = _ceiling(item.body)
                        ceilings[place] = ms
                continue
            countdown = countdown or BackwardNumbering(ends, ceilings)
            there, event, ms = _sorted_out(source, offset, group, gone)
            row = None if event is None else self._row(tag, source, offset, ms, event, bool(there), countdown)
            before += len(there)
            right = None
            if row is not None and event is not None:
                events += 1
                added += not there
                right = next((each for each in there if _is(each, row) and each.prints == event.prints), None)
                if right is None:
                    new.append(row)
                    buckets.add(row.bucket_ms)
            for each in there:
                # What is to be written over in its place must not be deleted.
                over = right is None and row is not None and _is(each, row) and each.bucket_ms == row.bucket_ms
                if each is not right and not over:
                    old.append(_narrow(tag, self._place(source), offset, each))
            if len(new) + len(old) >= AT_ONCE:
                written, deleted = written + len(new), deleted + len(old)
                self._change(tag, new, old)
                new, old = [], []
        written, deleted = written + len(new), deleted + len(old)
        self._change(tag, new, old)
        verdict = REBUILT if written or deleted else SAME
        return RestoredRows(tag, verdict, events, before, len(buckets), deleted, added, written)

    def _row(
        self, tag: str, source: str, offset: int, ms: int, event: _Wanted, is_there: bool, countdown: BackwardNumbering
    ) -> StoredRow | None:
        """Return the row that an event is to have; None if it has expired."""
        if not is_there and countdown.stamped(event.source, source, ms) < self._orders.since_ms:
            return None
        number, ms = countdown.give(event.source, source, ms)
        place = self._place(source)
        return StoredRow(
            tag=tag,
            bucket_ms=bucket_start(ms, self._span_ms),
            span_ms=self._span_ms,
            timeuuid=make_timeuuid(ms, offset, place),
            source=event.source,
            tag_seq=number,
            seq=event.seq,
            partition=place,
            offset=offset,
            time_ms=event.time_ms,
            key=event.key,
            headers=event.headers,
            value=event.value,
            tags=event.tags,
        )

    def _change(self, tag: str, new: Sequence[StoredRow], old: Sequence[RowKey]) -> None:
        """Write what is right, then delete what is not."""
        if self._writer is None or not (new or old):
            return
        shard = shard_of(tag, self._shards.options.shards)
        answer = self._shards.call(shard, "fence", WHAT, self._orders.token)
        if answer[0] == b"stale":
            raise StaleUpkeep(self._orders.token, int(answer[1]))
        self._writer.write(new)
        self._reached("rows-written")
        self._writer.delete(old)
        self._reached("rows-deleted")

    def _place(self, source: str) -> Partition:
        return self._places.get(source) or self._places.setdefault(source, Partition.parse(source))


def _sorted_out(
    source: str, offset: int, group: Iterable[RestoreItem], gone: Erasures
) -> tuple[list[ExistingRow], _Wanted | None, int]:
    """Return an event's rows, the event if the tag is to have it, and the stamp that it asks for.

    It has it if Kafka's record is there, or if Kafka no longer has it, and nobody took it out.
    """
    there: list[ExistingRow] = []
    event: _Wanted | None = None
    asked = 0
    for item in group:
        asked = item.ms
        if item.kind == ROW:
            there.append(_standing(item.body))
        else:
            body = _body(item.body)
            event = _wanted(source, offset, item.time_ms, body)
    if event is None:
        for each in sorted(there, key=lambda row: row.number):
            is_gone = each.source in gone and gone[each.source].covers(source, offset)
            if each.carried is not None and not is_gone:
                event = _wanted(source, offset, *each.carried)
    return there, event, asked


def _wanted(source: str, offset: int, time_ms: int, body: Body) -> _Wanted:
    note = noted(body.pid, body.seq, body.tags)
    prints = fingerprint(source, offset, time_ms, body.key, body.headers, body.value, note)
    return _Wanted(body.pid, body.seq, time_ms, body.key, body.headers, body.value, body.tags, prints)


def _is(there: ExistingRow, row: StoredRow) -> bool:
    return (there.timeuuid, there.source, there.number) == (row.timeuuid, row.source, row.tag_seq)


def _narrow(tag: str, place: Partition, offset: int, row: ExistingRow) -> RowKey:
    return RowKey(
        tag=tag,
        bucket_ms=row.bucket_ms,
        timeuuid=row.timeuuid,
        source=row.source,
        tag_seq=row.number,
        partition=place,
        offset=offset,
    )


logger = logging.getLogger(__name__)

_ITEMS = "name string, kind int, source string, offset long, time long, stamp long, body binary"
_RESTORED = (
    "name string, verdict string, events long, before long, segments long, replaced long, added long, written long"
)


class RowRebuilding(Rebuilding):
    """One run of a rebuild. What it has done so far is in ``facts``, also when it failed.

    Args:
        name: One tag; None = all of them.
        source: Those of one source; what a cleanup took out of it comes back.
        spark: A session that has Kafka's connector; one is started, and ended, without it.

    Raises:
        BadRequest: A day was asked for: a tag is rebuilt as a whole.
    """

    def __init__(self, settings: Settings, **given: Any) -> None:
        super().__init__(settings, VIEW, **given)
        self.restored: dict[str, RestoredRows] = {}  # type: ignore[assignment]
        """What became of every tag that something was wrong with, by name."""

    def facts(self) -> dict[str, object]:
        """What was done, for reports: tags looked at and rebuilt, events that came back, rows written and deleted."""
        done = [each for each in self.restored.values() if each.verdict == REBUILT]
        return {
            "names": self._names,
            "rebuilt": len(done),
            "events": sum(each.events for each in done),
            "restored": sum(each.added for each in done),
            "written": sum(each.written for each in done),
            "deleted": sum(each.replaced for each in done),
        }

    def look(self, shards: Shards) -> dict[str, object]:
        """Say what would be done, and change nothing."""
        with spark_for(self._settings, self._spark) as spark:
            if names := self._suspects(spark, shards):
                self._restore_rows(spark, shards, names, None)
        return self.facts()

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Restore what something is wrong with.

        Raises:
            StreamNotFound: Neither the rows nor Kafka know the tag.
            StaleUpkeep: Another process has taken over.
            PipelineError: Spark failed; what was restored until then is.
        """
        with spark_for(self._settings, self._spark) as spark:
            asked = self._asked(shards)
            if names := self._suspects(spark, shards):
                lease.check()
                _level(shards)
                self._restore_rows(spark, shards, names, lease.token)
            lease.check()
            self._take_back(shards, lease, asked)

    def _require(self, settings: Settings, view: str) -> None:
        """Rows are restored here, wherever logs are."""

    def _auditor(self, spark: Any) -> Auditor:
        return RowAuditor(self._settings, spark, VIEW, self._clock, brought_back=self._source)

    def _tags_of(self, shards: Shards, source: str) -> Iterable[str]:
        options = tag_options(self._settings).cassandra
        assert options is not None
        with Rows(options) as rows:
            return list(tags_of(shards, rows, source))

    def _restore_rows(self, spark: Any, shards: Shards, names: frozenset[str], token: int | None) -> None:
        """Restore tags; once more if Kafka dropped what was to be read."""
        history = History(self._settings, spark, VIEW, self._source)
        marks = read_marks(shards, VIEW)
        keep = self._settings.tags.keep
        for attempt in range(ATTEMPTS):
            extent = history.extent(shards, marks)
            orders = RowRebuildPlan(
                work=history.assign(shards, extent, WantedNames(names=names)),
                marks=tuple(marks),
                token=token or 0,
                dry_run=token is None,
                now_ms=self._clock(),
                keep_ms=None if keep is None else milliseconds(keep),
            )
            try:
                rows = collect(spark, self._rows_job(spark, history, orders))
            except PipelineError as error:
                if attempt == ATTEMPTS - 1 or not history.has_moved(extent):
                    raise
                logger.warning("%s; Kafka has dropped records meanwhile: once more", error)
                continue
            self.restored |= {row.name: RestoredRows(*row) for row in rows}
            return

    def _rows_job(self, spark: Any, history: History, orders: RowRebuildPlan) -> Any:
        from pyspark.sql import Window
        from pyspark.sql.functions import coalesce, col, least, lit, when
        from pyspark.sql.functions import max as highest
        from pyspark.sql.functions import min as lowest

        work, names = orders.work, sorted(orders.work.wanted.names or ())
        parts = 2 * int(spark.sparkContext.defaultParallelism)

        def stand(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            mine = [tag for batch in batches for i in batch.column(0).to_pylist() for tag in names[i::parts]]
            yield from _surveyed(orders, mine)

        def route(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from routed(work, batches)

        def restore(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from _restored(orders, batches)

        items = spark.range(0, parts, 1, parts).mapInArrow(stand, _ITEMS)
        records = history.records(work.extent)
        if records is not None:
            columns = "name", f"{RECORD} AS kind", "source", "offset", "time", "CAST(NULL AS LONG) AS stamp", "body"
            items = items.unionAll(records.mapInArrow(route, RECORDS).selectExpr(*columns))
        one = Window.partitionBy("name", "source", "offset")
        along = Window.partitionBy("name", "source").orderBy("offset")
        latest = lit(orders.now_ms + work.plan.of(TagsPlan).options.future_ms)
        # A time that none of the next records comes near is one from the future; it must not hold back what follows.
        # There are up to two items for each.
        next_ones = coalesce(highest("time").over(along.rowsBetween(1, 2 * NEXT_RECORDS)), col("time"))
        # A stamp that is there stays. One that is not is no later than the next that is.
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


def _level(shards: Shards) -> None:
    """Raise the floors of each partition to the highest that it has in any shard.

    Rebuilt rows get no stamp after the floor of their partition in the tag's shard, since rows that are still to come
    may get that one; but a shard that had nothing of a partition for long may have a floor that is long past.
    """
    times: dict[Partition, int] = {}
    for answer in shards.run_all([(s, ("HGETALL", shards.keys.times(s, VIEW))) for s in range(shards.options.shards)]):
        for place, stored in mapping(answer).items():
            source, ms = Partition.parse(place.decode()), parse_mark_time(stored)[0]
            times[source] = max(ms, times.get(source, ms))
    epoch = 0
    for _ in range(ATTEMPTS):
        try:
            raise_floors(shards, epoch, times)
            return
        except StaleDriver as error:  # it is said in the name of the driver that there is
            epoch = error.stored
    raise StaleDriver(VIEW, 0, epoch)


# What tasks do.


def _surveyed(orders: RowRebuildPlan, tags: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield what is there of tags."""
    types = [pa.string(), pa.int32(), pa.string(), pa.int64(), pa.int64(), pa.int64(), pa.binary()]
    names = [field.partition(" ")[0] for field in _ITEMS.split(", ")]
    if not tags:
        return
    shards = orders.work.open()
    try:
        with Rows(rests_in(orders.work)) as rows:
            for tag in tags:
                items = (
                    (tag, kind, source, offset, None, ms, body)
                    for kind, source, offset, ms, body in survey(orders, shards, rows, tag)
                )
                while chunk := list(_some(items)):
                    columns = zip(*chunk, strict=True)
                    arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
                    yield pa.RecordBatch.from_arrays(arrays, names=names)
    finally:
        shards.close()


def _some(items: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield the next items, up to about as much as a batch should have."""
    size = 0
    for item in items:
        yield item
        size += 200 + len(item[-1])
        if size > 1 << 20:
            return


def _restored(orders: RowRebuildPlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Restore the tags whose items come, one after the other; yield what became of each."""
    shards = orders.work.open()
    try:
        restorer = RowRestorer(orders, shards)
        for tag, rows in groupby(_items(batches), key=lambda row: row[0]):
            done = restorer.restore(tag, (item for _, item in rows))
            fields = msgspec.structs.asdict(done)
            yield pa.RecordBatch.from_arrays([pa.array([value]) for value in fields.values()], names=list(fields))
    finally:
        shards.close()


def _items(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, RestoreItem]]:
    for batch in batches:
        for tag, *item in zip(*map(listed, batch.columns), strict=True):
            yield tag, RestoreItem(*item)

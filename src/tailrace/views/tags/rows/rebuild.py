"""Rebuilds of tags that rest in Cassandra: rows become what Kafka and the present configuration say, while all goes on.

An audit says which tags something is wrong with. Then the marks are read, and one Spark job puts the rows of each tag
beside Kafka's records, event by event, and restores it from its last event backwards, so that numbers are anchored at
its live end. Invariant: what lies beyond the marks is not touched, nor is a row that is right; a rebuild that dies is
begun again, and comes to the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import msgspec
import pyarrow as pa

from tailrace.config import Settings
from tailrace.errors import PipelineError, StaleDriver
from tailrace.log.event import Source
from tailrace.upkeep.audit import Auditor
from tailrace.upkeep.job import Lease, milliseconds
from tailrace.upkeep.rebuild import NEXT_RECORDS, RECORDS, Rebuilding, listed, routed
from tailrace.upkeep.restore import REBUILT
from tailrace.upkeep.spark import ATTEMPTS, History, Wanted, collect, spark_for
from tailrace.valkey.marks import parse_mark_time, read_marks
from tailrace.valkey.shards import Shards, mapping
from tailrace.views.tags.rows.row_cleanup import tags_of
from tailrace.views.tags.rows.row_restore import RECORD, ROW, Item, Orders, RestoredRows, RowRestorer, survey
from tailrace.views.tags.rows.row_walk import Rows
from tailrace.views.tags.rows.upkeep import RowAuditor, rests_in
from tailrace.views.tags.store import VIEW, lift, tag_options

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

    def run(self, shards: Shards, lease: Lease) -> None:
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
            orders = Orders(
                work=history.assign(shards, extent, Wanted(names=names)),
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

    def _rows_job(self, spark: Any, history: History, orders: Orders) -> Any:
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
        latest = lit(orders.now_ms + work.plan.tags.future_ms)
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
    times: dict[Source, int] = {}
    for answer in shards.run_all([(s, ("HGETALL", shards.keys.times(s, VIEW))) for s in range(shards.options.shards)]):
        for place, stored in mapping(answer).items():
            source, ms = Source.parse(place.decode()), parse_mark_time(stored)[0]
            times[source] = max(ms, times.get(source, ms))
    epoch = 0
    for _ in range(ATTEMPTS):
        try:
            lift(shards, epoch, times)
            return
        except StaleDriver as error:  # it is said in the name of the driver that there is
            epoch = error.stored
    raise StaleDriver(VIEW, 0, epoch)


# What tasks do.


def _surveyed(orders: Orders, tags: list[str]) -> Iterator[pa.RecordBatch]:
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


def _restored(orders: Orders, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
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


def _items(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, Item]]:
    for batch in batches:
        for tag, *item in zip(*map(listed, batch.columns), strict=True):
            yield tag, Item(*item)

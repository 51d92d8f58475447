"""Rebuilds: restores from Kafka what a view has lost, while the pipeline goes on and everyone goes on reading.

First an audit says which logs something is wrong with; if none, nothing is done. Then every shard begins a new epoch,
so that what exists now is never written again, and one Spark job reads Kafka up to the marks of that moment, gathers
the records of each name, and restores log after log. Invariant: a log is as it was until the one step that replaces its
segments; a rebuild that dies is begun again from the beginning, and what it had finished stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

import msgspec
import pyarrow as pa

from tailrace.config.settings import Settings
from tailrace.errors import BadRequest, PipelineError, StoreError, StreamNotFound
from tailrace.log.event import Partition
from tailrace.log.store import Staging
from tailrace.upkeep import failpoint
from tailrace.upkeep.audit import Auditor
from tailrace.upkeep.job import JobLease, milliseconds, now_ms, require_copy, section_of
from tailrace.upkeep.replacement import DIFFERS
from tailrace.upkeep.restore import MOVED, REBUILT, Body, RebuildPlan, Restored, Restorer, encode_body
from tailrace.upkeep.spark import ATTEMPTS, Assignment, Extent, History, WantedNames, collect, kept, spark_for
from tailrace.valkey.shards import Shards
from tailrace.views.tags.store import VIEW as TAGS
from tailrace.views.tags.store import read_erasures, tags_of
from tailrace.views.tags.upkeep import SpooledRecord

logger = logging.getLogger(__name__)

RECORDS = "name string, source string, offset long, time long, body binary"
_RESTORED = "name string, verdict string, events long, before long, segments long, replaced long"
NEXT_RECORDS = 3
_ANY_EPOCH = 1 << 62
"""Above every epoch: what a dry run would replace is all there is."""


class Rebuilding:
    """One run of a rebuild. What it has done so far is in ``facts``, also when it failed.

    Args:
        name: One stream; None = all of them.
        day_ms: When the UTC day began that is to be restored; None = all days. Not for tags.
        source: Of tags, those of one source; what a cleanup took out of it comes back.
        spark: A session that has Kafka's connector; one is started, and ended, without it.

    Raises:
        BadRequest: There is no such view, or what was asked for is not for it.
    """

    name = "rebuild"
    whole = True
    """Every run leaves its report, also one of a single name."""

    def __init__(
        self,
        settings: Settings,
        view: str,
        *,
        name: str | None = None,
        day_ms: int | None = None,
        source: str | None = None,
        spark: Any = None,
        clock: Callable[[], int] = now_ms,
        reached: Callable[[str], None] = failpoint.reached,
    ) -> None:
        self._require(settings, view)
        if view == TAGS and day_ms is not None:
            raise BadRequest("a tag is rebuilt as a whole, not a day of it: its numbers go on from day to day")
        if view != TAGS and source is not None:
            raise BadRequest(f"the view {view!r} knows no sources of events: only tags do")
        self.view = view
        self._settings, self._name, self._day_ms = settings, name, day_ms
        self._source, self._spark, self._clock, self._reached = source, spark, clock, reached
        self._names = 0
        self.restored: dict[str, Restored] = {}
        """What became of every log that something was wrong with, by name."""

    def facts(self) -> dict[str, object]:
        """What was done, for reports: names looked at and rebuilt, events that came back, segments, what was left."""
        done = [each for each in self.restored.values() if each.verdict == REBUILT]
        left: dict[str, int] = {}
        for each in self.restored.values():
            if each.verdict != REBUILT:
                left[each.verdict] = left.get(each.verdict, 0) + 1
        return {
            "names": self._names,
            "rebuilt": len(done),
            "events": sum(each.events for each in done),
            "restored": sum(max(0, each.events - each.before) for each in done),
            "segments": sum(each.segments for each in done),
            "left": left,
        }

    def look(self, shards: Shards) -> dict[str, object]:
        """Say what would be done, and change nothing."""
        with spark_for(self._settings, self._spark) as spark:
            names = self._suspects(spark, shards)
            if names:
                count = shards.options.shards
                self._restore(spark, shards, names, (_ANY_EPOCH,) * count, None, 0)
        return self.facts()

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Restore what something is wrong with.

        Raises:
            StreamNotFound: Neither the view nor Kafka has the stream.
            StaleUpkeep: Another process has taken over.
            PipelineError: Spark failed; what was restored until then is.
        """
        with spark_for(self._settings, self._spark) as spark:
            names = self._suspects(spark, shards)
            if not names:
                return
            lease.check()
            opened = Staging(shards, self.view, lease.token).reopen(self._clock() // 1000)
            self._reached("reopened")
            epochs, marks = tuple(epoch for epoch, _ in opened), [marks for _, marks in opened]
            self._restore(spark, shards, names, epochs, marks, lease.token)
            lease.check()
            self._take_back(shards, lease, self._asked(shards))

    def _require(self, settings: Settings, view: str) -> None:
        require_copy(settings, view)

    def _take_back(self, shards: Shards, lease: JobLease, tags: frozenset[str] | None) -> None:
        """Forget that the source was taken out of tags: what was is there again."""
        if self._source is not None:
            for tag in tags or ():
                Staging(shards, self.view, lease.token).record_erasure(tag, self._source, b"")

    def _auditor(self, spark: Any) -> Auditor:
        return Auditor(self._settings, spark, self.view, self._clock, brought_back=self._source)

    def _suspects(self, spark: Any, shards: Shards) -> frozenset[str]:
        names, self._names = self._auditor(spark).suspects(shards, WantedNames(names=self._asked(shards)))
        if self._name is not None and not self._names:
            raise StreamNotFound(self._name)
        return frozenset(names)

    def _asked(self, shards: Shards) -> frozenset[str] | None:
        """Return the names that it is about, or None for all of them.

        Those of a source are the tags that it was taken out of, or has come somewhere in.
        """
        if self._name is not None:
            return frozenset([self._name])
        if self._source is None:
            return None
        cleaned = [tag for tag, sources in read_erasures(shards).items() if self._source in sources]
        if not (tags := frozenset([*cleaned, *self._tags_of(shards, self._source)])):
            raise BadRequest(f"no tag has, or had, events of the source {self._source!r}")
        return tags

    def _tags_of(self, shards: Shards, source: str) -> Iterable[str]:
        return tags_of(shards, source)

    def _restore(
        self,
        spark: Any,
        shards: Shards,
        names: frozenset[str],
        epochs: tuple[int, ...],
        marks: list[dict[Partition, int]] | None,
        token: int,
    ) -> None:
        """Restore logs; those that changed meanwhile once more, and all if Kafka dropped what was to be read."""
        history = History(self._settings, spark, self.view, self._source)
        for attempt in range(ATTEMPTS):
            extent = history.extent(shards, marks)
            try:
                orders = self._orders(history, shards, extent, names, epochs, token)
                rows = collect(spark, self._job(spark, history, orders))
            except PipelineError as error:
                if attempt == ATTEMPTS - 1 or not history.has_moved(extent):
                    raise
                logger.warning("%s; Kafka has dropped records meanwhile: once more", error)
                continue
            self.restored |= {row.name: Restored(*row) for row in rows}
            names = frozenset(name for name in names if self.restored[name].verdict == MOVED)
            if not names:
                break
        if wrong := [each.name for each in self.restored.values() if each.verdict == DIFFERS]:
            raise StoreError(f"what was staged for {wrong[0]!r} is not what was written: is the store sound?")

    def _orders(
        self,
        history: History,
        shards: Shards,
        extent: Extent,
        names: frozenset[str],
        epochs: tuple[int, ...],
        token: int,
    ) -> RebuildPlan:
        upkeep = self._settings.upkeep
        return RebuildPlan(
            work=history.assign(shards, extent, WantedNames(names=names)),
            section=section_of(self._settings, self.view),
            token=token,
            epochs=epochs,
            day_ms=self._day_ms,
            dry_run=epochs[0] == _ANY_EPOCH,
            now_ms=self._clock(),
            piece_bytes=upkeep.segment_bytes,
            remember_ms=milliseconds(upkeep.remember),
        )

    def _job(self, spark: Any, history: History, orders: RebuildPlan) -> Any:
        from pyspark.sql import Window
        from pyspark.sql.functions import coalesce, col, least, lit
        from pyspark.sql.functions import max as highest

        work, names = orders.work, sorted(orders.work.wanted.names or ())

        def route(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from routed(work, batches)

        def restore(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from _restored(orders, batches)

        # Every name has a row of its own: a log of which Kafka has nothing is looked at too.
        rows = spark.createDataFrame([(name, "", -1, 0, None) for name in names], RECORDS)
        records = history.records(work.extent)
        if records is not None:
            rows = rows.unionAll(records.mapInArrow(route, RECORDS))
        each = Window.partitionBy("name", "source").orderBy("offset")
        latest = orders.now_ms + work.make_view().future_ms
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


# What tasks do.


def routed(work: Assignment, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield Kafka's records with the name of their log."""
    types = [pa.string(), pa.string(), pa.int64(), pa.int64(), pa.binary()]
    for found in kept(work, batches):
        records, rows = found.records, found.rows
        source, heads = str(records.partition), records.headers
        at = [i for i, _, _ in rows]
        bodies: dict[int, bytes] = {}
        for i in at:
            if i not in bodies:
                event = found.tagged.get(i)
                more = () if event is None else (event.source, event.seq, event.tags)
                head = heads[i] if heads is not None else []
                bodies[i] = encode_body(Body(records.keys[i], head, records.values[i] or b"", *more))
        columns: list[list[object]] = [
            [name for _, _, name in rows],
            [source] * len(rows),
            [records.offsets[i] for i in at],
            [records.times[i] for i in at],
            [bodies[i] for i in at],
        ]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, names=["name", "source", "offset", "time", "body"])


def _restored(orders: RebuildPlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Restore the logs whose records come, one after the other; yield what became of each."""
    shards = orders.work.open()
    try:
        restorer = Restorer(orders, shards)
        for name, rows in groupby(_rows(batches), key=lambda row: row[0]):
            done = restorer.restore(name, (record for _, record in rows if record is not None))
            fields = msgspec.structs.asdict(done)
            yield pa.RecordBatch.from_arrays([pa.array([value]) for value in fields.values()], names=list(fields))
    finally:
        shards.close()


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, SpooledRecord | None]]:
    sources: dict[str, Partition] = {}
    for batch in batches:
        for name, source, offset, time_ms, body, newest in zip(*map(listed, batch.columns), strict=True):
            if not source:
                yield name, None
                continue
            known = sources.get(source) or sources.setdefault(source, Partition.parse(source))
            yield name, SpooledRecord(known, offset, time_ms, newest, body)


def listed(column: Any) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values

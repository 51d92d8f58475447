"""Audits: compares a view with what Kafka still has of it, and every log with its own registry, while everything runs.

One Spark job adds up the fingerprints of Kafka's records and takes away those of the view's events, for each name,
source and UTC day; whatever does not cancel out is a finding. The marks are read first, and neither side looks beyond
them, so appending goes on meanwhile. What was found is looked at a second time: what is found once only was a change in
between, a bucket expired or rebuilt, or Kafka's own retention. Invariant: an audit changes nothing but its report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any
from zlib import crc32

import msgspec
import pyarrow as pa

from tailrace.config.settings import Settings
from tailrace.errors import PipelineError
from tailrace.log.segment import DAY_MS, day_text
from tailrace.log.store import LogRegistry
from tailrace.upkeep.examine import (
    ExaminedLog,
    Finding,
    Tally,
    examine,
    fingerprint,
    horizon,
    look,
    noted,
    stray_keys,
    walk,
)
from tailrace.upkeep.job import BucketSettings, JobLease, milliseconds, now_ms, require_copy, section_of
from tailrace.upkeep.spark import ATTEMPTS, Assignment, History, WantedNames, collect, kept, spark_for
from tailrace.valkey.marks import read_marks
from tailrace.valkey.shards import Shards

logger = logging.getLogger(__name__)

MOST_FINDINGS = 1000
"""Findings that are told one by one; the others are counted."""
MOST_PLACES = 50_000
"""Places that a task adds up before it hands them on."""

SUMS = "name string, source string, day long, kafka long, view long, low long, high long, note string"
JUDGED = "kind string, name string, day string, source string, expected long, found long, detail string"
TOTALS = ""
"""The kind, or the name, of rows that only count."""

_decode_finding = msgspec.json.Decoder(Finding).decode


class Audit(msgspec.Struct, frozen=True):
    """What an audit found."""

    view: str
    names: int = 0
    days: int = 0
    """Days of all names together."""
    events: int = 0
    """Events of the view that were compared with Kafka's."""
    expired: int = 0
    """Records that Kafka has and the view has dropped on purpose."""
    findings: tuple[Finding, ...] = ()
    more: int = 0
    """Findings that are not told one by one."""
    retained: dict[str, tuple[int, int]] = {}
    """Of each source the offsets between which was compared."""
    left_out: dict[str, str] = {}
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings and not self.more

    def facts(self) -> dict[str, object]:
        """What there is to report."""
        return {
            "names": self.names,
            "days": self.days,
            "events": self.events,
            "expired": self.expired,
            "findings": len(self.findings) + self.more,
            "left_out": self.left_out,
        }


class Auditing:
    """One run of an audit; what it found is in ``found``.

    Args:
        pattern: Only names that match.
        keys: Also look through all keys for some that nobody owns.
        spark: A session that has Kafka's connector; one is started, and ended, without it.
        stopped: Whether to give up at the next opportunity.

    Raises:
        BadRequest: There is no such view, or the pattern is none.
    """

    name = "audit"

    def __init__(
        self,
        settings: Settings,
        view: str,
        *,
        pattern: str | None = None,
        keys: bool = False,
        spark: Any = None,
        clock: Callable[[], int] = now_ms,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._require(settings, view)
        self.view, self.whole = view, pattern is None
        self._settings, self._wanted, self._keys, self._spark = settings, WantedNames(pattern), keys, spark
        self._clock, self._stopped = clock, stopped
        self._wanted.test()
        self.found = Audit(view)
        self._ended = False

    def facts(self) -> dict[str, object]:
        """What was found, for reports; an audit that failed has nothing to say of what it did not see."""
        return self.found.facts() if self._ended else {}

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Audit the view. Changes nothing.

        Raises:
            Unavailable, StoreChanged, PipelineError: It could not be done, or was given up.
        """
        started = self._clock()
        if not self._is_written(shards):
            # As tags are that nobody has asked for: no session is begun for nothing.
            self._ended = True
            return
        with spark_for(self._settings, self._spark) as session:
            found = self._auditor(session).audit(shards, self._wanted)
        if self._keys:
            found = msgspec.structs.replace(found, findings=(*found.findings, *stray_keys(shards, self.view)))
        self.found = msgspec.structs.replace(found, seconds=(self._clock() - started) / 1000)
        self._ended = True

    def _require(self, settings: Settings, view: str) -> None:
        require_copy(settings, view)

    def _is_written(self, shards: Shards) -> bool:
        return any(read_marks(shards, self.view)) or LogRegistry(shards, self.view).count() > 0

    def _auditor(self, spark: Any) -> Auditor:
        return Auditor(self._settings, spark, self.view, self._clock, self._stopped)


class Auditor:
    """Runs the job, and runs it again where something was found."""

    def __init__(
        self,
        settings: Settings,
        spark: Any,
        view: str,
        clock: Callable[[], int],
        stopped: Callable[[], bool] = lambda: False,
        brought_back: str | None = None,
    ) -> None:
        self._settings, self._spark, self._view, self._clock, self._stopped = settings, spark, view, clock, stopped
        self.history = History(settings, spark, view, brought_back)

    def audit(self, shards: Shards, wanted: WantedNames) -> Audit:
        """Look at everything that is wanted, and at what was found once more."""
        first = self._look(shards, wanted)
        if first.clean:
            return first
        names = frozenset(finding.name for finding in first.findings)
        places = {f.place for f in self._look(shards, WantedNames(wanted.pattern, names)).findings}
        return msgspec.structs.replace(first, findings=tuple(f for f in first.findings if f.place in places))

    def suspects(self, shards: Shards, wanted: WantedNames) -> tuple[set[str], int]:
        """Return the names that something is wrong with, all of them, and how many names were looked at."""
        names: set[str] = set()
        total = 0
        for row in self._rows(shards, wanted, None)[0]:
            if row.kind == TOTALS:
                total += msgspec.json.decode(row.detail).get("names", 0)
            else:
                names.add(row.name)
        return names, max(total, len(names))

    def _look(self, shards: Shards, wanted: WantedNames) -> Audit:
        rows, work = self._rows(shards, wanted, MOST_FINDINGS)
        totals: dict[str, int] = {}
        findings: list[Finding] = []
        for row in rows:
            if row.kind == TOTALS:
                for field, n in msgspec.json.decode(row.detail, type=dict[str, int]).items():
                    totals[field] = totals.get(field, 0) + n
            else:
                findings.append(Finding(row.kind, row.name, row.day, row.source, row.expected, row.found, row.detail))
        findings.sort(key=lambda f: (f.name, f.day, f.source, f.kind))
        told = findings[:MOST_FINDINGS]
        return Audit(
            self._view,
            names=totals.get("names", 0),
            days=totals.get("days", 0),
            events=totals.get("events", 0),
            expired=totals.get("expired", 0),
            findings=tuple(told),
            more=totals.get("findings", 0) - len(told),
            retained={str(source): bounds for source, bounds in work.extent.ranges.items()},
            left_out=work.extent.left_out,
        )

    def _rows(self, shards: Shards, wanted: WantedNames, most: int | None) -> tuple[list[Any], Assignment]:
        """Run the job; again if Kafka dropped something that it was about to read."""
        for attempt in range(ATTEMPTS):
            work = self.history.assign(shards, self.history.extent(shards), wanted)
            try:
                return collect(self._spark, self._job(work, most), self._stopped), work
            except PipelineError as error:
                if attempt == ATTEMPTS - 1 or self._stopped() or not self.history.has_moved(work.extent):
                    raise
                logger.warning("%s; Kafka has dropped records meanwhile: once more", error)
        raise AssertionError

    def _job(self, work: Assignment, most: int | None) -> Any:
        section, now = section_of(self._settings, self._view), self._clock()
        count = work.plan.store.shards
        parts = max(1, -(-2 * int(self._spark.sparkContext.defaultParallelism) // count))

        def kafka_side(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from sums_of(kafka_places(work, batches))

        def view_side(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            pieces = [i for batch in batches for i in batch.column(0).to_pylist()]
            yield from sums_of(_view_places(work, [(i % count, i // count) for i in pieces], parts))

        def judge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from _judge(work, section, now, most, batches)

        sums = self._spark.range(0, count * parts, 1, count * parts).mapInArrow(view_side, SUMS)
        records = self.history.records(work.extent)
        if records is not None:
            sums = sums.unionAll(records.mapInArrow(kafka_side, SUMS))
        added = [f"sum({column}) AS {column}" for column in ("kafka", "view", "low", "high")]
        from pyspark.sql.functions import expr

        return (
            sums.repartition(count * parts, "name")
            .groupBy("name", "source", "day", "note")
            .agg(*map(expr, added))
            .where("kafka <> view OR low <> 0 OR high <> 0 OR note <> ''")
            .mapInArrow(judge, JUDGED)
        )


# What tasks do.


def kafka_places(work: Assignment, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[object, ...]]:
    """Yield the sums of Kafka's records."""
    tally: Tally[tuple[str, str, int]] = Tally()
    for found in kept(work, batches):
        records = found.records
        source, headers = str(records.partition), records.headers
        offsets, times, keys, values = records.offsets, records.times, records.keys, records.values
        for i, _, name in found.rows:
            head = headers[i] if headers is not None else None
            event = found.tagged.get(i)
            note = () if event is None else noted(event.source, event.seq, event.tags)
            mark = fingerprint(source, offsets[i], times[i], keys[i], head, values[i] or b"", note)
            tally.add((name, source, times[i] // DAY_MS), *mark)
        if len(tally.rows) > MOST_PLACES:
            yield from ((*place, n, 0, low, high, "") for place, (n, low, high) in tally.rows.items())
            tally = Tally()
    yield from ((*place, n, 0, low, high, "") for place, (n, low, high) in tally.rows.items())


def _view_places(work: Assignment, parts: Sequence[tuple[int, int]], of: int) -> Iterator[tuple[object, ...]]:
    """Yield the sums of the view's events, taken away, and what is wrong with its logs, for parts of shards."""
    wanted = work.wanted.test()
    shards = work.open()
    names = days = events = 0
    try:
        for shard, part in parts:
            count = work.plan.store.shards

            def mine(name: str, count: int = count, part: int = part) -> bool:
                return crc32(name.encode()) // count % of == part and wanted(name)

            logs = walk(shards, work.view, shard, mine)
            for examined in examine(shards, work.view, logs, work.extent.shards[shard], work.erasures):
                names += 1
                days += len({segment.start_ms // DAY_MS for segment in examined.log.segments})
                for (source, day), (n, low, high) in examined.tally.rows.items():
                    events += n
                    yield examined.name, source, day, 0, n, -low, -high, ""
                for finding in examined.findings:
                    yield finding.name, "", 0, 0, 0, 0, 0, msgspec.json.encode(finding).decode()
    finally:
        shards.close()
    yield TOTALS, "", 0, names, events, days, 0, "totals"


def _judge(
    work: Assignment, section: BucketSettings, at_ms: int, most: int | None, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Say what each place that does not cancel out is: a finding, or something that the view has dropped on purpose."""
    shards = work.open()
    totals = {"names": 0, "days": 0, "events": 0, "expired": 0, "findings": 0}
    left = most if most is not None else 1 << 62
    unlisted: set[str] = set()
    try:
        for batch in batches:
            found: list[Finding] = []
            open_rows: list[dict[str, Any]] = []
            for row in batch.to_pylist():
                if row["name"] == TOTALS:
                    totals["names"] += row["kafka"]
                    totals["events"] += row["view"]
                    totals["days"] += row["low"]
                elif row["note"]:
                    found.append(_decode_finding(row["note"]))
                elif _dropped(row, _kept_since(section, row["name"], at_ms)):
                    totals["expired"] += row["kafka"] - row["view"]
                else:
                    open_rows.append(row)
            names = sorted({row["name"] for row in open_rows})
            seen = dict(zip(names, look(shards, work.view, names), strict=True))
            for row in open_rows:
                name, log = row["name"], seen[row["name"]]
                if _dropped(row, _horizon(row, log, at_ms)):
                    totals["expired"] += row["kafka"] - row["view"]
                elif not log.listed and (log.log.segments or log.is_broken):
                    if name not in unlisted:
                        found.append(Finding("unlisted", name, detail="there is a log, and the name is not listed"))
                    unlisted.add(name)
                else:
                    found.append(_compared(row, log))
            totals["findings"] += len(found)
            told, left = found[:left], max(0, left - len(found))
            yield batch_of(JUDGED, ((f.kind, f.name, f.day, f.source, f.expected, f.found, f.detail) for f in told))
    finally:
        shards.close()
    yield batch_of(JUDGED, [(TOTALS, "", "", "", 0, 0, msgspec.json.encode(totals).decode())])


def _kept_since(section: BucketSettings, name: str, at_ms: int) -> int:
    keep = section.keep_of(name)
    return 0 if keep is None else at_ms - milliseconds(keep)


def _horizon(row: dict[str, Any], seen: ExaminedLog, at_ms: int) -> int:
    """Return the time before which a log may lack something.

    A day to come holds records from the future, whose own times say nothing of when they were dropped.
    """
    if seen.has_dropped and row["day"] * DAY_MS > at_ms:
        return 1 << 62
    return horizon(seen.log, seen.has_dropped, seen.floor_ms, None, at_ms)


def _dropped(row: dict[str, Any], horizon_ms: int) -> bool:
    """Whether what a place lacks may have been dropped on purpose; what it has too much never is."""
    return row["kafka"] > row["view"] and int(row["day"]) * DAY_MS < horizon_ms


def _compared(row: dict[str, Any], seen: ExaminedLog) -> Finding:
    expected, found = row["kafka"], row["view"]
    kind = "missing" if found < expected else "extra" if found > expected else "different"
    detail = {
        "missing": "Kafka has more" if seen.log.segments else "Kafka has it, and there is no such log",
        "extra": "Kafka has fewer",
        "different": "as many as in Kafka, but not the same, or not with the same tags",
    }[kind]
    return Finding(kind, row["name"], day_text(row["day"] * DAY_MS), row["source"], expected, found, detail)


def sums_of(rows: Iterable[tuple[object, ...]]) -> Iterator[pa.RecordBatch]:
    rows = iter(rows)
    while chunk := list(islice(rows, 10_000)):
        yield batch_of(SUMS, chunk)


def batch_of(schema: str, rows: Iterable[tuple[object, ...]]) -> pa.RecordBatch:
    """Return rows as Spark takes them from a task."""
    types = {"string": pa.string(), "long": pa.int64()}
    fields = [pa.field(name, types[kind]) for name, _, kind in (f.partition(" ") for f in schema.split(", "))]
    columns = list(zip(*rows, strict=True)) or [()] * len(fields)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, fields, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

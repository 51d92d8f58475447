"""Audits: compares a view's copy with the records that Kafka still has, and each log with its registry, while all runs.

One Spark job adds up the fingerprints of Kafka's records and subtracts those of the view's events, for each name,
partition and UTC day; a sum that does not cancel out is a finding. The marks are read first, and neither side looks
beyond them, so appending goes on meanwhile. Names with findings are audited a second time: a finding that comes only
once was a change in between, such as an expired bucket or Kafka's own retention. Invariant: an audit changes nothing
but its report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import pyarrow as pa

from tailrace.config.settings import Settings
from tailrace.driver.slice import Slice
from tailrace.log.segment import DAY_MS
from tailrace.upkeep.copy import (
    Assignment,
    History,
    MapRecords,
    ViewCopy,
    WantedNames,
    arrow_batch,
    may_have_dropped,
    replay,
)
from tailrace.upkeep.examine import Finding, Tally, fingerprint, stray_keys
from tailrace.upkeep.job import JobLease, now_ms
from tailrace.upkeep.spark import spark_for
from tailrace.valkey.shards import Shards
from tailrace.view import View

MOST_FINDINGS = 1000
"""Findings that are reported one by one; the others are counted."""
MOST_KEYS = 50_000
"""Keys of sums that a task gathers before it hands them on."""

SUMS = "name string, source string, day long, kafka long, view long, low long, high long, note string"
JUDGED = "kind string, name string, day string, source string, expected long, found long, detail string"
TOTALS = ""
"""Kind, or name, of rows that only count."""

_decode_finding = msgspec.json.Decoder(Finding).decode


class Audit(msgspec.Struct, frozen=True):
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
    """Findings that are not reported one by one."""
    retained: dict[str, tuple[int, int]] = {}
    """Of each partition the first and the last offset that were compared."""
    left_out: dict[str, str] = {}
    seconds: float = 0.0
    repeats: int | None = None
    """Further rows of events under the same number, which readers skip; None where there are no rows."""

    @property
    def clean(self) -> bool:
        return not self.findings and not self.more

    def facts(self) -> dict[str, object]:
        return {
            "names": self.names,
            "days": self.days,
            "events": self.events,
            "expired": self.expired,
            "findings": len(self.findings) + self.more,
            "left_out": self.left_out,
            **({} if self.repeats is None else {"repeats": self.repeats}),
        }


class Auditing:
    """One run of an audit, of all names or those that match; the result is in ``found``.

    If ``keys``, it also looks through all keys for some that nobody owns. Raises BadRequest if the view has no copy of
    Kafka's records, or cannot look through keys. Without ``spark``, a session is started, and ended.
    """

    name = "audit"

    def __init__(
        self,
        settings: Settings,
        view: View,
        *,
        pattern: str | None = None,
        keys: bool = False,
        spark: Any = None,
        clock: Callable[[], int] = now_ms,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._copy = view.copy(settings)
        self._copy.require(keys=keys)
        self.view, self.whole = view.name, pattern is None
        self._settings, self._wanted, self._keys, self._spark = settings, WantedNames(pattern), keys, spark
        self._clock, self._stopped = clock, stopped
        self._wanted.test()
        self.found = Audit(self.view)
        self._ended = False

    def facts(self) -> dict[str, object]:
        """Return the figures for reports; none after a failure."""
        return self.found.facts() if self._ended else {}

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Audit the view, and change nothing; PipelineError if it is stopped."""
        started = self._clock()
        if self._copy.is_written(shards):  # else no session is started for nothing
            with spark_for(self._settings, self._spark) as session:
                auditor = Auditor(self._settings, session, self._copy, self._clock, self._stopped)
                found = auditor.audit(shards, self._wanted)
            if self._keys:
                found = msgspec.structs.replace(found, findings=(*found.findings, *stray_keys(shards, self.view)))
            self.found = msgspec.structs.replace(found, seconds=(self._clock() - started) / 1000)
        self._ended = True


class Auditor:
    """Runs the job, and runs it again for names with findings."""

    def __init__(
        self,
        settings: Settings,
        spark: Any,
        copy: ViewCopy,
        clock: Callable[[], int],
        stopped: Callable[[], bool] = lambda: False,
        brought_back: str | None = None,
    ) -> None:
        self._spark, self._copy, self._clock, self._stopped = spark, copy, clock, stopped
        self._history = History(settings, spark, copy, brought_back)

    def audit(self, shards: Shards, wanted: WantedNames) -> Audit:
        """Audit all wanted names, and those with findings once more."""
        first = self._audit(shards, wanted)
        if first.clean:
            return first
        names = frozenset(finding.name for finding in first.findings)
        again = {f.place for f in self._audit(shards, WantedNames(wanted.pattern, names)).findings}
        return msgspec.structs.replace(first, findings=tuple(f for f in first.findings if f.place in again))

    def suspects(self, shards: Shards, wanted: WantedNames) -> tuple[set[str], int]:
        """Return all names with findings, and how many names were audited."""
        findings, totals, _ = self._run(shards, wanted, None)
        names = {finding.name for finding in findings}
        return names, max(totals["names"], len(names))

    def _audit(self, shards: Shards, wanted: WantedNames) -> Audit:
        findings, totals, work = self._run(shards, wanted, MOST_FINDINGS)
        findings.sort(key=lambda f: (f.name, f.day, f.source, f.kind))
        reported = findings[:MOST_FINDINGS]
        return Audit(
            self._copy.view,
            **{field: totals[field] for field in ("names", "days", "events", "expired")},
            findings=tuple(reported),
            more=totals["findings"] - len(reported),
            retained={str(partition): bounds for partition, bounds in work.extent.ranges.items()},
            left_out=work.extent.left_out,
            repeats=totals["repeats"] if self._copy.has_repeats else None,
        )

    def _run(
        self, shards: Shards, wanted: WantedNames, most: int | None
    ) -> tuple[list[Finding], Counter[str], Assignment]:
        """Run the job; return findings, at most so many of each task, and what all tasks counted."""
        rows, work = self._history.run(shards, wanted, partial(self._job, most), stopped=self._stopped)
        totals: Counter[str] = Counter()
        for row in rows:
            if row.kind == TOTALS:
                totals.update(msgspec.json.decode(row.detail, type=dict[str, int]))
        return [Finding(*row) for row in rows if row.kind != TOTALS], totals, work

    def _job(self, most: int | None, work: Assignment, records: MapRecords) -> Any:
        from pyspark.sql.functions import expr

        now, count = self._clock(), work.plan.store.shards
        # A multiple of the shards: each part of a log view lies in one of them.
        parts = count * max(1, -(-2 * int(self._spark.sparkContext.defaultParallelism) // count))

        def kafka_side(slices: Iterator[Slice]) -> Iterator[pa.RecordBatch]:
            yield from _sum_batches(_kafka_sums(work, slices))

        def view_side(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            mine = [i for batch in batches for i in batch.column(0).to_pylist()]
            yield from _sum_batches(_view_sums(work, mine, parts, now))

        def judge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from _judge(work, now, most, batches)

        sums = self._spark.range(0, parts, 1, parts).mapInArrow(view_side, SUMS).unionAll(records(kafka_side, SUMS))
        added = [f"sum({column}) AS {column}" for column in ("kafka", "view", "low", "high")]
        return (
            sums.repartition(parts, "name")
            .groupBy("name", "source", "day", "note")
            .agg(*map(expr, added))
            .where("kafka <> view OR low <> 0 OR high <> 0 OR note <> ''")
            .mapInArrow(judge, JUDGED)
        )


def _kafka_sums(work: Assignment, slices: Iterable[Slice]) -> Iterator[tuple[object, ...]]:
    tally: Tally[tuple[str, str, int]] = Tally()
    for records, rows in replay(work, slices):
        partition, headers = str(records.partition), records.headers
        offsets, times, keys, values = records.offsets, records.times, records.keys, records.values
        for i, _, name, fields in rows:
            head = headers[i] if headers is not None else None
            prints = fingerprint(partition, offsets[i], times[i], keys[i], head, values[i] or b"", fields)
            tally.add((name, partition, times[i] // DAY_MS), *prints)
        if len(tally.rows) > MOST_KEYS:
            yield from ((*key, n, 0, low, high, "") for key, (n, low, high) in tally.rows.items())
            tally = Tally()
    yield from ((*key, n, 0, low, high, "") for key, (n, low, high) in tally.rows.items())


def _view_sums(work: Assignment, mine: Sequence[int], parts: int, now_ms: int) -> Iterator[tuple[object, ...]]:
    """Yield the negative sums of the view's events, and the findings of its logs, for some parts of the view."""
    names = days = events = repeats = 0
    with closing(work.open()) as shards:
        for part in mine:
            for examined in work.copy.examine(work, shards, part, parts, now_ms):
                names, days, repeats = names + 1, days + examined.days, repeats + examined.repeats
                for (partition, day), (n, low, high) in examined.tally.rows.items():
                    events += n
                    yield examined.name, partition, day, 0, n, -low, -high, ""
                for finding in examined.findings:
                    yield finding.name, "", 0, 0, 0, 0, 0, msgspec.json.encode(finding).decode()
    yield TOTALS, "", 0, names, events, days, repeats, "totals"


def _judge(
    work: Assignment, now_ms: int, most: int | None, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Turn sums that do not cancel out into findings, except for events that the view has dropped on purpose."""
    totals = {"names": 0, "days": 0, "events": 0, "repeats": 0, "expired": 0, "findings": 0}
    left = most if most is not None else 1 << 62
    unlisted: set[tuple[str, ...]] = set()
    with closing(work.open()) as shards:
        for batch in batches:
            findings: list[Finding] = []
            differing: list[Mapping[str, Any]] = []
            for row in batch.to_pylist():
                if row["name"] == TOTALS:
                    for field, column in (("names", "kafka"), ("events", "view"), ("days", "low"), ("repeats", "high")):
                        totals[field] += row[column]
                elif row["note"]:
                    findings.append(_decode_finding(row["note"]))
                elif may_have_dropped(row, work.copy.kept_since(row["name"], now_ms)):
                    totals["expired"] += row["kafka"] - row["view"]
                else:
                    differing.append(row)
            for row, finding in work.copy.explain(shards, differing, now_ms):
                if finding is None:
                    totals["expired"] += row["kafka"] - row["view"]
                elif finding.place not in unlisted:
                    findings.append(finding)
                    if finding.kind == "unlisted":  # once for all days of the name
                        unlisted.add(finding.place)
            totals["findings"] += len(findings)
            reported, left = findings[:left], max(0, left - len(findings))
            yield arrow_batch(JUDGED, (msgspec.structs.astuple(finding) for finding in reported))
    yield arrow_batch(JUDGED, [(TOTALS, "", "", "", 0, 0, msgspec.json.encode(totals).decode())])


def _sum_batches(rows: Iterator[tuple[object, ...]]) -> Iterator[pa.RecordBatch]:
    while chunk := list(islice(rows, 10_000)):
        yield arrow_batch(SUMS, chunk)

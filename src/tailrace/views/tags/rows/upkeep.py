"""Audits of tags that rest in Cassandra: their rows against Kafka, and the numbers of each source against the shard's.

It is one Spark job, as with the views that rest in Valkey: fingerprints of Kafka's records are added up, and those of
the rows taken away. How far sources have come is read before the marks, and the marks before the rows: so the rows up
to the marks have at least those numbers, and what was written since is not missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any
from zlib import crc32

import msgspec
import pyarrow as pa

from tailrace.config import Settings
from tailrace.log.event import Source
from tailrace.log.name import shard_of
from tailrace.log.segment import DAY_MS, day_text
from tailrace.upkeep.audit import JUDGED, SUMS, TOTALS, Audit, Auditing, Auditor, batch_of, kafka_places, sums_of
from tailrace.upkeep.examine import MOST_ODD, Finding, Tally, fingerprint, noted
from tailrace.upkeep.job import milliseconds
from tailrace.upkeep.spark import Assignment, Wanted
from tailrace.valkey.marks import NOTHING, parse_marks, read_marks
from tailrace.valkey.shards import Shards
from tailrace.views.tags.anchor import read_all_numbers
from tailrace.views.tags.cleaned import Cleanings
from tailrace.views.tags.rows.cassandra import CassandraOptions
from tailrace.views.tags.rows.numbering import AGAIN, RowNumbers
from tailrace.views.tags.rows.row_walk import Rows
from tailrace.views.tags.rows.store import Narrow, Row
from tailrace.views.tags.stamp import ms_of
from tailrace.views.tags.store import VIEW, read_numbers

AUDIT_PAGE = 1000
MOST_LATE = 100_000
"""Rows of numbers that were there already which a task looks up; of more, each counts as one too many."""

_decode_finding = msgspec.json.Decoder(Finding).decode


class RowAudit(Audit, frozen=True):
    """What an audit of rows found."""

    repeats: int = 0
    """Rows of an event that is there already, under the same number: readers pass over them."""

    def facts(self) -> dict[str, object]:
        """What there is to report."""
        return {**super().facts(), "repeats": self.repeats}


class RowAuditing(Auditing):
    """One run of an audit; what it found is in ``found``.

    Args:
        pattern: Only tags that match.
        spark: A session that has Kafka's connector; one is started, and ended, without it.
        stopped: Whether to give up at the next opportunity.

    Raises:
        BadRequest: The pattern is none.
    """

    def __init__(self, settings: Settings, **given: Any) -> None:
        super().__init__(settings, VIEW, **given)
        self.found = RowAudit(VIEW)

    def _require(self, settings: Settings, view: str) -> None:
        """Rows are compared here, wherever logs are."""

    def _is_written(self, shards: Shards) -> bool:
        return any(read_marks(shards, VIEW))

    def _auditor(self, spark: Any) -> Auditor:
        return RowAuditor(self._settings, spark, VIEW, self._clock, self._stopped)


class RowAuditor(Auditor):
    """Runs the job over rows."""

    _repeats = 0

    def _look(self, shards: Shards, wanted: Wanted) -> Audit:
        found = super()._look(shards, wanted)
        fields = {name: getattr(found, name) for name in Audit.__struct_fields__}
        return RowAudit(**fields, repeats=self._repeats)

    def _rows(self, shards: Shards, wanted: Wanted, most: int | None) -> tuple[list[Any], Assignment]:
        rows, work = super()._rows(shards, wanted, most)
        totals = (msgspec.json.decode(row.detail) for row in rows if row.kind == TOTALS)
        self._repeats = sum(each["repeats"] for each in totals)
        return rows, work

    def _job(self, work: Assignment, most: int | None) -> Any:
        from pyspark.sql.functions import expr

        keep, now = self._settings.tags.keep, self._clock()
        since_ms = 0 if keep is None else now - milliseconds(keep)
        parts = 2 * int(self._spark.sparkContext.defaultParallelism)

        def kafka_side(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from sums_of(kafka_places(work, batches))

        def view_side(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            mine = {i for batch in batches for i in batch.column(0).to_pylist()}
            yield from sums_of(_row_places(work, lambda tag: crc32(tag.encode()) % parts in mine, since_ms))

        def judge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from _judge(since_ms, most, batches)

        sums = self._spark.range(0, parts, 1, parts).mapInArrow(view_side, SUMS)
        records = self.history.records(work.extent)
        if records is not None:
            sums = sums.unionAll(records.mapInArrow(kafka_side, SUMS))
        added = [f"sum({column}) AS {column}" for column in ("kafka", "view", "low", "high")]
        return (
            sums.repartition(parts, "name")
            .groupBy("name", "source", "day", "note")
            .agg(*map(expr, added))
            .where("kafka <> view OR low <> 0 OR high <> 0 OR note <> ''")
            .mapInArrow(judge, JUDGED)
        )


# What tasks do.


class RowTally(Tally[tuple[str, int]]):
    """What was found in the rows of one tag."""

    def __init__(self) -> None:
        super().__init__()
        self.events = 0
        self.repeats = 0
        self.findings: list[Finding] = []


def rests_in(work: Assignment) -> CassandraOptions:
    """Return where the rows are."""
    found = work.plan.tags.cassandra
    assert found is not None
    return found


def _row_places(work: Assignment, mine: Callable[[str], bool], since_ms: int) -> Iterator[tuple[object, ...]]:
    """Yield the sums of rows, taken away, and what is wrong with their numbers, for some of the tags."""
    wanted = work.wanted.test()
    names = days = events = repeats = 0
    shards = work.open()
    try:
        with Rows(rests_in(work)) as rows:
            for tag in rows.tags():
                if not mine(tag) or not wanted(tag):
                    continue
                names += 1
                days += len({bucket.start_ms // DAY_MS for bucket in rows.buckets(tag)})
                found = _examine(work, shards, rows, tag, since_ms)
                events, repeats = events + found.events, repeats + found.repeats
                for (source, day), (n, low, high) in found.rows.items():
                    yield tag, source, day, 0, n, -low, -high, ""
                for finding in found.findings:
                    yield tag, "", 0, 0, 0, 0, 0, msgspec.json.encode(finding).decode()
    finally:
        shards.close()
    yield TOTALS, "", 0, names, events, days, repeats, "totals"


def _examine(work: Assignment, shards: Shards, rows: Rows, tag: str, since_ms: int) -> RowTally:
    shard = shard_of(tag, shards.options.shards)
    given = {pid: each.number for pid, each in read_all_numbers(shards, shard, tag).items()}
    (answer,) = shards.run_all([(shard, ("HGETALL", shards.keys.marks(shard, VIEW)))])
    marks, bounds, gone = parse_marks(answer), work.extent.shards[shard], work.cleaned.get(tag, {})
    numbers, tally = RowNumbers(), RowTally()
    late: list[tuple[Row, tuple[int, int]]] = []
    for row in rows.rows(tag):
        if not _is_told(row, marks, gone):
            continue
        place = str(row.place)
        first, last = bounds.get(row.place, (0, NOTHING))
        note = noted(row.pid, row.seq, row.tags)
        sums = (0, 0)
        if first <= row.offset <= last:
            sums = fingerprint(place, row.offset, row.time_ms, row.key, row.headers, row.value or b"", note)
        what = numbers.take(row.pid, row.tag_seq, ms_of(row.stamp), (place, row.offset))
        if what == AGAIN and len(late) < MOST_LATE:
            late.append((msgspec.structs.replace(row, value=None, headers=[]), sums))
        elif first <= row.offset <= last:
            tally.add((place, row.time_ms // DAY_MS), *sums)
            tally.events += 1
    if numbers.is_doubtful:
        for each in rows.narrow(tag):
            if _is_told(each, marks, gone):
                numbers.recall(each.pid, each.tag_seq, (str(each.place), each.offset))
    for row, sums in late:
        if numbers.is_repeat(row.pid, row.tag_seq):
            tally.repeats += 1
        elif any(sums):
            tally.add((str(row.place), row.time_ms // DAY_MS), *sums)
            tally.events += 1
    tally.findings += islice(_misnumbered(tag, numbers, since_ms), MOST_ODD)
    tally.findings += islice(_miscounted(shards, shard, tag, numbers.ends(), given, since_ms), MOST_ODD)
    return tally


def _is_told(row: Narrow, marks: Mapping[Source, int], gone: Cleanings) -> bool:
    """Whether readers are shown a row: its partition's mark has passed it, and its source was not taken out."""
    if row.offset > marks.get(row.place, row.offset):
        return False
    return row.pid not in gone or not gone[row.pid].covers(str(row.place), row.offset)


def _misnumbered(tag: str, numbers: RowNumbers, since_ms: int) -> Iterator[Finding]:
    """Yield numbers that are missing, or there for two events, or not in the order of stamps."""
    for pid, number, events in numbers.conflicts():
        told = ", ".join(f"{place}:{offset}" for place, offset in events[:3])
        yield Finding("conflict", tag, "", pid, 1, len(events), f"number {number} is that of {told}")
    for gap in numbers.gaps():
        if gap.before_ms < since_ms:
            continue  # they may have expired
        told = f"number {gap.last + 1} comes after {gap.first - 1}"
        yield Finding("numbers", tag, day_text(gap.ms), gap.pid, gap.first, gap.last + 1, told)
    for pid in numbers.disordered():
        yield Finding("order", tag, "", pid, detail="its numbers are not in the order of their stamps")


def _miscounted(
    shards: Shards, shard: int, tag: str, ends: dict[str, int], given: Mapping[str, int], since_ms: int
) -> Iterator[Finding]:
    """Yield sources whose last row has not the number that the shard says they have come to."""
    wrong = [pid for pid, last in ends.items() if last != given.get(pid, 0)]
    for at in range(0, len(wrong), AUDIT_PAGE):
        part = wrong[at : at + AUDIT_PAGE]
        (known,) = read_numbers(shards, [(shard, tag, part)])
        for pid, now in zip(part, known, strict=True):
            last, before = ends[pid], given.get(pid, 0)
            # The shard may have gone on since its numbers were read, and the rows with it.
            if before <= last <= now.number or (last < before and now.ms < since_ms):
                continue
            if not now.place:
                continue  # somebody else wrote it: nothing was given out
            told = f"the last row has number {last}, and the shard has given out {now.number}"
            yield Finding("numbers", tag, "", pid, now.number, last, told)


def _judge(since_ms: int, most: int | None, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Say what each place that does not cancel out is: a finding, or rows that may have expired."""
    totals = {"names": 0, "days": 0, "events": 0, "repeats": 0, "expired": 0, "findings": 0}
    left = most if most is not None else 1 << 62
    for batch in batches:
        found: list[Finding] = []
        for row in batch.to_pylist():
            if row["name"] == TOTALS:
                for field, column in (("names", "kafka"), ("events", "view"), ("days", "low"), ("repeats", "high")):
                    totals[field] += row[column]
            elif row["note"]:
                found.append(_decode_finding(row["note"]))
            elif row["kafka"] > row["view"] and row["day"] * DAY_MS < since_ms:
                totals["expired"] += row["kafka"] - row["view"]
            else:
                found.append(_compared(row))
        totals["findings"] += len(found)
        told, left = found[:left], max(0, left - len(found))
        yield batch_of(JUDGED, ((f.kind, f.name, f.day, f.source, f.expected, f.found, f.detail) for f in told))
    yield batch_of(JUDGED, [(TOTALS, "", "", "", 0, 0, msgspec.json.encode(totals).decode())])


def _compared(row: dict[str, Any]) -> Finding:
    expected, found = row["kafka"], row["view"]
    kind = "missing" if found < expected else "extra" if found > expected else "different"
    detail = {
        "missing": "Kafka has more",
        "extra": "Kafka has fewer, or there are rows of one event under several numbers",
        "different": "as many as in Kafka, but not the same, or not with the same tags",
    }[kind]
    return Finding(kind, row["name"], day_text(row["day"] * DAY_MS), row["source"], expected, found, detail)

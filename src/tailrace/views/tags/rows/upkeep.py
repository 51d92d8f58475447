"""Audits of tags that rest in Cassandra: their rows against Kafka, and the numbers of each source against the shard's.

It is one Spark job, as with the views that rest in Valkey: fingerprints of Kafka's records are added up, and those of
the rows taken away. How far sources have come is read before the marks, and the marks before the rows: so the rows up
to the marks have at least those numbers, and what was written since is not missed.

Rows of tags for whoever has no event loop: a Spark task, or a command.

Invariant: a walk sees every row of a tag that was there when it began, once, in the order of stamps.

The job that takes a source's rows out of tags in Cassandra, while everything runs.

Up to where the source is taken out is remembered first, tag by tag; then its rows are deleted by their keys. Invariant:
rows beyond the marks stay, and so do all rows of other sources; the source's numbers go on after those that were taken
out; and a run that dies is completed by the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import TracebackType
from typing import Any, Final, TypeVar
from zlib import crc32

import msgspec
import pyarrow as pa

from tailrace.config.settings import Settings
from tailrace.log.event import Partition
from tailrace.log.name import shard_of
from tailrace.log.segment import DAY_MS, day_text
from tailrace.log.store import Staging
from tailrace.log.timeuuid import first_of, last_of, ms_of
from tailrace.upkeep import failpoint
from tailrace.upkeep.audit import JUDGED, SUMS, TOTALS, Audit, Auditing, Auditor, batch_of, kafka_places, sums_of
from tailrace.upkeep.examine import MOST_ODD, Finding, Tally, fingerprint, noted
from tailrace.upkeep.job import JobLease, milliseconds
from tailrace.upkeep.spark import Assignment, WantedNames
from tailrace.valkey.marks import NOTHING, parse_marks, read_marks
from tailrace.valkey.shards import Command, Shards
from tailrace.views.tags.model import Erasure, Erasures
from tailrace.views.tags.rows.cassandra import CassandraOptions
from tailrace.views.tags.rows.numbering import AGAIN, NumberCheck
from tailrace.views.tags.rows.reader import Bucket, RowReader
from tailrace.views.tags.rows.store import RowKey, StoredRow, writer
from tailrace.views.tags.store import VIEW, encode, read_erasures, read_progress, tag_options
from tailrace.views.tags.upkeep import CLEANED, Cleanup, TakingOut, read_all_numbers
from tailrace.views.tags.write import TagsPlan

WALK_PAGE: Final = 2_000
_FAR_MS: Final = 1 << 50

R = TypeVar("R", bound=RowKey)


class Rows:
    """Reads rows; blocks. Use as ``with``: the connections end with it.

    Raises:
        StoreUnavailable: Cassandra does not answer, or nobody has made the tables yet.
    """

    def __init__(self, options: CassandraOptions, page: int = WALK_PAGE) -> None:
        self._reader, self._runner = RowReader(options, page=page), asyncio.Runner()

    def __enter__(self) -> Rows:
        self._runner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._reader.close())
        self._runner.__exit__(kind, error, trace)

    def tags(self) -> list[str]:
        """Return every tag that has a bucket, in order."""
        return self._runner.run(self._reader.tags())

    def buckets(self, tag: str) -> list[Bucket]:
        """Return the buckets of a tag, in order."""
        return self._runner.run(self._reader.buckets(tag))

    def rows(self, tag: str) -> Iterator[StoredRow]:
        """Yield all rows of a tag."""
        return self._each(self._reader.rows(tag, first_of(-_FAR_MS), last_of(_FAR_MS)))

    def narrow(self, tag: str) -> Iterator[RowKey]:
        """Yield the same rows without what they carry."""
        return self._each(self._reader.narrow(tag, first_of(-_FAR_MS), last_of(_FAR_MS)))

    def _each(self, pages: AsyncGenerator[list[R], None]) -> Iterator[R]:
        async def following() -> list[R]:
            return await anext(pages, [])

        try:
            while page := self._runner.run(following()):
                yield from page
        finally:
            self._runner.run(pages.aclose())


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

    def _look(self, shards: Shards, wanted: WantedNames) -> Audit:
        found = super()._look(shards, wanted)
        fields = {name: getattr(found, name) for name in Audit.__struct_fields__}
        return RowAudit(**fields, repeats=self._repeats)

    def _rows(self, shards: Shards, wanted: WantedNames, most: int | None) -> tuple[list[Any], Assignment]:
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
    found = work.plan.of(TagsPlan).options.cassandra
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
    marks, bounds, gone = parse_marks(answer), work.extent.shards[shard], work.erasures.get(tag, {})
    numbers, tally = NumberCheck(), RowTally()
    late: list[tuple[StoredRow, tuple[int, int]]] = []
    for row in rows.rows(tag):
        if not _is_told(row, marks, gone):
            continue
        place = str(row.partition)
        first, last = bounds.get(row.partition, (0, NOTHING))
        note = noted(row.source, row.seq, row.tags)
        sums = (0, 0)
        if first <= row.offset <= last:
            sums = fingerprint(place, row.offset, row.time_ms, row.key, row.headers, row.value or b"", note)
        what = numbers.take(row.source, row.tag_seq, ms_of(row.timeuuid), (place, row.offset))
        if what == AGAIN and len(late) < MOST_LATE:
            late.append((msgspec.structs.replace(row, value=None, headers=[]), sums))
        elif first <= row.offset <= last:
            tally.add((place, row.time_ms // DAY_MS), *sums)
            tally.events += 1
    if numbers.is_doubtful:
        for each in rows.narrow(tag):
            if _is_told(each, marks, gone):
                numbers.recall(each.source, each.tag_seq, (str(each.partition), each.offset))
    for row, sums in late:
        if numbers.is_repeat(row.source, row.tag_seq):
            tally.repeats += 1
        elif any(sums):
            tally.add((str(row.partition), row.time_ms // DAY_MS), *sums)
            tally.events += 1
    tally.findings += islice(_misnumbered(tag, numbers, since_ms), MOST_ODD)
    tally.findings += islice(_miscounted(shards, shard, tag, numbers.ends(), given, since_ms), MOST_ODD)
    return tally


def _is_told(row: RowKey, marks: Mapping[Partition, int], gone: Erasures) -> bool:
    """Whether readers are shown a row: its partition's mark has passed it, and its source was not taken out."""
    if row.offset > marks.get(row.partition, row.offset):
        return False
    return row.source not in gone or not gone[row.source].covers(str(row.partition), row.offset)


def _misnumbered(tag: str, numbers: NumberCheck, since_ms: int) -> Iterator[Finding]:
    """Yield numbers that are missing, or there for two events, or not in the order of stamps."""
    for pid, number, events in numbers.conflicts():
        told = ", ".join(f"{place}:{offset}" for place, offset in events[:3])
        yield Finding("conflict", tag, "", pid, 1, len(events), f"number {number} is that of {told}")
    for gap in numbers.gaps():
        if gap.before_ms < since_ms:
            continue  # they may have expired
        told = f"number {gap.last + 1} comes after {gap.first - 1}"
        yield Finding("numbers", tag, day_text(gap.ms), gap.source, gap.first, gap.last + 1, told)
    for pid in numbers.disordered():
        yield Finding("order", tag, "", pid, detail="its numbers are not in the order of their stamps")


def _miscounted(
    shards: Shards, shard: int, tag: str, ends: dict[str, int], given: Mapping[str, int], since_ms: int
) -> Iterator[Finding]:
    """Yield sources whose last row has not the number that the shard says they have come to."""
    wrong = [pid for pid, last in ends.items() if last != given.get(pid, 0)]
    for at in range(0, len(wrong), AUDIT_PAGE):
        part = wrong[at : at + AUDIT_PAGE]
        (known,) = read_progress(shards, [(shard, tag, part)])
        for pid, now in zip(part, known, strict=True):
            last, before = ends[pid], given.get(pid, 0)
            # The shard may have gone on since its numbers were read, and the rows with it.
            if before <= last <= now.number or (last < before and now.ms < since_ms):
                continue
            if not now.partition:
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


STEPS = ("cleaned", "rows-deleted")
"""The failpoints, in order."""
AT_ONCE = 2_000
TAGS_AT_ONCE = 500


class _Found(msgspec.Struct):
    """What a tag has of the source, up to the marks."""

    events: int = 0
    number: int = 0
    """The highest."""
    buckets: set[int] = msgspec.field(default_factory=set)
    places: set[Partition] = msgspec.field(default_factory=set)


class RowCleaning(TakingOut):
    """One run of the job; what became of each tag is in ``cleaned``.

    Args:
        source: Whose rows are deleted.
        tag: Out of one tag; None = out of all.
    """

    def __init__(
        self,
        settings: Settings,
        source: str,
        tag: str | None = None,
        *,
        reached: Callable[[str], None] = failpoint.reached,
    ) -> None:
        options = tag_options(settings).cassandra
        assert options is not None
        self._options: CassandraOptions = options
        super().__init__(source, tag, reached)
        self._batch = settings.tags.batch

    def look(self, shards: Shards) -> dict[str, object]:
        """Count what would be taken out, and change nothing.

        Raises:
            BadRequest: No such tag has events of the source.
        """
        marks = read_marks(shards, VIEW)
        with Rows(self._options) as rows:
            for tag in self._asked(tags_of(shards, rows, self._source)):
                found = _Found()
                for row in self._covered(rows, tag, marks[shard_of(tag, len(marks))]):
                    _count(found, row)
                self._note(Cleanup(tag, CLEANED, found.events, len(found.buckets)), "would be taken out")
        return self.facts()

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Take the source out.

        Raises:
            BadRequest: No such tag has events of the source.
            StaleUpkeep: Another process has taken over.
        """
        staging = Staging(shards, VIEW, lease.token)
        with Rows(self._options) as rows:
            for tag in self._asked(tags_of(shards, rows, self._source)):
                lease.check()
                marks = read_marks(shards, VIEW)[shard_of(tag, shards.options.shards)]
                found = _Found()
                for row in self._covered(rows, tag, marks):
                    _count(found, row)
                if found.events:
                    before = read_erasures(shards, [tag]).get(tag, {}).get(self._source, Erasure(0, {}))
                    places = {str(place): marks[place] for place in found.places}
                    gone = Erasure(max(before.number, found.number), {**before.marks, **places})
                    staging.record_erasure(tag, self._source, encode(gone))
                    self._reached("cleaned")
                    self._delete(rows, tag, marks, lease)
                self._note(Cleanup(tag, CLEANED, found.events, len(found.buckets)), "taken out")

    def _delete(self, rows: Rows, tag: str, marks: dict[Partition, int], lease: JobLease) -> None:
        store = writer(self._options, self._batch)
        covered = self._covered(rows, tag, marks)
        while some := list(islice(covered, AT_ONCE)):
            lease.check()
            store.delete(some)
            self._reached("rows-deleted")

    def _covered(self, rows: Rows, tag: str, marks: dict[Partition, int]) -> Iterator[RowKey]:
        """Yield the source's rows up to the marks."""
        for row in rows.narrow(tag):
            if row.source == self._source and row.offset <= marks.get(row.partition, NOTHING):
                yield row


def tags_of(shards: Shards, rows: Rows, source: str) -> Iterator[str]:
    """Yield the tags with rows that a source has come somewhere in."""
    tags = iter(rows.tags())
    while page := list(islice(tags, TAGS_AT_ONCE)):
        places = [shard_of(tag, shards.options.shards) for tag in page]
        commands: list[Command] = [
            (shard, ("HEXISTS", shards.keys.numbers(shard, tag), source))
            for shard, tag in zip(places, page, strict=True)
        ]
        yield from (tag for tag, has in zip(page, shards.run_all(commands), strict=True) if has)


def _count(found: _Found, row: RowKey) -> None:
    found.events += 1
    found.number = max(found.number, row.tag_seq)
    found.buckets.add(row.bucket_ms)
    found.places.add(row.partition)

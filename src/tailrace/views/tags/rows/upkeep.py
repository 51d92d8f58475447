"""Upkeep of tags in Cassandra: the audit of their rows, and erasing a source from them.

An audit compares rows with Kafka as that of logs does, and checks the numbers of each source. The last numbers of
sources are read before the marks, and the marks before the rows: so the rows up to the marks have at least those
numbers, and rows written since do not look like faults.

Erasing first stores, tag by tag, up to where the source is erased, then deletes its rows by their keys. Invariant: rows
beyond the marks stay, and so do rows of other sources; the source's numbers go on after the erased ones; and the next
run completes one that died.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from itertools import islice
from types import TracebackType
from typing import Final, TypeVar

import msgspec

from tailrace.config.settings import Settings
from tailrace.log.columns import TagFields
from tailrace.log.event import Partition
from tailrace.log.name import shard_of
from tailrace.log.segment import DAY_MS, day_text
from tailrace.log.store import Staging
from tailrace.log.timeuuid import first_of, last_of, ms_of
from tailrace.upkeep.copy import Assignment
from tailrace.upkeep.examine import MOST_ODD, PAGE, Erasures, Examined, Finding, Tally, fingerprint
from tailrace.upkeep.job import JobLease, failpoint
from tailrace.valkey.marks import NOTHING, parse_marks, read_marks
from tailrace.valkey.shards import Command, Shards
from tailrace.views.tags.rows.cassandra import CassandraOptions
from tailrace.views.tags.rows.numbering import AGAIN, NumberCheck
from tailrace.views.tags.rows.reader import Bucket, RowReader
from tailrace.views.tags.rows.store import RowKey, StoredRow, writer
from tailrace.views.tags.store import VIEW, read_progress, tag_options
from tailrace.views.tags.upkeep import ERASED, Erasing, TagErasure, read_all_numbers

STEPS = ("cleaned", "rows-deleted")
"""The failpoints of erasing, in order."""
AT_ONCE = 2_000
TAGS_AT_ONCE = 500
MOST_LATE = 100_000
"""Rows of repeated numbers that a task examines; each further one counts as an event."""
WALK_PAGE: Final = 2_000
_FAR_MS: Final = 1 << 50

R = TypeVar("R", bound=RowKey)


class Rows:
    """Reads rows and blocks, for Spark tasks and commands. Use as ``with``: the connections end with it.

    A walk yields every row of a tag that existed when it began, once, in the order of timestamps.

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
        """Yield the same rows without their contents."""
        return self._each(self._reader.row_keys(tag, first_of(-_FAR_MS), last_of(_FAR_MS)))

    def _each(self, pages: AsyncGenerator[list[R], None]) -> Iterator[R]:
        async def following() -> list[R]:
            return await anext(pages, [])

        try:
            while page := self._runner.run(following()):
                yield from page
        finally:
            self._runner.run(pages.aclose())


def examine(work: Assignment, shards: Shards, rows: Rows, tag: str, since_ms: int) -> Examined:
    """Read the rows of a tag, and compare their numbers with those of the shard.

    Args:
        since_ms: Time before which rows may have expired.
    """
    shard = shard_of(tag, shards.options.shards)
    issued = {source: each.number for source, each in read_all_numbers(shards, shard, tag).items()}
    (answer,) = shards.run_all([(shard, ("HGETALL", shards.keys.marks(shard, VIEW)))])
    marks, bounds, erased = parse_marks(answer), work.extent.shards[shard], work.erased.get(tag, {})
    numbers, tally, repeats = NumberCheck(), Tally[tuple[str, int]](), 0
    late: list[tuple[StoredRow, tuple[int, int]]] = []
    for row in rows.rows(tag):
        if not _is_visible(row, marks, erased):
            continue
        label = str(row.partition)
        first, last = bounds.get(row.partition, (0, NOTHING))
        sums = row_print(row) if first <= row.offset <= last else (0, 0)
        order = numbers.take(row.source, row.tag_seq, ms_of(row.timeuuid), (label, row.offset))
        if order == AGAIN and len(late) < MOST_LATE:
            late.append((msgspec.structs.replace(row, value=None, headers=[]), sums))
        elif first <= row.offset <= last:
            tally.add((label, row.time_ms // DAY_MS), *sums)
    if numbers.is_doubtful:
        for each in rows.narrow(tag):
            if _is_visible(each, marks, erased):
                numbers.recall(each.source, each.tag_seq, (str(each.partition), each.offset))
    for row, sums in late:
        if numbers.is_repeat(row.source, row.tag_seq):
            repeats += 1
        elif any(sums):
            tally.add((str(row.partition), row.time_ms // DAY_MS), *sums)
    findings = [
        *islice(_misnumbered(tag, numbers, since_ms), MOST_ODD),
        *islice(_miscounted(shards, shard, tag, numbers.ends(), issued, since_ms), MOST_ODD),
    ]
    days = len({bucket.start_ms // DAY_MS for bucket in rows.buckets(tag)})
    return Examined(tag, days, tally, findings, repeats)


def row_print(row: StoredRow) -> tuple[int, int]:
    """Return the fingerprint of a row's event."""
    fields = TagFields(row.source, row.seq, 0, 0, row.tags)
    return fingerprint(str(row.partition), row.offset, row.time_ms, row.key, row.headers, row.value or b"", fields)


def _is_visible(row: RowKey, marks: Mapping[Partition, int], erased: Erasures) -> bool:
    """Return whether readers see a row: its partition's mark has passed it, and it was not erased."""
    if row.offset > marks.get(row.partition, row.offset):
        return False
    return row.source not in erased or not erased[row.source].covers(str(row.partition), row.offset)


def _misnumbered(tag: str, numbers: NumberCheck, since_ms: int) -> Iterator[Finding]:
    """Yield numbers that are missing, that two events have, or that are not in the order of timestamps."""
    for source, number, events in numbers.conflicts():
        ids = ", ".join(f"{label}:{offset}" for label, offset in events[:3])
        yield Finding("conflict", tag, "", source, 1, len(events), f"number {number} is that of {ids}")
    for gap in numbers.gaps():
        if gap.before_ms < since_ms:
            continue  # they may have expired
        detail = f"number {gap.last + 1} comes after {gap.first - 1}"
        yield Finding("numbers", tag, day_text(gap.ms), gap.source, gap.first, gap.last + 1, detail)
    for source in numbers.disordered():
        yield Finding("order", tag, "", source, detail="its numbers are not in the order of their stamps")


def _miscounted(
    shards: Shards, shard: int, tag: str, ends: dict[str, int], issued: Mapping[str, int], since_ms: int
) -> Iterator[Finding]:
    """Yield sources whose last row has another number than the last that the shard has given out."""
    wrong = [source for source, last in ends.items() if last != issued.get(source, 0)]
    for at in range(0, len(wrong), PAGE):
        part = wrong[at : at + PAGE]
        (numbers,) = read_progress(shards, [(shard, tag, part)])
        for source, now in zip(part, numbers, strict=True):
            last, before = ends[source], issued.get(source, 0)
            # The shard may have gone on since its numbers were read, and the rows with it.
            if before <= last <= now.number or (last < before and now.ms < since_ms):
                continue
            if not now.partition:
                continue  # another program wrote it: the shard has given out no number
            detail = f"the last row has number {last}, and the shard has given out {now.number}"
            yield Finding("numbers", tag, "", source, now.number, last, detail)


class _SourceRows(msgspec.Struct):
    """The rows of the source in a tag, up to the marks."""

    events: int = 0
    number: int = 0
    """The highest."""
    buckets: set[int] = msgspec.field(default_factory=set)
    partitions: set[Partition] = msgspec.field(default_factory=set)


class RowErasing(Erasing):
    """Erases a source from rows."""

    def __init__(
        self,
        settings: Settings,
        source: str,
        tag: str | None = None,
        *,
        reached: Callable[[str], None] = failpoint,
    ) -> None:
        options = tag_options(settings).cassandra
        assert options is not None
        self._options: CassandraOptions = options
        super().__init__(source, tag, reached)
        self._batch = settings.tags.batch

    def look(self, shards: Shards) -> dict[str, object]:
        marks = read_marks(shards, VIEW)
        with Rows(self._options) as rows:
            for tag in self._wanted(tags_of(shards, rows, self._source)):
                found = self._count(rows, tag, marks[shard_of(tag, len(marks))])
                self._add(TagErasure(tag, ERASED, found.events, len(found.buckets)), "would be erased")
        return self.facts()

    def run(self, shards: Shards, lease: JobLease) -> None:
        staging = Staging(shards, VIEW, lease.token)
        with Rows(self._options) as rows:
            for tag in self._wanted(tags_of(shards, rows, self._source)):
                lease.check()
                marks = read_marks(shards, VIEW)[shard_of(tag, shards.options.shards)]
                found = self._count(rows, tag, marks)
                if found.events:
                    last = {str(partition): marks[partition] for partition in found.partitions}
                    self._remember(shards, staging, tag, found.number, last)
                    self._delete(rows, tag, marks, lease)
                self._add(TagErasure(tag, ERASED, found.events, len(found.buckets)), "erased")

    def _count(self, rows: Rows, tag: str, marks: Mapping[Partition, int]) -> _SourceRows:
        found = _SourceRows()
        for row in self._covered(rows, tag, marks):
            found.events += 1
            found.number = max(found.number, row.tag_seq)
            found.buckets.add(row.bucket_ms)
            found.partitions.add(row.partition)
        return found

    def _delete(self, rows: Rows, tag: str, marks: Mapping[Partition, int], lease: JobLease) -> None:
        store = writer(self._options, self._batch)
        covered = self._covered(rows, tag, marks)
        while some := list(islice(covered, AT_ONCE)):
            lease.check()
            store.delete(some)
            self._reached("rows-deleted")

    def _covered(self, rows: Rows, tag: str, marks: Mapping[Partition, int]) -> Iterator[RowKey]:
        """Yield the source's rows up to the marks."""
        for row in rows.narrow(tag):
            if row.source == self._source and row.offset <= marks.get(row.partition, NOTHING):
                yield row


def tags_of(shards: Shards, rows: Rows, source: str) -> Iterator[str]:
    """Yield the tags with rows in which a source has been given numbers."""
    tags = iter(rows.tags())
    while page := list(islice(tags, TAGS_AT_ONCE)):
        places = [shard_of(tag, shards.options.shards) for tag in page]
        commands: list[Command] = [
            (shard, ("HEXISTS", shards.keys.numbers(shard, tag), source))
            for shard, tag in zip(places, page, strict=True)
        ]
        yield from (tag for tag, has in zip(page, shards.run_all(commands), strict=True) if has)

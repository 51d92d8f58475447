"""Upkeep of tags in Cassandra: the audit of their rows, and erasing a source from them.

An audit compares rows with Kafka as that of logs does, and checks the numbers of each source. The last numbers of
sources are read before the marks, and the marks before the rows: so the rows up to the marks have at least those
numbers, and rows written since do not look like faults.

Erasing first stores, tag by tag, up to where the source is erased, then deletes its rows by their keys. Invariant: rows
beyond the marks stay, and so do rows of other sources; the source's numbers go on after the erased ones; and the next
run completes one that died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, TypeAlias

import msgspec

from tailrace.config.settings import Settings
from tailrace.log.event import Partition, shard_of
from tailrace.log.run import TagFields
from tailrace.log.segment import DAY_MS, day_text
from tailrace.log.store import Staging
from tailrace.log.timeuuid import ms_of
from tailrace.upkeep.copy import Assignment
from tailrace.upkeep.examine import MOST_ODD, PAGE, Erasures, Examined, Finding, Tally, fingerprint
from tailrace.upkeep.job import JobLease, failpoint
from tailrace.valkey.marks import NOTHING, parse_marks, read_marks
from tailrace.valkey.shards import Shards
from tailrace.views.tags.model import Erasure
from tailrace.views.tags.rows.cassandra import CassandraOptions
from tailrace.views.tags.rows.model import RowKey, StoredRow
from tailrace.views.tags.rows.store import RowWalk, writer
from tailrace.views.tags.store import VIEW, read_all_progress, read_progress, tags_of
from tailrace.views.tags.upkeep import ERASED, Erasing, SourceEvents

STEPS = ("cleaned", "rows-deleted")
"""The failpoints of erasing, in order."""
AT_ONCE = 2_000
MOST_LATE = 100_000
"""Rows of repeated numbers that a task examines; each further one counts as an event."""
IN_ORDER, FILLS, AGAIN = "in-order", "fills", "again"
"""Verdicts on a row: the next of its source, perhaps after a gap; a number missing before; a number seen before."""

_Event: TypeAlias = tuple[str, int]
"""A partition, as text, and an offset."""


class MissingNumbers(NamedTuple):
    """A range of missing numbers of a source."""

    source: str
    first: int
    last: int
    before_ms: int
    """Millisecond of the row before them."""
    ms: int
    """Millisecond of the row after them."""


class _Source(msgspec.Struct):
    last: int
    ms: int
    missing: dict[int, tuple[int, int]] | None = None
    """Missing numbers, each with the milliseconds before and after it."""


class NumberCheck:
    """Checks the numbers of one tag's rows, which come in the order of timeuuids.

    The caller passes all rows to ``take``, and if some were ``AGAIN``, all of them once more to ``recall``. A row may
    exist twice: written, not applied, and written again with a later timeuuid. Then it has the same number and is the
    same event: a repeat, which readers ignore. Two events with one number are a conflict. Invariant: a row that is
    neither in order nor fills a gap does not count as an event.

    Args:
        most_missing: Missing numbers of all sources that are tracked one by one; a larger gap is reported as a whole.
    """

    def __init__(self, most_missing: int = 100_000) -> None:
        self._sources: dict[str, _Source] = {}
        self._room = most_missing
        self._wide: list[MissingNumbers] = []
        self._doubtful: dict[tuple[str, int], set[_Event]] = {}
        self.late: set[str] = set()
        """Sources with a number that came once, after a higher one."""

    def take(self, source: str, number: int, ms: int, event: _Event) -> str:
        known = self._sources.get(source)
        if known is None:
            self._sources[source] = _Source(number, ms)
            return IN_ORDER
        if number > known.last:
            if number > known.last + 1:
                self._note_gap(source, known, number, ms)
            known.last, known.ms = number, ms
            return IN_ORDER
        if known.missing and number in known.missing:
            del known.missing[number]
            self._room += 1
            self.late.add(source)
            return FILLS
        self._doubtful.setdefault((source, number), set()).add(event)
        return AGAIN

    def _note_gap(self, source: str, known: _Source, number: int, ms: int) -> None:
        first, n = known.last + 1, number - known.last - 1
        if n > self._room:
            self._wide.append(MissingNumbers(source, first, number - 1, known.ms, ms))
            return
        self._room -= n
        known.missing = known.missing or {}
        known.missing |= dict.fromkeys(range(first, number), (known.ms, ms))

    @property
    def is_doubtful(self) -> bool:
        """True if rows were ``AGAIN``, so that all rows must be passed to ``recall``."""
        return bool(self._doubtful)

    def recall(self, source: str, number: int, event: _Event) -> None:
        """Note the event of a number that occurs more than once."""
        events = self._doubtful.get((source, number))
        if events is not None:
            events.add(event)

    def conflicts(self) -> Iterator[tuple[str, int, list[_Event]]]:
        """Yield source, number and events of each number that several events have."""
        for (source, number), events in self._doubtful.items():
            if len(events) > 1:
                yield source, number, sorted(events)

    def is_repeat(self, source: str, number: int) -> bool:
        """Return True if a row that was ``AGAIN`` is the same event as the others with its number."""
        return len(self._doubtful[source, number]) == 1

    def disordered(self) -> list[str]:
        """Return the sources whose numbers are not in the order of timeuuids, except those with repeats.

        A first writing that was cut short lacks some rows; then their numbers come late.
        """
        repeated = {source for source, _ in self._doubtful}
        return sorted(self.late - repeated)

    def gaps(self) -> Iterator[MissingNumbers]:
        yield from self._wide
        for source, known in self._sources.items():
            begin = None
            missing = known.missing or {}
            for number in missing:
                begin = number if begin is None else begin
                if number + 1 not in missing or missing[number + 1] != missing[begin]:
                    yield MissingNumbers(source, begin, number, *missing[begin])
                    begin = None

    def ends(self) -> dict[str, int]:
        return {source: known.last for source, known in self._sources.items()}


def examine(work: Assignment, shards: Shards, rows: RowWalk, tag: str, since_ms: int) -> Examined:
    """Read the rows of a tag, and compare their numbers with those of the shard.

    Args:
        since_ms: Time before which rows may have expired.
    """
    shard = shard_of(tag, shards.options.shards)
    issued = {source: each.number for source, each in read_all_progress(shards, shard, tag).items()}
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
        super().__init__(source, tag, reached)
        self._options, self._batch = CassandraOptions.of(settings.cassandra), settings.tags.batch

    def look(self, shards: Shards) -> dict[str, object]:
        with RowWalk(self._options) as self._rows:
            return super().look(shards)

    def run(self, shards: Shards, lease: JobLease) -> None:
        with RowWalk(self._options) as self._rows:
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
        store, covered = writer(self._options, self._batch), self._covered(tag, found.marks)
        while some := list(islice(covered, AT_ONCE)):
            lease.check()
            store.delete(some)
            self._reached("rows-deleted")
        return ERASED

    def _covered(self, tag: str, marks: Mapping[Partition, int]) -> Iterator[RowKey]:
        """Yield the source's rows up to the marks."""
        for row in self._rows.narrow(tag):
            if row.source == self._source and row.offset <= marks.get(row.partition, NOTHING):
                yield row

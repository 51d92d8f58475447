"""Matches: every record goes to the log of each search that it matches, as its coordinates and its size.

A match is an event of its own: it has the record's place and time, and for a value the record's size. What the record
says is kept beside, once for all searches (``views/grep/store.py``, ``keep``), and in Kafka. The bucket of a match is
the day in which it was found, by the store's clock, and not that of the record: matches are kept for readers that come
back, and what was found in records of last year is as new to them as all else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from tailrace.config.settings import Settings
from tailrace.driver.plan import Plan
from tailrace.driver.slice import AppliedMarks, Slice, Window, Writer
from tailrace.log.event import home_of
from tailrace.log.name import shard_of
from tailrace.log.run import Run, encode
from tailrace.log.segment import DAY_MS
from tailrace.query import FilterSet, Query, Record
from tailrace.query.predicate import TopicFilter
from tailrace.query.value import document_reader
from tailrace.valkey.shards import Arg, Shards
from tailrace.views.grep.model import SearchLife
from tailrace.views.grep.store import VIEW, KeptRecords, SearchRegistry, keep_records

KEPT_MS = 3_600_000
"""How long what matched records say is kept, at most; then it is read from Kafka."""
LATEST_BUCKET = 1 << 53
"""The start of a bucket that is later than all: ``apply`` takes the latest that it allows."""
MERGE_FROM = 1_000
MERGE_MS = 3_600_000
"""A log with so many entries begins another segment with the next hour, so that upkeep need not wait for the day's end
to merge them. One with fewer keeps to one segment a day: a segment takes more memory than a few entries do."""
MOST_ROWS = 20_000
"""Matches that one call carries, about."""


class SearchSet:
    """Searches that are asked together, each once: those over one topic, or those that a chunk is scanned for."""

    def __init__(self, lives: Sequence[SearchLife]) -> None:
        self._set = FilterSet()
        self._names: dict[int, str] = {}
        self._queries: dict[int, Query] = {}
        self._asks_record = False
        for name, life in {life.name: life for life in lives}.items():
            query = life.search.compiled()
            number = self._set.add(query)
            self._names[number], self._queries[number] = name, query
            self._asks_record |= query.asks_record
        self._read = document_reader(self._set.fields())

    def find(self, records: Slice) -> dict[str, list[int]]:
        """Return the rows that each search matches, by the name of its log. Tombstones and poison match nothing."""
        found: dict[str, list[int]] = {}
        if not self._names:
            return found
        if len(self._queries) == 1:
            return self._find_one(records, *self._queries.items())
        names, match, read = self._names, self._set.match, self._read
        for i, value in enumerate(records.values):
            if value is None or (records.poison and i in records.poison):
                continue
            record = records.record(i) if self._asks_record else None
            try:
                document = read(value)
            except (ValueError, RecursionError):
                numbers = self._one_by_one(value, record)
            else:
                numbers = match(document, record)
            for number in numbers:
                rows = found.get(names[number])
                if rows is None:
                    found[names[number]] = [i]
                else:
                    rows.append(i)
        return found

    def _find_one(self, records: Slice, asked: tuple[int, Query]) -> dict[str, list[int]]:
        """Ask the only search there is: what tells many apart costs more than asking one."""
        number, query = asked
        matches, read, poison, asks_record = query.matches, self._read, records.poison, self._asks_record
        rows: list[int] = []
        for i, value in enumerate(records.values):
            if value is None or (poison and i in poison):
                continue
            try:
                if matches(read(value), records.record(i) if asks_record else None):
                    rows.append(i)
            except (ValueError, RecursionError):
                continue  # a number beyond all measure, in a field that it asks for
        return {self._names[number]: rows} if rows else {}

    def _one_by_one(self, value: bytes, record: Record | None) -> Iterator[int]:
        """Ask each search for itself about a value that holds a number beyond all measure.

        Those that do not ask for the field it is in are not concerned, whatever others ask for.
        """
        for number, query in self._queries.items():
            with suppress(ValueError, RecursionError):
                if query.matches(document_reader(query.fields())(value), record):
                    yield number


class GrepPlan(msgspec.Struct, frozen=True):
    """What tasks must know to write the matches of searches."""

    future_ms: int = 600_000
    """How far beyond the store's clock a bucket may lie."""
    kept_bytes: int = 0
    """How many bytes of matched records are kept for each partition."""
    name: str = VIEW

    @classmethod
    def of(cls, settings: Settings) -> GrepPlan:
        """Return the plan that the settings give."""
        return cls(round(settings.days.future_limit.total_seconds() * 1000), settings.grep.kept)

    def writer(self, plan: Plan) -> Writer:
        """Make the writer."""
        return GrepWriter(
            plan.store.shards, future_ms=self.future_ms, kept_bytes=self.kept_bytes, window_runs=plan.window_runs
        )


class GrepWriter(Writer):
    """One log per search that is alive."""

    name = VIEW
    span_ms = DAY_MS

    def __init__(self, shards: int, *, future_ms: int, kept_bytes: int, window_runs: int = 500) -> None:
        self._shards, self._kept_bytes, self._runs = shards, kept_bytes, window_runs
        self.future_ms = future_ms
        self._registry = SearchRegistry()
        self._topics: dict[str, TopicFilter] = {}
        self._standing: dict[str, SearchSet] = {}
        self._found: dict[int, tuple[Slice, dict[str, list[int]]]] = {}

    def load(self, shards: Shards, work: Sequence[tuple[Slice, AppliedMarks]]) -> None:
        """Read which searches are alive now that these records are here, and ask them; keep what was matched."""
        known = {id(records) for records, _ in work} & self._found.keys()
        if len(known) == len(work):
            return  # the same records again: what was found stays found
        if self._registry.refresh(shards):
            self._standing.clear()
            self._topics = {name: life.search.topic_pattern() for name, life in self._registry.lives.items()}
        self._found = {id(records): (records, self.over(records.partition.topic).find(records)) for records, _ in work}
        kept = [
            kept_records(records, found, home_of(records.partition, self._shards), str(records.partition))
            for records, found in self._found.values()
            if found
        ]
        if kept and self._kept_bytes:
            keep_records(shards, kept, self._kept_bytes, KEPT_MS)

    def over(self, topic: str) -> SearchSet:
        """Return the searches over a topic."""
        standing = self._standing.get(topic)
        if standing is None:
            lives = [self._registry.lives[name] for name, topics in self._topics.items() if topic in topics]
            standing = self._standing[topic] = SearchSet(lives)
        return standing

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return the windows of a slice; only shards with matches get any."""
        _, found = self._found[id(records)]
        windows: list[Window] = []
        by_shard: dict[int, dict[str, list[int]]] = {}
        for name, rows in found.items():
            by_shard.setdefault(shard_of(name, self._shards), {})[name] = rows
        for shard, names in by_shard.items():
            windows += append_windows(shard, records, names, marks[shard], self._runs)
        return windows


def kept_records(records: Slice, found: Mapping[str, list[int]], shard: int, shelf: str) -> KeptRecords:
    """Return all records that anybody matched, as they are kept."""
    rows = sorted(set().union(*found.values()))
    run = Run.of(
        records.partition,
        [records.offsets[i] for i in rows],
        [records.times[i] for i in rows],
        [records.keys[i] for i in rows],
        None if records.headers is None else [records.headers[i] for i in rows],
        [records.values[i] or b"" for i in rows],
    )
    return KeptRecords(shard, shelf, records.offsets[rows[-1]], len(rows), encode(run))


def append_windows(
    shard: int, records: Slice, names: Mapping[str, list[int]], mark: int, most: int
) -> Iterator[Window]:
    """Yield the windows that append matches to the logs of one shard: cut by offset, so that none is too large."""
    begin, end = 0, len(records)
    while begin < end:
        rows = {
            name: [i for i in each if begin <= i < end and records.offsets[i] > mark] for name, each in names.items()
        }
        rows = {name: each for name, each in rows.items() if each}
        if not rows:
            begin, end = end, len(records)
            continue
        if end - begin > 1 and (len(rows) > most or sum(map(len, rows.values())) > MOST_ROWS):
            end = (begin + end) // 2
            continue
        items: list[Arg] = ["C", "in", sum(map(len, rows.values())), "R", MERGE_FROM, MERGE_MS]
        for name, each in rows.items():
            newest = max(records.times[i] for i in each)
            items += ["A", name, LATEST_BUCKET, len(each), newest, encode(matches_as_run(records, each))]
        yield Window(shard, records.offsets[end - 1], items)
        begin, end = end, len(records)


def matches_as_run(records: Slice, rows: Sequence[int]) -> Run:
    """Return matches as a run: the coordinates and times of records, and their sizes for values."""
    values: list[Any] = [b"%d" % len(records.values[i] or b"") for i in rows]
    return Run.of(
        records.partition, [records.offsets[i] for i in rows], [records.times[i] for i in rows], [None], None, values
    )

"""The writer of matches: it appends each record's coordinates and size to the log of every search that it matches.

A match is an event with the record's coordinates and time; its value is the size of the record's value. The record
itself is kept for a while, once for all searches (``store.keep_records``), and is in Kafka. The bucket of a match is
the day on which it was found, by the store's clock, not the day of the record: readers that return need the matches
found since then, however old the records are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from tailrace.config.settings import Settings
from tailrace.driver.slice import AppliedMarks, Passes, Plan, Slice, Window, Writer
from tailrace.log.event import home_of, shard_of
from tailrace.log.run import Run, encode
from tailrace.log.segment import DAY_MS
from tailrace.query import FilterSet, Query, Record, prefilter
from tailrace.query.predicate import TopicFilter
from tailrace.query.value import document_reader
from tailrace.valkey.shards import Arg, Shards
from tailrace.views.grep.model import SearchLife
from tailrace.views.grep.store import VIEW, KeptRecords, SearchRegistry, keep_records

LATEST_BUCKET = 1 << 53
"""A bucket later than all: ``apply`` takes the latest that it allows."""
MERGE_FROM = 1_000
MERGE_MS = 3_600_000
"""A log with so many entries begins a new segment with the next hour, so that upkeep can merge them before the day
ends. A smaller log keeps one segment a day: a segment takes more memory than a few entries."""
MOST_ROWS = 20_000
"""About how many matches one call carries."""
PROBED = 100
"""Records that pass a prefilter before it is judged."""


class SearchSet:
    """Searches that are matched together: those over one topic, or those of a chunk."""

    def __init__(self, lives: Sequence[SearchLife]) -> None:
        queries = {life.name: life.search.compiled() for life in lives}
        # The set numbers its queries in their order.
        self._names, self._queries, self._set = list(queries), list(queries.values()), FilterSet(queries.values())
        self._asks_record = any(query.asks_record for query in self._queries)
        self._read = document_reader(self._set.fields())
        self._is_sifted = False

    def sieve(self) -> Passes | None:
        """Return a test of keys and values that every match passes, for ``find`` to be given what passes alone.

        Of a single search nothing else passes. A prefilter that lets most pass only costs time: it is left out.
        """
        likely: Passes | None = prefilter(self._queries)
        if len(self._queries) != 1 or self._asks_record:
            return likely
        self._is_sifted = True
        matches, read, asked, passed = self._queries[0].matches, self._read, 0, 0

        def passes(key: bytes | None, value: bytes) -> bool:
            nonlocal likely, asked, passed
            if likely is not None:
                asked += 1
                if not likely(key, value):
                    return False
                passed += 1
                if passed > PROBED and 2 * passed > asked:
                    likely = None
            try:
                return matches(read(value), None)
            except (ValueError, RecursionError):
                return False  # no JSON, or a number out of range in a field that the query reads

        return passes

    def find(self, records: Slice) -> dict[str, list[int]]:
        """Return the rows that each search matches, by the name of its log; tombstones and poison match nothing."""
        found: dict[str, list[int]] = {}
        if not self._names:
            return found
        if self._is_sifted:
            return {self._names[0]: list(range(len(records)))}
        if len(self._queries) == 1:
            return self._find_one(records, self._queries[0])
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
                found.setdefault(names[number], []).append(i)
        return found

    def _find_one(self, records: Slice, query: Query) -> dict[str, list[int]]:
        """Match a single search, without the cost of the index."""
        matches, read, poison, asks_record = query.matches, self._read, records.poison, self._asks_record
        rows: list[int] = []
        for i, value in enumerate(records.values):
            if value is None or (poison and i in poison):
                continue
            try:
                if matches(read(value), records.record(i) if asks_record else None):
                    rows.append(i)
            except (ValueError, RecursionError):
                continue  # a number out of range, in a field that the query reads
        return {self._names[0]: rows} if rows else {}

    def _one_by_one(self, value: bytes, record: Record | None) -> Iterator[int]:
        """Match each search by itself against a value with a number out of range.

        Searches that do not read that field can still match.
        """
        for number, query in enumerate(self._queries):
            with suppress(ValueError, RecursionError):
                if query.matches(document_reader(query.fields())(value), record):
                    yield number


class GrepPlan(msgspec.Struct, frozen=True):
    future_ms: int = 600_000
    """Longest distance of a bucket from the store's clock."""
    kept_bytes: int = 0
    """Bytes of matched records kept per partition."""
    name: str = VIEW

    @classmethod
    def of(cls, settings: Settings) -> GrepPlan:
        return cls(round(settings.days.future_limit.total_seconds() * 1000), settings.grep.kept)

    def writer(self, plan: Plan) -> Writer:
        return GrepWriter(self, plan)


class GrepWriter(Writer):
    """Writes one log per live search."""

    name = VIEW
    span_ms = DAY_MS

    def __init__(self, grep: GrepPlan, plan: Plan) -> None:
        self._shards, self._kept_bytes, self._runs = plan.store.shards, grep.kept_bytes, plan.window_runs
        self.future_ms = grep.future_ms
        self._registry = SearchRegistry()
        self._topics: dict[str, TopicFilter] = {}
        self._by_topic: dict[str, SearchSet] = {}
        self._found: dict[int, tuple[Slice, dict[str, list[int]]]] = {}

    def load(self, shards: Shards, work: Sequence[tuple[Slice, AppliedMarks]]) -> None:
        """Read which searches are alive after these records were read, match them, and keep the matched records."""
        matched = {id(records) for records, _ in work} & self._found.keys()
        if len(matched) == len(work):
            return  # the same records again
        if self._registry.refresh(shards):
            self._by_topic.clear()
            self._topics = {name: life.search.topic_filter() for name, life in self._registry.lives.items()}
        self._found = {id(records): (records, self.over(records.partition.topic).find(records)) for records, _ in work}
        kept = [
            kept_records(records, found, home_of(records.partition, self._shards), str(records.partition))
            for records, found in self._found.values()
            if found
        ]
        if kept and self._kept_bytes:
            keep_records(shards, kept, self._kept_bytes)

    def over(self, topic: str) -> SearchSet:
        searches = self._by_topic.get(topic)
        if searches is None:
            lives = [self._registry.lives[name] for name, topics in self._topics.items() if topic in topics]
            searches = self._by_topic[topic] = SearchSet(lives)
        return searches

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return the windows of a slice, for shards with matches only."""
        _, found = self._found[id(records)]
        windows: list[Window] = []
        by_shard: dict[int, dict[str, list[int]]] = {}
        for name, rows in found.items():
            by_shard.setdefault(shard_of(name, self._shards), {})[name] = rows
        for shard, names in by_shard.items():
            windows += append_windows(shard, records, names, marks[shard], self._runs)
        return windows


def kept_records(records: Slice, found: Mapping[str, list[int]], shard: int, shelf: str) -> KeptRecords:
    """Return the records of a slice that any search matched."""
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
    """Yield the windows that append matches to the logs of one shard, cut by offset to a limited size."""
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
    """Return matches as a run whose values are the sizes of the records' values."""
    values: list[Any] = [b"%d" % len(records.values[i] or b"") for i in rows]
    return Run.of(
        records.partition, [records.offsets[i] for i in rows], [records.times[i] for i in rows], [None], None, values
    )

"""Tags in the pipeline: the writer in its tasks, and the hooks of its driver.

The writer appends every event to the log of each of its tags, with its number among its source's events.
A task reads the progress of the sources in its slice and numbers the events. The shard compares that progress with its
own before it applies the window, so numbers have no gaps and no duplicates, whoever else writes. With Cassandra the
rows are written before the shard applies the window. They are computed from the records and the progress alone, so
writing them again changes nothing; and readers ignore rows beyond the shard's mark.

A reader of rows waits for partitions whose floor is behind. A partition without new records would keep its floor, so
the driver raises the floors of all partitions that are applied to their end.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from tailrace.config.settings import Settings
from tailrace.config.values import milliseconds
from tailrace.driver.hooks import Start, Times, ViewDriver
from tailrace.driver.slice import AppliedMarks, Plan, Slice, Window, Writer
from tailrace.driver.watermark import Timing
from tailrace.errors import BrokerUnavailable
from tailrace.log.event import Partition, event_id, home_of, shard_of
from tailrace.log.run import Run, TagColumns, TagFields, encode
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import make_timeuuid
from tailrace.valkey.marks import LONG_AGO, read_times
from tailrace.valkey.shards import Arg, Shards
from tailrace.views.tags.model import MANY_TAGS, SourceProgress, TaggedEvent, Tagger, timeuuid_ms
from tailrace.views.tags.settings import CassandraSettings, TagsSettings
from tailrace.views.tags.store import VIEW, introduce_partitions, raise_floors, read_conflicts, read_progress

if TYPE_CHECKING:
    from tailrace.views.tags.rows.model import StoredRow

logger = logging.getLogger(__name__)

MAX_PROGRESS = 2_000
"""About how many values of progress, each of one source in one tag, one call compares and writes."""
SHOWN_CONFLICTS = 20

_Progress: TypeAlias = dict[str, dict[str, SourceProgress]]
"""Progress by tag and source."""
_encode = msgspec.json.Encoder().encode


class TagsPlan(msgspec.Struct, frozen=True):
    """The settings that tasks need to tag events and to store them."""

    tags: TagsSettings = TagsSettings()
    bucket_future_ms: int = 600_000
    """A bucket may begin this much after the store's clock."""
    cassandra: CassandraSettings | None = None
    """None if the events are in Valkey."""
    name: str = VIEW

    @classmethod
    def of(cls, settings: Settings) -> TagsPlan:
        rows = settings.cassandra if settings.tags.store == "cassandra" else None
        return cls(settings.tags, milliseconds(settings.days.future_limit), rows)

    @property
    def future_ms(self) -> int:
        """A timeuuid may be ahead of the clock by this much."""
        return milliseconds(self.tags.future_limit)

    def writer(self, plan: Plan) -> Writer:
        return TagsWriter(self, plan)


class _TaggedSlice(NamedTuple):
    """A slice with the tags of its events, and the reasons why others have none, by row."""

    records: Slice
    events: dict[int, TaggedEvent]
    skipped: dict[int, str]


class _TagEvents(NamedTuple):
    """The events of a window in one tag, column by column."""

    rows: list[int]
    numbers: list[int]
    timeuuids: list[int]
    """Milliseconds, which never fall."""


class TagsWriter(Writer):
    """Writes one log per tag, to Valkey or to Cassandra."""

    name = VIEW
    keeps_times = True

    def __init__(self, tags: TagsPlan, plan: Plan, clock: Callable[[], float] = time.time) -> None:
        self._plan, self._shards, self._epoch, self._clock = tags, plan.store.shards, plan.epoch, clock
        self.shares_times = tags.cassandra is not None  # the driver raises them for readers of rows
        self.span_ms = milliseconds(tags.tags.span)
        self.future_ms = max(tags.bucket_future_ms, tags.future_ms)
        self._tagger = Tagger(tags.tags)
        # The limit holds for bytes on the wire; events compress about eightfold.
        self._max_bytes, self._max_runs = plan.window_bytes * 8, plan.window_runs
        self._slices: dict[int, _TaggedSlice] = {}
        self._progress: _Progress = {}
        """Includes events of windows that are cut but not applied."""
        self._floors: dict[int, list[int]] = {}
        """Floor of each slice's partition in every shard."""
        self._refused_rows: dict[tuple[str, str, int], StoredRow] = {}
        """Rows that were written for refused windows, by tag, partition and offset."""

    def load(self, shards: Shards, work: Sequence[tuple[Slice, AppliedMarks]]) -> None:
        """Tag the events of the slices, and read the progress of their sources."""
        before, self._slices = self._slices, {}
        self._floors = {}
        wanted: dict[str, dict[str, None]] = {}
        for records, applied in work:
            tagged = before.get(id(records))
            if tagged is None or tagged.records is not records:
                tagged = self._tag(records)
            self._slices[id(records)] = tagged
            self._floors[id(records)] = [ms for ms, _ in applied.times]
            for i, event in tagged.events.items():
                for shard, tags in _by_shard(event.tags, self._shards):
                    if records.offsets[i] > applied.marks[shard]:
                        for tag in tags:
                            wanted.setdefault(tag, {})[event.source] = None
        if self._plan.cassandra is not None:
            self._introduce(shards, work)
        requests = [(shard_of(tag, self._shards), tag, list(sources)) for tag, sources in wanted.items()]
        self._progress = {
            tag: dict(zip(sources, progress, strict=True))
            for (_, tag, sources), progress in zip(requests, read_progress(shards, requests), strict=True)
        }

    def _introduce(self, shards: Shards, work: Sequence[tuple[Slice, AppliedMarks]]) -> None:
        """Introduce partitions that are new in a shard, before a row of them is written."""
        new = [
            (shard, records)
            for records, applied in work
            for shard, (ms, _) in enumerate(applied.times)
            if ms == LONG_AGO[0]
        ]
        wanted = [(shard, [str(records.partition)]) for shard, records in new]
        floors = introduce_partitions(shards, self._epoch, wanted)
        for (shard, records), (ms,) in zip(new, floors, strict=True):
            self._floors[id(records)][shard] = ms

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return the windows of a slice. Call after ``load``; slices cut later continue its numbers."""
        tagged, floors = self._slices[id(records)], self._floors[id(records)]
        offsets, times, values = records.offsets, records.times, records.values
        latest = round(self._clock() * 1000) + self._plan.future_ms
        windows: list[Window] = []
        shares: dict[int, _ShardWindow] = {}
        begin, end, is_full = bisect_right(offsets, min(marks)), len(records), False
        for i in range(begin, end):
            event = tagged.events.get(i)
            if event is None:
                continue
            offset = offsets[i]
            for shard, tags in _by_shard(event.tags, self._shards):
                if offset <= marks[shard]:
                    continue
                share = shares.get(shard)
                if share is None:
                    share = shares[shard] = _ShardWindow(records.partition, floors[shard], self._progress, latest)
                share.add(i, offset, times[i], event, tags)
                share.size += len(tags) * len(values[i] or b"")
                is_full = (
                    is_full
                    or share.size > self._max_bytes
                    or share.changed >= MAX_PROGRESS
                    or len(share.events) > self._max_runs
                )
            if is_full:
                windows += self._windows(tagged, shares, begin, i + 1, marks)
                begin, is_full, shares = i + 1, False, {}
        if begin < end:
            windows += self._windows(tagged, shares, begin, end, marks)
        return windows

    def store(self, windows: Sequence[Window]) -> None:
        """Write the rows of windows to Cassandra; delete rows that an earlier attempt wrote under another key."""
        rows: list[StoredRow] = [row for window in windows for row in window.rows]
        if self._plan.cassandra is None or not rows:
            return
        from tailrace.views.tags.rows.store import writer

        store = writer(self._plan.cassandra, self._plan.tags.batch)
        store.write(rows)
        if self._refused_rows:
            keys = {(row.tag, row.clustering) for row in rows}
            refused = [self._refused_rows.pop((row.tag, str(row.partition), row.offset), None) for row in rows]
            store.delete([row for row in refused if row is not None and (row.tag, row.clustering) not in keys])

    def refused(self, window: Window, mark: int) -> None:
        """Remember the rows of a window that was not applied: the next attempt may number them differently."""
        for row in window.rows:
            if row.offset > mark:
                self._refused_rows[row.tag, str(row.partition), row.offset] = row

    def named(self, records: Slice) -> Iterator[tuple[int, int, str, TagFields]]:
        """Yield row, shard, tag and fields for every tag of every event."""
        for i, event in self._tag(records).events.items():
            fields = TagFields(event.source, event.seq, 0, 0, event.tags)
            for shard, tags in _by_shard(event.tags, self._shards):
                for tag in tags:
                    yield i, shard, tag, fields

    def _tag(self, records: Slice) -> _TaggedSlice:
        tagged: dict[int, TaggedEvent] = {}
        skipped: dict[int, str] = {}
        tagger = self._tagger
        is_wanted, asks_record, read = tagger.wants(records.partition.topic), tagger.asks_record, tagger.read
        for i, value in enumerate(records.values):
            if value is None:
                skipped[i] = "tombstone"
            elif i in records.poison:
                continue
            elif not is_wanted:
                skipped[i] = "no-tag"
            else:
                event = read(records.keys[i], value, records.offsets[i], records.record(i) if asks_record else None)
                if isinstance(event, str):
                    skipped[i] = event
                else:
                    tagged[i] = event
        return _TaggedSlice(records, tagged, skipped)

    def _windows(
        self, tagged: _TaggedSlice, shares: dict[int, _ShardWindow], begin: int, end: int, marks: Sequence[int]
    ) -> list[Window]:
        records = tagged.records
        home, last = home_of(records.partition, self._shards), records.offsets[end - 1]
        floors = self._floors[id(records)]
        windows: list[Window] = []
        for shard in {*shares, home}:
            if marks[shard] >= last:
                continue
            share = shares.get(shard)
            items: list[Arg] = share.progress_items() if share else []
            if share:
                floors[shard] = share.floor
                items += ["C", "in", sum(len(each.rows) for each in share.events.values()), *share.conflicts]
            if shard == home:
                items += self._counts(tagged, max(begin, bisect_right(records.offsets, marks[home])), end)
            rows: list[StoredRow] = []
            for tag, events in share.events.items() if share else ():
                if self._plan.cassandra is None:
                    items += self._runs(tagged, tag, events)
                else:
                    items += ["W", tag, "C", "stored", len(events.rows)]
                    rows += self._rows(tagged, tag, events)
            if items:
                windows.append(Window(shard, last, items, share.floor if share else None, rows))
        return windows

    def _counts(self, tagged: _TaggedSlice, begin: int, end: int) -> list[Arg]:
        """Return the counters that the home shard of the records adds up."""
        skipped = Counter(f"skipped:{why}" for i, why in tagged.skipped.items() if begin <= i < end)
        dead = sum(begin <= i < end for i in tagged.records.poison)
        events = [event for i, event in tagged.events.items() if begin <= i < end]
        counts = {
            "in": dead + skipped.total(),
            "dead": dead,
            **skipped,
            "events": len(events),
            "many-tags": sum(len(event.tags) > MANY_TAGS for event in events),
            "ignored": sum(event.ignored for event in events),
        }
        return [part for field, n in counts.items() if n for part in ("C", field, n)]

    def _runs(self, tagged: _TaggedSlice, tag: str, events: _TagEvents) -> list[Arg]:
        """Return the runs of a tag: one for each bucket."""
        items: list[Arg] = []
        span, timeuuids, begin = self.span_ms, events.timeuuids, 0
        while begin < len(timeuuids):
            start = bucket_start(timeuuids[begin], span)
            end = bisect_left(timeuuids, start + span, begin)
            run = self._run(tagged, _TagEvents(*(column[begin:end] for column in events)))
            items += ["A", tag, start, end - begin, timeuuids[end - 1], encode(run)]
            begin = end
        return items

    def _run(self, tagged: _TaggedSlice, events: _TagEvents) -> Run:
        records, rows = tagged.records, events.rows
        fields = [tagged.events[i] for i in rows]
        offsets, times = [records.offsets[i] for i in rows], [records.times[i] for i in rows]
        keys = [records.keys[i] for i in rows]
        return Run.of(
            records.partition,
            offsets,
            times,
            keys[:1] if keys.count(keys[0]) == len(keys) else keys,
            None if records.headers is None else [records.headers[i] for i in rows],
            [records.values[i] or b"" for i in rows],
            TagColumns.of_columns(
                [event.source for event in fields],
                [event.seq for event in fields],
                events.numbers,
                events.timeuuids,
                [event.tags for event in fields],
                offsets,
                times,
            ),
        )

    def _rows(self, tagged: _TaggedSlice, tag: str, events: _TagEvents) -> Iterator[StoredRow]:
        from tailrace.views.tags.rows.model import StoredRow

        records, span, headers = tagged.records, self.span_ms, tagged.records.headers
        for i, number, ms in zip(*events, strict=True):
            event = tagged.events[i]
            yield StoredRow(
                tag=tag,
                bucket_ms=bucket_start(ms, span),
                span_ms=span,
                timeuuid=make_timeuuid(ms, records.offsets[i], records.partition),
                source=event.source,
                tag_seq=number,
                seq=event.seq,
                partition=records.partition,
                offset=records.offsets[i],
                time_ms=records.times[i],
                key=records.keys[i],
                headers=headers[i] if headers is not None else [],
                value=records.values[i],
                tags=event.tags,
            )


@lru_cache(100_000)
def _by_shard(tags: tuple[str, ...], shards: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
    by_shard: dict[int, tuple[str, ...]] = {}
    for tag in tags:
        shard = shard_of(tag, shards)
        by_shard[shard] = (*by_shard.get(shard, ()), tag)
    return tuple(by_shard.items())


class _ShardWindow:
    """The part of a window that one shard applies: the events of its tags, numbered; it updates ``progress``."""

    def __init__(self, partition: Partition, floor: int, progress: _Progress, latest_ms: int) -> None:
        self._partition, self._label, self.floor, self._floor_before = partition, str(partition), floor, floor
        self._progress, self._latest_ms = progress, latest_ms
        self.events: dict[str, _TagEvents] = {}
        self.conflicts: list[Arg] = []
        self.changed = 0
        """Count of sources in tags whose progress changes."""
        self.size = 0
        """About the bytes of its events."""
        self._before: _Progress = {}

    def add(self, row: int, offset: int, time_ms: int, event: TaggedEvent, tags: Sequence[str]) -> None:
        """Number an event in its tags of this shard."""
        source, seq, label, progress = event.source, event.seq, self._label, self._progress
        known = [progress[tag][source] for tag in tags]
        self.floor = ms = timeuuid_ms(time_ms, self.floor, known, label, self._latest_ms)
        for tag, before in zip(tags, known, strict=True):
            number = before.number + 1
            if number > 1 and (conflict := before.conflict(seq, label)):
                at, last = event_id(self._partition, offset), {"seq": before.seq, "partition": before.partition}
                report = {"conflict": conflict, "tag": tag, "source": source, "seq": seq, "id": at, "before": last}
                self.conflicts += ["C", f"conflict:{conflict}", 1, "K", _encode(report)]
            events = self.events.get(tag)
            if events is None:
                events = self.events[tag] = _TagEvents([], [], [])
                self._before[tag] = {}
            if source not in self._before[tag]:
                self._before[tag][source] = before
                self.changed += 1
            progress[tag][source] = SourceProgress(number, seq, ms, label)
            rows, numbers, timeuuids = events
            rows.append(row)
            numbers.append(number)
            timeuuids.append(ms)

    def progress_items(self) -> list[Arg]:
        """Return the floor and the progress that the shard compares, and those that it then writes."""
        floor_before = str(self._floor_before) if self._floor_before > LONG_AGO[0] else ""
        items: list[Arg] = ["N", floor_before, self.floor, len(self._before)]
        for tag, sources in self._before.items():
            items += (tag, len(sources))
            for source, before in sources.items():
                after = self._progress[tag][source]
                items += (source, before.stored() if before.partition else b"", after.stored())
        return items


class TagsDriver(ViewDriver):
    times = Times.NONE

    def __init__(self, plan: TagsPlan) -> None:
        super().__init__(plan)
        self._cassandra = plan.cassandra
        self._warned: dict[str, int] = {}

    def prepare(self, start: Start) -> None:
        if self._cassandra is not None:
            from tailrace.views.tags.rows.cassandra import prepare

            prepare(self._cassandra, start.settings.tags.keep)

    def tick(self, start: Start, timing: Timing) -> None:
        """Raise the floors of partitions that are applied to their end, for readers of rows."""
        if self._cassandra is None:
            return
        try:
            timing.ask()
        except BrokerUnavailable:
            return  # floors wait for the broker
        shards = start.shards
        partitions, levels = timing.levels()
        known = read_times(shards, VIEW)
        if new := [str(partition) for partition in partitions - known.keys()]:
            introduce_partitions(shards, start.epoch, [(s, new) for s in range(shards.options.shards)])
        # Nothing more comes from a topic that is gone; if its name comes back, it is another topic.
        gone = dict.fromkeys(known.keys() - partitions, max(levels.values(), default=0))
        raise_floors(shards, start.epoch, gone | levels)

    def status(self, start: Start, counts: Mapping[str, int]) -> dict[str, Any]:
        """Warn of new conflicts and of events with many tags; return the latest conflicts."""
        odd = {field: n for field, n in counts.items() if field == "many-tags" or field.startswith("conflict:")}
        new = {field: n - self._warned.get(field, 0) for field, n in odd.items()}
        conflicts = read_conflicts(start.shards, SHOWN_CONFLICTS) if len(odd) > ("many-tags" in odd) else []
        if n := new.get("many-tags", 0):
            logger.warning("%d event(s) have more than 10 tags: each tag stores the event once more", n)
        if n := sum(n for field, n in new.items() if field.startswith("conflict:")):
            latest = conflicts[0] if conflicts else {}
            logger.warning("%d event(s) of sources that are written from two places; the latest: %s", n, latest)
        self._warned = odd
        return {"conflicts": conflicts}

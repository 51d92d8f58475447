"""Tags in the one pass: every event goes to the log of each of its tags, with its number among those of its source.

A task reads how far the sources of its slice have come in their tags, numbers the events, and the shard compares what
was read with what it has before it writes: so numbers have no gaps and no doubles, whoever else writes. With Cassandra
the rows are written before the shard is told. They are made of the record and of what was read, so writing them again
changes nothing; and readers look at none that the shard's mark has not passed.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tailrace.config.settings import Settings
from tailrace.driver.plan import Plan
from tailrace.driver.slice import AppliedMarks, Slice, Window, Writer
from tailrace.log.columns import TagColumns
from tailrace.log.event import Partition, event_id, home_of
from tailrace.log.name import shard_of
from tailrace.log.run import Run, encode
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import make_timeuuid
from tailrace.valkey.marks import LONG_AGO
from tailrace.valkey.shards import Arg, Shards
from tailrace.views.tags.model import MANY_TAGS, SourceProgress, TaggedEvent, Tagger, timeuuid_ms
from tailrace.views.tags.store import VIEW, TagOptions, introduce_partitions, read_progress, tag_options

if TYPE_CHECKING:
    from tailrace.views.tags.rows.store import StoredRow

NUMBERS = 2_000
"""Numbers that one call compares and writes, about; each is that of one source in one tag."""

_encode = msgspec.json.Encoder().encode


class _Looked(NamedTuple):
    """What was found in a slice."""

    records: Slice
    tagged: dict[int, TaggedEvent]
    skipped: dict[int, str]


class _Copies(NamedTuple):
    """The events of a window in one of their tags, column by column."""

    rows: list[int]
    numbers: list[int]
    stamps: list[int]
    """The milliseconds; they never fall."""


class TagsPlan(msgspec.Struct, frozen=True):
    """What tasks must know to tag events and to store them."""

    options: TagOptions = TagOptions()
    future_ms: int = 600_000
    """How far beyond the store's clock a bucket may lie."""
    name: str = VIEW

    @classmethod
    def of(cls, settings: Settings) -> TagsPlan:
        """Return the plan that the settings give."""
        return cls(tag_options(settings), round(settings.days.future_limit.total_seconds() * 1000))

    def writer(self, plan: Plan) -> Writer:
        """Make the writer."""
        return TagsWriter(
            plan.store.shards,
            self.options,
            future_ms=self.future_ms,
            epoch=plan.epoch,
            window_bytes=plan.window_bytes,
            window_runs=plan.window_runs,
        )


class TagsWriter(Writer):
    """One log per tag, in Valkey or in Cassandra."""

    name = VIEW
    keeps_times = True

    def __init__(
        self,
        shards: int,
        options: TagOptions,
        *,
        future_ms: int,
        epoch: int = 0,
        window_bytes: int = 256 << 10,
        window_runs: int = 500,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._shards, self._options, self._epoch, self._clock = shards, options, epoch, clock
        self.span_ms = options.span_ms
        self.future_ms = max(future_ms, options.future_ms)
        self._tagger = Tagger(options.tagging)
        # The limit holds for what is sent; events compress about eightfold.
        self._raw_bytes, self._runs = window_bytes * 8, window_runs
        self._looked: dict[int, _Looked] = {}
        self._numbers: dict[str, dict[str, SourceProgress]] = {}
        """How far each source has come, by tag."""
        self._floors: dict[int, list[int]] = {}
        self._homes: dict[tuple[str, ...], tuple[tuple[int, tuple[str, ...]], ...]] = {}
        self._doubtful: dict[tuple[str, str, int], StoredRow] = {}
        """Rows that were written for windows which were refused, by tag, partition and offset."""

    def load(self, shards: Shards, work: Sequence[tuple[Slice, AppliedMarks]]) -> None:
        """Look into the slices, and read how far their sources have come."""
        known, self._looked = self._looked, {}
        self._floors = {}
        wanted: dict[str, dict[str, None]] = {}
        for records, place in work:
            looked = known.get(id(records))
            if looked is None or looked.records is not records:
                looked = self._look(records)
            self._looked[id(records)] = looked
            self._floors[id(records)] = [ms for ms, _ in place.times]
            for i, event in looked.tagged.items():
                for shard, tags in self._at_home(event.tags):
                    if records.offsets[i] > place.marks[shard]:
                        for tag in tags:
                            wanted.setdefault(tag, {})[event.source] = None
        if self._options.cassandra is not None:
            self._introduce(shards, work)
        asked = [(shard_of(tag, self._shards), tag, list(pids)) for tag, pids in wanted.items()]
        self._numbers = {
            tag: dict(zip(pids, found, strict=True))
            for (_, tag, pids), found in zip(asked, read_progress(shards, asked), strict=True)
        }

    def _introduce(self, shards: Shards, work: Sequence[tuple[Slice, AppliedMarks]]) -> None:
        """Let readers know of partitions that are new, before anything of them is written."""
        new = [
            (shard, records)
            for records, place in work
            for shard, (ms, _) in enumerate(place.times)
            if ms == LONG_AGO[0]
        ]
        found = introduce_partitions(shards, self._epoch, [(shard, [str(records.source)]) for shard, records in new])
        for (shard, records), (ms,) in zip(new, found, strict=True):
            self._floors[id(records)][shard] = ms

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return the windows of a slice. Call after ``load``; what is numbered counts for the slices after it."""
        looked, floors = self._looked[id(records)], self._floors[id(records)]
        tagged, offsets, times, values = looked.tagged, records.offsets, records.times, records.values
        latest = round(self._clock() * 1000) + self._options.future_ms
        windows: list[Window] = []
        shares: dict[int, _Share] = {}
        begin, end, is_full = bisect_right(offsets, min(marks)), len(records), False
        for i in range(begin, end):
            event = tagged.get(i)
            if event is None:
                continue
            for shard, tags in self._at_home(event.tags):
                if offsets[i] <= marks[shard]:
                    continue
                share = shares.get(shard)
                if share is None:
                    share = shares[shard] = _Share(records.source, floors[shard])
                share.add(i, offsets[i], times[i], event, tags, self._numbers, latest)
                share.size += len(tags) * len(values[i] or b"")
                is_full = is_full or self._is_full(share)
            if is_full:
                windows += self._windows(looked, shares, begin, i + 1, marks)
                begin, is_full, shares = i + 1, False, {}
        if begin < end:
            windows += self._windows(looked, shares, begin, end, marks)
        return windows

    def store(self, windows: Sequence[Window]) -> None:
        """Write the rows of windows to Cassandra, and take back those that an earlier attempt wrote otherwise."""
        if self._options.cassandra is None:
            return
        rows: list[StoredRow] = [row for window in windows for row in window.rows]
        if not rows:
            return
        from tailrace.views.tags.rows.store import writer

        store = writer(self._options.cassandra, self._options.batch)
        store.write(rows)
        if self._doubtful:
            keys = {(row.tag, row.timeuuid, row.source, row.tag_seq) for row in rows}
            again = [self._doubtful.pop((row.tag, str(row.partition), row.offset), None) for row in rows]
            stale = [r for r in again if r is not None and (r.tag, r.timeuuid, r.source, r.tag_seq) not in keys]
            store.delete(stale)

    def refused(self, window: Window, mark: int) -> None:
        """Remember the rows of a window that nobody has applied: the next attempt may number them otherwise."""
        for row in window.rows:
            if row.offset > mark:
                self._doubtful[row.tag, str(row.partition), row.offset] = row

    # What is in a slice.

    def tagged(self, records: Slice) -> dict[int, TaggedEvent]:
        """Return the events of a slice that have tags, by row."""
        return self._look(records).tagged

    def named(self, records: Slice, tagged: Mapping[int, TaggedEvent] | None = None) -> Iterator[tuple[int, int, str]]:
        """Yield row, shard and tag of every event, as often as it has tags; ``tagged`` saves looking again."""
        for i, event in (self.tagged(records) if tagged is None else tagged).items():
            for shard, tags in self._at_home(event.tags):
                for tag in tags:
                    yield i, shard, tag

    def _look(self, records: Slice) -> _Looked:
        tagged: dict[int, TaggedEvent] = {}
        skipped: dict[int, str] = {}
        is_wanted, asks_record, read = (
            self._tagger.wants(records.source.topic),
            self._tagger.asks_record,
            self._tagger.read,
        )
        for i, value in enumerate(records.values):
            if value is None:
                skipped[i] = "tombstone"
            elif i in records.poison:
                continue
            elif not is_wanted:
                skipped[i] = "no-tag"
            else:
                found = read(records.keys[i], value, records.offsets[i], records.record(i) if asks_record else None)
                if isinstance(found, str):
                    skipped[i] = found
                else:
                    tagged[i] = found
        return _Looked(records, tagged, skipped)

    def _at_home(self, tags: tuple[str, ...]) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Return the shards of tags, each with those that are there."""
        found = self._homes.get(tags)
        if found is None:
            by_shard: dict[int, tuple[str, ...]] = {}
            for tag in tags:
                shard = shard_of(tag, self._shards)
                by_shard[shard] = (*by_shard.get(shard, ()), tag)
            if len(self._homes) > 100_000:
                self._homes.clear()
            found = self._homes[tags] = tuple(by_shard.items())
        return found

    def _is_full(self, share: _Share) -> bool:
        """Whether a shard has as much to write as one call should have."""
        return share.size > self._raw_bytes or len(share.copies) > self._runs or share.changed >= NUMBERS

    # What each shard has to write.

    def _windows(
        self, looked: _Looked, shares: dict[int, _Share], begin: int, end: int, marks: Sequence[int]
    ) -> list[Window]:
        records = looked.records
        home, last = home_of(records.source, self._shards), records.offsets[end - 1]
        floors = self._floors[id(records)]
        windows: list[Window] = []
        for shard in {*shares, home}:
            if marks[shard] >= last:
                continue
            share = shares.get(shard)
            items: list[Arg] = share.numbers(self._numbers) if share else []
            if share:
                floors[shard] = share.floor
                copies = sum(len(copies.rows) for copies in share.copies.values())
                items += ["C", "in", copies, *share.conflicts]
            if shard == home:
                items += self._books(looked, max(begin, bisect_right(records.offsets, marks[home])), end)
            rows: list[StoredRow] = []
            for tag, copies_of in share.copies.items() if share else ():
                if self._options.cassandra is None:
                    items += self._runs_of(looked, tag, copies_of)
                else:
                    items += ["W", tag, "C", "stored", len(copies_of.rows)]
                    rows += self._rows_of(looked, tag, copies_of)
            if items:
                windows.append(Window(shard, last, items, share.floor if share else None, rows))
        return windows

    def _books(self, looked: _Looked, begin: int, end: int) -> list[Arg]:
        """Return what the home shard of the records counts: those that have no tags, and how many have."""
        records = looked.records
        skipped: dict[str, int] = {}
        for i, why in looked.skipped.items():
            if begin <= i < end:
                skipped[why] = skipped.get(why, 0) + 1
        dead = sum(begin <= i < end for i in records.poison)
        tagged = [event for i, event in looked.tagged.items() if begin <= i < end]
        items: list[Arg] = []
        if lost := dead + sum(skipped.values()):
            items += ["C", "in", lost]
        if dead:
            items += ["C", "dead", dead]
        for why, n in skipped.items():
            items += ["C", f"skipped:{why}", n]
        if tagged:
            items += ["C", "events", len(tagged)]
        if many := sum(len(event.tags) > MANY_TAGS for event in tagged):
            items += ["C", "many-tags", many]
        if ignored := sum(event.ignored for event in tagged):
            items += ["C", "ignored", ignored]
        return items

    def _runs_of(self, looked: _Looked, tag: str, copies: _Copies) -> list[Arg]:
        """Return the runs of a tag: one, unless its bucket changes inside."""
        items: list[Arg] = []
        span, stamps, begin = self.span_ms, copies.stamps, 0
        while begin < len(stamps):
            end = bisect_left(stamps, bucket_start(stamps[begin], span) + span, begin)
            items += self._run(looked, tag, _Copies(*(column[begin:end] for column in copies)))
            begin = end
        return items

    def _run(self, looked: _Looked, tag: str, copies: _Copies) -> list[Arg]:
        records, rows = looked.records, copies.rows
        events = [looked.tagged[i] for i in rows]
        offsets, times = [records.offsets[i] for i in rows], [records.times[i] for i in rows]
        keys = [records.keys[i] for i in rows]
        run = Run.of(
            records.source,
            offsets,
            times,
            keys[:1] if keys.count(keys[0]) == len(keys) else keys,
            None if records.headers is None else [records.headers[i] for i in rows],
            [records.values[i] or b"" for i in rows],
            TagColumns.of_columns(
                [event.source for event in events],
                [event.seq for event in events],
                copies.numbers,
                copies.stamps,
                [event.tags for event in events],
                offsets,
                times,
            ),
        )
        newest = copies.stamps[-1]
        return ["A", tag, bucket_start(newest, self.span_ms), len(rows), newest, encode(run)]

    def _rows_of(self, looked: _Looked, tag: str, copies: _Copies) -> Iterator[StoredRow]:
        from tailrace.views.tags.rows.store import StoredRow

        records, span, headers = looked.records, self.span_ms, looked.records.headers
        for i, number, ms in zip(*copies, strict=True):
            event = looked.tagged[i]
            yield StoredRow(
                tag=tag,
                bucket_ms=bucket_start(ms, span),
                span_ms=span,
                timeuuid=make_timeuuid(ms, records.offsets[i], records.source),
                source=event.source,
                tag_seq=number,
                seq=event.seq,
                partition=records.source,
                offset=records.offsets[i],
                time_ms=records.times[i],
                key=records.keys[i],
                headers=headers[i] if headers is not None else [],
                value=records.values[i],
                tags=event.tags,
            )


class _Share:
    """What one shard gets of a window: the events of its tags, numbered."""

    def __init__(self, place: Partition, floor: int) -> None:
        self.partition, self._label, self.floor, self._was = place, str(place), floor, floor
        self.copies: dict[str, _Copies] = {}
        self.conflicts: list[Arg] = []
        self.changed = 0
        """How many numbers of sources."""
        self.size = 0
        """About the bytes of its events."""
        self._seen: dict[str, dict[str, SourceProgress]] = {}

    def add(
        self,
        row: int,
        offset: int,
        time_ms: int,
        event: TaggedEvent,
        tags: Sequence[str],
        numbers: dict[str, dict[str, SourceProgress]],
        latest_ms: int,
    ) -> None:
        """Number an event in the tags that it has here."""
        pid, seq, label = event.source, event.seq, self._label
        known = [numbers[tag][pid] for tag in tags]
        self.floor = ms = timeuuid_ms(time_ms, self.floor, known, label, latest_ms)
        for tag, before in zip(tags, known, strict=True):
            if wrong := before.conflict(seq, label):
                self.conflicts += ["C", f"conflict:{wrong}", 1, "K", self._told(wrong, tag, event, offset, before)]
            copies = self.copies.get(tag)
            if copies is None:
                copies, self._seen[tag] = self.copies.setdefault(tag, _Copies([], [], [])), {}
            if pid not in self._seen[tag]:
                self._seen[tag][pid] = before
                self.changed += 1
            numbers[tag][pid] = SourceProgress(before.number + 1, seq, ms, label)
            copies.rows.append(row)
            copies.numbers.append(before.number + 1)
            copies.stamps.append(ms)

    def numbers(self, now: dict[str, dict[str, SourceProgress]]) -> list[Arg]:
        """Return what the shard compares and writes: the floor, and how far sources have come."""
        seen = str(self._was) if self._was > LONG_AGO[0] else ""
        items: list[Arg] = ["N", seen, self.floor, len(self._seen)]
        for tag, sources in self._seen.items():
            items += (tag, len(sources))
            found = now[tag]
            for pid, before in sources.items():
                items += (pid, before.stored() if before.partition else b"", found[pid].stored())
        return items

    def _told(self, wrong: str, tag: str, event: TaggedEvent, offset: int, before: SourceProgress) -> bytes:
        return _encode(
            {
                "conflict": wrong,
                "tag": tag,
                "source": event.source,
                "seq": event.seq,
                "id": event_id(self.partition, offset),
                "before": {"seq": before.seq, "partition": before.partition},
            }
        )

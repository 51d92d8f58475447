"""The tags in Cassandra: opens feeds over their rows, and finds where each feed starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from datetime import timedelta
from heapq import nlargest
from uuid import UUID

import msgspec

from tailrace.config.settings import Settings
from tailrace.errors import BadRequest, CursorError, StreamNotFound
from tailrace.log.cursor import FromCursor, FromEnd, FromLast, FromTime
from tailrace.log.event import Partition
from tailrace.log.hub import Hub
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import last_of, ms_of, order
from tailrace.valkey.shards import Nodes
from tailrace.views.tags.feed import TagSummary
from tailrace.views.tags.request import FromStoreCursor, TagFilter, TagRequest
from tailrace.views.tags.rows.cassandra import CassandraOptions
from tailrace.views.tags.rows.cursor import BEGIN, MAX_TAGS, Reached, TagCursor, TagPosition, hashed_partition, room_for
from tailrace.views.tags.rows.feed import Pace, TagLine, TagRowsFeed, shows_row
from tailrace.views.tags.rows.gaps import GapTimeouts, ReadSettings
from tailrace.views.tags.rows.reader import RowReader
from tailrace.views.tags.rows.reading import ROOM_FOR_HELD
from tailrace.views.tags.rows.store import RowKey, StoredRow
from tailrace.views.tags.store import LevelReader, Levels

MAX_INSPECTED = 1_000_000
"""Rows of one tag that are inspected to find the last N that a request shows."""


class CassandraTags:
    """The ``TagStore`` of rows in Cassandra."""

    store = "cassandra"
    own_cursors = True

    def __init__(self, settings: Settings, nodes: Nodes, hub: Hub, clock: Callable[[], int]) -> None:
        tags = settings.tags
        self._hub, self._clock, self._levels = hub, clock, LevelReader(nodes)
        self._rows = RowReader(CassandraOptions.of(settings.cassandra))
        self._first = BEGIN if not tags.first_bucket else last_of(tags.first_ms - 1)
        self._scan_ms, self._future_ms = _ms(tags.offset_scan), _ms(tags.future_limit)
        delay_ms = _ms_or_none(tags.delay)
        self._pace = Pace(
            refresh_ms=_ms(tags.refresh), delay_ms=delay_ms, notify=tags.notify, fails=tags.on_missing == "fail"
        )
        self._read_settings = ReadSettings(
            delay_ms=delay_ms,
            future_ms=self._future_ms,
            span_ms=_ms(tags.span),
            timeouts=GapTimeouts(_ms(tags.gap_timeout), _ms(tags.new_source_scan), tags.max_missing),
            short_ms=_ms_or_none(tags.back_track),
            short_period_ms=_ms_or_none(tags.back_track_period),
            long_ms=_ms_or_none(tags.long_back_track),
            long_period_ms=_ms_or_none(tags.long_back_track_period),
            known_sources=tags.known_sources,
        )

    async def close(self) -> None:
        await self._rows.close()

    async def open(self, request: TagRequest) -> TagRowsFeed:
        if len(request.names) > MAX_TAGS:
            raise BadRequest(f"a feed over rows is over at most {MAX_TAGS} tags; this one has {len(request.names)}")
        if request.missing == "fail":
            for tag in request.names:
                if not await self._rows.buckets(tag):
                    raise StreamNotFound(tag)
        filters = [TagFilter(request, index) for index in range(len(request.names))]
        if request.mode == "all":
            request, filters = msgspec.structs.replace(request, names=request.names[:1]), filters[:1]
        levels = await self._levels.read(map(self._levels.shard_of, request.names))
        starts = await self._starts(request, filters, levels)
        from_beginning = all(start.low == self._first for start in starts)
        settings = msgspec.structs.replace(self._read_settings, room=room_for(len(request.names)))
        lines = [
            TagLine(
                *(tag, at, self._rows, self._levels, start, settings, self._clock),
                from_beginning=from_beginning,
            )
            for at, (tag, start) in enumerate(zip(request.names, starts, strict=True))
        ]
        if not from_beginning:
            for line, start in zip(lines, starts, strict=True):
                await self._expect(line, start, levels[line.shard])
        # A timeuuid may be ahead of the clock, but not of the floor of its partition.
        latest_ms = max([self._clock(), *(ms for each in levels.values() for ms in each.floors.values())])
        feed = TagRowsFeed(
            *(self._hub, self._levels, request, lines, filters, self._pace, self._clock, last_of(latest_ms))
        )
        await feed.begin()
        return feed

    async def is_at_end(self, tags: Sequence[str], mode: str, cursor: str) -> bool:
        names = tags[:1] if mode == "all" else tags
        positions = TagCursor.parse(cursor, len(names)).positions
        settings = msgspec.structs.replace(
            self._read_settings, delay_ms=0, future_ms=0, room=room_for(len(names)), short_ms=None
        )
        levels = await self._levels.read(map(self._levels.shard_of, names))
        for at, (tag, position) in enumerate(zip(names, positions, strict=True)):
            line = TagLine(tag, at, self._rows, self._levels, position, settings, self._clock)
            try:
                await line.begin(levels[line.shard])
                while line.is_reading and not line.ahead:
                    await line.read()
                if line.ahead or line.reading.is_waiting:
                    return False
            finally:
                await line.close()
        return True

    async def tags(self, prefix: str, after: str, limit: int) -> list[TagSummary]:
        tags = sorted((tag for tag in await self._rows.tags() if tag.startswith(prefix)), key=str.encode)
        page = [tag for tag in tags if not after or tag.encode() > after.encode()][:limit]
        summaries: list[TagSummary] = []
        for tag in page:
            if buckets := await self._rows.buckets(tag):
                last = max(bucket.start_ms + bucket.span_ms for bucket in buckets)
                summaries.append(TagSummary(tag, len(buckets), buckets[0].start_ms, last))
        return summaries

    async def _expect(self, line: TagLine, start: TagPosition, levels: Levels) -> None:
        """Look ahead for the first numbers of sources, where there are no floors and the start is in this bucket."""
        now_ms, span_ms = self._clock(), self._read_settings.span_ms
        if levels.floors or not self._scan_ms or ms_of(start.low) < bucket_start(now_ms, span_ms):
            return
        await asyncio.sleep(self._scan_ms / 1000)
        await line.expect(levels, start.low, last_of(self._clock()))

    # The start of a feed.

    async def _starts(
        self, request: TagRequest, filters: Sequence[TagFilter], levels: dict[int, Levels]
    ) -> list[TagPosition]:
        start, tags = request.start, request.names
        by_tag = [levels[self._levels.shard_of(tag)] for tag in tags]
        if isinstance(start, FromStoreCursor):
            return list(TagCursor.parse(start.text, len(tags)).positions)
        if isinstance(start, FromCursor):
            raise CursorError(
                "this is a cursor of tags in another store (see tags.store): begin anew, for example at a time"
            )
        if isinstance(start, FromEnd) or start == FromLast(0):
            room = room_for(len(tags))
            return [await self._end(tag, each, room) for tag, each in zip(tags, by_tag, strict=True)]
        if isinstance(start, FromTime):
            return [TagPosition(last_of(start.time_ms - 1))] * len(tags)
        if isinstance(start, FromLast):
            return await self._last(tags, filters, by_tag, start.count)
        return [TagPosition(self._first)] * len(tags)

    def _settled(self, levels: Levels) -> UUID:
        """Return the timeuuid up to which nothing more will be written."""
        now_ms = self._clock()
        return last_of(min(*levels.floors.values(), now_ms) - 1 if levels.floors else now_ms)

    async def _end(self, tag: str, levels: Levels, room: int) -> TagPosition:
        """Return the position after all committed rows; rows written later may have earlier timeuuids."""
        low = last = self._settled(levels)
        if not levels.floors:
            return TagPosition(low)
        reached: dict[str, Reached] = {}
        is_committed = _Committed(self._levels, tag, levels)
        async with aclosing(self._rows.row_keys(tag, low, self._latest())) as pages:
            async for rows in pages:
                for row in rows:
                    if await is_committed(row):
                        last = row.timeuuid
                        key = hashed_partition(row.partition)
                        reached[key] = Reached(key, row.offset, ms_of(row.timeuuid))
        return _after(low, reached, last, room)

    def _latest(self) -> UUID:
        return last_of(self._clock() + self._future_ms)

    async def _last(
        self, tags: Sequence[str], filters: Sequence[TagFilter], levels: Sequence[Levels], count: int
    ) -> list[TagPosition]:
        """Return the positions before the last ``count`` events of all tags that the request shows."""
        room = room_for(len(tags))
        lows = [self._settled(each) for each in levels]
        newest = [await self._newest(*each, count) for each in zip(tags, levels, lows, filters, strict=True)]
        shown_rows = [(order(rows[i].timeuuid), at, i) for at, (rows, shown) in enumerate(newest) for i in shown]
        first: dict[int, int] = {}
        for _, at, i in nlargest(count, shown_rows):
            first[at] = max(first.get(at, -1), i)
        return [
            _before(newest[at][0], first[at], lows[at], room) if at in first else await self._end(tag, levels[at], room)
            for at, tag in enumerate(tags)
        ]

    async def _newest(
        self, tag: str, levels: Levels, low: UUID, tag_filter: TagFilter, count: int
    ) -> tuple[list[StoredRow], list[int]]:
        """Return the newest committed rows of a tag, newest first, and the indexes of up to ``count`` that are shown.

        The rows go back at least to ``low``, the timeuuid up to which nothing more will be written, and one further.
        """
        rows: list[StoredRow] = []
        shown: list[int] = []
        is_committed = _Committed(self._levels, tag, levels)
        async with aclosing(self._rows.rows_down(tag, self._latest())) as pages:
            async for page in pages:
                for row in page:
                    if len(shown) >= count and order(row.timeuuid) <= order(low) and rows[-1].timeuuid != row.timeuuid:
                        return [*rows, row], shown
                    if not await is_committed(row):
                        continue
                    if len(shown) < count and shows_row(tag_filter, row):
                        shown.append(len(rows))
                    rows.append(row)
                if len(rows) >= MAX_INSPECTED:
                    return rows, [i for i in shown if i < len(rows) - 1]
        return rows, shown


class _Committed:
    """Tells of rows whether marks cover them; rows of partitions without marks are committed."""

    def __init__(self, reader: LevelReader, tag: str, levels: Levels) -> None:
        self._reader, self._shard, self._levels = reader, reader.shard_of(tag), levels
        self._unmarked: set[Partition] = set()

    async def __call__(self, row: RowKey) -> bool:
        partition, levels = row.partition, self._levels
        if partition in levels.marks or partition in levels.floors:
            return row.offset <= levels.marks.get(partition, -1)
        if partition not in self._unmarked:
            now = (await self._reader.read([self._shard]))[self._shard]
            if partition in now.marks or partition in now.floors:
                return False
            self._unmarked.add(partition)
        return True


def _before(rows: Sequence[StoredRow], first: int, low: UUID, room: int) -> TagPosition:
    """Return the position before ``rows[first]``; the rows are newest first and go back to ``low`` or to the start."""
    at = first + 1
    while at < len(rows) and rows[at].timeuuid == rows[first].timeuuid:
        at += 1
    if at == len(rows):
        return TagPosition(BEGIN)
    last = rows[at].timeuuid
    if order(last) <= order(low):
        return TagPosition(last)
    reached: dict[str, Reached] = {}
    for row in rows[at:]:
        if order(row.timeuuid) > order(low):
            key = hashed_partition(row.partition)
            reached.setdefault(key, Reached(key, row.offset, ms_of(row.timeuuid)))
    return _after(low, reached, last, room)


def _after(low: UUID, reached: dict[str, Reached], last: UUID, room: int) -> TagPosition:
    """Return the position at ``low`` with the partitions reached above it; at ``last`` if there are too many."""
    return TagPosition(low, tuple(reached.values())) if len(reached) <= room - ROOM_FOR_HELD else TagPosition(last)


def _ms(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)


def _ms_or_none(duration: timedelta | None) -> int | None:
    return None if duration is None else _ms(duration)

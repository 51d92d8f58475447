"""Tags in Cassandra: where a feed over their rows starts, and the feed itself, live after that.

A feed over several tags merges them by timeuuid as far as it has read. Invariant: from any cursor it yields exactly the
events after it that the request shows, each once, and each source's in its order within a tag; or it tells which
numbers of which source were not found in time. Each ``TagLine`` does the I/O for a ``Reading``. It reads marks and
floors before the rows, and asks again for the levels of unknown partitions after their rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from heapq import nlargest
from itertools import islice
from typing import TypeVar
from uuid import UUID

import msgspec

from tailrace.api.answers import Tag
from tailrace.config.settings import Settings
from tailrace.config.values import milliseconds
from tailrace.errors import BadRequest, CursorError, RowsMissing, Unavailable
from tailrace.log.cursor import MAX_CURSOR_BYTES, Cursor, FromCursor, FromEnd, FromLast, FromTime
from tailrace.log.event import iso_time
from tailrace.log.feed import BATCH_BYTES, OpenFeed
from tailrace.log.hub import Hub, woken
from tailrace.log.request import AnyFeed, AnyFrame, ControlFrame, EventFrame, Moved
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import last_of, ms_of, order
from tailrace.valkey.shards import Nodes
from tailrace.views.tags.feed import MAX_INSPECTED, TagStore
from tailrace.views.tags.model import FromStoreCursor, TagFilter, TagRequest, record_of
from tailrace.views.tags.rows.model import (
    BEGIN,
    MAX_TAGS,
    PartitionLevels,
    Reached,
    RowKey,
    StoredRow,
    TagPosition,
    hashed_partition,
    join_cursor,
    parse_positions,
    position_after,
    position_before,
    room_for,
)
from tailrace.views.tags.rows.reading import MIN_PAUSE_MS, Delivery, LostNumbers, Reading, ReadSettings, search_spans
from tailrace.views.tags.rows.store import RowReader
from tailrace.views.tags.store import LevelReader, Levels

logger = logging.getLogger(__name__)

POLL_MS = 250
"""Interval of reads while the feed waits for floors to rise, which nobody announces."""
MAX_RETRIES, RETRY_S = 40, 0.5
"""Reads from a store that does not answer, less and less often, for about a minute and a half."""

R = TypeVar("R", bound=RowKey)

_encode = msgspec.json.Encoder().encode


class CassandraTags(TagStore):
    own_cursors = True

    def __init__(self, settings: Settings, nodes: Nodes, hub: Hub, clock: Callable[[], int]) -> None:
        tags = settings.tags
        self._hub, self._clock, self._levels = hub, clock, LevelReader(nodes)
        self._rows = RowReader(settings.cassandra)
        self._first = BEGIN if not tags.first_bucket else last_of(tags.first_ms - 1)
        self._scan_ms = milliseconds(tags.offset_scan)
        self._settings = ReadSettings.of(tags)

    async def close(self) -> None:
        await self._rows.close()

    async def open(self, request: TagRequest) -> AnyFeed:
        if len(request.names) > MAX_TAGS:
            raise BadRequest(f"a feed over rows is over at most {MAX_TAGS} tags; this one has {len(request.names)}")
        return await super().open(request)

    async def _exists(self, tag: str) -> bool:
        return bool(await self._rows.buckets(tag))

    async def _feed(self, request: TagRequest, filters: Sequence[TagFilter]) -> TagRowsFeed:
        levels, room = await self._levels.read(request.names), room_for(len(request.names))
        starts = await self._starts(request, filters, levels, room)
        from_beginning = all(start.low == self._first for start in starts)
        settings = msgspec.structs.replace(self._settings, room=room)
        lines = [
            TagLine(self, tag, start, settings, from_beginning)
            for tag, start in zip(request.names, starts, strict=True)
        ]
        if not from_beginning:
            for line in lines:
                await self._expect(line, levels[line.tag])
        # A timeuuid may be ahead of the clock, but not of the floor of its partition.
        latest_ms = max([self._clock(), *(ms for each in levels.values() for ms in each.floors.values())])
        target = last_of(latest_ms)
        return TagRowsFeed(self, request, lines, filters, settings, target)

    async def is_at_end(self, names: Sequence[str], cursor: str) -> bool:
        positions = parse_positions(cursor, len(names))
        settings = msgspec.structs.replace(
            self._settings, delay_ms=0, future_ms=0, room=room_for(len(names)), short_ms=None
        )
        levels = await self._levels.read(names)
        for tag, position in zip(names, positions, strict=True):
            async with aclosing(TagLine(self, tag, position, settings)) as line:
                await line.begin(levels[tag])
                while line.is_reading and not line.ahead:
                    await line.read()
                if line.ahead or line.reading.is_waiting:
                    return False
        return True

    async def tags(self, prefix: str, after: str, limit: int) -> list[Tag]:
        names = sorted((tag for tag in await self._rows.tags() if tag.startswith(prefix)), key=str.encode)
        tags: list[Tag] = []
        for name in [name for name in names if not after or name.encode() > after.encode()][:limit]:
            if buckets := await self._rows.buckets(name):
                first, last = buckets[0].start_ms, max(bucket.start_ms + bucket.span_ms for bucket in buckets)
                tags.append(Tag(name, None, None, len(buckets), iso_time(first), iso_time(last)))
        return tags

    async def _expect(self, line: TagLine, levels: Levels) -> None:
        """Look ahead for the first numbers of sources, where there are no floors and the start is in this bucket."""
        bucket_ms = bucket_start(self._clock(), self._settings.span_ms)
        if self._scan_ms and not levels.floors and ms_of(line.read_to) >= bucket_ms:
            await asyncio.sleep(self._scan_ms / 1000)
            await line.expect(levels)

    async def _starts(
        self, request: TagRequest, filters: Sequence[TagFilter], levels: dict[str, Levels], room: int
    ) -> list[TagPosition]:
        start, tags = request.start, request.names
        if isinstance(start, FromStoreCursor):
            return list(parse_positions(start.text, len(tags)))
        if isinstance(start, FromCursor):
            raise CursorError(
                "this is a cursor of tags in another store (see tags.store): begin anew, for example at a time"
            )
        if isinstance(start, FromEnd) or start == FromLast(0):
            return [await self._end(tag, levels[tag], room) for tag in tags]
        if isinstance(start, FromTime):
            return [TagPosition(last_of(start.time_ms - 1))] * len(tags)
        if isinstance(start, FromLast):
            return await self._last(tags, filters, levels, room, start.count)
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
        async for rows in self._committed(tag, levels, self._rows.row_keys(tag, low, self._latest())):
            for row in rows:
                last = row.timeuuid
                key = hashed_partition(row.partition)
                reached[key] = Reached(key, row.offset, ms_of(row.timeuuid))
        return position_after(low, reached, last, room)

    def _latest(self) -> UUID:
        return last_of(self._clock() + self._settings.future_ms)

    async def _committed(
        self, tag: str, levels: Levels, pages: AsyncGenerator[list[R], None]
    ) -> AsyncGenerator[list[R], None]:
        known = PartitionLevels()
        known.renew(levels.marks, levels.floors)
        async with aclosing(pages):
            async for rows in pages:
                await _resolve_partitions(known, self._levels, tag, rows)
                yield [row for row in rows if known.is_committed(row)]

    async def _last(
        self, tags: Sequence[str], filters: Sequence[TagFilter], levels: dict[str, Levels], room: int, count: int
    ) -> list[TagPosition]:
        """Return the positions before the last ``count`` events of all tags that the request shows."""
        lows = [self._settled(levels[tag]) for tag in tags]
        newest = [
            await self._newest(tag, levels[tag], low, tag_filter, count)
            for tag, low, tag_filter in zip(tags, lows, filters, strict=True)
        ]
        shown_rows = [(order(rows[i].timeuuid), at, i) for at, (rows, shown) in enumerate(newest) for i in shown]
        first: dict[int, int] = {}
        for _, at, i in nlargest(count, shown_rows):
            first[at] = max(first.get(at, -1), i)
        return [
            position_before(newest[at][0], first[at], lows[at], room)
            if at in first
            else await self._end(tag, levels[tag], room)
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
        async with aclosing(self._committed(tag, levels, self._rows.rows_down(tag, self._latest()))) as pages:
            async for page in pages:
                for row in page:
                    if len(shown) >= count and order(row.timeuuid) <= order(low) and rows[-1].timeuuid != row.timeuuid:
                        return [*rows, row], shown
                    if len(shown) < count and shows_row(tag_filter, row):
                        shown.append(len(rows))
                    rows.append(row)
                if len(rows) >= MAX_INSPECTED:
                    return rows, [i for i in shown if i < len(rows) - 1]
        return rows, shown


class TagRowsFeed(OpenFeed):
    """An open feed over rows; no event that existed when it was opened has a timeuuid after ``target``."""

    def __init__(
        self,
        store: CassandraTags,
        request: TagRequest,
        lines: Sequence[TagLine],
        filters: Sequence[TagFilter],
        settings: ReadSettings,
        target: UUID,
    ) -> None:
        super().__init__(request, store._clock)
        self._hub, self._levels, self._request, self._settings = store._hub, store._levels, request, settings
        self._lines, self._filters, self._target = lines, dict(zip(request.names, filters, strict=True)), target
        self._until = None if request.until_ms is None else last_of(request.until_ms)
        if not request.parameters.follow:
            self._until = self._target if self._until is None else min(self._until, self._target, key=order)
        self._is_strict |= settings.fails
        self._moved = False
        self._failures = 0
        """Reads that failed, since one succeeded."""
        self._announced: deque[int] = deque()
        """Times when the hub announced writes that are not read yet."""
        self._announced_to_ms = 0
        """Latest floor at that time; announced events may have timeuuids up to it, ahead of our clock."""
        self._read_ms = 0

    @property
    def cursor(self) -> str:
        """Position of the feed; empty if its text would be too long, which is only possible before the first event."""
        text = self._cursor_text()
        return text if len(text) <= MAX_CURSOR_BYTES else ""

    def _cursor_text(self, ended: bool = False) -> str:
        state = Cursor((), self._counted, self._request.since_ms, ended)
        return join_cursor([line.text for line in self._lines], state.suffix)

    async def aclose(self) -> None:
        for line in self._lines:
            await line.aclose()
        await super().aclose()

    async def _begin(self) -> None:
        if self._settings.notify:
            for line in self._lines:
                await self._stack.enter_async_context(self._hub.follow(line.tag, self._wake))
        await self._read()

    async def _next(self) -> list[AnyFrame]:
        try:
            frames = await self._merge()
        except Unavailable as error:
            self._failures += 1
            if self._failures > MAX_RETRIES:
                raise
            logger.warning("tags %s: %s; reading again", ", ".join(line.tag for line in self._lines), error)
            self._read_ms = 0  # read again at once
            return []
        self._failures = 0
        return frames + self._controls()

    async def _read(self) -> None:
        """Begin to read on, with new levels of the shards."""
        levels = await self._levels.read(self._request.names)
        if self._announced:
            self._announced_to_ms = max((ms for each in levels.values() for ms in each.floors.values()), default=0)
        begun = (line.begin(levels[line.tag], self._until) for line in self._lines)
        for failure in await asyncio.gather(*begun, return_exceptions=True):
            if failure is not None:
                raise failure
        before_ms, self._read_ms = self._read_ms, self._clock()
        if self._read_ms < before_ms and self._announced:
            self._announced = deque([self._read_ms])  # the clock was set back

    def _due_ms(self) -> int:
        settings, now_ms = self._settings, self._clock()
        if now_ms < self._read_ms:
            return now_ms  # the clock was set back
        due = [self._read_ms + settings.refresh_ms]
        due += [due_ms for line in self._lines if (due_ms := line.reading.due_ms()) is not None]
        read_to = self._read_to()
        goal = self._until if self._until is not None else None if self._caught_up else self._target
        is_short = goal is not None and order(read_to) < order(goal)
        is_full = any(line.reading.is_full for line in self._lines)
        if is_full or (settings.delay_ms is None and (is_short or self._announced)):
            due.append(self._read_ms + POLL_MS)
        elif settings.delay_ms is not None:
            announced = list(islice(self._announced, 1))
            if self._announced_to_ms > ms_of(read_to):
                announced.append(self._announced_to_ms)
            due += [max(ms + settings.delay_ms + 1, self._read_ms + settings.debounce_ms) for ms in announced]
            if goal is not None and is_short:
                due.append(ms_of(goal) + settings.delay_ms + 1)
        return max(min(due), self._read_ms + MIN_PAUSE_MS)

    async def _wait(self) -> None:
        if self._failures:
            await asyncio.sleep(RETRY_S * min(self._failures, 5))
            return
        while (left_ms := self._due_ms() - self._clock()) > 0 and await woken(self._wake, left_ms / 1000):
            self._note_announcement()

    def _note_announcement(self) -> None:
        """Note the time of an announcement; one time stands for all announcements of an interval."""
        if not self._wake.is_set():
            return
        self._wake.clear()
        now_ms, debounce_ms = self._clock(), self._settings.debounce_ms
        if not self._announced or self._announced[-1] + debounce_ms <= now_ms:
            self._announced.append(now_ms)
        elif self._announced[-1] < now_ms:
            self._announced.append(self._announced[-1] + debounce_ms)

    def _read_to(self) -> UUID:
        return min((line.read_to for line in self._lines), key=order)

    async def _merge(self) -> list[AnyFrame]:
        """Return the next events; none if everything is read and no read is due."""
        self._note_announcement()
        if not any(line.is_reading or line.ahead for line in self._lines):
            if self._read_ms and self._clock() < self._due_ms():
                return []
            await self._read()
        frames: list[AnyFrame] = []
        size = 0
        while size < BATCH_BYTES and not self._is_full:
            if frames and any(line.is_reading and not line.ahead for line in self._lines):
                break  # send the frames before reading more
            line = await self._next_line()
            if line is None:
                break
            if isinstance(line.ahead[0], LostNumbers):
                if self._is_strict and frames:
                    break  # events before the gap go out first
                frames.append(self._lost(line))
                continue
            item = line.pop()
            assert not isinstance(item, LostNumbers)
            is_after = self._until is not None and order(item.row.timeuuid) > order(self._until)
            if is_after or not shows_row(self._filters[item.row.tag], item.row):
                self._moved = True
                continue
            self._moved = False
            self._sent += 1
            data = item.row.frame()
            frames.append(EventFrame(self.cursor, data))
            size += len(data)
        if self._moved:
            self._moved = False
            frames.append(Moved(self.cursor))
        return frames

    async def _next_line(self) -> TagLine | None:
        """Return the tag whose next event is the earliest; None if all are read."""
        best: TagLine | None = None
        best_order, alone = 0, len(self._lines) == 1
        for line in self._lines:
            while line.is_reading and not line.ahead:
                await line.read()
            if not line.ahead:
                continue
            head = line.ahead[0]
            if alone or isinstance(head, LostNumbers):
                return line
            position = order(head.row.timeuuid)
            if best is None or position < best_order:
                best, best_order = line, position
        if best is None:
            read_to = self._read_to()
            if self._until is not None and order(read_to) >= order(self._until):
                self._announced.clear()
                self._announced_to_ms = 0
            while self._announced and self._announced[0] <= ms_of(read_to):
                self._announced.popleft()
        return best

    def _lost(self, line: TagLine) -> AnyFrame:
        if self._is_strict:
            lost = [each for each in line.ahead if isinstance(each, LostNumbers)]
            after = min((each.after for each in lost), key=order)
            to = max((each.to for each in lost), key=order)
            raise RowsMissing(line.tag, {each.source: (each.first, each.last) for each in lost}, str(after), str(to))
        item = line.pop()
        assert isinstance(item, LostNumbers)
        logger.warning(
            "tag %r: %r %d to %d were not found between %s and %s, and are skipped",
            *(line.tag, item.source, item.first, item.last, item.after, item.to),
        )
        facts = {"tag": line.tag, "source": item.source, "missing": [item.first, item.last]}
        where = {"from": str(item.after), "to": str(item.to), "reason": "missing"}
        return ControlFrame("gap", self.cursor, _encode(facts | where))

    def _controls(self) -> list[AnyFrame]:
        """Return the frames that announce that the feed has caught up or has ended."""
        if not self._is_full and any(line.is_reading or line.ahead for line in self._lines):
            return []
        frames = list[AnyFrame]()
        if not self._caught_up and self._has_read(self._target):
            frames += self._catch_up()
        if self._is_full:
            frames += self._end("limit")
        elif self._until is not None and self._has_read(self._until):
            frames += self._end("until" if self._request.until_ms is not None else "caught-up")
        return frames

    def _has_read(self, target: UUID) -> bool:
        goal = target if self._until is None else min(target, self._until, key=order)
        return all(order(line.read_to) >= order(goal) and not line.reading.is_waiting for line in self._lines)


class TagLine:
    """One tag of a feed: its ``Reading``, and what was read ahead of the merge."""

    def __init__(
        self, store: CassandraTags, tag: str, start: TagPosition, settings: ReadSettings, from_beginning: bool = False
    ) -> None:
        self.tag = tag
        self.ahead: deque[Delivery] = deque()
        self.reading = Reading(start, settings, from_beginning=from_beginning, now_ms=store._clock())
        self.read_to: UUID = start.low
        """Timeuuid up to which all visible rows are read."""
        self._rows, self._levels, self._clock = store._rows, store._levels, store._clock
        self._position, self._text = start, str(start)
        self._pages: AsyncGenerator[list[StoredRow], None] | None = None
        self._to = start.low

    @property
    def text(self) -> str:
        """Text of its position in the cursor."""
        position = self._position if self.ahead else self.reading.position()
        if position is not self._position:
            self._position, self._text = position, str(position)
        return self._text

    @property
    def is_reading(self) -> bool:
        """True if there is more to read before the next ``begin``."""
        return self._pages is not None

    async def begin(self, levels: Levels, until: UUID | None = None) -> None:
        """Begin to read on, with new levels of the shard."""
        await self.aclose()
        now_ms = self._clock()
        after, self._to = self.reading.begin(levels.marks, levels.floors, now_ms, until)
        await self._search(now_ms)
        if self.reading.is_full:
            self.ahead += self.reading.expire(now_ms)
        else:
            self._pages = self._rows.rows(self.tag, after, self._to)

    async def read(self) -> None:
        pages, self._pages = self._pages, None  # after a failure the next ``begin`` reads the page again
        assert pages is not None
        rows = await anext(pages, None)
        if rows is not None:
            await _resolve_partitions(self.reading.levels, self._levels, self.tag, rows)
            self._pages = pages
        now_ms = self._clock()
        self.ahead += self.reading.finish(now_ms) if rows is None else self.reading.take_page(rows, now_ms)
        if self.reading.is_full:
            await self.aclose()
        if self.reading.is_at_end:
            self.read_to = self._to
        self.ahead += self.reading.expire(now_ms)

    def pop(self) -> Delivery:
        """Remove and return the next item; the position moves behind it."""
        item = self.ahead.popleft()
        self._position, self._text = item.position, str(item.position)
        return item

    async def aclose(self) -> None:
        pages, self._pages = self._pages, None
        if pages is not None:
            await pages.aclose()

    async def expect(self, levels: Levels) -> None:
        """Find the first number of each source after the start."""
        now_ms = self._clock()
        self.reading.begin(levels.marks, levels.floors, now_ms)
        async for rows in self._row_keys(self.read_to, last_of(now_ms)):
            self.reading.expect(rows)

    async def _row_keys(self, after: UUID, to: UUID) -> AsyncIterator[list[RowKey]]:
        async with aclosing(self._rows.row_keys(self.tag, after, to)) as pages:
            async for rows in pages:
                await _resolve_partitions(self.reading.levels, self._levels, self.tag, rows)
                yield rows

    async def _search(self, now_ms: int) -> None:
        """Run the searches that the reading asks for, and take the rows that were missed."""
        missed: set[tuple[UUID, str, int]] = set()
        for after, to in self.reading.searches(now_ms):
            async for rows in self._row_keys(after, to):
                missed.update(row.clustering for row in self.reading.find_missed(rows))
        for first, last in search_spans(sorted((timeuuid for timeuuid, _, _ in missed), key=order)):
            async with aclosing(self._rows.rows(self.tag, last_of(ms_of(first) - 1), last)) as full_pages:
                async for full in full_pages:
                    self.ahead += self.reading.take_missed([row for row in full if row.clustering in missed], now_ms)
        self.reading.searched()


async def _resolve_partitions(known: PartitionLevels, reader: LevelReader, tag: str, rows: Sequence[RowKey]) -> None:
    """Find out which unknown partitions of rows have no marks."""
    if unknown := known.unknown(rows):
        levels = (await reader.read([tag]))[tag]
        known.unmarked |= unknown - levels.marks.keys() - levels.floors.keys()


def shows_row(tag_filter: TagFilter, row: StoredRow) -> bool:
    if tag_filter.shows_all:
        return True
    record = None
    if tag_filter.asks_record:
        record = record_of(row.partition, row.offset, row.time_ms, row.key, row.headers)
    return tag_filter.shows(ms_of(row.timeuuid), row.tags, row.value or b"null", record)

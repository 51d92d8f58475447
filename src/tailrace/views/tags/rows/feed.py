"""The feed of tags whose events are rows in Cassandra: from any start, then live.

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
from contextlib import AsyncExitStack, aclosing
from itertools import islice
from uuid import UUID

import msgspec

from tailrace.errors import RowsMissing, Unavailable
from tailrace.log.columns import TagFields
from tailrace.log.cursor import MAX_CURSOR_BYTES, Cursor
from tailrace.log.feed import BATCH_BYTES
from tailrace.log.hub import Hub
from tailrace.log.request import AnyFrame, ControlFrame, EventFrame, Moved
from tailrace.log.run import tagged_frame
from tailrace.log.timeuuid import last_of, ms_of, order
from tailrace.views.tags.request import TagFilter, TagRequest, record_of
from tailrace.views.tags.rows.cursor import TagPosition, join_cursor
from tailrace.views.tags.rows.gaps import ReadSettings, TagRow
from tailrace.views.tags.rows.reader import RowReader
from tailrace.views.tags.rows.reading import DeliveredRow, LostNumbers, Reading
from tailrace.views.tags.rows.store import StoredRow
from tailrace.views.tags.store import LevelReader, Levels

logger = logging.getLogger(__name__)

MIN_PAUSE_MS = 10
POLL_MS = 250
"""Interval of reads while the feed waits for floors to rise, which nobody announces."""
MAX_RETRIES, RETRY_S = 40, 0.5
"""Reads from a store that does not answer, less and less often, for about a minute and a half."""
MAX_SEARCH_SPAN_MS = 60_000
"""Missed rows that lie further apart than this are read separately."""

_encode = msgspec.json.Encoder().encode


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a feed."""

    refresh_ms: int = 3_000
    delay_ms: int | None = 5_000
    notify: bool = True
    fails: bool = True
    """True if the feed fails when numbers are not found in time; else it skips them."""

    @property
    def debounce_ms(self) -> int:
        """Interval whose announcements are answered by one read."""
        return max(MIN_PAUSE_MS, (self.delay_ms or 0) // 20)


class TagRowsFeed:
    """An open feed: ``async for`` yields batches of frames until it ends; ``aclose`` ends it early.

    Args:
        target: No event that existed when the feed was opened has a later timeuuid.
    """

    def __init__(
        self,
        hub: Hub,
        levels: LevelReader,
        request: TagRequest,
        lines: Sequence[TagLine],
        filters: Sequence[TagFilter],
        pace: Pace,
        clock: Callable[[], int],
        target: UUID,
    ) -> None:
        self._hub, self._levels, self._request, self._pace, self._clock = hub, levels, request, pace, clock
        self._lines, self._filters = lines, filters
        self._target = target
        self._until = None if request.until_ms is None else last_of(request.until_ms)
        if not request.follow:
            self._until = self._target if self._until is None else min(self._until, self._target, key=order)
        self._sent = request.sent
        self._caught_up = request.resumed
        self._ended = False
        self._moved = False
        self._wake = asyncio.Event()
        self._announced: deque[int] = deque()
        """Times when the hub announced writes that are not read yet."""
        self._announced_to_ms = 0
        """Latest floor at that time; announced events may have timeuuids up to it, ahead of our clock."""
        self._read_ms = 0
        self._stack = AsyncExitStack()

    @property
    def cursor(self) -> str:
        """Position of the feed; empty if its text would be too long, which is only possible before the first event."""
        sent = self._sent if self._request.limit is not None else None
        text = join_cursor([line.text for line in self._lines], Cursor((), sent, self._request.since_ms).suffix)
        return text if len(text) <= MAX_CURSOR_BYTES else ""

    async def begin(self) -> None:
        """Follow the tags in the hub, and begin to read."""
        try:
            if self._pace.notify:
                for line in self._lines:
                    await self._stack.enter_async_context(self._hub.follow(line.tag, self._wake))
            await self._begin()
        except BaseException:
            await self.aclose()
            raise

    def __aiter__(self) -> AsyncIterator[list[AnyFrame]]:
        return self._batches()

    async def aclose(self) -> None:
        self._ended = True
        for line in self._lines:
            await line.close()
        await self._stack.aclose()

    async def _batches(self) -> AsyncIterator[list[AnyFrame]]:
        failures = 0
        try:
            while not self._ended:
                try:
                    frames = await self._next()
                    failures = 0
                except Unavailable as error:
                    failures += 1
                    if failures > MAX_RETRIES:
                        raise
                    logger.warning("tags %s: %s; reading again", ", ".join(line.tag for line in self._lines), error)
                    await asyncio.sleep(RETRY_S * min(failures, 5))
                    self._read_ms = 0  # read again at once
                    continue
                frames += self._controls()
                if frames:
                    yield frames
                elif not self._ended:
                    await self._wait()
        finally:
            await self.aclose()

    # When to read.

    async def _begin(self) -> None:
        levels = await self._levels.read(line.shard for line in self._lines)
        if self._announced:
            self._announced_to_ms = max((ms for each in levels.values() for ms in each.floors.values()), default=0)
        begun = (line.begin(levels[line.shard], self._until) for line in self._lines)
        for failure in await asyncio.gather(*begun, return_exceptions=True):
            if failure is not None:
                raise failure
        before_ms, self._read_ms = self._read_ms, self._clock()
        if self._read_ms < before_ms and self._announced:
            self._announced = deque([self._read_ms])  # the clock was set back

    def _due_ms(self) -> int:
        pace, now_ms = self._pace, self._clock()
        if now_ms < self._read_ms:
            return now_ms  # the clock was set back
        due = [self._read_ms + pace.refresh_ms]
        due += [due_ms for line in self._lines if (due_ms := line.reading.due_ms()) is not None]
        read_to = self._read_to()
        goal = self._until if self._until is not None else None if self._caught_up else self._target
        is_short = goal is not None and order(read_to) < order(goal)
        is_full = any(line.reading.is_full for line in self._lines)
        if is_full or (pace.delay_ms is None and (is_short or self._announced)):
            due.append(self._read_ms + POLL_MS)
        elif pace.delay_ms is not None:
            announced = list(islice(self._announced, 1))
            if self._announced_to_ms > ms_of(read_to):
                announced.append(self._announced_to_ms)
            due += [max(ms + pace.delay_ms + 1, self._read_ms + pace.debounce_ms) for ms in announced]
            if goal is not None and is_short:
                due.append(ms_of(goal) + pace.delay_ms + 1)
        return max(min(due), self._read_ms + MIN_PAUSE_MS)

    async def _wait(self) -> None:
        while (left_ms := self._due_ms() - self._clock()) > 0:
            try:
                await asyncio.wait_for(self._wake.wait(), left_ms / 1000)
            except TimeoutError:
                return
            self._note_announcement()

    def _note_announcement(self) -> None:
        """Note the time of an announcement; one time stands for all announcements of an interval."""
        if not self._wake.is_set():
            return
        self._wake.clear()
        now_ms, debounce_ms = self._clock(), self._pace.debounce_ms
        if not self._announced or self._announced[-1] + debounce_ms <= now_ms:
            self._announced.append(now_ms)
        elif self._announced[-1] < now_ms:
            self._announced.append(self._announced[-1] + debounce_ms)

    def _read_to(self) -> UUID:
        return min((line.read_to for line in self._lines), key=order)

    # Frames.

    async def _next(self) -> list[AnyFrame]:
        """Return the next frames; none if everything is read and no read is due."""
        self._note_announcement()
        if not any(line.is_reading or line.ahead for line in self._lines):
            if self._read_ms and self._clock() < self._due_ms():
                return []
            await self._begin()
        frames: list[AnyFrame] = []
        size, limit = 0, self._request.limit
        while size < BATCH_BYTES and (limit is None or self._sent < limit):
            if frames and any(line.is_reading and not line.ahead for line in self._lines):
                break  # send the frames before reading more
            line = await self._next_line()
            if line is None:
                break
            if isinstance(line.ahead[0], LostNumbers):
                if self._fails() and frames:
                    break  # events before the gap go out first
                frames.append(self._lost(line))
                continue
            item = line.pop()
            assert not isinstance(item, LostNumbers)
            if not self._shows(line, item.row):
                self._moved = True
                continue
            self._moved = False
            self._sent += 1
            data = frame_of(item.row)
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

    def _shows(self, line: TagLine, row: StoredRow) -> bool:
        if self._until is not None and order(row.timeuuid) > order(self._until):
            return False
        return shows_row(self._filters[line.at], row)

    def _fails(self) -> bool:
        return self._pace.fails or self._request.on_gap == "fail"

    def _lost(self, line: TagLine) -> AnyFrame:
        if self._fails():
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
        request, frames = self._request, list[AnyFrame]()
        full = request.limit is not None and self._sent >= request.limit
        if not full and any(line.is_reading or line.ahead for line in self._lines):
            return frames
        if not self._caught_up and self._has_read(self._target):
            self._caught_up = True
            frames.append(ControlFrame("caught-up", self.cursor))
        if full or (self._until is not None and self._has_read(self._until)):
            self._ended = True
            reason = "limit" if full else "until" if request.until_ms is not None else "caught-up"
            cursor = join_cursor([line.text for line in self._lines], Cursor((), ended=True).suffix)
            frames.append(ControlFrame("end", cursor, _encode({"reason": reason, "events": self._sent})))
        return frames

    def _has_read(self, target: UUID) -> bool:
        goal = target if self._until is None else min(target, self._until, key=order)
        return all(order(line.read_to) >= order(goal) and not line.reading.is_waiting for line in self._lines)


_Key = tuple[UUID, str, int]


class TagLine:
    """One tag of a feed: its ``Reading``, and what was read ahead of the merge.

    Args:
        at: Index of the tag in the request.
    """

    def __init__(
        self,
        tag: str,
        at: int,
        rows: RowReader,
        levels: LevelReader,
        start: TagPosition,
        settings: ReadSettings,
        clock: Callable[[], int],
        *,
        from_beginning: bool = False,
    ) -> None:
        self.tag, self.at, self.shard = tag, at, levels.shard_of(tag)
        self.ahead: deque[DeliveredRow[StoredRow] | LostNumbers] = deque()
        self.reading: Reading[StoredRow] = Reading(start, settings, from_beginning=from_beginning, now_ms=clock())
        self.read_to: UUID = start.low
        """Timeuuid up to which all visible rows are read."""
        self._rows, self._levels, self._clock = rows, levels, clock
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
        await self.close()
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
            await self._resolve_partitions(rows)
            self._pages = pages
        now_ms = self._clock()
        self.ahead += self.reading.finish(now_ms) if rows is None else self.reading.take_page(rows, now_ms)
        if self.reading.is_full:
            await self.close()
        if self.reading.is_at_end:
            self.read_to = self._to
        self.ahead += self.reading.expire(now_ms)

    def pop(self) -> DeliveredRow[StoredRow] | LostNumbers:
        """Remove and return the next item; the position moves behind it."""
        item = self.ahead.popleft()
        self._position, self._text = item.position, str(item.position)
        return item

    async def close(self) -> None:
        pages, self._pages = self._pages, None
        if pages is not None:
            await pages.aclose()

    async def expect(self, levels: Levels, start: UUID, to: UUID) -> None:
        """Find the first number of each source after the start."""
        self.reading.begin(levels.marks, levels.floors, self._clock())
        async with aclosing(self._rows.row_keys(self.tag, start, to)) as pages:
            async for rows in pages:
                await self._resolve_partitions(rows)
                self.reading.expect(rows)

    async def _search(self, now_ms: int) -> None:
        """Run the searches that the reading asks for, and take the rows that were missed."""
        missed: dict[_Key, TagRow] = {}
        for search in self.reading.searches(now_ms):
            async with aclosing(self._rows.row_keys(self.tag, search.after, search.to)) as pages:
                async for rows in pages:
                    await self._resolve_partitions(rows)
                    missed |= {_key(row): row for row in self.reading.find_missed(rows)}
        for first, last in _ranges(sorted((row.timeuuid for row in missed.values()), key=order)):
            async with aclosing(self._rows.rows(self.tag, last_of(ms_of(first) - 1), last)) as full_pages:
                async for full in full_pages:
                    self.ahead += self.reading.take_missed([row for row in full if _key(row) in missed], now_ms)
        self.reading.searched()

    async def _resolve_partitions(self, rows: Sequence[TagRow]) -> None:
        unknown = self.reading.unknown_partitions(rows)
        if unknown:
            levels = (await self._levels.read([self.shard]))[self.shard]
            self.reading.add_unmarked(unknown - levels.marks.keys() - levels.floors.keys())


def _key(row: TagRow) -> _Key:
    return row.timeuuid, row.source, row.tag_seq


def _ranges(timeuuids: Sequence[UUID]) -> list[tuple[UUID, UUID]]:
    """Return the first and the last timeuuid of each range that is read at once."""
    ranges: list[tuple[UUID, UUID]] = []
    for timeuuid in timeuuids:
        if ranges and ms_of(timeuuid) - ms_of(ranges[-1][1]) <= MAX_SEARCH_SPAN_MS:
            ranges[-1] = ranges[-1][0], timeuuid
        else:
            ranges.append((timeuuid, timeuuid))
    return ranges


def shows_row(tag_filter: TagFilter, row: StoredRow) -> bool:
    if tag_filter.shows_all:
        return True
    record = None
    if tag_filter.asks_record:
        record = record_of(row.partition, row.offset, row.time_ms, row.key, row.headers)
    return tag_filter.shows(ms_of(row.timeuuid), row.tags, row.value or b"null", record)


def frame_of(row: StoredRow) -> bytes:
    """Return the JSON form of an event, as every feed sends it."""
    fields = TagFields(row.source, row.seq, row.tag_seq, ms_of(row.timeuuid), row.tags)
    value = b"null" if row.value is None else row.value
    record = row.partition, row.offset, row.time_ms, row.key, row.headers, value
    return tagged_frame(row.tag, fields, row.timeuuid, *record)

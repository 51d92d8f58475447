"""The feed of tags whose events rest as rows: merged by stamp as far as is read, then live; exact when resumed.

Invariant: from any cursor a feed yields exactly the events after it that the request shows, each once and each source's
in its order within a tag; or it says which numbers of which source were not found in time.

One tag of a feed over rows: the host of ``views.tags.rows.reading``, which says what to read and what goes out.

Invariant: marks and floors are read before the rows; and a place that is not known is asked for after its rows were.
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

APART_MS = 60_000
"""Rows that were missed and lie further apart than this are read apart."""

_Key = tuple[UUID, str, int]


class TagLine:
    """The rows of one tag, and what was read of them ahead of the merge."""

    def __init__(
        self,
        tag: str,
        at: int,
        rows: RowReader,
        floors: LevelReader,
        start: TagPosition,
        reads: ReadSettings,
        clock: Callable[[], int],
        *,
        from_beginning: bool = False,
    ) -> None:
        """``at`` is the tag's place in the request."""
        self.tag, self.at, self.shard = tag, at, floors.shard_of(tag)
        self.ahead: deque[DeliveredRow[StoredRow] | LostNumbers] = deque()
        self.reading: Reading[StoredRow] = Reading(start, reads, from_beginning=from_beginning, now_ms=clock())
        self.read_to: UUID = start.low
        """Up to where everything was read that is written."""
        self._rows, self._floors, self._clock = rows, floors, clock
        self._part, self._text = start, str(start)
        self._pages: AsyncGenerator[list[StoredRow], None] | None = None
        self._to = start.low

    @property
    def text(self) -> str:
        """The line's part of the cursor, as text."""
        part = self._part if self.ahead else self.reading.position()
        if part is not self._part:
            self._part, self._text = part, str(part)
        return self._text

    @property
    def is_reading(self) -> bool:
        """Whether there is more to read before it is begun anew."""
        return self._pages is not None

    async def begin(self, levels: Levels, until: UUID | None = None) -> None:
        """Begin to read on, with what the shard says now."""
        await self.close()
        now_ms = self._clock()
        after, self._to = self.reading.begin(levels.marks, levels.floors, now_ms, until)
        await self._look(now_ms)
        if self.reading.is_full:
            self.ahead += self.reading.expire(now_ms)
        else:
            self._pages = self._rows.rows(self.tag, after, self._to)

    async def read(self) -> None:
        """Read one page, or note that there is none any more."""
        pages, self._pages = self._pages, None  # what fails on the way is read again, from where it was
        assert pages is not None
        rows = await anext(pages, None)
        if rows is not None:
            await self._meet(rows)
            self._pages = pages
        now_ms = self._clock()
        self.ahead += self.reading.finish(now_ms) if rows is None else self.reading.take_page(rows, now_ms)
        if self.reading.is_full:
            await self.close()
        if self.reading.is_at_end:
            self.read_to = self._to
        self.ahead += self.reading.expire(now_ms)

    def pop(self) -> DeliveredRow[StoredRow] | LostNumbers:
        """Take out what goes out next; the cursor moves behind it."""
        found = self.ahead.popleft()
        self._part, self._text = found.position, str(found.position)
        return found

    async def close(self) -> None:
        """Stop reading."""
        pages, self._pages = self._pages, None
        if pages is not None:
            await pages.aclose()

    async def expect(self, levels: Levels, start: UUID, to: UUID) -> None:
        """Look with which number each source begins after the start."""
        self.reading.begin(levels.marks, levels.floors, self._clock())
        async with aclosing(self._rows.narrow(self.tag, start, to)) as pages:
            async for rows in pages:
                await self._meet(rows)
                self.reading.expect(rows)

    async def _look(self, now_ms: int) -> None:
        """Look for what was missed, as far as the reading asks for it, and take what is found."""
        wanted: dict[_Key, TagRow] = {}
        for look in self.reading.searches(now_ms):
            async with aclosing(self._rows.narrow(self.tag, look.after, look.to)) as pages:
                async for rows in pages:
                    await self._meet(rows)
                    wanted |= {_key(row): row for row in self.reading.find_missed(rows)}
        for first, last in _stretches(sorted((row.timeuuid for row in wanted.values()), key=order)):
            async with aclosing(self._rows.rows(self.tag, last_of(ms_of(first) - 1), last)) as found:
                async for full in found:
                    self.ahead += self.reading.take_missed([row for row in full if _key(row) in wanted], now_ms)
        self.reading.searched()

    async def _meet(self, rows: Sequence[TagRow]) -> None:
        strange = self.reading.unknown_partitions(rows)
        if strange:
            levels = (await self._floors.read([self.shard]))[self.shard]
            self.reading.add_unmarked(strange - levels.marks.keys() - levels.floors.keys())


def _key(row: TagRow) -> _Key:
    return row.timeuuid, row.source, row.tag_seq


def _stretches(stamps: Sequence[UUID]) -> list[tuple[UUID, UUID]]:
    """Return the first and the last stamp of each stretch that is read in one go."""
    found: list[tuple[UUID, UUID]] = []
    for stamp in stamps:
        if found and ms_of(stamp) - ms_of(found[-1][1]) <= APART_MS:
            found[-1] = found[-1][0], stamp
        else:
            found.append((stamp, stamp))
    return found


logger = logging.getLogger(__name__)

LEAST_PAUSE_MS = 10
AGAIN_MS = 250
"""How soon it is looked again when something waits for what nobody tells: that floors rise."""
MOST_RETRIES, RETRY_S = 40, 0.5
"""A store that does not answer is asked again, less and less often, for about a minute and a half."""

_encode = msgspec.json.Encoder().encode


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """When a feed reads."""

    refresh_ms: int = 3_000
    delay_ms: int | None = 5_000
    notify: bool = True
    fails: bool = True
    """Whether it ends when numbers were not found in time."""

    @property
    def fold_ms(self) -> int:
        """How long one look answers all that is told meanwhile."""
        return max(LEAST_PAUSE_MS, (self.delay_ms or 0) // 20)


class TagRowsFeed:
    """An open feed: ``async for`` yields batches of frames until it ends; ``aclose`` ends it early."""

    def __init__(
        self,
        hub: Hub,
        floors: LevelReader,
        request: TagRequest,
        lines: Sequence[TagLine],
        wanted: Sequence[TagFilter],
        pace: Pace,
        clock: Callable[[], int],
        target: UUID,
    ) -> None:
        """``target``: what existed when it began has no later stamp."""
        self._hub, self._floors, self._request, self._pace, self._clock = hub, floors, request, pace, clock
        self._lines, self._wanted = lines, wanted
        self._target = target
        self._until = None if request.until_ms is None else last_of(request.until_ms)
        if not request.follow:
            self._until = self._target if self._until is None else min(self._until, self._target, key=order)
        self._sent = request.sent
        self._announced = request.resumed
        self._ended = False
        self._moved = False
        self._wake = asyncio.Event()
        self._told: deque[int] = deque()
        """When the tags were written to, as long as that was not read."""
        self._ahead_ms = 0
        """What was told of has no later stamp: it may be ahead of the clock that it was told at."""
        self._read_ms = 0
        self._stack = AsyncExitStack()

    @property
    def cursor(self) -> str:
        """Where the feed stands; empty while that cannot be said in so many bytes, which is before its first event."""
        sent = self._sent if self._request.limit is not None else None
        text = join_cursor([line.text for line in self._lines], Cursor((), sent, self._request.since_ms).suffix)
        return text if len(text) <= MAX_CURSOR_BYTES else ""

    async def begin(self) -> None:
        """Follow the tags' shards, and read the first stretch."""
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
        """Stop following."""
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
                    if failures > MOST_RETRIES:
                        raise
                    logger.warning("tags %s: %s; reading again", ", ".join(line.tag for line in self._lines), error)
                    await asyncio.sleep(RETRY_S * min(failures, 5))
                    self._read_ms = 0  # now
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
        levels = await self._floors.read(line.shard for line in self._lines)
        if self._told:
            self._ahead_ms = max((ms for each in levels.values() for ms in each.floors.values()), default=0)
        begun = (line.begin(levels[line.shard], self._until) for line in self._lines)
        for failure in await asyncio.gather(*begun, return_exceptions=True):
            if failure is not None:
                raise failure
        before_ms, self._read_ms = self._read_ms, self._clock()
        if self._read_ms < before_ms and self._told:
            self._told = deque([self._read_ms])  # the clock was set back

    def _due_ms(self) -> int:
        """Return when it is to be read again."""
        pace, now_ms = self._pace, self._clock()
        if now_ms < self._read_ms:
            return now_ms  # the clock was set back: what was due by it is not far
        due = [self._read_ms + pace.refresh_ms]
        due += [asked for line in self._lines if (asked := line.reading.due_ms()) is not None]
        read_to = min((line.read_to for line in self._lines), key=order)
        goal = self._until if self._until is not None else None if self._announced else self._target
        is_short = goal is not None and order(read_to) < order(goal)
        if any(line.reading.is_full for line in self._lines) or (pace.delay_ms is None and (is_short or self._told)):
            due.append(self._read_ms + AGAIN_MS)
        elif pace.delay_ms is not None:
            told = [*islice(self._told, 1), *([self._ahead_ms] if self._ahead_ms > ms_of(read_to) else [])]
            due += [max(ms + pace.delay_ms + 1, self._read_ms + pace.fold_ms) for ms in told]
            if goal is not None and is_short:
                due.append(ms_of(goal) + pace.delay_ms + 1)
        return max(min(due), self._read_ms + LEAST_PAUSE_MS)

    async def _wait(self) -> None:
        while (left_ms := self._due_ms() - self._clock()) > 0:
            try:
                await asyncio.wait_for(self._wake.wait(), left_ms / 1000)
            except TimeoutError:
                return
            self._note()

    def _note(self) -> None:
        """Note that something was told; a look at the end of an interval is for all that was told in it."""
        if not self._wake.is_set():
            return
        self._wake.clear()
        now_ms, fold_ms = self._clock(), self._pace.fold_ms
        if not self._told or self._told[-1] + fold_ms <= now_ms:
            self._told.append(now_ms)
        elif self._told[-1] < now_ms:
            self._told.append(self._told[-1] + fold_ms)

    # What goes out.

    async def _next(self) -> list[AnyFrame]:
        """Return what goes out next; nothing if everything was read, and it is not time to read again."""
        self._note()
        if not any(line.is_reading or line.ahead for line in self._lines):
            if self._read_ms and self._clock() < self._due_ms():
                return []
            await self._begin()
        frames: list[AnyFrame] = []
        size, limit = 0, self._request.limit
        while size < BATCH_BYTES and (limit is None or self._sent < limit):
            if frames and any(line.is_reading and not line.ahead for line in self._lines):
                break  # what there is goes out before more is read
            line = await self._turn()
            if line is None:
                break
            if isinstance(line.ahead[0], LostNumbers):
                if self._fails() and frames:
                    break  # what precedes it goes out first
                frames.append(self._lost(line))
                continue
            found = line.pop()
            assert not isinstance(found, LostNumbers)
            if not self._shows(line, found.row):
                self._moved = True
                continue
            self._moved = False
            self._sent += 1
            data = frame_of(found.row)
            frames.append(EventFrame(self.cursor, data))
            size += len(data)
        if self._moved:
            self._moved = False
            frames.append(Moved(self.cursor))
        return frames

    async def _turn(self) -> TagLine | None:
        """Return the tag whose next event is the earliest; None if all were read."""
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
            place = order(head.row.timeuuid)
            if best is None or place < best_order:
                best, best_order = line, place
        if best is None:
            read_to = min((line.read_to for line in self._lines), key=order)
            if self._until is not None and order(read_to) >= order(self._until):
                self._told.clear()
                self._ahead_ms = 0
            while self._told and self._told[0] <= ms_of(read_to):
                self._told.popleft()
        return best

    def _shows(self, line: TagLine, row: StoredRow) -> bool:
        if self._until is not None and order(row.timeuuid) > order(self._until):
            return False
        return shows_row(self._wanted[line.at], row)

    def _fails(self) -> bool:
        return self._pace.fails or self._request.on_gap == "fail"

    def _lost(self, line: TagLine) -> AnyFrame:
        if self._fails():
            lost = [each for each in line.ahead if isinstance(each, LostNumbers)]
            after = min((each.after for each in lost), key=order)
            to = max((each.to for each in lost), key=order)
            raise RowsMissing(line.tag, {each.source: (each.first, each.last) for each in lost}, str(after), str(to))
        found = line.pop()
        assert isinstance(found, LostNumbers)
        logger.warning(
            "tag %r: %r %d to %d were not found between %s and %s, and are passed over",
            *(line.tag, found.source, found.first, found.last, found.after, found.to),
        )
        facts = {"tag": line.tag, "source": found.source, "missing": [found.first, found.last]}
        where = {"from": str(found.after), "to": str(found.to), "reason": "missing"}
        return ControlFrame("gap", self.cursor, _encode(facts | where))

    def _controls(self) -> list[AnyFrame]:
        """Say that the feed has caught up, or that it has ended."""
        request, frames = self._request, list[AnyFrame]()
        full = request.limit is not None and self._sent >= request.limit
        if not full and any(line.is_reading or line.ahead for line in self._lines):
            return frames
        if not self._announced and self._has_read(self._target):
            self._announced = True
            frames.append(ControlFrame("caught-up", self.cursor))
        over = self._until is not None and self._has_read(self._until)
        if full or over:
            self._ended = True
            reason = "limit" if full else "until" if request.until_ms is not None else "caught-up"
            parts = [line.text for line in self._lines]
            ended = join_cursor(parts, Cursor((), ended=True).suffix)
            frames.append(ControlFrame("end", ended, _encode({"reason": reason, "events": self._sent})))
        return frames

    def _has_read(self, target: UUID) -> bool:
        goal = target if self._until is None else min(target, self._until, key=order)
        return all(order(line.read_to) >= order(goal) and not line.reading.is_waiting for line in self._lines)


def frame_of(row: StoredRow) -> bytes:
    """Return the JSON form of an event: what every feed sends as data."""
    note = TagFields(row.source, row.seq, row.tag_seq, ms_of(row.timeuuid), row.tags)
    value = b"null" if row.value is None else row.value
    record = row.partition, row.offset, row.time_ms, row.key, row.headers, value
    return tagged_frame(row.tag, note, row.timeuuid, *record)


def shows_row(tag_filter: TagFilter, row: StoredRow) -> bool:
    """Return True if a filter shows a row."""
    if tag_filter.shows_all:
        return True
    record = None
    if tag_filter.asks_record:
        record = record_of(row.partition, row.offset, row.time_ms, row.key, row.headers)
    return tag_filter.shows(ms_of(row.timeuuid), row.tags, row.value or b"null", record)

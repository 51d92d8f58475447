"""One tag of a feed over rows: the host of ``views.tags.rows.reading``, which says what to read and what goes out.

Invariant: marks and floors are read before the rows; and a place that is not known is asked for after its rows were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from uuid import UUID

from tailrace.views.tags.rows.cursor import Part
from tailrace.views.tags.rows.reader import RowReader
from tailrace.views.tags.rows.reading import Emitted, Lost, Reading
from tailrace.views.tags.rows.store import Row
from tailrace.views.tags.rows.tag_gaps import TagRow
from tailrace.views.tags.rows.tag_reads import Reads
from tailrace.views.tags.stamp import last_of, ms_of, order
from tailrace.views.tags.tag_floors import Floors, Levels

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
        floors: Floors,
        start: Part,
        reads: Reads,
        clock: Callable[[], int],
        *,
        from_beginning: bool = False,
    ) -> None:
        """``at`` is the tag's place in the request."""
        self.tag, self.at, self.shard = tag, at, floors.shard_of(tag)
        self.ahead: deque[Emitted[Row] | Lost] = deque()
        self.reading: Reading[Row] = Reading(start, reads, from_beginning=from_beginning, now_ms=clock())
        self.read_to: UUID = start.low
        """Up to where everything was read that is written."""
        self._rows, self._floors, self._clock = rows, floors, clock
        self._part, self._text = start, str(start)
        self._pages: AsyncGenerator[list[Row], None] | None = None
        self._to = start.low

    @property
    def text(self) -> str:
        """The line's part of the cursor, as text."""
        part = self._part if self.ahead else self.reading.part()
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
        self.ahead += self.reading.finish(now_ms) if rows is None else self.reading.page(rows, now_ms)
        if self.reading.is_full:
            await self.close()
        if self.reading.is_at_end:
            self.read_to = self._to
        self.ahead += self.reading.expire(now_ms)

    def pop(self) -> Emitted[Row] | Lost:
        """Take out what goes out next; the cursor moves behind it."""
        found = self.ahead.popleft()
        self._part, self._text = found.part, str(found.part)
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
        for look in self.reading.looks(now_ms):
            async with aclosing(self._rows.narrow(self.tag, look.after, look.to)) as pages:
                async for rows in pages:
                    await self._meet(rows)
                    wanted |= {_key(row): row for row in self.reading.spot(rows)}
        for first, last in _stretches(sorted((row.stamp for row in wanted.values()), key=order)):
            async with aclosing(self._rows.rows(self.tag, last_of(ms_of(first) - 1), last)) as found:
                async for full in found:
                    self.ahead += self.reading.late([row for row in full if _key(row) in wanted], now_ms)
        self.reading.looked()

    async def _meet(self, rows: Sequence[TagRow]) -> None:
        strange = self.reading.strangers(rows)
        if strange:
            levels = (await self._floors.read([self.shard]))[self.shard]
            self.reading.admit(strange - levels.marks.keys() - levels.floors.keys())


def _key(row: TagRow) -> _Key:
    return row.stamp, row.pid, row.tag_seq


def _stretches(stamps: Sequence[UUID]) -> list[tuple[UUID, UUID]]:
    """Return the first and the last stamp of each stretch that is read in one go."""
    found: list[tuple[UUID, UUID]] = []
    for stamp in stamps:
        if found and ms_of(stamp) - ms_of(found[-1][1]) <= APART_MS:
            found[-1] = found[-1][0], stamp
        else:
            found.append((stamp, stamp))
    return found

"""Reads rows of tags from Cassandra, in the order of their stamps.

Only buckets that are listed are looked into; each lies within one UTC day. Invariant: nothing is skipped because of
where a page ends, also where stamps are equal: a page goes on after a row, not after a stamp.
The driver answers in threads of its own; what it says is carried over to the event loop that asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import lru_cache
from typing import Any, Final, TypeAlias
from uuid import UUID

from cassandra.cluster import ResultSet

from tailrace.log.event import Source
from tailrace.log.segment import bucket_start
from tailrace.views.tags.rows.cassandra import CassandraOptions, Connection, translated
from tailrace.views.tags.rows.partitions import Bucket, Page, Partition, R, in_order
from tailrace.views.tags.rows.store import Narrow, Row
from tailrace.views.tags.stamp import ms_of

PAGE_BYTES: Final = 4 << 20
"""About how much one page may hold: of large rows, a page has fewer."""
_LEAST_PAGE, _FIRST_PAGE = 8, 50
_LISTED_AT_ONCE: Final = 1_000
_FIRST_MS, _LAST_MS = -(1 << 63), (1 << 63) - 1

After: TypeAlias = UUID | tuple[UUID, str, int]
"""A stamp, or a row by its stamp, pid and number: what comes after it is wanted."""

_NARROW: Final = "timestamp, persistence_id, tag_pid_sequence_nr, topic, generation, partition, offset"
_WIDE: Final = f"{_NARROW}, sequence_nr, time, key, headers, value, tags"
_FROM: Final = "FROM $keyspace.tag_views WHERE tag_name = ? AND timebucket = ? AND"
_AFTER_STAMP: Final = "timestamp > ? AND timestamp <= ?"
_AFTER_ROW: Final = "(timestamp, persistence_id, tag_pid_sequence_nr) > (?, ?, ?) AND (timestamp) <= (?)"
_DOWN: Final = "timestamp <= ? ORDER BY timestamp DESC"
_BUCKETS: Final = "SELECT start, span FROM $keyspace.tag_buckets WHERE tag_name = ? AND start >= ? AND start <= ?"
_BUCKETS_DOWN: Final = f"{_BUCKETS} ORDER BY start DESC"
_TAGS: Final = "SELECT DISTINCT tag_name FROM $keyspace.tag_buckets"


class RowReader:
    """Reads rows, for the service; a dead node fails what is asked, and the reader goes on when it is back.

    Args:
        options: The cluster and the keyspace.
        page: How many rows are asked for at once.
    """

    def __init__(self, options: CassandraOptions, *, page: int = 500) -> None:
        self.page = page
        self._connection = Connection(options)
        self._opened = False

    async def open(self) -> RowReader:
        """Connect, unless that was done.

        Raises:
            StoreUnavailable: Cassandra does not answer, or nobody has made the tables yet.
        """
        if not self._opened:
            await asyncio.to_thread(self._prepare)
            self._opened = True
        return self

    async def close(self) -> None:
        """Close all connections."""
        self._opened = False
        await asyncio.to_thread(self._connection.close)

    async def tags(self) -> list[str]:
        """Return every tag that has a bucket, in order."""
        return sorted([tag async for page in self._all(_TAGS, ()) for (tag,) in page])

    async def buckets(self, tag: str, from_ms: int = _FIRST_MS, to_ms: int = _LAST_MS) -> list[Bucket]:
        """Return the listed buckets of a tag that have any of these milliseconds, in order."""
        return [bucket async for day in self._days(tag, from_ms, to_ms) for bucket in day]

    def rows(self, tag: str, after: After, to: UUID, *, page: int | None = None) -> AsyncGenerator[list[Row], None]:
        """Read the rows after a stamp, or after a row, up to a stamp, in order, page by page; no page is empty.

        Pages are read ahead of whoever takes them: close the iterator if it is left before its end.
        """
        return self._read(_WIDE, tag, after, to, _row, _Pace(page or self.page))

    def narrow(
        self, tag: str, after: After, to: UUID, *, page: int | None = None
    ) -> AsyncGenerator[list[Narrow], None]:
        """Read the same rows without what they carry."""
        return self._read(_NARROW, tag, after, to, _narrow, _Pace(page or self.page, page or self.page))

    async def back(self, tag: str, upto: UUID, *, page: int | None = None) -> AsyncGenerator[list[Row], None]:
        """Read the rows up to a stamp, the newest first, page by page; for whoever wants some of the newest."""
        text, pace = f"SELECT {_WIDE} {_FROM} {_DOWN}", _Pace(page or self.page)

        def ask(bucket: Bucket, place: Any) -> asyncio.Future[Page]:
            return self._ask(text, (tag, bucket.start_ms, upto), pace.size, place)

        def opened(bucket: Bucket) -> Partition[Row]:
            return Partition(bucket, ask, lambda bucket, raw: _row(tag, bucket, raw))

        days = self._days(tag, _FIRST_MS, ms_of(upto), down=True)
        async with aclosing(days), aclosing(in_order(days, opened, pace.most, down=True)) as pages:
            async for rows in pages:
                pace.notice(rows)
                yield rows

    async def _read(
        self, columns: str, tag: str, after: After, to: UUID, made: Callable[[str, Bucket, Any], R], pace: _Pace
    ) -> AsyncGenerator[list[R], None]:
        place = (after,) if isinstance(after, UUID) else after
        text = f"SELECT {columns} {_FROM} {_AFTER_STAMP if len(place) == 1 else _AFTER_ROW}"

        def ask(bucket: Bucket, state: Any) -> asyncio.Future[Page]:
            return self._ask(text, (tag, bucket.start_ms, *place, to), pace.size, state)

        def opened(bucket: Bucket) -> Partition[R]:
            return Partition(bucket, ask, lambda bucket, raw: made(tag, bucket, raw))

        days = self._days(tag, ms_of(place[0]), ms_of(to))
        async with aclosing(days), aclosing(in_order(days, opened, pace.most)) as pages:
            async for rows in pages:
                pace.notice(rows)
                yield rows

    async def _days(
        self, tag: str, from_ms: int, to_ms: int, *, down: bool = False
    ) -> AsyncGenerator[list[Bucket], None]:
        """Read the listed buckets that have any of these milliseconds: those of each day together, in order."""
        first = from_ms if from_ms == _FIRST_MS else bucket_start(from_ms)
        day: list[Bucket] = []
        async for page in self._all(_BUCKETS_DOWN if down else _BUCKETS, (tag, first, to_ms)):
            for start, span in page:
                if day and bucket_start(day[0].start_ms) != bucket_start(start):
                    yield sorted(day)
                    day = []
                if start + span > from_ms:
                    day.append(Bucket(start, span))
        if day:
            yield sorted(day)

    async def _all(self, text: str, values: Sequence[Any]) -> AsyncIterator[list[Any]]:
        await self.open()
        state: Any = None
        while True:
            rows, state = await self._ask(text, values, _LISTED_AT_ONCE, state)
            yield rows
            if state is None:
                return

    def _ask(self, text: str, values: Sequence[Any], size: int, state: Any) -> asyncio.Future[Page]:
        """Ask for one page; the answer comes in this event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Page] = loop.create_future()
        bound = self._connection.prepared(text).bind(values)
        bound.fetch_size = size

        def settle(rows: Any, error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result((rows or [], ResultSet(response, rows).paging_state))
                return
            try:
                with translated():
                    raise error
            except Exception as ours:
                future.set_exception(ours)

        def told(rows: Any, error: Exception | None = None) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle, rows, error)

        with translated():
            response = self._connection.session.execute_async(bound, paging_state=state)
            response.add_callbacks(told, lambda error: told(None, error))
        return future

    def _prepare(self) -> None:
        slices = [
            f"SELECT {columns} {_FROM} {where}" for columns in (_WIDE, _NARROW) for where in (_AFTER_STAMP, _AFTER_ROW)
        ]
        for text in (*slices, f"SELECT {_WIDE} {_FROM} {_DOWN}", _BUCKETS, _BUCKETS_DOWN, _TAGS):
            self._connection.prepared(text)


class _Pace:
    """How many rows are asked for at once: few at first, then as many as make a page of about ``PAGE_BYTES``."""

    def __init__(self, most: int, first: int = _FIRST_PAGE) -> None:
        self.most = most
        self.size = min(most, first)

    def notice(self, rows: Sequence[Narrow]) -> None:
        """Look at the rows of a page."""
        held = sum(len(row.value or b"") for row in rows if isinstance(row, Row))
        fitting = max(_LEAST_PAGE, PAGE_BYTES * len(rows) // (held + 1))
        self.size = min(self.most, fitting, 4 * self.size)


@lru_cache(10_000)
def _place(topic: str | None, generation: int | None, partition: int | None) -> Source:
    """Return the place that a row names; somebody else's rows may have none."""
    return Source(topic or "", partition or 0, generation or 0)


def _narrow(tag: str, bucket: Bucket, raw: Any) -> Narrow:
    stamp, pid, tag_seq, topic, generation, partition, offset = raw
    return Narrow(
        tag=tag,
        bucket_ms=bucket.start_ms,
        stamp=stamp,
        pid=pid,
        tag_seq=tag_seq,
        place=_place(topic, generation, partition),
        offset=offset or 0,
    )


def _row(tag: str, bucket: Bucket, raw: Any) -> Row:
    stamp, pid, tag_seq, topic, generation, partition, offset, seq, time, key, headers, value, tags = raw
    return Row(
        tag=tag,
        bucket_ms=bucket.start_ms,
        span_ms=bucket.span_ms,
        stamp=stamp,
        pid=pid,
        tag_seq=tag_seq,
        seq=seq or 0,
        place=_place(topic, generation, partition),
        offset=offset or 0,
        time_ms=ms_of(stamp) if time is None else time,
        key=key,
        headers=headers or [],
        value=value,
        tags=tuple(tags) if tags else (tag,),
    )

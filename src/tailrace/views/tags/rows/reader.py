"""The reader of rows in Cassandra, in the order of their timeuuids.

Only listed buckets are read. Each is one Cassandra partition and lies within one UTC day. The length of buckets may
have been changed, so buckets of one day may overlap; such partitions are merged row by row. Pages are requested ahead:
the next one of a large partition, or those of several small partitions. Invariant: rows come in Cassandra's order of
(timeuuid, source, number), or in the reverse order; a page boundary never skips a row, also among equal timeuuids.

The driver answers in its own threads; answers are passed to the event loop of the caller.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import lru_cache
from itertools import islice
from typing import Any, Final, Generic, TypeAlias, TypeVar
from uuid import UUID

import msgspec
from cassandra.cluster import ResultSet

from tailrace.log.event import Partition
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import first_of, last_of, ms_of, order
from tailrace.views.tags.rows.cassandra import CassandraConnection, CassandraOptions, translated
from tailrace.views.tags.rows.store import RowKey, StoredRow

PAGE_BYTES: Final = 4 << 20
"""About the size of a page: with large rows, a page has fewer."""
_MIN_PAGE, _FIRST_PAGE = 8, 50
_BUCKETS_PAGE: Final = 1_000
_MAX_AHEAD: Final = 32
_FIRST_MS, _LAST_MS = -(1 << 63), (1 << 63) - 1

Page: TypeAlias = tuple[list[Any], Any]
"""Rows of the driver, and the paging state of the next page, if there is one."""
After: TypeAlias = UUID | tuple[UUID, str, int]
"""The timeuuid, or the row by timeuuid, source and number, after which to read."""
R = TypeVar("R", bound=RowKey)

_KEY_COLUMNS: Final = "timestamp, persistence_id, tag_pid_sequence_nr, topic, generation, partition, offset"
_ALL_COLUMNS: Final = f"{_KEY_COLUMNS}, sequence_nr, time, key, headers, value, tags"
_FROM: Final = "FROM $keyspace.tag_views WHERE tag_name = ? AND timebucket = ? AND"
_AFTER_TIMEUUID: Final = "timestamp > ? AND timestamp <= ?"
_AFTER_ROW: Final = "(timestamp, persistence_id, tag_pid_sequence_nr) > (?, ?, ?) AND (timestamp) <= (?)"
_DOWN: Final = "timestamp <= ? ORDER BY timestamp DESC"
_BUCKETS: Final = "SELECT start, span FROM $keyspace.tag_buckets WHERE tag_name = ? AND start >= ? AND start <= ?"
_BUCKETS_DOWN: Final = f"{_BUCKETS} ORDER BY start DESC"
_TAGS: Final = "SELECT DISTINCT tag_name FROM $keyspace.tag_buckets"


class Bucket(msgspec.Struct, frozen=True, order=True):
    """A listed bucket of a tag."""

    start_ms: int
    span_ms: int


class RowReader:
    """Reads rows for the service; after a failure it works again when the node is back.

    Args:
        page: Most rows in a page.
    """

    def __init__(self, options: CassandraOptions, *, page: int = 500) -> None:
        self.page = page
        self._connection = CassandraConnection(options)
        self._opened = False

    async def open(self) -> RowReader:
        """Connect, unless that was done.

        Raises:
            StoreUnavailable: Cassandra does not answer, or the tables do not exist yet.
        """
        if not self._opened:
            await asyncio.to_thread(self._prepare)
            self._opened = True
        return self

    async def close(self) -> None:
        self._opened = False
        await asyncio.to_thread(self._connection.close)

    async def tags(self) -> list[str]:
        """Return all tags with a bucket, in order."""
        return sorted([tag async for page in self._all(_TAGS, ()) for (tag,) in page])

    async def buckets(self, tag: str, from_ms: int = _FIRST_MS, to_ms: int = _LAST_MS) -> list[Bucket]:
        """Return the listed buckets of a tag that overlap a range of milliseconds, in order."""
        return [bucket async for day in self._days(tag, from_ms, to_ms) for bucket in day]

    def rows(
        self, tag: str, after: After, to: UUID, *, page: int | None = None
    ) -> AsyncGenerator[list[StoredRow], None]:
        """Yield the rows after a timeuuid or a row, up to a timeuuid, in order, page by page; no page is empty.

        Pages are requested ahead: close the iterator if you leave it before its end.
        """
        return self._read_after(_ALL_COLUMNS, _row, tag, after, to, _PageSize(page or self.page))

    def row_keys(
        self, tag: str, after: After, to: UUID, *, page: int | None = None
    ) -> AsyncGenerator[list[RowKey], None]:
        """Yield the keys of the same rows."""
        return self._read_after(_KEY_COLUMNS, _row_key, tag, after, to, _PageSize(page or self.page, page or self.page))

    def rows_down(self, tag: str, upto: UUID, *, page: int | None = None) -> AsyncGenerator[list[StoredRow], None]:
        """Yield the rows up to a timeuuid, newest first, page by page."""
        text = f"SELECT {_ALL_COLUMNS} {_FROM} {_DOWN}"
        days = self._days(tag, _FIRST_MS, ms_of(upto), down=True)
        return self._read(text, _row, tag, (upto,), days, _PageSize(page or self.page), down=True)

    def _read_after(
        self, columns: str, make: Callable[[str, Bucket, Any], R], tag: str, after: After, to: UUID, size: _PageSize
    ) -> AsyncGenerator[list[R], None]:
        key = (after,) if isinstance(after, UUID) else after
        text = f"SELECT {columns} {_FROM} {_AFTER_TIMEUUID if len(key) == 1 else _AFTER_ROW}"
        return self._read(text, make, tag, (*key, to), self._days(tag, ms_of(key[0]), ms_of(to)), size)

    async def _read(
        self,
        text: str,
        make: Callable[[str, Bucket, Any], R],
        tag: str,
        values: Sequence[Any],
        days: AsyncGenerator[list[Bucket], None],
        size: _PageSize,
        *,
        down: bool = False,
    ) -> AsyncGenerator[list[R], None]:
        def request(bucket: Bucket, state: Any) -> asyncio.Future[Page]:
            return self._request(text, (tag, bucket.start_ms, *values), size.now, state)

        def open_bucket(bucket: Bucket) -> CassandraPartition[R]:
            return CassandraPartition(bucket, request, lambda bucket, raw: make(tag, bucket, raw))

        async with aclosing(days), aclosing(in_order(days, open_bucket, size.most, down=down)) as pages:
            async for rows in pages:
                size.adapt(rows)
                yield rows

    async def _days(
        self, tag: str, from_ms: int, to_ms: int, *, down: bool = False
    ) -> AsyncGenerator[list[Bucket], None]:
        """Yield the listed buckets that overlap a range of milliseconds, sorted, those of a day together."""
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
            rows, state = await self._request(text, values, _BUCKETS_PAGE, state)
            yield rows
            if state is None:
                return

    def _request(self, text: str, values: Sequence[Any], size: int, state: Any) -> asyncio.Future[Page]:
        """Request one page; the answer comes in this event loop."""
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

        def answer(rows: Any, error: Exception | None = None) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(settle, rows, error)

        with translated():
            response = self._connection.session.execute_async(bound, paging_state=state)
            response.add_callbacks(answer, lambda error: answer(None, error))
        return future

    def _prepare(self) -> None:
        slices = [
            f"SELECT {columns} {_FROM} {where}"
            for columns in (_ALL_COLUMNS, _KEY_COLUMNS)
            for where in (_AFTER_TIMEUUID, _AFTER_ROW)
        ]
        for text in (*slices, f"SELECT {_ALL_COLUMNS} {_FROM} {_DOWN}", _BUCKETS, _BUCKETS_DOWN, _TAGS):
            self._connection.prepared(text)


class _PageSize:
    """The number of rows in a page: few at first, then as many as make about ``PAGE_BYTES``."""

    def __init__(self, most: int, first: int = _FIRST_PAGE) -> None:
        self.most = most
        self.now = min(most, first)

    def adapt(self, rows: Sequence[RowKey]) -> None:
        size = sum(len(row.value or b"") for row in rows if isinstance(row, StoredRow))
        fitting = max(_MIN_PAGE, PAGE_BYTES * len(rows) // (size + 1))
        self.now = min(self.most, fitting, 4 * self.now)


@lru_cache(10_000)
def _partition(topic: str | None, generation: int | None, partition: int | None) -> Partition:
    """Return the partition of a row; rows of another program may have none."""
    return Partition(topic or "", partition or 0, generation or 0)


def _row_key(tag: str, bucket: Bucket, raw: Any) -> RowKey:
    timeuuid, source, tag_seq, topic, generation, partition, offset = raw
    return RowKey(
        tag=tag,
        bucket_ms=bucket.start_ms,
        timeuuid=timeuuid,
        source=source,
        tag_seq=tag_seq,
        partition=_partition(topic, generation, partition),
        offset=offset or 0,
    )


def _row(tag: str, bucket: Bucket, raw: Any) -> StoredRow:
    timeuuid, source, tag_seq, topic, generation, partition, offset, seq, time, key, headers, value, tags = raw
    return StoredRow(
        tag=tag,
        bucket_ms=bucket.start_ms,
        span_ms=bucket.span_ms,
        timeuuid=timeuuid,
        source=source,
        tag_seq=tag_seq,
        seq=seq or 0,
        partition=_partition(topic, generation, partition),
        offset=offset or 0,
        time_ms=ms_of(timeuuid) if time is None else time,
        key=key,
        headers=headers or [],
        value=value,
        tags=tuple(tags) if tags else (tag,),
    )


class CassandraPartition(Generic[R]):
    """One bucket, read page by page, with one page requested ahead.

    Args:
        request: Requests the page at a paging state, None for the first.
        make: Makes a row from one of the driver.
    """

    __slots__ = ("_begun", "_make", "_next", "_request", "bucket")

    def __init__(
        self, bucket: Bucket, request: Callable[[Bucket, Any], asyncio.Future[Page]], make: Callable[[Bucket, Any], R]
    ) -> None:
        self.bucket = bucket
        self._request, self._make = request, make
        self._begun = False
        self._next: asyncio.Future[Page] | None = None

    def begin(self) -> None:
        """Request the first page, unless that was done."""
        if not self._begun:
            self._begun, self._next = True, self._request(self.bucket, None)

    async def page(self) -> list[R]:
        """Return the next rows; none at the end."""
        self.begin()
        while self._next is not None:
            rows, state = await self._next
            self._next = None if state is None else self._request(self.bucket, state)
            if rows:
                return [self._make(self.bucket, row) for row in rows]
        return []

    def drop(self) -> None:
        if self._next is not None and not self._next.cancel() and not self._next.cancelled():
            self._next.exception()  # retrieved, so that asyncio does not complain


async def in_order(
    days: AsyncIterator[list[Bucket]],
    open_bucket: Callable[[Bucket], CassandraPartition[R]],
    size: int,
    *,
    down: bool = False,
) -> AsyncGenerator[list[R], None]:
    """Yield the rows of buckets in order, page by page; no page is empty.

    Args:
        days: The sorted buckets of each day, in the order of reading.
        size: Rows in a page of merged partitions.
        down: Newest first.
    """
    ahead: deque[list[CassandraPartition[R]]] = deque()
    wanted, more = 1, True
    try:
        while more or ahead:
            while more and len(ahead) <= wanted:
                day = await anext(days, None)
                more = day is not None
                ahead.extend([open_bucket(bucket) for bucket in group] for group in overlapping(day or [], down=down))
            for partitions in islice(ahead, wanted + 1):
                partitions[0].begin()
            if not ahead:
                break
            count = 0
            first = ahead[0]
            async with aclosing(_alone(first[0]) if len(first) == 1 else _merged(first, size, down)) as pages:
                async for rows in pages:
                    count += len(rows)
                    yield rows
            ahead.popleft()
            # Request as many small partitions at once as make about one page.
            wanted = min(wanted * 2, _MAX_AHEAD) if count * wanted < size else max(wanted // 2, 1)
    finally:
        for partitions in ahead:
            for partition in partitions:
                partition.drop()


async def _alone(partition: CassandraPartition[R]) -> AsyncGenerator[list[R], None]:
    while rows := await partition.page():
        yield rows


async def _merged(partitions: Sequence[CassandraPartition[R]], size: int, down: bool) -> AsyncGenerator[list[R], None]:
    """Merge overlapping partitions; begin each only when its first row may be the next."""
    heads: list[tuple[list[R], int]] = [([], 0)] * len(partitions)
    heap = [(_SortKey(_edge(partition.bucket, down), "", 0, down), i) for i, partition in enumerate(partitions)]
    heapq.heapify(heap)
    out: list[R] = []
    while heap:
        _, i = heapq.heappop(heap)
        rows, at = heads[i]
        if rows:
            out.append(rows[at])
            at += 1
        if at == len(rows):
            rows, at = await partitions[i].page(), 0
        if rows:
            heads[i] = rows, at
            row = rows[at]
            heapq.heappush(heap, (_SortKey(order(row.timeuuid), row.source, row.tag_seq, down), i))
        if len(out) >= size:
            yield out
            out = []
    if out:
        yield out


class _SortKey:
    """Sort key of a row in Cassandra's order, or in the reverse order; all that a heap needs."""

    __slots__ = ("down", "key")

    def __init__(self, timeuuid: int, source: str, tag_seq: int, down: bool) -> None:
        self.key, self.down = (timeuuid, source, tag_seq), down

    def __lt__(self, other: _SortKey) -> bool:
        return self.key > other.key if self.down else self.key < other.key


def _edge(bucket: Bucket, down: bool) -> int:
    """Return a sort key that no row of a bucket comes before."""
    return order(last_of(bucket.start_ms + bucket.span_ms)) if down else order(first_of(bucket.start_ms))


def overlapping(buckets: Sequence[Bucket], *, down: bool = False) -> list[list[Bucket]]:
    """Group sorted buckets so that groups do not overlap; buckets with one start are one partition, of any length."""
    longest = {bucket.start_ms: bucket.span_ms for bucket in buckets}  # the longest bucket of a start comes last
    groups: list[list[Bucket]] = []
    end = 0
    for start, span in longest.items():
        if not groups or start >= end:
            groups.append([])
            end = start
        groups[-1].append(Bucket(start, span))
        end = max(end, start + span)
    return groups[::-1] if down else groups

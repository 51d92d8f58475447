"""The rows of tags in Cassandra: their writer, their reader, and ``RowWalk``, a reader that blocks.

A row is one event in one of its tags. Its Cassandra partition is the bucket of the tag. Its key is a pure function of
the record and the progress of its source, so writing it twice is writing it once. Invariant: a bucket is listed before
its first row is written, so a reader of all listed buckets misses no row that existed when it began.

A bucket lies within one UTC day. The length of buckets may have been changed, so buckets of one day may overlap; such
partitions are merged row by row. Pages are requested ahead: the next one of a large partition, or those of several
small partitions. Invariant: rows come in Cassandra's order of (timeuuid, source, number), or in the reverse order; a
page boundary never skips a row, also among equal timeuuids.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import struct
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Final, Generic, TypeAlias, TypeVar
from uuid import UUID

import msgspec
from cassandra.cluster import NoHostAvailable, ResultSet
from cassandra.connection import ConnectionBusy
from cassandra.query import UNSET_VALUE, BatchStatement, BatchType, BoundStatement

from tailrace.log.event import Partition
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import first_of, last_of, ms_of, order
from tailrace.views.tags.rows.cassandra import PROTOCOL, CassandraConnection, connected, translated
from tailrace.views.tags.rows.model import RowKey, StoredRow
from tailrace.views.tags.settings import CassandraSettings

BATCH_BYTES: Final = 1 << 20
"""About the largest size of a batch; one row may be larger."""
RELIST_S: Final = 3_600.0
"""A bucket is listed again after this time; ``BUCKET_MARGIN``, by which its entry outlives its rows, is far longer."""
_LISTED_CACHE: Final = 100_000
_ROW_BYTES: Final = 200
_IN_FLIGHT: Final = 32
PAGE_BYTES: Final = 4 << 20
"""About the size of a page: with large rows, a page has fewer."""
WALK_PAGE: Final = 2_000
_MIN_PAGE, _FIRST_PAGE = 8, 50
_BUCKETS_PAGE: Final = 1_000
_MAX_AHEAD: Final = 32
_FAR_MS: Final = 1 << 50

_INSERT: Final = (
    "INSERT INTO $keyspace.tag_views (tag_name, timebucket, timestamp, persistence_id, tag_pid_sequence_nr, "
    "sequence_nr, topic, generation, partition, offset, time, key, headers, value, tags) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_HEADERS: Final = 12
"""Index of the headers in the values of a row."""
_DELETE: Final = (
    "DELETE FROM $keyspace.tag_views WHERE tag_name = ? AND timebucket = ? "
    "AND timestamp = ? AND persistence_id = ? AND tag_pid_sequence_nr = ?"
)
_LIST: Final = "INSERT INTO $keyspace.tag_buckets (tag_name, start, span) VALUES (?, ?, ?)"
_KEY_COLUMNS: Final = "timestamp, persistence_id, tag_pid_sequence_nr, topic, generation, partition, offset"
_ALL_COLUMNS: Final = f"{_KEY_COLUMNS}, sequence_nr, time, key, headers, value, tags"
_FROM: Final = "FROM $keyspace.tag_views WHERE tag_name = ? AND timebucket = ? AND"
_ROWS: Final = f"SELECT {_ALL_COLUMNS} {_FROM} timestamp > ? AND timestamp <= ?"
_ROW_KEYS: Final = f"SELECT {_KEY_COLUMNS} {_FROM} timestamp > ? AND timestamp <= ?"
_ROWS_DOWN: Final = f"SELECT {_ALL_COLUMNS} {_FROM} timestamp <= ? ORDER BY timestamp DESC"
_BUCKETS: Final = "SELECT start, span FROM $keyspace.tag_buckets WHERE tag_name = ? AND start >= ? AND start <= ?"
_BUCKETS_DOWN: Final = f"{_BUCKETS} ORDER BY start DESC"
_TAGS: Final = "SELECT DISTINCT tag_name FROM $keyspace.tag_buckets"

R = TypeVar("R", bound=RowKey)
Page: TypeAlias = tuple[list[Any], Any]
"""Rows of the driver, and the paging state of the next page, if there is one."""


class RowWriter:
    """Writes rows to prepared tables, ``batch`` rows of a Cassandra partition at once; blocks. Not safe for threads."""

    def __init__(self, connection: CassandraConnection, batch: int = 150) -> None:
        self._connection, self._batch = connection, batch
        self._listed: dict[tuple[str, int, int], float] = {}

    def write(self, rows: Iterable[StoredRow]) -> None:
        """Write rows; existing rows are overwritten with the same values.

        After StoreUnavailable some may be written and some not, and nothing is in flight: write all of them again.
        """
        rows = list(rows)
        self._list({(row.tag, row.bucket_ms, row.span_ms) for row in rows})
        headers = self._connection.prepared(_INSERT).column_metadata[_HEADERS].type
        self._send(_INSERT, rows, lambda row: _values(row, headers))

    def delete(self, rows: Iterable[RowKey]) -> None:
        """Delete rows, after StoreUnavailable all of them again. None of the keys may be written again later."""
        self._send(_DELETE, rows, _key_values)

    def _list(self, buckets: set[tuple[str, int, int]]) -> None:
        now = time.monotonic()
        fresh = [bucket for bucket in buckets if now - self._listed.get(bucket, -RELIST_S) >= RELIST_S]
        if not fresh:
            return
        self._execute(map(self._connection.prepared(_LIST).bind, sorted(fresh)))
        if len(self._listed) + len(fresh) > _LISTED_CACHE:
            self._listed.clear()
        self._listed.update(dict.fromkeys(fresh, now))

    def _batches(self, rows: Iterable[R]) -> Iterator[list[R]]:
        """Yield batches of rows, each of one Cassandra partition."""
        batches: dict[tuple[str, int], tuple[list[R], int]] = {}
        for row in rows:
            key, more = (row.tag, row.bucket_ms), _size(row)
            batch, size = batches.get(key, ([], 0))
            if batch and (len(batch) >= self._batch or size + more > BATCH_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(row)
            batches[key] = batch, size + more
        yield from (batch for batch, _ in batches.values())

    def _send(self, text: str, rows: Iterable[R], values: Callable[[R], list[Any]]) -> None:
        """Execute a statement for all rows. Values are bytes already: the driver would take 15 µs for each row."""
        prepared = self._connection.prepared(text)

        def statements() -> Iterator[Any]:
            for batch in self._batches(rows):
                statement, bound = BatchStatement(BatchType.UNLOGGED), BoundStatement(prepared)
                statement.is_idempotent = True
                for row in batch:
                    bound.values = values(row)
                    statement.add(bound)
                yield statement

        self._execute(statements())

    def _execute(self, statements: Iterable[Any]) -> None:
        """Execute statements and wait for all; start no more after a failure."""
        session = self._connection.open().session
        in_flight: deque[tuple[Any, Any]] = deque()
        with translated():
            try:
                for statement in statements:
                    if len(in_flight) >= _IN_FLIGHT:
                        self._wait(*in_flight.popleft())
                    in_flight.append((statement, session.execute_async(statement)))
                while in_flight:
                    self._wait(*in_flight.popleft())
            finally:
                for _, response in in_flight:
                    with suppress(Exception):
                        response.result()

    def _wait(self, statement: Any, response: Any) -> None:
        """Wait for an answer. Send a statement again that was not sent, since the socket was full."""
        deadline = time.monotonic() + self._connection.options.timeout.total_seconds()
        while True:
            try:
                response.result()
                return
            except NoHostAvailable as error:
                is_full = any(isinstance(each, ConnectionBusy) for each in error.errors.values())
                if not is_full or time.monotonic() > deadline:
                    raise
            time.sleep(0.005)
            response = self._connection.session.execute_async(statement)


def writer(options: CassandraSettings, batch: int = 150) -> RowWriter:
    """Return the writer of this process, created on first use."""
    key = os.getpid(), options, batch
    if key not in _writers:
        _writers[key] = RowWriter(connected(options), batch)
    return _writers[key]


_writers: dict[tuple[int, CassandraSettings, int], RowWriter] = {}


def _size(row: RowKey) -> int:
    if not isinstance(row, StoredRow):
        return _ROW_BYTES
    headers = sum(len(name) + len(value or b"") for name, value in row.headers) if row.headers else 0
    return _ROW_BYTES + len(row.value or b"") + len(row.key or b"") + headers


# The bytes of values, by their types in schema.cql.

_long = struct.Struct(">q").pack
_int = struct.Struct(">i").pack


def _key_values(row: RowKey) -> list[Any]:
    return [row.tag.encode(), _long(row.bucket_ms), row.timeuuid.bytes, row.source.encode(), _long(row.tag_seq)]


def _values(row: StoredRow, headers: Any) -> list[Any]:
    """Return the values to bind; absent ones are unset, since a null would be a tombstone."""
    return [
        *_key_values(row),
        _long(row.seq),
        *_partition_values(row.partition),
        _long(row.offset),
        _long(row.time_ms),
        UNSET_VALUE if row.key is None else row.key,
        headers.serialize(row.headers, PROTOCOL) if row.headers else UNSET_VALUE,
        UNSET_VALUE if row.value is None else row.value,
        _tags(row.tags) if row.tags else UNSET_VALUE,
    ]


@lru_cache(10_000)
def _partition_values(partition: Partition) -> tuple[bytes, bytes, bytes]:
    return partition.topic.encode(), _int(partition.generation), _int(partition.partition)


@lru_cache(10_000)
def _tags(tags: tuple[str, ...]) -> bytes:
    texts = [tag.encode() for tag in tags]
    return _int(len(texts)) + b"".join(_int(len(text)) + text for text in texts)


class Bucket(msgspec.Struct, frozen=True, order=True):
    start_ms: int
    span_ms: int


class RowReader:
    """Reads rows for the service; after a failure it works again when the node is back."""

    def __init__(self, options: CassandraSettings, *, page: int = 500) -> None:
        self.page = page
        """Most rows in a page."""
        self._connection = CassandraConnection(options)
        self._opened = False

    async def open(self) -> RowReader:
        """Connect, unless that was done; raise StoreUnavailable without an answer, or while there are no tables."""
        if not self._opened:
            for text in (_ROWS, _ROW_KEYS, _ROWS_DOWN, _BUCKETS, _BUCKETS_DOWN, _TAGS):
                await asyncio.to_thread(self._connection.prepared, text)
            self._opened = True
        return self

    async def close(self) -> None:
        self._opened = False
        await asyncio.to_thread(self._connection.close)

    async def tags(self) -> list[str]:
        """Return all tags with a bucket, in order."""
        return sorted([tag async for page in self._all(_TAGS, ()) for (tag,) in page])

    async def buckets(self, tag: str) -> list[Bucket]:
        """Return the listed buckets of a tag, in order."""
        return [bucket async for day in self._days(tag, -_FAR_MS, _FAR_MS) for bucket in day]

    def rows(self, tag: str, after: UUID, to: UUID) -> AsyncGenerator[list[StoredRow], None]:
        """Yield the rows after a timeuuid, up to another, page by page, none empty; close it if you leave it early."""
        return self._read(_ROWS, _row, tag, (after, to), _PageSize(self.page))

    def row_keys(self, tag: str, after: UUID, to: UUID) -> AsyncGenerator[list[RowKey], None]:
        """Yield the keys of the same rows."""
        return self._read(_ROW_KEYS, _row_key, tag, (after, to), _PageSize(self.page, self.page))

    def rows_down(self, tag: str, to: UUID) -> AsyncGenerator[list[StoredRow], None]:
        """Yield the rows up to a timeuuid, newest first, page by page."""
        return self._read(_ROWS_DOWN, _row, tag, (to,), _PageSize(self.page), down=True)

    async def _read(
        self,
        text: str,
        make: Callable[[str, Bucket, Any], R],
        tag: str,
        bounds: Sequence[UUID],
        size: _PageSize,
        *,
        down: bool = False,
    ) -> AsyncGenerator[list[R], None]:
        """Yield the rows within bounds; without a lower one, ``down``, newest first."""

        def open_bucket(bucket: Bucket) -> CassandraPartition[R]:
            values = tag, bucket.start_ms, *bounds
            return CassandraPartition(
                bucket, lambda state: self._request(text, values, size.now, state), partial(make, tag, bucket)
            )

        ahead: deque[list[CassandraPartition[R]]] = deque()
        wanted, more = 1, True
        days = self._days(tag, -_FAR_MS if down else ms_of(bounds[0]), ms_of(bounds[-1]), down=down)
        try:
            while more or ahead:
                while more and len(ahead) <= wanted:
                    day = await anext(days, None)
                    more = day is not None
                    groups = overlapping(day or [], down=down)
                    ahead.extend([open_bucket(bucket) for bucket in group] for group in groups)
                for partitions in islice(ahead, wanted + 1):
                    partitions[0].begin()
                if not ahead:
                    break
                count, first = 0, ahead[0]
                async with aclosing(_alone(first[0]) if len(first) == 1 else _merged(first, size.most, down)) as pages:
                    async for rows in pages:
                        count += len(rows)
                        size.adapt(rows)
                        yield rows
                ahead.popleft()
                # Request as many small partitions at once as make about one page.
                wanted = min(wanted * 2, _MAX_AHEAD) if count * wanted < size.most else max(wanted // 2, 1)
        finally:
            for partition in (partition for partitions in ahead for partition in partitions):
                partition.drop()
            await days.aclose()

    async def _days(
        self, tag: str, from_ms: int, to_ms: int, *, down: bool = False
    ) -> AsyncGenerator[list[Bucket], None]:
        """Yield the listed buckets that overlap a range of milliseconds, sorted, those of a day together."""
        first = bucket_start(from_ms)
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


@dataclass(slots=True)
class CassandraPartition(Generic[R]):
    """One bucket, read page by page, with one page requested ahead."""

    bucket: Bucket
    request: Callable[[Any], asyncio.Future[Page]]
    """Requests the page at a paging state, None for the first."""
    make: Callable[[Any], R]
    begun: bool = False
    requested: asyncio.Future[Page] | None = None

    def begin(self) -> None:
        """Request the first page, unless that was done."""
        if not self.begun:
            self.begun, self.requested = True, self.request(None)

    async def page(self) -> list[R]:
        """Return the next rows; none at the end."""
        self.begin()
        while self.requested is not None:
            rows, state = await self.requested
            self.requested = None if state is None else self.request(state)
            if rows:
                return [self.make(row) for row in rows]
        return []

    def drop(self) -> None:
        if self.requested is not None and not self.requested.cancel() and not self.requested.cancelled():
            self.requested.exception()  # retrieved, so that asyncio does not complain


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


class RowWalk:
    """Reads rows and blocks, for Spark tasks and commands. Use as ``with``: the connections end with it.

    It yields every row of a tag that existed when it began, once, in the order of timeuuids; or raises
    StoreUnavailable, also while there are no tables.
    """

    def __init__(self, options: CassandraSettings) -> None:
        self._reader, self._runner = RowReader(options, page=WALK_PAGE), asyncio.Runner()

    def __enter__(self) -> RowWalk:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._reader.close())
        self._runner.close()

    def tags(self) -> list[str]:
        return self._runner.run(self._reader.tags())

    def buckets(self, tag: str) -> list[Bucket]:
        return self._runner.run(self._reader.buckets(tag))

    def rows(self, tag: str) -> Iterator[StoredRow]:
        return self._each(self._reader.rows(tag, first_of(-_FAR_MS), last_of(_FAR_MS)))

    def narrow(self, tag: str) -> Iterator[RowKey]:
        """Yield the same rows without their contents."""
        return self._each(self._reader.row_keys(tag, first_of(-_FAR_MS), last_of(_FAR_MS)))

    def _each(self, pages: AsyncGenerator[list[R], None]) -> Iterator[R]:
        async def following() -> list[R]:
            return await anext(pages, [])

        try:
            while page := self._runner.run(following()):
                yield from page
        finally:
            self._runner.run(pages.aclose())

"""Reads rows of tags from Cassandra, in the order of their stamps.

Only buckets that are listed are looked into; each lies within one UTC day. Invariant: nothing is skipped because of
where a page ends, also where stamps are equal: a page goes on after a row, not after a stamp.
The driver answers in threads of its own; what it says is carried over to the event loop that asked.

Reads partitions of Cassandra that follow each other in time as one sequence of pages.

The length of buckets may have been changed, so those of one UTC day may overlap: such ones are merged, row by row.
Pages are asked for ahead of whoever takes them: the next one of a large partition, and several small partitions at
once. Invariant: rows come in Cassandra's order of (stamp, pid, number), or exactly the other way round.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import lru_cache, total_ordering
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

_MOST_AHEAD: Final = 32

Page: TypeAlias = tuple[list[Any], Any]
"""Rows, as the driver hands them over, and where the next page begins, if there is one."""
R = TypeVar("R", bound=RowKey)


class Bucket(msgspec.Struct, frozen=True, order=True):
    """A bucket of a tag that has rows, or had."""

    start_ms: int
    span_ms: int


class CassandraPartition(Generic[R]):
    """One partition, read page by page, one page ahead of whoever takes them.

    Args:
        bucket: Whose rows these are.
        ask: Begins to fetch the page at a place, the first one without.
        made: Makes a row of what the driver hands over.
    """

    __slots__ = ("_ask", "_begun", "_coming", "_made", "bucket")

    def __init__(
        self, bucket: Bucket, ask: Callable[[Bucket, Any], asyncio.Future[Page]], made: Callable[[Bucket, Any], R]
    ) -> None:
        self.bucket = bucket
        self._ask, self._made = ask, made
        self._begun = False
        self._coming: asyncio.Future[Page] | None = None

    def begin(self) -> None:
        """Ask for the first page, unless that was done."""
        if not self._begun:
            self._begun, self._coming = True, self._ask(self.bucket, None)

    async def page(self) -> list[R]:
        """Return the next rows; none at the end."""
        self.begin()
        while self._coming is not None:
            rows, place = await self._coming
            self._coming = None if place is None else self._ask(self.bucket, place)
            if rows:
                return [self._made(self.bucket, row) for row in rows]
        return []

    def drop(self) -> None:
        """Forget what was asked for."""
        if self._coming is not None and not self._coming.cancel() and not self._coming.cancelled():
            self._coming.exception()  # looked at, so that asyncio does not complain


async def in_order(
    days: AsyncIterator[list[Bucket]],
    opened: Callable[[Bucket], CassandraPartition[R]],
    size: int,
    *,
    down: bool = False,
) -> AsyncGenerator[list[R], None]:
    """Read the rows of buckets, those of each day given together, in order; no page is empty.

    Args:
        days: The buckets of each day, sorted; days in the order in which they are read.
        opened: Makes the partition of a bucket.
        size: How many rows make a page of merged partitions.
        down: The newest first.
    """
    ahead: deque[list[CassandraPartition[R]]] = deque()
    wanted, more = 1, True
    try:
        while more or ahead:
            while more and len(ahead) <= wanted:
                day = await anext(days, None)
                more = day is not None
                ahead.extend([opened(bucket) for bucket in group] for group in overlapping(day or [], down=down))
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
            # Of small partitions, as many are under way as make about one page.
            wanted = min(wanted * 2, _MOST_AHEAD) if count * wanted < size else max(wanted // 2, 1)
    finally:
        for partitions in ahead:
            for partition in partitions:
                partition.drop()


async def _alone(partition: CassandraPartition[R]) -> AsyncGenerator[list[R], None]:
    while rows := await partition.page():
        yield rows


async def _merged(partitions: Sequence[CassandraPartition[R]], size: int, down: bool) -> AsyncGenerator[list[R], None]:
    """Read partitions that overlap as if they were one; each is begun only when its first row may be the next."""
    heads: list[tuple[list[R], int]] = [([], 0)] * len(partitions)
    heap = [(_Place(_edge(partition.bucket, down), "", 0, down), i) for i, partition in enumerate(partitions)]
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
            heapq.heappush(heap, (_Place(order(row.timeuuid), row.source, row.tag_seq, down), i))
        if len(out) >= size:
            yield out
            out = []
    if out:
        yield out


@total_ordering
class _Place:
    """Where a row stands among others, as Cassandra orders them, or the other way round."""

    __slots__ = ("down", "key")

    def __init__(self, stamp: int, pid: str, tag_seq: int, down: bool) -> None:
        self.key, self.down = (stamp, pid, tag_seq), down

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and self.key == other.key

    def __lt__(self, other: _Place) -> bool:
        return self.key > other.key if self.down else self.key < other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _edge(bucket: Bucket, down: bool) -> int:
    """Return what no row of a bucket comes before."""
    return order(last_of(bucket.start_ms + bucket.span_ms)) if down else order(first_of(bucket.start_ms))


def overlapping(buckets: Sequence[Bucket], *, down: bool = False) -> list[list[Bucket]]:
    """Cut sorted buckets into groups that do not overlap; a start is one partition, whatever lengths it had."""
    longest = {bucket.start_ms: bucket.span_ms for bucket in buckets}  # of one start, the longest comes last
    groups: list[list[Bucket]] = []
    end = 0
    for start, span in longest.items():
        if not groups or start >= end:
            groups.append([])
            end = start
        groups[-1].append(Bucket(start, span))
        end = max(end, start + span)
    return groups[::-1] if down else groups


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
        self._connection = CassandraConnection(options)
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

    def rows(
        self, tag: str, after: After, to: UUID, *, page: int | None = None
    ) -> AsyncGenerator[list[StoredRow], None]:
        """Read the rows after a stamp, or after a row, up to a stamp, in order, page by page; no page is empty.

        Pages are read ahead of whoever takes them: close the iterator if it is left before its end.
        """
        return self._read(_WIDE, tag, after, to, _row, _Pace(page or self.page))

    def narrow(
        self, tag: str, after: After, to: UUID, *, page: int | None = None
    ) -> AsyncGenerator[list[RowKey], None]:
        """Read the same rows without what they carry."""
        return self._read(_NARROW, tag, after, to, _narrow, _Pace(page or self.page, page or self.page))

    async def back(self, tag: str, upto: UUID, *, page: int | None = None) -> AsyncGenerator[list[StoredRow], None]:
        """Read the rows up to a stamp, the newest first, page by page; for whoever wants some of the newest."""
        text, pace = f"SELECT {_WIDE} {_FROM} {_DOWN}", _Pace(page or self.page)

        def ask(bucket: Bucket, place: Any) -> asyncio.Future[Page]:
            return self._ask(text, (tag, bucket.start_ms, upto), pace.size, place)

        def opened(bucket: Bucket) -> CassandraPartition[StoredRow]:
            return CassandraPartition(bucket, ask, lambda bucket, raw: _row(tag, bucket, raw))

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

        def opened(bucket: Bucket) -> CassandraPartition[R]:
            return CassandraPartition(bucket, ask, lambda bucket, raw: made(tag, bucket, raw))

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

    def notice(self, rows: Sequence[RowKey]) -> None:
        """Look at the rows of a page."""
        held = sum(len(row.value or b"") for row in rows if isinstance(row, StoredRow))
        fitting = max(_LEAST_PAGE, PAGE_BYTES * len(rows) // (held + 1))
        self.size = min(self.most, fitting, 4 * self.size)


@lru_cache(10_000)
def _place(topic: str | None, generation: int | None, partition: int | None) -> Partition:
    """Return the place that a row names; somebody else's rows may have none."""
    return Partition(topic or "", partition or 0, generation or 0)


def _narrow(tag: str, bucket: Bucket, raw: Any) -> RowKey:
    stamp, pid, tag_seq, topic, generation, partition, offset = raw
    return RowKey(
        tag=tag,
        bucket_ms=bucket.start_ms,
        timeuuid=stamp,
        source=pid,
        tag_seq=tag_seq,
        partition=_place(topic, generation, partition),
        offset=offset or 0,
    )


def _row(tag: str, bucket: Bucket, raw: Any) -> StoredRow:
    stamp, pid, tag_seq, topic, generation, partition, offset, seq, time, key, headers, value, tags = raw
    return StoredRow(
        tag=tag,
        bucket_ms=bucket.start_ms,
        span_ms=bucket.span_ms,
        timeuuid=stamp,
        source=pid,
        tag_seq=tag_seq,
        seq=seq or 0,
        partition=_place(topic, generation, partition),
        offset=offset or 0,
        time_ms=ms_of(stamp) if time is None else time,
        key=key,
        headers=headers or [],
        value=value,
        tags=tuple(tags) if tags else (tag,),
    )

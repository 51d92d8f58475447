"""Reads partitions of Cassandra that follow each other in time as one sequence of pages.

The length of buckets may have been changed, so those of one UTC day may overlap: such ones are merged, row by row.
Pages are asked for ahead of whoever takes them: the next one of a large partition, and several small partitions at
once. Invariant: rows come in Cassandra's order of (stamp, pid, number), or exactly the other way round.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import total_ordering
from itertools import islice
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from tailrace.views.tags.rows.store import Narrow
from tailrace.views.tags.stamp import first_of, last_of, order

_MOST_AHEAD: Final = 32

Page: TypeAlias = tuple[list[Any], Any]
"""Rows, as the driver hands them over, and where the next page begins, if there is one."""
R = TypeVar("R", bound=Narrow)


class Bucket(msgspec.Struct, frozen=True, order=True):
    """A bucket of a tag that has rows, or had."""

    start_ms: int
    span_ms: int


class Partition(Generic[R]):
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
    days: AsyncIterator[list[Bucket]], opened: Callable[[Bucket], Partition[R]], size: int, *, down: bool = False
) -> AsyncGenerator[list[R], None]:
    """Read the rows of buckets, those of each day given together, in order; no page is empty.

    Args:
        days: The buckets of each day, sorted; days in the order in which they are read.
        opened: Makes the partition of a bucket.
        size: How many rows make a page of merged partitions.
        down: The newest first.
    """
    ahead: deque[list[Partition[R]]] = deque()
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


async def _alone(partition: Partition[R]) -> AsyncGenerator[list[R], None]:
    while rows := await partition.page():
        yield rows


async def _merged(partitions: Sequence[Partition[R]], size: int, down: bool) -> AsyncGenerator[list[R], None]:
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
            heapq.heappush(heap, (_Place(order(row.stamp), row.pid, row.tag_seq, down), i))
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

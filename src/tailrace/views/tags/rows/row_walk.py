"""Rows of tags for whoever has no event loop: a Spark task, or a command.

Invariant: a walk sees every row of a tag that was there when it began, once, in the order of stamps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from types import TracebackType
from typing import Final, TypeVar

from tailrace.views.tags.rows.cassandra import CassandraOptions
from tailrace.views.tags.rows.partitions import Bucket
from tailrace.views.tags.rows.reader import RowReader
from tailrace.views.tags.rows.store import Narrow, Row
from tailrace.views.tags.stamp import first_of, last_of

WALK_PAGE: Final = 2_000
_FAR_MS: Final = 1 << 50

R = TypeVar("R", bound=Narrow)


class Rows:
    """Reads rows; blocks. Use as ``with``: the connections end with it.

    Raises:
        StoreUnavailable: Cassandra does not answer, or nobody has made the tables yet.
    """

    def __init__(self, options: CassandraOptions, page: int = WALK_PAGE) -> None:
        self._reader, self._runner = RowReader(options, page=page), asyncio.Runner()

    def __enter__(self) -> Rows:
        self._runner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._reader.close())
        self._runner.__exit__(kind, error, trace)

    def tags(self) -> list[str]:
        """Return every tag that has a bucket, in order."""
        return self._runner.run(self._reader.tags())

    def buckets(self, tag: str) -> list[Bucket]:
        """Return the buckets of a tag, in order."""
        return self._runner.run(self._reader.buckets(tag))

    def rows(self, tag: str) -> Iterator[Row]:
        """Yield all rows of a tag."""
        return self._each(self._reader.rows(tag, first_of(-_FAR_MS), last_of(_FAR_MS)))

    def narrow(self, tag: str) -> Iterator[Narrow]:
        """Yield the same rows without what they carry."""
        return self._each(self._reader.narrow(tag, first_of(-_FAR_MS), last_of(_FAR_MS)))

    def _each(self, pages: AsyncGenerator[list[R], None]) -> Iterator[R]:
        async def following() -> list[R]:
            return await anext(pages, [])

        try:
            while page := self._runner.run(following()):
                yield from page
        finally:
            self._runner.run(pages.aclose())

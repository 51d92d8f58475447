"""The rows of tags in Cassandra, and their writer; ``rows.reader`` reads them.

A row is one event in one of its tags. Its Cassandra partition is the bucket of the tag. Its key is a pure function of
the record and the progress of its source, so writing it twice is writing it once. Invariant: a bucket is listed before
its first row is written, so a reader of all listed buckets misses no row that existed when it began.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, TypeVar
from uuid import UUID

import msgspec
from cassandra.cluster import NoHostAvailable
from cassandra.connection import ConnectionBusy
from cassandra.query import UNSET_VALUE, BatchStatement, BatchType, BoundStatement

from tailrace.log.event import Headers, Partition
from tailrace.views.tags.rows.cassandra import PROTOCOL, CassandraConnection, CassandraOptions, connected, translated

BATCH_BYTES: Final = 1 << 20
"""About the largest size of a batch; one row may be larger."""
RELIST_S: Final = 3_600.0
"""A bucket is listed again after this time; ``BUCKET_MARGIN``, by which its entry outlives its rows, is far longer."""
_LISTED_CACHE: Final = 100_000
_ROW_BYTES: Final = 200

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


class RowKey(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The key of a row, and the partition and offset of its record."""

    tag: str
    bucket_ms: int
    timeuuid: UUID
    source: str
    tag_seq: int
    partition: Partition
    offset: int


class StoredRow(RowKey, frozen=True, kw_only=True, gc=False):
    """A row: an event in one of its tags."""

    span_ms: int
    """Length of its bucket."""
    seq: int
    time_ms: int
    key: bytes | None
    headers: Headers
    value: bytes | None
    tags: tuple[str, ...]


_Row = TypeVar("_Row", bound=RowKey)


class RowWriter:
    """Writes rows, with many batches in flight; blocks. Not safe for threads.

    Args:
        connection: A connection to prepared tables.
        batch: Rows of one Cassandra partition in a batch.
        in_flight: Most batches in flight.
    """

    def __init__(self, connection: CassandraConnection, batch: int = 150, in_flight: int = 32) -> None:
        self._connection = connection
        self._batch, self._in_flight = batch, in_flight
        self._listed: dict[tuple[str, int, int], float] = {}

    def write(self, rows: Iterable[StoredRow]) -> None:
        """Write rows; existing rows are overwritten with the same values.

        Raises:
            StoreUnavailable: Some may be written and some not; nothing is in flight any more. Write all of them again.
        """
        rows = list(rows)
        self._list({(row.tag, row.bucket_ms, row.span_ms) for row in rows})
        insert = self._connection.prepared(_INSERT)
        headers = insert.column_metadata[_HEADERS].type
        self._send(insert, self._batches(rows, _size), lambda row: _values(row, headers))

    def delete(self, rows: Iterable[RowKey]) -> None:
        """Delete rows. A key that is written again later must not be among them.

        Raises:
            StoreUnavailable: Some may be deleted and some not. Delete all of them again.
        """
        self._send(self._connection.prepared(_DELETE), self._batches(rows, lambda _: _ROW_BYTES), _key)

    def _list(self, buckets: set[tuple[str, int, int]]) -> None:
        now = time.monotonic()
        fresh = [bucket for bucket in buckets if now - self._listed.get(bucket, -RELIST_S) >= RELIST_S]
        if not fresh:
            return
        entry = self._connection.prepared(_LIST)
        self._execute(entry.bind(bucket) for bucket in sorted(fresh))
        if len(self._listed) + len(fresh) > _LISTED_CACHE:
            self._listed.clear()
        self._listed.update(dict.fromkeys(fresh, now))

    def _batches(self, rows: Iterable[_Row], size: Callable[[_Row], int]) -> Iterator[list[_Row]]:
        """Yield batches of rows, each of one Cassandra partition."""
        batches: dict[tuple[str, int], list[_Row]] = {}
        sizes: dict[tuple[str, int], int] = {}
        for row in rows:
            key, more = (row.tag, row.bucket_ms), size(row)
            batch = batches.setdefault(key, [])
            total = sizes.get(key, 0)
            if batch and (len(batch) >= self._batch or total + more > BATCH_BYTES):
                yield batch
                batch = batches[key] = []
                total = 0
            batch.append(row)
            sizes[key] = total + more
        yield from batches.values()

    def _send(self, prepared: Any, batches: Iterable[list[_Row]], values: Callable[[_Row], list[Any]]) -> None:
        """Execute a statement for all rows. Values are bytes already: the driver would take 15 µs for each row."""

        def statements() -> Iterator[Any]:
            for batch in batches:
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
                    if len(in_flight) >= self._in_flight:
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
        deadline = time.monotonic() + self._connection.options.timeout_s
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


def writer(options: CassandraOptions, batch: int = 150) -> RowWriter:
    """Return the writer of this process, created on first use."""
    key = os.getpid(), options, batch
    if key not in _writers:
        _writers[key] = RowWriter(connected(options), batch)
    return _writers[key]


_writers: dict[tuple[int, CassandraOptions, int], RowWriter] = {}


def _size(row: StoredRow) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in row.headers)
    return _ROW_BYTES + len(row.value or b"") + len(row.key or b"") + headers


# The bytes of values, by their types in schema.cql.

_long = struct.Struct(">q").pack
_int = struct.Struct(">i").pack


def _key(row: RowKey) -> list[Any]:
    return [row.tag.encode(), _long(row.bucket_ms), row.timeuuid.bytes, row.source.encode(), _long(row.tag_seq)]


def _values(row: StoredRow, headers: Any) -> list[Any]:
    """Return the values to bind; absent ones are unset, since a null would be a tombstone."""
    return [
        *_key(row),
        _long(row.seq),
        *_partition(row.partition),
        _long(row.offset),
        _long(row.time_ms),
        UNSET_VALUE if row.key is None else row.key,
        headers.serialize(row.headers, PROTOCOL) if row.headers else UNSET_VALUE,
        UNSET_VALUE if row.value is None else row.value,
        _tags(row.tags) if row.tags else UNSET_VALUE,
    ]


@lru_cache(10_000)
def _partition(partition: Partition) -> tuple[bytes, bytes, bytes]:
    return partition.topic.encode(), _int(partition.generation), _int(partition.partition)


@lru_cache(10_000)
def _tags(tags: tuple[str, ...]) -> bytes:
    texts = [tag.encode() for tag in tags]
    return _int(len(texts)) + b"".join(_int(len(text)) + text for text in texts)

"""Rows of tags in Cassandra, and how they are written; ``row_reader`` reads them.

A row is one event in one of its tags, in the partition of its tag and bucket. Its key is a pure function of the record
and of the numbers in force, so to write it twice is to write it once. Invariant: a bucket is listed before its first
row is written, so whoever reads the buckets that are listed misses no row that was there when he began.
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
"""About how large a batch may get; one row may be larger."""
LIST_AGAIN_S: Final = 3_600.0
"""How long a bucket is taken as listed; ``schema.BUCKET_MARGIN``, by which its entry outlives rows, is far more."""
_MOST_LISTED: Final = 100_000
_ROW_BYTES: Final = 200

_INSERT: Final = (
    "INSERT INTO $keyspace.tag_views (tag_name, timebucket, timestamp, persistence_id, tag_pid_sequence_nr, "
    "sequence_nr, topic, generation, partition, offset, time, key, headers, value, tags) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_HEADERS: Final = 12
"""Their place among the values of a row."""
_DELETE: Final = (
    "DELETE FROM $keyspace.tag_views WHERE tag_name = ? AND timebucket = ? "
    "AND timestamp = ? AND persistence_id = ? AND tag_pid_sequence_nr = ?"
)
_LIST: Final = "INSERT INTO $keyspace.tag_buckets (tag_name, start, span) VALUES (?, ?, ?)"


class RowKey(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row without what it carries: its key, and the record that it was made of."""

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
    """How long its bucket is."""
    seq: int
    time_ms: int
    key: bytes | None
    headers: Headers
    value: bytes | None
    tags: tuple[str, ...]


_Any = TypeVar("_Any", bound=RowKey)


class RowWriter:
    """Writes rows, many batches at a time; blocks. Not for several threads.

    Args:
        connection: To the cluster whose tables ``schema.prepare`` has made.
        batch: How many rows of one partition go together.
        in_flight: How many batches are under way at most.
    """

    def __init__(self, connection: CassandraConnection, batch: int = 150, in_flight: int = 32) -> None:
        self._connection = connection
        self._batch, self._in_flight = batch, in_flight
        self._listed: dict[tuple[str, int, int], float] = {}

    def write(self, rows: Iterable[StoredRow]) -> None:
        """Write rows; those that are there are written over with the same.

        Raises:
            StoreUnavailable: Some may be written and some not; nothing is under way any more. Write all of them again.
        """
        wanted = list(rows)
        self._list({(row.tag, row.bucket_ms, row.span_ms) for row in wanted})
        insert = self._connection.prepared(_INSERT)
        headers = insert.column_metadata[_HEADERS].type
        self._send(insert, self._batches(wanted, _size), lambda row: _values(row, headers))

    def delete(self, rows: Iterable[RowKey]) -> None:
        """Take rows back. One that is to stay under the same key must not be among them, also if it is written later.

        Raises:
            StoreUnavailable: Some may be gone and some not. Delete all of them again.
        """
        delete = self._connection.prepared(_DELETE)
        batches = self._batches(rows, lambda _: _ROW_BYTES)
        self._send(delete, batches, _key)

    def _list(self, buckets: set[tuple[str, int, int]]) -> None:
        now = time.monotonic()
        fresh = [bucket for bucket in buckets if now - self._listed.get(bucket, -LIST_AGAIN_S) >= LIST_AGAIN_S]
        if not fresh:
            return
        entry = self._connection.prepared(_LIST)
        self._finish(entry.bind(bucket) for bucket in sorted(fresh))
        if len(self._listed) + len(fresh) > _MOST_LISTED:
            self._listed.clear()
        self._listed.update(dict.fromkeys(fresh, now))

    def _batches(self, rows: Iterable[_Any], size: Callable[[_Any], int]) -> Iterator[list[_Any]]:
        """Cut rows into those that go together, of one partition each."""
        open_ones: dict[tuple[str, int], list[_Any]] = {}
        sizes: dict[tuple[str, int], int] = {}
        for row in rows:
            where, more = (row.tag, row.bucket_ms), size(row)
            batch = open_ones.setdefault(where, [])
            held = sizes.get(where, 0)
            if batch and (len(batch) >= self._batch or held + more > BATCH_BYTES):
                yield batch
                batch = open_ones[where] = []
                held = 0
            batch.append(row)
            sizes[where] = held + more
        yield from open_ones.values()

    def _send(self, prepared: Any, batches: Iterable[list[_Any]], values: Callable[[_Any], list[Any]]) -> None:
        """Execute a statement for all rows. Their values come as bytes: the driver would take 15 µs to make them."""

        def statements() -> Iterator[Any]:
            for batch in batches:
                statement, bound = BatchStatement(BatchType.UNLOGGED), BoundStatement(prepared)
                statement.is_idempotent = True
                for row in batch:
                    bound.values = values(row)
                    statement.add(bound)
                yield statement

        self._finish(statements())

    def _finish(self, statements: Iterable[Any]) -> None:
        """Execute statements and wait for all; after a failure no more are begun."""
        session = self._connection.open().session
        waiting: deque[tuple[Any, Any]] = deque()
        with translated():
            try:
                for statement in statements:
                    if len(waiting) >= self._in_flight:
                        self._wait(*waiting.popleft())
                    waiting.append((statement, session.execute_async(statement)))
                while waiting:
                    self._wait(*waiting.popleft())
            finally:
                for _, response in waiting:
                    with suppress(Exception):
                        response.result()

    def _wait(self, statement: Any, response: Any) -> None:
        """Wait for an answer. A statement that was not even sent, since the socket was full, is sent again."""
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
    """Return the writer of this process, made on first use."""
    mine = os.getpid(), options, batch
    found = _writers.get(mine)
    if found is None:
        found = _writers[mine] = RowWriter(connected(options), batch)
    return found


_writers: dict[tuple[int, CassandraOptions, int], RowWriter] = {}


def _size(row: StoredRow) -> int:
    """Return about how many bytes a row has."""
    carried = _ROW_BYTES + len(row.value or b"") + len(row.key or b"")
    return carried + sum(len(name) + len(value or b"") for name, value in row.headers) if row.headers else carried


# The bytes of values, as schema.cql has their types.

_long = struct.Struct(">q").pack
_int = struct.Struct(">i").pack


def _key(row: RowKey) -> list[Any]:
    return [row.tag.encode(), _long(row.bucket_ms), row.timeuuid.bytes, row.source.encode(), _long(row.tag_seq)]


def _values(row: StoredRow, headers: Any) -> list[Any]:
    """Return what is bound; what there is not is left out, since a null would be a tombstone."""
    return [
        *_key(row),
        _long(row.seq),
        *_place(row.partition),
        _long(row.offset),
        _long(row.time_ms),
        UNSET_VALUE if row.key is None else row.key,
        headers.serialize(row.headers, PROTOCOL) if row.headers else UNSET_VALUE,
        UNSET_VALUE if row.value is None else row.value,
        _tags(row.tags) if row.tags else UNSET_VALUE,
    ]


@lru_cache(10_000)
def _place(place: Partition) -> tuple[bytes, bytes, bytes]:
    return place.topic.encode(), _int(place.generation), _int(place.partition)


@lru_cache(10_000)
def _tags(tags: tuple[str, ...]) -> bytes:
    texts = [tag.encode() for tag in tags]
    return _int(len(texts)) + b"".join(_int(len(text)) + text for text in texts)

"""Rows of tags in a real Cassandra, written by the pipeline's own path or by somebody else."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from uuid import UUID

from tailrace.errors import StoreUnavailable
from tailrace.log.event import Partition
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import make_timeuuid, ms_of
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.rows.model import StoredRow
from tailrace.views.tags.rows.store import writer
from tailrace.views.tags.settings import CassandraSettings, TagsSettings
from tailrace.views.tags.store import VIEW, raise_floors
from tailrace.views.tags.write import TagsPlan
from tests.log.rig import now_ms
from tests.writing import Record, Writer

HOUR = 3_600_000
THEIRS = Partition("theirs", 0)


def their_row(tag: str, pid: str, number: int, at: UUID, place: Partition, span_ms: int) -> StoredRow:
    """A row of somebody else: an event of a source, by its number and its timeuuid."""
    return StoredRow(
        tag=tag,
        bucket_ms=bucket_start(ms_of(at), span_ms),
        span_ms=span_ms,
        timeuuid=at,
        source=pid,
        tag_seq=number,
        partition=place,
        offset=number,
        seq=number,
        time_ms=ms_of(at),
        key=None,
        headers=[],
        value=b'{"theirs":true}',
        tags=(tag,),
    )


class Rows:
    """Writes tagged events as a driver and its tasks do, and rows as somebody else does."""

    def __init__(self, store: StoreOptions, rows: CassandraSettings) -> None:
        self.options = rows
        self.writer = Writer(store, ("intake", VIEW), tags=TagsPlan(tags=TagsSettings(paths=("tags",)), cassandra=rows))
        self.ids: list[str] = []
        self._offsets: dict[int, int] = {}

    def write(self, pid: str, tags: Sequence[str], count: int = 1, *, partition: int = 0, age_ms: int = 0) -> list[str]:
        """Write so many events of a source in one batch; return their ids."""
        records = []
        for _ in range(count):
            offset = self._offsets[partition] = self._offsets.get(partition, -1) + 1
            value = json.dumps({"tags": list(tags), "n": offset}).encode()
            records.append(Record(offset, json.dumps([pid]).encode(), value, now_ms() - age_ms, partition))
        for attempt in range(60, -1, -1):
            try:
                self.writer.write(records)
                break
            except StoreUnavailable:
                if not attempt:
                    raise
                time.sleep(0.5)  # then the task is run again
        self.ids += [record.id for record in records]
        return [record.id for record in records]

    def lift(self, *partitions: int) -> None:
        """Raise the floors of partitions, as the driver does once a second; of all if none is named."""
        now = now_ms()
        named = partitions or tuple(self._offsets)
        raise_floors(self.writer.shards, self.writer.epoch, {Partition("jobs", partition): now for partition in named})

    def put(self, tag: str, *rows: tuple[str, int, int], span_ms: int = HOUR) -> None:
        """Write rows of somebody else: source, number, and the millisecond of the timeuuid."""
        timeuuids = [make_timeuuid(ms, number, Partition(pid, 0)) for pid, number, ms in rows]
        made = [their_row(tag, *row[:2], at, THEIRS, span_ms) for row, at in zip(rows, timeuuids, strict=True)]
        writer(self.options).write(made)

    def close(self) -> None:
        self.writer.host.close()
        self.writer.shards.close()

"""Tagged events in a real store, written by the pipeline's own path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from tailrace.log.event import Partition, home_of, shard_of
from tailrace.valkey.marks import advance
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.settings import CassandraSettings, TagsSettings
from tailrace.views.tags.store import VIEW
from tailrace.views.tags.write import TagsPlan
from tests.writing import NOON, Record, Writer


class Sent(NamedTuple):
    """An event as it was written."""

    id: str
    source: str
    tags: tuple[str, ...]
    partition: int
    offset: int
    n: int


class Tagger:
    """Writes tagged events, as a driver and its tasks do."""

    def __init__(self, store: StoreOptions, rows: CassandraSettings | None = None) -> None:
        options = TagsPlan(tags=TagsSettings(paths=("tags",)), cassandra=rows)
        self.writer = Writer(store, ("intake", VIEW), tags=options)
        self.sent: list[Sent] = []
        self._offsets: dict[int, int] = {}

    def write(
        self,
        pid: str,
        tags: Sequence[str],
        count: int = 1,
        *,
        partition: int = 0,
        time_ms: int | None = None,
        settle: bool = True,
        **data: object,
    ) -> list[str]:
        """Write so many events of a source, in one batch; return their ids."""
        records = [self.draft(pid, tags, partition=partition, time_ms=time_ms, **data) for _ in range(count)]
        self.writer.write(records)
        if settle:
            self.settle()
        return [record.id for record in records]

    def draft(
        self, pid: str, tags: Sequence[str], *, partition: int = 0, time_ms: int | None = None, **data: object
    ) -> Record:
        """Return the next event of a partition; it is to be written later."""
        offset = self._offsets.get(partition, 0)
        self._offsets[partition] = offset + 1
        n = len(self.sent)
        value = json.dumps({"n": n, "tags": list(tags), **data}).encode()
        timestamp = NOON + n * 1000 if time_ms is None else time_ms
        record = Record(offset, json.dumps([pid]).encode(), value, timestamp, partition)
        self.sent.append(Sent(record.id, pid, tuple(tags), partition, offset, n))
        return record

    def settle(self) -> None:
        """Raise the marks of shards that had nothing, as the driver does once a second."""
        ends = {Partition("jobs", partition): offset - 1 for partition, offset in self._offsets.items()}
        advance(self.writer.shards, VIEW, self.writer.epoch, ends)

    def ids(self, *tags: str) -> list[str]:
        """The ids of all events with one of the tags, as they were written."""
        return [sent.id for sent in self.sent if set(tags) & set(sent.tags)]

    def close(self) -> None:
        self.writer.host.close()
        self.writer.shards.close()


def apart(store: StoreOptions, count: int = 2) -> list[str]:
    """Tags that are all in different shards."""
    found: dict[int, str] = {}
    for n in range(1000):
        found.setdefault(shard_of(f"t{n}", store.shards), f"t{n}")
        if len(found) == count:
            break
    return list(found.values())


def strangers(store: StoreOptions, tags: Sequence[str], count: int = 1) -> list[int]:
    """Partitions whose own shard, which learns of all their events, is none of the tags'."""
    homes = {shard_of(tag, store.shards) for tag in tags}
    return [p for p in range(100) if home_of(Partition("jobs", p), store.shards) not in homes][:count]

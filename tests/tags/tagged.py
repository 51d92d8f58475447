"""Tagged events in a real store, written by the pipeline's own path, and readers of their feeds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from tailrace.feeds.frame import AnyFrame, Control, Frame
from tailrace.feeds.hub import Hub
from tailrace.feeds.log import Feed
from tailrace.feeds.tag_request import make_tag_request
from tailrace.feeds.tags import TagFeeds
from tailrace.model.event import Source, home_of
from tailrace.model.name import shard_of
from tailrace.model.tag import Tagging
from tailrace.stores.cassandra import CassandraOptions
from tailrace.stores.logs import Logs
from tailrace.stores.marks import advance
from tailrace.stores.nodes import Nodes
from tailrace.stores.tags import VIEW, TagOptions
from tailrace.stores.valkey import StoreOptions
from tests.writing import NOON, Record, Writer


def now_ms() -> int:
    return round(time.time() * 1000)


class Sent(NamedTuple):
    """An event as it was written."""

    id: str
    pid: str
    tags: tuple[str, ...]
    partition: int
    offset: int
    n: int


class Tagger:
    """Writes tagged events, as a driver and its tasks do."""

    def __init__(self, store: StoreOptions, rows: CassandraOptions | None = None) -> None:
        options = TagOptions(tagging=Tagging(paths=("tags",)), cassandra=rows)
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
        stamp = NOON + n * 1000 if time_ms is None else time_ms
        record = Record(offset, json.dumps([pid]).encode(), value, stamp, partition)
        self.sent.append(Sent(record.id, pid, tuple(tags), partition, offset, n))
        return record

    def settle(self) -> None:
        """Raise the marks of shards that had nothing, as the driver does once a second."""
        ends = {Source("jobs", partition): offset - 1 for partition, offset in self._offsets.items()}
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
    return [p for p in range(100) if home_of(Source("jobs", p), store.shards) not in homes][:count]


class Reading:
    """Opens feeds, collects what they yield."""

    def __init__(self, feeds: TagFeeds, logs: Logs, hub: Hub) -> None:
        self.feeds, self.logs, self.hub = feeds, logs, hub

    async def open(self, *tags: str, **parameters: Any) -> Feed:
        request = make_tag_request(tags, now_ms=now_ms(), **parameters)
        assert request is not None
        return await self.feeds.open(request)

    async def all(self, *tags: str, **parameters: Any) -> list[AnyFrame]:
        """Everything that a feed yields until it ends."""
        frames: list[AnyFrame] = []
        async with asyncio.timeout(60):
            async for batch in await self.open(*tags, **parameters):
                frames += batch
        return frames

    async def ids(self, *tags: str, **parameters: Any) -> list[str]:
        return ids(await self.all(*tags, **{"follow": False, **parameters}))


def events(frames: Iterable[AnyFrame]) -> list[Frame]:
    return [frame for frame in frames if isinstance(frame, Frame)]


def ids(frames: Iterable[AnyFrame]) -> list[str]:
    return [json.loads(frame.data)["id"] for frame in events(frames)]


def controls(frames: Iterable[AnyFrame]) -> list[str]:
    return [frame.name for frame in frames if isinstance(frame, Control)]


@asynccontextmanager
async def reading(options: StoreOptions, **changes: Any) -> AsyncIterator[Reading]:
    nodes = await Nodes(options).open()
    logs = Logs(nodes, VIEW)
    async with Hub(nodes, logs, **changes) as hub:
        yield Reading(TagFeeds(hub, logs, now_ms), logs, hub)
    await nodes.close()

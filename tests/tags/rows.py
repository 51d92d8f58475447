"""Rows of tags in a real Cassandra, written by the pipeline's own path or by somebody else, and readers of feeds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tailrace.config import Settings
from tailrace.errors import StoreUnavailable
from tailrace.feeds.frame import AnyFrame, Frame
from tailrace.feeds.hub import Hub
from tailrace.feeds.tag_feed import TagRowsFeed
from tailrace.feeds.tag_request import make_tag_request
from tailrace.feeds.tag_views import TagViews
from tailrace.model.bucket import bucket_start
from tailrace.model.event import Source
from tailrace.model.stamp import stamp
from tailrace.model.tag import Tagging
from tailrace.stores.cassandra import CassandraOptions
from tailrace.stores.logs import Logs
from tailrace.stores.nodes import Nodes
from tailrace.stores.tag_rows import Row, writer
from tailrace.stores.tags import VIEW, TagOptions, lift
from tailrace.stores.valkey import StoreOptions
from tests.feeds import rig as feeds
from tests.feeds.rig import now_ms
from tests.writing import Record, Writer

HOUR = 3_600_000
THEIRS = Source("theirs", 0)


class Rows:
    """Writes tagged events as a driver and its tasks do, and rows as somebody else does."""

    def __init__(self, store: StoreOptions, rows: CassandraOptions) -> None:
        self.options = rows
        self.writer = Writer(store, ("intake", VIEW), tags=TagOptions(tagging=Tagging(paths=("tags",)), cassandra=rows))
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
        lift(self.writer.shards, self.writer.epoch, {Source("jobs", partition): now for partition in named})

    def put(self, tag: str, *rows: tuple[str, int, int], span_ms: int = HOUR) -> None:
        """Write rows of somebody else: source, number, and the millisecond of the stamp."""
        made = [
            Row(
                tag=tag,
                bucket_ms=bucket_start(ms, span_ms),
                span_ms=span_ms,
                stamp=stamp(ms, number, Source(pid, 0)),
                pid=pid,
                tag_seq=number,
                place=THEIRS,
                offset=number,
                seq=number,
                time_ms=ms,
                key=None,
                headers=[],
                value=b'{"theirs":true}',
                tags=(tag,),
            )
            for pid, number, ms in rows
        ]
        writer(self.options).write(made)

    def close(self) -> None:
        self.writer.host.close()
        self.writer.shards.close()


class Reading:
    """Opens feeds, collects what they yield."""

    def __init__(self, views: TagViews) -> None:
        self.views = views

    async def open(self, *tags: str, **parameters: Any) -> TagRowsFeed:
        request = make_tag_request(tags, now_ms=now_ms(), own_cursors=True, **parameters)
        assert request is not None
        return await self.views.open(request)

    async def all(self, *tags: str, **parameters: Any) -> list[AnyFrame]:
        """Everything that a feed yields until it ends."""
        frames: list[AnyFrame] = []
        async with asyncio.timeout(60):
            async for batch in await self.open(*tags, **{"follow": False, **parameters}):
                frames += batch
        return frames

    async def names(self, *tags: str, **parameters: Any) -> list[str]:
        return names(await self.all(*tags, **parameters))


def events(frames: Iterable[AnyFrame]) -> list[Frame]:
    return [frame for frame in frames if isinstance(frame, Frame)]


def names(frames: Iterable[AnyFrame]) -> list[str]:
    """The events as p1:2: source, and number in the tag."""
    return [f"{data['source']}:{data['tag_seq']}" for data in (json.loads(frame.data) for frame in events(frames))]


class Follower(feeds.Follower):
    """A reader in the background that tells its events as p1:2."""

    shown = staticmethod(names)


@asynccontextmanager
async def reading(store: StoreOptions, rows: CassandraOptions, **tags: Any) -> AsyncIterator[Reading]:
    """Readers with these settings of tags; 50 ms behind the clock unless they say otherwise."""
    given = {"store": "cassandra", "paths": ("tags",), "delay": "50ms", **tags}
    where = {"hosts": rows.hosts, "port": rows.port, "keyspace": rows.keyspace, "timeout": "30s"}
    settings = Settings(tags=given, cassandra=where)  # type: ignore[arg-type]
    nodes = await Nodes(store).open()
    logs = Logs(nodes, VIEW)
    async with Hub(nodes, logs) as hub:
        views = TagViews(settings, nodes, hub, now_ms)
        yield Reading(views)
        await views.close()
    await nodes.close()

"""Tags in either store for cases of reading: written by the pipeline's own path, or as rows by somebody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from typing import Any, Literal
from uuid import UUID

from tailrace.log.event import Partition
from tailrace.log.request import AnyFeed, AnyFrame, EventFrame
from tailrace.log.timeuuid import make_timeuuid
from tailrace.valkey.marks import advance
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.rows.feed import CassandraTags
from tailrace.views.tags.rows.model import StoredRow
from tailrace.views.tags.rows.store import writer
from tailrace.views.tags.settings import CassandraSettings, TagsSettings
from tailrace.views.tags.store import VIEW, introduce_partitions, raise_floors
from tailrace.views.tags.write import TagsPlan
from tests.log.rig import controls, now_ms
from tests.views.tags import reading
from tests.views.tags.reading import events, names
from tests.views.tags.rows import their_row
from tests.writing import Record, Writer

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
SPANS = {"minute": MINUTE, "hour": HOUR, "day": DAY}
TOPIC = "jobs"


class World:
    """The tags of one store, their writers, and their readers."""

    def __init__(self, store: StoreOptions, rows: CassandraSettings | None = None) -> None:
        self.store, self.rows = store, rows
        self.bucket: Literal["minute", "hour", "day"] = "hour"
        """To be changed before anything is written."""
        self._ends: dict[int, int] = {}

    @property
    def in_rows(self) -> bool:
        return self.rows is not None

    @property
    def span_ms(self) -> int:
        return SPANS[self.bucket]

    @property
    def options(self) -> TagsPlan:
        return TagsPlan(TagsSettings(paths=("tags",), bucket=self.bucket), cassandra=self.rows)

    @cached_property
    def writer(self) -> Writer:
        """The driver and its tasks."""
        return Writer(self.store, ("intake", VIEW), tags=self.options)

    def close(self) -> None:
        if "writer" in vars(self):
            self.writer.host.close()
            self.writer.shards.close()

    # The pipeline.

    def begin(self, partitions: int) -> None:
        """Let readers know of partitions that may have old events, as the driver does when it begins."""
        named = [f"{TOPIC}:{partition}" for partition in range(partitions)]
        introduce_partitions(self.writer.shards, self.writer.epoch, [(s, named) for s in range(self.store.shards)])

    def draft(self, pid: str, *tags: str, at: int | None = None, partition: int = 0, **data: object) -> Record:
        """Return the next event of a partition, which is to be written later; ``at`` is its time, now by default."""
        offset = self._ends.get(partition, 0)
        self._ends[partition] = offset + 1
        value = json.dumps({"tags": tags, **data}).encode()
        return Record(offset, pid.encode(), value, now_ms() if at is None else at, partition, TOPIC)

    def write(self, pid: str, *tags: str, count: int = 1, step: int = 0, **given: Any) -> None:
        """Write events of a source in one batch, so many milliseconds apart."""
        at = given.pop("at", now_ms())
        self.writer.write([self.draft(pid, *tags, at=at + i * step, **given) for i in range(count)])

    def settle(self, *partitions: int) -> None:
        """Say what is written to its end, as the driver does once a second: of all partitions, or of those named."""
        ends = {Partition(TOPIC, p): end for p, end in self._ends.items() if not partitions or p in partitions}
        shards, epoch = self.writer.shards, self.writer.epoch
        advance(shards, VIEW, epoch, {source: end - 1 for source, end in ends.items()})
        if self.in_rows:
            raise_floors(shards, epoch, dict.fromkeys(ends, now_ms()))

    # Somebody else.

    def put(self, tag: str, *rows: tuple[str, int, int | UUID]) -> None:
        """Write rows as somebody else: source, number, and the millisecond of the timeuuid, or the timeuuid."""
        assert self.rows is not None
        made: list[StoredRow] = []
        for pid, number, when in rows:
            place = Partition(f"of-{pid}", 0)
            given = when if isinstance(when, UUID) else make_timeuuid(when, number, place)
            made.append(their_row(tag, pid, number, given, place, self.span_ms))
        writer(self.rows).write(made)

    # Readers.

    @asynccontextmanager
    async def reading(
        self, *, clock: Callable[[], int] = now_ms, page: int | None = None, **tags: Any
    ) -> AsyncIterator[Reading]:
        """Readers with these settings of tags; 50 ms behind the clock where rows are, unless they say otherwise."""
        assert self.writer
        async with AsyncExitStack() as stack:
            given = {"bucket": self.bucket, **tags}
            read = await stack.enter_async_context(reading.reading(self.store, self.rows, clock=clock, **given))
            if page is not None and isinstance(read.feeds, CassandraTags):
                read.feeds._rows.page = page
            yield Reading(read, stack)


class Reading(reading.Reading):
    """Closes the feeds that it has opened, and has readers of several kinds."""

    def __init__(self, read: reading.Reading, stack: AsyncExitStack) -> None:
        super().__init__(read.feeds, read.hub, read.clock)
        self._stack = stack

    async def open(self, *tags: str, **parameters: Any) -> AnyFeed:
        feed = await super().open(*tags, **parameters)
        self._stack.push_async_callback(feed.aclose)
        return feed

    async def current(self, *tags: str, **parameters: Any) -> list[str]:
        """Return the names of all events, such as p1:2; check that the feed ends as it should."""
        frames = await self.all(*tags, **parameters)
        assert controls(frames)[-1:] == ["end"]
        return names(frames)

    async def follow(self, *tags: str, **parameters: Any) -> Follower:
        """Follow tags, by default from the start."""
        if not parameters.keys() & {"start", "after", "last_event_id"}:
            parameters["start"] = "start"
        follower = Follower(await self.open(*tags, **parameters))
        self._stack.push_async_callback(follower.close)
        return follower

    async def pull(self, *tags: str, **parameters: Any) -> Pulled:
        """Read as a consumer that takes events when it likes."""
        return Pulled(await self.open(*tags, **{"start": "start", **parameters}))


class Follower(reading.Follower):
    """A reader in the background that keeps the names of its events and its control frames."""

    @property
    def names(self) -> list[str]:
        return names(self.frames)

    async def wait_for_control(self, control: str, seconds: float = 30) -> None:
        """Wait until the feed has sent such a control frame."""
        async with asyncio.timeout(seconds):
            while control not in controls(self.frames):
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.01)

    async def end(self, seconds: float = 30) -> None:
        """Wait until the feed ends, or fails."""
        async with asyncio.timeout(seconds):
            await self._task

    async def is_silent(self, seconds: float = 0.3) -> None:
        """Check that nothing comes, and that the feed goes on."""
        before = len(events(self.frames))
        await asyncio.sleep(seconds)
        assert self.names[before:] == []
        assert not self._task.done()


class Pulled:
    """A reader that takes so many events, and then none until it is asked again."""

    def __init__(self, feed: AnyFeed) -> None:
        self._batches = aiter(feed)
        self._ahead: list[EventFrame] = []
        self.controls: list[str] = []

    async def take(self, count: int, seconds: float = 30) -> list[str]:
        """Return the next events; fewer if the feed ends."""
        async with asyncio.timeout(seconds):
            while len(self._ahead) < count and (batch := await anext(self._batches, None)) is not None:
                self._ahead += events(batch)
                self.controls += controls(batch)
        taken, self._ahead = self._ahead[:count], self._ahead[count:]
        return names(taken)


def shown(frames: Iterable[AnyFrame]) -> list[dict[str, Any]]:
    """The events as they are sent."""
    return [json.loads(frame.data) for frame in events(frames)]


def timeuuids(frames: Iterable[AnyFrame]) -> list[UUID]:
    return [UUID(data["timeuuid"]) for data in shown(frames)]


def run(pid: str, first: int, last: int) -> list[str]:
    """The names of a source's events from one number to another."""
    return [f"{pid}:{number}" for number in range(first, last + 1)]


def in_turn(found: Iterable[str]) -> bool:
    """Return True if each source's events come in the order of their numbers, from 1, none twice and none missing."""
    last: dict[str, int] = {}
    for name in found:
        pid, _, number = name.rpartition(":")
        if int(number) != last.get(pid, 0) + 1:
            return False
        last[pid] = int(number)
    return True

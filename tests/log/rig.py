"""A feed over a real store, and readers of it."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from tailrace.api.requests import FeedParameters
from tailrace.log.feed import LogFeed, LogFeeds
from tailrace.log.hub import Hub
from tailrace.log.request import AnyFeed, AnyFrame, ControlFrame, EventFrame, make_request
from tailrace.log.store import Logs
from tailrace.valkey.shards import Nodes, StoreOptions


def now_ms() -> int:
    return round(time.time() * 1000)


class Reading(ABC):
    """Opens feeds, and collects what they yield."""

    @abstractmethod
    async def open(self, *names: str, **parameters: Any) -> AnyFeed: ...

    async def all(self, *names: str, **parameters: Any) -> list[AnyFrame]:
        """Everything that a feed yields until it ends."""
        frames: list[AnyFrame] = []
        async with asyncio.timeout(60):
            async for batch in await self.open(*names, **parameters):
                frames += batch
        return frames

    async def ids(self, *names: str, **parameters: Any) -> list[str]:
        return ids(await self.all(*names, **{"follow": False, **parameters}))


class Rig(Reading):
    """Feeds of logs."""

    def __init__(self, feeds: LogFeeds, logs: Logs, hub: Hub) -> None:
        self.feeds, self.logs, self.hub = feeds, logs, hub

    async def open(self, *names: str, last_event_id: str | None = None, **parameters: Any) -> LogFeed:
        request = make_request(names, FeedParameters(**parameters), now_ms=now_ms(), last_event_id=last_event_id)
        assert request is not None
        return await self.feeds.open(request)


def ids(frames: Iterable[AnyFrame]) -> list[str]:
    return [json.loads(frame.data)["id"] for frame in frames if isinstance(frame, EventFrame)]


def controls(frames: Iterable[AnyFrame]) -> list[str]:
    return [frame.name for frame in frames if isinstance(frame, ControlFrame)]


@asynccontextmanager
async def rig(options: StoreOptions, view: str = "days", **changes: Any) -> AsyncIterator[Rig]:
    nodes = await Nodes(options).open()
    logs = Logs(nodes, view)
    async with Hub(nodes, logs, **changes) as hub:
        yield Rig(LogFeeds(hub, logs, now_ms), logs, hub)
    await nodes.close()


class Follower:
    """A reader in the background that keeps what it has got."""

    shown = staticmethod(ids)
    """Names of its events."""

    def __init__(self, feed: AnyFeed) -> None:
        self.frames: list[AnyFrame] = []
        self._feed = feed
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for batch in self._feed:
            self.frames += batch

    async def until(self, count: int, seconds: float = 30) -> list[str]:
        """Wait until so many events have come, or the feed has ended."""
        async with asyncio.timeout(seconds):
            while len(self.shown(self.frames)) < count:
                if self._task.done():
                    self._task.result()
                    break
                await asyncio.sleep(0.01)
        return self.shown(self.frames)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._feed.aclose()

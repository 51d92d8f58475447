"""Readers of tags in either store, which tell events as p1:2: source, and number in the tag."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tailrace.api.requests import TagFeedParameters
from tailrace.config.settings import Settings
from tailrace.log.hub import Hub
from tailrace.log.request import AnyFeed, AnyFrame, EventFrame
from tailrace.log.store import Logs
from tailrace.valkey.shards import Nodes, StoreOptions
from tailrace.views.tags.feed import TagStore, open_store
from tailrace.views.tags.model import TagRequest, make_tag_request
from tailrace.views.tags.settings import CassandraSettings
from tailrace.views.tags.store import VIEW
from tests.log import rig
from tests.log.rig import now_ms


def events(frames: Iterable[AnyFrame]) -> list[EventFrame]:
    return [frame for frame in frames if isinstance(frame, EventFrame)]


def names(frames: Iterable[AnyFrame]) -> list[str]:
    """The events as p1:2."""
    return [f"{data['source']}:{data['tag_seq']}" for data in (json.loads(frame.data) for frame in events(frames))]


def request_of(
    *tags: str,
    clock: Callable[[], int] = now_ms,
    mode: str = "any",
    query: dict[str, Any] | None = None,
    own_cursors: bool = False,
    last_event_id: str | None = None,
    **parameters: Any,
) -> TagRequest | None:
    """Return the request that these parameters make."""
    return make_tag_request(
        tags,
        TagFeedParameters(q=json.dumps(query or {}), **parameters),
        now_ms=clock(),
        mode=mode,
        own_cursors=own_cursors,
        last_event_id=last_event_id,
    )


class Reading(rig.Reading):
    """Feeds of tags; unless ``follow`` is set, they end with the last event there is."""

    def __init__(self, feeds: TagStore, hub: Hub, clock: Callable[[], int] = now_ms) -> None:
        self.feeds, self.hub, self.clock = feeds, hub, clock

    async def open(self, *tags: str, **parameters: Any) -> AnyFeed:
        request = request_of(*tags, clock=self.clock, own_cursors=self.feeds.own_cursors, **parameters)
        assert request is not None
        return await self.feeds.open(request)

    async def all(self, *tags: str, **parameters: Any) -> list[AnyFrame]:
        return await super().all(*tags, **{"follow": False, **parameters})

    async def names(self, *tags: str, **parameters: Any) -> list[str]:
        return names(await self.all(*tags, **parameters))


class Follower(rig.Follower):
    """A reader in the background that names its events p1:2."""

    shown = staticmethod(names)


@asynccontextmanager
async def reading(
    store: StoreOptions, rows: CassandraSettings | None = None, *, clock: Callable[[], int] = now_ms, **tags: Any
) -> AsyncIterator[Reading]:
    """Readers with these settings of tags; 50 ms behind the clock where rows are, unless they say otherwise."""
    given: dict[str, Any] = {"paths": ("tags",), "delay": "50ms", **tags}
    if rows is not None:
        given["store"] = "cassandra"
    settings = Settings(tags=given, cassandra=rows or CassandraSettings())  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        nodes = await Nodes(store).open()
        stack.push_async_callback(nodes.close)
        logs = Logs(nodes, VIEW)
        hub = await stack.enter_async_context(Hub(nodes, logs))
        feeds = open_store(settings, nodes, hub, logs, clock)
        stack.push_async_callback(feeds.close)
        yield Reading(feeds, hub, clock)

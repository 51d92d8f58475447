"""Feeds of sessions in this process, over a real store, and what a viewer has in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec

from tailrace.api.requests import SessionFeedParameters
from tailrace.log.request import AnyFrame, ControlFrame, EventFrame
from tailrace.valkey.shards import Nodes, StoreOptions
from tailrace.views.sessions.feed import SessionFeed
from tailrace.views.sessions.life import SessionParts
from tailrace.views.sessions.reader import Archive, StreamHub
from tailrace.views.sessions.routes import make_session_request
from tailrace.views.sessions.streams import LiveSessions
from tests.views.sessions.recorded import Track

Samples = dict[str, list[tuple[int, Any]]]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@asynccontextmanager
async def feeds_of(
    store: StoreOptions, template: str = "sessions:{identity}", archive: Archive | None = None, ring: int = 64 << 20
) -> AsyncIterator[SessionParts]:
    nodes = Nodes(store)
    live = LiveSessions(nodes, template)
    try:
        async with aclosing(StreamHub(live, ring)) as hub:
            yield SessionParts(hub, archive)
    finally:
        await nodes.close()


def views(track: Track) -> Any:
    """The feeds of what a track has written."""
    return feeds_of(track.shards.options, track.plan.store.key)


async def opened(
    feeds: SessionParts, identity: str = "lap", last_event_id: str | None = None, **asked: Any
) -> SessionFeed:
    parameters = SessionFeedParameters(**asked)
    request = make_session_request(identity, parameters, now_ms=now_ms(), last_event_id=last_event_id)
    assert request is not None
    return await SessionFeed.open(feeds, request)


async def read(feeds: SessionParts, identity: str = "lap", **asked: Any) -> list[AnyFrame]:
    """Return all frames of a feed that ends."""
    found: list[AnyFrame] = []
    feed = await opened(feeds, identity, **asked)
    async with asyncio.timeout(20), aclosing(feed):
        async for frames in feed:
            found += frames
    return found


async def until(feed: SessionFeed, condition: Callable[[list[AnyFrame]], object]) -> list[AnyFrame]:
    """Return what a feed yields until that satisfies a condition; the feed is closed then."""
    found: list[AnyFrame] = []
    async with asyncio.timeout(20), aclosing(feed):
        async for frames in feed:
            found += frames
            if condition(found):
                break
    return found


async def happens(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def samples(frames: Iterable[AnyFrame]) -> Samples:
    """Return the samples of each line, in the order in which they came, with exact times."""
    found: Samples = {}
    for shown in shown_in(frames):
        for each in shown["channels"]:
            start = int(each["start"])
            assert all(0 <= offset < 2**53 for offset in each["t"])
            assert len(each["t"]) == len(each["v"])
            found.setdefault(each["name"], []).extend((start + t, v) for t, v in zip(each["t"], each["v"], strict=True))
    return found


def events(frames: Iterable[AnyFrame]) -> list[dict[str, Any]]:
    return [event for shown in shown_in(frames) for event in shown["events"]]


def shown_in(frames: Iterable[AnyFrame]) -> list[dict[str, Any]]:
    return [msgspec.json.decode(frame.data) for frame in frames if isinstance(frame, EventFrame)]


def controls(frames: Iterable[AnyFrame]) -> list[tuple[str, dict[str, Any]]]:
    return [(frame.name, msgspec.json.decode(frame.data)) for frame in frames if isinstance(frame, ControlFrame)]

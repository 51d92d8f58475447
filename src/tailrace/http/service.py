"""The service: the parts that requests share, from the first connection to the last farewell.

It comes up without Valkey or Kafka and says so; what needs them is answered with 503 until they are there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Protocol

from tailrace.config.settings import Settings
from tailrace.errors import Overloaded, StoreUnavailable, TagsOff, TailraceError
from tailrace.kafka.broker import client_properties
from tailrace.kafka.consume import Records
from tailrace.kafka.produce import Topics
from tailrace.log.event import home_of
from tailrace.log.feed import LogFeeds
from tailrace.log.hub import Hub
from tailrace.log.store import Logs
from tailrace.metrics import Metrics
from tailrace.valkey.nodes import Nodes
from tailrace.valkey.shards import StoreOptions
from tailrace.views.folds.store import rules_of
from tailrace.views.grep.feed import GrepFeeds
from tailrace.views.grep.leases import Leases
from tailrace.views.grep.parts import Parts
from tailrace.views.grep.payloads import Payloads
from tailrace.views.grep.store import PIECE_RUNS, Searched, Searches
from tailrace.views.grep.store import VIEW as MATCHES
from tailrace.views.sessions.feed import SessionFeeds
from tailrace.views.sessions.hub import StreamHub
from tailrace.views.sessions.life import Configurations, SessionParts
from tailrace.views.sessions.reader import Archive
from tailrace.views.sessions.streams import LiveSessions
from tailrace.views.tags.feed import OpensTags, open_store
from tailrace.views.tags.readers import Readers
from tailrace.views.tags.store import VIEW as TAGS

logger = logging.getLogger(__name__)

BODIES = 16
"""How many request bodies of the largest size may be in memory at once."""


class Stoppable(Protocol):
    """An open feed, as far as the service cares."""

    def stop(self) -> None:
        """Say goodbye and end soon."""


class Service:
    """Everything that handlers use. ``running`` opens it and closes it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.nodes = Nodes(StoreOptions.of(settings.valkey))
        self.days = Logs(self.nodes, "days")
        self.matches = Logs(self.nodes, MATCHES, PIECE_RUNS)
        self.tag_logs = Logs(self.nodes, TAGS)
        self.live = LiveSessions(self.nodes, settings.sessions.key)
        self.streams = StreamHub(self.live, settings.sessions.ring_bytes)
        """Sessions are served whether or not our pipeline writes any: others may, under the same keys."""
        self.records = Records(client_properties(settings))
        self.sessions = SessionFeeds(
            SessionParts(
                self.streams,
                Configurations(self.live, settings.sessions.unit_rational),
                Archive(
                    self.records,
                    Searched(settings, self.nodes).is_current,
                    settings.pipeline.max_event_bytes,
                    settings.pipeline.max_depth,
                ),
                settings.sessions.container,
                self.metrics.bursts_unread.inc,
            ),
            now_ms,
        )
        self.readers = Readers(self.nodes)
        self.leases = Leases(self.nodes)
        self.searches = Searches(self.nodes, settings.grep.searches, round(settings.grep.keep.total_seconds() * 1000))
        self.payloads = Payloads(
            self.nodes,
            client_properties(settings),
            lambda source: home_of(source, settings.valkey.shards),
            settings.grep.memory,
        )
        self.topics = Topics(settings, self.nodes)
        self.rules = rules_of(settings)
        """The rules of folds as they are configured; the pipeline may apply them with other windows."""
        self.started = time.time()
        self.hub: Hub | None = None
        self._feeds: LogFeeds | None = None
        self._grep: GrepFeeds | None = None
        self._tags: OpensTags | None = None
        self._open: set[Stoppable] = set()
        self._bodies = 0
        self._draining = False

    @property
    def feeds(self) -> LogFeeds:
        """The feeds of day streams; StoreUnavailable until Valkey has answered once."""
        if self._feeds is None:
            raise StoreUnavailable("valkey has not answered since the service started; is it running?")
        return self._feeds

    @property
    def grep(self) -> GrepFeeds:
        """The feeds of searches; StoreUnavailable until Valkey has answered once."""
        if self._grep is None:
            raise StoreUnavailable("valkey has not answered since the service started; is it running?")
        return self._grep

    @property
    def tags(self) -> OpensTags:
        """The feeds of tags, whichever store has them.

        Raises:
            TagsOff: Nothing is tagged.
            StoreUnavailable: Valkey has not answered yet.
        """
        if TAGS not in self.settings.live_views:
            raise TagsOff(
                "nothing is tagged here: set tags.paths, where events have their tags, or tags.rules, and have "
                "'tags' among pipeline.views; then start the pipeline and the service again"
            )
        if self._tags is None:
            raise StoreUnavailable("valkey has not answered since the service started; is it running?")
        return self._tags

    @property
    def connections(self) -> int:
        """How many feeds are open."""
        return len(self._open)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open the parts, and close them in the end."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.nodes.close)
            stack.push_async_callback(self.topics.close)
            stack.push_async_callback(self.payloads.close)
            stack.push_async_callback(self.records.close)
            await stack.enter_async_context(self.streams)
            self.topics.open()
            connecting = asyncio.create_task(self._connect(stack), name="connect to valkey")
            await asyncio.wait({connecting}, timeout=1.0)
            try:
                yield
            finally:
                connecting.cancel()
                with suppress(asyncio.CancelledError):
                    await connecting

    async def _connect(self, stack: AsyncExitStack) -> None:
        while True:
            hub = Hub(self.nodes, self.days, self.settings.serve.ring_bytes)
            matches = Hub(self.nodes, self.matches, self.settings.serve.ring_bytes)
            tags = Hub(self.nodes, self.tag_logs, self.settings.serve.ring_bytes)
            try:
                self.hub = await stack.enter_async_context(hub)
                await stack.enter_async_context(matches)
                if TAGS in self.settings.live_views:
                    await stack.enter_async_context(tags)
            except TailraceError as error:
                logger.warning("%s", error)
                await asyncio.sleep(0.5)
            else:
                self._feeds = LogFeeds(self.hub, self.days, now_ms)
                searched = Searched(self.settings, self.nodes)
                self._grep = GrepFeeds(
                    Parts(matches, self.matches, self.searches, searched, self.payloads, self.leases, now_ms),
                    self.settings.grep.reach,
                )
                if TAGS in self.settings.live_views:
                    self._tags = open_store(self.settings, self.nodes, tags, self.tag_logs, now_ms)
                    stack.push_async_callback(self._tags.close)
                beating = asyncio.create_task(self.leases.run(), name="heartbeat")
                stack.callback(beating.cancel)
                return

    def drain(self) -> None:
        """Take no more feeds, and end those that are open."""
        self._draining = True
        for feed in list(self._open):
            feed.stop()

    @contextmanager
    def admitted(self, feed: Stoppable) -> Iterator[None]:
        """Hold a place among the open feeds, or be refused."""
        if self._draining:
            raise Overloaded("the service is shutting down: connect again in a moment")
        if len(self._open) >= self.settings.serve.connections:
            raise Overloaded(
                f"{len(self._open)} feeds are open, as many as may be (serve.connections): try again later"
            )
        self._open.add(feed)
        self.metrics.feeds_open.set(len(self._open))
        try:
            yield
        finally:
            self._open.discard(feed)
            self.metrics.feeds_open.set(len(self._open))

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Hold memory for a request's body, or be refused."""
        if self._bodies + size > BODIES * self.settings.serve.max_body:
            raise Overloaded("too many large requests are under way: try again in a moment")
        self._bodies += size
        try:
            yield
        finally:
            self._bodies -= size


def now_ms() -> int:
    """Return the time of day in milliseconds."""
    return time.time_ns() // 1_000_000

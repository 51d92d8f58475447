"""The service: what all requests share, and one part for each view that shares more among its own requests.

The service starts without Valkey and Kafka. A request that needs one of them is answered with 503 until it is there.

Every error leaves the service as ``application/problem+json`` (RFC 9457), with a stable code. One that Tailrace raises
on purpose says what happened and what to do. Any other is for the log: the client learns only that it happened.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from tailrace.config.settings import Settings
from tailrace.errors import Overloaded, StoreUnavailable, TailraceError, UsageError
from tailrace.kafka.produce import TopicWriter
from tailrace.log.feed import LogFeeds
from tailrace.log.hub import Hub
from tailrace.log.request import AnyFeed, FeedRequest
from tailrace.log.store import Logs
from tailrace.metrics import FigureCollector, Metrics
from tailrace.valkey.shards import Nodes, StoreOptions
from tailrace.view import View

logger = logging.getLogger(__name__)

BODIES = 16
"""Request bodies of the largest size that may be in memory at once."""

P = TypeVar("P", bound="ViewService")
T = TypeVar("T")


class Service:
    """Everything that handlers use. ``running`` opens it and closes it."""

    def __init__(self, settings: Settings, views: Sequence[View]) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.nodes = Nodes(StoreOptions.of(settings.valkey))
        self.topics = TopicWriter(settings, self.nodes)
        self.started = time.time()
        used = [view.name for view in views if view.is_used(settings)]
        self.views = tuple(dict.fromkeys((*settings.live_views, *used)))
        """Names of the views that are written."""
        self.log_views = tuple(view.name for view in views if view.keeps_logs(settings))
        self.audited_views = tuple(view.name for view in views if view.is_audited(settings))
        self.parts: dict[str, ViewService] = {
            view.name: part for view in views if (part := view.open(self)) is not None
        }
        """Parts of the views, by the name of the view."""
        self.metrics.register(part.collector for part in self.parts.values() if part.collector is not None)
        self._open: set[Callable[[], None]] = set()
        self._bodies = 0
        self._draining = False

    def part_of(self, view: str, kind: type[P]) -> P:
        part = self.parts[view]
        assert isinstance(part, kind)
        return part

    @property
    def connections(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open the parts, and close them in the end."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.nodes.close)
            stack.push_async_callback(self.topics.close)
            for part in self.parts.values():
                await part.start(stack)
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
        waiting = list(self.parts.values())
        while waiting:
            try:
                await waiting[0].connect(stack)
            except TailraceError as error:
                logger.warning("%s", error)
                await asyncio.sleep(0.5)
            else:
                del waiting[0]

    def drain(self) -> None:
        """Take no more feeds, and end those that are open."""
        self._draining = True
        for stop in list(self._open):
            stop()

    @contextmanager
    def admitted(self, stop: Callable[[], None]) -> Iterator[None]:
        """Count a feed among the open ones, or refuse it; ``stop`` makes it say farewell and end soon."""
        if self._draining:
            raise Overloaded("the service is shutting down: connect again in a moment")
        if len(self._open) >= self.settings.serve.connections:
            raise Overloaded(
                f"{len(self._open)} feeds are open, as many as may be (serve.connections): try again later"
            )
        self._open.add(stop)
        self.metrics.feeds_open.set(len(self._open))
        try:
            yield
        finally:
            self._open.discard(stop)
            self.metrics.feeds_open.set(len(self._open))

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Reserve memory for a request's body, or refuse it."""
        if self._bodies + size > BODIES * self.settings.serve.max_body:
            raise Overloaded("too many large requests are under way: try again in a moment")
        self._bodies += size
        try:
            yield
        finally:
            self._bodies -= size


class ViewService:
    """The part of the service that the requests of one view share. ``View.open`` returns it."""

    collector: FigureCollector | None = None
    """Metrics of this view that are read from the store at each scrape."""
    ping: timedelta | None = None
    """Time between pings on WebSockets, if this view has some."""

    def __init__(self, service: Service) -> None:
        self.service, self.settings, self.nodes = service, service.settings, service.nodes

    async def start(self, stack: AsyncExitStack) -> None:
        """Open what needs no other process; the stack closes it."""

    async def connect(self, stack: AsyncExitStack) -> None:
        """Open what needs Valkey; the stack closes it. The service tries again after a TailraceError."""

    async def figures(self) -> Any:
        """Return the figures that ``collector`` shows."""
        return None

    async def status(self) -> dict[str, Any]:
        """Return the members that this view adds to ``/v1/status``."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Return the members that this view adds to ``service`` in ``/v1/status``."""
        return {}

    def intervals(self) -> Mapping[str, timedelta | None]:
        """Return how often each upkeep job runs that only this view has."""
        return {}


class LogService(ViewService):
    """The part of a view whose events are in logs: one hub follows them for all feeds."""

    def __init__(self, service: Service, logs: Logs) -> None:
        super().__init__(service)
        self.logs = logs
        self._hub: Hub | None = None

    @property
    def hub(self) -> Hub:
        """The hub; StoreUnavailable until Valkey has answered once."""
        return connected(self._hub)

    async def connect(self, stack: AsyncExitStack) -> None:
        hub = Hub(self.nodes, self.logs, self.settings.serve.ring_bytes)
        self._hub = await stack.enter_async_context(hub)

    async def open(self, request: FeedRequest) -> AnyFeed:
        return await LogFeeds(self.hub, self.logs, now_ms).open(request)


def connected(part: T | None) -> T:
    """Return what ``connect`` made; StoreUnavailable before that."""
    if part is None:
        raise StoreUnavailable("valkey has not answered since the service started; is it running?")
    return part


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def problem_of(error: Exception) -> dict[str, Any]:
    """Return the members of an error's problem document; facts that a caller can use are members of their own."""
    if not isinstance(error, TailraceError):
        return problem("internal", "Internal error", 500, "something went wrong in the service; its log says what")
    title = re.sub(r"(?<!^)(?=[A-Z])", " ", type(error).__name__).capitalize()
    document = problem(error.code, title, error.status, str(error), error.retryable)
    facts = vars(error) if isinstance(error, UsageError) else {}
    return {**{name: value for name, value in facts.items() if isinstance(value, str | int)}, **document}


def problem(code: str, title: str, status: int, detail: str, retryable: bool = False) -> dict[str, Any]:
    kind = f"urn:tailrace:{code}"
    return {"type": kind, "title": title, "status": status, "detail": detail, "code": code, "retryable": retryable}

"""Tags for readers: one protocol for both stores, and the store in Valkey, where each tag has a log.

Invariant: from any cursor a feed yields exactly the events after it that the request shows, each once, those of one
source in their order. Events that the request does not show move the cursor, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tailrace.config.settings import Settings
from tailrace.errors import StreamNotFound
from tailrace.log.cursor import Cursor, FromLast, Position
from tailrace.log.feed import LogFeeds, last_events, latest
from tailrace.log.hub import Hub
from tailrace.log.request import AnyFeed
from tailrace.log.run import NumberedRun
from tailrace.log.segment import key_of
from tailrace.log.store import Logs
from tailrace.valkey.nodes import Nodes
from tailrace.views.tags.merge import MergedTags, TagFeed
from tailrace.views.tags.request import TagFilter, TagRequest, filter_run

PAGE = 100
"""Registries read in one round trip."""
MAX_INSPECTED = 1_000_000
"""Events of one tag that are inspected to find the last N that a request shows."""


class TagSummary(msgspec.Struct, frozen=True):
    """The extent of one tag."""

    tag: str
    buckets: int
    first_ms: int
    """Start of its first bucket."""
    last_ms: int
    """Its latest timeuuid; in Cassandra the end of its last bucket."""
    events: int | None = None
    """None, like ``bytes``, in a store that does not count."""
    bytes: int | None = None


class TagStore(Protocol):
    """The tags of one store."""

    store: str
    """Its name in the settings."""
    own_cursors: bool
    """True if its cursors have their own form."""

    async def open(self, request: TagRequest) -> AnyFeed:
        """Check the request against the store, find its start, and open a feed. Raises before anything is sent."""
        ...

    async def tags(self, prefix: str, after: str, limit: int) -> list[TagSummary]:
        """Return up to ``limit`` tags that begin with ``prefix`` and follow ``after``, in order of their bytes."""
        ...

    async def is_at_end(self, tags: Sequence[str], mode: str, cursor: str) -> bool:
        """Return True if there is no event after a cursor."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


def open_store(settings: Settings, nodes: Nodes, hub: Hub, logs: Logs, clock: Callable[[], int]) -> TagStore:
    """Return the store that the settings name."""
    if settings.tags.store == "cassandra":
        from tailrace.views.tags.rows.tags import CassandraTags

        return CassandraTags(settings, nodes, hub, clock)
    return ValkeyTags(hub, logs, clock)


class ValkeyTags(LogFeeds):
    """The tags in Valkey."""

    store = "valkey"
    own_cursors = False

    async def open(self, request: TagRequest) -> TagFeed:  # type: ignore[override]
        if request.missing == "fail":
            for tag in request.names:
                if (await self._logs.log(tag)).end == Position.START:
                    raise StreamNotFound(tag)
        filters = [TagFilter(request, index) for index in range(len(request.names))]
        if request.mode == "all":
            request, filters = msgspec.structs.replace(request, names=request.names[:1]), filters[:1]
        ends = [(await self._logs.log(tag)).end for tag in request.names]
        if isinstance(request.start, FromLast):
            starts = await self._last(request, filters, ends, request.start.count)
        else:
            starts = list(await self._starts(request, ends))
        form = TagFeed if len(request.names) == 1 else MergedTags
        feed = form(self._hub, self._logs, request, filters, starts, ends, self._clock)
        await feed.begin()
        return feed

    async def tags(self, prefix: str, after: str, limit: int) -> list[TagSummary]:
        summaries: list[TagSummary] = []
        while len(summaries) < limit:
            names = await self._logs.names(after, prefix, min(limit - len(summaries), PAGE))
            if not names:
                break
            after = names[-1]
            for name, log in zip(names, await self._logs.logs_of(names), strict=True):
                segments = log.segments
                if segments:  # else the tag has just expired as a whole
                    summaries.append(
                        TagSummary(
                            name,
                            len({segment.start_ms for segment in segments}),
                            segments[0].start_ms,
                            segments[-1].newest_ms,
                            sum(segment.events for segment in segments),
                            sum(segment.bytes for segment in segments),
                        )
                    )
        return summaries

    async def is_at_end(self, tags: Sequence[str], mode: str, cursor: str) -> bool:
        names = tags[:1] if mode == "all" else tags
        positions = Cursor.parse(cursor, len(names)).positions
        for log, position in zip(await self._logs.logs_of(names), positions, strict=True):
            if log.segments and key_of(log, position) < (log.segments[-1].index, log.segments[-1].last):
                return False
        return True

    async def close(self) -> None:
        return

    async def _last(
        self, request: TagRequest, filters: Sequence[TagFilter], ends: Sequence[Position], count: int
    ) -> list[Position]:
        """Return the positions before the last ``count`` events that the request shows."""
        tails = []
        for tag, tag_filter in zip(request.names, filters, strict=True):

            def times(entry: NumberedRun, tag_filter: TagFilter = tag_filter) -> list[int | None]:
                return [ms if is_shown else None for ms, is_shown in filter_run(entry.run, tag_filter)]

            tails.append(await last_events(self._logs, tag, count, times, MAX_INSPECTED))
        return latest(tails, ends, count)

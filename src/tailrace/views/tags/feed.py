"""Tags for readers, wherever their events rest: one contract, and the store that the settings name.

Tags whose events rest in Valkey: opens feeds over a log for each tag, read to its end, without a delay.

Invariant: from any cursor a feed yields exactly the events after it that the request shows, each once, those of one
source in their order; what is passed over moves the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tailrace.config.settings import Settings
from tailrace.errors import StreamNotFound
from tailrace.log.cursor import (
    Cursor,
    FromLast,
    Position,
)
from tailrace.log.feed import LogFeeds, last_events, latest
from tailrace.log.hub import Hub
from tailrace.log.request import AnyFeed
from tailrace.log.run import NumberedRun
from tailrace.log.segment import Segment, key_of
from tailrace.log.store import Logs
from tailrace.valkey.nodes import Nodes
from tailrace.views.tags.merge import MergedTags, TagFeed
from tailrace.views.tags.request import TagFilter, TagRequest, look


class TagSummary(msgspec.Struct, frozen=True):
    """What a store has of a tag."""

    tag: str
    buckets: int
    first_ms: int
    """When its first bucket begins."""
    last_ms: int
    """Its latest stamp; where that is not known, the end of its last bucket."""
    events: int | None = None
    bytes: int | None = None
    """Both None where they are not counted."""


class OpensTags(Protocol):
    """The tags of one store."""

    store: str
    """Its name in the settings."""
    own_cursors: bool
    """Whether its cursors are of a form of their own."""

    async def open(self, request: TagRequest) -> AnyFeed:
        """Open a feed. Raises before anything is sent."""
        ...

    async def tags(self, prefix: str, after: str, limit: int) -> list[TagSummary]:
        """Return up to ``limit`` tags that begin with ``prefix`` and come after ``after``, in order of their bytes."""
        ...

    async def is_at_end(self, tags: Sequence[str], mode: str, cursor: str) -> bool:
        """Whether there is nothing behind a cursor that was handed out."""
        ...

    async def close(self) -> None:
        """Let connections go."""
        ...


def open_store(settings: Settings, nodes: Nodes, hub: Hub, logs: Logs, clock: Callable[[], int]) -> OpensTags:
    """Return the tags of the store that the settings name."""
    if settings.tags.store == "cassandra":
        from tailrace.views.tags.rows.tags import CassandraTags

        return CassandraTags(settings, nodes, hub, clock)
    return ValkeyTags(hub, logs, clock)


PAGE = 100
"""Registries that are read at once."""
MOST_LOOKED = 1_000_000
"""Events of one tag that are looked at for the last N that a request shows."""


class ValkeyTags(LogFeeds):
    """The tags of the logs in Valkey."""

    store = "valkey"
    own_cursors = False

    async def open(self, request: TagRequest) -> TagFeed:  # type: ignore[override]
        """Check the request against what exists and find its start. Raises before anything is sent."""
        if request.missing == "fail":
            for tag in request.names:
                if (await self._logs.log(tag)).end == Position.START:
                    raise StreamNotFound(tag)
        wanted = [TagFilter(request, at) for at in range(len(request.names))]
        if request.mode == "all":
            request, wanted = msgspec.structs.replace(request, names=request.names[:1]), wanted[:1]
        ends = [(await self._logs.log(tag)).end for tag in request.names]
        if isinstance(request.start, FromLast):
            starts = await self._last(request, wanted, ends, request.start.count)
        else:
            starts = list(await self._starts(request, ends))
        form = TagFeed if len(request.names) == 1 else MergedTags
        feed = form(self._hub, self._logs, request, wanted, starts, ends, self._clock)
        await feed.begin()
        return feed

    async def tags(self, prefix: str, after: str, limit: int) -> list[TagSummary]:
        found: list[TagSummary] = []
        while len(found) < limit and (names := await self._logs.names(after, prefix, min(limit - len(found), PAGE))):
            after = names[-1]
            for name, log in zip(names, await self._logs.logs_of(names), strict=True):
                if log.segments:  # else it has just expired as a whole
                    found.append(_held(name, log.segments))
        return found

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
        self, request: TagRequest, wanted: Sequence[TagFilter], ends: Sequence[Position], count: int
    ) -> list[Position]:
        """Return where the last events begin that the request shows."""
        tails = []
        for tag, shown in zip(request.names, wanted, strict=True):

            def times(entry: NumberedRun, shown: TagFilter = shown) -> list[int | None]:
                stamped = look(entry.run, request, shown)
                return [ms if is_shown else None for ms, is_shown in stamped]

            tails.append(await last_events(self._logs, tag, count, times, MOST_LOOKED))
        return latest(tails, ends, count)


def _held(tag: str, segments: Sequence[Segment]) -> TagSummary:
    return TagSummary(
        tag,
        len({segment.start_ms for segment in segments}),
        segments[0].start_ms,
        segments[-1].newest_ms,
        sum(segment.events for segment in segments),
        sum(segment.bytes for segment in segments),
    )

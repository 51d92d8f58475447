"""Tags for readers, wherever their events rest: one contract, and the store that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tailrace.config import Settings
from tailrace.feeds.frame import AnyFeed
from tailrace.feeds.hub import Hub
from tailrace.feeds.tag_request import TagRequest
from tailrace.feeds.tags import TagFeeds
from tailrace.model.cursor import Cursor
from tailrace.model.segment import Segment, key_of
from tailrace.stores.logs import Logs
from tailrace.stores.nodes import Nodes

PAGE = 100
"""Registries that are read at once."""


class Held(msgspec.Struct, frozen=True):
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

    async def tags(self, prefix: str, after: str, limit: int) -> list[Held]:
        """Return up to ``limit`` tags that begin with ``prefix`` and come after ``after``, in order of their bytes."""
        ...

    async def is_at_end(self, tags: Sequence[str], mode: str, cursor: str) -> bool:
        """Whether there is nothing behind a cursor that was handed out."""
        ...

    async def close(self) -> None:
        """Let connections go."""
        ...


class ValkeyTags(TagFeeds):
    """Tags whose events rest in Valkey."""

    store = "valkey"
    own_cursors = False

    async def tags(self, prefix: str, after: str, limit: int) -> list[Held]:
        found: list[Held] = []
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


def _held(tag: str, segments: Sequence[Segment]) -> Held:
    return Held(
        tag,
        len({segment.start_ms for segment in segments}),
        segments[0].start_ms,
        segments[-1].newest_ms,
        sum(segment.events for segment in segments),
        sum(segment.bytes for segment in segments),
    )


def open_store(settings: Settings, nodes: Nodes, hub: Hub, logs: Logs, clock: Callable[[], int]) -> OpensTags:
    """Return the tags of the store that the settings name."""
    if settings.tags.store == "cassandra":
        from tailrace.feeds.cassandra_tags import CassandraTags

        return CassandraTags(settings, nodes, hub, clock)
    return ValkeyTags(hub, logs, clock)

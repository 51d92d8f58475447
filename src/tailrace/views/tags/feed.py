"""Tags for readers, wherever their events rest: one contract, and the store that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tailrace.config import Settings
from tailrace.log.hub import Hub
from tailrace.log.request import AnyFeed
from tailrace.log.store import Logs
from tailrace.valkey.nodes import Nodes
from tailrace.views.tags.tag_request import TagRequest


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


def open_store(settings: Settings, nodes: Nodes, hub: Hub, logs: Logs, clock: Callable[[], int]) -> OpensTags:
    """Return the tags of the store that the settings name."""
    if settings.tags.store == "cassandra":
        from tailrace.views.tags.rows.tags import CassandraTags

        return CassandraTags(settings, nodes, hub, clock)
    from tailrace.views.tags.valkey_tags import ValkeyTags

    return ValkeyTags(hub, logs, clock)

"""Tags whose events rest in Cassandra: their feeds, and what is known of them without counting rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tailrace.config import Settings
from tailrace.feeds.frame import AnyFeed
from tailrace.feeds.hub import Hub
from tailrace.feeds.tag_request import TagRequest
from tailrace.feeds.tag_views import TagViews
from tailrace.feeds.tagged import Held
from tailrace.stores.cassandra import CassandraOptions
from tailrace.stores.nodes import Nodes
from tailrace.stores.row_reader import RowReader


class CassandraTags:
    """The tags of the rows in Cassandra."""

    store = "cassandra"
    own_cursors = True

    def __init__(self, settings: Settings, nodes: Nodes, hub: Hub, clock: Callable[[], int]) -> None:
        self._views = TagViews(settings, nodes, hub, clock)
        self._rows = RowReader(CassandraOptions.of(settings.cassandra))

    async def open(self, request: TagRequest) -> AnyFeed:
        """Open a feed. Raises before anything is sent."""
        return await self._views.open(request)

    async def tags(self, prefix: str, after: str, limit: int) -> list[Held]:
        """Return a page of tags, with their buckets; rows are not counted."""
        listed = sorted((tag for tag in await self._rows.tags() if tag.startswith(prefix)), key=str.encode)
        page = [tag for tag in listed if not after or tag.encode() > after.encode()][:limit]
        found: list[Held] = []
        for tag in page:
            if buckets := await self._rows.buckets(tag):
                last = max(bucket.start_ms + bucket.span_ms for bucket in buckets)
                found.append(Held(tag, len(buckets), buckets[0].start_ms, last))
        return found

    async def is_at_end(self, tags: Sequence[str], mode: str, cursor: str) -> bool:
        """Whether there is nothing behind a cursor that was handed out."""
        return await self._views.is_at_end(tags, mode, cursor.partition("~")[0])

    async def close(self) -> None:
        """Let connections go."""
        await self._views.close()
        await self._rows.close()

"""Tags whose events rest in Cassandra: their feeds, and what is known of them without counting rows."""

from __future__ import annotations

from tailrace.feeds.tag_views import TagViews
from tailrace.feeds.tagged import Held


class CassandraTags(TagViews):
    """The tags of the rows in Cassandra."""

    store = "cassandra"
    own_cursors = True

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

"""Tags from Python: their list, their sources, and feeds of their events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from tailrace.api.answers import SourcesPage, Tag, TaggedSource, TagsPage
from tailrace.api.requests import TagsFeedParameters
from tailrace.client.connection import Connection, Feed, FeedKeywords, as_segment, document_of
from tailrace.errors import BadRequest


class TagsClient(Connection):
    """Tags of a ``River``."""

    def tagged(
        self,
        *tags: str,
        mode: str = "any",
        query: Mapping[str, object] | None = None,
        client: str | None = None,
        **options: Unpack[FeedKeywords],
    ) -> Feed:
        """Follow the events of some tags.

        Args:
            tags: the tags; the events of each source keep their order.
            mode: ``any``: events that have one of the tags, each once; ``all``: events that have all of them.
            query: MongoDB's, as ``docs/query.md`` says: only events that match it.
            client: a name under which the service keeps the reader's position: without ``after`` it goes on there.
            options: of every feed. Here ``missing`` is about tags that no event has yet.
        """
        if not tags:
            raise BadRequest("name at least one tag to follow")
        q = document_of({} if query is None else query)
        return self._feed("/v1/tags/events", TagsFeedParameters, options, tag=tags, mode=mode, q=q, client=client)

    async def tags(self, prefix: str | None = None, limit: int | None = None) -> list[Tag]:
        """List the tags in the order of their names; so many at most."""
        return await self._listed("/v1/tags", TagsPage, lambda page: page.tags, limit, prefix)

    async def sources(self, tag: str, limit: int | None = None) -> list[TaggedSource]:
        """List the sources that have had events with a tag, in no order; so many at most."""
        found: dict[str, TaggedSource] = {}
        async for page in self._pages(f"/v1/tags/{as_segment(tag)}/sources", SourcesPage, limit):
            found |= {each.source: each for each in page.sources}
            if limit is not None and len(found) >= limit:
                break
        return list(found.values())[:limit]

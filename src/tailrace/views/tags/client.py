"""Tags from Python: which there are, whose events have them, and the events of some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import msgspec

from tailrace.api import Tag, TaggedSource
from tailrace.client.connection import Connection
from tailrace.client.following import Feed, FeedParameters, Query
from tailrace.client.request_encoding import as_segment, document_of
from tailrace.errors import BadRequest


class TagsClient(Connection):
    """What a ``River`` does with tags."""

    def tagged(
        self,
        *tags: str,
        mode: str = "any",
        query: Mapping[str, object] | None = None,
        client: str | None = None,
        **asked: Unpack[FeedParameters],
    ) -> Feed:
        """Follow the events of some tags. Takes what ``tail`` takes, and more.

        Args:
            tags: the tags; the events of each source keep their order.
            mode: ``any``: events that have one of the tags, each once; ``all``: events that have all of them.
            query: MongoDB's, as ``docs/query.md`` says: only events that it holds for.
            client: a name under which the service keeps the reader's place: without ``after`` it goes on there.
            asked: see ``tail``. Here ``missing`` is about tags that no event has yet.
        """
        if not tags:
            raise BadRequest("name at least one tag to follow")
        words: Query = [("tag", tag) for tag in tags]
        words += [("mode", mode)] if mode != "any" else []
        words += [] if query is None else [("q", document_of(query))]
        words += [] if client is None else [("client", client)]
        return self._feed("/v1/tags/events", words, **asked)

    async def tags(self, prefix: str | None = None, limit: int | None = None) -> list[Tag]:
        """List the tags in the order of their names; so many at most."""
        query: dict[str, str | int] = {"prefix": prefix} if prefix else {}
        return await self._listed("/v1/tags", query, limit, lambda page: msgspec.json.decode(page, type=_Tags).tags)

    async def sources(self, tag: str, limit: int | None = None) -> list[TaggedSource]:
        """List the sources that have had events with a tag, in no order; so many at most."""
        found: dict[str, TaggedSource] = {}
        async for page in self._pages(f"/v1/tags/{as_segment(tag)}/sources", {}, limit):
            found |= {each.source: each for each in msgspec.json.decode(page, type=_Sources).sources}
            if limit is not None and len(found) >= limit:
                break
        return list(found.values())[:limit]


class _Tags(msgspec.Struct):
    tags: list[Tag]


class _Sources(msgspec.Struct):
    sources: list[TaggedSource]

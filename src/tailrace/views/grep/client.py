"""Searches from Python: follow one, or try one on samples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Unpack

import msgspec

from tailrace.api.answers import SearchExplanation
from tailrace.api.requests import WINDOW_BYTES, GrepParameters
from tailrace.client.connection import Connection, Feed, FeedKeywords, document_of
from tailrace.errors import BadRequest

_TOPIC = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)


class GrepClient(Connection):
    """Searches of a ``River``."""

    def grep(
        self,
        topics: str | Sequence[str] = "",
        query: Mapping[str, object] | None = None,
        *,
        key: str | Sequence[object] | None = None,
        count: bool = False,
        window: int = WINDOW_BYTES,
        client: str | None = None,
        since: str | None = None,
        **options: Unpack[FeedKeywords],
    ) -> Feed:
        """Search topics: what the past has, from ``start`` on, then what comes.

        Args:
            topics: a regular expression (RE2) for their whole names, or names; ``""`` for all.
            query: MongoDB's, as ``docs/query.md`` says; all events without it. Times in it may be ``datetime``.
            key: the first elements of the key, or a regular expression (RE2) for one of them.
            count: send no events, only their number: ``await feed.count()``.
            window: bytes of events that the service fetches at once.
            client: a name under which the service keeps the reader's position: without ``after`` it goes on there.
            since: the same as ``start``.
            options: of every feed. Here ``missing`` is about topics that are named.
        """
        if since is not None:
            if options.get("start") is not None:
                raise BadRequest("since= and start= are the same: give one of them")
            options["start"] = since
        return self._feed(
            "/v1/grep",
            GrepParameters,
            options,
            long_in_body=True,
            topics=topics_text(topics),
            q=document_of({} if query is None else query),
            key=None if key is None else key_text(key),
            count=count,
            window=window,
            client=client,
        )

    async def explain(
        self,
        query: Mapping[str, object],
        samples: Iterable[object] = (),
        *,
        topics: str | Sequence[str] = "",
        key: str | Sequence[object] | None = None,
    ) -> SearchExplanation:
        """Try a search on samples: how it is understood, and which part of it each sample passes or fails.

        A sample is an event of a feed or a bare value.
        """
        body = {"topics": topics_text(topics), "q": msgspec.Raw(document_of(query).encode()), "samples": list(samples)}
        body |= {} if key is None else {"key": key_text(key)}
        answer = await self.call("POST", "/v1/grep/explain", content=msgspec.json.encode(body))
        return msgspec.json.decode(answer, type=SearchExplanation)


def topics_text(topics: str | Sequence[str]) -> str:
    """Return topics as one text: an expression, or names with commas between."""
    if isinstance(topics, str):
        return topics
    if not topics:
        raise BadRequest('no topic is named: give "" to search all of them')
    if odd := next((name for name in topics if not _TOPIC.fullmatch(name)), None):
        raise BadRequest(f"{odd!r} is no name of a topic: give a regular expression as one text, not in a list")
    return ",".join(topics)


def key_text(key: str | Sequence[object]) -> str:
    """Return a filter of keys as text: an expression, or a JSON array."""
    return key if isinstance(key, str) else msgspec.json.encode(key).decode()

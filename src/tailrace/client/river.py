"""The client: follow feeds, put events, and list what there is.

    async with tailrace.connect("http://127.0.0.1:7070") as river:
        async for event in river.tail("jobs/nightly", after=cursor):
            ...

A feed goes on over any number of disconnects.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from typing import Any, Unpack

import msgspec

from tailrace.api.answers import Coordinates, Day, Days, PutResult, Stream, Streams
from tailrace.api.requests import StreamsFeedParameters
from tailrace.client.connection import DEFAULT_URL, LONGEST_SEARCH, Feed, FeedKeywords, as_segment
from tailrace.errors import BadRequest
from tailrace.views.folds.client import FoldsClient, Group
from tailrace.views.grep.client import GrepClient
from tailrace.views.sessions.client import SessionsClient
from tailrace.views.tags.client import TagsClient

__all__ = ["BATCH_BYTES", "DEFAULT_URL", "Feed", "Group", "River", "connect"]

BATCH_EVENTS = 1_000
BATCH_BYTES = 2**20


def connect(url: str = DEFAULT_URL, *, token: str | None = None, timeout: float = 10.0, silence: float = 45.0) -> River:
    """Return the client of a service; the first call connects.

    Args:
        url: where the service is.
        token: sent as a bearer token, for a proxy in front of the service.
        timeout: seconds for one call, and for the first contact of a feed.
        silence: seconds without a byte, heartbeats included, after which a feed connects again.
    """
    return River(url, token=token, timeout=timeout, silence=silence)


class River(FoldsClient, GrepClient, TagsClient, SessionsClient):
    """A service: its streams here, and its other subjects in the classes above."""

    def tail(self, *names: str, **options: Unpack[FeedKeywords]) -> Feed:
        """Follow the day streams of some names, merged by time; ``FeedKeywords`` says what each keyword means."""
        if not names:
            raise BadRequest("name at least one stream to follow")
        return self._feed("/v1/streams/events", StreamsFeedParameters, options, name=names)

    async def put(
        self,
        topic: str,
        events: Iterable[Mapping[str, object]] | AsyncIterable[Mapping[str, object]],
        *,
        batch: int = BATCH_EVENTS,
    ) -> list[Coordinates]:
        """Write events to a topic and return their coordinates, once the broker has acknowledged all of them.

        Each event is ``{"key": …, "value": …, "headers": {…}, "time": "…Z"}``, of which only ``value`` is needed.
        They are sent in batches, in order; when one fails, those before it are written.
        """
        written: list[Coordinates] = []
        lines: list[bytes] = []
        size = 0
        async for event in _each(events):
            line = msgspec.json.encode(event)
            if lines and (len(lines) >= batch or size + len(line) > BATCH_BYTES):
                written += msgspec.json.decode(await self.put_lines(topic, lines), type=PutResult).events
                lines, size = [], 0
            lines.append(line)
            size += len(line) + 1
        if lines:
            written += msgspec.json.decode(await self.put_lines(topic, lines), type=PutResult).events
        return written

    async def put_lines(self, topic: str, lines: Iterable[bytes]) -> bytes:
        """Write one batch of events that are JSON already; return the answer as it came."""
        headers = {"Content-Type": "application/x-ndjson"}
        return await self.call(
            "POST", f"/v1/topics/{as_segment(topic)}", content=b"\n".join(lines) + b"\n", headers=headers
        )

    async def streams(
        self, prefix: str | None = None, limit: int | None = None, *, top: int | None = None, memory: bool = False
    ) -> list[Stream]:
        """List the day streams in the order of their names, or the largest ones.

        Args:
            prefix: only names that begin with this.
            limit: so many at most.
            top: the largest ones instead, so many of them, the largest first; the service looks at every stream.
            memory: with ``top``, also ask what each of them takes in the server.
        """
        if top is not None and limit is not None:
            raise BadRequest("give either limit= or top=, not both")
        if memory and top is None:
            raise BadRequest("memory= is only for the largest streams: give top= too")
        if top is not None:
            wanted: dict[str, str | int | None] = {"top": top, "memory": "true" if memory else None}
            found = await self._get("/v1/streams", Streams, LONGEST_SEARCH, prefix=prefix or None, **wanted)
            return found.streams
        return await self._listed("/v1/streams", Streams, lambda page: page.streams, limit, prefix)

    async def days(self, name: str) -> list[Day]:
        """List the days of a stream, the oldest first."""
        return (await self._get(f"/v1/streams/{as_segment(name)}/days", Days)).days

    async def status(self) -> dict[str, Any]:
        """Return rates, lag, batch time and health of every part."""
        return await self._get("/v1/status", dict[str, Any])


async def _each(
    events: Iterable[Mapping[str, object]] | AsyncIterable[Mapping[str, object]],
) -> AsyncIterator[Mapping[str, object]]:
    if isinstance(events, AsyncIterable):
        async for event in events:
            yield event
    else:
        for event in events:
            yield event

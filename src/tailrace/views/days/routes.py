"""Day streams over HTTP: lists of streams and days, the largest streams, and their feeds.

Lists are read from registries, never from events, and a few registries at a time, so a page of a thousand streams does
not hold up other requests. To find the largest streams, one walk reads all registries and remembers only the best so
far. Invariant: of one prefix there is at most one walk at a time. Requests that come meanwhile, or soon after, share
its answer: it is kept for as long as it took to find, so asking again takes no more than half of the service's time.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any

import msgspec
from fastapi import Path, Request, Response
from pydantic import AfterValidator

from tailrace.api.answers import Day, Days, Stream, Streams
from tailrace.api.requests import MAX_TOP, FeedParameters, Parameters, StreamsFeedParameters, StreamsParameters
from tailrace.errors import BadRequest, Overloaded, StreamNotFound
from tailrace.http.delivery import follow_logs
from tailrace.http.openapi import FEED
from tailrace.http.routing import LastEventId, Routes, decoded, part
from tailrace.http.service import LogService, Service
from tailrace.log.cursor import Position
from tailrace.log.event import iso_time
from tailrace.log.segment import DAY_MS, PACKED, SEALED, Log, Segment, day_text
from tailrace.log.store import Logs
from tailrace.valkey.shards import Command, Nodes

FIRST_LOGS = 10
MOST_LOGS = 100
ROWS = 1_000
"""Registries read at once: ten, then as many as have about 1,000 rows, a hundred at most."""
PAGE = 1_000
CANDIDATES = 4
KEPT_S = 5.0
"""Least time for which a walk's answer is kept."""
WALKS = 4
"""Walks under way at once, and answers kept, each of another prefix."""
KEYS = 200
"""Keys whose memory is asked for in one round trip."""
SAMPLES = 100
"""Elements of a key that the server looks at to estimate its memory."""


async def read_logs(logs: Logs, names: Sequence[str]) -> AsyncIterator[tuple[str, Log]]:
    """Yield the logs of names, in their order, without empty ones."""
    at, count = 0, FIRST_LOGS
    while at < len(names):
        some = names[at : at + count]
        found = await logs.logs_of(some)
        for name, log in zip(some, found, strict=True):
            if log.segments:
                yield name, log
        at += len(some)
        rows = sum(len(log.segments) for log in found)
        count = max(1, min(MOST_LOGS, ROWS * len(some) // max(1, rows)))


def stream_of(name: str, log: Log) -> Stream:
    """Describe a log that has segments."""
    segments = log.segments
    events = sum(segment.events for segment in segments)
    return Stream(
        name=name,
        events=events,
        bytes=sum(segment.bytes for segment in segments),
        days=len({segment.start_ms // DAY_MS for segment in segments}),
        packed=sum(segment.events for segment in segments if segment.state == PACKED) / max(1, events),
        # A new log begins with the end of others that expired before it; only one that lost segments begins after 0.
        expired=log.expired != Position.START and segments[0].index > 0,
        first_day=day_text(segments[0].start_ms),
        last_day=day_text(segments[-1].start_ms),
        last_time=iso_time(segments[-1].newest_ms),
    )


def _day(bucket: int, parts: list[Segment]) -> Day:
    return Day(
        day=day_text(bucket * DAY_MS),
        events=sum(part.events for part in parts),
        bytes=sum(part.bytes for part in parts),
        raw_bytes=sum(part.raw_bytes for part in parts),
        first=str(Position(parts[0].epoch, parts[0].first)),
        last=str(parts[-1].end),
        state=_state(parts),
    )


def _state(parts: list[Segment]) -> str:
    packed = sum(part.state == PACKED for part in parts)
    if any(part.open for part in parts):
        return "open"
    if packed:
        return "packed" if packed == len(parts) else "partly packed"
    return "sealed" if parts[-1].state == SEALED else "closed"


class Largest:
    """Finds the largest streams of a view."""

    def __init__(self, nodes: Nodes, logs: Logs) -> None:
        self._nodes, self._logs = nodes, logs
        self._walks: dict[str, asyncio.Task[list[Stream]]] = {}

    async def aclose(self) -> None:
        walks = list(self._walks.values())
        for walk in walks:
            walk.cancel()
        await asyncio.gather(*walks, return_exceptions=True)

    async def find(self, prefix: str, count: int, memory: bool = False) -> Streams:
        """Return up to ``count`` streams by their stored size, the largest first; of equal ones the first by name.

        With ``memory`` the candidates, several times as many, are measured in the store and ordered by that: streams
        of few packed pieces take about what is stored, those of many small runs up to twice as much.
        """
        found = await asyncio.shield(self._walk(prefix))
        if not memory:
            return Streams(streams=found[:count], next=None)
        measured = await self._measured(found[: CANDIDATES * count])
        measured.sort(key=lambda stream: -(stream.memory or 0))
        return Streams(streams=measured[:count], next=None)

    def _walk(self, prefix: str) -> asyncio.Task[list[Stream]]:
        walk = self._walks.get(prefix)
        if walk is not None:
            return walk
        if sum(not other.done() for other in self._walks.values()) >= WALKS:
            raise Overloaded(f"{WALKS} searches for the largest streams are under way: try again in a moment")
        began = time.monotonic()
        walk = self._walks[prefix] = asyncio.create_task(self._search(prefix), name="largest streams")
        walk.add_done_callback(lambda ended: self._ended(prefix, ended, time.monotonic() - began))
        return walk

    def _ended(self, prefix: str, walk: asyncio.Task[list[Stream]], took_s: float) -> None:
        if walk.cancelled() or walk.exception() is not None:
            self._forget(prefix, walk)
            return
        asyncio.get_running_loop().call_later(max(KEPT_S, took_s), self._forget, prefix, walk)
        kept = [(key, other) for key, other in self._walks.items() if other.done()]
        for key, other in kept[:-WALKS]:
            self._forget(key, other)

    def _forget(self, prefix: str, walk: asyncio.Task[list[Stream]]) -> None:
        if self._walks.get(prefix) is walk:
            del self._walks[prefix]

    async def _search(self, prefix: str) -> list[Stream]:
        best: list[tuple[int, int, Stream]] = []
        after, seen = "", 0
        while True:
            names = await self._logs.names(after, prefix, PAGE)
            async for name, log in read_logs(self._logs, names):
                seen += 1
                size = sum(segment.bytes for segment in log.segments)
                if len(best) < MAX_TOP:
                    heapq.heappush(best, (size, -seen, stream_of(name, log)))
                elif size > best[0][0]:
                    heapq.heapreplace(best, (size, -seen, stream_of(name, log)))
            if len(names) < PAGE:
                return [stream for _, _, stream in sorted(best, key=lambda found: found[:2], reverse=True)]
            after = names[-1]

    async def _measured(self, streams: list[Stream]) -> list[Stream]:
        """Ask the server for the memory of the streams' keys; a key that is gone takes none."""
        keys, view = self._nodes.keys, self._logs.view
        totals = dict.fromkeys((stream.name for stream in streams), 0)
        async for name, log in read_logs(self._logs, list(totals)):
            shard = self._logs.shard_of(name)
            owned = [keys.log(shard, view, name)]
            owned += [keys.segment(shard, view, segment.index, name) for segment in log.segments]
            for at in range(0, len(owned), KEYS):
                commands: list[Command] = [
                    (shard, ("MEMORY", "USAGE", key, "SAMPLES", SAMPLES)) for key in owned[at : at + KEYS]
                ]
                totals[name] += sum(size or 0 for size in await self._nodes.read_all(commands))
        return [msgspec.structs.replace(stream, memory=totals[stream.name]) for stream in streams]


class DaysService(LogService):
    """State that requests of day streams share: the hub, and the walks over all streams."""

    def __init__(self, service: Service) -> None:
        super().__init__(service, Logs(service.nodes, "days"))
        self.largest = Largest(service.nodes, self.logs)
        service.metrics.streams_followed.set_function(lambda: self.followed)

    @property
    def followed(self) -> int:
        """Number of streams that some feed follows."""
        return self._hub.followed if self._hub else 0

    async def start(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.largest.aclose)

    def facts(self) -> dict[str, Any]:
        return {"streams_followed": self.followed}


PART = DaysService
DaysHere = Annotated[DaysService, part("days", DaysService)]
Name = Annotated[
    str,
    Path(description="Name of a stream, URL-encoded; it may contain `/`, which may be written `%2F` or as it is."),
    AfterValidator(decoded),
]


routes = Routes("streams")


@routes.get("/v1/streams", 400, 503)
async def list_streams(days: DaysHere, parameters: StreamsParameters) -> Streams:
    """List the day streams in the order of their names, or the largest ones."""
    if parameters.top is None:
        if parameters.memory:
            raise BadRequest("memory is only for the largest streams: give top too")
        limit = parameters.limit or 100
        names = await days.logs.names(parameters.after, parameters.prefix, limit + 1)
        page = names[:limit]
        streams = [stream_of(name, log) async for name, log in read_logs(days.logs, page)]
        return Streams(streams=streams, next=page[-1] if len(names) > limit else None)
    if needless := [name for name in ("after", "limit") if getattr(parameters, name)]:
        raise BadRequest(f"top answers in one piece: leave {needless[0]} out")
    return await days.largest.find(parameters.prefix, parameters.top, parameters.memory)


@routes.feed("/v1/streams/events", FEED)
async def follow_several(
    request: Request, days: DaysHere, parameters: StreamsFeedParameters, last_event_id: LastEventId = None
) -> Response:
    """Follow several day streams in one feed, merged by time; each keeps its own order."""
    return follow_logs(request, days, tuple(parameters.name), parameters, last_event_id)


@routes.feed("/v1/streams/{name:path}/events", FEED)
async def follow_one(
    request: Request, days: DaysHere, name: Name, parameters: FeedParameters, last_event_id: LastEventId = None
) -> Response:
    """Follow a day stream: from anywhere, then live; resumable after every event."""
    return follow_logs(request, days, (name,), parameters, last_event_id)


@routes.get("/v1/streams/{name:path}/days", 400, 404, 503)
async def list_days(days: DaysHere, name: Name, parameters: Parameters) -> Days:
    """List the days of a stream."""
    segments = (await days.logs.log(name)).segments
    if not segments:
        raise StreamNotFound(name)
    # All segments of a day are one row: of several servers, buckets, seals.
    by_day: dict[int, list[Segment]] = {}
    for segment in segments:
        by_day.setdefault(segment.start_ms // DAY_MS, []).append(segment)
    return Days(name=name, days=[_day(bucket, parts) for bucket, parts in by_day.items()])

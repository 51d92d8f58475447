"""Listings: which streams there are, and the days of one.

Everything here is read from registries, never from events, and a few registries at a time: the event loop is held no
longer by a page of a thousand streams than by a page of ten.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, TypeAlias

from pydantic import BaseModel, Field

from tailrace.errors import StreamNotFound
from tailrace.log.cursor import Position
from tailrace.log.event import iso_time
from tailrace.log.segment import DAY_MS, PACKED, SEALED, Log, Segment, day_text
from tailrace.log.store import Logs

FIRST_LOGS = 10
MOST_LOGS = 100
ROWS = 1_000
"""Registries read at once: ten, then as many as have about so many rows, a hundred at most."""

State: TypeAlias = Literal["open", "closed", "sealed", "packed", "partly packed"]


class Stream(BaseModel):
    """A stream and how much it holds."""

    name: str = Field(examples=["jobs/nightly"])
    events: int
    bytes: int = Field(description="Stored, compressed.")
    days: int
    packed: float = Field(description="The share of its events that is packed, 0 to 1.", examples=[0.93])
    expired: bool = Field(description="Whether it had older days, which were dropped.")
    first_day: str = Field(examples=["2026-11-15"])
    last_day: str
    last_time: str = Field(description="The latest time of all its events.", examples=["2026-11-15T08:00:00.000Z"])
    memory: int | None = Field(default=None, description="What its keys take in the server; only with `memory=true`.")


class Streams(BaseModel):
    """A page of streams, in the order of their names' bytes; with `top` the largest ones, the largest first."""

    streams: list[Stream]
    next: str | None = Field(description="Ask with `after=` this for the next page; null on the last one.")


class Day(BaseModel):
    """One UTC day of a stream."""

    day: str = Field(examples=["2026-11-15"])
    events: int
    bytes: int = Field(description="Stored, compressed.")
    raw_bytes: int = Field(description="What is packed, without compression; 0 when nothing is.")
    first: str = Field(description="The cursor of its first event.", examples=["1789200000.42"])
    last: str = Field(description="The cursor of its last event.")
    state: State = Field(
        description="`open`: it is the one that is written. `closed`: as it came. `sealed`: as it came, closed by an "
        "event before its end. `packed`: rewritten into few large pieces. `partly packed`: some of its buckets are."
    )


class Days(BaseModel):
    """The days of a stream, the oldest first."""

    name: str
    days: list[Day]


async def list_streams(logs: Logs, prefix: str, after: str, limit: int) -> Streams:
    """Return a page of streams. One that has expired as a whole is not among them."""
    names = await logs.names(after, prefix, limit + 1)
    page = names[:limit]
    streams = [stream_of(name, log) async for name, log in read_logs(logs, page)]
    return Streams(streams=streams, next=page[-1] if len(names) > limit else None)


async def list_days(logs: Logs, name: str) -> Days:
    """Return the days of a stream.

    A day is one however it was written: by several server processes, in shorter buckets, before and after a seal.
    """
    segments = (await logs.log(name)).segments
    if not segments:
        raise StreamNotFound(name)
    by_day: dict[int, list[Segment]] = {}
    for segment in segments:
        by_day.setdefault(segment.start_ms // DAY_MS, []).append(segment)
    return Days(name=name, days=[_day(bucket, parts) for bucket, parts in by_day.items()])


async def read_logs(logs: Logs, names: Sequence[str]) -> AsyncIterator[tuple[str, Log]]:
    """Yield the logs of names, in their order, without those that hold nothing."""
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


def _state(parts: list[Segment]) -> State:
    packed = sum(part.state == PACKED for part in parts)
    if any(part.open for part in parts):
        return "open"
    if packed:
        return "packed" if packed == len(parts) else "partly packed"
    return "sealed" if parts[-1].state == SEALED else "closed"

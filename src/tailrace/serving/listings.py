"""Listings: which streams there are, and the days of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

from tailrace.errors import StreamNotFound
from tailrace.model.bucket import DAY_MS, day_text
from tailrace.model.cursor import Position
from tailrace.model.event import iso_time
from tailrace.model.segment import Segment
from tailrace.stores.logs import Logs


class Stream(BaseModel):
    """A stream and how much it holds."""

    name: str = Field(examples=["jobs/nightly"])
    events: int
    bytes: int = Field(description="Stored, compressed.")
    days: int
    first_day: str = Field(examples=["2026-11-15"])
    last_day: str
    last_time: str = Field(description="The latest time of all its events.", examples=["2026-11-15T08:00:00.000Z"])


class Streams(BaseModel):
    """A page of streams, in the order of their names' bytes."""

    streams: list[Stream]
    next: str | None = Field(description="Ask with `after=` this for the next page; null on the last one.")


class Day(BaseModel):
    """One UTC day of a stream."""

    day: str = Field(examples=["2026-11-15"])
    events: int
    bytes: int = Field(description="Stored, compressed.")
    first: str = Field(description="The cursor of its first event.", examples=["1789200000.42"])
    last: str = Field(description="The cursor of its last event.")
    state: Literal["open", "closed"] = Field(description="A closed day is never written again.")


class Days(BaseModel):
    """The days of a stream, the oldest first."""

    name: str
    days: list[Day]


async def list_streams(logs: Logs, prefix: str, after: str, limit: int) -> Streams:
    """Return a page of streams."""
    names = await logs.names(after, prefix, limit + 1)
    page = names[:limit]
    found = zip(page, [log.segments for log in await logs.logs_of(page)], strict=True)
    return Streams(
        streams=[_stream(name, segments) for name, segments in found if segments],
        next=page[-1] if len(names) > limit else None,
    )


async def list_days(logs: Logs, name: str) -> Days:
    """Return the days of a stream. A day that was written by several server processes is still one."""
    segments = (await logs.log(name)).segments
    if not segments:
        raise StreamNotFound(name)
    by_day: dict[int, list[Segment]] = {}
    for segment in segments:
        by_day.setdefault(segment.start_ms // DAY_MS, []).append(segment)
    newest = segments[-1].start_ms // DAY_MS
    return Days(name=name, days=[_day(bucket, parts, bucket == newest) for bucket, parts in by_day.items()])


def _stream(name: str, segments: Sequence[Segment]) -> Stream:
    return Stream(
        name=name,
        events=sum(segment.events for segment in segments),
        bytes=sum(segment.bytes for segment in segments),
        days=len({segment.start_ms // DAY_MS for segment in segments}),
        first_day=day_text(segments[0].start_ms),
        last_day=day_text(segments[-1].start_ms),
        last_time=iso_time(segments[-1].newest_ms),
    )


def _day(bucket: int, parts: list[Segment], newest: bool) -> Day:
    return Day(
        day=day_text(bucket * DAY_MS),
        events=sum(part.events for part in parts),
        bytes=sum(part.bytes for part in parts),
        first=str(Position(parts[0].epoch, parts[0].first)),
        last=str(parts[-1].end),
        state="open" if newest else "closed",
    )

"""Frames of feeds: events of Kafka, bursts of telemetry sessions, and frames about the feed itself."""

from __future__ import annotations

from datetime import datetime
from functools import cached_property
from typing import Annotated, Any

import msgspec

from tailrace.api import TEXT, TIME, note


class Event(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One record of Kafka in a feed."""

    id: Annotated[str, note("The event's own id, the same in every view, every delivery and after a rebuild.")]
    topic: str
    partition: int
    offset: int
    time: Annotated[str, note("The record's time in UTC.", TIME)]
    key: Annotated[Any, note('The elements of the key; null without one; {"base64": …} if it is no text.')]
    headers: Annotated[dict[str, Any], note("A repeated header is a list.")]
    late: Annotated[bool, note("True if the record's own day is before the day it is in.")] = False
    tag: Annotated[str | None, note("Only in feeds of tags: the requested tag that it is shown for.")] = None
    tags: Annotated[list[str], note("Only in feeds of tags: all its tags.")] = []
    source: Annotated[str | None, note("Only in feeds of tags: whose event it is.")] = None
    seq: Annotated[int | None, note("Only in feeds of tags: its number in its source.")] = None
    tag_seq: Annotated[
        int | None, note("Only in feeds of tags: its number among the source's events with the tag: 1, 2, 3.")
    ] = None
    timeuuid: Annotated[str | None, note("Only in feeds of tags: its position in time in the tag.")] = None
    payload: Annotated[msgspec.Raw, note("The record's value as it was produced: digits, key order, duplicates.")] = (
        msgspec.field(name="data")
    )
    cursor: Annotated[
        str, note("Resumes exactly after it. Only in lines of JSON; in an event stream it is the `id:` line.")
    ] = ""

    def __str__(self) -> str:
        return self.id

    def __repr__(self) -> str:
        return f"Event({self.id!r}, time={self.time!r}, key={self.key!r})"

    @property
    def raw(self) -> bytes:
        """The record's value: JSON as it was produced."""
        return bytes(self.payload)

    @cached_property
    def data(self) -> Any:
        """The record's value, decoded."""
        return msgspec.json.decode(self.payload)

    @property
    def at(self) -> datetime:
        """The record's time; fails for the few that no calendar has."""
        return datetime.fromisoformat(self.time)


class Control(msgspec.Struct, frozen=True):
    """A frame about the feed itself."""

    kind: str
    """``caught-up``, ``gap``, ``progress``, ``problem`` or ``end``; a newer service may have more."""
    data: dict[str, Any]
    cursor: str | None = None


Value = float | int | str | list[float] | None
"""A number, a text, three numbers of one sample, or None for a value that is no number."""
Nanoseconds = Annotated[
    int, note("Nanoseconds since the epoch, as text: too large for a double.", extra_json_schema={"format": TEXT})
]


class ChannelSeries(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Samples of one channel in a burst, as one of its parameters shows it."""

    channel: int
    name: Annotated[str, note("Of the parameter, or of the channel if it has none.")]
    unit: str = ""
    start: Nanoseconds
    t: Annotated[list[int], note("Nanoseconds since `start`.")]
    v: Annotated[list[Any], note("Numbers or texts; null where there is no number.")]

    def __post_init__(self) -> None:
        if len(self.t) != len(self.v):
            raise ValueError(f"{len(self.t)} times of {len(self.v)} values")

    @cached_property
    def samples(self) -> list[tuple[int, Value]]:
        """Time in nanoseconds since the epoch, and value."""
        return [(self.start + t, v) for t, v in zip(self.t, self.v, strict=True)]


class SessionEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a session."""

    id: int
    time: Nanoseconds
    app: str = ""
    text: str = ""
    values: list[Any] = []
    code: str = ""
    description: str = ""
    priority: str = ""


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Samples and events of a session that came together."""

    session: str
    position: Annotated[str, note("Of the last entry in it, in the session's stream.")]
    channels: list[ChannelSeries] = []
    events: list[SessionEvent] = []
    json: Annotated[dict[str, Any] | None, note("Session JSON, if it changed.")] = None
    range: Annotated[tuple[Nanoseconds, Nanoseconds] | None, note("First and last time, if they changed.")] = None
    cursor: Annotated[
        str, note("Resumes exactly after it. Only in lines of JSON; in an event stream it is the `id:` line.")
    ] = ""


class Closing(msgspec.Struct, frozen=True):
    """The end of a WebSocket: a code of RFC 6455, and a reason."""

    code: int
    reason: str

"""Telemetry sessions from Python: their list, and bursts of one, decoded and with exact times.

    async for burst in river.session("lap-7", channels=["vCar:Chassis"]):
        for series in burst.channels:
            print(series.name, series.samples[-1])

A time is an integer of nanoseconds all the way. Like every feed, a session goes on over any number of disconnects.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import msgspec

from tailrace.api.answers import BurstMessage, Control, SeriesMessage, SessionEventMessage, SessionRow, SessionRows
from tailrace.api.requests import SessionFeedParameters
from tailrace.client.connection import Connection
from tailrace.client.following import Feed, FeedKeywords
from tailrace.client.request_encoding import as_segment
from tailrace.client.sse_reader import SseFrame
from tailrace.errors import BadRequest

LARGEST_LIST = 1_000

Value = float | int | str | list[float] | None
"""A number, a text, three numbers of one sample, or None for a value that is no number."""


class ChannelSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one channel, as one of its parameters shows it."""

    channel: int
    name: str
    unit: str = ""
    samples: list[tuple[int, Value]] = []
    """Time in nanoseconds since the epoch, and value."""


class SessionEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a session."""

    id: int
    time: int
    app: str = ""
    text: str = ""
    values: list[Any] = []
    code: str = ""
    description: str = ""
    priority: str = ""


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Samples and events that came together."""

    session: str
    position: str
    """Of its last entry in the session's stream."""
    cursor: str = ""
    """Resumes exactly after it."""
    channels: list[ChannelSeries] = []
    events: list[SessionEvent] = []
    json: dict[str, Any] | None = None
    """Session JSON, if it changed."""
    range: tuple[int, int] | None = None
    """Nanoseconds, if it changed."""


_decode = msgspec.json.Decoder(BurstMessage).decode


def decode_burst(frame: SseFrame) -> Burst:
    """Read a burst's frame."""
    try:
        found = _decode(frame.data or b"null")
        return Burst(
            session=found.session,
            position=found.position,
            cursor=frame.id or "",
            channels=[_series(each) for each in found.channels],
            events=[_event(each) for each in found.events],
            json=found.json,
            range=None if found.range is None else (int(found.range[0]), int(found.range[1])),
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise BadRequest(
            f"the frame after cursor {frame.id} is no burst ({error}): is this a Tailrace service?"
        ) from None


def _series(found: SeriesMessage) -> ChannelSeries:
    start = int(found.start)
    samples = [(start + t, v) for t, v in zip(found.t, found.v, strict=True)]
    return ChannelSeries(channel=found.channel, name=found.name, unit=found.unit, samples=samples)


def _event(found: SessionEventMessage) -> SessionEvent:
    fields = msgspec.structs.asdict(found)
    return SessionEvent(**{**fields, "time": int(found.time)})


class BurstFeed:
    """The bursts of one session: an asynchronous iterable, and a context manager that closes it.

    Iterating again after a ``break`` goes on where it stopped. One task at a time may iterate.
    """

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        """The feed that carries them; its lines are the bursts as the service sent them."""

    @property
    def cursor(self) -> str | None:
        """Position after the last burst handed out: resume there with ``after=``."""
        return self.feed.cursor

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let the connection go."""
        await self.feed.aclose()

    def __aiter__(self) -> AsyncIterator[Burst]:
        return self._bursts()

    async def _bursts(self) -> AsyncIterator[Burst]:
        async for item in self.frames():
            if isinstance(item, Burst):
                yield item

    async def frames(self) -> AsyncIterator[Burst | Control]:
        """Yield bursts and control frames alike."""
        while frame := await self.feed._next():
            if frame.event == "message":
                yield decode_burst(frame)
            else:
                yield self.feed._control(frame)


class SessionsClient(Connection):
    """Telemetry sessions of a ``River``."""

    def session(
        self,
        identity: str,
        *,
        channels: Sequence[str | int] = (),
        pixel: str | None = None,
        rate: float | None = None,
        raw: bool = False,
        **options: Unpack[FeedKeywords],
    ) -> BurstFeed:
        """Follow a telemetry session.

        Args:
            identity: the session.
            channels: only these: numbers, names of channels or parameters, or patterns; all if there are none.
            pixel: thin samples: of each channel the least and the greatest in every such time, as ``20ms``.
            rate: thin samples: at most so many of each channel per second.
            raw: values as they were sampled, not converted.
            options: of every feed. ``-N`` and ``limit`` are about bursts, and times are about samples; they may be
                nanoseconds.
        """
        if isinstance(channels, str):
            raise BadRequest("channels= is a list of names")
        names = [str(each) for each in channels]
        if any("," in name for name in names):
            raise BadRequest("a name of a channel with a comma in it cannot be asked for: use a pattern")
        path, wanted = f"/v1/sessions/{as_segment(identity)}/events", ",".join(names) or None
        feed = self._feed(path, SessionFeedParameters, options, channels=wanted, pixel=pixel, rate=rate, raw=raw)
        return BurstFeed(feed)

    async def sessions(
        self, prefix: str | None = None, limit: int | None = None, *, state: str | None = None
    ) -> list[SessionRow]:
        """List telemetry sessions, those that were updated last first; so many at most, and no more than 1,000."""
        given = {"prefix": prefix, "state": state, "limit": min(limit or LARGEST_LIST, LARGEST_LIST)}
        query = {key: value for key, value in given.items() if value is not None}
        return msgspec.json.decode(await self.call("GET", "/v1/sessions", params=query), type=SessionRows).sessions

    async def session_config(self, identity: str) -> dict[str, Any]:
        """Return what a session's configurations say: channels, parameters, kinds of events."""
        answer = await self.call("GET", f"/v1/sessions/{as_segment(identity)}/config")
        found: dict[str, Any] = msgspec.json.decode(answer)
        return found

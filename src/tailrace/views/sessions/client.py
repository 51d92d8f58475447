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

from tailrace.api.answers import SessionRow, SessionRows
from tailrace.api.feeds import Burst, Control
from tailrace.api.requests import SessionFeedParameters
from tailrace.client.connection import Connection
from tailrace.client.following import Feed, FeedKeywords
from tailrace.client.request_encoding import as_segment
from tailrace.client.sse_reader import SseFrame
from tailrace.errors import BadRequest

LARGEST_LIST = 1_000

_decode = msgspec.json.Decoder(Burst, strict=False).decode


def decode_burst(frame: SseFrame) -> Burst:
    """Read a burst's frame."""
    try:
        burst = _decode(frame.data or b"null")
    except msgspec.DecodeError as error:
        raise BadRequest(
            f"the frame after cursor {frame.id} is no burst ({error}): is this a Tailrace service?"
        ) from None
    msgspec.structs.force_setattr(burst, "cursor", frame.id or "")
    return burst


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

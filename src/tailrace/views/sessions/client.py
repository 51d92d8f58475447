"""Telemetry sessions from Python: their list, and bursts of one, decoded and with exact times.

    async for burst in river.session("lap-7", channels=["vCar:Chassis"]):
        for series in burst.channels:
            print(series.name, series.samples[-1])

A time is an integer of nanoseconds all the way. Like every feed, a session goes on over any number of disconnects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import msgspec

from tailrace.api.answers import Burst, SessionRow, SessionRows
from tailrace.api.requests import SessionFeedParameters
from tailrace.client.answers import SseFrame, read_frame
from tailrace.client.connection import Connection, Feed, FeedKeywords, as_segment
from tailrace.errors import BadRequest

LARGEST_LIST = 1_000

_decode = msgspec.json.Decoder(Burst, strict=False).decode


def read_burst(frame: SseFrame) -> Burst:
    return read_frame(frame, _decode, "no burst")


class SessionsClient(Connection):
    def session(
        self,
        identity: str,
        *,
        channels: Sequence[str | int] = (),
        pixel: str | None = None,
        rate: float | None = None,
        raw: bool = False,
        **options: Unpack[FeedKeywords],
    ) -> Feed[Burst]:
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
        more: dict[str, Any] = {"channels": wanted, "pixel": pixel, "rate": rate, "raw": raw}
        return self._feed(path, SessionFeedParameters, options, decode=read_burst, **more)

    async def sessions(
        self, prefix: str | None = None, limit: int | None = None, *, state: str | None = None
    ) -> list[SessionRow]:
        """List telemetry sessions, those that were updated last first; so many at most, and no more than 1,000."""
        most = min(limit or LARGEST_LIST, LARGEST_LIST)
        return (await self._get("/v1/sessions", SessionRows, prefix=prefix, state=state, limit=most)).sessions

    async def session_config(self, identity: str) -> dict[str, Any]:
        """Return what a session's configurations say: channels, parameters, kinds of events."""
        return await self._get(f"/v1/sessions/{as_segment(identity)}/config", dict[str, Any])

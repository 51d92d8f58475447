"""The feed of a session over a binary WebSocket, in a form that a browser uses without copying.

What is sent is what the feed yields, as ``samples`` writes it; what it says of itself is a message without
samples, with ``event`` in its header. A viewer that has caught up once and then falls too far behind goes on at the
live end, and is told what it missed, or is closed; one that reads the past may take its time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import Response
from pydantic import ValidationError
from starlette.websockets import WebSocket

from tailrace.errors import BadRequest, TailraceError
from tailrace.http.problems import problem_of
from tailrace.http.request import decoded
from tailrace.http.service import Service
from tailrace.http.socket import admit, converse
from tailrace.log.request import AnyFrame, Control, Frame
from tailrace.views.sessions.feed import SessionFeed
from tailrace.views.sessions.routes import Identity, SessionQuery
from tailrace.views.sessions.rta.viewer import Closing
from tailrace.views.sessions.shown import as_bytes, message

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class LiveFeed:
    """A feed on its way to one viewer."""

    def __init__(self, feed: SessionFeed, client_bytes: int, drops: bool) -> None:
        self._feed, self._client_bytes, self._drops = feed, client_bytes, drops
        self.closing = Closing(1000, "")
        self.dropped = 0
        """How often the viewer was too far behind."""

    def stop(self) -> None:
        """End soon, telling the client to come back."""
        self.closing = Closing(1012, "the service is shutting down: connect again, after the last id")
        self._feed.stop()

    def hear(self, frame: bytes | str) -> Closing | None:
        """Pass over what the client says: there is nothing to say here."""
        return None

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Give messages until the feed ends, or the viewer is to be closed."""
        try:
            async with aclosing(self._feed.__aiter__()) as batches:
                async for frames in batches:
                    for frame in frames:
                        yield written(frame)
                    behind = self._feed.behind
                    if behind <= self._client_bytes:
                        continue
                    self.dropped += 1
                    if not self._drops:
                        said = f"{behind} bytes behind (sessions.client_bytes): connect again, after the last id"
                        self.closing = Closing(1013, said)
                        return
                    self._feed.drop()
        except TailraceError as error:
            yield message(_encode({"event": "problem", **problem_of(error)}))
            self.closing = Closing(1013 if error.retryable else 1008, str(error))


def written(frame: AnyFrame) -> bytes:
    """Return a frame as a message."""
    if isinstance(frame, Frame):
        return frame.data
    place = {"id": frame.cursor} if frame.cursor else {}
    if isinstance(frame, Control):
        return message(_encode({"event": frame.name, **place, **_decode(frame.data)}))
    return message(_encode({"event": "moved", **place}))


async def session_live(websocket: WebSocket) -> None:
    """Follow a session over a WebSocket, in binary messages."""
    service: Service = websocket.app.state.service
    admit(service, websocket)
    identity = decoded(websocket.path_params["identity"])
    request = _query(websocket).session_request(identity)
    assert request is not None
    feed = await service.sessions.open(request, as_bytes)
    settings = service.settings.sessions
    live = LiveFeed(feed, settings.client_bytes, settings.slow == "drop")
    try:
        await converse(service, websocket, live)
    finally:
        await feed.aclose()
        service.metrics.viewer_drops.inc(live.dropped)
        service.metrics.viewer_slow_closes.inc(live.closing.code == 1013)


async def live_not_upgraded(identity: Identity) -> Response:
    """Follow a session over a WebSocket, in binary messages; takes what its events take. Plain requests are refused."""
    raise BadRequest("this is a WebSocket: ask for an upgrade; /events has the same as an event stream")


def _query(websocket: WebSocket) -> SessionQuery:
    given = websocket.query_params.multi_items()
    if len(dict(given)) < len(given):
        raise BadRequest("a parameter is given twice")
    if "format" in dict(given):
        raise BadRequest("unknown parameter 'format': messages have one form")
    try:
        return SessionQuery.model_validate(dict(given))
    except ValidationError as error:
        wrong = error.errors()[0]
        name = str(wrong["loc"][0]) if wrong["loc"] else "?"
        said = "unknown parameter" if wrong["type"] == "extra_forbidden" else f"{wrong['msg']}:"
        raise BadRequest(f"{said} {name!r}") from None

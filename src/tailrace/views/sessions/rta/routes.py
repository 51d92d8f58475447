"""The routes of the RTA telemetry protocol: the stream of a session, and the lists of sessions and configurations.

Stream and lists read the same hash of a session, so the time range in a list is as new as the last message. Times in
nanoseconds are integers all the way. Unknown (null or missing) and empty properties of a session's JSON are passed on
unchanged: they mean different things. Unknown query parameters are ignored, since the clients are not ours.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from fastapi import Path, Response
from pydantic import AfterValidator
from starlette.exceptions import HTTPException
from starlette.websockets import WebSocket

from tailrace.api.answers import RtaSession, RtaSessions
from tailrace.api.requests import MAX_SESSIONS, RtaParameters
from tailrace.errors import BadRequest, SessionNotFound
from tailrace.http.openapi import Responses, answer
from tailrace.http.routing import Routes, decoded
from tailrace.http.service import Service
from tailrace.http.socket import admit, converse
from tailrace.views.sessions.routes import Identity, SessionsHere, SessionsService
from tailrace.views.sessions.rta.viewer import Viewer, ViewerOptions
from tailrace.views.sessions.streams import Located

SUBPROTOCOL = "mat.ocs.rta.stream-lz4"
CONFIG_TYPE = "application/vnd.mat.config+json"
Identifier = Annotated[str, Path(description="Identifier of a configuration, URL-encoded."), AfterValidator(decoded)]

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_value = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


RTA_CONFIG: Responses = {200: {"content": {CONFIG_TYPE: {"schema": {"type": "object"}}}}}
RTA_STREAM: Responses = {
    101: {
        "description": "Binary frames, each a burst as a raw LZ4 block: first the Session JSON, then the time range, "
        "then updates; samples and events after a `StreamRequest`, which is not compressed."
    },
    406: {"description": "The sub-protocol is missing."},
}
routes = Routes("rta")


@routes.websocket("/rta/v2/sessions/{identity}/stream")
async def rta_stream(websocket: WebSocket) -> None:
    """Follow a session over a WebSocket, in the telemetry protocol."""
    service: Service = websocket.app.state.service
    sessions = service.part_of("sessions", SessionsService)
    identity = decoded(websocket.path_params["identity"])
    admit(service, websocket, sessions.settings.sessions.origins)
    if SUBPROTOCOL not in websocket.scope["subprotocols"]:
        raise HTTPException(406, f"this WebSocket speaks {SUBPROTOCOL}: offer it as a sub-protocol")
    viewer = Viewer(sessions.streams, identity, ViewerOptions.of(service.settings.sessions))
    try:
        await converse(service, websocket, viewer, SUBPROTOCOL)
    finally:
        service.metrics.viewer_drops.inc(viewer.dropped_bursts)
        service.metrics.bursts_unread.inc(viewer.unread)
        service.metrics.viewer_slow_closes.inc(viewer.closing.code == 1013)


@routes.get("/rta/v2/sessions/{identity}/stream", 400, responses=RTA_STREAM)
async def rta_not_upgraded(identity: Identity) -> Response:
    """Follow a session: a WebSocket, with the sub-protocol `mat.ocs.rta.stream-lz4`; plain requests are refused."""
    raise BadRequest(f"this is a WebSocket: ask for an upgrade, and offer the sub-protocol {SUBPROTOCOL}")


@routes.get("/rta/v2/sessions", 400, 503, responses=answer(RtaSessions))
async def rta_sessions(sessions: SessionsHere, parameters: RtaParameters) -> Response:
    """List sessions as clients of the telemetry protocol want them."""
    shown = [
        fields
        for located in await sessions.live.listing(MAX_SESSIONS)
        if (fields := session_fields(located)) is not None
    ]
    path, _, order = parameters.sort.rpartition(":")
    shown.sort(key=lambda fields: sort_key(fields, path), reverse=order == "desc")
    begin = parameters.page_index * parameters.page_size
    body = _encode({"sessions": shown[begin : begin + parameters.page_size]})
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


@routes.get("/rta/v2/sessions/{identity}", 400, 404, 503, responses=answer(RtaSession))
async def rta_session(sessions: SessionsHere, identity: Identity) -> Response:
    """Show a session as clients of the telemetry protocol want it."""
    located = await sessions.live.get(identity)
    fields = None if located is None else session_fields(located)
    if fields is None:
        raise SessionNotFound(f"no session has the identity {identity[:200]!r}, or its writer has not described it yet")
    return Response(_encode(fields), media_type="application/json", headers={"Cache-Control": "no-store"})


@routes.get("/rta/v2/configs/{identifier}", 400, 404, 503, responses=RTA_CONFIG)
async def rta_config(sessions: SessionsHere, identifier: Identifier) -> Response:
    """Return a configuration of sessions: its parameters, channels and conversions. It never changes."""
    found = await sessions.live.config(identifier)
    if found is None:
        raise SessionNotFound(f"no configuration of sessions has the identifier {identifier[:200]!r}")
    return Response(found, headers={"Content-Type": CONFIG_TYPE, "Cache-Control": "no-cache"})


def session_fields(located: Located) -> dict[str, msgspec.Raw] | None:
    """Return a session's JSON with the time range of its hash; None if it has no valid one."""
    try:
        fields = _fields(located.merged or located.json or "")
    except (msgspec.DecodeError, RecursionError):
        return None
    if located.start is not None and located.end is not None:
        fields["timeRange"] = msgspec.Raw(_encode({"startTime": located.start, "endTime": located.end}))
        fields["startTimestamp"] = msgspec.Raw(_encode(iso(located.start)))
        fields["endTimestamp"] = msgspec.Raw(_encode(iso(located.end)))
    return fields


def iso(ns: int) -> str:
    """Format a time in UTC with microseconds, the precision that clients can read."""
    seconds, rest = divmod(ns, 1_000_000_000)
    try:
        text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    except (ValueError, OverflowError, OSError):  # a year beyond the calendar
        return "1970-01-01T00:00:00.000000Z"
    return f"{text}.{rest // 1000:06d}Z"


def sort_key(fields: dict[str, msgspec.Raw], path: str) -> tuple[int, Any]:
    """Return the sort key of a session: numbers before texts, and missing values before all."""
    name, _, rest = path.partition(".")
    value: Any = _value(fields[name]) if name in fields else None
    for step in rest.split(".") if rest else ():
        value = value.get(step) if isinstance(value, dict) else None
    if isinstance(value, bool | int | float):
        return 1, value
    if isinstance(value, str):
        return 2, _instant(value) if name == "timestamp" else value
    return 0, 0


def _instant(text: str) -> str:
    """Convert a time to UTC, so that texts compare as times."""
    try:
        found = datetime.fromisoformat(text)
        found = found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
        return found.isoformat(timespec="microseconds")
    except (ValueError, OverflowError):
        return text

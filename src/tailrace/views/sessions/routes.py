"""Telemetry sessions over HTTP: their list, configurations and feeds, WebSockets, and pages for a browser.

Times in nanoseconds are texts wherever they may be too large for a double. Values are converted here, so a reader of a
feed needs no configuration; it is served for labels, units and limits.

Our own WebSocket sends what the feed yields, in messages that a browser uses without copying; a control frame is a
message without samples, with ``event`` in its header. A viewer that has caught up once and then falls too far behind
goes on at the live end and gets a gap, or is closed; a viewer that reads the past may take its time.

Below ``/rta`` are the stream of a session in the RTA telemetry protocol, and its lists of sessions and configurations.
Both read the same hash, so the time range in a list is as new as the last message. Unknown (null or missing) and empty
properties of a session's JSON mean different things and stay. Unknown query parameters are ignored.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from importlib.resources import files
from typing import Annotated, Any

import msgspec
from fastapi import HTTPException, Path, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import AfterValidator
from starlette.websockets import WebSocket

from tailrace.api.answers import (
    Burst,
    Closing,
    RtaSession,
    RtaSessions,
    SessionBuffer,
    SessionConfig,
    SessionDetails,
    SessionRow,
    SessionRows,
)
from tailrace.api.requests import MAX_SESSIONS, Parameters, RtaParameters, SessionFeedParameters, SessionsParameters
from tailrace.errors import BadRequest, SessionNotFound, TailraceError
from tailrace.http.delivery import answer_feed, converse
from tailrace.http.openapi import Responses, answer, feed, reference, text
from tailrace.http.routing import LastEventId, Routes, admit, decoded, part, read_parameters
from tailrace.http.service import Service, ViewService, now_ms, problem_of
from tailrace.kafka.broker import BrokerTopics, Records, client_properties
from tailrace.log.cursor import BEGINNING, FromEnd, FromStart, id_text
from tailrace.log.event import iso_time
from tailrace.log.request import AnyFrame, ControlFrame, EventFrame, check_options
from tailrace.views.sessions.configuration import Channels, Conversion, TextTable, bindings_in
from tailrace.views.sessions.feed import SessionFeed, as_bytes, message
from tailrace.views.sessions.life import SessionParts
from tailrace.views.sessions.reader import Archive, StreamHub
from tailrace.views.sessions.rta import Viewer
from tailrace.views.sessions.samples import Selection, is_pattern, parse_thinning
from tailrace.views.sessions.settings import SessionsSettings
from tailrace.views.sessions.streams import (
    FromMoment,
    FromSessionCursor,
    LiveSessions,
    Located,
    SessionCursor,
    SessionRequest,
    SessionStart,
    parse_session_start,
    parse_session_until,
)

Identity = Annotated[str, Path(description="Identity of a session, URL-encoded."), AfterValidator(decoded)]

_fields = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class SessionsService(ViewService):
    """State that requests of sessions share. Others may write sessions under our keys, so they are always served."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        settings = self.settings
        self.ping = settings.sessions.ping
        self.live = LiveSessions(self.nodes, settings.sessions.key, settings.sessions.unit_rational)
        self.streams = StreamHub(self.live, settings.sessions.ring_bytes)
        self._records = Records(client_properties(settings))
        archive = Archive(
            self._records,
            BrokerTopics(settings, self.nodes).is_current,
            settings.pipeline.max_event_bytes,
            settings.pipeline.max_depth,
        )
        unread = service.metrics.bursts_unread.inc
        self.parts = SessionParts(self.streams, archive, settings.sessions.container, unread)

    async def start(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self._records.close)
        stack.push_async_callback(self.streams.aclose)

    def intervals(self) -> Mapping[str, timedelta | None]:
        sessions = self.settings.sessions
        if not sessions.is_used:
            return {}
        return {"trim": sessions.trim_every, "abandon": sessions.trim_every, "forget": sessions.forget_every}


PART = SessionsService
SessionsHere = Annotated[SessionsService, part("sessions", SessionsService)]
PAGE = text("text/html")
SESSION_FEED = feed(
    reference(Burst),
    'id: 42.1789200000000-3\ndata: {"session":"lap-7","position":"1789200000000-3",'
    '"range":["1789200000000000000","1789200000005000000"],"channels":[{"channel":1,"name":"vCar:Chassis",'
    '"unit":"km/h","start":"1789200000000000000","t":[0,5000000],"v":[88.5,null]}],"events":[]}\n\n',
    "Bursts of samples and events until the session ends. Control frames are those of every feed, "
    "and `life`, when the session was opened again. `caught-up` has the `position` where live began; `gap` says "
    "`from`, `to`, a `reason`, and `possible` when nobody knows whether anything was there.",
)
routes = Routes("sessions", headers={"Cache-Control": "no-store"})
pages = Routes("pages")
rta = Routes("rta")


@routes.get("/v1/sessions", 400, 503)
async def list_sessions(sessions: SessionsHere, parameters: SessionsParameters) -> SessionRows:
    """List telemetry sessions, those that were updated last first."""
    found = [
        SessionRow(**_row(located))
        for located in await sessions.live.listing(MAX_SESSIONS)
        if located.identity.startswith(parameters.prefix) and parameters.state in ("", located.state)
    ]
    return SessionRows(found[: parameters.limit])


@routes.get("/v1/sessions/{identity}", 404, 503)
async def show_session(sessions: SessionsHere, identity: Identity, parameters: Parameters) -> SessionDetails:
    """Show a session: its JSON, its channels, and how much of it is in the stream."""
    located, channels = await _located(sessions, identity)
    live, stream, number = sessions.live, located.stream, located.number
    gone = await live.trimmed(stream, number)
    begin = max(located.position, gone or BEGINNING)
    first = await live.first_entry(stream, number, begin)
    last = await live.last_entries(stream, number, 1, begin, await live.tail(stream))
    buffer = SessionBuffer(
        first=None if first is None else id_text(first),
        last=id_text(last[0]) if last else None,
        trimmed=None if gone is None else id_text(gone),
    )
    return SessionDetails(
        **_row(located),
        number=number,
        position=id_text(located.position),
        writer=located.writer,
        complete=channels.complete,
        channels=channels.described(),
        buffer=buffer,
    )


@routes.get("/v1/sessions/{identity}/config", 404)
async def session_config(sessions: SessionsHere, identity: Identity, parameters: Parameters) -> SessionConfig:
    """Show what a session's configurations say: channels, parameters with units and conversions, kinds of events."""
    located, channels = await _located(sessions, identity)
    return SessionConfig(
        session=identity,
        complete=channels.complete,
        bindings=[{"identifier": each.identifier, "offset": each.offset} for each in bindings_in(_json(located))],
        channels=channels.described(),
        parameters=[
            {**each.described(), "channels": each.channels, "steps": _steps(each.conversion)}
            for each in channels.parameters
        ],
        events=[each.described() for each in channels.events],
    )


@routes.feed("/v1/sessions/{identity}/events", SESSION_FEED)
async def follow_session(
    request: Request,
    sessions: SessionsHere,
    identity: Identity,
    parameters: SessionFeedParameters,
    last_event_id: LastEventId = None,
) -> Response:
    """Follow a session's samples and events: from anywhere, then live; resumable after every burst."""
    wanted = make_session_request(identity, parameters, now_ms=now_ms(), last_event_id=last_event_id)
    return answer_feed(request, sessions.service, wanted, partial(SessionFeed.open, sessions.parts))


MOST_CHANNELS, MOST_PATTERNS = 1_000, 50
"""Limits of names in one request, and of patterns among them: each is matched with every channel."""


def make_session_request(
    identity: str, parameters: SessionFeedParameters, *, now_ms: int, last_event_id: str | None = None
) -> SessionRequest | None:
    """Parse the parameters of a feed; None if the request has ended before (HTTP answers 204)."""
    check_options(parameters, "bursts")
    channels = parameters.channels
    names = tuple(dict.fromkeys(name for part in (channels or "").split(",") if (name := part.strip())))
    if channels is not None and not names:
        raise BadRequest("channels= has no names in it: leave it out for all channels")
    if len(names) > MOST_CHANNELS:
        raise BadRequest(
            f"{len(names)} names of channels, at most {MOST_CHANNELS}: a pattern, such as *:Chassis, is one"
        )
    if (patterns := sum(map(is_pattern, names))) > MOST_PATTERNS:
        raise BadRequest(f"{patterns} patterns of channels, at most {MOST_PATTERNS}: take fewer, or names")
    sent, since = 0, None
    begin: SessionStart
    if given := last_event_id or parameters.after:
        cursor = SessionCursor.parse(given)
        begin, since = FromSessionCursor(cursor), cursor.since
        if last_event_id:
            if cursor.ended:
                return None
            sent = cursor.sent or 0
    elif start := parameters.beginning:
        begin = parse_session_start(start, now_ms)
        since = begin.time if isinstance(begin, FromMoment) else None
    else:
        begin = FromEnd() if parameters.follow else FromStart()
    return SessionRequest(
        identity=identity,
        parameters=parameters,
        start=begin,
        selection=Selection(names, parameters.raw),
        thinning=parse_thinning(parameters.pixel, parameters.rate),
        until=parse_session_until(parameters.until, now_ms) if parameters.until else None,
        sent=sent,
        since=since,
        resumed=bool(last_event_id),
    )


def _row(located: Located) -> dict[str, Any]:
    json, span = _json(located), located.span
    return {
        "identity": located.identity,
        "state": located.state,
        "identifier": json.get("identifier"),
        "stream": located.stream,
        "range": None if span is None else (str(span[0]), str(span[1])),
        "updated": iso_time(located.updated_ms),
        "json": json,
    }


def _json(located: Located) -> dict[str, Any]:
    try:
        return _fields(located.merged or located.json or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}


async def _located(sessions: SessionsService, identity: str) -> tuple[Located, Channels]:
    found = await sessions.live.get(identity)
    if found is None:
        raise SessionNotFound(f"no session is called {identity[:200]!r}: see the list of sessions")
    return found, await sessions.live.channels(bindings_in(_json(found)))


def _steps(conversion: Conversion) -> dict[str, Any]:
    how = conversion.how
    if isinstance(how, TextTable):
        table: dict[str, Any] = {"keys": list(how.names), "values": list(how.names.values()), "default": how.default}
    else:
        table = msgspec.structs.asdict(how)
    steps = {"shift": conversion.shift, "mask": f"{conversion.mask:x}", "offset": conversion.offset}
    return {**steps, conversion.kind: table}


class LiveFeed:
    def __init__(self, feed: SessionFeed, settings: SessionsSettings) -> None:
        self._feed, self._settings = feed, settings
        self.closing = Closing(1000, "")
        self.dropped = 0
        """Times that the viewer was too far behind."""

    def stop(self) -> None:
        """End soon, with a close frame that lets the client come back."""
        self.closing = Closing(1012, "the service is shutting down: connect again, after the last id")
        self._feed.stop()

    def hear(self, frame: bytes | str) -> Closing | None:
        """Ignore messages of the client."""
        return None

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield messages until the feed ends, or the viewer is too far behind."""
        try:
            async with aclosing(self._feed.__aiter__()) as batches:
                async for frames in batches:
                    for frame in frames:
                        yield encode_frame(frame)
                    behind = self._feed.behind
                    if behind <= self._settings.client_bytes:
                        continue
                    self.dropped += 1
                    if self._settings.slow == "close":
                        reason = f"{behind} bytes behind (sessions.client_bytes): connect again, after the last id"
                        self.closing = Closing(1013, reason)
                        return
                    self._feed.drop()
        except TailraceError as error:
            yield message(_encode({"event": "problem", **problem_of(error)}))
            self.closing = Closing(1013 if error.retryable else 1008, str(error))


def encode_frame(frame: AnyFrame) -> bytes:
    if isinstance(frame, EventFrame):
        return frame.data
    position = {"id": frame.cursor} if frame.cursor else {}
    if isinstance(frame, ControlFrame):
        return message(_encode({"event": frame.name, **position, **_fields(frame.data)}))
    return message(_encode({"event": "moved", **position}))


async def _admitted(websocket: WebSocket) -> tuple[Service, SessionsService, str]:
    service: Service = websocket.app.state.service
    sessions = service.part_of("sessions", SessionsService)
    await admit(websocket, sessions.settings.sessions.origins)
    return service, sessions, decoded(websocket.path_params["identity"])


@routes.websocket("/v1/sessions/{identity}/live")
async def session_live(websocket: WebSocket) -> None:
    """Follow a session over a WebSocket, in binary messages."""
    service, sessions, identity = await _admitted(websocket)
    if "format" in websocket.query_params:
        raise BadRequest("unknown parameter 'format': messages have one form")
    parameters = read_parameters(SessionFeedParameters, websocket.query_params)
    request = make_session_request(identity, parameters, now_ms=now_ms())
    assert request is not None
    feed = await SessionFeed.open(sessions.parts, request, as_bytes)
    live = LiveFeed(feed, sessions.settings.sessions)
    try:
        await converse(service, websocket, live)
    finally:
        await feed.aclose()
        service.metrics.viewer_drops.inc(live.dropped)
        service.metrics.viewer_slow_closes.inc(live.closing.code == 1013)


@routes.get("/v1/sessions/{identity}/live", 400)
async def live_not_upgraded(identity: Identity) -> Response:
    """Follow a session over a WebSocket, in binary messages; takes what its events take. Plain requests are refused."""
    raise BadRequest("this is a WebSocket: ask for an upgrade; /events has the same as an event stream")


_TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; connect-src 'self' ws: wss:; base-uri 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
}


@pages.get("/sessions", responses=PAGE, response_class=HTMLResponse)
async def sessions_page() -> Response:
    """Show the sessions in a browser."""
    return _file("sessions.html")


@pages.get("/sessions/{identity}", responses=PAGE, response_class=HTMLResponse)
async def session_page(identity: Identity) -> Response:
    """Show a session in a browser while it goes on: charts, values, events. It waits for one that is not there yet."""
    return _file("session.html")


@pages.get("/pages/{name}", 404, responses=PAGE)
async def page_file(
    name: Annotated[str, Path(description="Name of a file of the pages, such as `pages.css`.")],
) -> Response:
    """Return a script or a style sheet of the pages."""
    return _file(name)


def _file(name: str) -> Response:
    text = _texts().get(name)
    if text is None:
        raise HTTPException(404)
    return Response(text, media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)


@cache
def _texts() -> dict[str, bytes]:
    folder = files("tailrace.views.sessions").joinpath("pages")
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in _TYPES}


SUBPROTOCOL = "mat.ocs.rta.stream-lz4"
CONFIG_TYPE = "application/vnd.mat.config+json"
Identifier = Annotated[str, Path(description="Identifier of a configuration, URL-encoded."), AfterValidator(decoded)]

_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_value = msgspec.json.Decoder().decode


RTA_CONFIG: Responses = {200: {"content": {CONFIG_TYPE: {"schema": {"type": "object"}}}}}
RTA_STREAM: Responses = {
    101: {
        "description": "Binary frames, each a burst as a raw LZ4 block: first the Session JSON, then the time range, "
        "then updates; samples and events after a `StreamRequest`, which is not compressed."
    },
    406: {"description": "The sub-protocol is missing."},
}


@rta.websocket("/rta/v2/sessions/{identity}/stream")
async def rta_stream(websocket: WebSocket) -> None:
    """Follow a session over a WebSocket, in the telemetry protocol."""
    service, sessions, identity = await _admitted(websocket)
    if SUBPROTOCOL not in websocket.scope["subprotocols"]:
        raise HTTPException(406, f"this WebSocket speaks {SUBPROTOCOL}: offer it as a sub-protocol")
    viewer = Viewer(sessions.streams, identity, sessions.settings.sessions)
    try:
        await converse(service, websocket, viewer, SUBPROTOCOL)
    finally:
        service.metrics.viewer_drops.inc(viewer.dropped_bursts)
        service.metrics.bursts_unread.inc(viewer.unread)
        service.metrics.viewer_slow_closes.inc(viewer.closing.code == 1013)


@rta.get("/rta/v2/sessions/{identity}/stream", 400, responses=RTA_STREAM)
async def rta_not_upgraded(identity: Identity) -> Response:
    """Follow a session: a WebSocket, with the sub-protocol `mat.ocs.rta.stream-lz4`; plain requests are refused."""
    raise BadRequest(f"this is a WebSocket: ask for an upgrade, and offer the sub-protocol {SUBPROTOCOL}")


@rta.get("/rta/v2/sessions", 400, 503, responses=answer(RtaSessions))
async def rta_sessions(sessions: SessionsHere, parameters: RtaParameters) -> Response:
    """List sessions as clients of the telemetry protocol want them."""
    found = await sessions.live.listing(MAX_SESSIONS)
    shown = [fields for located in found if (fields := session_fields(located)) is not None]
    path, _, order = parameters.sort.rpartition(":")
    shown.sort(key=lambda fields: sort_key(fields, path), reverse=order == "desc")
    begin = parameters.page_index * parameters.page_size
    body = _encode({"sessions": shown[begin : begin + parameters.page_size]})
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


@rta.get("/rta/v2/sessions/{identity}", 400, 404, 503, responses=answer(RtaSession))
async def rta_session(sessions: SessionsHere, identity: Identity) -> Response:
    """Show a session as clients of the telemetry protocol want it."""
    located = await sessions.live.get(identity)
    fields = None if located is None else session_fields(located)
    if fields is None:
        raise SessionNotFound(f"no session has the identity {identity[:200]!r}, or its writer has not described it yet")
    return Response(_encode(fields), media_type="application/json", headers={"Cache-Control": "no-store"})


@rta.get("/rta/v2/configs/{identifier}", 400, 404, 503, responses=RTA_CONFIG)
async def rta_config(sessions: SessionsHere, identifier: Identifier) -> Response:
    """Return a configuration of sessions: its parameters, channels and conversions. It never changes."""
    found = await sessions.live.config(identifier)
    if found is None:
        raise SessionNotFound(f"no configuration of sessions has the identifier {identifier[:200]!r}")
    return Response(found, headers={"Content-Type": CONFIG_TYPE, "Cache-Control": "no-cache"})


def session_fields(located: Located) -> dict[str, msgspec.Raw] | None:
    """Return a session's JSON with the time range of its hash; None if it has no valid one."""
    try:
        fields = _raw_fields(located.merged or located.json or "")
    except (msgspec.DecodeError, RecursionError):
        return None
    if located.span is not None:
        start, end = located.span
        fields["timeRange"] = msgspec.Raw(_encode({"startTime": start, "endTime": end}))
        fields["startTimestamp"] = msgspec.Raw(_encode(iso(start)))
        fields["endTimestamp"] = msgspec.Raw(_encode(iso(end)))
    return fields


def iso(ns: int) -> str:
    """Format a time in UTC with microseconds, the precision that clients can read; 1970 for other years."""
    text = iso_time(ns // 1_000_000)
    return f"{text[:-1]}{ns // 1_000 % 1_000:03d}Z" if text.endswith("Z") else "1970-01-01T00:00:00.000000Z"


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


for _more in (pages, rta):
    routes.router.routes.extend(_more.router.routes)

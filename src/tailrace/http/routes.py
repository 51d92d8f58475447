"""The route table: every URL of the service, and the few lines between a request and the part that answers it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from html import escape
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from tailrace.http.health import Readiness, Status
from tailrace.http.openapi import (
    FEED,
    GROUP_BODY,
    PUT_BODY,
    RTA_CONFIG,
    RTA_SESSION,
    RTA_SESSIONS,
    RTA_STREAM,
    SESSION_CONFIG,
    SESSION_DETAILS,
    SESSION_FEED,
    SESSION_LIST,
    TAG_FEED,
    WINDOWS_BODY,
    Responses,
    problems,
)
from tailrace.http.puts import body_of, read_events
from tailrace.http.request import (
    Asked,
    FeedQuery,
    Here,
    LastEventId,
    ListQuery,
    Name,
    NoQuery,
    PendingQuery,
    RuleName,
    SearchId,
    SeveralQuery,
    Topic,
    Walker,
    refuse_repeats,
)
from tailrace.http.service import Service
from tailrace.http.socket import everything, topics_of
from tailrace.http.sse import FeedResponse, choose
from tailrace.metrics import CONTENT_TYPE
from tailrace.views.days import routes as listings
from tailrace.views.folds.routes import (
    Changed,
    Folds,
    GivenOut,
    Pending,
    change_windows,
    give_out,
    known,
    list_folds,
    list_pending,
)
from tailrace.views.folds.rule import stream_of
from tailrace.views.grep.routes import (
    EXPLAIN_BODY,
    GREP_BODY,
    EndedSearch,
    EndQuery,
    ExplainBody,
    Explained,
    GrepBody,
    GrepQuery,
    SearchDetails,
    SearchesPage,
    SearchesQuery,
    SearchQuery,
    end_search,
    explain,
    limits_of,
    list_searches,
    read_body,
    show_search,
)
from tailrace.views.sessions.routes import (
    follow_session,
    list_sessions,
    live_not_upgraded,
    page_file,
    session_config,
    session_live,
    session_page,
    sessions_page,
    show_session,
)
from tailrace.views.sessions.rta.routes import rta_config, rta_not_upgraded, rta_session, rta_sessions, rta_stream
from tailrace.views.tags.routes import follow_tag, follow_tags, list_tags, tag_readers, tag_sources

_encode = msgspec.json.Encoder().encode


class Written(BaseModel):
    """Where an event was written."""

    id: str
    topic: str
    partition: int
    offset: int


class Put(BaseModel):
    """The events of a put, in the order of the request."""

    events: list[Written]


async def list_streams(service: Here, largest: Walker, query: Annotated[ListQuery, Query()]) -> listings.Streams:
    """List the day streams in the order of their names, or the largest ones."""
    query.check()
    if query.top is not None:
        return await largest.find(query.prefix, query.top, query.memory)
    return await listings.list_streams(service.days, query.prefix, query.after, query.limit)


async def list_days(service: Here, name: Name, query: Annotated[NoQuery, Query()]) -> listings.Days:
    """List the days of a stream."""
    return await listings.list_days(service.days, name)


async def follow_one(
    request: Request, service: Here, name: Name, query: Annotated[FeedQuery, Query()], last_event_id: LastEventId = None
) -> Response:
    """Follow a day stream: from anywhere, then live; resumable after every event."""
    return _feed(request, service, (name,), query, last_event_id)


async def follow_several(
    request: Request, service: Here, query: Annotated[SeveralQuery, Query()], last_event_id: LastEventId = None
) -> Response:
    """Follow several day streams in one feed, merged by time; each keeps its own order."""
    return _feed(request, service, tuple(query.name), query, last_event_id)


def _feed(
    request: Request, service: Service, names: tuple[str, ...], query: FeedQuery, last_event_id: str | None
) -> Response:
    refuse_repeats(request)
    wanted = query.request(names, last_event_id)
    if wanted is None:
        return Response(status_code=204)
    encoding = choose(request.headers.get("accept", ""), query.format)
    return FeedResponse(service, lambda: service.feeds.open(wanted), encoding, wanted.resumed)


async def list_rules(service: Here, query: Annotated[NoQuery, Query()]) -> Folds:
    """List the rules of folds: their windows, what they hold and how much they fold."""
    return await list_folds(service)


async def follow_folds(
    request: Request,
    service: Here,
    name: RuleName,
    query: Annotated[FeedQuery, Query()],
    last_event_id: LastEventId = None,
) -> Response:
    """Follow the folded events of a rule: the feed of its day stream."""
    return _feed(request, service, (stream_of(known(service, name).name),), query, last_event_id)


async def pending_groups(service: Here, name: RuleName, query: Annotated[PendingQuery, Query()]) -> Response:
    """List the groups of a rule that hold folds, the first due first."""
    return Response(await list_pending(service, name, query.after, query.limit), media_type="application/json")


async def flush_folds(request: Request, service: Here, name: RuleName, query: Annotated[NoQuery, Query()]) -> GivenOut:
    """Close the folds of a group, or of all groups, now; they are given out with the reason `flush`.

    What was due anyway keeps its own reason.
    """
    async with body_of(service, request) as body:
        return await give_out(service, name, body, "flush")


async def delete_folds(request: Request, service: Here, name: RuleName, query: Annotated[NoQuery, Query()]) -> GivenOut:
    """Drop the folds of a group, or of all groups; they are given out with the reason `deleted`."""
    async with body_of(service, request) as body:
        return await give_out(service, name, body, "deleted")


async def set_windows(request: Request, service: Here, name: RuleName, query: Annotated[NoQuery, Query()]) -> Changed:
    """Change the windows of a rule while it runs; pending folds get their new due time."""
    async with body_of(service, request) as body:
        return await change_windows(service, name, body)


async def search(
    request: Request, service: Here, query: Annotated[GrepQuery, Query()], last_event_id: LastEventId = None
) -> Response:
    """Search topics, from any time in the past on, then live; resumable after every event."""
    refuse_repeats(request)
    return _grep(request, service, query, last_event_id)


async def search_by_body(
    request: Request, service: Here, query: Annotated[NoQuery, Query()], last_event_id: LastEventId = None
) -> Response:
    """Search topics as `GET /v1/grep` does, with the same parameters in a JSON body; `q` is the query itself."""
    async with body_of(service, request) as body:
        return _grep(request, service, read_body(GrepBody, body), last_event_id)


def _grep(request: Request, service: Service, query: GrepQuery, last_event_id: str | None) -> Response:
    within = topics_of(service.settings, request)
    wanted = query.request(limits_of(service.settings), last_event_id, within)
    if wanted is None:
        return Response(status_code=204)
    encoding = choose(request.headers.get("accept", ""), query.format)
    return FeedResponse(service, lambda: service.grep.open(wanted), encoding, wanted.resumed)


async def explain_search(request: Request, service: Here, query: Annotated[NoQuery, Query()]) -> Explained:
    """Try a search on samples: which of them it finds, and which part of the query each passes or fails."""
    async with body_of(service, request) as body:
        within = topics_of(service.settings, request)
        return explain(read_body(ExplainBody, body), limits_of(service.settings), within)


async def searches(service: Here, query: Annotated[SearchesQuery, Query()]) -> SearchesPage:
    """List the searches that are alive, in the order of their ids: who follows them, and how far their past is."""
    return await list_searches(service, query.after, query.limit)


async def one_search(service: Here, id: SearchId, query: Annotated[SearchQuery, Query()]) -> SearchDetails:
    """Show a search that is alive, with the connections that follow it."""
    return await show_search(service, id, query.limit)


async def end_one_search(service: Here, id: SearchId, query: Annotated[EndQuery, Query()]) -> EndedSearch:
    """End a search and its scans, and forget what it found; refused while somebody follows it, unless forced.

    Those who followed it get a `problem` with the code `search.ended`. Whoever asks for it again begins it anew.
    """
    return await end_search(service, id, query.force)


async def put_events(request: Request, service: Here, topic: Topic, query: Annotated[NoQuery, Query()]) -> Response:
    """Write events to a topic; answers when the broker has acknowledged all of them.

    A new topic is created with LogAppendTime, or with CreateTime when events carry a `time`.
    """
    async with body_of(service, request) as body:
        began = time.perf_counter()
        written = await service.topics.put(topic, await read_events(service, body))
    service.metrics.put_events.inc(len(written))
    service.metrics.put_seconds.observe(time.perf_counter() - began)
    return Response(_encode({"events": written}), media_type="application/json")


async def alive() -> Response:
    """Say that the process is alive."""
    return PlainTextResponse("ok\n")


async def ready(health: Asked) -> Response:
    """Say whether Valkey, Kafka and the pipeline answer, and which of them does not."""
    found = await health.readiness()
    return JSONResponse(found.model_dump(), 200 if found.ready else 503, {"Cache-Control": "no-store"})


async def metrics(health: Asked) -> Response:
    """Return all metrics in Prometheus's text format."""
    return Response(await health.metrics(), headers={"Content-Type": CONTENT_TYPE})


async def status(health: Asked) -> Status:
    """Return rates, lag, batch time and health of every part."""
    return await health.status()


async def root(request: Request) -> Response:
    """List what is served."""
    listed = {f"{route.method} {route.path}": route.summary for route in ROUTES} | {"GET /openapi.json": "This API."}
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"service": "tailrace", "routes": listed})
    rows = "".join(f"<tr><td><code>{escape(url)}</code><td>{escape(said)}" for url, said in listed.items())
    return HTMLResponse(
        f"<!doctype html><meta charset=utf-8><title>Tailrace</title><h1>Tailrace</h1><table>{rows}</table>"
    )


class Route(NamedTuple):
    """One row of the table."""

    method: str
    path: str
    endpoint: Callable[..., Any]
    tag: str
    responses: Responses
    more: Mapping[str, Any] = MappingProxyType({})

    @property
    def dependencies(self) -> list[Any]:
        """What is asked before the handler: who may do everything, but for searches, which are narrowed, and probes."""
        return [] if self.tag == "operations" or self.endpoint in _SEARCHES else [Depends(everything)]

    @property
    def summary(self) -> str:
        """The first line of what the handler says of itself."""
        return (self.endpoint.__doc__ or "").partition("\n")[0].strip()


_SEARCHES = (search, search_by_body, explain_search)
_STREAMING = {"response_class": FeedResponse, "status_code": 200}
_FEED = FEED | problems(400, 404, 410, 503)
_TAGS = TAG_FEED | problems(400, 404, 410, 503)
_SESSION = SESSION_FEED | problems(400, 404, 410, 503)
_PENDING: Responses = {200: {"model": Pending}, **problems(400, 404, 503)}
_CHANGE = problems(400, 404, 413, 503)
_READY: Responses = {200: {"model": Readiness}, 503: {"model": Readiness, "description": "A part does not answer."}}
_METRICS: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_PLAIN = {"response_class": Response}
_PAGE: Responses = {200: {"content": {"text/html": {"schema": {"type": "string"}}}}}
_HTML = {"response_class": HTMLResponse}

ROUTES = (
    Route("GET", "/v1/streams", list_streams, "streams", problems(400, 503)),
    Route("GET", "/v1/streams/events", follow_several, "streams", _FEED, _STREAMING),
    Route("GET", "/v1/streams/{name:path}/events", follow_one, "streams", _FEED, _STREAMING),
    Route("GET", "/v1/streams/{name:path}/days", list_days, "streams", problems(400, 404, 503)),
    Route("GET", "/v1/tags", list_tags, "tags", problems(400, 404, 503)),
    Route("GET", "/v1/tags/events", follow_tags, "tags", _TAGS, _STREAMING),
    Route("GET", "/v1/tags/readers", tag_readers, "tags", problems(400, 404, 503)),
    Route("GET", "/v1/tags/{tag:path}/events", follow_tag, "tags", _TAGS, _STREAMING),
    Route("GET", "/v1/tags/{tag:path}/sources", tag_sources, "tags", problems(400, 404, 503)),
    Route("GET", "/v1/folds", list_rules, "folds", problems(400, 503)),
    Route("GET", "/v1/folds/{name}/events", follow_folds, "folds", _FEED, _STREAMING),
    Route("GET", "/v1/folds/{name}/pending", pending_groups, "folds", _PENDING),
    Route("POST", "/v1/folds/{name}/flush", flush_folds, "folds", _CHANGE, {"openapi_extra": GROUP_BODY}),
    Route("POST", "/v1/folds/{name}/delete", delete_folds, "folds", _CHANGE, {"openapi_extra": GROUP_BODY}),
    Route(
        "POST",
        "/v1/folds/{name}/windows",
        set_windows,
        "folds",
        _CHANGE | problems(422),
        {"openapi_extra": WINDOWS_BODY},
    ),
    Route("GET", "/v1/grep", search, "grep", _FEED, _STREAMING),
    Route("POST", "/v1/grep", search_by_body, "grep", _FEED, {**_STREAMING, "openapi_extra": GREP_BODY}),
    Route("POST", "/v1/grep/explain", explain_search, "grep", problems(400, 413, 503), {"openapi_extra": EXPLAIN_BODY}),
    Route("GET", "/v1/grep/searches", searches, "grep", problems(400, 503)),
    Route("GET", "/v1/grep/searches/{id}", one_search, "grep", problems(400, 404, 503)),
    Route("DELETE", "/v1/grep/searches/{id}", end_one_search, "grep", problems(400, 404, 409, 503)),
    Route(
        "POST",
        "/v1/topics/{topic}",
        put_events,
        "topics",
        {200: {"model": Put}, **problems(400, 404, 413, 422, 503)},
        {"openapi_extra": PUT_BODY},
    ),
    Route("GET", "/v1/sessions", list_sessions, "sessions", SESSION_LIST | problems(400, 503), _PLAIN),
    Route("GET", "/v1/sessions/{identity}", show_session, "sessions", SESSION_DETAILS | problems(404, 503), _PLAIN),
    Route("GET", "/v1/sessions/{identity}/config", session_config, "sessions", SESSION_CONFIG | problems(404), _PLAIN),
    Route("GET", "/v1/sessions/{identity}/events", follow_session, "sessions", _SESSION, _STREAMING),
    Route("GET", "/v1/sessions/{identity}/live", live_not_upgraded, "sessions", problems(400), _PLAIN),
    Route("GET", "/sessions", sessions_page, "pages", _PAGE, _HTML),
    Route("GET", "/sessions/{identity}", session_page, "pages", _PAGE, _HTML),
    Route("GET", "/pages/{name}", page_file, "pages", _PAGE | problems(404), {"response_class": Response}),
    Route("GET", "/rta/v2/sessions", rta_sessions, "rta", RTA_SESSIONS | problems(400, 503), _PLAIN),
    Route("GET", "/rta/v2/sessions/{identity}", rta_session, "rta", RTA_SESSION | problems(400, 404, 503), _PLAIN),
    Route("GET", "/rta/v2/sessions/{identity}/stream", rta_not_upgraded, "rta", RTA_STREAM | problems(400), _PLAIN),
    Route("GET", "/rta/v2/configs/{identifier}", rta_config, "rta", RTA_CONFIG | problems(400, 404, 503), _PLAIN),
    Route("GET", "/v1/status", status, "operations", problems(503)),
    Route("GET", "/healthz", alive, "operations", {}, {"response_class": PlainTextResponse}),
    Route("GET", "/readyz", ready, "operations", _READY),
    Route("GET", "/metrics", metrics, "operations", _METRICS, {"response_class": PlainTextResponse}),
    Route("GET", "/", root, "operations", {}),
)

SOCKETS: tuple[tuple[str, Callable[[WebSocket], Awaitable[None]]], ...] = (
    ("/rta/v2/sessions/{identity}/stream", rta_stream),
    ("/v1/sessions/{identity}/live", session_live),
)
"""WebSockets; what a plain request there is told stands in the table above."""


def install(app: FastAPI) -> None:
    """Serve the tables. Whatever can be got can be asked for its head."""
    for path, endpoint in SOCKETS:
        app.router.routes.append(WebSocketRoute(path, endpoint))
    for route in ROUTES:
        app.add_api_route(
            route.path,
            route.endpoint,
            methods=[route.method],
            tags=[route.tag],
            name=route.endpoint.__name__,
            operation_id=route.endpoint.__name__,
            summary=route.summary,
            responses=route.responses if route.tag == "operations" else route.responses | problems(403),
            dependencies=route.dependencies,
            **route.more,
        )
        if route.method == "GET":
            app.add_api_route(
                route.path,
                route.endpoint,
                methods=["HEAD"],
                include_in_schema=False,
                response_model=None,
                dependencies=route.dependencies,
            )

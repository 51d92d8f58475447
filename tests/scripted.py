"""Small real HTTP servers that speak the contract over a list in memory and break connections as they are told.

What they are told is a list of plans, one for each request that comes. ``ScriptedService`` has streams,
``ScriptedSearches`` has searches."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class CutError(Exception):
    """Ends a response in the middle: the server drops the connection."""


@dataclass
class Plan:
    """Fate of one connection of a feed; by default it is whole."""

    status: int = 200
    keep: int | None = None
    """Bytes that get through before the connection ends."""
    clean: bool = False
    """End it as if all were well, but without the ``end`` frame."""
    chunk: int = 65_536
    stall: float = 0.0
    """Seconds of silence at the end."""

    async def sent(self, text: str) -> AsyncIterator[bytes]:
        """Yield the part of a text that gets through."""
        whole = text.encode()
        part = whole if self.keep is None else whole[: self.keep]
        for start in range(0, len(part), self.chunk):
            yield part[start : start + self.chunk]
        await asyncio.sleep(self.stall)
        if self.keep is not None and not self.clean:
            raise CutError


def event(name: str, number: int, *, late: bool = False) -> dict[str, Any]:
    shown = {
        "id": f"jobs:0:{number}",
        "topic": "jobs",
        "partition": 0,
        "offset": number,
        "time": "2026-11-15T08:00:00.000Z",
        "key": name.split("/"),
        "headers": {},
        "data": {"n": number, "text": "zwölf\u2028\n", "big": 12345678901234567890123},
    }
    return shown | ({"late": True} if late else {})


@dataclass
class ScriptedService:
    """The state behind the server; tests set it and look at what was asked."""

    url: str = ""
    plans: list[Plan] = field(default_factory=list)
    feeds: dict[str, int] = field(default_factory=dict)
    """Number of events of each stream."""
    control: str = ""
    """Text put before the events of the first connection, such as a control frame."""
    follow_for: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    listed: list[dict[str, str]] = field(default_factory=list)
    """The parameters of every listing of streams."""
    is_older: bool = False
    """Leave out what services have not always said."""
    written: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    bodies: list[int] = field(default_factory=list)
    unavailable: int = 0
    """Number of next writes that are answered with 503."""

    def reset(self) -> None:
        fresh = ScriptedService(url=self.url)
        self.__dict__.update(fresh.__dict__)

    async def events(self, request: Request) -> Response:
        query = request.query_params
        names = query.getlist("name")
        resumed = request.headers.get("last-event-id")
        self.asked.append({**dict(query), "name": names, "last-event-id": resumed})
        plan = self.plans.pop(0) if self.plans else Plan()
        if plan.status == 204 or (resumed or "").endswith("~end"):
            return Response(status_code=204)
        if plan.status != 200:
            return Response("busy", plan.status)
        if query.get("missing") == "fail" and names[0] not in self.feeds:
            return problem("stream.not_found", 404, f"no stream is called {names[0]!r}", name=names[0])
        if query.get("after") == "gone":
            return problem("cursor.gone", 410, "gone", name=names[0], after="gone", first="7.3", reason="expired")
        if query.get("after") == "odd":
            return problem("weather.bad", 418, "it rains")
        if query.get("after") == "page":
            return Response("<html>", media_type="text/html")
        total = sum(self.feeds.get(name, 0) for name in names)
        position = resumed or query.get("after") or ("7.0" if query.get("from", "start") == "start" else f"7.{total}")
        position, _, counted = position.partition("~")
        first, sent = int(position.removeprefix("7.")), int(counted or 0)
        limit = int(query.get("limit", 0)) or None
        return StreamingResponse(
            self.body(plan, names[0], first, total, sent, limit, query.get("follow") == "true"),
            media_type="text/event-stream",
        )

    async def body(
        self, plan: Plan, name: str, first: int, total: int, sent: int, limit: int | None, follow: bool
    ) -> AsyncIterator[bytes]:
        def counted(sent: int) -> str:
            return f"~{sent}" if limit else ""

        last = min(total, first + limit - sent) if limit else total
        text = f": hello\nretry: 2\n\nid: 7.{first}{counted(sent)}\n\n{self.control}"
        for number in range(first, last):
            sent += 1
            shown = json.dumps(event(name, number, late=number == 1), ensure_ascii=False)
            text += f"id: 7.{number + 1}{counted(sent)}\ndata: {shown}\n\n: alive\n\n"
        ends = not follow or (limit is not None and sent >= limit)
        text += f"id: 7.{last}\nevent: caught-up\ndata: {{}}\n\n" if last == total else ""
        text += f"id: 7.{last}~end\nevent: end\ndata: {{}}\n\n" if ends else ""
        async for chunk in plan.sent(text):
            yield chunk
        if plan.keep is None and not ends:
            await asyncio.sleep(self.follow_for)

    async def put(self, request: Request) -> Response:
        body = await request.body()
        self.bodies.append(len(body))
        topic = request.path_params["topic"]
        if self.unavailable:
            self.unavailable -= 1
            return problem("broker.unavailable", 503, "kafka does not answer")
        batch = [json.loads(line) for line in body.splitlines()]
        for number, given in enumerate(batch, 1):
            if given["value"] == "refused":
                return problem("event.refused", 422, f"nothing was written. line {number}: its key is odd")
        stored = self.written.setdefault(topic, [])
        offsets = range(len(stored), len(stored) + len(batch))
        stored += batch
        rows = [{"id": f"{topic}:0:{n}", "topic": topic, "partition": 0, "offset": n} for n in offsets]
        return JSONResponse({"events": rows})

    async def streams(self, request: Request) -> Response:
        query = request.query_params
        self.listed.append(dict(query))
        names = sorted(n for n in self.feeds if n.startswith(query.get("prefix", "")) and n > query.get("after", ""))
        page = names[: min(2, int(query.get("limit", 2)))]
        if "top" in query:
            names = page = sorted(names, key=lambda name: -self.feeds[name])[: int(query["top"])]
        newer = {} if self.is_older else {"packed": 0.125, "expired": True, "memory": None}
        measured = {"memory": 65_432} if query.get("memory") == "true" else {}
        rows = [
            {"name": n, "events": self.feeds[n], "bytes": 10, "days": 1, "first_day": "2026-11-15"}
            | {"last_day": "2026-11-15", "last_time": "2026-11-15T08:00:00.000Z", "new_field": 1}
            | newer
            | measured
            for n in page
        ]
        return JSONResponse({"streams": rows, "next": page[-1] if len(page) < len(names) else None})

    async def days(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.feeds:
            return problem("stream.not_found", 404, f"no stream is called {name!r}", name=name)
        row = {
            "day": "2026-11-15",
            "events": self.feeds[name],
            "bytes": 10,
            **({} if self.is_older else {"raw_bytes": 98_765}),
            "first": "7.1",
            "last": "7.2",
            "state": "open" if self.is_older else "partly packed",
        }
        return JSONResponse({"name": name, "days": [row]})

    async def status(self, request: Request) -> Response:
        view = {"rate": 12.5, "lag": 3, "take_ms": 140, "in": 10, "stored": 8, "skipped": {"no-key": 1}, "dead": 1}
        parts = [{"name": "pipeline", "state": "running"}, {"name": "valkey", "state": "running"}]
        jobs = [
            {"job": "pack", "view": "days", "started": "2026-11-15T08:00:00.000Z", "ended": "2026-11-15T08:00:02.500Z"}
            | {"seconds": 2.5, "error": None, "overdue": False}
            | {
                "figures": {
                    "segments": 1_234,
                    "bytes_after": 5_600,
                    "left": {"early": 2},
                    "left_out": {"a": "no-topic"},
                }
            },
            {"job": "sweep", "view": "days", "started": "2026-11-15T08:00:00.000Z", "ended": "2026-11-15T08:00:02.500Z"}
            | {"seconds": 0.5, "error": "it rains", "overdue": True, "figures": {}},
            {"job": "audit", "view": "days", "started": None, "ended": None}
            | {"seconds": None, "error": None, "overdue": False, "figures": {}},
        ]
        newer = {} if self.is_older else {"upkeep": jobs}
        return JSONResponse({"service": {"version": "0.1.0"}, "parts": parts, "views": {"days": view}, **newer})


def problem(code: str, status: int, detail: str, **more: object) -> Response:
    body = {"type": "about:blank", "title": code, "status": status, "detail": detail, "code": code, **more}
    return JSONResponse(body, status, media_type="application/problem+json")


@contextmanager
def running() -> Iterator[ScriptedService]:
    """Run a scripted service on a free port of this machine."""
    service = ScriptedService()
    routes = [
        Route("/v1/streams/events", service.events),
        Route("/v1/streams/{name:path}/days", service.days),
        Route("/v1/streams", service.streams),
        Route("/v1/topics/{topic}", service.put, methods=["POST"]),
        Route("/v1/status", service.status),
    ]
    with listening(routes) as service.url:
        yield service


@contextmanager
def listening(routes: list[Route]) -> Iterator[str]:
    """Run a server on a free port of this machine; its address."""
    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=0, log_level=60, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


LIFE = "17-23-1789200000"
LONG = {"sku": {"$in": [f"item-{number}" for number in range(2_000)]}}


@dataclass
class ScriptedSearches:
    """A small service of searches over a list in memory: every event matches. Tests look at what was asked."""

    url: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    control: str = ""
    """Text put before the events."""
    wait: float = 0.0
    """Seconds that a feed which follows goes on after its last event."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def reset(self) -> None:
        self.__dict__.update(ScriptedSearches(url=self.url).__dict__)

    def have(self, total: int, *topics: str, **data: object) -> list[dict[str, Any]]:
        """Give it so many more events, of the topics in turn."""
        for _ in range(total):
            number = len(self.events)
            topic = (topics or ("orders",))[number % len(topics or ("orders",))]
            where = {"id": f"{topic}:0:{number}", "topic": topic, "partition": 0, "offset": number}
            more = {"time": "2026-11-15T08:00:00.000Z", "key": ["acc-7", "x"], "headers": {}}
            self.events.append({**where, **more, "data": {"total": 100 + number, **data}})
        return self.events

    async def grep(self, request: Request) -> Response:
        asked: dict[str, Any] = dict(request.query_params)
        if request.method == "POST":
            self.bodies.append(await request.body())
            asked |= json.loads(self.bodies[-1])
        query = json.loads(asked["q"]) if isinstance(asked["q"], str) else asked["q"]
        resumed = request.headers.get("last-event-id")
        asked = {name: str(value).lower() if isinstance(value, bool) else value for name, value in asked.items()}
        self.asked.append({**asked, "q": query, "method": request.method, "last-event-id": resumed})
        if "$bad" in json.dumps(query):
            return problem("query.invalid", 400, "$bad at 'total': there is no such operator", operator="$bad")
        if asked.get("missing") == "fail":
            return problem("topic.not_found", 404, "no topic is called 'absent'")
        plan = self.plans.pop(0) if self.plans else Plan()
        if plan.status != 200:
            return Response("busy", plan.status)
        place, _, state = (resumed or asked.get("after") or f"{LIFE}.0").partition("~")
        first, sent = int(place.removeprefix(f"{LIFE}.")), int(state.partition("@")[0] or 0) if resumed else 0
        return StreamingResponse(self.body(asked, plan, first, sent), media_type="text/event-stream")

    async def body(self, asked: dict[str, Any], plan: Plan, first: int, sent: int) -> AsyncIterator[bytes]:
        limit, counts = int(asked.get("limit", 0)) or None, asked.get("count") == "true"

        def cursor(number: int) -> str:
            since = "@1789199999000" if "from" in asked else ""
            state = (str(sent) if limit or counts else "") + since
            return f"{LIFE}.{number}" + (f"~{state}" if state else "")

        total = len(self.events)
        last = min(total, first + limit - sent) if limit else total
        text = f"retry: 2\n\nid: {cursor(first)}\n\n{self.control}"
        for number in range(first, last):
            sent += 1
            shown = "" if counts else f"data: {json.dumps(self.events[number], ensure_ascii=False)}\n"
            text += f"id: {cursor(number + 1)}\n{shown}\n"
        ends = asked.get("follow") == "false" or sent == limit
        facts = json.dumps({"reason": "caught-up", "events": sent})
        text += f"id: {LIFE}.{last}~end\nevent: end\ndata: {facts}\n\n" if ends else ""
        async for chunk in plan.sent(text):
            yield chunk
        if plan.keep is None and not ends:
            await asyncio.sleep(self.wait)

    async def explain(self, request: Request) -> Response:
        asked = await request.json()
        self.asked.append(asked)
        inner = {"part": {"a": 1}, "matched": True, "found": [1]}
        whole = {"part": asked["q"], "matched": False, "parts": [inner], "new_field": 1}
        tried = [{"matched": False, "explanation": whole} for _ in asked["samples"]]
        return JSONResponse({"id": "3f", "topics": ["orders"], "canonical": asked["q"], "samples": tried})


@contextmanager
def searching() -> Iterator[ScriptedSearches]:
    """Run a service of searches on a free port of this machine."""
    service = ScriptedSearches()
    routes = [
        Route("/v1/grep", service.grep, methods=["GET", "POST"]),
        Route("/v1/grep/explain", service.explain, methods=["POST"]),
    ]
    with listening(routes) as service.url:
        yield service

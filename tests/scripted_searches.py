"""A small real HTTP server of searches that breaks connections as it is told; like ``scripted_service``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.scripted_service import Plan, listening, problem

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
        said = json.dumps({"reason": "caught-up", "events": sent})
        text += f"id: {LIFE}.{last}~end\nevent: end\ndata: {said}\n\n" if ends else ""
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

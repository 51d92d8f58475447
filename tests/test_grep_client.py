"""Searches through the client, against a real server that breaks connections: exact resume, long queries, counts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import tailrace
from tailrace import following
from tailrace.errors import BadRequest, QueryError, TopicNotFound
from tailrace.wire import Control, Event
from tests.scripted_service import CutError, Plan, problem

LIFE = "17-23-1789200000"


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
        whole = text.encode()
        part = whole if plan.keep is None else whole[: plan.keep]
        for start in range(0, len(part), plan.chunk):
            yield part[start : start + plan.chunk]
        await asyncio.sleep(plan.stall)
        if plan.keep is not None and not plan.clean:
            raise CutError
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
    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=0, log_level=60, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    service.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield service
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def running_service() -> Iterator[ScriptedSearches]:
    with searching() as service:
        yield service


@pytest.fixture
def service(running_service: ScriptedSearches, monkeypatch: pytest.MonkeyPatch) -> ScriptedSearches:
    running_service.reset()
    monkeypatch.setattr(following, "FIRST_WAIT", 0.002)
    return running_service


LONG = {"sku": {"$in": [f"item-{number}" for number in range(2_000)]}}


def grep(url: str, *given: Any, **asked: Any) -> list[Event]:
    async def read() -> list[Event]:
        async with tailrace.connect(url, timeout=1.0, silence=5.0) as river:
            return [event async for event in river.grep(*given, **asked)]

    return asyncio.run(asyncio.wait_for(read(), 30))


def count(url: str, *given: Any, **asked: Any) -> int:
    async def read() -> int:
        async with tailrace.connect(url, timeout=1.0, silence=5.0) as river:
            return await river.grep(*given, count=True, follow=False, **asked).count()

    return asyncio.run(asyncio.wait_for(read(), 30))


BREAKS = st.one_of(
    st.builds(Plan, status=st.sampled_from([500, 502, 503, 429])),
    st.builds(Plan, keep=st.integers(0, 2_000), clean=st.booleans(), chunk=st.integers(1, 700)),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    breaks=st.lists(BREAKS, max_size=5),
    total=st.integers(0, 12),
    limit=st.none() | st.integers(1, 15),
    query=st.sampled_from([{}, LONG]),
)
def test_a_search_that_is_cut_anywhere_yields_every_match_once_and_counts_each_once(
    service: ScriptedSearches, breaks: list[Plan], total: int, limit: int | None, query: dict[str, Any]
) -> None:
    service.reset()
    service.have(total)
    expected = min(total, limit or total)
    service.plans = list(breaks)
    events = grep(service.url, "orders", query, follow=False, limit=limit, since="start")
    assert [event.offset for event in events] == list(range(expected))
    service.plans = list(breaks)
    assert count(service.url, "orders", query, limit=limit) == expected
    assert {asked["method"] for asked in service.asked} == {"POST" if query else "GET"}


def test_what_is_asked_is_sent(service: ScriptedSearches) -> None:
    asked = {"until": "2027-01-01T00:00:00Z", "limit": 5, "follow": False, "on_gap": "fail", "window": 4_096}
    grep(service.url, ["orders-1", "b.c"], {"total": {"$gt": 1}}, key=["acc-7", 1], start="@-1h", count=True, **asked)
    grep(service.url, "orders-.*", key="^acc", since="-1h", follow=False)
    grep(service.url, after=f"{LIFE}.3", client="reader-1", follow=False)
    first, second, third = service.asked
    assert first == {
        "topics": "orders-1,b.c",
        "q": {"total": {"$gt": 1}},
        "key": '["acc-7",1]',
        "from": "@-1h",
        "until": "2027-01-01T00:00:00Z",
        "limit": "5",
        "follow": "false",
        "count": "true",
        "on_gap": "fail",
        "missing": "wait",
        "window": "4096",
        "method": "GET",
        "last-event-id": None,
    }
    assert (second["topics"], second["key"], second["from"], second["q"]) == ("orders-.*", "^acc", "-1h", {})
    assert (third["topics"], third["after"], third["client"], "from" in third) == ("", f"{LIFE}.3", "reader-1", False)


def test_a_query_too_long_for_an_address_goes_in_a_body_also_when_it_connects_again(service: ScriptedSearches) -> None:
    service.have(3)
    service.plans = [Plan(keep=500, clean=True)]
    events = grep(service.url, ["orders", "b"], LONG, key="^acc", limit=3, start="start", window=4_096)
    assert [event.offset for event in events] == [0, 1, 2]
    first, second = service.asked
    assert [first["last-event-id"], second["last-event-id"]] == [None, f"{LIFE}.2~2@1789199999000"]
    assert service.bodies[0] == service.bodies[1]
    assert json.loads(service.bodies[0]) == {
        "topics": "orders,b",
        "q": LONG,
        "key": "^acc",
        "window": 4_096,
        "from": "start",
        "limit": 3,
        "follow": True,
        "missing": "wait",
        "on_gap": "skip",
    }


def test_progress_is_told_while_the_past_is_scanned(service: ScriptedSearches) -> None:
    service.have(1)
    service.control = f'id: {LIFE}.0\nevent: progress\ndata: {{"percent": 12.5, "records": 1, "of": 8}}\n\n'
    told: list[Control] = []
    assert len(grep(service.url, follow=False, on_control=told.append)) == 1
    assert [control.kind for control in told] == ["progress", "end"]
    assert told[0].data["percent"] == 12.5


def test_a_feed_knows_how_many_there_were_when_it_has_ended(service: ScriptedSearches) -> None:
    service.have(4)

    async def read() -> None:
        async with tailrace.connect(service.url) as river:
            feed = river.grep("orders", follow=False)
            await anext(aiter(feed))
            assert feed.total is None
            assert await feed.count() == 4
            assert await feed.count() == 4

    asyncio.run(read())


def test_a_search_that_is_refused_raises_the_error_of_its_code(service: ScriptedSearches) -> None:
    with pytest.raises(QueryError, match="no such operator") as caught:
        grep(service.url, "orders", {"total": {"$bad": 1}})
    assert caught.value.operator == "$bad"
    with pytest.raises(TopicNotFound):
        grep(service.url, "absent", missing="fail")
    assert len(service.asked) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), "\ud800"])
def test_a_query_that_json_cannot_say_is_refused_before_any_request(service: ScriptedSearches, value: object) -> None:
    with pytest.raises(QueryError, match="cannot be written as JSON"):
        grep(service.url, "orders", {"total": value})
    assert service.asked == []


def test_a_query_keeps_its_digits_and_its_order_and_may_have_times(service: ScriptedSearches) -> None:
    query = {"z": 12345678901234567890123, "a": 1.0, "$time": {"$gte": datetime(2026, 11, 15, 8, tzinfo=UTC)}}
    grep(service.url, "orders", query, follow=False)
    sent = service.asked[0]["q"]
    assert list(sent) == ["z", "a", "$time"]
    assert sent == {**query, "$time": {"$gte": "2026-11-15T08:00:00Z"}}
    assert isinstance(sent["a"], float)


def test_what_cannot_be_meant_is_refused_before_any_request(service: ScriptedSearches) -> None:
    with pytest.raises(BadRequest, match="since= and start= are the same"):
        grep(service.url, since="-1h", start="end")
    with pytest.raises(BadRequest, match="either after"):
        grep(service.url, since="-1h", after=f"{LIFE}.3")
    with pytest.raises(BadRequest, match="as one text"):
        grep(service.url, ["orders", "pay.*"])
    with pytest.raises(BadRequest, match="no topic is named"):
        grep(service.url, [])
    assert service.asked == []


def test_a_search_can_be_tried_on_values_and_on_events(service: ScriptedSearches) -> None:
    service.have(1)

    async def read() -> None:
        async with tailrace.connect(service.url) as river:
            event = await anext(aiter(river.grep("orders", follow=False)))
            found = await river.explain({"a": 1, "b": 2}, [{"a": 1}, event], topics=["orders"], key=["acc-7"])
            assert (found.id, found.topics, found.canonical) == ("3f", ["orders"], {"a": 1, "b": 2})
            assert [tried.matched for tried in found.samples] == [False, False]
            whole = found.samples[0].explanation
            assert (whole.matched, whole.parts[0].matched, whole.parts[0].found) == (False, True, [1])

    asyncio.run(read())
    asked = service.asked[-1]
    assert (asked["topics"], asked["key"], asked["samples"][0]) == ("orders", '["acc-7"]', {"a": 1})
    assert asked["samples"][1]["data"] == {"total": 100}
    assert asked["samples"][1]["topic"] == "orders"

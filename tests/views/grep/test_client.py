"""Searches through the client, against a real server that breaks connections: exact resume, long queries, counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tailrace
from tailrace.api.answers import Control, Event
from tailrace.client import connection
from tailrace.errors import BadRequest, QueryError, TopicNotFound
from tests.examples import examples
from tests.scripted import LIFE, LONG, Plan, ScriptedSearches, searching


@pytest.fixture(scope="module")
def running_service() -> Iterator[ScriptedSearches]:
    with searching() as service:
        yield service


@pytest.fixture
def service(running_service: ScriptedSearches, monkeypatch: pytest.MonkeyPatch) -> ScriptedSearches:
    running_service.reset()
    monkeypatch.setattr(connection, "FIRST_WAIT", 0.002)
    return running_service


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


@examples(30)
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
        "count": False,
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
    controls: list[Control] = []
    assert len(grep(service.url, follow=False, on_control=controls.append)) == 1
    assert [control.kind for control in controls] == ["progress", "end"]
    assert controls[0].data["percent"] == 12.5


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

"""Tags over HTTP, on a real store: feeds, listings, named readers, and what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tailrace.log.event import iso_time
from tailrace.testing.installation import ServiceThread
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.settings import CassandraSettings
from tests.http.parts import Serve, problem
from tests.views.tags.tagged import Tagger, apart
from tests.writing import NOON

HOUR = 3_600_000


@pytest.fixture
def tagger(store: StoreOptions) -> Iterator[Tagger]:
    made = Tagger(store)
    yield made
    made.close()


@pytest.fixture
def service(serve: Serve) -> ServiceThread:
    return serve(tags__paths=["tags"])


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines() if line]


def read(client: httpx.Client, path: str, **query: Any) -> list[dict[str, Any]]:
    """All events of a feed that ends."""
    query = {"follow": "false", "format": "ndjson"} | {name.rstrip("_"): value for name, value in query.items()}
    return [line for line in lines(client.get(path, params=query)) if "event" not in line and not line.get("moved")]


def read_ids(client: httpx.Client, path: str, **query: Any) -> list[str]:
    return [event["id"] for event in read(client, path, **query) if "id" in event]


# Feeds.


def test_a_tag_is_followed_from_anywhere(tagger: Tagger, client: httpx.Client) -> None:
    wanted = [tagger.write(f"cart/{i % 2}", ["gpu", "big one"])[0] for i in range(10)]
    events = read(client, "/v1/tags/gpu/events")
    assert [event["id"] for event in events] == wanted
    members = ("tag", "tags", "source", "seq", "tag_seq", "data", "time")
    assert {name: events[2][name] for name in members} == {
        "tag": "gpu",
        "tags": ["gpu", "big one"],
        "source": "cart%2F0",
        "seq": 2,
        "tag_seq": 2,
        "data": {"n": 2, "tags": ["gpu", "big one"]},
        "time": iso_time(NOON + 2000),
    }
    for i, event in enumerate(events):
        assert read_ids(client, "/v1/tags/gpu/events", after=event["cursor"]) == wanted[i + 1 :]
    assert read_ids(client, "/v1/tags/big%20one/events", from_="-3") == wanted[-3:]
    assert read_ids(client, "/v1/tags/gpu/events", since=iso_time(NOON + 7000)) == wanted[7:]
    assert read_ids(client, "/v1/tags/gpu/events", until=iso_time(NOON + 2000)) == wanted[:3]
    assert read_ids(client, "/v1/tags/gpu/events", limit=4) == wanted[:4]
    assert read_ids(client, "/v1/tags/gpu/events", q='{"n": {"$gte": 8}}') == wanted[8:]


def test_a_tag_may_have_any_letters(tagger: Tagger, client: httpx.Client) -> None:
    for i, tag in enumerate(("a/b", "events", "readers", "ä %2F", "..")):
        (wanted,) = tagger.write("p", [tag])
        path = "/v1/tags/" + "".join(f"%{byte:02X}" for byte in tag.encode()) + "/events"
        assert read_ids(client, path) == [wanted], (i, tag)


def test_several_tags_are_one_feed(tagger: Tagger, client: httpx.Client, store: StoreOptions) -> None:
    first, second = apart(store)
    for i in range(12):
        tagger.write(f"p{i % 2}", [[first], [second], [first, second]][i % 3])
    everything, both = [s.id for s in tagger.sent], [s.id for s in tagger.sent if len(s.tags) == 2]
    events = read(client, "/v1/tags/events", tag=[first, second])
    assert [event["id"] for event in events] == everything
    assert read_ids(client, "/v1/tags/events", tag=[first, second], after=events[6]["cursor"]) == everything[7:]
    assert read_ids(client, "/v1/tags/events", tag=[second, first], mode="all") == both
    assert read_ids(client, "/v1/tags/events", tag=[first, second], mode="all", from_="-2") == both[-2:]
    assert read_ids(client, "/v1/tags/events", tag=[first]) == tagger.ids(first)
    assert read_ids(client, "/v1/tags/events", tag=[first, second], q='{"n": 5}') == [everything[5]]


def test_a_feed_is_an_event_stream_that_goes_on_where_it_was_cut(
    tagger: Tagger, client: httpx.Client, store: StoreOptions
) -> None:
    wanted = tagger.write("p", ["gpu"], 5)
    with client.stream("GET", "/v1/tags/gpu/events", params={"from": "start", "limit": 8}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        cursor, seen = "", 0
        for line in response.iter_lines():
            if line.startswith("id: "):
                cursor = line[4:]
            seen += line.startswith('data: {"id"')
            if seen == 3:
                break
    wanted += tagger.write("p", ["gpu"], 5)
    answer = client.get("/v1/tags/gpu/events", params={"limit": 8}, headers={"Last-Event-ID": cursor})
    got = [json.loads(line[6:])["id"] for line in answer.text.splitlines() if line.startswith('data: {"id"')]
    assert got in (wanted[2:8], wanted[3:8])
    end = [line[4:] for line in answer.text.splitlines() if line.startswith("id: ")][-1]
    again = client.get("/v1/tags/gpu/events", params={"limit": 8}, headers={"Last-Event-ID": end})
    assert again.status_code == 204


# Listings.


def test_tags_are_listed_page_by_page(tagger: Tagger, client: httpx.Client) -> None:
    for i in range(7):
        tagger.write("p", [f"t{i}", "all"], i + 1, time_ms=NOON + i * HOUR)
    page = client.get("/v1/tags", params={"limit": 3}).json()
    assert [tag["tag"] for tag in page["tags"]] == ["all", "t0", "t1"]
    everything, two = page["tags"][0], page["tags"][2]
    assert (everything["events"], everything["buckets"]) == (28, 7)
    assert (everything["first_bucket"], everything["last_time"]) == (iso_time(NOON), iso_time(NOON + 6 * HOUR))
    assert (two["events"], two["buckets"], two["bytes"] > 0) == (2, 1, True)
    rest = client.get("/v1/tags", params={"limit": 10, "after": page["next"]}).json()
    assert ([tag["tag"] for tag in rest["tags"]], rest["next"]) == (["t2", "t3", "t4", "t5", "t6"], None)
    some = client.get("/v1/tags", params={"prefix": "t", "limit": 2}).json()
    assert ([tag["tag"] for tag in some["tags"]], some["next"]) == (["t0", "t1"], "t1")
    problem(client.get("/v1/tags?limit=0"), 400, "request.invalid")


def test_the_sources_of_a_tag_are_listed_with_how_far_they_are(tagger: Tagger, client: httpx.Client) -> None:
    drafts = [tagger.draft(f"p{n % 1200}", ["gpu", "red"][: 1 + n % 2], partition=n % 4) for n in range(4000)]
    for partition in range(4):
        tagger.writer.write(drafts[partition::4])
    found: dict[str, Any] = {}
    after: int | None = 0
    pages = 0
    while after is not None:
        page = client.get("/v1/tags/gpu/sources", params={"after": after, "limit": 200}).json()
        found |= {source["source"]: source for source in page["sources"]}
        after, pages = page["next"], pages + 1
    assert pages > 1
    assert {name: source["tag_seq"] for name, source in found.items()} == {
        f"p{i}": 4 if i < 400 else 3 for i in range(1200)
    }
    last = {sent.source: sent for sent in tagger.sent}
    assert all(source["seq"] == last[name].offset for name, source in found.items())
    assert found["p7"]["partition"] == "jobs:3"
    assert found["p7"]["time"] == iso_time(NOON + last["p7"].n * 1000)
    problem(client.get("/v1/tags/none/sources"), 404, "stream.not_found")


# Named readers.


def test_a_reader_with_a_name_goes_on_where_it_was(tagger: Tagger, client: httpx.Client) -> None:
    wanted = tagger.write("p", ["gpu"], 20)
    got = read_ids(client, "/v1/tags/gpu/events", client_="billing", limit=5)
    got += read_ids(client, "/v1/tags/gpu/events", client_="billing", limit=5)
    got += read_ids(client, "/v1/tags/gpu/events", client_="billing")
    assert got == wanted
    assert read_ids(client, "/v1/tags/gpu/events", client_="billing", from_="start") == []
    assert read_ids(client, "/v1/tags/gpu/events", client_="other", from_="-2") == wanted[-2:]
    new = tagger.write("p", ["gpu", "red"], 2)
    assert read_ids(client, "/v1/tags/gpu/events", client_="billing") == new
    assert read_ids(client, "/v1/tags/events", tag=["gpu", "red"], client_="billing") == [*wanted, *new]
    problem(client.get("/v1/tags/gpu/events?client=no%20name"), 400, "request.invalid")


def test_a_reader_that_lags_near_the_end_of_what_is_kept_is_warned_of(serve: Serve, tagger: Tagger) -> None:
    service = serve(tags__paths=["tags"], tags__keep="10h")
    with service.client() as client:
        now = round(time.time() * 1000)
        tagger.write("p", ["gpu"], 3, time_ms=now - 9 * HOUR)
        assert len(read_ids(client, "/v1/tags/gpu/events", client_="slow", limit=1)) == 1
        assert len(read_ids(client, "/v1/tags/gpu/events", client_="quick")) == 3
        quick, slow = client.get("/v1/tags/readers").json()["readers"]
        assert (quick["client"], quick["lag_s"], quick["warning"]) == ("quick", 0.0, None)
        assert (slow["client"], slow["tags"], slow["mode"]) == ("slow", ["gpu"], "any")
        assert slow["lag_s"] == pytest.approx(9 * 3_600, abs=60)
        assert "kept for 10h (tags.keep)" in slow["warning"]
        metrics = client.get("/metrics").text
        assert 'tailrace_tag_reader_lag_seconds{reader="quick",tags="gpu"} 0.0' in metrics
        assert 'tailrace_tag_reader_lag_seconds{reader="slow",tags="gpu"} 324' in metrics
        read_ids(client, "/v1/tags/gpu/events", client_="slow")
        assert [r["warning"] for r in client.get("/v1/tags/readers").json()["readers"]] == [None, None]
        tagger.write("p", ["gpu"], 1, time_ms=now - 1000)
        lags = [r["lag_s"] for r in client.get("/v1/tags/readers").json()["readers"]]
        assert all(lag > 8 * 3600 for lag in lags), "they are not there, and something has come"


# Cassandra.


def test_all_of_it_is_the_same_where_events_rest_in_cassandra(
    serve: Serve, store: StoreOptions, rows_store: CassandraSettings
) -> None:
    first, second = apart(store)
    tagger = Tagger(store, rows_store)
    now = round(time.time() * 1000)
    for i in range(12):
        tagger.write(f"p{i % 2}", [[first], [second], [first, second]][i % 3], time_ms=now - 9 * HOUR + i * 1000)
    sent = [each.id for each in tagger.sent]
    at = {"cassandra__port": rows_store.port, "cassandra__keyspace": rows_store.keyspace, "tags__keep": "10h"}
    service = serve(tags__paths=["tags"], tags__store="cassandra", tags__delay="50ms", cassandra__timeout="30s", **at)
    with service.client() as client:
        events = read(client, "/v1/tags/events", tag=[first, second])
        assert [event["id"] for event in events] == sent
        for i in (0, 5, 10):
            assert read_ids(client, "/v1/tags/events", tag=[first, second], after=events[i]["cursor"]) == sent[i + 1 :]
        (one,) = read(client, f"/v1/tags/{first}/events", q='{"n": 6}')
        assert (one["tag"], one["source"], one["seq"], one["tag_seq"]) == (first, "p0", 6, 3)
        both = [each.id for each in tagger.sent if len(each.tags) == 2]
        assert read_ids(client, "/v1/tags/events", tag=[first, second], mode="all", from_="-2") == both[-2:]
        listed = client.get("/v1/tags").json()["tags"]
        assert [(tag["tag"], tag["events"]) for tag in listed] == [(tag, None) for tag in sorted((first, second))]
        assert all(tag["buckets"] >= 1 for tag in listed)
        sources = client.get(f"/v1/tags/{first}/sources").json()["sources"]
        assert sum(source["tag_seq"] for source in sources) == 8
        got = read_ids(client, f"/v1/tags/{first}/events", client_="slow", limit=3)
        warned = client.get("/v1/tags/readers").json()["readers"]
        assert [reader["warning"] is not None for reader in warned] == [True]
        got += read_ids(client, f"/v1/tags/{first}/events", client_="slow")
        assert got == tagger.ids(first)
        assert [reader["warning"] for reader in client.get("/v1/tags/readers").json()["readers"]] == [None]
    tagger.close()


# What is refused.


@pytest.mark.parametrize("path", ["/v1/tags", "/v1/tags/gpu/events", "/v1/tags/events?tag=a", "/v1/tags/a/sources"])
def test_where_nothing_is_tagged_it_is_said_what_to_configure(serve: Serve, path: str) -> None:
    with serve().client() as client:
        detail = problem(client.get(path), 404, "tags.off")
        assert "tags.paths" in detail
        assert "tags.rules" in detail
    with serve(tags__paths=["tags"], pipeline__views=["days"]).client() as client:
        assert "pipeline.views" in problem(client.get(path), 404, "tags.off")


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("tag=a&q=nonsense", 400, "request.invalid"),
        ("tag=a&q=[]", 400, "query.invalid"),
        ("tag=a&q={%22x%22:{%22$bad%22:1}}", 400, "query.invalid"),
        ("tag=a&mode=some", 400, "request.invalid"),
        ("tag=a&tag=a", 400, "request.invalid"),
        ("mode=any", 400, "request.invalid"),
        ("tag=a&name=b", 400, "request.invalid"),
        ("tag=a&limit=1&limit=2", 400, "request.invalid"),
        ("tag=a&after=nonsense", 400, "cursor.invalid"),
        ("tag=a&tag=b&after=1.2", 400, "cursor.invalid"),
        ("tag=a&missing=fail", 404, "stream.not_found"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client: httpx.Client, query: str, status: int, code: str) -> None:
    problem(client.get(f"/v1/tags/events?{query}"), status, code)


def test_whoever_may_only_search_does_not_get_tags(serve: Serve) -> None:
    users = {"root": ".*", "eve": "orders"}
    service = serve(tags__paths=["tags"], serve__user_header="X-User", serve__topics_by_user=users)
    with service.client() as client:
        for path in ("/v1/tags", "/v1/tags/gpu/events?follow=false", "/v1/tags/readers"):
            problem(client.get(path, headers={"X-User": "eve"}), 403, "access.denied")
            assert client.get(path, headers={"X-User": "root"}).status_code == 200


def test_the_description_of_the_api_knows_tags(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    several = paths["/v1/tags/events"]["get"]
    assert {"tag", "mode", "q", "client", "from", "after"} <= {each["name"] for each in several["parameters"]}
    lines = several["responses"]["200"]["content"]["application/x-ndjson"]["schema"]
    assert {"tag", "tags", "source", "seq", "tag_seq", "timeuuid"} <= set(lines["required"])
    assert "404" in paths["/v1/tags/{tag}/sources"]["get"]["responses"]

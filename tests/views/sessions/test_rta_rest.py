"""The lists of the telemetry protocol on a real server: sessions as they were written, and their configurations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.testing.installation import served
from tailrace.valkey.keys import Keys
from tailrace.valkey.shards import StoreOptions
from tailrace.views.sessions.routes import iso
from tests.http.parts import problem
from tests.views.sessions.foreign import T0, Foreign, connected, event

PREFIX = "rest"


@pytest.fixture(scope="module")
def http(valkey_server: EmbeddedValkey) -> Iterator[httpx.Client]:
    options = StoreOptions(valkey_server.url, prefix=PREFIX)
    with served(options) as running, running.client() as made:
        yield made


@pytest.fixture
def client(store: StoreOptions) -> Iterator[Any]:
    with connected(store) as made:
        made.delete(Keys(PREFIX).sessions())
        yield made


def listed(client: Any, session: Foreign, updated_ms: int = 1) -> Foreign:
    """Put a session into the index, as our own writers do."""
    client.zadd(Keys(PREFIX).sessions(), {session.identity: updated_ms})
    return session


def test_a_session_has_the_time_range_of_its_hash_and_all_that_its_writer_said(
    http: httpx.Client, client: Any, store: StoreOptions
) -> None:
    fields: dict[str, Any] = {
        "details": None,
        "configBindings": [{"identifier": "cfg", "channelOffset": 0}],
        "children": [],
        "extDetails": {},
        "later": {"n": 12345678901234567890},
    }
    made = Foreign(client, store.prefix, f"{store.prefix}/lap 1").open(**fields)
    end = T0 + 9_007_199_254_740_993
    made.send(event(1, T0, "x"), start=T0 + 1, end=end)
    answer = http.get(f"/rta/v2/sessions/{quote(made.identity, safe='')}")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    found = answer.json()
    assert found["timeRange"] == {"startTime": T0 + 1, "endTime": end}
    assert f'"endTime":{end}' in answer.text
    assert (found["startTimestamp"], found["endTimestamp"]) == (iso(T0 + 1), iso(end))
    assert found["startTimestamp"] == "2021-05-04T11:50:55.000000Z"
    assert {name: found[name] for name in fields} == fields
    assert "group" not in found
    assert http.head(f"/rta/v2/sessions/{quote(made.identity, safe='')}").status_code == 200


def test_a_session_without_a_range_says_what_its_json_says(
    http: httpx.Client, client: Any, store: StoreOptions
) -> None:
    Foreign(client, store.prefix, f"{store.prefix}a").open()
    assert "timeRange" not in http.get(f"/rta/v2/sessions/{store.prefix}a").json()
    Foreign(client, store.prefix, f"{store.prefix}b").open(timeRange=None, startTimestamp=None)
    assert http.get(f"/rta/v2/sessions/{store.prefix}b").json()["timeRange"] is None


def test_what_was_merged_goes_before_the_last_update(http: httpx.Client, client: Any, store: StoreOptions) -> None:
    made = Foreign(client, store.prefix, f"{store.prefix}a").open(details=None)
    client.hset(made.key, "merged", json.dumps({"identity": made.identity, "details": {"driver": "Anna"}}))
    assert http.get(f"/rta/v2/sessions/{made.identity}").json()["details"] == {"driver": "Anna"}


def test_a_session_that_is_not_there_or_not_yet_is_answered_with_404(
    http: httpx.Client, client: Any, store: StoreOptions
) -> None:
    for fields in ({}, {"json": "no json"}, {"json": "[1]"}):
        identity = f"{store.prefix}{len(fields)}{len(str(fields))}"
        client.hset(f"sessions:{identity}", mapping={"streamSessionId": 1, "streamName": "s", **fields})
        problem(http.get(f"/rta/v2/sessions/{identity}"), 404, "session.not_found")
    problem(http.get("/rta/v2/sessions/nobody"), 404, "session.not_found")


def test_sessions_are_listed_by_any_property_in_pages_the_newest_first(
    http: httpx.Client, client: Any, store: StoreOptions
) -> None:
    assert http.get("/rta/v2/sessions").json() == {"sessions": []}
    times = ["2026-01-01T12:00:00+02:00", "2026-01-01T11:00:00+00:00", "2026-01-01T10:30:00.5Z", "2026-01-01T09:00:00Z"]
    for i, (timestamp, quality) in enumerate(zip(times, (0.5, None, 1, 0.25), strict=True)):
        details = {"laps": i} if i else {}
        made = Foreign(client, store.prefix, f"{store.prefix}{i}")
        listed(client, made.open(timestamp=timestamp, quality=quality, details=details), i)
    client.zadd(Keys(PREFIX).sessions(), {"expired": 99})

    def order(**query: Any) -> str:
        found = http.get("/rta/v2/sessions", params=query).json()["sessions"]
        return "".join(each["identity"].removeprefix(store.prefix) for each in found)

    assert order() == "1203"
    assert order(sort="timestamp:asc") == "3021"
    assert order(sort="identity:desc") == "3210"
    assert order(sort="quality:asc") == "1302"
    assert order(sort="details.laps:desc") == "3210"
    assert order(sort="no.such:asc", folder="x", unknown="1") in {"0123", "3210"}
    assert [order(pageSize=3, pageIndex=page) for page in (0, 1, 2)] == ["120", "3", ""]
    for bad in ({"sort": "timestamp"}, {"sort": "timestamp:up"}, {"pageSize": 0}, {"pageIndex": -1}):
        problem(http.get("/rta/v2/sessions", params=bad), 400, "request.invalid")


def test_a_configuration_is_served_as_it_was_published(http: httpx.Client, client: Any, store: StoreOptions) -> None:
    text = b'{"chassis" : {"channels":[{"id":1,"type":"f64"}],"parameters":[]}, "n":1.10}'
    identifier = f"{store.prefix}/cfg 1"
    client.set(Keys(PREFIX).config(identifier), text, ex=600)
    url = f"/rta/v2/configs/{quote(identifier, safe='')}"
    answer = http.get(url)
    assert (answer.content, answer.headers["content-type"]) == (text, "application/vnd.mat.config+json")
    head = http.head(url)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(text)))
    problem(http.get("/rta/v2/configs/none"), 404, "session.not_found")
    assert http.head("/rta/v2/configs/none").status_code == 404


def test_another_template_of_the_key_is_another_place(store: StoreOptions, client: Any) -> None:
    made = Foreign(client, store.prefix, f"{store.prefix}a", key=f"rta/{store.prefix}a/session").open()
    with served(store, sessions__key="rta/{identity}/session") as running, running.client() as http:
        assert http.get(f"/rta/v2/sessions/{made.identity}").json()["identity"] == made.identity


def test_the_routes_describe_themselves(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    wanted = {"/rta/v2/sessions", "/rta/v2/sessions/{identity}", "/rta/v2/configs/{identifier}"}
    assert {path for path in paths if path.startswith("/rta")} == wanted | {"/rta/v2/sessions/{identity}/stream"}
    assert "GET /rta/v2/sessions/{identity}/stream" in http.get("/").json()["routes"]


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "1970-01-01T00:00:00.000000Z"),
        (-1, "1969-12-31T23:59:59.999999Z"),
        (T0 + 999, "2021-05-04T11:50:55.000000Z"),
    ],
)
def test_times_are_shown_to_the_microsecond(ns: int, text: str) -> None:
    assert iso(ns) == text

"""Folds over HTTP on a real store: the rules, their feed, what they hold, and windows that change while they run."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from tailrace.log.event import iso_time
from tailrace.testing.installation import ServiceThread
from tailrace.valkey.shards import StoreOptions
from tailrace.views.folds.model import Windows
from tests.http.parts import Serve, Streams, problem
from tests.views.folds.holding import RULES, SEED, Holder, flush, hold, rule_of
from tests.writing import NOON


@pytest.fixture
def service(serve: Serve) -> ServiceThread:
    return serve(folds__rules=RULES)


# Rules.


def test_a_rule_that_nobody_has_applied_is_listed_as_it_is_configured(client: httpx.Client) -> None:
    assert [rule["name"] for rule in client.get("/v1/folds").json()["folds"]] == ["accounts", "rows"]
    assert rule_of(client) == {
        "name": "accounts",
        "stream": "folds/accounts",
        "topics": ["posts"],
        "group": ["account_id"],
        "collect": {"metrics": "keys metrics", "posts": "set id"},
        "windows": {"quiet": "5s", "max_wait": "50s", "max_count": 10000, "max_bytes": "256KiB", "lateness": "0s"},
        "clock": "arrival",
        "output": "folds.accounts",
        "raw": None,
        "pending": 0,
        "input": 0,
        "new": 0,
        "folded": 0,
        "emitted": 0,
        "ratio": None,
        "premature": 0,
        "reasons": {},
        "since": None,
        "frontier_ms": None,
    }
    assert rule_of(client, "rows")["windows"]["max_wait"] == "3s"


def test_a_rule_says_how_much_it_has_folded_and_how_much_since_its_windows_changed(
    client: httpx.Client, holder: Holder
) -> None:
    hold(holder)
    for shard in range(2):
        holder.count(shard, input__accounts=50, new__accounts=10, emitted__accounts=4, premature__accounts=1)
        holder.count(shard, reason__accounts__quiet=3, reason__accounts__max_wait=1, input__accounts2=7)
    windows = Windows(2_000, 60_000, 500, 1 << 20, 250)
    in_force = msgspec.structs.replace(holder.rules["accounts"], windows=windows)
    holder.put_in_force(in_force, NOON, input=60, new=20, emitted=6, premature=1)
    holder.reach("accounts", NOON + 7)
    rule = rule_of(client)
    assert rule["windows"] == {
        "quiet": "2s",
        "max_wait": "1m",
        "max_count": 500,
        "max_bytes": "1MiB",
        "lateness": "250ms",
    }
    assert (rule["pending"], rule["input"], rule["new"], rule["folded"]) == (2, 100, 20, 80)
    assert (rule["emitted"], rule["ratio"], rule["premature"]) == (8, 0.92, 2)
    assert rule["reasons"] == {"max_wait": 2, "quiet": 6}
    assert rule["since"] == {"time": iso_time(NOON), "input": 40, "emitted": 2, "ratio": 0.95, "premature": 1}
    assert rule["frontier_ms"] == NOON + 7


def test_metrics_and_status_show_the_rules(client: httpx.Client, holder: Holder) -> None:
    hold(holder)
    holder.count(input__accounts=100, new__accounts=20, emitted__accounts=8, premature__accounts=2)
    holder.count(reason__accounts__quiet=6, reason__accounts__flush=2)
    holder.reach("accounts", NOON)
    holder.reach("rows", NOON)
    lines = client.get("/metrics").text.splitlines()
    for line in (
        'tailrace_fold_inputs_total{rule="accounts"} 100.0',
        'tailrace_fold_new_total{rule="accounts"} 20.0',
        'tailrace_fold_emitted_total{reason="quiet",rule="accounts"} 6.0',
        'tailrace_fold_emitted_total{reason="flush",rule="accounts"} 2.0',
        'tailrace_fold_premature_total{rule="accounts"} 2.0',
        'tailrace_fold_pending{rule="accounts"} 2.0',
        'tailrace_fold_ratio{rule="accounts"} 0.92',
        'tailrace_fold_pending{rule="rows"} 0.0',
        'tailrace_pipeline_up{view="folds"} 0.0',
    ):
        assert line in lines
    assert any(line.startswith('tailrace_fold_frontier_lag_seconds{rule="accounts"} ') for line in lines)
    assert not any(
        line.startswith(('tailrace_fold_ratio{rule="rows"', 'tailrace_fold_frontier_lag_seconds{rule="rows'))
        for line in lines
    )
    assert client.get("/v1/status").json()["folds"] == [
        {"rule": "accounts", "pending": 2, "ratio": 0.92},
        {"rule": "rows", "pending": 0, "ratio": None},
    ]


def test_the_view_of_folds_is_missed_only_where_there_are_rules(serve: Serve, store: StoreOptions) -> None:
    with serve().client() as client:
        assert "folds" not in client.get("/readyz").json()["parts"][2]["detail"]
        assert client.get("/v1/folds").json() == {"folds": []}
    with serve(folds__rules=RULES).client() as client:
        assert "folds" in client.get("/readyz").json()["parts"][2]["detail"]


# The feed.


def test_the_feed_of_a_rule_is_that_of_its_day_stream(client: httpx.Client, streams: Streams) -> None:
    streams.write("folds/accounts", [{"n": n} for n in range(5)])
    streams.write("folds/rows", [{"n": 17}])
    lines = client.get("/v1/folds/accounts/events?follow=false&from=-2&format=ndjson").text.splitlines()
    events = [json.loads(line) for line in lines if "event" not in json.loads(line)]
    assert [event["data"] for event in events] == [{"n": 3}, {"n": 4}]
    assert events[0]["key"] == ["folds", "accounts"]
    resumed = client.get(
        "/v1/folds/accounts/events?follow=false&limit=3", headers={"Last-Event-ID": events[0]["cursor"]}
    )
    assert 'data: {"id"' in resumed.text
    assert resumed.headers["content-type"].startswith("text/event-stream")
    assert client.head("/v1/folds/accounts/events").status_code == 200


def test_a_feed_refuses_what_every_feed_refuses(client: httpx.Client) -> None:
    problem(client.get("/v1/folds/accounts/events?missing=fail"), 404, "stream.not_found")
    problem(client.get("/v1/folds/accounts/events?limit=1&limit=2"), 400, "request.invalid")


# Pending groups.


def test_a_pending_group_says_what_it_holds_and_when_it_is_due(client: httpx.Client, holder: Holder) -> None:
    hold(holder)
    holder.add("accounts", SEED[5], NOON + 60_000, watermark=NOON)
    page = client.get("/v1/folds/accounts/pending").json()
    assert (page["name"], page["next"]) == ("accounts", None)
    first, second = page["groups"]
    size = first.pop("bytes")
    assert first == {
        "group": {"account_id": "account_1"},
        "folds": 1,
        "count": 4,
        "first": iso_time(NOON),
        "last": iso_time(NOON + 3_000),
        "due": iso_time(NOON + 8_000),
    }
    assert size > 0
    assert (second["group"], second["folds"], second["count"]) == ({"account_id": "account_2"}, 2, 3)
    assert (second["due"], second["last"]) == (iso_time(NOON + 10_000), iso_time(NOON + 60_000))


def test_pending_groups_come_in_pages_in_the_order_in_which_they_are_due(client: httpx.Client, holder: Holder) -> None:
    # Most are due at the same moment, as those of one batch of a producer are.
    added = [holder.add("accounts", {"account_id": n}, NOON + max(0, n - 40)) for n in range(50)]
    found: list[int] = []
    query: dict[str, Any] = {"limit": 7}
    while True:
        page = client.get("/v1/folds/accounts/pending", params=query).json()
        assert len(page["groups"]) == 7 or page["next"] is None
        found += [row["group"]["account_id"] for row in page["groups"]]
        if page["next"] is None:
            break
        query["after"] = page["next"]
    at_once = sorted(added[:41])
    assert [f"[{n}]".encode() for n in found] == [*at_once, *added[41:]]
    assert [row["group"]["account_id"] for row in client.get("/v1/folds/accounts/pending").json()["groups"]] == found


def test_groups_keep_the_digits_and_the_types_of_their_values(client: httpx.Client, holder: Holder) -> None:
    for account in (1, "1", True, 12345678901234567890123, {"b": 1, "a": [2.5]}):
        holder.add("accounts", {"account_id": account}, NOON)
    text = client.get("/v1/folds/accounts/pending").text
    for written in ("1", '"1"', "true", "12345678901234567890123", '{"a":[2.5],"b":1}'):
        assert f'{{"group":{{"account_id":{written}}}' in text
        done = flush(client, b'{"group": [%b]}' % written.encode())
        assert done.json()["groups"] == 1, done.text
    assert holder.left("accounts") == []


def test_pending_refuses_what_it_does_not_know(client: httpx.Client) -> None:
    for query in ("limit=0", "limit=1001", "before=1"):
        problem(client.get(f"/v1/folds/accounts/pending?{query}"), 400, "request.invalid")
    problem(client.get("/v1/folds/accounts/pending?after=nonsense"), 400, "cursor.invalid")


# Windows.


def wanted(holder: Holder, name: str = "accounts") -> Any:
    (text,) = holder.shards.run_all([(0, ("HGET", holder.shards.keys.wanted(), name))])
    return None if text is None else json.loads(text)


def set_windows(client: httpx.Client, **windows: Any) -> httpx.Response:
    return client.post("/v1/folds/accounts/windows", json=windows)


def test_windows_are_asked_for_one_on_top_of_the_other_until_they_are_reset(
    client: httpx.Client, holder: Holder
) -> None:
    answer = set_windows(client, quiet="2s").json()
    assert answer["windows"] == {
        "quiet": "2s",
        "max_wait": "20s",
        "max_count": 10000,
        "max_bytes": "256KiB",
        "lateness": "0s",
    }
    assert wanted(holder) == {"quiet": "2s"}
    answer = set_windows(client, max_wait="1m", max_count=7, max_bytes="1KiB", lateness="10ms").json()
    assert list(answer["windows"].values()) == ["2s", "1m", 7, "1KiB", "10ms"]
    assert wanted(holder) == {"quiet": "2s", "max_wait": "1m", "max_count": 7, "max_bytes": "1KiB", "lateness": "10ms"}
    assert rule_of(client)["windows"]["quiet"] == "5s", "the pipeline puts them into force"
    answer = set_windows(client, reset=True).json()
    assert (answer["name"], answer["windows"]["quiet"], answer["windows"]["max_wait"]) == ("accounts", "5s", "50s")
    assert wanted(holder) is None


def test_windows_that_the_settings_would_not_take_are_refused_by_key(client: httpx.Client, holder: Holder) -> None:
    set_windows(client, max_count=5)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"quiet": "soon"}, "quiet: wanted a duration"),
        ({"quiet": "0s"}, "quiet: wanted a duration of 1ms"),
        ({"max_wait": "1s"}, "max_wait: wanted at least quiet, 5s"),
        ({"max_count": 0, "lateness": "-1s"}, "max_count: "),
        ({"max_count": 0, "lateness": "-1s"}, "lateness: wanted a duration"),
        ({"max_bytes": "3MiB"}, "max_bytes: wanted at most half of pipeline.max_event_bytes"),
        ({"group": ["id"]}, "group: cannot change while it runs"),
    ]
    for windows, message in refused:
        assert message in problem(set_windows(client, **windows), 422, "windows.refused")
    assert wanted(holder) == {"max_count": 5}


def test_a_body_that_asks_for_no_windows_is_refused(client: httpx.Client) -> None:
    for body in (b"{}", b"[]", b"5s", b'{"reset":false}', b'{"reset":true,"quiet":"1s"}', b"\xff"):
        assert "quiet" in problem(client.post("/v1/folds/accounts/windows", content=body), 400, "request.invalid")


# The description.


def test_the_service_describes_folds(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    paths = {path: set(methods) for path, methods in document["paths"].items() if path.startswith("/v1/folds")}
    assert paths == {
        "/v1/folds": {"get"},
        "/v1/folds/{name}/events": {"get"},
        "/v1/folds/{name}/pending": {"get"},
        "/v1/folds/{name}/flush": {"post"},
        "/v1/folds/{name}/delete": {"post"},
        "/v1/folds/{name}/windows": {"post"},
    }
    for path in paths:
        for operation in document["paths"][path].values():
            assert operation["tags"] == ["folds"]
            assert operation["summary"]
            assert "200" in operation["responses"]
    followed = [document["paths"][f"/v1/{kind}/{{name}}/events"]["get"]["parameters"] for kind in ("folds", "streams")]
    assert [{p["name"] for p in parameters} for parameters in followed] == [{p["name"] for p in followed[1]}] * 2
    windows = document["paths"]["/v1/folds/{name}/windows"]["post"]
    assert "422" in windows["responses"]
    assert "quiet" in windows["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"FoldRule", "FoldRules", "EmittedFolds", "PendingPage", "WindowsChange"} <= document["components"][
        "schemas"
    ].keys()
    assert "GET /v1/folds" in client.get("/").json()["routes"]

"""Listings, problems and operations of the service, on a real server and a real store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime

import httpx
import msgspec
import pytest
from valkey import Valkey

from tailrace.embedded.process import free_port
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.log.event import shard_of
from tailrace.testing.installation import NO_BROKER, ServiceThread
from tailrace.valkey.shards import StoreOptions
from tests.http.parts import Serve, Streams, problem

YESTERDAY_MS = round(time.time() * 1000) - 86_400_000


def report(store: StoreOptions, view: str, **facts: object) -> None:
    known = {
        "view": view,
        "state": "running",
        "rate": 12.5,
        "lag": 3,
        "take_ms": 140,
        "in": 10,
        "stored": 8,
        "dead": 1,
    }
    known |= {
        "skipped": {"no-key": 1},
        "unaccounted": 0,
        "frontier_ms": round(time.time() * 1000) - 2000,
        "restarts": 2,
    }
    known |= {"updated_ms": round(time.time() * 1000)}
    with Valkey.from_url(store.url) as client:
        client.set(store.keys.status(view), msgspec.json.encode(known | facts), ex=10)


# Listings.


def test_streams_are_listed_in_pages_in_the_order_of_their_names(streams: Streams, client: httpx.Client) -> None:
    names = sorted(["b/2", "a", "b/1", "b/10", "ü"], key=str.encode)
    for name in names:
        streams.write(name, [1, 2, 3])
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = client.get("/v1/streams", params={"after": after, "limit": 2}).json()
        found += [stream["name"] for stream in page["streams"]]
        after = page["next"]
    assert found == names
    of_b = client.get("/v1/streams", params={"prefix": "b/"}).json()
    assert [stream["name"] for stream in of_b["streams"]] == ["b/1", "b/10", "b/2"]
    assert of_b["next"] is None


def test_a_stream_says_how_much_it_holds(streams: Streams, client: httpx.Client) -> None:
    streams.write("a", [1, 2], time_ms=YESTERDAY_MS)
    streams.write("a", [3])
    (stream,) = client.get("/v1/streams").json()["streams"]
    assert (stream["events"], stream["days"]) == (3, 2)
    assert stream["first_day"] < stream["last_day"] == datetime.now(UTC).date().isoformat()
    assert stream["bytes"] > 0
    assert stream["last_time"].endswith("Z")


def test_the_days_of_a_stream_name_their_first_and_last_cursor(streams: Streams, client: httpx.Client) -> None:
    streams.write("a", [1, 2], time_ms=YESTERDAY_MS)
    streams.write("a", [3, 4, 5])
    days = client.get("/v1/streams/a/days").json()["days"]
    assert [(day["events"], day["state"]) for day in days] == [(2, "closed"), (3, "open")]
    lines = client.get("/v1/streams/a/events?follow=false&format=ndjson").text.splitlines()
    cursors = [json.loads(line)["cursor"] for line in lines if "event" not in json.loads(line)]
    assert [days[0]["first"], days[0]["last"], days[1]["first"], days[1]["last"]] == [
        cursors[0],
        cursors[1],
        cursors[2],
        cursors[4],
    ]


# Problems.


def test_a_missing_stream_is_a_problem_with_its_name(client: httpx.Client) -> None:
    for path in ("/v1/streams/none/days", "/v1/streams/none/events?missing=fail"):
        response = client.get(path)
        assert "none" in problem(response, 404, "stream.not_found")
        assert response.json()["name"] == "none"


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("frm=start", "unknown parameter 'frm'"),
        ("limit=-1", "'limit'"),
        ("limit=many", "'limit'"),
        ("follow=perhaps", "'follow'"),
        ("missing=maybe", "'missing'"),
        ("format=xml", "'format'"),
        ("limit=1&limit=2", "'limit'"),
        ("from=start&since=end", "since"),
        ("from=nowhere", "nowhere"),
        ("until=never", "never"),
    ],
)
def test_a_parameter_that_cannot_be_meant_is_refused_by_name(client: httpx.Client, query: str, named: str) -> None:
    assert named in problem(client.get(f"/v1/streams/a/events?{query}"), 400, "request.invalid")


def test_a_cursor_of_another_feed_is_refused(client: httpx.Client) -> None:
    problem(client.get("/v1/streams/a/events?after=x"), 400, "cursor.invalid")
    problem(client.get("/v1/streams/a/events", headers={"Last-Event-ID": "1.2,3.4"}), 400, "cursor.invalid")


def test_listings_refuse_what_they_do_not_know(client: httpx.Client) -> None:
    assert "'pre'" in problem(client.get("/v1/streams?pre=a"), 400, "request.invalid")
    assert "'limit'" in problem(client.get("/v1/streams?limit=1001"), 400, "request.invalid")
    assert "'x'" in problem(client.get("/v1/streams/a/days?x=1"), 400, "request.invalid")
    assert "'name'" in problem(client.get("/v1/streams/events"), 400, "request.invalid")


def test_what_is_not_served_is_a_problem_too(client: httpx.Client) -> None:
    problem(client.get("/v2/streams"), 404, "route.not_found")
    response = client.post("/v1/streams")
    problem(response, 405, "route.method_not_allowed")
    assert "GET" in response.headers["allow"]


def test_an_unexpected_error_tells_the_client_nothing_but_that_it_happened(
    serve: Serve, streams: Streams, valkey_server: EmbeddedValkey, store: StoreOptions
) -> None:
    streams.write("a", [1])
    service = serve()
    with valkey_server.client() as connection:
        connection.hset(store.keys.log(shard_of("a", store.shards), "days", "a"), "b", "secret")
        connection.zadd(store.keys.names(0, "days"), {b"secret \xff": 0})
    with service.client() as client:
        for path, code in (("/v1/streams/a/days", "store.refused"), ("/v1/streams", "internal")):
            response = client.get(path)
            problem(response, 500, code)
            assert "secret" not in response.text
            assert f'tailrace_http_errors_total{{code="{code}"}} 1.0' in client.get("/metrics").text


def test_a_request_id_is_echoed_or_made(client: httpx.Client) -> None:
    assert client.get("/healthz", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = [client.get("/nowhere").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]


def test_no_other_site_may_read_the_answers(client: httpx.Client) -> None:
    response = client.get("/v1/streams", headers={"Origin": "http://elsewhere.example"})
    assert "access-control-allow-origin" not in response.headers


# Operations.


def test_it_is_alive_but_not_ready_without_a_broker_and_a_pipeline(client: httpx.Client) -> None:
    assert client.get("/healthz").status_code == 200
    response = client.get("/readyz")
    assert response.status_code == 503
    assert {part["name"]: part["state"] for part in response.json()["parts"]} == {
        "kafka": "down",
        "valkey": "up",
        "pipeline": "down",
    }


def test_the_pipeline_is_up_while_its_report_is_fresh(client: httpx.Client, store: StoreOptions) -> None:
    report(store, "days")
    report(store, "matches")
    status = client.get("/v1/status").json()
    assert {part["name"]: part["state"] for part in status["parts"]}["pipeline"] == "up"
    assert status["views"]["days"]["rate"] == 12.5
    assert status["service"]["version"]
    report(store, "days", updated_ms=round(time.time() * 1000) - 11_000)
    time.sleep(0.6)
    parts = client.get("/readyz").json()["parts"]
    assert {part["name"]: part["state"] for part in parts}["pipeline"] == "down"


def test_metrics_show_the_service_and_the_pipeline(streams: Streams, client: httpx.Client, store: StoreOptions) -> None:
    streams.write("a", [1, 2, 3])
    client.get("/v1/streams/a/events?follow=false")
    report(store, "days")
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    for line in (
        "tailrace_feed_frames_total 5.0",
        "tailrace_feeds_open 0.0",
        'tailrace_pipeline_up{view="days"} 1.0',
        'tailrace_pipeline_up{view="intake"} 0.0',
        'tailrace_pipeline_records_per_second{view="days"} 12.5',
        'tailrace_pipeline_records_stored_total{view="days"} 8.0',
        'tailrace_pipeline_records_skipped_total{reason="no-key",view="days"} 1.0',
        'tailrace_pipeline_restarts_total{view="days"} 2.0',
    ):
        assert line in lines


def test_the_service_describes_itself(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    feed = document["paths"]["/v1/streams/{name}/events"]["get"]
    assert feed["responses"]["200"]["content"].keys() >= {"text/event-stream", "application/x-ndjson"}
    assert {p["name"] for p in feed["parameters"]} >= {
        "name",
        "from",
        "since",
        "after",
        "until",
        "limit",
        "last-event-id",
    }
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (path, method)
            assert "HTTPValidationError" not in json.dumps(operation)
    put = document["paths"]["/v1/topics/{topic}"]["post"]
    assert put["requestBody"]["content"].keys() == {"application/x-ndjson", "application/json"}
    listed = client.get("/").json()["routes"]
    assert "GET /v1/streams" in listed
    assert "<table>" in client.get("/", headers={"Accept": "text/html"}).text


def test_pages_find_an_icon(client: httpx.Client) -> None:
    response = client.get("/favicon.ico")
    assert (response.status_code, response.headers["content-type"]) == (200, "image/svg+xml")
    assert response.content.startswith(b"<svg ")


def test_a_service_without_its_store_says_so_and_recovers(
    tmp_path_factory: pytest.TempPathFactory, serve: Serve
) -> None:
    late = EmbeddedValkey(tmp_path_factory.mktemp("late"))
    service = serve(valkey__url=late.url, valkey__timeout="1s")
    with service.client() as client:
        assert client.get("/healthz").status_code == 200
        problem(client.get("/v1/streams"), 503, "store.unavailable")
        problem(client.get("/v1/streams?top=5"), 503, "store.unavailable")
        problem(client.get("/v1/streams/a/events"), 503, "store.unavailable")
        late.start()
        try:
            deadline = time.monotonic() + 5
            while client.get("/v1/streams/a/events?follow=false").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert client.get("/v1/streams?top=5").json()["streams"] == [], "a failure is not kept"
        finally:
            service.stop()
            late.stop()


def test_it_ends_with_code_0_on_sigterm_with_a_reader_attached(store: StoreOptions) -> None:
    port = free_port()
    code = "import tailrace.config.settings as c, tailrace.http.app as a, tailrace.views as v, sys"
    code += "; sys.exit(a.main(c.load(), v.VIEWS))"
    settings = {
        "VALKEY__URL": store.url,
        "VALKEY__PREFIX": store.prefix,
        "SERVE__PORT": str(port),
        "KAFKA__BOOTSTRAP": NO_BROKER,
    }
    env = os.environ | {f"TAILRACE_{key}": value for key, value in settings.items()}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            deadline = time.monotonic() + 60
            while True:
                try:
                    client.get("/healthz")
                    break
                except httpx.TransportError:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            with client.stream("GET", "/v1/streams/a/events") as response:
                chunks = response.iter_raw()
                assert next(chunks).startswith(b"retry: ")
                process.send_signal(signal.SIGTERM)
                assert b"".join(chunks).rstrip().rpartition(b"\n\n")[2].startswith(b"retry: ")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_two_services_cannot_have_the_same_port(service: ServiceThread) -> None:
    code = (
        "import tailrace.config.settings as c, tailrace.http.app as a, tailrace.views as v; a.main(c.load(), v.VIEWS)"
    )
    env = os.environ | {"TAILRACE_SERVE__PORT": str(service.port)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "PrerequisiteMissing: cannot listen on" in done.stderr.splitlines()[-1]


def test_serving_knows_no_spark() -> None:
    code = "import sys, tailrace.http.app; print(sorted(m for m in sys.modules if m in ('pyspark', 'pyarrow')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

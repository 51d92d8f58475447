"""Feeds over HTTP, on a real server and a real store: exact when resumed, in both forms, fair to others."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tailrace.client.connection import SseFrame, SseReader
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.http.service import LogService
from tailrace.log.event import shard_of
from tailrace.testing.installation import ServiceThread
from tailrace.valkey.shards import StoreOptions
from tests.http.parts import Serve, Streams


@contextmanager
def followed(client: httpx.Client, path: str, **options: Any) -> Iterator[Iterator[SseFrame]]:
    with client.stream("GET", path, **options) as response:
        assert response.status_code == 200, response.read()
        yield frames(response)


def frames(response: httpx.Response) -> Iterator[SseFrame]:
    reader = SseReader()
    for chunk in response.iter_raw():
        yield from reader.feed(chunk)


def data(frame: SseFrame) -> Any:
    return json.loads(frame.data or b"null")


def events(client: httpx.Client, path: str, **options: Any) -> list[Any]:
    with followed(client, path, **options) as found:
        return [data(frame)["data"] for frame in found if frame.event == "message" and frame.data]


def test_a_feed_that_does_not_follow_gives_everything_and_an_end(streams: Streams, client: httpx.Client) -> None:
    streams.write("a", list(range(23)))
    with followed(client, "/v1/streams/a/events?follow=false") as found:
        got = list(found)
    assert [data(f)["data"] for f in got if f.event == "message" and f.data] == list(range(23))
    assert [f.event for f in got if f.event != "message"] == ["caught-up", "end"]
    assert (got[-1].id or "").endswith("~end")


def test_the_answer_is_never_cached_nor_buffered_by_a_proxy(streams: Streams, client: httpx.Client) -> None:
    streams.write("a", [1])
    response = client.get("/v1/streams/a/events?follow=false")
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.text.startswith("retry: 2000\n\n")


def test_a_stream_cut_after_every_event_and_resumed_gives_the_same_sequence(
    streams: Streams, client: httpx.Client
) -> None:
    streams.write("a", list(range(60)), batch=7)
    got, last = [], None
    for _ in range(60):
        headers = {"Last-Event-ID": last or ""}
        with followed(client, "/v1/streams/a/events?from=start", headers=headers) as found:
            frame = next(f for f in found if f.event == "message" and f.data)
        got.append(data(frame)["data"])
        last = frame.id
    assert got == list(range(60))


def test_a_limit_counts_what_was_sent_before_a_resume_and_then_the_answer_is_204(
    streams: Streams, client: httpx.Client
) -> None:
    streams.write("a", list(range(30)))
    path = "/v1/streams/a/events?from=start&limit=10"
    with followed(client, path) as found:
        first = [next(f for f in found if f.event == "message" and f.data) for _ in range(4)]
    with followed(client, path, headers={"Last-Event-ID": first[-1].id}) as found:
        rest = list(found)
    sent = [data(f)["data"] for f in [*first, *rest] if f.event == "message" and f.data]
    assert sent == list(range(10))
    assert rest[-1].event == "end"
    again = client.get(path, headers={"Last-Event-ID": rest[-1].id or ""})
    assert (again.status_code, again.content) == (204, b"")


def test_a_reader_that_waits_at_the_end_resumes_there_even_before_the_first_event(
    streams: Streams, client: httpx.Client
) -> None:
    streams.write("a", [1])
    with followed(client, "/v1/streams/a/events") as found:
        start = next(found)
    assert start.data is None
    streams.write("a", [2, 3])
    got = events(client, "/v1/streams/a/events?limit=2", headers={"Last-Event-ID": start.id})
    assert got == [2, 3]


def test_new_events_arrive_while_following(streams: Streams, client: httpx.Client) -> None:
    with followed(client, "/v1/streams/new/events") as found:
        assert next(f for f in found if f.data).event == "caught-up"
        streams.write("new", ["first"])
        assert data(next(f for f in found if f.data))["data"] == "first"


def test_lines_of_json_carry_the_cursor_and_resume_too(streams: Streams, client: httpx.Client) -> None:
    streams.write("a", list(range(9)))
    response = client.get("/v1/streams/a/events?follow=false", headers={"Accept": "application/x-ndjson"})
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["data"] for line in lines if "event" not in line] == list(range(9))
    assert [line["event"] for line in lines if "event" in line] == ["caught-up", "end"]
    after = lines[3]["cursor"]
    rest = client.get("/v1/streams/a/events", params={"follow": "false", "after": after, "format": "ndjson"})
    assert [json.loads(x)["data"] for x in rest.text.splitlines() if "data" in json.loads(x)] == list(range(4, 9))


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", "text/event-stream"),
        ("*/*", "text/event-stream"),
        ("text/html", "text/event-stream"),
        ("application/x-ndjson", "application/x-ndjson"),
        ("application/x-ndjson, */*", "application/x-ndjson"),
        ("application/x-ndjson;q=0.5, text/event-stream", "text/event-stream"),
        ("text/event-stream;q=0.5, application/x-ndjson;q=0.8", "application/x-ndjson"),
        ("application/x-ndjson;q=0, */*;q=0.1", "text/event-stream"),
    ],
)
def test_the_form_follows_the_header_accept(streams: Streams, client: httpx.Client, accept: str, form: str) -> None:
    response = client.head("/v1/streams/a/events?follow=false", headers={"Accept": accept})
    assert response.headers["content-type"].partition(";")[0] == form


def test_a_value_leaves_as_it_was_produced(streams: Streams, client: httpx.Client) -> None:
    streams.write("a", [b'{"n": 12345678901234567890.10, "b": 1,\r\n "a": 2, "a": 3}'])
    body = client.get("/v1/streams/a/events?follow=false").text
    assert '"data":{"n": 12345678901234567890.10, "b": 1, "a": 2, "a": 3}}\n\n' in body


def test_head_answers_like_get_without_a_stream(streams: Streams, service: ServiceThread, client: httpx.Client) -> None:
    streams.write("a", [1])
    response = client.head("/v1/streams/a/events")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert client.head("/v1/streams/none/events?missing=fail").status_code == 404
    assert service.service.connections == 0


def test_several_streams_come_in_one_feed_merged_by_time(streams: Streams, client: httpx.Client) -> None:
    now = round(time.time() * 1000)
    for i in range(4):
        streams.write("a" if i % 2 else "b", [i], time_ms=now + i)
    got = events(client, "/v1/streams/events?name=a&name=b&follow=false")
    assert got == [0, 1, 2, 3]


ODD = [
    "jobs/nightly",
    "a%2Fb/c",
    "events",
    "x/events",
    "x/days",
    "days",
    "ü ☃/{0}:_",
    "100%25",
    "a//b",
    "/a",
    "a?b#c&d=e+f",
]


@pytest.mark.parametrize("name", ODD)
def test_every_name_has_one_address(streams: Streams, client: httpx.Client, name: str) -> None:
    for other in ODD:
        streams.write(other, [f"of {other}"])
    quoted = quote(name, safe="")
    assert events(client, f"/v1/streams/{quoted}/events?follow=false") == [f"of {name}"]
    assert client.get(f"/v1/streams/{quoted}/days").json()["name"] == name
    assert events(client, "/v1/streams/events", params={"name": name, "follow": "false"}) == [f"of {name}"]


def test_an_escaped_slash_never_divides_a_path(streams: Streams, client: httpx.Client) -> None:
    streams.write("a", [1])
    assert client.get("/v1/streams/a%2Fevents").status_code == 404
    assert client.get("/v1/streams/%FF/events").json()["code"] == "request.invalid"


def test_a_client_that_does_not_read_is_closed_and_others_go_on(streams: Streams, serve: Serve) -> None:
    service = serve(serve__send_timeout="1s", serve__client_bytes="64KiB")
    streams.write("big", [{"n": n, "text": "x" * 20_000} for n in range(2_000)], batch=100)
    with socket.socket() as slow, service.client() as client:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        slow.connect(("127.0.0.1", service.port))
        slow.sendall(b"GET /v1/streams/big/events?from=start HTTP/1.1\r\nHost: x\r\n\r\n")
        deadline = time.monotonic() + 8
        with followed(client, "/v1/streams/big/events?from=start") as found:
            got = (data(frame)["data"]["n"] for frame in found if frame.event == "message" and frame.data)
            assert [next(got) for _ in range(2_000)] == list(range(2_000))
            while service.service.connections > 1 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert service.service.connections == 1
            streams.write("big", [{"n": 2_000}])
            assert next(got) == 2_000
        assert "tailrace_feed_slow_closes_total 1.0" in client.get("/metrics").text
        last = b""
        while chunk := slow.recv(1 << 16):
            last = (last + chunk)[-5:]
        assert last != b"0\r\n\r\n", "a feed that was cut must not look complete"


def test_a_client_that_goes_away_ends_its_feed(streams: Streams, service: ServiceThread, client: httpx.Client) -> None:
    streams.write("a", [1])
    with followed(client, "/v1/streams/a/events") as found:
        next(found)
        assert service.service.connections == 1
    deadline = time.monotonic() + 2
    while service.service.connections and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.service.connections == 0
    assert service.service.part_of("days", LogService).hub.followed == 0


def test_heartbeats_keep_an_idle_feed_alive(streams: Streams, serve: Serve) -> None:
    service = serve(serve__heartbeat="200ms")
    for form, beat in (("sse", b": \n\n"), ("ndjson", b"\n")):
        with service.client() as client, client.stream("GET", f"/v1/streams/a/events?format={form}") as response:
            chunks = response.iter_raw()
            assert beat in (next(chunks), next(chunks), next(chunks))


def test_more_feeds_than_may_be_are_refused_and_told_when_to_come_back(serve: Serve) -> None:
    service = serve(serve__connections=1)
    with service.client() as client, followed(client, "/v1/streams/a/events") as found:
        next(found)
        refused = client.get("/v1/streams/a/events")
        assert (refused.status_code, refused.json()["code"]) == (503, "service.overloaded")
        assert refused.headers["retry-after"] == "2"
        assert client.get("/healthz").status_code == 200
    with service.client() as client:
        while "tailrace_feeds_open 0.0" not in client.get("/metrics").text:
            time.sleep(0.05)  # the service has yet to notice that the first reader has gone
    with service.client() as client, followed(client, "/v1/streams/a/events") as found:
        next(found)


def test_a_service_that_stops_tells_its_readers_to_come_back(streams: Streams, serve: Serve) -> None:
    service = serve()
    streams.write("a", [1])
    with service.client() as client, client.stream("GET", "/v1/streams/a/events?from=start") as response:
        chunks = response.iter_raw()
        seen = next(chunks)
        while b"caught-up" not in seen:
            seen += next(chunks)
        service.server.should_exit = True
        rest = b"".join(chunks)
    assert rest.startswith(b"retry: ")
    assert rest.endswith(b"\n\n")


def test_a_feed_that_fails_later_says_so_in_a_frame_and_ends(
    streams: Streams, client: httpx.Client, valkey_server: EmbeddedValkey, store: StoreOptions
) -> None:
    streams.write("a", list(range(300)), batch=1)
    shard = shard_of("a", store.shards)
    log = store.keys.log(shard, "days", "a")
    with valkey_server.client() as connection:
        last = int((connection.hget(log, "p") or b"0").split()[0]) + 1
        connection.xadd(store.keys.segment(shard, "days", 0, "a"), {"r": b"secret", "t": 1}, id=f"{last}-1")
        connection.hset(log, "p", f"{last} 301 1 1")
    with followed(client, "/v1/streams/a/events?from=start") as found:
        *before, failure = found
    assert [data(frame)["data"] for frame in before if frame.data] == list(range(len(before) - 1))
    assert (failure.id, failure.event, data(failure)["code"]) == (None, "problem", "store.refused")
    assert b"secret" not in (failure.data or b"")

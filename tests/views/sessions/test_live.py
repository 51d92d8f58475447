"""Sessions over HTTP and over the binary WebSocket, on a real server and a real store."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tailrace.testing.installation import ServiceThread, served
from tailrace.valkey.shards import StoreOptions
from tests.http.parts import problem
from tests.views.sessions.foreign import SECOND, Foreign, connected
from tests.views.sessions.foreign import periodic as foreign_periodic
from tests.views.sessions.recorded import MS, T0, Track
from tests.views.sessions.test_feed import configured, expected, lap


@pytest.fixture
def track(store: StoreOptions) -> Track:
    return Track(store)


@pytest.fixture
def service(store: StoreOptions, track: Track) -> Iterator[ServiceThread]:
    with served(store, sessions__key=track.plan.store.key) as running:
        yield running


@pytest.fixture
def http(service: ServiceThread) -> Iterator[httpx.Client]:
    with service.client() as client:
        yield client


def opened(service: ServiceThread, query: str = "", identity: str = "lap", **more: Any) -> connect:
    url = f"{service.url.replace('http', 'ws')}/v1/sessions/{identity}/live?{query}"
    return connect(url, proxy=None, max_size=None, compression=None, **more)


def unpacked(message: bytes) -> dict[str, Any]:
    """Read a message as a browser does: views of the same buffer, each where a multiple of eight is."""
    (length,) = struct.unpack_from("<I", message)
    header: dict[str, Any] = json.loads(message[4 : 4 + length])
    begin = (4 + length + 7) // 8 * 8
    for channel in header.get("channels", ()):
        assert channel["times"] % 8 == 0
        times = np.frombuffer(message, "<i8", channel["n"], begin + channel["times"]).tolist()
        values = channel.get("v")
        if values is None:
            values = np.frombuffer(message, "<f8", channel["n"], begin + channel["values"]).tolist()
        channel["samples"] = list(zip(times, values, strict=True))
    return header


async def heard(connection: ClientConnection, last: str) -> list[dict[str, Any]]:
    """Return messages up to a control message, or to the end of the connection."""
    found: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(20):
            while not found or found[-1].get("event") != last:
                message = await connection.recv()
                assert isinstance(message, bytes)
                found.append(unpacked(message))
    except ConnectionClosed:
        pass
    return found


def samples(messages: list[dict[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for message in messages:
        for channel in message.get("channels", ()):
            found.setdefault(channel["name"], []).extend(channel["samples"])
    return found


def test_sessions_are_listed_and_shown_with_their_channels(track: Track, http: httpx.Client) -> None:
    configured(track)
    track.write(track.open("other"), track.close("other"))
    listed = http.get("/v1/sessions").json()["sessions"]
    assert [each["identity"] for each in listed] == ["other", "lap"]
    assert [each["identity"] for each in http.get("/v1/sessions?state=open&prefix=l&limit=1").json()["sessions"]] == [
        "lap"
    ]
    assert listed[1]["range"] == [str(T0), str(T0 + MS)]
    assert listed[1]["json"]["configBindings"] == [{"identifier": "car-7", "channelOffset": 0}]
    shown = http.get("/v1/sessions/lap").json()
    assert (shown["state"], shown["complete"], shown["buffer"]["trimmed"]) == ("open", True, None)
    assert shown["buffer"]["first"] < shown["buffer"]["last"]
    assert [each["name"] for each in shown["channels"]] == ["speed", "gear", "force"]
    assert shown["channels"][0]["parameters"][0]["unit"] == "km/h"
    config = http.get("/v1/sessions/lap/config").json()
    steps = {each["id"]: each["steps"] for each in config["parameters"]}
    assert steps["vCar:Chassis"]["rational"] == {"coefficients": [0.0, 0.1, 0.0, 0.0, 0.0, 1.0]}
    assert steps["nGear:Chassis"]["text"]["values"] == ["N", "1st", "2nd"]
    assert steps["bClutch:Chassis"]["mask"] == "1"
    assert config["events"][0]["code"] == "OVER"
    problem(http.get("/v1/sessions/none"), 404, "session.not_found")
    problem(http.get("/v1/sessions/none/config"), 404, "session.not_found")
    problem(http.get("/v1/sessions/lap/live"), 400, "request.invalid")
    routes = http.get("/").json()["routes"]
    for path in ("", "/{identity}", "/{identity}/config", "/{identity}/events", "/{identity}/live"):
        assert f"GET /v1/sessions{path}" in routes


def test_events_are_an_event_stream_or_lines(track: Track, http: httpx.Client) -> None:
    configured(track)
    lines = http.get("/v1/sessions/lap/events?follow=false&format=ndjson&channels=vCar").text.splitlines()
    rows = [json.loads(line) for line in lines if line]
    assert [row.get("event") for row in rows] == [None, "caught-up", "end"]
    (channel,) = rows[0]["channels"]
    assert channel == {
        "channel": 1,
        "name": "vCar:Chassis",
        "unit": "km/h",
        "start": str(T0),
        "t": [0, MS],
        "v": [10.0, 20.5],
    }
    assert rows[1]["position"] == rows[0]["position"]
    text = http.get("/v1/sessions/lap/events?follow=false").text
    assert f"id: {rows[0]['cursor']}\ndata: {{" in text
    ended = http.get("/v1/sessions/lap/events", headers={"Last-Event-ID": rows[-1]["cursor"]})
    assert ended.status_code == 204
    for query, words in (
        ("channels=wheel", "vCar:Chassis, nGear:Chassis"),
        ("pixel=20ms&rate=3", "one of them"),
        ("pixel=soon", "duration"),
        ("after=17.3", "cursor"),
        ("nothing=1", "unknown parameter 'nothing'"),
    ):
        answer = http.get(f"/v1/sessions/lap/events?follow=false&{query}")
        assert words in answer.json()["detail"]
        assert answer.status_code == 400
    problem(http.get("/v1/sessions/none/events?missing=fail"), 404, "session.not_found")


def test_a_message_that_cannot_be_read_is_told_and_counted(track: Track, http: httpx.Client) -> None:
    def counted() -> float:
        name = "tailrace_session_bursts_unread_total "
        [line] = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
        return float(line.split(" ")[1])

    configured(track)
    key, number = track.shards.keys.stream(track.stream()), track.hash()["streamSessionId"]
    track.shards.run_keyed([(key, ("XADD", key, "*", "id", number, "data", b"\xffnot a block"))])
    before = counted()
    assert '"unreadable"' in http.get("/v1/sessions/lap/events?follow=false&format=ndjson").text
    assert counted() == before + 1


async def test_messages_are_arrays_that_a_browser_can_use_as_they_are(track: Track, service: ServiceThread) -> None:
    configured(track)
    async with opened(service, "from=start") as connection:
        got = await heard(connection, "caught-up")
    assert samples(got) == {
        "vCar:Chassis": [(T0, 10.0), (T0 + MS, 20.5)],
        "nGear:Chassis": [(T0, "2nd"), (T0 + 1, "?")],
        "bClutch:Chassis": [(T0, 0.0), (T0 + 1, 1.0)],
        "force": [(T0, [1.0, 2.0, 3.0])],
    }
    assert [event["text"] for message in got for event in message.get("events", ())] == ["too fast"]
    assert got[0]["json"]["state"] == "open"
    assert got[-1]["position"] == got[-2]["position"]


async def test_a_viewer_resumes_after_the_last_id(track: Track, service: ServiceThread) -> None:
    track.write(track.open())
    lap(track, 2)
    async with opened(service, "from=start&pixel=3ms") as connection:
        got = await heard(connection, "caught-up")
    await asyncio.to_thread(lap, track, 2, 2)
    async with opened(service, f"pixel=3ms&after={got[-1]['id']}") as connection:
        got += await heard(connection, "caught-up")
        await asyncio.to_thread(track.write, track.close())
        rest = await heard(connection, "end")
        got += rest
        await connection.wait_closed()
    assert rest[-1]["reason"] == "closed"
    assert connection.close_code == 1000
    async with opened(service, "from=start&pixel=3ms") as connection:
        whole = await heard(connection, "end")
    assert samples(got) == samples(whole)
    assert samples(whole)["1"][-1] == expected(39)[0]


async def test_what_cannot_be_served_is_refused_before_the_upgrade(track: Track, service: ServiceThread) -> None:
    configured(track)
    for query, status in (("channels=wheel", 400), ("missing=fail&after=x", 400), ("nothing=1", 400), ("rate=x", 400)):
        with pytest.raises(InvalidStatus) as refused:
            await opened(service, query).__aenter__()
        assert refused.value.response.status_code == status
    with pytest.raises(InvalidStatus) as refused:
        await opened(service, origin="https://elsewhere.example").__aenter__()
    assert refused.value.response.status_code == 403
    async with opened(service, "from=end", origin=service.url):
        pass


@pytest.mark.parametrize("policy", ["drop", "close"])
async def test_a_viewer_that_stops_reading_is_dropped_or_closed(store: StoreOptions, policy: str) -> None:
    limits = {"sessions__client_bytes": 1 << 20, "sessions__slow": policy, "serve__client_bytes": 1 << 16}
    with connected(store) as client, served(store, **limits) as service, socket.socket() as small:
        mine = Foreign(client, f"{store.prefix}-cars", f"{store.prefix}-lap").open()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        small.connect(("127.0.0.1", service.port))
        small.setblocking(False)
        async with opened(service, "from=end", mine.identity, sock=small, max_queue=1) as connection:
            await heard(connection, "caught-up")
            connection.transport.pause_reading()
            noise = np.random.default_rng(1).random(100_000).tolist()
            for i in range(16):
                await asyncio.to_thread(mine.send, foreign_periodic(1, T0 + i * SECOND, 1, noise))
            async with opened(service, "from=end", mine.identity) as other:  # what it hears first, the service has read
                await heard(other, "caught-up")
            connection.transport.resume_reading()
            got = await heard(connection, "dropped")
            assert len(samples(got)["1"]) < 1_600_000
            if policy == "close":
                assert (connection.close_code, "bytes behind" in (connection.close_reason or "")) == (1013, True)
                return
            assert (got[-1]["reason"], got[-1]["bytes"] > 1 << 20) == ("slow", True)
            await asyncio.to_thread(mine.send, foreign_periodic(1, T0, 1, [1.0]))
            await asyncio.to_thread(mine.close)
            rest = await heard(connection, "end")
            assert rest[0]["json"]["state"] == "open"
            assert samples(rest)["1"][-1] == (T0, 1.0)
            assert rest[-1]["reason"] == "closed"


async def test_a_service_that_stops_tells_its_viewers_to_come_back(store: StoreOptions, track: Track) -> None:
    track.write(track.open())
    with served(store, sessions__key=track.plan.store.key) as service:
        async with opened(service) as connection:
            await heard(connection, "caught-up")
            await asyncio.to_thread(service.stop)
            await heard(connection, "end")
            assert connection.close_code == 1012

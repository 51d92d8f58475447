"""The telemetry protocol on a real server, seen by a client that knows its description and nothing of Tailrace."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import lz4.block
import lz4.frame
import pytest

from tailrace import SessionWriter
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.testing.installation import ServiceThread, served
from tailrace.valkey.shards import StoreOptions
from tailrace.views.sessions import rta as viewers
from tests.http.parts import problem
from tests.views.sessions.foreign import (
    T0,
    Foreign,
    burst,
    connected,
    event,
    packed,
    periodic,
    row,
    session_json,
    time_range,
    timestamped,
)
from tests.views.sessions.rta_client import MEGABYTE, SUBPROTOCOL, RtaClient, request


@pytest.fixture
def client(store: StoreOptions) -> Iterator[Any]:
    with connected(store) as made:
        yield made


@pytest.fixture(scope="module")
def service(valkey_server: EmbeddedValkey) -> Iterator[ServiceThread]:
    with served(StoreOptions(valkey_server.url, prefix="rta")) as running:
        yield running


@pytest.fixture
def session(client: Any, store: StoreOptions) -> Foreign:
    return Foreign(client, f"{store.prefix}-cars", f"{store.prefix}-lap").open()


def values(samples: dict[tuple[int, int], bytes]) -> dict[tuple[int, int], float]:
    return {at: struct.unpack("<d", data)[0] for at, data in samples.items()}


# The handshake.


def test_a_request_that_is_no_upgrade_is_answered_with_400(service: ServiceThread, session: Foreign) -> None:
    with service.client() as http:
        answer = http.get(f"/rta/v2/sessions/{session.identity}/stream")
        assert SUBPROTOCOL in problem(answer, 400, "request.invalid")
        assert http.head(f"/rta/v2/sessions/{session.identity}/stream").status_code == 400
        half = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Protocol": SUBPROTOCOL}
        assert http.get(f"/rta/v2/sessions/{session.identity}/stream", headers=half).status_code == 400


def test_the_subprotocol_is_found_among_others_and_nothing_is_compressed_twice(
    service: ServiceThread, session: Foreign
) -> None:
    with RtaClient(service.url, session.identity, subprotocols=["chat", SUBPROTOCOL]) as viewer:
        assert viewer.receive() is not None


def test_an_unknown_session_is_closed_normally_without_a_message(service: ServiceThread) -> None:
    with RtaClient(service.url, "nobody") as viewer:
        assert viewer.to_the_end() == []
        assert viewer.closed is not None
        assert viewer.closed[0] == 1000


def test_a_session_without_json_is_not_there_yet(service: ServiceThread, client: Any, store: StoreOptions) -> None:
    later = Foreign(client, store.prefix, f"{store.prefix}-later")
    client.hset(later.key, mapping={"streamSessionId": 1, "streamName": store.prefix, "streamPosition": "0-0"})
    with RtaClient(service.url, later.identity) as viewer:
        assert (viewer.to_the_end(), (viewer.closed or (0, ""))[0]) == ([], 1000)
    later.open()
    with RtaClient(service.url, later.identity) as viewer:
        viewer.receive()
        assert viewer.session["state"] == "open"


@pytest.mark.parametrize("identity", ["a/b", "50 % & more?", "Größe #1", "..", "%2F"])
def test_an_identity_may_be_any_text(service: ServiceThread, client: Any, store: StoreOptions, identity: str) -> None:
    made = Foreign(client, store.prefix, f"{identity}{store.prefix}").open()
    with RtaClient(service.url, made.identity) as viewer:
        viewer.receive()
        assert viewer.session["identity"] == made.identity


# What comes, and in which order.


def test_first_the_session_alone_then_its_range_then_updates_of_both(service: ServiceThread, session: Foreign) -> None:
    session.send(periodic(1, T0, 10, [1.0]), event(1, T0, "x"), start=T0, end=T0 + 10)
    with RtaClient(service.url, session.identity) as viewer:
        first, second = viewer.receive(), viewer.receive()
        assert first is not None
        assert second is not None
        assert (first.kinds, second.kinds) == (["session"], ["range"])
        assert viewer.range == (T0, T0 + 10)
        assert viewer.quiet()
        session.send(periodic(1, T0 + 20, 10, [1.0]), event(1, T0, "x"), start=T0, end=T0 + 20)
        viewer.until(lambda v: v.range == (T0, T0 + 20))
        session.describe(details={"driver": "Anna"})
        viewer.until(lambda v: v.session.get("details"))
        assert {kind for got in viewer.bursts for kind in got.kinds} == {"session", "range"}


def test_without_a_range_there_is_only_the_session(service: ServiceThread, session: Foreign) -> None:
    with RtaClient(service.url, session.identity) as viewer:
        viewer.receive()
        assert viewer.quiet()


def test_ranges_alone_come_about_ten_times_a_second_and_the_last_one_is_right(
    service: ServiceThread, session: Foreign, client: Any
) -> None:
    with RtaClient(service.url, session.identity) as viewer:
        viewer.receive()
        pipeline = client.pipeline()
        for i in range(200):
            data = packed(periodic(1, T0 + i, 1, [1.0]), time_range(T0, T0 + i))
            pipeline.xadd(f"stream:{session.stream}", {"id": session.number, "data": data})
        pipeline.execute()
        viewer.until(lambda v: v.range == (T0, T0 + 199))
        assert len(viewer.bursts) < 100


def test_data_comes_only_after_a_subscription_which_only_widens(service: ServiceThread, session: Foreign) -> None:
    def send(i: int) -> None:
        session.send(
            periodic(1, T0 + i, 1, [1.0]),
            timestamped(2, [T0 + i], [2.0]),
            row([3, 4], T0 + i, [3.0, 4.0]),
            event(7, T0 + i, "seven"),
            start=T0,
            end=T0 + i,
        )

    steps: list[tuple[dict[str, Any], list[str]]] = [
        ({}, ["range"]),
        ({"channels": [1]}, ["periodic", "range"]),
        ({"channels": [4]}, ["periodic", "row", "range"]),
        ({"channels": []}, ["periodic", "row", "range"]),
        ({"events": True}, ["periodic", "row", "event", "range"]),
        ({"everything": True}, ["periodic", "timestamped", "row", "event", "range"]),
        ({"channels": [9]}, ["periodic", "timestamped", "row", "event", "range"]),
    ]
    with RtaClient(service.url, session.identity) as viewer:
        viewer.receive()
        for i, (asked, kinds) in enumerate(steps):
            viewer.subscribe(**asked)
            while not viewer.quiet(0.2):
                pass
            send(i)
            viewer.until(lambda v, end=T0 + i: v.range == (T0, end))
            assert viewer.bursts[-1].kinds == kinds, asked


def test_after_a_subscription_the_stream_is_read_back_and_nothing_comes_twice(
    service: ServiceThread, session: Foreign, client: Any
) -> None:
    other = Foreign(client, session.stream, f"{session.identity}-other").open()
    for i in range(40):
        session.send(periodic(1, T0 + i, 1, [float(i)]), event(5, T0 + i, str(i)), start=T0, end=T0 + i)
        other.send(periodic(1, T0 + 1000 + i, 1, [0.0]), event(5, T0 + 1000 + i, "other"), start=T0, end=T0 + i)
    session.describe(version="2")
    with RtaClient(service.url, session.identity) as viewer:
        viewer.receive()
        viewer.subscribe(channels=[1])
        viewer.until(lambda v: len(v.samples) == 40)
        viewer.subscribe(channels=[1], events=True)
        viewer.until(lambda v: len(v.events) == 40)
        for i in range(40, 50):
            session.send(periodic(1, T0 + i, 1, [float(i)]), event(5, T0 + i, str(i)), start=T0, end=T0 + i)
        viewer.until(lambda v: len(v.samples) == 50 == len(v.events))
        assert values(viewer.samples) == {(1, T0 + i): float(i) for i in range(50)}
        assert sum(len(got.samples) for got in viewer.bursts) == 50 == sum(len(got.events) for got in viewer.bursts)
        # What was said of the session before is not said again.
        assert [session.get("version") for got in viewer.bursts for session in got.sessions] == ["2"]


def test_trimming_while_the_stream_is_read_back_leaves_out_what_is_gone(
    service: ServiceThread, session: Foreign, client: Any
) -> None:
    chance = random.Random(3)
    ids = [session.append(periodic(1, T0 + i, 1, [chance.random()] * 4000)) for i in range(400)]
    with RtaClient(service.url, session.identity, max_queue=1) as viewer:
        viewer.receive()
        viewer.subscribe(everything=True)
        viewer.until(lambda v: v.samples)
        client.xdel(f"stream:{session.stream}", *ids[::2])
        client.xtrim(f"stream:{session.stream}", minid=ids[350], approximate=False)
        live = [
            session.send(event(1, T0, "x"), periodic(1, T0 + i, 1, [0.0]), start=T0, end=T0) for i in range(400, 405)
        ]
        assert len(live) == 5
        viewer.until(lambda v: {T0 + i for i in (399, 404)} <= {at for _, at in v.samples})
        while not viewer.quiet():
            pass
        got = {at - T0 for _, at in viewer.samples}
        assert got >= {*range(351, 400, 2), *range(400, 405)}


def test_a_session_beside_others_in_its_stream_is_sent_alone(
    service: ServiceThread, session: Foreign, client: Any
) -> None:
    other = Foreign(client, session.stream, f"{session.identity}-other").open()
    with RtaClient(service.url, session.identity) as mine, RtaClient(service.url, other.identity) as theirs:
        for viewer in (mine, theirs):
            viewer.receive()
            viewer.subscribe(everything=True)
        for i in range(30):
            session.send(periodic(1, T0 + i, 1, [1.0]), start=T0, end=T0 + i)
            other.send(periodic(2, T0 + i, 1, [2.0]), start=T0, end=T0 + i)
        for viewer, channel in ((mine, 1), (theirs, 2)):
            viewer.until(lambda v: len(v.samples) == 30)
            assert {at for at, _ in viewer.samples} == {channel}


# How it ends.


@pytest.mark.parametrize("state", ["closed", "truncated", "failed"])
def test_a_session_that_ends_is_closed_normally_after_its_last_json(
    service: ServiceThread, session: Foreign, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "SETTLE_S", 0.1)
    session.send(periodic(1, T0, 1, [1.0]), start=T0, end=T0)
    with RtaClient(service.url, session.identity) as viewer:
        viewer.subscribe(everything=True)
        viewer.until(lambda v: v.samples)
        session.send(periodic(1, T0 + 1, 1, [1.0]), start=T0, end=T0 + 1)
        session.close(state)
        last = viewer.to_the_end()[-1]
        assert (last.kinds, viewer.session["state"], len(viewer.samples)) == (["session"], state, 2)
        assert viewer.closed == (1000, "the session has ended")


def test_who_comes_after_the_end_gets_what_is_still_there(service: ServiceThread, session: Foreign) -> None:
    for i in range(20):
        session.send(periodic(1, T0 + i, 1, [1.0]), event(1, T0 + i, "x"), start=T0, end=T0 + i)
    session.close()
    with RtaClient(service.url, session.identity) as viewer:
        viewer.subscribe(everything=True)
        viewer.subscribe(events=True)
        viewer.to_the_end()
        assert (len(viewer.samples), len(viewer.events), viewer.session["state"]) == (20, 20, "closed")
        assert viewer.closed == (1000, "the session has ended")


def test_an_abandoned_session_may_speak_again(service: ServiceThread, session: Foreign) -> None:
    with RtaClient(service.url, session.identity) as viewer:
        viewer.receive()
        viewer.subscribe(everything=True)
        session.describe(state="abandoned")
        viewer.until(lambda v: v.session["state"] == "abandoned")
        assert viewer.quiet()
        session.describe(state="open")
        session.send(periodic(1, T0, 1, [1.0]), start=T0, end=T0)
        viewer.until(lambda v: v.samples)
        assert viewer.session["state"] == "open"


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("subscribe", 1003),
        (b"\x12\x7f\x01", 1007),
        (b"\xff" * 20, 1007),
        (request(channels=range(100_001)), 1009),
        (bytes(300_000), 1009),
    ],
)
def test_what_is_no_request_closes_the_connection_with_a_reason(
    service: ServiceThread, session: Foreign, frame: Any, code: int
) -> None:
    with RtaClient(service.url, session.identity) as viewer:
        viewer.ws.send(frame)
        viewer.to_the_end()
        assert viewer.closed is not None
        assert viewer.closed[0] == code
        assert viewer.closed[1]


def test_too_many_channels_by_and_by_close_it_too(service: ServiceThread, session: Foreign) -> None:
    with RtaClient(service.url, session.identity) as viewer:
        viewer.subscribe(channels=range(60_000))
        viewer.subscribe(channels=range(60_000, 110_000))
        viewer.to_the_end()
        assert viewer.closed is not None
        assert viewer.closed[0] == 1008


def test_requests_of_later_versions_are_ignored(service: ServiceThread, session: Foreign) -> None:
    with RtaClient(service.url, session.identity) as viewer:
        viewer.receive()
        for frame in (b"", b"\x0a\x03abc", b"\x1a\x02ab"):
            viewer.ws.send(frame)
        assert viewer.quiet()
        viewer.ws.send(b"\x0a\x03abc" + request(everything=True))
        session.append(periodic(1, T0, 1, [1.0]))
        assert viewer.until(lambda v: v.samples).closed is None


# The bytes.


def test_who_subscribes_to_everything_gets_the_stored_bytes(service: ServiceThread, session: Foreign) -> None:
    stored = [packed(periodic(i, T0, 1, [1.0] * 100), event(1, T0, "x"), time_range(T0, T0 + i)) for i in range(1, 6)]
    with RtaClient(service.url, session.identity) as viewer:
        viewer.subscribe(everything=True, events=True)
        session.append(event(1, T0, "from here on"))
        viewer.until(lambda v: v.events)
        for data in stored:
            session.raw(data)
        assert [viewer.ws.recv(20) for _ in stored] == stored


def test_other_containers_are_packed_anew_and_what_cannot_be_read_is_left_out(
    service: ServiceThread, session: Foreign
) -> None:
    data = burst(periodic(1, T0, 1, [1.0] * 50), time_range(T0, T0))
    large = burst(periodic(1, T0 + 5, 1, [1.0] * ((MEGABYTE - 60) // 8)))
    assert MEGABYTE - 64 < len(large) <= MEGABYTE
    around = [burst(session_json("[" + " " * size + "]")) for size in range(MEGABYTE - 11, MEGABYTE - 8)]
    under, exact, over = around
    assert [len(each) - MEGABYTE for each in around] == [-1, 0, 1]
    with RtaClient(service.url, session.identity) as viewer:
        viewer.subscribe(everything=True)
        session.append(periodic(2, T0, 1, [1.0]))
        viewer.until(lambda v: v.samples)
        for stored in (lz4.frame.compress(data), lz4.block.compress(data), data):
            session.raw(stored)
        for bad in (b"", b"no burst", bytes(1000), lz4.block.compress(bytes(50 << 20), store_size=False)):
            session.raw(bad)
        session.raw(lz4.block.compress(over, store_size=False))
        session.raw(lz4.block.compress(large, store_size=False))
        session.raw(lz4.block.compress(under, store_size=False))
        session.raw(lz4.block.compress(exact, store_size=False))
        session.append(event(1, T0, "never asked for"), time_range(T0, T0 + 1))
        frames = [viewer.ws.recv(20) for _ in range(6)]
        assert all(lz4.block.decompress(frame, uncompressed_size=len(data)) == data for frame in frames[:3])
        opened = [lz4.block.decompress(frame, uncompressed_size=MEGABYTE) for frame in frames[3:]]
        assert opened == [large, under, exact]
        last = viewer.receive()
        assert last is not None
        assert last.ranges == [(T0, T0 + 1)]


# What our own writer writes.


def test_a_session_of_the_writer_library_is_listed_and_followed(service: ServiceThread, store: StoreOptions) -> None:
    identity, config = f"{store.prefix}/own", {"car": {"channels": [{"id": 1, "name": "v", "type": "f64"}]}}
    with SessionWriter(store.url, stream=f"{store.prefix}-own", writer="w", prefix="rta") as writer:
        bound = {"configBindings": [{"identifier": f"{store.prefix}-cfg", "channelOffset": 0}], "details": {"lap": 1}}
        writer.open(identity, bound, {f"{store.prefix}-cfg": config})
        writer.flush()
        with RtaClient(service.url, identity) as viewer, service.client() as http:
            first = viewer.receive()
            assert first is not None
            assert (first.kinds, viewer.session["state"]) == (["session"], "open")
            viewer.subscribe(everything=True, events=True)
            for i in range(50):
                writer.periodic(1, T0 + 1000 * i, 10, [float(j) for j in range(100)])
                writer.event(3, T0 + 1000 * i, "car", f"number {i}")
                writer.flush()
                shown = http.get(f"/rta/v2/sessions/{quote(identity, safe='')}").json()["timeRange"]
                assert shown == {"startTime": T0, "endTime": T0 + 1000 * i + 990}  # never older than the stream
            viewer.until(lambda v: len(v.samples) == 5000 and len(v.events) == 50)
            assert viewer.range == (T0, T0 + 49 * 1000 + 990)
            (found,) = [s for s in http.get("/rta/v2/sessions").json()["sessions"] if s["identity"] == identity]
            assert found == http.get(f"/rta/v2/sessions/{quote(identity, safe='')}").json()
            assert found["timeRange"] == {"startTime": T0, "endTime": T0 + 49 * 1000 + 990}
            assert (found["configBindings"], found["details"]) == (bound["configBindings"], {"lap": 1})
            assert http.get(f"/rta/v2/configs/{store.prefix}-cfg").json() == config
            writer.close_session("truncated")
            assert viewer.to_the_end()[-1].kinds[-1] == "session"
            assert (viewer.session["state"], viewer.closed) == ("truncated", (1000, "the session has ended"))

"""Viewers of sessions that are slow, gone, or many; and a service that dies under them."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from tailrace.api.answers import Closing
from tailrace.testing.installation import ServiceProcess, ServiceThread, served
from tailrace.valkey.shards import Nodes, StoreOptions
from tailrace.views.sessions import rta as viewers
from tailrace.views.sessions.reader import StreamHub
from tailrace.views.sessions.rta import Viewer
from tailrace.views.sessions.settings import SessionsSettings
from tailrace.views.sessions.streams import LiveSessions, Located
from tests.views.sessions.foreign import T0, Foreign, connected, event, packed, periodic, session_json
from tests.views.sessions.rta_client import SUBPROTOCOL, RtaClient, decode, request

ALL = request(everything=True, events=True)


@pytest.fixture
def client(store: StoreOptions) -> Iterator[Any]:
    with connected(store) as made:
        yield made


@pytest.fixture
def session(client: Any, store: StoreOptions) -> Foreign:
    return Foreign(client, f"{store.prefix}-cars", f"{store.prefix}-lap").open()


@asynccontextmanager
async def hub_of(options: StoreOptions, ring_bytes: int = 64 << 20) -> AsyncIterator[StreamHub]:
    nodes = Nodes(options)
    try:
        async with aclosing(StreamHub(LiveSessions(nodes), ring_bytes)) as hub:
            yield hub
    finally:
        await nodes.close()


@asynccontextmanager
async def viewing(hub: StreamHub, identity: str, **options: Any) -> AsyncIterator[tuple[Viewer, Any]]:
    """A viewer who wants everything and has got what comes first, and how to pull what comes next."""
    viewer = Viewer(hub, identity, SessionsSettings(**options))
    messages: AsyncGenerator[bytes, None] = viewer.messages()
    assert viewer.hear(ALL) is None

    async def pull() -> bytes | None:
        async with asyncio.timeout(20):
            return await anext(messages, None)

    try:
        assert decode(await pull() or b"").kinds == ["session"]
        yield viewer, pull
    finally:
        await messages.aclose()


async def level(hub: StreamHub, session: Foreign) -> None:
    """Wait until the hub has all that was written."""
    waiter = asyncio.Event()
    async with asyncio.timeout(20), hub.follow(session.stream, waiter) as tap:
        while tap.head < await hub.live.tail(session.stream):
            await waiter.wait()
            waiter.clear()


def metric(running: ServiceThread, name: str) -> float:
    with running.client() as http:
        [line] = [line for line in http.get("/metrics").text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split(" ")[1])


def happens(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


# What is shared.


async def test_all_who_want_the_same_are_given_the_same_bytes(store: StoreOptions, session: Foreign) -> None:
    async with (
        hub_of(store) as hub,
        viewing(hub, session.identity) as (_, first),
        viewing(hub, session.identity) as (_, second),
        hub.follow(session.stream, asyncio.Event()) as tap,
    ):
        some = [Viewer(hub, session.identity, SessionsSettings()) for _ in range(2)]
        streams = [viewer.messages() for viewer in some]
        for viewer, messages in zip(some, streams, strict=True):
            viewer.hear(request(channels=[1, 2]))
            assert await anext(messages)
        waits = [asyncio.ensure_future(anext(messages)) for messages in streams]
        whole = [asyncio.ensure_future(pull()) for pull in (first, second)]
        await asyncio.sleep(0.1)
        session.append(periodic(1, T0, 1, [1.0]), periodic(3, T0, 1, [1.0]))
        one, other = [await wait for wait in waits]
        assert one is other
        assert [channel for channel, _, _ in decode(one).samples] == [1]
        assert await whole[0] is await whole[1] is (tap.after((0, 0)) or tap.after(tap.base) or [])[-1].data
        for messages in streams:
            await messages.aclose()
        assert len(hub.taps) == 1


ORDERS = ["".join("w" if i in at else "r" for i in range(4)) for at in combinations(range(4), 2)]
"""Every order of two steps of a writer (w) and two of a reader (r)."""


@pytest.mark.parametrize("order", ORDERS)
async def test_hash_then_stream_and_tail_then_hash_lose_nothing_in_any_order(
    store: StoreOptions, session: Foreign, client: Any, order: str
) -> None:
    new = '{"state":"new"}'
    async with hub_of(store) as hub:
        found: list[Any] = []
        writes = iter((lambda: client.hset(session.key, "json", new), lambda: session.append(session_json(new))))
        reads = iter((lambda: hub.live.tail(session.stream), lambda: hub.live.get(session.identity)))
        for who in order:
            if who == "w":
                next(writes)()
            else:
                found.append(await next(reads)())
        tail, located = found
        assert isinstance(located, Located)
        later = [decode(entry.data).sessions[-1] for entry in await hub.live.read(session.stream, tail, 10)]
        assert located.json == new or later == [{"state": "new"}]


# Those who fall behind.


async def test_a_viewer_that_the_ring_no_longer_holds_reads_the_store_and_misses_nothing(
    store: StoreOptions, session: Foreign, client: Any
) -> None:
    other = Foreign(client, session.stream, f"{session.identity}-other").open()
    async with hub_of(store, ring_bytes=1 << 17) as hub, viewing(hub, session.identity) as (viewer, pull):
        for i in range(100):
            session.append(event(1, T0 + i, "x"))
            other.raw(os.urandom(20_000))
        got: list[int] = []
        while len(got) < 100:
            got += [at - T0 for _, at, _ in decode(await pull() or b"").events]
        assert got == list(range(100))
        assert (viewer.dropped_bursts, viewer.unread) == (0, 0)


async def test_what_came_between_two_subscriptions_is_not_read_back_again(
    store: StoreOptions, session: Foreign
) -> None:
    def sent(at: int) -> None:
        session.append(periodic(1, T0 + at, 1, [1.0]), periodic(2, T0 + at, 1, [1.0]))

    sent(0)
    async with hub_of(store) as hub:
        viewer, got = Viewer(hub, session.identity, SessionsSettings()), list[tuple[int, int]]()
        messages = viewer.messages()
        await anext(messages)
        for at in (1, 2):  # both come before there is time to read back
            viewer.hear(request(channels=[at]))
            sent(at)
            await level(hub, session)
            got += [(channel, time - T0) for channel, time, _ in decode(await anext(messages)).samples]
        async with asyncio.timeout(20):
            while len(got) < 6:
                got += [(channel, time - T0) for channel, time, _ in decode(await anext(messages)).samples]
        await messages.aclose()
        assert sorted(got) == [(channel, at) for channel in (1, 2) for at in range(3)]


async def test_a_viewer_too_far_behind_goes_on_at_the_end_and_is_told_what_it_missed(
    store: StoreOptions, session: Foreign
) -> None:
    async with hub_of(store) as hub, viewing(hub, session.identity, client_bytes="100KiB", backfill="0s") as (_, pull):
        sizes = []
        for i in range(30):
            sizes.append(len(packed(event(1, T0 + i, os.urandom(4000).hex()))))
            session.append(event(1, T0 + i, os.urandom(4000).hex()))
        session.describe(version="2", details={"lap": 3})
        await level(hub, session)
        burst = decode(await pull() or b"")
        assert burst.kinds == ["session"]
        (update,) = burst.sessions
        assert (update["version"], update["details"]) == ("2", {"lap": 3})
        assert update["tailraceDropped"]["bursts"] == 31
        assert abs(update["tailraceDropped"]["bytes"] - sum(sizes)) < 2000
        session.append(event(2, T0, "after"))
        assert decode(await pull() or b"").events == [(2, T0, "after")]


async def test_a_viewer_too_far_behind_is_closed_if_that_is_configured(store: StoreOptions, session: Foreign) -> None:
    options = {"client_bytes": "100KiB", "slow": "close"}
    async with hub_of(store) as hub, viewing(hub, session.identity, **options) as (viewer, pull):
        for i in range(30):
            session.append(event(1, T0 + i, os.urandom(4000).hex()))
        await level(hub, session)
        while await pull() is not None:
            pass
        assert viewer.closing.code == 1013
        assert "sessions.client_bytes" in viewer.closing.reason


async def test_a_session_that_is_gone_or_began_anew_is_noticed_in_the_silence(
    store: StoreOptions, session: Foreign, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "CHECK_S", 0.1)
    chatty = Foreign(client, session.stream, f"{session.identity}-other").open()

    async def chat() -> None:
        while True:  # its stream is never silent
            chatty.append(event(1, T0, "x"))
            await asyncio.sleep(0.01)

    chatting = asyncio.create_task(chat())
    async with hub_of(store) as hub, viewing(hub, session.identity) as (viewer, pull):
        Foreign(client, session.stream, session.identity).open()
        assert await pull() is None
        assert viewer.closing.code == 1012
    chatting.cancel()
    async with hub_of(store) as hub, viewing(hub, session.identity) as (viewer, pull):
        client.delete(session.key)
        assert await pull() is None
        assert viewer.closing == Closing(1000, "the session is no longer kept")


@pytest.mark.parametrize(("backfill", "wanted"), [("0s", 0), ("10s", 1), ("30s", 2), ("10m", 3)])
async def test_the_stream_is_read_back_for_as_long_as_is_configured(
    store: StoreOptions, session: Foreign, client: Any, backfill: str, wanted: int
) -> None:
    key, now = f"stream:{session.stream}", int(client.time()[0]) * 1000
    client.delete(key)
    for age_ms in (50_000, 20_000, 5_000):
        data = packed(event(1, T0 - age_ms, "old"))
        client.xadd(key, {"id": session.number, "data": data}, id=f"{now - age_ms}-1")
    async with hub_of(store) as hub, viewing(hub, session.identity, backfill=backfill) as (_, pull):
        got = [decode(await pull() or b"").events for _ in range(wanted)]
        assert len(got) == wanted
        waiting = asyncio.ensure_future(pull())
        session.append(event(2, T0, "live"))
        assert decode(await waiting or b"").events == [(2, T0, "live")]


async def test_a_session_is_over_when_its_stream_says_so_and_not_before(
    store: StoreOptions, session: Foreign, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "SETTLE_S", 0.05)
    session.append(event(1, T0, "first"))
    client.hset(session.key, "json", '{"state":"closed"}')  # a writer that was stopped between its two steps
    async with hub_of(store) as hub, viewing(hub, session.identity) as (viewer, pull):
        assert decode(await pull() or b"").events == [(1, T0, "first")]
        waiting = asyncio.ensure_future(pull())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        session.append(event(1, T0, "last"))
        session.append(session_json('{"state":"closed"}'))
        assert decode(await waiting or b"").events == [(1, T0, "last")]
        assert decode(await pull() or b"").kinds == ["session"]
        assert await pull() is None
        assert viewer.closing.reason == "the session has ended"


# Real connections.


def narrow(port: int) -> socket.socket:
    """A connection that holds little of what was not read."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    made.connect(("127.0.0.1", port))
    return made


def data(i: int) -> bytes:
    return periodic(1, T0 + i * 1000, 1, struct.unpack("<7000d", random.Random(i).randbytes(56_000)))


def subscribed(running: ServiceThread, session: Foreign, **more: Any) -> RtaClient:
    viewer = RtaClient(running.url, session.identity, **more)
    viewer.subscribe(everything=True, events=True)
    session.append(event(1, T0, "here"))
    return viewer.until(lambda v: v.events)


def flood(session: Foreign, fast: RtaClient, count: int) -> None:
    """Write more than any buffer holds; a viewer that reads gets all of it meanwhile."""
    for i in range(0, count, 10):
        for j in range(i, i + 10):
            session.append(data(j))
        fast.until(lambda v, last=T0 + (i + 9) * 1000: (1, last) in v.samples)
    assert {(1, T0 + i * 1000) for i in range(count)} <= fast.samples.keys()


def test_a_viewer_that_stops_reading_slows_nobody_and_is_told_what_it_missed(
    store: StoreOptions, session: Foreign
) -> None:
    with served(store, sessions__client_bytes="1MiB") as running:
        slow = subscribed(running, session, max_queue=1, sock=narrow(running.port))
        with slow, subscribed(running, session) as fast:
            flood(session, fast, 150)
            slow.until(lambda v: "tailraceDropped" in v.session)
            session.append(event(2, T0, "after"))
            slow.until(lambda v: (2, T0, "after") in v.events)
            got = sum(bool(burst.samples) for burst in slow.bursts)
            assert got + slow.session["tailraceDropped"]["bursts"] == 150
            assert "tailraceDropped" not in fast.session
        happens(lambda: metric(running, "tailrace_viewers_open") == 0)
        assert metric(running, "tailrace_viewer_dropped_bursts_total") == 150 - got


def test_a_viewer_that_never_reads_again_is_dropped_with_all_that_waits_for_it(
    store: StoreOptions, session: Foreign
) -> None:
    with served(store, serve__send_timeout="500ms") as running:
        slow = subscribed(running, session, max_queue=1, sock=narrow(running.port))
        with subscribed(running, session) as fast:
            flood(session, fast, 150)
            happens(lambda: metric(running, "tailrace_viewer_slow_closes_total") == 1)
            happens(lambda: metric(running, "tailrace_viewers_open") == 1)
            session.append(event(2, T0, "after"))
            fast.until(lambda v: (2, T0, "after") in v.events)
        with pytest.raises(ConnectionClosed):
            slow.until(lambda v: False)


def test_a_service_that_ends_tells_its_viewers_to_come_back(store: StoreOptions, session: Foreign) -> None:
    with served(store) as running:
        viewer = subscribed(running, session)
    viewer.to_the_end()
    assert viewer.closed is not None
    assert viewer.closed[0] == 1012


def test_a_client_that_does_not_answer_pings_is_closed(store: StoreOptions, session: Foreign) -> None:
    with (
        served(store, sessions__ping="1s") as running,
        socket.create_connection(("127.0.0.1", running.port)) as raw,
    ):
        raw.settimeout(20)
        head = f"GET /rta/v2/sessions/{session.identity}/stream HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n"
        head += "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        raw.sendall(f"{head}Sec-WebSocket-Protocol: {SUBPROTOCOL}\r\n\r\n".encode())
        got = b""
        while chunk := raw.recv(1 << 16):
            got += chunk
        assert got.startswith(b"HTTP/1.1 101")
        assert b"\x89\x04" in got
        assert struct.pack("!H", 1011) in got
        happens(lambda: metric(running, "tailrace_viewers_open") == 0)


def test_a_viewer_of_a_service_that_is_killed_comes_back_and_misses_nothing(
    store: StoreOptions, session: Foreign, tmp_path: Path
) -> None:
    service = ServiceProcess(store, tmp_path)
    service.start()
    try:
        viewer = RtaClient(service.url, session.identity)
        viewer.subscribe(everything=True)
        for i in range(100):
            session.send(periodic(1, T0 + i, 1, [float(i)]), start=T0, end=T0 + i)
        viewer.until(lambda v: len(v.samples) >= 50)
        service.kill()
        for i in range(100, 150):
            session.send(periodic(1, T0 + i, 1, [float(i)]), start=T0, end=T0 + i)
        with pytest.raises(ConnectionClosed):
            viewer.until(lambda v: False)
        service.start()
        with RtaClient(service.url, session.identity, viewer) as again:
            again.subscribe(everything=True)
            again.until(lambda v: len(v.samples) == 150)
            assert again.range == (T0, T0 + 149)
            session.close()
            again.to_the_end()
            assert (again.session["state"], again.closed) == ("closed", (1000, "the session has ended"))
        text = httpx.get(f"{service.url}/metrics", trust_env=False).text
        assert "tailrace_viewer_slow_closes_total 0.0" in text
    finally:
        service.kill()

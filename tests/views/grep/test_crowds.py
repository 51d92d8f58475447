"""Many at once: subscribers of one search, searches of one pipeline, and one client that hardly reads beside others."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailrace.client.connection import SseReader
from tailrace.views.grep.model import Search, make_search
from tests.views.grep.clients import Client, Tap, eventually, grep_path, open_taps, request
from tests.views.grep.rig import finds, random_search
from tests.views.grep.site import Site, assert_same, fill, numbered
from tests.writing import NOON, Record

PAD = "x" * 4_000
MIB = 1 << 20


def padded(site: Site, topic: str, first: int, until: int) -> None:
    """Write records that are large enough to fill the buffers between a service and a client."""
    values = [json.dumps({"n": n, "pad": PAD}).encode() for n in range(first, until)]
    site.put([Record(0, b"k", value, NOON, 0, topic) for value in values])


async def crawl(slow: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(slow, 1):  # noqa: ASYNC110
        await asyncio.sleep(1)


async def test_a_client_that_reads_a_byte_a_second_holds_up_nobody_and_is_closed_and_can_resume(
    site: Site, tmp_path: Path
) -> None:
    topic = site.topic("a")
    asked: dict[str, Any] = {"topics": topic, "start": "start"}
    padded(site, topic, 0, 800)
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        served = stack.enter_context(site.service(tmp_path, serve__send_timeout="3s"))
        stack.enter_context(site.at_work())
        first = stack.enter_context(Client(served.port, **asked))
        await first.has(800)
        process = psutil.Process(served.pid)
        before = process.memory_info().rss
        slow = stack.enter_context(socket.socket())
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        await loop.sock_connect(slow, ("127.0.0.1", served.port))
        await loop.sock_sendall(slow, request(grep_path(**asked)))
        taken = b""
        while len(taken) < 20_000:
            taken += await loop.sock_recv(slow, 20_000 - len(taken))

        crawling = asyncio.create_task(crawl(slow))
        others = await open_taps(stack, served.port, [grep_path(**asked)] * 100)
        await eventually(lambda: all(tap.events >= 800 for tap in others))
        await eventually(lambda: served.metric("tailrace_feed_slow_closes_total") == 1)
        crawling.cancel()
        padded(site, topic, 800, 820)
        await eventually(lambda: all(tap.events >= 820 for tap in others))
        wanted = site.ids(site.offline(make_search(topic, {})))
        assert {tuple(tap.ids()) for tap in others} == {tuple(wanted)}
        assert process.memory_info().rss - before < 64 * MIB
        body = Tap.body(taken)
        reader = SseReader()
        whole = [frame for frame in reader.feed(body) if frame.data is not None]
        assert reader.retry == 0.2
        assert 0 < len(whole) < 10
        rest = stack.enter_context(Client(served.port, last=whole[-1].id, **asked))
        await rest.has(820 - len(whole))
        assert [json.loads(frame.data or b"")["id"] for frame in whole] + rest.ids == wanted


async def test_every_subscriber_of_a_search_gets_every_event(
    site: Site, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    subscribers = pytestconfig.getoption("--subscribers")
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    topic = site.topic("a", 2)
    numbered(site, topic, 0, 10)
    path = grep_path(topics=topic, q={"n": {"$gte": 5}}, start="start")
    with ExitStack() as stack:
        served = stack.enter_context(site.service(tmp_path, serve__connections=subscribers + 1))
        stack.enter_context(site.at_work())
        process = Figures(served.pid)
        taps = await open_taps(stack, served.port, [path] * subscribers)
        await eventually(lambda: all(tap.events >= 5 for tap in taps))
        process.note(f"{subscribers} subscribers connected and caught up")
        for n in range(10, 30, 5):
            numbered(site, topic, n, n + 5, partition=n % 2)
            await eventually(lambda: all(tap.events >= n for tap in taps))  # noqa: B023
        process.note("20 events to each of them")
        await asyncio.sleep(0.0 if subscribers < 1_000 else 10.0)
        process.note("idle")
        assert served.metric("tailrace_feeds_open") == subscribers
        wanted = site.ids(site.offline(make_search(topic, {"n": {"$gte": 5}})))
        for found in {tuple(tap.ids()) for tap in taps}:
            assert_same(found, wanted)


async def test_each_of_many_searches_finds_what_it_would_find_alone(
    site: Site, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    topics = [site.topic(name, 2) for name in ("a", "b")]
    searches = distinct(site, topics, pytestconfig.getoption("--searches"))
    with ExitStack() as stack:
        served = stack.enter_context(site.service(tmp_path))
        process = Figures(served.pid)
        paths = [grep_path(topics=t if isinstance(t := s.topics, str) else t[0], q=s.query) for s in searches]
        taps = await open_taps(stack, served.port, paths)
        process.note(f"{len(searches)} searches registered")
        fill(site, topics, 50)
        await asyncio.to_thread(site.live)
        process.note("matched")
        records = site.records()
        wanted = [[i for i, r in zip(site.ids(records), records, strict=True) if finds(s, r)] for s in searches]
        assert sum(map(bool, wanted)) > len(searches) // 2, "most of them find something"
        process.note("told by the other program")
        await eventually(lambda: all(tap.events >= len(each) for tap, each in zip(taps, wanted, strict=True)))
        process.note("delivered")
        for tap, each in zip(taps, wanted, strict=True):
            assert_same(tap.ids(), each)


def distinct(site: Site, topics: Sequence[str], count: int) -> list[Search]:
    """Return searches that all mean something else."""
    found: dict[str, Search] = {}
    chance = random.Random(1)
    while len(found) < count:
        search = random_search(chance, (rf"{site.name}\..*", (topics[0],))[len(found) % 2])
        with suppress(ValueError):  # what JSON cannot say cannot be asked over HTTP
            json.dumps(search.query, allow_nan=False)
            found[search.id] = search
    return list(found.values())


class Figures:
    """Memory and CPU of a service process, printed between steps: for runs with ``-s`` and large numbers."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._began = self._measured()

    def _measured(self) -> tuple[float, float, int]:
        spent = self._process.cpu_times()
        return time.monotonic(), spent.user + spent.system, self._process.memory_info().rss

    def note(self, what: str) -> None:
        now = self._measured()
        took, spent = (after - before for after, before in zip(now[:2], self._began[:2], strict=True))
        print(f"{what}: {took:.1f} s, the service took {spent:.1f} s of CPU and has {now[2] / MIB:.0f} MiB")
        self._began = now

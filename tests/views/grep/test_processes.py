"""Searches over several service processes, and while topics come, grow and go: each event once, and never another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.log.event import iso_time
from tailrace.testing.installation import ServiceProcess
from tailrace.valkey.shards import StoreOptions
from tailrace.views.grep import driver
from tailrace.views.grep.driver import Watchdog
from tailrace.views.grep.model import make_search
from tailrace.views.grep.store import pending_stretches
from tests.views.grep.clients import Client, eventually, is_event, read_all
from tests.views.grep.site import Site, assert_same, numbered
from tests.writing import NOON

SILENT_MS = 8_000
DAY_MS = 86_400_000


@pytest.fixture
def served(site: Site, tmp_path: Path) -> Iterator[ServiceProcess]:
    with site.service(tmp_path) as process:
        yield process


def followers(site: Site, search: str) -> int:
    return int(site.shards.run_all([(0, ("HGET", site.shards.keys.followers(), search))])[0] or 0)


def processes(site: Site) -> dict[int, str]:
    """Return the names of the service processes that are alive, by their process ids."""
    [names] = site.shards.run_all([(0, ("ZRANGE", site.shards.keys.processes(), 0, -1))])
    return {int(name.decode().split("-")[-2]): name.decode() for name in names}


# Several processes.


async def test_clients_of_a_process_that_is_killed_go_on_at_another_and_only_its_leases_end(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = site.topic("a", 2)
    search = make_search(topic, {"n": {"$mod": [3, 0]}})
    asked: dict[str, Any] = {"topics": topic, "q": {"n": {"$mod": [3, 0]}}, "window": 1024}
    for partition in range(2):
        numbered(site, topic, 0, 1_500, partition)
    monkeypatch.setattr(driver, "SILENT_MS", SILENT_MS)
    watchdog = Watchdog(site.shards, DAY_MS)
    with ExitStack() as stack:
        one, other = (stack.enter_context(site.service(tmp_path, name)) for name in ("one", "other"))
        before = stack.enter_context(Client(other.port, start="start", **asked))
        movers = [stack.enter_context(Client(one.port, other.port, start="start", **asked)) for _ in range(3)]
        late = stack.enter_context(Client(one.port, other.port, start="end", **asked))
        await eventually(lambda: followers(site, search.id) == 5)
        site.live()
        await late.saw("caught-up")
        [(life, stretch)] = pending_stretches(site.shards)
        site.scanner.take(
            life, stretch, {source: (first, first + 700) for source, (first, _) in stretch.ranges.items()}
        )
        await asyncio.gather(*(client.has(100) for client in (before, *movers)))
        assert set(processes(site)) == {one.pid, other.pid}
        one.kill()  # in the middle of the past
        stack.enter_context(site.at_work())
        for n in range(1_500, 1_560, 20):
            numbered(site, topic, n, n + 20, partition=n // 20 % 2)
            await asyncio.sleep(0.2)
        wanted = site.ids(site.offline(search))
        for client in (before, *movers):
            assert_same((await client.has(len(wanted))).ids, wanted)
        assert_same((await late.has(20)).ids, site.ids(site.offline(search, since_ms=NOON + 1_500_000)))
        assert [client.connections for client in (before, *movers, late)] == [1, 2, 2, 2, 2]
        # Five leases of the one that lives, and four of the dead one, until it is found silent.
        assert followers(site, search.id) == 9
        dead, lives = processes(site)[one.pid], processes(site)[other.pid]
        assert await eventually(lambda: watchdog.look()[0]) == [dead]
        assert followers(site, search.id) == 5
        assert processes(site) == {other.pid: lives}
        for client in movers:
            client.__exit__(None, None, None)
        await eventually(lambda: followers(site, search.id) == 2)
        one.start()
        resumed = stack.enter_context(Client(one.port, last=movers[0].last, **asked))
        numbered(site, topic, 1_560, 1_563)
        assert (await resumed.has(1)).ids == (await before.has(len(wanted) + 1)).ids[-1:]


async def test_a_recorded_stream_that_is_resumed_at_every_id_has_the_same_rest_each_time(
    site: Site, served: ServiceProcess
) -> None:
    topic = site.topic("a", 2)
    search = make_search(topic, {})
    asked: dict[str, Any] = {"topics": topic, "follow": False, "start": "start"}
    for partition in range(2):
        numbered(site, topic, 0, 50, partition)
    with site.at_work():
        await read_all([Client(served.port, **(asked | {"start": iso_time(NOON + 30_000)}))])
        for partition in range(2):
            numbered(site, topic, 50, 150, partition)
        whole = Client(served.port, window=1024, **asked)
        await read_all([whole])
        assert_same(whole.ids, site.ids(site.offline(search)))
        places = list(dict.fromkeys(frame.id for frame in whole.frames if frame.id))
        assert len({place.split("-")[1] for place in places}) == 3, "two stretches of the past, and what was live"
    resumed = [Client(served.port, last=place, **asked) for place in places[:-1]]
    await read_all(resumed, at_once=4)
    behind: dict[str, int] = {}
    count = 0
    for frame in whole.frames:
        count += is_event(frame)
        behind[frame.id or ""] = count
    for place, client in zip(places, resumed, strict=False):
        assert client.ids == whole.ids[behind[place] :], place
        assert (client.facts("end")[0]["reason"], client.last) == ("caught-up", whole.last)


# Topics that come, grow and go.


async def test_partitions_and_topics_that_are_added_while_a_search_is_followed_are_followed_too_from_its_start_on(
    site: Site, served: ServiceProcess
) -> None:
    topic, since = site.topic("orders-1"), NOON + 5_000
    search = make_search(rf"{site.name}\.orders-.*", {"n": {"$gte": 2}})
    asked: dict[str, Any] = {"topics": search.topics, "q": search.query}
    numbered(site, topic, 0, 8)
    with ExitStack() as stack:
        timed, whole, live = (
            stack.enter_context(Client(served.port, start=start, **asked))
            for start in (iso_time(since), "start", "end")
        )
        with site.at_work():
            await asyncio.gather(*(client.saw("caught-up") for client in (timed, whole, live)))
        past = site.ids(site.offline(search))
        site.grow(topic, 2)
        for name in ("orders-2", "elsewhere"):
            numbered(site, site.topic(name, 2), 0, 10, partition=1)
        numbered(site, topic, 3, 12, partition=1)
        numbered(site, topic, 8, 12)
        with site.at_work():
            everything, later = site.ids(site.offline(search)), site.ids(site.offline(search, since))
            assert len(everything) > len(past) + 15 > len(later) > 15
            assert_same((await whole.has(len(everything))).ids, everything)
            assert_same((await timed.has(len(later))).ids, later)
            assert_same((await live.has(len(everything) - len(past))).ids, [e for e in everything if e not in past])
            again = [
                Client(served.port, follow=False, start="start", **asked),
                Client(served.port, follow=False, start=iso_time(since), **asked),
                Client(served.port, follow=False, last=whole.frames[9].id, **asked),
            ]
            await read_all(again)
        assert_same(again[0].ids, everything)
        assert_same(again[1].ids, later)
        assert again[2].ids == whole.ids[-sum(map(is_event, whole.frames[10:])) :]


async def test_a_topic_that_is_created_again_while_it_is_followed_never_shows_a_record_in_the_place_of_another(
    kafka: EmbeddedKafka, store: StoreOptions, tmp_path: Path
) -> None:
    """Nothing is kept of what matched: all of it is read from Kafka, where other records have the same offsets."""
    site = Site(kafka.address, store, grep__kept=1)
    asked: dict[str, Any] = {"topics": rf"{site.name}\..*", "window": 1024}
    written: dict[str, dict[str, int]] = {}
    with ExitStack() as stack:
        served = stack.enter_context(site.service(tmp_path, grep__memory="1MiB"))
        idle = stack.enter_context(Client(served.port, start="start", **asked))
        follower = stack.enter_context(Client(served.port, start="end", **asked))
        await follower.saw("caught-up")
        first = follower.last
        for generation in range(3):
            topic = site.topic("a")
            site.drive()
            numbered(site, topic, 1_000 * generation, 1_000 * generation + 40)
            for record, event in zip(site.records(), site.ids(site.records()), strict=True):
                written[event] = json.loads(record.value or b"")
            await asyncio.to_thread(site.live)  # all is in the log, some of it is shown, the topic is gone
            if generation % 2:
                await follower.has(len(follower.ids) + 1)
            site.delete(topic)
        last = Client(served.port, last=first, follow=False, **asked)
        with site.at_work():
            await read_all([last])
            await idle.until(lambda client: len(client.ids) + len(client.facts("gap")) >= len(written))
    assert len(written) == 120
    for client in (idle, follower, last):
        assert len(client.ids) == len(set(client.ids))
        for shown in client.events:
            assert shown["data"] == written[shown["id"]], shown["id"]
        gone = {fact["id"] for fact in client.facts("gap")}
        assert gone <= written.keys() - set(client.ids)
    assert {*last.ids, *(fact["id"] for fact in last.facts("gap"))} == written.keys(), (
        "each is shown, or said to be gone"
    )

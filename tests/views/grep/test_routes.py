"""The list of searches that are alive, and ending one, over HTTP and as commands, on a real store."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tailrace.api.requests import SearchParameters
from tailrace.client.river import connect
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import SearchEnded, SearchFollowed, TooManySearches
from tailrace.log.event import shard_of
from tailrace.testing.installation import ServiceThread
from tailrace.valkey.shards import Nodes, Shards, StoreOptions, prepare
from tailrace.views.grep import store as leasing
from tailrace.views.grep.model import make_search
from tailrace.views.grep.routes import one_search
from tailrace.views.grep.store import LeaseRequest, Leases, Searches, finish_stretch
from tests import command_line
from tests.command_line import run
from tests.http.parts import problem
from tests.views.grep.site import Following, Site, ids, numbered
from tests.writing import NOON, Record, Writer

PATH = "/v1/grep/searches"


@pytest.fixture
def shards(store: StoreOptions) -> Iterator[Shards]:
    opened = Shards(store).open()
    prepare(opened)
    yield opened
    opened.close()


@pytest.fixture
async def nodes(store: StoreOptions, shards: Shards) -> AsyncIterator[Nodes]:
    opened = await Nodes(store).open()
    yield opened
    await opened.close()


@pytest.fixture
async def client(service: ServiceThread) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=service.url, timeout=30, trust_env=False) as made:
        yield made


async def listed(client: httpx.AsyncClient, **asked: Any) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in (await client.get(PATH, params=asked)).json()["searches"]}


async def test_a_search_shows_what_it_is_who_follows_it_and_what_it_found(
    client: httpx.AsyncClient, nodes: Nodes, store: StoreOptions
) -> None:
    searches = Searches(nodes)
    assert (await client.get(PATH)).json() == {"searches": [], "next": None}
    one = await searches.register(make_search("jobs,orders", {"n": {"$gt": 0}}, '["a"]'), NOON)
    two = await searches.register(make_search("jo.*", {}), NOON + 1)
    writer = Writer(store, ("intake", "matches"))
    writer.write([Record(i, b'["a"]', b'{"n":%d}' % i) for i in range(5)])
    held = Leases(nodes)
    for client_name in ("me", ""):
        await held.take(one.search.id, LeaseRequest(one.number, "-1h", 4096, client_name))
    found = await listed(client)
    assert found.keys() == {one.search.id, two.search.id}
    shown = found[one.search.id]
    assert (shown["topics"], shown["query"]) == (["jobs", "orders"], one.search.query)
    assert (shown["life"], shown["since"]) == (one.number, "2026-09-12T12:00:00.000Z")
    assert (shown["followers"], shown["popularity"], shown["last_used"], shown["matches"]) == (2, 2, None, 4)
    assert shown["use"] == pytest.approx(2, rel=0.01)
    assert shown["bytes"] > 0
    other = found[two.search.id]
    assert (other["topics"], other["followers"], other["popularity"], other["use"]) == ("jo.*", 0, 0, 0)
    assert (other["matches"], other["last_used"] > "2026-11") == (5, True)
    details = (await client.get(f"{PATH}/{one.search.id}")).json()
    connections = details.pop("connections")
    assert details == shown
    assert {row["process"] for row in connections} == {held.process}
    fields = [(row["number"], row["start"], row["window"], row["client"]) for row in connections]
    assert fields == [(1, "-1h", 4096, "me"), (2, "-1h", 4096, None)]
    assert len((await client.get(f"{PATH}/{one.search.id}", params={"limit": 1})).json()["connections"]) == 1
    assert (await client.get(f"{PATH}/{two.search.id}")).json()["connections"] == []


async def test_a_search_shows_how_far_each_stretch_of_its_past_is(
    client: httpx.AsyncClient, nodes: Nodes, shards: Shards
) -> None:
    searches = Searches(nodes)
    life = await searches.register(make_search("jobs", {}), NOON)
    assert await searches.extend(life, 0, 1, NOON, {"jobs:0": (100, 200), "jobs:1": (0, 100)})
    assert await searches.extend(life, 1, 2, 0, {"jobs:0": (0, 100)})
    (first, second), _ = await searches.stretches(life)
    epoch = int(shards.call(0, "enlist", 1))
    for stretch, source, mark in ((first, "jobs:0", 149), (second, "jobs:0", 99)):
        shard = shard_of(stretch.name(life), shards.options.shards)
        assert shards.call(shard, "advance", "matches", epoch, stretch.mark(source), mark, "")[0] == b"ok"
    finish_stretch(shards, life, second)
    one, two = (await client.get(f"{PATH}/{life.search.id}")).json()["stretches"]
    assert one == {
        "number": first.number,
        "since": "2026-09-12T12:00:00.000Z",
        "records": 50,
        "of": 200,
        "percent": 25.0,
        "done": False,
        "matches": 0,
    }
    assert (two["since"], two["records"], two["of"], two["percent"], two["done"]) == (None, 100, 100, 100.0, True)


async def test_searches_are_listed_page_by_page_in_the_order_of_their_ids(
    client: httpx.AsyncClient, nodes: Nodes
) -> None:
    searches = Searches(nodes)
    wanted = sorted([(await searches.register(make_search("jobs", {"n": n}), n)).search.id for n in range(120)])
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = (await client.get(PATH, params={"limit": 25, "after": after})).json()
        found += [row["id"] for row in page["searches"]]
        assert len(page["searches"]) <= 25
        after = page["next"]
    assert found == wanted
    assert list(await listed(client, limit=1000)) == wanted
    assert [*await listed(client, after=wanted[60][:5], limit=1)] == [wanted[60]]
    problem(await client.get(PATH, params={"limit": 0}), 400, "request.invalid")
    problem(await client.get(PATH, params={"prefix": "a"}), 400, "request.invalid")


async def test_a_search_is_ended_if_nobody_follows_it_or_by_force(client: httpx.AsyncClient, nodes: Nodes) -> None:
    searches, held = Searches(nodes), Leases(nodes)
    life = await searches.register(make_search("jobs", {}), NOON)
    url = f"{PATH}/{life.search.id}"
    lease = await held.take(life.search.id)
    detail = problem(await client.delete(url), 409, "search.followed")
    assert "1 connection" in detail
    assert (await client.get(url)).json()["life"] == life.number
    assert (await client.delete(url, params={"force": "true"})).json() == {
        "id": life.search.id,
        "life": life.number,
        "connections": 1,
    }
    for answer in (await client.get(url), await client.delete(url), await client.delete(url, params={"force": "true"})):
        problem(answer, 404, "search.not_found")
    await held.beat()
    assert lease not in held
    again = await searches.register(life.search, NOON + 5)
    assert (await client.delete(url)).json() == {"id": life.search.id, "life": again.number, "connections": 0}


async def test_the_python_client_lists_shows_and_ends_searches(service: ServiceThread, nodes: Nodes) -> None:
    searches, held = Searches(nodes), Leases(nodes)
    numbers = {}
    for n in range(3):
        life = await searches.register(make_search("jobs", {"n": n}), NOON)
        numbers[life.search.id] = life.number
    wanted = sorted(numbers)
    await held.take(wanted[0], LeaseRequest(numbers[wanted[0]], "-1h", 4096, "me"))
    async with connect(service.url) as river:
        assert [each.id for each in await river.searches()] == wanted
        assert [each.id for each in await river.searches(2)] == wanted[:2]
        shown = await river.search(wanted[0])
        assert (shown.topics, shown.followers, [each.client for each in shown.connections]) == (["jobs"], 1, ["me"])
        with pytest.raises(SearchFollowed):
            await river.end_search(wanted[0])
        ended = await river.end_search(wanted[0], force=True)
        assert (ended.id, ended.connections) == (wanted[0], 1)
        assert [each.id for each in await river.searches()] == wanted[1:]


# As commands.


def environment(service: ServiceThread) -> dict[str, str]:
    """Return an environment with the address of the service and no other setting."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    return known | {"TAILRACE_URL": service.url}


def tailrace(service: ServiceThread, *words: str) -> subprocess.CompletedProcess[str]:
    return run("searches", *words, env=environment(service))


def on_a_terminal(service: ServiceThread, *words: str) -> str:
    return command_line.on_a_terminal("searches", *words, term="xterm", columns=240, env=environment(service))


async def test_the_commands_list_show_and_end(service: ServiceThread, nodes: Nodes) -> None:
    searches, held = Searches(nodes), Leases(nodes)
    lives = sorted(
        [await searches.register(make_search("jobs", {"n": n}), NOON) for n in range(3)],
        key=lambda each: each.search.id,
    )
    await held.take(lives[1].search.id)
    done = tailrace(service, "ls")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["id"], row["followers"]) for row in rows] == [
        (life.search.id, int(life is lives[1])) for life in lives
    ]
    assert len(tailrace(service, "ls", "-n", "2").stdout.splitlines()) == 2
    shown = json.loads(tailrace(service, "show", lives[1].search.id).stdout)
    assert [row["process"] for row in shown["connections"]] == [held.process]
    assert await searches.extend(lives[1], 0, 1, 0, {"jobs:0": (0, 1_000)})
    assert "0 of 1,000" in on_a_terminal(service, "ls")
    assert held.process in on_a_terminal(service, "show", lives[1].search.id)
    refused = tailrace(service, "end", lives[1].search.id)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "search.followed" in refused.stderr
    ended = tailrace(service, "end", lives[1].search.id, "--force")
    assert (ended.returncode, json.loads(ended.stdout)["connections"]) == (0, 1)
    assert "search.not_found" in tailrace(service, "show", lives[1].search.id).stderr


# Feeds.


async def test_the_lease_of_a_feed_says_where_it_began(kafka: EmbeddedKafka, store: StoreOptions) -> None:
    site = Site(kafka.address, store)
    topic = site.topic("a")
    search = make_search(topic, {})
    asked: list[dict[str, Any]] = [
        {"start": "end", "window": 2_048, "client": "me"},
        {"start": "2026-09-12T12:00:00Z", "follow": False},
        {"start": "start"},
    ]
    async with site.serving() as serving:
        feeds = [await serving.open(search, **each) for each in asked]
        feeds.append(await serving.open(search, after=feeds[0].cursor))
        connections = (await one_search(serving.view, search.id, SearchParameters(limit=10))).connections
        assert [(each.number, each.start, each.window, each.client) for each in connections] == [
            (1, "end", 2_048, "me"),
            (2, "2026-09-12T12:00:00.000Z", 262_144, None),
            (3, "start", 262_144, None),
            (4, feeds[0].cursor, 262_144, None),
        ]
        for feed in feeds:
            await feed.aclose()
        assert (await one_search(serving.view, search.id, SearchParameters(limit=10))).connections == []


async def test_a_feed_whose_search_is_ended_says_so_and_the_next_one_begins_anew(
    kafka: EmbeddedKafka, store: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "BEAT_S", 0.1)
    site = Site(kafka.address, store)
    topic = site.topic("a")
    numbered(site, topic, 0, 5)
    search = make_search(topic, {})
    async with site.serving() as serving:
        live, past = [Following(await serving.open(search, start=start, follow=True)) for start in ("end", "start")]
        await asyncio.to_thread(site.live)
        await live.saw("caught-up")
        assert await serving.view.searches.end(search.id, True)
        for following in (live, past):
            with pytest.raises(SearchEnded):
                await following.saw("end")
            await following.close()
        assert site.scan() == 0
        with site.at_work():
            assert len(ids(await serving.all(search, start="start"))) == 5


async def test_a_search_too_many_is_refused_by_the_service(kafka: EmbeddedKafka, store: StoreOptions) -> None:
    site = Site(kafka.address, store, grep__searches=1)
    topic = site.topic("a")
    async with site.serving() as serving:
        first = await serving.open(make_search(topic, {}), follow=True)
        with pytest.raises(TooManySearches):
            await serving.open(make_search(topic, {"n": 1}), follow=True)
        await first.aclose()

"""Leases of searches end with their connections and with their processes, and never come back by themselves."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tailrace.errors import SearchEnded, SearchFollowed, SearchNotFound
from tailrace.log.event import shard_of
from tailrace.valkey.shards import Nodes, Shards, mapping
from tailrace.views.grep import driver as module
from tailrace.views.grep.driver import Watchdog
from tailrace.views.grep.model import SearchLife, Stretch, make_search
from tailrace.views.grep.store import LeaseRequest, Leases, Searches, SearchRegistry, pending_stretches

DAY_MS = 86_400_000


async def registered(nodes: Nodes, topic: str = "orders") -> SearchLife:
    life = await Searches(nodes).register(make_search(topic, {"a": 1}), 1)
    await Searches(nodes).pin(life, {f"{topic}:0": 5})
    return life


def age(shards: Shards, search: str, ms: int) -> None:
    """Let it be so long ago that somebody followed a search."""
    shards.run_all([(0, ("ZINCRBY", shards.keys.idle(), -ms, search))])


def connections(shards: Shards, search: str) -> dict[str, dict[str, object]]:
    """Return what is kept of each connection of a search."""
    found = mapping(shards.run_all([(0, ("HGETALL", shards.keys.connections(search)))])[0])
    return {place.decode(): msgspec.json.decode(facts) for place, facts in found.items()}


def followers(shards: Shards) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = mapping(shards.run_all([(0, ("HGETALL", shards.keys.followers()))])[0])
    return found


async def test_a_search_is_followed_as_long_as_a_connection_leases_it(nodes: Nodes, shards: Shards) -> None:
    life = await registered(nodes)
    held = Leases(nodes)
    await held.beat()
    one, other = await held.take(life.search.id), await held.take(life.search.id)
    assert followers(shards) == {life.search.id.encode(): b"2"}
    await held.give_up(one)
    await held.give_up(one)
    assert followers(shards) == {life.search.id.encode(): b"1"}
    await held.give_up(other)
    assert followers(shards) == {}


async def test_a_process_that_is_silent_loses_its_leases(
    nodes: Nodes, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = await registered(nodes)
    dead, alive = Leases(nodes), Leases(nodes)
    await dead.beat()
    await dead.take(life.search.id)
    monkeypatch.setattr(module, "SILENT_MS", 0)
    buried, _ = Watchdog(shards, DAY_MS).look()
    assert buried == [dead.process]
    assert followers(shards) == {}
    await alive.beat()
    await alive.take(life.search.id)
    assert followers(shards) == {life.search.id.encode(): b"1"}


async def test_a_paused_process_that_returns_takes_another_name_and_its_old_one_stays_dead(
    nodes: Nodes, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = await registered(nodes)
    paused = Leases(nodes)
    await paused.beat()
    lease = await paused.take(life.search.id)
    monkeypatch.setattr(module, "SILENT_MS", 0)
    Watchdog(shards, DAY_MS).look()
    old = paused.process
    await paused.beat()
    assert paused.process != old
    assert followers(shards) == {life.search.id.encode(): b"1"}
    await paused.give_up(lease)
    assert followers(shards) == {}
    assert shards.call(0, "follow", old, 1, life.search.id) == [b"buried"]
    assert shards.call(0, "heartbeat", old, b"{}", 0) == [b"buried"]
    assert followers(shards) == {}


async def test_a_lease_says_what_its_connection_asks_for_also_after_its_process_took_another_name(
    nodes: Nodes, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = await registered(nodes)
    held = Leases(nodes)
    await held.beat()
    asked = LeaseRequest(life.number, "-1h", 4096, "me")
    taken = [await held.take(life.search.id, asked), await held.take(life.search.id)]
    found = connections(shards, life.search.id)
    assert found.keys() == {f"{held.process} {lease.number}" for lease in taken}
    connection = found[f"{held.process} {taken[0].number}"]
    since = connection.pop("since_ms")
    assert connection == {"life": life.number, "start": "-1h", "window": 4096, "client": "me"}
    monkeypatch.setattr(module, "SILENT_MS", 0)
    Watchdog(shards, DAY_MS).look()
    assert connections(shards, life.search.id) == {}
    await held.beat()
    assert connections(shards, life.search.id)[f"{held.process} {taken[0].number}"] == {**connection, "since_ms": since}
    for lease in taken:
        await held.give_up(lease)
    assert connections(shards, life.search.id) == {}


async def test_the_first_lease_of_a_process_need_not_wait_for_its_first_heartbeat(nodes: Nodes, shards: Shards) -> None:
    life = await registered(nodes)
    held = Leases(nodes)
    await asyncio.gather(*(held.take(life.search.id) for _ in range(20)))
    assert followers(shards) == {life.search.id.encode(): b"20"}
    [names] = shards.run_all([(0, ("ZRANGE", shards.keys.processes(), 0, -1))])
    assert names == [held.process.encode()]


async def test_a_lease_that_is_given_up_while_a_process_begins_anew_does_not_stay(
    nodes: Nodes, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = await registered(nodes)
    held = Leases(nodes)
    taken = [await held.take(life.search.id) for _ in range(30)]
    monkeypatch.setattr(module, "SILENT_MS", 0)
    Watchdog(shards, DAY_MS).look()
    await asyncio.gather(held.beat(), *(held.give_up(lease) for lease in taken[:20]))
    assert followers(shards) == {life.search.id.encode(): b"10"}
    assert len(connections(shards, life.search.id)) == len(held) == 10


# Ended by hand.


async def test_a_search_that_is_followed_is_ended_by_force_only_and_its_connections_are_told(
    nodes: Nodes, shards: Shards
) -> None:
    life, other = await registered(nodes), await registered(nodes, "payments")
    one, two = Leases(nodes), Leases(nodes)
    mine = [await one.take(life.search.id), await two.take(life.search.id), await two.take(other.search.id)]
    searches = Searches(nodes)
    assert await searches.extend(life, 0, 1, 0, {"orders:0": (0, 5)})
    with pytest.raises(SearchFollowed, match="2 connection"):
        await searches.end(life.search.id, False)
    assert await searches.end(life.search.id, True) == (life.name, 2)
    with pytest.raises(SearchNotFound):
        await searches.end(life.search.id, True)
    assert pending_stretches(shards) == []
    again = await searches.register(life.search, 5)  # somebody asks for the same at once
    await one.beat()
    await two.beat()
    assert [mine[0] in one, mine[1] in two, mine[2] in two] == [False, False, True]
    assert followers(shards) == {other.search.id.encode(): b"1"}
    with pytest.raises(SearchEnded):
        await one.take(life.search.id, LeaseRequest(life.number))
    await one.take(life.search.id, LeaseRequest(again.number))
    assert await searches.pin(life, {"orders:0": 9}) == {"orders:0": 9}
    assert await searches.extend(life, 0, 1, 0, {"orders:0": (0, 5)})
    assert (await searches.pins(life), (await searches.stretches(life))[0]) == (None, [])


async def test_what_an_ended_search_leaves_is_dropped_once_and_for_all(nodes: Nodes, shards: Shards) -> None:
    life = await registered(nodes)
    write(shards, life.name, "orders:0")
    await Searches(nodes).end(life.search.id, False)
    assert leftovers(shards, life)
    assert Watchdog(shards, DAY_MS).look() == ([], [])
    assert leftovers(shards, life) == []
    # As if it had been killed before it could say that it was done.
    shards.run_all([(0, ("HSET", shards.keys.dropping(), life.name, "77"))])
    write(shards, f"{life.name}.77", "~77~orders:0")
    assert Watchdog(shards, DAY_MS).look() == ([], [])
    assert leftovers(shards, life) == []
    assert shards.run_all([(0, ("HLEN", shards.keys.dropping()))]) == [0]


# Forgotten.


async def test_a_search_that_nobody_asks_for_is_forgotten_with_its_logs(nodes: Nodes, shards: Shards) -> None:
    life = await registered(nodes)
    searches = Searches(nodes)
    assert await searches.extend(life, 0, 1, 0, {"orders:0": (0, 5)})
    [stretch], _ = await searches.stretches(life)
    for name, source in ((life.name, "orders:0"), (stretch.name(life), stretch.mark("orders:0"))):
        write(shards, name, source)
    assert Watchdog(shards, DAY_MS).look() == ([], [])
    age(shards, life.search.id, DAY_MS)
    assert Watchdog(shards, DAY_MS).look() == ([], [life.name])
    registry = SearchRegistry()
    registry.refresh(shards)
    assert registry.lives == {}
    assert await searches.pins(life) is None
    assert await searches.past(life.number) == life.search.id
    assert leftovers(shards, life) == []
    assert not [field for s in range(shards.options.shards) for field in _marks(shards, s) if field.startswith(b"~")]
    again = await searches.register(life.search, 2)
    assert again.number > stretch.number > life.number


async def test_a_search_that_is_followed_or_was_lately_is_not_forgotten(nodes: Nodes, shards: Shards) -> None:
    life = await registered(nodes)
    held = Leases(nodes)
    await held.beat()
    lease = await held.take(life.search.id)
    assert Watchdog(shards, -1).look() == ([], [])
    await held.give_up(lease)
    assert Watchdog(shards, DAY_MS).look() == ([], [])
    assert Watchdog(shards, -1).look() == ([], [life.name])


def write(shards: Shards, name: str, source: str) -> None:
    """Append something to a log of matches."""
    shard = shard_of(name, shards.options.shards)
    head = ("matches", int(shards.call(0, "enlist", 1)), source, -1, 4, DAY_MS, 0, 100)
    assert shards.call(shard, "apply", *head, "A", name, 0, 1, 5, b"run")[0] == b"ok"


def leftovers(shards: Shards, life: SearchLife) -> list[bytes]:
    """Return the keys that are named after a search."""
    found = [node.execute_command("KEYS", f"{shards.keys.prefix}:*{life.search.id}*") for node in shards.primaries()]
    return [key for keys in found for key in keys]


def _marks(shards: Shards, shard: int) -> list[bytes]:
    found: list[bytes] = shards.run_all([(shard, ("HKEYS", shards.keys.marks(shard, "matches")))])[0]
    return found


def test_a_stretch_is_named_after_its_life_and_number() -> None:
    life = SearchLife(make_search("orders", {}), 7, 0)
    assert Stretch(9, 0, {}).name(life) == f"{life.search.id}.7.9"

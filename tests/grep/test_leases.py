"""Leases of searches end with their connections and with their processes, and never come back by themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tailrace.model.name import shard_of
from tailrace.model.search import Life, Stretch, make_search
from tailrace.stores import leases as module
from tailrace.stores.leases import Leases, Watchdog
from tailrace.stores.nodes import Nodes
from tailrace.stores.searches import Registry, Searches
from tailrace.stores.valkey import Shards, StoreOptions, mapping, prepare

DAY_MS = 86_400_000


@pytest.fixture
def shards(any_store: StoreOptions) -> Shards:
    opened = Shards(any_store).open()
    prepare(opened)
    return opened


@pytest.fixture
async def nodes(any_store: StoreOptions, shards: Shards) -> AsyncIterator[Nodes]:
    opened = await Nodes(any_store).open()
    yield opened
    await opened.close()


async def registered(nodes: Nodes, topic: str = "orders") -> Life:
    life = await Searches(nodes).register(make_search(topic, {"a": 1}), 1)
    await Searches(nodes).pin(life, {f"{topic}:0": 5})
    return life


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
    number = await paused.take(life.search.id)
    monkeypatch.setattr(module, "SILENT_MS", 0)
    Watchdog(shards, DAY_MS).look()
    old = paused.process
    await paused.beat()
    assert paused.process != old
    assert followers(shards) == {life.search.id.encode(): b"1"}
    await paused.give_up(number)
    assert followers(shards) == {}
    assert shards.call(0, "follow", old, 1, life.search.id) == b"buried"
    assert shards.call(0, "heartbeat", old, b"{}") == b"buried"
    assert followers(shards) == {}


async def test_a_search_that_nobody_asks_for_is_forgotten_with_its_logs(nodes: Nodes, shards: Shards) -> None:
    life = await registered(nodes)
    searches = Searches(nodes)
    assert await searches.extend(life, 0, 1, 0, {"orders:0": (0, 5)})
    [stretch], _ = await searches.stretches(life)
    epoch = int(shards.call(0, "enlist", 1))
    for name, source in ((life.name, "orders:0"), (stretch.name(life), stretch.mark("orders:0"))):
        shard = shard_of(name, shards.options.shards)
        head = ("matches", epoch, source, -1, 4, DAY_MS, 0, 100)
        assert shards.call(shard, "apply", *head, "A", name, 0, 1, 5, b"run")[0] == b"ok"
    assert Watchdog(shards, DAY_MS).look() == ([], [life.name])  # it was asked for in 1970
    registry = Registry()
    registry.refresh(shards)
    assert registry.lives == {}
    assert await searches.pins(life) is None
    assert await searches.past(life.number) == life.search.id
    for node in shards.primaries():
        assert node.execute_command("KEYS", f"{shards.keys.prefix}:*{life.search.id}*") == []
    assert not [field for s in range(shards.options.shards) for field in _marks(shards, s) if field.startswith(b"~")]
    again = await searches.register(life.search, 2)
    assert again.number > stretch.number > life.number


async def test_a_search_that_is_followed_or_was_lately_is_not_forgotten(nodes: Nodes, shards: Shards) -> None:
    life = await registered(nodes)
    held = Leases(nodes)
    await held.beat()
    number = await held.take(life.search.id)
    assert Watchdog(shards, 0).look() == ([], [])
    await held.give_up(number)
    assert Watchdog(shards, DAY_MS).look() == ([], [])
    assert Watchdog(shards, -1).look() == ([], [life.name])


def _marks(shards: Shards, shard: int) -> list[bytes]:
    found: list[bytes] = shards.run_all([(shard, ("HKEYS", shards.keys.marks(shard, "matches")))])[0]
    return found


def test_a_stretch_is_named_after_its_life_and_number() -> None:
    life = Life(make_search("orders", {}), 7, 0)
    assert Stretch(9, 0, {}).name(life) == f"{life.search.id}.7.9"

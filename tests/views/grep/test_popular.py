"""Use of searches, and which are forgotten first: on a real store; time passes by moving what it wrote."""

from __future__ import annotations

import random
from itertools import count

import pytest

from tailrace.errors import TooManySearches
from tailrace.valkey.shards import Nodes, Shards, mapping
from tailrace.views.grep import driver as module
from tailrace.views.grep.driver import Watchdog
from tailrace.views.grep.model import SearchLife, make_search
from tailrace.views.grep.store import Leases, Searches

WINDOW_MS = 600_000
HALF_LIFE = 144
DAY_MS = 86_400_000
WEEK_MS = 7 * DAY_MS

_numbers = count()


async def begun(nodes: Nodes) -> SearchLife:
    """A search of its own, which nobody follows."""
    return await Searches(nodes).register(make_search("orders", {"n": next(_numbers)}), 1)


def window(shards: Shards) -> int:
    [[seconds, _]] = shards.run_all([(0, ("TIME",))])
    return int(seconds) * 1000 // WINDOW_MS


def popular(shards: Shards, life: SearchLife) -> int:
    """Return how many connections are counted for a search in the last two windows: one may end while a test runs."""
    now = window(shards)
    counted = shards.run_all([(0, ("HGET", shards.keys.popular(w), life.search.id)) for w in (now, now - 1)])
    return sum(int(n or 0) for n in counted)


def next_window(shards: Shards) -> None:
    """Let ten minutes pass: whatever was in this window is now in the one before the last, which is not looked at."""
    now, tag = window(shards), shards.keys.tag(0)
    shards.run_all([(0, ("DEL", shards.keys.popular(w))) for w in (now, now - 1)])
    [beats] = shards.run_all([(0, ("ZRANGE", shards.keys.processes(), 0, -1))])
    for process in beats:
        shards.run_all([(0, ("ZINCRBY", shards.keys.processes(), -2 * WINDOW_MS, process))])
        key = f"{tag}:leases:{process.decode()}"
        for connection, lease in mapping(shards.run_all([(0, ("HGETALL", key))])[0]).items():
            search, _, began = lease.partition(b" ")
            shards.run_all([(0, ("HSET", key, connection, b"%s %d" % (search, int(began) - 2)))])


def use(shards: Shards, life: SearchLife) -> float:
    """Return how much a search is used, as connections of now."""
    [score] = shards.run_all([(0, ("ZSCORE", shards.keys.uses(), life.search.id))])
    return 0.0 if score is None else float(2 ** (float(score) - window(shards) / HALF_LIFE))


def grow_old(shards: Shards, life: SearchLife, ms: int) -> None:
    """Let it be so long ago that a search was used, and followed."""
    shards.run_all(
        [
            (0, ("ZINCRBY", shards.keys.uses(), str(-ms / WINDOW_MS / HALF_LIFE), life.search.id)),
            (0, ("ZADD", shards.keys.idle(), "XX", "INCR", -ms, life.search.id)),
        ]
    )


# What is counted.


async def test_a_connection_counts_once_in_each_window_in_which_it_is_open(nodes: Nodes, shards: Shards) -> None:
    life, held = await begun(nodes), Leases(nodes)
    await held.beat()
    taken = [await held.take(life.search.id) for _ in range(3)]
    for _ in range(3):
        await held.beat()
    assert popular(shards, life) == 3
    next_window(shards)
    assert popular(shards, life) == 0
    new = await held.take(life.search.id)  # before the first heartbeat of the window
    for _ in range(3):
        await held.beat()
    assert popular(shards, life) == 4
    next_window(shards)
    await held.give_up(taken[0])  # it was open for a moment of this window
    await held.beat()
    await held.give_up(taken[1])
    assert popular(shards, life) == 4
    next_window(shards)
    await held.beat()
    await held.give_up(new)
    assert popular(shards, life) == 2
    next_window(shards)
    assert popular(shards, life) == 0


async def test_a_process_that_takes_another_name_does_not_count_its_connections_again(
    nodes: Nodes, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    life, held = await begun(nodes), Leases(nodes)
    await held.beat()
    for _ in range(5):
        await held.take(life.search.id)
    monkeypatch.setattr(module, "SILENT_MS", -1)
    for _ in range(3):
        Watchdog(shards, DAY_MS).look()
        await held.beat()
    assert popular(shards, life) == 5


@pytest.mark.parametrize("seed", range(3))
async def test_the_use_of_a_search_is_the_sum_over_its_windows_halved_with_every_day(
    nodes: Nodes, shards: Shards, seed: int
) -> None:
    chance = random.Random(seed)
    held = Leases(nodes)
    lives = [await begun(nodes) for _ in range(4)]
    wanted = [0.0] * len(lives)
    for _ in range(40):
        at = chance.randrange(len(lives))
        if chance.random() < 0.6:
            await held.give_up(await held.take(lives[at].search.id))
            wanted[at] += 1
        else:
            windows = chance.choice((1, 10, 144, 1000, 40_000))
            wanted = [each * 2 ** (-windows / HALF_LIFE) for each in wanted]
            for life in lives:
                if use(shards, life):
                    grow_old(shards, life, windows * WINDOW_MS)
    for life, expected in zip(lives, wanted, strict=True):
        # Two windows may have begun while the test ran.
        assert use(shards, life) == pytest.approx(expected, rel=0.02)


# Which are forgotten.


async def _used(nodes: Nodes, times: int) -> SearchLife:
    life, held = await begun(nodes), Leases(nodes)
    for _ in range(times):
        await held.give_up(await held.take(life.search.id))
    return life


async def test_of_searches_past_the_promise_the_least_used_are_forgotten_first(nodes: Nodes, shards: Shards) -> None:
    lives = [await _used(nodes, times) for times in (3, 0, 5, 1, 4)]
    promised = await _used(nodes, 0)
    watchdog = Watchdog(shards, DAY_MS, WEEK_MS, 2)
    assert watchdog.look() == ([], [])
    for life in lives:
        grow_old(shards, life, 2 * DAY_MS)
    assert watchdog.look() == ([], [lives[1].name, lives[3].name, lives[0].name])
    assert watchdog.look() == ([], [])
    # What was used much long ago is used less than what is used now and then.
    grow_old(shards, lives[2], 4 * DAY_MS)
    again = await _used(nodes, 1)
    grow_old(shards, again, DAY_MS)
    assert watchdog.look() == ([], [lives[2].name])
    grow_old(shards, lives[4], 5 * DAY_MS)
    assert watchdog.look() == ([], [lives[4].name])  # a week without readers is the most
    grow_old(shards, again, DAY_MS)
    grow_old(shards, promised, DAY_MS - 60_000)
    assert Watchdog(shards, DAY_MS, WEEK_MS, 0).look() == ([], [again.name])
    assert Watchdog(shards, DAY_MS).look() == ([], [])


async def test_hundreds_of_searches_that_are_past_the_promise_are_forgotten_at_once(
    nodes: Nodes, shards: Shards
) -> None:
    lives = [await begun(nodes) for _ in range(250)]
    for life in lives:
        grow_old(shards, life, 2 * DAY_MS)
    _, ended = Watchdog(shards, DAY_MS, WEEK_MS, 20).look()
    assert len(ended) == len(set(ended)) == 230


# How many there may be.


async def test_a_search_too_many_is_refused_until_one_that_nobody_was_promised_makes_room(
    nodes: Nodes, shards: Shards
) -> None:
    searches = Searches(nodes, 3, DAY_MS)
    held = Leases(nodes)
    lives = [await searches.register(make_search("orders", {"n": next(_numbers)}), 1) for _ in range(3)]
    await held.take(lives[0].search.id)
    fourth = make_search("orders", {"n": next(_numbers)})
    with pytest.raises(TooManySearches, match="3 searches are alive") as caught:
        await searches.register(fourth, 1)
    assert (caught.value.status, caught.value.retryable, caught.value.code) == (503, True, "search.too_many")
    assert await searches.register(lives[1].search, 2) == lives[1]  # those that are there are found
    for life in lives:
        grow_old(shards, life, 2 * DAY_MS)
    used = [await _used_again(held, life) for life in lives[1:2]]
    grow_old(shards, used[0], DAY_MS)
    assert (await searches.register(fourth, 3)).search == fourth
    assert await searches.register(lives[1].search, 4) == lives[1]
    assert await searches.past(lives[2].number) == lives[2].search.id
    with pytest.raises(TooManySearches):
        await searches.register(lives[2].search, 5)
    Watchdog(shards, DAY_MS).look()
    assert shards.run_all([(0, ("HLEN", shards.keys.dropping()))]) == [0]


async def _used_again(held: Leases, life: SearchLife) -> SearchLife:
    await held.give_up(await held.take(life.search.id))
    return life

"""Listings of days that are sealed, packed and expired, and of the largest streams, on a real store."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from valkey import Valkey

from tailrace.api.answers import Stream
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.errors import Overloaded
from tailrace.log.event import shard_of
from tailrace.log.store import Logs
from tailrace.valkey.keys import FORMAT
from tailrace.valkey.shards import Nodes, StoreOptions
from tailrace.views.days import routes as largest
from tailrace.views.days.routes import Largest
from tests.http.parts import Streams, problem
from tests.upkeep.past import Keeper, now_ms
from tests.writing import DAY, NOON, Record, Writer

HOUR = DAY // 24
START = NOON - NOON % DAY


def days_of(client: httpx.Client, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get(f"/v1/streams/{name}/days").json()["days"]
    return found


def states_of(client: httpx.Client, name: str) -> list[tuple[int, str]]:
    return [(day["events"], day["state"]) for day in days_of(client, name)]


# Days.


def test_a_day_is_open_then_closed_then_packed(streams: Streams, client: httpx.Client, store: StoreOptions) -> None:
    now = now_ms()
    for back in (3, 1, 0):
        streams.write("a", [{"n": n} for n in range(100)], time_ms=now - back * DAY)
    with Keeper(store) as keeper:
        keeper.pack(after_ms=DAY)
    assert states_of(client, "a") == [(100, "packed"), (100, "closed"), (100, "open")]
    packed, closed, opened = days_of(client, "a")
    assert packed["raw_bytes"] > packed["bytes"] > 0
    assert closed["raw_bytes"] == opened["raw_bytes"] == 0


def test_a_day_that_nothing_follows_stays_open_until_it_is_packed(
    streams: Streams, client: httpx.Client, store: StoreOptions
) -> None:
    streams.write("a", [1], time_ms=NOON)
    assert states_of(client, "a") == [(1, "open")]
    with Keeper(store) as keeper:
        keeper.pack()
    assert states_of(client, "a") == [(1, "packed")]


def test_a_day_that_an_event_closed_is_sealed_until_it_is_packed(client: httpx.Client, store: StoreOptions) -> None:
    today = now_ms() - now_ms() % DAY
    writer = Writer(store, seal_when={"done": True})
    writer.write([Record(0, b"a", time=today), Record(1, b"a", b'{"done":true}', time=today)])
    assert states_of(client, "a") == [(2, "sealed")]
    writer.write([Record(2, b"a", time=today)])
    assert states_of(client, "a") == [(2, "sealed"), (1, "open")]
    with Keeper(store) as keeper:
        keeper.pack(after_ms=DAY)
    assert states_of(client, "a") == [(2, "packed"), (1, "open")]


def test_buckets_of_one_day_are_one_day(client: httpx.Client, store: StoreOptions) -> None:
    hours = (1, 2, 3, 25)
    Writer(store, span_ms=HOUR).write([Record(i, b"a", time=START + h * HOUR) for i, h in enumerate(hours)])
    assert states_of(client, "a") == [(3, "closed"), (1, "open")]
    with Keeper(store, clock=lambda: START + 3 * HOUR) as keeper:
        assert keeper.pack().segments == 2
    assert states_of(client, "a") == [(3, "partly packed"), (1, "open")]
    with Keeper(store) as keeper:
        keeper.pack()
    assert states_of(client, "a") == [(3, "packed"), (1, "packed")]
    (stream,) = client.get("/v1/streams").json()["streams"]
    assert (stream["days"], stream["packed"]) == (2, 1.0)


def test_what_several_server_processes_wrote_of_a_day_is_one_day(client: httpx.Client, store: StoreOptions) -> None:
    writer = Writer(store)
    writer.write([Record(0, b"a")])
    shard = shard_of("a", store.shards)
    writer.shards.call(shard, "begin", "another process", round(time.time()), store.shards, FORMAT)
    writer.write([Record(1, b"a")])
    (day,) = days_of(client, "a")
    assert (day["events"], day["state"]) == (2, "open")
    assert day["first"].partition(".")[0] != day["last"].partition(".")[0]


# Streams.


def test_a_stream_says_how_much_of_it_is_packed_and_whether_days_were_dropped(
    streams: Streams, client: httpx.Client, store: StoreOptions
) -> None:
    now = now_ms()
    streams.write("a", [1, 2, 3], time_ms=now - 3 * DAY)
    streams.write("a", [4], time_ms=now)
    with Keeper(store) as keeper:
        keeper.pack(after_ms=DAY)
        (stream,) = client.get("/v1/streams").json()["streams"]
        assert (stream["events"], stream["packed"], stream["expired"]) == (4, 0.75, False)
        keeper.expire("a", DAY)
        (stream,) = client.get("/v1/streams").json()["streams"]
        assert (stream["events"], stream["packed"], stream["expired"], stream["days"]) == (1, 0.0, True, 1)


def test_a_stream_that_expired_as_a_whole_is_not_listed_and_marks_no_other(
    streams: Streams, client: httpx.Client, store: StoreOptions
) -> None:
    neighbour = next(name for name in "bcdefghijk" if shard_of(name, store.shards) == shard_of("a", store.shards))
    streams.write("a", [1], time_ms=NOON)
    with Keeper(store) as keeper:
        keeper.pack()
        assert keeper.expire("a", DAY).ended
    assert client.get("/v1/streams").json()["streams"] == []
    assert client.get("/v1/streams?top=10").json()["streams"] == []
    problem(client.get("/v1/streams/a/days"), 404, "stream.not_found")
    streams.write(neighbour, [1])
    (stream,) = client.get("/v1/streams").json()["streams"]
    assert (stream["name"], stream["expired"]) == (neighbour, False)
    streams.write("a", [2])
    assert [s["expired"] for s in client.get("/v1/streams").json()["streams"]] == [True, False]


# The largest.


def test_the_largest_streams_come_first(streams: Streams, client: httpx.Client) -> None:
    for name, count in {"a/small": 1, "a/large": 40, "b/largest": 80, "a/middle": 20, "c/none": 1}.items():
        streams.write(name, [f"{name} {n}" for n in range(count)])
    answer = client.get("/v1/streams?top=3").json()
    assert [stream["name"] for stream in answer["streams"]] == ["b/largest", "a/large", "a/middle"]
    assert answer["next"] is None
    assert [s["memory"] for s in answer["streams"]] == [None] * 3
    some = client.get("/v1/streams", params={"top": 1000, "prefix": "a/"}).json()["streams"]
    assert [stream["name"] for stream in some] == ["a/large", "a/middle", "a/small"]
    listed = {stream["name"]: stream for stream in client.get("/v1/streams").json()["streams"]}
    assert some == [listed[stream["name"]] for stream in some]


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("top=0", "'top'"),
        ("top=1001", "'top'"),
        ("top=many", "'top'"),
        ("top=5&after=a", "after"),
        ("top=5&limit=5", "limit"),
        ("memory=true", "top"),
    ],
)
def test_what_does_not_go_with_the_largest_is_refused_by_name(client: httpx.Client, query: str, named: str) -> None:
    assert named in problem(client.get(f"/v1/streams?{query}"), 400, "request.invalid")


def walking(store: StoreOptions, use: Callable[[Largest], Any]) -> Any:
    async def walk() -> Any:
        nodes = Nodes(store)
        try:
            async with aclosing(Largest(nodes, Logs(nodes, "days"))) as found:
                return await use(found)
        finally:
            await nodes.close()

    return asyncio.run(walk())


def write_sizes(store: StoreOptions, sizes: list[int]) -> None:
    """Write a stream for each size, with an event that has about so many numbers."""
    writer = Writer(store)
    for at in range(0, len(sizes), 500):
        writer.write(
            Record(i, b"s%05d" % i, json.dumps(list(range(sizes[i]))).encode())
            for i in range(at, min(at + 500, len(sizes)))
        )


async def all_sizes(store: StoreOptions) -> dict[str, int]:
    nodes = Nodes(store)
    try:
        logs = Logs(nodes, "days")
        names = await logs.names("", "", 10_000)
        return {
            name: sum(s.bytes for s in log.segments) for name, log in zip(names, await logs.logs_of(names), strict=True)
        }
    finally:
        await nodes.close()


def test_every_page_is_looked_at_and_only_the_best_are_remembered(
    any_store: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(largest, "MAX_TOP", 20)
    monkeypatch.setattr(largest, "PAGE", 100)
    sizes = [1 + (i * 7919) % 1009 for i in range(1_009)]
    write_sizes(any_store, sizes)
    found: list[Stream] = walking(any_store, lambda walker: walker.find("", 1_000)).streams
    assert len(found) == 20
    assert [stream.bytes for stream in found] == sorted((stream.bytes for stream in found), reverse=True)
    everything = asyncio.run(all_sizes(any_store))
    assert [stream.bytes for stream in found] == sorted(everything.values(), reverse=True)[:20]
    assert all(everything[stream.name] == stream.bytes for stream in found)


def test_of_equally_large_streams_the_first_by_name_are_taken(streams: Streams, client: httpx.Client) -> None:
    for name in ("d", "b", "a", "c"):
        streams.write(name, [1])
    found = client.get("/v1/streams?top=3").json()["streams"]
    assert [stream["name"] for stream in found] == ["a", "b", "c"]


def test_memory_is_what_the_server_says_of_all_keys_of_a_stream(any_store: StoreOptions) -> None:
    Writer(any_store).write([Record(i, b"a", time=NOON + i * DAY) for i in range(5)])
    (stream,) = walking(any_store, lambda walker: walker.find("", 1, memory=True)).streams
    with Keeper(any_store) as keeper:
        shard, keys = shard_of("a", any_store.shards), any_store.keys
        owned = [keys.log(shard, "days", "a"), *(keys.segment(shard, "days", i, "a") for i in range(5))]
        node: Any = keeper.shards.client(shard)
        assert stream.memory == sum(node.memory_usage(key, 0) for key in owned) > stream.bytes


def test_those_who_ask_together_share_one_walk_and_those_who_ask_soon_get_its_answer(
    own_valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(largest, "KEPT_S", 60.0)
    store = StoreOptions(own_valkey.url)  # nobody else's reads are counted
    write_sizes(store, [5, 6, 7])

    def reads(client: Valkey) -> int:
        stats: Any = client.info("commandstats")
        return int(stats.get("cmdstat_zrange", {"calls": 0})["calls"])

    with Valkey.from_url(store.url) as client:

        async def ask(walker: Largest) -> None:
            before = reads(client)
            first, second = await asyncio.gather(walker.find("", 1), walker.find("", 3))
            assert (second.streams[:1], len(second.streams)) == (first.streams, 3)
            once = reads(client) - before
            assert once == store.shards
            await asyncio.to_thread(Writer(store).write, [Record(9, b"new", b'"%s"' % (b"x" * 1000))])
            assert (await walker.find("", 3)).streams == second.streams
            assert reads(client) - before == once
            assert [stream.name for stream in (await walker.find("n", 3)).streams] == ["new"]

        walking(store, ask)


def test_an_answer_is_kept_for_a_moment_only(store: StoreOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "KEPT_S", 0.0)
    write_sizes(store, [5])

    async def ask(walker: Largest) -> None:
        assert len((await walker.find("", 9)).streams) == 1
        await asyncio.to_thread(Writer(store).write, [Record(9, b"new")])
        deadline = time.monotonic() + 10
        while len((await walker.find("", 9)).streams) == 1:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    walking(store, ask)


def test_more_walks_than_may_be_are_refused_and_a_few_answers_are_kept(store: StoreOptions) -> None:
    write_sizes(store, [5])

    async def ask(walker: Largest) -> list[Any]:
        for prefix in "abcdefgh":
            await walker.find(prefix, 1)
        return await asyncio.gather(*(walker.find(prefix, 1) for prefix in "stuvw"), return_exceptions=True)

    *served, refused = walking(store, ask)
    assert [len(answer.streams) for answer in served] == [1, 0, 0, 0]
    assert isinstance(refused, Overloaded)

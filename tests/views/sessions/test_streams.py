"""The hub of streams on a real Valkey: one reader for all, what is held, and what those behind read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.errors import StoreUnavailable
from tailrace.log.cursor import END, EntryId, parse_id
from tailrace.valkey.shards import Nodes, StoreOptions
from tailrace.views.sessions import reader as streams
from tailrace.views.sessions.reader import StreamHub, Tap
from tailrace.views.sessions.streams import LiveSessions, StreamEntry
from tests.views.sessions.foreign import T0, Foreign, connected, event, periodic


@asynccontextmanager
async def hub_of(options: StoreOptions, **more: Any) -> AsyncIterator[StreamHub]:
    nodes = Nodes(options)
    try:
        async with aclosing(StreamHub(LiveSessions(nodes), **more)) as hub:
            yield hub
    finally:
        await nodes.close()


async def happens(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


def numbers(entries: list[StreamEntry] | None) -> list[int]:
    assert entries is not None
    return [entry.number for entry in entries]


async def test_a_session_that_another_program_wrote_is_found_and_read(any_store: StoreOptions) -> None:
    with connected(any_store) as client:
        mine = Foreign(client, f"{any_store.prefix}-cars", f"{any_store.prefix}/a b").open()
        other = Foreign(client, mine.stream, f"{any_store.prefix}-other").open()
        ids = [parse_id(mine.send(periodic(1, T0 + i, 1, [1.0]), start=T0, end=T0 + i)) for i in range(3)]
        other.close("truncated")
        async with hub_of(any_store) as hub:
            live = hub.live
            found = await live.get(mine.identity)
            assert found is not None
            assert (found.number, found.stream, found.state) == (mine.number, mine.stream, "open")
            assert (found.span, found.position) == ((T0, T0 + 2), (0, 0))
            ended = await live.get(other.identity)
            assert ended is not None
            assert (ended.state, ended.span, ended.merged, ended.order) == ("truncated", None, None, ())
            assert await live.get("nobody") is None
            entries = await live.read(mine.stream, (0, 0), 100, mine.number)
            assert [entry.id for entry in entries][1:] == ids
            order = [mine.number, other.number, *[mine.number] * 3, other.number]
            assert numbers(await live.read(mine.stream, (0, 0), 100)) == order
            assert await live.tail(mine.stream) == await live.last_generated_id(mine.stream) > ids[-1]
            assert await live.first(mine.stream) == entries[0].id
            assert (await live.tail("no-such"), await live.last_generated_id("no-such")) == ((0, 0), (0, 0))
            assert await live.first("no-such") is None
            assert await live.trimmed(mine.stream, 1) is None


async def test_a_hash_without_what_every_writer_writes_is_no_session(store: StoreOptions) -> None:
    with connected(store) as client:
        async with hub_of(store) as hub:
            for i, fields in enumerate(
                (
                    {"streamSessionId": "x", "streamName": "s"},
                    {"streamSessionId": "1"},
                    {"streamSessionId": "1", "streamName": "s", "streamPosition": "?"},
                    {"streamSessionId": "1", "streamName": "s", "json": b"\xff"},
                )
            ):
                client.hset(f"sessions:{store.prefix}{i}", mapping=fields)
                assert await hub.live.get(f"{store.prefix}{i}") is None
            client.hset(f"sessions:{store.prefix}-half", mapping={"streamSessionId": 1, "streamName": "s", "tStart": 1})
            half = await hub.live.get(f"{store.prefix}-half")
            assert half is not None
            assert (half.json, half.span) == (None, None)


async def test_what_nobody_should_have_written_stops_no_reader(store: StoreOptions) -> None:
    deep = '{"state": "open", "details": ' + "[" * 100_000 + "]" * 100_000 + "}"
    with connected(store) as client:
        mine = Foreign(client, store.prefix, f"{store.prefix}a").open()
        async with hub_of(store) as hub, hub.follow(store.prefix, asyncio.Event()) as tap:
            for json in (deep, "no json", "[1]"):
                client.hset(mine.key, "json", json)
                located = await hub.live.get(mine.identity)
                assert located is not None
                assert (located.json, located.state) == (None, "")
            client.xadd(f"stream:{store.prefix}", {"id": "9" * 5000, "data": b""})
            client.xadd(f"stream:{store.prefix}", {"other": "field"})
            last = parse_id(mine.append(event(1, T0, "more")))
            await happens(lambda: tap.head == last)
            assert numbers(tap.after(tap.base)) == [-1, -1, mine.number]


async def test_a_scan_says_how_far_it_looked(store: StoreOptions) -> None:
    with connected(store) as client:
        mine = Foreign(client, store.prefix, f"{store.prefix}a").open()
        other = Foreign(client, store.prefix, f"{store.prefix}b").open()
        for i in range(100):
            (mine if i % 10 == 0 else other).append(event(1, T0 + i, "x"))
        async with hub_of(store) as hub:
            place: EntryId = (0, 0)
            seen: list[EntryId] = []
            while place < END:
                entries, place = await hub.live.scan(store.prefix, place, 3, mine.number)
                assert all(entry.number == mine.number for entry in entries)
                seen += [entry.id for entry in entries]
            assert len(seen) == 11 == len(set(seen))
            assert seen == sorted(seen)
            some, reached = await hub.live.scan(store.prefix, (0, 0), 100, mine.number, seen[4])
            assert ([entry.id for entry in some], reached) == (seen[:5], seen[4])


@asynccontextmanager
async def followers(hub: StreamHub, stream: str, count: int) -> AsyncIterator[tuple[list[Tap], list[asyncio.Event]]]:
    waiters = [asyncio.Event() for _ in range(count)]
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(hub.follow(stream, waiter)) for waiter in waiters], waiters


def readers() -> int:
    return sum(task.get_name().startswith("stream ") for task in asyncio.all_tasks())


async def test_many_followers_of_a_stream_share_one_reader(any_store: StoreOptions) -> None:
    stream = f"{any_store.prefix}-shared"
    with connected(any_store) as client:
        mine = Foreign(client, stream, f"{any_store.prefix}a").open()
        other = Foreign(client, stream, f"{any_store.prefix}b").open()
        async with hub_of(any_store) as hub:
            async with followers(hub, stream, 20) as (taps, waiters):
                assert (len(set(map(id, taps))), len(hub.taps), readers()) == (1, 1, 1)
                tap, head = taps[0], taps[0].head
                wanted = [parse_id(mine.append(event(1, T0 + i, "x"))) for i in range(5)]
                other.append(event(1, T0, "y"))
                await happens(lambda: (tap.after(head) or [])[5:])
                assert all(waiter.is_set() for waiter in waiters)
                assert [entry.id for entry in tap.after(head, mine.number) or ()] == wanted
                last = tap.after(wanted[3], mine.number)
                assert last is not None
                assert [entry.id for entry in last] == wanted[4:]
                assert tap.behind(wanted[3], mine.number) == len(last[0].data)
                assert tap.after(tap.head) == []
            await happens(lambda: readers() == 0)
            assert len(hub.taps) == 0


async def test_what_is_no_longer_held_is_read_from_the_store(store: StoreOptions) -> None:
    with connected(store) as client:
        mine = Foreign(client, store.prefix, f"{store.prefix}a").open()
        async with hub_of(store, ring_bytes=1 << 17) as hub, hub.follow(store.prefix, asyncio.Event()) as tap:
            begin = tap.head
            ids = [parse_id(mine.raw(bytes([i]) * 30_000)) for i in range(12)]
            await happens(lambda: tap.head == ids[-1])
            assert tap.after(begin, mine.number) is None
            assert 0 < tap.behind(begin, mine.number) <= 1 << 17
            entries, reached = await hub.live.scan(store.prefix, begin, 100, mine.number, tap.base)
            held = tap.after(reached, mine.number)
            assert held is not None
            assert [entry.id for entry in entries + held] == ids


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3000)), max_size=300),
    st.integers(1000, 100_000),
    st.integers(0, 320),
    st.integers(0, 4),
)
def test_a_tap_holds_an_unbroken_stretch_however_long_it_is_filled(
    written: list[tuple[int, int]], limit: int, at: int, number: int
) -> None:
    tap, every = Tap("s"), [StreamEntry((i + 1, 0), number, bytes(size)) for i, (number, size) in enumerate(written)]
    for entry in every:
        tap.add([entry], limit)
    place, wanted = (at, 0), number or None
    held = tap.after(place, wanted)
    if place < tap.base:
        assert held is None
        held = tap.after(tap.base, wanted)
    mine = [entry for entry in every if entry.id > max(place, tap.base) and wanted in (None, entry.number)]
    assert held == mine
    assert tap.behind(place, wanted) == sum(len(entry.data) for entry in mine)
    assert tap.after(max(place, tap.base), wanted, 3) == mine[:3]
    assert tap.head == ((len(every), 0) if every else (0, 0))
    kept = [entry for entry in every if entry.id > tap.base]
    assert sum(len(entry.data) + streams.OVERHEAD for entry in kept) <= limit or not kept


async def test_a_form_of_an_entry_is_made_once_and_the_oldest_are_forgotten(store: StoreOptions) -> None:
    made: list[EntryId] = []

    def make(entry: StreamEntry) -> bytes:
        made.append(entry.id)
        return bytes(40_000)

    async with hub_of(store, ring_bytes=1 << 17) as hub:
        entries = [StreamEntry((i, 0), 1, b"") for i in range(1, 9)]
        for entry in entries:
            assert hub.form(entry, "a", make, len) is hub.form(entry, "a", make, len)
        assert len(made) == 8
        assert sum(bool(entry.forms) for entry in entries) == 3
        hub.form(entries[0], "a", make, len)
        assert made[-1] == (1, 0)
        assert hub.one(frozenset({1, 2})) is hub.one(frozenset({2, 1}))


async def test_entries_that_are_deleted_while_they_are_read_are_only_missing(store: StoreOptions) -> None:
    with connected(store) as client:
        mine = Foreign(client, store.prefix, f"{store.prefix}a").open()
        async with hub_of(store) as hub, hub.follow(store.prefix, asyncio.Event()) as tap:
            ids = [mine.append(event(1, T0 + i, "x")) for i in range(100)]
            await happens(lambda: tap.head == parse_id(ids[-1]))
            first, place = await hub.live.scan(store.prefix, (0, 0), 40, mine.number)
            client.xdel(f"stream:{store.prefix}", *ids[30:60], ids[-1])
            rest, _ = await hub.live.scan(store.prefix, place, 100, mine.number)
            assert [entry.id for entry in first[1:] + rest] == [parse_id(i) for i in ids[:39] + ids[60:99]]
            client.xtrim(f"stream:{store.prefix}", maxlen=0)
            assert await hub.live.scan(store.prefix, place, 100) == ([], END)
            assert await hub.live.last_generated_id(store.prefix) == tap.head
            assert len(tap.after(place, mine.number) or ()) == 61
            more = parse_id(mine.append(event(1, T0, "more")))
            await happens(lambda: tap.head == more)


async def test_a_stream_that_begins_anew_with_lower_ids_is_read_from_its_beginning(
    store: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CHECK_S", 0.1)
    monkeypatch.setattr(streams, "BLOCK_MS", 50)
    key, waiter = f"stream:{store.prefix}", asyncio.Event()
    with connected(store) as client:
        client.xadd(key, {"id": 1, "data": b"x"})
        async with hub_of(store) as hub, hub.follow(store.prefix, waiter) as tap:
            assert tap.head > (1, 0)
            client.delete(key)
            client.xadd(key, {"id": 2, "data": b"y"}, id="5-1")
            await happens(lambda: tap.head == (5, 1))
            assert (tap.era, numbers(tap.after((0, 0)))) == (1, [2])
            assert waiter.is_set()


async def test_a_follower_goes_on_when_the_store_is_back(own_valkey: EmbeddedValkey) -> None:
    options = StoreOptions(own_valkey.url)
    async with hub_of(options) as hub, hub.follow("s", asyncio.Event()) as tap:
        with connected(options) as client:
            client.xadd("stream:s", {"id": 1, "data": b"x"}, id="1-1")
        await happens(lambda: tap.head == (1, 1))
        own_valkey.stop()
        own_valkey.start(30)
        with connected(options) as client:
            client.xadd("stream:s", {"id": 1, "data": b"y"}, id="2-1")
        await happens(lambda: tap.head == (2, 1))
        assert numbers(tap.after((0, 0))) == [1, 1]


async def test_without_a_store_nobody_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "OPEN_S", 0.2)
    async with hub_of(StoreOptions("valkey://127.0.0.1:1")) as hub:
        with pytest.raises(StoreUnavailable):
            async with hub.follow("s", asyncio.Event()):
                pass
        await happens(lambda: readers() == 0)

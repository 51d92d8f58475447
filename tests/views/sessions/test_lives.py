"""The feed of a session over its lives, ends and moves, and over streams that somebody else cuts or begins anew."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import pytest

from tailrace.errors import CursorGone
from tailrace.log.cursor import EntryId, parse_id
from tailrace.log.request import AnyFrame, EventFrame
from tailrace.valkey.shards import StoreOptions
from tailrace.views.sessions import feed as session_wait
from tailrace.views.sessions import reader as session_reader
from tailrace.views.sessions import reader as streams
from tailrace.views.sessions.life import SessionParts
from tailrace.views.sessions.streams import Located, SessionCursor
from tests.views.sessions.foreign import Foreign, connected, event, periodic, time_range
from tests.views.sessions.recorded import MS, T0, Track
from tests.views.sessions.viewing import controls, events, feeds_of, opened, read, samples, shown_in, until, views


def lap(track: Track, *numbers: int, session: str = "lap") -> None:
    """Write samples, each in a write of its own."""
    for n in numbers:
        track.write(track.periodic(session, n, [n]))


def expected(*numbers: int) -> dict[str, list[tuple[int, float]]]:
    return {"1": [(T0 + n * MS, float(n)) for n in numbers]}


async def located_in(feeds: SessionParts, identity: str = "lap") -> Located:
    located = await feeds.live.get(identity)
    assert located is not None
    return located


async def entries_of(feeds: SessionParts, identity: str = "lap") -> list[EntryId]:
    located = await located_in(feeds, identity)
    return [each.id for each in await feeds.live.read(located.stream, (0, 0), 100, located.number)]


def ids_in(track: Track) -> list[EntryId]:
    """Return the entries that the stream has, while nothing else of this process happens."""
    key = track.shards.keys.stream(track.stream())
    return [parse_id(entry) for entry, _ in track.shards.run_keyed([(key, ("XRANGE", key, "-", "+"))])[0]]


def names(frames: list[AnyFrame]) -> list[str]:
    return [name for name, _ in controls(frames)]


def ended(found: list[AnyFrame]) -> bool:
    return "end" in names(found)


# Its range.


async def test_the_range_that_is_shown_only_grows_whatever_the_stream_says(store: StoreOptions) -> None:
    with connected(store) as client:
        mine = Foreign(client, f"{store.prefix}-cars", f"{store.prefix}-mine").open()
        mine.send(start=T0, end=T0 + 50)
        async with feeds_of(store) as feeds:
            for asked in ({"start": "-3"}, {"start": "start"}):
                feed = await opened(feeds, mine.identity, **asked)
                mine.append(time_range(T0 + 10, T0 + 20))
                mine.append(time_range(T0 - 5, T0 + 20), event(1, T0, "last"))
                got = await until(feed, events)
                ranges = [tuple(map(int, shown["range"])) for shown in shown_in(got) if "range" in shown]
                assert ranges[-1] == (T0 - 5, T0 + 50)
                assert all(a[0] >= b[0] and a[1] <= b[1] for a, b in pairwise(ranges))


# Streams that are cut, or begin anew.


async def test_what_comes_right_after_a_cut_is_shown_in_full(store: StoreOptions) -> None:
    with connected(store) as client:
        mine = Foreign(client, f"{store.prefix}-cars", f"{store.prefix}-mine").open()
        ids = list[bytes]()
        for i in range(3):
            await asyncio.sleep(0.002)  # so that the ids are what they mostly are: each in a millisecond of its own
            ids.append(mine.send(event(1, T0 + i, str(i))))
        client.xtrim(f"stream:{mine.stream}", minid=ids[1], approximate=False)
        async with feeds_of(store) as feeds:
            got = await read(feeds, mine.identity, follow=False)
            assert dict(controls(got))["gap"]["possible"]
            assert [each["text"] for each in events(got)] == ["1", "2"]


async def test_a_stream_of_ours_that_somebody_else_cuts_may_have_a_gap(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open(), track.open("other"))
    lap(track, *range(6))
    lap(track, 1, session="other")
    async with views(track) as feeds:
        number, ids = (await located_in(feeds)).number, await entries_of(feeds)
        track.shed(number, ids[:2])
        assert "possible" not in dict(controls(await read(feeds, follow=False)))["gap"]
        assert "gap" not in names(await read(feeds, "other", follow=False))
        key = track.shards.keys.stream(track.stream())
        track.shards.run_keyed([(key, ("XTRIM", key, "MINID", f"{ids[4][0]}-{ids[4][1]}"))])
        got = await read(feeds, follow=False)
        assert [facts.get("possible") for name, facts in controls(got) if name == "gap"] == [None, True]
        assert samples(got) == expected(3, 4, 5)
        at = SessionCursor.parse(next(f.cursor for f in got if isinstance(f, EventFrame) and b'"v":' in f.data))
        assert "gap" not in names(await read(feeds, after=str(at), follow=False))


async def test_a_read_that_trims_cross_again_and_again_tells_all_that_is_gone(
    store: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_reader, "TRIES", 1)
    track = Track(store)
    track.write(track.open())
    lap(track, *range(6))
    async with views(track) as feeds:
        number, ids, live = (await located_in(feeds)).number, await entries_of(feeds), feeds.live
        scan = live.scan

        async def crossed(*asked: Any) -> Any:
            found = await scan(*asked)
            track.shed(number, ids[:4])
            return found

        monkeypatch.setattr(live, "scan", crossed)
        got = await read(feeds, follow=False)
        gap = dict(controls(got))["gap"]
        assert (gap["to"], gap["reason"]) == (f"{ids[3][0]}-{ids[3][1]}", "trimmed")
        assert samples(got) == expected(3, 4, 5)


async def test_a_stream_that_begins_anew_is_told_and_followed(
    store: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CHECK_S", 0.1)
    monkeypatch.setattr(streams, "BLOCK_MS", 50)
    with connected(store) as client:
        mine = Foreign(client, f"{store.prefix}-cars", f"{store.prefix}-mine").open()
        mine.append(periodic(1, T0, 1, [1.0]))
        entry = {"id": mine.number, "data": client.xrevrange(f"stream:{mine.stream}", count=1)[0][1][b"data"]}
        async with feeds_of(store) as feeds:
            feed = await opened(feeds, mine.identity, start="start")
            batches = feed.__aiter__()
            got = list(await anext(batches))
            client.delete(f"stream:{mine.stream}")
            client.xadd(f"stream:{mine.stream}", entry, id="5-1")
            async with asyncio.timeout(20):
                while len(samples(got)["1"]) < 2:
                    got += await anext(batches)
            await feed.aclose()
            assert dict(controls(got))["gap"]["reason"] == "store-rolled-back"
            assert got[-1].cursor == f"{mine.number}.5-1"
            assert samples(await read(feeds, mine.identity, after=f"{mine.number}.5-0", follow=False)) == {
                "1": [(T0, 1.0)]
            }
            later = await read(feeds, mine.identity, after=f"{mine.number}.77-0", follow=False)
            assert dict(controls(later))["gap"]["reason"] == "store-rolled-back"


async def test_what_comes_before_an_entry_that_cannot_be_read_is_sent_before_that_fails(store: StoreOptions) -> None:
    unread: list[int] = []
    with connected(store) as client:
        mine = Foreign(client, f"{store.prefix}-cars", f"{store.prefix}-mine").open()
        mine.send(periodic(1, T0, 1, [1.0]))
        mine.raw(b"\xffnot a block")
        async with feeds_of(store) as parts:
            feeds = SessionParts(parts.hub, on_unread=lambda: unread.append(1))
            feed, got = await opened(feeds, mine.identity, start="start", on_gap="fail"), list[AnyFrame]()
            batches = feed.__aiter__()
            got += await anext(batches)
            with pytest.raises(CursorGone):
                await anext(batches)
            assert samples(got) == {"1": [(T0, 1.0)]}
            assert unread == [1]


# Lives.


@pytest.mark.parametrize("beside", [False, True])
async def test_a_session_that_is_no_longer_kept_ends_also_beside_one_that_never_stops(
    store: StoreOptions, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    monkeypatch.setattr(session_wait, "CHECK_S", 0.3)
    track = Track(store)
    track.write(track.open(), track.open("chatty"))
    lap(track, 1)
    async with views(track) as feeds:
        feed = await opened(feeds, start="start")
        key = track.plan.store.key.replace("{identity}", "lap")
        track.shards.run_keyed([(key, ("DEL", key))])

        async def chat() -> None:
            for n in range(10_000):
                await asyncio.to_thread(lap, track, n, session="chatty")

        chatting = asyncio.create_task(chat()) if beside else None
        got = await until(feed, ended)
        if chatting is not None:
            chatting.cancel()
            await asyncio.wait({chatting})
        assert samples(got) == expected(1)
        assert dict(controls(got))["end"]["reason"] == "expired"


async def test_a_session_that_is_opened_again_in_another_stream_is_followed_there(
    store: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_wait, "CHECK_S", 0.3)
    with connected(store) as client:
        first = Foreign(client, f"{store.prefix}-a", f"{store.prefix}-mine").open()
        first.append(periodic(1, T0, 1, [1.0]))
        async with feeds_of(store) as feeds:
            feed = await opened(feeds, first.identity, start="start")
            batches = feed.__aiter__()
            got = list(await anext(batches))
            second = Foreign(client, f"{store.prefix}-b", first.identity).open()
            second.append(periodic(1, T0 + 1, 1, [2.0]))
            second.close()
            async for frames in batches:
                got += frames
            assert samples(got) == {"1": [(T0, 1.0), (T0 + 1, 2.0)]}
            facts = dict(controls(got))
            assert (facts["life"]["before"], facts["life"]["number"]) == (first.number, second.number)
            assert facts["end"]["reason"] == "closed"


async def test_whoever_comes_back_after_several_lives_gets_all_of_them(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open(), track.open("other"))
    lap(track, 0)
    async with views(track) as feeds:
        first = await read(feeds, follow=False)
        cursor = next(frame.cursor for frame in reversed(first) if isinstance(frame, EventFrame))
        for n in (1, 2, 3):
            lap(track, n, session="other")
            track.write(track.close(), track.open())
            lap(track, n)
        got = await read(feeds, after=cursor, follow=False)
        assert names(got) == ["life", "life", "life", "caught-up", "end"]
        assert samples(got) == expected(1, 2, 3)
        frames = [frame for frame in got if isinstance(frame, EventFrame)]
        for at, frame in enumerate(frames):
            assert samples([*frames[: at + 1], *await read(feeds, after=frame.cursor, follow=False)]) == samples(got)


async def test_a_cursor_of_another_session_shows_nothing_of_that_one(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open("other"), track.open())
    lap(track, 7, session="other")
    lap(track, 1)
    async with views(track) as feeds:
        got = await read(feeds, after=f"{(await located_in(feeds, 'other')).number}.1-0", follow=False)
        assert dict(controls(got))["gap"]["reason"] == "life-over"
        assert samples(got) == expected(1)
        assert {shown["json"]["identity"] for shown in shown_in(got) if "json" in shown} == {"lap"}


async def test_a_life_that_is_over_before_it_is_joined_is_not_skipped(
    store: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    track = Track(store)
    track.write(track.open())
    lap(track, 0)
    async with views(track) as feeds:
        feed, live = await opened(feeds, start="start"), feeds.live
        first, get, seen = (await located_in(feeds)).number, live.get, list[int]()

        async def crossed(identity: str) -> Located | None:
            found: Located | None = await get(identity)
            if found is not None and found.number > first and not seen:
                seen.append(found.number)  # whoever goes there finds a third one
                lap(track, 1)
                track.write(track.close(), track.open())
                lap(track, 2)
                track.write(track.close())
            return found

        monkeypatch.setattr(live, "get", crossed)
        track.write(track.close(), track.open())
        got = await until(feed, ended)
        assert samples(got) == expected(0, 1, 2)
        assert [facts["number"] for name, facts in controls(got) if name == "life"] == [*seen, seen[0] + 1]


async def test_what_is_left_of_a_life_between_is_found_also_without_its_beginning(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open())
    lap(track, 0)
    async with views(track) as feeds:
        feed = await opened(feeds, start="start")
        track.write(track.close(), track.open())  # nothing reads from here on
        number, end = int(track.hash()["streamSessionId"]), parse_id(track.hash()["streamPosition"])
        lap(track, 1, 2)
        ids = [entry for entry in ids_in(track) if entry > end]
        track.write(track.close(), track.open())
        lap(track, 3)
        track.write(track.close())
        track.shed(number, ids[:2])
        got = await until(feed, ended)
        assert samples(got) == expected(0, 2, 3)
        assert [facts["reason"] for name, facts in controls(got) if name == "gap"] == ["trimmed"]


# What is trimmed before anybody has read it.


async def test_a_live_viewer_is_told_what_was_trimmed_before_its_stream_was_read(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open())
    lap(track, 0)
    async with views(track) as feeds:
        feed, got, is_trimmed = await opened(feeds, start="start"), list[AnyFrame](), False
        async with asyncio.timeout(20), aclosing(feed):
            async for frames in feed:
                got += frames
                if "caught-up" in names(got) and not is_trimmed:
                    is_trimmed = True
                    lap(track, 1, 2, 3)  # nothing reads meanwhile
                    track.shed(int(track.hash()["streamSessionId"]), ids_in(track)[:-1])
                if len(samples(got)["1"]) > 1:
                    break
        assert samples(got) == expected(0, 3)
        assert [facts["reason"] for name, facts in controls(got) if name == "gap"] == ["trimmed"]


async def test_whoever_comes_back_to_a_stream_without_entries_is_told_what_is_gone(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open())
    lap(track, 0, 1)
    async with views(track) as feeds:
        ids = await entries_of(feeds)
        number = (await located_in(feeds)).number
        track.shed(number, ids)
        got = await read(feeds, after=f"{number}.{ids[0][0]}-{ids[0][1]}", follow=False)
        (gap,) = [facts for name, facts in controls(got) if name == "gap"]
        assert (gap["to"], gap["reason"]) == (f"{ids[-1][0]}-{ids[-1][1]}", "trimmed")
        assert "gap" not in names(await read(feeds, after=f"{number}.{ids[-1][0]}-{ids[-1][1]}", follow=False))


async def test_a_key_of_another_kind_is_no_session(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open(), track.open("other"))
    key = track.plan.store.key.replace("{identity}", "lap")
    track.shards.run_keyed([(key, ("SET", key, "something else"))])
    track.write(track.periodic("lap", 0, [1]), track.periodic("other", 0, [2]))
    (letter,) = track.letters()
    assert (letter["reason"], letter["offset"]) == ("session-key", 2)
    assert f"{key} is a string" in letter["what"]
    async with views(track) as feeds:
        assert await feeds.live.get("lap") is None
        assert [found.identity for found in await feeds.live.listing()] == ["other"]
        assert samples(await read(feeds, "other", follow=False)) == {"1": [(T0, 2.0)]}
        track.shards.run_keyed([(key, ("DEL", key))])
        track.write(track.periodic("lap", 1, [3]))
        assert samples(await read(feeds, follow=False)) == {"1": [(T0 + MS, 3.0)]}

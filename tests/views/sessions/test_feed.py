"""The feed of a session on a real store: each sample once, from anywhere, over trims, ends and new lives."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.api.requests import SessionFeedParameters
from tailrace.errors import BadRequest, CursorGone, SessionNotFound
from tailrace.log.request import ControlFrame, EventFrame
from tailrace.valkey.shards import StoreOptions
from tailrace.views.sessions import life as session_start
from tailrace.views.sessions.routes import make_session_request
from tailrace.views.sessions.samples import StreamPosition
from tailrace.views.sessions.streams import SessionCursor
from tests.examples import examples
from tests.views.sessions.foreign import Foreign, connected
from tests.views.sessions.foreign import periodic as foreign_periodic
from tests.views.sessions.recorded import MS, T0, Track
from tests.views.sessions.viewing import (
    controls,
    events,
    feeds_of,
    happens,
    opened,
    read,
    samples,
    shown_in,
    until,
    views,
)

CONFIG: dict[str, Any] = {
    "Chassis": {
        "channels": [
            {"id": 1, "name": "speed", "type": "u16", "source": "periodic", "interval": MS},
            {"id": 2, "name": "gear", "type": "u8", "source": "timestamped"},
            {"id": 3, "name": "force", "type": "3f32", "source": "timestamped"},
        ],
        "conversions": [
            {"name": "tenth", "unit": "km/h", "rational": {"coeffs": [0, 0.1, 0, 0, 0, 1]}},
            {"name": "gears", "text": {"keys": [0, 1, 2], "values": ["N", "1st", "2nd"], "default": "?"}},
        ],
        "parameters": [
            {"id": "vCar:Chassis", "name": "vCar", "conv": "tenth", "channels": [1]},
            {"id": "nGear:Chassis", "name": "nGear", "conv": "gears", "channels": [2]},
            {"id": "bClutch:Chassis", "name": "bClutch", "mask": "1", "channels": [2]},
        ],
        "events": [{"id": 4, "code": "OVER", "desc": "over speed", "pri": "high"}],
    }
}
BOUND = [{"identifier": "car-7", "channelOffset": 0}]


def lap(track: Track, bursts: int, first: int = 0) -> None:
    """Write so many bursts of ten samples, each a write of its own."""
    for i in range(first, first + bursts):
        track.write(track.periodic("lap", 10 * i, range(10 * i, 10 * i + 10)))


def expected(*numbers: int) -> list[tuple[int, float]]:
    return [(T0 + n * MS, float(n)) for n in numbers]


def configured(track: Track) -> None:
    """Write a session with a configuration, of three channels."""
    track.write(
        track.record("lap", "open", json={"configBindings": BOUND}, configs={"car-7": CONFIG}),
        track.data(
            periodic=[{"channel": 1, "start": T0, "values": [100, 205]}],
            timestamped=[
                {"channel": 2, "times": [T0, T0 + 1], "values": [2, 7]},
                {"channel": 3, "times": [T0], "values": [1, 2, 3]},
            ],
            events=[{"id": 4, "app": "Chassis", "time": T0 + 5, "text": "too fast", "values": [301.5]}],
        ),
    )


async def test_a_session_is_followed_from_its_start_to_its_close(any_store: StoreOptions) -> None:
    track = Track(any_store)
    track.write(track.open())
    lap(track, 3)
    async with views(track) as feeds:
        feed = await opened(feeds, start="start")
        before = await until(feed, lambda found: any(isinstance(f, ControlFrame) for f in found))
        assert samples(before) == {"1": expected(*range(30))}
        ((name, facts),) = controls(before)
        assert name == "caught-up"
        assert facts["position"] == str(SessionCursor.parse(before[-1].cursor).position)
        assert shown_in(before)[0]["json"]["state"] == "open"
        feed = await opened(feeds, last_event_id=before[-1].cursor)
        lap(track, 2, 3)
        track.write(track.close(state="truncated"))
        after = await until(feed, lambda found: isinstance(found[-1], ControlFrame))
        assert samples(after) == {"1": expected(*range(30, 50))}
        assert dict(controls(after))["end"]["reason"] == "truncated"
        assert shown_in(after)[-1]["json"]["state"] == "truncated"
        assert after[-1].cursor.endswith("~end")


async def test_what_is_joined_says_all_that_was_said_of_the_session(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.record("lap", "open", json={"details": {"driver": "Ada"}}))
    lap(track, 2)
    track.write(track.record("lap", "session", json={"details": None, "configBindings": []}))
    track.write(track.record("lap", "close"))
    async with views(track) as feeds:
        jsons = [frame["json"] for frame in shown_in(await read(feeds, follow=False)) if "json" in frame]
    assert len(jsons) == 1
    assert (jsons[0]["details"], jsons[0]["configBindings"], jsons[0]["state"]) == ({"driver": "Ada"}, [], "closed")


async def test_values_are_converted_once_and_times_are_exact(store: StoreOptions) -> None:
    track = Track(store)
    configured(track)
    async with views(track) as feeds:
        got = await read(feeds, follow=False)
        found = samples(got)
        assert found == {
            "vCar:Chassis": [(T0, 10.0), (T0 + MS, 20.5)],
            "nGear:Chassis": [(T0, "2nd"), (T0 + 1, "?")],
            "bClutch:Chassis": [(T0, 0), (T0 + 1, 1)],
            "force": [(T0, [1.0, 2.0, 3.0])],
        }
        units = {each["name"]: each["unit"] for shown in shown_in(got) for each in shown["channels"]}
        assert units["vCar:Chassis"] == "km/h"
        assert events(got) == [
            {
                "id": 4,
                "app": "Chassis",
                "time": str(T0 + 5),
                "text": "too fast",
                "values": [301.5],
                "code": "OVER",
                "description": "over speed",
                "priority": "high",
            }
        ]
        raw = samples(await read(feeds, follow=False, raw=True, channels="1,gear"))
        assert raw == {"speed": [(T0, 100), (T0 + MS, 205)], "gear": [(T0, 2), (T0 + 1, 7)]}


async def test_channels_are_chosen_by_number_name_parameter_or_pattern(store: StoreOptions) -> None:
    track = Track(store)
    configured(track)
    async with views(track) as feeds:
        for asked, names in (
            ("1", {"vCar:Chassis"}),
            ("gear", {"nGear:Chassis", "bClutch:Chassis"}),
            ("nGear", {"nGear:Chassis"}),
            ("?Car:*, force", {"vCar:Chassis", "force"}),
        ):
            assert set(samples(await read(feeds, follow=False, channels=asked))) == names
        with pytest.raises(BadRequest, match=r"'wheel'.*vCar:Chassis, nGear:Chassis, bClutch:Chassis, force"):
            await opened(feeds, channels="vCar,wheel")
        for bad in (" ,", ",".join(f"*{n}" for n in range(51)), ",".join(map(str, range(1001)))):
            with pytest.raises(BadRequest):
                await opened(feeds, channels=bad)


async def test_a_start_is_what_it_is_everywhere(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open())
    lap(track, 6)
    async with views(track) as feeds:
        for start, first in (("-2", 40), (str(T0 + 33 * MS), 33), ("start", 0), ("-100", 0)):
            assert samples(await read(feeds, start=start, follow=False)) == {"1": expected(*range(first, 60))}
        nothing = await read(feeds, start="end", follow=False)
        assert samples(nothing) == {}
        assert shown_in(nothing)[0]["range"] == [str(T0), str(T0 + 59 * MS)]
        some = await read(feeds, start=str(T0 + 5 * MS), until=str(T0 + 7 * MS), follow=False)
        assert samples(some) == {"1": expected(5, 6, 7)}
        every = await read(feeds, start="start", follow=False)
        place = str(SessionCursor.parse(every[1].cursor).renewed())
        assert samples(await read(feeds, start="start", until=place)) == samples(every[:2])


async def test_a_time_is_found_without_reading_all_that_is_before_it(
    store: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_start, "NEAR_MS", 0)
    track = Track(store)
    track.write(track.open())
    lap(track, 12)
    track.write(track.periodic("lap", 3, [3]))  # late
    lap(track, 12, 12)
    async with views(track) as feeds:
        places = []
        for first in (0, 3, 57, 119, 121, 233, 239, 300):
            feed = await opened(feeds, start=str(T0 + first * MS))
            assert feed._life is not None
            places.append(feed._life.position)
            await feed.aclose()
            got = samples(await read(feeds, start=str(T0 + first * MS), follow=False)).get("1", [])
            late = [(T0 + 3 * MS, 3.0)] if first <= 3 else []
            assert sorted(got) == sorted([*expected(*range(first, 240)), *late])
        assert places == sorted(places)
        assert places[0] < places[2] < places[-1]


async def test_a_limit_counts_what_was_sent_before_a_resume(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open())
    async with views(track) as feeds:
        got: list[Any] = []
        for i in range(2):
            feed = await opened(feeds, **({"last_event_id": got[-1].cursor} if got else {"start": "start"}), limit=3)
            got += await until(feed, lambda found: any(isinstance(f, EventFrame) for f in found))
            lap(track, 1, i)
        rest = await read(feeds, last_event_id=got[-1].cursor, limit=3)
        assert controls(rest)[-1] == ("end", {"reason": "limit", "events": 3})
        assert len([f for f in (*got, *rest) if isinstance(f, EventFrame)]) == 3
        assert make_session_request("lap", SessionFeedParameters(), now_ms=0, last_event_id=rest[-1].cursor) is None


@examples(12)
@given(seed=st.integers(0, 1 << 32))
async def test_from_every_cursor_exactly_the_rest_comes(store: StoreOptions, seed: int) -> None:
    chance = random.Random(seed)
    track = Track(StoreOptions(store.url, prefix=f"{store.prefix}.{seed:x}"))
    track.write(track.open())
    at = 0
    for _ in range(chance.randrange(2, 8)):
        parts = []
        for channel in (1, 2):
            start = max(0, at - chance.choice((0, 0, 20)))
            values = [chance.choice((1.0, -2.0, None, 5.5)) for _ in range(chance.randrange(1, 30))]
            parts.append({"channel": channel, "start": T0 + start * MS, "interval": MS, "values": values})
        at += chance.randrange(40)
        track.write(track.data(periodic=parts, events=[{"id": 1, "time": T0 + at, "text": f"{at}"}]))
    if chance.random() < 0.5:
        track.write(track.close())
    asked: dict[str, Any] = chance.choice(({}, {"pixel": "7ms"}, {"rate": 90.0}, {"channels": "2", "pixel": "25ms"}))
    async with views(track) as feeds:
        everything = await read(feeds, start="start", follow=False, **asked)
        # Frames join what is there; the places in between are those of a viewer that comes burst by burst.
        for count in range(1, 9):
            feed = await opened(feeds, start="start", **asked)
            life = feed._life
            assert life is not None
            for _ in range(count):
                piece = await life.next()
                if piece is None:
                    break
                feed._take(piece)  # type: ignore[arg-type]
            first = [*feed._frames()]
            cursor = feed.cursor
            await feed.aclose()
            rest = await read(feeds, last_event_id=cursor, follow=False, **asked)
            assert merged(first, rest) == (samples(everything), events(everything))
        for at, frame in enumerate(everything[:-1], 1):
            rest = await read(feeds, last_event_id=frame.cursor, follow=False, **asked)
            assert merged(everything[:at], rest) == (samples(everything), events(everything))


def merged(first: list[Any], rest: list[Any]) -> tuple[Any, Any]:
    return samples([*first, *rest]), events([*first, *rest])


async def test_a_cursor_of_a_thinned_feed_goes_on_otherwise_without_loss(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open())
    lap(track, 3)
    async with views(track) as feeds:
        feed = await opened(feeds, start="start", pixel="1h")  # everything is held
        got = await until(feed, lambda found: controls(found))
        assert samples(got) == {}
        for asked in ({}, {"pixel": "30m"}, {"rate": 500.0}):
            rest = await read(feeds, last_event_id=got[-1].cursor, follow=False, **asked)
            if not asked:
                assert samples(rest) == {"1": expected(*range(30))}
            assert samples(rest)["1"][0] == expected(0)[0]
            for frame in rest[:-1]:
                more = await read(feeds, last_event_id=frame.cursor, follow=False, **asked)
                cut = rest.index(frame) + 1
                assert samples([*rest[:cut], *more]) == samples(rest)


async def test_what_was_trimmed_is_told_and_the_rest_comes(any_store: StoreOptions) -> None:
    track = Track(any_store)
    track.write(track.open())
    lap(track, 6)
    async with views(track) as feeds:
        feed = await opened(feeds, start="start")
        head = await until(feed, lambda found: any(isinstance(f, EventFrame) for f in found))
        live = feeds.live
        located = await live.get("lap")
        assert located is not None
        entries = await live.read(located.stream, (0, 0), 100, located.number)
        first = str(SessionCursor(located.number, StreamPosition.of(entries[1].id)))
        track.shed(located.number, [entry.id for entry in entries[:4]])
        got = await read(feeds, after=first, follow=False)
        assert controls(got)[0] == (
            "gap",
            {"session": "lap", "from": _text(entries[1].id), "to": _text(entries[3].id), "reason": "trimmed"},
        )
        assert samples(got) == {"1": expected(*range(30, 60))}
        assert any("json" in shown for shown in shown_in(got))
        with pytest.raises(CursorGone):
            await opened(feeds, after=first, on_gap="fail")
        exact = str(SessionCursor(located.number, StreamPosition.of(entries[3].id)))
        assert [name for name, _ in controls(await read(feeds, after=exact, follow=False))] == ["caught-up", "end"]
        assert samples(head) == {"1": expected(*range(60))}


async def test_a_trim_while_it_is_read_hides_nothing(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open())
    lap(track, 60)
    async with views(track) as feeds:
        live = feeds.live
        located = await live.get("lap")
        assert located is not None
        ids = [entry.id for entry in await live.read(located.stream, (0, 0), 100, located.number)]
        feed = await opened(feeds, start="start")  # it has read the first 32 entries ahead
        track.shed(located.number, ids[:20])
        track.shed(located.number, ids[20:45])
        got = await until(feed, lambda found: dict(controls(found)).get("caught-up"))
        gap = dict(controls(got))["gap"]
        assert (gap["from"], gap["to"]) == (_text(ids[31]), _text(ids[44]))
        assert samples(got) == {"1": expected(*range(310), *range(440, 600))}


async def test_the_last_bursts_of_a_quiet_session_are_found_behind_a_chatty_one(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open())
    lap(track, 4)
    for i in range(30):
        track.write(*(track.periodic(f"other{n}", i, [i]) for n in range(10)))
    async with views(track) as feeds:
        assert samples(await read(feeds, start="-2", follow=False)) == {"1": expected(*range(20, 40))}
        located = await feeds.live.get("lap")
        assert located is not None
        first = await feeds.live.first_entry(located.stream, located.number, (0, 0))
        assert first is not None
        assert first > located.position


async def test_what_several_viewers_want_alike_is_made_once(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open())
    async with views(track) as feeds:
        both = [await opened(feeds, start="end") for _ in range(2)]
        assert len(feeds.hub.taps) == 1
        lap(track, 1)
        got = [await until(feed, samples) for feed in both]
        first, second = (next(f for f in reversed(frames) if isinstance(f, EventFrame)) for frames in got)
        assert first.data is second.data


async def test_a_stream_that_others_trim_may_have_a_gap(store: StoreOptions) -> None:
    with connected(store) as client:
        mine = Foreign(client, f"{store.prefix}-cars", f"{store.prefix}-mine").open()
        ids = [mine.send(foreign_periodic(1, T0 + i, 1, [float(i)])) for i in range(5)]
        async with feeds_of(store) as feeds:
            whole = await read(feeds, mine.identity, follow=False)
            assert samples(whole) == {"1": [(T0 + i, float(i)) for i in range(5)]}
            assert "gap" not in dict(controls(whole))
            client.xtrim(f"stream:{mine.stream}", minid=ids[3], approximate=False)
            got = await read(feeds, mine.identity, follow=False)
            name, facts = controls(got)[0]
            assert (name, facts["reason"], facts["possible"]) == ("gap", "trimmed", True)
            assert samples(got) == {"1": [(T0 + 3, 3.0), (T0 + 4, 4.0)]}


async def test_an_entry_that_cannot_be_read_is_told_and_passed_over(store: StoreOptions) -> None:
    with connected(store) as client:
        mine = Foreign(client, f"{store.prefix}-cars", f"{store.prefix}-mine").open()
        mine.send(foreign_periodic(1, T0, 1, [1.0]))
        mine.raw(b"\xffnot a block")
        mine.send(foreign_periodic(1, T0 + 1, 1, [math.inf]))
        async with feeds_of(store) as feeds:
            got = await read(feeds, mine.identity, follow=False)
            assert controls(got)[0][1]["reason"] == "unreadable"
            assert samples(got) == {"1": [(T0, 1.0), (T0 + 1, None)]}


async def test_a_new_life_is_told_and_followed(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open())
    lap(track, 2)
    async with views(track) as feeds:
        first = await read(feeds, start="start", follow=False)
        early = next(frame.cursor for frame in first if isinstance(frame, EventFrame))
        lap(track, 1, 2)
        track.write(track.close())
        track.write(track.open())
        lap(track, 2, 3)
        got = await read(feeds, after=early, follow=False)
        assert [name for name, _ in controls(got)] == ["life", "caught-up", "end"]
        both = samples([f for f in first if f.cursor == early] + got)
        assert both == {"1": expected(*range(50))}


async def test_a_session_that_is_not_there_is_waited_for_or_refused(store: StoreOptions) -> None:
    track = Track(store)
    async with views(track) as feeds:
        with pytest.raises(SessionNotFound, match="lap"):
            await opened(feeds, missing="fail")
        feed = await opened(feeds, start="start")
        assert feed.cursor == ""
        track.write(track.open())
        lap(track, 1)
        got = await until(feed, lambda found: samples(found))
        assert samples(got) == {"1": expected(*range(10))}


async def test_a_viewer_that_was_dropped_goes_on_at_the_end_and_is_told(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open())
    async with views(track) as feeds:
        feed = await opened(feeds, start="start", pixel="3ms")
        iterator = feed.__aiter__()
        got = list(await anext(iterator))
        lap(track, 5)
        await happens(lambda: feed.behind)
        missed = feed.behind
        feed.drop()
        while not any(isinstance(f, ControlFrame) and f.name == "dropped" for f in got):
            got += await anext(iterator)
        facts = dict(controls(got))["dropped"]
        assert facts["bytes"] >= missed
        assert samples(got) == {}
        lap(track, 1, 5)
        track.write(track.close())
        async for frames in iterator:
            got += frames
        assert samples(got)["1"][0] == expected(50)[0]
        await feed.aclose()


async def test_two_sessions_of_one_stream_are_kept_apart(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open("a"), track.open("b"))
    for i in range(4):
        track.write(track.periodic("ab"[i % 2], i, [i]))
    async with views(track) as feeds:
        assert samples(await read(feeds, "a", follow=False)) == {"1": expected(0, 2)}
        assert samples(await read(feeds, "b", follow=False)) == {"1": expected(1, 3)}


def _text(entry: tuple[int, int]) -> str:
    return f"{entry[0]}-{entry[1]}"

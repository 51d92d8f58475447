"""The client against a real server that breaks connections: exact resume, errors by code, batches, listings."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tailrace
from tailrace.api.answers import Control, Event
from tailrace.client import connection
from tailrace.errors import (
    BadRequest,
    BrokerUnavailable,
    CursorGone,
    EventRefused,
    StreamNotFound,
    TailraceError,
    Unavailable,
    UsageError,
)
from tests.examples import examples
from tests.scripted import Plan, ScriptedService, event, running

NAME = "queue/jobset"


@pytest.fixture(scope="module")
def running_service() -> Iterator[ScriptedService]:
    with running() as service:
        yield service


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_WAIT", 0.002)


@pytest.fixture
def service(running_service: ScriptedService) -> ScriptedService:
    running_service.reset()
    return running_service


def follow(url: str, *names: str, silence: float = 5.0, **asked: Any) -> list[Event]:
    async def read() -> list[Event]:
        async with tailrace.connect(url, timeout=1.0, silence=silence) as river:
            return [event async for event in river.tail(*(names or (NAME,)), **asked)]

    return asyncio.run(asyncio.wait_for(read(), 30))


BREAKS = st.one_of(
    st.builds(Plan, status=st.sampled_from([500, 502, 503, 429])),
    st.builds(Plan, keep=st.integers(0, 4_000), clean=st.booleans(), chunk=st.integers(1, 700)),
)


@examples(40)
@given(breaks=st.lists(BREAKS, max_size=6), total=st.integers(0, 12), limit=st.none() | st.integers(1, 15))
def test_a_feed_that_is_cut_anywhere_yields_every_event_once_and_in_order(
    service: ScriptedService, breaks: list[Plan], total: int, limit: int | None
) -> None:
    service.reset()
    service.feeds[NAME] = total
    service.plans = list(breaks)
    events = follow(service.url, follow=False, limit=limit)
    assert [event.offset for event in events] == list(range(min(total, limit or total)))


def test_a_feed_that_is_cut_after_every_event_yields_all_of_them(service: ScriptedService) -> None:
    service.feeds[NAME] = 100
    size = len(b": hello\nretry: 2\n\nid: 7.10\n\n") + len(str(event(NAME, 10)).encode()) + 60
    service.plans = [Plan(keep=size, clean=bool(number % 2)) for number in range(300)]
    events = follow(service.url, follow=False)
    assert [event.offset for event in events] == list(range(100))
    assert len(service.asked) > 50


def test_an_event_has_all_that_the_frame_says(service: ScriptedService) -> None:
    service.feeds[NAME] = 2
    first, second = follow(service.url, follow=False)
    assert (first.id, first.topic, first.partition, first.offset) == ("jobs:0:0", "jobs", 0, 0)
    assert (first.key, first.headers, first.late, first.cursor) == (["queue", "jobset"], {}, False, "7.1")
    assert first.at.isoformat() == "2026-11-15T08:00:00+00:00"
    assert first.data == {"n": 0, "text": "zwölf\u2028\n", "big": 12345678901234567890123}
    assert b'"big": 12345678901234567890123' in first.raw
    assert second.late
    assert "zw" not in repr(first) + str(first)
    with pytest.raises(AttributeError):
        first.id = "other"  # type: ignore[misc]


def test_what_was_asked_is_sent_and_reconnecting_continues_the_same_request(service: ScriptedService) -> None:
    service.feeds |= {"a": 1, "b": 1}
    service.plans = [Plan(keep=0, clean=True), Plan(keep=40, clean=True)]
    follow(service.url, "a", "b", start="start", until="2027-01-01T00:00:00Z", limit=1, on_gap="fail", missing="fail")
    assert [asked["last-event-id"] for asked in service.asked] == [None, None, "7.0~0"]
    for asked in service.asked:
        assert asked["name"] == ["a", "b"]
        assert {key: asked[key] for key in ("from", "until", "limit", "follow", "missing", "on_gap")} == {
            "from": "start",
            "until": "2027-01-01T00:00:00Z",
            "limit": "1",
            "follow": "true",
            "missing": "fail",
            "on_gap": "fail",
        }


def test_silence_counts_as_a_disconnect(service: ScriptedService) -> None:
    service.feeds[NAME] = 3
    service.plans = [Plan(keep=400, stall=5.0)]
    assert [event.offset for event in follow(service.url, follow=False, silence=0.2)] == [0, 1, 2]
    assert len(service.asked) == 2


def test_204_ends_a_feed(service: ScriptedService) -> None:
    service.plans = [Plan(status=204)]
    assert follow(service.url) == []


def test_control_frames_are_told_and_can_be_read_with_the_events(service: ScriptedService) -> None:
    service.feeds[NAME] = 1
    service.control = 'id: 7.0\nevent: gap\ndata: {"from": "6.1", "to": "7.0", "reason": "expired"}\n\n'
    controls: list[Control] = []
    assert len(follow(service.url, follow=False, on_control=controls.append)) == 1
    assert [control.kind for control in controls] == ["gap", "caught-up", "end"]
    assert controls[0].data["reason"] == "expired"

    async def read() -> list[str]:
        async with tailrace.connect(service.url) as river, river.tail(NAME, follow=False) as feed:
            return [frame.kind if isinstance(frame, Control) else frame.id async for frame in feed.frames()]

    assert asyncio.run(read()) == ["gap", "jobs:0:0", "caught-up", "end"]


def test_a_problem_that_will_not_pass_ends_the_feed_with_its_error(service: ScriptedService) -> None:
    service.control = 'event: problem\ndata: {"code": "cursor.gone", "detail": "too old", "first": "9.1"}\n\n'
    with pytest.raises(CursorGone, match="too old") as caught:
        follow(service.url)
    assert caught.value.first == "9.1"


def test_a_problem_that_passes_is_waited_for(service: ScriptedService) -> None:
    service.feeds[NAME] = 1
    service.control = 'event: problem\ndata: {"code": "store.unavailable", "detail": "valkey is away"}\n\n'
    service.plans = [Plan(keep=120)]
    assert len(follow(service.url, follow=False)) == 1


def test_the_cursor_is_after_the_last_event_handed_out_and_the_feed_goes_on_from_there(
    service: ScriptedService,
) -> None:
    service.feeds[NAME] = 5

    async def read() -> tuple[list[int], list[int], list[int]]:
        async with tailrace.connect(service.url) as river:
            feed = river.tail(NAME, follow=False, after="7.1")
            assert feed.cursor == "7.1"
            first = [(await anext(aiter(feed))).offset]
            assert feed.cursor == "7.2"
            await feed.aclose()
            second = [(await anext(aiter(feed))).offset]
            third = [event.offset async for event in feed]
            assert feed.cursor == "7.5~end"
            return first, second, third

    assert asyncio.run(read()) == ([1], [2], [3, 4])


def test_a_wait_that_is_cancelled_loses_nothing(service: ScriptedService) -> None:
    service.feeds[NAME] = 3
    service.plans = [Plan(keep=400, stall=0.3, clean=True)]

    async def read() -> list[int]:
        seen: list[int] = []
        async with tailrace.connect(service.url) as river, river.tail(NAME, start="start", limit=3) as feed:
            while len(seen) < 3:
                try:
                    async with asyncio.timeout(0.05):
                        seen.append((await anext(aiter(feed))).offset)
                except TimeoutError:
                    pass
        return seen

    assert asyncio.run(asyncio.wait_for(read(), 10)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"missing": "fail"}, StreamNotFound),
        ({"after": "gone"}, CursorGone),
        ({"after": "odd"}, UsageError),
        ({"after": "page"}, UsageError),
    ],
)
def test_a_refused_request_raises_the_error_of_its_code(
    service: ScriptedService, asked: dict[str, Any], expected: type[TailraceError]
) -> None:
    with pytest.raises(expected) as caught:
        follow(service.url, **asked)
    assert type(caught.value) is expected
    assert len(service.asked) == 1
    if isinstance(caught.value, CursorGone):
        assert (caught.value.first, caught.value.reason) == ("7.3", "expired")


def test_asking_for_nothing_or_for_two_starts_is_refused_before_any_request(service: ScriptedService) -> None:
    with pytest.raises(BadRequest, match="either after"):
        follow(service.url, after="7.1", start="end")
    with pytest.raises(BadRequest, match="at least one"):
        tailrace.connect(service.url).tail()
    with pytest.raises(BadRequest, match="address of a service"):
        tailrace.connect("127.0.0.1:7070")


def test_a_service_that_was_never_there_is_an_error_and_not_a_wait() -> None:
    with pytest.raises(Unavailable, match="is `tailrace up` or `tailrace serve` running"):
        follow("http://127.0.0.1:9", follow=False)


def test_put_sends_batches_in_order_and_returns_coordinates(service: ScriptedService) -> None:
    events = [{"key": ["q", "s"], "value": {"n": number}} for number in range(2_500)]

    async def write() -> list[int]:
        async with tailrace.connect(service.url) as river:
            return [row.offset for row in await river.put("jobs", events)]

    assert asyncio.run(write()) == list(range(2_500))
    assert service.written["jobs"] == events
    assert len(service.bodies) == 3


def test_put_takes_an_asynchronous_source_and_keeps_batches_small(service: ScriptedService) -> None:
    async def source() -> AsyncIterator[dict[str, object]]:
        for number in range(6):
            yield {"value": {"n": number, "text": "x" * 400_000}}

    async def write() -> list[str]:
        async with tailrace.connect(service.url) as river:
            return [str(row) for row in await river.put("a topic §", source())]

    assert asyncio.run(write()) == [f"a topic §:0:{number}" for number in range(6)]
    assert len(service.bodies) == 3
    assert max(service.bodies) <= 2**20


def test_a_write_that_fails_raises_the_error_of_its_code(service: ScriptedService) -> None:
    async def write(value: str) -> None:
        async with tailrace.connect(service.url) as river:
            await river.put("jobs", [{"value": value}])

    with pytest.raises(EventRefused):
        asyncio.run(write("refused"))
    service.unavailable = 1
    with pytest.raises(BrokerUnavailable):
        asyncio.run(write("fine"))


def test_listings_are_read_to_their_end(service: ScriptedService) -> None:
    service.feeds |= {f"s/{number}": number for number in range(5)} | {"../days": 1, ".": 1, "other": 1}

    async def read() -> None:
        async with tailrace.connect(service.url) as river:
            assert [s.name for s in await river.streams("s/")] == [f"s/{number}" for number in range(5)]
            assert [s.name for s in await river.streams("s/", limit=3)] == ["s/0", "s/1", "s/2"]
            assert len(await river.streams()) == 8
            for name in ("s/1", "../days", "."):
                assert [str(day) for day in await river.days(name)] == ["2026-11-15"]
            with pytest.raises(StreamNotFound):
                await river.days("absent")
            assert (await river.status())["views"]["days"]["lag"] == 3

    asyncio.run(read())


def test_the_largest_streams_come_in_one_answer_as_the_service_sorted_them(service: ScriptedService) -> None:
    service.feeds |= {f"s/{number}": number for number in range(5)} | {"other": 9}

    async def read() -> None:
        async with tailrace.connect(service.url) as river:
            found = await river.streams("s/", top=3, memory=True)
            assert [(s.name, s.packed, s.expired, s.memory) for s in found] == [
                (f"s/{number}", 0.125, True, 65_432) for number in (4, 3, 2)
            ]
            assert [(s.name, s.memory) for s in await river.streams(top=1)] == [("other", None)]
            with pytest.raises(BadRequest, match="either limit"):
                await river.streams(limit=1, top=1)
            with pytest.raises(BadRequest, match="largest"):
                await river.streams(memory=True)

    asyncio.run(read())
    assert service.listed == [{"prefix": "s/", "top": "3", "memory": "true"}, {"top": "1"}]


def test_a_service_that_says_less_is_understood(service: ScriptedService) -> None:
    service.feeds["a"] = 1
    service.is_older = True

    async def read() -> None:
        async with tailrace.connect(service.url) as river:
            (stream,) = await river.streams()
            assert (stream.events, stream.packed, stream.expired, stream.memory) == (1, 0.0, False, None)
            (day,) = await river.days("a")
            assert (day.events, day.raw_bytes, day.state) == (1, 0, "open")

    asyncio.run(read())


def test_importing_the_package_loads_no_other_library() -> None:
    heavy = "{'pydantic', 'httpx', 'msgspec', 'typer', 'rich', 'pyspark', 'fastapi', 'asyncio'}"
    code = f"import sys, tailrace; print(sorted({heavy} & set(sys.modules)), callable(tailrace.connect))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[] True"


def test_the_public_names_are_sorted_and_there_and_the_version_is_the_project_s() -> None:
    assert sorted(tailrace.__all__) == tailrace.__all__ == dir(tailrace)
    assert all(getattr(tailrace, name) for name in tailrace.__all__)
    with pytest.raises(AttributeError):
        _ = tailrace.nothing
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert tomllib.loads(project.read_text("utf-8"))["project"]["version"] == tailrace.__version__

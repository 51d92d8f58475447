"""Sessions longer than their stream: trimmed entries come from Kafka, each sample once, or a gap names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.log.request import EventFrame
from tailrace.valkey.shards import StoreOptions
from tailrace.views.sessions.streams import SessionCursor
from tests.views.sessions.kept import Kept, archived, lap
from tests.views.sessions.recorded import MS, T0
from tests.views.sessions.viewing import controls, events, opened, read, samples, shown_in, until


@pytest.fixture
def track(store: StoreOptions, kafka: EmbeddedKafka) -> Kept:
    return Kept(store, kafka, burst=1 << 9)


async def test_what_was_trimmed_comes_from_kafka_and_each_sample_once(
    track: Kept, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    whole = lap(track)
    async with archived(track, kafka, tmp_path) as feeds:
        before = await read(feeds, follow=False)
        for trimmed in (1, 4, 3):  # also in the middle of a write, and more when some was trimmed before
            await track.trim(feeds, trimmed)
            got = await read(feeds, follow=False)
            assert samples(got) == samples(before) == whole
            assert [event["text"] for event in events(got)] == ["0", "1", "2", "3", "4"]
            assert [name for name, _ in controls(got)] == ["caught-up", "end"]
            assert shown_in(got)[0]["position"].startswith("k")
            assert shown_in(got)[0]["json"]["state"] == "open"
        late = await read(feeds, start=str(T0 + 1990 * MS), follow=False)
        assert samples(late) == {"vCar:Chassis": whole["vCar:Chassis"][1990:]}
        early = await read(feeds, start=str(T0 + 7 * MS), follow=False)
        assert samples(early) == {"vCar:Chassis": whole["vCar:Chassis"][7:]}


@pytest.mark.parametrize("asked", [{}, {"pixel": "33ms"}])
async def test_from_every_place_in_the_trimmed_part_exactly_the_rest_comes(
    track: Kept, kafka: EmbeddedKafka, tmp_path: Path, asked: dict[str, str]
) -> None:
    lap(track)
    async with archived(track, kafka, tmp_path) as feeds:
        await track.trim(feeds, 7)
        whole = await read(feeds, follow=False, **asked)
        for count in range(1, 12):
            feed = await opened(feeds, start="start", **asked)
            assert feed._life is not None
            for _ in range(count):
                feed._take(await feed._life.next())  # type: ignore[arg-type]
            first, cursor = feed._frames(), feed.cursor
            await feed.aclose()
            rest = await read(feeds, last_event_id=cursor, follow=False, **asked)
            assert samples([*first, *rest]) == samples(whole)
            assert events([*first, *rest]) == events(whole)
            ranges = [int(shown["range"][0]) for shown in shown_in(rest) if "range" in shown]
            assert set(ranges) <= {T0}


async def test_more_may_be_trimmed_while_the_past_is_read(track: Kept, kafka: EmbeddedKafka, tmp_path: Path) -> None:
    whole = lap(track)
    async with archived(track, kafka, tmp_path) as feeds:
        await track.trim(feeds, 2)
        feed = await opened(feeds, start="start")
        await track.trim(feeds, 9)
        got = await until(feed, lambda found: controls(found))
        assert samples(got) == whole
        place = next(frame.cursor for frame in got if isinstance(frame, EventFrame))
        assert not SessionCursor.parse(place).position.in_stream


async def test_what_kafka_no_longer_has_is_told(track: Kept, kafka: EmbeddedKafka, tmp_path: Path) -> None:
    whole = lap(track)
    async with archived(track, kafka, tmp_path) as feeds:
        await track.trim(feeds, 9)
        track.expire(4)  # the first samples are in record 3
        got = await read(feeds, follow=False)
        name, facts = controls(got)[0]
        assert (name, facts["from"], facts["to"], facts["reason"]) == ("gap", "k0", "k3", "expired")
        assert samples(got) == {"vCar:Chassis": whole["vCar:Chassis"][400:]}
        track.admin.delete_topics([track.topic])[track.topic].result(20)
        gone = await read(feeds, follow=False)
        assert controls(gone)[0][1]["reason"] == "deleted"
        assert samples(gone)["vCar:Chassis"][-1] == whole["vCar:Chassis"][-1]

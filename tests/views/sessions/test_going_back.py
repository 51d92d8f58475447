"""Cursors whose places in the stream were trimmed, and readers that trimming overtakes: they go on from Kafka."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tailrace import SessionWriter
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import CursorGone
from tailrace.log.cursor import EntryId
from tailrace.log.request import AnyFrame, EventFrame
from tailrace.valkey.shards import StoreOptions
from tailrace.views.sessions import feed as joined
from tailrace.views.sessions import feed as session
from tailrace.views.sessions import reader as session_reader
from tailrace.views.sessions.samples import StreamPosition
from tailrace.views.sessions.streams import SessionCursor
from tests.views.sessions.kept import Kept, archived, lap
from tests.views.sessions.recorded import MS, T0
from tests.views.sessions.viewing import controls, events, opened, read, samples, shown_in

NAME = "vCar:Chassis"
CELL = 33 * MS
PER_WRITE = 400
"""Samples, and one event, of each write of a lap."""

Whole = dict[str, list[tuple[int, Any]]]


@pytest.fixture
def track(store: StoreOptions, kafka: EmbeddedKafka) -> Kept:
    return Kept(store, kafka, burst=1 << 8)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame for each entry, so that there are cursors everywhere, and readers that read little at once."""
    monkeypatch.setattr(joined, "JOINED_ENTRIES", 1)
    monkeypatch.setattr(session, "BATCH_ENTRIES", 1)
    monkeypatch.setattr(session_reader, "PAGE", 2)


def gaps(frames: Iterable[AnyFrame]) -> list[dict[str, Any]]:
    return [facts for name, facts in controls(frames) if name == "gap"]


def check(frames: list[AnyFrame], whole: Whole, writes: list[tuple[EntryId, EntryId, int]], thinned: bool) -> int:
    """Check that everything was seen once, except in gaps; return the number of gaps.

    A gap lies in one write, and what is missing is its rest; of samples that are thinned, what was held of it, too.
    """
    got = dict(samples(frames).get(NAME, []))
    assert len(got) == len(samples(frames).get(NAME, [])), "a sample came twice"
    texts = [event["text"] for event in events(frames)]
    assert len(texts) == len(set(texts)), "an event came twice"
    lost: set[int] = set()
    for gap in gaps(frames):
        after, to = StreamPosition.parse(gap["from"]), StreamPosition.parse(gap["to"])
        assert gap["reason"] == "trimmed"
        found = [n for n, (first, last, _) in enumerate(writes) if first <= after.entry < last]
        found += [n for n in range(1, len(writes)) if thinned and after == StreamPosition.at_offset(writes[n - 1][2])]
        assert found, f"{gap} is in no write"
        _, last, mark = writes[found[0]]
        assert to == StreamPosition.at_offset(mark) if not to.in_stream else to.entry <= last
        begin = (found[0] - 1) * PER_WRITE  # the first write has no samples
        lost |= {T0 + n * MS for n in range(begin, begin + PER_WRITE)}
    values = dict(whole[NAME])
    assert got.items() <= values.items()
    if not thinned:
        assert set(values) - set(got) <= lost
        assert list(got) == sorted(got)
        return len(gaps(frames))
    cells: dict[int, list[int]] = {}
    for time in values:
        cells.setdefault(time // CELL, []).append(time)
    for times in cells.values():
        if not lost & set(times):
            shown = {got[time] for time in times if time in got}
            assert {min(values[time] for time in times), max(values[time] for time in times)} <= shown
    return len(gaps(frames))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("asked", [{}, {"pixel": "33ms"}])
async def test_from_every_cursor_that_a_feed_gave_exactly_the_rest_comes_after_it_was_trimmed(
    track: Kept, kafka: EmbeddedKafka, tmp_path: Path, asked: dict[str, str]
) -> None:
    whole = lap(track, 3)
    writes, n_gaps, in_the_middle = track.writes(), 0, 0
    async with archived(track, kafka, tmp_path) as feeds:
        given = await read(feeds, start="start", follow=False, **asked)
        assert check(given, whole, writes, bool(asked)) == 0
        for depth in (3, 4, 100):
            await track.trim(feeds, depth)
            for at in range(1, len(given)):
                cursor = SessionCursor.parse(given[at - 1].cursor)
                rest = await read(feeds, after=str(cursor.renewed()), follow=False, **asked)
                in_the_middle += any(first <= cursor.position.entry < last for first, last, _ in writes)
                n_gaps += check([*given[:at], *rest], whole, writes, bool(asked))
                ranges = [int(shown["range"][0]) for shown in shown_in(rest) if "range" in shown]
                assert set(ranges) <= {T0}
        assert 0 < n_gaps <= in_the_middle


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("asked", [{}, {"pixel": "33ms"}])
async def test_a_reader_that_trimming_overtakes_goes_back_to_kafka(
    track: Kept, kafka: EmbeddedKafka, tmp_path: Path, asked: dict[str, str]
) -> None:
    whole = lap(track)
    writes, place, counts = track.writes(), "", list[int]()
    async with archived(track, kafka, tmp_path) as feeds:
        for batches in (4, 9):
            feed, got = await opened(feeds, start="start", **asked), list[AnyFrame]()
            async with aclosing(feed):
                async for frames in feed:
                    got += frames
                    batches -= 1
                    if not batches:
                        place = feed.cursor
                        await track.trim(feeds, 12)
                    if "caught-up" in dict(controls(got)):
                        break
            frames = await read(feeds, after=feed.cursor, follow=False, **asked)
            assert [name for name, _ in controls(got)].count("caught-up") == 1
            assert SessionCursor.parse(place).position.in_stream
            backs = [frame.cursor for frame in got if not SessionCursor.parse(frame.cursor).position.in_stream]
            assert backs, "nothing was read from Kafka"
            counts.append(check([*got, *frames], whole, writes, bool(asked)))
        assert max(counts) <= 1


@pytest.mark.usefixtures("small")
async def test_whoever_wants_no_gaps_gets_what_is_before_one_and_is_told_in_the_middle_of_a_write(
    track: Kept, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    whole = lap(track, 3)
    writes = track.writes()
    async with archived(track, kafka, tmp_path) as feeds:
        given = [frame for frame in await read(feeds, follow=False) if isinstance(frame, EventFrame)]
        await track.trim(feeds, 100)
        for at, frame in enumerate(given[:-1], 1):
            place = SessionCursor.parse(frame.cursor).position.entry
            if any(first <= place < last for first, last, _ in writes):
                with pytest.raises(CursorGone, match="trimmed"):
                    await opened(feeds, after=frame.cursor, on_gap="fail", follow=False)
            else:
                rest = await read(feeds, after=frame.cursor, on_gap="fail", follow=False)
                assert samples([*given[:at], *rest]) == whole


async def test_what_the_ledger_has_forgotten_is_told_and_the_rest_comes(
    track: Kept, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    whole = lap(track, 2)
    async with archived(track, kafka, tmp_path) as feeds:
        early = (await read(feeds, follow=False, limit=2))[-2].cursor
        await track.trim(feeds, 100)
        await track.trim(feeds, 100, "other")
        track.forget_writes()
        mark = track.ends[0] - 1
        track.write(track.periodic("lap", 800, [1.0] * 5))
        await track.trim(feeds, 100)
        track.write(track.periodic("lap", 805, [2.0] * 5))
        got = await read(feeds, after=early, follow=False)
        (gap,) = gaps(got)
        assert (gap["from"], gap["to"]) == (str(SessionCursor.parse(early).position), f"k{mark}")
        assert [n for _, n in samples(got)[NAME]] == [0.1] * 5 + [0.2] * 5
        # The beginning of the session needs no ledger.
        again = samples(await read(feeds, follow=False))[NAME]
        assert again[: len(whole[NAME])] == whole[NAME]
        assert len(again) == len(whole[NAME]) + 10


@pytest.mark.usefixtures("small")
async def test_a_stream_that_was_trimmed_to_nothing_has_the_rest_in_kafka_and_goes_on(
    track: Kept, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    whole = lap(track, 2)
    async with archived(track, kafka, tmp_path) as feeds:
        given = [frame for frame in await read(feeds, follow=False) if isinstance(frame, EventFrame)]
        await track.trim(feeds, 100)
        await track.trim(feeds, 100, "other")
        assert await feeds.live.first(track.stream()) is None
        rest = await read(feeds, after=given[0].cursor, follow=False)
        assert (samples(rest), gaps(rest)) == (whole, [])
        track.write(track.periodic("lap", 800, [7.0]))
        more = await read(feeds, after=given[0].cursor, follow=False)
        assert (samples(more)[NAME][:-1], gaps(more)) == (whole[NAME], [])
        assert samples(more)[NAME][-1] == (T0 + 800 * MS, 7.0 * 0.1)


@pytest.mark.usefixtures("small")
async def test_others_in_the_stream_change_nothing(store: StoreOptions, kafka: EmbeddedKafka, tmp_path: Path) -> None:
    track = Kept(store, kafka, stream="{topic}", burst=1 << 9)
    given: dict[str, Any] = {"stream": track.stream(), "writer": "rig", "prefix": store.prefix}
    track.write(track.open())
    with SessionWriter(store.url, key=track.plan.store.key, burst=1 << 9, **given) as rig:
        rig.open("run")
        whole: Whole = {"1": []}
        for i in range(4):
            rig.periodic(9, start=T0 + i, interval=1, values=[1.0] * 200)
            rig.flush()
            track.write(track.periodic("beside", 100 * i, [2.0] * 100, partition=1))
            track.write(track.periodic("lap", 5 * i, [i] * 5), track.periodic("beside", 100 * i, [3.0], partition=1))
            whole["1"] += [(T0 + n * MS, float(i)) for n in range(5 * i, 5 * i + 5)]
    async with archived(track, kafka, tmp_path) as feeds:
        events = [frame for frame in await read(feeds, follow=False) if isinstance(frame, EventFrame)]
        await track.trim(feeds, 4)
        await track.trim(feeds, 3, "beside")
        for at, frame in enumerate(events, 1):
            rest = await read(feeds, after=frame.cursor, follow=False)
            assert (samples([*events[:at], *rest]), gaps(rest)) == (whole, [])


async def test_what_came_from_several_partitions_is_told_and_not_left_out(
    store: StoreOptions, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    track = Kept(store, kafka, stream="{topic}")
    track.write(track.open())
    async with archived(track, kafka, tmp_path) as feeds:
        for n in range(6):
            track.write(track.periodic("lap", n, [n], partition=n % 2))
        await track.trim(feeds, 4)
        got = await read(feeds, follow=False)
        assert [value for _, value in samples(got)["1"]] == [3.0, 4.0, 5.0]
        assert [gap["reason"] for gap in gaps(got)] == ["trimmed"]


@pytest.mark.usefixtures("small")
async def test_a_request_ends_at_a_cursor_also_where_that_comes_from_kafka(
    track: Kept, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    lap(track, 3)
    writes = track.writes()
    async with archived(track, kafka, tmp_path) as feeds:
        given = [frame for frame in await read(feeds, follow=False) if isinstance(frame, EventFrame)]
        await track.trim(feeds, 100)
        for at, frame in enumerate(given, 1):
            place = SessionCursor.parse(frame.cursor).position.entry
            got = samples(await read(feeds, start="start", until=frame.cursor)).get(NAME, [])
            wanted = samples(given[:at]).get(NAME, [])
            if any(first <= place < last for first, last, _ in writes):  # a write is not divided
                assert got[: len(wanted)] == wanted
                assert len(got) - len(wanted) < PER_WRITE
            else:
                assert got == wanted

"""The last N matches of a search: as many as were asked for, whatever part of the past they are in."""

from __future__ import annotations

import json
import random

import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import SearchEnded, TooFarBack
from tailrace.http.service import now_ms
from tailrace.log.event import iso_time
from tailrace.log.request import EventFrame
from tailrace.valkey.shards import StoreOptions
from tailrace.views.grep.model import make_search
from tests.views.grep.site import Following, Site, assert_same, facts, ids
from tests.writing import Record

AGES_MS = (0, 30_000, 300_000, 1_800_000, 10_000_000, 50_000_000, 300_000_000, 900_000_000, 9_000_000_000)


def aged(chance: random.Random, topic: str, count: int) -> list[Record]:
    """Records of all ages in two partitions: those of a partition do not always get younger, no two are of one time."""
    ages = {chance.randrange(1000, 2 * max(1000, chance.choice(AGES_MS))) for _ in range(count)}
    times = sorted((now_ms() - age for age in ages), key=lambda ms: ms + chance.choice((0, 0, 5_000_000)))
    return [
        Record(n, b"k", json.dumps({"n": n, "even": n % 2 == 0}).encode(), ms, chance.randrange(2), topic)
        for n, ms in enumerate(times)
    ]


@pytest.mark.parametrize("seed", range(4))
async def test_the_last_n_are_the_newest_that_a_program_finds_that_reads_everything(
    kafka: EmbeddedKafka, store: StoreOptions, seed: int
) -> None:
    site = Site(kafka.address, store, seed)
    topic = site.topic("a", 2)
    site.put(aged(site.chance, topic, 120))
    search = make_search(topic, {"even": True})
    async with site.serving() as serving:
        with site.at_work():
            for count in (1, site.chance.randrange(2, 30), 3, 1000):
                frames = await serving.all(search, start=f"-{count}")
                whole = sorted(site.offline(search), key=lambda record: record.time)
                assert sorted(ids(frames)) == sorted(site.ids(whole[-count:]))
                assert_same(ids(frames), site.ids([r for r in site.offline(search) if r in whole[-count:]]))


async def test_the_last_n_are_looked_for_no_further_back_than_they_are(site: Site) -> None:
    topic, now = site.topic("a"), now_ms()
    ages = [9_000_000, 8_000_000, 20_000, 10_000]
    site.put([Record(n, b"k", b'{"n":%d}' % n, now - age, 0, topic) for n, age in enumerate(ages)])
    async with site.serving() as serving:
        with site.at_work():
            found = ids(await serving.all(make_search(topic, {}), start="-2"))
    assert found == [f"{topic}:0:2", f"{topic}:0:3"]
    assert {first for chunk in site.scanner.chunks for first, _ in chunk.ranges.values()} == {2}


async def test_what_comes_after_the_last_n_follows_and_is_resumed(site: Site) -> None:
    topic = site.topic("a")
    search = make_search(topic, {})
    site.put([Record(n, b"k", b"{}", now_ms() - 1000 + n, 0, topic) for n in range(10)])
    async with site.serving() as serving:
        with site.at_work():
            following = Following(await serving.open(search, start="-3", follow=True))
            await following.until(3)
            await following.saw("caught-up")
            site.put([Record(10, b"k", b"{}", now_ms(), 0, topic)])
            assert await following.until(4) == [f"{topic}:0:{n}" for n in (7, 8, 9, 10)]
            await following.close()
            second = [frame for frame in following.frames if isinstance(frame, EventFrame)][1]
            rest = await serving.all(search, last_event_id=second.cursor)
    assert ids(rest) == [f"{topic}:0:{n}" for n in (9, 10)]


async def test_a_feed_that_looks_for_the_last_n_tells_how_far_it_is_and_has_no_cursor_yet(site: Site) -> None:
    topic = site.topic("a")
    site.put([Record(n, b"k", b"{}", now_ms() - 1000, 0, topic) for n in range(10)])
    async with site.serving() as serving:
        feed = await serving.open(make_search(topic, {}), start="-3", follow=True)
        assert feed.cursor == ""
        assert len(serving.view.leases) == 1
        following = Following(feed)
        await following.saw("progress")
        assert {frame.cursor for frame in following.frames} == {""}
        with site.at_work():
            await following.saw("caught-up")
        assert feed.cursor
        assert len(facts(following.frames, "progress")) >= 1
        assert len(serving.view.leases) == 1
        await following.close()
        assert len(serving.view.leases) == 0


async def test_a_search_that_is_ended_while_its_last_n_are_looked_for_says_so(site: Site) -> None:
    topic = site.topic("a")
    site.put([Record(0, b"k", b"{}", now_ms() - 1000, 0, topic)])
    search = make_search(topic, {})
    async with site.serving() as serving:
        following = Following(await serving.open(search, start="-3", follow=True))
        await following.saw("progress")
        assert await serving.view.searches.end(search.id, True)
        await serving.view.leases.beat()
        with pytest.raises(SearchEnded):
            await following.saw("caught-up")
        await following.close()


async def test_the_last_n_up_to_a_time_are_those_before_it(site: Site) -> None:
    topic, now = site.topic("a"), now_ms()
    ages = [50_000, 40_000, 30_000, 20_000]
    site.put([Record(n, b"k", b"{}", now - age, 0, topic) for n, age in enumerate(ages)])
    async with site.serving() as serving:
        with site.at_work():
            found = ids(await serving.all(make_search(topic, {}), start="-2", until=iso_time(now - 35_000)))
    assert found == [f"{topic}:0:{n}" for n in (0, 1)]


async def test_the_last_none_are_what_is_to_come(site: Site) -> None:
    topic = site.topic("a")
    site.put([Record(0, b"k", b"{}", now_ms(), 0, topic)])
    async with site.serving() as serving:
        with site.at_work():
            assert ids(await serving.all(make_search(topic, {}), start="-0")) == []


async def test_the_last_n_are_looked_for_no_further_back_than_a_search_may_go(
    kafka: EmbeddedKafka, store: StoreOptions
) -> None:
    site = Site(kafka.address, store, grep__reach="1h")
    topic, now = site.topic("a"), now_ms()
    ages = [9_000_000, 3_000_000, 10_000]
    site.put([Record(n, b"k", b"{}", now - age, 0, topic) for n, age in enumerate(ages)])
    search = make_search(topic, {})
    async with site.serving() as serving:
        with site.at_work():
            assert ids(await serving.all(search, start="-5")) == [f"{topic}:0:1", f"{topic}:0:2"]
            assert ids(await serving.all(search, start="-55m")) == [f"{topic}:0:1", f"{topic}:0:2"]
        for start in ("start", "-2h", "2020-01-01"):
            with pytest.raises(TooFarBack, match=r"1h \(grep\.reach\)"):
                await serving.open(search, start=start)

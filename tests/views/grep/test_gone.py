"""Feeds of searches when something is gone: records, topics, the search itself. Readers get a gap or an error."""

from __future__ import annotations

import asyncio
import json

import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import CursorError, CursorGone
from tailrace.log.request import EventFrame
from tailrace.valkey.shards import StoreOptions
from tailrace.views.grep import driver
from tailrace.views.grep.driver import Watchdog
from tailrace.views.grep.model import SearchCursor, SearchLife, Stretch, make_search
from tailrace.views.grep.store import VIEW, SearchRegistry
from tests.views.grep.site import Following, Site, assert_same, controls, facts, ids, numbered
from tests.writing import NOON


async def test_a_cursor_of_another_search_or_of_no_part_is_refused(site: Site) -> None:
    topic = site.topic("a")
    numbered(site, topic, 0, 3)
    one, other = make_search(".*", {}), make_search(".*", {"n": 1})
    async with site.serving() as serving:
        with site.at_work():
            [cursor, *_] = [frame.cursor for frame in await serving.all(one, start="start")]
            await serving.all(other, start="start")
        for given in ({"after": cursor}, {"last_event_id": cursor}, {"start": cursor}):
            with pytest.raises(CursorError, match="another search"):
                await serving.open(other, **given)
        place = SearchCursor.parse(cursor)
        with pytest.raises(CursorError, match="no such part"):
            await serving.open(one, after=str(SearchCursor(place.life, place.part + 100, place.cursor)))


async def test_who_comes_back_after_the_search_was_forgotten_is_told_so_and_goes_on_live(site: Site) -> None:
    topic, search = site.topic("a"), make_search(".*", {})
    numbered(site, topic, 0, 3)
    async with site.serving() as serving:
        with site.at_work():
            frames = await serving.all(search, start="start")
            site.forget_search(search)
            numbered(site, topic, 3, 5)
            resumed = await serving.all(search, last_event_id=frames[1].cursor)
            assert [fact["reason"] for fact in facts(resumed, "gap")] == ["expired"]
            assert ids(resumed) == []
            numbered(site, topic, 5, 8)
            again = await serving.all(search, last_event_id=resumed[0].cursor)
            assert (controls(again), ids(again)) == (["end"], [f"{topic}:0:{offset}" for offset in (5, 6, 7)])
            with pytest.raises(CursorGone):
                await serving.all(search, last_event_id=frames[1].cursor, on_gap="fail")
            assert_same(ids(await serving.all(search, start="start")), site.ids(site.offline(search)))


async def test_matches_whose_records_kafka_has_dropped_are_gaps(kafka: EmbeddedKafka, store: StoreOptions) -> None:
    site = Site(kafka.address, store, grep__kept=1, grep__memory=1 << 20)
    topic, search = site.topic("a"), make_search(".*", {})
    numbered(site, topic, 0, 10)
    async with site.serving() as serving:
        with site.at_work():
            assert len(ids(await serving.all(search, start="start"))) == 10
        site.forget(topic, 0, 4)
    async with site.serving() as serving:  # another process: it remembers nothing
        frames = await serving.all(search, start="start")
        assert facts(frames, "gap") == [{"id": f"{topic}:0:{offset}", "reason": "gone"} for offset in range(4)]
        assert ids(frames) == [f"{topic}:0:{offset}" for offset in range(4, 10)]
        site.forget(topic, 0, 6)
        resumed = await serving.all(search, last_event_id=frames[1].cursor)
        assert len(facts(resumed, "gap")) == 2, "what was remembered is not gone"
    async with site.serving() as serving:
        with pytest.raises(CursorGone) as gone:
            await serving.all(search, start="start", on_gap="fail")
        assert f"{topic}:0:0" in str(gone.value)


async def test_events_before_a_gap_are_sent_before_the_feed_fails_of_it(
    kafka: EmbeddedKafka, store: StoreOptions
) -> None:
    site = Site(kafka.address, store, grep__kept=1)
    topic, search = site.topic("a", 2), make_search(".*", {})
    numbered(site, topic, 0, 5)
    numbered(site, topic, 0, 5, partition=1)
    async with site.serving() as serving:
        with site.at_work():
            whole = ids(await serving.all(search, start="start"))
        behind = whole[5].split(":")
        site.forget(topic, int(behind[1]), 1)
    async with site.serving() as serving:
        following = Following(await serving.open(search, start="start", on_gap="fail"))
        with pytest.raises(CursorGone):
            await following.until(10)
        seen = ids(following.frames)
        await following.close()
        assert seen == whole[:5]


async def test_a_topic_that_is_created_again_shows_nothing_of_itself_under_old_ids(
    kafka: EmbeddedKafka, store: StoreOptions
) -> None:
    site = Site(kafka.address, store, grep__kept=1)
    topic, search = site.topic("a"), make_search(".*", {})
    numbered(site, topic, 0, 8)
    site.drive()  # the driver has seen it
    async with site.serving() as serving:
        with site.at_work():
            old = ids(await serving.all(search, start="start"))
    site.delete(topic)
    async with site.serving() as serving:
        frames = await serving.all(search, start="start")
        assert (ids(frames), len(facts(frames, "gap"))) == ([], 8)
    site.topic("a")
    numbered(site, topic, 100, 103)
    async with site.serving() as serving:
        # The pipeline has not noticed yet; what is new is waited for, and comes under ids of its own.
        waiting = asyncio.create_task(serving.all(search, start="start"))
        done, _ = await asyncio.wait({waiting}, timeout=1.0)
        assert not done
        site.drive()
        site.live()
        frames = await waiting
        assert [fact["id"] for fact in facts(frames, "gap")] == old
        assert ids(frames) == [f"{topic}@1:0:{offset}" for offset in range(3)]
        assert [json.loads(frame.data)["data"]["n"] for frame in frames if isinstance(frame, EventFrame)] == [
            100,
            101,
            102,
        ]


@pytest.mark.parametrize("step", [60_000, -3_600_000])
async def test_nobody_waits_for_the_end_of_a_topic_that_is_deleted_before_it_is_read(site: Site, step: int) -> None:
    """Nor if the clock is set back meanwhile."""
    topics = [site.topic(name) for name in ("a", "b")]
    site.drive()
    for topic in topics:
        numbered(site, topic, 0, 3)
    async with site.serving() as serving:
        now = [NOON]
        serving.grep.clock = lambda: now[0]
        following = Following(await serving.open(make_search(".*", {}), start="end"))
        site.delete(topics[0])
        now[0] += step
        site.drive()
        with site.at_work():
            await following.saw("end")
        await following.close()


async def test_the_place_of_a_client_that_has_a_name_is_not_kept_for_a_search_that_is_forgotten(site: Site) -> None:
    topic, search = site.topic("a"), make_search(".*", {})
    numbered(site, topic, 0, 3)
    async with site.serving() as serving:
        with site.at_work():
            await serving.all(search, start="start", client="me")
        searches = serving.grep.searches
        assert await searches.position(search.id, "me") is not None
        site.forget_search(search)
        await searches.keep_position(search.id, "me", "late")
        assert await searches.position(search.id, "me") is None


async def test_what_a_task_appends_to_a_search_that_was_forgotten_does_not_stay(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read the registry before; and a scan was under way."""
    topic, search = site.topic("a"), make_search(".*", {})
    numbered(site, topic, 0, 5)
    watchdog = Watchdog(site.shards, 1 << 50, 1 << 50, 1 << 30)
    async with site.serving() as serving:
        with site.at_work():
            await serving.all(search, start="start")
        life = await serving.grep.searches.register(search, NOON)
        [stretch], _ = await serving.grep.searches.stretches(life)
        site.forget_search(search)
        watchdog.look()
        assert _of_life(site, life, stretch) == []
        monkeypatch.setattr(SearchRegistry, "refresh", lambda *_: False)
        numbered(site, topic, 5, 8)
        site.live()
        site.scanner.take(life, stretch, stretch.ranges)
        assert len(_of_life(site, life, stretch)) > 1
        watchdog.look()
        assert len(_of_life(site, life, stretch)) > 1, "there may be more to come"
        monkeypatch.setattr(driver, "AGAIN_MS", 0)
        watchdog.look()
        assert _of_life(site, life, stretch) == []
        assert site.shards.run_all([(0, ("HLEN", site.shards.keys.dropped()))]) == [0]


def _of_life(site: Site, life: SearchLife, stretch: Stretch) -> list[bytes]:
    """Return the keys, marks and shelves that there are of a life."""
    keys, shards = site.shards.keys, range(site.store.shards)
    pattern = f"{keys.prefix}:*{life.name}*"
    found = [key for node in site.shards.primaries() for key in node.execute_command("KEYS", pattern)]
    fields = site.shards.run_all([(s, ("HKEYS", keys.marks(s, VIEW))) for s in shards])
    fields += site.shards.run_all([(s, ("HKEYS", keys.kept_sizes(s))) for s in shards])
    begins = stretch.mark("").encode()
    return found + [field for some in fields for field in some if field.startswith(begins)]

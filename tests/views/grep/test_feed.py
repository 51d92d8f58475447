"""Feeds of searches over a real Kafka and a real store: what they show is what a separate program finds offline."""

from __future__ import annotations

import asyncio
import json

import pytest

from tailrace.api.requests import GrepParameters
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import TopicNotFound, TopicNotRead
from tailrace.http.service import now_ms
from tailrace.log.cursor import Cursor, Position
from tailrace.log.event import iso_time
from tailrace.log.request import EventFrame
from tailrace.valkey.shards import StoreOptions
from tailrace.views.grep.model import LIVE, Search, SearchCursor, SearchLife, make_grep_request, make_search
from tests.views.grep.rig import random_records, random_search
from tests.views.grep.site import Following, Serving, Site, assert_same, controls, facts, fill, ids, numbered, split
from tests.writing import NOON, Record

# The whole, against another program.


@pytest.mark.parametrize("seed", range(3))
async def test_a_feed_shows_what_a_program_finds_that_reads_everything(
    kafka: EmbeddedKafka, store: StoreOptions, seed: int
) -> None:
    site = Site(kafka.address, store, seed, grep__kept=(1, 2_000, 1 << 20)[seed % 3])
    chance = site.chance
    topics = [site.topic(name, 2) for name in ("a", "b")]
    searches = [random_search(chance, (".*", (topics[0],))[i % 2]) for i in range(5)]
    async with site.serving() as serving:
        for phase in range(2):
            fill(site, topics, 30, 30 * phase)
            with site.at_work():
                for search in chance.sample(searches, 4):
                    since = chance.choice((None, NOON + chance.randrange(-5_000, 10_000)))
                    until = chance.choice((None, None, NOON + chance.randrange(0, 15_000)))
                    limit = chance.choice((None, None, 0, 3, 20))
                    frames = await serving.all(
                        search,
                        start="start" if since is None else iso_time(since),
                        until=None if until is None else iso_time(until),
                        limit=limit,
                        window=chance.choice((1024, 256 << 10)),
                    )
                    wanted = site.ids(site.offline(search, since, until))
                    found = ids(frames)
                    [end] = facts(frames, "end")
                    assert end["events"] == len(found)
                    if limit is None or len(wanted) < limit:
                        assert_same(found, wanted)
                    else:
                        assert (end["reason"], len(found)) == ("limit", limit)
                        whole = split(wanted)
                        assert all(offsets == whole[s][: len(offsets)] for s, offsets in split(found).items())


@pytest.mark.parametrize("seed", range(2))
async def test_readers_that_come_and_go_while_records_topics_and_drivers_do_get_each_match_once(
    kafka: EmbeddedKafka, store: StoreOptions, seed: int
) -> None:
    site = Site(kafka.address, store, seed, grep__kept=5_000)
    chance = site.chance
    topics = [site.topic("a", 2)]
    fill(site, topics, 10)
    searches = [random_search(chance) for _ in range(3)]
    readers: list[Reader] = []
    async with site.serving() as serving:
        for _ in range(40):
            action = chance.choice(("put", "put", "live", "live", "scan", "drive", "topic", "open", "open", "resume"))
            if action == "put":
                site.put(random_records(chance, chance.choice(topics), chance.randrange(2), 8))
            elif action == "live":
                await asyncio.to_thread(site.live)
            elif action == "scan":
                await asyncio.to_thread(site.scan, 1)
            elif action == "drive":
                site.drive()
            elif action == "topic" and len(topics) < 3:
                topics.append(site.topic(f"more{len(topics)}", 2))
            elif action == "open" and len(readers) < 10:
                since = chance.choice((None, NOON + chance.randrange(-3_000, 3_000)))
                readers.append(Reader(serving, chance.choice(searches), since))
                await readers[-1].open()
            elif action == "resume" and readers:
                reader = chance.choice(readers)
                await reader.close()
                await reader.open()
            await asyncio.sleep(chance.choice((0, 0, 0.02)))
        with site.at_work():
            for reader in readers:
                wanted = site.ids(site.offline(reader.search, reader.since))
                assert_same(await reader.until(len(wanted)), wanted)
                await reader.close()
                assert ids(await serving.all(reader.search, last_event_id=reader.cursor)) == []


class Reader:
    """A client that follows a search, and goes on where it was when it comes back."""

    def __init__(self, serving: Serving, search: Search, since: int | None) -> None:
        self.search, self.since = search, since
        self.cursor: str | None = None
        self._serving = serving
        self._seen: list[str] = []
        self._following: Following | None = None

    async def open(self) -> None:
        start = "start" if self.since is None else iso_time(self.since)
        feed = await self._serving.open(self.search, start=start, last_event_id=self.cursor, follow=True)
        self.cursor = self.cursor or feed.cursor
        self._following = Following(feed)

    async def close(self) -> None:
        assert self._following is not None
        await self._following.close()
        self._seen += ids(self._following.frames)
        if self._following.frames:
            self.cursor = self._following.frames[-1].cursor

    async def until(self, count: int) -> list[str]:
        assert self._following is not None
        return self._seen + await self._following.until(count - len(self._seen))


async def test_who_follows_from_the_end_sees_what_is_written_from_then_on(site: Site) -> None:
    topics = [site.topic(name, 2) for name in ("a", "b")]
    fill(site, topics, 20)
    search = make_search(".*", {"a": {"$exists": True}})
    site.live()
    before = set(site.ids(site.offline(search)))
    async with site.serving() as serving:
        first = Following(await serving.open(search, start="end", follow=True))
        with site.at_work():
            await first.saw("caught-up")
            fill(site, topics, 20, 20)
            late = site.topic("late", 2)  # it did not exist when the search began
            fill(site, [late], 20)
            wanted = [event for event in site.ids(site.offline(search)) if event not in before]
            assert any(event.startswith(late) for event in wanted)
            assert_same(await first.until(len(wanted)), wanted)
            await first.close()
            assert_same(ids(await serving.all(search, start="start")), site.ids(site.offline(search)))
        assert ids(await serving.all(search, after=first.frames[-1].cursor)) == []


async def test_a_stream_of_several_stretches_and_live_resumed_at_every_id_gives_exactly_the_rest(site: Site) -> None:
    topics = [site.topic("a", 2)]
    search = make_search(".*", {"a": {"$ne": "x"}})
    fill(site, topics, 15)
    async with site.serving() as serving:
        with site.at_work():
            await serving.all(search, start=iso_time(NOON + 1_000))
            fill(site, topics, 10, 15)
            frames = await serving.all(search, start="start", window=1024)
        assert len({SearchCursor.parse(frame.cursor).part for frame in frames}) == 3
        whole = ids(frames)
        assert_same(whole, site.ids(site.offline(search)))
        for at, frame in enumerate(frames[:-1]):
            rest = ids(frames[at + 1 :])
            assert ids(await serving.all(search, last_event_id=frame.cursor)) == rest
            assert ids(await serving.all(search, after=frame.cursor)) == rest
        assert make_grep_request(search, GrepParameters(), now_ms=0, last_event_id=frames[-1].cursor) is None
        assert ids(await serving.all(search, after=frames[-1].cursor)) == []
        limited = await serving.all(search, start="start", limit=len(whole) - 5)
        for at, frame in enumerate(limited[:-1]):
            resumed = await serving.all(search, last_event_id=frame.cursor, limit=len(whole) - 5)
            assert ids(resumed) == ids(limited[at + 1 :])
            assert facts(resumed, "end") == [{"reason": "limit", "events": len(whole) - 5}]
        timed = await serving.all(search, start=iso_time(NOON + 500))
        assert_same(ids(timed), site.ids(site.offline(search, NOON + 500)))
        for at, frame in enumerate(timed[:-1]):
            assert ids(await serving.all(search, last_event_id=frame.cursor)) == ids(timed[at + 1 :])
            assert ids(await serving.all(search, after=frame.cursor)) == ids(timed[at + 1 :])


async def test_counting_sends_no_events_and_the_right_number(site: Site) -> None:
    topics = [site.topic("a", 2)]
    fill(site, topics, 30)
    search = random_search(site.chance)
    async with site.serving() as serving:
        with site.at_work():
            frames = await serving.all(search, start="start", count=True)
        assert ids(frames) == []
        assert facts(frames, "end") == [{"reason": "caught-up", "events": len(site.offline(search))}]
        [end] = facts(await serving.all(search, start="start", count=True, limit=2), "end")
        assert end == {"reason": "limit", "events": 2}
        for frame in frames[:-1]:
            resumed = await serving.all(search, last_event_id=frame.cursor, count=True)
            assert facts(resumed, "end") == facts(frames, "end"), "what was counted before counts"


# What is behind, and what comes late.


async def test_a_request_that_is_continued_waits_for_what_exists_as_the_first_one_did(site: Site) -> None:
    topic, search = site.topic("a"), make_search(".*", {})
    numbered(site, topic, 0, 5)
    async with site.serving() as serving:
        with site.at_work():
            frames = await serving.all(search, start="start")
        last = [frame for frame in frames if isinstance(frame, EventFrame)][-1]
        numbered(site, topic, 5, 10)
        waiting = asyncio.create_task(serving.all(search, last_event_id=last.cursor))
        done, _ = await asyncio.wait({waiting}, timeout=1.0)
        assert not done
        site.live()
        assert ids(await waiting) == [f"{topic}:0:{offset}" for offset in range(5, 10)]


async def test_a_feed_that_ends_at_a_time_has_what_was_written_by_then(site: Site) -> None:
    topic, search = site.topic("a"), make_search(".*", {})
    numbered(site, topic, 0, 3)
    async with site.serving() as serving:
        now = [NOON + 4_000]
        serving.grep.clock = lambda: now[0]
        following = Following(await serving.open(search, start="start", follow=True, until=iso_time(NOON + 7_000)))
        with site.at_work():
            await following.saw("caught-up")
        numbered(site, topic, 3, 10)
        now[0] += 60_000
        await asyncio.sleep(1.0)
        assert "end" not in controls(following.frames)
        site.live()
        await following.saw("end")
        assert ids(following.frames) == [f"{topic}:0:{offset}" for offset in range(8)]
        assert facts(following.frames, "end") == [{"reason": "until", "events": 8}]
        await following.close()


async def test_the_end_is_where_the_store_says_it_is_and_not_where_the_hub_has_come_to(site: Site) -> None:
    """A hub that hears nothing any more holds what it heard last; the scan goes on meanwhile, and is done."""
    topic, search = site.topic("a"), make_search(".*", {})
    numbered(site, topic, 0, 20)
    async with site.serving() as serving:
        following = Following(await serving.open(search, start="start"))
        life = await serving.grep.searches.register(search, now_ms())
        stretches, _ = await serving.grep.searches.stretches(life)
        site.scanner.take(life, stretches[0], {f"{topic}:0": (0, 10)})
        await following.until(10)
        await asyncio.sleep(0.3)
        await serving.deafen()
        site.scanner.take(life, stretches[0], {f"{topic}:0": (10, 20)})
        site.live()
        site.scan()
        await following.saw("end")
        assert ids(following.frames) == [f"{topic}:0:{offset}" for offset in range(20)]
        await following.close()


async def test_a_topic_that_is_read_before_the_search_is_registered_belongs_to_the_past(site: Site) -> None:
    """It was not there yet when the request looked which topics there are."""
    search = make_search(".*", {})
    async with site.serving() as serving:
        register = serving.grep.searches.register

        async def late(search: Search, now_ms: int) -> SearchLife:
            numbered(site, site.topic("new"), 0, 3)
            site.live()
            return await register(search, now_ms)

        serving.grep.searches.register = late  # type: ignore[method-assign]
        following = Following(await serving.open(search, start="start"))
        with site.at_work():
            await following.saw("end")
        found = ids(following.frames)
        await following.close()
        assert found == [f"{site.name}.new:0:{offset}" for offset in range(3)]


async def test_a_client_that_has_a_name_and_got_nothing_yet_misses_nothing_when_it_comes_back(site: Site) -> None:
    topic, search = site.topic("a"), make_search(".*", {})
    numbered(site, topic, 0, 3)
    site.live()
    async with site.serving() as serving:
        await (await serving.open(search, start="end", follow=True, client="me")).aclose()
        numbered(site, topic, 3, 6)
        site.live()
        assert ids(await serving.all(search, start="end", client="me")) == [f"{topic}:0:{n}" for n in (3, 4, 5)]


# How events are fetched.


async def test_events_larger_than_the_window_are_all_sent(site: Site) -> None:
    topic, search = site.topic("a"), make_search(".*", {})
    values = [json.dumps({"n": n, "pad": "x" * (5_000 * (n % 3))}).encode() for n in range(12)]
    site.put([Record(n, b"k", value, NOON, 0, topic) for n, value in enumerate(values)])
    async with site.serving() as serving:
        with site.at_work():
            frames = await serving.all(search, start="start", window=1024)
    assert ids(frames) == [f"{topic}:0:{n}" for n in range(12)]
    assert [json.loads(frame.data)["data"]["n"] for frame in frames if isinstance(frame, EventFrame)] == list(range(12))


async def test_an_event_is_the_same_whether_it_was_kept_or_comes_from_kafka(
    kafka: EmbeddedKafka, store: StoreOptions
) -> None:
    site = Site(kafka.address, store)
    topic, search = site.topic("a", 2), make_search(".*", {})
    async with site.serving() as serving:
        following = Following(await serving.open(search, start="end", follow=True))
        fill(site, [topic], 40)
        wanted = site.ids(site.offline(search))
        with site.at_work():
            await following.until(len(wanted))
        await following.close()
    kept = [frame.data for frame in following.frames if isinstance(frame, EventFrame)]
    for shard in range(store.shards):
        for source in (f"{topic}:0", f"{topic}:1"):
            site.shards.run_all([(shard, ("DEL", site.shards.keys.kept(shard, source)))])
    async with site.serving() as serving:
        begin = SearchCursor(SearchCursor.parse(following.frames[0].cursor).life, LIVE, Cursor((Position.START,)))
        frames = await serving.all(search, after=str(begin))
    assert [frame.data for frame in frames if isinstance(frame, EventFrame)] == kept


# What is refused.


async def test_topics_that_are_not_read_or_not_there_are_refused_or_waited_for(site: Site) -> None:
    async with site.serving() as serving:
        with pytest.raises(TopicNotRead):
            await serving.open(make_search("elsewhere", {}))
        with pytest.raises(TopicNotFound):
            await serving.open(make_search(f"{site.name}.later", {}), missing="fail")
        following = Following(await serving.open(make_search(f"{site.name}.later", {}), start="start", follow=True))
        topic = site.topic("later")
        numbered(site, topic, 0, 3)
        with site.at_work():
            assert await following.until(3) == [f"{topic}:0:{offset}" for offset in range(3)]
        await following.close()

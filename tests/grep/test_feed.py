"""Feeds of searches over a real Kafka and a real store: what they show is what a separate program finds offline."""

from __future__ import annotations

import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.model.event import iso_time
from tailrace.stores.valkey import StoreOptions
from tests.grep.rig import random_records, random_search
from tests.grep.site import Site, assert_same, facts, ids, split
from tests.writing import NOON


@pytest.fixture
def site(kafka: EmbeddedKafka, store: StoreOptions) -> Site:
    return Site(kafka.address, store)


def fill(site: Site, topics: list[str], each: int, first: int = 0) -> None:
    for topic in topics:
        for partition in range(2):
            site.put(random_records(site.chance, topic, partition, each, first))


@pytest.mark.parametrize("seed", range(4))
async def test_a_feed_shows_what_a_program_finds_that_reads_everything(
    kafka: EmbeddedKafka, store: StoreOptions, seed: int
) -> None:
    kept = (1, 2_000, 1 << 20, 1 << 20)[seed]
    site = Site(kafka.address, store, seed, grep__kept=kept)
    chance = site.chance
    topics = [site.topic(name, 2) for name in ("a", "b")]
    searches = [random_search(chance, (".*", (topics[0],))[i % 2]) for i in range(6)]
    async with site.serving() as serving:
        for phase in range(3):
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

"""Tags through the Python client, against a real service on a real store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import tailrace
from tailrace.api.answers import Control
from tailrace.errors import BadRequest, QueryError, StreamNotFound, TailraceError, UsageError
from tailrace.testing.installation import ServiceThread, served
from tailrace.valkey.shards import StoreOptions
from tests.views.tags.tagged import Tagger, apart


@pytest.fixture
def service(store: StoreOptions) -> Iterator[ServiceThread]:
    with served(store, tags__paths=["tags"]) as running:
        yield running


async def test_events_of_a_tag_are_read_and_resumed_from_every_cursor(service: ServiceThread, tagger: Tagger) -> None:
    wanted = [tagger.write(f"cart-{i % 2}", ["gpu", "red"])[0] for i in range(8)]
    async with tailrace.connect(service.url) as river:
        events = [event async for event in river.tagged("gpu", follow=False)]
        assert [event.id for event in events] == wanted
        third = events[2]
        assert (third.tag, third.tags, third.source, third.tag_seq, third.seq) == (
            "gpu",
            ["gpu", "red"],
            "cart-0",
            2,
            2,
        )
        assert third.timeuuid is not None
        assert third.data == {"n": 2, "tags": ["gpu", "red"]}
        for i, event in enumerate(events):
            rest = river.tagged("gpu", after=event.cursor, follow=False)
            assert [each.id async for each in rest] == wanted[i + 1 :]


async def test_several_tags_a_query_and_a_name(service: ServiceThread, tagger: Tagger, store: StoreOptions) -> None:
    first, second = apart(store)
    for i in range(9):
        tagger.write("p", [[first], [second], [first, second]][i % 3], total=i)
    sent = tagger.sent
    async with tailrace.connect(service.url) as river:
        feed = river.tagged(first, second, query={"total": {"$gte": 4}}, follow=False)
        assert [event.id async for event in feed] == [each.id for each in sent[4:]]
        feed = river.tagged(first, second, mode="all", start="-2", follow=False)
        assert [event.id async for event in feed] == [sent[5].id, sent[8].id]
        for begin in (0, 4, 8):
            feed = river.tagged(first, second, client="billing", limit=4, follow=False)
            assert [event.id async for event in feed] == [each.id for each in sent[begin : begin + 4]]
        listed = await river.tags()
        assert {tag.tag: tag.events for tag in listed} == {first: 6, second: 6}
        assert [tag.tag for tag in await river.tags(limit=1)] == [listed[0].tag]
        (source,) = await river.sources(first)
        assert (source.source, source.tag_seq, source.partition) == ("p", 6, "jobs:0")
        (reader,) = await river.readers()
        assert (reader.client, reader.tags, reader.mode, reader.warning) == ("billing", [first, second], "any", None)


async def test_a_feed_goes_on_over_restarts_of_the_service(store: StoreOptions, tagger: Tagger) -> None:
    tags = apart(store)
    controls: list[Control] = []
    with served(store, tags__paths=["tags"]) as running:
        port = running.port
        river = tailrace.connect(running.url, timeout=30)
        feed = river.tagged(*tags, start="start", on_control=controls.append)
        got: list[str] = []

        async def read(total: int) -> None:
            async with asyncio.timeout(30):
                async for event in feed:
                    got.append(event.id)
                    if len(got) == total:
                        return

        for i in range(5):
            await asyncio.to_thread(tagger.write, f"p{i % 2}", [tags[i % 2]], 2, partition=i % 2)
        await read(7)
    await asyncio.to_thread(tagger.write, "p", tags, 5)
    cursor = feed.cursor
    await river.aclose()
    with served(store, tags__paths=["tags"]) as running:
        assert running.port != port
        async with tailrace.connect(running.url) as again:
            rest = [event.id async for event in again.tagged(*tags, after=cursor, follow=False)]
    assert got + rest == [each.id for each in tagger.sent]
    assert [control.kind for control in controls][:1] in ([], ["caught-up"])


async def test_what_cannot_be_asked_is_refused(service: ServiceThread, store: StoreOptions) -> None:
    async with tailrace.connect(service.url) as river:
        with pytest.raises(BadRequest, match="at least one tag"):
            river.tagged()
        for asked, error in (
            (river.tagged("a", query={"x": {"$bad": 1}}), QueryError),
            (river.tagged("a", mode="some"), BadRequest),
            (river.tagged("a", missing="fail"), StreamNotFound),
        ):
            with pytest.raises(error):
                await anext(aiter(asked))
        with pytest.raises(StreamNotFound):
            await river.sources("none")
    with served(store) as off:
        async with tailrace.connect(off.url) as river:
            with pytest.raises(UsageError, match=r"tags\.rules") as refused:
                await river.tags()
            assert isinstance(refused.value, TailraceError)
            assert refused.value.code == "tags.off"

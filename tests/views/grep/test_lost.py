"""Gaps for records that Kafka drops before a scan reads them: with source and offsets, and for nothing else."""

from __future__ import annotations

import json

import pytest

from tailrace.errors import CursorGone, StaleDriver
from tailrace.log.request import AnyFrame, Moved
from tailrace.views.grep import driver as module
from tailrace.views.grep.driver import GONE, LATER, Chunk, lost_offsets
from tailrace.views.grep.model import LostOffsets, Search, make_search
from tailrace.views.grep.store import record_chunk
from tests.views.grep.site import HandScanner, Serving, Site, controls, facts, ids, numbered
from tests.writing import NOON

EVERYTHING = make_search(".*", {})


async def asked(serving: Serving, search: Search = EVERYTHING) -> None:
    """Ask for the past, and go before it is scanned."""
    await (await serving.open(search, start="start")).aclose()


def offsets(frames: list[AnyFrame]) -> list[int]:
    return [int(event.rpartition(":")[2]) for event in ids(frames)]


async def test_what_expires_between_the_request_and_the_scan_is_said_before_the_feed_leaves_the_past(
    site: Site,
) -> None:
    topic = site.topic("a", 2)
    for partition in range(2):
        numbered(site, topic, 0, 10, partition)
    async with site.serving() as serving:
        await asked(serving)
        site.forget(topic, 0, 4)
        site.forget(topic, 1, 10)
        with site.at_work():
            frames = await serving.all(EVERYTHING, start="start")
            numbered(site, topic, 10, 12)
            again = await serving.all(EVERYTHING, start="start")
        gaps = [
            {"source": f"{topic}:0", "first": 0, "until": 4, "reason": "expired"},
            {"source": f"{topic}:1", "first": 0, "until": 10, "reason": "expired"},
        ]
        assert facts(frames, "gap") == facts(again, "gap") == gaps
        assert offsets(frames) == [4, 5, 6, 7, 8, 9]
        assert [name for name in controls(frames) if name != "progress"] == ["gap", "gap", "caught-up", "end"]
        # Who was cut off after it was said, and before the place was left, hears it again; behind it nobody does.
        [at, *_] = [n for n, frame in enumerate(again) if getattr(frame, "name", "") == "gap"]
        assert facts(await serving.all(EVERYTHING, last_event_id=again[at].cursor), "gap") == gaps
        [moved] = [frame for frame in again[at:] if isinstance(frame, Moved)][:1]
        assert facts(await serving.all(EVERYTHING, last_event_id=moved.cursor), "gap") == []
        [counted] = facts(await serving.all(EVERYTHING, start="start", count=True), "end")
        assert counted["events"] == 8


async def test_who_would_rather_fail_is_told_where_to_go_on(site: Site) -> None:
    topic = site.topic("a")
    numbered(site, topic, 0, 5)
    async with site.serving() as serving:
        await asked(serving)
        site.forget(topic, 0, 3)
        with site.at_work():
            with pytest.raises(CursorGone, match=rf"{topic}:0:0 .*expired") as gone:
                await serving.all(EVERYTHING, start="start", on_gap="fail")
            numbered(site, topic, 5, 7)
            behind = await serving.all(EVERYTHING, after=gone.value.first, on_gap="fail")
        assert offsets(behind) == [5, 6]


@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("again", [False, True])
async def test_a_topic_that_is_deleted_before_it_is_scanned_is_said_and_no_other_is_read_in_its_place(
    site: Site, again: bool, noticed: bool
) -> None:
    topic = site.topic("a")
    numbered(site, topic, 0, 5)
    site.drive()
    async with site.serving() as serving:
        await asked(serving)
        site.delete(topic)
        if again:
            site.topic("a")
            numbered(site, topic, 100, 103)
        if noticed:
            site.drive()
        site.scan()
        site.drive()
        with site.at_work():
            frames = await serving.all(EVERYTHING, start="start")
        assert facts(frames, "gap") == [{"source": f"{topic}:0", "first": 0, "until": 5, "reason": "deleted"}]
        assert ids(frames) == ([f"{topic}@1:0:{offset}" for offset in range(3)] if again else [])


async def test_a_topic_that_was_created_again_is_scanned_when_the_driver_has_noticed_it(site: Site) -> None:
    """The service knows the generation that it will have; until then its past is neither read nor passed over."""
    site.topic("a")
    site.drive()
    topic = f"{site.name}.a"
    site.delete(topic)
    site.topic("a")
    numbered(site, topic, 0, 3)
    async with site.serving() as serving:
        await asked(serving)
        assert site.scan() == 0
        site.drive()
        with site.at_work():
            frames = await serving.all(EVERYTHING, start="start")
        assert ids(frames) == [f"{topic}@1:0:{offset}" for offset in range(3)]
        assert facts(frames, "gap") == []


async def test_what_expires_while_a_scan_goes_on_is_said_and_what_was_scanned_before_is_not(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = site.topic("a")
    numbered(site, topic, 0, 30)
    whole = module.next_chunk
    monkeypatch.setattr(module, "next_chunk", lambda waiting: whole(waiting, 10))
    async with site.serving() as serving:
        await asked(serving)
        assert site.scan(1) == 1
        site.forget(topic, 0, 15)
        site.live()
        site.scan()
        gone = facts(frames := await serving.all(EVERYTHING, start="start"), "gap")
        assert [each["id"] for each in gone[:-1]] == [f"{topic}:0:{offset}" for offset in range(10)]
        assert gone[-1] == {"source": f"{topic}:0", "first": 10, "until": 15, "reason": "expired"}
        assert offsets(frames) == list(range(15, 30))


async def test_what_expires_while_it_is_read_is_said(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = site.topic("a")
    numbered(site, topic, 0, 10)
    read = HandScanner._read

    def late(scanner: HandScanner, chunk: Chunk) -> int:
        site.forget(topic, 0, 6)
        return read(scanner, chunk)

    monkeypatch.setattr(HandScanner, "_read", late)
    async with site.serving() as serving:
        await asked(serving)
        site.live()
        site.scan()
        frames = await serving.all(EVERYTHING, start="start")
    assert facts(frames, "gap") == [{"source": f"{topic}:0", "first": 0, "until": 6, "reason": "expired"}]
    assert offsets(frames) == [6, 7, 8, 9]


async def test_a_topic_that_is_created_again_while_it_is_read_shows_nothing_of_itself_under_old_ids(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = site.topic("a")
    numbered(site, topic, 0, 20)
    site.drive()
    read = HandScanner._read

    def late(scanner: HandScanner, chunk: Chunk) -> int:
        site.delete(topic)
        site.topic("a")
        numbered(site, topic, 100, 120)
        return read(scanner, chunk)

    monkeypatch.setattr(HandScanner, "_read", late)
    search = make_search(".*", {"n": {"$mod": [5, 0]}})
    async with site.serving() as serving:
        await asked(serving, search)
        site.scan()
        site.drive()
        site.live()
        frames = await serving.all(search, start="start")
        assert ids(frames) == [f"{topic}@1:0:{offset}" for offset in (0, 5, 10, 15)]
        assert {"source": f"{topic}:0", "first": 0, "until": 20, "reason": "deleted"} in facts(frames, "gap")


async def test_a_driver_that_was_overtaken_says_nothing_of_what_another_one_has_read(site: Site) -> None:
    topic = site.topic("a")
    numbered(site, topic, 0, 5)
    async with site.serving() as serving:
        await asked(serving)
        old = site.writer.epoch
        site.drive()
        site.live()
        site.scan()
        searches = serving.grep.searches
        life = await searches.register(EVERYTHING, NOON)
        [stretch], _ = await searches.stretches(life)
        with pytest.raises(StaleDriver):
            record_chunk(site.shards, old, life, stretch, 1, [LostOffsets(f"{topic}:0", 0, 5, "expired")])
        assert facts(await serving.all(EVERYTHING, start="start"), "gap") == []


async def test_what_is_noted_of_a_search_goes_with_it(site: Site) -> None:
    topic = site.topic("a")
    numbered(site, topic, 0, 5)
    async with site.serving() as serving:
        await asked(serving)
        site.forget(topic, 0, 3)
        with site.at_work():
            assert len(facts(await serving.all(EVERYTHING, start="start"), "gap")) == 1
        site.forget_search(EVERYTHING)
        with site.at_work():
            assert facts(await serving.all(EVERYTHING, start="start"), "gap") == []
    for node in site.shards.primaries():
        for what in ("lost", "read"):
            assert len(node.execute_command("KEYS", f"{site.shards.keys.prefix}:*:{what}:*")) <= (what == "read")


def test_what_is_lost_of_a_range_is_what_lies_before_the_beginning() -> None:
    def lost(before: int, after: int) -> list[tuple[int, int, str]]:
        return [(each.first, each.until, each.reason) for each in lost_offsets("a:0", (10, 20), before, after)]

    assert lost(10, 10) == lost(0, 5) == lost(3, LATER) == []
    assert lost(15, 15) == lost(15, LATER) == [(10, 15, "expired")]
    assert lost(25, 30) == [(10, 20, "expired")]
    assert lost(12, 15) == [(10, 12, "expired"), (12, 15, "expired")]
    assert lost(GONE, GONE) == [(10, 20, "deleted")]
    assert lost(12, GONE) == [(10, 12, "expired"), (12, 20, "deleted")]


# How far a scan is.


async def test_progress_says_what_the_log_has_and_what_was_read_also_to_who_comes_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = site.topic("a")
    numbered(site, topic, 0, 30)
    search = make_search(".*", {"n": {"$lt": 8}})
    whole = module.next_chunk
    monkeypatch.setattr(module, "next_chunk", lambda waiting: whole(waiting, 10))
    size = sum(1 + len(json.dumps({"n": n})) for n in range(20))
    async with site.serving() as serving:
        await asked(serving, search)
        site.scan(2)
        for _ in range(2):
            feed = await serving.open(search, start="start")
            async for frames in feed:
                if progress := facts(frames, "progress"):
                    break
            await feed.aclose()
            assert progress == [{"percent": 66.7, "records": 20, "of": 30, "bytes": size, "matches": 8}]

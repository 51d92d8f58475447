"""The feeds of tags over Valkey: one tag or several, starts, ends, filters, and resuming from every cursor."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from tailrace.errors import BadRequest, CursorError, QueryError, StreamNotFound
from tailrace.log.event import Partition, iso_time
from tailrace.log.request import EventFrame, Moved
from tailrace.log.timeuuid import make_timeuuid, ms_of
from tailrace.valkey.marks import advance
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags import feed as tag_merge
from tests.log.rig import Follower, controls, ids
from tests.views.tags.reading import events, reading, request_of
from tests.views.tags.tagged import Tagger, apart, strangers
from tests.writing import NOON, Record, Writer


def shown(frame: EventFrame) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(frame.data)
    return found


async def test_a_frame_says_what_the_tag_knows_of_the_event(any_store: StoreOptions) -> None:
    tagger = Tagger(any_store)
    tagger.write("cart-1", ["red", "gpu"])
    tagger.write("cart-2", ["gpu"], partition=1)
    tagger.write("cart-1", ["gpu"])
    async with reading(any_store) as feeds:
        frames = [shown(frame) for frame in events(await feeds.all("gpu", follow=False))]
        (red,) = [shown(frame) for frame in events(await feeds.all("red", follow=False))]
    assert [(f["source"], f["seq"], f["tag_seq"], f["tags"]) for f in frames] == [
        ("cart-1", 0, 1, ["red", "gpu"]),
        ("cart-2", 0, 1, ["gpu"]),
        ("cart-1", 1, 2, ["gpu"]),
    ]
    assert {f["tag"] for f in frames} == {"gpu"}
    assert (red["tag"], red["id"], red["data"]["n"]) == ("red", "jobs:0:0", 0)
    first = make_timeuuid(NOON, 0, Partition("jobs", 0))
    assert frames[0]["timeuuid"] == str(first)
    assert ms_of(first) == NOON
    assert "late" not in frames[0]


async def test_one_tag_is_resumed_exactly_from_every_cursor(any_store: StoreOptions) -> None:
    tagger = Tagger(any_store)
    for i in range(12):
        tagger.write(f"p{i % 3}", ["gpu"] if i % 4 else ["gpu", "red"], 1 + i % 5, partition=i % 2)
    async with reading(any_store) as feeds:
        frames = events(await feeds.all("gpu", follow=False))
        wanted = ids(frames)
        assert sorted(wanted) == sorted(tagger.ids("gpu"))
        for i, frame in enumerate(frames):
            assert await feeds.ids("gpu", after=frame.cursor) == wanted[i + 1 :]
            assert await feeds.ids("gpu", last_event_id=frame.cursor) == wanted[i + 1 :]


async def test_the_start_grammar_finds_its_place(store: StoreOptions) -> None:
    tagger = Tagger(store)
    for i in range(40):
        tagger.write("p", ["gpu"] if i % 2 else ["gpu", "red"])
    wanted = tagger.ids("gpu")
    async with reading(store) as feeds:
        assert await feeds.ids("gpu", start="start") == await feeds.ids("gpu") == wanted
        assert await feeds.ids("gpu", start="end") == []
        for count in (0, 1, 7, 39, 40, 41):
            assert await feeds.ids("gpu", start=f"-{count}") == wanted[-count:] * bool(count)
        for i in (0, 1, 8, 39):
            assert await feeds.ids("gpu", start=iso_time(NOON + i * 1000)) == wanted[i:]
            assert await feeds.ids("gpu", start=iso_time(NOON + i * 1000 - 1)) == wanted[i:]
        assert await feeds.ids("gpu", until=iso_time(NOON + 9_500)) == wanted[:10]
        assert await feeds.ids("gpu", start="-30", limit=5) == wanted[10:15]
        frames = events(await feeds.all("gpu", follow=False))
        for begin, end in ((0, 9), (3, 4), (5, 5), (7, 2)):
            got = await feeds.all("gpu", after=frames[begin].cursor, until=frames[end].cursor, follow=True)
            assert ids(got) == wanted[begin + 1 : end + 1]
            assert controls(got)[-1] == "end"


async def test_a_time_is_that_of_the_timeuuid_which_never_falls(store: StoreOptions) -> None:
    tagger = Tagger(store)
    times = [NOON, NOON + 60_000, NOON + 1_000, NOON + 2_000, NOON + 61_000]
    wanted = [tagger.write("p", ["gpu"], time_ms=time_ms)[0] for time_ms in times]
    async with reading(store) as feeds:
        assert await feeds.ids("gpu", start=iso_time(NOON + 60_000)) == wanted[1:]
        assert await feeds.ids("gpu", start=iso_time(NOON + 60_001)) == wanted[4:]
        assert await feeds.ids("gpu", until=iso_time(NOON + 59_999)) == wanted[:1]


async def test_a_limit_counts_what_was_sent_before_a_reconnect(store: StoreOptions) -> None:
    tagger = Tagger(store)
    tags = apart(store)
    for i in range(20):
        tagger.write("p", [tags[i % 2]])
    wanted = [sent.id for sent in tagger.sent]
    async with reading(store) as feeds:
        for names in ((tags[0],), tuple(tags)):
            mine = tagger.ids(*names)
            frames = events(await feeds.all(*names, start="start", limit=7, follow=True))
            assert ids(frames) == mine[:7]
            for i, frame in enumerate(frames):
                assert await feeds.ids(*names, limit=7, last_event_id=frame.cursor) == mine[i + 1 : 7]
                assert await feeds.ids(*names, limit=7, after=frame.cursor) == mine[i + 1 : i + 8]
    assert wanted == tagger.ids(*tags)


# Several tags.


async def test_by_any_an_event_of_several_requested_tags_is_shown_once(any_store: StoreOptions) -> None:
    tagger = Tagger(any_store)
    chance = random.Random(3)
    for i in range(60):
        tags = chance.sample(["a", "b", "c", "d"], chance.randrange(1, 4))
        tagger.write(f"p{i % 5}", tags, chance.randrange(1, 4), partition=i % 3)
    async with reading(any_store) as feeds:
        for names in (("a", "b"), ("b", "a"), ("c", "a", "d"), ("d", "b", "none", "a", "c")):
            frames = events(await feeds.all(*names, follow=False))
            assert ids(frames) == tagger.ids(*names), "by the order of the timeuuids, which are the times here"
            for frame in map(shown, frames):
                assert frame["tag"] == next(name for name in names if name in frame["tags"])


async def test_several_tags_are_resumed_exactly_from_every_cursor(any_store: StoreOptions) -> None:
    tagger = Tagger(any_store)
    tags = apart(any_store, 3)
    chance = random.Random(8)
    for i in range(25):
        tagger.write(f"p{i % 4}", chance.sample(tags, chance.randrange(1, 3)), 1 + i % 3, partition=i % 2)
    async with reading(any_store) as feeds:
        frames = events(await feeds.all(*tags, follow=False))
        wanted = ids(frames)
        assert wanted == tagger.ids(*tags)
        for i, frame in enumerate(frames):
            assert await feeds.ids(*tags, after=frame.cursor) == wanted[i + 1 :]
        for count in (0, 1, 2, 7, len(wanted), len(wanted) + 1):
            assert await feeds.ids(*tags, start=f"-{count}") == wanted[-count:] * bool(count)


async def test_by_all_only_events_with_all_tags_are_shown(any_store: StoreOptions) -> None:
    tagger = Tagger(any_store)
    for i in range(30):
        tagger.write(f"p{i % 3}", [tag for tag, every in (("a", 1), ("b", 2), ("c", 3)) if i % every == 0])
    async with reading(any_store) as feeds:
        for names in (("a", "b"), ("b", "a"), ("c", "b", "a")):
            wanted = [sent.id for sent in tagger.sent if set(names) <= set(sent.tags)]
            frames = events(await feeds.all(*names, mode="all", follow=False))
            assert ids(frames) == wanted
            assert {shown(frame)["tag"] for frame in frames} == {names[0]}
            for i, frame in enumerate(frames):
                assert await feeds.ids(*names, mode="all", after=frame.cursor) == wanted[i + 1 :]
            for count in (1, 3, 100):
                assert await feeds.ids(*names, mode="all", start=f"-{count}") == wanted[-count:]
        assert await feeds.ids("a", "none", mode="all") == []


async def test_a_query_narrows_what_is_shown_and_the_last_n_are_those_it_shows(store: StoreOptions) -> None:
    tagger = Tagger(store)
    tags = apart(store)
    for i in range(200):
        tagger.write(f"p{i % 4}", [tags[i % 2]] if i % 3 else tags, total=i % 50, partition=i % 2)
    rare = {"total": 7}
    async with reading(store) as feeds:
        for names in ((tags[0],), tuple(tags)):
            mine = [s for s in tagger.sent if set(names) & set(s.tags)]
            wanted = [sent.id for sent in mine if sent.n % 50 == 7]
            assert await feeds.ids(*names, query=rare) == wanted
            assert await feeds.ids(*names, query=rare, start="-1") == wanted[-1:]
            assert await feeds.ids(*names, query=rare, start="-3") == wanted[-3:]
            by_key = [sent.id for sent in mine if sent.source == "p2"]
            assert await feeds.ids(*names, query={"$key": "p2"}) == by_key
            assert await feeds.ids(*names, query={"$key": "p2"}, start="-2") == by_key[-2:]
        both = [sent.id for sent in tagger.sent if len(sent.tags) == 2 and sent.n % 50 >= 40]
        assert await feeds.ids(*tags, mode="all", query={"total": {"$gte": 40}}) == both


async def test_the_cursor_moves_over_what_is_not_shown(store: StoreOptions) -> None:
    tagger = Tagger(store)
    tags = apart(store)
    for i in range(40):
        tagger.write("p", [tags[i % 2]], total=i)
    async with reading(store) as feeds:
        for names in ((tags[0],), tuple(tags)):
            follower = Follower(await feeds.open(*names, start="start", query={"total": 4}))
            assert await follower.until(1) == [tagger.sent[4].id]
            await _until(lambda found=follower: "caught-up" in [getattr(f, "name", "") for f in found.frames])
            moved = [frame for frame in follower.frames if isinstance(frame, Moved)]
            assert await feeds.ids(*names, after=moved[-1].cursor) == []
            await follower.close()


# Two shards that have partitions in another order.


async def test_shards_that_were_written_in_any_order_give_each_source_in_its_order_from_every_cursor(
    store: StoreOptions,
) -> None:
    tags = apart(store, 3)
    chance = random.Random(11)
    tagger = Tagger(store)
    _scramble(tagger, tags, chance, 12)
    async with reading(store) as feeds:
        frames = events(await feeds.all(*tags, follow=False))
        wanted = ids(frames)
        _check_order(tagger, wanted)
        assert sorted(wanted) == sorted(tagger.ids(*tags))
        assert any("+" in frame.cursor for frame in frames), "nothing had to be sent before its turn"
        for i, frame in enumerate(frames):
            rest = await feeds.ids(*tags, after=frame.cursor)
            assert sorted(rest) == sorted(wanted[i + 1 :])
            _check_order(tagger, wanted[: i + 1] + rest)
            until = await feeds.ids(*tags, start="start", until=frame.cursor)
            assert sorted(until) == sorted(wanted[: i + 1])


async def test_with_no_room_to_read_ahead_nothing_is_lost_or_repeated(
    store: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tag_merge, "MAX_BYTES_AHEAD", 1)
    monkeypatch.setattr(tag_merge, "BATCH_BYTES", 1)
    monkeypatch.setattr(tag_merge, "MAX_RANGES", 1)
    tags = apart(store, 3)
    tagger = Tagger(store)
    _scramble(tagger, tags, random.Random(5), 12)
    async with reading(store) as feeds:
        frames = events(await feeds.all(*tags, follow=False))
        wanted = ids(frames)
        assert sorted(wanted) == sorted(tagger.ids(*tags))
        for i in range(0, len(frames), 3):
            assert sorted(await feeds.ids(*tags, after=frames[i].cursor)) == sorted(wanted[i + 1 :])


async def test_an_event_waits_for_the_marks_of_the_other_tags_shards(store: StoreOptions) -> None:
    first, second = tags = apart(store)
    (p,) = strangers(store, tags)
    tagger = Tagger(store)
    tagger.write("x", [second], partition=p)
    async with reading(store) as feeds:
        follower = Follower(await feeds.open(first, second, start="start"))
        assert await follower.until(1) == [f"jobs:{p}:0"]
        before, after = (tagger.draft("x", [tag], partition=p) for tag in (second, first))
        await asyncio.to_thread(tagger.writer.write, [after])
        alone = Follower(await feeds.open(first, start="start"))
        assert await alone.until(1) == [after.id]
        await asyncio.sleep(0.3)
        assert ids(follower.frames) == [f"jobs:{p}:0"], "the other shard may still get an earlier one"
        await asyncio.to_thread(tagger.writer.write, [before])
        await asyncio.to_thread(tagger.settle)
        assert await follower.until(3) == [f"jobs:{p}:0", before.id, after.id]
        await follower.close()
        await alone.close()


async def test_an_event_whose_marks_never_come_goes_out_in_the_end(
    store: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tag_merge, "MARK_TIMEOUT_S", 0.2)
    tags = apart(store)
    tagger = Tagger(store)
    wanted = tagger.write("x", tags[:1], 3, partition=strangers(store, tags)[0], settle=False)
    async with reading(store) as feeds:
        assert await feeds.ids(*tags) == wanted


# Live.


async def test_events_arrive_live_in_all_forms_of_feeds(any_store: StoreOptions) -> None:
    tagger = Tagger(any_store)
    tags = apart(any_store)
    tagger.write("p", tags, 5)
    async with reading(any_store) as feeds:
        forms: list[dict[str, Any]] = [{"mode": "any"}, {"mode": "all"}, {"query": {"n": {"$gte": 3}}}]
        followers = [Follower(await feeds.open(*tags, start="start", **form)) for form in forms]
        single = Follower(await feeds.open(tags[1]))
        for i in range(5, 60):
            await asyncio.to_thread(tagger.write, f"p{i % 3}", tags if i % 2 else tags[i % 4 // 2 :], partition=i % 2)
        sent = tagger.sent
        everything = [each.id for each in sent]
        assert sorted(await followers[0].until(60)) == sorted(everything)
        both = [each.id for each in sent if len(each.tags) == 2]
        assert sorted(await followers[1].until(len(both))) == sorted(both)
        assert sorted(await followers[2].until(57)) == sorted(everything[3:])
        mine = [each.id for each in sent[5:] if tags[1] in each.tags]
        assert sorted(await single.until(len(mine))) == sorted(mine)
        for follower in (*followers, single):
            _check_order(tagger, ids(follower.frames))
            await follower.close()
        assert feeds.hub.followed == 0


async def test_tasks_that_write_at_once_are_followed_live_in_order_and_resumed_from_what_was_seen(
    any_store: StoreOptions,
) -> None:
    tags = apart(any_store, 3)
    tagger = Tagger(any_store)
    chance = random.Random(2)
    work: dict[int, list[list[Record]]] = {}
    for partition in range(3):
        for _ in range(25):
            some = [chance.sample(tags, chance.choice((1, 1, 2))) for _ in range(chance.randrange(1, 9))]
            batch = [tagger.draft(f"p{partition}", each, partition=partition) for each in some]
            work.setdefault(partition, []).append(batch)
    tasks = [(tagger.writer.another_task(), batches) for batches in work.values()]

    def run(task: Writer, batches: list[list[Record]]) -> None:
        for batch in batches:
            task.write(batch)
            # What the driver does for shards that had nothing.
            last = batch[-1]
            advance(task.shards, "tags", task.epoch, {Partition("jobs", last.partition): last.offset})

    async with reading(any_store) as feeds:
        followers = [Follower(await feeds.open(*tags, start="start")), Follower(await feeds.open(*tags[::-1]))]
        await asyncio.gather(*(asyncio.to_thread(run, task, batches) for task, batches in tasks))
        for follower in followers:
            got = await follower.until(len(tagger.sent))
            _check_order(tagger, got)
            assert sorted(got) == sorted(each.id for each in tagger.sent)
            await follower.close()
        frames = events(followers[0].frames)
        for i in chance.sample(range(len(frames)), 20):
            rest = await feeds.ids(*tags, after=frames[i].cursor)
            assert sorted(rest) == sorted(ids(frames)[i + 1 :])
            _check_order(tagger, ids(frames)[: i + 1] + rest)
    for task, _ in tasks:
        task.host.close()


async def test_a_tag_that_nothing_has_yet_is_waited_for_or_refused(store: StoreOptions) -> None:
    tagger = Tagger(store)
    async with reading(store) as feeds:
        with pytest.raises(StreamNotFound, match="'gpu'"):
            await feeds.open("gpu", missing="fail")
        assert await feeds.ids("gpu") == []
        followers = [Follower(await feeds.open(*tags)) for tags in (("gpu",), ("red", "gpu"))]
        for follower in followers:
            await _until(lambda found=follower: controls(found.frames) == ["caught-up"])
        wanted = await asyncio.to_thread(tagger.write, "p", ["gpu"], 3)
        with pytest.raises(StreamNotFound, match="'red'"):
            await feeds.open("gpu", "red", mode="all", missing="fail")
        for follower in followers:
            assert await follower.until(3) == wanted
            await follower.close()


async def test_what_a_feed_says_of_itself(store: StoreOptions) -> None:
    tagger = Tagger(store)
    tags = apart(store)
    tagger.write("p", tags, 4)
    async with reading(store) as feeds:
        for names in ((tags[0],), tuple(tags)):
            frames = await feeds.all(*names, follow=False)
            assert controls(frames) == ["caught-up", "end"]
            end = frames[-1].cursor
            assert request_of(*names, last_event_id=end) is None
            assert await feeds.ids(*names, after=end) == []
            gone = await feeds.all(*names, after=",".join(["5.3"] * len(names)), follow=False)
            assert "gap" in controls(gone)
            assert ids(gone) == tagger.ids(*names)


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"tags": ("a", "a")}, BadRequest),
        ({"tags": ("",)}, BadRequest),
        ({"tags": ("a" * 513,)}, BadRequest),
        ({"tags": ("a",), "mode": "some"}, BadRequest),
        ({"tags": ("a",), "client": "no name"}, BadRequest),
        ({"tags": ("a",), "query": {"x": {"$bad": 1}}}, QueryError),
        ({"tags": ("a", "b"), "after": "1.2"}, CursorError),
        ({"tags": ("a", "b"), "after": "1.2,3.4", "mode": "all"}, CursorError),
        ({"tags": ("a",), "after": "1.2+5-3"}, CursorError),
        ({"tags": ("a",), "after": "1.2", "own_cursors": True}, CursorError),
        ({"tags": ("a",), "until": "u1", "own_cursors": True}, BadRequest),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(parameters: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        request_of(*parameters.pop("tags"), **parameters)


def test_a_cursor_of_the_stores_own_form_is_left_to_the_store() -> None:
    for given in ({"after": "u12:3~4@5"}, {"start": "u12:3~4@5"}, {"last_event_id": "u12:3~4@5", "limit": 9}):
        request = request_of("a", "b", own_cursors=True, **given)
        assert request is not None
        assert (str(request.start), request.since_ms) == ("FromStoreCursor(text='u12:3')", 5)
        assert (request.sent, request.resumed) == ((4, True) if "last_event_id" in given else (0, False))
    assert request_of("a", own_cursors=True, last_event_id="u1~end") is None


def _scramble(tagger: Tagger, tags: list[str], chance: random.Random, batches: int) -> None:
    """Write events so that the shards of the tags get the partitions of each batch in orders of their own."""
    partitions = strangers(tagger.writer.shards.options, tags, 3)
    for _ in range(batches):
        parts: dict[tuple[int, str], list[Record]] = {}
        for _ in range(chance.randrange(1, 12)):
            partition, tag = chance.choice(partitions), chance.choice(tags)
            parts.setdefault((partition, tag), []).append(tagger.draft(f"p{partition}", [tag], partition=partition))
        for part in chance.sample(list(parts.values()), len(parts)):
            tagger.writer.write(part)
        tagger.settle()
        for partition in chance.sample(partitions, 2):
            tagger.write(f"p{partition}", chance.sample(tags, 2), partition=partition)


def _check_order(tagger: Tagger, found: list[str]) -> None:
    """Check that events of each partition come in its order, each once."""
    assert len(set(found)) == len(found)
    offsets: dict[str, int] = {}
    for each in found:
        place, _, offset = each.rpartition(":")
        assert offsets.get(place, -1) < int(offset), f"{each} comes too late"
        offsets[place] = int(offset)


async def _until(holds: Any) -> None:
    async with asyncio.timeout(15):
        while not holds():  # noqa: ASYNC110 nothing tells
            await asyncio.sleep(0.01)

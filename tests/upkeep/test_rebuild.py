"""Rebuilds on real parts: what Kafka still has comes back, nothing else changes, and nobody is stopped."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cli.upkeep import run_rebuild
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import BadRequest, StreamNotFound
from tailrace.log.cursor import Position
from tailrace.log.event import Partition
from tailrace.log.request import AnyFrame, ControlFrame, EventFrame
from tailrace.log.segment import PACKED, Log, Segment, locate
from tailrace.upkeep.copy import RebuildPlan, RestoredEvent
from tailrace.upkeep.job import FAILPOINT
from tailrace.upkeep.log_copy import STEPS, Restorer
from tailrace.upkeep.rebuild import Buckets, merged, replaced
from tailrace.valkey.marks import advance
from tailrace.valkey.shards import Shards, StoreOptions
from tests.log.rig import ids, rig
from tests.meanwhile import meanwhile
from tests.upkeep.past import Keeper, Past, by_name
from tests.writing import DAY, NOON, Record, Writer

Make = Callable[..., Past]


def in_any_order(view: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: sorted(found) for name, found in view.items()}


def assert_whole(here: Past, records: list[Record]) -> None:
    """Each record is in its stream once, and each partition's records are in order."""
    view = here.view()
    assert in_any_order(view) == in_any_order(by_name(records))
    for found in view.values():
        places = [(place, int(offset)) for place, _, offset in (each.rpartition(":") for each in found)]
        for partition in {place for place, _ in places}:
            offsets = [offset for place, offset in places if place == partition]
            assert offsets == sorted(offsets)


def logs_of(here: Past) -> dict[bytes, Any]:
    """All keys of logs, as they are."""
    kinds = (b"log", b"seg", b"staged", b"meta", b"marks", b"names")
    return {
        key: node.dump(key)
        for node in here.shards.primaries()
        for key in node.scan_iter(f"{here.store.prefix}:*")
        if key.partition(b"}:")[2].partition(b":")[0] in kinds
    }


# The rules.


def _event(source: int, offset: int, newest: int) -> RestoredEvent:
    return RestoredEvent(Partition("jobs", source), offset, newest, None, [], b"", newest, 0, DAY)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.booleans()), max_size=30))
def test_what_is_carried_over_and_what_kafka_has_are_merged_by_time_and_each_source_keeps_its_order(
    drawn: list[tuple[int, int, bool]],
) -> None:
    """Of each source, the older part is carried over; times come in any order."""
    old: list[RestoredEvent] = []
    new: list[RestoredEvent] = []
    for source in range(3):
        mine = [(ms, is_new) for s, ms, is_new in drawn if s == source]
        split = sum(not is_new for _, is_new in mine)
        old += [_event(source, i, ms) for i, (ms, _) in enumerate(mine[:split])]
        new += [_event(source, split + i, ms) for i, (ms, _) in enumerate(mine[split:])]

    def risen(events: list[RestoredEvent]) -> list[RestoredEvent]:
        reached: dict[Partition, int] = {}
        for i, event in enumerate(events):
            reached[event.partition] = max(event.newest_ms, reached.get(event.partition, 0))
            events[i] = msgspec.structs.replace(event, newest_ms=reached[event.partition])
        return sorted(events, key=lambda e: (e.newest_ms, e.partition.partition, e.offset))

    old, new = risen(old), risen(new)
    carried = {e.partition: sum(o.partition == e.partition for o in old) for e in old}
    together = list(merged(iter(old), iter(new), carried))
    assert sorted(map(repr, together)) == sorted(map(repr, old + new))
    for source in range(3):
        offsets = [e.offset for e in together if e.partition.partition == source]
        assert offsets == sorted(offsets)


@given(
    st.lists(st.integers(-3, 12), min_size=1, max_size=30),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(0, 5),
)
def test_buckets_never_go_back_and_there_are_no_more_of_them_than_there_is_room(
    starts: list[int], room: int | None, front: int | None
) -> None:
    before = None if front is None else Segment(0, front, 2, 1, 1, 1, 1, 0, 0)
    buckets = Buckets(before, room, lowest=(-3, 1), highest=(10, 1))
    newest, placed = -(10**6), []
    for start in starts:
        newest = max(newest, start)
        placed.append(buckets.place(newest, 1))
    assert placed == sorted(placed)
    assert room is None or len(buckets.made) <= room
    assert all(a[0] < b[0] and a[1] <= b[0] for a, b in pairwise(buckets.made))
    assert before is None or buckets.made[0][0] >= before.start_ms
    assert buckets.made[-1][0] <= 10


def test_every_place_inside_what_was_replaced_is_told_and_none_outside() -> None:
    def segment(index: int, epoch: int, first: int, last: int, **more: Any) -> Segment:
        return Segment(index, index, 1, epoch, first, last, last - first + 1, 0, 0, **more)

    front, behind = segment(0, 10, 5, 20), segment(4, 20, 91, 99)
    gone = [segment(1, 10, 25, 30), segment(2, 10, 35, 40), segment(3, 70, 1, 9, replaced=((10, 41, 60),))]
    triples = replaced([front], gone, Position(10, 3))
    assert triples == ((10, 21, 40), (10, 41, 60), (70, 1, 9))
    new = segment(3, 80, 1, 30, replaced=triples)
    log = Log([front, new, behind], Position(10, 3))
    for place in (Position(10, 24), Position(10, 30), Position(10, 40), Position(10, 50), Position(70, 8)):
        found = locate(log, place)
        assert found.gap is not None
        assert (found.at, found.gap.reason) == (1, "rebuilt")
    assert locate(log, Position(10, 20)).gap is None
    assert locate(log, Position(70, 9)) == locate(log, Position(70, 9)).__class__(2, Position(70, 9))
    assert replaced([], gone[:1], Position(10, 3)) == ((10, 4, 30),)


# Whole rebuilds.


def test_a_view_that_is_whole_is_left_as_it_is(past: Make) -> None:
    here = past(2)
    here.put(here.days("a", "b", "c", days=3, each=6))
    before = logs_of(here)
    assert here.rebuild() == {"names": 3, "rebuilt": 0, "events": 0, "restored": 0, "segments": 0, "left": {}}
    assert logs_of(here) == before
    with pytest.raises(StreamNotFound):
        here.rebuild("nobody")


def test_what_was_lost_comes_back_while_the_pipeline_goes_on(past: Make) -> None:
    here = past(3)
    records = list(
        here.put(here.days("whole", "deleted", "broken", "no-hash", "vanished", "unlisted", "bad-row", days=4, each=6))
    )
    with Keeper(here.store) as keeper:
        keeper.pack()
    client, key = here.segment_key("deleted", 1)
    client.delete(key)
    client, key = here.segment_key("broken", 2)
    (entry, fields) = client.xrange(key)[0]
    client.delete(key)
    client.xadd(key, {b"r": fields[b"r"][:-9] + b"123456789", b"t": fields[b"t"]}, entry)
    here.client("no-hash").delete(here.log_key("no-hash"))
    client, log, listed = here.client("vanished"), here.log_key("vanished"), here.names_key("vanished")
    client.delete(log, *(here.segment_key("vanished", i)[1] for i in range(4)))
    client.zrem(listed, "vanished")
    here.client("unlisted").zrem(here.names_key("unlisted"), "unlisted")
    here.client("bad-row").hset(here.log_key("bad-row"), "s1", b"\xc1 no row")
    untouched = here.log("whole").segments
    records += here.put([here.record("skewed", NOON + day * DAY) for day in (0, 1, 80_000, 2, 2, 2, 3)])
    here.client("skewed").hdel(here.log_key("skewed"), "s1")

    def live(turn: int) -> None:
        names = ("whole", "deleted", "no-hash", "vanished") if turn % 2 else ("broken", "new")
        records.extend(here.put(here.days(*names, days=1, each=3, first=4)))

    with meanwhile(live):
        done = here.rebuild()
    assert (done["rebuilt"], done["left"]) == (7, {})
    assert done["restored"] >= 6 + 6 + 24
    assert here.log("whole").segments[:4] == untouched
    days = [(segment.start_ms - NOON) // DAY + 1 for segment in here.log("skewed").segments]
    assert days[:4] == [0, 1, 2, 3], "a record from the future does not hold back those behind it"
    assert here.audit(keys=True).clean
    assert_whole(here, records)
    assert {segment.state for segment in here.log("vanished").segments if not segment.open} <= {0, PACKED}
    stored: Any = here.shards.client(0).hget(here.keys.upkeep(), "rebuild:days")
    assert json.loads(stored)["rebuilt"] == 7


def test_a_dry_run_says_what_would_be_replaced_and_a_day_is_rebuilt_alone(
    past: Make, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    here = past(2)
    records = here.put(here.days("a", "b", "c", days=4, each=4))
    for name, at in (("a", 1), ("b", 2)):
        client, key = here.segment_key(name, at)
        client.delete(key)
    before = logs_of(here)

    def run(name: str | None, day: str | None, dry_run: bool = False) -> tuple[int, list[Any]]:
        code = run_rebuild(here.settings, "days", name, day, dry_run=dry_run, wait_s=1, json=True, spark=here.spark)
        return code, [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]

    code, (a, b, summary) = run(None, None, dry_run=True)
    assert (code, logs_of(here)) == (0, before)
    assert a == {"name": "a", "verdict": "rebuilt", "events": 16, "before": 12, "segments": 4, "replaced": 4}
    assert (b["verdict"], summary["dry_run"], summary["names"], summary["rebuilt"]) == ("rebuilt", True, 3, 2)
    kept = here.log("a").segments
    code, (a, b, summary) = run(None, "2026-09-13")
    assert (code, a["verdict"], a["events"], a["replaced"], b["verdict"]) == (0, "rebuilt", 4, 1, "same")
    assert [s for s in here.log("a").segments if s.index != 1] == [s for s in kept if s.index != 1]
    assert {finding.name for finding in here.audit().findings} == {"b"}
    code, (b, summary) = run("b", None)
    assert (code, b["verdict"], summary["restored"]) == (0, "rebuilt", 4)
    assert_whole(here, list(records))
    with pytest.raises(BadRequest, match="no day"):
        run(None, "yesterday")


# One log, restored by what runs in every task.


async def test_readers_elsewhere_notice_nothing_and_one_inside_is_told_and_gets_all_of_it(past: Make) -> None:
    here = past(2)
    records = here.put(here.days("a", days=4, each=6), at_once=6)
    client, key = here.segment_key("a", 1)
    client.xdel(key, client.xrange(key)[-1][0])

    def ids_of(days: range) -> list[str]:
        return [r.id for r in records if (r.time - NOON) // DAY in days]

    def gaps(frames: list[AnyFrame]) -> list[str]:
        return [json.loads(f.data)["reason"] for f in frames if isinstance(f, ControlFrame) and f.name == "gap"]

    async with rig(here.store) as feeds:
        frames = [f for f in await feeds.all("a", follow=False) if isinstance(f, EventFrame)]
        by_id = {json.loads(frame.data)["id"]: frame.cursor for frame in frames}
        with here.restorer(day=1) as restoring:
            done = await asyncio.to_thread(restoring.restore, "a")
        assert (done.verdict, done.events, done.replaced) == ("rebuilt", 6, 1)
        before = ids(list(frames))
        for i, event in enumerate(before[:-1]):
            wanted = 6 + 12 if 6 <= i < 11 else len(before) + (i < 6) - 1 - i
            rest = await feeds.all("a", after=by_id[event], follow=False)
            if 6 <= i < 11:
                assert gaps(rest) == ["rebuilt"]
                assert sorted(ids(rest)) == sorted(ids_of(range(1, 4)))
            else:
                assert gaps(rest) == []
                assert ids(rest)[-12:] == before[i + 1 :][-12:]
                assert len(set(ids(rest))) == wanted
        last = here.log("a").segments[1]
        rest = await feeds.all("a", after=str(Position(last.epoch, last.last)), follow=False)
        assert (gaps(rest), ids(rest)) == ([], before[11:])


def test_what_kafka_no_longer_has_is_kept_as_far_as_it_can_be_read(past: Make) -> None:
    here = past(2)
    records = here.put(here.days("a", days=5, each=4), at_once=4)
    here.forget(0, 6)
    here.forget(1, 5)
    segments = here.log("a").segments
    client, key = here.segment_key("a", 3)
    client.delete(key)
    with here.restorer() as restoring:
        done = restoring.restore("a")
    assert (done.verdict, done.events, done.replaced) == ("rebuilt", 12, 3)
    assert here.log("a").segments[:2] == segments[:2]
    assert here.audit(keys=True).clean
    assert_whole(here, list(records))
    client, key = here.segment_key("a", 0)
    client.delete(key)
    with here.restorer() as restoring:
        done = restoring.restore("a")
    assert (done.verdict, done.events) == ("rebuilt", 16)
    assert in_any_order(here.view()) == in_any_order(by_name(records[4:]))
    with here.restorer() as restoring:
        assert restoring.restore("a").verdict == "same"


def test_a_lost_log_is_made_again_below_what_the_pipeline_has_begun_since(
    kafka: EmbeddedKafka, any_store: StoreOptions
) -> None:
    here = Past(kafka.address, any_store, None, 1)
    records = here.put(here.days("a", days=3, each=4))
    client, log = here.client("a"), here.log_key("a")
    client.delete(log, *(here.segment_key("a", i)[1] for i in range(3)))
    late = here.days("a", days=1, each=2, first=-1)

    def begin_again(step: str) -> None:
        if step == "rebuilt-checked":
            here.put(late)

    with here.restorer() as restoring:
        assert restoring.restore("a", begin_again).verdict == "moved", "what follows would begin before it"
        done = restoring.restore("a")
    assert (done.verdict, done.segments) == ("rebuilt", 1)
    found = here.log("a").segments
    assert [(s.index, s.events) for s in found] == [(-1, 12), (0, 2)]
    more = here.put(here.days("a", days=1, each=2, first=4))
    assert [s.index for s in here.log("a").segments] == [-1, 0, 1]
    assert here.view()["a"] == [r.id for r in [*records, *late, *more]]


def test_days_that_have_expired_are_not_brought_back_and_those_about_to_are_left_to_it(past: Make) -> None:
    now = NOON + 12 * DAY
    here = past(2, days__keep="10d")
    records = here.put(here.days("a", "ended", days=6, each=4))
    with Keeper(here.store, clock=lambda: now - DAY) as keeper:
        assert keeper.expire("a", 10 * DAY).segments == 1
        assert keeper.expire("ended", DAY).ended
    client, key = here.segment_key("a", 3)
    client.delete(key)
    with here.restorer(now_ms=now) as restoring:
        done = restoring.restore("a")
        assert (done.verdict, done.events, done.replaced) == ("rebuilt", 16, 4)
        assert [s.index for s in here.log("a").segments] == [1, 2, 3, 4, 5]
        assert restoring.restore("ended").verdict == "same"
    wanted = [r for r in records if r.key == b"a" and r.time > NOON + DAY - 1]
    assert in_any_order(here.view()) == in_any_order(by_name(wanted))
    assert here.audit(clock=lambda: now).clean


def test_a_day_is_never_replaced_by_fewer_events_nor_squeezed_in_where_there_is_no_room(past: Make) -> None:
    here = past(1)
    here.put(here.days("a", "b", days=3, each=4))
    foreign = here.record("a", NOON + 3 * DAY)
    here.produce([foreign._replace(key=b"other")])
    here.writer.write([foreign])
    with here.restorer(day=3) as restoring:
        assert restoring.restore("a").verdict == "fewer"
        here.client("b").hdel(here.log_key("b"), "s1")
        kept = here.log("b").segments
        done = restoring.restore("b")
        assert (done.verdict, here.log("b").segments) == ("same", kept)
    with here.restorer(day=1) as restoring:
        assert restoring.restore("b").verdict == "rebuilt"
        assert [s.index for s in here.log("b").segments] == [0, 1, 2]
    with here.restorer() as restoring:
        done = restoring.restore("a")
        assert (done.verdict, done.events, done.before) == ("rebuilt", 12, 13)


def test_a_stream_whose_records_have_another_name_by_now_ends(past: Make) -> None:
    here = past(1)
    records = here.days("a", days=2)
    here.produce([record._replace(key=b"b") for record in records])
    here.writer.write(records)
    advance(here.shards, "days", here.writer.epoch, {Partition(here.topic, 0): records[-1].offset})
    with here.restorer() as restoring:
        assert restoring.restore("a").verdict == "rebuilt"
        assert restoring.restore("b").verdict == "rebuilt"
    assert in_any_order(here.view()) == {"b": sorted(r.id for r in records)}
    assert here.audit(keys=True).clean


def test_large_buckets_of_any_length_are_written_piece_by_piece(past: Make, store: StoreOptions) -> None:
    hour = DAY // 24
    here = past(1, Writer(store, span_ms=hour), upkeep__segment_bytes="64KiB", days__bucket="1h")
    large = b'{"x":"%s"}' % (b"y" * 3000)
    records = [here.record("a", NOON - DAY)]
    records += [here.record("a", NOON + i * 60_000, value=large) for i in range(200)]
    records += [here.record("a", NOON + 2 * DAY)]
    here.put(records, at_once=50)
    buckets = [(s.index, s.start_ms, s.span_ms, s.events) for s in here.log("a").segments]
    with here.restorer(day=0) as restoring:
        assert restoring.restore("a").verdict == "same"
        for at in (1, 3):
            client, key = here.segment_key("a", at)
            client.delete(key)
        done = restoring.restore("a")
    assert (done.verdict, done.replaced, done.segments) == ("rebuilt", 4, 4)
    assert [(s.index, s.start_ms, s.span_ms, s.events) for s in here.log("a").segments] == buckets
    client, key = here.segment_key("a", 1)
    assert client.xlen(key) > 2
    assert here.view()["a"] == [r.id for r in records]


def _restore_in_a_process(orders: RebuildPlan, records: Any, step: str) -> None:
    os.environ[FAILPOINT] = step
    Restorer(orders, Shards(orders.work.plan.store, dict(orders.work.plan.run_ids))).restore("a", iter(records))


@pytest.mark.parametrize("step", STEPS[2:])
def test_a_process_that_dies_leaves_the_log_as_it_was_or_rebuilt(past: Make, step: str) -> None:
    here = past(1)
    records = here.put(here.days("a", days=3, each=4))
    client, key = here.segment_key("a", 1)
    client.delete(key)
    before, view = here.log("a"), here.view()
    with here.restorer() as restoring:
        arguments = restoring.orders, restoring.records("a"), step
        process = multiprocessing.get_context("spawn").Process(target=_restore_in_a_process, args=arguments)
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        if step != "replaced":
            assert (here.log("a"), here.view()) == (before, view)
        assert restoring.restore("a").verdict == "rebuilt"
    assert_whole(here, list(records))

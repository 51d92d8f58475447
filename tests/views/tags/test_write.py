"""Tags in the store: whatever is replayed, split or run twice, numbers have no gaps and events come once."""

from __future__ import annotations

import random
import threading
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.values import Where
from tailrace.log.event import Partition
from tailrace.log.store import Logs
from tailrace.log.timeuuid import make_timeuuid, order
from tailrace.valkey.marks import conserved, read_counts
from tailrace.valkey.shards import Nodes, StoreOptions
from tailrace.views.tags.settings import TagRules, TagsSettings
from tailrace.views.tags.store import raise_floors, read_conflicts
from tailrace.views.tags.write import TagsPlan
from tests.examples import examples
from tests.writing import NOON, Record, Writer

EVEN = TagRules({"even": Where({"n": {"$mod": [2, 0]}})})
OPTIONS = TagsPlan(tags=TagsSettings(paths=("tags",), rules=EVEN))
VIEWS = ("intake", "tags")
HOUR = 3_600_000

_fresh = count()


def tagged(offset: int, pid: str, *tags: str, time: int = NOON, partition: int = 0, n: int = 1) -> Record:
    value = msgspec.json.encode({"n": n, "tags": tags})
    return Record(offset, key=pid.encode(), value=value, time=time, partition=partition, topic="carts")


async def read_tags(options: StoreOptions) -> dict[str, list[dict[str, Any]]]:
    """Return the events of every tag, in the order of its log."""
    nodes = await Nodes(options).open()
    try:
        logs, found = Logs(nodes, "tags"), dict[str, list[dict[str, Any]]]()
        for tag in await logs.names("", "", 100_000):
            for segment in (await logs.log(tag)).segments:
                after = segment.first - 1
                while entries := await logs.read(tag, segment, after, 100):
                    for entry in entries:
                        found.setdefault(tag, []).extend(
                            map(msgspec.json.decode, entry.run.frames(segment.start_ms, 0, tag))
                        )
                        after = entry.last
        return found
    finally:
        await nodes.close()


def check(records: list[Record], found: dict[str, list[dict[str, Any]]]) -> None:
    """Compare what the tags hold with the records: each event once, in order, numbered without a gap."""
    expected: dict[str, set[str]] = {}
    for record in records:
        value = msgspec.json.decode(record.value or b"")
        for tag in {*value["tags"], *(["even"] if value["n"] % 2 == 0 else [])}:
            expected.setdefault(tag, set()).add(record.id)
    assert {tag: {event["id"] for event in events} for tag, events in found.items()} == expected
    for tag, events in found.items():
        assert len({event["id"] for event in events}) == len(events)
        offsets, timeuuids, numbers = dict[int, int](), dict[Any, int](), dict[str, int]()
        for event in events:
            assert event["tag"] == tag
            assert tag in event["tags"]
            partition, pid = event["partition"], event["source"]
            assert event["offset"] > offsets.get(partition, -1)
            assert event["tag_seq"] == numbers.get(pid, 0) + 1
            place = order(msgspec.convert(event["timeuuid"], type=_uuid))
            assert place > timeuuids.get(partition, -1)
            assert place > timeuuids.get(pid, -1)
            offsets[partition], numbers[pid] = event["offset"], event["tag_seq"]
            timeuuids[partition] = timeuuids[pid] = place


_uuid = type(make_timeuuid(0, 0, Partition("a", 0)))


def _history(chance: random.Random, n: int) -> list[Record]:
    """Records of three partitions: clocks that step by an hour and back, sources that move between partitions."""
    clocks, offsets, found = [NOON] * 3, [0] * 3, list[Record]()
    for _ in range(n):
        p = chance.randrange(3)
        clocks[p] += chance.choice((0, 0, 1, 40, 1_000, 20 * 60_000, -20 * 60_000, HOUR, -HOUR))
        pid = f"cart-{chance.randrange(4)}" if chance.random() < 0.2 else f"cart-{p}{chance.randrange(4)}"
        tags = [tag for tag in ("red", "green", "blue", "gold") if chance.random() < 0.5]
        found.append(tagged(offsets[p], pid, *tags, time=clocks[p], partition=p, n=chance.randrange(4)))
        offsets[p] += chance.choice((1, 1, 1, 5))
    return found


@examples(25)
@given(seed=st.integers(0, 1 << 32))
async def test_any_split_and_replay_writes_every_tag_once_in_order_without_a_gap(
    store: StoreOptions, seed: int
) -> None:
    chance = random.Random(seed)
    store = msgspec.structs.replace(store, prefix=f"{store.prefix}v{next(_fresh)}")
    records = _history(chance, 60)
    writer = Writer(store, VIEWS, tags=OPTIONS, window_runs=chance.choice((1, 3, 500)))
    tasks = [writer, writer.another_task(), writer.another_task()]
    done = [0, 0, 0]
    by_partition = [[r for r in records if r.partition == p] for p in range(3)]
    while any(done[p] < len(by_partition[p]) for p in range(3)):
        batch: list[Record] = []
        for p in chance.sample(range(3), chance.randint(1, 3)):
            begin = max(0, done[p] - chance.choice((0, 0, 1, 7)))
            end = min(len(by_partition[p]), done[p] + chance.randint(1, 12))
            batch += by_partition[p][begin:end]
            done[p] = end
        chance.choice(tasks).write(batch)
        if chance.random() < 0.2:
            raise_floors(
                writer.shards, writer.epoch, {Partition("carts", chance.randrange(3)): NOON + chance.randrange(HOUR)}
            )
    writer.another_task().write(records[: len(records) // 2])
    found = await read_tags(store)
    check(records, found)
    counts = read_counts(writer.shards, "tags")
    assert conserved(counts) == 0
    assert counts.get("stored", 0) == sum(map(len, found.values()))


async def test_two_tasks_that_number_the_same_sources_at_once_make_no_gap_and_no_double(
    any_store: StoreOptions,
) -> None:
    writer = Writer(any_store, VIEWS, tags=OPTIONS)
    records = [tagged(i, f"cart-{i % 3}", "red", partition=p, n=1) for p in range(4) for i in range(60)]

    def run(partition: int) -> None:
        task = writer.another_task()
        for i in range(0, 60, 5):
            task.write([r for r in records if r.partition == partition and i <= r.offset < i + 5])

    threads = [threading.Thread(target=run, args=(p,)) for p in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = await read_tags(any_store)
    check(records, found)
    assert {
        e["source"]: max(x["tag_seq"] for x in found["red"] if x["source"] == e["source"]) for e in found["red"]
    } == {
        "cart-0": 80,
        "cart-1": 80,
        "cart-2": 80,
    }


async def test_a_source_written_from_two_places_is_reported_and_stored(store: StoreOptions) -> None:
    writer = Writer(store, VIEWS, tags=OPTIONS)
    writer.write([tagged(0, "cart-1", "red"), tagged(0, "cart-1", "red", partition=1)])
    conflicts = read_conflicts(writer.shards, 10)
    assert [(c["conflict"], c["tag"], c["source"], c["id"]) for c in conflicts] == [
        ("place", "red", "cart-1", "carts:1:0")
    ]
    assert read_counts(writer.shards, "tags")["conflict:place"] == 1
    assert [e["tag_seq"] for e in (await read_tags(store))["red"]] == [1, 2]


async def test_a_sequence_that_does_not_rise_is_reported_and_stored(store: StoreOptions) -> None:
    options = TagsPlan(tags=TagsSettings(sequence="n", paths=("tags",)))
    writer = Writer(store, VIEWS, tags=options)
    writer.write([tagged(i, "cart-1", "red", n=n) for i, n in enumerate((5, 6, 6, 7))])
    events = (await read_tags(store))["red"]
    assert [(e["seq"], e["tag_seq"]) for e in events] == [(5, 1), (6, 2), (6, 3), (7, 4)]
    assert read_counts(writer.shards, "tags")["conflict:sequence"] == 1


async def test_records_without_tags_source_or_number_are_skipped_and_counted(store: StoreOptions) -> None:
    options = TagsPlan(tags=TagsSettings(topics=("carts",), sequence="n", paths=("tags",)))
    writer = Writer(store, VIEWS, tags=options)
    writer.write(
        [
            Record(0, key=b"a", value=b'{"tags":[],"n":1}', topic="carts"),
            Record(1, key=None, value=b'{"tags":["x"],"n":1}', topic="carts"),
            Record(2, key=b"a", value=b'{"tags":["x"]}', topic="carts"),
            Record(3, key=b"a", value=None, topic="carts"),
            Record(4, key=b"a", value=b"{", topic="carts"),
            Record(5, key=b"a", value=b'{"tags":["x"],"n":1}', topic="carts"),
            Record(6, key=b"a", value=b'{"tags":["x",1,2],"n":2}', topic="carts"),
            Record(0, key=b"a", value=b'{"tags":["x"],"n":1}', topic="others"),
        ]
    )
    counts = read_counts(writer.shards, "tags")
    assert {field: n for field, n in counts.items() if field not in ("in", "events")} == {
        "stored": 2,
        "dead": 1,
        "skipped:no-tag": 2,
        "skipped:no-source": 1,
        "skipped:no-sequence": 1,
        "skipped:tombstone": 1,
        "ignored": 2,
    }
    assert conserved(counts) == 0


@pytest.mark.parametrize("many", [10, 11, 400])
async def test_an_event_may_have_any_number_of_tags_and_more_than_ten_are_counted(
    store: StoreOptions, many: int
) -> None:
    writer = Writer(store, VIEWS, tags=OPTIONS, window_runs=50)
    writer.write([tagged(0, "cart-1", *(f"t{i}" for i in range(many)))])
    assert len(await read_tags(store)) == many
    assert read_counts(writer.shards, "tags").get("many-tags", 0) == (many > 10)

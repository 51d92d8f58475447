"""The heart: marks and apply, on a real Valkey and on a real cluster."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import StaleDriver, StoreMismatch
from tailrace.log.event import Partition
from tailrace.log.store import LogRegistry
from tailrace.valkey.marks import advance, conserved, lowest, read_counts, read_marks
from tailrace.valkey.shards import Shards, StoreOptions, enlist, prepare
from tests.examples import examples
from tests.writing import DAY, NOON, Record, Writer, read_view

_fresh = count()


def _records(n: int, names: int, partition: int = 0, seed: int = 0) -> list[Record]:
    chance = random.Random(seed)
    return [
        Record(
            offset=i,
            key=json.dumps(["q", f"set-{chance.randrange(names)}"]).encode(),
            value=json.dumps({"n": i, "pad": "x" * chance.randrange(200)}).encode(),
            time=NOON + i * 1000 + chance.randrange(-90_000_000, 90_000_000),
            partition=partition,
        )
        for i in range(n)
    ]


def _expected(records: list[Record]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for record in records:
        assert record.key is not None
        found.setdefault("/".join(json.loads(record.key)), []).append(record.id)
    return found


def _per_source(ids: list[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for text in ids:
        source, _, offset = text.rpartition(":")
        found.setdefault(source, []).append(int(offset))
    return found


def test_each_record_is_stored_once_and_in_order(any_store: StoreOptions) -> None:
    writer = Writer(any_store)
    records = _records(2_000, 30)
    for at in range(0, 2_000, 300):
        writer.write(records[at : at + 300])
    assert asyncio.run(read_view(any_store)) == _expected(records)
    counts = read_counts(writer.shards, "days")
    assert counts["in"] == counts["stored"] == 2_000
    assert conserved(counts) == 0


def test_a_range_applied_again_in_other_splits_changes_nothing(any_store: StoreOptions) -> None:
    writer = Writer(any_store)
    records = _records(1_000, 20)
    writer.write(records)
    before = asyncio.run(read_view(any_store))
    for size in (1, 7, 250, 1_000):
        replay = writer.another_task()
        for at in range(0, 1_000, size):
            replay.write(records[at : at + size])
    assert asyncio.run(read_view(any_store)) == before == _expected(records)
    assert conserved(read_counts(writer.shards, "days")) == 0


_steps = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([(0,), (1,), (0, 1), (1, 0)]),
        st.floats(0, 1),
        st.integers(0, 40),
    ),
    max_size=15,
)


@examples(60)
@given(steps=_steps, seed=st.integers(0, 1 << 16), names=st.integers(1, 12), runs=st.integers(1, 9))
def test_any_overlapping_ranges_from_any_tasks_give_what_one_application_gives(
    any_store: StoreOptions, steps: list[tuple[int, tuple[int, ...], float, int]], seed: int, names: int, runs: int
) -> None:
    options = StoreOptions(any_store.url, prefix=f"{any_store.prefix}x{next(_fresh)}", shards=3)
    writer = Writer(options, window_bytes=64 if seed % 2 else 4096, window_runs=runs)
    tasks = [writer, writer.another_task(), writer.another_task()]
    records = {p: _records(60, names, partition=p, seed=seed + p) for p in (0, 1)}
    reached = {0: 0, 1: 0}
    for task, partitions, where, size in steps:
        piece: list[Record] = []
        for p in partitions:
            begin = round(where * reached[p])
            piece += records[p][begin : begin + size]
            reached[p] = max(reached[p], min(60, begin + size))
        tasks[task].write(piece)
    tasks[seed % 3].write(records[0] + records[1])
    view = asyncio.run(read_view(options))
    wanted = _expected(records[0] + records[1])
    assert view.keys() == wanted.keys()
    for name, ids in view.items():
        assert sorted(ids) == sorted(wanted[name])
        for offsets in _per_source(ids).values():
            assert offsets == sorted(offsets)
    assert conserved(read_counts(writer.shards, "days")) == 0


def test_tasks_that_apply_the_same_range_at_once_store_it_once(any_store: StoreOptions) -> None:
    writer = Writer(any_store)
    records = _records(3_000, 25)
    failures: list[BaseException] = []

    def work(task: Writer, size: int) -> None:
        try:
            for at in range(0, len(records), size):
                task.write(records[at : at + size])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(writer.another_task(), size)) for size in (50, 111, 400, 3_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert asyncio.run(read_view(any_store)) == _expected(records)
    assert read_counts(writer.shards, "days")["stored"] == 3_000


def test_an_older_driver_is_refused_and_changes_nothing(any_store: StoreOptions) -> None:
    old = Writer(any_store)
    records = _records(200, 5)
    old.write(records[:100])
    new = Writer(any_store)
    assert new.epoch > old.epoch
    with pytest.raises(StaleDriver, match="another pipeline"):
        old.write(records[100:])
    with pytest.raises(StaleDriver):
        advance(old.shards, "days", old.epoch, {Partition("jobs", 0): 150})
    assert sum(map(len, asyncio.run(read_view(any_store)).values())) == 100
    new.write(records[100:])
    assert asyncio.run(read_view(any_store)) == _expected(records)


def test_marks_of_shards_that_had_nothing_are_moved_and_never_back(any_store: StoreOptions) -> None:
    writer = Writer(any_store)
    source = Partition("jobs", 0)
    writer.write([Record(offset=i, key=b"one-name") for i in range(10)])
    assert lowest(read_marks(writer.shards, "days"))[source] == -1
    advance(writer.shards, "days", writer.epoch, {source: 9})
    assert lowest(read_marks(writer.shards, "days"))[source] == 9
    advance(writer.shards, "days", writer.epoch, {source: 3})
    assert lowest(read_marks(writer.shards, "days"))[source] == 9
    writer.another_task().write([Record(offset=i, key=f"name-{i}".encode()) for i in range(10)])
    assert asyncio.run(read_view(any_store)) == {"one-name": [f"jobs:0:{i}" for i in range(10)]}


def test_poison_goes_to_the_outbox_once_and_its_neighbours_are_stored(any_store: StoreOptions) -> None:
    writer = Writer(any_store)
    bad = [b"{nope", b"", b"\xff\xfe", b'"\\ud835"', b"NaN", b"[" * 1000 + b"]" * 1000, b'"' + b"x" * (2 << 20) + b'"']
    records = [Record(offset=0), Record(offset=1, value=None), Record(offset=2, key=None)]
    records += [Record(offset=3 + i, value=value) for i, value in enumerate(bad)]
    records += [Record(offset=10, value=b'{"long":' + b"9" * 400 + b"}"), Record(offset=11, key=b"plain")]
    writer.write(records)
    writer.another_task().write(records)
    assert asyncio.run(read_view(any_store)) == {"queue/jobset": ["jobs:0:0", "jobs:0:10"], "plain": ["jobs:0:11"]}
    keys, shards = writer.shards.keys, writer.shards
    boxes = shards.run_all([(s, ("XRANGE", keys.outbox(s), "-", "+")) for s in range(any_store.shards)])
    letters = [dict(zip(f[::2], f[1::2], strict=True)) if isinstance(f, list) else f for box in boxes for _, f in box]
    reasons = [json.loads(letter[b"v"])["reason"] for letter in letters]
    assert reasons == [
        "invalid-json",
        "empty",
        "invalid-utf8",
        "invalid-json",
        "invalid-json",
        "too-deep",
        "oversize",
    ]
    assert [letter[b"i"].decode() for letter in letters] == [f"jobs:0:{3 + i}" for i in range(7)]
    counts = read_counts(shards, "days")
    assert counts == {"in": 12, "stored": 3, "dead": 7, "skipped:tombstone": 1, "skipped:no-key": 1}
    assert conserved(counts) == conserved(read_counts(shards, "intake")) == 0


def test_a_bucket_never_moves_back_and_the_future_is_clamped(store: StoreOptions) -> None:
    writer = Writer(store)
    times = [NOON, NOON + DAY, NOON, NOON + 5 * DAY, NOON - 9 * DAY]
    for offset, time_ms in enumerate(times):
        writer.write([Record(offset=offset, time=time_ms, key=b"a")])
    writer.write([Record(offset=5, time=NOON + 5000 * DAY, key=b"a"), Record(offset=6, time=NOON, key=b"a")])
    day = NOON // DAY
    buckets = [s.start_ms // DAY for s in asyncio.run(_segments(store, "a"))]
    assert buckets[:3] == [day, day + 1, day + 5]
    assert day + 5 < buckets[3] < day + 5000
    assert asyncio.run(read_view(store))["a"] == [f"jobs:0:{i}" for i in range(7)]


def test_a_log_whose_open_segment_was_written_field_by_field_is_read_and_goes_on(store: StoreOptions) -> None:
    writer = Writer(store)
    records = [Record(i, b"a", time=NOON + i) for i in range(6)]
    writer.write(records[:2])
    writer.write(records[2:4])
    [found] = LogRegistry(writer.shards, "days").logs(["a"])
    key, client = writer.shards.keys.log(found.shard, "days", "a"), writer.shards.client(found.shard)
    [segment] = found.log.segments
    client.hset(key, mapping={"l": segment.last, "c": 4, "z": segment.bytes, "t": segment.newest_ms})
    client.hdel(key, "p")
    assert LogRegistry(writer.shards, "days").logs(["a"]) == [found]
    assert asyncio.run(read_view(store)) == {"a": [record.id for record in records[:4]]}
    writer.another_task().write(records)
    assert asyncio.run(read_view(store)) == {"a": [record.id for record in records]}
    [found] = LogRegistry(writer.shards, "days").logs(["a"])
    assert [(each.events, each.newest_ms, each.open) for each in found.log.segments] == [
        (4, NOON + 3, False),
        (2, NOON + 5, True),
    ]


@pytest.mark.slow
def test_a_window_with_thousands_of_days_is_applied_once(store: StoreOptions) -> None:
    records = [Record(i, b"a", time=i * DAY + NOON % DAY) for i in range(6_000)]
    writer = Writer(store)
    writer.write(records)
    writer.another_task().write(records)
    assert asyncio.run(read_view(store))["a"] == [record.id for record in records]
    assert read_counts(writer.shards, "days")["stored"] == 6_000


def test_runs_with_large_headers_are_cut_so_that_they_can_be_read(store: StoreOptions) -> None:
    carried: list[tuple[str, bytes | None]] = [("trace", random.Random(1).randbytes(9_000))]
    records = [Record(i, b"a", headers=carried) for i in range(3_000)]
    Writer(store).write(records)
    assert asyncio.run(read_view(store))["a"] == [record.id for record in records]


def test_names_by_path_take_any_number_and_skip_what_has_no_such_path(store: StoreOptions) -> None:
    writer = Writer(store, name_paths=("job.queue", "job.n"))
    long = b"9" * 5_000
    values = [b'{"job":{"queue":"q","n":%b}}' % n for n in (b"1", b'"1"', long[:300], b"1e400")]
    values += [b'{"job":{"queue":"q"}}', b'{"job":[1]}', b"17", b'{"x":%b,"job":{"queue":"z","n":2}}' % long]
    writer.write([Record(i, b"k", value) for i, value in enumerate(values)])
    names = ["q/=1", "q/1", "q/=" + "9" * 300, "q/=1e400", "z/=2"]
    assert asyncio.run(read_view(store)) == dict(zip(names, [[f"jobs:0:{i}"] for i in (0, 1, 2, 3, 7)], strict=True))
    assert read_counts(writer.shards, "days")["skipped:no-name"] == 3


def test_a_topic_created_again_gets_a_new_generation_with_fresh_marks(any_store: StoreOptions) -> None:
    writer = Writer(any_store)
    assert int(writer.shards.call(0, "adopt", "jobs", "id-1")) == 0
    assert int(writer.shards.call(0, "adopt", "jobs", "id-1")) == 0
    writer.write([Record(offset=i) for i in range(5)])
    assert int(writer.shards.call(0, "adopt", "jobs", "id-2")) == 1
    again = Writer(any_store, generations={"jobs": 1})
    again.write([Record(offset=i) for i in range(3)])
    ids = asyncio.run(read_view(any_store))["queue/jobset"]
    assert ids == [f"jobs:0:{i}" for i in range(5)] + [f"jobs@1:0:{i}" for i in range(3)]


def test_another_number_of_shards_is_refused_with_what_to_do(any_store: StoreOptions) -> None:
    Writer(any_store)
    other = StoreOptions(any_store.url, prefix=any_store.prefix, shards=any_store.shards - 1)
    with pytest.raises(StoreMismatch, match=r"set valkey\.shards back"):
        prepare(Shards(other).open())


def test_driver_epochs_are_never_given_out_twice(any_store: StoreOptions) -> None:
    shards = Shards(any_store).open()
    prepare(shards)
    epochs = [enlist(shards, ["days"], now=lambda: 5.0) for _ in range(5)]
    assert epochs == sorted(set(epochs))


async def _segments(options: StoreOptions, name: str):  # type: ignore[no-untyped-def]
    from tailrace.log.store import Logs
    from tailrace.valkey.shards import Nodes

    nodes = await Nodes(options).open()
    try:
        return (await Logs(nodes, "days").log(name)).segments
    finally:
        await nodes.close()

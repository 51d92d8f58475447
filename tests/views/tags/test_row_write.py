"""Tags that rest in Cassandra: rows first, then the mark, and whatever dies between changes nothing."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tailrace.driver.slice import AppliedMarks
from tailrace.log.event import Partition
from tailrace.log.timeuuid import first_of, last_of, order
from tailrace.valkey.marks import conserved, read_counts, read_marks, read_times
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.rows.model import StoredRow
from tailrace.views.tags.rows.store import RowReader
from tailrace.views.tags.settings import CassandraSettings, TagsSettings
from tailrace.views.tags.store import raise_floors
from tailrace.views.tags.write import TagsPlan, TagsWriter
from tests.examples import examples
from tests.views.tags.test_write import HOUR, VIEWS, tagged
from tests.writing import NOON, Record, Writer, batch

TAGGING = TagsSettings(paths=("tags",))

_fresh = count()


async def read_rows(options: CassandraSettings) -> dict[str, list[StoredRow]]:
    reader = await RowReader(options).open()
    try:
        found: dict[str, list[StoredRow]] = {}
        for tag in await reader.tags():
            async for page in reader.rows(tag, first_of(0), last_of(1 << 42)):
                found.setdefault(tag, []).extend(page)
        return found
    finally:
        await reader.close()


def check(records: list[Record], found: dict[str, list[StoredRow]]) -> None:
    """Each event once in each of its tags; per source 1, 2, 3 by timeuuid; timeuuids rise with offsets."""
    expected: dict[str, set[str]] = {}
    for record in records:
        for tag in msgspec.json.decode(record.value or b"")["tags"]:
            expected.setdefault(tag, set()).add(record.id)
    assert {tag: sorted(f"{row.partition}:{row.offset}" for row in rows) for tag, rows in found.items()} == {
        tag: sorted(ids) for tag, ids in expected.items()
    }
    for rows in found.values():
        assert [order(row.timeuuid) for row in rows] == sorted(order(row.timeuuid) for row in rows)
        numbers, offsets = dict[str, int](), dict[Partition, int]()
        for row in rows:
            assert row.tag_seq == numbers.get(row.source, 0) + 1
            assert row.offset > offsets.get(row.partition, -1)
            numbers[row.source], offsets[row.partition] = row.tag_seq, row.offset


def die_before_the_mark(writer: Writer, records: list[Record], most: int) -> None:
    """Work as a task, and stop when the rows of some windows are written: no shard has applied them."""
    (view,) = [view for view in writer.plan.make_writers() if isinstance(view, TagsWriter)]
    marks, shards = read_marks(writer.shards, "tags"), writer.plan.store.shards
    for part in batch(records, writer.plan.limits):
        answers = writer.shards.run_all(
            [(s, ("HGET", writer.shards.keys.times(s, "tags"), str(part.partition))) for s in range(shards)]
        )
        times = [(-(1 << 53), -1) if a is None else (int(a.split()[0]), int(a.split()[1])) for a in answers]
        place = AppliedMarks([shard.get(part.partition, -1) for shard in marks], times)
        view.load(writer.shards, [(part, place)])
        view.store(view.cut(part, list(place.marks))[:most])


def _history(chance: random.Random, n: int, prefix: str) -> list[Record]:
    clocks, offsets, found = [NOON] * 3, [0] * 3, list[Record]()
    for _ in range(n):
        p = chance.randrange(3)
        clocks[p] += chance.choice((0, 0, 1, 40, 20 * 60_000, -20 * 60_000, HOUR, -HOUR))
        tags = [f"{prefix}-{tag}" for tag in ("red", "green", "blue", "gold") if chance.random() < 0.6]
        found.append(tagged(offsets[p], f"cart-{p}{chance.randrange(3)}", *tags, time=clocks[p], partition=p))
        offsets[p] += chance.choice((1, 1, 5))
    return found


@examples(12)
@given(seed=st.integers(0, 1 << 32))
async def test_tasks_that_die_between_rows_and_mark_leave_the_rows_of_a_run_without_them(
    store: StoreOptions, rows_store: CassandraSettings, seed: int
) -> None:
    chance = random.Random(seed)
    prefix = f"r{next(_fresh)}"
    store = msgspec.structs.replace(store, prefix=f"{store.prefix}{prefix}")
    records = _history(chance, 40, prefix)
    options = TagsPlan(TAGGING.model_copy(update={"batch": chance.choice((1, 3, 150))}), cassandra=rows_store)
    writer = Writer(store, VIEWS, tags=options, window_runs=chance.choice((1, 500)))
    by_partition = [[r for r in records if r.partition == p] for p in range(3)]
    done = [0, 0, 0]
    while any(done[p] < len(by_partition[p]) for p in range(3)):
        p = chance.randrange(3)
        begin, end = max(0, done[p] - chance.choice((0, 0, 3))), done[p] + chance.randint(1, 10)
        some = by_partition[p][begin:end]
        if not some:
            continue
        if chance.random() < 0.5:
            die_before_the_mark(writer, some, chance.choice((1, 2, 100)))
        else:
            chance.choice((writer, writer.another_task())).write(some)
            done[p] = min(end, len(by_partition[p]))
        if chance.random() < 0.2 and not chance.randrange(2):
            # Only what is applied to its end is raised: nobody has written rows of it that are still to be marked.
            whole = [q for q in range(3) if done[q] == len(by_partition[q])]
            raise_floors(writer.shards, writer.epoch, {Partition("carts", q): NOON + 2 * HOUR for q in whole})
    found = {tag: rows for tag, rows in (await read_rows(rows_store)).items() if tag.startswith(prefix)}
    check(records, found)
    counts = read_counts(writer.shards, "tags")
    assert conserved(counts) == 0


async def test_tasks_that_number_one_source_at_once_leave_no_row_with_a_number_that_another_has(
    store: StoreOptions, rows_store: CassandraSettings
) -> None:
    writer = Writer(store, VIEWS, tags=TagsPlan(tags=TAGGING, cassandra=rows_store))
    records = [tagged(i, f"cart-{i % 2}", "red", partition=p) for p in range(4) for i in range(40)]

    def run(partition: int) -> None:
        task = writer.another_task()
        for i in range(0, 40, 5):
            task.write([r for r in records if r.partition == partition and i <= r.offset < i + 5])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    check(records, await read_rows(rows_store))


async def test_a_new_partition_has_a_floor_before_its_first_row(
    store: StoreOptions, rows_store: CassandraSettings
) -> None:
    options = TagsPlan(tags=TAGGING, cassandra=rows_store)
    writer = Writer(store, VIEWS, tags=options)
    writer.write([tagged(0, "cart-1", "red", time=NOON)])
    raise_floors(writer.shards, writer.epoch, {Partition("carts", 0): NOON + HOUR})
    lowest = min(ms for ms, _ in read_times(writer.shards, "tags").values())
    die_before_the_mark(writer, [tagged(0, "cart-2", "red", time=NOON - HOUR, partition=1)], 100)
    assert Partition("carts", 1) in read_times(writer.shards, "tags")
    late = [row for row in (await read_rows(rows_store))["red"] if row.partition.partition == 1]
    assert [order(row.timeuuid) >= order(first_of(lowest)) for row in late] == [True]

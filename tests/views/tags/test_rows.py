"""Rows of tags in a real Cassandra: written once however often, read in order whatever the pages and the buckets."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

import pytest

from tailrace.errors import StoreError, StoreMismatch, StoreUnavailable
from tailrace.log.event import Partition
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import first_of, last_of, make_timeuuid, ms_of, order
from tailrace.views.tags.rows import cassandra as schema
from tailrace.views.tags.rows.cassandra import CassandraConnection
from tailrace.views.tags.rows.model import RowKey, StoredRow
from tailrace.views.tags.rows.store import Bucket, RowReader, overlapping, writer
from tailrace.views.tags.settings import CassandraSettings

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
NOON = 1_700_049_600_000
PLACE = Partition("orders", 3, 1)
ALL = first_of(0), last_of(NOON * 2)

T = TypeVar("T")


def row(ms: int, offset: int, *, span: int = HOUR, value: bytes | None = b"{}", **other: Any) -> StoredRow:
    given: dict[str, Any] = {
        "tag": "green",
        "bucket_ms": bucket_start(ms, span),
        "span_ms": span,
        "timeuuid": make_timeuuid(ms, offset, PLACE),
        "source": f"cart-{offset % 7}",
        "tag_seq": offset + 1,
        "seq": offset,
        "partition": PLACE,
        "offset": offset,
        "time_ms": ms,
        "key": b"k",
        "headers": [],
        "value": value,
        "tags": ("green", "blue"),
    }
    return StoredRow(**given | other)


def narrow(of: StoredRow) -> RowKey:
    return RowKey(**{name: getattr(of, name) for name in RowKey.__struct_fields__})


def in_order(rows: Iterable[StoredRow]) -> list[StoredRow]:
    return sorted(rows, key=lambda r: (order(r.timeuuid), r.source, r.tag_seq))


async def all_of(pages: AsyncIterator[list[T]]) -> list[T]:
    found: list[T] = []
    async for page in pages:
        assert page
        found += page
    return found


@pytest.fixture
async def reader(rows_store: CassandraSettings) -> AsyncIterator[RowReader]:
    opened = await RowReader(rows_store).open()
    yield opened
    await opened.close()


async def test_a_row_is_read_as_it_was_written(rows_store: CassandraSettings, reader: RowReader) -> None:
    rows = [
        row(NOON, 1, key=None, value=b"\x00\xff" * 10, headers=[("a", b"1"), ("a", None), ("ü", b"")]),
        row(NOON + 1, 2, value=None, source="ünï ✓", tags=("green",)),
        row(NOON + 2, (1 << 44) - 1, key=b"", value=b"", seq=-(1 << 62), tag_seq=1 << 62, time_ms=-5),
        row(NOON - HOUR, 3),
    ]
    assert pickle.loads(pickle.dumps(rows_store)) == rows_store
    writer(rows_store).write(rows)
    assert await all_of(reader.rows("green", *ALL)) == in_order(rows)
    assert await all_of(reader.row_keys("green", *ALL)) == [narrow(r) for r in in_order(rows)]
    assert await reader.buckets("green") == [Bucket(NOON - HOUR, HOUR), Bucket(NOON, HOUR)]
    assert await all_of(reader.rows("red", *ALL)) == []
    assert await reader.buckets("red") == []


async def test_a_range_leaves_its_beginning_out_and_has_its_end(
    reader: RowReader, rows_store: CassandraSettings
) -> None:
    rows = [row(NOON + i * 20 * MINUTE, i) for i in range(9)]
    writer(rows_store).write(rows)
    for low in range(9):
        for high in range(low, 9):
            found = await all_of(reader.rows("green", rows[low].timeuuid, rows[high].timeuuid))
            assert found == rows[low + 1 : high + 1]
    assert await all_of(reader.rows("green", rows[5].timeuuid, rows[2].timeuuid)) == []


async def test_timeuuids_order_as_they_do_in_cassandra(reader: RowReader, rows_store: CassandraSettings) -> None:
    chance = random.Random(7)
    places = [Partition(f"t{i}", i, i % 3) for i in range(5)]
    made = {
        (ms, offset, i): make_timeuuid(NOON + ms, offset, places[i])
        for ms in (0, 1)
        for offset in (0, 1, 127, 128, 255, 256, 1 << 31, (1 << 44) - 1, *(chance.getrandbits(40) for _ in range(20)))
        for i in range(5)
    }
    rows = [row(NOON + ms, offset, timeuuid=made[ms, offset, i], tag_seq=1) for ms, offset, i in made]
    chance.shuffle(rows)
    writer(rows_store).write(rows)
    found = [r.timeuuid for r in await all_of(reader.rows("green", *ALL))]
    assert found == sorted(made.values(), key=order)
    by_place = [(ms, offset) for ms, offset, i in sorted(made, key=lambda k: order(made[k])) if i == 0]
    assert by_place == sorted(by_place), "along a place, timeuuids rise with the offsets"


async def test_a_batch_of_150_rows_of_8_kib_goes_through_and_comes_back(
    reader: RowReader, rows_store: CassandraSettings
) -> None:
    chance = random.Random(1)
    rows = [row(NOON + i, i, value=chance.randbytes(8 * 1024)) for i in range(150)]
    writer(rows_store, 150).write(rows)
    assert await all_of(reader.rows("green", *ALL)) == rows


async def test_a_row_as_large_as_the_largest_record_goes_through(
    reader: RowReader, rows_store: CassandraSettings
) -> None:
    large = row(NOON, 1, value=random.Random(1).randbytes(15 << 20))
    writer(rows_store).write([large])
    assert await all_of(reader.rows("green", *ALL)) == [large]


async def test_to_write_again_is_to_have_written_once_and_leaves_no_tombstones(
    reader: RowReader, rows_store: CassandraSettings
) -> None:
    rows = [row(NOON + i, i, key=None, value=None if i % 2 else b"x", tags=()) for i in range(300)]
    for size in (7, 150, 1):
        writer(rows_store, size).write(rows)
    assert [r.offset for r in await all_of(reader.rows("green", *ALL))] == list(range(300))
    connection = CassandraConnection(rows_store).open()
    try:
        text = connection.text(f"SELECT * FROM $keyspace.tag_views WHERE tag_name = 'green' AND timebucket = {NOON}")
        answer = connection.session.execute(text, trace=True)
        assert len(list(answer)) == 300
        trace = [event.description for event in answer.get_query_trace(10).events]
        assert "Read 300 live rows and 0 tombstone cells" in trace
    finally:
        connection.close()


async def test_rows_that_were_taken_back_are_gone_and_the_others_stay(
    reader: RowReader, rows_store: CassandraSettings
) -> None:
    wrong = [row(NOON + i * MINUTE, i) for i in range(120)]
    right = [row(NOON + i * MINUTE, i, tag_seq=1_000 + i) for i in range(120)]
    out = writer(rows_store, 10)
    out.write(wrong)
    out.write(right)
    out.delete([narrow(r) for r in wrong])
    assert await all_of(reader.rows("green", *ALL)) == right


@pytest.mark.parametrize("page", [1, 2, 3, 5, 7, 50, 100, 499, 500])
async def test_every_page_size_gives_the_same_rows(page: int, reader: RowReader, rows_store: CassandraSettings) -> None:
    rows = [row(NOON + i * 3 * MINUTE, i) for i in range(100)]
    same = [row(NOON + HOUR, 20, source=f"p{i}", tag_seq=1) for i in range(10)]
    writer(rows_store).write(rows + same)
    wanted = in_order(rows + same)
    reader.page = page
    pages = [len(p) async for p in reader.rows("green", *ALL)]
    assert max(pages) <= page
    assert await all_of(reader.rows("green", *ALL)) == wanted
    assert await all_of(reader.row_keys("green", *ALL)) == [narrow(r) for r in wanted]
    assert await all_of(reader.rows_down("green", ALL[1])) == wanted[::-1]


async def test_buckets_whose_length_was_changed_are_merged(reader: RowReader, rows_store: CassandraSettings) -> None:
    chance = random.Random(3)
    rows = []
    for offset in range(600):
        ms = NOON + chance.randrange(-2 * DAY, 2 * DAY)
        rows.append(row(ms, offset, span=chance.choice([MINUTE, HOUR, DAY]), time_ms=ms))
    rows += [row(bucket_start(NOON, DAY), 1_000 + i, span=span) for i, span in enumerate((MINUTE, HOUR, DAY))]
    writer(rows_store).write(rows)
    wanted = [(r.timeuuid, r.source, r.tag_seq) for r in in_order(rows)]

    def keys(found: Sequence[Any]) -> list[tuple[UUID, str, int]]:
        return [(r.timeuuid, r.source, r.tag_seq) for r in found]

    for page in (3, 500):
        reader.page = page
        assert keys(await all_of(reader.rows("green", *ALL))) == wanted
        assert keys(await all_of(reader.row_keys("green", *ALL))) == wanted
        assert keys(await all_of(reader.rows_down("green", ALL[1]))) == wanted[::-1]
    for _ in range(20):
        low, high = sorted(chance.sample(range(len(wanted)), 2))
        found = await all_of(reader.rows("green", wanted[low][0], wanted[high][0]))
        assert keys(found) == wanted[low + 1 : high + 1]
        assert (
            keys(await all_of(reader.rows_down("green", wanted[high][0])))[: high - low]
            == wanted[low + 1 : high + 1][::-1]
        )


def test_groups_of_buckets_do_not_overlap() -> None:
    day = [Bucket(0, HOUR), Bucket(0, DAY), Bucket(HOUR, HOUR)]
    assert overlapping(day) == [[Bucket(0, DAY), Bucket(HOUR, HOUR)]]
    hours = [
        Bucket(0, MINUTE),
        Bucket(0, HOUR),
        Bucket(5 * MINUTE, MINUTE),
        Bucket(HOUR, HOUR),
        Bucket(3 * HOUR, MINUTE),
    ]
    groups = [[Bucket(0, HOUR), Bucket(5 * MINUTE, MINUTE)], [Bucket(HOUR, HOUR)], [Bucket(3 * HOUR, MINUTE)]]
    assert overlapping(hours) == groups
    assert overlapping(hours, down=True) == groups[::-1]


async def test_years_of_buckets_are_read_in_order_and_only_those_that_have_rows(
    reader: RowReader, rows_store: CassandraSettings
) -> None:
    rows = [row(NOON - i * 31 * HOUR, i, tag=tag) for i in range(1_500) for tag in ("green", "blue")]
    writer(rows_store).write(rows)
    green = in_order(r for r in rows if r.tag == "green")
    assert len(await reader.buckets("green")) == 1_500
    assert await all_of(reader.rows("green", *ALL)) == green
    reader.page = 10
    async with aclosing(reader.rows_down("green", ALL[1])) as pages:
        assert [r.offset for r in await anext(pages)] == [0]
    assert await reader.tags() == ["blue", "green"]


async def test_whoever_stops_early_or_reads_at_once_with_others_gets_what_is_his(
    reader: RowReader, rows_store: CassandraSettings
) -> None:
    rows = [row(NOON + i * 100, i, tag=f"tag{i % 4}") for i in range(4_000)]
    writer(rows_store).write(rows)

    reader.page = 20

    async def one(tag: str, stop: int) -> list[StoredRow]:
        found: list[StoredRow] = []
        async with aclosing(reader.rows(tag, *ALL)) as pages:
            async for page in pages:
                found += page
                if len(found) >= stop:
                    break
        return found

    for i, found in enumerate(await asyncio.gather(*(one(f"tag{i % 4}", 30 * i) for i in range(40)))):
        wanted = [r for r in rows if r.tag == f"tag{i % 4}"]
        assert found == wanted[: len(found)]
        assert len(found) >= min(30 * i, 1_000)


def options_of_table(options: CassandraSettings, table: str) -> tuple[int, dict[str, str]]:
    connection = CassandraConnection(options).open()
    text = (
        "SELECT default_time_to_live, compaction FROM system_schema.tables WHERE keyspace_name = %s AND table_name = %s"
    )
    ((ttl, compaction),) = connection.execute(text, (options.keyspace, table))
    connection.close()
    return ttl, dict(compaction)


def test_rows_expire_as_configured_and_the_setting_may_change(rows_store: CassandraSettings) -> None:
    assert options_of_table(rows_store, "tag_views")[0] == 0
    for keep in (timedelta(days=30), timedelta(hours=1), timedelta(days=3_650)):
        schema.prepare(rows_store, keep)
        ttl, compaction = options_of_table(rows_store, "tag_views")
        assert ttl == keep.total_seconds()
        assert compaction["class"].endswith("TimeWindowCompactionStrategy")
        unit = {"MINUTES": 60, "HOURS": 3_600, "DAYS": 86_400}[compaction["compaction_window_unit"]]
        assert 10 <= ttl / (unit * int(compaction["compaction_window_size"])) <= 50
        assert options_of_table(rows_store, "tag_buckets")[0] > ttl
        schema.prepare(rows_store, keep)
    schema.prepare(rows_store)
    ttl, compaction = options_of_table(rows_store, "tag_views")
    assert (ttl, "TimeWindow" in compaction["class"]) == (0, False)


async def test_a_row_is_gone_when_its_time_is_over(reader: RowReader, rows_store: CassandraSettings) -> None:
    schema.prepare(rows_store, timedelta(seconds=1))
    writer(rows_store).write([row(NOON, 1)])
    for _ in range(100):
        if not await all_of(reader.rows("green", *ALL)):
            break
        await asyncio.sleep(0.1)
    assert await all_of(reader.rows("green", *ALL)) == []
    assert await reader.buckets("green") == [Bucket(NOON, HOUR)], (
        "a bucket is listed for longer than its rows are there"
    )


def test_tables_with_other_columns_are_refused_by_name(rows_store: CassandraSettings) -> None:
    connection = CassandraConnection(rows_store).open()
    connection.execute(connection.text("ALTER TABLE $keyspace.tag_views ADD ser_id int"))
    connection.execute(
        connection.text("ALTER TABLE $keyspace.tag_views DROP seq_nr_of_nobody").replace(
            "seq_nr_of_nobody", "sequence_nr"
        )
    )
    connection.close()
    with pytest.raises(
        StoreMismatch, match=r"tag_views .*sequence_nr \(missing, .*ser_id \(int regular -1, not there\)"
    ):
        schema.prepare(rows_store)


def test_what_is_not_there_or_refused_is_said(rows_store: CassandraSettings) -> None:
    nowhere = CassandraConnection(CassandraSettings(port=rows_store.port, keyspace="nowhere"))
    with pytest.raises(StoreUnavailable, match="no pipeline has prepared cassandra yet"):
        nowhere.prepared("SELECT start FROM $keyspace.tag_buckets WHERE tag_name = ?")
    nowhere.close()
    with pytest.raises(StoreError, match="cassandra refused a call"):
        writer(rows_store).write([row(NOON, 1, source="x" * 70_000)])
    assert ms_of(row(NOON, 1).timeuuid) == NOON

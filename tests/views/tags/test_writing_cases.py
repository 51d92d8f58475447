"""Behaviour cases of writing tags (W): batches, buckets, numbers and progress in both stores, and what fails.

There is no writer that lives on between batches, and nothing is kept back: a batch of rows is a limit and not
something to wait for, and an event is acknowledged when the mark has passed it.
"""

# ruff: noqa: N802 cases have their ids in the names of their tests

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import repeat

import msgspec
import pytest
from pydantic import ValidationError

from tailrace.driver.slice import RecordLimits
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.errors import StaleDriver, StoreError, StoreUnavailable
from tailrace.log.event import Partition
from tailrace.log.segment import DAY_MS, bucket_start
from tailrace.log.timeuuid import make_timeuuid, ms_of
from tailrace.valkey.marks import lowest, read_counts, read_marks
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.model import SourceProgress
from tailrace.views.tags.rows.cassandra import CassandraConnection
from tailrace.views.tags.rows.model import StoredRow
from tailrace.views.tags.rows.store import RowWriter
from tailrace.views.tags.settings import CassandraSettings, TagsSettings
from tests.views.tags.stored import HOUR, MINUTE, TOPIC, Died, Stored, dying, interrupted
from tests.views.tags.tagged import apart
from tests.writing import NOON, Record, Writer

PLACE = f"{TOPIC}:0"


@pytest.fixture(params=["valkey", "cassandra"])
def stored(request: pytest.FixtureRequest, store: StoreOptions) -> Iterator[Stored]:
    made = Stored(store, request.getfixturevalue("rows_store") if request.param == "cassandra" else None)
    yield made
    made.close()


@pytest.fixture
def in_rows(store: StoreOptions, rows_store: CassandraSettings) -> Iterator[Callable[..., Stored]]:
    """Makes tags in Cassandra, with options of their own."""
    made: list[Stored] = []

    def make(**options: object) -> Stored:
        made.append(Stored(store, rows_store, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def sizes(stored: Stored, tag: str) -> list[int]:
    return [len(batch) for batch in stored.batches(tag)]


# Batches.


def test_W_01_one_event_is_written_at_once_with_its_number_its_progress_and_the_mark(stored: Stored) -> None:
    stored.driver.write([stored.event("p1", "red", at=7)])
    (held,) = stored.tag("red")
    assert (held.id, held.number, held.seq) == (f"{PLACE}:0", 1, 0)
    assert held.timeuuid == make_timeuuid(NOON + 7, 0, Partition(TOPIC, 0))
    assert stored.progress("red", "p1") == SourceProgress(1, 0, NOON + 7, PLACE)
    assert stored.mark("red") == 0


def test_W_05_a_batch_is_a_limit_and_nobody_waits_until_one_is_full(in_rows: Callable[..., Stored]) -> None:
    stored = in_rows(batch=2)
    stored.driver.write(stored.events("p1", "red", 1))
    assert stored.numbers("red") == {"p1": [1]}
    stored.driver.write(stored.events("p1", "red", 2))
    stored.driver.write(stored.events("p1", "red", 3))
    assert sizes(stored, "red") == [1, 2, 2, 1]
    stored.check()


def test_W_06_one_batch_per_partition_and_progress_for_each_source(in_rows: Callable[..., Stored]) -> None:
    stored = in_rows(batch=3)
    stored.driver.write([stored.event(pid, "red") for pid in ("p1", "p1", "p2")])
    assert sizes(stored, "red") == [3]
    assert [stored.progress("red", pid).number for pid in ("p1", "p2", "p3")] == [2, 1, 0]


def test_W_09_a_change_of_bucket_splits_a_batch_and_both_parts_are_written(stored: Stored) -> None:
    first, second = stored.event("p1", "red", at=HOUR - 1), stored.event("p1", "red", at=HOUR)
    stored.driver.write([first, second])
    assert [(held.id, held.bucket_ms - NOON) for held in stored.tag("red")] == [(first.id, 0), (second.id, HOUR)]
    if stored.rows is not None:
        assert sorted(stored.batches("red")) == [[first.id], [second.id]]
    stored.check()


@pytest.mark.parametrize("apart_ms", [HOUR, 0], ids=["W_10", "W_11"])
def test_W_10_and_W_11_the_mark_waits_for_all_batches_whether_of_two_buckets_or_of_one(
    in_rows: Callable[..., Stored], apart_ms: int
) -> None:
    stored = in_rows(batch=2)
    records = [stored.event("p1", "red", at=at) for at in (0, 1, apart_ms + 2)]
    large = stored.event("p1", "red", at=apart_ms + 3, pad="x" * (17 << 20))
    # Larger than Cassandra takes: what it refuses is not the whole write, but one batch of it.
    generous = Writer(stored.store, ("intake", "tags"), tags=stored.options, limits=RecordLimits(max_bytes=64 << 20))
    with pytest.raises(StoreError, match="too big"):
        generous.write([*records, large])
    assert {held.number for held in stored.tag("red")} == {1, 2, 3}
    assert (stored.mark("red"), stored.progress("red", "p1")) == (-1, SourceProgress())
    stored.begin().write([*records, large])
    assert stored.numbers("red") == {"p1": [1, 2, 3]}
    assert (stored.mark("red"), read_counts(stored.driver.shards, "tags")["dead"]) == (3, 1)


def test_W_12_what_spans_three_buckets_is_written_to_each_in_order(stored: Stored) -> None:
    records = [stored.event("p1", "red", at=at) for at in (0, 1, HOUR, HOUR + 1, 2 * HOUR)]
    stored.driver.write(records)
    held = stored.tag("red")
    assert [(each.id, each.number) for each in held] == [(record.id, i + 1) for i, record in enumerate(records)]
    assert [(each.bucket_ms - NOON) // HOUR for each in held] == [0, 0, 1, 1, 2]
    assert stored.mark("red") == 4


def test_W_13_each_event_is_written_when_it_comes_and_those_that_come_together_together(
    in_rows: Callable[..., Stored],
) -> None:
    stored = in_rows()
    for count in (1, 1, 3):
        stored.driver.write(stored.events("p1", "red", count))
    assert sizes(stored, "red") == [1, 1, 3]
    stored.check()


def test_W_29_nothing_is_no_write_what_is_larger_than_a_batch_is_split_and_many_are_no_trouble(
    in_rows: Callable[..., Stored],
) -> None:
    stored = in_rows(batch=3)
    stored.driver.write([])
    stored.driver.write([stored.event("p1")])
    assert stored.held() == {}
    stored.driver.write(stored.events("p1", "red", 7))
    assert sorted(sizes(stored, "red")) == [1, 3, 3]
    assert stored.mark("red") == 7
    assert stored.rows is not None
    row = StoredRow(
        tag="red",
        bucket_ms=NOON,
        span_ms=HOUR,
        timeuuid=make_timeuuid(NOON, 0, Partition(TOPIC, 0)),
        source="p",
        tag_seq=1,
        seq=1,
        partition=Partition(TOPIC, 0),
        offset=0,
        time_ms=NOON,
        key=None,
        headers=[],
        value=b"{}",
        tags=("red",),
    )
    batches = RowWriter(CassandraConnection(stored.rows), 2)._batches(repeat(row, 1_000_000))
    assert sum(len(batch) == 2 for batch in batches) == 500_000


# Numbers.


def test_W_15_numbers_go_on_from_what_the_shard_says(stored: Stored) -> None:
    stored.reset("red", "p1", SourceProgress(10, 100, NOON, PLACE))
    records = [Record(offset, b"p1", b'{"tags":["red"]}', NOON + offset, 0, TOPIC) for offset in (101, 102)]
    stored.driver.write(records)
    assert [(held.seq, held.number) for held in stored.tag("red")] == [(101, 11), (102, 12)]
    assert stored.progress("red", "p1") == SourceProgress(12, 102, NOON + 102, PLACE)
    assert "conflict:sequence" not in read_counts(stored.driver.shards, "tags")


def test_W_16_what_is_of_an_earlier_bucket_and_comes_later_is_stamped_after_what_was_there(stored: Stored) -> None:
    late = [stored.event("p1", "red", at=at) for at in (HOUR, 0, 1)]
    other = stored.event("p2", "red", at=5, partition=1)
    stored.driver.write([*late, other])
    assert [(held.id, ms_of(held.timeuuid) - NOON) for held in stored.tag("red") if held.source == "p1"] == [
        (record.id, HOUR) for record in late
    ]
    (first,) = (held for held in stored.tag("red") if held.source == "p2")
    assert ms_of(first.timeuuid) == NOON + 5, "another partition has a clock of its own"
    stored.check()


def test_W_17_a_number_that_was_set_back_counts_also_for_a_task_that_has_read_another(stored: Stored) -> None:
    stored.driver.write(stored.events("p1", "red", 11))
    stored.reset("red", "p1", msgspec.structs.replace(stored.progress("red", "p1"), number=5))
    stored.driver.write(stored.events("p1", "red", 1, at=MINUTE))
    assert stored.tag("red")[-1].number == 6
    twenty = msgspec.structs.replace(stored.progress("red", "p1"), number=20)
    task = interrupted(stored.driver, lambda: stored.reset("red", "p1", twenty))
    task.write(stored.events("p1", "red", 2, at=2 * MINUTE))
    assert stored.numbers("red")["p1"] == [*range(1, 12), 6, 21, 22]
    assert stored.progress("red", "p1").number == 22


def test_W_18_what_was_numbered_from_what_no_longer_holds_is_numbered_again_and_nothing_of_it_is_left(
    stored: Stored,
) -> None:
    other = stored.event("p1", "red", partition=1)
    task = interrupted(stored.driver, lambda: stored.driver.another_task().write([other]))
    task.write(stored.events("p1", "red", 3, at=MINUTE))
    assert stored.numbers("red") == {"p1": [1, 2, 3, 4]}
    stored.check()


def test_W_20_what_a_task_knew_of_a_source_is_dropped_with_its_batch(stored: Stored) -> None:
    one, two = stored.driver, stored.driver.another_task()
    for task in (one, two, one, one, two):
        task.write(stored.events("p1", "red", 2))
    assert stored.numbers("red") == {"p1": list(range(1, 11))}
    stored.check()


def test_W_22_a_driver_that_begins_before_the_writes_of_the_last_one_end_is_the_one_that_counts(
    stored: Stored,
) -> None:
    records = [stored.event(pid, "red", "blue") for pid in ("p1", "p2", "p1")]
    task = interrupted(stored.driver, lambda: stored.begin().write(records[:2]))
    with pytest.raises(StaleDriver):
        task.write(records)
    stored.driver.write(records)
    assert stored.numbers("red") == {"p1": [1, 2], "p2": [1]}
    stored.check()


def test_W_28_each_tag_has_numbers_of_its_own_and_one_that_knows_nothing_of_a_source_begins_at_one(
    stored: Stored,
) -> None:
    stored.driver.write([stored.event("p2", "blue")])
    stored.reset("red", "p1", SourceProgress(10, 0, NOON, PLACE))
    stored.driver.write([stored.event("p1", "red", "blue")])
    assert [held.number for held in stored.tag("red")] == [11]
    assert stored.numbers("blue") == {"p2": [1], "p1": [1]}


# What fails.


def test_W_23_of_two_sources_of_which_one_is_written_both_are_written_by_the_next_attempt(stored: Stored) -> None:
    records = [stored.event(pid, "red", at=at) for at in (0, HOUR) for pid in ("p1", "p2")]
    with pytest.raises(Died):
        dying(stored.driver, "some rows").write(records)
    if stored.rows is not None:
        assert stored.numbers("red") == {"p1": [2], "p2": [2]}
    assert stored.mark("red") == -1
    stored.driver.write(records)
    stored.check()


def test_W_25_rows_whose_progress_could_not_be_written_do_not_count_and_are_written_again_the_same(
    own_valkey: EmbeddedValkey, rows_store: CassandraSettings
) -> None:
    stored = Stored(StoreOptions(own_valkey.url), rows_store)
    stored.driver.write(stored.events("p1", "red", 3))
    batch = stored.events("p1", "red", 3, at=MINUTE)
    with pytest.raises(StoreUnavailable):
        interrupted(stored.driver, own_valkey.kill).write(batch)
    before = stored.held()
    assert [held.number for held in before["red"]] == [1, 2, 3, 4, 5, 6]
    own_valkey.start(30)
    stored.begin()
    assert (stored.mark("red"), stored.progress("red", "p1").number) == (2, 3)
    stored.driver.write(batch)
    assert stored.held() == before
    stored.check()


def test_W_26_an_event_with_two_tags_is_acknowledged_when_both_have_it(stored: Stored) -> None:
    one, two = sorted(apart(stored.store), key=stored.shard)
    records = [stored.event("p1", one, two) for _ in range(5)]
    with pytest.raises(Died):
        dying(stored.driver, "some shards").write(records)
    assert sorted((stored.mark(one), stored.mark(two))) == [-1, 4]
    assert lowest(read_marks(stored.driver.shards, "tags"))[Partition(TOPIC, 0)] == -1, "a driver begins there"
    stored.begin().write(records)
    stored.settle()
    assert lowest(read_marks(stored.driver.shards, "tags"))[Partition(TOPIC, 0)] == 4
    stored.check()


def test_W_27_a_task_has_ended_when_every_tag_has_its_events(stored: Stored) -> None:
    tags = [f"t{i}" for i in range(40)]
    stored.driver.write([stored.event(f"p{i % 3}", *tags[i : i + 10]) for i in range(30)])
    assert len(stored.held()) == 39
    assert {stored.mark(tag) for tag in tags[:39]} == {29}
    stored.check()


def test_W_30_marks_pass_events_without_tags(stored: Stored) -> None:
    stored.driver.write([stored.event(f"p{i}") for i in range(25)])
    stored.settle()
    assert lowest(read_marks(stored.driver.shards, "tags")) == {Partition(TOPIC, 0): 24}
    assert read_counts(stored.driver.shards, "tags") == {"in": 25, "skipped:no-tag": 25}


# Buckets.


def test_W_31_a_time_lies_in_its_bucket_of_a_day_an_hour_or_a_minute() -> None:
    given = 1_409_545_135_047
    for span, start in ((DAY_MS, 1_409_529_600_000), (HOUR, 1_409_544_000_000), (MINUTE, 1_409_545_080_000)):
        assert bucket_start(given, span) == start
        assert bucket_start(start, span) == bucket_start(start + span - 1, span) == start
        assert bucket_start(start + span, span) == start + span
        assert bucket_start(start - 1, span) == start - span


@pytest.mark.parametrize(
    ("bucket", "text", "start"),
    [
        ("day", "20140901", 1_409_529_600_000),
        ("day", "20140901T04", 1_409_529_600_000),
        ("day", "20140901T04:18", 1_409_529_600_000),
        ("hour", "20140901T04", 1_409_544_000_000),
        ("hour", "20140901T04:18", 1_409_544_000_000),
        ("minute", "20140901T04:18", 1_409_545_080_000),
        ("hour", "", 0),
    ],
)
def test_W_32_the_first_bucket_is_a_time_that_is_rounded_down(bucket: str, text: str, start: int) -> None:
    tags = TagsSettings.model_validate({"bucket": bucket, "first_bucket": text})
    assert tags.first_ms == start
    assert tags.span in (timedelta(days=1), timedelta(hours=1), timedelta(minutes=1))


@pytest.mark.parametrize(
    "text", ["2014", "2014-09-01", "20140901T4", "20140901T04:18:55", "20141301", "20140901T25", "now"]
)
def test_W_32_any_other_first_bucket_is_refused_with_the_format(text: str) -> None:
    with pytest.raises(ValidationError, match="yyyyMMdd, yyyyMMddTHH or yyyyMMddTHH:mm"):
        TagsSettings.model_validate({"first_bucket": text})

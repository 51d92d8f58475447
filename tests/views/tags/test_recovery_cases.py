"""Behaviour cases of recovery (R): tasks and drivers that end anywhere, and others that go on, in both stores.

A source of events is what an entity is in the cases, a task or a driver is a node, and to recover is to be given the
same batch again: there is nothing else to load, since numbers are read from the shard.
"""

# ruff: noqa: N802 cases have their ids in the names of their tests

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence

import pytest

from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.model import SourceProgress
from tests.views.tags.reading import reading
from tests.views.tags.stored import HOUR, MINUTE, STEPS, Died, Held, Stored, dying, interrupted
from tests.writing import Record, Writer


@pytest.fixture(params=["valkey", "cassandra"])
def stored(request: pytest.FixtureRequest, store: StoreOptions) -> Iterator[Stored]:
    made = Stored(store, request.getfixturevalue("rows_store") if request.param == "cassandra" else None)
    yield made
    made.close()


def dies(stored: Stored, step: str, records: Sequence[Record], n_applied: int = 1) -> None:
    with pytest.raises(Died):
        dying(stored.driver, step, n_applied).write(records)


def at_once(*tasks: tuple[Writer, Sequence[Record]]) -> None:
    """Let tasks write at the same time."""
    failed: list[BaseException] = []

    def run(task: Writer, records: Sequence[Record]) -> None:
        try:
            task.write(records)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=each) for each in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_R_01_a_source_that_moves_between_nodes_and_back_is_numbered_on(stored: Stored) -> None:
    one, two = stored.driver, stored.driver.another_task()
    for task in (two, one, two):
        task.write(stored.events("p1", "red", 4))
    assert stored.numbers("red") == {"p1": list(range(1, 13))}
    stored.check()


def test_R_02_a_view_that_was_lost_with_all_its_progress_is_written_again_from_the_first_event(stored: Stored) -> None:
    stored.driver.write(stored.events("p1", "red", 4))
    before = stored.tag("red")
    stored.lose()
    assert stored.begin() is stored.driver
    assert (stored.held(), stored.mark("red"), stored.progress("red", "p1")) == ({}, -1, SourceProgress())
    stored.driver.write([*stored.records, *stored.events("p1", "red", 4, at=MINUTE)])
    assert stored.tag("red")[:4] == before
    assert stored.numbers("red") == {"p1": list(range(1, 9))}
    stored.check()


def test_R_04_a_driver_that_has_nothing_to_read_again_knows_the_numbers_all_the_same(stored: Stored) -> None:
    stored.driver.write(stored.events("p1", "red", 4))
    stored.settle()
    stored.begin().write(stored.events("p1", "red", 1))
    assert stored.numbers("red") == {"p1": [1, 2, 3, 4, 5]}
    stored.check()


def test_R_05_ten_restarts_with_a_hundred_events_each_of_which_many_were_under_way(stored: Stored) -> None:
    chance, pending = random.Random(5), list[Record]()
    for restart in range(10):
        pending += [stored.event("p1", "red", at=restart * MINUTE + i) for i in range(100)]
        split = chance.randrange(len(pending) + 1)
        stored.driver.write(pending[:split])
        dies(stored, chance.choice(STEPS), pending[split:] or pending)
        stored.close()
        stored.begin()
        pending = pending[max(0, split - 10) :]
    stored.driver.write(pending)
    assert stored.numbers("red") == {"p1": list(range(1, 1_001))}
    stored.check()


async def shown(stored: Stored, tag: str) -> list[str]:
    """Return what a reader of a tag gets now, as p1:2."""
    async with reading(stored.store, stored.rows) as feeds:
        return await feeds.names(tag)


@pytest.mark.parametrize("step", STEPS)
async def test_R_06_a_write_that_was_under_way_at_the_end_is_shown_with_its_number_or_not_at_all(
    stored: Stored, step: str
) -> None:
    stored.driver.write(stored.events("p1", "red", 3))
    dies(stored, step, stored.events("p1", "red", 1))
    applied = stored.mark("red") == 3
    assert applied or step != "all shards"
    assert not applied or step.endswith("shards")
    assert stored.progress("red", "p1").number == (4 if applied else 3)
    assert await shown(stored, "red") == ["p1:1", "p1:2", "p1:3", "p1:4"][: 4 if applied else 3]
    there = applied or (stored.rows is not None and step != "read")
    assert stored.numbers("red") == {"p1": [1, 2, 3, 4] if there else [1, 2, 3]}


@pytest.mark.parametrize("step", STEPS)
def test_R_07_whoever_goes_on_after_that_makes_no_gap(stored: Stored, step: str) -> None:
    stored.driver.write(stored.events("p1", "red", 3))
    batch = stored.events("p1", "red", 1)
    dies(stored, step, batch)
    stored.begin().write([*batch, *stored.events("p1", "red", 2)])
    assert stored.numbers("red") == {"p1": [1, 2, 3, 4, 5, 6]}
    stored.check()


def test_R_08_a_task_that_dies_at_every_fifth_event_and_twenty_times_loses_and_doubles_nothing(stored: Stored) -> None:
    chance = random.Random(8)
    for crash in range(20):
        batch = [stored.event(f"p{i % 2}", "red", "blue", at=crash * MINUTE) for i in range(5)]
        dies(stored, chance.choice(STEPS), batch, n_applied=chance.randint(1, 2))
        stored.driver.another_task().write(batch)
    assert sum(map(len, stored.numbers("red").values())) == 100
    stored.check()


@pytest.mark.parametrize("pids", [("p1",), ("p1", "p2")], ids=["one source", "two sources"])
def test_R_09_what_was_not_written_at_the_end_is_written_by_the_next_on_the_same_node(
    stored: Stored, pids: Sequence[str]
) -> None:
    stored.driver.write([stored.event(pid, "red") for pid in pids])
    batch = [stored.event(pid, "red", at=i) for i in range(5) for pid in pids]
    dies(stored, "read", batch)
    stored.driver.write(batch)
    stored.check()


@pytest.mark.parametrize("pids", [("p1",), ("p1", "p2")], ids=["one source", "two sources"])
def test_R_09_two_nodes_that_write_the_same_events_at_once_and_more_write_the_same_rows(
    stored: Stored, pids: Sequence[str]
) -> None:
    batch = [stored.event(pid, "red", at=i) for i in range(20) for pid in pids]
    more = [stored.event(pid, "red", at=MINUTE + i) for i in range(20) for pid in pids]
    tasks = [stored.driver.another_task() for _ in range(3)]
    at_once((tasks[0], batch), (tasks[1], batch), (tasks[2], [*batch, *more]))
    for task in tasks:
        task.write(more)
    stored.check()


def test_R_09_a_task_that_was_overtaken_in_the_middle_by_one_that_writes_more_leaves_no_row_of_its_own(
    stored: Stored,
) -> None:
    batch = [stored.event(pid, "red") for pid in ("p1", "p2", "p1")]
    more = stored.events("p1", "red", 3, at=MINUTE)
    interrupted(stored.driver, lambda: stored.driver.another_task().write([*batch, *more])).write(batch)
    stored.check()


def test_R_09_a_source_that_never_comes_again_has_all_of_its_events(stored: Stored) -> None:
    batch = [stored.event(pid, "red") for pid in ("p1", "p2") for _ in range(3)]
    stored.driver.write(batch)
    stored.close()
    stored.begin()
    stored.check()


def test_R_10_a_source_that_is_restarted_after_each_of_a_hundred_writes_is_never_numbered_wrong(
    stored: Stored,
) -> None:
    for i in range(101):
        if i % 10 == 0:
            stored.close()
            stored.begin()
        task = stored.driver.another_task()
        task.write(stored.events("p1", "red", 1, at=i))
        assert stored.progress("red", "p1").number == i + 1
        task.host.close()
    assert stored.numbers("red") == {"p1": list(range(1, 102))}
    stored.check()


# The crash matrix: what was written when a task died, and what another makes of the same batch.


def half_written(stored: Stored) -> list[Record]:
    """Write something, and return a batch over two tags, three sources and two buckets, of which some go on."""
    stored.driver.write([stored.event(f"p{i % 2}", "red", at=i) for i in range(4)])
    return [
        stored.event(f"p{i % 3}", *(("red", "blue") if i % 2 else ("red",)), at=HOUR - 5_000 + i * 1_000)
        for i in range(10)
    ]


@pytest.mark.parametrize("step", ["some rows", "all rows"])
def test_R_11_rows_whose_mark_was_lost_are_written_again_with_the_same_numbers_onto_the_same_rows(
    stored: Stored, step: str
) -> None:
    batch = half_written(stored)
    dies(stored, step, batch)
    before = stored.held()
    assert (stored.mark("red"), stored.progress("red", "p2")) == (3, SourceProgress())
    stored.driver.another_task().write(batch)
    after = stored.held()
    for tag, held in before.items():
        assert set(held) <= set(after[tag]), "each with the same number, timeuuid, bucket and value"
    if stored.rows is not None:
        assert sum(map(len, before.values())) == (4 + 15 if step == "all rows" else 4 + 15 - 15 // 2)
    stored.check()


def test_R_11_a_batch_whose_rows_and_mark_are_there_is_passed_over(stored: Stored) -> None:
    batch = half_written(stored)
    dies(stored, "all shards", batch)
    before = stored.held()
    batches = stored.batches("red") if stored.rows is not None else []
    stored.driver.another_task().write(batch)
    stored.begin().write(batch)
    assert stored.held() == before
    assert batches == (stored.batches("red") if stored.rows is not None else []), "not even written again"
    stored.check()


def test_R_11_a_batch_of_which_some_shards_know_is_completed_in_the_others(stored: Stored) -> None:
    batch = half_written(stored)
    dies(stored, "some shards", batch)
    known = {tag for tag in ("red", "blue") if stored.mark(tag) == 13}
    before: dict[str, list[Held]] = {tag: held for tag, held in stored.held().items() if tag in known}
    stored.begin().write(batch)
    after = stored.held()
    assert {tag: after[tag] for tag in before} == before
    stored.check()


def test_R_12_events_of_which_only_the_numbers_were_read_are_written_by_the_next_without_a_gap(stored: Stored) -> None:
    batch = half_written(stored)
    before = stored.held()
    dies(stored, "read", batch)
    assert stored.held() == before
    stored.driver.another_task().write([*batch, *stored.events("p1", "red", 2, at=2 * HOUR)])
    stored.check()

"""Hands and their rota on a real Kafka and a real Valkey: whoever dies, each record is applied once and in order."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import psutil
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tailrace.driver import crew as crews
from tailrace.driver import shift as shifts
from tailrace.driver.crew import Crew, CrewReport, in_spark
from tailrace.driver.rota import BEHIND, Progress, Rota
from tailrace.driver.shift import NICENESS, Hand, Shift, ShiftEnd, work
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import StaleDriver, TailraceError
from tailrace.log.event import Partition
from tailrace.testing.fixtures import unique_name
from tailrace.testing.installation import wait_for
from tailrace.valkey.marks import conserved, lowest, read_counts, read_marks
from tailrace.valkey.shards import StoreOptions
from tests.faults.rig import assert_ordered
from tests.writing import Writer, read_view

VIEWS = ("intake", "days")


class Place:
    """A topic, its view, and a crew that writes it."""

    def __init__(self, kafka: EmbeddedKafka, store: StoreOptions, partitions: int = 3) -> None:
        self.kafka, self.topic, self.partitions = kafka, unique_name(), partitions
        self.admin = AdminClient({"bootstrap.servers": kafka.address})
        self.admin.create_topics([NewTopic(self.topic, partitions, 1)])[self.topic].result(30)
        self.writer = Writer(store, VIEWS)
        self.sent: set[str] = set()
        self.store = store

    def send(self, count: int, *, partition: int | None = None) -> None:
        producer = Producer({"bootstrap.servers": self.kafka.address, "log_level": 0})

        def kept(error: Any, message: Any) -> None:
            assert error is None
            self.sent.add(f"{self.topic}:{message.partition()}:{message.offset()}")

        for i in range(count):
            number = i % self.partitions if partition is None else partition
            producer.produce(self.topic, b"{}", f"name-{i % 7}".encode(), partition=number, on_delivery=kept)
        producer.flush(30)

    def all(self) -> dict[Partition, int]:
        return {Partition(self.topic, number): 0 for number in range(self.partitions)}

    @contextmanager
    def crew(
        self, do: Callable[[Shift], ShiftEnd], hands: int = 2, shift_s: float = 900.0, spare: int = 0
    ) -> Iterator[tuple[Crew, Rota]]:
        client = {"bootstrap.servers": self.kafka.address, "log_level": 0}
        shift = Shift(self.writer.plan, "intake", 0, 0, client, frozenset(), 0.2)
        rota = Rota(self.writer.shards, "intake", self.writer.plan.epoch, hands, spare)
        crew = Crew(do, rota, shift, shift_s)
        try:
            yield crew, rota
        finally:
            crew.stop()

    def wait_applied(self, crew: Crew) -> None:
        wanted = len(self.sent)
        wait_tick("all records applied", crew, lambda said: sum(said.done.values()) >= wanted)

    def check(self) -> None:
        view = asyncio.run(read_view(self.store))
        ids = [event for stream in view.values() for event in stream]
        assert len(ids) == len(set(ids)), "an event is there twice"
        assert set(ids) == self.sent
        for stream in view.values():
            assert_ordered(stream)
        for view_name in VIEWS:
            assert conserved(read_counts(self.writer.shards, view_name)) == 0


def wait_tick(what: str, crew: Crew, holds: Callable[[CrewReport], object]) -> None:
    """Wait for what the hands say, and keep them at work meanwhile."""

    def look() -> object:
        crew.tick()
        return holds(crew.report())

    wait_for(what, look)


def alive(shift: Shift) -> ShiftEnd:
    return work(shift, 0)


class Died(Exception):
    """A hand whose process was killed: it says nothing to anybody."""


def dying_after(calls: int, shift: Shift) -> ShiftEnd:
    """Do a shift, and die at a call to the store, before it is sent or after."""
    hand = Hand(shift, 0)
    left = calls

    def mortal(shards: Any) -> None:
        run_all = shards.run_all

        def run(commands: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Died
            answers = run_all(commands)
            if left == -1:
                raise Died
            return answers

        shards.run_all = run

    mortal(hand._shards)
    mortal(hand._host._shards)
    try:
        return hand.run()
    except Died:
        return ShiftEnd("killed")
    except TailraceError as error:
        return ShiftEnd("failed", error)
    finally:
        hand.close()


@pytest.mark.parametrize("seed", range(4))
def test_each_record_is_applied_once_and_in_order_though_hands_are_relieved_and_killed_at_any_call(
    kafka: EmbeddedKafka, store: StoreOptions, seed: int
) -> None:
    chance = random.Random(seed)
    place = Place(kafka, store)
    ends: list[str] = []

    def do(shift: Shift) -> ShiftEnd:
        dies = chance.random() < 0.5
        end = dying_after(chance.randrange(1, 60), shift) if dies else work(shift, 0)
        ends.append(end.reason)
        # Spark repeats a task whose process died; a job that failed is another shift.
        return work(shift, 1) if end.reason == "killed" and chance.random() < 0.5 else end

    with place.crew(do, hands=chance.choice((1, 2, 3)), shift_s=0.4) as (crew, rota):
        rota.assign(dict(list(place.all().items())[:1]))
        counted = 0
        for _ in range(12):
            place.send(chance.choice((1, 10, 200)))
            crew.tick()
            before, counted = counted, crew.report().records
            assert counted >= before, "what an attempt took counts also when it has died"
            if len(rota.partitions) < place.partitions:
                more = Partition(place.topic, len(rota.partitions))
                rota.assign({more: 0})
            time.sleep(0.1)
        place.wait_applied(crew)
    place.check()
    assert {"relieved", "killed"} & set(ends)


def test_two_hands_that_read_the_same_partition_apply_each_record_once(
    kafka: EmbeddedKafka, store: StoreOptions
) -> None:
    place = Place(kafka, store, 1)
    place.send(2_000)

    def do(shift: Shift) -> ShiftEnd:
        # A hand that never asks whether it may go on: a process that was paused, and woke up.
        zombie = Hand(msgspec.structs.replace(shift, hand=shift.hand), 0)
        zombie._fetch([Partition(place.topic, 0)])
        zombie._held = {Partition(place.topic, 0)}
        try:
            until = time.monotonic() + 2
            while time.monotonic() < until:
                zombie._take(0.1)
        finally:
            zombie.close()
        return ShiftEnd("stop")

    with place.crew(do, hands=2) as (crew, rota):
        rota.assign(place.all())
        crew.tick()
        time.sleep(0.5)
        place.send(500)
        wait_for("all stored", lambda: read_counts(place.writer.shards, "days").get("stored", 0) >= 2_500)
    place.check()


def test_a_partition_moves_to_a_new_hand_and_back_while_records_come(kafka: EmbeddedKafka, store: StoreOptions) -> None:
    place = Place(kafka, store, 4)
    with place.crew(alive, hands=2) as (crew, rota):
        for _ in range(6):
            whole = crew.report().done or place.all()
            rota.assign({partition: whole.get(partition, 0) for partition in place.all()})
            place.send(40)
            place.wait_applied(crew)
            gone = [Partition(place.topic, 0), Partition(place.topic, 1)]
            done = crew.report().done
            rota.assign({}, gone)
            place.send(20)
            wait_tick("the hands to let go", crew, lambda said: said.held == 2)
            rota.assign({partition: done[partition] for partition in gone})
            place.wait_applied(crew)
    place.check()


def test_a_partition_that_is_far_behind_is_caught_up_by_a_hand_that_leaves_when_it_is_level(
    kafka: EmbeddedKafka, store: StoreOptions
) -> None:
    place = Place(kafka, store, 2)
    first = Partition(place.topic, 0)
    kinds: list[tuple[int, bool]] = []

    def do(shift: Shift) -> ShiftEnd:
        kinds.append((shift.hand, shift.catching_up))
        return alive(shift)

    with place.crew(do, spare=1) as (crew, rota):
        rota.assign(place.all())
        place.send(100)
        place.wait_applied(crew)
        rota.balance({first: BEHIND + 1}, Progress(0.0, {}, {}))
        assert rota.hands == {0, 1, 2}
        place.send(200)
        place.wait_applied(crew)
        assert kinds[2:] == [(2, True)]
        rota.balance({first: 10}, Progress(1.0, {}, {}))
        assert rota.hands == {0, 1}
        place.send(200)
        place.wait_applied(crew)
        wait_tick("the hand to leave", crew, lambda _: not crew._jobs[2])
    place.check()


def test_a_partition_goes_back_to_a_live_hand_when_there_is_no_slot_to_catch_up_in(
    kafka: EmbeddedKafka, store: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crews, "SLOT_S", 0.5)
    place, slot = Place(kafka, store, 2), threading.Event()
    far = {Partition(place.topic, 0): BEHIND + 1}

    def do(shift: Shift) -> ShiftEnd:
        if shift.catching_up:
            slot.wait()
        return alive(shift)

    with place.crew(do, hands=1, spare=1) as (crew, rota):
        rota.assign(place.all())
        rota.balance(far, Progress(0.0, {}, {}))
        assert rota.hands == {0, 1}
        place.send(100)
        wait_tick("no hope for a slot", crew, lambda _: not rota.spare)
        rota.balance(far, Progress(1.0, {}, {}))
        place.wait_applied(crew)
        slot.set()
        wait_tick("a slot", crew, lambda _: rota.spare)
    place.check()


def test_a_hand_that_catches_up_has_low_priority_and_its_process_does_nothing_after_it(
    kafka: EmbeddedKafka, store: StoreOptions, spark: Any
) -> None:
    place = Place(kafka, store, 2)
    first, usual = Partition(place.topic, 0), os.nice(0)

    def niceness() -> list[int]:
        family = psutil.Process(spark.sparkContext._gateway.proc.pid).children(recursive=True)
        return sorted(process.nice() for process in family if process.is_running())

    with place.crew(in_spark(spark), hands=1, spare=1) as (crew, rota):
        rota.assign(place.all())
        rota.balance({first: BEHIND + 1}, Progress(0.0, {}, {}))
        place.send(100)
        place.wait_applied(crew)
        assert niceness()[-2:] == [usual, usual + NICENESS]
        rota.balance({first: 0}, Progress(1.0, {}, {}))
        wait_tick("its hand to leave", crew, lambda _: not crew._jobs[1])
        assert spark.sparkContext.parallelize([0], 1).map(os.nice).collect() == [usual]
        place.send(100)
        place.wait_applied(crew)
    place.check()


def test_offsets_that_kafka_no_longer_has_are_reported_and_not_jumped_over(
    kafka: EmbeddedKafka, store: StoreOptions
) -> None:
    place = Place(kafka, store, 2)
    place.send(100)
    first = Partition(place.topic, 0)
    place.admin.delete_records([TopicPartition(place.topic, 0, 20)])[TopicPartition(place.topic, 0)].result(30)
    with place.crew(alive) as (crew, rota):
        rota.assign(place.all())
        wait_tick("an error", crew, lambda said: said.errors)
        wait_for("the other partition", lambda: crew.report().done[Partition(place.topic, 1)] == 50)
        assert crew.report().done[first] == 0
        rota.assign({}, [first])
        wait_tick("the hand to know", crew, lambda said: not said.errors)
        rota.assign({first: 20})
        wait_tick("the rest", crew, lambda said: said.done[first] == 50)


def test_the_marks_of_shards_without_records_follow_also_over_the_end_of_a_transaction(
    kafka: EmbeddedKafka, store: StoreOptions
) -> None:
    place = Place(kafka, store, 1)
    producer = Producer({"bootstrap.servers": kafka.address, "transactional.id": place.topic, "log_level": 0})
    producer.init_transactions(30)
    for commit in (True, False):
        producer.begin_transaction()
        producer.produce(place.topic, b"{}", b"name")
        producer.flush(30)
        producer.commit_transaction(30) if commit else producer.abort_transaction(30)
    with place.crew(alive) as (crew, rota):
        rota.assign(place.all())
        only = Partition(place.topic, 0)
        wait_tick("its end", crew, lambda said: said.done[only] == 4)
        shards = place.writer.shards
        wait_for("all marks", lambda: all(lowest(read_marks(shards, view)).get(only) == 3 for view in VIEWS))


def test_hands_leave_soon_when_the_driver_stops_or_is_not_heard(
    kafka: EmbeddedKafka, store: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shifts, "ORPHANED_MS", 600)
    place = Place(kafka, store, 1)
    ends: list[str] = []

    def do(shift: Shift) -> ShiftEnd:
        ends.append((end := alive(shift)).reason)
        return end

    with place.crew(do, hands=1) as (crew, rota):
        rota.assign(place.all())
        crew.tick()
        wait_for("an orphan", lambda: ends)
        crew.tick()
        crew.tick()
        wait_tick("another hand", crew, lambda said: said.held)
    assert ends == ["orphaned", "stop"]


def test_a_driver_that_was_overtaken_cannot_change_or_stop_the_rota_of_the_other(
    kafka: EmbeddedKafka, store: StoreOptions
) -> None:
    place = Place(kafka, store, 1)
    with place.crew(alive) as (old, old_rota):
        old_rota.assign(place.all())
        place.writer = Writer(store, VIEWS)
        with place.crew(alive) as (new, new_rota):
            new_rota.assign(place.all())
            for change in (old.tick, lambda: old_rota.assign({}), lambda: old_rota.assign({}, list(place.all()))):
                with pytest.raises(StaleDriver):
                    change()
            old.stop()
            place.send(10)
            place.wait_applied(new)
    place.check()

"""The rota in the store: what each hand may read, and how a shift passes from one task to the next."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

import pytest

from tailrace.driver.crew import read_done
from tailrace.driver.shift import RollAnswer
from tailrace.log.event import Partition
from tailrace.valkey.shards import Shards, StoreOptions, prepare

A, B, C = (Partition("jobs", number) for number in range(3))
EPOCH = 7


class Rota:
    """The rota of a driver, as the driver writes it and hands see it."""

    def __init__(self, store: StoreOptions) -> None:
        self.shards = Shards(store).open()
        prepare(self.shards)
        self.version = 0
        self.shards.run_all([(0, ("HSET", self._key("rota"), "epoch", EPOCH))])

    def _key(self, word: str) -> str:
        return f"{self.shards.keys.tag(0)}:{word}:days"

    def write(self, lists: Mapping[int, Iterable[Partition]], *, beat: int = 0) -> None:
        self.version += 1
        fields: list[str | int] = ["version", self.version, "beat", beat]
        for hand, partitions in lists.items():
            fields += [f"hand:{hand}", json.dumps([str(each) for each in partitions])]
            pairs = [part for each in partitions for part in (str(each), 0)]
            self.shards.run_all([(0, ("HSET", self._key("done"), *pairs))] if pairs else [])
        self.shards.run_all([(0, ("HSET", self._key("rota"), *fields))])

    def silence(self, hand: int) -> None:
        """Let a hand's last beat be long ago."""
        self.shards.run_all([(0, ("HSET", self._key("hands"), f"beat:{hand}", 1))])

    def stop(self) -> None:
        self.shards.run_all([(0, ("HSET", self._key("rota"), "stop", 1))])

    def done(self) -> dict[str, int]:
        return {str(partition): offset for partition, offset in read_done(self.shards, "days").items()}

    def roll(
        self,
        hand: int,
        token: int,
        *,
        seen: int | str = "",
        ready: bool = False,
        leaving: bool = False,
        waiting: bool = False,
        gave: Iterable[Partition] = (),
        done: Mapping[Partition, int] | None = None,
        epoch: int = EPOCH,
    ) -> RollAnswer:
        given = [str(each) for each in gave]
        progress = [part for each, offset in (done or {}).items() for part in (str(each), offset)]
        flags = int(ready), int(leaving), int(waiting)
        arguments = ["days", epoch, hand, token, seen, *flags, "{}", len(given), *given, *progress]
        return RollAnswer.read(self.shards.call(0, "roll", *arguments))


@pytest.fixture
def rota(store: StoreOptions) -> Iterator[Rota]:
    made = Rota(store)
    yield made
    made.shards.close()


def test_a_hand_is_told_its_partitions_once_for_each_version_of_the_rota(rota: Rota) -> None:
    rota.write({0: [A, B], 1: [C]})
    first = rota.roll(0, 1000)
    assert (first.verdict, first.partitions, first.refused) == ("ok", frozenset({A, B}), 0)
    assert rota.roll(0, 1000, seen=first.version).partitions is None
    rota.write({0: [A], 1: [C, B]})
    assert rota.roll(0, 1000, seen=first.version).partitions == frozenset({A})


def test_a_partition_changes_hands_only_when_it_was_given_up(rota: Rota) -> None:
    rota.write({0: [A, B], 1: []})
    rota.roll(0, 1000)
    rota.write({0: [A], 1: [B]})
    waits = rota.roll(1, 2000)
    assert (waits.partitions, waits.refused) == (frozenset(), 1)
    rota.roll(0, 1000, gave=[B])
    assert rota.roll(1, 2000, seen=waits.version, waiting=True).partitions == frozenset({B})


def test_what_a_silent_hand_holds_goes_to_another_without_its_word(rota: Rota) -> None:
    rota.write({0: [A]})
    rota.roll(0, 1000)
    rota.write({0: [], 1: [A]})
    assert rota.roll(1, 2000).refused == 1
    rota.silence(0)
    assert rota.roll(1, 2000, waiting=True).partitions == frozenset({A})


def test_nobody_gives_up_what_another_hand_holds(rota: Rota) -> None:
    rota.write({0: [A], 1: []})
    rota.roll(0, 1000)
    rota.roll(1, 2000, gave=[A])
    rota.write({0: [], 1: [A]})
    assert rota.roll(1, 2000).refused == 1


def test_a_successor_waits_and_its_predecessor_goes_on_until_the_successor_is_ready(rota: Rota) -> None:
    rota.write({0: [A]})
    rota.roll(0, 1000)
    waits = rota.roll(0, 2000)
    assert (waits.verdict, waits.partitions) == ("wait", frozenset({A}))
    assert rota.roll(0, 1000).verdict == "ok"
    assert rota.roll(0, 2000, seen=waits.version, ready=True).partitions is None
    assert rota.roll(0, 1000).verdict == "relieved"
    assert rota.roll(0, 2000, ready=True).verdict == "wait"
    assert rota.roll(0, 1000, leaving=True, done={A: 5}).verdict == "left"
    takes = rota.roll(0, 2000, ready=True)
    assert (takes.verdict, takes.partitions) == ("ok", frozenset({A}))
    assert rota.roll(0, 1000).verdict == "replaced"
    assert rota.done() == {str(A): 5}


def test_a_successor_of_a_silent_hand_begins_at_once(rota: Rota) -> None:
    rota.write({0: [A]})
    rota.roll(0, 1000)
    rota.silence(0)
    assert rota.roll(0, 2000).partitions == frozenset({A})
    assert rota.roll(0, 1000).verdict == "replaced"


def test_a_later_attempt_of_a_shift_replaces_the_earlier_one(rota: Rota) -> None:
    rota.write({0: [A]})
    rota.roll(0, 1000)
    assert rota.roll(0, 1001).partitions == frozenset({A})
    assert rota.roll(0, 1000).verdict == "replaced"
    assert rota.roll(0, 1001).verdict == "ok"


def test_a_hand_of_another_driver_is_stale_and_changes_nothing(rota: Rota) -> None:
    rota.write({0: [A]})
    assert rota.roll(0, 1000, done={A: 9}, epoch=EPOCH - 1).verdict == "stale"
    assert rota.done() == {str(A): 0}


def test_progress_never_goes_back_and_is_that_of_listed_partitions(rota: Rota) -> None:
    rota.write({0: [A]})
    rota.roll(0, 1000, done={A: 9, B: 3})
    rota.roll(0, 1000, done={A: 4})
    assert rota.done() == {str(A): 9}


def test_a_driver_that_ends_stops_hands_at_work_and_hands_that_wait(rota: Rota) -> None:
    rota.write({0: [A]})
    rota.roll(0, 1000)
    rota.stop()
    assert rota.roll(0, 1000).verdict == rota.roll(0, 2000).verdict == "stop"
    assert rota.roll(0, 1000, leaving=True).verdict == "left"


def test_a_hand_learns_how_long_its_driver_was_not_heard(rota: Rota) -> None:
    rota.write({0: []}, beat=1)
    assert rota.roll(0, 1000).age_ms > 1_000_000_000


def test_a_hand_that_is_not_on_the_rota_stops(rota: Rota) -> None:
    rota.write({0: [A]})
    assert rota.roll(3, 1000).verdict == "stop"

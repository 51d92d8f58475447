"""The plan of who reads what: every partition has one hand, few change hands, and none goes to and fro."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tailrace.driver.rota import BEHIND, BUSY, IMBALANCE, LEVEL, OBSERVED_S, Progress, Rota, relieve, share
from tailrace.log.event import Partition
from tailrace.valkey.shards import Shards, StoreOptions, prepare

A, B, C, D = (Partition("t", number) for number in range(4))

_partitions = st.lists(st.integers(0, 40), unique=True).map(lambda numbers: [Partition("t", n) for n in numbers])
_lags = st.sampled_from([0, LEVEL - 1, LEVEL, BEHIND, BEHIND + 1, 5_000_000])


@st.composite
def _plans(draw: st.DrawFn) -> tuple[list[Partition], dict[Partition, int], dict[Partition, int], int, int]:
    """Partitions, their lags, hands that some of them had, also of partitions that are gone; and numbers of hands."""
    partitions, live, spare = draw(_partitions), draw(st.integers(1, 5)), draw(st.integers(0, 3))
    before = {
        Partition("t", n): hand for n, hand in draw(st.dictionaries(st.integers(0, 40), st.integers(0, 9))).items()
    }
    return partitions, {each: draw(_lags) for each in partitions}, before, live, spare


@given(_plans())
def test_every_partition_has_one_hand_of_its_kind(plan: Any) -> None:
    partitions, lags, before, live, spare = plan
    shared = share(*plan)
    assert shared.keys() == set(partitions)
    assert all(0 <= hand < live + spare for hand in shared.values())
    for each, hand in shared.items():
        catches_up = hand >= live
        assert not (catches_up and lags[each] < LEVEL)
        if spare and lags[each] > BEHIND and any(lag <= BEHIND for lag in lags.values()):
            assert catches_up
        if catches_up and lags[each] <= BEHIND:
            assert before[each] >= live


@given(_plans())
def test_only_what_must_changes_hands_and_the_same_plan_again_moves_nothing(plan: Any) -> None:
    partitions, lags, before, live, spare = plan
    shared = share(*plan)
    assert share(partitions, lags, shared, live, spare) == shared
    for each, hand in shared.items():
        if before.get(each, -1) in range(live + spare):
            same_kind = (before[each] >= live) == (hand >= live)
            assert hand == before[each] or not same_kind


@given(_partitions, st.integers(1, 7))
def test_new_partitions_are_spread_evenly(partitions: list[Partition], live: int) -> None:
    hands = list(share(partitions, {}, {}, live, 0).values())
    counts = [hands.count(hand) for hand in range(live)]
    assert max(counts) - min(counts) <= 1


def test_where_everything_is_far_behind_there_is_nobody_to_yield_to() -> None:
    assert share([A, B], {A: BEHIND + 1, B: BEHIND + 1}, {A: 0, B: 1}, 2, 2) == {A: 0, B: 1}
    assert share([A, B], {A: BEHIND + 1, B: 0}, {A: 0, B: 1}, 2, 2) == {A: 2, B: 1}


_shares = st.dictionaries(
    st.integers(0, 12).map(lambda n: Partition("t", n)), st.tuples(st.integers(0, 5), st.floats(0, 1)), min_size=1
)


def _totals(shared: Mapping[Partition, int], busy: Mapping[Partition, float], live: int) -> list[float]:
    return [sum(busy[each] for each, hand in shared.items() if hand == number) for number in range(live)]


@given(_shares, st.integers(1, 6))
def test_relieving_a_busy_hand_moves_one_partition_at_most_and_ends(
    given: dict[Partition, tuple[int, float]], live: int
) -> None:
    shared = {each: hand for each, (hand, _) in given.items()}
    busy = {each: cost for each, (_, cost) in given.items()}
    for _ in range(100):
        again = relieve(shared, busy, live)
        before, after = _totals(shared, busy, live), _totals(again, busy, live)
        moved = [each for each in shared if again[each] != shared[each]]
        if not moved:
            break
        [each] = moved
        assert shared[each] == before.index(max(before))
        assert max(before) >= BUSY
        assert max(before) > IMBALANCE * sum(before) / live
        assert max(after) <= max(before) + 1e-9
        assert after[shared[each]] >= after[again[each]] - 1e-9, "the two have not changed places"
        shared = again
    else:
        raise AssertionError("partitions go to and fro")


def test_a_hand_gives_a_partition_away_only_when_it_was_busy_for_long(store: StoreOptions) -> None:
    shards = Shards(store).open()
    prepare(shards)
    rota = Rota(shards, "days", 7, 2)
    rota.assign(dict.fromkeys((A, B, C, D), 0))
    assert rota._shared == {A: 0, B: 1, C: 0, D: 1}
    for second in range(int(OBSERVED_S) + 1):
        assert rota._shared[C] == 0
        rota.balance({}, Progress(second, {A: 100 * second, C: 50 * second}, {0: 0.9 * second}))
    assert rota._shared == {A: 0, B: 1, C: 1, D: 1}
    shards.close()

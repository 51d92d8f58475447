"""Retention of sessions in their streams."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from tailrace.log.cursor import EntryId
from tailrace.views.sessions.settings import SessionsSettings
from tailrace.views.sessions.upkeep import Weights, stale_trims

PLENTY = SessionsSettings.model_construct(
    keep_entries=10**9, keep_bytes=10**12, keep_time=timedelta(days=10_000), stream_bytes=10**12
)


MS = timedelta(milliseconds=1)


def weighed(*entries: tuple[int, int]) -> Weights:
    """A stream with entries of sessions, each with its size, a millisecond after the other."""
    weights = Weights()
    for ms, (number, size) in enumerate(entries, 1):
        weights.add((ms, 0), number, size)
    return weights


def limits(**given: object) -> SessionsSettings:
    """Return limits that may be below those that settings allow; all others are wide."""
    return PLENTY.model_copy(update=given)


def test_with_room_for_everything_nothing_is_too_much() -> None:
    assert weighed(*[(n % 3, 100) for n in range(100)]).surplus(PLENTY, 100) == {}
    assert Weights().surplus(PLENTY, 100) == {}


def test_each_session_keeps_its_newest_entries_whatever_others_write() -> None:
    chatty_and_quiet = weighed(*[(2 if n % 50 == 0 else 1, 10) for n in range(500)])
    assert chatty_and_quiet.surplus(limits(keep_entries=10), 500) == {1: 480}
    assert chatty_and_quiet.surplus(limits(keep_bytes=200), 500) == {1: 470}


def test_entries_are_kept_for_a_time_by_the_servers_clock() -> None:
    weights = weighed((1, 5), (2, 5), (1, 5), (2, 5))
    assert weights.surplus(limits(keep_time=10 * MS), 11) == {}
    assert weights.surplus(limits(keep_time=10 * MS), 13) == {1: 1, 2: 1}
    assert weights.surplus(limits(keep_time=10 * MS), 1_000) == {1: 2, 2: 2}


def test_one_entry_that_is_larger_than_allowed_goes_too() -> None:
    assert weighed((1, 50), (1, 5)).surplus(limits(keep_bytes=10), 2) == {1: 1}
    assert weighed((1, 5), (1, 50)).surplus(limits(keep_bytes=10), 2) == {1: 2}


def test_when_the_stream_is_too_large_the_largest_session_gives_first() -> None:
    weights = weighed(*[(1, 10)] * 10, *[(2, 10)] * 4, (3, 10))
    assert weights.surplus(limits(stream_bytes=100), 15) == {1: 5}
    # Down to where the next one is as large; then they give in turn.
    assert weights.surplus(limits(stream_bytes=70), 15) == {1: 7, 2: 1}
    assert weights.surplus(limits(stream_bytes=0), 15) == {1: 10, 2: 4, 3: 1}


def test_what_was_dropped_is_forgotten_and_weighing_goes_on_after_it() -> None:
    weights = weighed(*[(1, 10)] * 3000, (2, 7))
    assert weights.oldest(1, 2) == [(1, 0), (2, 0)]
    assert weights.drop(1, 2000) == 20_000
    assert weights.oldest(1, 3000) == [(n, 0) for n in range(2001, 3001)]
    assert weights.drop(2, 1) == 7
    assert weights.drop(1, 1000) == 10_000
    assert (weights.surplus(limits(keep_entries=0), 3001), weights.last) == ({}, (3001, 0))


def test_it_is_told_of_trimmed_entries_while_somebody_may_ask() -> None:
    trimmed: dict[int, EntryId] = {1: (10, 0), 2: (10, 5), 3: (20, 0)}
    assert stale_trims(trimmed, {2}, 15) == [1]


_entries = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 50)), max_size=60)
_limits = st.builds(
    limits,
    keep_entries=st.integers(1, 20),
    keep_bytes=st.integers(0, 300),
    keep_time=st.integers(0, 60).map(lambda ms: ms * MS),
    stream_bytes=st.integers(0, 500),
)


@given(_entries, _limits)
def test_what_is_left_is_within_all_limits_and_no_more_goes_than_must(
    entries: list[tuple[int, int]], limits: SessionsSettings
) -> None:
    now, age_ms = len(entries), limits.keep_time // MS
    weights = weighed(*entries)
    going = weights.surplus(limits, now)
    left: dict[int, list[tuple[int, int]]] = {}
    for ms, (number, size) in enumerate(entries, 1):
        left.setdefault(number, []).append((ms, size))
    for number, n in going.items():
        assert weights.oldest(number, n) == [(ms, 0) for ms, _ in left[number][:n]]
    kept = {number: some[going.get(number, 0) :] for number, some in left.items()}
    total = {number: sum(s for _, s in some) for number, some in kept.items()}
    for number, some in kept.items():
        assert len(some) <= limits.keep_entries
        assert total[number] <= limits.keep_bytes
        assert all(ms >= now - age_ms for ms, _ in some)
    assert sum(total.values()) <= limits.stream_bytes
    for number, n in going.items():
        ms, given = left[number][n - 1]
        alone = (
            len(kept[number]) + 1 > limits.keep_entries
            or total[number] + given > limits.keep_bytes
            or ms < now - age_ms
        )
        # Or it gave for the stream, in which case it was the largest one when it did.
        assert alone or sum(total.values()) + given > limits.stream_bytes - 50 * len(left)
        assert alone or total[number] + given >= max(total.values())
    for number, n in going.items():
        weights.drop(number, n)
    assert weights.surplus(limits, now) == {}

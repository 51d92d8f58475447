"""Timeuuids sort by millisecond and offset, here and in Cassandra alike."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from tailrace.log.event import Partition
from tailrace.log.timeuuid import first_of, last_of, make_timeuuid, ms_of, order

_ms = st.integers(0, 4_000_000_000_000)
_offset = st.integers(0, (1 << 44) - 1)
_place = st.builds(Partition, st.sampled_from(["a", "jobs", "orders-eu"]), st.integers(0, 100), st.integers(0, 3))


def _as_cassandra_compares(given: UUID) -> tuple[int, list[int]]:
    """By time, then byte by byte as signed numbers."""
    return given.time, [byte - 256 if byte > 127 else byte for byte in given.bytes[8:]]


@given(st.tuples(_ms, _offset, _place), st.tuples(_ms, _offset, _place))
def test_timeuuids_sort_here_as_they_do_in_cassandra(
    one: tuple[int, int, Partition], two: tuple[int, int, Partition]
) -> None:
    a, b = make_timeuuid(*one), make_timeuuid(*two)
    assert (order(a) < order(b)) == (_as_cassandra_compares(a) < _as_cassandra_compares(b))
    assert (order(a) == order(b)) == (a == b)


@given(_ms, _ms, _offset, _offset, _place)
def test_along_a_partition_timeuuids_rise_with_the_offsets(
    one: int, two: int, low: int, high: int, place: Partition
) -> None:
    (one, two), (low, high) = sorted((one, two)), sorted((low, high))
    assert low == high or order(make_timeuuid(one, low, place)) < order(make_timeuuid(two, high, place))


@given(_ms, _offset, _place)
def test_a_timeuuid_lies_inside_its_millisecond_and_is_a_uuid_of_version_1(
    ms: int, offset: int, place: Partition
) -> None:
    given = make_timeuuid(ms, offset, place)
    assert ms_of(given) == ms
    assert given.version == 1
    assert order(first_of(ms)) <= order(given) <= order(last_of(ms)) < order(first_of(ms + 1))

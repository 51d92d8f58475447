"""Bursts: however samples are cut, they and their times are the same, and nothing is over the limit."""

from __future__ import annotations

from itertools import pairwise
from math import gcd

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.errors import BadBurst, TooLarge
from tailrace.views.sessions.burst import (
    MAX_BURST,
    TARGET,
    bursts,
    event,
    event_of,
    parse,
    periodic,
    points_of,
    row,
    row_of,
    run_of,
    session_json,
    time_range,
    timestamped,
)
from tailrace.views.sessions.rta import NOTHING, Subscription
from tailrace.views.sessions.rta_pb2 import PeriodicData, StreamData, StreamSubscription, TimestampedData
from tailrace.views.sessions.telemetry import BadSample, Periodic, SampleRow, TelemetryEvent, Timestamped
from tests.examples import examples

NOW = 1_620_129_055_123_456_789
OVERHEAD = 64
"""Bytes that a message and its place in a burst take beside samples and deltas."""


def unknown(channel: int) -> None:
    """Every channel is without configuration."""


def _timestamped(messages: list[bytes]) -> list[TimestampedData]:
    found = [StreamData.FromString(message) for message in messages]
    assert all(each.WhichOneof("data") == "timestamped_data" for each in found)
    return [each.timestamped_data for each in found]


def _times(given: TimestampedData) -> list[int]:
    times, at = [], given.start_timestamp
    for delta in given.timestamp_deltas:
        at += delta * given.timestamp_deltas_scale
        times.append(at)
    return times


_widths = st.sampled_from([1, 2, 4, 8, 12])
_targets = st.sampled_from([1, 80, 100, 1000, TARGET, 1 << 20, 1 << 30])
_steps = st.one_of(st.integers(-5, 5), st.integers(-(10**9), 10**18), st.sampled_from([0, 1000, 5 * 10**6]))
_series = st.builds(
    lambda start, steps, by: [start + by * sum(steps[:i]) for i in range(len(steps) + 1)],
    st.integers(-(2**61), 2**61),
    st.lists(_steps, max_size=60).filter(lambda steps: sum(map(abs, steps)) < 2**52),
    st.sampled_from([1, 10, 1000]),
)


@given(_series, _widths, _targets, st.integers(0, 2**32 - 1))
@example([-(2**63), 2**63 - 1, -(2**63)], 1, TARGET, 0)
@example([NOW] * 300, 1, 100, 1)
@example([NOW], 8, TARGET, 16)
def test_samples_with_times_come_out_in_order_with_exactly_their_times(
    times: list[int], width: int, target: int, channel: int
) -> None:
    buffer = bytes(i % 251 for i in range(len(times) * width))
    messages = timestamped(channel, times, width, buffer, target)
    pieces = _timestamped(messages)
    assert b"".join(piece.buffer for piece in pieces) == buffer
    assert [time for piece in pieces for time in _times(piece)] == times
    assert timestamped(channel, np.array(times, np.int64), width, buffer, target) == messages
    for piece, message in zip(pieces, messages, strict=True):
        assert piece.channel_id == channel
        assert piece.timestamp_deltas[0] == 0
        assert all(delta >= 0 for delta in piece.timestamp_deltas)
        assert piece.timestamp_deltas_scale >= 1
        assert gcd(*piece.timestamp_deltas) in (0, 1)
        assert message == StreamData(timestamped_data=piece).SerializeToString()
        assert len(message) <= max(min(target, MAX_BURST), OVERHEAD + width + 10)
    for before, after in pairwise(pieces):
        went_back = _times(after)[0] < _times(before)[-1] or _times(after)[0] - _times(before)[-1] >= 2**63
        full = len(StreamData(timestamped_data=before).SerializeToString()) + OVERHEAD + width + 10 > target
        assert went_back or full


@given(st.integers(0, 400), st.integers(1, 10**12), _widths, _targets, st.integers(-(2**61), 2**61))
def test_periodic_samples_come_out_in_order_with_exactly_their_times(
    count: int, interval: int, width: int, target: int, start: int
) -> None:
    buffer = bytes(i % 251 for i in range(count * width))
    messages = periodic(9, start, interval, width, buffer, target)
    pieces: list[PeriodicData] = [StreamData.FromString(message).periodic_data for message in messages]
    assert b"".join(piece.buffer for piece in pieces) == buffer
    times = [piece.start_timestamp + i * piece.interval for piece in pieces for i in range(piece.samples)]
    assert times == [start + i * interval for i in range(count)]
    for piece, message in zip(pieces, messages, strict=True):
        assert len(piece.buffer) == piece.samples * width
        assert len(message) <= max(min(target, MAX_BURST), OVERHEAD + width)


@given(st.lists(st.integers(0, 3000), max_size=40), st.integers(1, 4000))
def test_bursts_hold_all_messages_in_order_and_are_of_about_the_size_that_is_wanted(
    sizes: list[int], target: int
) -> None:
    messages = [session_json("x" * size) for size in sizes]
    made = list(bursts(messages, target))
    assert [each.SerializeToString() for burst in made for each in parse(burst).data] == messages
    for burst in made:
        assert len(burst) <= target or len(parse(burst).data) == 1
    for before, after in pairwise(made):
        first = parse(after).data[0].SerializeToString()
        assert len(before) + len(next(bursts([first]))) > target


@examples(15)
@given(st.integers(1, 3_000_000), st.sampled_from([1, 2, 4, 8, 12]), st.sampled_from([1 << 10, TARGET, 1 << 20]))
@example(3 << 20, 1, 1 << 20)
def test_a_record_of_any_size_becomes_bursts_that_are_never_over_1_mib(size: int, width: int, target: int) -> None:
    count = max(1, size // width)
    buffer = np.arange(count * width, dtype=np.uint8).tobytes()
    times = NOW + np.cumsum(np.arange(count, dtype=np.int64) % 977 * 1000)
    regular = periodic(1, NOW, 1000, width, buffer, target)
    irregular = timestamped(2, times, width, buffer, target)
    made = list(bursts([*regular, *irregular], target))
    assert all(len(burst) <= target for burst in made)
    found = [each for burst in made for each in parse(burst).data]
    assert [each.SerializeToString() for each in found] == [*regular, *irregular]
    deltas = [np.array(each.timestamp_deltas) for each in _timestamped(irregular)]
    pieces = zip(_timestamped(irregular), deltas, strict=True)
    again = [piece.start_timestamp + piece.timestamp_deltas_scale * np.cumsum(each) for piece, each in pieces]
    assert np.array_equal(np.concatenate(again), times)


def test_a_message_of_1_mib_with_its_head_is_a_burst_and_one_byte_more_is_refused() -> None:
    for size in (MAX_BURST - 1, MAX_BURST):
        (made,) = bursts([session_json("x" * (size - 8))])
        assert len(made) == size
    with pytest.raises(TooLarge, match="at most 1048576"):
        list(bursts([session_json("x" * (MAX_BURST + 1 - 8))]))


def test_bursts_stay_within_1_mib_when_more_is_wanted() -> None:
    messages = [session_json("x" * 400_000)] * 5
    assert [len(parse(burst).data) for burst in bursts(messages, 1 << 30)] == [2, 2, 1]


def test_time_that_goes_back_begins_a_new_message() -> None:
    pieces = _timestamped(timestamped(1, [10, 20, 15, 15, 40, 39], 1, b"abcdef"))
    assert [piece.buffer for piece in pieces] == [b"ab", b"cde", b"f"]
    assert [_times(piece) for piece in pieces] == [[10, 20], [15, 15, 40], [39]]


def test_the_scale_is_the_greatest_common_divisor_of_the_distances() -> None:
    (piece,) = _timestamped(timestamped(1, [NOW, NOW + 40, NOW + 100], 1, b"abc"))
    assert (piece.timestamp_deltas_scale, list(piece.timestamp_deltas)) == (20, [0, 2, 3])
    (piece,) = _timestamped(timestamped(1, [NOW, NOW, NOW], 1, b"abc"))
    assert (piece.timestamp_deltas_scale, list(piece.timestamp_deltas)) == (1, [0, 0, 0])


def test_deltas_are_plain_varints_of_any_length() -> None:
    steps = [2 ** (7 * bits) - less for bits in range(1, 9) for less in (1, 0)]
    times = np.cumsum([0, 1, *steps])
    (message,) = timestamped(1, times, 1, bytes(len(times)))
    (piece,) = _timestamped([message])
    assert list(piece.timestamp_deltas) == [0, 1, *steps]
    assert message == StreamData(timestamped_data=piece).SerializeToString()


def test_no_samples_are_no_messages_and_no_bursts() -> None:
    assert periodic(1, NOW, 10, 8, b"") == timestamped(1, [], 8, b"") == []
    assert list(bursts([])) == []


@pytest.mark.parametrize(
    ("reason", "wrong"),
    [
        ("bad-width", lambda: run_of(Periodic(channel=1, start=NOW, interval=10, data=bytes(15)), unknown)),
        ("bad-width", lambda: points_of(Timestamped(channel=1, times=[NOW], data=bytes(9)), unknown)),
        ("bad-width", lambda: row_of(SampleRow(channels=[1, 2], time=NOW, data=bytes(15)), unknown)),
        ("bad-count", lambda: points_of(Timestamped(channel=1, times=[NOW, NOW + 1], data=bytes(8)), unknown)),
        ("bad-interval", lambda: run_of(Periodic(channel=1, start=NOW, interval=-1, values=[1, 2]), unknown)),
        ("bad-interval", lambda: run_of(Periodic(channel=1, start=NOW, interval=0, values=[1, 2]), unknown)),
        ("bad-time", lambda: points_of(Timestamped(channel=1, times=[2**63], values=[1]), unknown)),
        ("out-of-range", lambda: event_of(TelemetryEvent(2**31, NOW))),
    ],
)
def test_what_the_format_cannot_say_is_refused_with_a_reason(reason: str, wrong: object) -> None:
    with pytest.raises(BadSample) as caught:
        wrong()  # type: ignore[operator]
    assert str(caught.value).startswith(f"{reason}: ")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: run_of(Periodic(channel=1, start=2**63 - 10, interval=10, values=[1, 2]), unknown),
        lambda: row_of(SampleRow(channels=[1], time=-(2**63) - 1, values=[1]), unknown),
        lambda: event_of(TelemetryEvent(1, 2**63)),
    ],
)
def test_times_beyond_64_bits_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="does not fit into 64 bits"):
        wrong()  # type: ignore[operator]


def test_bytes_that_are_no_burst_are_refused() -> None:
    with pytest.raises(BadBurst, match="no burst"):
        parse(b"\x0a\x05x")


ALL = [
    session_json("{}"),
    time_range(1, 2),
    *periodic(1, 1, 1, 1, b"a"),
    *timestamped(2, [1], 1, b"b"),
    row([3, 4], 1, b"cd"),
    event(1, "a", 1),
]
BURST = next(bursts(ALL))


def _kinds(wanted: Subscription) -> list[str | None]:
    return [each.WhichOneof("data") for each in parse(BURST).data if wanted.wants(each)]


def test_a_reader_who_asked_for_nothing_gets_only_updates_of_the_session() -> None:
    assert _kinds(NOTHING) == ["session_json", "time_range"]


@pytest.mark.parametrize(
    ("wanted", "kinds"),
    [
        (Subscription(channels=frozenset({1})), ["periodic_data"]),
        (Subscription(channels=frozenset({2})), ["timestamped_data"]),
        (Subscription(channels=frozenset({4, 9})), ["row_data"]),
        (Subscription(all_events=True), ["event"]),
        (Subscription(all_channels=True), ["periodic_data", "timestamped_data", "row_data"]),
        (Subscription(True, True), ["periodic_data", "timestamped_data", "row_data", "event"]),
    ],
)
def test_a_reader_gets_what_it_asked_for_and_a_row_whole_if_any_channel_matches(
    wanted: Subscription, kinds: list[str]
) -> None:
    assert _kinds(wanted) == ["session_json", "time_range", *kinds]


_asked = st.builds(
    StreamSubscription,
    all_events=st.booleans(),
    all_data_channels=st.booleans(),
    data_channel_ids=st.lists(st.integers(0, 5), max_size=3),
)


@given(st.lists(_asked, max_size=5))
def test_subscriptions_only_ever_widen(requests: list[StreamSubscription]) -> None:
    wanted = NOTHING
    seen: set[str | None] = set(_kinds(wanted))
    for request in requests:
        wider = wanted.widened(request)
        assert wanted.widened(request).widened(request) == wider
        kinds = set(_kinds(wider))
        assert seen <= kinds
        wanted, seen = wider, kinds
    assert wanted.all_events == any(each.all_events for each in requests)
    assert wanted.all_channels == any(each.all_data_channels for each in requests)
    if not wanted.all_channels:
        assert wanted.channels == {channel for each in requests for channel in each.data_channel_ids}

"""Samples: what was put into a burst comes out of it, exactly, and slips of writers are survived."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import BadBurst
from tailrace.views.sessions.burst import bursts, event, periodic, row, session_json, time_range, timestamped
from tailrace.views.sessions.configuration import Channels, Configuration
from tailrace.views.sessions.rta_pb2 import PeriodicData, StreamData, TimestampedData
from tailrace.views.sessions.samples import Decoded, samples_of
from tailrace.views.sessions.telemetry import WIDTHS, pack_values

NOW = 1_620_129_055_123_456_789
TYPES = list(WIDTHS)
CHANNELS = Channels(
    [
        (
            Configuration.parse(
                json.dumps(
                    {
                        "a": {
                            "channels": [{"id": i, "type": type_} for i, type_ in enumerate(TYPES)]
                            + [{"id": 20, "type": "u16"}],
                            "parameters": [{"id": "p", "byteOrder": "be", "channels": [20]}],
                        }
                    }
                ).encode()
            ),
            100,
        )
    ]
)
NONE = Channels()


def _decoded(messages: list[bytes], channels: Channels = CHANNELS) -> Decoded:
    (burst,) = bursts(messages, 1 << 20)
    return samples_of(burst, channels)


@given(st.sampled_from(range(len(TYPES))), st.integers(1, 300), st.sampled_from([100, 1000, 1 << 16]), st.data())
def test_what_was_put_in_comes_out_with_exactly_its_times(
    at: int, count: int, target: int, data: st.DataObject
) -> None:
    width = WIDTHS[TYPES[at]]
    buffer = np.arange(count * width, dtype=np.uint8).tobytes()
    steps = data.draw(st.lists(st.integers(-5, 10**6), min_size=count, max_size=count))
    times = NOW + np.cumsum(steps)
    decoded = _decoded(
        [
            *timestamped(100 + at, times, width, buffer, target),
            *periodic(100 + at, NOW, 7, width, buffer, target),
        ]
    )
    assert np.array_equal(
        np.concatenate([each.times for each in decoded.series]),
        np.concatenate([times, NOW + 7 * np.arange(count)]),
    )
    assert b"".join(each.values.tobytes() for each in decoded.series) == buffer * 2
    assert {each.line for each in decoded.series} == {100 + at}
    assert all(len(each.values) == len(each.times) for each in decoded.series)
    assert all(each.times.dtype == np.int64 for each in decoded.series)


def test_updates_and_events_come_out_in_order() -> None:
    decoded = _decoded(
        [
            session_json('{"a":0,"b":2}'),
            time_range(1, 2),
            event(7, "a", NOW, "on", [1.5]),
            event(8, "a", NOW),
            session_json("no JSON"),
            session_json('{"a":1}'),
            time_range(0, 9),
        ]
    )
    assert decoded.json == '{"a":1,"b":2}'
    assert decoded.range == (0, 9)
    assert decoded.events == [
        {"id": 7, "app": "a", "time": str(NOW), "text": "on", "values": [1.5]},
        {"id": 8, "app": "a", "time": str(NOW), "text": "", "values": []},
    ]
    assert decoded.series == []


def test_rows_of_the_same_channels_are_one_series_for_each() -> None:
    rows = [
        row([102, 120, 107], NOW + i, pack_values("u16", [i]) + pack_values("u16", [i + 1], True) + bytes(12))
        for i in range(50)
    ]
    decoded = _decoded(rows)
    first, second, third = decoded.series
    assert [each.line for each in decoded.series] == [102, 120, 107]
    assert first.values.tolist() == list(range(50))
    assert second.values.tolist() == list(range(1, 51))
    assert third.values.shape == (50, 3)
    assert first.times.tolist() == [NOW + i for i in range(50)]


def test_big_endian_samples_are_read_as_such() -> None:
    (series,) = _decoded(periodic(120, NOW, 1, 2, b"\x01\x02\x03\x04")).series
    assert series.values.tolist() == [0x0102, 0x0304]


@pytest.mark.parametrize(("deltas", "samples", "taken"), [(3, 2, 2), (2, 3, 2), (0, 2, 0), (2, 0, 0)])
def test_of_times_and_samples_that_are_not_equally_many_those_are_taken_that_have_both(
    deltas: int, samples: int, taken: int
) -> None:
    uneven = TimestampedData(
        channel_id=102,
        start_timestamp=NOW,
        timestamp_deltas_scale=10,
        timestamp_deltas=[0, 1, 1][:deltas],
        buffer=bytes(2 * samples),
    )
    decoded = _decoded([StreamData(timestamped_data=uneven).SerializeToString()])
    assert [each.times.tolist() for each in decoded.series] == ([[NOW, NOW + 10][:taken]] if taken else [])


@pytest.mark.parametrize(("claimed", "size", "taken"), [(5, 4, 2), (1, 4, 1), (2**31 - 1, 5, 2), (-1, 4, 0)])
def test_periodic_samples_are_never_more_than_there_are(claimed: int, size: int, taken: int) -> None:
    uneven = PeriodicData(channel_id=102, start_timestamp=NOW, interval=3, samples=claimed, buffer=bytes(size))
    decoded = _decoded([StreamData(periodic_data=uneven).SerializeToString()])
    assert sum(len(each.values) for each in decoded.series) == taken


def test_the_scale_may_be_absent_when_there_is_one_sample() -> None:
    alone = TimestampedData(channel_id=102, start_timestamp=NOW, timestamp_deltas=[0], buffer=b"\x01\x00")
    (series,) = _decoded([StreamData(timestamped_data=alone).SerializeToString()]).series
    assert (series.times.tolist(), series.values.tolist()) == ([NOW], [1])


def test_a_channel_that_is_not_known_is_read_as_f64_if_its_samples_are_as_wide() -> None:
    decoded = _decoded(
        [
            *periodic(1, NOW, 5, 8, pack_values("f64", [0.5, 1.5])),
            *timestamped(2, [NOW], 8, pack_values("f64", [2.5])),
            row([3, 4], NOW, pack_values("f64", [3.5, 4.5])),
            *periodic(5, NOW, 5, 4, bytes(8)),
            row([6], NOW, b"\x01"),
        ],
        NONE,
    )
    assert [each.values.tolist() for each in decoded.series] == [[0.5, 1.5], [2.5], [3.5], [4.5]]


def test_samples_from_before_their_configuration_was_published_are_read_as_f64() -> None:
    decoded = _decoded(
        [
            *periodic(102, NOW, 5, 8, pack_values("f64", [0.5, 1.5])),
            *timestamped(120, [NOW], 8, pack_values("f64", [2.5])),
            row([102, 120], NOW, pack_values("f64", [3.5, 4.5])),
            row([102, 120], NOW + 1, pack_values("s16", [7]) + pack_values("s16", [8], True)),
        ]
    )
    raw = [(each.line, each.times.tolist(), each.values.tolist()) for each in decoded.series]
    assert raw == [
        (102, [NOW, NOW + 5], [0.5, 1.5]),
        (120, [NOW], [2.5]),
        (102, [NOW], [3.5]),
        (120, [NOW], [4.5]),
        (102, [NOW + 1], [7]),
        (120, [NOW + 1], [8]),
    ]


def test_times_beyond_what_a_double_holds_stay_exact() -> None:
    times = [2**53 + 1, 2**53 + 2, 2**53 + 5]
    (series,) = _decoded(timestamped(102, times, 2, bytes(6))).series
    assert series.times.tolist() == times
    (series,) = _decoded(periodic(102, 2**62 + 1, 1, 2, bytes(6))).series
    assert series.times.tolist() == [2**62 + 1, 2**62 + 2, 2**62 + 3]


@given(
    st.builds(
        TimestampedData,
        channel_id=st.sampled_from([1, 102, 107, 120]),
        start_timestamp=st.integers(-(2**63), 2**63 - 1),
        timestamp_deltas_scale=st.integers(-(2**63), 2**63 - 1),
        timestamp_deltas=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
        buffer=st.binary(max_size=40),
    )
)
def test_whatever_a_writer_has_put_together_reading_it_does_not_fail(message: TimestampedData) -> None:
    decoded = _decoded([StreamData(timestamped_data=message).SerializeToString()])
    assert all(len(each.times) == len(each.values) for each in decoded.series)


def test_bytes_that_are_no_burst_are_refused() -> None:
    with pytest.raises(BadBurst):
        samples_of(b"\x0a\x05x", CHANNELS)

"""Samples: what a burst says, as arrays of times and raw numbers for each channel.

Invariant: times are integers of nanoseconds, computed as the format says and never through a float. Reading is lenient
where writers are known to slip: of times and samples that are not equally many, as many as there are of both are
taken, and it is counted. A channel that no configuration knows is read as ``f64`` if its samples are 8 bytes wide, as a
channel is of which nothing is said; otherwise it cannot be read, which is counted as well. Where a channel has narrower
samples, those of 8 bytes are read as ``f64``, too: they were written before anybody had published what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.views.sessions.burst import parse
from tailrace.views.sessions.configuration import Channels
from tailrace.views.sessions.rta import PeriodicData, RowData, StreamDataBurst, TimestampedData
from tailrace.views.sessions.samples import Channel, unpack_values

SHORT = 4096
"""Samples of a message, up to which their distances are remembered."""
_PLAIN = Channel(0)
"""A channel of which nothing is said."""
_PLAIN_WIDTH = _PLAIN.width


class RawSeries(msgspec.Struct, frozen=True):
    """Samples of one channel, from one message, or from all rows of the same channels in a burst."""

    channel: int
    times: npt.NDArray[np.int64]
    raw: npt.NDArray[Any]


class Occurrence(msgspec.Struct, frozen=True):
    """An event that happened."""

    definition: int
    app: str
    time: int
    text: str
    values: tuple[float, ...]


class Decoded(msgspec.Struct):
    """What a burst says, kind by kind, each in its order."""

    session_json: list[str] = msgspec.field(default_factory=list)
    ranges: list[tuple[int, int]] = msgspec.field(default_factory=list)
    series: list[RawSeries] = msgspec.field(default_factory=list)
    events: list[Occurrence] = msgspec.field(default_factory=list)
    uneven: int = 0
    """Messages whose times and samples were not equally many."""
    unreadable: int = 0
    """Messages of samples whose width nobody knows, or that are too short for their channels."""


def samples_of(burst: bytes | StreamDataBurst, channels: Channels) -> Decoded:
    """Read a burst; BadBurst if its bytes are none."""
    decoded = Decoded()
    rows: dict[tuple[int, ...], list[RowData]] = {}
    for message in (parse(burst) if isinstance(burst, bytes) else burst).data:
        kind = message.WhichOneof("data")
        if kind == "periodic_data":
            _periodic(decoded, message.periodic_data, channels)
        elif kind == "timestamped_data":
            _timestamped(decoded, message.timestamped_data, channels)
        elif kind == "row_data":
            rows.setdefault(tuple(message.row_data.channel_ids), []).append(message.row_data)
        elif kind == "event":
            given = message.event
            values = tuple(given.raw_data)
            decoded.events.append(
                Occurrence(given.event_definition_id, given.app_name, given.timestamp, given.status_text, values)
            )
        elif kind == "session_json":
            decoded.session_json.append(message.session_json)
        elif kind == "time_range":
            decoded.ranges.append((message.time_range.start_time, message.time_range.end_time))
    for numbers, messages in rows.items():
        _rows(decoded, numbers, messages, channels)
    return decoded


def _periodic(decoded: Decoded, given: PeriodicData, channels: Channels) -> None:
    raw = _raw(decoded, given.channel_id, given.buffer, given.samples, channels)
    if raw is not None:
        distances = _remembered if len(raw) <= SHORT else _distances
        times = given.start_timestamp + distances(given.interval, len(raw))
        decoded.series.append(RawSeries(given.channel_id, times, raw))


def _distances(interval: int, count: int) -> npt.NDArray[np.int64]:
    """Return how far samples are from their first."""
    return interval * np.arange(count, dtype=np.int64)


_remembered = lru_cache(maxsize=256)(_distances)
"""Messages of a source have mostly as many samples, as far apart, as the one before."""


def _timestamped(decoded: Decoded, given: TimestampedData, channels: Channels) -> None:
    count = len(given.timestamp_deltas)
    raw = _raw(decoded, given.channel_id, given.buffer, count, channels)
    if raw is not None:
        deltas = np.fromiter(given.timestamp_deltas, np.int64, count)[: len(raw)]
        times = given.start_timestamp + given.timestamp_deltas_scale * np.cumsum(deltas)
        decoded.series.append(RawSeries(given.channel_id, times, raw))


def _raw(decoded: Decoded, number: int, buffer: bytes, count: int, channels: Channels) -> npt.NDArray[Any] | None:
    channel = channels.get(number)
    width = 0 if channel is None else channel.width
    if width < _PLAIN_WIDTH and len(buffer) == _PLAIN_WIDTH * count:
        channel, width = _PLAIN, _PLAIN_WIDTH
    if channel is None:
        decoded.unreadable += 1
        return None
    if len(buffer) != count * width:
        decoded.uneven += 1
        count = max(0, min(count, len(buffer) // width))
        buffer = buffer[: count * width]
    return unpack_values(channel, buffer) if count else None


def _rows(decoded: Decoded, numbers: tuple[int, ...], messages: list[RowData], channels: Channels) -> None:
    plain = [_PLAIN] * len(numbers)
    known = [channels.get(number) or _PLAIN for number in numbers]
    width, plain_width = (sum(channel.width for channel in each) for each in (known, plain))
    whole = [message for message in messages if len(message.buffer) == width]
    early = [message for message in messages if len(message.buffer) == plain_width > width]
    decoded.unreadable += len(messages) - len(whole) - len(early)
    _columns(decoded, numbers, plain, early)
    _columns(decoded, numbers, known, whole)


def _columns(decoded: Decoded, numbers: tuple[int, ...], known: Sequence[Channel], messages: list[RowData]) -> None:
    width = sum(channel.width for channel in known)
    if not messages or not width:
        return
    times = np.array([message.timestamp for message in messages], np.int64)
    table = np.frombuffer(b"".join(message.buffer for message in messages), np.uint8).reshape(len(messages), width)
    at = 0
    for number, channel in zip(numbers, known, strict=True):
        column = table[:, at : at + channel.width].tobytes()
        decoded.series.append(RawSeries(number, times, unpack_values(channel, column)))
        at += channel.width

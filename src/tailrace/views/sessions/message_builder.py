"""Builds the messages of a session from the parts of its records.

A piece is samples of one channel for one message, or several if they are too many. A piece that continues the last one
of its channel is appended to it, so that messages are large however small records are. Invariant: for each channel, the
samples of the messages are those of the records, in order, and no samples pass an update of the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.errors import BadRequest
from tailrace.views.sessions import burst
from tailrace.views.sessions.burst import MAX_BURST
from tailrace.views.sessions.channel import WIDTHS, BadSample, Channel, pack_values
from tailrace.views.sessions.telemetry import (
    Periodic,
    SampleRow,
    TelemetryEvent,
    Time,
    Timestamped,
    nanoseconds,
)

ChannelOf: TypeAlias = Callable[[int], Channel | None]
"""Returns a channel by number, None if its configuration is unknown; raises BadSample if there is no such channel."""

UNUSABLE = (ValueError, BadRequest)
"""Exceptions of a part, or a configuration, that cannot be used."""
HEAD = 64
"""Estimate of the bytes of a message without its samples."""


class SampleRun(msgspec.Struct, gc=False):
    """Samples of one channel at a fixed interval."""

    channel: int
    start: int
    interval: int
    width: int
    buffers: list[bytes]
    count: int

    @property
    def end(self) -> int:
        return self.start + self.interval * (self.count - 1)

    def absorb(self, other: Piece) -> bool:
        """Append a run that continues this one; return False if it does not."""
        if (
            type(other) is not SampleRun
            or other.interval != self.interval
            or other.width != self.width
            or not self.interval
        ):
            return False
        if other.start != self.start + self.interval * self.count:
            return False
        self.buffers += other.buffers
        self.count += other.count
        return True

    def messages(self, target: int) -> list[bytes]:
        buffer = self.buffers[0] if len(self.buffers) == 1 else b"".join(self.buffers)
        return burst.periodic(self.channel, self.start, self.interval, self.width, buffer, target)


class Points(msgspec.Struct, gc=False):
    """Samples of one channel, each with its time."""

    channel: int
    times: list[npt.NDArray[np.int64]]
    width: int
    buffers: list[bytes]
    start: int
    end: int
    """Earliest and latest time; not necessarily those of the first and the last sample."""

    def absorb(self, other: Piece) -> bool:
        """Append points that are not before the end of these; return False if they are."""
        if type(other) is not Points or other.width != self.width or other.start < self.end:
            return False
        self.times += other.times
        self.buffers += other.buffers
        self.end = other.end
        return True

    def messages(self, target: int) -> list[bytes]:
        times = self.times[0] if len(self.times) == 1 else np.concatenate(self.times)
        return burst.timestamped(self.channel, times, self.width, b"".join(self.buffers), target)


class WholeMessage(msgspec.Struct, frozen=True):
    """A message that is never joined with others: a row, an event."""

    message: bytes
    time: int
    channels: Sequence[int] = ()


Piece: TypeAlias = SampleRun | Points


class MessageQueue:
    """The pending messages of a session, in order."""

    def __init__(self) -> None:
        self._pending: list[Piece | bytes] = []
        self._last: dict[int, Piece] = {}
        """The piece of each channel that further samples may continue."""
        self.size = 0
        """Estimate of the bytes."""

    def add(self, piece: Piece | WholeMessage) -> None:
        if isinstance(piece, WholeMessage):
            for channel in piece.channels:
                self._last.pop(channel, None)
            self._pending.append(piece.message)
            self.size += len(piece.message)
            return
        last = self._last.get(piece.channel)
        self.size += sum(map(len, piece.buffers))
        if last is None or not last.absorb(piece):
            self._last[piece.channel] = piece
            self._pending.append(piece)
            self.size += HEAD

    def update(self, message: bytes) -> None:
        """Add an update of the session: samples after it may depend on it, and those before it may not."""
        self._last.clear()
        self._pending.append(message)
        self.size += len(message)

    def messages(self, target: int) -> Iterator[bytes]:
        for each in self._pending:
            if isinstance(each, bytes):
                yield each
            else:
                yield from each.messages(target)


# The parts of records as pieces. Each function raises one of UNUSABLE for a bad part.


def run_of(part: Periodic, channel_of: ChannelOf) -> SampleRun | None:
    """Return samples at a fixed interval; None if there are none."""
    channel = channel_of(part.channel)
    buffer, width = _samples(part, channel)
    count = len(buffer) // width
    start = nanoseconds(part.start)
    interval = channel.interval if channel is not None else 0
    if part.interval is not None:
        interval = nanoseconds(part.interval)
    if interval < 0 or (not interval and count > 1):
        raise BadSample("bad-interval", f"{interval} ns between samples: `interval` is missing, or not above 0")
    nanoseconds(start + interval * max(0, count - 1))
    return SampleRun(part.channel, start, interval, width, [buffer], count) if count else None


def points_of(part: Timestamped, channel_of: ChannelOf) -> Points | None:
    """Return samples with times of their own; None if there are none."""
    buffer, width = _samples(part, channel_of(part.channel))
    times = _spread(part) if part.times is None else _array(part.times)
    if len(times) * width != len(buffer):
        raise BadSample("bad-count", f"{len(times)} times for {len(buffer) // width} samples")
    if not len(times):
        return None
    return Points(part.channel, [times], width, [buffer], int(times.min()), int(times.max()))


def row_of(part: SampleRow, channel_of: ChannelOf) -> WholeMessage:
    time, channels = nanoseconds(part.time), [channel_of(channel) for channel in part.channels]
    if not channels:
        raise BadSample("bad-count", "a row without channels")
    types = [part.as_ if channel is None else channel.type for channel in channels]
    buffer = part.data
    if buffer is None:
        buffer, values, at = b"", part.values or [], 0
        for type_, channel in zip(types, channels, strict=True):
            after = at + (3 if type_ == "3f32" else 1)
            buffer += pack_values(type_, values[at:after], channel is not None and channel.big_endian)
            at = after
        if at != len(values):
            raise BadSample("bad-count", f"{len(values)} values for {at}")
    if len(buffer) != (wanted := sum(WIDTHS[type_] for type_ in types)):
        raise BadSample("bad-width", f"{len(buffer)} bytes for samples of {wanted}")
    return _whole(burst.row(part.channels, time, buffer), time, part.channels)


def event_of(part: TelemetryEvent) -> WholeMessage:
    time = nanoseconds(part.time)
    return _whole(burst.event(part.id, part.app, time, part.text, part.values), time)


def _whole(message: bytes, time: int, channels: Sequence[int] = ()) -> WholeMessage:
    if len(message) > MAX_BURST - HEAD:
        raise BadSample("too-large", f"{len(message)} bytes that cannot be divided; {MAX_BURST - HEAD} are possible")
    return WholeMessage(message, time, channels)


def _samples(part: Periodic | Timestamped, channel: Channel | None) -> tuple[bytes, int]:
    """Return the buffer of a part, and the width of a sample."""
    type_ = part.as_ if channel is None else channel.type
    width = WIDTHS[type_]
    if part.data is None:
        return pack_values(
            type_, () if part.values is None else part.values, channel is not None and channel.big_endian
        ), width
    if len(part.data) % width:
        raise BadSample("bad-width", f"{len(part.data)} bytes are no samples of {type_}, which have {width}")
    return part.data, width


def _array(times: Sequence[Time] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if isinstance(times, np.ndarray):
        return times
    if str in set(map(type, times)):
        times = [nanoseconds(time) for time in times]
    try:
        return np.array(times, np.int64)
    except OverflowError:
        raise BadSample("bad-time", "a time does not fit into 64 bits") from None


def _spread(part: Timestamped) -> npt.NDArray[np.int64]:
    """Return the times that start, scale and deltas define."""
    start, scale = nanoseconds(part.start or 0), nanoseconds(part.scale)
    try:
        steps = np.array(part.deltas, np.int64)
    except OverflowError:
        raise BadSample("bad-time", "a delta does not fit into 64 bits") from None
    # In floats first: they do not overflow.
    if abs(start) + abs(scale) * float(np.abs(steps.astype(np.float64)).sum()) >= 2.0**63:
        raise BadSample("bad-time", "the times do not fit into 64 bits")
    return start + scale * np.cumsum(steps)

"""Pieces: the samples of records on their way into messages.

A piece is samples of one channel that one message can hold, unless they are too many for it. A piece that goes on where
the last one of its channel ended becomes part of it, so that messages are large however small records are. Invariant:
for each channel, the samples of the messages are those of the records, in order, and no samples pass an update.

Samples as a program gives them to the writer library, and what a record has of them.

Invariant: what comes out is a copy, since a program may use its arrays again before all is in the stream; and it is of
the right kind, since what were refused only when it is sent would keep all the rest from being sent. Whatever is not
raises ValueError or TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import index
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.errors import BadRequest
from tailrace.views.sessions import burst
from tailrace.views.sessions.burst import MAX_BURST
from tailrace.views.sessions.channel import WIDTHS, BadSample, Channel, pack_values
from tailrace.views.sessions.telemetry import (
    LAST,
    Periodic,
    SampleRow,
    TelemetryEvent,
    Time,
    Timestamped,
    Type,
    nanoseconds,
)

ChannelOf: TypeAlias = Callable[[int], Channel | None]
"""Says what a channel is, if that is known; BadSample if there is certainly no such channel."""

UNUSABLE = (ValueError, BadRequest)
"""What is raised of a part, or of a configuration, that cannot be used."""
HEAD = 64
"""Bytes of a message beside its samples, about."""


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
        """The time of the last sample."""
        return self.start + self.interval * (self.count - 1)

    def absorb(self, other: Piece) -> bool:
        """Take what goes on where this one ends; return whether it does."""
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
    """The earliest and the latest time; they need not be the first and the last."""

    def absorb(self, other: Piece) -> bool:
        """Take what is not before the end of this one; return whether it is not."""
        if type(other) is not Points or other.width != self.width or other.start < self.end:
            return False
        self.times += other.times
        self.buffers += other.buffers
        self.end = other.end
        return True

    def messages(self, target: int) -> list[bytes]:
        times = self.times[0] if len(self.times) == 1 else np.concatenate(self.times)
        return burst.timestamped(self.channel, times, self.width, b"".join(self.buffers), target)


class Whole(msgspec.Struct, frozen=True):
    """A message that is never put together with others: a row, an event."""

    message: bytes
    time: int
    channels: Sequence[int] = ()


Piece: TypeAlias = SampleRun | Points


class Pieces:
    """What a session has to say, in order."""

    def __init__(self) -> None:
        self._said: list[Piece | bytes] = []
        self._last: dict[int, Piece] = {}
        """The piece that samples of a channel may go on with."""
        self.size = 0
        """Bytes, about."""

    def add(self, made: Piece | Whole) -> None:
        """Say samples, or an event."""
        if isinstance(made, Whole):
            for channel in made.channels:
                self._last.pop(channel, None)
            self._said.append(made.message)
            self.size += len(made.message)
            return
        last = self._last.get(made.channel)
        self.size += sum(map(len, made.buffers))
        if last is None or not last.absorb(made):
            self._last[made.channel] = made
            self._said.append(made)
            self.size += HEAD

    def update(self, message: bytes) -> None:
        """Say something that samples after it may depend upon, and none before it."""
        self._last.clear()
        self._said.append(message)
        self.size += len(message)

    def messages(self, target: int) -> Iterator[bytes]:
        """Yield all of it as messages."""
        for said in self._said:
            if isinstance(said, bytes):
                yield said
            else:
                yield from said.messages(target)


# What the parts of records are. Each raises what is in UNUSABLE if it cannot be used.


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


def row_of(part: SampleRow, channel_of: ChannelOf) -> Whole:
    """Return one sample of each of some channels."""
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


def event_of(part: TelemetryEvent) -> Whole:
    """Return an event."""
    time = nanoseconds(part.time)
    return _whole(burst.event(part.id, part.app, time, part.text, part.values), time)


def _whole(message: bytes, time: int, channels: Sequence[int] = ()) -> Whole:
    if len(message) > MAX_BURST - HEAD:
        raise BadSample("too-large", f"{len(message)} bytes that cannot be divided; {MAX_BURST - HEAD} are possible")
    return Whole(message, time, channels)


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
    """Return the times that start, scale and deltas say."""
    start, scale = nanoseconds(part.start or 0), nanoseconds(part.scale)
    try:
        steps = np.array(part.deltas, np.int64)
    except OverflowError:
        raise BadSample("bad-time", "a delta does not fit into 64 bits") from None
    # In floats first, which do not wrap round.
    if abs(start) + abs(scale) * float(np.abs(steps.astype(np.float64)).sum()) >= 2.0**63:
        raise BadSample("bad-time", "the times do not fit into 64 bits")
    return start + scale * np.cumsum(steps)


Values: TypeAlias = Sequence[float | None] | npt.NDArray[Any]
Times: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]

_MOST_CHANNEL = (1 << 32) - 1


def channel_of(number: int) -> int:
    """Return the number of a channel."""
    if not 0 <= index(number) <= _MOST_CHANNEL:
        raise ValueError(f"{number} is no number of a channel")
    return index(number)


def times_of(times: Times) -> Any:
    """Return times: a list of integers, or an array of them."""
    if not isinstance(times, np.ndarray):
        return [index(time) for time in times]
    if times.ndim != 1 or times.dtype.kind not in "iu" or (times.size and int(times.max()) > LAST):
        raise ValueError(f"times are integers of nanoseconds in a row, not an array of {times.dtype} like this one")
    return times.astype(np.int64)


def values_of(values: Values | None) -> Any:
    """Return values: a list, or an array."""
    if values is None:
        return None
    return values.copy() if isinstance(values, np.ndarray) else list(values)


def bytes_of(data: bytes | None) -> bytes | None:
    """Return samples as bytes."""
    if data is None:
        return None
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"samples as bytes are wanted, not {type(data).__name__}")
    return bytes(data)


def type_of(name: Type) -> Type:
    """Return the type of samples."""
    if name not in WIDTHS:
        raise ValueError(f"no channel has the type {name!r}: one of {', '.join(WIDTHS)}")
    return name

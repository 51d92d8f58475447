"""Bursts: the serialised messages of a session, and the compressed blocks that hold them.

A message is a serialised ``StreamData``; a burst is messages one after the other, each with a tag and its length, so
that a message is serialised once. Invariants: the messages of one call have exactly its samples, in order,
with their times, which are integers all the way; no burst exceeds ``MAX_BURST`` bytes; all output is a function of the
input, so a replay makes the same bytes.

Parts of records become messages by way of pieces (``MessageQueue``): samples of one channel for one message, or several
if they are too many. A piece that continues the last one of its channel is appended to it, so that messages are large
however small records are. Invariant: for each channel, the samples of the messages are those of the records, in order,
and no samples pass an update of the session.

A block is a burst as it is stored and sent, compressed with LZ4, in a container. Invariant: whatever the bytes are,
decoding allocates at most ``MAX_BURST`` bytes; anything larger is refused. Tailrace writes raw blocks and reads five
containers:

    block    a raw LZ4 block
    frame    an LZ4 frame, with its magic number
    sized    a raw block after its size as 32 bits, little-endian (python-lz4's default)
    pickle   K4os' LZ4Pickler, version 0
    plain    not compressed

``auto`` detects the container: the first of frame, plain, block, sized and pickle that decodes to its very end and is a
burst without unknown bytes; else the first that is a burst, preferably one whose first message is of a known kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import lz4.block
import lz4.frame
import msgspec
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from tailrace.errors import BadBurst, BadRequest, TooLarge
from tailrace.views.sessions.rta_pb2 import (
    Event,
    PeriodicData,
    RowData,
    StreamData,
    StreamDataBurst,
    StreamTimeRange,
    TimestampedData,
)
from tailrace.views.sessions.telemetry import (
    WIDTHS,
    BadSample,
    Channel,
    Periodic,
    SampleRow,
    TelemetryEvent,
    Time,
    Timestamped,
    nanoseconds,
    pack_values,
)

Longs: TypeAlias = npt.NDArray[np.int64]

MAX_BURST = 1 << 20
"""Limit of the bytes of a burst before compression."""

_ORDER = ("frame", "plain", "block", "sized", "pickle")
_BEGINS = {"frame": b"\x04\x22\x4d\x18", "plain": b"\n"}
_MOST_RATIO = 255
"""Upper bound of LZ4's compression ratio."""
_STEP = 64 << 10
_CERTAIN = 2
_DIFF_WIDTHS = (0, 1, 2, 4)


def pack(data: bytes) -> bytes:
    """Compress a serialised burst into a raw block."""
    block: bytes = lz4.block.compress(data, store_size=False)
    return block


def unpack(block: bytes, container: str = "auto") -> bytes:
    """Return the serialised burst in a container; BadBurst if there is none, or it exceeds ``MAX_BURST`` bytes."""
    return _sniffed(block) if container == "auto" else _OPENERS[container](block)


def _sniffed(block: bytes) -> bytes:
    best, found = -1, b""
    for name in _ORDER:
        if not block.startswith(_BEGINS.get(name, b"")):
            continue
        try:
            data = _OPENERS[name](block)
            likely = _likelihood(data)
        except (BadBurst, DecodeError):
            continue
        if likely == _CERTAIN:
            return data
        if likely > best:
            best, found = likely, data
    if best < 0:
        raise BadBurst(
            f"{len(block)} bytes are a burst of up to {MAX_BURST} bytes in no container that is known: "
            "write raw LZ4 blocks, and smaller bursts"
        )
    return found


def _likelihood(data: bytes) -> int:
    burst = StreamDataBurst.FromString(data)
    known = bool(burst.data and burst.data[0].WhichOneof("data"))
    burst.DiscardUnknownFields()
    return _CERTAIN if burst.ByteSize() == len(data) else int(known)


def _plain(block: bytes | memoryview, name: str = "plain") -> bytes:
    _check_size(name, len(block))
    return bytes(block)


def _block(block: bytes | memoryview, name: str = "block", most: int | None = None) -> bytes:
    room = min(MAX_BURST if most is None else most, len(block) * _MOST_RATIO)
    try:
        data: bytes = lz4.block.decompress(block, uncompressed_size=room)
    except lz4.block.LZ4BlockError:
        raise BadBurst(f"{name}: no LZ4 block, or one that becomes more than {room} bytes") from None
    return data


def _sized(block: bytes) -> bytes:
    if len(block) < 5:
        raise BadBurst("sized: 4 bytes of size and a block are wanted, and there are fewer than 5 bytes")
    return _exact("sized", memoryview(block)[4:], int.from_bytes(block[:4], "little"))


def _pickle(block: bytes) -> bytes:
    if not block or block[0] & 0b0011_1111:
        raise BadBurst("pickle: the first byte is not that of version 0")
    begin = 1 + _DIFF_WIDTHS[block[0] >> 6]
    if len(block) < begin:
        raise BadBurst("pickle: it ends within its head")
    payload, more = memoryview(block)[begin:], int.from_bytes(block[1:begin], "little")
    return _exact("pickle", payload, len(payload) + more) if more else _plain(payload, "pickle")


def _frame(block: bytes) -> bytes:
    opened = lz4.frame.LZ4FrameDecompressor()
    parts: list[bytes] = []
    size = 0
    # In steps, since the decompressor copies input that it does not need yet.
    for at in range(0, len(block), _STEP):
        try:
            parts.append(opened.decompress(block[at : at + _STEP], max_length=MAX_BURST + 1 - size))
        except (RuntimeError, EOFError) as error:
            raise BadBurst(f"frame: {error}") from None
        size += len(parts[-1])
        _check_size("frame", size)
    if not opened.eof or opened.unused_data:
        raise BadBurst(f"frame: it {'is followed by something else' if opened.eof else 'ends before its end mark'}")
    return b"".join(parts)


_OPENERS = {"block": _block, "frame": _frame, "sized": _sized, "pickle": _pickle, "plain": _plain}


def _exact(name: str, payload: memoryview, size: int) -> bytes:
    _check_size(name, size)
    data = _block(payload, name, size)
    if len(data) != size:
        raise BadBurst(f"{name}: {len(data)} bytes came out of it, and it says {size}")
    return data


def _check_size(name: str, size: int) -> None:
    if size > MAX_BURST:
        raise BadBurst(
            f"{name}: it becomes more than the {MAX_BURST} bytes that a burst may have: write smaller bursts"
        )


TARGET = 64 << 10
"""Size that bursts aim at, in bytes."""

HEAD = 64
"""Upper bound of the bytes of tags, lengths and small fields in a message of samples and its burst."""
_TAG = b"\n"


def session_json(text: str) -> bytes:
    return _bytes(StreamData(session_json=text))


def time_range(start: int, end: int) -> bytes:
    """Return the message that extends a session's range to these two times."""
    return _bytes(StreamData(time_range=StreamTimeRange(start_time=start, end_time=end)))


def periodic(channel: int, start: int, interval: int, width: int, buffer: bytes, target: int = TARGET) -> list[bytes]:
    """Return messages of samples at equal intervals, each of at most about ``target`` bytes; none without samples."""
    count = len(buffer) // width
    per = max(1, (_room(target) - HEAD) // width)
    return [
        _bytes(
            StreamData(
                periodic_data=PeriodicData(
                    channel_id=channel,
                    start_timestamp=start + at * interval,
                    interval=interval,
                    samples=min(per, count - at),
                    buffer=buffer[at * width : (at + per) * width],
                )
            )
        )
        for at in range(0, count, per)
    ]


def timestamped(
    channel: int, times: Sequence[int] | Longs, width: int, buffer: bytes, target: int = TARGET
) -> list[bytes]:
    """Return messages of samples with times of their own, as large; a new one begins wherever time goes back."""
    at = np.asarray(times, np.int64)
    if not len(at):
        return []
    room = _room(target) - HEAD
    steps = np.diff(at)
    # A step of more than 2^63 ns wraps round to below 0, and is a new message as well.
    back = np.flatnonzero((steps < 0) | (at[1:] < at[:-1])) + 1
    edges = [0, *back.tolist(), len(at)]
    return [
        _run(channel, at, steps, first, last, width, buffer)
        for low, high in pairwise(edges)
        for first, last in _pieces(steps, low, high, width, room)
    ]


def row(channels: Sequence[int], time: int, buffer: bytes) -> bytes:
    """Return the message of one sample of each of several channels, side by side in the buffer."""
    return _bytes(StreamData(row_data=RowData(channel_ids=channels, timestamp=time, buffer=buffer)))


def event(definition: int, app: str, time: int, text: str = "", values: Sequence[float] = ()) -> bytes:
    if not -(2**31) <= definition < 2**31:
        raise BadSample(f"out-of-range: {definition} is no id of an event")
    what = Event(event_definition_id=definition, app_name=app, timestamp=time, status_text=text, raw_data=values)
    return _bytes(StreamData(event=what))


def bursts(messages: Iterable[bytes], target: int = TARGET) -> Iterator[bytes]:
    """Put messages into bursts of up to about ``target`` bytes, in order; TooLarge if one alone exceeds the limit."""
    target = _room(target)
    parts: list[bytes] = []
    size = 0
    for message in messages:
        head = _TAG + _varint(len(message))
        length = len(head) + len(message)
        if length > MAX_BURST:
            raise TooLarge(
                f"a message of {len(message)} bytes cannot go into a burst, which has at most {MAX_BURST}: "
                "make the session's JSON, the row or the event smaller"
            )
        if parts and size + length > target:
            yield b"".join(parts)
            parts, size = [], 0
        parts += (head, message)
        size += length
    if parts:
        yield b"".join(parts)


def parse(data: bytes) -> StreamDataBurst:
    """Parse a serialised burst; BadBurst if it is none."""
    try:
        burst: StreamDataBurst = StreamDataBurst.FromString(data)
    except DecodeError as error:
        raise BadBurst(f"{len(data)} bytes are no burst: {error}") from None
    return burst


def parts_of(kind: str, block: bytes, container: str) -> list[Any]:
    """Return the content of the messages of one kind in a block; none if it is unreadable."""
    try:
        messages = parse(unpack(block, container)).data
    except BadBurst:
        return []
    return [getattr(message, kind) for message in messages if message.WhichOneof("data") == kind]


def _run(channel: int, at: Longs, steps: Longs, first: int, last: int, width: int, buffer: bytes) -> bytes:
    deltas = np.zeros(last - first, np.int64)
    own = steps[first : last - 1]
    scale = int(np.gcd.reduce(own)) or 1 if len(own) else 1
    np.floor_divide(own, scale, out=deltas[1:])
    head = TimestampedData(channel_id=channel, start_timestamp=int(at[first]), timestamp_deltas_scale=scale)
    # The two long fields are serialised by hand: lists of integers would take most of the time.
    packed_deltas = _field(TimestampedData.TIMESTAMP_DELTAS_FIELD_NUMBER, _varints(deltas))
    samples = _field(TimestampedData.BUFFER_FIELD_NUMBER, buffer[first * width : last * width])
    return _field(StreamData.TIMESTAMPED_DATA_FIELD_NUMBER, head.SerializeToString() + packed_deltas + samples)


def _pieces(steps: Longs, low: int, high: int, width: int, room: int) -> Iterator[tuple[int, int]]:
    """Cut samples in ascending order of time into slices that fit, with their deltas, into ``room`` bytes."""
    own = steps[low : high - 1]
    scale = int(np.gcd.reduce(own)) if len(own) else 0
    most = int(own.max()) // scale if scale else 0
    if (high - low) * (width + _length(most)) <= room:
        yield low, high
        return
    taken = np.full(high - low, width + 1, np.int64)
    if scale:
        deltas = own // scale
        for bits in range(7, most.bit_length(), 7):
            taken[1:] += deltas >= (1 << bits)
    ends = np.cumsum(taken)
    first = 0
    while first < high - low:
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + room, "right")))
        yield low + first, low + last
        first = last


def _bytes(message: StreamData | StreamDataBurst) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _room(target: int) -> int:
    return max(1, min(target, MAX_BURST))


def _length(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))


def _field(number: int, data: bytes) -> bytes:
    return b"%c%b%b" % (number << 3 | 2, _varint(len(data)), data)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _varints(values: Longs) -> bytes:
    """Return the concatenated ``_varint`` of each value, vectorised; values are not negative."""
    most = _length(int(values.max()))
    if most == 1:
        return values.astype(np.uint8).tobytes()
    table = np.empty((len(values), most), np.uint8)
    used = np.ones((len(values), most), np.bool_)
    for column in range(most):
        rest = values >> 7
        goes_on = rest > 0
        table[:, column] = (values & 0x7F) | (goes_on.astype(np.int64) << 7)
        if column + 1 < most:
            used[:, column + 1] = goes_on
        values = rest
    return table[used].tobytes()


ChannelOf: TypeAlias = Callable[[int], Channel | None]
"""Returns a channel by number, None if its configuration is unknown; raises BadSample if there is no such channel."""

UNUSABLE = (ValueError, BadRequest)
"""Exceptions of a part, or a configuration, that cannot be used."""


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
        if type(other) is not SampleRun or (other.interval, other.width) != (self.interval, self.width):
            return False
        if not self.interval or other.start != self.start + self.interval * self.count:
            return False
        self.buffers += other.buffers
        self.count += other.count
        return True

    def messages(self, target: int) -> list[bytes]:
        buffer = self.buffers[0] if len(self.buffers) == 1 else b"".join(self.buffers)
        return periodic(self.channel, self.start, self.interval, self.width, buffer, target)


class Points(msgspec.Struct, gc=False):
    """Samples of one channel, each with its time."""

    channel: int
    times: list[Longs]
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
        return timestamped(self.channel, times, self.width, b"".join(self.buffers), target)


class WholeMessage(msgspec.Struct, frozen=True):
    """A message that is never joined with others: a row, an event."""

    message: bytes
    time: int
    channels: Sequence[int] = ()


Piece: TypeAlias = SampleRun | Points


class MessageQueue:
    def __init__(self) -> None:
        self._pending: list[Piece | bytes] = []
        self._last: dict[int, Piece] = {}
        """The piece of each channel that further samples may continue."""
        self.size = 0

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
        raise BadSample(f"bad-interval: {interval} ns between samples: `interval` is missing, or not above 0")
    nanoseconds(start + interval * max(0, count - 1))
    return SampleRun(part.channel, start, interval, width, [buffer], count) if count else None


def points_of(part: Timestamped, channel_of: ChannelOf) -> Points | None:
    """Return samples with times of their own; None if there are none."""
    buffer, width = _samples(part, channel_of(part.channel))
    times = _spread(part) if part.times is None else _array(part.times)
    if len(times) * width != len(buffer):
        raise BadSample(f"bad-count: {len(times)} times for {len(buffer) // width} samples")
    if not len(times):
        return None
    return Points(part.channel, [times], width, [buffer], int(times.min()), int(times.max()))


def row_of(part: SampleRow, channel_of: ChannelOf) -> WholeMessage:
    time, channels = nanoseconds(part.time), [channel_of(channel) for channel in part.channels]
    if not channels:
        raise BadSample("bad-count: a row without channels")
    types = [part.as_ if channel is None else channel.type for channel in channels]
    buffer = part.data
    if buffer is None:
        buffer, values, at = b"", [] if part.values is None else part.values, 0
        for type_, channel in zip(types, channels, strict=True):
            after = at + (3 if type_ == "3f32" else 1)
            buffer += pack_values(type_, values[at:after], channel is not None and channel.big_endian)
            at = after
        if at != len(values):
            raise BadSample(f"bad-count: {len(values)} values for {at}")
    if len(buffer) != (wanted := sum(WIDTHS[type_] for type_ in types)):
        raise BadSample(f"bad-width: {len(buffer)} bytes for samples of {wanted}")
    return _whole(row(part.channels, time, buffer), time, part.channels)


def event_of(part: TelemetryEvent) -> WholeMessage:
    time = nanoseconds(part.time)
    return _whole(event(part.id, part.app, time, part.text, part.values), time)


def _whole(message: bytes, time: int, channels: Sequence[int] = ()) -> WholeMessage:
    if len(message) > MAX_BURST - HEAD:
        raise BadSample(f"too-large: {len(message)} bytes that cannot be divided; {MAX_BURST - HEAD} are possible")
    return WholeMessage(message, time, channels)


def _samples(part: Periodic | Timestamped, channel: Channel | None) -> tuple[bytes, int]:
    type_ = part.as_ if channel is None else channel.type
    width = WIDTHS[type_]
    if part.data is None:
        return pack_values(
            type_, () if part.values is None else part.values, channel is not None and channel.big_endian
        ), width
    if len(part.data) % width:
        raise BadSample(f"bad-width: {len(part.data)} bytes are no samples of {type_}, which have {width}")
    return part.data, width


def _array(times: Sequence[Time] | Longs) -> Longs:
    if isinstance(times, np.ndarray):
        return times
    if str in set(map(type, times)):
        times = [nanoseconds(time) for time in times]
    try:
        return np.array(times, np.int64)
    except OverflowError:
        raise BadSample("bad-time: a time does not fit into 64 bits") from None


def _spread(part: Timestamped) -> Longs:
    """Return the times that start, scale and deltas define."""
    start, scale = nanoseconds(part.start or 0), nanoseconds(part.scale)
    try:
        steps = np.array(part.deltas, np.int64)
    except OverflowError:
        raise BadSample("bad-time: a delta does not fit into 64 bits") from None
    # In floats first: they do not overflow.
    if abs(start) + abs(scale) * float(np.abs(steps.astype(np.float64)).sum()) >= 2.0**63:
        raise BadSample("bad-time: the times do not fit into 64 bits")
    return start + scale * np.cumsum(steps)

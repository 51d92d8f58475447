"""Bursts: the serialised messages of a session, and the compressed blocks that hold them.

A message is a serialised ``StreamData``; a burst is messages one after the other, each with a tag and its length, so
that a message is serialised once. Invariants: the messages of one call have exactly its samples, in order,
with their times, which are integers all the way; no burst exceeds ``MAX_BURST`` bytes; all output is a function of the
input, so a replay makes the same bytes.

A block is a burst as it is stored and sent, compressed with LZ4, in a container. Invariant: whatever the bytes are,
decoding allocates at most ``most`` bytes; anything larger is refused. We write raw blocks and read five containers:

    block    a raw LZ4 block
    frame    an LZ4 frame, with its magic number
    sized    a raw block after its size as 32 bits, little-endian (python-lz4's default)
    pickle   K4os' LZ4Pickler, version 0
    plain    not compressed

``auto`` detects the container: the first of frame, plain, block, sized and pickle that decodes to its very end and is a
burst without unknown bytes; else the first that is a burst, preferably one whose first message is of a known kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import lz4.block
import lz4.frame
import msgspec
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from tailrace.errors import BadBurst, TooLarge
from tailrace.views.sessions.channel import MAX_CHANNEL, BadSample
from tailrace.views.sessions.rta import (
    Event,
    PeriodicData,
    RowData,
    StreamData,
    StreamDataBurst,
    StreamSubscription,
    StreamTimeRange,
    TimestampedData,
)

MAX_BURST = 1 << 20
"""Limit of the bytes of a burst before compression."""

CONTAINERS = ("auto", "block", "frame", "sized", "pickle", "plain")

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


def unpack(block: bytes, container: str = "auto", most: int = MAX_BURST) -> bytes:
    """Return the serialised burst in a container.

    Raises:
        BadBurst: There is none, or it exceeds ``most`` bytes.
    """
    if container == "auto":
        return _sniffed(block, most)
    open_it = _OPENERS.get(container)
    if open_it is None:
        raise ValueError(f"no container is called {container!r}: one of {', '.join(CONTAINERS)}")
    return open_it(block, most)


def _sniffed(block: bytes, most: int) -> bytes:
    best, found = -1, b""
    for name in _ORDER:
        if not block.startswith(_BEGINS.get(name, b"")):
            continue
        try:
            data = _OPENERS[name](block, most)
            likely = _likelihood(data)
        except (BadBurst, DecodeError):
            continue
        if likely == _CERTAIN:
            return data
        if likely > best:
            best, found = likely, data
    if best < 0:
        raise BadBurst(
            f"{len(block)} bytes are a burst of up to {most} bytes in no container that is known: "
            "write raw LZ4 blocks, and smaller bursts"
        )
    return found


def _likelihood(data: bytes) -> int:
    burst = StreamDataBurst.FromString(data)
    known = bool(burst.data and burst.data[0].WhichOneof("data"))
    burst.DiscardUnknownFields()
    return _CERTAIN if burst.ByteSize() == len(data) else int(known)


def _plain(block: bytes, most: int) -> bytes:
    if len(block) > most:
        raise _too_large("plain", most)
    return bytes(block)


def _block(block: bytes, most: int) -> bytes:
    return _decoded(block, min(most, len(block) * _MOST_RATIO), "block", most)


def _sized(block: bytes, most: int) -> bytes:
    size = int.from_bytes(block[:4], "little")
    if len(block) < 5:
        raise BadBurst("sized: 4 bytes of size and a block are wanted, and there are fewer than 5 bytes")
    if size > most:
        raise _too_large("sized", most)
    return _exact(memoryview(block)[4:], size, "sized", most)


def _pickle(block: bytes, most: int) -> bytes:
    if not block or block[0] & 0b0011_1111:
        raise BadBurst("pickle: the first byte is not that of version 0")
    width = _DIFF_WIDTHS[block[0] >> 6]
    payload = memoryview(block)[1 + width :]
    more = int.from_bytes(block[1 : 1 + width], "little")
    if len(block) < 1 + width:
        raise BadBurst("pickle: it ends within its head")
    if len(payload) + more > most:
        raise _too_large("pickle", most)
    return _exact(payload, len(payload) + more, "pickle", most) if more else bytes(payload)


def _frame(block: bytes, most: int) -> bytes:
    opened = lz4.frame.LZ4FrameDecompressor()
    parts: list[bytes] = []
    size = 0
    # In steps, since the decompressor copies input that it does not need yet.
    for at in range(0, len(block), _STEP):
        try:
            parts.append(opened.decompress(block[at : at + _STEP], max_length=most + 1 - size))
        except (RuntimeError, EOFError) as error:
            raise BadBurst(f"frame: {error}") from None
        size += len(parts[-1])
        if size > most:
            raise _too_large("frame", most)
    if not opened.eof or opened.unused_data:
        raise BadBurst(f"frame: it {'is followed by something else' if opened.eof else 'ends before its end mark'}")
    return b"".join(parts)


def _exact(payload: memoryview, size: int, name: str, most: int) -> bytes:
    data = _decoded(payload, min(size, len(payload) * _MOST_RATIO), name, most)
    if len(data) != size:
        raise BadBurst(f"{name}: {len(data)} bytes came out of it, and it says {size}")
    return data


def _decoded(block: bytes | memoryview, room: int, name: str, most: int) -> bytes:
    try:
        data: bytes = lz4.block.decompress(block, uncompressed_size=room)
    except lz4.block.LZ4BlockError:
        raise BadBurst(f"{name}: no LZ4 block, or one that becomes more than {min(room, most)} bytes") from None
    return data


def _too_large(name: str, most: int) -> BadBurst:
    return BadBurst(f"{name}: it becomes more than the {most} bytes that a burst may have: write smaller bursts")


_OPENERS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "block": _block,
    "frame": _frame,
    "sized": _sized,
    "pickle": _pickle,
    "plain": _plain,
}


TARGET = 64 << 10
"""Size that bursts aim at, in bytes."""

_HEAD = 64
"""Upper bound of the bytes of tags, lengths and small fields in a message of samples and its burst."""
_TAG = b"\n"
_INT32, _INT64 = 1 << 31, 1 << 63


class Subscription(msgspec.Struct, frozen=True, weakref=True):
    """Everything a viewer of the RTA protocol has asked for so far. It only grows, by union."""

    all_events: bool = False
    all_channels: bool = False
    channels: frozenset[int] = frozenset()

    def widened(self, more: StreamSubscription) -> Subscription:
        """Return the subscription extended by a request."""
        every = self.all_channels or more.all_data_channels
        channels = frozenset() if every else self.channels.union(more.data_channel_ids)
        return Subscription(self.all_events or more.all_events, every, channels)

    def wants(self, message: StreamData) -> bool:
        """Return True if a message is for this viewer. A row is if any of its channels is; updates always are."""
        kind = message.WhichOneof("data")
        if kind == "periodic_data":
            return self.all_channels or message.periodic_data.channel_id in self.channels
        if kind == "timestamped_data":
            return self.all_channels or message.timestamped_data.channel_id in self.channels
        if kind == "row_data":
            return self.all_channels or not self.channels.isdisjoint(message.row_data.channel_ids)
        if kind == "event":
            return self.all_events
        return kind is not None


NOTHING = Subscription()
"""Subscription of a new viewer: only updates of the session."""


def session_json(text: str | bytes) -> bytes:
    if isinstance(text, bytes):
        text = text.decode()
    return _bytes(StreamData(session_json=text))


def time_range(start: int, end: int) -> bytes:
    """Return the message that extends a session's range to these two times."""
    _times_fit(start, end)
    return _bytes(StreamData(time_range=StreamTimeRange(start_time=start, end_time=end)))


def periodic(channel: int, start: int, interval: int, width: int, buffer: bytes, target: int = TARGET) -> list[bytes]:
    """Return messages of samples at equal intervals, each of at most about ``target`` bytes; none without samples."""
    count = _count(channel, width, buffer)
    if interval < 0 or (interval == 0 and count > 1):
        raise BadSample("bad-interval", f"{interval} ns between samples")
    _times_fit(start, start + interval * max(0, count - 1), interval)
    per = max(1, (_room(target) - _HEAD) // width)
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
    channel: int,
    times: Sequence[int] | npt.NDArray[np.int64],
    width: int,
    buffer: bytes,
    target: int = TARGET,
) -> list[bytes]:
    """Return messages of samples with times of their own, each of at most about ``target`` bytes.

    A new message begins wherever time goes back. The scale of each is the greatest common divisor of its steps.
    """
    count = _count(channel, width, buffer)
    at = _nanoseconds(times)
    if len(at) != count:
        raise BadSample("bad-count", f"{len(at)} times for {count} samples of {width} bytes")
    if not count:
        return []
    room = _room(target) - _HEAD
    steps = np.diff(at)
    # A step of more than 2^63 ns wraps round to below 0, and is a new message as well.
    back = np.flatnonzero((steps < 0) | (at[1:] < at[:-1])) + 1
    edges = [0, *back.tolist(), count]
    return [
        _run(channel, at, steps, first, last, width, buffer)
        for low, high in pairwise(edges)
        for first, last in _pieces(steps, low, high, width, room)
    ]


def row(channels: Sequence[int], time: int, buffer: bytes) -> bytes:
    """Return the message of one sample of each of several channels, side by side in the buffer."""
    for channel in channels:
        _channel_fits(channel)
    _times_fit(time)
    return _bytes(StreamData(row_data=RowData(channel_ids=channels, timestamp=time, buffer=buffer)))


def event(definition: int, app: str, time: int, text: str = "", values: Sequence[float] = ()) -> bytes:
    _times_fit(time)
    if not -_INT32 <= definition < _INT32:
        raise BadSample("out-of-range", f"{definition} is no id of an event")
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


def _run(
    channel: int,
    at: npt.NDArray[np.int64],
    steps: npt.NDArray[np.int64],
    first: int,
    last: int,
    width: int,
    buffer: bytes,
) -> bytes:
    deltas = np.zeros(last - first, np.int64)
    own = steps[first : last - 1]
    scale = int(np.gcd.reduce(own)) or 1 if len(own) else 1
    np.floor_divide(own, scale, out=deltas[1:])
    head = TimestampedData(channel_id=channel, start_timestamp=int(at[first]), timestamp_deltas_scale=scale)
    # The two long fields are serialised by hand: lists of integers would take most of the time.
    packed_deltas = _field(TimestampedData.TIMESTAMP_DELTAS_FIELD_NUMBER, _varints(deltas))
    samples = _field(TimestampedData.BUFFER_FIELD_NUMBER, buffer[first * width : last * width])
    return _field(StreamData.TIMESTAMPED_DATA_FIELD_NUMBER, head.SerializeToString() + packed_deltas + samples)


def _pieces(steps: npt.NDArray[np.int64], low: int, high: int, width: int, room: int) -> Iterator[tuple[int, int]]:
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


def _nanoseconds(times: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if isinstance(times, np.ndarray):
        if times.dtype != np.int64 or times.ndim != 1:
            raise BadSample("bad-time", f"times are an array of int64, not of {times.dtype}")
        return times
    if any(kind is bool or not issubclass(kind, int | np.integer) for kind in set(map(type, times))):
        raise BadSample("bad-time", "a time is an integer, in nanoseconds")
    try:
        return np.asarray(times, np.int64)
    except OverflowError:
        raise BadSample("bad-time", "a time is not within 64 bits") from None


def _count(channel: int, width: int, buffer: bytes) -> int:
    _channel_fits(channel)
    if len(buffer) % width:
        raise BadSample("bad-width", f"channel {channel}: {len(buffer)} bytes are no whole samples of {width} bytes")
    return len(buffer) // width


def _channel_fits(channel: int) -> None:
    if not 0 <= channel <= MAX_CHANNEL:
        raise BadSample("out-of-range", f"{channel} is no number of a channel")


def _times_fit(*times: int) -> None:
    for time in times:
        if not -_INT64 <= time < _INT64:
            raise BadSample("bad-time", f"{time} ns is not within 64 bits")


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


def _varints(values: npt.NDArray[np.int64]) -> bytes:
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

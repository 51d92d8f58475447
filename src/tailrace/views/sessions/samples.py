"""Decodes bursts into samples of a viewer's lines, and encodes frames of them in two forms.

Invariant: times are integers of nanoseconds from end to end, never floats. Decoding is lenient with known mistakes of
writers: of unequal numbers of times and samples the common prefix is taken, and the message is counted. A channel
without configuration is read as ``f64`` if its samples are 8 bytes wide; otherwise it is unreadable, and counted. Where
a configured channel is narrower, samples of 8 bytes are ``f64``, too: they were written before it was published.

A line is a channel converted by one parameter: a channel with several parameters has several lines, one without
parameters has one, and raw samples have one for each channel. A viewer selects lines by channel id, name, parameter or
pattern. Invariant: a value is converted exactly once, by the conversion of its line's parameter, or not at all.

A frame as JSON:

    {"session": "lap-7", "position": "1789200000000-3", "range": ["1789…", "1789…"], "json": {…},
     "channels": [{"channel": 1, "name": "vCar:Chassis", "unit": "km/h", "start": "1789200000000000000",
                   "t": [0, 5000000], "v": [12.5, null]}],
     "events": [{"id": 4, "app": "engine", "time": "1789…", "text": "over speed", "values": [301.5]}]}

The binary form is the length of a header (32 bits, little-endian), the header, which is JSON and has the cursor as
``id``, zeros up to a multiple of eight, and the samples: for each channel ``n`` times as int64 at ``times`` and as many
values as float64 at ``values``, in bytes from the begin of the samples; texts are in the header, as ``v``. Offsets of
times in JSON are below 2^53.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.errors import BadBurst, BadRequest
from tailrace.views.sessions.burst import parse, unpack
from tailrace.views.sessions.channel import Channel, unpack_values
from tailrace.views.sessions.configuration import Channels, Conversion
from tailrace.views.sessions.model import merge_session_json
from tailrace.views.sessions.request import is_pattern
from tailrace.views.sessions.rta.data_pb2 import PeriodicData, RowData, TimestampedData
from tailrace.views.sessions.rta.stream_pb2 import StreamDataBurst
from tailrace.views.sessions.thinning import Series, Times, Values, concatenated

SHORT = 4096
"""Largest message whose time offsets are cached."""
_PLAIN = Channel(0)
"""A channel without configuration."""
_PLAIN_WIDTH = _PLAIN.width


class RawSeries(msgspec.Struct, frozen=True):
    """Samples of one channel, from one message, or from all rows of the same channels in a burst."""

    channel: int
    times: npt.NDArray[np.int64]
    raw: npt.NDArray[Any]


class Occurrence(msgspec.Struct, frozen=True):
    """An event in a burst."""

    definition: int
    app: str
    time: int
    text: str
    values: tuple[float, ...]


class Decoded(msgspec.Struct):
    """The content of a burst by kind, each in its order."""

    session_json: list[str] = msgspec.field(default_factory=list)
    ranges: list[tuple[int, int]] = msgspec.field(default_factory=list)
    series: list[RawSeries] = msgspec.field(default_factory=list)
    events: list[Occurrence] = msgspec.field(default_factory=list)
    uneven: int = 0
    """Messages with unequal numbers of times and samples."""
    unreadable: int = 0
    """Messages of samples of unknown width, or too short for their channels."""


def samples_of(burst: bytes | StreamDataBurst, channels: Channels) -> Decoded:
    """Decode a burst; BadBurst if it is none."""
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
            e = message.event
            occurrence = Occurrence(e.event_definition_id, e.app_name, e.timestamp, e.status_text, tuple(e.raw_data))
            decoded.events.append(occurrence)
        elif kind == "session_json":
            decoded.session_json.append(message.session_json)
        elif kind == "time_range":
            decoded.ranges.append((message.time_range.start_time, message.time_range.end_time))
    for numbers, messages in rows.items():
        _rows(decoded, numbers, messages, channels)
    return decoded


def _periodic(decoded: Decoded, message: PeriodicData, channels: Channels) -> None:
    raw = _raw(decoded, message.channel_id, message.buffer, message.samples, channels)
    if raw is not None:
        distances = _cached_distances if len(raw) <= SHORT else _distances
        times = message.start_timestamp + distances(message.interval, len(raw))
        decoded.series.append(RawSeries(message.channel_id, times, raw))


def _distances(interval: int, count: int) -> npt.NDArray[np.int64]:
    return interval * np.arange(count, dtype=np.int64)


_cached_distances = lru_cache(maxsize=256)(_distances)
"""Most messages of a channel have the count and interval of the one before."""


def _timestamped(decoded: Decoded, message: TimestampedData, channels: Channels) -> None:
    count = len(message.timestamp_deltas)
    raw = _raw(decoded, message.channel_id, message.buffer, count, channels)
    if raw is not None:
        deltas = np.fromiter(message.timestamp_deltas, np.int64, count)[: len(raw)]
        times = message.start_timestamp + message.timestamp_deltas_scale * np.cumsum(deltas)
        decoded.series.append(RawSeries(message.channel_id, times, raw))


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


LISTED = 50
"""Limit of the names listed in the error for an unknown one."""


class Line(msgspec.Struct, frozen=True):
    """A channel converted by one of its parameters."""

    channel: int
    name: str
    unit: str = ""
    conversion: Conversion | None = msgspec.field(default=None)

    def __hash__(self) -> int:
        return hash((self.channel, self.name))


class Selection(msgspec.Struct, frozen=True):
    """The lines that a viewer asked for."""

    names: tuple[str, ...] = ()
    """Ids, names, parameters or patterns; empty for all."""
    raw: bool = False

    def lines(self, channels: Channels) -> Lines:
        """Return the selected lines of the known channels.

        Raises:
            BadRequest: All configurations are known, and none has one of the names.
        """
        return Lines(self, channels)


class Lines:
    """The selected lines of a session."""

    def __init__(self, selection: Selection, channels: Channels) -> None:
        self._matcher = _NameMatcher(selection.names)
        self._lines: dict[int, tuple[Line, ...]] = {}
        """By channel; one without configuration is added with its first samples."""
        used: set[str] = set()
        every: list[str] = []
        for line, called in _all(selection, channels):
            every.append(line.name)
            found = self._matcher.matches(called)
            used |= found
            wanted = (line,) if found or not selection.names else ()
            self._lines[line.channel] = self._lines.get(line.channel, ()) + wanted
        unknown = [name for name in selection.names if name not in used]
        if unknown and channels.complete:
            more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
            raise BadRequest(
                f"no channel of the session is called {unknown[0][:80]!r}: there are {', '.join(every[:LISTED])}{more}"
            )

    def of(self, channel: int) -> tuple[Line, ...]:
        """Return the selected lines of a channel."""
        found = self._lines.get(channel)
        if found is None:
            name = str(channel)
            is_wanted = self._matcher.is_all or self._matcher.matches((name,))
            found = self._lines[channel] = (Line(channel, name),) if is_wanted else ()
        return found


def _all(selection: Selection, channels: Channels) -> Iterator[tuple[Line, tuple[str, ...]]]:
    """Yield every line of the configured channels, with all of its names."""
    for channel in sorted(channels, key=lambda each: each.id):
        own = (str(channel.id), channel.name)
        parameters = channels.parameters_of(channel.id)
        if selection.raw or not parameters:
            called = tuple(name for parameter in parameters for name in (parameter.id, parameter.name))
            name = channel.name or (parameters[0].id if parameters else str(channel.id))
            yield Line(channel.id, name), (*own, *called)
            continue
        for parameter in parameters:
            line = Line(channel.id, parameter.id, parameter.unit, parameter.conversion)
            yield line, (*own, parameter.id, parameter.name)


class _NameMatcher:
    """Matches names: exact ones by look-up, patterns one by one."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.is_all = not names
        self._names = frozenset(names)
        self._patterns = [(name, re.compile(translate(name))) for name in names if is_pattern(name)]

    def matches(self, called: tuple[str, ...]) -> frozenset[str]:
        """Return the requested names and patterns that match one of a line's names."""
        found = self._names.intersection(called)
        return found | {name for name, wanted in self._patterns if any(wanted.match(each) for each in called if each)}


FARTHEST = 1 << 52
"""Limit of nanoseconds between samples of one item: twice that is the last integer that a double holds."""

_encode = msgspec.json.Encoder().encode

LineSeries: TypeAlias = Series[Line]


class Content(msgspec.Struct, frozen=True):
    """The content of an entry for a viewer."""

    json: str | None = None
    """Session JSONs in it, merged."""
    range: tuple[int, int] | None = None
    series: tuple[LineSeries, ...] = ()
    events: tuple[dict[str, Any], ...] = ()
    newest: int | None = None
    """Time of the newest sample of any channel, selected or not."""
    unread: str = ""
    """Error, if it could not be read."""

    @property
    def samples(self) -> int:
        """Number of samples of the selected lines."""
        return sum(len(each.times) for each in self.series)

    @property
    def size(self) -> int:
        """Estimate of the bytes in memory."""
        return len(self.json or "") + 500 * (len(self.series) + len(self.events)) + 40 * self.samples


def content_of(block: bytes, container: str, channels: Channels, lines: Lines) -> Content:
    """Decode a compressed burst; an unreadable one has only ``unread``."""
    try:
        decoded = samples_of(unpack(block, container), channels)
    except BadBurst as error:
        return Content(unread=str(error))
    return Content(
        _json(decoded),
        decoded.ranges[-1] if decoded.ranges else None,
        tuple(_line_series(decoded, lines)),
        tuple(_event(each, channels) for each in decoded.events),
        _newest(decoded),
    )


def range_end(block: bytes, container: str) -> int | None:
    """Return the end of the time range in a compressed burst; None if it has none, or is unreadable."""
    try:
        messages = parse(unpack(block, container)).data
    except BadBurst:
        return None
    return next((each.time_range.end_time for each in messages if each.WhichOneof("data") == "time_range"), None)


def _newest(decoded: Decoded) -> int | None:
    if not decoded.series:
        return None
    return int(np.concatenate([each.times for each in decoded.series]).max())


def _json(decoded: Decoded) -> str | None:
    found: str | None = None
    for text in decoded.session_json:
        try:
            msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError):
            continue  # another program's mistake; it cannot be embedded in a frame
        found = merge_session_json(found, text)
    return found


def _line_series(decoded: Decoded, lines: Lines) -> Iterator[LineSeries]:
    for each in decoded.series:
        for line in lines.of(each.channel):
            yield Series(line, each.times, _values(line, each.raw))


def _values(line: Line, raw: Values) -> Values:
    converted = raw if line.conversion is None else line.conversion.convert(raw)
    if isinstance(converted, list):
        return _objects(converted)
    return _objects(converted.tolist()) if converted.ndim > 1 else converted


def _objects(values: Sequence[Any]) -> Values:
    found = np.empty(len(values), object)
    for at, value in enumerate(values):
        found[at] = value
    return found


def _event(event: Occurrence, channels: Channels) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": event.definition, "app": event.app, "time": str(event.time), "text": event.text}
    definition = channels.event(event.app, event.definition)
    if definition is None:
        return {**shown, "values": list(event.values)}
    named = {"code": definition.code, "description": definition.description, "priority": definition.priority}
    return {**shown, "values": definition.convert(event.values), **named}


class SampleFrame(msgspec.Struct, frozen=True):
    """One frame: the thinned content of consecutive entries."""

    session: str
    position: str
    json: str | None = None
    range: tuple[int, int] | None = None
    series: tuple[LineSeries, ...] = ()
    events: tuple[dict[str, Any], ...] = ()

    @property
    def is_empty(self) -> bool:
        return self.json is None and self.range is None and not self.series and not self.events


def as_json(shown: SampleFrame, cursor: str) -> bytes:
    """Return the JSON form for SSE and lines; the cursor is sent beside it."""
    channels = []
    for line, times, values in _items(shown.series):
        start = int(times.min())
        channels.append({**_named(line), "start": str(start), "t": (times - start).tolist(), "v": values.tolist()})
    return _encode({**_head(shown), "channels": channels, "events": shown.events})


def as_bytes(shown: SampleFrame, cursor: str) -> bytes:
    """Return the binary form."""
    channels: list[dict[str, Any]] = []
    arrays: list[bytes] = []
    at = 0
    for line, times, values in _items(shown.series):
        item = {**_named(line), "n": len(times), "times": at}
        arrays.append(times.astype("<i8").tobytes())
        if values.dtype == object:
            item["v"] = values.tolist()
        else:
            item["values"] = at + len(arrays[-1])
            arrays.append(values.astype("<f8").tobytes())
        at = sum(map(len, arrays))
        channels.append(item)
    header = _encode({"id": cursor, **_head(shown), "channels": channels, "events": shown.events})
    return message(header) + b"".join(arrays)


def message(header: bytes) -> bytes:
    """Return a header with its length and padding: the part of a binary message before the samples."""
    return struct.pack("<I", len(header)) + header + bytes(-(len(header) + 4) % 8)


def _head(shown: SampleFrame) -> dict[str, Any]:
    head: dict[str, Any] = {"session": shown.session, "position": shown.position}
    if shown.range is not None:
        head["range"] = [str(shown.range[0]), str(shown.range[1])]
    if shown.json is not None:
        head["json"] = msgspec.Raw(shown.json.encode())
    return head


def _named(line: Line) -> dict[str, Any]:
    return {"channel": line.channel, "name": line.name, "unit": line.unit}


def _items(series: Sequence[LineSeries]) -> Iterator[tuple[Line, Times, Values]]:
    """Yield the samples of each line, in as few slices as the limit of offsets allows."""
    lines: dict[Line, list[LineSeries]] = {}
    for each in series:
        lines.setdefault(each.line, []).append(each)
    for line, found in lines.items():
        whole = found[0] if len(found) == 1 else concatenated(found)
        times, values = whole.times, whole.values
        while len(times):
            if int(times.max()) - int(times.min()) <= FARTHEST:
                yield line, times, values
                break
            far = np.flatnonzero((times > int(times[0]) + FARTHEST) | (times < int(times[0]) - FARTHEST))
            end = int(far[0]) if len(far) else len(times)
            yield line, times[:end], values[:end]
            times, values = times[end:], values[end:]

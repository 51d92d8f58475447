"""Decodes bursts into samples of a viewer's lines, and thins them.

A channel with several parameters has a line for each; one without parameters, or read raw, has one. Invariants: a value
is converted once, by the conversion of its line's parameter, or not at all; times are integers of nanoseconds, never
floats. Decoding is lenient with known mistakes of writers: of unequal numbers of times and samples the common prefix is
taken. A channel without configuration is read as ``f64`` if its samples are 8 bytes wide, and left out otherwise. Where
a configured channel is narrower, samples of 8 bytes are ``f64``, too: they were written before it was published.

Thinning keeps of each cell of time the least and the greatest sample of a line, or the first. Cells have one length and
are aligned to the epoch. All cells before that of the session's newest sample are closed, for all channels alike; so at
most one is open. The samples of an entry are reduced within their cells, together with those of the open cell: closed
cells go out, the open one is held. A sample that is too late for its cell forms a cell of its own, which goes out at
once. Invariant: the output and the held samples depend on the entries in their order alone, not on how often, or where,
the feed was stopped and resumed: ``UnsentSamples`` tells a successor which samples to read again.

The functions on numpy arrays work on a lot, samples of many lines, line after line: so hundreds of lines with a few
samples each cost a few numpy calls. Invariant: each line is thinned as if it were alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from datetime import timedelta
from fnmatch import translate
from functools import lru_cache
from itertools import pairwise
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.config.values import parse_duration
from tailrace.errors import BadBurst, BadRequest
from tailrace.log.cursor import EntryId, parse_id
from tailrace.views.sessions.burst import parse, unpack
from tailrace.views.sessions.configuration import Channels, Conversion
from tailrace.views.sessions.model import merge_session_json
from tailrace.views.sessions.rta_pb2 import Event, PeriodicData, RowData, TimestampedData
from tailrace.views.sessions.telemetry import Channel, unpack_values


class StreamPosition(msgspec.Struct, frozen=True, order=True):
    """The position after an entry of a stream, or after an offset in Kafka; the latter precedes every entry."""

    in_stream: bool
    major: int
    minor: int = 0

    def __str__(self) -> str:
        return f"{self.major}-{self.minor}" if self.in_stream else f"k{self.major}"

    @property
    def entry(self) -> EntryId:
        """Id of the entry; BEGINNING for an offset in Kafka."""
        return (self.major, self.minor) if self.in_stream else (0, 0)

    @classmethod
    def of(cls, entry: EntryId) -> StreamPosition:
        return cls(True, *entry)

    @classmethod
    def at_offset(cls, offset: int) -> StreamPosition:
        return cls(False, offset)

    @classmethod
    def parse(cls, text: str) -> StreamPosition:
        """Parse a text that the grammar has checked."""
        return cls.at_offset(int(text[1:])) if text.startswith("k") else cls.of(parse_id(text))


class UnsentSamples(msgspec.Struct, frozen=True):
    """The samples that a thinned feed still held: those from ``floor`` (ns) on, in entries after ``after``."""

    after: StreamPosition
    floor: int


LISTED = 50
"""Limit of the names listed in the error for an unknown one."""


class Line(msgspec.Struct, frozen=True):
    """A channel converted by one of its parameters."""

    channel: int
    name: str
    unit: str = ""
    conversion: Conversion | None = None

    def __hash__(self) -> int:
        return hash((self.channel, self.name))


class Selection(msgspec.Struct, frozen=True):
    names: tuple[str, ...] = ()
    """Ids, names, parameters or patterns; empty for all."""
    raw: bool = False


class Lines:
    """The selected lines of the known channels; BadRequest if all are known, and none has one of the names."""

    def __init__(self, selection: Selection, channels: Channels) -> None:
        self._names = frozenset(selection.names)
        self._patterns = [(name, re.compile(translate(name))) for name in selection.names if is_pattern(name)]
        self._lines: dict[int, tuple[Line, ...]] = {}
        """By channel; one without configuration is added with its first samples."""
        used: set[str] = set()
        every: list[str] = []
        for line, called in _all(selection, channels):
            every.append(line.name)
            found = self._matches(called)
            used |= found
            wanted = (line,) if found or not self._names else ()
            self._lines[line.channel] = self._lines.get(line.channel, ()) + wanted
        unknown = [name for name in selection.names if name not in used]
        if unknown and channels.complete:
            more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
            raise BadRequest(
                f"no channel of the session is called {unknown[0][:80]!r}: there are {', '.join(every[:LISTED])}{more}"
            )

    def of(self, channel: int) -> tuple[Line, ...]:
        found = self._lines.get(channel)
        if found is None:
            is_wanted = not self._names or self._matches((str(channel),))
            found = self._lines[channel] = (Line(channel, str(channel)),) if is_wanted else ()
        return found

    def _matches(self, called: tuple[str, ...]) -> frozenset[str]:
        """Return the requested names, looked up, and patterns, tried one by one, that match one of a line's names."""
        found = self._names.intersection(called)
        return found | {name for name, wanted in self._patterns if any(wanted.match(each) for each in called if each)}


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


def is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


SECOND = 1_000_000_000
LONGEST_CELL = 86_400 * SECOND
MOST_PER_SECOND = 1_000_000


class Thinning(msgspec.Struct, frozen=True):
    """The rule of a cell, and the length of cells in nanoseconds."""

    keeps: Literal["extremes", "first"]
    cell: int


def parse_thinning(pixel: str | None, rate: float | None) -> Thinning | None:
    """Parse ``pixel=20ms`` or ``rate=10``; None if samples are not thinned."""
    if pixel is not None and rate is not None:
        raise BadRequest("pixel and rate are two ways to thin samples: give one of them")
    if pixel is not None:
        try:
            cell = parse_duration(pixel) // timedelta(microseconds=1) * 1000
        except ValueError as error:
            raise BadRequest(f"pixel={pixel[:80]!r}: {error}") from None
        if not 0 < cell <= LONGEST_CELL:
            raise BadRequest(f"pixel={pixel[:80]!r}: a duration over 0 and up to a day")
        return Thinning("extremes", cell)
    if rate is not None:
        if not SECOND / LONGEST_CELL <= rate <= MOST_PER_SECOND:
            raise BadRequest(f"rate={rate}: samples per second, from once a day to {MOST_PER_SECOND:,}")
        return Thinning("first", math.ceil(SECOND / rate))
    return None


Indexes = NDArray[np.intp]
Mask = NDArray[np.bool_]


def _extremes(values: NDArray[Any], starts: Mask) -> Mask:
    """Return a mask of the least and the greatest number of each cell, the first ones if several are equal.

    Of a cell without finite numbers it is the first sample.
    """
    cell = np.cumsum(starts) - 1
    usable = np.isfinite(values) if values.dtype.kind == "f" else None
    if usable is None or usable.all():
        return _of_numbers(values, cell, starts)
    at = np.flatnonzero(usable)
    chosen = starts.copy()
    chosen[starts] = np.bincount(cell[at], minlength=int(starts.sum())) == 0
    if len(at):
        begins = _changes(cell[at])
        chosen[at] |= _of_numbers(values[at], np.cumsum(begins) - 1, begins)
    return chosen


def _of_numbers(values: NDArray[Any], cell: Indexes, starts: Mask) -> Mask:
    """Return the same for finite numbers in cells that are numbered from 0."""
    chosen, first = np.zeros(len(values), np.bool_), np.flatnonzero(starts)
    for extreme in (np.minimum, np.maximum):
        at = np.flatnonzero(values == extreme.reduceat(values, first)[cell])
        chosen[at[_changes(cell[at])]] = True
    return chosen


def _changes(numbers: NDArray[Any]) -> Mask:
    """Return a mask of the numbers that differ from the one before, and of the first."""
    starts = np.ones(len(numbers), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=starts[1:])
    return starts


Times = NDArray[np.int64]
Values = NDArray[Any]
"""Numbers; texts and triples are objects, and have no least and greatest."""
K = TypeVar("K", bound=Hashable)


class Series(msgspec.Struct, Generic[K], frozen=True):
    line: K
    times: Times
    values: Values


class State(msgspec.Struct, Generic[K], frozen=True):
    """State of thinning: the open cell, its samples, and the position before the first entry of those."""

    cell: int | None = None
    held: tuple[Series[K], ...] = ()
    origin: StreamPosition | None = None

    @property
    def key(self) -> tuple[int | None, StreamPosition | None]:
        """Equal for equal states of viewers that get the same samples."""
        return self.cell, self.origin


def step(
    thinning: Thinning, state: State[K], before: StreamPosition, newest: int | None, series: Iterable[Series[K]]
) -> tuple[tuple[Series[K], ...], State[K]]:
    """Thin the samples of one entry; return the output, and the state afterwards.

    ``before`` is the position before the entry, and ``newest`` the time of the newest sample in it, of any channel.
    """
    if newest is None:
        return (), state
    cell = newest // thinning.cell
    if state.cell is not None:
        cell = max(cell, state.cell)
    held = {each.line: each for each in state.held}
    brought = by_line(series)
    for line, found in brought.items():
        if (open_one := held.pop(line, None)) is not None:
            found.insert(0, open_one)
    lots = [_thin(lot, thinning) for lot in _lots(list(brought.values()))]
    is_open = [lot.times >= cell * thinning.cell for lot in lots]
    lines = list(brought)
    out = _spread([lot.only(~which) for lot, which in zip(lots, is_open, strict=True)], lines)
    still_open = _spread([lot.only(which) for lot, which in zip(lots, is_open, strict=True)], lines)
    if cell != state.cell:
        out += held.values()
    else:
        still_open = list({each.line: each for each in (*state.held, *still_open)}.values())
    origin = before if cell != state.cell or state.origin is None else state.origin
    return tuple(out), State(cell, tuple(still_open), origin if still_open else None)


class Thinner(Generic[K]):
    def __init__(self, thinning: Thinning | None, unsent: UnsentSamples | None = None) -> None:
        """Begin, or resume: then the entries after ``unsent.after`` must come first."""
        self._thinning = thinning
        self.state: State[K] = State(None if thinning is None or unsent is None else unsent.floor // thinning.cell)

    def unsent(self, position: StreamPosition) -> UnsentSamples | None:
        """Return the held samples for a cursor at the position after the last entry; None without thinning."""
        state = self.state
        if self._thinning is None or state.cell is None:
            return None
        return UnsentSamples(position if state.origin is None else state.origin, state.cell * self._thinning.cell)

    def take(self, before: StreamPosition, newest: int | None, series: Iterable[Series[K]]) -> Sequence[Series[K]]:
        """Thin the samples of one entry; return the output. See ``step``."""
        if self._thinning is None:
            return [each for each in series if len(each.times)]
        out, self.state = step(self._thinning, self.state, before, newest, series)
        return out

    def flush(self) -> Sequence[Series[K]]:
        """Return the held samples: no more will come for their cell."""
        out, self.state = self.state.held, State(self.state.cell)
        return out


def thinned(series: Iterable[Series[K]], thinning: Thinning) -> list[Series[K]]:
    """Thin each cell of each line: one series for a line, in the order of time.

    Thinning the joined output of parts equals thinning the whole, so this may be done once for all viewers.
    """
    lines = by_line(series)
    return _spread([_thin(lot, thinning) for lot in _lots(list(lines.values()))], list(lines))


def between(series: Sequence[Series[K]], since: int | None, until: int | None) -> Sequence[Series[K]]:
    """Return the samples between two times, both included."""
    if not series or (since is None and until is None):
        return series
    first, last = -(2**63) if since is None else since, 2**63 - 1 if until is None else until
    times = np.concatenate([each.times for each in series])
    if not len(times) or (int(times.min()) >= first and int(times.max()) <= last):
        return series
    masks = [(each.times >= first) & (each.times <= last) for each in series]
    return [Series(each.line, each.times[m], each.values[m]) for each, m in zip(series, masks, strict=True)]


def concatenated(series: list[Series[K]]) -> Series[K]:
    values = np.concatenate([each.values for each in series], dtype=_kind(series))
    return Series(series[0].line, np.concatenate([each.times for each in series]), values)


class _Lot(msgspec.Struct, frozen=True):
    """Samples of lines with values of one dtype, line after line, each with the number of its line."""

    owners: Indexes
    times: Times
    values: Values

    def only(self, wanted: Indexes | Mask) -> _Lot:
        return _Lot(self.owners[wanted], self.times[wanted], self.values[wanted])


def by_line(series: Iterable[Series[K]]) -> dict[K, list[Series[K]]]:
    lines: dict[K, list[Series[K]]] = {}
    for each in series:
        lines.setdefault(each.line, []).append(each)
    return lines


def _kind(series: list[Series[K]]) -> np.dtype[Any]:
    """Return the dtype for the values of several series of a line."""
    first = series[0].values.dtype
    for each in series:
        if each.values.dtype is not first:
            return np.result_type(*(each.values.dtype for each in series))
    return first


def _lots(lines: Sequence[list[Series[K]]]) -> Iterator[_Lot]:
    """Join the samples of lines by dtype; the number of a line is its index."""
    kinds: dict[np.dtype[Any], list[int]] = {}
    for number, found in enumerate(lines):
        kinds.setdefault(_kind(found), []).append(number)
    for kind, numbers in kinds.items():
        series = [each for number in numbers for each in lines[number]]
        owners = np.array([number for number in numbers for _ in lines[number]], np.intp)
        yield _Lot(
            np.repeat(owners, [len(each.times) for each in series]),
            np.concatenate([each.times for each in series]),
            np.concatenate([each.values for each in series], dtype=kind),
        )


def _spread(lots: Iterable[_Lot], lines: Sequence[K]) -> list[Series[K]]:
    """Split lots into series, in the order of the lines, without empty ones."""
    found: list[Series[K] | None] = [None] * len(lines)
    for lot in lots:
        if not len(lot.owners):
            continue
        edges = [0, *(np.flatnonzero(lot.owners[1:] != lot.owners[:-1]) + 1).tolist(), len(lot.owners)]
        for number, (first, last) in zip(lot.owners[edges[:-1]].tolist(), pairwise(edges), strict=True):
            found[number] = Series(lines[number], lot.times[first:last], lot.values[first:last])
    return [each for each in found if each is not None]


def _thin(lot: _Lot, thinning: Thinning) -> _Lot:
    if not len(lot.times):
        return lot
    owners, times = lot.owners, lot.times
    if ((times[1:] < times[:-1]) & (owners[1:] == owners[:-1])).any():
        lot = lot.only(np.lexsort((times, owners)))
    starts = _changes(lot.times // thinning.cell) | _changes(lot.owners)
    if thinning.keeps == "first":
        return lot.only(starts)
    is_object = lot.values.dtype == object
    chosen = starts | np.append(starts[1:], True) if is_object else _extremes(lot.values, starts)
    return lot.only(np.flatnonzero(chosen))


SHORT = 4096
"""Largest message whose time offsets are cached."""
_PLAIN = Channel(0)
_PLAIN_WIDTH = _PLAIN.width


class Decoded(msgspec.Struct):
    json: str | None = None
    """Session JSONs in it, merged."""
    range: tuple[int, int] | None = None
    """The last one in it."""
    series: list[Series[int]] = []
    """Raw values by channel: of one message, or of all rows of the same channels."""
    events: list[dict[str, Any]] = []


def samples_of(burst: bytes, channels: Channels) -> Decoded:
    """Decode a burst; BadBurst if it is none."""
    decoded = Decoded()
    rows: dict[tuple[int, ...], list[RowData]] = {}
    for message in parse(burst).data:
        kind = message.WhichOneof("data")
        if kind == "periodic_data":
            _periodic(decoded, message.periodic_data, channels)
        elif kind == "timestamped_data":
            _timestamped(decoded, message.timestamped_data, channels)
        elif kind == "row_data":
            rows.setdefault(tuple(message.row_data.channel_ids), []).append(message.row_data)
        elif kind == "event":
            decoded.events.append(_event(message.event, channels))
        elif kind == "session_json":
            decoded.json = merge_session_json(decoded.json, message.session_json)
        elif kind == "time_range":
            decoded.range = message.time_range.start_time, message.time_range.end_time
    for numbers, messages in rows.items():
        _rows(decoded, numbers, messages, channels)
    return decoded


def _periodic(decoded: Decoded, message: PeriodicData, channels: Channels) -> None:
    raw = _raw(message.channel_id, message.buffer, message.samples, channels)
    if raw is not None:
        distances = _cached_distances if len(raw) <= SHORT else _distances
        times = message.start_timestamp + distances(message.interval, len(raw))
        decoded.series.append(Series(message.channel_id, times, raw))


def _distances(interval: int, count: int) -> Times:
    return interval * np.arange(count, dtype=np.int64)


_cached_distances = lru_cache(maxsize=256)(_distances)
"""Most messages of a channel have the count and interval of the one before."""


def _timestamped(decoded: Decoded, message: TimestampedData, channels: Channels) -> None:
    count = len(message.timestamp_deltas)
    raw = _raw(message.channel_id, message.buffer, count, channels)
    if raw is not None:
        deltas = np.fromiter(message.timestamp_deltas, np.int64, count)[: len(raw)]
        times = message.start_timestamp + message.timestamp_deltas_scale * np.cumsum(deltas)
        decoded.series.append(Series(message.channel_id, times, raw))


def _raw(number: int, buffer: bytes, count: int, channels: Channels) -> NDArray[Any] | None:
    channel = channels.get(number)
    width = 0 if channel is None else channel.width
    if width < _PLAIN_WIDTH and len(buffer) == _PLAIN_WIDTH * count:
        channel, width = _PLAIN, _PLAIN_WIDTH
    if channel is None:
        return None
    if len(buffer) != count * width:
        count = max(0, min(count, len(buffer) // width))
        buffer = buffer[: count * width]
    return unpack_values(channel, buffer) if count else None


def _rows(decoded: Decoded, numbers: tuple[int, ...], messages: list[RowData], channels: Channels) -> None:
    plain = [_PLAIN] * len(numbers)
    known = [channels.get(number) or _PLAIN for number in numbers]
    width, plain_width = (sum(channel.width for channel in each) for each in (known, plain))
    whole = [message for message in messages if len(message.buffer) == width]
    early = [message for message in messages if len(message.buffer) == plain_width > width]
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
        decoded.series.append(Series(number, times, unpack_values(channel, column)))
        at += channel.width


LineSeries: TypeAlias = Series[Line]


class Content(msgspec.Struct, frozen=True):
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
    def size(self) -> int:
        samples = sum(len(each.times) for each in self.series)
        return len(self.json or "") + 500 * (len(self.series) + len(self.events)) + 40 * samples


def content_of(block: bytes, container: str, channels: Channels, lines: Lines) -> Content:
    """Decode a compressed burst; an unreadable one has only ``unread``."""
    try:
        decoded = samples_of(unpack(block, container), channels)
    except BadBurst as error:
        return Content(unread=str(error))
    return Content(
        decoded.json,
        decoded.range,
        tuple(
            Series(line, each.times, _values(line, each.values))
            for each in decoded.series
            for line in lines.of(each.line)
        ),
        tuple(decoded.events),
        int(np.concatenate([each.times for each in decoded.series]).max()) if decoded.series else None,
    )


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


def _event(event: Event, channels: Channels) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": event.event_definition_id, "app": event.app_name, "time": str(event.timestamp)}
    shown["text"], values = event.status_text, list(event.raw_data)
    definition = channels.event(event.app_name, event.event_definition_id)
    if definition is None:
        return {**shown, "values": values}
    named = {"code": definition.code, "description": definition.description, "priority": definition.priority}
    return {**shown, "values": definition.convert(values), **named}

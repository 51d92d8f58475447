"""Telemetry records: the JSON objects that producers write into the topics of sessions, and the samples in them.

``docs/sessions.md`` describes the kinds of records and the parts of ``data``, with examples; the structs below are the
same in code. A record belongs to the session named by its field ``session``, or else by its key. Details:

- While a session is open, a second ``open`` is an update; after its end, it begins a new session of the same name.
- An update with a closed ``state`` closes the session.
- ``deltas`` are the steps from sample to sample in units of ``scale`` nanoseconds (default 1), the first one from
  ``start``. ``interval`` may be missing if the configuration has it.
- ``data`` is in the byte order of the configuration (default little-endian). ``as`` is the type of a channel without
  configuration (default ``f64``), in a row that of all its channels. A sample of ``3f32`` is three values.

Invariant: everything usable is used. A bad part, a sample that does not fit its channel's type, or an unknown field
costs that part alone; the record goes to the dead letters with the faults of its parts. The reasons of dead letters:

    bad-record          no object, an unknown type, or a required field is missing or wrong
    bad-part            some of its parts; ``parts`` in the letter names them
    no-session          neither a field ``session`` nor a key that is text
    bad-identity        a session name that is empty, longer than 1,000 bytes, or has control characters
    session-closed      samples, events or updates of a session after its end
    session-elsewhere   the session is open in another stream
    session-key         the key of the session holds something else; the letter names it
    session-too-large   Session JSON that does not fit into a message, alone or merged with the former updates

``pack_values`` and ``unpack_values`` pack samples into the buffers of messages. Invariant: unpacked values equal the
packed ones, rounded only where the type is a float. A value that the type cannot hold is refused, never clipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.errors import BadRequest

MAX_CHANNEL = (1 << 32) - 1
Time: TypeAlias = int | str
"""Nanoseconds since the epoch, as written in JSON."""
ChannelId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_CHANNEL)]
Type: TypeAlias = Literal["u8", "s8", "u16", "s16", "u32", "s32", "f32", "3f32", "f64"]
Closed: TypeAlias = Literal["closed", "truncated", "failed"]
Values: TypeAlias = list[float | None]

CLOSED: frozenset[str] = frozenset(get_args(Closed))
"""States that end a session."""
LONGEST = 1_000
"""Limit of the bytes of a session's name."""
FIRST, LAST = -(2**63), 2**63 - 1

_DIGITS = re.compile(r"-?[0-9]{1,19}")
_UNFIT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class Refused(ValueError):
    """A record that cannot be used at all; ``reason`` is that of its dead letter."""

    def __init__(self, reason: str, what: str = "") -> None:
        self.reason, self.what = reason, what
        super().__init__(what or reason)


class Fault(msgspec.Struct, frozen=True, array_like=True):
    part: str
    """Name of the part, such as ``periodic[2]``."""
    what: str


def nanoseconds(time: Time) -> int:
    """Return a written time as an integer; ValueError if it is no number, or does not fit into 64 bits."""
    if isinstance(time, str):
        if _DIGITS.fullmatch(time) is None:
            raise ValueError(f"{time[:40]!r} is no time: write nanoseconds since the epoch, in digits")
        time = int(time)
    if not FIRST <= time <= LAST:
        raise ValueError(f"{time} is no time: it does not fit into 64 bits")
    return time


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    values: Values | None = None
    data: bytes | None = None
    as_: Type = msgspec.field(name="as", default="f64")

    def __post_init__(self) -> None:
        if (self.values is None) == (self.data is None):
            raise ValueError("samples are either `values` or `data`")


class Periodic(_Part, frozen=True):
    channel: ChannelId
    start: Time
    interval: Time | None = None


class Timestamped(_Part, frozen=True):
    channel: ChannelId
    times: list[Time] | None = None
    start: Time | None = None
    scale: Time = 1
    deltas: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.times is None) == (self.deltas is None) or (self.start is None) != (self.deltas is None):
            raise ValueError("times are either `times`, or `start` and `deltas`")


class SampleRow(_Part, frozen=True):
    channels: list[ChannelId]
    time: Time


class TelemetryEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event; the configuration of its app has its definition."""

    id: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
    time: Time
    app: str = ""
    text: str = ""
    values: list[float] = []


class TimeRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A time range that the session spans at least, both ends included."""

    start: Time
    end: Time


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    session: str | None = None


class OpenSession(_Record, frozen=True, tag="open"):
    json: dict[str, Any] = {}
    configs: dict[str, msgspec.Raw] = {}


class Update(_Record, frozen=True, tag="session"):
    json: dict[str, Any]


class Config(_Record, frozen=True, tag="config"):
    identifier: str
    config: msgspec.Raw


class Data(_Record, frozen=True, tag="data"):
    periodic: list[Periodic] = []
    timestamped: list[Timestamped] = []
    rows: list[SampleRow] = []
    events: list[TelemetryEvent] = []
    range: TimeRange | None = None


class Close(_Record, frozen=True, tag="close"):
    state: Closed = "closed"
    json: dict[str, Any] = {}


Record: TypeAlias = OpenSession | Update | Config | Data | Close


class Head(msgspec.Struct, frozen=True):
    """The routing fields of a record: kind and session."""

    type: str = ""
    session: str | None = None
    identifier: Any = ""
    """Identifier of a configuration; other records have no such field, so anything may stand there."""


_KINDS: dict[Any, type[Record]] = {kind.__struct_config__.tag: kind for kind in get_args(Record)}
PARTS: dict[str, Any] = {"periodic": Periodic, "timestamped": Timestamped, "rows": SampleRow, "events": TelemetryEvent}

_decode = msgspec.json.Decoder(Record).decode
_decode_head = msgspec.json.Decoder(Head).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_key = msgspec.json.Decoder(tuple[str]).decode


def head(value: bytes) -> Head:
    """Return the routing fields of a record without parsing the rest; Refused if it is no such record."""
    try:
        return _decode_head(value)
    except (ValueError, RecursionError) as error:
        raise Refused("bad-record", str(error)) from None


def identity_of(session: str | None, key: bytes | None) -> str:
    """Return the name of a record's session; Refused if it has none, or an invalid one."""
    if session is None:
        try:
            session = _text_of(key) if key is not None else None
        except UnicodeDecodeError:
            session = None
        if session is None:
            raise Refused("no-session", "neither a field `session` nor a key that is text")
    if not session or _UNFIT.search(session) or len(session.encode()) > LONGEST:
        raise Refused("bad-identity", f"{session[:40]!r} cannot be the name of a session")
    return session


def _text_of(key: bytes) -> str:
    if key.startswith(b"["):
        try:
            return _decode_key(key)[0]
        except (ValueError, RecursionError):
            pass
    return key.decode()


def parse(value: bytes) -> tuple[Record, Sequence[Fault]]:
    """Return a record with its readable parts, and the faults of the others; Refused if nothing of it can be used."""
    try:
        return _decode(value), ()
    except (msgspec.ValidationError, RecursionError) as error:
        return _leniently(value, error)
    except ValueError as error:
        raise Refused("bad-record", str(error)) from None


def _leniently(value: bytes, error: Exception) -> tuple[Record, Sequence[Fault]]:
    head(value)  # raises if the routing fields are bad: callers have read the session from them
    try:
        fields = _decode_fields(value)
        kind = _KINDS[msgspec.json.decode(fields.pop("type", msgspec.Raw(b"null")), type=str)]
    except (ValueError, KeyError, RecursionError):
        raise Refused("bad-record", str(error)) from None
    known = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    fields_read: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, raw in fields.items():
        try:
            if name not in known:
                faults.append(Fault(name[:100], "there is no such field"))
            elif name in PARTS:
                fields_read[name] = list(_parts(name, raw, faults))
            else:
                fields_read[name] = msgspec.json.decode(raw, type=known[name].type)
        except (ValueError, RecursionError) as wrong:
            # Whose record it is must be certain; the rest of it is useful without the bad field.
            if known[name].required or name == "session":
                raise Refused("bad-record", f"{name}: {wrong}") from None
            faults.append(Fault(name, str(wrong)))
    missing = [name for name, field in known.items() if field.required and name not in fields_read]
    if missing or not faults:
        raise Refused("bad-record", str(error))
    return kind(**fields_read), faults


def _parts(name: str, raw: msgspec.Raw, faults: list[Fault]) -> Any:
    for i, each in enumerate(_decode_list(raw)):
        try:
            yield msgspec.json.decode(each, type=PARTS[name])
        except (ValueError, RecursionError) as wrong:
            faults.append(Fault(f"{name}[{i}]", str(wrong)))


Array: TypeAlias = npt.NDArray[Any]

WIDTHS: dict[str, int] = {"u8": 1, "s8": 1, "u16": 2, "s16": 2, "u32": 4, "s32": 4, "f32": 4, "3f32": 12, "f64": 8}
"""Bytes of one sample of each type; ``3f32`` is three numbers."""

_CODES = dict(zip(WIDTHS, ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "f4", "f8"), strict=True))
_DTYPES = {(name, big): np.dtype(("<", ">")[big] + code) for name, code in _CODES.items() for big in (False, True)}


class BadSample(BadRequest):
    """Samples that do not fit their channel's type. The message begins with a short and stable reason."""

    code = "sample.invalid"


class Channel(msgspec.Struct, frozen=True):
    id: int
    """Number in the session: the configuration's number plus the offset of the binding."""
    name: str = ""
    type: str = "f64"
    source: str = "row"
    interval: int = 0
    """Nanoseconds between samples; 0 if there is no fixed rate."""
    big_endian: bool = False

    @property
    def width(self) -> int:
        return WIDTHS[self.type]


def pack_values(type_: str, values: Sequence[Any] | Array, big_endian: bool = False) -> bytes:
    """Pack raw values into a buffer; BadSample if one is no number, no integer, or out of the type's range.

    Values are numbers; None, in a float only, is NaN. Those of ``3f32`` are lists of three, or a flat list.
    """
    dtype = _DTYPES.get((type_, big_endian))
    if dtype is None:
        raise BadSample(f"bad-type: no channel has the type {type_!r}: one of {', '.join(WIDTHS)}")
    if type_ == "3f32":
        values = _flat(values)
    array = _floats(values, dtype) if dtype.kind == "f" else _integers(values, dtype)
    if type_ == "3f32" and array.size % 3:
        raise BadSample(f"bad-width: {array.size} numbers are no whole samples of three")
    return array.tobytes()


def unpack_values(channel: Channel, buffer: bytes) -> Array:
    """Return the raw values of a buffer, in native byte order; those of ``3f32`` as rows of three."""
    if len(buffer) % channel.width:
        raise BadSample(f"bad-width: channel {channel.id}: {len(buffer)} bytes are no whole samples of {channel.type}")
    array: Array = np.frombuffer(buffer, _DTYPES[channel.type, channel.big_endian])
    if channel.big_endian:
        array = array.astype(array.dtype.newbyteorder("="))
    return array.reshape(-1, 3) if channel.type == "3f32" else array


def _flat(values: Sequence[Any] | Array) -> Sequence[Any] | Array:
    if isinstance(values, np.ndarray):
        return values.reshape(-1)
    if list not in set(map(type, values)) and tuple not in set(map(type, values)):
        return values
    if any(not isinstance(each, list | tuple) or len(each) != 3 for each in values):
        raise BadSample("bad-width: a sample of 3f32 is a list of three numbers")
    return [number for each in values for number in each]


def _floats(values: Sequence[Any] | Array, dtype: np.dtype[Any]) -> Array:
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "iuf" or values.ndim != 1:
            raise BadSample(f"not-a-number: an array of {values.dtype} and {values.ndim} dimensions")
    else:
        _has_floats(values, (int, float, type(None)))
    try:
        wide = np.asarray(values, np.float64)
    except OverflowError:
        raise BadSample("out-of-range: a number is too large for a float") from None
    with np.errstate(over="ignore"):
        array = wide.astype(dtype)
    if dtype.itemsize == 4 and not np.array_equal(np.isinf(array), np.isinf(wide)):
        raise BadSample("out-of-range: a number is too large for a float of 32 bits")
    return array


def _integers(values: Sequence[Any] | Array, dtype: np.dtype[Any]) -> Array:
    if not isinstance(values, np.ndarray):
        try:
            values = np.asarray(values, np.float64 if _has_floats(values, (int, float)) else np.int64)
        except OverflowError:
            raise _beyond(dtype) from None
    if values.dtype.kind not in "iuf" or values.ndim != 1:
        raise BadSample(f"not-an-integer: an array of {values.dtype} and {values.ndim} dimensions")
    if not values.size:
        return values.astype(dtype)
    if values.dtype.kind == "f" and not (np.isfinite(values).all() and (values == np.trunc(values)).all()):
        raise BadSample("not-an-integer: a number with a fraction, or none at all")
    limits = np.iinfo(dtype)
    if values.min() < limits.min or values.max() > limits.max:
        raise _beyond(dtype)
    return values.astype(dtype)


def _has_floats(values: Sequence[Any], allowed: tuple[type, ...]) -> bool:
    """Return True if any value is a float; BadSample if one is of no allowed type."""
    kinds = set(map(type, values))
    for kind in kinds:
        if kind is bool or not issubclass(kind, (*allowed, np.integer, np.floating)):
            name = "null" if kind is type(None) else kind.__name__
            raise BadSample(f"not-a-number: {name} among the values")
    return any(issubclass(kind, float | np.floating) for kind in kinds)


def _beyond(dtype: np.dtype[Any]) -> BadSample:
    limits = np.iinfo(dtype)
    return BadSample(f"out-of-range: a number is not from {limits.min} to {limits.max}")

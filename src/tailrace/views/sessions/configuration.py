"""Configurations: the channels of a session, and the parameters, events and conversions that are read from them.

A configuration never changes once it is published. A session binds configurations, each with an offset that is added to
the numbers of its channels. Invariants: a channel's number in a session means the same for everyone with the same
bindings, and if two bindings define one number, the first counts; a value is converted once, by the conversion of its
parameter or of its position in an event. The parser skips unknown properties, takes an undefined conversion for none,
and refuses whatever would give samples another meaning than their writer's.

A ``Catalogue`` has the configurations that a process knows: a known one stays right for ever, and an unknown one is
worth asking for again.

A conversion takes a raw number to the value that a person reads, in this order: shift, mask, the conversion itself,
offset. These are the rules that the format leaves open:

- Shift and mask apply to integers of up to 32 bits, not to floats. A shift to the right keeps the sign, one to the left
  loses bits beyond the 32nd. A mask with every bit of the channel's width changes nothing; any other gives the rest of
  the bits as an unsigned number.
- A rational is ``(c1 x² + c2 x + c3) / (c4 x² + c5 x + c6)`` in floats of 64 bits, without the terms whose coefficient
  is 0. Where the divisor is 0 the value is infinite or NaN.
- An interpolated table is linear between neighbours; any other has, up to the next entry, the value of the entry at or
  below. Both have the first value below the first entry, and the last one above the last.
- A text is that of the key that equals the number, otherwise the default; it takes no offset.
- A formula is not computed: the number passes unchanged, with shift, mask and offset.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.errors import BadRequest
from tailrace.views.sessions.telemetry import MAX_CHANNEL, WIDTHS, BadSample, Channel

Array: TypeAlias = npt.NDArray[Any]

UNIT = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
"""Coefficients of the rational that changes nothing."""
MISPRINTED_UNIT = (0.0, 1.0, 0.0, 0.0, 1.0, 0.0)
"""The same coefficients as published documents misprint them. As a formula it is x / x: 1 everywhere but at 0."""

_ALL_BITS = 0xFFFF_FFFF


class Rational(msgspec.Struct, frozen=True):
    coefficients: tuple[float, float, float, float, float, float] = msgspec.field(name="coeffs")

    def values(self, raw: Array) -> Array:
        """Return the quotient for each number; the numbers themselves if it changes nothing."""
        if self.coefficients == UNIT:
            return raw
        c1, c2, c3, c4, c5, c6 = self.coefficients
        x = raw.astype(np.float64)
        with np.errstate(all="ignore"):
            quotient = _quadratic(x, c1, c2, c3) / _quadratic(x, c4, c5, c6)
        return np.full(x.shape, quotient) if quotient.ndim < x.ndim else quotient


class LookupTable(msgspec.Struct, frozen=True):
    """A look-up table with ascending raw numbers."""

    raw: tuple[float, ...]
    calibrated: tuple[float, ...]
    interpolated: bool | None = None

    def values(self, raw: Array) -> Array:
        """Return the table's value for each number; NaN for NaN."""
        x = raw.astype(np.float64)
        if self.interpolated:
            return np.interp(x, self.raw, self.calibrated)
        at = np.searchsorted(np.asarray(self.raw), x, "right") - 1
        found = np.asarray(self.calibrated)[np.maximum(at, 0)]
        return np.where(np.isnan(x), np.nan, found)


class TextTable(msgspec.Struct, frozen=True):
    names: dict[float, str]
    default: str = ""

    def values(self, raw: Array) -> list[str]:
        distinct, at = np.unique(raw, return_inverse=True)
        known = [self.names.get(number, self.default) for number in distinct.tolist()]
        return [known[i] for i in at.reshape(-1).tolist()]


class Formula(msgspec.Struct, frozen=True):
    """Code in a language that Tailrace does not run."""

    code: str

    def values(self, raw: Array) -> Array:
        return raw


UNCHANGED = Rational(UNIT)
How: TypeAlias = Rational | LookupTable | TextTable | Formula
_KINDS: dict[type, str] = {Rational: "rational", LookupTable: "table", TextTable: "text", Formula: "formula"}


class Conversion(msgspec.Struct, frozen=True):
    """All steps from a parameter's raw numbers to its values."""

    how: How = UNCHANGED
    shift: int = 0
    """Bits to the right, or to the left if negative."""
    mask: int = _ALL_BITS
    offset: float = 0.0

    @property
    def kind(self) -> str:
        return _KINDS[type(self.how)]

    def convert(self, raw: Array) -> Array | list[str]:
        """Return the value of each raw number; texts if it is a conversion to text."""
        values = self.how.values(_bits(raw, self.shift, self.mask))
        return values + self.offset if self.offset and not isinstance(values, list) else values


def _bits(raw: Array, shift: int, mask: int) -> Array:
    if raw.dtype.kind not in "iu":
        return raw
    every = _ALL_BITS if shift < 0 else (1 << 8 * raw.dtype.itemsize) - 1
    if shift > 0:
        raw = raw.astype(np.int64) >> min(shift, 63)
    elif shift < 0:
        moved = raw.astype(np.int64) << min(-shift, 32)
        raw = moved.astype(np.int32) if raw.dtype.kind == "i" else moved & _ALL_BITS
    return raw if mask & every == every else raw.astype(np.int64) & mask


def _quadratic(x: Array, a: float, b: float, c: float) -> Array:
    """Return the sum of the nonzero terms: an array, or a scalar if it does not depend on x."""
    total: Array = np.asarray(c, np.float64)
    if b:
        total = b * x + c if c else b * x
    return total + a * (x * x) if a else total


def _without(struct: msgspec.Struct, *names: str) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if name not in names}


class Parameter(msgspec.Struct, frozen=True):
    """A measured quantity: one or several channels, and the conversion of their raw numbers."""

    id: str
    """By convention ``name:app``."""
    name: str
    app: str = ""
    description: str = ""
    unit: str = ""
    format: str = ""
    min: float = 0.0
    max: float = 0.0
    warn_min: float = 0.0
    warn_max: float = 0.0
    channels: tuple[int, ...] = ()
    conversion: Conversion = Conversion()

    def described(self) -> dict[str, Any]:
        """Return it as JSON for clients; they get converted values, unless ``converted`` is false."""
        conversion = {"conversion": self.conversion.kind, "converted": self.conversion.kind != "formula"}
        return _without(self, "app", "channels", "conversion") | conversion


class EventDefinition(msgspec.Struct, frozen=True):
    id: int
    app: str
    code: str = ""
    description: str = ""
    priority: str = "debug"
    conversions: tuple[Conversion, ...] = ()
    """One for each of the first values of an event."""

    def convert(self, values: Sequence[float]) -> list[float | str]:
        """Return the values of an event, each converted by its own conversion; unchanged where there is none."""
        converted: list[float | str] = list(values)
        for at, conversion in enumerate(self.conversions[: len(values)]):
            found = conversion.convert(np.array([values[at]], np.float64))
            converted[at] = found[0] if isinstance(found, list) else float(found[0])
        return converted

    def described(self) -> dict[str, Any]:
        return _without(self, "conversions")


_MASK = re.compile(r"(?:0[xX])?([0-9A-Fa-f]{1,8})")


class BadConfiguration(BadRequest):
    code = "configuration.invalid"


class _Channel(msgspec.Struct, frozen=True):
    id: int
    name: str | None = None
    source: str | None = None
    type: str | None = None
    interval: int | None = None


class _Text(msgspec.Struct, frozen=True):
    keys: tuple[float, ...]
    values: tuple[str, ...]
    default: str | None = None


class _Conversion(msgspec.Struct, frozen=True):
    name: str
    unit: str | None = None
    format: str | None = None
    rational: Rational | None = None
    table: LookupTable | None = None
    text: _Text | None = None
    formula: Formula | None = None


class _Parameter(msgspec.Struct, frozen=True, rename="camel"):
    id: str
    name: str | None = None
    desc: str | None = None
    min: float | None = None
    max: float | None = None
    warn_min: float | None = None
    warn_max: float | None = None
    format: str | None = None
    unit: str | None = None
    byte_order: Literal["le", "be"] | None = None
    offset: float | None = None
    mask: str | None = None
    shift: int | None = None
    conv: str | None = None
    channels: tuple[int, ...] | None = None


class _Event(msgspec.Struct, frozen=True):
    id: int
    code: str | None = None
    desc: str | None = None
    pri: str | None = None
    convs: tuple[str, ...] | None = None


class _Application(msgspec.Struct, frozen=True):
    parameters: tuple[_Parameter, ...] | None = None
    channels: tuple[_Channel, ...] | None = None
    conversions: tuple[_Conversion, ...] | None = None
    events: tuple[_Event, ...] | None = None


_decode = msgspec.json.Decoder(dict[str, _Application]).decode


def _all_channels(apps: dict[str, _Application]) -> dict[int, Channel]:
    orders: dict[int, set[str]] = {}
    for app in apps.values():
        for parameter in app.parameters or ():
            for number in parameter.channels or ():
                orders.setdefault(number, set()).add(parameter.byte_order or "le")
    found: dict[int, Channel] = {}
    for name, app in apps.items():
        for each in app.channels or ():
            order = orders.get(each.id, {"le"})
            if len(order) > 1:
                raise BadConfiguration(f"channel {each.id} of {name!r}: parameters disagree on its byte order")
            channel = _channel(each, name, order == {"be"})
            if found.setdefault(each.id, channel) != channel:
                raise BadConfiguration(f"channel {each.id} of {name!r} is defined twice, and not alike")
    return found


def _parameter(
    app: str, written: _Parameter, named: _Conversion | None, how: How, channels: Mapping[int, Channel]
) -> Parameter:
    mask = _MASK.fullmatch(written.mask if written.mask is not None else "ffffffff")
    if mask is None:
        raise BadConfiguration(
            f"parameter {written.id!r}: the mask {written.mask!r} is no hexadecimal number of up to 32 bits"
        )
    known = [channels[number] for number in written.channels or () if number in channels]
    if isinstance(how, TextTable) and any(channel.type == "3f32" for channel in known):
        how = UNCHANGED  # no text is looked up for three numbers
    low, high = written.min or 0.0, written.max or 0.0
    return Parameter(
        id=written.id,
        name=written.name or written.id.removesuffix(f":{app}"),
        app=app,
        description=written.desc or "",
        unit=written.unit if written.unit is not None else (named and named.unit) or "",
        format=written.format if written.format is not None else (named and named.format) or "",
        min=low,
        max=high,
        warn_min=low if written.warn_min is None else written.warn_min,
        warn_max=high if written.warn_max is None else written.warn_max,
        channels=written.channels or (),
        conversion=Conversion(how, written.shift or 0, int(mask[1], 16), written.offset or 0.0),
    )


def _how(written: _Conversion, unit_rational: bool) -> How:
    where = f"conversion {written.name!r}"
    rational, table, text, formula = written.rational, written.table, written.text, written.formula
    if sum(each is not None for each in (rational, table, text, formula)) > 1:
        raise BadConfiguration(f"{where} is of several kinds: keep one of rational, table, text and formula")
    if table is not None:
        if not table.raw or len(table.raw) != len(table.calibrated):
            raise BadConfiguration(f"{where}: a table has as many raw as calibrated values, and at least one")
        if any(low >= high for low, high in pairwise(table.raw)):
            raise BadConfiguration(f"{where}: the raw values of a table rise from each to the next")
        return msgspec.structs.replace(table, interpolated=bool(table.interpolated))
    if text is not None:
        if len(text.keys) != len(text.values):
            raise BadConfiguration(f"{where}: a text conversion has as many keys as values")
        return TextTable(dict(zip(text.keys, text.values, strict=True)), text.default or "")
    if formula is not None:
        return formula
    if rational is None or (unit_rational and rational.coefficients == MISPRINTED_UNIT):
        return UNCHANGED
    return rational


def _channel(written: _Channel, app: str, big_endian: bool) -> Channel:
    kind, interval = written.type or "f64", written.interval or 0
    where = f"channel {written.id} of {app!r}"
    if not 0 <= written.id <= MAX_CHANNEL:
        raise BadConfiguration(f"{where}: a channel's number is from 0 to {MAX_CHANNEL}")
    if kind not in WIDTHS:
        raise BadConfiguration(f"{where}: there is no type {kind!r}, only {', '.join(WIDTHS)}")
    if not 0 <= interval < 1 << 63:
        raise BadConfiguration(f"{where}: {interval} ns are no interval")
    return Channel(written.id, written.name or "", kind, written.source or "row", interval, big_endian)


class Configuration(msgspec.Struct, frozen=True):
    channels: tuple[Channel, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    events: tuple[EventDefinition, ...] = ()

    @classmethod
    def parse(cls, data: bytes, unit_rational: bool = False) -> Configuration:
        """Parse a configuration's JSON; with ``unit_rational``, MISPRINTED_UNIT is taken for UNIT."""
        try:
            apps = _decode(data)
        except (ValueError, RecursionError) as error:
            raise BadConfiguration(f"no configuration: {error}") from None
        written = {each.name: each for app in apps.values() for each in app.conversions or ()}
        hows = {name: _how(each, unit_rational) for name, each in written.items()}
        channels = _all_channels(apps)
        parameters = tuple(
            _parameter(name, each, written.get(each.conv or ""), hows.get(each.conv or "", UNCHANGED), channels)
            for name, app in apps.items()
            for each in app.parameters or ()
        )
        events = tuple(
            EventDefinition(
                each.id,
                name,
                each.code or "",
                each.desc or "",
                each.pri or "debug",
                tuple(Conversion(hows.get(conversion, UNCHANGED)) for conversion in each.convs or ()),
            )
            for name, app in apps.items()
            for each in app.events or ()
        )
        return cls(tuple(channels.values()), parameters, events)

    def bound(self, offset: int) -> Configuration:
        """Return it with the channel numbers of a session that binds it with this offset."""
        if not offset:
            return self
        change = msgspec.structs.replace
        return change(
            self,
            channels=tuple(change(each, id=each.id + offset) for each in self.channels),
            parameters=tuple(
                change(each, channels=tuple(channel + offset for channel in each.channels)) for each in self.parameters
            ),
        )


class Channels:
    """The channels of a session, from its bindings: each a configuration, or None if it is unknown, and its offset."""

    def __init__(self, bindings: Sequence[tuple[Configuration | None, int]] = ()) -> None:
        bound = [configuration.bound(offset) for configuration, offset in bindings if configuration is not None]
        self.complete = 0 < len(bound) == len(bindings)
        """True if there are configurations, and all are known; only then is an unknown channel a mistake."""
        self.parameters = [parameter for each in bound for parameter in each.parameters]
        self.events = [event for each in bound for event in each.events]
        self._channels: dict[int, Channel] = {}
        for channel in (channel for each in bound for channel in each.channels):
            self._channels.setdefault(channel.id, channel)
        self._events = {(event.app, event.id): event for event in reversed(self.events)}
        self._parameters: dict[int, list[Parameter]] = {}
        for parameter in self.parameters:
            for number in parameter.channels:
                self._parameters.setdefault(number, []).append(parameter)

    def __iter__(self) -> Iterator[Channel]:
        return iter(self._channels.values())

    def get(self, channel: int) -> Channel | None:
        return self._channels.get(channel)

    def event(self, app: str, definition: int) -> EventDefinition | None:
        return self._events.get((app, definition))

    def parameters_of(self, channel: int) -> list[Parameter]:
        return self._parameters.get(channel, [])

    def described(self) -> list[dict[str, Any]]:
        """Return the channels as JSON for clients, by number, each with its parameters."""
        return [
            _without(channel, "big_endian")
            | {"parameters": [parameter.described() for parameter in self.parameters_of(channel.id)]}
            for channel in sorted(self, key=lambda each: each.id)
        ]


class Binding(msgspec.Struct, frozen=True):
    """A configuration bound to a session: the session adds ``offset`` to the numbers of its channels."""

    identifier: str
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = msgspec.field(name="channelOffset")


def bindings_in(json: Mapping[str, Any]) -> tuple[Binding, ...]:
    """Return the configurations that a Session JSON names; none if it names none."""
    try:
        return tuple(msgspec.convert(json.get("configBindings") or [], list[Binding]))
    except ValueError:
        return ()


def identifiers(bindings: Iterable[Binding]) -> set[str]:
    return {binding.identifier for binding in bindings}


KNOWN = 1_000
"""Limit of remembered configurations."""


class Catalogue:
    def __init__(self, unit_rational: bool = False) -> None:
        self._unit_rational = unit_rational
        self._known: dict[str, tuple[bytes, Configuration]] = {}
        self._channels: dict[tuple[Binding, ...], Channels] = {}

    def tidy(self) -> None:
        """Forget everything if there is too much; to be called only before asking for the missing ones."""
        if max(len(self._known), len(self._channels)) > KNOWN:
            self.forget(list(self._known))

    def missing(self, identifiers: Iterable[str]) -> set[str]:
        return {identifier for identifier in identifiers if identifier not in self._known}

    def learn(self, stored: Mapping[str, bytes]) -> None:
        """Remember published configurations; an unreadable one stays unknown."""
        for identifier, text in stored.items():
            with suppress(BadConfiguration):
                self._add(identifier, text)

    def publish(self, identifier: str, config: msgspec.Raw) -> bytes:
        """Remember a configuration to be published; return its text. ValueError if its identifier is not its own."""
        if not identifier:
            raise ValueError("a configuration without an identifier")
        text = msgspec.json.format(bytes(config), indent=-1)
        if identifier not in self._known:
            self._add(identifier, text)
        elif self._known[identifier][0] != text:
            raise ValueError(
                f"another configuration is published as {identifier[:40]!r}, and configurations never change: "
                "give this one another identifier"
            )
        return text

    def forget(self, identifiers: Iterable[str]) -> None:
        """Forget configurations that another writer may have published meanwhile."""
        for identifier in identifiers:
            self._known.pop(identifier, None)
        self._channels.clear()

    def channels(self, bindings: tuple[Binding, ...]) -> Channels:
        found = self._channels.get(bindings)
        if found is None:
            known = [(self._known.get(each.identifier, (b"", None))[1], each.offset) for each in bindings]
            found = self._channels[bindings] = Channels(known)
        return found

    def channel(self, bindings: tuple[Binding, ...], number: int) -> Channel | None:
        """Return a channel of a session; None if it may be of an unknown configuration, BadSample if there is none."""
        channels = self.channels(bindings)
        found = channels.get(number)
        if found is None and channels.complete:
            raise BadSample(f"unknown-channel: no configuration of the session has a channel {number}")
        return found

    def _add(self, identifier: str, text: bytes) -> None:
        self._known[identifier] = text, Configuration.parse(text, self._unit_rational)
        self._channels.clear()

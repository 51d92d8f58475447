"""The JSON of a configuration: an object of applications by name, each with parameters, channels, conversions, events.

Invariants: properties that are not known are passed over; what can be read in spite of a slip is read, and the slip is
told among the warnings; what would give samples another meaning than their writer's is refused.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Literal, TypeAlias

import msgspec

from tailrace.errors import BadRequest
from tailrace.views.sessions.conversion import MISPRINTED_UNIT, Conversion, Formula, Rational, Table, Text
from tailrace.views.sessions.parameter import ErrorDefinition, EventDefinition, Parameter
from tailrace.views.sessions.samples import WIDTHS, Channel

Read: TypeAlias = tuple[
    tuple[Channel, ...],
    tuple[Parameter, ...],
    tuple[EventDefinition, ...],
    tuple[ErrorDefinition, ...],
    tuple[str, ...],
]

_MASK = re.compile(r"(?:0[xX])?([0-9A-Fa-f]{1,8})")
_MOST_CHANNEL = (1 << 32) - 1


class BadConfiguration(BadRequest):
    """A configuration that cannot be read."""

    code = "configuration.invalid"


class _Channel(msgspec.Struct, frozen=True):
    id: int
    name: str | None = None
    source: str | None = None
    type: str | None = None
    interval: int | None = None


class _Coefficients(msgspec.Struct, frozen=True):
    coeffs: tuple[float, float, float, float, float, float]


class _Table(msgspec.Struct, frozen=True):
    raw: tuple[float, ...]
    calibrated: tuple[float, ...]
    interpolated: bool | None = None


class _Text(msgspec.Struct, frozen=True):
    keys: tuple[float, ...]
    values: tuple[str, ...]
    default: str | None = None


class _Conversion(msgspec.Struct, frozen=True):
    name: str
    unit: str | None = None
    format: str | None = None
    rational: _Coefficients | None = None
    table: _Table | None = None
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
    errors: tuple[ErrorDefinition, ...] | None = None


_decode = msgspec.json.Decoder(dict[str, _Application]).decode


def read(data: bytes, unit_rational: bool) -> Read:
    """Return a configuration's channels, parameters, events, errors and warnings; BadConfiguration if it is none."""
    try:
        apps = _decode(data)
    except (ValueError, RecursionError) as error:
        raise BadConfiguration(f"no configuration: {error}") from None
    return _Reading(apps, unit_rational).all()


class _Reading:
    """One configuration being read: what its applications refer to, and what is to be told."""

    def __init__(self, apps: dict[str, _Application], unit_rational: bool) -> None:
        self._apps, self._unit_rational = apps, unit_rational
        self._warnings: list[str] = []
        self._conversions = {each.name: each for app in apps.values() for each in app.conversions or ()}
        self._hows = {name: self._how(each) for name, each in self._conversions.items()}

    def all(self) -> Read:
        """Return what was read."""
        channels = self._channels()
        parameters = tuple(
            self._parameter(name, each, channels) for name, app in self._apps.items() for each in app.parameters or ()
        )
        events = tuple(
            EventDefinition(
                each.id,
                name,
                each.code or "",
                each.desc or "",
                each.pri or "debug",
                tuple(Conversion(self._named(conv, f"event {each.id} of {name!r}")) for conv in each.convs or ()),
            )
            for name, app in self._apps.items()
            for each in app.events or ()
        )
        errors = tuple(each for app in self._apps.values() for each in app.errors or ())
        return tuple(channels.values()), parameters, events, errors, tuple(dict.fromkeys(self._warnings))

    def _channels(self) -> dict[int, Channel]:
        orders: dict[int, set[str]] = {}
        for app in self._apps.values():
            for parameter in app.parameters or ():
                for number in parameter.channels or ():
                    orders.setdefault(number, set()).add(parameter.byte_order or "le")
        found: dict[int, Channel] = {}
        for name, app in self._apps.items():
            for each in app.channels or ():
                order = orders.get(each.id, {"le"})
                if len(order) > 1:
                    raise BadConfiguration(f"channel {each.id} of {name!r}: parameters disagree on its byte order")
                channel = _channel(each, name, order == {"be"})
                if found.setdefault(each.id, channel) != channel:
                    raise BadConfiguration(f"channel {each.id} of {name!r} is defined twice, and not alike")
        return found

    def _parameter(self, app: str, given: _Parameter, channels: dict[int, Channel]) -> Parameter:
        where = f"parameter {given.id!r}"
        named = self._conversions.get(given.conv or "")
        how = self._named(given.conv, where)
        mask = _MASK.fullmatch(given.mask if given.mask is not None else "ffffffff")
        if mask is None:
            raise BadConfiguration(f"{where}: the mask {given.mask!r} is no hexadecimal number of up to 32 bits")
        for number in given.channels or ():
            channel = channels.get(number)
            if channel is None:
                self._warnings.append(f"{where}: channel {number} is not defined")
            elif not channel.is_integer and (given.shift or int(mask[1], 16) != 0xFFFF_FFFF):
                self._warnings.append(f"{where}: shift and mask are not applied to channel {number}, a float")
            if channel is not None and channel.type == "3f32" and isinstance(how, Text):
                self._warnings.append(f"{where}: no text is looked up for channel {number}, which is of three numbers")
                how = Rational()
        low, high = given.min or 0.0, given.max or 0.0
        return Parameter(
            id=given.id,
            name=given.name or given.id.removesuffix(f":{app}"),
            app=app,
            description=given.desc or "",
            unit=given.unit if given.unit is not None else (named and named.unit) or "",
            format=given.format if given.format is not None else (named and named.format) or "",
            min=low,
            max=high,
            warn_min=low if given.warn_min is None else given.warn_min,
            warn_max=high if given.warn_max is None else given.warn_max,
            channels=given.channels or (),
            conversion=Conversion(how, given.shift or 0, int(mask[1], 16), given.offset or 0.0),
        )

    def _named(self, name: str | None, where: str) -> Rational | Table | Text | Formula:
        if not name:
            return Rational()
        if name not in self._hows:
            self._warnings.append(f"{where}: the conversion {name!r} is not defined, raw values are shown")
            return Rational()
        return self._hows[name]

    def _how(self, given: _Conversion) -> Rational | Table | Text | Formula:
        where = f"conversion {given.name!r}"
        rational, table, text, formula = given.rational, given.table, given.text, given.formula
        if sum(each is not None for each in (rational, table, text, formula)) > 1:
            raise BadConfiguration(f"{where} is of several kinds: keep one of rational, table, text and formula")
        if table is not None:
            if not table.raw or len(table.raw) != len(table.calibrated):
                raise BadConfiguration(f"{where}: a table has as many raw as calibrated values, and at least one")
            if any(low >= high for low, high in pairwise(table.raw)):
                raise BadConfiguration(f"{where}: the raw values of a table rise from each to the next")
            return Table(table.raw, table.calibrated, bool(table.interpolated))
        if text is not None:
            if len(text.keys) != len(text.values):
                raise BadConfiguration(f"{where}: a text conversion has as many keys as values")
            return Text(dict(zip(text.keys, text.values, strict=True)), text.default or "")
        if formula is not None:
            return formula
        if rational is None:
            return Rational()
        if rational.coeffs != MISPRINTED_UNIT:
            return Rational(rational.coeffs)
        if self._unit_rational:
            self._warnings.append(f"{where}: [0,1,0,0,1,0] is x/x as it is written; it is taken for x, as configured")
            return Rational()
        self._warnings.append(
            f"{where}: [0,1,0,0,1,0] is x/x, which is 1; for x write [0,1,0,0,0,1], or set sessions.unit_rational"
        )
        return Rational(rational.coeffs)


def _channel(given: _Channel, app: str, big_endian: bool) -> Channel:
    kind, interval = given.type or "f64", given.interval or 0
    where = f"channel {given.id} of {app!r}"
    if not 0 <= given.id <= _MOST_CHANNEL:
        raise BadConfiguration(f"{where}: a channel's number is from 0 to {_MOST_CHANNEL}")
    if kind not in WIDTHS:
        raise BadConfiguration(f"{where}: there is no type {kind!r}, only {', '.join(WIDTHS)}")
    if not 0 <= interval < 1 << 63:
        raise BadConfiguration(f"{where}: {interval} ns are no interval")
    return Channel(given.id, given.name or "", kind, given.source or "row", interval, big_endian)

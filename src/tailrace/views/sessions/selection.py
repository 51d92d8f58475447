"""Selections: which lines of a session a viewer wants, by id, name, parameter or pattern.

A line is a channel as one parameter shows it: a channel that several parameters are read from has several lines, one
without parameters has one, and raw samples have one for each channel. Invariant: a value is converted exactly once, by
the conversion of its line's parameter, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate

import msgspec

from tailrace.errors import BadRequest
from tailrace.views.sessions.configuration import Channels
from tailrace.views.sessions.conversion import Conversion

SHOWN = 50
"""Names that are listed for someone who asked for one that is not there."""


class Line(msgspec.Struct, frozen=True):
    """A channel as a viewer sees it."""

    channel: int
    name: str
    unit: str = ""
    conversion: Conversion | None = msgspec.field(default=None)

    def __hash__(self) -> int:
        return hash((self.channel, self.name))


class Selection(msgspec.Struct, frozen=True):
    """What was asked for."""

    names: tuple[str, ...] = ()
    """None for everything."""
    raw: bool = False

    def lines(self, channels: Channels) -> Lines:
        """Return the lines that are wanted, as far as the configuration says.

        Raises:
            BadRequest: The configuration is known, and has nothing by one of the names.
        """
        return Lines(self, channels)


class Lines:
    """The lines of a session that a viewer wants."""

    def __init__(self, selection: Selection, channels: Channels) -> None:
        self._wanted = _Wanted(selection.names)
        self._lines: dict[int, tuple[Line, ...]] = {}
        """By channel; one that the configuration does not have is added when it is met."""
        used: set[str] = set()
        every: list[str] = []
        for line, called in _all(selection, channels):
            every.append(line.name)
            found = self._wanted.among(called)
            used |= found
            wanted = (line,) if found or not selection.names else ()
            self._lines[line.channel] = self._lines.get(line.channel, ()) + wanted
        unknown = [name for name in selection.names if name not in used]
        if unknown and channels.complete:
            more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
            raise BadRequest(
                f"no channel of the session is called {unknown[0][:80]!r}: there are {', '.join(every[:SHOWN])}{more}"
            )

    def of(self, channel: int) -> tuple[Line, ...]:
        """Return the lines of a channel that are wanted."""
        found = self._lines.get(channel)
        if found is None:
            name = str(channel)
            is_wanted = self._wanted.is_all or self._wanted.among((name,))
            found = self._lines[channel] = (Line(channel, name),) if is_wanted else ()
        return found


def _all(selection: Selection, channels: Channels) -> Iterator[tuple[Line, tuple[str, ...]]]:
    """Yield every line that the configuration has, with the names that it goes by."""
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


class _Wanted:
    """What was asked for: names are looked up, and only patterns are tried one by one."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.is_all = not names
        self._names = frozenset(names)
        self._patterns = [(name, re.compile(translate(name))) for name in names if is_pattern(name)]

    def among(self, called: tuple[str, ...]) -> frozenset[str]:
        """Return which of the names and patterns that were asked for a line goes by."""
        found = self._names.intersection(called)
        return found | {name for name, wanted in self._patterns if any(wanted.match(each) for each in called if each)}


def is_pattern(name: str) -> bool:
    """Whether a name stands for all that are like it."""
    return any(sign in name for sign in "*?[")

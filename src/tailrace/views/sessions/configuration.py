"""Configurations: which channels a session has, and the parameters and events that are read from them.

A configuration never changes once it is published. A session binds configurations, each with an offset that is added to
the numbers of its channels. Invariant: a channel's number in a session means the same for everyone who has the same
bindings; where two bindings give one number, the first is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import msgspec

from tailrace.views.sessions.config_json import BadConfiguration, read
from tailrace.views.sessions.parameter import ErrorDefinition, EventDefinition, Parameter
from tailrace.views.sessions.samples import Channel

__all__ = ["BadConfiguration", "Channels", "Configuration", "ErrorDefinition", "EventDefinition", "Parameter"]


class Configuration(msgspec.Struct, frozen=True):
    """What a configuration says."""

    channels: tuple[Channel, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    events: tuple[EventDefinition, ...] = ()
    errors: tuple[ErrorDefinition, ...] = ()
    warnings: tuple[str, ...] = ()
    """What was read, though it may not be what its writer meant."""

    @classmethod
    def parse(cls, data: bytes, unit_rational: bool = False) -> Configuration:
        """Read a configuration's JSON; BadConfiguration if it is none.

        With ``unit_rational``, a rational with the coefficients that are often misprinted as those of the one that
        changes nothing is taken for that one. Otherwise it is computed as it is written, and told.
        """
        return cls(*read(data, unit_rational))

    def bound(self, offset: int) -> Configuration:
        """Return it with the numbers that its channels have in a session that binds it with this offset."""
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
    """The channels of a session, from all configurations that it binds."""

    def __init__(self, bound: Sequence[Configuration], complete: bool) -> None:
        self.complete = complete
        """Whether every configuration is known; only then is a channel that is not known a mistake."""
        self.parameters = [parameter for each in bound for parameter in each.parameters]
        self.events = [event for each in bound for event in each.events]
        self._channels: dict[int, Channel] = {}
        for channel in (channel for each in bound for channel in each.channels):
            self._channels.setdefault(channel.id, channel)
        self._events = {(event.app, event.id): event for event in reversed(self.events)}

    @classmethod
    def of(cls, bindings: Iterable[tuple[Configuration | None, int]]) -> Channels:
        """Put bindings together, each a configuration, or None if it is not known, and its offset.

        A session that binds nothing is not complete.
        """
        given = list(bindings)
        known = [configuration.bound(offset) for configuration, offset in given if configuration is not None]
        return cls(known, bool(given) and len(known) == len(given))

    def __iter__(self) -> Iterator[Channel]:
        return iter(self._channels.values())

    def __len__(self) -> int:
        return len(self._channels)

    def get(self, channel: int) -> Channel | None:
        """Return a channel by its number in the session."""
        return self._channels.get(channel)

    def event(self, app: str, definition: int) -> EventDefinition | None:
        """Return the definition of an event."""
        return self._events.get((app, definition))

    def parameters_of(self, channel: int) -> list[Parameter]:
        """Return the parameters that are read from a channel."""
        return self._parameters_of.get(channel, [])

    @cached_property
    def _parameters_of(self) -> dict[int, list[Parameter]]:
        found: dict[int, list[Parameter]] = {}
        for parameter in self.parameters:
            for channel in parameter.channels:
                found.setdefault(channel, []).append(parameter)
        return found

    def described(self) -> list[dict[str, Any]]:
        """Return the channels as JSON for clients, by number, each with what is read from it."""
        return [
            {
                "id": channel.id,
                "name": channel.name,
                "type": channel.type,
                "source": channel.source,
                "interval": channel.interval,
                "parameters": [parameter.described() for parameter in self.parameters_of(channel.id)],
            }
            for channel in sorted(self, key=lambda each: each.id)
        ]

"""The catalogue: the configurations that a writer of sessions knows, and the channels that they make.

A configuration never changes once it is published, so what is known stays right for ever, and what is not known yet is
worth asking for again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from tailrace.views.sessions.configuration import Channels, Configuration
from tailrace.views.sessions.message_builder import UNUSABLE
from tailrace.views.sessions.model import Binding
from tailrace.views.sessions.samples import BadSample, Channel

KNOWN = 1_000
"""Configurations that are remembered from one time to the next."""


class _Known(NamedTuple):
    text: bytes
    configuration: Configuration


class Catalogue:
    """Configurations by identifier."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._channels: dict[tuple[Binding, ...], Channels] = {}

    def tidy(self) -> None:
        """Forget everything if it is too much; to be called before what is needed is asked for, and not later."""
        if len(self._known) > KNOWN:
            self.forget(list(self._known))

    def missing(self, identifiers: Iterable[str]) -> set[str]:
        """Return which of these are not known."""
        return {identifier for identifier in identifiers if identifier not in self._known}

    def learn(self, stored: Mapping[str, bytes]) -> None:
        """Take note of configurations as they are published; one that cannot be read stays unknown."""
        for identifier, text in stored.items():
            try:
                self._add(identifier, text, Configuration.parse(text))
            except UNUSABLE:
                continue

    def publish(self, identifier: str, config: msgspec.Raw) -> bytes:
        """Take note of a configuration that is to be published; return its text.

        Raises:
            ValueError: It is none, or another one is known by that identifier.
        """
        if not identifier:
            raise ValueError("a configuration without an identifier")
        text = msgspec.json.format(bytes(config), indent=-1)
        known = self._known.get(identifier)
        if known is None:
            self._add(identifier, text, Configuration.parse(text))
        elif known.text != text:
            raise ValueError(
                f"another configuration is published as {identifier[:40]!r}, and configurations never change: "
                "give this one another identifier"
            )
        return text

    def forget(self, identifiers: Iterable[str]) -> None:
        """Forget configurations that somebody else may have published meanwhile."""
        for identifier in identifiers:
            self._known.pop(identifier, None)
        self._channels.clear()

    def channel(self, bindings: tuple[Binding, ...], number: int) -> Channel | None:
        """Return a channel of a session; None if it may be one of a configuration that is not known.

        Raises:
            BadSample: No configuration of the session has it.
        """
        if not bindings:
            return None
        channels = self._channels.get(bindings)
        if channels is None:
            bound = [(self._configuration(binding.identifier), binding.offset) for binding in bindings]
            channels = self._channels[bindings] = Channels.of(bound)
        found = channels.get(number)
        if found is None and channels.complete:
            raise BadSample("unknown-channel", f"no configuration of the session has a channel {number}")
        return found

    def _configuration(self, identifier: str) -> Configuration | None:
        known = self._known.get(identifier)
        return None if known is None else known.configuration

    def _add(self, identifier: str, text: bytes, configuration: Configuration) -> None:
        self._known[identifier] = _Known(text, configuration)
        self._channels.clear()

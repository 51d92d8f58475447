"""Parameters, events and errors: what a configuration says of the values that people read.

Invariant: a value is converted by the one conversion that its parameter, or its place in an event, has; whoever shows
it converts nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from tailrace.views.sessions.conversion import Conversion


class Parameter(msgspec.Struct, frozen=True):
    """Something that is measured: one or several channels, and how their raw numbers are read."""

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
        """Return it as JSON for clients, who get values that are converted already, unless ``converted`` is false."""
        return {
            "id": self.id,
            "name": self.name,
            "description": self.description,
            "unit": self.unit,
            "format": self.format,
            "min": self.min,
            "max": self.max,
            "warn_min": self.warn_min,
            "warn_max": self.warn_max,
            "conversion": self.conversion.kind,
            "converted": self.conversion.is_computed,
        }


class EventDefinition(msgspec.Struct, frozen=True):
    """A kind of event of an application."""

    id: int
    app: str
    code: str = ""
    description: str = ""
    priority: str = "debug"
    conversions: tuple[Conversion, ...] = ()
    """One for each of the first values of an event."""

    def convert(self, values: Sequence[float]) -> list[float | str]:
        """Return the values of an event, each converted by its own conversion; as they are where there is none."""
        converted: list[float | str] = list(values)
        for at, conversion in enumerate(self.conversions[: len(values)]):
            found = conversion.convert(np.array([values[at]], np.float64))
            converted[at] = found[0] if isinstance(found, list) else float(found[0])
        return converted

    def described(self) -> dict[str, Any]:
        """Return it as JSON for clients."""
        return {
            "id": self.id,
            "app": self.app,
            "code": self.code,
            "description": self.description,
            "priority": self.priority,
        }


class ErrorDefinition(msgspec.Struct, frozen=True):
    """A fault that is found in parameters: one says that it is there, another that it was."""

    name: str
    group: str = ""
    current: str = ""
    logged: str = ""
    desc: str = ""
    bit: int = 0
    """Of the converted value."""

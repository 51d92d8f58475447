"""The public contract: every shape that enters or leaves the service, defined once.

The service writes these structs, the client reads them, and ``/openapi.json`` is made from them. Fields that a newer
service adds are ignored. Payloads stay the bytes that were sent, so passing them on costs nothing and changes nothing.
"""

from __future__ import annotations

from typing import Any

from msgspec import Meta

TIME = "2026-11-15T08:00:00.000Z"
"""A time in UTC, for examples."""
TEXT = "number-as-text"
"""Format of a number that travels as text."""


def note(text: str, *examples: Any, **limits: Any) -> Meta:
    """Describe a field for ``/openapi.json``; ``limits`` are those of ``msgspec.Meta``."""
    return Meta(description=text, examples=list(examples) or None, **limits)

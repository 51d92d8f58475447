"""Conditions: events whose value has given plain values at given paths, all of them.

They say which events end a stream's day and which ones a fold takes, until queries can say more.
Numbers are compared as numbers (1 is 1.0), and no boolean is a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_decode = msgspec.json.Decoder().decode


class Condition(msgspec.Struct, frozen=True):
    """What an event must have, as (path, value)."""

    wanted: tuple[tuple[tuple[str, ...], str | int | float | bool], ...]

    @classmethod
    def of(cls, given: Mapping[str, str | int | float | bool]) -> Condition | None:
        """Make one from dotted paths; None when nothing is given."""
        if not given:
            return None
        return cls(tuple((tuple(path.split(".")), value) for path, value in given.items()))

    def matches(self, value: bytes) -> bool:
        """Return whether a record's value has all of it."""
        # Most records have not: one that lacks a wanted text need not be decoded, unless escapes spell it otherwise.
        if b"\\" not in value:
            for _, wanted in self.wanted:
                if isinstance(wanted, str) and wanted.encode() not in value:
                    return False
        try:
            document = _decode(value)
        except ValueError:
            return False
        return all(_same(_at(document, path), wanted) for path, wanted in self.wanted)


def _at(document: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        if not isinstance(document, dict) or step not in document:
            return None
        document = document[step]
    return document


def _same(found: Any, wanted: str | int | float | bool) -> bool:
    return isinstance(found, bool) == isinstance(wanted, bool) and bool(found == wanted)

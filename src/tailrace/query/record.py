"""The record beside its value: what ``$topic``, ``$key``, ``$headers``, ``$time``, ``$partition``, ``$offset`` read."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from tailrace.errors import BadRequest
from tailrace.log.cursor import parse_time


class Record(msgspec.Struct, frozen=True):
    """One record as queries see it: its place, its time in milliseconds, its key's elements and its headers."""

    topic: str
    partition: int
    offset: int
    time_ms: int
    key: list[Any] | None = None
    headers: dict[str, Any] = msgspec.field(default_factory=dict)


def fields_of(record: Any) -> dict[str, Any]:
    """Return the fields of a record under the names that queries use; none without a record.

    A frame of a feed will do for a record too: it has the same names, and its time is text.
    """
    if record is None:
        return {}
    given = record if isinstance(record, Mapping) else _attributes(record)
    found = {f"${name}": given[name] for name in ("topic", "partition", "offset", "key", "headers") if name in given}
    if "time_ms" in given:
        found["$time"] = given["time_ms"]
    elif "time" in given:
        found["$time"] = _milliseconds(given["time"])
    if isinstance(found.get("$key"), tuple):
        found["$key"] = list(found["$key"])
    return found


def _attributes(record: Any) -> dict[str, Any]:
    names = (*Record.__struct_fields__, "time")
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def _milliseconds(time: Any) -> Any:
    try:
        if isinstance(time, datetime):
            return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
        return parse_time(time, 0) if isinstance(time, str) else time
    except (BadRequest, ValueError, OverflowError):
        return None

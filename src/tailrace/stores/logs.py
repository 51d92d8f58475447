"""Logs as the read side sees them: names, segments, and runs after a place. Writing them is ``apply``'s work alone.

A log's hash is read before its segments are: what the hash shows is at least stored, and a segment that has a successor
in it is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace.errors import StoreError
from tailrace.model.name import shard_of
from tailrace.model.run import Run, decode, raw_size
from tailrace.model.segment import Segment
from tailrace.stores.nodes import Nodes


class Entry(msgspec.Struct, frozen=True):
    """A stored run with the numbers of its events."""

    first: int
    last: int
    newest_ms: int
    """The log's running-maximum time."""
    run: Run
    size: int
    """Bytes of the run when it is not compressed, for limits on memory."""


class Logs:
    """The logs of one view."""

    def __init__(self, nodes: Nodes, view: str) -> None:
        self._nodes = nodes
        self._keys = nodes.keys
        self._count = nodes.options.shards
        self.view = view

    def shard_of(self, name: str) -> int:
        """Return the shard that a log is in."""
        return shard_of(name, self._count)

    async def segments(self, name: str) -> list[Segment]:
        """Return the log's segments in order; none when it does not exist."""
        shard = self.shard_of(name)
        return _segments(await self._nodes.read(shard, "HGETALL", self._keys.log(shard, self.view, name)))

    async def segments_of(self, names: Sequence[str]) -> list[list[Segment]]:
        """Return the segments of several logs, in one round trip for each node."""
        commands = []
        for name in names:
            shard = self.shard_of(name)
            commands.append((shard, ("HGETALL", self._keys.log(shard, self.view, name))))
        return [_segments(answer) for answer in await self._nodes.read_all(commands)]

    async def read(self, name: str, segment: Segment, after: int, count: int) -> list[Entry]:
        """Return up to ``count`` entries of a segment that hold events with a number above ``after``.

        The first one may begin earlier: the caller leaves out what it has seen.
        """
        return (await self.read_many([(name, segment, after)], count))[0]

    async def read_many(self, places: Sequence[tuple[str, Segment, int]], count: int) -> list[list[Entry]]:
        """Return the entries after several places, in one round trip for each node."""
        commands = []
        for name, segment, after in places:
            shard = self.shard_of(name)
            key = self._keys.segment(shard, self.view, segment.index, name)
            commands.append((shard, ("XRANGE", key, f"{after + 1}-0", "+", "COUNT", count)))
        return [[_entry(*item) for item in answer] for answer in await self._nodes.read_all(commands)]

    async def read_back(self, name: str, segment: Segment, before: int, count: int) -> list[Entry]:
        """Return up to ``count`` entries that end at or below number ``before``, the latest first."""
        shard = self.shard_of(name)
        key = self._keys.segment(shard, self.view, segment.index, name)
        answer = await self._nodes.read(shard, "XREVRANGE", key, f"{before}-18446744073709551615", "-", "COUNT", count)
        return [_entry(*item) for item in answer]

    async def names(self, after: str, prefix: str, limit: int) -> list[str]:
        """Return up to ``limit`` names that begin with ``prefix`` and come after ``after``, in order of their bytes."""
        low = f"({after}" if after >= prefix and after else f"[{prefix}" if prefix else "-"
        high = f"[{prefix}" + "\U0010ffff" * 2 if prefix else "+"
        commands = [
            (s, ("ZRANGE", self._keys.names(s, self.view), low, high, "BYLEX", "LIMIT", 0, limit))
            for s in range(self._count)
        ]
        found = {name for answer in await self._nodes.read_all(commands) for name in answer}
        return [name.decode() for name in sorted(found)[:limit]]


def _segments(answer: Any) -> list[Segment]:
    fields: dict[bytes, bytes]
    fields = answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))
    if b"i" not in fields:
        return []
    current = int(fields[b"i"])
    found: list[Segment] = []
    for field, value in fields.items():
        if field[:1] == b"s":
            found.append(Segment(int(field[1:]), *map(int, value.split())))
    found.sort(key=lambda segment: segment.index)
    found.append(Segment(current, *(int(fields[f]) for f in (b"b", b"e", b"f", b"l", b"c", b"z", b"t"))))
    return found


def _entry(entry_id: bytes, fields: Any) -> Entry:
    last, _, count = entry_id.partition(b"-")
    named = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
    try:
        run = decode(named[b"r"])
    except Exception as error:
        raise StoreError(
            f"a stored run ({entry_id.decode()}) cannot be read: {error}; rebuild the view from Kafka"
        ) from error
    return Entry(int(last) - int(count) + 1, int(last), int(named[b"t"]), run, raw_size(named[b"r"]))

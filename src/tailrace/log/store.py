"""Logs as the read side sees them: names, segments, and runs after a place. Writing them is ``apply``'s work alone.

A log's hash is read before its segments are: what the hash shows is at least stored, and a segment that has a successor
in it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tailrace.errors import StoreError
from tailrace.log.cursor import Position
from tailrace.log.event import Source
from tailrace.log.name import shard_of
from tailrace.log.pack import CODEC, unpack
from tailrace.log.run import Entry, decode, raw_size
from tailrace.log.segment import PACKED, Log, Segment
from tailrace.valkey.marks import parse_marks
from tailrace.valkey.nodes import Nodes
from tailrace.valkey.shards import mapping

PACKED_BYTES = 1 << 20
"""About how much of a packed piece one read returns, so that a reader's memory does not depend on the piece's size."""


class Logs:
    """The logs of one view."""

    def __init__(self, nodes: Nodes, view: str, piece_runs: int | None = None) -> None:
        """``piece_runs``: how many runs one packed piece stands for; None where it is large, and one is enough."""
        self._nodes = nodes
        self._keys = nodes.keys
        self._count = nodes.options.shards
        self.view = view
        self._piece_runs = piece_runs

    def shard_of(self, name: str) -> int:
        """Return the shard that a log is in."""
        return shard_of(name, self._count)

    async def log(self, name: str) -> Log:
        """Return the log's registry; one without segments when it does not exist."""
        return (await self.logs_of([name]))[0]

    async def logs_of(self, names: Sequence[str]) -> list[Log]:
        """Return the registries of several logs, in one round trip for each node."""
        commands = []
        for name in names:
            shard = self.shard_of(name)
            commands.append((shard, ("HGETALL", self._keys.log(shard, self.view, name))))
        return [read_log(answer) for answer in await self._nodes.read_all(commands)]

    async def marks(self, shards: Sequence[int]) -> list[dict[Source, int]]:
        """Return how far some shards have applied every source: up to there their logs have everything."""
        commands = [(shard, ("HGETALL", self._keys.marks(shard, self.view))) for shard in shards]
        return [parse_marks(answer) for answer in await self._nodes.read_all(commands)]

    async def floor(self, name: str) -> int:
        """Return the time before which no bucket of a log begins any more: what is packed or expired ends there."""
        shard = self.shard_of(name)
        return int(await self._nodes.read(shard, "HGET", self._keys.log(shard, self.view, name), "o") or 0)

    async def read(self, name: str, segment: Segment, after: int, count: int) -> list[Entry]:
        """Return up to ``count`` stored runs, or some runs of a packed piece, with events numbered above ``after``.

        The first one may begin earlier: the caller leaves out what it has seen. A segment that was packed since its
        registry was read answers the same events: they are under the same key, in another form.
        """
        return (await self.read_many([(name, segment, after)], count))[0]

    async def read_many(self, places: Sequence[tuple[str, Segment, int]], count: int) -> list[list[Entry]]:
        """Return the entries after several places, in one round trip for each node."""
        commands = []
        packed = max(1, count // self._piece_runs) if self._piece_runs is not None else 1
        for name, segment, after in places:
            shard = self.shard_of(name)
            key = self._keys.segment(shard, self.view, segment.index, name)
            most = packed if segment.state == PACKED else count
            commands.append((shard, ("XRANGE", key, f"{max(0, after) + 1}-0", "+", "COUNT", most)))
        answers = await self._nodes.read_all(commands)
        return [_some(answer, after) for answer, (_, _, after) in zip(answers, places, strict=True)]

    async def read_back(self, name: str, segment: Segment, before: int, count: int) -> list[Entry]:
        """Return up to ``count`` stored runs, or a packed piece's, that end by ``before``, the latest first."""
        shard = self.shard_of(name)
        key = self._keys.segment(shard, self.view, segment.index, name)
        most = 1 if segment.state == PACKED else count
        answer = await self._nodes.read(shard, "XREVRANGE", key, f"{before}-18446744073709551615", "-", "COUNT", most)
        return [entry for item in answer for entry in reversed(list(read_entries(*item)))]

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


_OPEN = (b"i", b"b", b"w", b"e", b"f", b"l", b"c", b"z", b"t")


def read_log(answer: Any) -> Log:
    """Read the answer to HGETALL of a log's hash."""
    fields: dict[bytes, bytes]
    fields = mapping(answer)
    if b"i" not in fields:
        return Log()
    try:
        return _log(fields)
    except (ValueError, KeyError, msgspec.MsgspecError) as error:
        # What the error says may quote what is stored.
        raise StoreError("the registry of a stream cannot be read; `tailrace rebuild` restores it") from error


def _log(fields: Mapping[bytes, bytes]) -> Log:
    found = [read_row(int(field[1:]), value) for field, value in fields.items() if field[:1] == b"s"]
    found.sort(key=lambda segment: segment.index)
    if b"b" in fields:
        i, b, w, e, f, l, c, z, t = (int(fields[x]) for x in _OPEN)  # noqa: E741
        found.append(Segment(i, b, w, e, f, l, c, z, t, open=True))
    epoch, _, number = fields.get(b"x", b"0 0").partition(b" ")
    return Log(found, Position(int(epoch), int(number)))


_ints = msgspec.msgpack.Decoder(list[int]).decode


def read_row(index: int, stored: bytes) -> Segment:
    """Read the row of a closed segment."""
    b, w, e, f, l, c, z, t, raw, state, *rest = _ints(stored)  # noqa: E741
    replaced = iter(rest)
    return Segment(index, b, w, e, f, l, c, z, t, raw, state, tuple(zip(replaced, replaced, replaced, strict=True)))


def write_row(segment: Segment) -> bytes:
    """Return the row of a closed segment: what ``read_row`` reads."""
    s = segment
    head = [s.start_ms, s.span_ms, s.epoch, s.first, s.last, s.events, s.bytes, s.newest_ms, s.raw_bytes, s.state]
    return msgspec.msgpack.encode([*head, *(n for triple in s.replaced for n in triple)])


def read_entries(entry_id: bytes, fields: Any) -> Iterator[Entry]:
    """Yield what one entry of a segment's stream holds: a run, or the runs of a packed piece."""
    last, _, count = entry_id.partition(b"-")
    named = mapping(fields)
    stored = named[b"r"]
    try:
        if stored[:1] == CODEC:
            yield from unpack(stored)
        else:
            run = decode(stored)
            yield Entry(int(last) - int(count) + 1, int(last), int(named[b"t"]), run, raw_size(stored))
    except Exception as error:
        raise StoreError(
            f"a stored run ({entry_id.decode()}) cannot be read: {error}; rebuild the view from Kafka"
        ) from error


def _some(answer: Any, after: int) -> list[Entry]:
    """Return the entries above a number: every run, but of packed pieces only about what one read may return."""
    found: list[Entry] = []
    size = 0
    for item in answer:
        packed = item[1][b"r"][:1] == CODEC if isinstance(item[1], dict) else item[1][1][:1] == CODEC
        if packed and size >= PACKED_BYTES:
            break
        for entry in read_entries(*item):
            if entry.last <= after:
                continue
            found.append(entry)
            size += entry.size
            if packed and size >= PACKED_BYTES:
                return found
    return found

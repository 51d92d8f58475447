"""Logs in Valkey, for the three that use them: ``Logs`` for feeds, ``LogRegistry`` and ``Staging`` for upkeep.

Only the function ``apply`` appends to logs. Readers read a log's registry (a hash) before its segments: everything that
the registry lists is stored by then, and a segment that has a successor in it is complete.

``Logs`` reads with asyncio: names, registries, and runs after a position. ``LogRegistry`` walks all logs of a view with
a blocking client. Names are in one sorted set per shard, so a walk costs as much as the view has logs, and never scans
the keyspace.

``Staging`` changes logs, each step one atomic function: stage pieces aside, swap them in, expire, replace. Every call
carries the token of the caller's lease, and a shard refuses a token below the highest it has seen, so of two upkeepers
one that was paused and wakes up late can no longer change anything. Staged pieces that are never swapped in expire.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tailrace.errors import StaleUpkeep, StoreError
from tailrace.log.cursor import Position
from tailrace.log.event import Partition, shard_of
from tailrace.log.pack import CODEC, unpack
from tailrace.log.run import NumberedRun, decode, raw_size
from tailrace.log.segment import PACKED, Log, Segment
from tailrace.valkey.marks import parse_marks
from tailrace.valkey.shards import Arg, Call, Command, Nodes, Shards, mapping

logger = logging.getLogger(__name__)

PACKED_BYTES = 1 << 20
"""Approximate bytes of packed pieces that one read returns, so that a reader's memory does not depend on their size."""
PAGE = 1000
REGISTRIES = 50
"""Registries that upkeep reads in one round trip: nobody else is served meanwhile."""
STAGED_MS = 3_600_000
"""Time after which staged pieces expire; every further piece of the same segment restarts it."""
EXPIRE_AT_ONCE = 100
"""Most segments that one call drops."""
SOURCES_AT_ONCE = 1000
"""Most sources of a tag in one call."""


class Logs:
    """The logs of one view, for feeds."""

    def __init__(self, nodes: Nodes, view: str, piece_runs: int | None = None) -> None:
        """``piece_runs``: number of runs in a packed piece; None if pieces are so large that one is enough per read."""
        self._nodes, self._keys, self._count = nodes, nodes.keys, nodes.options.shards
        self.view, self._piece_runs = view, piece_runs

    def shard_of(self, name: str) -> int:
        return shard_of(name, self._count)

    async def log(self, name: str) -> Log:
        """Return a log's registry; one without segments if it does not exist."""
        return (await self.logs_of([name]))[0]

    async def logs_of(self, names: Sequence[str]) -> list[Log]:
        """Return the registries of several logs, in one round trip per node."""
        commands = []
        for name in names:
            shard = self.shard_of(name)
            commands.append((shard, ("HGETALL", self._keys.log(shard, self.view, name))))
        return [read_log(answer) for answer in await self._nodes.read_all(commands)]

    async def marks(self, shards: Sequence[int]) -> list[dict[Partition, int]]:
        """Return the marks of some shards: up to them their logs have everything."""
        commands = [(shard, ("HGETALL", self._keys.marks(shard, self.view))) for shard in shards]
        return [parse_marks(answer) for answer in await self._nodes.read_all(commands)]

    async def floor(self, name: str) -> int:
        """Return a log's floor: no new bucket begins before this time, since everything before is packed or expired."""
        shard = self.shard_of(name)
        return int(await self._nodes.read(shard, "HGET", self._keys.log(shard, self.view, name), "o") or 0)

    async def read(self, name: str, segment: Segment, after: int, count: int) -> list[NumberedRun]:
        """Return up to ``count`` stored runs, or some runs of a packed piece, with events numbered above ``after``.

        The first one may begin earlier: the caller skips events it has seen. A segment that was packed since its
        registry was read returns the same events: they are under the same key, in another form.
        """
        return (await self.read_many([(name, segment, after)], count))[0]

    async def read_many(self, requests: Sequence[tuple[str, Segment, int]], count: int) -> list[list[NumberedRun]]:
        """Do ``read`` for several (name, segment, after), in one round trip per node."""
        commands = []
        packed = max(1, count // self._piece_runs) if self._piece_runs is not None else 1
        for name, segment, after in requests:
            shard = self.shard_of(name)
            key = self._keys.segment(shard, self.view, segment.index, name)
            most = packed if segment.state == PACKED else count
            commands.append((shard, ("XRANGE", key, f"{max(0, after) + 1}-0", "+", "COUNT", most)))
        answers = await self._nodes.read_all(commands)
        return [_within_read(answer, after) for answer, (_, _, after) in zip(answers, requests, strict=True)]

    async def read_back(self, name: str, segment: Segment, before: int, count: int) -> list[NumberedRun]:
        """Return up to ``count`` stored runs, or those of a packed piece, that end by ``before``, the latest first."""
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
        names = {name for answer in await self._nodes.read_all(commands) for name in answer}
        return [name.decode() for name in sorted(names)[:limit]]


class LogRegistry:
    """The logs of one view, for upkeep."""

    def __init__(self, shards: Shards, view: str) -> None:
        self._shards, self._keys, self.view = shards, shards.keys, view

    def walk(self, wanted: Callable[[str], bool] = lambda _: True) -> Iterator[NamedLog]:
        """Yield every log whose name is wanted, shard by shard, in the order of the names' bytes.

        A log that is there all the time is seen once; one that is added meanwhile may or may not be.
        """
        for shard in range(self._shards.options.shards):
            for names in self.pages(shard, wanted):
                yield from self._page(shard, names)

    def pages(self, shard: int, wanted: Callable[[str], bool]) -> Iterator[list[str]]:
        """Yield the wanted names of one shard, page by page, in the order of their bytes."""
        key, low = self._keys.names(shard, self.view), b"-"
        while True:
            page: list[bytes]
            (page,) = self._shards.run_all([(shard, ("ZRANGE", key, low, "+", "BYLEX", "LIMIT", 0, PAGE))])
            yield [name for name in map(bytes.decode, page) if wanted(name)]
            if len(page) < PAGE:
                return
            low = b"(" + page[-1]

    def logs(self, names: Sequence[str]) -> list[NamedLog]:
        """Return logs by name; one that does not exist has no segments."""
        return [log for name in names for log in self._page(shard_of(name, self._shards.options.shards), [name])]

    def count(self) -> int:
        commands: list[Command] = [
            (s, ("ZCARD", self._keys.names(s, self.view))) for s in range(self._shards.options.shards)
        ]
        return sum(self._shards.run_all(commands))

    def read_whole(self, segments: Sequence[tuple[str, Segment]]) -> list[list[NumberedRun]]:
        """Return all entries of several small segments, in one round trip per node."""
        commands: list[Command] = []
        for name, segment in segments:
            shard = shard_of(name, self._shards.options.shards)
            commands.append((shard, ("XRANGE", self._keys.segment(shard, self.view, segment.index, name), "-", "+")))
        return [[e for item in answer for e in read_entries(*item)] for answer in self._shards.run_all(commands)]

    def _page(self, shard: int, names: Sequence[str]) -> Iterator[NamedLog]:
        for at in range(0, len(names), REGISTRIES):
            some = names[at : at + REGISTRIES]
            commands: list[Command] = [(shard, ("HGETALL", self._keys.log(shard, self.view, name))) for name in some]
            for name, answer in zip(some, self._shards.run_all(commands), strict=True):
                try:
                    yield NamedLog(shard, name, read_log(answer))
                except StoreError as error:
                    # The walk continues; an audit reports the missing events.
                    logger.error("stream %r is left out: %s", name, error)


class NamedLog(msgspec.Struct, frozen=True):
    shard: int
    name: str
    log: Log


class Staging:
    """Changes the logs of one view, under one lease."""

    def __init__(self, shards: Shards, view: str, token: int) -> None:
        self._shards, self._keys, self.view, self.token = shards, shards.keys, view, token

    def stage(self, pieces: Sequence[PackedPiece]) -> None:
        """Write pieces aside, in order for each segment; the first piece of a segment discards earlier ones."""
        calls: list[Call] = []
        for piece in pieces:
            head: list[Arg] = [self.token, self.view, piece.name, piece.index, STAGED_MS, int(piece.is_first)]
            calls.append((self._shard(piece.name), "stage", (*head, piece.id, piece.stored, piece.newest_ms)))
        self._call(calls)

    def read_staged(self, pieces: Sequence[PackedPiece]) -> list[list[NumberedRun]]:
        commands: list[Command] = [
            (self._shard(p.name), ("XRANGE", self._key(p.name, p.index), p.id, p.id)) for p in pieces
        ]
        return [[e for item in answer for e in read_entries(*item)] for answer in self._shards.run_all(commands)]

    def swap(self, packed: Sequence[StagedSegment], after_ms: int, now_ms: int) -> list[str]:
        """Replace segments by their staged pieces; return ``ok`` for each, or gone, moved, early, unstaged."""
        calls: list[Call] = []
        for p in packed:
            s = p.segment
            args: list[Arg] = [self.token, self.view, p.name, s.index, s.epoch, s.last, s.events]
            args += [p.pieces, p.bytes, p.raw_bytes, after_ms, now_ms]
            calls.append((self._shard(p.name), "swap", args))
        return [answer[0].decode() for answer in self._call(calls)]

    def expire(self, names: Iterable[tuple[str, int]], now_ms: int, remember_ms: int) -> list[ExpiredCounts]:
        """Drop the oldest segments of logs, given as (name, retention in ms)."""
        calls: list[Call] = []
        for name, keep_ms in names:
            args = self.token, self.view, name, keep_ms, now_ms, remember_ms, EXPIRE_AT_ONCE
            calls.append((self._shard(name), "expire", args))
        return [
            ExpiredCounts(int(segments), int(events), int(size), ended == b"ended")
            for _, segments, events, size, ended in self._call(calls)
        ]

    def reopen(self, now_s: int) -> list[tuple[int, dict[Partition, int]]]:
        """Begin a new epoch for rebuilt segments; return it with the marks of that moment, for each shard.

        Everything up to those marks is in segments of earlier epochs, which are written no more.
        """
        shards = range(self._shards.options.shards)
        answers = self._call([(shard, "reopen", (self.token, self.view, now_s)) for shard in shards])
        return [(int(epoch), parse_marks(marks)) for _, epoch, marks in answers]

    def replace(self, name: str, old: Sequence[Segment], new: Sequence[NewSegment], remember_ms: int) -> str:
        """Replace old segments by staged ones, in order; return ``ok``, moved or unstaged.

        An old segment whose row cannot be read has the epoch 0. A log with nothing left ends, and its end is
        remembered for ``remember_ms``.
        """
        args: list[Arg] = [self.token, self.view, name, remember_ms, len(old)]
        for segment in old:
            args += [segment.index, segment.epoch or "", segment.last]
        for rebuilt in new:
            args += [rebuilt.staged_as, rebuilt.pieces, rebuilt.segment.index, write_row(rebuilt.segment)]
        return str(self._call([(self._shard(name), "replace", args)])[0][0].decode())

    def thin(
        self, name: str, old: Segment, left: NewSegment | None, neighbour: Segment | None, remember_ms: int
    ) -> str:
        """Replace a segment by a part of it, or by nothing; return ``ok``, gone, moved or unstaged.

        If nothing is left of it, the neighbour's row is written instead. A log with nothing left ends.
        """
        args: list[Arg] = [self.token, self.view, name, remember_ms, old.index, old.epoch, old.last, old.events]
        args += [0, ""] if left is None else [left.pieces, write_row(left.segment)]
        args += ["", ""] if neighbour is None else [neighbour.index, write_row(neighbour)]
        return str(self._call([(self._shard(name), "thin", args)])[0][0].decode())

    def record_erasure(self, tag: str, source: str, stored: bytes) -> None:
        """Record up to where a source is erased from a tag; an empty value forgets it."""
        self._call([(self._shard(tag), "clean", (self.token, tag, source, stored))])

    def restore_numbers(self, tag: str, numbers: Mapping[str, bytes]) -> None:
        """Set the last numbers of sources in a tag where the shard has none; it keeps those it has."""
        pairs = list(numbers.items())
        for at in range(0, len(pairs), SOURCES_AT_ONCE):
            flat = [part for pair in pairs[at : at + SOURCES_AT_ONCE] for part in pair]
            self._call([(self._shard(tag), "count_from", (self.token, tag, *flat))])

    def discard(self, name: str, staged_as: Iterable[int]) -> None:
        """Remove staged segments that are not needed after all; otherwise they expire."""
        keys = [self._key(name, index) for index in staged_as]
        if keys:
            self._shards.run_all([(self._shard(name), ("UNLINK", *keys))])

    def _call(self, calls: Sequence[Call]) -> list[Any]:
        answers = self._shards.call_all(calls)
        for answer in answers:
            if answer[0] == b"stale":
                raise StaleUpkeep(self.token, int(answer[1]))
            if answer[0] == b"unready":
                raise StoreError("a shard was never initialised: run the pipeline first")
        return answers

    def _shard(self, name: str) -> int:
        return shard_of(name, self._shards.options.shards)

    def _key(self, name: str, index: int) -> str:
        return self._keys.staged(self._shard(name), self.token, self.view, index, name)


class PackedPiece(msgspec.Struct, frozen=True):
    """A packed piece, ready to be stored."""

    name: str
    index: int
    last: int
    events: int
    newest_ms: int
    stored: bytes
    is_first: bool

    @property
    def id(self) -> str:
        return f"{self.last}-{self.events}"


class StagedSegment(msgspec.Struct, frozen=True):
    """A segment with all its packed pieces staged."""

    name: str
    segment: Segment
    pieces: int
    bytes: int
    raw_bytes: int


class NewSegment(msgspec.Struct, frozen=True):
    """A new segment with all its pieces staged, under the index ``staged_as``."""

    segment: Segment
    staged_as: int
    pieces: int


class ExpiredCounts(msgspec.Struct, frozen=True):
    """Counts of one call of ``expire``."""

    segments: int
    events: int
    bytes: int
    ended: bool
    """True if the log is gone too."""


_OPEN, _BEFORE = (b"i", b"b", b"w", b"e", b"f"), (b"l", b"c", b"z", b"t")
"""Fields of an open segment; those of the second were one, ``p``, when a newer version wrote it."""
_ints = msgspec.msgpack.Decoder(list[int]).decode


def read_log(answer: Any) -> Log:
    fields = mapping(answer)
    if b"i" not in fields:
        return Log()
    try:
        segments = [read_row(int(field[1:]), value) for field, value in fields.items() if field[:1] == b"s"]
        segments.sort(key=lambda segment: segment.index)
        if b"b" in fields:
            grown = fields[b"p"].split() if b"p" in fields else [fields[field] for field in _BEFORE]
            i, b, w, e, f, l, c, z, t = map(int, [*(fields[field] for field in _OPEN), *grown])  # noqa: E741
            segments.append(Segment(i, b, w, e, f, l, c, z, t, open=True))
        epoch, _, number = fields.get(b"x", b"0 0").partition(b" ")
        return Log(segments, Position(int(epoch), int(number)))
    except (ValueError, KeyError, msgspec.MsgspecError) as error:
        # The text of the error may quote stored data, so it is not repeated.
        raise StoreError("the registry of a stream cannot be read; `tailrace rebuild` restores it") from error


def read_row(index: int, stored: bytes) -> Segment:
    b, w, e, f, l, c, z, t, raw, state, *rest = _ints(stored)  # noqa: E741
    replaced = iter(rest)
    return Segment(index, b, w, e, f, l, c, z, t, raw, state, tuple(zip(replaced, replaced, replaced, strict=True)))


def write_row(segment: Segment) -> bytes:
    """Return the row of a closed segment, as ``read_row`` reads it."""
    s = segment
    head = [s.start_ms, s.span_ms, s.epoch, s.first, s.last, s.events, s.bytes, s.newest_ms, s.raw_bytes, s.state]
    return msgspec.msgpack.encode([*head, *(n for triple in s.replaced for n in triple)])


def read_entries(entry_id: bytes, fields: Any) -> Iterator[NumberedRun]:
    """Yield the run of one entry of a segment's stream, or the runs of a packed piece."""
    last, _, count = entry_id.partition(b"-")
    by_name = mapping(fields)
    stored = by_name[b"r"]
    try:
        if stored[:1] == CODEC:
            yield from unpack(stored)
        else:
            run = decode(stored)
            yield NumberedRun(int(last) - int(count) + 1, int(last), int(by_name[b"t"]), run, raw_size(stored))
    except Exception as error:
        raise StoreError(
            f"a stored run ({entry_id.decode()}) cannot be read: {error}; rebuild the view from Kafka"
        ) from error


def _within_read(answer: Any, after: int) -> list[NumberedRun]:
    """Return the entries above a number: every run, but of packed pieces only as much as one read may return."""
    entries: list[NumberedRun] = []
    size = 0
    for item in answer:
        packed = mapping(item[1])[b"r"][:1] == CODEC
        if packed and size >= PACKED_BYTES:
            break
        for entry in read_entries(*item):
            if entry.last <= after:
                continue
            entries.append(entry)
            size += entry.size
            if packed and size >= PACKED_BYTES:
                return entries
    return entries

"""Logs as the read side sees them: names, segments, and runs after a place. Writing them is ``apply``'s work alone.

A log's hash is read before its segments are: what the hash shows is at least stored, and a segment that has a successor
in it is complete.

The registries of logs as upkeep sees them: every name with its segments, page by page, and what segments hold.

Names are kept in one sorted set per shard; the set is walked in pages, and the keyspace is never scanned, so the work
grows with the logs of one view and nothing else.

What upkeep does to logs, each step one atomic function: stage pieces aside, swap them in, expire, replace.

Every call carries the token of the caller's lease, and a shard refuses a token below the highest it has seen: of two
upkeepers, one that was paused and woke up late can no longer change anything. What is staged and never put in its
place ends by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tailrace.errors import StaleUpkeep, StoreError
from tailrace.log.cursor import Position
from tailrace.log.event import Partition
from tailrace.log.name import shard_of
from tailrace.log.pack import CODEC, unpack
from tailrace.log.run import NumberedRun, decode, raw_size
from tailrace.log.segment import PACKED, Log, Segment
from tailrace.valkey.marks import parse_marks
from tailrace.valkey.nodes import Nodes
from tailrace.valkey.shards import Arg, Call, Command, Shards, mapping

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

    async def marks(self, shards: Sequence[int]) -> list[dict[Partition, int]]:
        """Return how far some shards have applied every source: up to there their logs have everything."""
        commands = [(shard, ("HGETALL", self._keys.marks(shard, self.view))) for shard in shards]
        return [parse_marks(answer) for answer in await self._nodes.read_all(commands)]

    async def floor(self, name: str) -> int:
        """Return the time before which no bucket of a log begins any more: what is packed or expired ends there."""
        shard = self.shard_of(name)
        return int(await self._nodes.read(shard, "HGET", self._keys.log(shard, self.view, name), "o") or 0)

    async def read(self, name: str, segment: Segment, after: int, count: int) -> list[NumberedRun]:
        """Return up to ``count`` stored runs, or some runs of a packed piece, with events numbered above ``after``.

        The first one may begin earlier: the caller leaves out what it has seen. A segment that was packed since its
        registry was read answers the same events: they are under the same key, in another form.
        """
        return (await self.read_many([(name, segment, after)], count))[0]

    async def read_many(self, places: Sequence[tuple[str, Segment, int]], count: int) -> list[list[NumberedRun]]:
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

    async def read_back(self, name: str, segment: Segment, before: int, count: int) -> list[NumberedRun]:
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


def read_entries(entry_id: bytes, fields: Any) -> Iterator[NumberedRun]:
    """Yield what one entry of a segment's stream holds: a run, or the runs of a packed piece."""
    last, _, count = entry_id.partition(b"-")
    named = mapping(fields)
    stored = named[b"r"]
    try:
        if stored[:1] == CODEC:
            yield from unpack(stored)
        else:
            run = decode(stored)
            yield NumberedRun(int(last) - int(count) + 1, int(last), int(named[b"t"]), run, raw_size(stored))
    except Exception as error:
        raise StoreError(
            f"a stored run ({entry_id.decode()}) cannot be read: {error}; rebuild the view from Kafka"
        ) from error


def _some(answer: Any, after: int) -> list[NumberedRun]:
    """Return the entries above a number: every run, but of packed pieces only about what one read may return."""
    found: list[NumberedRun] = []
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


logger = logging.getLogger(__name__)

PAGE = 1000
READ_BYTES = 1 << 20


class Named(msgspec.Struct, frozen=True):
    """A log with its name and its shard."""

    shard: int
    name: str
    log: Log


class LogRegistry:
    """The logs of one view, read with a blocking client."""

    def __init__(self, shards: Shards, view: str) -> None:
        self._shards = shards
        self._keys = shards.keys
        self.view = view

    def walk(
        self, wanted: Callable[[str], bool] = lambda _: True, shards: Sequence[int] | None = None
    ) -> Iterator[Named]:
        """Yield every log whose name is wanted, shard by shard, in the order of the names' bytes.

        A log that is added meanwhile may or may not be seen; one that is there all the time is seen once.
        """
        for shard in shards if shards is not None else range(self._shards.options.shards):
            low = b"-"
            while True:
                key = self._keys.names(shard, self.view)
                page: list[bytes]
                (page,) = self._shards.run_all([(shard, ("ZRANGE", key, low, "+", "BYLEX", "LIMIT", 0, PAGE))])
                yield from self._page(shard, [name for name in map(bytes.decode, page) if wanted(name)])
                if len(page) < PAGE:
                    break
                low = b"(" + page[-1]

    def logs(self, names: Sequence[str]) -> list[Named]:
        """Return logs by name; one that does not exist has no segments."""
        found: list[Named] = []
        for name in names:
            found += self._page(shard_of(name, self._shards.options.shards), [name])
        return found

    def count(self) -> int:
        """Return how many names there are."""
        commands: list[Command] = [
            (s, ("ZCARD", self._keys.names(s, self.view))) for s in range(self._shards.options.shards)
        ]
        return sum(self._shards.run_all(commands))

    def whole(self, places: Sequence[tuple[str, Segment]]) -> list[list[NumberedRun]]:
        """Return everything that several small segments hold, in one round trip for each node."""
        commands: list[Command] = []
        for name, segment in places:
            shard = shard_of(name, self._shards.options.shards)
            commands.append((shard, ("XRANGE", self._keys.segment(shard, self.view, segment.index, name), "-", "+")))
        return [[e for item in answer for e in read_entries(*item)] for answer in self._shards.run_all(commands)]

    def entries(self, name: str, segment: Segment) -> Iterator[NumberedRun]:
        """Yield everything that a segment holds, reading about a mebibyte of stored runs at a time."""
        shard = shard_of(name, self._shards.options.shards)
        key = self._keys.segment(shard, self.view, segment.index, name)
        after, count = segment.first - 1, 16
        while True:
            command = "XRANGE", key, f"{max(0, after) + 1}-0", "+", "COUNT", count
            (answer,) = self._shards.run_all([(shard, command)])
            if not answer:
                return
            size = 0
            for item in answer:
                size += len(item[1][1]) if not isinstance(item[1], dict) else len(item[1][b"r"])
                yield from read_entries(*item)
            after = int(answer[-1][0].partition(b"-")[0])
            count = max(1, min(1000, READ_BYTES * len(answer) // max(1, size)))

    def _page(self, shard: int, names: Sequence[str]) -> Iterator[Named]:
        commands: list[Command] = [(shard, ("HGETALL", self._keys.log(shard, self.view, name))) for name in names]
        for name, answer in zip(names, self._shards.run_all(commands), strict=True):
            try:
                yield Named(shard, name, read_log(answer))
            except StoreError as error:
                # The others go on; an audit finds that its events are missing.
                logger.error("stream %r is left out: %s", name, error)


STAGED_MS = 3_600_000
"""How long what is staged waits; every further piece of the same segment begins it anew."""

EXPIRE_AT_ONCE = 100
"""Segments that one call drops at most."""

COUNT_AT_ONCE = 1000
"""Sources of events that one call is about."""


class PackedPiece(msgspec.Struct, frozen=True):
    """A packed piece, ready to be stored."""

    name: str
    index: int
    last: int
    events: int
    newest_ms: int
    stored: bytes
    is_first: bool
    size: int

    @property
    def id(self) -> str:
        """The id of its entry."""
        return f"{self.last}-{self.events}"


class Packed(msgspec.Struct, frozen=True):
    """A segment all of whose pieces are staged."""

    name: str
    segment: Segment
    pieces: int
    bytes: int
    raw_bytes: int


class Rebuilt(msgspec.Struct, frozen=True):
    """A new segment all of whose pieces are staged, under an index that need not be its own yet."""

    segment: Segment
    staged_as: int
    pieces: int


class Dropped(msgspec.Struct, frozen=True):
    """What one call expired."""

    segments: int
    events: int
    bytes: int
    ended: bool
    """Whether the log is gone with it."""


class Staging:
    """The changes that upkeep makes to the logs of one view, under one lease."""

    def __init__(self, shards: Shards, view: str, token: int) -> None:
        self._shards = shards
        self._keys = shards.keys
        self.view = view
        self.token = token

    def stage(self, pieces: Sequence[PackedPiece]) -> None:
        """Write pieces aside, in order for each segment; a segment's first one begins it anew."""
        calls: list[Call] = []
        for piece in pieces:
            head: list[Arg] = [self.token, self.view, piece.name, piece.index, STAGED_MS, int(piece.is_first)]
            calls.append((self._shard(piece.name), "stage", (*head, piece.id, piece.stored, piece.newest_ms)))
        self._call(calls)

    def staged(self, pieces: Sequence[PackedPiece]) -> list[list[NumberedRun]]:
        """Read staged pieces back as they are stored."""
        commands: list[Command] = [
            (self._shard(p.name), ("XRANGE", self._key(p.name, p.index), p.id, p.id)) for p in pieces
        ]
        return [[e for item in answer for e in read_entries(*item)] for answer in self._shards.run_all(commands)]

    def swap(self, packed: Sequence[Packed], after_ms: int, now_ms: int) -> list[str]:
        """Put staged segments in their place; return for each ``ok``, or why not: gone, moved, early, unstaged."""
        calls: list[Call] = []
        for p in packed:
            s = p.segment
            args: list[Arg] = [self.token, self.view, p.name, s.index, s.epoch, s.last, s.events]
            args += [p.pieces, p.bytes, p.raw_bytes, after_ms, now_ms]
            calls.append((self._shard(p.name), "swap", args))
        return [answer[0].decode() for answer in self._call(calls)]

    def expire(self, names: Iterable[tuple[str, int]], now_ms: int, remember_ms: int) -> list[Dropped]:
        """Drop the oldest segments of logs, given as name and how long its events are kept."""
        calls: list[Call] = [
            (
                self._shard(name),
                "expire",
                (self.token, self.view, name, keep_ms, now_ms, remember_ms, EXPIRE_AT_ONCE),
            )
            for name, keep_ms in names
        ]
        return [
            Dropped(int(segments), int(events), int(size), ended == b"ended")
            for _, segments, events, size, ended in self._call(calls)
        ]

    def reopen(self, now_s: int) -> list[tuple[int, dict[Partition, int]]]:
        """Begin new epochs: return for each shard the one for what is rebuilt, and its marks at that moment.

        What was stored up to those marks is in segments of earlier epochs, which nobody writes any more.
        """
        found: list[tuple[int, dict[Partition, int]]] = []
        count = self._shards.options.shards
        for answer in self._call([(s, "reopen", (self.token, self.view, now_s)) for s in range(count)]):
            flat = answer[2]
            pairs = mapping(flat).items()
            found.append((int(answer[1]), {Partition.parse(field.decode()): int(mark) for field, mark in pairs}))
        return found

    def replace(self, name: str, old: Sequence[Segment], new: Sequence[Rebuilt], remember_ms: int) -> str:
        """Put staged segments, in order, in the place of old ones; return ``ok``, or why not: moved, unstaged.

        An old one whose row cannot be read has the epoch 0. A log of which nothing is left ends; it is remembered for
        so long.
        """
        args: list[Arg] = [self.token, self.view, name, remember_ms, len(old)]
        for segment in old:
            args += [segment.index, segment.epoch or "", segment.last]
        for rebuilt in new:
            args += [rebuilt.staged_as, rebuilt.pieces, rebuilt.segment.index, write_row(rebuilt.segment)]
        return str(self._call([(self._shard(name), "replace", args)])[0][0].decode())

    def thin(self, name: str, old: Segment, left: Rebuilt | None, neighbour: Segment | None, remember_ms: int) -> str:
        """Put what is left of a segment in its place, or nothing; return ``ok``, or why not: gone, moved, unstaged.

        The neighbour's row is written where nothing is left. A log of which nothing is left ends.
        """
        args: list[Arg] = [self.token, self.view, name, remember_ms, old.index, old.epoch, old.last, old.events]
        args += [0, ""] if left is None else [left.pieces, write_row(left.segment)]
        args += ["", ""] if neighbour is None else [neighbour.index, write_row(neighbour)]
        return str(self._call([(self._shard(name), "thin", args)])[0][0].decode())

    def clean(self, tag: str, source: str, stored: bytes) -> None:
        """Remember up to where the events of a source are taken out of a tag; nothing stored forgets it."""
        self._call([(self._shard(tag), "clean", (self.token, tag, source, stored))])

    def count_from(self, tag: str, numbered: Mapping[str, bytes]) -> None:
        """Say how far sources have come in a tag that have come nowhere yet; what the shard knows better stays."""
        pairs = list(numbered.items())
        for at in range(0, len(pairs), COUNT_AT_ONCE):
            flat = [part for pair in pairs[at : at + COUNT_AT_ONCE] for part in pair]
            self._call([(self._shard(tag), "count_from", (self.token, tag, *flat))])

    def discard(self, name: str, staged_as: Iterable[int]) -> None:
        """Remove staged segments that are not wanted after all; they would end by themselves."""
        keys = [self._key(name, index) for index in staged_as]
        if keys:
            self._shards.run_all([(self._shard(name), ("UNLINK", *keys))])

    def _call(self, calls: Sequence[Call]) -> list[Any]:
        answers = self._shards.call_all(calls)
        for answer in answers:
            if answer[0] == b"stale":
                raise StaleUpkeep(self.token, int(answer[1]))
            if answer[0] == b"unready":
                raise StoreError("a shard was never begun: run the pipeline first")
        return answers

    def _shard(self, name: str) -> int:
        return shard_of(name, self._shards.options.shards)

    def _key(self, name: str, index: int) -> str:
        return self._keys.staged(self._shard(name), self.token, self.view, index, name)

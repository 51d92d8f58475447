"""What upkeep does to logs, each step one atomic function: stage pieces aside, swap them in, expire, replace.

Every call carries the token of the caller's lease, and a shard refuses a token below the highest it has seen: of two
upkeepers, one that was paused and woke up late can no longer change anything. What is staged and never put in its
place ends by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tailrace.errors import StaleUpkeep, StoreError
from tailrace.log.event import Source
from tailrace.log.name import shard_of
from tailrace.log.run import Entry
from tailrace.log.segment import Segment
from tailrace.log.store import read_entries, write_row
from tailrace.valkey.shards import Arg, Call, Command, Shards, mapping
from tailrace.views.tags.cleaned import Cleaned
from tailrace.views.tags.cleaned_ import encode
from tailrace.views.tags.model import Numbered

STAGED_MS = 3_600_000
"""How long what is staged waits; every further piece of the same segment begins it anew."""

EXPIRE_AT_ONCE = 100
"""Segments that one call drops at most."""

COUNT_AT_ONCE = 1000
"""Sources of events that one call is about."""


class Piece(msgspec.Struct, frozen=True):
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

    def stage(self, pieces: Sequence[Piece]) -> None:
        """Write pieces aside, in order for each segment; a segment's first one begins it anew."""
        calls: list[Call] = []
        for piece in pieces:
            head: list[Arg] = [self.token, self.view, piece.name, piece.index, STAGED_MS, int(piece.is_first)]
            calls.append((self._shard(piece.name), "stage", (*head, piece.id, piece.stored, piece.newest_ms)))
        self._call(calls)

    def staged(self, pieces: Sequence[Piece]) -> list[list[Entry]]:
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

    def reopen(self, now_s: int) -> list[tuple[int, dict[Source, int]]]:
        """Begin new epochs: return for each shard the one for what is rebuilt, and its marks at that moment.

        What was stored up to those marks is in segments of earlier epochs, which nobody writes any more.
        """
        found: list[tuple[int, dict[Source, int]]] = []
        count = self._shards.options.shards
        for answer in self._call([(s, "reopen", (self.token, self.view, now_s)) for s in range(count)]):
            flat = answer[2]
            pairs = mapping(flat).items()
            found.append((int(answer[1]), {Source.parse(field.decode()): int(mark) for field, mark in pairs}))
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

    def clean(self, tag: str, source: str, cleaned: Cleaned | None) -> None:
        """Remember up to where the events of a source are taken out of a tag; None forgets it."""
        stored = b"" if cleaned is None else encode(cleaned)
        self._call([(self._shard(tag), "clean", (self.token, tag, source, stored))])

    def count_from(self, tag: str, numbered: Mapping[str, Numbered]) -> None:
        """Say how far sources have come in a tag that have come nowhere yet; what the shard knows better stays."""
        pairs = [(pid, each.stored()) for pid, each in numbered.items()]
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

"""What shards say of the places that tags come from: how far each is written, and below what nothing more will be."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from tailrace.log.event import Source
from tailrace.log.name import shard_of
from tailrace.valkey.marks import SCANNED, parse_mark_time
from tailrace.valkey.nodes import Nodes
from tailrace.valkey.shards import mapping
from tailrace.views.tags.store import VIEW


class Levels(msgspec.Struct, frozen=True):
    """The marks and the floors of one shard, as ``views.tags.rows.reading`` takes them."""

    marks: dict[Source, int]
    floors: dict[Source, int]


class Floors:
    """Reads marks and floors."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def shard_of(self, tag: str) -> int:
        """Return the shard that a tag lives in."""
        return shard_of(tag, self._nodes.options.shards)

    async def read(self, shards: Iterable[int]) -> dict[int, Levels]:
        """Return what shards say. Floors are read before the marks: they hold for what lies beyond these, too."""
        wanted, keys = sorted(set(shards)), self._nodes.keys
        answers = await self._nodes.read_all(
            [
                *((shard, ("HGETALL", keys.times(shard, VIEW))) for shard in wanted),
                *((shard, ("HGETALL", keys.marks(shard, VIEW))) for shard in wanted),
            ]
        )
        found: dict[int, Levels] = {}
        for shard, times, marks in zip(wanted, answers, answers[len(wanted) :], strict=False):
            found[shard] = Levels(
                {_place(field): int(mark) for field, mark in mapping(marks).items() if field[:1] != SCANNED},
                {_place(field): parse_mark_time(value)[0] for field, value in mapping(times).items()},
            )
        return found


@lru_cache(10_000)
def _place(field: bytes) -> Source:
    return Source.parse(field.decode())

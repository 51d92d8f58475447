"""What the shards keep for tags: how far each source has come in each tag, and the floors of what is still to come.

A tag lives in one shard, and its numbers with it, wherever its events rest. They are read by the task that is about to
write, and compared by the shard when it has. A floor is the time of a partition's last stamp in a shard, or what the
driver raised it to since. Invariant: no event that is still to be written has a stamp before its partition's floor.

What the shards remember of cleaned sources: up to where their events were taken out of each tag.

A set of each shard names the tags that have some, so that nobody has to look through all tags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.config.settings import Settings
from tailrace.errors import StaleDriver
from tailrace.log.event import Partition
from tailrace.log.name import shard_of
from tailrace.log.store import LogRegistry
from tailrace.valkey.marks import SCANNED, parse_mark_time
from tailrace.valkey.nodes import Nodes
from tailrace.valkey.shards import Command, Shards, mapping
from tailrace.views.tags.model import Erasure, SourceProgress, Tagging

if TYPE_CHECKING:
    from tailrace.views.tags.rows.cassandra import CassandraOptions


VIEW = "tags"


class TagOptions(msgspec.Struct, frozen=True):
    """Everything that a task must know to tag events and to store them."""

    tagging: Tagging = Tagging()
    span_ms: int = 3_600_000
    """Length of a bucket."""
    future_ms: int = 1_000
    """How far ahead of the clock a stamp may be."""
    batch: int = 150
    cassandra: CassandraOptions | None = None
    """Where the events rest, if not in Valkey."""


def tag_options(settings: Settings) -> TagOptions:
    """Return the options that the configuration gives."""
    tags = settings.tags
    cassandra: CassandraOptions | None = None
    if tags.store == "cassandra":
        from tailrace.views.tags.rows.cassandra import CassandraOptions

        cassandra = CassandraOptions.of(settings.cassandra)
    return TagOptions(
        tagging=Tagging(
            topics=tags.topics,
            source=None if tags.source == "key" else tuple(tags.source),
            sequence="" if tags.sequence == "offset" else tags.sequence,
            paths=tags.paths,
            rules=tags.rules.written(),
        ),
        span_ms=round(tags.span.total_seconds() * 1000),
        future_ms=round(tags.future_limit.total_seconds() * 1000),
        batch=tags.batch,
        cassandra=cassandra,
    )


def read_progress(shards: Shards, wanted: Sequence[tuple[int, str, Sequence[str]]]) -> list[list[SourceProgress]]:
    """Return how far sources have come: for each (shard, tag, sources) a list in the order of the sources."""
    keys = shards.keys
    answers = shards.run_all([(shard, ("HMGET", keys.numbers(shard, tag), *pids)) for shard, tag, pids in wanted])
    return [[SourceProgress.parse(value) for value in answer] for answer in answers]


def introduce_partitions(shards: Shards, epoch: int, wanted: Sequence[tuple[int, Sequence[str]]]) -> list[list[int]]:
    """Give partitions that have no floor in a shard the lowest there is; return those of all, in their order.

    Before the first row of a partition is written: so readers know that it is there, and that more of it may come.
    """
    answers = shards.call_all([(shard, "introduce", (VIEW, epoch, *sources)) for shard, sources in wanted])
    for answer in answers:
        if answer[0] == b"stale":
            raise StaleDriver(VIEW, epoch, int(answer[1]))
    return [[int(ms) for ms in answer[1:]] for answer in answers]


def raise_floors(shards: Shards, epoch: int, times: Mapping[Partition, int]) -> None:
    """Raise the floors of partitions of which everything up to these times is applied, in every shard."""
    if not times:
        return
    pairs = [part for source, ms in times.items() for part in (str(source), ms)]
    for answer in shards.call_all([(s, "lift", (VIEW, epoch, *pairs)) for s in range(shards.options.shards)]):
        if answer[0] == b"stale":
            raise StaleDriver(VIEW, epoch, int(answer[1]))


def read_conflicts(shards: Shards, most: int) -> list[dict[str, Any]]:
    """Return the latest conflicts, the newest first: sources that are written from two places."""
    keys, count = shards.keys, shards.options.shards
    answers = shards.run_all([(s, ("XREVRANGE", keys.conflicts(s), "+", "-", "COUNT", most)) for s in range(count)])
    found = [(entry_id, mapping(flat)[b"c"]) for answer in answers for entry_id, flat in answer]
    found.sort(key=lambda each: tuple(map(int, each[0].split(b"-"))), reverse=True)
    return [msgspec.json.decode(text) for _, text in found[:most]]


PAGE = 500

_decode = msgspec.json.Decoder(Erasure).decode
encode = msgspec.json.Encoder().encode


def read_erasures(shards: Shards, tags: Iterable[str] | None = None) -> dict[str, dict[str, Erasure]]:
    """Return the cleaned sources of tags that have some; of all of them, unless tags are given."""
    keys, count = shards.keys, shards.options.shards
    listed = shards.run_all([(s, ("SMEMBERS", keys.erased_tags(s))) for s in range(count)])
    known = {tag.decode() for members in listed for tag in members}
    wanted = sorted(known if tags is None else known.intersection(tags))
    places = [shard_of(tag, count) for tag in wanted]
    commands: list[Command] = [(s, ("HGETALL", keys.erasures(s, tag))) for s, tag in zip(places, wanted, strict=True)]
    return {
        tag: {pid.decode(): _decode(stored) for pid, stored in mapping(answer).items()}
        for tag, answer in zip(wanted, shards.run_all(commands), strict=True)
    }


def tags_of(shards: Shards, source: str) -> Iterator[str]:
    """Yield the tags with a log that a source has come somewhere in."""
    logs = LogRegistry(shards, VIEW).walk()
    while page := list(islice(logs, PAGE)):
        commands: list[Command] = [(s.shard, ("HEXISTS", shards.keys.numbers(s.shard, s.name), source)) for s in page]
        yield from (seen.name for seen, has in zip(page, shards.run_all(commands), strict=True) if has)


class Levels(msgspec.Struct, frozen=True):
    """The marks and the floors of one shard, as ``views.tags.rows.reading`` takes them."""

    marks: dict[Partition, int]
    floors: dict[Partition, int]


class LevelReader:
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
def _place(field: bytes) -> Partition:
    return Partition.parse(field.decode())

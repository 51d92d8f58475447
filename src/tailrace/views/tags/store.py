"""The state that shards store for tags: progress of sources, levels of partitions, conflicts, erasures.

A tag lives in one shard, and the progress of its sources with it, whether its events are in Valkey or in Cassandra. A
task reads that progress before it writes; the shard compares it before it applies the window.

A floor is the millisecond of a partition's last timeuuid in a shard, or a later one that the driver raised it to.
Invariant: no event that is still to be written has a timeuuid before the floor of its partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from tailrace.errors import StaleDriver
from tailrace.log.event import Partition, shard_of
from tailrace.log.store import LogRegistry
from tailrace.valkey.marks import parse_mark_time, parse_marks
from tailrace.valkey.shards import Command, Nodes, Shards, mapping
from tailrace.views.tags.model import Erasure, SourceProgress

VIEW = "tags"
PAGE = 500

_decode_erasure = msgspec.json.Decoder(Erasure).decode
encode = msgspec.json.Encoder().encode


def read_progress(shards: Shards, wanted: Sequence[tuple[int, str, Sequence[str]]]) -> list[list[SourceProgress]]:
    """Return the progress of sources: for each (shard, tag, sources) a list in the order of the sources."""
    keys = shards.keys
    answers = shards.run_all([(shard, ("HMGET", keys.numbers(shard, tag), *sources)) for shard, tag, sources in wanted])
    return [[SourceProgress.parse(value) for value in answer] for answer in answers]


def progress_of(shards: Shards, tag: str, sources: Iterable[str]) -> Iterator[tuple[str, SourceProgress]]:
    """Yield sources with their progress in a tag, page by page."""
    listed, shard = iter(sources), shard_of(tag, shards.options.shards)
    while page := list(islice(listed, PAGE)):
        yield from zip(page, *read_progress(shards, [(shard, tag, page)]), strict=True)


def tags_of(shards: Shards, source: str, tags: Iterable[str] | None = None) -> Iterator[str]:
    """Yield the tags in which a source has been given numbers; of all tags with a log if none are given."""
    listed = iter(tags if tags is not None else (log.name for log in LogRegistry(shards, VIEW).walk()))
    while page := list(islice(listed, PAGE)):
        placed = [(shard_of(tag, shards.options.shards), tag) for tag in page]
        answers = shards.run_all(
            [(shard, ("HEXISTS", shards.keys.numbers(shard, tag), source)) for shard, tag in placed]
        )
        yield from (tag for tag, has in zip(page, answers, strict=True) if has)


def read_all_progress(shards: Shards, tag: str) -> dict[str, SourceProgress]:
    """Return the progress of every source in a tag, each at some moment before this returns."""
    shard, found = shard_of(tag, shards.options.shards), dict[str, SourceProgress]()
    cursor: Any = b"0"
    while True:
        command = "HSCAN", shards.keys.numbers(shard, tag), cursor, "COUNT", PAGE
        cursor, page = shards.run_all([(shard, command)])[0]
        found |= {source.decode(): SourceProgress.parse(stored) for source, stored in mapping(page).items()}
        if int(cursor) == 0:
            return found


def introduce_partitions(shards: Shards, epoch: int, wanted: Sequence[tuple[int, Sequence[str]]]) -> list[list[int]]:
    """Give partitions without a floor in a shard the lowest floor there; return the floors of all, in their order.

    This comes before the first row of a partition is written, so that readers know of the partition and wait for it.
    """
    answers = shards.call_all([(shard, "introduce", (VIEW, epoch, *partitions)) for shard, partitions in wanted])
    _refuse_stale(answers, epoch)
    return [[int(ms) for ms in answer[1:]] for answer in answers]


def raise_floors(shards: Shards, epoch: int, times: Mapping[Partition, int]) -> None:
    """Raise the floors of partitions to the times up to which everything is applied, in every shard."""
    if not times:
        return
    pairs = [part for partition, ms in times.items() for part in (str(partition), ms)]
    _refuse_stale(shards.call_all([(s, "lift", (VIEW, epoch, *pairs)) for s in range(shards.options.shards)]), epoch)


def _refuse_stale(answers: Sequence[Any], epoch: int) -> None:
    for answer in answers:
        if answer[0] == b"stale":
            raise StaleDriver(VIEW, epoch, int(answer[1]))


def read_floors(shards: Shards, wanted: Sequence[int]) -> list[dict[Partition, int]]:
    return list(map(_floors, shards.run_all([(s, ("HGETALL", shards.keys.times(s, VIEW))) for s in wanted])))


def _floors(answer: Any) -> dict[Partition, int]:
    return {Partition.parse(field.decode()): parse_mark_time(value)[0] for field, value in mapping(answer).items()}


class Levels(msgspec.Struct, frozen=True):
    marks: dict[Partition, int]
    floors: dict[Partition, int]


class LevelReader:
    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    async def read(self, tags: Iterable[str]) -> dict[str, Levels]:
        """Return for each tag the levels of its shard. Floors, read first, hold for everything beyond the marks."""
        shards, keys = {tag: shard_of(tag, self._nodes.options.shards) for tag in tags}, self._nodes.keys
        wanted = sorted(set(shards.values()))
        floors = [(shard, ("HGETALL", keys.times(shard, VIEW))) for shard in wanted]
        marks = [(shard, ("HGETALL", keys.marks(shard, VIEW))) for shard in wanted]
        answers = await self._nodes.read_all([*floors, *marks])
        read = zip(map(parse_marks, answers[len(wanted) :]), map(_floors, answers), strict=False)
        levels = {shard: Levels(*both) for shard, both in zip(wanted, read, strict=True)}
        return {tag: levels[shard] for tag, shard in shards.items()}


def read_conflicts(shards: Shards, most: int) -> list[dict[str, Any]]:
    """Return the latest conflicts, the newest first: events that show a second writer of their source."""
    keys, count = shards.keys, shards.options.shards
    answers = shards.run_all([(s, ("XREVRANGE", keys.conflicts(s), "+", "-", "COUNT", most)) for s in range(count)])
    entries = [(entry_id, mapping(flat)[b"c"]) for answer in answers for entry_id, flat in answer]
    entries.sort(key=lambda each: tuple(map(int, each[0].split(b"-"))), reverse=True)
    return [msgspec.json.decode(text) for _, text in entries[:most]]


def read_erasures(shards: Shards, tags: Iterable[str] | None = None) -> dict[str, dict[str, Erasure]]:
    """Return the erasures of tags, by tag and source; of all tags if none are given. A tag without any is left out.

    Each shard has a set of the tags with erasures, so that not every tag is looked up.
    """
    keys, count = shards.keys, shards.options.shards
    answers = shards.run_all([(s, ("SMEMBERS", keys.erased_tags(s))) for s in range(count)])
    listed = {tag.decode() for members in answers for tag in members}
    wanted = sorted(listed if tags is None else listed.intersection(tags))
    commands: list[Command] = [
        (shard, ("HGETALL", keys.erasures(shard, tag))) for tag in wanted for shard in (shard_of(tag, count),)
    ]
    return {
        tag: {source.decode(): _decode_erasure(stored) for source, stored in mapping(answer).items()}
        for tag, answer in zip(wanted, shards.run_all(commands), strict=True)
    }

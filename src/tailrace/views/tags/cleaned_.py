"""What the shards remember of cleaned sources: up to where their events were taken out of each tag.

A set of each shard names the tags that have some, so that nobody has to look through all tags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from tailrace.log.name import shard_of
from tailrace.log.store import Registry
from tailrace.valkey.shards import Command, Shards, mapping
from tailrace.views.tags.cleaned import Cleaned
from tailrace.views.tags.store import VIEW

PAGE = 500

_decode = msgspec.json.Decoder(Cleaned).decode
encode = msgspec.json.Encoder().encode


def read_cleaned(shards: Shards, tags: Iterable[str] | None = None) -> dict[str, dict[str, Cleaned]]:
    """Return the cleaned sources of tags that have some; of all of them, unless tags are given."""
    keys, count = shards.keys, shards.options.shards
    listed = shards.run_all([(s, ("SMEMBERS", keys.cleaned_tags(s))) for s in range(count)])
    known = {tag.decode() for members in listed for tag in members}
    wanted = sorted(known if tags is None else known.intersection(tags))
    places = [shard_of(tag, count) for tag in wanted]
    commands: list[Command] = [(s, ("HGETALL", keys.cleaned(s, tag))) for s, tag in zip(places, wanted, strict=True)]
    return {
        tag: {pid.decode(): _decode(stored) for pid, stored in mapping(answer).items()}
        for tag, answer in zip(wanted, shards.run_all(commands), strict=True)
    }


def tags_of(shards: Shards, source: str) -> Iterator[str]:
    """Yield the tags with a log that a source has come somewhere in."""
    logs = Registry(shards, VIEW).walk()
    while page := list(islice(logs, PAGE)):
        commands: list[Command] = [(s.shard, ("HEXISTS", shards.keys.numbers(s.shard, s.name), source)) for s in page]
        yield from (seen.name for seen, has in zip(page, shards.run_all(commands), strict=True) if has)

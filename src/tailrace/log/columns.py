"""Tag columns: the fields that tags store beside each event of a run, column by column.

Invariant: ``TagColumns.of(rows, offsets, times).rows(offsets, times) == rows``. A column that would only repeat the
run's own columns, or one value, is stored empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import sub
from typing import NamedTuple
from uuid import UUID

import msgspec


class TagFields(NamedTuple):
    """The fields of one event in a tag."""

    source: str
    """The entity whose event it is."""
    seq: int
    """Its sequence number at the source."""
    number: int
    """Its number among the source's events with the tag: 1, 2, 3, without a gap."""
    ms: int
    """The millisecond of its timeuuid."""
    tags: tuple[str, ...]
    """All tags of the event."""


class TagColumns(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tag fields of a run."""

    sources: list[str]
    source_of: list[int]
    """Each event's index in ``sources``; empty if there is one source."""
    seqs: list[int]
    """Empty if they equal the offsets."""
    numbers: list[int]
    ahead: list[int]
    """Milliseconds from each event's own time to its timeuuid; empty if all are 0."""
    sets: list[tuple[str, ...]]
    set_of: list[int]
    """Each event's index in ``sets``; empty if all have the same tags."""

    @classmethod
    def of(cls, rows: Sequence[TagFields], offsets: Sequence[int], times: Sequence[int]) -> TagColumns:
        """Return the columns for events at these offsets and times."""
        sources, seqs, numbers, timeuuids, tags = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [], [])
        return cls.of_columns(sources, seqs, numbers, timeuuids, tags, offsets, times)

    @classmethod
    def of_columns(
        cls,
        sources: Sequence[str],
        seqs: list[int],
        numbers: list[int],
        timeuuids: Sequence[int],
        tags: Sequence[tuple[str, ...]],
        offsets: Sequence[int],
        times: Sequence[int],
    ) -> TagColumns:
        """Return the columns for plain lists, one item for each event; ``timeuuids`` are milliseconds."""
        source_at = {source: i for i, source in enumerate(dict.fromkeys(sources))}
        set_at = {each: i for i, each in enumerate(dict.fromkeys(tags))}
        ahead = list(map(sub, timeuuids, times))
        return cls(
            list(source_at),
            [source_at[source] for source in sources] if len(source_at) > 1 else [],
            [] if seqs == list(offsets) else seqs,
            numbers,
            ahead if any(ahead) else [],
            list(set_at),
            [set_at[each] for each in tags] if len(set_at) > 1 else [],
        )

    def rows(self, offsets: Sequence[int], times: Sequence[int]) -> list[TagFields]:
        """Return the fields of each event, given the offsets and times of the run."""
        sources = [self.sources[i] for i in self.source_of] if self.source_of else self.sources * len(offsets)
        sets = [self.sets[i] for i in self.set_of] if self.set_of else self.sets * len(offsets)
        ahead = self.ahead or [0] * len(offsets)
        timeuuids = [time_ms + more for time_ms, more in zip(times, ahead, strict=True)]
        return list(map(TagFields, sources, self.seqs or offsets, self.numbers, timeuuids, sets))


def tag_fields_json(fields: TagFields, tag: str, timeuuid: UUID) -> bytes:
    """Return the members that a frame of a tag has in addition, with a comma after the last."""
    return b'%b%b,"seq":%d,"tag_seq":%d,"timeuuid":"%b",' % (
        _tags_json(tag, fields.tags),
        _source_json(fields.source),
        fields.seq,
        fields.number,
        str(timeuuid).encode(),
    )


@lru_cache(4096)
def _tags_json(tag: str, tags: tuple[str, ...]) -> bytes:
    return b'"tag":%b,"tags":%b,"source":' % (_encode(tag), _encode(tags))


@lru_cache(10_000)
def _source_json(source: str) -> bytes:
    return _encode(source)


_encode = msgspec.json.Encoder().encode

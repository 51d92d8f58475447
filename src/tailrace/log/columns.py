"""TODO."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import sub
from typing import NamedTuple
from uuid import UUID

import msgspec


class TagFields(NamedTuple):
    """What a tag knows of one of its events."""

    source: str
    """The event's source: whose history it belongs to."""
    seq: int
    """Its number in that history."""
    number: int
    """Its number among the source's events with the tag: 1, 2, 3, without a gap."""
    ms: int
    """The millisecond of its stamp."""
    tags: tuple[str, ...]
    """All tags that it has."""


class TagColumns(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The notes of a run. A column that says nothing new is empty."""

    sources: list[str]
    source_of: list[int]
    """For each event its source; nothing when there is one."""
    seqs: list[int]
    """Nothing when they are the offsets."""
    numbers: list[int]
    ahead: list[int]
    """How far the stamp is after the event's own time, in ms; nothing when all are equal to it."""
    sets: list[tuple[str, ...]]
    set_of: list[int]
    """For each event its tags; nothing when all have the same."""

    @classmethod
    def of(cls, rows: Sequence[TagFields], offsets: Sequence[int], times: Sequence[int]) -> TagColumns:
        """Make the columns for events at these offsets and times."""
        pids, seqs, numbers, stamps, tags = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [], [])
        return cls.of_columns(pids, seqs, numbers, stamps, tags, offsets, times)

    @classmethod
    def of_columns(
        cls,
        pids: Sequence[str],
        seqs: list[int],
        numbers: list[int],
        stamps: Sequence[int],
        tags: Sequence[tuple[str, ...]],
        offsets: Sequence[int],
        times: Sequence[int],
    ) -> TagColumns:
        """Make them from what is known of the events, column by column."""
        pid_at = {pid: i for i, pid in enumerate(dict.fromkeys(pids))}
        set_at = {each: i for i, each in enumerate(dict.fromkeys(tags))}
        ahead = list(map(sub, stamps, times))
        return cls(
            list(pid_at),
            [pid_at[pid] for pid in pids] if len(pid_at) > 1 else [],
            [] if seqs == list(offsets) else seqs,
            numbers,
            ahead if any(ahead) else [],
            list(set_at),
            [set_at[each] for each in tags] if len(set_at) > 1 else [],
        )

    def rows(self, offsets: Sequence[int], times: Sequence[int]) -> list[TagFields]:
        """Return the notes of the events, which have these offsets and times."""
        pids = [self.sources[i] for i in self.source_of] if self.source_of else self.sources * len(offsets)
        sets = [self.sets[i] for i in self.set_of] if self.set_of else self.sets * len(offsets)
        ahead = self.ahead or [0] * len(offsets)
        stamps = [time_ms + more for time_ms, more in zip(times, ahead, strict=True)]
        return list(map(TagFields, pids, self.seqs or offsets, self.numbers, stamps, sets))


def tag_fields_json(note: TagFields, tag: str, timeuuid: UUID) -> bytes:
    """Return what a frame says of an event beside what every frame does: members of an object, and a comma."""
    return b'%b%b,"seq":%d,"tag_seq":%d,"timeuuid":"%b",' % (
        _tag_columns(tag, note.tags),
        _text(note.source),
        note.seq,
        note.number,
        str(timeuuid).encode(),
    )


@lru_cache(4096)
def _tag_columns(tag: str, tags: tuple[str, ...]) -> bytes:
    return b'"tag":%b,"tags":%b,"source":' % (_encode(tag), _encode(tags))


@lru_cache(10_000)
def _text(text: str) -> bytes:
    return _encode(text)


_encode = msgspec.json.Encoder().encode

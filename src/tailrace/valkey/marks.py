"""Marks: the last offset of each source that a shard has applied, for one view.

Invariant: everything of a source up to a shard's mark, and nothing after it, is in that shard. A start begins after the
lowest mark; a shard that is ahead refuses what it has. Marks never expire.

Generations of topics, as the store has them: how often a name was given to another topic, and which one has it.

A topic that was deleted and created again is another one, with offsets of its own; `adopt` counts it up when a driver
meets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tailrace.errors import StaleDriver, StoreError
from tailrace.log.event import Partition
from tailrace.valkey.shards import Shards, mapping

NOTHING = -1
"""The mark of a source of which nothing is applied."""

LONG_AGO = -(1 << 53), NOTHING
"""The time of a source of which nothing is applied, and the mark it holds at."""

SCANNED = b"~"
"""What the marks of scans begin with; they lie beside those of sources."""


def read_marks(shards: Shards, view: str) -> list[dict[Partition, int]]:
    """Return the marks of every shard."""
    answers = shards.run_all(
        [(s, ("HGETALL", shards.keys.marks(s, view))) for s in range(shards.options.shards)],
    )
    return [parse_marks(answer) for answer in answers]


def parse_marks(answer: Any) -> dict[Partition, int]:
    """Read the answer to HGETALL of a shard's marks."""
    stored = mapping(answer)
    return {Partition.parse(field.decode()): int(mark) for field, mark in stored.items() if field[:1] != SCANNED}


def lowest(marks: Sequence[Mapping[Partition, int]]) -> dict[Partition, int]:
    """Return, for each source that any shard knows, the mark up to which every shard has applied."""
    known = set().union(*marks) if marks else set()
    return {source: min(shard.get(source, NOTHING) for shard in marks) for source in known}


def advance(
    shards: Shards, view: str, epoch: int, ends: Mapping[Partition, int], times: Mapping[Partition, int] | None = None
) -> None:
    """Raise the marks of all shards to offsets that completed batches have passed, and with them their times if given.

    Only for ranges whose tasks have all succeeded: a shard that had nothing in them learns that it had nothing.
    """
    if not ends:
        return
    known = times or {}
    pairs = [part for source, offset in ends.items() for part in (str(source), offset, known.get(source, ""))]
    for answer in shards.call_all([(s, "advance", (view, epoch, *pairs)) for s in range(shards.options.shards)]):
        if answer[0] == b"stale":
            raise StaleDriver(view, epoch, int(answer[1]))
        if answer[0] == b"unready":
            raise StoreError("a shard was never begun: the store was emptied under the pipeline")


def read_times(shards: Shards, view: str) -> dict[Partition, tuple[int, int]]:
    """Return the running-maximum time applied of every source, with the offset that it holds up to."""
    found: dict[Partition, tuple[int, int]] = {}
    for answer in shards.run_all(
        [(s, ("HGETALL", shards.keys.times(s, view))) for s in range(shards.options.shards)],
    ):
        for field, value in mapping(answer).items():
            source, known = Partition.parse(field.decode()), parse_mark_time(value)
            if source not in found or found[source][1] < known[1]:
                found[source] = known
    return found


def parse_mark_time(value: bytes) -> tuple[int, int]:
    """Read a running-maximum time and the mark that it was stored with."""
    time_ms, _, mark = value.partition(b" ")
    return int(time_ms), int(mark or -1)


def read_counts(shards: Shards, view: str) -> dict[str, int]:
    """Return the view's counters, added up over all shards: in, stored, dead, skipped:<reason>."""
    totals: dict[str, int] = {}
    for answer in shards.run_all([(s, ("HGETALL", shards.keys.counts(s, view))) for s in range(shards.options.shards)]):
        for field, n in mapping(answer).items():
            totals[field.decode()] = totals.get(field.decode(), 0) + int(n)
    return totals


def conserved(counts: Mapping[str, int]) -> int:
    """Return in − (stored + skipped + dead): 0 when no record is under way and none was lost."""
    out = sum(n for field, n in counts.items() if field in ("stored", "dead") or field.startswith("skipped:"))
    return counts.get("in", 0) - out


class Adopted(NamedTuple):
    """A topic's name as the drivers know it; nothing is known of one that none has met."""

    generation: int = 0
    topic_id: str = ""

    def of(self, topic_id: str) -> int:
        """Return the generation that a topic of this id has, or will get when a driver meets it."""
        return self.generation + (self.topic_id not in ("", topic_id))


UNKNOWN = Adopted()


def read_adopted(stored: bytes | None) -> Adopted:
    """Read what the store has under a topic's name."""
    if stored is None:
        return UNKNOWN
    generation, _, topic_id = stored.decode().partition(" ")
    return Adopted(int(generation), topic_id)


def read_all_adopted(answer: Any) -> dict[str, Adopted]:
    """Read what the store has of all topics that drivers have met."""
    return {name.decode(): read_adopted(stored) for name, stored in mapping(answer).items()}

"""Progress in Kafka, as each shard has it: marks, their times and counters; and the generations of topics.

A mark is the last offset of a partition that a shard has applied for a view. Invariant: the shard has everything of the
partition up to its mark, and nothing after it. A driver starts after the lowest mark; a shard that is ahead refuses
records that it has. Marks never expire.

A topic that was deleted and created again under the same name has new offsets. The function ``adopt`` raises its
generation when a driver first reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tailrace.errors import StaleDriver, StoreError
from tailrace.log.event import Partition
from tailrace.valkey.shards import Shards, mapping

NOTHING = -1
"""Mark of a partition of which nothing is applied."""
LONG_AGO = -(1 << 53), NOTHING
"""Time and mark of a partition of which nothing is applied."""
SCAN_PREFIX = b"~"
"""First byte of the fields that hold marks of scans; they are in the same hash as those of partitions."""


def read_marks(shards: Shards, view: str) -> list[dict[Partition, int]]:
    commands = [(s, ("HGETALL", shards.keys.marks(s, view))) for s in range(shards.options.shards)]
    return [parse_marks(answer) for answer in shards.run_all(commands)]


def parse_marks(answer: Any) -> dict[Partition, int]:
    """Read the answer to HGETALL of a shard's marks."""
    stored = mapping(answer)
    return {Partition.parse(field.decode()): int(mark) for field, mark in stored.items() if field[:1] != SCAN_PREFIX}


def lowest(marks: Sequence[Mapping[Partition, int]]) -> dict[Partition, int]:
    """Return the lowest mark over all shards, for each partition that any shard has a mark of."""
    partitions = set().union(*marks) if marks else set()
    return {partition: min(shard.get(partition, NOTHING) for shard in marks) for partition in partitions}


def advance(
    shards: Shards, view: str, epoch: int, ends: Mapping[Partition, int], times: Mapping[Partition, int] | None = None
) -> None:
    """Raise the marks of all shards to offsets up to which everything is applied, and their times if given.

    Only by the task that has applied it: a shard that had no record in them gets its mark from here.
    """
    if not ends:
        return
    times = times or {}
    pairs = [part for each, offset in ends.items() for part in (str(each), offset, times.get(each, ""))]
    for answer in shards.call_all([(s, "advance", (view, epoch, *pairs)) for s in range(shards.options.shards)]):
        if answer[0] == b"stale":
            raise StaleDriver(view, epoch, int(answer[1]))
        if answer[0] == b"unready":
            raise StoreError("a shard is not initialised: the store was emptied under the pipeline")


def read_times(shards: Shards, view: str) -> dict[Partition, tuple[int, int]]:
    """Return the running-maximum time of every partition, with the mark that it belongs to."""
    latest: dict[Partition, tuple[int, int]] = {}
    for answer in shards.run_all([(s, ("HGETALL", shards.keys.times(s, view))) for s in range(shards.options.shards)]):
        for field, value in mapping(answer).items():
            partition, time = Partition.parse(field.decode()), parse_mark_time(value)
            if partition not in latest or latest[partition][1] < time[1]:
                latest[partition] = time
    return latest


def parse_mark_time(value: bytes) -> tuple[int, int]:
    """Read a running-maximum time and its mark."""
    time_ms, _, mark = value.partition(b" ")
    return int(time_ms), int(mark or -1)


def read_counts(shards: Shards, view: str) -> dict[str, int]:
    """Return the counters of a view, summed over all shards: in, stored, dead, skipped:<reason>."""
    totals: Counter[str] = Counter()
    for answer in shards.run_all([(s, ("HGETALL", shards.keys.counts(s, view))) for s in range(shards.options.shards)]):
        totals.update({field.decode(): int(n) for field, n in mapping(answer).items()})
    return totals


def conserved(counts: Mapping[str, int]) -> int:
    """Return in − (stored + skipped + dead): 0 if no record is under way and none was lost."""
    out = sum(n for field, n in counts.items() if field in ("stored", "dead") or field.startswith("skipped:"))
    return counts.get("in", 0) - out


class TopicGeneration(NamedTuple):
    """Generation and Kafka id of the topic that has a name now; the defaults if no driver has read it yet."""

    generation: int = 0
    topic_id: str = ""

    def of(self, topic_id: str) -> int:
        """Return the generation that the topic with this id has, or will get when a driver first reads it."""
        return self.generation + (self.topic_id not in ("", topic_id))


UNKNOWN_TOPIC = TopicGeneration()


def read_generation(stored: bytes | None) -> TopicGeneration:
    """Read the value stored for a topic's name."""
    if stored is None:
        return UNKNOWN_TOPIC
    generation, _, topic_id = stored.decode().partition(" ")
    return TopicGeneration(int(generation), topic_id)


def read_generations(answer: Any) -> dict[str, TopicGeneration]:
    """Read the answer to HGETALL of the topics that drivers have read."""
    return {name.decode(): read_generation(stored) for name, stored in mapping(answer).items()}

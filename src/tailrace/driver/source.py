"""The source: which topics are read, from which offsets, and with which settings of Spark's Kafka reader.

Invariant: a start names every partition that matches, at the lowest mark of all views, clipped to what Kafka still has;
what was clipped is reported as a gap. One partition is read by one task, in order, committed records only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tailrace.config import Settings
from tailrace.kafka.broker import Topic, included_and_excluded
from tailrace.log.event import Source
from tailrace.valkey.marks import NOTHING

FETCH_BUDGET = 128 << 20
LEAST_FETCHED, MOST_FETCHED = 1 << 20, 16 << 20
"""What one consumer fetches ahead; a larger record is fetched all the same."""


class LostRange(msgspec.Struct, frozen=True):
    """Offsets that were not applied before Kafka dropped them: from ``first`` up to, not including, ``until``."""

    source: str
    first: int
    until: int


def starting_offsets(
    topics: Iterable[Topic],
    generations: Mapping[str, int],
    bounds: Mapping[tuple[str, int], tuple[int, int]],
    marks: Sequence[Mapping[Source, int]],
) -> tuple[dict[str, dict[str, int]], list[LostRange]]:
    """Return where each partition is read from, and the ranges that Kafka no longer has.

    ``marks`` has, for each view, the offset up to which all of its shards have applied each source. A source that a
    view does not know begins at the earliest record; there is no gap before it.
    """
    starts: dict[str, dict[str, int]] = {}
    lost: list[LostRange] = []
    for topic in topics:
        for partition in topic.partitions:
            if (topic.name, partition) not in bounds:
                continue
            first, end = bounds[topic.name, partition]
            source = Source(topic.name, partition, generations[topic.name])
            start = min((view.get(source, NOTHING) for view in marks), default=NOTHING) + 1
            known = [view[source] for view in marks if source in view]
            if known and min(known) + 1 < first:
                lost.append(LostRange(str(source), min(known) + 1, first))
            if start > max(end, first):
                # Kafka lost its own tail and gives these offsets out again: what it had under them stays in the views.
                lost.append(LostRange(str(source), max(end, first), start))
            starts.setdefault(topic.name, {})[str(partition)] = min(max(start, first), max(end, first))
    return starts, lost


def partitions_of(starts: Mapping[str, Mapping[str, int]]) -> int:
    """Return how many partitions are read from the start."""
    return sum(map(len, starts.values()))


def reader_options(
    settings: Settings, starts: Mapping[str, Mapping[str, int]], partitions: int | None = None
) -> dict[str, str]:
    """Return the options of Spark's Kafka reader, tuned: three times the rate of the defaults, and a short wait.

    Spark keeps a consumer for every partition, each with what it fetched ahead: they share a budget, since those of
    several queries, with 16 MiB each, have filled a heap of 1 GiB.
    """
    wanted, excluded = included_and_excluded(settings)
    consumers = max(1, partitions if partitions is not None else partitions_of(starts))
    fetch_bytes = min(MOST_FETCHED, max(LEAST_FETCHED, FETCH_BUDGET // consumers))
    extra = {f"kafka.{name}": value for name, value in settings.kafka.properties.items()}
    return {
        "kafka.bootstrap.servers": settings.kafka.bootstrap,
        "subscribePattern": f"^(?!(?:{excluded})$){wanted}$",
        "startingOffsets": json.dumps(starts) if starts else "earliest",
        "failOnDataLoss": "false",
        "includeHeaders": "true",
        # A broker that is away, or a partition that is gone, ends the task and so the query, which then starts again.
        "kafkaConsumer.pollTimeoutMs": "20000",
        "kafka.request.timeout.ms": "10000",
        "kafka.default.api.timeout.ms": "15000",
        "maxOffsetsPerTrigger": str(settings.spark.max_records),
        "kafka.isolation.level": "read_committed",
        "kafka.max.poll.records": str(min(20_000, max(500, 100_000 // consumers))),
        "kafka.max.partition.fetch.bytes": str(fetch_bytes),
        "kafka.fetch.max.bytes": str(fetch_bytes),
        "kafka.fetch.max.wait.ms": "10",
        **extra,
    }

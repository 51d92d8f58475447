"""The source: which topics are read, from which offsets, and with which settings of Spark's Kafka reader.

Invariant: a start names every partition that matches, at the lowest mark of all views, clipped to what Kafka still has;
what was clipped is reported as a gap. One partition is read by one task, in order, committed records only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import re2
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from tailrace.config import Settings
from tailrace.errors import BrokerUnavailable, ConfigError
from tailrace.model.event import Source
from tailrace.stores.marks import NOTHING

ANSWER_S = 3.0
"""How long the broker has to answer the driver, which does nothing else meanwhile."""

FETCH_BUDGET = 128 << 20
LEAST_FETCHED, MOST_FETCHED = 1 << 20, 16 << 20
"""What one consumer fetches ahead; a larger record is fetched all the same."""


class Topic(msgspec.Struct, frozen=True):
    """A topic as the broker describes it; another id under the same name is another topic."""

    name: str
    id: str
    partitions: tuple[int, ...]


class LostRange(msgspec.Struct, frozen=True):
    """Offsets that were not applied before Kafka dropped them: from ``first`` up to, not including, ``until``."""

    source: str
    first: int
    until: int


class Broker:
    """What the driver asks Kafka: topics with their ids, and the ends of their partitions."""

    def __init__(self, settings: Settings) -> None:
        try:
            self._admin = AdminClient(client_properties(settings) | {"socket.timeout.ms": 10_000})
        except KafkaException as error:
            raise ConfigError(f"kafka.properties or kafka.bootstrap: {error.args[0].str()}") from error
        self._included = topic_pattern(settings)

    def topics(self) -> dict[str, Topic]:
        """Return the topics that the pipeline reads."""
        try:
            listed = self._admin.list_topics(timeout=ANSWER_S).topics
            names = [name for name in listed if self._included.fullmatch(name)]
            if not names:
                return {}
            answers = self._admin.describe_topics(TopicCollection(names), request_timeout=ANSWER_S)
            return {name: topic for name, answer in answers.items() if (topic := _described(name, answer)) is not None}
        except KafkaException as error:
            raise BrokerUnavailable(f"kafka does not answer: {error}; is kafka.bootstrap right?") from error

    def bounds(self, topics: Iterable[Topic]) -> dict[tuple[str, int], tuple[int, int]]:
        """Return the earliest offset and the end of every partition."""
        wanted = [TopicPartition(topic.name, p) for topic in topics for p in topic.partitions]
        if not wanted:
            return {}
        try:
            firsts = self._offsets(wanted, OffsetSpec.earliest())
            ends = self._offsets(wanted, OffsetSpec.latest())
        except KafkaException as error:
            raise BrokerUnavailable(f"kafka does not list offsets: {error}") from error
        return {place: (firsts[place], ends[place]) for place in firsts if place in ends}

    def ends(self, topics: Iterable[Topic]) -> dict[tuple[str, int], int]:
        """Return the end of every partition."""
        wanted = [TopicPartition(topic.name, p) for topic in topics for p in topic.partitions]
        if not wanted:
            return {}
        try:
            return self._offsets(wanted, OffsetSpec.latest())
        except KafkaException as error:
            raise BrokerUnavailable(f"kafka does not list offsets: {error}") from error

    def _offsets(self, wanted: Sequence[TopicPartition], spec: OffsetSpec) -> dict[tuple[str, int], int]:
        answers = self._admin.list_offsets(
            dict.fromkeys(wanted, spec), isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=ANSWER_S
        )
        return {(tp.topic, tp.partition): future.result().offset for tp, future in answers.items()}


def _described(name: str, answer: Any) -> Topic | None:
    try:
        described = answer.result()
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return None  # deleted between the two calls
        raise
    return Topic(name, str(described.topic_id), tuple(sorted(p.id for p in described.partitions)))


def client_properties(settings: Settings) -> dict[str, Any]:
    """Return the properties of the driver's own Kafka clients. What their library would print, we raise or log."""
    return {"log_level": 2, **settings.kafka.client()}


def included_and_excluded(settings: Settings) -> tuple[str, str]:
    """Return two regular expressions: the topics wanted, and those never read (our own and the configured ones).

    Folded events are read, whatever the topics are, since their feed is a day stream. Events that a rule passes on are
    not: they are in their streams already.
    """
    topics, rules = settings.kafka.topics, settings.folds.rules
    listed = (topics,) if isinstance(topics, str) else tuple(map(re.escape, topics))
    wanted = "|".join((*(f"(?:{each})" for each in listed), *(re.escape(rules.output(name)) for name in rules)))
    passed_on = (fold.raw for fold in rules.values() if fold.raw)
    own = map(re.escape, (settings.kafka.dead_letters, settings.kafka.positions, *passed_on))
    return f"(?:{wanted})", "|".join(f"(?:{pattern})" for pattern in (*own, *settings.kafka.exclude))


class TopicPattern:
    """The topics that the pipeline reads, by name."""

    def __init__(self, wanted: str, excluded: str) -> None:
        options = re2.Options()
        options.log_errors = False
        try:
            self._wanted, self._excluded = re2.compile(wanted, options), re2.compile(excluded, options)
        except re2.error as error:
            raise ConfigError(f"kafka.topics or kafka.exclude is no regular expression (RE2): {error}") from None

    def fullmatch(self, name: str) -> bool:
        """Return whether a topic is read."""
        return bool(self._wanted.fullmatch(name)) and not self._excluded.fullmatch(name)


def topic_pattern(settings: Settings) -> TopicPattern:
    """Return the pattern of the topics that the pipeline reads."""
    return TopicPattern(*included_and_excluded(settings))


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

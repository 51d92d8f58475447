"""The broker as everybody asks it: which topics the pipeline reads, with their ids, and where their partitions end."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import re2
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from tailrace.config.settings import Settings
from tailrace.errors import BrokerUnavailable, ConfigError

ANSWER_S = 3.0
"""How long the broker has to answer whoever asks; the driver does nothing else meanwhile."""
NEW_TOPIC_S = 2.0
"""How long a partition is waited for that was made a moment ago and has no leader yet."""

_NO_LEADER_YET = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE)


class Topic(msgspec.Struct, frozen=True):
    """A topic as the broker describes it; another id under the same name is another topic."""

    name: str
    id: str
    partitions: tuple[int, ...]


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

    def topic(self, name: str) -> Topic | None:
        """Return a topic as it is now, read by the pipeline or not."""
        try:
            answers = self._admin.describe_topics(TopicCollection([name]), request_timeout=ANSWER_S)
            return _described(name, answers[name])
        except KafkaException as error:
            raise BrokerUnavailable(f"kafka does not describe {name!r}: {error}") from error

    def bounds(self, topics: Iterable[Topic]) -> dict[tuple[str, int], tuple[int, int]]:
        """Return the earliest offset and the end of every partition."""
        topics = list(topics)
        firsts, ends = self.firsts(topics), self.ends(topics)
        return {place: (firsts[place], ends[place]) for place in firsts if place in ends}

    def at_time(self, topics: Iterable[Topic], time_ms: int) -> dict[tuple[str, int], int]:
        """Return, for every partition, the first offset whose record has this time or a later one; else its end."""
        topics = list(topics)
        found, ends = self._offsets(topics, OffsetSpec.for_timestamp(max(0, time_ms))), self.ends(topics)
        return {place: offset if offset >= 0 else ends[place] for place, offset in found.items()}

    def firsts(self, topics: Iterable[Topic]) -> dict[tuple[str, int], int]:
        """Return the earliest offset of every partition; its end if it has no record."""
        return self._offsets(topics, OffsetSpec.earliest())

    def ends(self, topics: Iterable[Topic]) -> dict[tuple[str, int], int]:
        """Return the end of every partition."""
        return self._offsets(topics, OffsetSpec.latest())

    def _offsets(self, topics: Iterable[Topic], spec: OffsetSpec) -> dict[tuple[str, int], int]:
        wanted = [TopicPartition(topic.name, p) for topic in topics for p in topic.partitions]
        if not wanted:
            return {}
        until = time.monotonic() + NEW_TOPIC_S
        while True:
            try:
                answers = self._admin.list_offsets(
                    dict.fromkeys(wanted, spec), isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=ANSWER_S
                )
                return {(tp.topic, tp.partition): future.result().offset for tp, future in answers.items()}
            except KafkaException as error:
                if error.args[0].code() not in _NO_LEADER_YET or time.monotonic() > until:
                    raise BrokerUnavailable(f"kafka does not list offsets: {error}") from error
            time.sleep(0.1)


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


def reader_properties(properties: Mapping[str, Any], group: str, ahead_kib: int) -> dict[str, Any]:
    """Return the properties of a consumer that reads chosen offsets of committed records, and fetches little else."""
    return {
        **properties,
        "group.id": group,
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        # A fetch that finds nothing, at the end or of what was read before, is waited for by the next one.
        "fetch.wait.max.ms": 10,
        # What is fetched ahead of what was asked for is thrown away.
        "queued.max.messages.kbytes": ahead_kib,
        "fetch.queue.backoff.ms": 2,
    }


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

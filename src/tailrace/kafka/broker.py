"""Questions to the broker: topics, with their ids, the offsets of their partitions, and ranges of records.

``Broker`` asks and waits, for the driver and for upkeep; ``BrokerTopics`` asks in threads, for the service. Invariant:
an answer includes everything that was written before the request, since nobody shares a call to the broker that was
under way before.

``Records`` reads ranges of offsets in the service, with a small pool of consumers. Invariant: an idle consumer fetches
nothing, and one thread uses a consumer at a time. Only records of the requested range are returned; if Kafka has
dropped its beginning, the answer says where it begins. The client library's exceptions become BrokerUnavailable.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import re2
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec

from tailrace.config.settings import Settings
from tailrace.config.values import compile_pattern
from tailrace.errors import BrokerUnavailable, ConfigError, TopicNotFound, TopicNotRead
from tailrace.log.event import Partition
from tailrace.query.predicate import TopicFilter
from tailrace.valkey.marks import UNKNOWN_TOPIC, TopicGeneration, read_generations
from tailrace.valkey.shards import Nodes

ANSWER_S = 3.0
"""Time that the broker has to answer a request; the driver does nothing else meanwhile."""
NEW_TOPIC_S = 2.0
"""Time to wait for the leader of a partition that was just created."""
READERS = 2
"""Consumers of one purpose that read at the same time."""
MOST, MOST_BYTES = 500, 1 << 20
"""Approximate limits of one range that is read: records, and bytes of their values."""
PATIENCE_S = 5.0
"""Time for which a range's next records may fail to come."""
_NO_LEADER_YET = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE)


T = TypeVar("T")


class Topic(msgspec.Struct, frozen=True):
    """A topic as the broker describes it; a topic that was deleted and created again has another id."""

    name: str
    id: str
    partitions: tuple[int, ...]


class Broker:
    """An admin client for topics and offsets."""

    def __init__(self, settings: Settings) -> None:
        with settings_checked():
            self._admin = AdminClient(client_properties(settings) | {"socket.timeout.ms": 10_000})
        self._is_read = topic_test(settings)
        self._leaderless: set[tuple[str, int]] = set()
        """Partitions without a leader when the topics were last listed."""

    def topics(self) -> dict[str, Topic]:
        """Return the topics that the pipeline reads."""
        try:
            listed = self._admin.list_topics(timeout=ANSWER_S).topics
            names = [name for name in listed if self._is_read(name)]
            leaders = {(name, p.id): p.leader for name in names for p in listed[name].partitions.values()}
            self._leaderless = {each for each, leader in leaders.items() if leader < 0}
            if not names:
                return {}
            answers = self._admin.describe_topics(TopicCollection(names), request_timeout=ANSWER_S)
            return {name: topic for name, answer in answers.items() if (topic := _described(name, answer)) is not None}
        except KafkaException as error:
            raise BrokerUnavailable(f"kafka does not answer: {error}; is kafka.bootstrap right?") from error

    def led(self, topics: Iterable[Topic]) -> list[Topic]:
        """Return the topics without the partitions that had no leader when ``topics`` listed them.

        The broker answers no question about offsets in which one of those is.
        """
        return [
            msgspec.structs.replace(
                topic, partitions=tuple(p for p in topic.partitions if (topic.name, p) not in self._leaderless)
            )
            for topic in topics
        ]

    def topic(self, name: str) -> Topic | None:
        """Return a topic, whether or not the pipeline reads it; None if it does not exist."""
        try:
            answers = self._admin.describe_topics(TopicCollection([name]), request_timeout=ANSWER_S)
            return _described(name, answers[name])
        except KafkaException as error:
            raise BrokerUnavailable(f"kafka does not describe {name!r}: {error}") from error

    def compacted(self, topics: Iterable[str]) -> dict[str, str]:
        """Return the topics of which Kafka may drop single records, each with the reason to think so."""
        resources = {name: ConfigResource(ConfigResource.Type.TOPIC, name) for name in topics}
        if not resources:
            return {}
        found: dict[str, str] = {}
        answers = self._admin.describe_configs(list(resources.values()), request_timeout=ANSWER_S)
        for name, resource in resources.items():
            try:
                if "compact" in (answers[resource].result()["cleanup.policy"].value or ""):
                    found[name] = "Kafka compacts it"
            except KafkaException as error:
                found[name] = f"Kafka does not say whether it compacts it: {error.args[0].str()}"
        return found

    def bounds(self, topics: Iterable[Topic]) -> dict[tuple[str, int], tuple[int, int]]:
        """Return the earliest offset and the end of every partition."""
        topics = list(topics)
        firsts, ends = self.firsts(topics), self.ends(topics)
        return {each: (first, ends[each]) for each, first in firsts.items() if each in ends}

    def at_time(self, topics: Iterable[Topic], time_ms: int) -> dict[tuple[str, int], int]:
        """Return, for every partition, the first offset whose record has this time or a later one; else its end."""
        topics = list(topics)
        offsets, ends = self._offsets(topics, OffsetSpec.for_timestamp(max(0, time_ms))), self.ends(topics)
        return {each: offset if offset >= 0 else ends[each] for each, offset in offsets.items()}

    def firsts(self, topics: Iterable[Topic]) -> dict[tuple[str, int], int]:
        """Return the earliest offset of every partition; its end if it has no record."""
        return self._offsets(topics, OffsetSpec.earliest())

    def ends(self, topics: Iterable[Topic]) -> dict[tuple[str, int], int]:
        return self._offsets(topics, OffsetSpec.latest())

    def _offsets(self, topics: Iterable[Topic], spec: OffsetSpec) -> dict[tuple[str, int], int]:
        partitions = [TopicPartition(topic.name, p) for topic in topics for p in topic.partitions]
        if not partitions:
            return {}
        until = time.monotonic() + NEW_TOPIC_S
        while True:
            try:
                requests = dict.fromkeys(partitions, spec)
                answers = self._admin.list_offsets(
                    requests, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=ANSWER_S
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


@contextmanager
def settings_checked() -> Iterator[None]:
    """Raise ConfigError if a client cannot be made from the settings."""
    try:
        yield
    except KafkaException as error:
        raise ConfigError(f"kafka.properties or kafka.bootstrap: {error.args[0].str()}") from error


def client_properties(settings: Settings) -> dict[str, Any]:
    """Return the properties of our own Kafka clients; their library prints nothing, since we raise or log errors."""
    return {"log_level": 2, **settings.kafka.client()}


def reader_properties(properties: Mapping[str, Any], group: str, ahead_kib: int) -> dict[str, Any]:
    """Return the properties of a consumer that reads chosen offsets of committed records and fetches little else."""
    return {
        **properties,
        "group.id": group,
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        # The next fetch waits for one that found nothing, at the end of the partition or of an earlier assignment.
        "fetch.wait.max.ms": 10,
        # Records fetched ahead of the requested range are thrown away.
        "queued.max.messages.kbytes": ahead_kib,
        "fetch.queue.backoff.ms": 2,
    }


def topic_expressions(settings: Settings) -> tuple[str, str]:
    """Return two regular expressions: the topics to read, and the topics never to read (our own and the configured).

    Topics of folded events are always read, since their feed is a day stream. Topics of events that a rule passes on
    are not: those events are in their streams already.
    """
    topics, rules = settings.kafka.topics, settings.folds.rules
    listed = (topics,) if isinstance(topics, str) else tuple(map(re.escape, topics))
    wanted = "|".join((*(f"(?:{each})" for each in listed), *(re.escape(rules.output(name)) for name in rules)))
    passed_on = (fold.raw for fold in rules.values() if fold.raw)
    own = map(re.escape, (settings.kafka.dead_letters, settings.kafka.positions, *passed_on))
    return f"(?:{wanted})", "|".join(f"(?:{pattern})" for pattern in (*own, *settings.kafka.exclude))


def topic_test(settings: Settings) -> Callable[[str], bool]:
    """Return the test whether the pipeline reads a topic, given its name."""
    try:
        wanted, excluded = map(compile_pattern, topic_expressions(settings))
    except re2.error as error:
        raise ConfigError(f"kafka.topics or kafka.exclude is no regular expression (RE2): {error}") from None
    return lambda name: bool(wanted.fullmatch(name)) and not excluded.fullmatch(name)


class BrokerTopics:
    """Asks Kafka for topics and offsets, and the store for generations."""

    def __init__(self, settings: Settings, nodes: Nodes) -> None:
        self._settings, self._nodes = settings, nodes
        self._broker: Broker | None = None
        self._opening = asyncio.Lock()
        self._is_read = topic_test(settings)
        self._next: dict[Hashable, asyncio.Task[Any]] = {}
        self._under_way: dict[Hashable, asyncio.Task[Any]] = {}

    async def topics(self, wanted: TopicFilter, missing: str = "wait") -> list[Topic]:
        """Return the topics of a filter that exist.

        Raises:
            TopicNotRead: The pipeline does not read one of the names.
            TopicNotFound: One of the names does not exist, and ``missing`` is "fail".
        """
        for name in wanted.names:
            if not self._is_read(name):
                raise TopicNotRead(name)
        existing = await self._ask("topics", lambda broker: broker.topics())
        for name in wanted.names:
            if name not in existing and missing == "fail":
                raise TopicNotFound(f"no topic is called {name!r}: see the topics of the broker, or wait for it")
        return [topic for name, topic in existing.items() if name in wanted]

    async def ends(self, topics: list[Topic]) -> dict[str, int]:
        return await self._labelled("ends", topics, lambda broker: broker.ends(topics))

    async def at_time(self, topics: list[Topic], time_ms: int) -> dict[str, int]:
        """Return the first offset of each partition whose record has this time or a later one; else its end."""
        return await self._labelled(time_ms, topics, lambda broker: broker.at_time(topics, time_ms))

    async def generations(self) -> dict[str, TopicGeneration]:
        """Return the generation of every topic that the pipeline has ever read."""
        return read_generations(await self._nodes.read(0, "HGETALL", self._nodes.keys.topics()))

    async def is_current(self, partition: Partition) -> bool:
        """Return True if Kafka has this generation of the partition now."""
        generation, topic_id = (await self.generations()).get(partition.topic, UNKNOWN_TOPIC)
        if generation != partition.generation:
            return False
        # The pipeline may not have noticed yet that the topic was deleted, or created again.
        topic = await self._ask(("topic", partition.topic), lambda broker: broker.topic(partition.topic))
        return topic is not None and topic_id in ("", topic.id)

    async def _labelled(
        self, what: Hashable, topics: list[Topic], ask: Callable[[Broker], Mapping[tuple[str, int], int]]
    ) -> dict[str, int]:
        offsets = await self._ask((what, *((topic.name, topic.id, topic.partitions) for topic in topics)), ask)
        generations = await self.generations()
        labelled: dict[str, int] = {}
        for topic in topics:
            # The pipeline may not have noticed yet that a topic was created again: it will get the next generation.
            generation = generations.get(topic.name, UNKNOWN_TOPIC).of(topic.id)
            for partition in topic.partitions:
                if (topic.name, partition) in offsets:
                    labelled[str(Partition(topic.name, partition, generation))] = offsets[topic.name, partition]
        return labelled

    async def _ask(self, what: Hashable, ask: Callable[[Broker], T]) -> T:
        """Call the broker; requests for the same ``what`` that come during a call share the next one."""
        task = self._next.get(what)
        if task is None:
            task = self._next[what] = asyncio.create_task(self._ask_next(what, ask))
        answer: T = await asyncio.shield(task)
        return answer

    async def _ask_next(self, what: Hashable, ask: Callable[[Broker], T]) -> T:
        try:
            while (under_way := self._under_way.get(what)) is not None:
                await asyncio.wait([under_way])
        finally:
            task = self._next.pop(what)
        self._under_way[what] = task
        try:
            async with self._opening:
                if self._broker is None:
                    self._broker = await asyncio.to_thread(Broker, self._settings)
            return await asyncio.to_thread(ask, self._broker)
        finally:
            del self._under_way[what]


class RecordStretch(msgspec.Struct, frozen=True):
    """The first records of a requested range."""

    records: list[KafkaRecord]
    first: int
    """First offset that Kafka still has of the range: after the requested one if records were dropped."""
    reached: int
    """Offset up to which the records are complete."""


class KafkaRecord(msgspec.Struct, frozen=True, gc=False):
    """A record of Kafka, without its headers."""

    offset: int
    time_ms: int
    key: bytes | None
    value: bytes | None


def _read_range(consumer: Consumer, partition: Partition, first: int, last: int) -> RecordStretch:
    topic, number = partition.topic, partition.partition
    begins, ends = consumer.get_watermark_offsets(TopicPartition(topic, number, first), timeout=PATIENCE_S)
    first = max(first, begins)
    if first > last or first >= ends:
        return RecordStretch([], min(first, last + 1), last)
    consumer.assign([TopicPartition(topic, number, first)])
    records: list[KafkaRecord] = []
    size, silent, reached = 0, 0.0, first - 1
    while reached < last and len(records) < MOST and size < MOST_BYTES:
        messages = consumer.consume(min(100, last - reached), 0.5)
        silent = 0.0 if messages else silent + 0.5
        if silent >= PATIENCE_S:
            raise BrokerUnavailable(f"kafka sends nothing of {partition} from offset {reached + 1}")
        for message in messages:
            if (error := message.error()) is not None:
                if error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                return RecordStretch(records, first, last)
            offset: int = message.offset()  # type: ignore[assignment]
            if offset > last:
                return RecordStretch(records, first, last)
            value = message.value()
            records.append(KafkaRecord(offset, message.timestamp()[1], message.key(), value))
            size += len(value or b"")
            reached = offset
    return RecordStretch(records, first, reached)


class Consumers:
    """A pool of consumers for one purpose; ``ahead_kib`` is how much each may fetch ahead."""

    def __init__(self, properties: Mapping[str, Any], purpose: str, ahead_kib: int) -> None:
        self._properties = reader_properties(properties, f"tailrace-{purpose}", ahead_kib)
        self._purpose = purpose
        self._pool: ThreadPoolExecutor | None = None
        self._idle: list[Consumer] = []

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for consumer in self._idle:
            await asyncio.to_thread(consumer.close)

    async def run(self, work: Callable[[Consumer], T]) -> T:
        """Run ``work`` with a consumer, in a thread; BrokerUnavailable if Kafka does not answer."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READERS, self._purpose)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._run, work)

    def _run(self, work: Callable[[Consumer], T]) -> T:
        try:
            consumer = self._idle.pop()  # without a check before: another thread may take the last one in between
        except IndexError:
            consumer = Consumer(self._properties)
        try:
            return work(consumer)
        except KafkaException as error:
            raise BrokerUnavailable(f"kafka does not answer: {error}") from error
        finally:
            consumer.unassign()  # otherwise it continues to fetch
            self._idle.append(consumer)


class Records(Consumers):
    """Reads ranges of offsets, in threads."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        super().__init__(properties, "records", 1 << 10)

    async def read(self, partition: Partition, first: int, last: int) -> RecordStretch:
        """Return the records from one offset to another, both included, or the first ones of them."""
        return await self.run(lambda consumer: _read_range(consumer, partition, first, last))

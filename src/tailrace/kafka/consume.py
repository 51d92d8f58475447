"""Consumers that read chosen offsets: a few, used again and again, each by one thread at a time.

Invariant: a consumer that nobody uses fetches nothing. Driver exceptions do not leave: they are BrokerUnavailable.

Ranges of records as Kafka has them, for whoever reads a stretch of a partition again.

Invariant: what is returned lies in the range that was asked for; where Kafka no longer has its beginning, it is said
where it begins. Driver exceptions do not leave this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tailrace.errors import BrokerUnavailable
from tailrace.kafka.broker import reader_properties
from tailrace.log.event import Partition

READERS = 2
"""Consumers that read at the same time."""

Found = TypeVar("Found")


class Consumers:
    """The consumers of one purpose; ``ahead_kib`` is how much each may fetch before it is asked for."""

    def __init__(self, properties: Mapping[str, Any], purpose: str, ahead_kib: int) -> None:
        self._properties = reader_properties(properties, f"tailrace-{purpose}", ahead_kib)
        self._purpose = purpose
        self._pool: ThreadPoolExecutor | None = None
        self._idle: list[Consumer] = []

    async def close(self) -> None:
        """Let the broker go."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for consumer in self._idle:
            await asyncio.to_thread(consumer.close)

    async def run(self, work: Callable[[Consumer], Found]) -> Found:
        """Do some work with a consumer, in a thread.

        Raises:
            BrokerUnavailable: Kafka does not answer.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READERS, self._purpose)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._run, work)

    def _run(self, work: Callable[[Consumer], Found]) -> Found:
        try:
            consumer = self._idle.pop()  # not looked before: another thread may take the last one in between
        except IndexError:
            consumer = Consumer(self._properties)
        try:
            return work(consumer)
        except KafkaException as error:
            raise BrokerUnavailable(f"kafka does not answer: {error}") from error
        finally:
            consumer.unassign()  # else it goes on fetching for nobody
            self._idle.append(consumer)


MOST, MOST_BYTES = 500, 1 << 20
"""Records, and bytes of them, that are returned at once, about."""
PATIENCE_S = 5.0


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A record."""

    offset: int
    time_ms: int
    key: bytes | None
    value: bytes | None


class RecordStretch(msgspec.Struct, frozen=True):
    """Some records of a partition."""

    records: list[Stored]
    first: int
    """The first offset that Kafka could have returned: behind the one asked for if what was there is gone."""
    reached: int
    """Up to this offset everything that Kafka has of the range is among the records."""


class Records:
    """Reads ranges of partitions, in threads."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self._consumers = Consumers(properties, "records", 1 << 10)

    async def close(self) -> None:
        """Let the broker go."""
        await self._consumers.close()

    async def read(self, source: Partition, first: int, last: int) -> RecordStretch:
        """Return the records from one offset to another, or the first ones of them.

        Raises:
            BrokerUnavailable: Kafka does not answer.
        """
        return await self._consumers.run(lambda consumer: _stretch(consumer, source, first, last))


def _stretch(consumer: Consumer, source: Partition, first: int, last: int) -> RecordStretch:
    place = TopicPartition(source.topic, source.partition, first)
    begins, ends = consumer.get_watermark_offsets(place, timeout=PATIENCE_S)
    first = max(first, begins)
    if first > last or first >= ends:
        return RecordStretch([], min(first, last + 1), last)
    consumer.assign([TopicPartition(source.topic, source.partition, first)])
    found: list[Stored] = []
    size, silent, reached = 0, 0.0, first - 1
    while reached < last and len(found) < MOST and size < MOST_BYTES:
        messages = consumer.consume(min(100, last - reached), 0.5)
        silent = 0.0 if messages else silent + 0.5
        if silent >= PATIENCE_S:
            raise BrokerUnavailable(f"kafka sends nothing of {source} from offset {reached + 1}")
        for message in messages:
            if (error := message.error()) is not None:
                if error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                return RecordStretch(found, first, last)
            offset: int = message.offset()  # type: ignore[assignment]
            if offset > last:
                return RecordStretch(found, first, last)
            value = message.value()
            found.append(Stored(offset, message.timestamp()[1], message.key(), value))
            size += len(value or b"")
            reached = offset
    return RecordStretch(found, first, reached)

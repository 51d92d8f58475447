"""Reading ranges of offsets from Kafka in the service, with a small pool of consumers.

Invariant: an idle consumer fetches nothing, and one thread uses a consumer at a time. ``Records`` returns only records
of the requested range; if Kafka has dropped its beginning, the answer says where it begins. The client library's
exceptions become BrokerUnavailable.
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
MOST, MOST_BYTES = 500, 1 << 20
"""Approximate limits of one answer: records, and bytes of their values."""
PATIENCE_S = 5.0
Result = TypeVar("Result")


class Records:
    """Reads ranges of offsets, in threads."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self._consumers = Consumers(properties, "records", 1 << 10)

    async def close(self) -> None:
        """Disconnect from the broker."""
        await self._consumers.close()

    async def read(self, partition: Partition, first: int, last: int) -> RecordStretch:
        """Return the records from one offset to another, both included, or the first ones of them.

        Raises:
            BrokerUnavailable: Kafka does not answer.
        """
        return await self._consumers.run(lambda consumer: _read(consumer, partition, first, last))


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


def _read(consumer: Consumer, partition: Partition, first: int, last: int) -> RecordStretch:
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
        """Disconnect from the broker."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for consumer in self._idle:
            await asyncio.to_thread(consumer.close)

    async def run(self, work: Callable[[Consumer], Result]) -> Result:
        """Run ``work`` with a consumer, in a thread.

        Raises:
            BrokerUnavailable: Kafka does not answer.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READERS, self._purpose)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._run, work)

    def _run(self, work: Callable[[Consumer], Result]) -> Result:
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

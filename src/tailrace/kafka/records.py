"""Ranges of records as Kafka has them, for whoever reads a stretch of a partition again.

Invariant: what is returned lies in the range that was asked for; where Kafka no longer has its beginning, it is said
where it begins. Driver exceptions do not leave this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tailrace.errors import BrokerUnavailable
from tailrace.kafka.consume import Consumers
from tailrace.log.event import Source

MOST, MOST_BYTES = 500, 1 << 20
"""Records, and bytes of them, that are returned at once, about."""
PATIENCE_S = 5.0


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A record."""

    offset: int
    time_ms: int
    key: bytes | None
    value: bytes | None


class Stretch(msgspec.Struct, frozen=True):
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

    async def read(self, source: Source, first: int, last: int) -> Stretch:
        """Return the records from one offset to another, or the first ones of them.

        Raises:
            BrokerUnavailable: Kafka does not answer.
        """
        return await self._consumers.run(lambda consumer: _stretch(consumer, source, first, last))


def _stretch(consumer: Consumer, source: Source, first: int, last: int) -> Stretch:
    place = TopicPartition(source.topic, source.partition, first)
    begins, ends = consumer.get_watermark_offsets(place, timeout=PATIENCE_S)
    first = max(first, begins)
    if first > last or first >= ends:
        return Stretch([], min(first, last + 1), last)
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
                return Stretch(found, first, last)
            offset: int = message.offset()  # type: ignore[assignment]
            if offset > last:
                return Stretch(found, first, last)
            value = message.value()
            found.append(Stored(offset, message.timestamp()[1], message.key(), value))
            size += len(value or b"")
            reached = offset
    return Stretch(found, first, reached)

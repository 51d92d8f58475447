"""Ranges of offsets that a Spark task reads by itself, without Spark's Kafka reader.

Spark's reader costs about a second of one core to start, and brings every record through the JVM to Python, where most
are found not to match. Here a record that lacks what is looked for is never more than bytes.

Invariant: of a partition, the committed records from the first offset up to, not including, the last are read in order,
each once; those that Kafka no longer has are passed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tailrace.driver.slice import Slice
from tailrace.errors import BrokerUnavailable
from tailrace.kafka.broker import reader_properties
from tailrace.log.event import Partition

ROWS = 5_000
"""Records that are taken at once."""


WAIT_S = 0.1


SILENCE_S = 20.0
"""How long the broker may send nothing."""


SHORT_S = 10.0
"""How long a partition may be shorter than it was, as it may be while its leader changes, before it is believed."""


Passes = Callable[[bytes | None, bytes], bool]
"""Whether a record may match, by its key and its value."""


_idle: dict[str, Consumer] = {}
"""The consumer of this process, by its properties: the next task in it need not connect again."""


@contextmanager
def consumer_of(properties: Mapping[str, Any]) -> Iterator[Consumer]:
    """Lend the consumer of this process; one that something went wrong with is not used again."""
    key = repr(sorted(properties.items()))
    consumer = _idle.pop(key, None) or Consumer(
        # What is fetched beyond the end of a range is fetched for nobody.
        {**reader_properties(properties, "tailrace-scans", 8 << 10), "fetch.message.max.bytes": 2 << 20}
    )
    try:
        yield consumer
        consumer.unassign()
    except BaseException:
        consumer.close()
        raise
    for other in list(_idle):
        _idle.pop(other).close()
    _idle[key] = consumer


class RangeReader:
    """Reads what a task is given: of each partition, by its label, the first offset and the one behind the last."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self._properties = dict(properties)

    def __call__(
        self, part: Mapping[str, tuple[int, int]], passes: Passes | None
    ) -> Iterator[tuple[Slice | None, int]]:
        """Yield records that pass, if there are any, and how many bytes the keys and values of all have meanwhile.

        It is not looked yet whether records are poison.
        """
        with consumer_of(self._properties) as consumer:
            for label, (first, until) in part.items():
                yield from _read(consumer, Partition.parse(label), first, until, passes)


def shared_out(ranges: Mapping[str, tuple[int, int]], tasks: int) -> list[dict[str, tuple[int, int]]]:
    """Share ranges out to so many tasks at most: a partition belongs to one task, and all get about as much."""
    parts: list[dict[str, tuple[int, int]]] = [{} for _ in range(min(tasks, len(ranges)))]
    sizes = [0] * len(parts)
    for label, (first, until) in sorted(ranges.items(), key=lambda each: each[1][0] - each[1][1]):
        least = sizes.index(min(sizes))
        parts[least][label] = first, until
        sizes[least] += until - first
    return parts


def _read(
    consumer: Consumer, partition: Partition, first: int, until: int, passes: Passes | None
) -> Iterator[tuple[Slice | None, int]]:
    consumer.assign([TopicPartition(partition.topic, partition.partition, first)])
    reached, heard, short = first, time.monotonic(), None
    while reached < until:
        taken, size = list[Any](), 0
        messages = consumer.consume(min(ROWS, until - reached), WAIT_S)
        now = time.monotonic()
        heard = now if messages else heard
        for message in messages:
            if (error := message.error()) is not None:
                if error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                if message.offset() >= until:  # type: ignore[operator]
                    reached = until  # the last offsets have no records
                short = now if short is None else short
                continue
            offset: int = message.offset()  # type: ignore[assignment]
            if offset < reached:
                return  # the range lies beyond the end, so Kafka began at the start: it lost what it had there
            reached, short = offset + 1, None
            if offset >= until:
                break
            key, value = message.key(), message.value()
            size += (0 if key is None else len(key)) + (0 if value is None else len(value))
            if value is not None and (passes is None or passes(key, value)):
                taken.append(message)
        yield _slice(partition, taken) if taken else None, size
        if reached < until and short is not None and now - short >= SHORT_S:
            return
        if now - heard >= SILENCE_S:
            raise BrokerUnavailable(f"kafka sends nothing of {partition} from offset {reached}")


def _slice(partition: Partition, messages: list[Any]) -> Slice:
    headers = [message.headers() or [] for message in messages]
    return Slice(
        partition,
        [message.offset() for message in messages],
        [message.timestamp()[1] for message in messages],
        [message.key() for message in messages],
        [message.value() for message in messages],
        headers if any(headers) else None,
        {},
    )

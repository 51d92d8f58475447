"""Consumers that read chosen offsets: a few, used again and again, each by one thread at a time.

Invariant: a consumer that nobody uses fetches nothing. Driver exceptions do not leave: they are BrokerUnavailable.

Ranges of records as Kafka has them, for whoever reads a stretch of a partition again.

Invariant: what is returned lies in the range that was asked for; where Kafka no longer has its beginning, it is said
where it begins. Driver exceptions do not leave this file.

Ranges of offsets, read by a task itself.

Spark's own reader costs about a second of one core to begin with, and brings every record through the JVM to Python,
where most are found not to match. Here a record that lacks what is looked for is never more than bytes.

Invariant: what is read of a source are its committed records from the first offset up to, not including, the last, in
order and each once; those that Kafka no longer has are passed over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tailrace.driver.slice import Slice
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
    """Reads what a task is given: of each source, by its label, the first offset and the one behind the last."""

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
    """Return ranges as the parts of so many tasks, at most: each source is one task's, and all have about as much."""
    parts: list[dict[str, tuple[int, int]]] = [{} for _ in range(min(tasks, len(ranges)))]
    sizes = [0] * len(parts)
    for label, (first, until) in sorted(ranges.items(), key=lambda each: each[1][0] - each[1][1]):
        least = sizes.index(min(sizes))
        parts[least][label] = first, until
        sizes[least] += until - first
    return parts


def _read(
    consumer: Consumer, source: Partition, first: int, until: int, passes: Passes | None
) -> Iterator[tuple[Slice | None, int]]:
    consumer.assign([TopicPartition(source.topic, source.partition, first)])
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
        yield _slice(source, taken) if taken else None, size
        if reached < until and short is not None and now - short >= SHORT_S:
            return
        if now - heard >= SILENCE_S:
            raise BrokerUnavailable(f"kafka sends nothing of {source} from offset {reached}")


def _slice(source: Partition, messages: list[Any]) -> Slice:
    headers = [message.headers() or [] for message in messages]
    return Slice(
        source,
        [message.offset() for message in messages],
        [message.timestamp()[1] for message in messages],
        [message.key() for message in messages],
        [message.value() for message in messages],
        headers if any(headers) else None,
        {},
    )

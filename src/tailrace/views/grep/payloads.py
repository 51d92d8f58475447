"""The frames of matched records: from this process's memory, from the records that the pipeline keeps, or from Kafka.

Invariant: a record is returned under its own coordinates or not at all. For an offset that it no longer has, Kafka
returns the next record; for a topic that was created again, a record of the new topic. Both are detected here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tailrace.errors import BrokerUnavailable
from tailrace.kafka.broker import Consumers
from tailrace.log.event import Partition
from tailrace.log.run import Run, decode
from tailrace.valkey.shards import Nodes, mapping

FAR = 2_000
"""Distance in offsets from which seeking is better than reading on."""
READ_MESSAGES = 1_000
PATIENCE_S = 5.0
KEPT_ENTRIES = 64
"""Most runs of kept records to read at once."""


class Payloads:
    """Frames of records by their coordinates; records that several feeds want are fetched once."""

    def __init__(
        self, nodes: Nodes, properties: Mapping[str, Any], home: Callable[[Partition], int], memory_bytes: int
    ) -> None:
        self._nodes, self._home = nodes, home
        self._memory: dict[str, dict[int, bytes]] = {}
        self._order: deque[tuple[str, list[int], int]] = deque()
        """Frames that came into memory together, the oldest first: partition, offsets, and bytes."""
        self._size, self.memory_bytes = 0, memory_bytes
        self._locks: dict[str, asyncio.Lock] = {}
        self._consumers = Consumers(properties, "payloads", 4 << 10)

    async def close(self) -> None:
        await self._consumers.close()

    async def frames(
        self,
        partition: Partition,
        offsets: Sequence[int],
        shelf: str,
        is_current: Callable[[Partition], Awaitable[bool]],
        ahead: Callable[[], Iterable[int]] = tuple,
    ) -> Mapping[int, bytes]:
        """Return the frames of records of one partition by offset, without those that are gone.

        Args:
            offsets: In ascending order.
            shelf: The stream of kept records that may have them.
            is_current: Tells whether Kafka still has this generation of the partition.
            ahead: Returns the offsets that the caller will want next; they are fetched along.
        """
        label = str(partition)
        found = self._remembered(label, offsets)
        if len(found) == len(offsets):
            return found
        async with self._locks.setdefault(label, asyncio.Lock()):
            found = self._remembered(label, offsets)  # another feed may have fetched them meanwhile
            missing = [offset for offset in offsets if offset not in found]
            if not missing:
                return found
            frames = self._memory.get(label, {})
            wanted = {*missing, *(offset for offset in ahead() if offset not in frames)}
            # A scan may have kept records of a newer topic with this name; the live pipeline reads topics by id.
            if not shelf.startswith("~") or await is_current(partition):
                found |= await self._kept(partition, missing, wanted, shelf)
            missing = [offset for offset in missing if offset not in found]
            if missing and await is_current(partition):
                try:
                    fetched = await self._fetched(partition, sorted(offset for offset in wanted if offset not in found))
                except BrokerUnavailable:
                    if await is_current(partition):
                        raise
                    fetched = None  # the topic was deleted meanwhile
                # Asked again: if it is current now, it was current during the fetch.
                if fetched is not None and await is_current(partition):
                    found |= self._remember(partition, fetched, wanted)
        return found

    def _remembered(self, label: str, offsets: Sequence[int]) -> dict[int, bytes]:
        frames = self._memory.get(label)
        return {} if frames is None else {o: frame for o in offsets if (frame := frames.get(o)) is not None}

    async def _kept(
        self, partition: Partition, offsets: Sequence[int], wanted: set[int], shelf: str
    ) -> dict[int, bytes]:
        """Read kept records. The id of a run is its last offset."""
        shard = self._home(partition)
        key = self._nodes.keys.kept(shard, shelf)
        found: dict[int, bytes] = {}
        after, count = offsets[0], 1
        while after <= offsets[-1]:
            entries = await self._nodes.read(shard, "XRANGE", key, f"{after}-0", "+", "COUNT", count)
            for _, fields in entries:
                run = decode(mapping(fields)[b"r"])
                # Live records matched some search, and feeds of other searches will want the rest of the run.
                found |= self._remember(partition, run, None if shelf == str(partition) else wanted)
            if len(entries) < count:
                break
            after = int(entries[-1][0].partition(b"-")[0]) + 1
            count = min(2 * count, KEPT_ENTRIES)  # runs may be small
        return found

    def _remember(self, partition: Partition, run: Run, wanted: set[int] | None) -> dict[int, bytes]:
        """Put the wanted frames of a run, or all, into memory, and return them."""
        label = str(partition)
        found = dict(zip(run.offsets, run.frames(0), strict=True))
        if wanted is not None:
            found = {offset: frame for offset, frame in found.items() if offset in wanted}
        memory = self._memory.setdefault(label, {})
        new = {offset: frame for offset, frame in found.items() if offset not in memory}
        if new:
            size = sum(map(len, new.values()))
            memory.update(new)
            self._order.append((label, list(new), size))
            self._size += size
        while self._size > self.memory_bytes and self._order:
            self._forget(*self._order.popleft())
        return found

    def _forget(self, label: str, offsets: Sequence[int], size: int) -> None:
        self._size -= size
        memory = self._memory[label]
        for offset in offsets:
            del memory[offset]
        if not memory:
            del self._memory[label]

    async def _fetched(self, partition: Partition, offsets: Sequence[int]) -> Run | None:
        found = await self._consumers.run(lambda consumer: _messages(consumer, partition, offsets))
        if not found:
            return None
        headers = [message.headers() or [] for message in found]
        return Run.of(
            partition,
            [message.offset() for message in found],
            [message.timestamp()[1] for message in found],
            [message.key() for message in found],
            headers if any(headers) else None,
            [message.value() or b"null" for message in found],
        )


def _messages(consumer: Consumer, partition: Partition, offsets: Sequence[int]) -> list[Any]:
    """Read messages forwards up to the last offset; read over short distances and seek over long ones."""
    found: list[Any] = []
    at, silent, short = 0, 0.0, None
    consumer.assign([TopicPartition(partition.topic, partition.partition, offsets[0])])
    reached = offsets[0]
    while at < len(offsets):
        messages = consumer.consume(min(READ_MESSAGES, max(1, offsets[-1] - reached + 1)), 0.5)
        silent = 0.0 if messages else silent + 0.5
        if silent >= PATIENCE_S:
            raise BrokerUnavailable(f"kafka sends nothing of {partition} from offset {offsets[at]}")
        for message in messages:
            if (error := message.error()) is not None:
                if error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                now = time.monotonic()
                short = now if short is None else short
                # The rest was dropped; unless the end lies before it, as it may for a while after a failover.
                if message.offset() > offsets[-1] or now - short >= PATIENCE_S:  # type: ignore[operator]
                    return found
                continue
            offset: int = message.offset()  # type: ignore[assignment]
            if offset < reached:
                return found  # the offset lies beyond the end, so Kafka began at the start
            reached = offset + 1
            while at < len(offsets) and offsets[at] < offset:
                at += 1  # dropped by compaction, or expired
            if at < len(offsets) and offsets[at] == offset:
                found.append(message)
                at += 1
        if at < len(offsets) and offsets[at] - reached > FAR:
            consumer.assign([TopicPartition(partition.topic, partition.partition, offsets[at])])
            reached = offsets[at]
    return found

"""What matched records say: from this process's memory, from what the pipeline kept of them, or from Kafka.

Invariant: a record is answered under its own coordinates or not at all. Kafka answers a question for an offset that it
no longer has with the next one, and for a topic that was created again with another record: both are told apart.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tailrace.errors import BrokerUnavailable
from tailrace.kafka.consume import Consumers
from tailrace.log.event import Partition
from tailrace.log.run import Run, decode
from tailrace.valkey.nodes import Nodes
from tailrace.valkey.shards import mapping

FAR = 2_000
"""Offsets that are skipped by seeking rather than by reading."""
TAKEN = 1_000
PATIENCE_S = 5.0
KEPT_ENTRIES = 64
"""Runs of kept records that are read at once, at most."""


class Payloads:
    """Frames of records by their coordinates; what several readers want is fetched once."""

    def __init__(
        self, nodes: Nodes, properties: Mapping[str, Any], home: Callable[[Partition], int], memory_bytes: int
    ) -> None:
        self._nodes, self._home = nodes, home
        self._memory: dict[str, dict[int, bytes]] = {}
        self._order: deque[tuple[str, list[int], int]] = deque()
        """What came into memory together: of which source, which offsets, and how many bytes; the oldest first."""
        self._size, self.memory_bytes = 0, memory_bytes
        self._locks: dict[str, asyncio.Lock] = {}
        self._consumers = Consumers(properties, "payloads", 4 << 10)

    async def close(self) -> None:
        """Let the broker go."""
        await self._consumers.close()

    async def frames(
        self,
        source: Partition,
        offsets: Sequence[int],
        shelf: str,
        is_current: Callable[[Partition], Awaitable[bool]],
        ahead: Callable[[], Iterable[int]] = tuple,
    ) -> Mapping[int, bytes]:
        """Return the frames of records of one source, whose offsets rise; those that are gone are left out.

        ``shelf`` is where they may be kept; ``is_current`` tells whether Kafka has the source itself under its name;
        ``ahead`` which offsets the caller will ask for next: they are fetched together with what is missing.
        """
        label = str(source)
        found = self._remembered(label, offsets)
        if len(found) == len(offsets):
            return found
        async with self._locks.setdefault(label, asyncio.Lock()):
            found = self._remembered(label, offsets)  # who has waited finds what the other one fetched
            missing = [offset for offset in offsets if offset not in found]
            if not missing:
                return found
            known = self._memory.get(label, {})
            wanted = {*missing, *(offset for offset in ahead() if offset not in known)}
            # A scan may have read another topic by this name before it found out; what is live is read by its id.
            if not shelf.startswith("~") or await is_current(source):
                found |= await self._kept(source, missing, wanted, shelf)
            missing = [offset for offset in missing if offset not in found]
            if missing and await is_current(source):
                try:
                    fetched = await self._fetched(source, sorted(offset for offset in wanted if offset not in found))
                except BrokerUnavailable:
                    if await is_current(source):
                        raise
                    fetched = None  # it was deleted while it was read
                # Asked again: if it is what it was, then so it was meanwhile.
                if fetched is not None and await is_current(source):
                    found |= self._remember(source, fetched, wanted)
        return found

    def _remembered(self, label: str, offsets: Sequence[int]) -> dict[int, bytes]:
        known = self._memory.get(label)
        return {} if known is None else {o: frame for o in offsets if (frame := known.get(o)) is not None}

    async def _kept(self, source: Partition, offsets: Sequence[int], wanted: set[int], shelf: str) -> dict[int, bytes]:
        """Read what the pipeline kept. A run that holds an offset ends at it or behind it."""
        shard = self._home(source)
        key = self._nodes.keys.kept(shard, shelf)
        found: dict[int, bytes] = {}
        after, count = offsets[0], 1
        while after <= offsets[-1]:
            entries = await self._nodes.read(shard, "XRANGE", key, f"{after}-0", "+", "COUNT", count)
            for _, fields in entries:
                run = decode(mapping(fields)[b"r"])
                # What is kept live matched some search: those who follow the others ask for the rest of it.
                found |= self._remember(source, run, None if shelf == str(source) else wanted)
            if len(entries) < count:
                break
            after = int(entries[-1][0].partition(b"-")[0]) + 1
            count = min(2 * count, KEPT_ENTRIES)  # runs may be small, or hold more than is wanted
        return found

    def _remember(self, source: Partition, run: Run, wanted: set[int] | None) -> dict[int, bytes]:
        """Hold what is wanted of a run, or all of it, in memory, and return it."""
        label = str(source)
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

    async def _fetched(self, source: Partition, offsets: Sequence[int]) -> Run | None:
        found = await self._consumers.run(lambda consumer: _messages(consumer, source, offsets))
        if not found:
            return None
        headers = [message.headers() or [] for message in found]
        return Run.of(
            source,
            [message.offset() for message in found],
            [message.timestamp()[1] for message in found],
            [message.key() for message in found],
            headers if any(headers) else None,
            [message.value() or b"null" for message in found],
        )


def _messages(consumer: Consumer, source: Partition, offsets: Sequence[int]) -> list[Any]:
    """Read forwards, over near offsets that are not wanted and around far ones, until the last one is passed."""
    found: list[Any] = []
    at, silent, short = 0, 0.0, None
    consumer.assign([TopicPartition(source.topic, source.partition, offsets[0])])
    reached = offsets[0]
    while at < len(offsets):
        messages = consumer.consume(min(TAKEN, max(1, offsets[-1] - reached + 1)), 0.5)
        silent = 0.0 if messages else silent + 0.5
        if silent >= PATIENCE_S:
            raise BrokerUnavailable(f"kafka sends nothing of {source} from offset {offsets[at]}")
        for message in messages:
            if (error := message.error()) is not None:
                if error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                now = time.monotonic()
                short = now if short is None else short
                # What is left was dropped; unless the end lies before it, as it may for a while after a failover.
                if message.offset() > offsets[-1] or now - short >= PATIENCE_S:  # type: ignore[operator]
                    return found
                continue
            offset: int = message.offset()  # type: ignore[assignment]
            if offset < reached:
                return found  # what was asked for lies beyond the end, so Kafka began at the start
            reached = offset + 1
            while at < len(offsets) and offsets[at] < offset:
                at += 1  # dropped by compaction, or expired
            if at < len(offsets) and offsets[at] == offset:
                found.append(message)
                at += 1
        if at < len(offsets) and offsets[at] - reached > FAR:
            consumer.assign([TopicPartition(source.topic, source.partition, offsets[at])])
            reached = offsets[at]
    return found

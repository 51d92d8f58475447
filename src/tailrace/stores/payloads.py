"""What matched records say: from this process's memory, from what the pipeline kept of them, or from Kafka.

Invariant: a record is answered under its own coordinates or not at all. Kafka answers a question for an offset that it
no longer has with the next one, and for a topic that was created again with another record: both are told apart.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tailrace.errors import BrokerUnavailable
from tailrace.model.event import Source
from tailrace.model.run import Run, decode
from tailrace.stores.nodes import Nodes
from tailrace.stores.valkey import mapping

READERS = 2
"""Consumers that fetch records at the same time."""
FAR = 2_000
"""Offsets that are skipped by seeking rather than by reading."""
TAKEN = 1_000
PATIENCE_S = 5.0
KEPT_ENTRIES = 64
"""Runs of kept records that are read at once, at most."""


class Payloads:
    """Frames of records by their coordinates; what several readers want is fetched once."""

    def __init__(
        self, nodes: Nodes, properties: Mapping[str, Any], home: Callable[[Source], int], memory_bytes: int
    ) -> None:
        self._nodes, self._properties, self._home = nodes, dict(properties), home
        self._memory: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._size, self._most = 0, memory_bytes
        self._locks: dict[str, asyncio.Lock] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._idle: list[Consumer] = []

    async def close(self) -> None:
        """Let the broker go."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for consumer in self._idle:
            await asyncio.to_thread(consumer.close)

    async def frames(
        self, source: Source, offsets: Sequence[int], shelf: str, is_current: Callable[[Source], Awaitable[bool]]
    ) -> dict[int, bytes]:
        """Return the frames of records of one source, whose offsets rise; those that are gone are left out.

        ``shelf`` is where they may be kept; ``is_current`` tells whether Kafka has the source itself under its name.
        """
        label = str(source)
        lock = self._locks.setdefault(label, asyncio.Lock())
        async with lock:  # who waits finds in memory what the other one fetched
            found = {o: frame for o in offsets if (frame := self._memory.get((label, o))) is not None}
            missing = [offset for offset in offsets if offset not in found]
            if missing:
                found |= await self._kept(source, missing, shelf)
                missing = [offset for offset in missing if offset not in found]
            if missing and await is_current(source):
                fetched = await self._fetched(source, missing)
                # Asked again: if it is what it was, then so it was meanwhile.
                if fetched is not None and await is_current(source):
                    found |= self._remember(source, fetched, set(missing))
        return found

    async def _kept(self, source: Source, offsets: Sequence[int], shelf: str) -> dict[int, bytes]:
        """Read what the pipeline kept. A run that holds an offset ends at it or behind it."""
        shard, wanted = self._home(source), set(offsets)
        key = self._nodes.keys.kept(shard, shelf)
        found: dict[int, bytes] = {}
        after, count = offsets[0], 1
        while after <= offsets[-1]:
            entries = await self._nodes.read(shard, "XRANGE", key, f"{after}-0", "+", "COUNT", count)
            for _, fields in entries:
                run = decode(mapping(fields)[b"r"])
                found |= self._remember(source, run, wanted)
            if len(entries) < count:
                break
            after = int(entries[-1][0].partition(b"-")[0]) + 1
            count = min(2 * count, KEPT_ENTRIES)  # runs may be small, or hold more than is wanted
        return found

    def _remember(self, source: Source, run: Run, wanted: set[int]) -> dict[int, bytes]:
        label, found = str(source), dict[int, bytes]()
        for offset, frame in zip(run.offsets, run.frames(0), strict=True):
            if offset in wanted:
                found[offset] = frame
                if (label, offset) not in self._memory:
                    self._memory[label, offset] = frame
                    self._size += len(frame)
        while self._size > self._most and self._memory:
            self._size -= len(self._memory.popitem(last=False)[1])
        return found

    async def _fetched(self, source: Source, offsets: Sequence[int]) -> Run | None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READERS, "payloads")
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._read, source, offsets)

    def _read(self, source: Source, offsets: Sequence[int]) -> Run | None:
        """Read records from Kafka, in a thread."""
        consumer = (
            self._idle.pop()
            if self._idle
            else Consumer(
                {
                    **self._properties,
                    "group.id": "tailrace-payloads",
                    "enable.auto.commit": False,
                    "enable.partition.eof": True,
                    "auto.offset.reset": "earliest",
                    "isolation.level": "read_committed",
                    # A fetch that finds nothing, at the end or of what was read before, is waited for by the next one.
                    "fetch.wait.max.ms": 10,
                }
            )
        )
        try:
            found = _messages(consumer, source, offsets)
        except KafkaException as error:
            raise BrokerUnavailable(f"kafka does not answer: {error}") from error
        finally:
            consumer.unassign()  # else it goes on fetching for nobody
            self._idle.append(consumer)
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


def _messages(consumer: Consumer, source: Source, offsets: Sequence[int]) -> list[Any]:
    """Read forwards, over near offsets that are not wanted and around far ones, until the last one is passed."""
    found: list[Any] = []
    at, silent = 0, 0.0
    consumer.assign([TopicPartition(source.topic, source.partition, offsets[0])])
    reached = offsets[0]
    while at < len(offsets):
        messages = consumer.consume(min(TAKEN, max(1, offsets[-1] - reached + 1)), 0.5)
        silent = 0.0 if messages else silent + 0.5
        if silent >= PATIENCE_S:
            raise BrokerUnavailable(f"kafka sends nothing of {source} from offset {offsets[at]}")
        for message in messages:
            if (error := message.error()) is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    return found  # nothing behind: what is left was dropped
                raise KafkaException(error)
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

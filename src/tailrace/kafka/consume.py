"""Consumers that read chosen offsets: a few, used again and again, each by one thread at a time.

Invariant: a consumer that nobody uses fetches nothing. Driver exceptions do not leave: they are BrokerUnavailable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaException

from tailrace.errors import BrokerUnavailable
from tailrace.kafka.broker import reader_properties

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

"""Topics of a request and the offsets of their partitions, for the service: the broker is asked in threads.

Invariant: an answer includes everything that was written before the request, since nobody shares a call to the broker
that was under way before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from tailrace.config.settings import Settings
from tailrace.errors import TopicNotFound, TopicNotRead
from tailrace.kafka.broker import Broker, Topic, topic_pattern
from tailrace.log.event import Partition
from tailrace.query.predicate import TopicFilter
from tailrace.valkey.marks import UNKNOWN_TOPIC, TopicGeneration, read_generations
from tailrace.valkey.nodes import Nodes

T = TypeVar("T")


class BrokerTopics:
    """Asks Kafka for topics and offsets, and the store for generations."""

    def __init__(self, settings: Settings, nodes: Nodes) -> None:
        self._settings, self._nodes = settings, nodes
        self._broker: Broker | None = None
        self._opening = asyncio.Lock()
        self._read = topic_pattern(settings)
        self._next: dict[Hashable, asyncio.Task[Any]] = {}
        self._under_way: dict[Hashable, asyncio.Task[Any]] = {}

    async def topics(self, wanted: TopicFilter, missing: str = "wait") -> list[Topic]:
        """Return the topics of a filter that exist.

        Raises:
            TopicNotRead: The pipeline does not read one of the names.
            TopicNotFound: One of the names does not exist, and ``missing`` is "fail".
        """
        for name in wanted.names:
            if not self._read.fullmatch(name):
                raise TopicNotRead(name)
        existing = await self._ask("topics", lambda broker: broker.topics())
        for name in wanted.names:
            if name not in existing and missing == "fail":
                raise TopicNotFound(f"no topic is called {name!r}: see the topics of the broker, or wait for it")
        return [topic for name, topic in existing.items() if name in wanted]

    async def ends(self, topics: list[Topic]) -> dict[str, int]:
        """Return the end of each partition."""
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

"""Which topics are meant, and what Kafka has of them now, asked without blocking the event loop.

Invariant of ``BrokerTopics``: nobody gets an answer that was under way before he asked, so what was written by then is
in it.
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
    """Asks Kafka, in threads, where topics begin and end, and the store for their generations."""

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
            TopicNotRead: A name is not among the topics that the pipeline reads.
            TopicNotFound: A name does not exist, and the caller would not wait.
        """
        for name in wanted.names:
            if not self._read.fullmatch(name):
                raise TopicNotRead(name)
        found = await self._ask("topics", lambda broker: broker.topics())
        for name in wanted.names:
            if name not in found and missing == "fail":
                raise TopicNotFound(f"no topic is called {name!r}: see the topics of the broker, or wait for it")
        return [topic for name, topic in found.items() if name in wanted]

    async def ends(self, topics: list[Topic]) -> dict[str, int]:
        """Return where each partition ends."""
        return await self._labelled("ends", topics, lambda broker: broker.ends(topics))

    async def at_time(self, topics: list[Topic], time_ms: int) -> dict[str, int]:
        """Return, for each partition, the offset behind which every record of this time, or a later one, is."""
        return await self._labelled(time_ms, topics, lambda broker: broker.at_time(topics, time_ms))

    async def adopted(self) -> dict[str, TopicGeneration]:
        """Return what the store knows of every topic that was ever read."""
        return read_generations(await self._nodes.read(0, "HGETALL", self._nodes.keys.topics()))

    async def is_current(self, partition: Partition) -> bool:
        """Return True if a partition is what Kafka has under its name now."""
        generation, topic_id = (await self.adopted()).get(partition.topic, UNKNOWN_TOPIC)
        if generation != partition.generation:
            return False
        # The pipeline may not have noticed yet that the topic was deleted, or created again.
        found = await self._ask(("topic", partition.topic), lambda broker: broker.topic(partition.topic))
        return found is not None and topic_id in ("", found.id)

    async def _labelled(
        self, what: Hashable, topics: list[Topic], ask: Callable[[Broker], Mapping[tuple[str, int], int]]
    ) -> dict[str, int]:
        offsets = await self._ask((what, *((topic.name, topic.id, topic.partitions) for topic in topics)), ask)
        known = await self.adopted()
        found: dict[str, int] = {}
        for topic in topics:
            # One that was created again, and that the pipeline has not noticed yet, gets the next generation.
            generation = known.get(topic.name, UNKNOWN_TOPIC).of(topic.id)
            for partition in topic.partitions:
                if (topic.name, partition) in offsets:
                    found[str(Partition(topic.name, partition, generation))] = offsets[topic.name, partition]
        return found

    async def _ask(self, what: Hashable, ask: Callable[[Broker], T]) -> T:
        """Ask the broker; those who ask ``what`` while it is being asked share the next answer.

        Nobody gets an answer that was under way before he asked: what was written by then is in it.
        """
        asked = self._next.get(what)
        if asked is None:
            asked = self._next[what] = asyncio.create_task(self._ask_next(what, ask))
        answer: T = await asyncio.shield(asked)
        return answer

    async def _ask_next(self, what: Hashable, ask: Callable[[Broker], T]) -> T:
        try:
            while (under_way := self._under_way.get(what)) is not None:
                await asyncio.wait([under_way])
        finally:
            asked = self._next.pop(what)
        self._under_way[what] = asked
        try:
            async with self._opening:
                if self._broker is None:
                    self._broker = await asyncio.to_thread(Broker, self._settings)
            return await asyncio.to_thread(ask, self._broker)
        finally:
            del self._under_way[what]

"""Folding with a sorted set, as it was first written down: one ZADD and one SADD per event, and a poller.

The score is the event's time, the member the group as JSON; the names of metrics are in a set beside it. The poller
takes what has been quiet with ZRANGEBYSCORE, reads the sets, publishes, then removes with ZREM and DEL.

It is treated kindly: commands go in pipelines of 500, values are decoded by a compiled decoder, the poller runs between
pipelines, so that none of its known races happen, and its clock is that of the partition which is furthest behind,
since by the wall clock all of a backlog would be due at once.

What it does not do: a longest wait (a group that never rests is never published); anything but names of metrics; a
restart repeats up to a pipeline of events and loses or repeats folds; two pollers publish twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import valkey
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from bench.peers.task import Watch, given

AT_ONCE = 500
POLL_S = 0.1
"""Seconds between two looks of the poller."""


class PostMetricUpdated(msgspec.Struct, frozen=True):
    """The event, as far as it is needed."""

    account_id: str
    metrics: dict[str, float]


_read = msgspec.json.Decoder(PostMetricUpdated).decode
_write = msgspec.json.Encoder().encode


class SortedSetFolder:
    """The algorithm: a sorted set of groups, and a set of metrics for each."""

    def __init__(self, url: str, prefix: str) -> None:
        self._store = valkey.Valkey.from_url(url)
        self._groups, self._metrics = f"{prefix}:groups", f"{prefix}:metrics:"
        self.new = 0
        """Number of times that ZADD answered 1."""

    def add(self, events: Sequence[tuple[bytes, int]]) -> None:
        """Add events with their times."""
        pipeline = self._store.pipeline(transaction=False)
        for value, at in events:
            event = _read(value)
            pipeline.execute_command("ZADD", self._groups, at, _write({"account_id": event.account_id}))
            pipeline.execute_command("SADD", self._metrics + event.account_id, *event.metrics)
        self.new += sum(pipeline.execute()[::2])

    def poll(self, until: float) -> list[bytes]:
        """Return the folded events of groups not heard of after a time; ``remove`` them once they are published."""
        due = self._store.execute_command("ZRANGEBYSCORE", self._groups, "-inf", until)
        self._due = [(group, msgspec.json.decode(group)["account_id"]) for group in due]
        if not due:
            return []
        pipeline = self._store.pipeline(transaction=False)
        for _, account in self._due:
            pipeline.execute_command("SMEMBERS", self._metrics + account)
        return [
            _write({"account_id": account, "metrics": [name.decode() for name in names]})
            for (_, account), names in zip(self._due, pipeline.execute(), strict=True)
        ]

    def remove(self) -> None:
        """Remove what the last poll returned."""
        pipeline = self._store.pipeline(transaction=False)
        for group, account in self._due:
            pipeline.execute_command("ZREM", self._groups, group)
            pipeline.execute_command("DEL", self._metrics + account)
        pipeline.execute()


class Clock:
    """The time that all partitions have come to."""

    def __init__(self, ends: dict[int, int]) -> None:
        self._ends = ends
        self._times = {p: float("-inf") for p, end in ends.items() if end}

    def see(self, message: Message) -> None:
        """Note a record: what comes after it in its partition is not older; after the last one nothing comes."""
        partition = message.partition() or 0
        if (message.offset() or 0) + 1 >= self._ends[partition]:
            self._times.pop(partition, None)
        else:
            self._times[partition] = message.timestamp()[1]

    def now(self) -> float:
        """Return it; infinite when all was read."""
        return min(self._times.values(), default=float("inf"))


def main() -> None:
    task = given()
    consumer = Consumer({"bootstrap.servers": task.bootstrap, "group.id": "seed", "enable.auto.commit": False})
    partitions = sorted(consumer.list_topics(task.topic, timeout=10).topics[task.topic].partitions)
    ends = {p: consumer.get_watermark_offsets(TopicPartition(task.topic, p), timeout=10)[1] for p in partitions}
    consumer.assign([TopicPartition(task.topic, p, 0) for p in partitions])
    producer = Producer({"bootstrap.servers": task.bootstrap, "linger.ms": 20})
    folder, clock, watch = SortedSetFolder(task.url, task.output), Clock(ends), Watch()
    polled = time.monotonic()
    while watch.events < task.events:
        messages = consumer.consume(AT_ONCE, timeout=1.0)
        watch.batch(len(messages), 0)
        for message in messages:
            clock.see(message)
        folder.add([(message.value() or b"", message.timestamp()[1]) for message in messages])
        if time.monotonic() - polled >= POLL_S or watch.events >= task.events:
            polled = time.monotonic()
            folded = folder.poll(clock.now() - task.quiet_ms)
            for value in folded:
                producer.produce(task.output, value)
            producer.flush()
            folder.remove()
            watch.batch(0, len(folded))
    watch.end()
    watch.tell()
    consumer.close()


if __name__ == "__main__":
    main()

"""Posts that are folded: a load, what Kafka then has of folds, and that each post is in exactly one."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from tailrace.valkey.marks import conserved
from tests.faults.rig import Installation, wait_for
from tests.views.folds.rig import Fold, FoldRig
from tests.writing import Record

PARTITIONS = 3
QUIET_MS = 2_000


class Posts:
    """A topic of posts, a rule of an installation that folds them, and what came of it."""

    def __init__(self, installation: Installation, name: str = "posts", topic: str = "", **rule: Any) -> None:
        self.installation, self.name = installation, name
        # Posts of long ago stay, too.
        kept = {"message.timestamp.type": "CreateTime", "retention.ms": "-1"}
        self.topic = topic or installation.topic(name, PARTITIONS, **kept)
        self.output = f"{installation.prefix}-folds-{name}"
        """No topic that the pipeline reads."""
        told = {"topics": [self.topic], "group": "account_id", "collect": {"posts": "set id"}, "output": self.output}
        self.rule = told | {"quiet": f"{QUIET_MS}ms"} | rule
        self.sent: list[Record] = []
        self._producer = Producer({"bootstrap.servers": installation.kafka.address, "log_level": 0})
        self._offsets = [0] * PARTITIONS

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Meanwhile, a dozen accounts post, and fall quiet, in a thread."""
        stopping, chance = threading.Event(), random.Random()

        def post() -> None:
            while not stopping.wait(chance.choice((0.05, 0.05, 0.4))):
                for partition in range(PARTITIONS):
                    self.send(f"account_{chance.randrange(12)}", partition=partition)
                self.flush()

        thread = threading.Thread(target=post, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join(90)
            assert not thread.is_alive()

    def send(self, account: str, time_ms: int | None = None, partition: int = 0) -> None:
        """Write one post, now or at a time."""
        at = time_ms if time_ms is not None else time.time_ns() // 1_000_000
        record = Record(
            offset=self._offsets[partition],
            value=json.dumps({"id": f"post_{partition}_{self._offsets[partition]}", "account_id": account}).encode(),
            time=at,
            partition=partition,
            topic=self.topic,
        )
        self._offsets[partition] += 1
        self.sent.append(record)
        self._producer.produce(self.topic, record.value, partition=partition, timestamp=at)

    def flush(self) -> None:
        assert self._producer.flush(60) == 0

    def published(self) -> list[dict[str, Any]]:
        """Return all folded events that are in Kafka."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.installation.kafka.address,
                "group.id": self.output,
                "isolation.level": "read_committed",
                "log_level": 0,
            }
        )
        try:
            if self.output not in consumer.list_topics(timeout=10).topics:
                return []
            place = TopicPartition(self.output, 0, 0)
            _, end = consumer.get_watermark_offsets(place, timeout=10)
            consumer.assign([place])
            found: list[dict[str, Any]] = []
            while end and consumer.position([place])[0].offset < end:
                message = consumer.poll(5.0)
                if message is None:
                    break
                if message.error() is None:
                    found.append(json.loads(message.value() or b""))
            return found
        finally:
            consumer.close()

    def taken(self) -> int:
        """Return how many posts the rule has been given."""
        return self.installation.counts("folds").get(f"input:{self.name}", 0)

    def wait_published(self) -> list[dict[str, Any]]:
        """Wait until every post that was sent is in a published fold."""
        wanted = len(self.sent)

        def enough() -> list[dict[str, Any]]:
            found = self.published()
            return found if sum(fold["count"] for fold in found) >= wanted else []

        try:
            found: list[dict[str, Any]] = wait_for(f"{wanted} posts in folds", enough, 120)
        except AssertionError as error:
            seen = sum(fold["count"] for fold in self.published())
            counts, said = self.installation.counts("folds"), self.installation.log()
            raise AssertionError(f"{error}; there were {seen}, counted {counts}. It said:\n{said}") from None
        return found

    def check(self) -> None:
        """Wait until all is published; then compare: each post in one fold, each fold once, and the books balance."""
        found = self.wait_published()
        wait_for("the books of folds to balance", lambda: conserved(self.installation.counts("folds")) == 0)
        ids = [fold["id"] for fold in found]
        assert len(ids) == len(set(ids)), "a fold was published twice"
        inputs = sorted(place for fold in folds_of(found) for place in fold.inputs)
        assert inputs == sorted((r.partition, r.offset) for r in self.sent)


def folds_of(found: list[dict[str, Any]]) -> list[Fold]:
    """Return published folds as tests compare them."""
    return sorted(map(FoldRig.read, found))

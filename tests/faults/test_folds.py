"""Folds through a real Kafka, Spark and Valkey: a driver that is killed, or was away, changes none of them."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.model.fold import Windows
from tailrace.stores.marks import conserved
from tests.faults.rig import Installation, Pipeline, wait_for
from tests.folds.rig import Fold, FoldRig, expected
from tests.writing import NOON, Record

PARTITIONS = 3
QUIET_MS = 2_000


class Posts:
    """A topic of posts in an installation whose rule folds them, and what came of it."""

    def __init__(self, kafka: EmbeddedKafka, url: str, folder: Path, topic: str = "", **rule: Any) -> None:
        self.installation = Installation(kafka, url, folder)
        self.topic = topic or self.installation.topic("posts", PARTITIONS, **{"message.timestamp.type": "CreateTime"})
        self.output = f"{self.installation.prefix}.folds"
        told = {"topics": [self.topic], "group": "account_id", "collect": {"posts": "set id"}, "output": self.output}
        self.rule = told | {"quiet": f"{QUIET_MS}ms"} | rule
        self.sent: list[Record] = []
        self._producer = Producer({"bootstrap.servers": kafka.address, "log_level": 0})
        self._offsets = [0] * PARTITIONS

    def pipeline(self, **changes: str) -> Pipeline:
        """Return a pipeline of its own for this topic."""
        given = {"folds__rules": json.dumps({"accounts": self.rule}), "kafka__topics": json.dumps([self.topic])}
        return Pipeline(self.installation, f"pipeline-{time.time_ns()}", **given | changes)

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
            raise AssertionError(f"{error}; there were {seen}. It said:\n{self.installation.log()}") from None
        return found


def _folds(found: list[dict[str, Any]]) -> list[Fold]:
    return sorted(map(FoldRig.read, found))


def _same(found: dict[str, Any]) -> dict[str, Any]:
    """A folded event without the time at which it was given out."""
    return {k: v for k, v in found.items() if k != "emitted"}


@pytest.fixture
def posts(kafka: EmbeddedKafka, valkey_server: EmbeddedValkey, tmp_path: Path) -> Posts:
    return Posts(kafka, valkey_server.url, tmp_path)


@pytest.mark.timeout(400)
def test_a_driver_that_is_killed_puts_every_event_into_exactly_one_fold(
    posts: Posts, pytestconfig: pytest.Config
) -> None:
    chance = random.Random(time.time_ns())
    kills = max(2, pytestconfig.getoption("--faults") // 2)
    for _ in range(kills):
        before = len(posts.published())
        with posts.pipeline(folds__begin="start") as pipeline:
            ends = time.monotonic() + chance.uniform(4, 7)
            while time.monotonic() < ends or len(posts.published()) == before:
                for partition in range(PARTITIONS):
                    posts.send(f"account_{chance.randrange(12)}", partition=partition)
                posts.flush()
                time.sleep(chance.choice((0.05, 0.05, 0.4)))
            pipeline.kill()
    with posts.pipeline(folds__begin="start"):
        found = posts.wait_published()
        wait_for("the books to balance", lambda: conserved(posts.installation.counts("folds")) == 0)
    ids = [fold["id"] for fold in found]
    assert len(ids) == len(set(ids)), "a fold was published twice"
    inputs = sorted(place for fold in _folds(found) for place in fold.inputs)
    assert inputs == sorted((r.partition, r.offset) for r in posts.sent)


@pytest.mark.timeout(300)
def test_a_pipeline_that_was_away_folds_as_if_it_had_not_been(posts: Posts) -> None:
    begin = time.time_ns() // 1_000_000 - 700_000
    with posts.pipeline(folds__begin="start"):
        posts.send("account_1", begin)
        posts.flush()
        wait_for("the first post", lambda: posts.installation.counts("folds").get("input:accounts"))
    # Ten minutes of bursts while nobody looks: every account falls quiet several times, over all partitions.
    for burst in range(1, 21):
        for i in range(12):
            at = begin + 30_000 * burst + 150 * i
            posts.send(f"account_{(burst + i) % 4}", at, partition=i % PARTITIONS)
    posts.flush()
    with posts.pipeline(folds__begin="start"):
        found = posts.wait_published()
    assert _folds(found) == expected(posts.sent, Windows(QUIET_MS, 10 * QUIET_MS))


@pytest.mark.timeout(300)
def test_history_folded_again_gives_the_folds_that_were_live(
    kafka: EmbeddedKafka, valkey_server: EmbeddedValkey, tmp_path: Path
) -> None:
    rule = {"clock": "event", "quiet": "1s"}
    live = Posts(kafka, valkey_server.url, tmp_path / "live", **rule)
    chance = random.Random(3)
    with live.pipeline():
        at = NOON
        for i in range(60):
            at += chance.choice((50, 50, 100, 400, 1_500, 4_000))
            live.send(f"account_{chance.randrange(3)}", at, partition=0)
            if i % 5 == 4:
                live.flush()
                time.sleep(0.2)
        live.flush()
        was_live = live.wait_published()
    again = Posts(kafka, valkey_server.url, tmp_path / "again", live.topic, **rule)
    again.sent = live.sent
    with again.pipeline(folds__begin="start"):
        was_history = again.wait_published()
    by_id = {fold["id"]: _same(fold) for fold in was_history}
    assert by_id == {fold["id"]: _same(fold) for fold in was_live}
    assert _folds(was_live) == expected(live.sent, Windows(1_000, 10_000))


@pytest.mark.timeout(300)
def test_windows_change_while_it_runs_and_a_rule_that_goes_gives_out_what_it_held(posts: Posts) -> None:
    posts.rule["quiet"] = "1h"
    shards = posts.installation.shards()
    with posts.pipeline() as pipeline:
        posts.send("account_1")
        posts.flush()
        wait_for("the first post", lambda: posts.installation.counts("folds").get("input:accounts"))
        time.sleep(1.5)
        assert posts.published() == []
        shards.run_all([(0, ("HSET", shards.keys.wanted(), "accounts", '{"quiet": "500ms"}'))])
        (first,) = posts.wait_published()
        assert first["reason"] == "quiet"
        assert pipeline.exit_code is None
        shards.run_all([(0, ("HDEL", shards.keys.wanted(), "accounts"))])
        wait_for("the old windows", lambda: "1h" in pipeline.log or pipeline.log.count("has new windows") >= 2)
        posts.send("account_2")
        posts.flush()
        wait_for("the second post", lambda: posts.installation.counts("folds").get("input:accounts") == 2)
    posts.rule = posts.rule | {"collect": {"n": "count id"}}
    with posts.pipeline():
        found = posts.wait_published()
    assert [fold["reason"] for fold in found] == ["quiet", "flush"]
    assert found[1]["values"] == {"posts": ["post_0_1"]}

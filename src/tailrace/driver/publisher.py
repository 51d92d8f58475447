"""The publisher: moves what the shards have in their outboxes to Kafka, each message exactly once.

One transactional id per shard makes an older publisher's writes fail. The position in the outbox (epoch, number) is
written to a compacted topic in the same transaction as the messages, so a publisher that dies goes on exactly there.
After a new epoch the store may have been rolled back and its outbox filled again; then the ids at the targets' ends
are looked up first, and what is already there is skipped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from tailrace.errors import BrokerUnavailable, PipelineError, StoreError, Unavailable
from tailrace.log.cursor import Position
from tailrace.valkey.shards import Shards, mapping

logger = logging.getLogger(__name__)

_decode_headers = msgspec.msgpack.Decoder(list[tuple[str, bytes | None]]).decode

ID_HEADER = "tailrace-id"
BATCH = 500
LOOK_BACK = 10_000
"""Records at the end of each partition of a target that are searched for ids that are already there."""
MAX_BYTES = 16 << 20
"""The largest message our own client lets through; the topic has its own limit."""
OVERHEAD = 1024
"""Bytes that Kafka adds to a message, rounded up."""
QUOTED = 64 << 10
"""Bytes of a message that was too large that its dead letter shows."""


class Publisher(threading.Thread):
    """A loop over the outboxes of all shards; ends with ``stop``, or with an error in ``failure``."""

    def __init__(
        self,
        shards: Shards,
        properties: Mapping[str, Any],
        positions: str,
        targets: Mapping[str, int],
        replication: int = 1,
        poll_s: float = 1.0,
        dead_letters: str = "",
    ) -> None:
        super().__init__(name="publisher", daemon=True)
        self._shards = shards
        self._properties = dict(properties)
        self._positions = positions
        self._targets = dict(targets)
        """Topics that messages may go to, with the number of partitions to create them with."""
        self._replication = replication
        self._dead_letters = dead_letters
        """The topic that is told of messages which their own would not take."""
        self._limits: dict[str, int] = {}
        self._poll_s = poll_s
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._producers: dict[int, Producer] = {}
        self._placed: dict[int, Position] = {}
        self._published: set[str] | None = None
        """The ids at the targets' ends when this publisher began; None until the first message wants to know."""
        self.failure: BaseException | None = None

    def wake(self) -> None:
        """Let it look into the outboxes now, and not at its next turn."""
        self._woken.set()

    def stop(self) -> None:
        """End the loop and wait a little; an open transaction is aborted by the broker or by the next publisher."""
        self._stopping.set()
        self._woken.set()
        self.join(timeout=3)

    def run(self) -> None:
        """Publish until stopped. A broker or a store that is away is waited for; being fenced ends the loop."""
        pause = 0.5
        while not self._stopping.is_set():
            try:
                self._begin()
                while not self._stopping.is_set():
                    moved = sum(self._publish(shard) for shard in self._filled())
                    pause = 0.5
                    if moved:
                        logger.debug("published %d message(s)", moved)
            except (Unavailable, KafkaException) as error:
                if isinstance(error, KafkaException) and error.args[0].code() in _FENCED:
                    self.failure = PipelineError(f"another publisher took over: {error}")
                    break
                logger.warning("publisher: %s; trying again in %.1f s", error, pause)
                self._producers.clear()
                self._stopping.wait(pause)
                pause = min(pause * 2, 15.0)
            except StoreError as error:
                self.failure = error
                break
            except Exception as error:
                logger.exception("publisher")
                self.failure = PipelineError(f"the publisher ended: {type(error).__name__}: {error}")
                break
        self._shards.close()

    def _begin(self) -> None:
        """Create the topics, take the transactional ids over and then find the positions."""
        self._prepare_topics()
        for shard in range(self._shards.options.shards):
            if self._stopping.is_set():
                return
            producer = Producer(
                self._properties
                | {
                    "transactional.id": f"tailrace-outbox-{self._shards.options.prefix}-{shard}",
                    "transaction.timeout.ms": 30_000,
                    "message.max.bytes": MAX_BYTES,
                    "linger.ms": 5,
                }
            )
            producer.init_transactions(30)
            self._producers[shard] = producer
        self._published = None
        self._placed = self._read_positions()

    def _filled(self) -> list[int]:
        """Wait a little for outboxes to have something; return the shards that do."""
        count = self._shards.options.shards
        keys = self._shards.keys
        deadline = time.monotonic() + self._poll_s
        while True:
            self._woken.clear()
            lengths = self._shards.run_all([(s, ("XLEN", keys.outbox(s))) for s in range(count)])
            filled = [shard for shard, length in enumerate(lengths) if length]
            if filled or self._stopping.is_set() or time.monotonic() >= deadline:
                return filled
            self._woken.wait(min(0.25, self._poll_s))

    def _publish(self, shard: int) -> int:
        """Move one batch of a shard's outbox; return how many messages it had."""
        key = self._shards.keys.outbox(shard)
        entries = self._shards.run_all([(shard, ("XRANGE", key, "-", "+", "COUNT", BATCH))])[0]
        if not entries:
            return 0
        producer, placed = self._producers[shard], self._placed.get(shard, Position.START)
        fresh: list[tuple[Position, dict[bytes, bytes]]] = []
        for entry_id, flat in entries:
            fields = mapping(flat)
            position = Position(int(fields[b"e"]), int(entry_id.partition(b"-")[0]))
            if (position.epoch, position.number) > (placed.epoch, placed.number):
                fresh.append((position, fields))
        if fresh and self._published is None:
            self._published = self._ids_at_the_end()
        if self._stopping.is_set():
            return 0
        if fresh:
            producer.begin_transaction()
            try:
                for _, fields in fresh:
                    if fields[b"i"].decode() not in (self._published or ()):
                        self._produce(producer, fields)
                last = fresh[-1][0]
                producer.produce(self._positions, key=str(shard), value=str(last))
                producer.commit_transaction(30)
            except KafkaException:
                producer.abort_transaction(30)
                raise
            self._placed[shard] = last
        last_id = entries[-1][0].decode().partition("-")[0]
        self._shards.run_all([(shard, ("XTRIM", key, "MINID", f"{int(last_id) + 1}-0"))])
        return len(fresh)

    def _produce(self, producer: Producer, fields: Mapping[bytes, bytes]) -> None:
        topic = fields[b"t"].decode()
        size = len(fields[b"v"]) + len(fields[b"k"]) + len(fields.get(b"h", b"")) + OVERHEAD
        if size > self._limits.get(topic, MAX_BYTES):
            topic, fields = self._too_large(topic, fields)
        headers = _decode_headers(fields[b"h"]) if b"h" in fields else []
        message: dict[str, Any] = {"value": fields[b"v"], "headers": [*headers, (ID_HEADER, fields[b"i"])]}
        if fields[b"k"]:
            message["key"] = fields[b"k"]
        while True:
            try:
                producer.produce(topic, **message)
                return
            except BufferError:
                producer.poll(0.1)

    def _too_large(self, topic: str, fields: Mapping[bytes, bytes]) -> tuple[str, dict[bytes, bytes]]:
        """Return a dead letter in the place of a message that its topic would not take: the others must go on."""
        id_, size = fields[b"i"].decode(), len(fields[b"v"])
        if not self._dead_letters:
            raise PipelineError(f"{id_} has {size} bytes, more than topic {topic!r} takes: raise its max.message.bytes")
        logger.error("%s has %d bytes, more than topic %r takes: it is in the dead letters", id_, size, topic)
        letter = {"id": id_, "topic": topic, "reason": "too-large", "bytes": size}
        letter["value"] = fields[b"v"][:QUOTED].decode(errors="replace")
        return self._dead_letters, {b"i": fields[b"i"], b"k": fields[b"k"], b"v": msgspec.json.encode(letter)}

    def _prepare_topics(self) -> None:
        """Create the topics that are missing, and read how large a message each target takes."""
        admin = AdminClient(self._properties)
        try:
            present = set(admin.list_topics(timeout=10).topics)
        except KafkaException as error:
            raise BrokerUnavailable(f"kafka does not answer: {error}") from error
        wanted = [NewTopic(self._positions, 1, self._replication, config={"cleanup.policy": "compact"})]
        large = {"max.message.bytes": str(MAX_BYTES)}
        wanted += [NewTopic(topic, n, self._replication, config=large) for topic, n in self._targets.items()]
        missing = [topic for topic in wanted if topic.topic not in present]
        for future in admin.create_topics(missing).values() if missing else ():
            try:
                future.result(15)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
        # A topic that was just created takes MAX_BYTES, and not every broker may know it yet.
        self._limits = dict.fromkeys(self._targets, MAX_BYTES)
        asked = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in self._targets if topic in present]
        for resource, answer in admin.describe_configs(asked).items() if asked else ():
            self._limits[resource.name] = min(MAX_BYTES, int(answer.result(15)["max.message.bytes"].value))

    def _read_positions(self) -> dict[int, Position]:
        found: dict[int, Position] = {}

        def note(message: Any) -> None:
            epoch, _, number = message.value().decode().partition(".")
            found[int(message.key())] = Position(int(epoch), int(number))

        self._scan(self._positions, None, note)
        return found

    def _ids_at_the_end(self) -> set[str]:
        found: set[str] = set()

        def note(message: Any) -> None:
            found.update(v.decode() for k, v in message.headers() or () if k == ID_HEADER and v)

        for topic in self._targets:
            self._scan(topic, LOOK_BACK, note)
        return found

    def _scan(self, topic: str, back: int | None, note: Callable[[Any], None]) -> None:
        """Read a topic's committed records up to its present end: all of them, or the last ``back`` per partition."""
        consumer = Consumer(
            self._properties
            | {
                "group.id": "tailrace-publisher",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
            }
        )
        try:
            metadata = consumer.list_topics(topic, timeout=10).topics[topic]
            places, left = [], set()
            for partition in metadata.partitions:
                first, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
                if end > first:
                    start = OFFSET_BEGINNING if back is None else max(first, end - back)
                    places.append(TopicPartition(topic, partition, start))
                    left.add(partition)
            if not places:
                return
            consumer.assign(places)
            while left and not self._stopping.is_set():
                message = consumer.poll(1.0)
                if message is None:
                    continue
                error = message.error()
                if error is None:
                    note(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard(message.partition())
                else:
                    raise KafkaException(error)
        finally:
            consumer.close()


_FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}

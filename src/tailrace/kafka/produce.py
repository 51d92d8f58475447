"""Writing events to Kafka for the service.

Invariant: ``put`` returns the coordinates under which every view shows an event, once all in-sync replicas have it. It
checks a request before it sends the first event, so one bad event keeps all of them out. An event that was not
acknowledged in time may still be written: nobody can know, and the error says so. The client library's exceptions
become BrokerUnavailable, EventRefused or ConfigError.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, Producer, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from tailrace.api.answers import Coordinates
from tailrace.config.settings import Settings
from tailrace.errors import BrokerUnavailable, EventRefused, StoreUnavailable, TopicNotFound
from tailrace.kafka.broker import settings_checked
from tailrace.log.event import Headers, Partition, event_id
from tailrace.valkey.marks import read_generation
from tailrace.valkey.shards import Nodes

logger = logging.getLogger(__name__)

DELIVERY_S = 10.0
"""Time that the broker has to acknowledge an event."""
ADMIN_S = 5.0
FRESH_S = 1.0
"""Time for which a topic's configuration and generation are cached."""
OVERHEAD_BYTES = 512
"""Most bytes that a record batch needs besides its events."""
TURN_EVENTS = 200
"""Events handed to the producer before other tasks get their turn: about a millisecond."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
_REFUSALS = frozenset(
    (
        *(KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_TIMESTAMP),
        *(KafkaError.INVALID_RECORD, KafkaError.POLICY_VIOLATION, KafkaError.TOPIC_AUTHORIZATION_FAILED),
        *(KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.INVALID_CONFIG, KafkaError.INVALID_PARTITIONS),
        *(KafkaError.INVALID_REPLICATION_FACTOR, KafkaError.TOPIC_EXCEPTION),
    )
)


class TopicWriter:
    """Writes events to topics; creates a topic at its first event."""

    def __init__(self, settings: Settings, nodes: Nodes) -> None:
        self._kafka = settings.kafka
        self._nodes = nodes
        self._max_bytes = settings.pipeline.max_event_bytes
        self._own = {settings.kafka.dead_letters, settings.kafka.positions}
        self._configs: dict[str, tuple[float, TopicConfig]] = {}
        self._generations: dict[str, tuple[float, int]] = {}
        self._sender: _Sender | None = None
        self._client: AdminClient | None = None

    def open(self) -> None:
        """Begin to connect, since the first event of a new producer waits a second or two; needs no broker yet."""
        self._live()

    async def close(self) -> None:
        """Wait a little for events under way, then disconnect."""
        if self._sender is not None:
            await asyncio.to_thread(self._sender.close, 2.0)

    async def ping(self) -> int:
        """Return the number of brokers in the cluster."""
        try:
            cluster: Any = await asyncio.wrap_future(self._admin().describe_cluster(request_timeout=2))
        except KafkaException as error:
            raise _unavailable(error) from error
        return len(cluster.nodes)

    async def put(self, topic: str, events: Sequence[NewEvent]) -> list[Coordinates]:
        """Write events in order, all of them or, if one of them is bad, none; return their coordinates.

        Raises:
            TopicNotFound: The topic cannot exist, or nobody may write it through Tailrace.
            EventRefused: The topic does not take one of the events.
            BrokerUnavailable: The broker did not acknowledge every event; some may be written.
        """
        self._check_name(topic)
        if not events:
            return []
        config = await self._config(topic, timed=any(event.time_ms is not None for event in events))
        _check(topic, config, events)
        generation = await self._generation(topic, config)
        written = await self._live().send(topic, events, time.monotonic() + DELIVERY_S)
        partitions = {p: Partition(topic, p, generation) for p in {partition for partition, _ in written}}
        return [Coordinates(event_id(partitions[p], offset), topic, p, offset) for p, offset in written]

    def _check_name(self, topic: str) -> None:
        if not _NAME.fullmatch(topic) or topic in (".", ".."):
            raise TopicNotFound(
                f"no topic can be called {topic[:80]!r}: a name has 1 to 249 letters, digits, dots, _ and -"
            )
        if topic.startswith("__") or topic in self._own:
            raise TopicNotFound(f"topic {topic!r} is kept by Kafka or by Tailrace itself: put events into another one")

    async def _config(self, topic: str, timed: bool) -> TopicConfig:
        cached = self._configs.get(topic)
        if cached is not None and time.monotonic() - cached[0] < FRESH_S:
            return cached[1]
        config = await self._describe(topic)
        if config is None:
            await self._create(topic, "CreateTime" if timed else "LogAppendTime")
            config = await self._describe(topic, patience_s=ADMIN_S)
        if config is None:
            raise BrokerUnavailable(f"topic {topic!r} was created and does not show up yet: nothing was written")
        self._configs[topic] = time.monotonic(), config
        return config

    async def _describe(self, topic: str, patience_s: float = 0.0) -> TopicConfig | None:
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        deadline = time.monotonic() + patience_s
        while True:
            admin = self._admin()
            described = admin.describe_topics(TopicCollection([topic]), request_timeout=ADMIN_S)[topic]
            configured = admin.describe_configs([resource], request_timeout=ADMIN_S)[resource]
            try:
                identity, config = await asyncio.gather(asyncio.wrap_future(described), asyncio.wrap_future(configured))
                break
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise _unavailable(error) from error
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(0.05)
        return TopicConfig(
            id=str(identity.topic_id),
            append_time=config["message.timestamp.type"].value == "LogAppendTime",
            max_bytes=int(config["max.message.bytes"].value),
            future_ms=int(limit.value) if (limit := config.get("message.timestamp.after.max.ms")) else 2**63 - 1,
        )

    async def _create(self, topic: str, time_type: str) -> None:
        partitions, replication = self._kafka.new_topic_partitions, self._kafka.new_topic_replication
        new = NewTopic(topic, partitions, replication, config={"message.timestamp.type": time_type})
        try:
            await asyncio.wrap_future(self._admin().create_topics([new], request_timeout=ADMIN_S)[topic])
            logger.info("created topic %s: %d partition(s), %s", topic, partitions, time_type)
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.TOPIC_ALREADY_EXISTS:
                return
            if code in _REFUSALS:
                raise EventRefused(f"kafka does not create topic {topic!r}: {error.args[0].str()}") from error
            raise _unavailable(error) from error

    async def _generation(self, topic: str, config: TopicConfig) -> int:
        """Return the generation in the event ids: the one that the pipeline has for this topic id, or will have."""
        cached = self._generations.get(topic)
        if cached is not None and time.monotonic() - cached[0] < FRESH_S:
            return cached[1]
        try:
            stored = await self._nodes.read(0, "HGET", self._nodes.keys.topics(), topic)
        except StoreUnavailable:
            if cached is None:
                raise
            return cached[1]
        generation = read_generation(stored).of(config.id)
        self._generations[topic] = time.monotonic(), generation
        return generation

    def _properties(self) -> dict[str, Any]:
        return {"socket.keepalive.enable": True, **self._kafka.client()}

    def _admin(self) -> AdminClient:
        if self._client is None:
            with settings_checked():
                self._client = AdminClient(self._properties(), logger=logger)
        self._client.poll(0)  # its log lines and errors
        return self._client

    def _live(self) -> _Sender:
        if self._sender is None or self._sender.failed:
            if self._sender is not None:
                threading.Thread(target=self._sender.close, args=(DELIVERY_S,), daemon=True).start()
            with settings_checked():
                self._sender = _Sender(self._properties(), self._max_bytes)
        return self._sender


class NewEvent(msgspec.Struct, frozen=True, gc=False):
    """An event to write, as the bytes that Kafka gets."""

    value: bytes
    key: bytes | None = None
    headers: Headers | None = None
    time_ms: int | None = None

    @property
    def size(self) -> int:
        """Most bytes that it takes in Kafka, without the batch's own."""
        headers = sum(len(name) * 4 + len(value or b"") for name, value in self.headers or ())
        return len(self.value) + len(self.key or b"") + headers


class TopicConfig(msgspec.Struct, frozen=True):
    """The id of a topic and the settings that an event must fit."""

    id: str
    append_time: bool
    """True if records get the broker's time."""
    max_bytes: int
    future_ms: int
    """Most milliseconds that a record's own time may be ahead of the broker's clock."""


def _check(topic: str, config: TopicConfig, events: Sequence[NewEvent]) -> None:
    """Raise EventRefused for an event that the broker would refuse."""
    latest = round(time.time() * 1000) + config.future_ms
    for number, event in enumerate(events, 1):
        if event.time_ms is not None:
            if config.append_time:
                raise EventRefused(
                    f"event {number} has a time, but topic {topic!r} gives records the broker's time (LogAppendTime): "
                    "leave `time` out, or put it into a topic with message.timestamp.type=CreateTime"
                )
            if event.time_ms > latest:
                raise EventRefused(
                    f"event {number} is further in the future than topic {topic!r} allows "
                    f"(message.timestamp.after.max.ms={config.future_ms})"
                )
        if event.size + OVERHEAD_BYTES > config.max_bytes:
            raise EventRefused(
                f"event {number} has {event.size} bytes; topic {topic!r} takes {config.max_bytes - OVERHEAD_BYTES} "
                "(max.message.bytes)"
            )


def _unavailable(error: KafkaException) -> BrokerUnavailable:
    reason = error.args[0].str()
    return BrokerUnavailable(
        f"kafka does not answer ({reason}); nothing was written: is it up, and kafka.bootstrap right?"
    )


class _Sender:
    """One idempotent producer and the thread that receives its acknowledgements."""

    def __init__(self, properties: dict[str, Any], max_bytes: int) -> None:
        own = {
            "acks": "all",
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "delivery.timeout.ms": round(DELIVERY_S * 1000),
            "message.max.bytes": max_bytes + (1 << 20),
            "error_cb": self._on_error,
        }
        tuned = {"linger.ms": 5, "compression.type": "lz4", "queue.buffering.max.messages": 1_000_000}
        self._producer = Producer({**tuned, **properties, **own}, logger=logger)
        self.failed = False
        self._stopping = False
        self._thread = threading.Thread(target=self._poll, name="kafka acknowledgements", daemon=True)
        self._thread.start()

    async def send(self, topic: str, events: Sequence[NewEvent], deadline: float) -> list[tuple[int, int]]:
        """Write events; return partition and offset of each."""
        receipt = _Receipt(asyncio.get_running_loop(), len(events))
        for i, event in enumerate(events):
            if i % TURN_EVENTS == TURN_EVENTS - 1:
                await asyncio.sleep(0)
            try:
                while not self._produce(topic, event, partial(receipt.delivered, i)):
                    if time.monotonic() > deadline:
                        raise KafkaException(KafkaError(KafkaError._QUEUE_FULL))
                    await asyncio.sleep(0.005)
            except KafkaException as error:
                receipt.give_up(len(events) - i, error.args[0])
                break
        # The producer reports every event it took, at the latest after its delivery timeout.
        await receipt.complete
        if receipt.failure is not None:
            raise _not_written(topic, receipt.failure, receipt.failures, len(events))
        return receipt.coordinates

    def _produce(self, topic: str, event: NewEvent, report: Any) -> bool:
        headers: Any = event.headers
        try:
            # A timestamp of 0 is the producer's now.
            self._producer.produce(
                topic, event.value, event.key, headers=headers, on_delivery=report, timestamp=event.time_ms or 0
            )
        except BufferError:
            return False
        return True

    def close(self, patience_s: float) -> None:
        """Wait for events under way, give up the rest, and end the thread."""
        self._producer.flush(patience_s)
        self._producer.purge()
        self._stopping = True
        self._thread.join(2.0)

    def _poll(self) -> None:
        while not self._stopping or len(self._producer):
            self._producer.poll(0.2)

    def _on_error(self, error: KafkaError) -> None:
        # A fatal error ends the producer for good; the next request makes another one.
        self.failed = self.failed or error.fatal()


class _Receipt:
    """Collects the acknowledgements of one request, in the producer's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self.complete: asyncio.Future[None] = loop.create_future()
        self.coordinates: list[tuple[int, int]] = [(-1, -1)] * count
        self.failure: KafkaError | None = None
        self.failures = 0
        self._loop = loop
        self._left = count
        self._lock = threading.Lock()

    def delivered(self, index: int, error: KafkaError | None, message: Any) -> None:
        if error is None:
            self.coordinates[index] = message.partition(), message.offset()
            self._count(1)
        else:
            self.give_up(1, error)

    def give_up(self, count: int, error: KafkaError) -> None:
        self.failure = self.failure or error
        self._count(count, failed=True)

    def _count(self, count: int, failed: bool = False) -> None:
        with self._lock:
            self._left -= count
            self.failures += count if failed else 0
            if self._left:
                return
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self.complete.done():
            self.complete.set_result(None)


def _not_written(topic: str, error: KafkaError, failures: int, count: int) -> BrokerUnavailable | EventRefused:
    problem = f"topic {topic!r}: {failures} of {count} event(s) were not acknowledged ({error.str()})"
    if error.code() in _REFUSALS:
        return EventRefused(f"{problem}: the broker refused them; the others are written")
    return BrokerUnavailable(
        f"{problem}; each of them may be written or not, and putting them again may write them twice: "
        "compare by their content, or read the topic before you try again"
    )

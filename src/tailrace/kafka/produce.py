"""Topics as the service writes them: events put into Kafka, answered when the broker has them.

Invariant: an event is answered with the coordinates under which every view shows it, once all in-sync replicas have it.
A request is checked before its first event is sent, so a bad event keeps its neighbours out. An event that was
not acknowledged in time may still be written: nobody can know, and the error says so.
Driver exceptions do not leave this file.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, Producer, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from tailrace.config.settings import Settings
from tailrace.errors import BrokerUnavailable, ConfigError, EventRefused, StoreUnavailable, TopicNotFound
from tailrace.log.event import Headers, Partition, event_id
from tailrace.valkey.marks import read_generation
from tailrace.valkey.nodes import Nodes

logger = logging.getLogger(__name__)

DELIVERY_S = 10.0
"""How long the broker has to acknowledge an event."""
ADMIN_S = 5.0
FRESH_S = 1.0
"""How long what is known of a topic is believed."""
OVERHEAD_BYTES = 512
"""What a record batch needs besides its events; no event is larger than its parts and this."""
TURN_EVENTS = 200
"""Events handed to the producer before others get their turn: about a millisecond."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
_REFUSALS = frozenset(
    (
        *(KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_TIMESTAMP),
        *(KafkaError.INVALID_RECORD, KafkaError.POLICY_VIOLATION, KafkaError.TOPIC_AUTHORIZATION_FAILED),
        *(KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.INVALID_CONFIG, KafkaError.INVALID_PARTITIONS),
        *(KafkaError.INVALID_REPLICATION_FACTOR, KafkaError.TOPIC_EXCEPTION),
    )
)


class NewEvent(msgspec.Struct, frozen=True, gc=False):
    """An event that is to be written, as the bytes that Kafka gets."""

    value: bytes
    key: bytes | None = None
    headers: Headers | None = None
    time_ms: int | None = None

    @property
    def size(self) -> int:
        """Its bytes in Kafka, without the batch's own."""
        named = sum(len(name) * 4 + len(value or b"") for name, value in self.headers or ())
        return len(self.value) + len(self.key or b"") + named


class WrittenEvent(msgspec.Struct, frozen=True, gc=False):
    """Where an event is."""

    id: str
    topic: str
    partition: int
    offset: int


class Facts(msgspec.Struct, frozen=True):
    """What the broker says of a topic."""

    id: str
    append_time: bool
    """Whether the broker's clock gives records their time."""
    max_bytes: int
    future_ms: int
    """How far ahead of the broker's clock a record's own time may be."""


class Topics:
    """Writes events to topics, and creates topics at the first event."""

    def __init__(self, settings: Settings, nodes: Nodes) -> None:
        self._kafka = settings.kafka
        self._nodes = nodes
        self._max_bytes = settings.pipeline.max_event_bytes
        self._own = {settings.kafka.dead_letters, settings.kafka.positions}
        self._known: dict[str, tuple[float, Facts]] = {}
        self._generations: dict[str, tuple[float, int]] = {}
        self._sender: _Sender | None = None
        self._client: AdminClient | None = None

    def open(self) -> None:
        """Begin to connect; a new producer's first event waits a second or two for its id. Needs no broker yet."""
        self._live()

    async def close(self) -> None:
        """Wait a little for what is under way, then let the broker go."""
        if self._sender is not None:
            await asyncio.to_thread(self._sender.close, 2.0)

    async def ping(self) -> int:
        """Return how many brokers answer."""
        cluster = await self._ask(self._admin().describe_cluster(request_timeout=2))
        return len(cluster.nodes)

    async def put(self, topic: str, events: Sequence[NewEvent]) -> list[WrittenEvent]:
        """Write events in order, all of them or, if one of them is bad, none; return where they are.

        Raises:
            TopicNotFound: A topic that nobody may write through Tailrace, or that cannot exist.
            EventRefused: The topic would not take an event.
            BrokerUnavailable: The broker did not acknowledge everything; some events may be written.
        """
        self._check_name(topic)
        if not events:
            return []
        facts = await self._facts(topic, timed=any(event.time_ms is not None for event in events))
        _check(topic, facts, events)
        generation = await self._generation(topic, facts)
        places = await self._live().send(topic, events, time.monotonic() + DELIVERY_S)
        sources = {p: Partition(topic, p, generation) for p in {partition for partition, _ in places}}
        return [WrittenEvent(event_id(sources[p], offset), topic, p, offset) for p, offset in places]

    def _check_name(self, topic: str) -> None:
        if not _NAME.fullmatch(topic) or topic in (".", ".."):
            raise TopicNotFound(
                f"no topic can be called {topic[:80]!r}: a name has 1 to 249 letters, digits, dots, _ and -"
            )
        if topic.startswith("__") or topic in self._own:
            raise TopicNotFound(f"topic {topic!r} is kept by Kafka or by Tailrace itself: put events into another one")

    # What is known of a topic.

    async def _facts(self, topic: str, timed: bool) -> Facts:
        known = self._known.get(topic)
        if known is not None and time.monotonic() - known[0] < FRESH_S:
            return known[1]
        facts = await self._look(topic)
        if facts is None:
            await self._create(topic, "CreateTime" if timed else "LogAppendTime")
            facts = await self._look(topic, patience_s=ADMIN_S)
        if facts is None:
            raise BrokerUnavailable(f"topic {topic!r} was created and does not show up yet: nothing was written")
        self._known[topic] = time.monotonic(), facts
        return facts

    async def _look(self, topic: str, patience_s: float = 0.0) -> Facts | None:
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
        return Facts(
            id=str(identity.topic_id),
            append_time=config["message.timestamp.type"].value == "LogAppendTime",
            max_bytes=int(config["max.message.bytes"].value),
            future_ms=int(found.value) if (found := config.get("message.timestamp.after.max.ms")) else 2**63 - 1,
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

    async def _generation(self, topic: str, facts: Facts) -> int:
        """Return the generation that event ids carry: what the pipeline has adopted for this topic id, or will."""
        known = self._generations.get(topic)
        if known is not None and time.monotonic() - known[0] < FRESH_S:
            return known[1]
        try:
            stored = await self._nodes.read(0, "HGET", self._nodes.keys.topics(), topic)
        except StoreUnavailable:
            if known is None:
                raise
            return known[1]
        generation = read_generation(stored).of(facts.id)
        self._generations[topic] = time.monotonic(), generation
        return generation

    # Clients.

    def _properties(self) -> dict[str, Any]:
        return {"socket.keepalive.enable": True, **self._kafka.client()}

    def _admin(self) -> AdminClient:
        if self._client is None:
            with _settings_checked():
                self._client = AdminClient(self._properties(), logger=logger)
        self._client.poll(0)  # its log lines and errors
        return self._client

    def _live(self) -> _Sender:
        if self._sender is None or self._sender.failed:
            if self._sender is not None:
                threading.Thread(target=self._sender.close, args=(DELIVERY_S,), daemon=True).start()
            with _settings_checked():
                self._sender = _Sender(self._properties(), self._max_bytes)
        return self._sender

    async def _ask(self, future: Any) -> Any:
        try:
            return await asyncio.wrap_future(future)
        except KafkaException as error:
            raise _unavailable(error) from error


def _check(topic: str, facts: Facts, events: Sequence[NewEvent]) -> None:
    """Refuse what the broker would refuse, before anything is sent."""
    latest = round(time.time() * 1000) + facts.future_ms
    for number, event in enumerate(events, 1):
        if event.time_ms is not None:
            if facts.append_time:
                raise EventRefused(
                    f"event {number} has a time, but topic {topic!r} gives records the broker's time (LogAppendTime): "
                    "leave `time` out, or put it into a topic with message.timestamp.type=CreateTime"
                )
            if event.time_ms > latest:
                raise EventRefused(
                    f"event {number} is further in the future than topic {topic!r} allows "
                    f"(message.timestamp.after.max.ms={facts.future_ms})"
                )
        if event.size + OVERHEAD_BYTES > facts.max_bytes:
            raise EventRefused(
                f"event {number} has {event.size} bytes; topic {topic!r} takes {facts.max_bytes - OVERHEAD_BYTES} "
                "(max.message.bytes)"
            )


@contextmanager
def _settings_checked() -> Iterator[None]:
    """Turn a client that cannot be made into an error about the settings."""
    try:
        yield
    except KafkaException as error:
        raise ConfigError(f"kafka.properties or kafka.bootstrap: {error.args[0].str()}") from error


def _unavailable(error: KafkaException) -> BrokerUnavailable:
    said = error.args[0].str()
    return BrokerUnavailable(
        f"kafka does not answer ({said}); nothing was written: is it up, and kafka.bootstrap right?"
    )


class _Sender:
    """One idempotent producer and the thread that hears its acknowledgements."""

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
        self._thread = threading.Thread(target=self._hear, name="kafka acknowledgements", daemon=True)
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
        # The producer reports every event it took, at the latest when its time is over.
        await receipt.complete
        if receipt.failure is not None:
            raise _not_written(topic, receipt.failure, receipt.failures, len(events))
        return receipt.places

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
        """Wait for what is under way, give up the rest, and end the thread."""
        self._producer.flush(patience_s)
        self._producer.purge()
        self._stopping = True
        self._thread.join(2.0)

    def _hear(self) -> None:
        while not self._stopping or len(self._producer):
            self._producer.poll(0.2)

    def _on_error(self, error: KafkaError) -> None:
        # A fatal error ends the producer for good; the next request makes another one.
        self.failed = self.failed or error.fatal()


class _Receipt:
    """Collects the acknowledgements of one request, in the producer's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self.complete: asyncio.Future[None] = loop.create_future()
        self.places: list[tuple[int, int]] = [(-1, -1)] * count
        self.failure: KafkaError | None = None
        self.failures = 0
        self._loop = loop
        self._left = count
        self._lock = threading.Lock()

    def delivered(self, index: int, error: KafkaError | None, message: Any) -> None:
        if error is None:
            self.places[index] = message.partition(), message.offset()
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
    said = f"topic {topic!r}: {failures} of {count} event(s) were not acknowledged ({error.str()})"
    if error.code() in _REFUSALS:
        return EventRefused(f"{said}: the broker refused them; the others are written")
    return BrokerUnavailable(
        f"{said}; each of them may be written or not, and putting them again may write them twice: "
        "compare by their content, or read the topic before you try again"
    )

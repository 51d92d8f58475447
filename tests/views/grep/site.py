"""Topics in a real Kafka, the pipeline's own host and scanner without Spark, and a service that searches: one site.

Expected matches come from a reader of its own: it reads the topics from their start and asks the oracle.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from tailrace.api.requests import GrepParameters
from tailrace.config.settings import load
from tailrace.driver.slice import Passes, RangeReader, Slice
from tailrace.errors import BrokerUnavailable
from tailrace.http.service import Service, now_ms
from tailrace.kafka.broker import Broker, client_properties
from tailrace.log.event import Partition
from tailrace.log.request import AnyFeed, AnyFrame, ControlFrame, EventFrame
from tailrace.testing.installation import QUICK_JAVA, ServiceProcess
from tailrace.valkey.marks import advance
from tailrace.valkey.shards import Shards, StoreOptions, prepare
from tailrace.views import VIEWS as ALL_VIEWS
from tailrace.views.grep.driver import Chunk, DueRange, Scanner, scan
from tailrace.views.grep.feed import GrepFeeds
from tailrace.views.grep.model import Search, SearchLife, Stretch, make_grep_request
from tailrace.views.grep.routes import GrepService
from tests.views.grep.rig import finds, random_records
from tests.writing import LIMITS, NOON, Record, Writer, batch

VIEWS = ("intake", "matches")
PATIENCE_S = 60.0
KEPT = {"retention.ms": "-1", "message.timestamp.type": "CreateTime", "message.timestamp.after.max.ms": str(2**63 - 1)}

_sites = count()


class Site:
    """One installation. Nothing goes on in it by itself unless ``at_work`` is entered."""

    def __init__(self, kafka: str, store: StoreOptions, seed: int = 0, spark: Any = None, **flags: object) -> None:
        self.kafka, self.store, self.chance, self.spark = kafka, store, random.Random(seed), spark
        self.name = f"g{os.getpid()}x{next(_sites)}"
        given: dict[str, object] = {
            "kafka.bootstrap": kafka,
            "kafka.topics": rf"{self.name}\..*",
            "valkey.url": store.url,
            "valkey.prefix": store.prefix,
            "spark.conf": {"spark.driver.extraJavaOptions": QUICK_JAVA},
            "spark.driver_memory": "512m",
        }
        self.settings = load(flags=given | {name.replace("__", "."): value for name, value in flags.items()})
        self.admin = AdminClient({"bootstrap.servers": kafka, "log_level": 0})
        self.producer = Producer({"bootstrap.servers": kafka, "log_level": 0, "linger.ms": 1})
        self.broker = Broker(self.settings)
        self.shards = Shards(store).open()
        prepare(self.shards)
        self._read: dict[Partition, int] = {}
        self.drive()

    def service(self, folder: Path, name: str = "serve", **changes: object) -> ServiceProcess:
        """Return a service over the site, as a process that is still to be started."""
        at = {"kafka__bootstrap": self.kafka, "kafka__topics": rf"{self.name}\..*", "serve__retry": "200ms"}
        return ServiceProcess(self.store, folder, name, **at, **changes)

    # What Kafka has.

    def topic(self, name: str, partitions: int = 1, **config: str) -> str:
        """Create a topic, and wait until the broker knows where it ends."""
        topic = f"{self.name}.{name}"
        self.admin.create_topics([NewTopic(topic, partitions, 1, config=KEPT | config)])[topic].result(30)
        while not self._has_leaders(topic):
            time.sleep(0.02)
        return topic

    def grow(self, topic: str, partitions: int) -> None:
        """Give a topic more partitions, and wait until the broker knows where they end."""
        self.admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(30)
        while len(self.broker.topics()[topic].partitions) < partitions or not self._has_leaders(topic):
            time.sleep(0.02)
        self.producer.list_topics(topic)  # which it would find out later

    def _has_leaders(self, topic: str) -> bool:
        found = self.broker.topics().get(topic)
        with suppress(BrokerUnavailable):
            return found is not None and bool(self.broker.bounds([found]))
        return False

    def delete(self, topic: str) -> None:
        """Delete a topic, and wait until it is gone."""
        self.admin.delete_topics([topic])[topic].result(30)
        while topic in self.broker.topics():
            time.sleep(0.02)

    def put(self, records: Sequence[Record]) -> None:
        """Write records; their offsets are what Kafka makes of them."""
        for r in records:
            headers: Any = r.headers or []
            place = {"partition": r.partition, "timestamp": r.time, "headers": headers}
            self.producer.produce(r.topic, r.value, r.key, **place)
        assert self.producer.flush(30) == 0

    def forget(self, topic: str, partition: int, before: int) -> None:
        """Let Kafka drop what it has before an offset."""
        place = TopicPartition(topic, partition, before)
        self.admin.delete_records([place])[place].result(30)

    def records(
        self, starts: dict[Partition, int] | None = None, ends: dict[Partition, int] | None = None
    ) -> list[Record]:
        """Read what Kafka has from some offsets, or the first ones, up to others or the ends."""
        topics = self.broker.topics()
        bounds = self.broker.bounds(topics.values())
        found: list[Record] = []
        for (topic, partition), (first, end) in sorted(bounds.items()):
            source = Partition(topic, partition, self.generations.get(topic, 0))
            first = max(first, starts.get(source, end) if starts is not None else first)
            end = min(end, ends.get(source, first) if ends is not None else end)
            found += consume(self.kafka, topic, partition, first, end)
        return found

    def offline(self, search: Search, since_ms: int | None = None, until_ms: int | None = None) -> list[Record]:
        """Return what a search must find, source by source."""
        return [
            record
            for record in self.records()
            if (since_ms is None or record.time >= since_ms)
            and (until_ms is None or record.time <= until_ms)
            and finds(search, record)
        ]

    def ids(self, records: Sequence[Record]) -> list[str]:
        return [f"{Partition(r.topic, r.partition, self.generations.get(r.topic, 0))}:{r.offset}" for r in records]

    # What the pipeline does.

    def drive(self) -> None:
        """Begin as a new driver: adopt the topics, take the view over."""
        topics = self.broker.topics()
        answers = self.shards.call_all([(0, "adopt", (topic.name, topic.id)) for topic in topics.values()])
        known = self.shards.run_all([(0, ("HKEYS", self.shards.keys.topics()))])[0]
        self.generations = {name.decode(): -1 for name in known}
        self.generations |= {name: int(answer) for name, answer in zip(topics, answers, strict=True)}
        kept = self.settings.grep.kept
        self.writer = Writer(self.store, VIEWS, generations=self.generations, kept_bytes=kept)
        self._ids = {topic.name: topic.id for topic in topics.values()}
        self.scanner = HandScanner(self) if self.spark is None else CountedScanner(self)

    def live(self) -> int:
        """Do what the query does: read what is new, in batches of any size, then move the marks."""
        starts: dict[Partition, int] = {}
        ends: dict[Partition, int] = {}
        # One that was created again is left alone until a driver has noticed it.
        found = [t for t in self.broker.topics().values() if self.generations.get(t.name, 0) >= 0]
        topics = [topic for topic in found if self._ids.setdefault(topic.name, topic.id) == topic.id]
        for (topic, partition), (first, end) in self.broker.bounds(topics).items():
            source = Partition(topic, partition, self.generations.get(topic, 0))
            if end > self._read.get(source, 0):
                starts[source], ends[source] = max(first, self._read.get(source, 0)), end
        new = self.records(starts, ends)
        while new:
            n = self.chance.choice((1, 7, 50, 1000))
            self.writer.write(new[:n])
            del new[:n]
        advance(self.writer.shards, "matches", self.writer.epoch, {source: end - 1 for source, end in ends.items()})
        self._read |= ends
        return len(ends)

    def scan(self, most: int | None = None) -> int:
        """Do what the scanner does, until there is nothing left or so many chunks are read; return how many were."""
        chunks = 0
        while (most is None or chunks < most) and self.scanner.step():
            chunks += 1
        return chunks

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let the pipeline go on by itself, in a thread."""
        stopping = threading.Event()
        failed: list[BaseException] = []

        def work() -> None:
            try:
                while not stopping.wait(0.01):
                    self.live()
                    self.scan()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join(PATIENCE_S)
        assert not failed, failed

    def forget_search(self, search: Search) -> None:
        """Let the watchdog end its life: nobody follows it."""
        assert self.shards.call(0, "end", search.id, 0)[0] == b"ok"

    # What the service does.

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Serving]:
        service = Service(self.settings, ALL_VIEWS)
        async with service.running():
            yield Serving(service)


def fill(site: Site, topics: list[str], each: int, first: int = 0) -> None:
    """Write random records to both partitions of topics."""
    for topic in topics:
        for partition in range(2):
            site.put(random_records(site.chance, topic, partition, each, first))


def numbered(site: Site, topic: str, first: int, until: int, partition: int = 0) -> None:
    """Write records that have a number, one a second."""
    values = [(n, json.dumps({"n": n}).encode()) for n in range(first, until)]
    site.put([Record(n, b"k", value, NOON + 1000 * n, partition, topic) for n, value in values])


class CountedScanner(Scanner):
    """The driver's scanner, and what it has read."""

    stop_after: int | None = None
    """Index of the batch at which a scan stops in the middle; None to read all."""

    def __init__(self, site: Site) -> None:
        plan = site.writer.plan
        super().__init__(site.settings, site.spark, plan, Shards(plan.store, dict(plan.run_ids)), site.generations)
        self._site = site
        self.chunks: list[Chunk] = []

    def _read(self, chunk: Chunk) -> int:
        self.chunks.append(chunk)
        return super()._read(chunk)

    def take(self, life: SearchLife, stretch: Stretch, ranges: dict[str, tuple[int, int]]) -> None:
        """Scan a part of a stretch."""
        chunk = Chunk(ranges, [DueRange(life, stretch, ranges)])
        self._read(chunk)
        self._advance(chunk)


class HandScanner(CountedScanner):
    """One that reads by itself instead of by Spark."""

    def _read(self, chunk: Chunk) -> int:
        self.chunks.append(chunk)
        if self.stop_after is None and self._site.chance.random() < 0.5:  # as tasks read it
            read = RangeReader(client_properties(self._site.settings))
            return sum(scan(self._plan, chunk, read)([chunk.ranges]))
        starts = {Partition.parse(source): first for source, (first, _) in chunk.ranges.items()}
        ends = {Partition.parse(source): until for source, (_, until) in chunk.ranges.items()}
        records = self._site.records(starts, ends)
        return sum(scan(self._plan, chunk, self._slices)(self._batches(records)))

    def _slices(self, given: Sequence[Slice], passes: Passes | None) -> Iterator[tuple[Slice, int]]:
        for r in given:
            size = sum(len(key or b"") + len(value or b"") for key, value in zip(r.keys, r.values, strict=True))
            rows = [i for i, v in enumerate(r.values) if v is not None and (passes is None or passes(r.keys[i], v))]
            yield (
                Slice(
                    r.partition,
                    [r.offsets[i] for i in rows],
                    [r.times[i] for i in rows],
                    [r.keys[i] for i in rows],
                    [r.values[i] for i in rows],
                    None if r.headers is None else [r.headers[i] for i in rows],
                    {},
                ),
                size,
            )

    def _batches(self, records: list[Record]) -> Iterator[list[Slice]]:
        size = self._site.chance.choice((1, 7, 50, 1000))
        for n, begin in enumerate(range(0, len(records), size)):
            if n == self.stop_after:
                raise Stopped
            yield batch(records[begin : begin + size], LIMITS, self._generations)


class Stopped(Exception):
    """A scan was stopped in the middle."""


class Serving:
    """A service process and what its feeds say."""

    def __init__(self, service: Service) -> None:
        self.view = service.part_of("matches", GrepService)

    @property
    def grep(self) -> GrepFeeds:
        return self.view.feeds

    async def deafen(self) -> None:
        """Let the hub hear nothing any more; its channels stay as they are."""
        await self.grep.hub.__aexit__(None, None, None)

    async def open(self, search: Search, last_event_id: str | None = None, **given: Any) -> AnyFeed:
        parameters = GrepParameters(**{"follow": False, **given})
        request = make_grep_request(search, parameters, now_ms=now_ms(), last_event_id=last_event_id)
        assert request is not None
        return await self.grep.open(request)

    async def all(self, search: Search, **parameters: Any) -> list[AnyFrame]:
        """Return everything that a feed yields until it ends."""
        frames: list[AnyFrame] = []
        feed = await self.open(search, **parameters)
        try:
            async with asyncio.timeout(PATIENCE_S):
                async for some in feed:
                    frames += some
        finally:
            await feed.aclose()
        return frames


class Following:
    """A feed that is read in the background."""

    def __init__(self, feed: AnyFeed) -> None:
        self.frames: list[AnyFrame] = []
        self._feed = feed
        self._more = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            async for some in self._feed:
                self.frames += some
                self._more.set()
        finally:
            self._more.set()

    async def until(self, count: int) -> list[str]:
        """Wait until so many events have come, or the feed has ended."""
        await self._wait(lambda: len(ids(self.frames)) >= count)
        return ids(self.frames)

    async def saw(self, name: str) -> None:
        """Wait for a frame about the feed itself."""
        await self._wait(lambda: name in controls(self.frames))

    async def _wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition() and not self._task.done():
                self._more.clear()
                await self._more.wait()
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._feed.aclose()


def ids(frames: Sequence[AnyFrame]) -> list[str]:
    return [json.loads(frame.data)["id"] for frame in frames if isinstance(frame, EventFrame)]


def controls(frames: Sequence[AnyFrame]) -> list[str]:
    return [frame.name for frame in frames if isinstance(frame, ControlFrame)]


def facts(frames: Sequence[AnyFrame], name: str) -> list[dict[str, Any]]:
    return [json.loads(frame.data) for frame in frames if isinstance(frame, ControlFrame) and frame.name == name]


def split(found: Sequence[str]) -> dict[str, list[int]]:
    """Return the offsets of each source, in the order in which they come."""
    offsets: dict[str, list[int]] = {}
    for event in found:
        source, _, offset = event.rpartition(":")
        offsets.setdefault(source, []).append(int(offset))
    return offsets


def assert_same(found: Sequence[str], wanted: Sequence[str]) -> None:
    """Check that each was found once, those of a source in their order, and nothing else."""
    assert len(found) == len(set(found)), "an event came twice"
    assert split(found) == split(wanted)


def consume(kafka: str, topic: str, partition: int, first: int = 0, end: int = 1 << 62) -> list[Record]:
    """Read what Kafka has of a partition, from an offset up to another or the end."""
    if first >= end:
        return []
    consumer = Consumer(
        {
            "bootstrap.servers": kafka,
            "group.id": "offline",
            "fetch.wait.max.ms": 10,
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(topic, partition, first)])
    found: list[Record] = []
    try:
        while True:
            message = consumer.poll(10)
            assert message is not None, f"kafka sends nothing of {topic}"
            if (error := message.error()) is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                return found
            offset: Any = message.offset()
            if offset >= end:
                return found
            headers: Any = message.headers()
            place = (message.timestamp()[1], partition, topic, headers)
            found.append(Record(offset, message.key(), message.value(), *place))
    finally:
        consumer.close()

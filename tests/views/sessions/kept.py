"""A track whose records are in Kafka, too, and feeds that read them there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tailrace.config.settings import load
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.kafka.broker import BrokerTopics, Records, client_properties
from tailrace.log.cursor import EntryId, parse_id
from tailrace.valkey.shards import Nodes, StoreOptions, mapping
from tailrace.views.sessions.life import SessionParts
from tailrace.views.sessions.reader import Archive
from tailrace.views.sessions.streams import first_of_write
from tailrace.views.sessions.upkeep import SessionUpkeep
from tests.views.sessions.recorded import MS, T0, Track
from tests.views.sessions.test_feed import BOUND, CONFIG
from tests.views.sessions.viewing import feeds_of
from tests.writing import Record


class Kept(Track):
    """A track whose records are in Kafka, too."""

    def __init__(self, store: StoreOptions, kafka: EmbeddedKafka, **more: Any) -> None:
        super().__init__(store, **more)
        self.admin = AdminClient({"bootstrap.servers": kafka.address})
        self.admin.create_topics([NewTopic(self.topic, 2, 1)])[self.topic].result(20)
        self._producer = Producer({"bootstrap.servers": kafka.address})

    def write(self, *records: Record) -> None:
        for record in records:
            self._producer.produce(self.topic, record.value, record.key, record.partition, timestamp=record.time)
        assert self._producer.flush(20) == 0
        super().write(*records)

    def expire(self, offset: int) -> None:
        """Let Kafka forget what is before an offset."""
        place = TopicPartition(self.topic, 0, offset)
        self.admin.delete_records([place])[place].result(20)

    async def trim(self, feeds: SessionParts, entries: int, session: str = "lap") -> None:
        """Trim so many of the first entries of a session."""
        located = await feeds.live.get(session)
        assert located is not None
        found = await feeds.live.read(located.stream, (0, 0), entries, located.number)
        self.shed(located.number, [entry.id for entry in found])

    def writes(self) -> list[tuple[EntryId, EntryId, int]]:
        """Return the first and the last entry of each write of the first partition, and up to which offset it goes."""
        key, writer = self.shards.keys.ledger(self.stream()), f"{self.topic}:0".encode()
        rows = [(at, mapping(row)) for at, row in self.shards.run_keyed([(key, ("XRANGE", key, "-", "+"))])[0]]
        return [
            (first_of_write(parse_id(at), row[b"a"]), parse_id(at), int(row[b"m"]))
            for at, row in rows
            if row[b"w"] == writer
        ]

    def forget_writes(self) -> None:
        """Forget all writes that the stream does not have any more, as upkeep does after a time."""
        upkeep = SessionUpkeep(self.shards, self.plan.store)
        upkeep.cut_ledger(self.stream(), upkeep.server_ms(self.stream()) + 60_000)


@asynccontextmanager
async def archived(track: Track, kafka: EmbeddedKafka, folder: Path) -> AsyncIterator[SessionParts]:
    (folder / "tailrace.toml").touch()
    store = track.shards.options
    settings = load(folder / "tailrace.toml", {"valkey.url": store.url, "kafka.bootstrap": kafka.address})
    records, nodes = Records(client_properties(settings)), Nodes(store)
    try:
        archive = Archive(records, BrokerTopics(settings, nodes).is_current)
        async with feeds_of(store, track.plan.store.key, archive) as feeds:
            yield feeds
    finally:
        await records.close()
        await nodes.close()


def lap(track: Kept, writes: int = 5) -> dict[str, list[tuple[int, Any]]]:
    """Write a session in so many writes of several entries each, with others beside it; return what it has."""
    track.write(
        track.record("", "config", identifier="car-7", config=CONFIG),
        track.record("lap", "open", json={"configBindings": BOUND}),
    )
    for i in range(writes):
        values = [(37 * n) % 1000 for n in range(400 * i, 400 * i + 400)]
        track.write(
            track.data("other", periodic=[{"channel": 9, "start": T0, "interval": 1, "values": [1.5] * 50}]),
            track.periodic("lap", 400 * i, values),
            track.data("lap", timestamped=[{"channel": 77, "times": [T0], "values": [1]}]),  # no such channel
            track.data("lap", events=[{"id": 4, "app": "Chassis", "time": T0 + i, "text": f"{i}"}]),
        )
    return {"vCar:Chassis": [(T0 + n * MS, (37 * n) % 1000 * 0.1) for n in range(400 * writes)]}

"""Searches while the pipeline is killed: whoever follows one gets each match once, of the past and of what is live."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tailrace.config import load
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.errors import TailraceError
from tailrace.feeds.frame import Frame
from tailrace.feeds.searching import make_grep_request
from tailrace.model.search import Search, make_search
from tailrace.serving.service import Service, now_ms
from tailrace.stores.searches import VIEW, scanning
from tests.faults.rig import PATIENCE_S, Installation, Load, Pipeline, assert_ordered, wait_for
from tests.grep.rig import finds
from tests.grep.site import consume
from tests.writing import Record

PARTITIONS = 3
PAST = 40_000


class Follower:
    """A reader in a thread of its own that resumes by its cursor whenever its feed fails. Use as ``with``."""

    def __init__(self, installation: Installation, search: Search) -> None:
        self.search, self.events = search, list[str]()
        self._installation = installation
        self._cursor: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        store, kafka = self._installation.store, self._installation.kafka
        flags = {"valkey.url": store.url, "valkey.prefix": store.prefix, "kafka.bootstrap": kafka.address}
        service = Service(load(flags=flags | {"kafka.topics": rf"{self._installation.prefix}\..*"}))
        async with service.running():
            reading = asyncio.create_task(self._read(service))
            await asyncio.to_thread(self._stopping.wait)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, service: Service) -> None:
        while True:
            start = None if self._cursor else "start"
            request = make_grep_request(self.search, now_ms=now_ms(), start=start, last_event_id=self._cursor)
            assert request is not None
            try:
                feed = await service.grep.open(request)
                try:
                    async for frames in feed:
                        self.events += [json.loads(frame.data)["id"] for frame in frames if isinstance(frame, Frame)]
                        self._cursor = frames[-1].cursor
                finally:
                    await feed.aclose()
            except TailraceError:
                await asyncio.sleep(0.2)


def _fill(installation: Installation, topic: str) -> None:
    producer = Producer({"bootstrap.servers": installation.kafka.address, "log_level": 0, "linger.ms": 20})
    for n in range(PAST):
        producer.produce(topic, b'{"n":%d}' % n, b"past", n % PARTITIONS)
        if n % 10_000 == 0:
            producer.flush(30)
    assert producer.flush(30) == 0


def _written(installation: Installation) -> set[bytes]:
    """Return the numbers of the stretches of which a scan has written something."""
    shards = installation.shards()
    keys = [(s, ("HKEYS", shards.keys.marks(s, VIEW))) for s in range(shards.options.shards)]
    return {field.split(b"~")[1] for fields in shards.run_all(keys) for field in fields if field.startswith(b"~")}


def _expected(search: Search, records: Sequence[Record]) -> list[str]:
    return [record.id for record in records if finds(search, record)]


@pytest.mark.timeout(3600)
def test_a_pipeline_that_is_killed_while_it_matches_and_scans_loses_nothing_and_doubles_nothing(
    kafka: EmbeddedKafka, valkey_server: EmbeddedValkey, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    installation = Installation(kafka, valkey_server.url, tmp_path)
    topic = installation.topic("past", PARTITIONS)
    _fill(installation, topic)
    chance = random.Random(time.time_ns())
    kills = max(1, pytestconfig.getoption("--faults") // 5)
    in_the_middle = 0
    with ExitStack() as stack:
        load = stack.enter_context(Load(installation, topic, partitions=PARTITIONS))
        pipeline = Pipeline(installation)
        stack.push(pipeline)
        pipeline.start(wait=False)
        followers: list[Follower] = []
        for kill in range(kills):
            before = _written(installation)
            search = make_search(topic, {"n": {"$mod": [5 + kill, 0]}})
            followers.append(stack.enter_context(Follower(installation, search)))
            deadline = time.monotonic() + PATIENCE_S
            while _written(installation) == before:
                assert time.monotonic() < deadline, f"no scan has begun:\n{installation.log()}"
                time.sleep(0.01)
            time.sleep(chance.choice((0, 0.05, 0.2)) if kill else 0)
            pipeline.kill()
            in_the_middle += bool(scanning(installation.shards()))
            time.sleep(chance.uniform(0, 1))
            pipeline.start(wait=False)
        load.wait_more(200)
        load.finish()
        records = [r for p in range(PARTITIONS) for r in consume(kafka.address, topic, p)]
        for follower in followers:
            wanted = _expected(follower.search, records)
            wait_for(f"all of {len(wanted)} matches", lambda: len(follower.events) >= len(wanted))  # noqa: B023
            assert len(follower.events) == len(set(follower.events)), "an event came twice"
            assert sorted(follower.events) == sorted(wanted)
            assert_ordered(follower.events)
    assert in_the_middle, "every scan was done before the kill, so nothing is proven"

"""Searches over a topic with a past: whoever follows one gets each match once, of the past and of what is live."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import ExitStack

from confluent_kafka import Producer

from tailrace.api.requests import GrepParameters
from tailrace.config.load import load
from tailrace.errors import TailraceError
from tailrace.http.service import Service, now_ms
from tailrace.log.request import EventFrame
from tailrace.views import VIEWS
from tailrace.views.grep.model import Search, make_search
from tailrace.views.grep.request import make_grep_request
from tailrace.views.grep.routes import GrepService
from tailrace.views.grep.store import VIEW, pending_stretches
from tests.faults.rig import Installation, assert_ordered, wait_for
from tests.views.grep.rig import finds
from tests.views.grep.site import consume

PARTITIONS = 3
PAST = 20_000


class Searcher:
    """A reader in a thread of its own that resumes by its cursor whenever its feed fails. Use as ``with``."""

    def __init__(self, installation: Installation, search: Search) -> None:
        self.search, self.events = search, list[str]()
        self._installation = installation
        self._cursor: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Searcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        store, kafka = self._installation.store, self._installation.kafka
        flags = {"valkey.url": store.url, "valkey.prefix": store.prefix, "kafka.bootstrap": kafka.address}
        service = Service(load(flags=flags | {"kafka.topics": rf"{self._installation.prefix}\..*"}), VIEWS)
        async with service.running():
            reading = asyncio.create_task(self._read(service))
            await asyncio.to_thread(self._stopping.wait)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, service: Service) -> None:
        while True:
            start = None if self._cursor else "start"
            request = make_grep_request(
                self.search, GrepParameters(start=start), now_ms=now_ms(), last_event_id=self._cursor
            )
            assert request is not None
            try:
                feed = await service.part_of(VIEW, GrepService).feeds.open(request)
                try:
                    async for frames in feed:
                        self.events += [
                            json.loads(frame.data)["id"] for frame in frames if isinstance(frame, EventFrame)
                        ]
                        self._cursor = frames[-1].cursor
                finally:
                    await feed.aclose()
            except TailraceError:
                await asyncio.sleep(0.2)


class Searches:
    """A topic whose past nobody names and tags, and those who search it. Use as ``with``."""

    def __init__(self, installation: Installation, topic: str) -> None:
        self._installation, self._topic = installation, topic
        self._searchers: list[Searcher] = []
        self._written: set[bytes] = set()
        self._following = ExitStack()
        producer = Producer({"bootstrap.servers": installation.kafka.address, "log_level": 0, "linger.ms": 20})
        for n in range(PAST):
            producer.produce(topic, b'{"past":%d}' % n, partition=n % PARTITIONS)
        assert producer.flush(60) == 0

    def __enter__(self) -> Searches:
        return self

    def __exit__(self, *_: object) -> None:
        self._following.close()

    def another(self) -> None:
        """Follow one more search from the start of the topic on."""
        self._written = self._stretches()
        of = {"$mod": [5 + len(self._searchers), 0]}
        search = make_search(self._topic, {"$or": [{"past": of}, {"n": of}]})
        self._searchers.append(self._following.enter_context(Searcher(self._installation, search)))

    def half_scanned(self) -> bool:
        """Whether the scan for the last of the searches has written something, and is not done."""
        return self._stretches() > self._written and bool(pending_stretches(self._installation.shards()))

    def scanned(self) -> bool:
        """Whether the scan for the last of the searches has written something, and is done."""
        return self._stretches() > self._written and not pending_stretches(self._installation.shards())

    def check(self) -> None:
        """Compare what each has received with what the topic has: each match once, in order, and nothing else."""
        kafka = self._installation.kafka.address
        records = [record for p in range(PARTITIONS) for record in consume(kafka, self._topic, p)]
        for searcher in self._searchers:
            wanted = [record.id for record in records if finds(searcher.search, record)]
            wait_for(f"all of {len(wanted)} matches", lambda: len(searcher.events) >= len(wanted))  # noqa: B023
            assert len(searcher.events) == len(set(searcher.events)), "an event came twice"
            assert sorted(searcher.events) == sorted(wanted)
            assert_ordered(searcher.events)

    def _stretches(self) -> set[bytes]:
        """Return the numbers of the stretches of which a scan has written something."""
        shards = self._installation.shards()
        keys = [(s, ("HKEYS", shards.keys.marks(s, VIEW))) for s in range(shards.options.shards)]
        return {field.split(b"~")[1] for fields in shards.run_all(keys) for field in fields if field.startswith(b"~")}

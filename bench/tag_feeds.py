"""Readers of tags for ``tags.py``: feeds in this process, opened as the service opens them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from typing import Any, TypeAlias

from cassandra.cluster import Session

from bench.events import create
from bench.lane import given
from bench.meter import percentile
from bench.readers import Sender
from tailrace.api.requests import TagFeedParameters
from tailrace.config.settings import Settings
from tailrace.driver.job import Driver
from tailrace.log.event import Partition
from tailrace.log.hub import Hub
from tailrace.log.request import EventFrame
from tailrace.log.segment import bucket_start
from tailrace.log.store import Logs
from tailrace.log.timeuuid import make_timeuuid
from tailrace.valkey.marks import read_counts
from tailrace.valkey.shards import Nodes, Shards, StoreOptions, prepare
from tailrace.views import VIEWS
from tailrace.views.tags.feed import TagStore, open_store
from tailrace.views.tags.model import make_tag_request
from tailrace.views.tags.rows.cassandra import CassandraConnection, disconnect
from tailrace.views.tags.rows.model import StoredRow
from tailrace.views.tags.rows.store import writer
from tailrace.views.tags.settings import CassandraSettings
from tailrace.views.tags.store import VIEW

Row: TypeAlias = dict[str, Any]

HOUR_MS = 3_600_000
YEARS_MS = 10 * 365 * 24 * HOUR_MS
SMALL = 2_000
"""Buckets that are not empty, of those of ten years."""
ASKED = 1_000
"""Buckets that are asked one by one, 32 at a time; those of ten years take longer as they are more."""
WARM_S = 3.0
"""Of live events before those that count."""
PATIENCE_S = 60.0


def now_ms() -> int:
    return round(time.time() * 1000)


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[TagStore]:
    """Open the store that the settings name."""
    nodes = await Nodes(StoreOptions.of(settings.valkey)).open()
    logs = Logs(nodes, VIEW)
    try:
        async with Hub(nodes, logs, settings.serve.ring_bytes) as hub:
            store = open_store(settings, nodes, hub, logs, now_ms)
            try:
                yield store
            finally:
                await store.close()
    finally:
        await nodes.close()


async def frames(store: TagStore, tag: str, **parameters: Any) -> AsyncGenerator[list[EventFrame], None]:
    """Yield the events of a feed as they come, several at a time."""
    request = make_tag_request((tag,), TagFeedParameters(**parameters), now_ms=now_ms(), own_cursors=store.own_cursors)
    assert request is not None
    feed = await store.open(request)
    try:
        async for batch in feed:
            if events := [frame for frame in batch if isinstance(frame, EventFrame)]:
                yield events
    finally:
        await feed.aclose()


def catch_up(settings: Settings, tag: str) -> list[bytes]:
    """Read a tag from its start to its end; return what came."""

    async def read() -> list[bytes]:
        async with opened(settings) as store:
            return [e.data async for events in frames(store, tag, start="start", follow=False) for e in events]

    return asyncio.run(read())


# What comes.


def visible(spark: Any, flags: Row, readers: Sequence[Row], rate: int, seconds: float) -> Iterator[Row]:
    """Run the pipeline on a new topic, and yield how late its events are for readers with these settings."""
    topic, bootstrap = f"live-{flags['valkey.prefix']}", flags["kafka.bootstrap"]
    create(bootstrap, topic, 4)
    others = {"kafka.positions": f"{topic}.positions", "kafka.dead_letters": f"{topic}.dead-letters"}
    flags = flags | others | {"kafka.topics": [topic], "tags.rules": {"live": {"n": {"$gte": 0}}}}
    stopping = threading.Event()
    job = threading.Thread(target=Driver(given(flags), spark, VIEWS).run, args=(stopping,), daemon=True)
    job.start()
    try:
        # A JVM compiles what it runs often.
        sender = Sender(bootstrap, topic, 4, 20, [b'{"kind":"live"}'])
        _wait_for_end(given(flags), job, sender.send(int(rate * WARM_S), rate))
        for more in readers:
            yield asyncio.run(_follow(given(flags | more), sender, rate, seconds))
    finally:
        stopping.set()
        job.join(60)


async def _follow(settings: Settings, sender: Sender, rate: int, seconds: float) -> Row:
    """Follow the tag from its end; return how old its events were when they came, and whether one is missing."""
    delay = settings.tags.delay if settings.tags.store == "cassandra" else None
    ages: list[float] = []
    numbers: list[int] = []

    async def receive(events: AsyncIterator[list[EventFrame]], wanted: int) -> None:
        while len(ages) < wanted:
            frames = await anext(events)
            now = time.time()
            values = [json.loads(frame.data)["data"] for frame in frames]
            ages.extend(now - value["due"] for value in values)
            numbers.extend(value["n"] for value in values)

    async with opened(settings) as store, aclosing(frames(store, "live", start="end")) as events:
        for stretch in (WARM_S, seconds):
            ages.clear()
            numbers.clear()
            receiving = asyncio.create_task(receive(events, int(rate * stretch)))
            await asyncio.sleep(1)
            await asyncio.to_thread(sender.send, int(rate * stretch), rate)
            await asyncio.wait_for(receiving, PATIENCE_S)
    row: Row = {f"p{share} ms": round(1000 * percentile(ages, share / 100)) for share in (50, 99)}
    row["over the delay"] = row["p99 ms"] - round(delay.total_seconds() * 1000 if delay else 0)
    wanted, found = range(min(numbers), min(numbers) + len(numbers)), set(numbers)
    return row | {
        "checked": len(numbers),
        "lost": len(set(wanted) - found),
        "repeated": len(numbers) - len(found),
        "disordered": sum(
            later < earlier for p in range(4) for earlier, later in pairwise(n for n in numbers if n % 4 == p)
        ),
    }


def _wait_for_end(settings: Settings, job: threading.Thread, events: int) -> None:
    """Wait until so many events are tagged."""
    shards, deadline = Shards(StoreOptions.of(settings.valkey)), time.monotonic() + PATIENCE_S
    while read_counts(shards, VIEW).get("events", 0) < events:
        if not job.is_alive() or time.monotonic() > deadline:
            raise SystemExit("the pipeline does not tag what it is sent")
        time.sleep(0.1)
    shards.close()


# From nothing.


class Asked:
    """Counts what this process asks of Cassandra, while it is entered."""

    def __init__(self) -> None:
        self.queries = 0
        self._plain: Any = None

    def __enter__(self) -> Asked:
        plain = self._plain = Session.execute_async

        def counted(session: Any, *given: Any, **more: Any) -> Any:
            self.queries += 1
            return plain(session, *given, **more)

        Session.execute_async = counted
        return self

    def __exit__(self, *_: object) -> None:
        Session.execute_async = self._plain


def start_from_nothing(settings: Settings) -> Iterator[Row]:
    """Write tags whose events are ten years apart in all, and yield what it costs to find the first and the last."""
    options = settings.cassandra
    prepare(Shards(StoreOptions.of(settings.valkey)).open())
    end_ms = now_ms() - HOUR_MS
    cases = {"few": [end_ms - YEARS_MS, end_ms - YEARS_MS // 2, end_ms]}
    cases["many"] = [end_ms - YEARS_MS * i // SMALL for i in range(SMALL - 1, -1, -1)]
    for tag, times in cases.items():
        writer(options).write(_row(tag, number, ms) for number, ms in enumerate(times, 1))
    disconnect(options)
    for tag, times in cases.items():
        row = asyncio.run(_from_nothing(settings, tag, len(times)))
        yield {"case": f"{len(times):,} of {YEARS_MS // HOUR_MS:,} buckets are not empty", **row}
    seconds = _ask_all(options, end_ms)
    yield {
        "case": f"asking {YEARS_MS // HOUR_MS:,} buckets one by one",
        "last ms": round(1000 * seconds * YEARS_MS / HOUR_MS / ASKED),
        "queries": YEARS_MS // HOUR_MS,
    }


async def _from_nothing(settings: Settings, tag: str, events: int) -> Row:
    async with opened(settings) as store:
        # Connections are made and statements are prepared once for all feeds.
        async for _ in frames(store, "none", start="start", follow=False):
            pass
        with Asked() as asked:
            began, first, first_asked, found = time.perf_counter(), 0.0, 0, 0
            async with aclosing(frames(store, tag, start="start")) as batches:
                while found < events:
                    batch = await anext(batches)
                    if not found:
                        first, first_asked = time.perf_counter() - began, asked.queries
                    found += len(batch)
            last = time.perf_counter() - began
            row = {"first ms": round(1000 * first), "queries to first": first_asked, "last ms": round(1000 * last)}
            return row | {"queries": asked.queries, "events": found}


def _ask_all(options: CassandraSettings, end_ms: int) -> float:
    """Ask buckets that are empty, one by one; return seconds."""
    connection = CassandraConnection(options).open()
    select = connection.prepared("SELECT timestamp FROM $keyspace.tag_views WHERE tag_name = ? AND timebucket = ?")
    waiting: deque[Any] = deque()
    began = time.perf_counter()
    for i in range(ASKED):
        if len(waiting) >= 32:
            waiting.popleft().result()
        waiting.append(connection.session.execute_async(select.bind(("none", end_ms - i * HOUR_MS))))
    for response in waiting:
        response.result()
    seconds = time.perf_counter() - began
    connection.close()
    return seconds


def _row(tag: str, number: int, ms: int) -> StoredRow:
    place = Partition("old", 0)
    return StoredRow(
        tag=tag,
        bucket_ms=bucket_start(ms, HOUR_MS),
        span_ms=HOUR_MS,
        timeuuid=make_timeuuid(ms, number, place),
        source="source",
        tag_seq=number,
        seq=number,
        partition=place,
        offset=number,
        time_ms=ms,
        key=b"source",
        headers=[],
        value=b'{"n":%d}' % number,
        tags=(tag,),
    )

"""The loads of an installation, one for each view, which remember what they sent and check what the view has of it."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from tailrace.api.requests import GrepParameters
from tailrace.config.settings import load
from tailrace.errors import TailraceError
from tailrace.http.service import Service, now_ms
from tailrace.log.event import Partition, shard_of
from tailrace.log.request import EventFrame
from tailrace.log.timeuuid import first_of, last_of
from tailrace.testing.installation import wait_for
from tailrace.valkey.marks import conserved, read_marks
from tailrace.views import VIEWS
from tailrace.views.grep.model import Search, make_grep_request, make_search
from tailrace.views.grep.routes import GrepService
from tailrace.views.grep.store import VIEW, pending_stretches
from tailrace.views.sessions.model import Session
from tailrace.views.sessions.store import state_of
from tailrace.views.tags.rows.cassandra import CassandraConnection
from tailrace.views.tags.rows.store import RowReader
from tailrace.views.tags.settings import CassandraSettings
from tests.faults.rig import Load, LoadedInstallation, assert_ordered
from tests.views.folds.rig import Fold, FoldRig
from tests.views.grep.rig import finds
from tests.views.grep.site import consume
from tests.views.sessions.recorded import MS, T0, doubles, read_stream
from tests.views.tags.test_write import read_tags
from tests.writing import Record

LAP_PARTITIONS = 2
SAMPLES = 20
"""Of a channel in one record, a millisecond apart."""


class Laps:
    """Two cars in each partition, each a session that goes on until ``finish``. Use as ``with``."""

    def __init__(self, installation: LoadedInstallation) -> None:
        self.topic = installation.topic("laps", LAP_PARTITIONS)
        self.settings = {
            "sessions__topics": json.dumps([self.topic]),
            "sessions__begin": "start",
            "sessions__key": f"{installation.prefix}:session:{{identity}}",
        }
        self.sent: dict[str, int] = {f"car-{partition}-{i}": 0 for partition in range(LAP_PARTITIONS) for i in range(2)}
        """Records of samples of each session."""
        self.acknowledged = 0
        self.failures: list[str] = []
        self._installation = installation
        self._producer = Producer(
            {
                "bootstrap.servers": installation.kafka,
                "enable.idempotence": True,
                "linger.ms": 5,
                "log_level": 0,
            }
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Laps:
        for session in self.sent:
            self._produce(session, type="open", json={"identifier": session})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()

    def finish(self) -> None:
        """Close all sessions, and wait for the last acknowledgement."""
        self._stopping.set()
        self._thread.join(60)
        for session in self.sent:
            self._produce(session, type="close")
        assert self._producer.flush(60) == 0
        assert not self.failures

    def hash_is_ahead(self) -> bool:
        """Return True if the hash of a session is ahead of its stream now."""
        shards = self._installation.shards()
        keys, commands = shards.keys, []
        for session in self.sent:
            stream = f"{self.topic}-{_partition(session)}"
            commands.append((keys.stream(stream), ("HGET", keys.stream_sessions(stream), session)))
            key = keys.session(self.settings["sessions__key"], session)
            commands.append((key, ("HGET", key, "tEnd")))
        answers = shards.run_keyed(commands)
        return any(
            end is not None and state is not None and int(end) > (Session.decode(state_of(state)).end or 0)
            for state, end in zip(answers[::2], answers[1::2], strict=True)
        )

    def check(self) -> None:
        """Wait until the books balance; then compare streams with what was sent."""

        def counts() -> dict[str, int]:
            return self._installation.counts("sessions")

        wait_for("all records of sessions", lambda: counts().get("stored", 0) == self.acknowledged)
        wait_for("the books of sessions to balance", lambda: conserved(counts()) == 0)
        assert not counts().get("dead", 0)
        for partition in range(LAP_PARTITIONS):
            found = read_stream(self._installation.shards(), f"{self.topic}-{partition}")
            sessions = {each.jsons[0]["identity"]: each for each in found.values()}
            assert sessions.keys() == {session for session in self.sent if _partition(session) == partition}
            assert len(found) == len(sessions)
            for session, each in sessions.items():
                n = self.sent[session] * SAMPLES
                wanted = list(zip((T0 + i * MS for i in range(n)), doubles(*range(n)), strict=True))
                assert each.samples == {0: wanted, 1: wanted}
                assert each.ranges[-1] == (T0, T0 + (n - 1) * MS)
                assert [json["state"] for json in each.jsons] == ["open", "closed"]
                assert each.kinds[0] == each.kinds[-1] == ["session_json"]

    def _run(self) -> None:
        while not self._stopping.wait(0.05):
            for session, n in self.sent.items():
                start, values = T0 + n * SAMPLES * MS, list(range(n * SAMPLES, (n + 1) * SAMPLES))
                part = {"start": start, "interval": MS, "values": values}
                self._produce(session, type="data", periodic=[{"channel": c, **part} for c in range(2)])
                self.sent[session] += 1
            self._producer.poll(0)

    def _produce(self, session: str, **record: object) -> None:
        def delivered(error: KafkaError | None, _: object) -> None:
            self.acknowledged += error is None
            if error is not None:
                self.failures.append(error.str())

        value = json.dumps({"session": session, **record})
        self._producer.produce(self.topic, value.encode(), partition=_partition(session), on_delivery=delivered)


def _partition(session: str) -> int:
    return int(session.split("-")[1])


PARTITIONS = 3
QUIET_MS = 2_000


class Posts:
    """A topic of posts, a rule of an installation that folds them, and what came of it."""

    def __init__(self, installation: LoadedInstallation, name: str = "posts", topic: str = "", **rule: Any) -> None:
        self.installation, self.name = installation, name
        # Posts of long ago stay, too.
        kept = {"message.timestamp.type": "CreateTime", "retention.ms": "-1"}
        self.topic = topic or installation.topic(name, PARTITIONS, **kept)
        self.output = f"{installation.prefix}-folds-{name}"
        """No topic that the pipeline reads."""
        base = {"topics": [self.topic], "group": "account_id", "collect": {"posts": "set id"}, "output": self.output}
        self.rule = base | {"quiet": f"{QUIET_MS}ms"} | rule
        self.sent: list[Record] = []
        self._producer = Producer({"bootstrap.servers": installation.kafka, "log_level": 0})
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
                "bootstrap.servers": self.installation.kafka,
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
            counts, log = self.installation.counts("folds"), self.installation.log()
            raise AssertionError(f"{error}; there were {seen}, counted {counts}. It said:\n{log}") from None
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


PAST = 20_000


class Searcher:
    """A reader in a thread of its own that resumes by its cursor whenever its feed fails. Use as ``with``."""

    def __init__(self, installation: LoadedInstallation, search: Search) -> None:
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
        flags = {"valkey.url": store.url, "valkey.prefix": store.prefix, "kafka.bootstrap": kafka}
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

    def __init__(self, installation: LoadedInstallation, topic: str) -> None:
        self._installation, self._topic = installation, topic
        self._searchers: list[Searcher] = []
        self._written: set[bytes] = set()
        self._following = ExitStack()
        producer = Producer({"bootstrap.servers": installation.kafka, "log_level": 0, "linger.ms": 20})
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
        """Return True if the scan for the last search has written something, and is not done."""
        return self._stretches() > self._written and bool(pending_stretches(self._installation.shards()))

    def scanned(self) -> bool:
        """Return True if the scan for the last search has written something, and is done."""
        return self._stretches() > self._written and not pending_stretches(self._installation.shards())

    def check(self) -> None:
        """Compare what each has received with what the topic has: each match once, in order, and nothing else."""
        kafka = self._installation.kafka
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


RULES = {"all": {"n": {"$gte": 0}}, "third": {"n": {"$mod": [3, 0]}}, "long": {"pad": {"$regex": "x{100}"}}}
_BUCKETS = "SELECT start FROM $keyspace.tag_buckets WHERE tag_name = 'all'"
_NEWEST = (
    "SELECT topic, partition, offset FROM $keyspace.tag_views WHERE tag_name = 'all' AND timebucket = %s "
    "ORDER BY timestamp DESC LIMIT 20"
)
Events = list[dict[str, Any]]


class Tagged:
    """Events of a topic in three tags, whose rows rest in Cassandra if there is one."""

    def __init__(self, installation: LoadedInstallation, topic: str, rows: CassandraSettings | None) -> None:
        self._installation, self._rows = installation, rows
        self.settings = {
            "tags__rules": json.dumps(RULES),
            "tags__topics": json.dumps([topic]),
            "tags__source": '["who"]',
            "tags__bucket": "minute",
        }
        if rows is not None:
            self._connection = CassandraConnection(rows)
            self.settings |= {
                "tags__store": "cassandra",
                "cassandra__port": str(rows.port),
                "cassandra__keyspace": rows.keyspace,
            }

    def rows_are_ahead(self) -> bool:
        """Return True if there are rows now that their shard has not applied."""
        ask = self._connection
        marks = read_marks(self._installation.shards(), "tags")[shard_of("all", self._installation.store.shards)]
        buckets = [start for (start,) in ask.execute(ask.text(_BUCKETS))]
        newest = ask.execute(ask.text(_NEWEST), (max(buckets),)) if buckets else []
        return any(offset > marks.get(Partition(topic, partition), -1) for topic, partition, offset in newest)

    def check(self, load: Load) -> None:
        """Wait until the books balance; then compare what the tags hold with what Kafka acknowledged."""

        def balanced() -> bool:
            counts = self._installation.counts("tags")
            return conserved(counts) == 0 and counts.get("events", 0) == load.total

        wait_for("the books of tags to balance", balanced)
        found = asyncio.run(_in_valkey(self._installation) if self._rows is None else _in_cassandra(self._rows))
        ids = {event for name in load.acknowledged.values() for event in name}
        assert {event["id"] for event in found["all"]} == ids
        for events in found.values():
            assert len({event["id"] for event in events}) == len(events)
            _numbered(events)
        thirds = {event["id"] for event in found["all"] if event["n"] % 3 == 0}
        assert {event["id"] for event in found["third"]} == thirds

    def close(self) -> None:
        """Let go of Cassandra."""
        if self._rows is not None:
            self._connection.close()


def _numbered(events: Events) -> None:
    """Check that each source's events have the numbers 1, 2, 3 in the order of their offsets."""
    numbers, offsets = dict[str, int](), dict[str, int]()
    for event in events:
        pid = event["source"]
        assert event["tag_seq"] == numbers.get(pid, 0) + 1, f"{pid}: {event['tag_seq']} after {numbers.get(pid, 0)}"
        assert event["offset"] > offsets.get(pid, -1)
        numbers[pid], offsets[pid] = event["tag_seq"], event["offset"]


async def _in_valkey(installation: LoadedInstallation) -> dict[str, Events]:
    found = await read_tags(installation.store)
    return {tag: [{**event, "n": event["data"]["n"]} for event in events] for tag, events in found.items()}


async def _in_cassandra(options: CassandraSettings) -> dict[str, Events]:
    reader = await RowReader(options).open()
    try:
        found: dict[str, Events] = {}
        for tag in await reader.tags():
            async for page in reader.rows(tag, first_of(0), last_of(1 << 42)):
                found.setdefault(tag, []).extend(
                    {
                        "id": f"{row.partition}:{row.offset}",
                        "source": row.source,
                        "tag_seq": row.tag_seq,
                        "offset": row.offset,
                        "n": json.loads(row.value or b"{}")["n"],
                    }
                    for row in page
                )
        return found
    finally:
        await reader.close()

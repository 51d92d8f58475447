"""A random history of one installation, and what its readers must have got in the end.

The ledger has every record that was ever written, under the coordinates that it has for ever, and when Kafka dropped
it. A reader may miss a record only if it was told so, or if the record was gone before anybody asked for it."""

from __future__ import annotations

import asyncio
import json
import random
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any

from confluent_kafka import KafkaException

from tailrace.errors import BrokerUnavailable, CursorGone, PipelineError, StaleDriver
from tailrace.http.service import now_ms
from tailrace.log.event import Partition, iso_time
from tailrace.log.request import AnyFrame, EventFrame
from tailrace.valkey.shards import StoreOptions
from tailrace.views.grep.feed import GrepFeed
from tailrace.views.grep.model import Search
from tests.views.grep.rig import KEYS, elements, finds, headers_of, random_records, random_search, random_value
from tests.views.grep.site import PATIENCE_S, Serving, Site, Stopped, facts
from tests.writing import NOON, Record


class Written:
    """A record of the ledger."""

    def __init__(self, record: Record, source: str, at: int) -> None:
        self.record, self.source, self.at = record, source, at
        self.dropped: int | None = None
        """When Kafka dropped it."""
        self.passed = False
        """True if the live query had read it by then."""

    @property
    def id(self) -> str:
        return f"{self.source}:{self.record.offset}"


class Reader:
    """A client that asks for a search, is cut off and comes back, with the frames it got."""

    def __init__(self, search: Search, at: int, **wanted: Any) -> None:
        self.search, self.at, self.wanted = search, at, wanted
        self.opened = at
        self.cursor: str | None = None
        self.events: list[dict[str, Any]] = []
        self.gone: set[str] = set()
        self.lost: list[tuple[str, int, int]] = []
        self.expired = self.ended = False
        self.counted: int | None = None
        self.lives: dict[int, Mapping[str, int]] = {}
        """The pins of each life that it was in."""

    def take(self, frames: Sequence[AnyFrame]) -> None:
        for frame in frames:
            if isinstance(frame, EventFrame):
                self.events.append(json.loads(frame.data))
            self.cursor = frame.cursor
        for gap in facts(frames, "gap"):
            if "id" in gap:
                self.gone.add(gap["id"])
            elif "source" in gap:
                self.lost.append((gap["source"], gap["first"], gap["until"]))
            else:
                assert gap["reason"] == "expired", gap
                self.expired = True
        for end in facts(frames, "end"):
            self.ended, self.counted = True, end["events"]

    @contextmanager
    def forgiving(self) -> Iterator[None]:
        """After a gap, let a reader with ``on_gap=fail`` go on where it was, with ``skip``."""
        try:
            yield
        except CursorGone:
            assert self.wanted["on_gap"] == "fail"
            self.wanted["on_gap"] = "skip"

    async def open(self, serving: Serving, now: int, **changes: Any) -> GrepFeed:
        self.opened = now
        wanted = {**self.wanted, **changes}
        if self.cursor is not None and "client" not in wanted:
            wanted["last_event_id"] = self.cursor
        feed = await serving.open(self.search, **wanted)
        assert isinstance(feed, GrepFeed)
        self.lives[feed._history.life.number] = feed._history.pins
        self.cursor = self.cursor or feed.cursor
        return feed


class History(Site):
    """Random steps over a site, with a ledger of everything that was written."""

    def __init__(self, kafka: str, store: StoreOptions, seed: int) -> None:
        chance = random.Random(f"history {seed}")
        self.seed, self.now = seed, 0
        self.log: list[str] = []
        kept = chance.choice((1, 2_000, 1 << 20))
        super().__init__(kafka, store, seed, grep__kept=kept, grep__memory=chance.choice((1 << 20, 16 << 20)))
        self.ledger: dict[str, list[Written]] = {}
        self.alive: dict[str, int] = {}
        """The topics that exist, and which of their name they are."""
        self.adopted_ids: dict[str, int] = {}
        self.readers: list[Reader] = []
        self.born: dict[int, int] = {}
        """When lives were first seen."""
        self.asked: dict[tuple[int, int], tuple[int, dict[str, tuple[int, int]]]] = {}
        """When stretches of lives were first seen, and their ranges."""
        self.searches = [random_search(self.chance, self._topics()) for _ in range(3)]
        self.services: list[Serving] = []

    def _topics(self) -> str | tuple[str, ...]:
        names = [f"{self.name}.{name}" for name in "abc"]
        return self.chance.choice((".*", ".*", (names[0],), tuple(names[:2]), rf"{self.name}\.[bc]"))

    # What happens.

    async def happen(self, steps: int) -> None:
        """Let so many things happen, then let every reader come to the end, and compare."""
        chance = self.chance
        actions = {
            "put": 8, "live": 6, "scan": 6, "open": 6, "read": 10, "crowd": 1, "stop": 2, "drive": 2, "replay": 2,
            "again": 1, "topic": 2, "grow": 1, "delete": 1, "forget": 1, "drop": 2, "clock": 1, "together": 2,
        }  # fmt: skip
        try:
            async with AsyncExitStack() as stack:
                self.services += [await stack.enter_async_context(self.serving()) for _ in range(2)]
                self._create("a")
                for _ in range(steps):
                    action = chance.choices(list(actions), list(actions.values()))[0]
                    self.now += 1
                    self.log.append(f"{self.now} {action}")
                    await getattr(self, f"do_{action}")()
                await self._finish()
            self._compare()
        except Exception as error:
            text = "\n".join(self.log[-200:])
            traceback.print_exc()
            raise AssertionError(f"seed {self.seed}: {error!r}\n{text}") from error

    def _say(self, text: object) -> None:
        self.log.append(f"    {text}")

    def _create(self, name: str, partitions: int = 2) -> None:
        topic = self.topic(name, partitions)
        self.producer.list_topics(topic, 10)
        before = self.adopted_ids.get(topic)
        self.alive[topic] = 0 if before is None else before + 1
        for partition in range(partitions):
            self.ledger[str(Partition(topic, partition, self.alive[topic]))] = []

    def _sources(self) -> list[Partition]:
        return [
            source for source in map(Partition.parse, self.ledger) if self.alive.get(source.topic) == source.generation
        ]

    async def do_put(self) -> None:
        if not (sources := self._sources()):
            return
        for source in self.chance.sample(sources, min(len(sources), 2)):
            known = self.ledger[str(source)]
            records = random_records(
                self.chance, source.topic, source.partition, self.chance.choice((1, 5, 15)), len(known)
            )
            for n, record in enumerate(records):
                placed = record._replace(offset=len(known))
                if n and self.chance.random() < 0.3:
                    placed = placed._replace(time=records[n - 1].time)
                if self.chance.random() < 0.2:
                    placed = placed._replace(key=self.chance.choice(KEYS), value=random_value(self.chance))
                self.put([placed])
                known.append(Written(placed, str(source), self.now))

    async def do_live(self) -> None:
        await asyncio.to_thread(self.live)

    async def do_together(self) -> None:
        """Matching and scanning at the same time, while a reader reads."""
        readers = [await self._new_reader() for _ in range(2)]
        work = asyncio.to_thread(self.live), asyncio.to_thread(self.scan, 3)
        await asyncio.gather(*work, *(self._some_of(reader, 1.0) for reader in readers))

    async def do_scan(self) -> None:
        await asyncio.to_thread(self.scan, self.chance.choice((1, 2, None)))

    async def do_stop(self) -> None:
        """A scan is stopped in the middle of a chunk, and another driver comes."""
        self.scanner.stop_after = self.chance.randrange(4)
        with suppress(Stopped):
            await asyncio.to_thread(self.scan, 1)
        self.scanner.stop_after = None
        await self.do_drive()

    async def do_drive(self) -> None:
        old = self.writer
        self.drive()
        self.adopted_ids |= self.alive
        if (sources := self._sources()) and (written := self.ledger[str(self.chance.choice(sources))]):
            with suppress(StaleDriver, PipelineError):  # an old driver, back from the dead
                old.write([w.record for w in written if w.dropped is None][-3:])

    async def do_replay(self) -> None:
        """A batch again, split otherwise, by another task."""
        self.writer = self.writer.another_task()
        for source in self._read:
            self._read[source] = max(0, self._read[source] - self.chance.choice((0, 1, 5, 100)))
        await self.do_live()

    async def do_topic(self) -> None:
        free = [name for name in "abcd" if f"{self.name}.{name}" not in self.alive]
        if free:
            self._create(self.chance.choice(free), self.chance.choice((1, 2)))

    async def do_grow(self) -> None:
        if self.alive:
            topic = self.chance.choice(sorted(self.alive))
            count = sum(source.topic == topic for source in self._sources())
            self.grow(topic, count + 1)
            self.producer.list_topics(topic, 10)
            self.ledger[str(Partition(topic, count, self.alive[topic]))] = []

    async def do_delete(self) -> None:
        """A topic goes; a driver has noticed it before."""
        if self.alive:
            topic = self.chance.choice(sorted(self.alive))
            if topic not in self.adopted_ids or self.adopted_ids[topic] != self.alive[topic]:
                await self.do_drive()
            for source in self._sources():
                if source.topic == topic:
                    self._dropped(source, 1 << 60)
            del self.alive[topic]
            self.delete(topic)
            self._say(topic)

    async def do_again(self) -> None:
        """A topic is deleted and created again before the driver notices."""
        await self.do_delete()
        await self.do_topic()
        await self.do_put()

    async def do_drop(self) -> None:
        sources = [source for source in self._sources() if self.ledger[str(source)]]
        if sources:
            source = self.chance.choice(sources)
            before = self.chance.randint(1, len(self.ledger[str(source)]))
            self._dropped(source, before)
            for _ in range(50):
                with suppress(KafkaException):  # a topic that was just created may have no leader for a moment
                    self.forget(source.topic, source.partition, before)
                    break
                await asyncio.sleep(0.05)
            self._say(f"{source} before {before}")

    def _dropped(self, source: Partition, before: int) -> None:
        for written in self.ledger[str(source)]:
            if written.record.offset < before and written.dropped is None:
                written.dropped = self.now
                written.passed = self._read.get(source, 0) > written.record.offset

    async def do_forget(self) -> None:
        """A search is forgotten, if nobody follows it."""
        self.shards.call(0, "end", self.chance.choice(self.searches).id, 0)

    async def do_clock(self) -> None:
        """The clock of a service is set."""
        step = self.chance.choice((0, -3_600_000, 86_400_000, -400 * 86_400_000))
        self.chance.choice(self.services).grep.clock = lambda: now_ms() + step

    # Who reads.

    async def do_open(self) -> None:
        await self._some_of(await self._new_reader(), 0.05)

    async def do_read(self) -> None:
        if waiting := [reader for reader in self.readers if not reader.ended]:
            await self._some_of(self.chance.choice(waiting), self.chance.choice((0, 0.02, 0.3)))

    async def do_crowd(self) -> None:
        """Several come for the same search at once."""
        search = self.chance.choice(self.searches)
        readers = [await self._new_reader(search) for _ in range(4)]
        await asyncio.gather(*(self._some_of(reader, 0.05) for reader in readers))

    async def _new_reader(self, search: Search | None = None) -> Reader:
        chance = self.chance
        wanted: dict[str, Any] = {"start": chance.choice(("start", "start", "end", "time", "time"))}
        if wanted["start"] == "time":
            wanted["start"] = iso_time(NOON + chance.randrange(-6_000, 10_000))
        if chance.random() < 0.3:
            wanted["until"] = iso_time(NOON + chance.randrange(-6_000, 10_000))
        if chance.random() < 0.3:
            wanted["limit"] = chance.choice((0, 1, 5, 40))
        wanted["count"] = chance.random() < 0.2
        wanted["window"] = chance.choice((1024, 256 << 10))
        wanted["follow"] = chance.random() < 0.5
        wanted["on_gap"] = chance.choice(("skip", "skip", "fail"))
        if chance.random() < 0.15:
            wanted = {name: each for name, each in wanted.items() if name != "limit"}
            wanted |= {"client": f"client-{len(self.readers)}", "count": False}
        reader = Reader(search or chance.choice(self.searches), self.now, **wanted)
        self.readers.append(reader)
        self._say(f"reader {len(self.readers) - 1}: {wanted} of {self.searches.index(reader.search)}")
        return reader

    async def _some_of(self, reader: Reader, seconds: float) -> None:
        """Read for a while, or some frames; the last batch may be cut."""
        if reader.ended:
            return
        most = self.chance.choice((1, 3, 10, 1000))
        for _ in range(20):
            try:
                feed = await reader.open(self.chance.choice(self.services), self.now)
                break
            except BrokerUnavailable:  # a topic was deleted meanwhile
                await asyncio.sleep(0.1)
        else:
            raise AssertionError("the broker does not answer")
        await self._see(feed)
        with suppress(TimeoutError), reader.forgiving():
            try:
                async with asyncio.timeout(seconds):
                    async for frames in feed:
                        reader.take(frames[:most])
                        most -= len(frames)
                        if most <= 0:
                            break
            finally:
                await feed.aclose()

    async def _see(self, feed: GrepFeed) -> None:
        life = feed._history.life
        self.born.setdefault(life.number, self.now)
        stretches, _ = await feed._feeds.searches.stretches(life)
        for stretch in stretches:
            self.asked.setdefault((life.number, stretch.number), (self.now, stretch.ranges))

    async def _finish(self) -> None:
        self.now += 1
        self.drive()
        for serving in self.services:
            serving.grep.clock = now_ms
        with self.at_work():
            for number, reader in enumerate(self.readers):
                self._say(f"end of reader {number}")
                async with asyncio.timeout(PATIENCE_S):
                    while not reader.ended:
                        feed = await reader.open(self.chance.choice(self.services), self.now, follow=False)
                        await self._see(feed)
                        try:
                            with reader.forgiving():
                                async for frames in feed:
                                    reader.take(frames)
                        except asyncio.CancelledError:
                            self._say(
                                f"part {feed._part} of life {feed._history.life.number}, waiting for {feed._ends}"
                            )
                            raise
                        finally:
                            await feed.aclose()

    # What must have come of it.

    def _compare(self) -> None:
        for number, reader in enumerate(self.readers):
            try:
                self._check(reader)
            except AssertionError as error:
                self._say(f"reader {number}, opened at {reader.at}, lives {reader.lives}, lost {reader.lost}")
                raise AssertionError(f"reader {number} {reader.wanted}: {error}") from None

    def _check(self, reader: Reader) -> None:
        found = [event["id"] for event in reader.events]
        if "client" not in reader.wanted:  # who comes back by a name may get some of it again
            _check_order(found)
        every = {w.id: w for known in self.ledger.values() for w in known}
        for event in reader.events:
            written = every.get(event["id"])
            assert written is not None, f"{event['id']} was never written"
            assert self._wants(reader, written), f"{event['id']} does not match"
            assert _shown(event) == _expected(written.record), f"{event['id']} is another record"
        for event_id in reader.gone:
            assert every[event_id].dropped is not None, f"{event_id} is said to be gone, and is there"
        for source, first, until in reader.lost:
            for written in self.ledger[source][first:until]:
                assert written.dropped is not None, f"{written.id} is said to be lost, and is there"
        self._check_all_there(reader, set(found), every)

    def _wants(self, reader: Reader, written: Written) -> bool:
        record, wanted = written.record, reader.wanted
        since, until = wanted["start"], wanted.get("until")
        return (
            (since in ("start", "end") or iso_time(record.time) >= since)
            and (until is None or iso_time(record.time) <= until)
            and finds(reader.search, record)
        )

    def _check_all_there(self, reader: Reader, found: set[str], every: dict[str, Written]) -> None:
        limit = reader.wanted.get("limit")
        from_end = reader.wanted["start"] == "end"
        there = [w for w in every.values() if w.at <= reader.opened and (not from_end or w.at > reader.at)]
        wanted = [w for w in there if self._wants(reader, w)]
        if reader.wanted["count"]:
            least = sum(w.dropped is None for w in wanted)
            most = sum(self._wants(reader, w) for w in every.values())
            least, most = (min(n, limit) if limit is not None else n for n in (least, most))
            if reader.expired:
                least = 0
            assert least <= (reader.counted or 0) <= most, f"{reader.counted} counted, of {least} to {most}"
            return
        if limit is not None:
            assert len(found) <= limit
            if len(found) == limit:
                return
        if reader.expired or (from_end and len(reader.lives) > 1):
            return
        assert len(reader.lives) == 1 or "client" in reader.wanted, "it was not told that the search was forgotten"
        life, pins = list(reader.lives.items())[-1]
        for written in wanted:
            if written.id in found or written.id in reader.gone:
                continue
            offset = written.record.offset
            announced = any(s == written.source and first <= offset < until for s, first, until in reader.lost)
            live = offset >= pins.get(written.source, 0)
            asked = self.born[life] if live else self._asked_for(life, written)
            # Gone before anybody asked for it, or before the live query came to it, of which nothing is known.
            unknown = asked is None or (written.dropped or 0) <= asked or (live and not written.passed)
            if written.dropped is not None and (announced or unknown):
                continue
            raise AssertionError(
                f"{written.id} is missing: written at {written.at}, asked for at {asked}, "
                f"dropped at {written.dropped}, live: {live}"
            )

    def _asked_for(self, life: int, written: Written) -> int | None:
        """Return when the stretch that has a record was asked for."""
        for (number, _), (at, ranges) in self.asked.items():
            first, until = ranges.get(written.source, (0, 0))
            if number == life and first <= written.record.offset < until:
                return at
        return None


def _check_order(found: Sequence[str]) -> None:
    assert len(found) == len(set(found)), f"twice: {sorted({i for i in found if found.count(i) > 1})}"
    last: dict[str, int] = {}
    for event in found:
        source, _, offset = event.rpartition(":")
        assert last.get(source, -1) < int(offset), f"{event} came after {last[source]}"
        last[source] = int(offset)


def _shown(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["time"], repr(event["key"]), repr(event["headers"]), repr(event["data"])


def _expected(record: Record) -> tuple[Any, ...]:
    assert record.value is not None
    data = json.loads(record.value)
    return iso_time(record.time), repr(elements(record.key)), repr(headers_of(record)), repr(data)

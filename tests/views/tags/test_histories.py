"""Random histories of tags: written, packed, damaged, tagged otherwise, erased, forgotten by Kafka, and rebuilt."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tailrace.config.values import Where
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.log.request import ControlFrame, EventFrame
from tailrace.upkeep.examine import examine, read_logs
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.settings import TagRules
from tailrace.views.tags.upkeep import TagLogCopy
from tests.log.rig import ids
from tests.upkeep.past import MINUTE, Keeper, Seen, TagPast, tag_feeds

PIDS = tuple("pqrstu")
PATH_TAGS = ("red", "blue")
RULES: tuple[dict[str, dict[str, Any]], ...] = (
    {"big": {"n": {"$gt": 5}}},
    {"big": {"n": {"$gt": 2}}, "odd": {"n": {"$mod": [2, 1]}}},
    {"odd": {"n": {"$mod": [2, 1]}}, "red": {"n": 9}},
)
TAGS = (*PATH_TAGS, "big", "odd")


class Life:
    """One history, and what must be true of it."""

    def __init__(self, here: TagPast, chance: random.Random, back_ms: int) -> None:
        self.here, self.chance, self.back_ms = here, chance, back_ms
        self.at = 0
        self.first = [0, 0]
        self.damaged = False
        self.marks: dict[tuple[str, str], tuple[int, ...]] = {}
        """Of each tag and source that was taken out, where the partitions ended."""

    def write(self) -> None:
        records = []
        for _ in range(self.chance.randrange(1, 25)):
            self.at += self.chance.choice((0, 1, MINUTE, 10 * MINUTE, 10 * MINUTE, -self.back_ms))
            tags = self.chance.sample(PATH_TAGS, self.chance.randrange(3))
            records.append(self.here.event(self.chance.choice(PIDS), *tags, at=self.at, n=self.chance.randrange(10)))
        self.here.put(records, at_once=self.chance.randrange(1, 12))

    def pack(self) -> None:
        with Keeper(self.here.store, view="tags") as keeper:
            keeper.pack()

    def lose(self) -> None:
        tag = self.chance.choice(TAGS)
        segments = self.here.log(tag).segments
        if segments:
            client, key = self.here.segment_key(tag, self.chance.randrange(len(segments)))
            client.delete(key)
            self.damaged = True

    def retag(self) -> None:
        rules = self.chance.choice(RULES)
        self.here.restart(rules=TagRules({tag: Where(query) for tag, query in rules.items()}))
        self.rebuild()

    def forget(self) -> None:
        partition = self.chance.randrange(2)
        end = self.here._ends[partition]
        if end > self.first[partition]:
            self.first[partition] = self.chance.randrange(self.first[partition], end)
            self.here.forget(partition, self.first[partition])

    def rebuild(self) -> None:
        carried = {tag: {e.id: e for e in self.here.events(tag) if not self._is_retained(e.id)} for tag in TAGS}
        with self.here.restorer() as restoring:
            if self.chance.random() < 0.5:
                self.write()
            for tag in TAGS:
                assert restoring.restore(tag).verdict in ("rebuilt", "same")
        for tag in TAGS:
            wanted = {r.id for r, _ in self.here.named(tag) if self._is_retained(r.id)}
            gone = {r.id for r, more in self.here.named(tag) if self._is_erased(tag, more[0], r.id)}
            kept = {i for i, e in carried[tag].items() if not self._is_erased(tag, e.source, i)}
            assert {e.id for e in self.here.events(tag)} == (wanted - gone) | kept, tag
        self.damaged = False

    def cleanup(self) -> None:
        if self.damaged:
            self.rebuild()
        pid = self.chance.choice(PIDS)
        if not any(pid in self.here.numbers(tag) for tag in TAGS):
            return
        before = {tag: self.here.events(tag) for tag in TAGS}
        self.here.cleanup(pid)
        for tag, events in before.items():
            left = [e for e in events if e.source != pid]
            assert self.here.events(tag) == left
            if len(left) < len(events):
                self.marks[tag, pid] = tuple(self.here._ends)

    def _is_retained(self, event: str) -> bool:
        place, _, offset = event.rpartition(":")
        return int(offset) >= self.first[int(place.rpartition(":")[2])]

    def _is_erased(self, tag: str, pid: str, event: str) -> bool:
        place, _, offset = event.rpartition(":")
        return int(offset) < self.marks.get((tag, pid), (0, 0))[int(place.rpartition(":")[2])]

    def check(self) -> None:
        """A tag that is not damaged has gapless numbers up to the last assigned ones.

        Its timeuuids never fall along a partition, where times do not.
        """
        if self.damaged:
            return
        shards = self.here.shards
        copy = self.here.upkept.copy(self.here.settings)
        assert isinstance(copy, TagLogCopy)
        logs = read_logs(shards, "tags", [t for t in TAGS if self.here.log(t).segments])
        for examined in examine(shards, "tags", logs, {}, check_numbers=copy.check_numbers):
            assert not examined.findings, examined.findings
        for tag in TAGS:
            by_partition: dict[str, list[Seen]] = {}
            for event in self.here.events(tag):
                by_partition.setdefault(event.id.rpartition(":")[0], []).append(event)
            for events in () if self.back_ms else by_partition.values():
                assert [e.ms for e in events] == sorted(e.ms for e in events)


@pytest.mark.parametrize(("seed", "back_ms"), [(1, 0), (2, 20 * MINUTE)])
async def test_tags_stay_gapless_and_cursors_exact_whatever_happens_to_them(
    kafka: EmbeddedKafka, store: StoreOptions, seed: int, back_ms: int
) -> None:
    chance = random.Random(seed)
    here = TagPast(kafka.address, store, None, 2, tags__paths=["tags"], tags__source="key")
    life = Life(here, chance, back_ms)
    steps = [life.write, life.write, life.pack, life.lose, life.retag, life.forget, life.rebuild, life.cleanup]
    async with tag_feeds(store) as feeds:
        for _ in range(30):
            step: Any = chance.choice(steps)
            frames = [f for f in await feeds.all("red", follow=False) if isinstance(f, EventFrame)]
            is_whole = not life.damaged
            step()
            life.check()
            if is_whole and not life.damaged and frames and step in (life.write, life.pack, life.cleanup):
                at = chance.randrange(len(frames))
                rest = await feeds.all("red", after=frames[at].cursor, follow=False)
                seen = set(ids([*frames[: at + 1]]))
                gaps = [f for f in rest if isinstance(f, ControlFrame) and f.name == "gap"]
                assert gaps == [] or step == life.cleanup
                assert ids(rest) == [e.id for e in here.events("red") if e.id not in seen]

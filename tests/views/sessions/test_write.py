"""Sessions in the one pass: each sample once, in order, whatever is replayed, split otherwise or run twice."""

from __future__ import annotations

import glob
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.settings import Settings
from tailrace.driver.hooks import Start
from tailrace.log.event import Partition
from tailrace.valkey.marks import advance, lowest, read_counts, read_marks
from tailrace.valkey.shards import StoreOptions
from tailrace.views.sessions.write import VIEW, SessionsDriver
from tests.examples import examples
from tests.views.sessions.histories import History
from tests.views.sessions.mortal import STEPS, Died, dying
from tests.views.sessions.recorded import MS, T0, Track, doubles
from tests.writing import Record

_fresh = count()


def held_back(track: Track) -> Mapping[Partition, int]:
    """Return the marks after which a start of the driver reads."""
    start = Start(Settings(), track.shards, track.driver.epoch)
    return SessionsDriver(track.plan).marks(start, lowest(read_marks(track.shards, VIEW)))


def test_a_session_begins_with_its_json_alone_and_ends_with_it(any_store: StoreOptions) -> None:
    track = Track(any_store)
    track.write(
        track.open(identifier="Lap 1", configBindings=[{"identifier": "none", "channelOffset": 0}], details=None),
        track.periodic("lap", 0, [1, 2, 3]),
        track.periodic("lap", 3, [4]),
        track.close(),
    )
    (session,) = track.sessions()
    assert session.kinds == [["session_json"], ["time_range", "periodic_data"], ["session_json"]]
    assert session.samples == {1: [(T0 + i * MS, value) for i, value in enumerate(doubles(1, 2, 3, 4))]}
    assert session.ranges == [(T0, T0 + 3 * MS)]
    first, last = session.jsons
    assert first["identity"] == "lap"
    assert first["identifier"] == "Lap 1"
    assert first["state"] == "open"
    assert first["details"] is None
    assert "markers" not in first
    assert last["state"] == "closed"
    stored = track.hash()
    assert msgspec.json.decode(stored["json"]) == last
    assert (stored["tStart"], stored["tEnd"], stored["state"]) == (str(T0), str(T0 + 3 * MS), "closed")
    assert (stored["streamName"], stored["streamPosition"], stored["opened"]) == (track.stream(), "0-0", "0")
    counts = read_counts(track.shards, VIEW)
    assert counts == {"in": 4, "stored": 4}


# Any split, any replay, any death.


@examples(25)
@given(seed=st.integers(0, 1 << 32))
def test_any_split_and_replay_writes_every_sample_once_in_order(store: StoreOptions, seed: int) -> None:
    chance = random.Random(seed)
    track = Track(fresh(store), burst=chance.choice((1 << 10, 64 << 10)), window=chance.choice((1, 5_000, 1 << 20)))
    history = History(track, chance, 60)
    tasks = [track.driver, track.driver.another_task(), track.driver.another_task()]
    for batch in in_batches(history, chance):
        chance.choice(tasks).write(batch)
    track.driver.another_task().write([*history.of(1)[:20], *history.of(0)])
    history.check()


@examples(25)
@given(seed=st.integers(0, 1 << 32))
def test_tasks_that_die_between_any_two_steps_lose_and_repeat_nothing(store: StoreOptions, seed: int) -> None:
    chance = random.Random(seed)
    track = Track(fresh(store), window=chance.choice((1, 5_000, 1 << 20)))
    history = History(track, chance, 60)
    for batch in in_batches(history, chance):
        for _ in range(chance.choice((0, 1, 2))):
            # Whoever comes next may have got other batches: fewer records, or more.
            least = {record.partition: record.offset for record in reversed(batch)}
            most = {record.partition: record.offset + chance.choice((0, 0, 5)) for record in batch}
            part = [r for r in history.records if least.get(r.partition, 1 << 60) <= r.offset <= most[r.partition]]
            with suppress(Died):
                dying(track.driver, chance.choice(STEPS)).write(sorted(part[: chance.randint(1, len(part))], key=place))
        track.driver.another_task().write(batch)
    history.check()


def place(record: Record) -> tuple[int, int]:
    return record.partition, record.offset


def in_batches(history: History, chance: random.Random) -> Iterator[list[Record]]:
    """Yield the records of both partitions in random portions, some of them again."""
    done = [0, 0]
    while any(done[p] < len(history.of(p)) for p in range(2)):
        batch: list[Record] = []
        for p in chance.sample(range(2), chance.randint(1, 2)):
            records = history.of(p)
            end = min(len(records), done[p] + chance.randint(1, 12))
            batch += records[max(0, done[p] - chance.choice((0, 0, 1, 7))) : end]
            done[p] = end
        if batch:
            yield batch


def fresh(store: StoreOptions) -> StoreOptions:
    return msgspec.structs.replace(store, prefix=f"{store.prefix}s{next(_fresh)}")


def test_two_tasks_that_write_the_same_records_at_once_write_them_once(any_store: StoreOptions) -> None:
    track = Track(any_store, window=2_000)
    history = History(track, random.Random(7), 80)
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        chance, task = random.Random(seed), track.driver.another_task()
        try:
            for batch in in_batches(history, chance):
                task.write(batch)
        except BaseException as error:
            errors.append(error)

    together(run, 3)
    assert not errors
    history.check()


def test_partitions_that_share_a_stream_and_a_session_read_again_what_the_other_changed(
    any_store: StoreOptions,
) -> None:
    track = Track(any_store, "{topic}")
    track.write(track.open("lap", group="g"))
    records = [
        [track.periodic("lap", i * 10, [i] * 10, channel=partition, partition=partition) for i in range(30)]
        for partition in range(3)
    ]

    def run(partition: int) -> None:
        task = track.driver.another_task()
        for i in range(0, 30, 3):
            task.write(records[partition][i : i + 3])

    together(run, 3)
    track.write(*[record for each in records for record in each])
    track.write(track.close(partition=2))
    (session,) = track.sessions()
    for partition in range(3):
        assert session.samples[partition] == [(T0 + i * MS, *doubles(i // 10)) for i in range(300)]
    assert session.ranges == sorted(set(session.ranges))
    assert (track.hash()["state"], track.hash()["tEnd"]) == ("closed", str(T0 + 299 * MS))
    assert session.kinds[-1] == ["session_json"]


def together(run: Callable[[int], None], n: int) -> None:
    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Snapshot:
    """Keys as they were, to be put back as if a server had lost what came after."""

    def __init__(self, track: Track, pattern: str) -> None:
        (self._node,) = track.shards.primaries()
        self._pattern = pattern
        self._was: dict[bytes, Any] = {key: self._node.dump(key) for key in self._node.scan_iter(pattern)}

    def put_back(self) -> None:
        for key in list(self._node.scan_iter(self._pattern)):
            self._node.delete(key)
        for key, value in self._was.items():
            self._node.restore(key, 0, value)


def passed(track: Track, *records: Record) -> None:
    """Write records, and raise the marks of the shards that had nothing in them, as the driver does."""
    track.write(*records)
    advance(track.shards, VIEW, track.driver.epoch, {Partition(track.topic, 0): records[-1].offset})


@pytest.mark.parametrize("who", ["stream", "shards"])
def test_a_store_that_lost_its_last_writes_gets_them_again_and_counts_them_once(store: StoreOptions, who: str) -> None:
    track = Track(store)
    chance = random.Random(3)
    history = History(track, chance, 80, partitions=1)
    passed(track, *history.records[:30])
    pattern = f"*stream:{glob.escape(track.stream())}*" if who == "stream" else f"{store.prefix}:{{[0-9]*"
    before = Snapshot(track, pattern)
    passed(track, *history.records[30:60])
    before.put_back()
    (start,) = held_back(track).values()
    assert start == 29
    track.driver.another_task().write(history.records[start + 1 :])
    history.check()


def test_a_view_that_begins_at_the_end_takes_nothing_from_before_though_others_read_it(store: StoreOptions) -> None:
    track = Track(store)
    source = Partition(track.topic, 0)
    records = [track.periodic("lap", i, [i]) for i in range(6)]
    advance(track.shards, VIEW, track.driver.epoch, {source: 2})
    track.write(*records[:5])
    assert track.sessions()[0].samples == {1: [(T0 + i * MS, *doubles(i)) for i in (3, 4)]}
    assert read_counts(track.shards, VIEW) == {"in": 2, "stored": 2}
    # Beyond the last record are offsets without any; nothing is read again because of them.
    advance(track.shards, VIEW, track.driver.epoch, {source: 9})
    assert held_back(track) == {source: 9}

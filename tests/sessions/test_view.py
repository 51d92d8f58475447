"""Sessions in the one pass: each sample once, in order, whatever is replayed, split otherwise or run twice."""

from __future__ import annotations

import base64
import glob
import random
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.model.block import unpack
from tailrace.model.burst import parse
from tailrace.model.event import Source
from tailrace.model.session import Session
from tailrace.pipeline.sessions import VIEW, held_back
from tailrace.pipeline.slice import Limits
from tailrace.stores.marks import advance, lowest, read_counts, read_marks
from tailrace.stores.sessions import Change, SessionStore, Verdict, Write, state_of
from tailrace.stores.valkey import StoreOptions, mapping
from tests.sessions.histories import History
from tests.sessions.mortal import STEPS, Died, dying
from tests.sessions.recorded import MS, T0, Track, doubles
from tests.writing import Record

_fresh = count()


def test_a_session_begins_with_its_json_alone_and_ends_with_it(any_store: StoreOptions) -> None:
    track = Track(any_store)
    track.write(
        track.open(identifier="Lap 1", configBindings=[{"identifier": "none", "channelOffset": 0}], details=None),
        track.periodic("lap", 0, [1, 2, 3]),
        track.periodic("lap", 3, [4]),
        track.close(),
    )
    (told,) = track.told()
    assert told.kinds == [["session_json"], ["time_range", "periodic_data"], ["session_json"]]
    assert told.samples == {1: [(T0 + i * MS, value) for i, value in enumerate(doubles(1, 2, 3, 4))]}
    assert told.ranges == [(T0, T0 + 3 * MS)]
    first, last = told.jsons
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


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    (told,) = track.told()
    for partition in range(3):
        assert told.samples[partition] == [(T0 + i * MS, *doubles(i // 10)) for i in range(300)]
    assert told.ranges == sorted(set(told.ranges))
    assert (track.hash()["state"], track.hash()["tEnd"]) == ("closed", str(T0 + 299 * MS))
    assert told.kinds[-1] == ["session_json"]


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
    advance(track.shards, VIEW, track.driver.epoch, {Source(track.topic, 0): records[-1].offset})


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
    marks = lowest(read_marks(track.shards, VIEW))
    (start,) = held_back(track.shards, track.plan, marks).values()
    assert start == 29
    track.driver.another_task().write(history.records[start + 1 :])
    history.check()


def test_a_view_that_begins_at_the_end_takes_nothing_from_before_though_others_read_it(store: StoreOptions) -> None:
    track = Track(store)
    source = Source(track.topic, 0)
    records = [track.periodic("lap", i, [i]) for i in range(6)]
    advance(track.shards, VIEW, track.driver.epoch, {source: 2})
    track.write(*records[:5])
    assert track.told()[0].samples == {1: [(T0 + i * MS, *doubles(i)) for i in (3, 4)]}
    assert read_counts(track.shards, VIEW) == {"in": 2, "stored": 2}
    # Beyond the last record are offsets without any; nothing is read again because of them.
    advance(track.shards, VIEW, track.driver.epoch, {source: 9})
    assert held_back(track.shards, track.plan, lowest(read_marks(track.shards, VIEW))) == {source: 9}


# What records say.


def test_topics_without_sessions_are_counted_and_left_alone(store: StoreOptions) -> None:
    track = Track(store)
    track.write()
    track.write(Record(0), Record(1, value=None), Record(2, value=b"{"))
    assert read_counts(track.shards, VIEW) == {"in": 3, "dead": 1, "skipped:no-sessions": 2}
    assert lowest(read_marks(track.shards, VIEW))[Source("jobs", 0)] == -1
    assert not track.told()


def test_bad_records_and_parts_go_to_the_dead_letters_and_their_neighbours_into_the_stream(store: StoreOptions) -> None:
    track = Track(store, limits=Limits(8 << 20))
    good = {"channel": 1, "start": T0, "interval": MS, "values": [1, 2]}
    bad: list[tuple[str, str, dict[str, Any]]] = [
        ("periodic", "channel", {**good, "channel": -1}),
        ("periodic", "start", {**good, "start": 1.5}),
        ("periodic", "64 bits", {**good, "start": "9223372036854775807"}),
        ("periodic", "in digits", {**good, "start": "noon"}),
        ("periodic", "bad-interval", {**good, "interval": 0}),
        ("periodic", "either", {**good, "data": "AAAA"}),
        ("periodic", "bad-width", {"channel": 1, "start": T0, "interval": MS, "data": "AAAA"}),
        ("periodic", "out-of-range", {**good, "as": "u8", "values": [256]}),
        ("periodic", "not-an-integer", {**good, "as": "s16", "values": [0.5]}),
        ("periodic", "null", {**good, "as": "s16", "values": [None]}),
        ("periodic", "float", {**good, "values": ["1"]}),
        ("periodic", "enum", {**good, "as": "u64"}),
        ("periodic", "unknown field", {**good, "color": 1}),
        ("timestamped", "times are either", {"channel": 1, "values": [1]}),
        ("timestamped", "bad-count", {"channel": 1, "times": [T0], "values": [1, 2]}),
        ("timestamped", "64 bits", {"channel": 1, "start": T0, "scale": 1 << 62, "deltas": [1, 7], "values": [1, 2]}),
        ("rows", "bad-count", {"channels": [1, 2], "time": T0, "values": [1, 2, 3]}),
        ("rows", "bad-width", {"channels": [1, 2], "time": T0, "data": "AAAA"}),
        ("events", "text", {"id": 1, "time": T0, "text": 5}),
        ("events", "too-large", {"id": 1, "time": T0, "text": "x" * (1 << 20)}),
        ("range", "after its end", {"start": T0 + 1, "end": T0}),
    ]
    records: list[Record] = [track.open()]
    for name, _, part in bad:
        parts: dict[str, Any] = {"periodic": [{**good, "channel": 100 + len(records)}]}
        if name == "range":
            parts[name] = part
        else:
            parts[name] = [*parts.get(name, []), part]
        records.append(track.data(**parts))
    values = [b"[]", b"5", b"{}", b'{"type":"nothing"}', b'{"type":"config"}', b'{"type":"data","session":1}']
    records += [track.raw(value) for value in values]
    records += [track.raw(b'{"type":"data"}', None), track.raw(b'{"type":"data"}', "a\x01b"), track.raw(b"{")]
    track.write(*records)
    letters = track.letters()
    assert [letter["offset"] for letter in letters] == list(range(1, len(records)))
    for letter, (name, what, _) in zip(letters, bad, strict=False):
        assert letter["reason"] == "bad-part"
        (part,) = letter["parts"]
        assert part["part"].startswith(name)
        assert what in part["what"]
    reasons = [letter["reason"] for letter in letters[len(bad) :]]
    assert reasons == ["bad-record"] * 6 + ["no-session", "bad-identity", "invalid-json"]
    (told,) = track.told()
    for i in range(len(bad)):
        assert told.samples[101 + i] == [(T0, *doubles(1)), (T0 + MS, *doubles(2))]
    assert read_counts(track.shards, VIEW) == {"in": len(records), "stored": 1, "dead": len(records) - 1}


def test_a_large_record_becomes_several_messages_and_no_burst_is_over_the_limit(store: StoreOptions) -> None:
    track = Track(store, limits=Limits(16 << 20))
    values = [float(i) for i in range(600_000)]
    data = base64.b64encode(struct.pack(f"<{len(values)}d", *values)).decode()
    times = [T0 + i * i for i in range(100_000)]
    timed = {"channel": 2, "times": times, "values": values[: len(times)]}
    track.write(
        track.data(periodic=[{"channel": 1, "start": T0, "interval": 7, "data": data}], timestamped=[timed]),
        track.periodic("lap", 0, [5.0], channel=3),
    )
    (told,) = track.told()
    assert told.samples[1] == list(zip((T0 + 7 * i for i in range(len(values))), doubles(*values), strict=True))
    assert told.samples[2] == list(zip(times, doubles(*values[: len(times)]), strict=True))
    assert told.entries > (8 * len(values) + 9 * len(times)) // (64 << 10)


def test_session_json_that_no_message_can_hold_goes_to_the_dead_letters(store: StoreOptions) -> None:
    track = Track(store, limits=Limits(4 << 20))
    half = "x" * (600 << 10)
    track.write(
        track.open(),
        track.record("lap", "session", json={"group": "y" * (1 << 20)}),
        track.record("lap", "session", json={"group": half}),
        track.record("lap", "session", json={"type": half}),
        track.record("big", "open", json={"group": "y" * (1 << 20)}),
        track.close(),
    )
    assert [(letter["offset"], letter["reason"]) for letter in track.letters()] == [
        (offset, "session-too-large") for offset in (1, 3, 4)
    ]
    (told,) = track.told()
    assert [json["state"] for json in told.jsons] == ["open", "open", "closed"]
    assert track.hash("big") == {}


def test_properties_that_are_missing_or_null_stay_and_empty_ones_replace(store: StoreOptions) -> None:
    track = Track(store)
    bindings = [{"identifier": "c", "channelOffset": 3}]
    track.write(
        track.open(details={"driver": "A"}, configBindings=bindings, group="g"),
        track.record("lap", "session", json={"details": None, "children": ["x"]}),
        track.record("lap", "session", json={"configBindings": [], "details": {"driver": 5, "wet": True}}),
        track.record("lap", "session", json={"configBindings": "c", "details": {"a": {"b": 1}}, "quality": 0.5}),
    )
    (told,) = track.told()
    required = {"identity": "lap", "identifier": "lap", "state": "open", "timestamp": told.jsons[0]["timestamp"]}
    assert told.jsons == [
        {**required, "details": {"driver": "A"}, "configBindings": bindings, "group": "g"},
        {**required, "group": "g", "details": None, "children": ["x"]},
        {**required, "group": "g", "configBindings": [], "details": {"driver": 5, "wet": True}},
        {**required, "group": "g", "quality": 0.5},
    ]
    merged = msgspec.json.decode(track.hash()["merged"])
    known = {"details": {"driver": 5, "wet": True}, "configBindings": [], "children": ["x"], "quality": 0.5}
    assert merged == {**required, "group": "g", **known}
    (letter,) = track.letters()
    assert [part["part"] for part in letter["parts"]] == ["json.configBindings", "json.details"]


def test_samples_are_packed_as_the_configuration_says_also_one_that_comes_later(store: StoreOptions) -> None:
    track = Track(store)
    identifier = track.topic
    channels = [{"id": 1, "type": "s16"}, {"id": 2, "type": "f32"}]
    config = {"app": {"parameters": [{"id": "v", "channels": [1], "byteOrder": "be"}], "channels": channels}}
    bindings = [{"identifier": identifier, "channelOffset": 10}]
    row = {"channels": [11, 12], "time": T0, "values": [-2, 0.5]}
    track.write(
        track.open(configBindings=bindings),
        track.data(periodic=[{"channel": 77, "start": T0, "interval": MS, "values": [9]}], rows=[row]),
        track.record("lap", "config", identifier=identifier, config=config),
        track.data(rows=[row], periodic=[{"channel": 77, "start": T0, "interval": MS, "values": [9]}]),
        track.record("lap", "config", identifier=identifier, config={}),
        track.record("lap", "config", identifier=identifier, config=config),
    )
    key = track.shards.keys.stream(track.stream())
    assert SessionStore(track.shards).configs([identifier]) == {identifier: msgspec.json.encode(config)}
    assert [(letter["offset"], letter["parts"][0]["part"]) for letter in track.letters()] == [
        (3, "periodic[0]"),
        (4, "config"),
    ]
    # Of which type the first row was nobody had said.
    entries = track.shards.run_keyed([(key, ("XRANGE", key, "-", "+"))])[0]
    rows = [m.row_data.buffer for _, flat in entries for m in messages(flat) if m.WhichOneof("data") == "row_data"]
    assert rows == [b"".join(doubles(-2, 0.5)), struct.pack(">h", -2) + struct.pack("<f", 0.5)]


def test_a_session_that_is_open_in_another_stream_is_refused_until_it_is_over_there(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open(partition=0), track.open(partition=1), track.periodic("lap", 0, [1], partition=1))
    track.write(track.close(partition=0))
    track.write(track.periodic("lap", 0, [2], partition=1))
    track.write(track.periodic("lap", 0, [3], partition=0))
    letters = [(letter["partition"], letter["offset"], letter["reason"]) for letter in track.letters()]
    assert letters == [
        (0, 2, "session-elsewhere"),
        (1, 0, "session-elsewhere"),
        (1, 1, "session-elsewhere"),
    ]
    assert [told.samples for told in track.told(1)] == [{1: [(T0, *doubles(2))]}]
    assert track.hash()["streamName"] == track.stream(1)


def test_a_session_that_was_given_up_is_open_again_when_it_speaks(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open(), track.periodic("lap", 0, [1]))
    sessions = SessionStore(track.shards, track.plan.store)

    def give_up() -> Verdict:
        _, values = sessions.read(track.stream(), "", ["lap"])
        over = Session.decode(state_of(values["lap"])).abandoned()
        change = Change("lap", over.number, values["lap"], over.encode(), over.order, over.fields())
        (verdict,) = sessions.write([Write(track.stream(), "", 0, 0, [change], [])])
        return verdict

    assert give_up() is Verdict.OK
    assert track.hash()["state"] == "abandoned"
    track.write(track.periodic("lap", 1, [2]))
    assert track.hash()["state"] == "open"
    assert give_up() is Verdict.OK
    track.write(track.close())
    (told,) = track.told()
    assert [json["state"] for json in told.jsons] == ["open", "open", "closed"]
    assert told.samples == {1: [(T0, *doubles(1)), (T0 + MS, *doubles(2))]}


def messages(flat: Any) -> list[Any]:
    return list(parse(unpack(mapping(flat)[b"data"], "block")).data)

"""Records in the streams of sessions: good ones, bad ones, and those of other streams."""

from __future__ import annotations

import base64
import json
import struct
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tailrace.driver.slice import RecordLimits
from tailrace.log.event import Partition
from tailrace.valkey.marks import lowest, read_counts, read_marks
from tailrace.valkey.shards import StoreOptions, mapping
from tailrace.views.sessions.burst import parse, unpack
from tailrace.views.sessions.model import Session
from tailrace.views.sessions.store import SessionChange, SessionStore, Verdict, Write, state_of
from tailrace.views.sessions.write import VIEW
from tests.examples import examples
from tests.views.sessions.mortal import Died, dying
from tests.views.sessions.recorded import MS, T0, Track, doubles
from tests.writing import Record

_fresh = count()


def test_topics_without_sessions_are_counted_and_left_alone(store: StoreOptions) -> None:
    track = Track(store)
    track.write()
    track.write(Record(0), Record(1, value=None), Record(2, value=b"{"))
    assert read_counts(track.shards, VIEW) == {"in": 3, "dead": 1, "skipped:no-sessions": 2}
    assert lowest(read_marks(track.shards, VIEW))[Partition("jobs", 0)] == -1
    assert not track.sessions()


def test_bad_records_and_parts_go_to_the_dead_letters_and_their_neighbours_into_the_stream(store: StoreOptions) -> None:
    track = Track(store, limits=RecordLimits(8 << 20))
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
    (session,) = track.sessions()
    for i in range(len(bad)):
        assert session.samples[101 + i] == [(T0, *doubles(1)), (T0 + MS, *doubles(2))]
    assert read_counts(track.shards, VIEW) == {"in": len(records), "stored": 1, "dead": len(records) - 1}


def test_a_record_with_a_field_that_only_configurations_have_is_of_its_session_all_the_same(
    store: StoreOptions,
) -> None:
    track = Track(store)
    track.write(track.open())
    track.write(
        track.data(identifier=5, range={"start": 1, "end": 2}),
        track.data(identifier=[5], range={"start": 1, "end": 3}),
        track.record("lap", "config", identifier=[5], config={}),
    )
    assert [(letter["offset"], letter["reason"]) for letter in track.letters()] == [
        (1, "bad-part"),
        (2, "bad-part"),
        (3, "bad-record"),
    ]
    (session,) = track.sessions()
    assert session.ranges == [(1, 3)]


def test_times_may_be_any_of_64_bits(store: StoreOptions) -> None:
    track = Track(store)
    first, last = -(1 << 63), (1 << 63) - 1
    track.write(
        track.data(periodic=[{"channel": 1, "start": last, "interval": 5, "values": [1]}]),
        track.data(periodic=[{"channel": 2, "start": first, "interval": last, "values": [1, 2, 3]}]),
        track.data(timestamped=[{"channel": 3, "times": [first, last, 0], "values": [1, 2, 3]}]),
    )
    (session,) = track.sessions()
    assert {channel: [time for time, _ in samples] for channel, samples in session.samples.items()} == {
        1: [last],
        2: [first, -1, last - 1],
        3: [first, last, 0],
    }
    assert session.ranges == [(first, last)]


_NAMES = "type session identifier json config configs state periodic timestamped rows events range other"
_PARTS = "channel channels start end interval times time values data as id"
_WORDS = st.sampled_from(["lap", "open", "data", "config", "close", "session", "closed"])
_PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_JSON = st.recursive(
    _PLAIN | _WORDS,
    lambda each: (
        st.lists(each, max_size=2) | st.dictionaries(st.sampled_from(_PARTS.split(" ")) | st.text(), each, max_size=4)
    ),
)
_FIELDS = st.lists(st.tuples(st.sampled_from(_NAMES.split(" ")), _JSON), max_size=3)


@examples(25)
@given(drawn=st.lists(st.tuples(_WORDS, _FIELDS, st.booleans()), min_size=1, max_size=20))
def test_whatever_records_are_each_of_them_is_stored_skipped_or_dead(store: StoreOptions, drawn: Any) -> None:
    track = Track(msgspec.structs.replace(store, prefix=f"{store.prefix}r{next(_fresh)}"))
    track.write(track.open())
    records: list[Record] = []
    for kind, fields, at_end in drawn:
        pairs = [*fields, ("type", kind)] if at_end else [("type", kind), *fields]
        written = ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in pairs)
        records.append(track.raw(f"{{{written}}}".encode()))
    track.write(*records)
    counts = read_counts(track.shards, VIEW)
    assert counts.pop("in") == 1 + len(records) == sum(counts.values())


def test_a_large_record_becomes_several_messages_and_no_burst_is_over_the_limit(store: StoreOptions) -> None:
    track = Track(store, limits=RecordLimits(16 << 20))
    values = [float(i) for i in range(600_000)]
    data = base64.b64encode(struct.pack(f"<{len(values)}d", *values)).decode()
    times = [T0 + i * i for i in range(100_000)]
    timed = {"channel": 2, "times": times, "values": values[: len(times)]}
    track.write(
        track.data(periodic=[{"channel": 1, "start": T0, "interval": 7, "data": data}], timestamped=[timed]),
        track.periodic("lap", 0, [5.0], channel=3),
    )
    (session,) = track.sessions()
    assert session.samples[1] == list(zip((T0 + 7 * i for i in range(len(values))), doubles(*values), strict=True))
    assert session.samples[2] == list(zip(times, doubles(*values[: len(times)]), strict=True))
    assert session.entries > (8 * len(values) + 9 * len(times)) // (64 << 10)


def test_session_json_that_no_message_can_hold_goes_to_the_dead_letters(store: StoreOptions) -> None:
    track = Track(store, limits=RecordLimits(4 << 20))
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
    (session,) = track.sessions()
    assert [json["state"] for json in session.jsons] == ["open", "open", "closed"]
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
    (session,) = track.sessions()
    required = {"identity": "lap", "identifier": "lap", "state": "open", "timestamp": session.jsons[0]["timestamp"]}
    assert session.jsons == [
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
    assert [session.samples for session in track.sessions(1)] == [{1: [(T0, *doubles(2))]}]
    assert track.hash()["streamName"] == track.stream(1)


def test_a_task_that_died_in_an_opening_does_not_keep_its_partition_from_a_name_that_lived_elsewhere_since(
    store: StoreOptions,
) -> None:
    track = Track(store)
    opening = track.open(partition=1)
    with suppress(Died):
        dying(track.driver, ("claim", None)).write([opening])
    track.write(track.open(partition=0), track.close(partition=0))
    track.write(opening)
    assert track.hash()["streamName"] == track.stream(1)
    assert len(track.sessions(1)) == 1


def test_a_session_that_was_given_up_is_open_again_when_it_speaks(store: StoreOptions) -> None:
    track = Track(store)
    track.write(track.open(), track.periodic("lap", 0, [1]))
    sessions = SessionStore(track.shards, track.plan.store)

    def give_up() -> Verdict:
        _, values = sessions.read(track.stream(), "", ["lap"])
        over = Session.decode(state_of(values["lap"])).abandoned()
        change = SessionChange("lap", over.number, values["lap"], over.encode(), over.order, over.fields())
        (verdict,) = sessions.write([Write(track.stream(), "", 0, 0, [change], [])])
        return verdict

    assert give_up() is Verdict.OK
    assert track.hash()["state"] == "abandoned"
    track.write(track.periodic("lap", 1, [2]))
    assert track.hash()["state"] == "open"
    assert give_up() is Verdict.OK
    track.write(track.close())
    (session,) = track.sessions()
    assert [json["state"] for json in session.jsons] == ["open", "open", "closed"]
    assert session.samples == {1: [(T0, *doubles(1)), (T0 + MS, *doubles(2))]}


def messages(flat: Any) -> list[Any]:
    return list(parse(unpack(mapping(flat)[b"data"], "block")).data)

"""The store of sessions: marks, versions, claims and the order of steps, on a real Valkey, a real cluster and Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count

import pytest

from tailrace.errors import StoreChanged, StoreError, StoreUnavailable
from tailrace.valkey.shards import Arg, Nodes, Shards, Slots, StoreOptions, load_functions, mapping, prepare
from tailrace.views.sessions.store import (
    Opening,
    Owner,
    SessionChange,
    SessionOptions,
    SessionStore,
    Verdict,
    Write,
    state_of,
)
from tests.views.sessions.recorded import claim

_fresh = count()
NOTHING = -1


def a_name(what: str = "s") -> str:
    """The keys of sessions have no prefix: each test has names of its own."""
    return f"{what}-{next(_fresh)}"


def a_store(options: StoreOptions, **given: object) -> SessionStore:
    shards = Shards(options).open()
    load_functions(shards)
    return SessionStore(shards, SessionOptions(), **given)  # type: ignore[arg-type]


def a_change(
    stream: str,
    identity: str,
    number: int,
    records: int,
    *,
    seen: bytes = b"",
    state: str = "open",
    writer: str = "t:0",
    opened: int = 0,
    amendment: int = 0,
    more: Mapping[str, Arg] | None = None,
) -> SessionChange:
    fields: dict[str, Arg] = {
        "streamSessionId": number,
        "streamName": stream,
        "streamPosition": "0-0",
        "json": f"json-{records}",
        "state": state,
        "writer": writer,
        "opened": opened,
    }
    value = f"state-{number}-{records}-{state}".encode()
    return SessionChange(identity, number, seen, value, (number, records, amendment), {**fields, **(more or {})})


def entries_of(store: SessionStore, stream: str) -> list[tuple[int, bytes]]:
    key = store.shards.keys.stream(stream)
    found = store.shards.run_keyed([(key, ("XRANGE", key, "-", "+"))])[0]
    assert all(list(mapping(fields)) == [b"id", b"data"] for _, fields in found)
    return [(int(mapping(fields)[b"id"]), mapping(fields)[b"data"]) for _, fields in found]


def hash_of(store: SessionStore, identity: str) -> dict[str, str]:
    key = store.shards.keys.session(store.options.key, identity)
    (answer,) = store.shards.run_keyed([(key, ("HGETALL", key))])
    return {field.decode(): value.decode() for field, value in mapping(answer).items()}


def test_a_session_is_opened_written_and_read_back(any_store: StoreOptions) -> None:
    store, stream, identity = a_store(any_store, clock=lambda: 1_000.5), a_name("stream"), a_name("lap")
    assert store.read(stream, "t:0", [identity]) == (NOTHING, {})
    claimed = claim(store, stream, identity, "t:0", 7)
    assert claimed is not None
    number, position = claimed
    assert position == "0-0"
    change = a_change(stream, identity, number, 1, opened=7)
    written = store.write([Write(stream, "t:0", NOTHING, 9, [change], [(number, b"one"), (number, b"two")])])
    assert written == [Verdict.OK]
    assert entries_of(store, stream) == [(number, b"one"), (number, b"two")]
    mark, values = store.read(stream, "t:0", [identity, "nobody"])
    assert (mark, {i: state_of(value) for i, value in values.items()}) == (9, {identity: change.value})
    found = hash_of(store, identity)
    assert found["order"] == f"{number} 1 0"
    assert found["lastUpdated"] == "1000500"
    assert store.owners([identity, "nobody"]) == {identity: Owner(stream, "open", number)}
    assert stream in store.streams()
    assert store.stream_marks([stream]) == {stream: {"t:0": 9}}
    keys = store.shards.keys
    key = keys.session(store.options.key, identity)
    left, score = store.shards.run_keyed(
        [(key, ("PTTL", key)), (keys.sessions(), ("ZSCORE", keys.sessions(), identity))]
    )
    assert 0 < left <= store.options.expire_ms
    assert float(score) == 1_000_500


def test_the_ledger_says_which_records_the_entries_are_of(any_store: StoreOptions) -> None:
    store, stream = a_store(any_store), a_name("stream")
    store.write([Write(stream, "t:0", NOTHING, 4, (), [(1, b"a"), (1, b"b")])])
    store.write([Write(stream, "t:0", 4, 5)])
    store.write([Write(stream, "t:0", 5, 8, (), [(1, b"c")])])
    key, ledger = store.shards.keys.stream(stream), store.shards.keys.ledger(stream)
    entries, noted = store.shards.run_keyed([(key, ("XRANGE", key, "-", "+")), (key, ("XRANGE", ledger, "-", "+"))])
    assert [(at, mapping(fields)) for at, fields in noted] == [
        (entries[1][0], {b"w": b"t:0", b"f": b"-1", b"m": b"4", b"a": b"1"}),
        (entries[2][0], {b"w": b"t:0", b"f": b"5", b"m": b"8", b"a": b"0"}),
    ]


def test_a_key_of_another_kind_is_no_session_and_stops_nobody_else(any_store: StoreOptions) -> None:
    store, stream, mine, other = a_store(any_store), a_name("stream"), a_name("lap"), a_name("lap")
    key = store.shards.keys.session(store.options.key, mine)
    store.shards.run_keyed([(key, ("SET", key, "mine"))])
    (number, _) = claim(store, stream, mine, "t:0", 0) or (0, "")
    (second, _) = claim(store, stream, other, "t:1", 0) or (0, "")
    taken = Write(stream, "t:0", NOTHING, 0, [a_change(stream, mine, number, 1)], [(number, b"a")])
    fine = Write(stream, "t:1", NOTHING, 0, [a_change(stream, other, second, 1)], [(second, b"b")])
    assert store.write([taken, fine]) == [Verdict.TAKEN, Verdict.OK]
    assert entries_of(store, stream) == [(second, b"b")]
    assert store.owners([mine, other]) == {
        mine: Owner("", "", 0, f"{key} is a string"),
        other: Owner(stream, "open", second),
    }
    assert store.hash_fields([mine, other], ["state"]) == [[None], [b"open"]]


def test_a_stream_of_another_kind_is_refused_by_name(any_store: StoreOptions) -> None:
    store, stream = a_store(any_store), a_name("stream")
    key = store.shards.keys.stream(stream)
    store.shards.run_keyed([(key, ("SET", key, "theirs"))])
    with pytest.raises(StoreError, match=rf"{key} is a string, not a stream of sessions: .* sessions\.stream"):
        claim(store, stream, a_name("lap"), "t:0", 0)
    with pytest.raises(StoreError, match=f"{key} is a string"):
        store.append([Write(stream, "t:0", NOTHING, 0, (), [(1, b"a")])])
    assert store.stream_marks([stream]) == {stream: {}}


def test_a_mark_that_moved_or_a_session_that_changed_refuses_everything(any_store: StoreOptions) -> None:
    store, stream, identity = a_store(any_store), a_name("stream"), a_name("lap")
    (number, _) = claim(store, stream, identity, "t:0", 0) or (0, "")
    assert store.write([Write(stream, "t:0", NOTHING, 0, [a_change(stream, identity, number, 1)], [(number, b"a")])])
    seen = store.read(stream, "t:0", [identity])[1][identity]
    late = Write(stream, "t:0", NOTHING, 3, [a_change(stream, identity, number, 4)], [(number, b"b")])
    assert store.write([late]) == [Verdict.MOVED]
    unseen = Write(stream, "t:0", 0, 3, [a_change(stream, identity, number, 4)], [(number, b"b")])
    assert store.write([unseen]) == [Verdict.CONFLICT]
    assert entries_of(store, stream) == [(number, b"a")]
    assert store.read(stream, "t:0", [identity]) == (0, {identity: seen})
    right = Write(stream, "t:0", 0, 3, [a_change(stream, identity, number, 4, seen=seen)], [(number, b"b")])
    assert store.write([right]) == [Verdict.OK]
    assert entries_of(store, stream) == [(number, b"a"), (number, b"b")]


def test_one_refused_write_does_not_refuse_the_others(any_store: StoreOptions) -> None:
    store, streams = a_store(any_store), [a_name("stream") for _ in range(6)]
    store.write([Write(streams[3], "t:0", NOTHING, 5)])
    written = store.write([Write(stream, "t:0", NOTHING, 1, (), [(1, b"x")]) for stream in streams])
    assert written == [Verdict.MOVED if i == 3 else Verdict.OK for i in range(6)]
    assert [len(entries_of(store, stream)) for stream in streams] == [1, 1, 1, 0, 1, 1]


def test_whoever_repeats_an_opening_gets_the_same_number(any_store: StoreOptions) -> None:
    store, other = a_store(any_store), a_store(any_store)
    stream, identity = a_name("stream"), a_name("lap")
    store.write([Write(stream, "t:1", NOTHING, 0, (), [(1, b"x")])])
    first = claim(store, stream, identity, "t:0", 5)
    assert first is not None
    assert first[1] != "0-0"
    # Another life in the same portion, and the same portion again by somebody who cuts it otherwise.
    second = claim(store, stream, identity, "t:0", 8)
    assert second is not None
    assert second[0] > first[0]
    assert claim(other, stream, identity, "t:0", 5) == first
    assert claim(other, stream, identity, "t:0", 8) == second
    change = a_change(stream, identity, first[0], 1, opened=5)
    assert other.write([Write(stream, "t:0", NOTHING, 6, [change], [(first[0], b"a")])]) == [Verdict.OK]
    seen = store.read(stream, "t:0", [identity])[1][identity]
    assert claim(store, stream, identity, "t:0", 5, seen) is None
    assert claim(store, stream, identity, "t:0", 8) is None
    assert claim(store, stream, identity, "t:0", 8, seen) == second


def test_of_two_writers_that_open_one_session_one_succeeds(any_store: StoreOptions) -> None:
    store, stream, identity = a_store(any_store), a_name("stream"), a_name("lap")
    one, two = claim(store, stream, identity, "t:0", 5), claim(store, stream, identity, "t:1", 3)
    assert one is not None
    assert two is not None
    first = a_change(stream, identity, one[0], 1, opened=5, writer="t:0")
    second = a_change(stream, identity, two[0], 1, opened=3, writer="t:1")
    assert store.write([Write(stream, "t:0", NOTHING, 6, [first], [(one[0], b"a")])]) == [Verdict.CONFLICT]
    assert store.write([Write(stream, "t:1", NOTHING, 4, [second], [(two[0], b"b")])]) == [Verdict.OK]
    assert claim(store, stream, identity, "t:0", 5) is None
    assert entries_of(store, stream) == [(two[0], b"b")]
    assert hash_of(store, identity)["order"] == f"{two[0]} 1 0"


def test_a_writer_that_died_while_opening_does_not_keep_others_from_it(any_store: StoreOptions) -> None:
    store, stream, identity = a_store(any_store), a_name("stream"), a_name("lap")
    dead = claim(store, stream, identity, "~dead", 1)
    assert dead is not None
    store.put([Write(stream, "~dead", NOTHING, 1, [a_change(stream, identity, dead[0], 1, writer="~dead")])])
    number, _ = claim(store, stream, identity, "~alive", 1) or (0, "")
    assert number > dead[0]
    change = a_change(stream, identity, number, 1, opened=1, writer="~alive")
    assert store.write([Write(stream, "~alive", NOTHING, 1, [change], [(number, b"a")])]) == [Verdict.OK]
    assert hash_of(store, identity)["writer"] == "~alive"


def test_the_hash_only_goes_forward_and_a_new_life_leaves_nothing_of_the_old(any_store: StoreOptions) -> None:
    store, stream, identity = a_store(any_store), a_name("stream"), a_name("lap")

    def put(
        number: int, records: int, amendment: int = 0, writer: str = "t:0", more: Mapping[str, Arg] | None = None
    ) -> Verdict:
        change = a_change(stream, identity, number, records, amendment=amendment, more=more)
        return store.put([Write(stream, writer, NOTHING, 0, [change])])[0]

    assert put(5, 10, more={"tStart": 1, "tEnd": 2}) is Verdict.OK
    assert put(5, 10, 1, writer="") is Verdict.OK
    assert put(5, 12) is Verdict.OK
    # One that is behind may go on, its hash is further; the watchdog may not.
    assert put(5, 11) is Verdict.OK
    assert put(5, 10, 1, writer="") is Verdict.OLD
    assert hash_of(store, identity)["json"] == "json-12"
    assert put(6, 1) is Verdict.OK
    assert "tStart" not in hash_of(store, identity)
    assert put(5, 99) is Verdict.OK
    assert hash_of(store, identity)["order"] == "6 1 0"


def test_an_open_session_of_another_stream_is_not_taken(any_store: StoreOptions) -> None:
    store, identity = a_store(any_store), a_name("lap")
    here, there = a_name("stream"), a_name("stream")

    def put(stream: str, number: int, records: int, state: str = "open") -> Verdict:
        return store.put(
            [Write(stream, "t:0", NOTHING, 0, [a_change(stream, identity, number, records, state=state)])]
        )[0]

    assert put(here, 5, 1) is Verdict.OK
    assert put(there, 6, 1) is Verdict.TAKEN
    assert put(here, 5, 2, "closed") is Verdict.OK
    assert put(there, 6, 1) is Verdict.OK
    assert put(there, 6, 2, "closed") is Verdict.OK
    assert put(here, 5, 3) is Verdict.TAKEN
    assert hash_of(store, identity)["streamName"] == there


def test_a_session_that_others_wrote_is_not_taken_either(any_store: StoreOptions) -> None:
    store, stream, identity = a_store(any_store), a_name("stream"), a_name("lap")
    key = store.shards.keys.session(store.options.key, identity)
    store.shards.run_keyed([(key, ("HSET", key, "streamName", "theirs", "streamSessionId", 1, "json", "{}"))])
    assert store.owners([identity])[identity].state == ""
    assert store.put([Write(stream, "t:0", NOTHING, 0, [a_change(stream, identity, 5, 1)])]) == [Verdict.TAKEN]


def test_the_watchdog_has_no_mark_and_is_refused_when_the_session_spoke(any_store: StoreOptions) -> None:
    store, stream, identity = a_store(any_store), a_name("stream"), a_name("lap")
    (number, _) = claim(store, stream, identity, "t:0", 0) or (0, "")
    store.write([Write(stream, "t:0", NOTHING, 0, [a_change(stream, identity, number, 1)], [(number, b"a")])])
    seen = store.read(stream, "", [identity])[1][identity]
    word = a_change(stream, identity, number, 1, seen=seen, state="abandoned", amendment=1)
    write = Write(stream, "", NOTHING, NOTHING, [word], [(number, b"gone")])
    assert store.write([write]) == [Verdict.OK]
    assert store.write([write]) == [Verdict.CONFLICT]
    assert hash_of(store, identity)["state"] == "abandoned"
    assert store.stream_marks([stream]) == {stream: {"t:0": 0}}
    spoken = a_change(stream, identity, number, 2, seen=store.read(stream, "", [identity])[1][identity])
    assert store.write([Write(stream, "t:0", 0, 1, [spoken], [(number, b"b")])]) == [Verdict.OK]
    assert store.write([write]) == [Verdict.OLD]
    assert hash_of(store, identity)["state"] == "open"


def test_numbers_that_were_taken_early_and_come_late_are_taken_anew(any_store: StoreOptions) -> None:
    store, stream, identity = a_store(any_store), a_name("stream"), a_name("lap")
    keys = store.shards.keys
    low = int(store.shards.run_keyed([(keys.last_session(), ("INCRBY", keys.last_session(), 1))])[0])
    high, _ = claim(store, stream, identity, "t:0", 3) or (0, "")
    slot = [keys.stream(stream), keys.stream_tag(stream)]
    late = store.shards.call_keyed([("claim", slot, ("t:0", 9, identity, b"", low, 0))])
    assert late == [[b"low", str(high).encode()]]
    openings = [
        Opening(stream, identity, "t:0", 9),
        *(Opening(stream, a_name("lap"), "t:0", 10 + i) for i in range(50)),
    ]
    claimed = [each[0] for each in store.claim(openings) if each is not None]
    assert claimed == sorted(set(claimed))
    assert len(claimed) == 51
    assert claimed[0] > high > low


def test_no_number_is_given_twice_in_a_stream_though_the_counter_has_lost_its_last_writes(store: StoreOptions) -> None:
    sessions, stream = a_store(store), a_name("stream")
    counter = sessions.shards.keys.last_session()
    given = [claim(sessions, stream, a_name("lap"), "t:0", i) for i in range(3)]
    sessions.shards.run_keyed([(counter, ("DECRBY", counter, 2))])
    given += sessions.claim([Opening(stream, a_name("lap"), "t:0", 3 + i) for i in range(2)])
    numbers = [each[0] for each in given if each is not None]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 5
    assert int(sessions.shards.run_keyed([(counter, ("GET", counter))])[0]) == numbers[-1]


def test_an_opening_is_repeated_under_a_new_number_when_its_name_had_a_later_life_elsewhere(
    any_store: StoreOptions,
) -> None:
    store, identity = a_store(any_store), a_name("lap")
    here, there = a_name("stream"), a_name("stream")
    early, _ = claim(store, here, identity, "t:0", 0) or (0, "")
    later, _ = claim(store, there, identity, "u:0", 0) or (0, "")
    closed = a_change(there, identity, later, 1, state="closed")
    assert store.write([Write(there, "u:0", NOTHING, 0, [closed], [(later, b"x")])]) == [Verdict.OK]
    number, _ = claim(store, here, identity, "t:0", 0) or (0, "")
    assert number > later > early
    assert claim(store, here, identity, "t:0", 0) == (number, "0-0")
    opened = a_change(here, identity, number, 1)
    assert store.write([Write(here, "t:0", NOTHING, 0, [opened], [(number, b"x")])]) == [Verdict.OK]


def test_a_configuration_never_changes_under_its_identifier(any_store: StoreOptions) -> None:
    store, identifier = a_store(any_store), a_name("car{7}")
    assert store.put_config(identifier, b"{}")
    assert store.put_config(identifier, b"{}")
    assert not store.put_config(identifier, b"{ }")
    assert store.configs([identifier, "unknown"]) == {identifier: b"{}"}


def test_a_name_with_braces_is_refused(store: StoreOptions) -> None:
    with pytest.raises(StoreError, match="braces"):
        claim(a_store(store), "a{b}", "x", "t:0", 0)


def test_every_node_is_known_to_whoever_prepared_the_store(any_store: StoreOptions) -> None:
    shards = Shards(any_store).open()
    prepare(shards)
    streams = [a_name("stream") for _ in range(20)]
    # A task knows the nodes that its driver knew, and no others; a stream may be on any of them.
    task = SessionStore(Shards(any_store, dict(shards.run_ids)))
    written = task.write([Write(stream, "t:0", NOTHING, 1, (), [(1, b"x")]) for stream in streams])
    assert written == [Verdict.OK] * 20
    assert len(shards.run_ids) == len(shards.primaries())
    for where, process in shards.run_ids.items():
        known = {**shards.run_ids, where: process[::-1]}
        with pytest.raises(StoreChanged):
            SessionStore(Shards(any_store, known)).stream_marks(streams)


def test_the_service_reads_and_calls_where_a_key_is(any_store: StoreOptions) -> None:
    store, streams = a_store(any_store), [a_name("stream") for _ in range(9)]
    store.write([Write(stream, "t:0", NOTHING, 1, (), [(1, stream.encode())]) for stream in streams])
    keys = store.shards.keys

    async def read() -> None:
        nodes = await Nodes(any_store).open()
        try:
            found = await nodes.read_keyed([(keys.stream(s), ("XLEN", keys.stream(s))) for s in streams])
            assert found == [1] * 9
            slots = [[keys.stream(s), keys.stream_tag(s)] for s in streams]
            weighed = await nodes.call_keyed([("weigh", slot, ("0-0", 10, 1 << 20)) for slot in slots])
            assert [(number, size) for (_, number, size) in weighed] == [(b"1", len(s) + 1) for s in streams]
            key = keys.stream(streams[0])
            ((read, entries),) = await nodes.follow("me", {key: "0-0"}, 10, 5_000)
            assert (read, len(entries)) == (key, 1)
            await nodes.end_follow(key, "me")
            await nodes.end_follow(key, "me")
        finally:
            await nodes.close()

    asyncio.run(read())


def test_a_slot_that_no_node_serves_is_told() -> None:
    slots = Slots([[0, 100, [b"", 7000, b"id"]], [101, 16_000, [b"10.0.0.2", 7001, b"id"]]], "10.0.0.1")
    assert slots.primaries == [("10.0.0.1", 7000), ("10.0.0.2", 7001)]
    assert not slots.is_complete
    with pytest.raises(StoreUnavailable, match="is the cluster complete"):
        list(map(slots.node_of, (f"key-{i}" for i in range(1_000))))

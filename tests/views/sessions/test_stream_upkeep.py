"""Upkeep of the streams of sessions, on a real Valkey, a real cluster and Redis."""

from __future__ import annotations

from itertools import count

import pytest

from tailrace.log.cursor import EntryId, id_text
from tailrace.valkey.shards import Arg, Shards, StoreOptions, load_functions, mapping
from tailrace.views.sessions.store import SessionChange, SessionOptions, SessionStore, Verdict, Write
from tailrace.views.sessions.upkeep import IndexedSession, SessionUpkeep
from tests.views.sessions.recorded import claim

_fresh = count()
NOTHING = -1


@pytest.fixture
def sessions(any_store: StoreOptions) -> SessionStore:
    shards = Shards(any_store).open()
    load_functions(shards)
    return SessionStore(shards, SessionOptions(), clock=lambda: 1_000.0)


def a_stream() -> str:
    return f"kept-{next(_fresh)}"


def written(store: SessionStore, stream: str, entries: list[tuple[int, bytes]]) -> None:
    """Put entries into a stream, each with a write of its own."""
    mark = store.stream_marks([stream])[stream].get("t:0", NOTHING)
    for n, entry in enumerate(entries, mark + 1):
        assert store.write([Write(stream, "t:0", n - 1, n, (), [entry])]) == [Verdict.OK]


def text(entry: EntryId) -> bytes:
    return id_text(entry).encode()


def a_session(store: SessionStore, stream: str, identity: str, number: int) -> None:
    fields: dict[str, Arg] = {"streamSessionId": number, "streamName": stream, "state": "open", "writer": "t:9"}
    change = SessionChange(identity, number, b"", b"state", (number, 1, 0), fields)
    assert store.write([Write(stream, "", NOTHING, NOTHING, [change])]) == [Verdict.OK]


def test_entries_are_weighed_in_portions_without_their_data(sessions: SessionStore) -> None:
    keeping, stream = SessionUpkeep(sessions.shards), a_stream()
    assert keeping.weigh(stream, (0, 0)) == []
    written(sessions, stream, [(1, b"x" * 700_000), (22, b"y" * 700_000)] * 3)
    key = sessions.shards.keys.stream(stream)
    sessions.shards.run_keyed([(key, ("XADD", key, "*", "other", "field"))])
    found: list[tuple[EntryId, int, int]] = []
    portions = 0
    while some := keeping.weigh(stream, found[-1][0] if found else (0, 0)):
        found += some
        portions += 1
    assert [(number, size) for _, number, size in found] == [(1, 700_001), (22, 700_002)] * 3 + [(-1, 5)]
    assert found == sorted(found)
    assert portions > 1
    written(sessions, stream, [(3, b"z" * 900_000)] * 20)
    assert 0 < len(keeping.weigh(stream, found[-1][0])) < 20


def test_readers_are_told_what_was_shed_and_the_ledger_stays(sessions: SessionStore) -> None:
    keeping, stream = SessionUpkeep(sessions.shards), a_stream()
    written(sessions, stream, [(1, b"a"), (2, b"b"), (1, b"c"), (2, b"d")])
    ids = [entry for entry, _, _ in keeping.weigh(stream, (0, 0))]
    keys = sessions.shards.keys

    def ledger() -> list[int]:
        key = keys.ledger(stream)
        return [
            int(mapping(fields)[b"m"]) for _, fields in sessions.shards.run_keyed([(key, ("XRANGE", key, "-", "+"))])[0]
        ]

    def noted() -> dict[bytes, bytes]:
        key = keys.trimmed(stream)
        return {
            name: value
            for name, value in mapping(sessions.shards.run_keyed([(key, ("HGETALL", key))])[0]).items()
            if not name.isdigit()
        }

    assert keeping.shed(stream, 1, [ids[0]]) == 1
    assert keeping.trimmed(stream) == {1: ids[0]}
    assert noted() == {b"newest": text(ids[0]), b"ours": b"(" + text(ids[1])}
    assert keeping.shed(stream, 1, [ids[0], ids[2]]) == 1
    assert keeping.shed(stream, 1, [ids[0]]) == 0
    assert keeping.trimmed(stream) == {1: ids[2]}
    assert [number for _, number, _ in keeping.weigh(stream, (0, 0))] == [2, 2]
    assert noted() == {b"newest": text(ids[2]), b"ours": b"(" + text(ids[1])}
    assert keeping.shed(stream, 2, [ids[1], ids[3]]) == 2
    assert noted() == {b"newest": text(ids[3]), b"ours": text(ids[3])}
    written(sessions, stream, [(2, b"e")])
    assert ledger() == [0, 1, 2, 3, 4]
    keeping.forget_trimmed(stream, [1, 7])
    assert keeping.trimmed(stream) == {2: ids[3]}


def test_the_ledger_forgets_writes_after_a_time_but_none_that_the_stream_has(sessions: SessionStore) -> None:
    keeping, stream = SessionUpkeep(sessions.shards), a_stream()
    keys = sessions.shards.keys
    ledger, trimmed = keys.ledger(stream), keys.trimmed(stream)

    def rows() -> list[bytes]:
        return [entry for entry, _ in sessions.shards.run_keyed([(ledger, ("XRANGE", ledger, "-", "+"))])[0]]

    assert keeping.cut_ledger(stream, 1) == 0
    written(sessions, stream, [(1, b"a"), (2, b"b"), (1, b"c")])
    ids = [entry for entry, _, _ in keeping.weigh(stream, (0, 0))]
    later = sessions.server_ms(stream) + 60_000
    assert keeping.cut_ledger(stream, later) == 0
    keeping.shed(stream, 1, [ids[0]])
    assert keeping.cut_ledger(stream, -1) == 0
    assert rows() == [text(each) for each in ids]
    assert keeping.cut_ledger(stream, later) == 1
    assert rows() == [text(each) for each in ids[1:]]
    (whole,) = sessions.shards.run_keyed([(trimmed, ("HGET", trimmed, "whole"))])
    assert whole == text(ids[1])
    keeping.shed(stream, 1, [ids[2]])
    keeping.shed(stream, 2, [ids[1]])
    assert keeping.cut_ledger(stream, later) == 2
    (whole,) = sessions.shards.run_keyed([(trimmed, ("HGET", trimmed, "whole"))])
    assert whole == f"{later}-0".encode()


def test_a_session_is_forgotten_unless_it_has_changed(sessions: SessionStore) -> None:
    keeping, stream = SessionUpkeep(sessions.shards), a_stream()
    a_session(sessions, stream, f"{stream}-old", 5)
    a_session(sessions, stream, f"{stream}-live", 6)
    # What a writer notes for itself is no session; an opening that came to nothing is, as long as it is young.
    sessions.write([Write(stream, "", NOTHING, NOTHING, [SessionChange("\0t:0", 0, b"", b"n", (0, 0, 0), {})])])
    assert claim(sessions, stream, f"{stream}-claimed", "t:0", 1) is not None
    found = {kept.identity.removeprefix(f"{stream}-"): kept for kept in keeping.sessions(stream)}
    assert {name: kept.updated_ms for name, kept in found.items()} == {
        "old": 1_000_000,
        "live": 1_000_000,
        "claimed": None,
    }
    live = found["live"]
    assert not keeping.forget(stream, live._replace(value=b"another one"), 6, 0)
    assert keeping.forget(stream, found["old"], 5, 0)
    assert keeping.forget(stream, found["claimed"], None, 0)
    assert {kept.identity for kept in keeping.sessions(stream)} == {f"{stream}-live", f"{stream}-claimed"}
    later = sessions.server_ms(stream) + 1
    assert keeping.forget(stream, IndexedSession(f"{stream}-claimed", b"", None), None, later)
    assert list(keeping.sessions(stream)) == [live]


def test_a_stream_goes_when_it_has_no_sessions_and_marks_stay(sessions: SessionStore) -> None:
    keeping, stream = SessionUpkeep(sessions.shards), a_stream()
    later = sessions.server_ms(stream) + 60_000
    assert not keeping.drop(stream, later)
    written(sessions, stream, [(5, b"a")])
    a_session(sessions, stream, f"{stream}-s", 5)
    sessions.write([Write(stream, "", NOTHING, NOTHING, [SessionChange("\0t:0", 0, b"", b"notes", (0, 0, 0), {})])])
    assert not keeping.drop(stream, later)
    (kept,) = keeping.sessions(stream)
    assert keeping.forget(stream, kept, 5, 0)
    assert not keeping.drop(stream, later - 3_600_000)
    assert stream in keeping.maintained()
    assert keeping.drop(stream, later)
    assert stream not in keeping.maintained()
    assert sessions.read(stream, "t:0", ["\0t:0"])[0] == 0
    assert set(sessions.read(stream, "t:0", ["\0t:0"])[1]) == {"\0t:0"}
    # What comes again is refused, and what is new begins the stream anew.
    assert sessions.write([Write(stream, "t:0", NOTHING, 0, (), [(5, b"a")])]) == [Verdict.MOVED]
    written(sessions, stream, [(6, b"b")])
    assert stream in keeping.maintained()


def test_configurations_live_on_while_they_are_renewed(sessions: SessionStore) -> None:
    keeping, name = SessionUpkeep(sessions.shards), f"car-{next(_fresh)}"
    sessions.put_config(name, b"{}")
    key = sessions.shards.keys.config(name)
    sessions.shards.run_keyed([(key, ("PEXPIRE", key, 60_000))])
    assert keeping.renew_configs([name, "unknown"]) == 1
    assert sessions.shards.run_keyed([(key, ("PTTL", key))])[0] > 60_000


def test_streams_of_others_with_braces_in_their_names_are_left_alone(sessions: SessionStore) -> None:
    keys, name = sessions.shards.keys, "theirs{7}"
    sessions.shards.run_keyed([(keys.streams(), ("SADD", keys.streams(), name))])
    assert name in sessions.streams()
    assert name not in SessionUpkeep(sessions.shards).maintained()

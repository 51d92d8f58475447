"""The writer library: the same sessions as the pipeline's, each call in the stream once, whatever answers are lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest

import tailrace
from tailrace import SessionWriter
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.errors import EventRefused, StoreError, StoreUnavailable
from tailrace.valkey.shards import Shards, StoreOptions, mapping
from tailrace.views.sessions.model import Session
from tailrace.views.sessions.store import SessionChange, SessionOptions, SessionStore, Verdict, Write, state_of
from tests.views.sessions.recorded import MS, T0, RecordedSession, doubles, read_stream
from tests.views.sessions.severed import Severed

CONFIG = {
    "engine": {
        "channels": [{"id": 1, "name": "rpm", "type": "u16", "source": "periodic", "interval": MS}],
        "parameters": [],
        "conversions": [],
    }
}

_rigs = count()


class Rig:
    """A stream of its own."""

    def __init__(self, store: StoreOptions) -> None:
        self.store, self.stream = store, f"{store.prefix}.rig{next(_rigs)}"
        self.key = f"{store.prefix}:session:{{identity}}"
        self.shards = Shards(store).open()

    @contextmanager
    def writer(self, url: str = "", **given: Any) -> Iterator[SessionWriter]:
        more = {"stream": self.stream, "writer": "w", "prefix": self.store.prefix, "key": self.key} | given
        with SessionWriter(url or self.store.url, **more) as writer:
            yield writer

    def sessions(self, width: int = 8) -> list[RecordedSession]:
        found = read_stream(self.shards, self.stream, width)
        return [found[number] for number in sorted(found)]

    def hash(self, session: str) -> dict[str, str]:
        key = self.key.replace("{identity}", session)
        fields = mapping(self.shards.run_keyed([(key, ("HGETALL", key))])[0])
        return {name.decode(): value.decode() for name, value in fields.items()}


@pytest.fixture
def rig(store: StoreOptions) -> Rig:
    return Rig(store)


def test_a_program_writes_sessions_as_the_pipeline_does(any_store: StoreOptions) -> None:
    rig = Rig(any_store)
    with rig.writer() as writer:
        writer.open("run", {"identifier": "Run", "details": {"driver": "A"}})
        writer.periodic(1, T0, MS, [1, 2, None])
        writer.periodic(1, T0 + 3 * MS, MS, np.array([4.0, 5.0]))
        writer.timestamped(2, [T0, T0 + 5 * MS], [1.5, 2.5])
        writer.row([3, 4], T0 + MS, [7, 8])
        writer.event(4, T0 + 2 * MS, app="engine", text="over speed", values=[301])
        writer.range(T0 - MS, T0)
        writer.update({"group": "g"})
        writer.close_session("truncated")
    (session,) = rig.sessions()
    assert session.kinds[0] == session.kinds[-1] == ["session_json"]
    assert [value for _, value in session.samples[1]][:2] == doubles(1, 2)
    assert [time for time, _ in session.samples[1]] == [T0 + i * MS for i in range(5)]
    assert session.samples[2] == [(T0, *doubles(1.5)), (T0 + 5 * MS, *doubles(2.5))]
    assert (session.samples[3], session.samples[4]) == ([(T0 + MS, *doubles(7))], [(T0 + MS, *doubles(8))])
    assert session.events == [(T0 + 2 * MS, "over speed")]
    assert session.ranges == [(T0 - MS, T0 + 5 * MS)]
    stored = rig.hash("run")
    assert (stored["state"], stored["writer"], stored["streamName"]) == ("truncated", "~w", rig.stream)
    assert msgspec.json.decode(stored["merged"])["details"] == {"driver": "A"}
    assert "details" not in msgspec.json.decode(stored["json"])


def test_the_package_has_it_without_spark_and_the_store_needs_nothing_before(own_valkey: EmbeddedValkey) -> None:
    assert tailrace.SessionWriter is SessionWriter
    rig = Rig(StoreOptions(own_valkey.url, prefix="own"))
    with rig.writer() as writer:
        writer.periodic(1, T0, MS, [1], session="run")
    assert rig.sessions()[0].jsons[0]["identifier"] == "run"


def test_one_writer_has_several_sessions_and_a_name_has_several_lives(rig: Rig) -> None:
    with rig.writer() as writer:
        for life in range(3):
            writer.open("a")
            writer.open("b")
            for i in range(4):
                writer.periodic(1, T0 + i * MS, MS, [life], session="a")
                writer.periodic(1, T0 + i * MS, MS, [10 + life])
            writer.close_session(session="a")
            writer.close_session()
    found = rig.sessions()
    assert [session.jsons[0]["identity"] for session in found] == ["a", "b"] * 3
    for i, session in enumerate(found):
        assert [value for _, value in session.samples[1]] == doubles(i // 2 + 10 * (i % 2)) * 4


@pytest.mark.parametrize("seed", range(3))
def test_answers_that_get_lost_repeat_nothing(valkey_server: EmbeddedValkey, rig: Rig, seed: int) -> None:
    chance = random.Random(seed)
    wire = Severed(valkey_server.port, lambda name: chance.random() < 0.3)
    written: dict[str, list[tuple[int, bytes]]] = {"a": [], "b": []}
    try:
        with rig.writer(wire.url, flush_every=chance.choice((0.0, 60.0)), burst=1024) as writer:
            for session in written:
                writer.open(session)
            for i in range(40):
                session = chance.choice("ab")
                values = [float(i)] * chance.choice((1, 50))
                writer.periodic(1, T0 + i * 100 * MS, MS, values, session=session)
                times = [T0 + (i * 100 + k) * MS for k in range(len(values))]
                written[session] += zip(times, doubles(*values), strict=True)
            for session in written:
                writer.close_session(session=session)
    finally:
        wire.close()
    assert wire.lost
    found = rig.sessions()
    assert {session.jsons[0]["identity"]: session.samples[1] for session in found} == written
    for recorded in found:
        assert [json["state"] for json in recorded.jsons] == ["open", "closed"]
        assert recorded.ranges == sorted(set(recorded.ranges))


def test_a_new_process_with_the_name_of_an_old_one_goes_on_after_it(rig: Rig) -> None:
    for i in range(3):
        with rig.writer() as writer:
            writer.periodic(1, T0 + i * MS, MS, [i], session="run")
    (session,) = rig.sessions()
    assert session.samples[1] == [(T0 + i * MS, *doubles(i)) for i in range(3)]
    assert len(session.jsons) == 1
    assert SessionStore(rig.shards).stream_marks([rig.stream]) == {rig.stream: {"~w": 2}}


def test_two_processes_with_one_name_are_told(rig: Rig) -> None:
    with rig.writer() as first:
        first.open("a")
        with rig.writer() as second:
            second.open("b")
            second.open("c")
        with pytest.raises(StoreError, match="somebody else writes as '~w'"):
            first.flush()
        first._pending.clear()


def test_what_is_refused_costs_nothing_else(rig: Rig) -> None:
    with rig.writer() as writer:
        with pytest.raises(EventRefused, match="no session was opened"):
            writer.periodic(1, T0, MS, [1])
        writer.open("run", {"configBindings": [{"identifier": rig.stream, "channelOffset": 0}]}, {rig.stream: CONFIG})
        writer.periodic(1, T0, values=[1, 65535])
        refused: list[tuple[str, Any]] = [
            ("out-of-range", lambda: writer.periodic(1, T0, MS, [70_000])),
            ("not-an-integer", lambda: writer.periodic(1, T0, MS, [0.5])),
            ("unknown-channel", lambda: writer.periodic(2, T0, MS, [1])),
            ("bad-width", lambda: writer.periodic(1, T0, MS, data=b"abc")),
            ("bad-count", lambda: writer.timestamped(1, [T0], [1, 2])),
            ("either `values` or `data`", lambda: writer.periodic(1, T0, MS)),
            ("json.quality", lambda: writer.update({"quality": 7})),
            ("configurations never change", lambda: writer.config(rig.stream, {})),
            ("too-large", lambda: writer.event(1, T0, text="x" * (1 << 20))),
            ("session-too-large", lambda: writer.update({"group": "x" * (1 << 20)})),
            ("cannot be the name", lambda: writer.open("")),
            ("cannot be the name", lambda: writer.open("\ud800")),
            ("no number of a channel", lambda: writer.periodic(-1, T0, MS, [1])),
            ("no number of a channel", lambda: writer.row([1, 1 << 32], T0, [1, 1])),
            ("as an integer", lambda: writer.periodic(1, float(T0), MS, [1])),  # type: ignore[arg-type]
            ("as an integer", lambda: writer.timestamped(1, [T0, T0 + 0.5], [1, 2])),  # type: ignore[list-item]
            ("times are integers", lambda: writer.timestamped(1, np.array([0.5]), [1])),
            ("times are integers", lambda: writer.timestamped(1, np.array([1 << 63], np.uint64), [1])),
            ("as bytes", lambda: writer.periodic(1, T0, MS, data="ab")),  # type: ignore[arg-type]
            ("no channel has the type", lambda: writer.periodic(1, T0, MS, [1], as_="u64")),  # type: ignore[arg-type]
            ("as an integer", lambda: writer.range(0.5, 2)),  # type: ignore[arg-type]
            ("json", lambda: writer.update({"x": object()})),
            ("ends no session", lambda: writer.close_session("open")),  # type: ignore[arg-type]
        ]
        for what, call in refused:
            with pytest.raises(EventRefused, match=what):
                call()
        writer.periodic(1, T0 + 2 * MS, values=np.array([3]))
        writer.close_session()
        for call in (lambda: writer.periodic(1, T0, MS, [1]), writer.close_session):
            with pytest.raises(EventRefused, match=r"session-closed|nothing-to-close"):
                call()
    (session,) = rig.sessions(width=2)
    assert session.samples == {1: [(T0, b"\1\0"), (T0 + MS, b"\xff\xff"), (T0 + 2 * MS, b"\3\0")]}
    assert SessionStore(rig.shards).configs([rig.stream])


def test_a_stream_or_a_key_that_cannot_be_is_refused_before_anything_is_written(rig: Rig) -> None:
    for wrong in ({"stream": "a{b}"}, {"stream": ""}, {"key": "sessions"}):
        with pytest.raises(ValueError, match="braces"), rig.writer(**wrong):
            pass


def test_a_program_may_use_its_arrays_again_at_once(rig: Rig) -> None:
    times, values, details = np.array([1, 2], np.int32), np.array([1.0, 2.0]), {"driver": "A"}
    buffer = bytearray(b"".join(doubles(3)))
    with rig.writer(flush_every=60) as writer:
        writer.open("run", {"details": details})
        writer.timestamped(1, times, values)
        writer.periodic(2, np.int64(T0), np.int64(MS), data=buffer)  # type: ignore[arg-type]
        writer.row(np.array([3, 4]), T0, np.array([5.0, 6.0]))  # type: ignore[arg-type]
        times[:], values[:], details["driver"], buffer[:] = 9, 9, "B", bytes(8)
        writer._is_lost = True  # so that all is recorded anew
    (session,) = rig.sessions()
    assert session.jsons[0]["details"] == {"driver": "A"}
    assert session.samples == {
        1: [(1, *doubles(1)), (2, *doubles(2))],
        2: [(T0, *doubles(3))],
        3: [(T0, *doubles(5))],
        4: [(T0, *doubles(6))],
    }


def test_a_session_that_was_given_up_is_open_again_when_it_speaks(rig: Rig) -> None:
    store = SessionStore(rig.shards, SessionOptions(key=rig.key))
    with rig.writer() as writer:
        writer.open("run")
        writer.flush()
        _, values = store.read(rig.stream, "", ["run"])
        abandoned = Session.decode(state_of(values["run"])).abandoned()
        change = SessionChange(
            "run", abandoned.number, values["run"], abandoned.encode(), abandoned.order, abandoned.fields()
        )
        assert store.write([Write(rig.stream, "", 0, 0, [change])]) == [Verdict.OK]
        assert rig.hash("run")["state"] == "abandoned"
        writer.periodic(1, T0, MS, [1])
    (session,) = rig.sessions()
    assert rig.hash("run")["state"] == "open"
    assert session.jsons[-1]["state"] == "open"
    assert session.samples[1] == [(T0, *doubles(1))]


def test_a_name_that_is_open_in_another_stream_is_refused(rig: Rig) -> None:
    with rig.writer() as first, rig.writer(stream=f"{rig.stream}-b") as second:
        first.open("run")
        first.flush()
        with pytest.raises(EventRefused, match="session-elsewhere"):
            second.open("run")
        second.open("other")
        first.close_session()
    with rig.writer(stream=f"{rig.stream}-b") as second:
        second.open("run")
    assert rig.hash("run")["streamName"] == f"{rig.stream}-b"


def test_a_store_that_is_away_keeps_what_was_written_until_it_is_back(own_valkey: EmbeddedValkey) -> None:
    rig = Rig(StoreOptions(own_valkey.url, prefix="own"))
    with rig.writer(flush_every=60, patience_s=0.5, timeout_s=1) as writer:
        writer.open("run")
        writer.flush()
        writer.periodic(1, T0, MS, [1])
        own_valkey.stop()
        with pytest.raises(StoreUnavailable):
            writer.flush()
        own_valkey.start(30)
        writer.periodic(1, T0 + MS, MS, [2])
    rig.shards = Shards(rig.store).open()
    (session,) = rig.sessions()
    assert session.samples[1] == [(T0, *doubles(1)), (T0 + MS, *doubles(2))]

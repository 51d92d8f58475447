"""The upkeep of sessions on a real store: trimming, silent sessions, and what is forgotten."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest

from tailrace.config.settings import Settings, load
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.errors import StoreUnavailable
from tailrace.log.cursor import parse_id
from tailrace.upkeep.job import JobLease, Scope, Work
from tailrace.upkeep.loop import JobLoop
from tailrace.valkey.shards import Shards, StoreOptions, mapping, prepare
from tailrace.views.sessions.burst import parse, unpack
from tailrace.views.sessions.model import Session
from tailrace.views.sessions.store import SessionChange, SessionOptions, SessionStore, Verdict, Write, state_of
from tailrace.views.sessions.upkeep import (
    LEASE,
    Abandoning,
    Forgetting,
    SessionUpkeep,
    TrimMemory,
    Trimming,
    session_jobs,
)
from tests.views.sessions.foreign import Foreign, connected
from tests.views.sessions.recorded import claim
from tests.views.sessions.test_retention import MS, limits

HOUR = 3_600_000
NOTHING = -1


class Site:
    """A store of its own, since upkeep looks at all streams that there are."""

    def __init__(self, server: EmbeddedValkey) -> None:
        self.server = server
        self.options = StoreOptions(server.url, prefix="s")
        self.connect()
        self.memory = TrimMemory()

    def connect(self) -> None:
        self.shards = Shards(self.options).open()
        prepare(self.shards)
        # Whatever is written here was written ten minutes ago.
        self.store = SessionStore(self.shards, SessionOptions(), lambda: time.time() - 600)
        self.keeping = SessionUpkeep(self.shards)

    def do(self, work: Work) -> dict[str, object]:
        with JobLease(self.shards, "test", kind=LEASE) as lease:
            work.run(self.shards, lease)
        return work.facts()

    def trim(self, **given: object) -> dict[str, object]:
        return self.do(Trimming(limits(**given), Scope(), self.memory))

    def write(self, stream: str, *entries: tuple[int, bytes]) -> None:
        mark = self.store.stream_marks([stream])[stream].get("t:0", NOTHING)
        for n, entry in enumerate(entries, mark + 1):
            assert self.store.write([Write(stream, "t:0", n - 1, n, (), [entry])]) == [Verdict.OK]

    def entries(self, stream: str) -> list[tuple[int, bytes]]:
        key = self.shards.keys.stream(stream)
        found = self.shards.run_keyed([(key, ("XRANGE", key, "-", "+"))])[0]
        return [(int(mapping(fields)[b"id"]), mapping(fields)[b"data"]) for _, fields in found]

    def numbers(self, stream: str) -> list[int]:
        return [number for number, _ in self.entries(stream)]

    def reached(self, watermark_ms: int | None) -> None:
        """Store the watermark as the driver's last report."""
        key = self.shards.keys.status("sessions")
        self.shards.run_all([(0, ("SET", key, msgspec.json.encode({"view": "sessions", "frontier_ms": watermark_ms})))])

    def speak(self, session: Session, *, after: Session | None = None) -> Session:
        """Write a session as the pipeline does: its hash, then its stream."""
        mark, values = self.store.read(session.stream, session.writer, [session.identity])
        if after is None:
            claimed = claim(self.store, session.stream, session.identity, session.writer, session.opened)
            assert claimed is not None
            session = session.placed(*claimed)
        seen = values.get(session.identity, b"")
        change = SessionChange(
            session.identity, session.number, seen, session.encode(), session.order, session.fields()
        )
        entries = [(session.number, b"spoken")]
        write = Write(session.stream, session.writer, mark, mark + 1, [change], entries)
        assert self.store.write([write]) == [Verdict.OK]
        return session

    def open(self, identity: str, heard: int, *, writer: str = "t:0", json: dict[str, Any] | None = None) -> Session:
        offset = self.store.read("cars-0", writer, ())[0] + 1
        return self.speak(Session.opening(identity, "cars-0", writer, offset, heard, json or {}).heard_of(heard))

    def state(self, identity: str) -> tuple[str, str]:
        """Return the state of a session in its hash, and the state beside its stream."""
        ((json, state),) = self.store.hash_fields([identity], ["json", "state"])
        assert json is not None
        assert state is not None
        assert msgspec.json.decode(json)["state"] == state.decode()
        value = self.store.read("cars-0", "", [identity])[1][identity]
        return state.decode(), Session.decode(state_of(value)).state

    def abandon(self, after_ms: int = 1_000) -> dict[str, object]:
        return self.do(Abandoning(limits(abandon_after=after_ms * MS), Scope()))

    def forget(self, *, ahead_ms: int = 0, stream_ms: int = HOUR) -> dict[str, object]:
        """Forget what is an hour old, by a clock that is ahead; as much as clocks may differ."""
        settings = limits(keep_time=HOUR * MS, expire=HOUR * MS, forget_streams=stream_ms * MS)
        clock = lambda: round(time.time() * 1000) + ahead_ms  # noqa: E731
        return self.do(Forgetting(settings, Scope(clock=clock)))


@pytest.fixture
def site(own_valkey: EmbeddedValkey) -> Site:
    return Site(own_valkey)


def test_a_chatty_session_does_not_evict_a_quiet_one(site: Site) -> None:
    for n in range(300):
        site.write("cars-0", (2 if n % 60 == 0 else 1, b"x" * 100))
    assert site.trim(keep_entries=20) == {"entries": 275, "bytes": 275 * 101}
    assert sorted(set(site.numbers("cars-0"))) == [1, 2]
    assert site.numbers("cars-0").count(2) == 5
    assert site.trim(keep_bytes=5 * 101) == {"entries": 15, "bytes": 15 * 101}
    assert site.trim(stream_bytes=7 * 101) == {"entries": 3, "bytes": 3 * 101}
    assert [site.numbers("cars-0").count(number) for number in (1, 2)] == [3, 4]
    time.sleep(0.02)
    assert site.trim(keep_time=10 * MS)["entries"] == 7
    assert site.entries("cars-0") == []


def test_streams_that_others_write_are_trimmed_too(site: Site) -> None:
    keys = site.shards.keys
    commands: list[Any] = [("XADD", keys.stream("theirs"), "*", "id", n % 2, "data", b"d") for n in range(50)]
    commands += [("XADD", keys.stream("unlisted"), "*", "id", 1, "data", b"d") for _ in range(50)]
    commands += [("SADD", keys.streams(), "theirs", "gone")]
    site.shards.run_keyed([(str(command[1]), command) for command in commands])
    assert site.trim(keep_entries=10)["entries"] == 30
    assert len(site.entries("theirs")) == 20
    assert len(site.entries("unlisted")) == 50
    assert set(site.keeping.trimmed("theirs")) == {0, 1}


def test_a_run_goes_on_where_the_last_one_ended_and_after_a_restart_at_the_beginning(site: Site) -> None:
    site.write("cars-0", *[(1, b"x")] * 30)
    assert site.trim(keep_entries=20)["entries"] == 10
    weights = site.memory.of("cars-0")
    last = weights.last
    site.write("cars-0", *[(1, b"x")] * 5)
    assert site.trim(keep_entries=20)["entries"] == 5
    assert site.memory.of("cars-0") is weights
    assert weights.last > last
    # A process that was started anew knows nothing, and comes to the same.
    site.memory = TrimMemory()
    assert site.trim(keep_entries=20)["entries"] == 0
    assert site.trim(keep_entries=19)["entries"] == 1
    # And if the store was, what is known may not be there any more.
    site.server.kill()
    site.server.start(30)
    site.connect()
    left = len(site.entries("cars-0"))
    assert site.trim(keep_entries=left - 1)["entries"] == 1
    assert site.memory.of("cars-0") is not weights


def test_whoever_reads_while_it_is_trimmed_is_told_what_is_missing(site: Site) -> None:
    site.write("cars-0", *[(number, b"%d" % n) for n in range(100) for number in (1, 2)])
    keys = site.shards.keys
    key, cursor, got = keys.stream("cars-0"), (0, 0), list[int]()
    gaps = 0
    for round_ in range(40):
        page = site.shards.run_keyed([(key, ("XRANGE", key, f"({cursor[0]}-{cursor[1]}", "+", "COUNT", 10))])[0]
        before, trimmed = cursor, site.keeping.trimmed("cars-0").get(1, (0, 0))
        for at, fields in page:
            if mapping(fields)[b"id"] == b"1":
                n = int(mapping(fields)[b"data"])
                if n != (got[-1] + 1 if got else 0):
                    assert trimmed > before, "something is missing, and nobody said so"
                    gaps += 1
                got.append(n)
            cursor = parse_id(at)
        site.write("cars-0", (1, b"%d" % (100 + round_)))
        site.trim(keep_entries=max(1, 60 - 7 * round_))
    assert gaps > 0
    assert got[-1] == 100 + 38
    assert got == sorted(set(got))


def test_memory_is_given_back(site: Site) -> None:
    client = site.shards.client(0)
    site.write("cars-0", *[(n % 2, bytes([n]) * 200_000) for n in range(100)])

    def used() -> int:
        info: Any = client.info("memory")
        return int(info["used_memory"])

    full = used()
    site.trim(keep_entries=1)
    assert used() < full - 15_000_000


def test_a_store_that_is_full_can_be_trimmed(site: Site) -> None:
    client = site.shards.client(0)
    site.write("cars-0", *[(n % 2, bytes([n]) * 200_000) for n in range(100)])
    client.config_set("maxmemory", "15mb")
    with pytest.raises(StoreUnavailable):
        site.write("cars-0", (1, b"x" * 200_000))
    flags = {"sessions.keep_entries": 5, "sessions.topics": ["laps"]}
    jobs = session_jobs(settings_of(site.options, **flags))
    assert jobs["trim"].run("sessions", lambda: False)["entries"] == 90
    site.write("cars-0", (1, b"x" * 200_000))


def test_a_session_that_is_silent_is_abandoned_and_comes_back_when_it_speaks(site: Site) -> None:
    session = site.open("lap", heard=10_000)
    site.reached(11_000)
    assert site.abandon() == {"sessions": 0}
    assert site.state("lap") == ("open", "open")
    site.reached(11_001)
    assert site.abandon() == {"sessions": 1}
    assert site.state("lap") == ("abandoned", "abandoned")
    number, data = site.entries("cars-0")[-1]
    (message,) = parse(unpack(data)).data
    assert number == session.number
    assert msgspec.json.decode(message.session_json)["state"] == "abandoned"
    assert site.abandon() == {"sessions": 0}
    known = Session.decode(state_of(site.store.read("cars-0", "", ["lap"])[1]["lap"]))
    site.speak(known.awake().heard_of(20_000), after=known)
    assert site.state("lap") == ("open", "open")


def test_a_session_whose_records_are_old_is_not_silent_while_they_come(site: Site) -> None:
    site.reached(10**9)
    site.store = SessionStore(site.shards, SessionOptions())
    site.open("lap", heard=1_000)
    assert site.abandon(after_ms=60_000) == {"sessions": 0}
    assert site.state("lap") == ("open", "open")


def test_the_word_of_a_watchdog_that_died_comes_to_the_stream_all_the_same(site: Site) -> None:
    site.open("lap", heard=1_000)
    (value,) = site.store.read("cars-0", "", ["lap"])[1].values()
    abandoned = Session.decode(state_of(value)).abandoned()
    change = SessionChange("lap", abandoned.number, value, abandoned.encode(), abandoned.order, abandoned.fields())
    site.store.put([Write("cars-0", "", NOTHING, NOTHING, [change])])
    assert site.state("lap") == ("abandoned", "open")
    assert site.abandon() == {"sessions": 0}  # it has been said for ten minutes by the clock of the store here
    site.store = SessionStore(site.shards, SessionOptions())
    site.store.put([Write("cars-0", "", NOTHING, NOTHING, [change])])
    assert site.abandon() == {"sessions": 1}
    assert site.state("lap") == ("abandoned", "abandoned")
    assert site.abandon() == {"sessions": 0}


def test_without_a_pipeline_nobody_knows_who_is_silent(site: Site) -> None:
    site.open("lap", heard=10_000)
    assert site.abandon() == {"sessions": 0}
    site.reached(None)
    assert site.abandon() == {"sessions": 0}
    key = site.shards.keys.status("sessions")
    site.shards.run_all([(0, ("SET", key, b"not json"))])
    assert site.abandon() == {"sessions": 0}
    assert site.state("lap") == ("open", "open")


def test_a_session_that_a_program_writes_goes_by_the_stores_clock(site: Site) -> None:
    now = site.store.server_ms("cars-0")
    site.open("silent", heard=now - 5_000, writer="~a")
    site.open("alive", heard=now, writer="~b")
    assert site.abandon(after_ms=4_000) == {"sessions": 1}
    assert site.state("silent") == ("abandoned", "abandoned")
    assert site.state("alive") == ("open", "open")


@pytest.mark.parametrize("state", ["closed", "truncated", "failed", "waiting"])
def test_sessions_that_are_not_open_stay_what_they_are(site: Site, state: str) -> None:
    site.open("lap", heard=10_000, json={"state": state})
    site.reached(99_000)
    assert site.abandon() == {"sessions": 0}
    assert site.state("lap") == (state, state)


@pytest.mark.parametrize("order", ["put append speak", "put speak append", "speak put append"])
def test_a_session_that_speaks_meanwhile_is_open(site: Site, order: str) -> None:
    session = site.open("lap", heard=10_000)
    value, abandoned = site.store.read("cars-0", "", ["lap"])[1]["lap"], session.abandoned()
    change = SessionChange("lap", abandoned.number, value, abandoned.encode(), abandoned.order, abandoned.fields())
    word = Write("cars-0", "", NOTHING, NOTHING, [change], [(abandoned.number, b"abandoned")])
    for step in order.split():
        if step == "put":
            put = site.store.put([word])
            assert put == [Verdict.OLD if order.startswith("speak") else Verdict.OK]
        elif step == "append":
            appended = site.store.append([word])
            assert appended == [Verdict.OK if order.endswith("speak") else Verdict.CONFLICT]
        else:
            known = Session.decode(state_of(site.store.read("cars-0", "", ["lap"])[1]["lap"]))
            site.speak(known.awake().heard_of(20_000), after=known)
    assert site.state("lap") == ("open", "open")


def test_idle_sessions_are_forgotten_and_the_configurations_of_others_kept(site: Site) -> None:
    bound = {"configBindings": [{"identifier": "car-1", "channelOffset": 0}]}
    site.store.put_config("car-1", b"{}")
    site.store.put_config("car-2", b"{}")
    key, index = site.shards.keys.config("car-1"), site.shards.keys.sessions()
    site.shards.run_keyed([(key, ("PEXPIRE", key, 60_000))])
    site.open("live", heard=1, json=bound)
    idle = site.open("idle", heard=1, json={"configBindings": [{"identifier": "car-2", "channelOffset": 0}]})
    old = round(time.time() * 1000) - HOUR - 1
    site.shards.run_keyed([(index, ("ZADD", index, old, "idle"))])
    site.trim(keep_entries=1)
    assert set(site.keeping.trimmed("cars-0")) == set()
    assert site.forget() == {"sessions": 1, "streams": 0}
    assert [kept.identity for kept in site.keeping.sessions("cars-0")] == ["live"]
    assert site.keeping.listed() == ["live"]
    assert site.shards.run_keyed([(key, ("PTTL", key))])[0] > 60_000
    assert site.forget() == {"sessions": 0, "streams": 0}
    # If it speaks after all it begins anew, and nothing of it is there twice.
    again = site.open("idle", heard=2)
    assert again.number > idle.number


def test_sessions_of_other_programs_get_their_place_in_the_listing(site: Site) -> None:
    site.open("ours", heard=1)
    with connected(site.options) as client:
        Foreign(client, "theirs", "ran *?[{x}]").open()
        Foreign(client, "theirs", "elsewhere", key="other:elsewhere").open()
        Foreign(client, "theirs", "idle").open()
        client.hset("sessions:idle", "lastUpdated", round(time.time() * 1000) - HOUR - 1_000)
        client.hset("sessions:half", "streamName", "theirs")
        client.hset(b"sessions:\xff", "streamName", "theirs")
        client.set("sessions:text", "x")
        site.forget()
        assert sorted(site.keeping.listed()) == ["ours", "ran *?[{x}]"]
        client.delete("sessions:ran *?[{x}]")
    assert site.abandon() == {"sessions": 0}
    assert site.forget(ahead_ms=1_000) == {"sessions": 0, "streams": 0}


def test_a_stream_that_nobody_writes_to_is_removed_and_its_marks_stay(site: Site) -> None:
    site.write("quiet", (1, b"x"))
    site.write("busy", (1, b"x"))
    time.sleep(0.05)
    site.write("busy", (1, b"y"))
    busy_ms = int(
        site.shards.run_keyed([("stream:busy", ("XREVRANGE", "stream:busy", "+", "-"))])[0][0][0].split(b"-")[0]
    )
    since = site.store.server_ms("busy") - busy_ms
    assert site.forget(stream_ms=since + 25) == {"sessions": 0, "streams": 1}
    assert site.store.streams() == {"busy"}
    assert site.store.stream_marks(["quiet"]) == {"quiet": {"t:0": 0}}


def settings_of(options: StoreOptions, **more: object) -> Settings:
    return load(flags={"valkey.url": options.url, "valkey.prefix": options.prefix, **more})


def test_the_jobs_of_sessions_run_beside_a_pack_and_leave_reports(site: Site) -> None:
    site.write("cars-0", *[(99, b"x")] * 30)
    site.open("lap", heard=1)
    site.reached(10**9)
    flags = {"sessions.keep_entries": 5, "sessions.trim_every": "1s"}
    stopping = threading.Event()
    loop = JobLoop(session_jobs(settings_of(site.options, **flags)), ("sessions",), stopping)
    thread = threading.Thread(target=loop.run)
    with JobLease(site.shards, "a pack"):
        thread.start()
        try:
            deadline = time.monotonic() + 30
            wanted = {"trim:sessions", "abandon:sessions"}
            while not wanted <= reports(site).keys():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            stopping.set()
            thread.join()
    found = reports(site)
    assert (found["trim:sessions"]["error"], found["abandon:sessions"]["error"]) == ("", "")
    assert site.numbers("cars-0").count(99) == 5
    assert site.state("lap") == ("abandoned", "abandoned")


def test_in_a_store_without_sessions_nothing_of_others_is_touched(site: Site) -> None:
    keys = site.shards.keys
    key = keys.stream("theirs")
    site.shards.run_keyed([(key, ("XADD", key, "*", "a", "b")) for _ in range(20)])
    site.shards.run_keyed([(keys.streams(), ("SADD", keys.streams(), "theirs", "none", b"\xff", "another"))])
    site.shards.run_keyed([("stream:another", ("SET", "stream:another", "no stream"))])
    jobs = session_jobs(settings_of(site.options, **{"sessions.keep_entries": 5}))
    assert [job.run("sessions", lambda: False) for job in jobs.values()] == [{}, {}, {}]
    assert site.shards.run_keyed([(key, ("XLEN", key))]) == [20]
    used = session_jobs(settings_of(site.options, **{"sessions.keep_entries": 5, "sessions.topics": ["laps"]}))
    assert used["trim"].run("sessions", lambda: False) == {"entries": 15, "bytes": 15}


def reports(site: Site) -> dict[str, dict[str, Any]]:
    stored: Any = site.shards.client(0).hgetall(site.shards.keys.upkeep())
    return {field.decode(): msgspec.json.decode(report) for field, report in stored.items()}

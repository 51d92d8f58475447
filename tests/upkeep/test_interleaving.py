"""Any interleaving of writing, midnight, packing, crashes, expiry and reading: each reader sees each event once."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tailrace.log.request import ControlFrame, EventFrame
from tailrace.upkeep.pack import STEPS
from tailrace.valkey.shards import StoreOptions
from tests.examples import scaled
from tests.log.rig import Follower, rig
from tests.upkeep.past import Keeper
from tests.writing import DAY, NOON, Record, Writer

NAMES = ("a", "b")
END = b'{"end":true}'
_fresh = count()


class Crash(Exception):
    """The packer dies here."""


class Reader:
    """Reads a stream in turns, always from its last cursor."""

    def __init__(self, name: str, begin: int) -> None:
        self.name = name
        self.at = begin
        """Its index in the list of all events ever written to the stream."""
        self.cursor = ""


class Interleaving(RuleBasedStateMachine):
    """A store, its writer and its upkeeper, against a list of what was written."""

    options: StoreOptions

    @initialize()
    def begin(self) -> None:
        self.store = StoreOptions(self.options.url, prefix=f"{self.options.prefix}i{next(_fresh)}", shards=2)
        self.writer = Writer(self.store, seal_when={"end": True})
        self.now = NOON
        self.offsets = [0, 0]
        self.written: list[Record] = []
        self.events: dict[str, list[Record]] = {name: [] for name in NAMES}
        self.gone = dict.fromkeys(NAMES, 0)
        self.readers: list[Reader] = []
        self.loop = asyncio.Runner()
        self.rig = rig(self.store)
        self.feeds = self.loop.run(self.rig.__aenter__())
        self.follower = self.loop.run(self._follow())

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.loop.run(self.follower.close())
        self.loop.run(self.rig.__aexit__(None, None, None))
        self.loop.close()

    async def _follow(self) -> Follower:
        return Follower(await self.feeds.open("a", start="start"))

    @rule(
        name=st.sampled_from(NAMES),
        partition=st.integers(0, 1),
        values=st.lists(st.sampled_from([b'{"n":1}', b"{}", END]), min_size=1, max_size=6),
        late=st.sampled_from([0, 0, 0, 1, 3]),
    )
    def append(self, name: str, partition: int, values: list[bytes], late: int) -> None:
        records = []
        for value in values:
            offset = self.offsets[partition]
            self.offsets[partition] += 1
            records.append(Record(offset, name.encode(), value, self.now - late * DAY, partition))
        self.writer.write(records)
        self.written += records
        self.events[name] += records
        if name == "a":
            self.loop.run(self.follower.until(len(self.events["a"])))

    @rule(begin=st.integers(0, 40), length=st.integers(1, 20))
    def replay(self, begin: int, length: int) -> None:
        for partition in (0, 1):
            mine = [r for r in self.written if r.partition == partition][begin : begin + length]
            if mine:
                self.writer.another_task().write(mine)

    @rule(days=st.integers(1, 3))
    def midnight(self, days: int) -> None:
        self.now += days * DAY

    @rule(after=st.integers(0, 2), step=st.sampled_from((None, None, *STEPS)), piece=st.sampled_from([1, 200, 1 << 16]))
    def pack(self, after: int, step: str | None, piece: int) -> None:
        def reached(at: str) -> None:
            if at == step:
                raise Crash

        keeper = Keeper(self.store, clock=lambda: self.now, piece_bytes=piece, reached=reached)
        with suppress(Crash), keeper:
            assert set(keeper.pack(after * DAY).left) <= {"early"}

    @rule(keep=st.integers(1, 4))
    def expire(self, keep: int) -> None:
        with Keeper(self.store, clock=lambda: self.now) as keeper:
            for name in NAMES:
                dropped = keeper.expire(name, keep * DAY)
                lost = self.events[name][self.gone[name] : self.gone[name] + dropped.events]
                assert all(record.time + keep * DAY <= self.now for record in lost)
                self.gone[name] += dropped.events
                assert dropped.ended == (dropped.events > 0 and self.gone[name] == len(self.events[name]))

    @rule(name=st.sampled_from(NAMES))
    def start_reader(self, name: str) -> None:
        self.readers.append(Reader(name, self.gone[name]))

    @rule(which=st.integers(0, 5), limit=st.integers(1, 9))
    def resume_reader(self, which: int, limit: int) -> None:
        if which >= len(self.readers):
            return
        reader = self.readers[which]
        place = {"after": reader.cursor} if reader.cursor else {"start": "start"}
        frames = self.loop.run(self.feeds.all(reader.name, follow=False, limit=limit, **place))
        gone = self.gone[reader.name]
        if not reader.cursor:
            reader.at = gone
        reasons = [json.loads(f.data)["reason"] for f in frames if isinstance(f, ControlFrame) and f.name == "gap"]
        assert reasons == (["expired"] if reader.at < gone else [])
        reader.at = max(reader.at, gone)
        wanted = [record.id for record in self.events[reader.name][reader.at : reader.at + limit]]
        assert [json.loads(f.data)["id"] for f in frames if isinstance(f, EventFrame)] == wanted
        reader.at += len(wanted)
        placed = [f.cursor.partition("~")[0] for f in frames if not isinstance(f, ControlFrame) or f.name == "gap"]
        reader.cursor = placed[-1] if placed else reader.cursor

    @invariant()
    def everything_written_and_not_expired_is_there_once_and_in_order(self) -> None:
        if not hasattr(self, "feeds"):
            return
        for name in NAMES:
            wanted = [record.id for record in self.events[name][self.gone[name] :]]
            assert self.loop.run(self.feeds.ids(name, start="start")) == wanted
        assert self.loop.run(self.follower.until(0)) == [record.id for record in self.events["a"]]

    @invariant()
    def no_key_is_left_without_an_owner_or_an_end(self) -> None:
        if hasattr(self, "feeds"):
            with Keeper(self.store, clock=lambda: self.now) as keeper:
                assert keeper.unowned() == []


@pytest.mark.parametrize("any_store", ["single", "cluster"], indirect=True)
def test_any_interleaving_shows_every_reader_every_event_once(any_store: StoreOptions) -> None:
    machine = type("Machine", (Interleaving,), {"options": any_store})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=scaled(8), stateful_step_count=25, suppress_health_check=list(HealthCheck)),
    )

"""Writers of sessions that race, die and come back: every record is in the stream once, however they are cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count, groupby

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.valkey.shards import Shards, StoreOptions, load_functions, mapping
from tailrace.views.sessions.store import SessionChange, SessionOptions, SessionStore, Verdict, Write, state_of
from tests.examples import examples
from tests.views.sessions.recorded import claim

_fresh = count()
_encode = msgspec.json.encode


class Record(msgspec.Struct, frozen=True):
    offset: int
    identity: str
    kind: str


class State(msgspec.Struct, frozen=True):
    number: int
    position: str
    opened: int
    records: int
    state: str
    last: int


_decode = msgspec.json.Decoder(State).decode


def some_records(chance: random.Random, n: int, names: Sequence[str]) -> list[Record]:
    """Records of sessions that are opened, written and closed, some of them several times."""
    is_open = dict.fromkeys(names, False)
    found: list[Record] = []
    offset = 0
    for _ in range(n):
        offset += chance.choice((1, 1, 1, 4))  # transactions and compaction leave holes
        name = chance.choice(names)
        kind = "open" if not is_open[name] else chance.choice(("data", "data", "data", "close"))
        is_open[name] = kind != "close"
        found.append(Record(offset, name, kind))
    return found


def lives(records: Sequence[Record]) -> list[tuple[str, list[int]]]:
    """The offsets of each life of each session, in the order in which they were opened."""
    found: list[tuple[str, list[int]]] = []
    current: dict[str, list[int]] = {}
    for record in records:
        if record.kind == "open":
            current[record.identity] = []
            found.append((record.identity, current[record.identity]))
        current[record.identity].append(record.offset)
    return found


class Stream:
    """A stream with its writers' records, and the tasks that bring these into it."""

    def __init__(self, options: StoreOptions, records: dict[str, list[Record]]) -> None:
        self.shards = Shards(options).open()
        load_functions(self.shards)
        self.store = SessionStore(self.shards, SessionOptions())
        self.name = f"replayed-{next(_fresh)}"
        self.records = {
            writer: [msgspec.structs.replace(r, identity=f"{self.name}-{r.identity}") for r in some]
            for writer, some in records.items()
        }

    def task(self, writer: str, chance: random.Random) -> Iterator[str]:
        """Write all that is not there yet; yields before every step, where it may be stopped for long, or for good."""
        records = self.records[writer]
        identities = sorted({record.identity for record in records})
        while True:
            yield "read"
            mark, values = self.store.read(self.name, writer, identities)
            left = [record for record in records if record.offset > mark]
            if not left:
                return
            portion = left[: chance.randrange(1, len(left) + 1)]
            known = {identity: _decode(state_of(value)) for identity, value in values.items()}
            entries: list[tuple[int, int]] = []
            refused = False
            for record in portion:
                name = record.identity
                if record.kind == "open":
                    yield "claim"
                    claimed = claim(self.store, self.name, name, writer, record.offset, values.get(name, b""))
                    if claimed is None:
                        refused = True
                        break
                    known[name] = State(*claimed, opened=record.offset, records=0, state="open", last=-1)
                one = known[name]
                state = "closed" if record.kind == "close" else "open"
                known[name] = msgspec.structs.replace(one, records=one.records + 1, state=state, last=record.offset)
                entries.append((one.number, record.offset))
            if refused:
                continue
            write = self._write(writer, mark, portion, known, values, entries, chance)
            yield "put"
            if self.store.put([write]) != [Verdict.OK]:
                continue
            yield "append"
            self.store.append([write])

    def _write(
        self,
        writer: str,
        mark: int,
        portion: list[Record],
        known: dict[str, State],
        values: dict[str, bytes],
        entries: list[tuple[int, int]],
        chance: random.Random,
    ) -> Write:
        changes = [
            SessionChange(
                name,
                known[name].number,
                values.get(name, b""),
                _encode(known[name]),
                (known[name].number, known[name].records, 0),
                {
                    "streamSessionId": known[name].number,
                    "streamName": self.name,
                    "streamPosition": known[name].position,
                    "json": _encode(known[name]),
                    "state": known[name].state,
                    "writer": writer,
                    "opened": known[name].opened,
                },
            )
            for name in dict.fromkeys(record.identity for record in portion)
        ]
        bursts: list[tuple[int, bytes]] = []
        for number, some in groupby(entries, key=lambda entry: entry[0]):
            offsets = [offset for _, offset in some]
            while offsets:
                size = chance.randrange(1, 4)
                bursts.append((number, _encode((writer, offsets[:size]))))
                offsets = offsets[size:]
        return Write(self.name, writer, mark, portion[-1].offset, changes, bursts)

    def check(self) -> None:
        """Every record is there once and in order, under one number a life; the hash is the last state."""
        keys = self.shards.keys
        key, claims = keys.stream(self.name), keys.claims(self.name)
        entries, claimed = self.shards.run_keyed([(key, ("XRANGE", key, "-", "+")), (key, ("HLEN", claims))])
        assert claimed == 0
        by_number: dict[int, list[tuple[str, int]]] = {}
        first: dict[int, tuple[int, ...]] = {}
        order: dict[str, list[int]] = {}
        for at, fields in entries:
            number = int(mapping(fields)[b"id"])
            writer, offsets = msgspec.json.decode(mapping(fields)[b"data"])
            by_number.setdefault(number, []).extend((writer, offset) for offset in offsets)
            first.setdefault(number, tuple(map(int, at.split(b"-"))))
            order.setdefault(writer, []).extend(offsets)
        for writer, records in self.records.items():
            assert order[writer] == [record.offset for record in records]
            last: dict[str, tuple[int, list[int]]] = {}
            for identity, offsets in lives(records):
                expected = [(writer, offset) for offset in offsets]
                numbers = [number for number, some in by_number.items() if some == expected]
                assert len(numbers) == 1, (identity, offsets, by_number)
                assert identity not in last or numbers[0] > last[identity][0]
                last[identity] = numbers[0], offsets
            mark, values = self.store.read(self.name, writer, sorted(last))
            assert mark == records[-1].offset
            for identity, (number, offsets) in last.items():
                state = _decode(state_of(values[identity]))
                assert (state.number, state.records, state.last) == (number, len(offsets), offsets[-1])
                assert tuple(map(int, state.position.split("-"))) < first[number]
                assert self.store.hash_fields([identity], ["json", "order"]) == [
                    [_encode(state), f"{number} {len(offsets)} 0".encode()]
                ]


@examples(25)
@given(seed=st.integers(0, 2**32))
def test_tasks_that_race_and_die_anywhere_write_every_record_once(store: StoreOptions, seed: int) -> None:
    chance = random.Random(seed)
    records = {
        "t:0": some_records(chance, 24, ("a", "b", "c")),
        "t:1": some_records(chance, 12, ("d", "e")),
    }
    stream = Stream(store, records)
    running = [stream.task(chance.choice(("t:0", "t:1")), random.Random(chance.random())) for _ in range(4)]
    for _ in range(250):
        at = chance.randrange(len(running))
        # Some go on for a while, so that others find themselves far behind; some die, and others come.
        for _ in range(chance.choice((1, 1, 2, 9))):
            if next(running[at], None) is None or chance.random() < 0.03:
                running[at] = stream.task(chance.choice(("t:0", "t:1")), random.Random(chance.random()))
                break
    for task in [*running, *(stream.task(writer, chance) for writer in records)]:
        for _ in task:
            pass
    stream.check()


@pytest.mark.parametrize("portions", [(24, 1), (5, 24), (3, 2)])
def test_a_task_that_dies_between_any_two_steps_leaves_nothing_wrong(
    any_store: StoreOptions, portions: tuple[int, int]
) -> None:
    class Cut(random.Random):
        """Takes portions of one size."""

        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.size = size

        def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
            assert stop is not None
            return min(self.size, stop - 1)

    records = some_records(random.Random(5), 24, ("a", "b"))
    dies_after = 1
    while True:
        stream = Stream(any_store, {"t:0": records})
        task = stream.task("t:0", Cut(portions[0]))
        survived = sum(1 for _ in zip(task, range(dies_after), strict=False)) < dies_after
        for _ in stream.task("t:0", Cut(portions[1])):
            pass
        stream.check()
        if survived:
            break
        dies_after += 1
    assert dies_after > 4

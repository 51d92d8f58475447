"""The reading of a tag: whatever is written late, in pieces or twice, from every cursor exactly the rest."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from hypothesis import event, given
from hypothesis import strategies as st

from tailrace.log.event import Partition
from tailrace.log.timeuuid import make_timeuuid
from tailrace.views.tags.rows.model import BEGIN, StoredRow, TagPosition, hashed, join_cursor, parse_positions
from tailrace.views.tags.rows.reading import DeliveredRow, Reading, ReadSettings
from tests.examples import examples
from tests.views.tags import tag_store
from tests.views.tags.tag_store import HOUR, T0, Reader, Store, quiet, row

START = TagPosition(BEGIN)
PLACES = [Partition("jobs", 0), Partition("jobs", 1), Partition("orders", 0)]

AGES = (0, 0, 0, 1, 7, 900, 5_000, HOUR, 3 * HOUR, -500, -5_000)
TICKS = (0, 1, 1, 10, 10, 60, 60, 1_000, 6_000, HOUR, -2_000, -HOUR)
KINDS = ("produce",) * 5 + (
    "write",
    "apply",
    "apply",
    "raise",
    "tick",
    "begin",
    "page",
    "page",
    "poll",
    "restart",
    "theirs",
)


def _op(choice: Random) -> tuple[Any, ...]:
    """Something that happens; of the last place little is applied, so that it lags."""
    match kind := choice.choice(KINDS):
        case "produce":
            return kind, choice.choice(PLACES), choice.choice("abcd"), choice.choice(AGES), choice.randint(1, 3)
        case "write":
            return kind, choice.choice(PLACES), choice.randint(1, 4), choice.sample(range(4), choice.randint(1, 4))
        case "apply":
            return kind, PLACES[int(choice.random() ** 2 * len(PLACES))], choice.randint(1, 4)
        case "tick":
            return kind, choice.choice(TICKS)
        case "begin":
            return kind, choice.choice([None, *PLACES])
        case "page" | "poll":
            return kind, choice.randint(1, 3)
        case _:
            return (kind,)


@st.composite
def _histories(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    choice = Random(draw(st.integers(0, 1 << 40)))
    return [_op(choice) for _ in range(draw(st.integers(1, 150)))]


_reads = st.builds(
    ReadSettings,
    delay_ms=st.sampled_from([0, 50, 5_000, None]),
    known_sources=st.sampled_from([1, 2, 100]),
    room=st.sampled_from([4, 5, 30]),
    short_ms=st.sampled_from([None, 1_000]),
    long_ms=st.sampled_from([None, 120_000]),
)


def _again(part: TagPosition) -> TagPosition:
    """The part as it comes back in a cursor."""
    return parse_positions(join_cursor([str(part)], ""), 1)[0]


def _run(ops: list[Any], reads: ReadSettings, with_others: bool = False) -> tuple[Store, Reader, list[StoredRow]]:
    """Carry out operations; return the store, the last reader, and the rows that earlier readers delivered."""
    store, theirs, their_ms = Store(), 0, 0
    if with_others:
        # What others wrote says nothing of a place that comes as the first, nor of a source that was forgotten.
        store.times.update(dict.fromkeys(PLACES, 0))
        reads = msgspec.structs.replace(reads, known_sources=100)
    reader, before = Reader(store, START, reads, from_beginning=True), list[StoredRow]()
    for name, *arguments in ops:
        match name:
            case "produce":
                store.produce(*arguments)
            case "write":
                store.write(*arguments)
            case "apply":
                store.apply(*arguments)
            case "theirs":
                if with_others:
                    theirs, their_ms = theirs + 1, max(store.now - T0, their_ms + 1)
                    store.put(row("theirs", theirs, their_ms))
            case "raise":
                store.raise_floors()
            case "tick":
                store.now += arguments[0]
            case "begin":
                reader.begin(between=arguments[0])
            case "page":
                reader.page(arguments[0])
            case "poll":
                reader.poll(arguments[0])
            case "restart":
                before += reader.rows
                reader = Reader(store, _again(reader.reading.position()), reads)
    return store, reader, before


def _drain(store: Store, reader: Reader) -> None:
    """Read until nothing more comes, with a writer that has done everything."""
    for _ in range(3):
        store.now += 2 * HOUR
        store.raise_floors()
        reader.poll()


def _check(rows: list[StoredRow], store: Store) -> None:
    ours = [each for each in rows if each.source != "theirs"]
    assert sorted(map(str, ours)) == sorted(str(each) for each in store.rows.values() if each.source != "theirs")
    _in_order(ours)
    theirs = [each.tag_seq for each in rows if each.source == "theirs"]
    assert theirs == sorted(set(theirs))


def _in_order(rows: list[StoredRow]) -> None:
    numbers: dict[str, int] = {}
    for each in rows:
        assert each.tag_seq == numbers.get(each.source, 0) + 1, f"{each.source} out of order"
        numbers[each.source] = each.tag_seq


@examples(150)
@given(_histories(), _reads, st.booleans())
def test_every_row_is_delivered_once_in_the_order_of_its_source_whatever_the_writers_do(
    ops: list[Any], reads: ReadSettings, with_others: bool
) -> None:
    store, reader, before = _run(ops, reads, with_others)
    store.apply_all()
    _drain(store, reader)
    assert not reader.lost
    _check(before + reader.rows, store)


@examples(150)
@given(_histories(), _reads, st.booleans())
def test_a_reader_that_begins_at_any_cursor_gets_exactly_the_rest_also_what_was_written_late(
    ops: list[Any], reads: ReadSettings, with_others: bool
) -> None:
    store, reader, _ = _run([op for op in ops if op[0] != "restart"], reads, with_others)
    store.apply_all()
    _drain(store, reader)
    got = [each for each in reader.out if isinstance(each, DeliveredRow)]
    for i, each in enumerate(got):
        text = join_cursor([str(each.position)], "")
        assert len(text) <= 4096
        resumed = Reader(store, parse_positions(text, 1)[0], reads)
        _drain(store, resumed)
        if each.position.reached:
            event("above the low-water timeuuid")
        _check([e.row for e in got[: i + 1]] + resumed.rows, store)


_visible = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 6)), unique=True, max_size=12)


@examples(300)
@given(_visible, st.lists(st.integers(0, 3), max_size=12), st.sampled_from([4, 30]), st.integers(0, 1))
def test_what_somebody_else_writes_in_any_order_comes_once_in_its_source_s_order_also_after_a_restart(
    arrivals: list[tuple[str, int]], between: list[int], room: int, skew: int
) -> None:
    """Rows become visible one after the other; only those are waited for that were seen to be missing."""
    store, reads = Store(), quiet(gap_ms=1 << 40, first_ms=1 << 40, room=room)
    reader = Reader(store, START, reads, from_beginning=True)
    for i, (pid, number) in enumerate(arrivals):
        store.put(row(pid, number, 10 * number + (5 * skew if pid == "b" else 0)))
        store.now = max(store.now, T0 + 100)
        for _ in range(between[i] if i < len(between) else 1):
            reader.poll(2)
    reader.poll()
    reader.poll()
    assert not reader.lost
    present = {(each.source, each.tag_seq) for each in store.rows.values()}
    gapless = {(p, n) for p, n in present if all((p, m) in present for m in range(1, n))}
    _in_order(reader.rows)
    assert {(each.source, each.tag_seq) for each in reader.rows} <= gapless
    got = [each for each in reader.out if isinstance(each, DeliveredRow)]
    for i, each in enumerate(got):
        resumed = Reader(store, _again(each.position), reads)
        resumed.poll()
        resumed.poll()
        again = [e.row for e in got[: i + 1]] + resumed.rows
        for pid in "ab":
            numbers = [e.tag_seq for e in again if e.source == pid]
            assert numbers == sorted(set(numbers))
            if hashed(pid) in {o.source for o in each.position.open}:
                event("was open")
                _in_order([e for e in again if e.source == pid])
                assert {(pid, n) for n in numbers} == {each for each in gapless if each[0] == pid}


def test_two_events_that_got_one_number_both_go_out_and_not_again() -> None:
    p, q = PLACES[:2]
    rows = [
        tag_store.event("a", 1, make_timeuuid(T0, 0, p), p, 0),
        tag_store.event("a", 2, make_timeuuid(T0 + 1, 1, p), p, 1),
        tag_store.event("a", 2, make_timeuuid(T0 + 2, 0, q), q, 0),
        tag_store.event("a", 3, make_timeuuid(T0 + 3, 1, p), p, 1),
    ]
    reading = Reading(START, ReadSettings(delay_ms=0), now_ms=T0 + 10)
    marks, floors = {p: 1, q: 0}, {p: T0 + 5, q: T0 + 5}
    reading.begin(marks, floors, T0 + 10)
    out = reading.take_page(rows, T0 + 10) + reading.finish(T0 + 10)
    assert [each.row for each in out if isinstance(each, DeliveredRow)] == rows
    assert reading.find_missed(rows) == []

"""Upkeep of tags in Cassandra on real parts: compared with Kafka, made again with their numbers, and erased."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from tailrace.cli.upkeep import run_rebuild
from tailrace.config.values import Where
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import BadRequest
from tailrace.log.timeuuid import make_timeuuid, ms_of, order
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.rows.model import StoredRow
from tailrace.views.tags.rows.upkeep import STEPS
from tailrace.views.tags.settings import CassandraSettings, TagRules
from tests.meanwhile import meanwhile
from tests.upkeep.past import HOUR, MINUTE, RowPast
from tests.writing import NOON

Make = Callable[..., RowPast]


@pytest.fixture
def past(kafka: EmbeddedKafka, store: StoreOptions, rows_store: CassandraSettings, spark: Any) -> Make:
    """Makes a topic and the rows of its tags; they are at the path ``tags``."""

    def make(partitions: int = 2, **flags: object) -> RowPast:
        return RowPast(kafka.address, store, rows_store, spark, partitions, **flags)

    return make


def audit_findings(here: RowPast, **changes: Any) -> set[tuple[str, str, str, int, int]]:
    """Return what an audit finds."""
    findings = here.audit(**changes).findings
    return {(f.name, f.kind, f.source, f.expected, f.found) for f in findings}


def assert_in_order(rows: list[StoredRow]) -> None:
    """Numbers have no gap along a source, and timeuuids rise along sources and partitions."""
    numbers: dict[str, int] = {}
    offsets: dict[Any, int] = {}
    for row in sorted(rows, key=lambda row: order(row.timeuuid)):
        assert row.tag_seq == numbers.get(row.source, row.tag_seq - 1) + 1, row
        assert row.offset > offsets.get(row.partition, -1), row
        numbers[row.source], offsets[row.partition] = row.tag_seq, row.offset


def test_an_audit_finds_rows_whole_and_names_what_is_lost_misnumbered_stale_or_twice(past: Make) -> None:
    here = past(2)
    here.put([*here.history(["p", "q", "r"], "red", "blue", hours=2), here.event("p"), here.event("s", "red")])
    found = here.audit()
    assert (found.clean, found.names, found.events, found.repeats) == (True, 2, 3 * 2 * 4 * 2 + 1, 0), found.findings
    red = {(row.source, row.tag_seq): row for row in here.rows("red")}
    again = red["q", 8]
    here.rows_writer.write(
        [
            # Written, not told of, and written again, since its time was cut by the clock.
            msgspec.structs.replace(
                again, timeuuid=make_timeuuid(ms_of(again.timeuuid) + 7, again.offset, again.partition)
            ),
            # Written by a task that does not exist yet.
            msgspec.structs.replace(
                again, offset=10_000, tag_seq=9, timeuuid=make_timeuuid(NOON + HOUR, 10_000, again.partition)
            ),
        ]
    )
    found = here.audit()
    assert (found.clean, found.repeats) == (True, 1), found.findings
    here.lose(red["p", 3], red["r", 8])
    here.rows_writer.write([msgspec.structs.replace(red["q", 4], tag_seq=2)])
    findings = audit_findings(here)
    assert {("red", "numbers", "p", 3, 4), ("red", "numbers", "r", 8, 7), ("red", "conflict", "q", 1, 2)} <= findings
    assert {f[0] for f in findings} == {"red"}
    rebuilt = here.rebuild("red")
    assert (rebuilt["rebuilt"], rebuilt["restored"]) == (1, 2)
    found = here.audit()
    assert (found.clean, found.repeats) == (True, 0), found.findings


def test_lost_rows_come_back_under_their_numbers_and_right_ones_are_not_touched(
    past: Make, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    here = past(2)
    pids = ["p", "q", "r", "s"]
    here.put(here.history(pids, "red", "blue", hours=3), at_once=7)
    here.put([here.event("late", "red", at=-5 * HOUR), here.event("late", "red", at=4 * HOUR)])
    # A source that comes by two partitions, in turns.
    body = b'{"tags":["red"]}'
    here.put([here.record("moves", NOON + 5 * HOUR + i * MINUTE, i % 2, body) for i in range(10)], at_once=1)
    before = {tag: here.rows(tag) for tag in ("red", "blue")}
    lost = [row for row in before["red"] if row.offset % 5 == 0]
    here.lose(*lost)

    def rebuild(dry_run: bool) -> tuple[int, list[Any]]:
        code = run_rebuild(here.settings, "tags", None, None, dry_run=dry_run, wait_s=1, json=True, spark=here.spark)
        return code, [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]

    code, (red, summary) = rebuild(dry_run=True)
    assert (code, red["name"], red["added"], summary["dry_run"]) == (0, "red", len(lost), True)
    assert len(here.rows("red")) == len(before["red"]) - len(lost)
    code, (red, summary) = rebuild(dry_run=False)
    assert (code, red["verdict"], red["written"], red["replaced"]) == (0, "rebuilt", len(lost), 0)
    now = here.rows("red")
    assert {(row.source, row.tag_seq, row.offset, row.value) for row in now} == {
        (row.source, row.tag_seq, row.offset, row.value) for row in before["red"]
    }
    assert [row for row in now if row.offset % 5] == [row for row in before["red"] if row.offset % 5]
    assert here.rows("blue") == before["blue"]
    assert_in_order(now)
    assert here.audit().clean
    assert rebuild(dry_run=False)[1][0]["rebuilt"] == 0


def test_history_is_tagged_while_the_pipeline_writes_and_a_run_that_died_is_begun_again(past: Make) -> None:
    here = past(2)
    pids = [f"p{i}" for i in range(4)]
    here.put(here.history(pids, "red", hours=3, each=5))
    here.restart(rules=TagRules({"big": Where({"n": {"$gte": 3}}), "red": Where({"n": 100})}))
    assert {f[:2] for f in audit_findings(here)} == {("big", "missing"), ("red", "different")}

    def write(turn: int) -> None:
        here.put([here.event(pids[turn % 3], "red", at=4 * HOUR + turn * MINUTE, n=turn % 6)])

    with meanwhile(write, 0.1) as turns:
        done = here.rebuild()
    assert (done["rebuilt"], done["restored"]) == (2, 4 * 3 * 2)
    assert turns.count > 5
    for tag, history in (("big", 6), ("red", 15)):
        rows = here.rows(tag)
        assert_in_order(rows)
        for pid in pids:
            numbers = [row.tag_seq for row in rows if row.source == pid]
            begin = 1 - history if tag == "big" else 1
            assert numbers == list(range(begin, begin + len(numbers))), (tag, pid)
    assert {row.tags for row in here.rows("big")} == {("red", "big")}
    assert here.audit().clean
    here.put([here.event("p3", "red", at=5 * HOUR, n=3)])
    assert here.numbers("big")["p3"] == [-5, -4, -3, -2, -1, 0, 1]
    # A rule is narrowed: rows go, and those before them are renumbered. Whatever a run had done when it died, the next
    # comes to the same.
    before = {row.offset: row for row in here.rows("big") if row.source == "p0"}
    here.restart(rules=TagRules({"big": Where({"n": 3}), "red": Where({"n": 100})}))
    here.rebuild("big")
    after = here.rows("big")
    assert_in_order(after)
    new = {row.offset: row for row in after if row.source == "p0"}
    assert set(new) < set(before)
    assert max(row.tag_seq for row in new.values()) == max(row.tag_seq for row in before.values())
    chance = random.Random(1)
    for offset, old in before.items():
        right = new.get(offset)
        if right != old and chance.random() < 0.7:
            here.rows_writer.write([old])
            if right is not None and chance.random() < 0.5:
                here.lose(right)
    assert here.rows("big") != after
    here.rebuild("big")
    assert here.rows("big") == after


def test_what_kafka_no_longer_has_stays_and_is_numbered_on_and_what_expired_is_not_missed(past: Make) -> None:
    here = past(1)
    here.put(here.history(["p", "q"], "red", hours=4), at_once=4)
    before = here.rows("red")
    here.forget(0, 16)
    here.restart(rules=TagRules({"red": Where({"n": {"$gt": 1}})}), paths=())
    assert here.rebuild()["rebuilt"] == 1
    rows = here.rows("red")
    assert_in_order(rows)
    assert [row.offset for row in rows if row.offset < 16] == list(range(16))
    assert here.numbers("red") == {"p": list(range(5, 17)), "q": list(range(5, 17))}
    assert [row.value for row in rows[:16]] == [row.value for row in before[:16]]
    assert here.audit().clean
    here.lose(*rows[:20])
    found = here.audit()
    assert not found.clean
    here.set("tags", keep=timedelta(days=1))
    found = here.audit()
    assert (found.clean, found.expired) == (True, 4), found.findings
    assert here.rebuild()["restored"] == 0


def test_a_source_is_erased_for_good_and_comes_back_when_it_is_asked_for(past: Make) -> None:
    here = past(2)
    here.put(here.history(["p", "q", "gone"], "red", "blue", hours=2), at_once=5)
    before = {tag: here.rows(tag) for tag in ("red", "blue")}
    preview = here.clean_rows("gone", dry_run=True)
    assert {each.tag: each.events for each in preview.erased} == {"red": 8, "blue": 8}
    assert {tag: here.rows(tag) for tag in before} == before

    for step in STEPS:

        def die(reached: str, step: str = step) -> None:
            if reached == step:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            here.clean_rows("gone", reached=die)
    assert here.audit().clean
    done = here.clean_rows("gone")
    assert done.facts()["left"] == {}
    left = {tag: [row for row in rows if row.source != "gone"] for tag, rows in before.items()}
    assert {tag: here.rows(tag) for tag in before} == left
    assert here.audit().clean
    assert here.rebuild()["rebuilt"] == 0
    here.put(here.history(["p", "gone"], "red", hours=1, each=1, first=6))
    assert here.numbers("red")["gone"] == [9], "its numbers go on"
    with pytest.raises(BadRequest, match="nobody"):
        here.clean_rows("nobody")
    assert here.rebuild(source="gone")["restored"] == 16
    assert here.numbers("red")["gone"] == list(range(1, 10))
    assert here.rows("blue") == before["blue"]
    assert here.audit().clean

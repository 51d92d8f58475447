"""Audits on real parts: a view that is whole is found whole while it changes, and every kind of damage is named."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cli.upkeep import run_audit
from tailrace.errors import BadRequest, PipelineError
from tailrace.log.store import write_row
from tailrace.upkeep.examine import Tally, examine, fingerprint, read_logs
from tailrace.upkeep.job import find_view
from tailrace.valkey.shards import StoreOptions
from tailrace.views import VIEWS
from tests.upkeep.past import Keeper, Past
from tests.writing import DAY, NOON, Record, Writer

Make = Callable[..., Past]

_events = st.tuples(
    st.sampled_from(["jobs:0", "jobs:1"]),
    st.integers(0, 2**40),
    st.integers(0, 2**41),
    st.none() | st.binary(max_size=4),
    st.none() | st.lists(st.tuples(st.text(max_size=3), st.none() | st.binary(max_size=3)), max_size=2),
    st.binary(max_size=8),
)


@given(st.lists(_events, min_size=1, max_size=12, unique_by=repr), st.randoms(use_true_random=False))
def test_sums_of_fingerprints_are_equal_for_the_same_events_in_any_order_and_for_no_others(
    events: list[Any], chance: random.Random
) -> None:
    def sums(some: list[Any]) -> list[int]:
        tally = Tally[str]()
        for event in some:
            tally.add("", *fingerprint(*event))
        return tally.rows.get("", [0, 0, 0])

    shuffled = list(events)
    chance.shuffle(shuffled)
    assert sums(shuffled) == sums(events)
    assert sums(events[1:]) != sums(events)
    source, offset, *rest = events[0]
    assert sums([(source, offset + 1, *rest), *events[1:]]) != sums(events)


def test_a_view_is_whole_as_it_came_and_packed_and_with_all_that_it_skips(past: Make) -> None:
    here = past(3)
    records = here.days("a", "b", "c", days=3, each=6)
    records += [here.record("d", value=b"no json"), here.record("e", value=b"")]
    records += [here.record("late", NOON + 2 * DAY), here.record("late", NOON), here.record("late", NOON + 9 * DAY)]
    here.put([*records, here.record("a")._replace(value=None), here.record("a")._replace(key=None)])
    found = here.audit(keys=True)
    assert (found.clean, found.names, found.days, found.events) == (True, 4, 11, 57)
    assert [last - first for first, last in found.retained.values()] == [24, 17, 17]
    with Keeper(here.store) as keeper:
        assert keeper.pack().segments == 11
    again = here.audit(keys=True)
    assert msgspec.structs.replace(again, seconds=found.seconds) == found
    stored: Any = here.shards.client(0).hget(here.keys.upkeep(), "audit:days")
    report = json.loads(stored)
    assert (report["names"], report["events"], report["findings"], report["error"]) == (4, 57, 0, "")
    assert 0 < report["started_ms"] <= report["ended_ms"]


def test_what_is_appended_packed_and_expired_meanwhile_is_no_finding(past: Make) -> None:
    here = past(2, days__keep="8d")
    here.put(here.days(*(f"n{i}" for i in range(20)), days=3, each=4))
    ended = threading.Event()
    turns = 0

    def live() -> None:
        nonlocal turns
        with Keeper(here.store, clock=lambda: NOON + 12 * DAY) as keeper:
            while not ended.is_set():
                here.put(here.days("n1", "n2", f"new{turns % 5}", days=1, each=4, first=3 + turns % 2))
                keeper.pack()
                keeper.expire(f"n{turns % 20}", 10 * DAY)
                turns += 1

    thread = threading.Thread(target=live)
    thread.start()
    try:
        found = [here.audit(clock=lambda: NOON + 12 * DAY) for _ in range(2)]
    finally:
        ended.set()
        thread.join()
    assert all(each.clean for each in found), found
    assert turns > 2
    assert found[1].events > found[0].events - 200


def test_what_the_view_dropped_on_purpose_is_not_missing_and_what_it_lost_is(past: Make) -> None:
    here = past(2, days__keep="10d", days__keep_by_name={"old.*": "9d"})
    here.put(here.days("a", "b", "old/1", days=4, each=4) + here.days("ended", days=2))
    now = NOON + 12 * DAY
    with Keeper(here.store, clock=lambda: now) as keeper:
        assert [keeper.expire(name, keep * DAY).events for name, keep in (("a", 10), ("old/1", 9))] == [8, 12]
        assert keeper.expire("ended", DAY).ended
        assert keeper.expire("b", 9 * DAY).events == 12
    found = here.audit(clock=lambda: now)
    assert found.clean, found.findings
    assert found.expired == 8 + 12 + 8 + 12
    here.set("days", keep=None)
    client, key = here.segment_key("a", 1)
    client.delete(key)
    kinds = {(f.kind, f.name, f.day) for f in here.audit(clock=lambda: now).findings}
    assert kinds == {("gone", "a", "2026-09-15"), ("missing", "a", "2026-09-15")}


def test_every_kind_of_damage_is_found_and_named(past: Make) -> None:
    here = past(2)
    names = [
        "whole",
        "deleted",
        "lost-entry",
        "broken",
        "twice",
        "unlisted",
        "no-hash",
        "miscounted",
        "other-bytes",
        "bad-row",
        "vanished",
    ]
    here.put(here.days(*names, days=3, each=4))
    with Keeper(here.store) as keeper:
        segments = {name: keeper.log(name).segments for name in names}

    client, key = here.segment_key("deleted", 1)
    client.delete(key)
    client, key = here.segment_key("lost-entry", 2)
    client.xdel(key, client.xrange(key)[0][0])
    client, key = here.segment_key("broken", 0)
    (entry, fields), *rest = client.xrange(key)
    client.delete(key)
    client.xadd(key, {b"r": b"\x02" + fields[b"r"], b"t": fields[b"t"]}, entry)
    for entry, fields in rest:
        client.xadd(key, fields, entry)
    client, key = here.segment_key("twice", 1)
    entry, fields = client.xrange(key)[-1]
    number, count = (int(part) for part in entry.split(b"-"))
    client.xadd(key, fields, f"{number + count}-{count}")
    row = segments["twice"][1]
    grown = msgspec.structs.replace(row, last=row.last + count, events=row.events + count)
    client.hset(here.log_key("twice"), "s1", write_row(grown))
    here.client("unlisted").zrem(here.names_key("unlisted"), "unlisted")
    here.client("no-hash").delete(here.log_key("no-hash"))
    row = segments["miscounted"][0]
    client = here.client("miscounted")
    client.hset(here.log_key("miscounted"), "s0", write_row(msgspec.structs.replace(row, events=row.events + 1)))
    client, key = here.segment_key("other-bytes", 0)
    held = client.xrange(key)
    client.delete(key)
    for entry, fields in held:
        client.xadd(key, {b"r": fields[b"r"].replace(b'"name"', b'"NAME"'), b"t": fields[b"t"]}, entry)
    here.client("bad-row").hset(here.log_key("bad-row"), "s1", b"\xc1 no row")
    client, gone = here.client("vanished"), here.log_key("vanished")
    client.zrem(here.names_key("vanished"), "vanished")
    client.delete(gone, *(here.segment_key("vanished", i)[1] for i in range(2)))

    found = here.audit(keys=True)
    kinds: dict[str, set[str]] = {}
    for finding in found.findings:
        kinds.setdefault(finding.name, set()).add(finding.kind)
    assert kinds == {
        "deleted": {"gone", "missing"},
        "lost-entry": {"count", "missing"},
        "broken": {"damaged", "missing"},
        "twice": {"order", "extra"},
        "unlisted": {"unlisted", "stray"},
        "no-hash": {"no-log", "missing", "stray"},
        "miscounted": {"count"},
        "other-bytes": {"different"},
        "bad-row": {"registry", "missing"},
        "vanished": {"missing", "stray"},
    }
    missing = [f for f in found.findings if f.name == "deleted" and f.kind == "missing"]
    assert [(f.day, f.source, f.expected, f.found) for f in missing] == [
        ("2026-09-13", f"{here.topic}:{partition}", 2, 0) for partition in (0, 1)
    ]
    assert len([f for f in found.findings if f.name == "vanished" and f.kind == "stray"]) == 1


def test_the_command_prints_findings_and_a_summary_and_says_by_its_code_whether_all_is_well(
    past: Make, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    here = past(1)
    here.put(here.days("a", "b/1", "b/2", days=1))
    client, key = here.segment_key("b/2")
    client.delete(key)
    assert run_audit(here.settings, "days", "a|b/1", keys=False, json=True, spark=here.spark) == 0
    (summary,) = map(json.loads, capfdbinary.readouterr().out.splitlines())
    assert (summary["names"], summary["events"], summary["findings"], summary["sources"]) == (2, 8, 0, 1)
    assert run_audit(here.settings, "days", "b.*", keys=False, json=False, spark=here.spark) == 1
    *findings, summary = map(json.loads, capfdbinary.readouterr().out.splitlines())
    assert [(f["kind"], f["name"], f["expected"], f["found"]) for f in findings] == [
        ("gone", "b/2", 4, 0),
        ("missing", "b/2", 4, 0),
    ]
    assert (summary["names"], summary["findings"]) == (2, 2)
    with pytest.raises(BadRequest, match="no view 'nights'"):
        find_view(here.settings, VIEWS, "nights")
    with pytest.raises(BadRequest, match="RE2"):
        here.audit(pattern="(")
    with pytest.raises(PipelineError, match="given up"):
        here.audit(stopped=lambda: True)
    stored: Any = here.shards.client(0).hget(here.keys.upkeep(), "audit:days")
    assert "given up" in json.loads(stored)["error"]


def test_what_kafka_has_dropped_thins_out_or_was_never_read_from_is_not_compared(past: Make) -> None:
    here = past(2)
    other, thin = here.beside(), here.beside()
    here.put(here.days("a", "b", days=3, each=4))
    here.forget(0, 5)
    here.set("kafka", topics=(here.topic, other.topic, thin.topic))
    other.produce(other.days("a"))
    here.shards.client(0).hdel(here.keys.topics(), other.topic)
    compact = ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, thin.topic, incremental_configs=[compact])
    here.admin.incremental_alter_configs([resource])[resource].result(30)
    records = thin.days("thin")
    thin.produce(records[:-1])
    thin.writer.write(records)
    found = here.audit()
    assert found.clean, found.findings
    assert found.left_out == {other.topic: "not read by the pipeline yet", thin.topic: "Kafka compacts it"}
    assert (found.events, found.names) == (24 - 5, 3)


def test_a_log_that_changed_since_its_registry_was_read_is_read_again(store: StoreOptions) -> None:
    writer = Writer(store)
    writer.write([Record(i, b"a", time=NOON + i * DAY) for i in range(5)])
    with Keeper(store, clock=lambda: NOON + 12 * DAY) as keeper:
        before = read_logs(keeper.shards, "days", ["a"])
        keeper.pack()
        keeper.expire("a", 10 * DAY)
        writer.write([Record(5, b"a", time=NOON + 5 * DAY)])
        (examined,) = examine(keeper.shards, "days", before, {})
        assert not examined.findings
        assert examined.days == 4
        assert keeper.expire("a", DAY).ended
        (ended,) = examine(keeper.shards, "days", before, {})
        assert not ended.findings

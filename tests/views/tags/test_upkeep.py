"""Upkeep of tags on real parts: packed, swept, compared with Kafka, made again with their numbers, and erased."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tailrace.cli.upkeep import run_rebuild
from tailrace.config.settings import Settings
from tailrace.config.values import Where
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import BadRequest
from tailrace.log.request import AnyFrame, ControlFrame, EventFrame
from tailrace.log.run import decode, encode
from tailrace.upkeep import pack, sweep
from tailrace.upkeep.examine import examine, read_logs
from tailrace.upkeep.job import FAILPOINT, run_job
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.settings import TagRules, TagsSettings
from tailrace.views.tags.upkeep import STEPS, TagLogCopy
from tailrace.views.tags.write import TagsPlan
from tests.log.rig import ids
from tests.meanwhile import meanwhile
from tests.upkeep.past import HOUR, MINUTE, Keeper, Seen, TagPast, tag_feeds
from tests.upkeep.test_process import run
from tests.writing import NOON, Record, Writer

Make = Callable[..., TagPast]


@pytest.fixture
def past(kafka: EmbeddedKafka, store: StoreOptions, spark: Any) -> Make:
    """Makes a topic and its tags; they are at the path ``tags``."""

    def make(partitions: int = 2, **flags: object) -> TagPast:
        return TagPast(kafka.address, store, spark, partitions, None, **{"tags__paths": ["tags"], **flags})

    return make


def by_source(events: list[Seen]) -> dict[str, list[Seen]]:
    """Return the events of each source, in their order."""
    found: dict[str, list[Seen]] = {}
    for each in events:
        found.setdefault(each.source, []).append(each)
    return found


def gaps(frames: list[AnyFrame]) -> list[str]:
    return [json.loads(f.data)["reason"] for f in frames if isinstance(f, ControlFrame) and f.name == "gap"]


def assert_gapless(here: TagPast, tag: str, ends: dict[str, int]) -> None:
    """Each source's numbers go up to its last one without a gap."""
    for pid, numbers in here.numbers(tag).items():
        assert numbers == list(range(ends[pid] - len(numbers) + 1, ends[pid] + 1)), pid


# Packing and sweeping.


async def test_tags_are_packed_with_all_that_they_know_and_swept_and_readers_are_told(past: Make) -> None:
    here = past(2, tags__keep="30d", tags__pack_after="0s")
    here.put(here.history(["p", "q", "r"], "red", "blue", hours=4), at_once=5)
    before = here.events("red")
    async with tag_feeds(here.store) as feeds:
        frames = [f for f in await feeds.all("red", follow=False) if isinstance(f, EventFrame)]
        done = run_job(here.settings, pack.Packing("tags", pack.PackRules.of(here.settings, here.upkept)))
        assert (done["segments"], done["events"]) == (8, 2 * len(before))
        assert here.events("red") == before
        assert {segment.state for segment in here.log("red").segments} == {1}
        assert ids(await feeds.all("red", after=frames[20].cursor, follow=False)) == ids([*frames[21:]])
        rules = sweep.SweepRules.of(here.settings, here.upkept)
        assert rules.keep_of("red") == here.settings.tags.keep
        with Keeper(here.store, clock=lambda: NOON + 3 * HOUR, view="tags") as keeper:
            assert keeper.expire("red", HOUR).segments == 2
        assert here.events("red") == before[24:]
        rest = await feeds.all("red", after=frames[3].cursor, follow=False)
        assert (gaps(rest), ids(rest)) == (["expired"], ids([*frames[24:]]))
    assert run_job(here.settings, sweep.Sweeping("tags", rules))["events"] == 2 * len(before) - 24


# Audits.


def test_an_audit_finds_tags_whole_as_they_came_and_packed_and_names_what_was_lost_or_misnumbered(past: Make) -> None:
    here = past(2)
    here.put([*here.history(["p", "q", "r"], "red", "blue", hours=3), here.event("p"), here.event("s", "red")])
    found = here.audit(keys=True)
    assert (found.clean, found.names, found.events) == (True, 2, 3 * 3 * 4 * 2 + 1), found.findings
    with Keeper(here.store, view="tags") as keeper:
        assert keeper.pack().segments == 6
    assert here.audit().clean
    here.put(here.history(["p", "q"], "red", "green", hours=1, first=5), at_once=1)
    client, key = here.segment_key("red", 3)
    entries = client.xrange(key)
    lost = decode(entries[2][1][b"r"])
    client.xdel(key, entries[2][0])
    client, key = here.segment_key("green")
    entries = client.xrange(key)
    client.delete(key)
    for entry, fields in entries:
        run = decode(fields[b"r"])
        if run.tag_columns is not None and run.tag_columns.numbers == [3] and run.tag_columns.sources == ["q"]:
            wrong = msgspec.structs.replace(run.tag_columns, numbers=[7])
            fields = {**fields, b"r": encode(msgspec.structs.replace(run, tag_columns=wrong))}
        client.xadd(key, fields, entry)
    found = here.audit()
    findings = {(f.name, f.kind, f.source, f.expected, f.found) for f in found.findings}
    pid = lost.tag_columns.sources[0] if lost.tag_columns is not None else ""
    assert ("red", "numbers", pid, 14, 15) in findings
    assert {f.kind for f in found.findings if f.name == "red"} == {"numbers", "count", "missing"}
    assert ("green", "numbers", "q", 3, 7) in findings
    assert {f.name for f in found.findings} == {"red", "green"}


def test_an_audit_compares_the_last_numbers_with_those_that_were_given_out(past: Make) -> None:
    here = past(1)
    here.put(here.history(["p", "q"], "red", hours=1))
    client, key = here.client("red"), here.keys.numbers(here.registry.logs(["red"])[0].shard, "red")
    stored: Any = client.hget(key, "p")
    client.hset(key, "p", stored.replace(b"4 ", b"6 ", 1))
    (finding,) = here.audit().findings
    assert (finding.kind, finding.source, finding.expected, finding.found) == ("numbers", "p", 6, 4)


def test_audits_of_tags_that_nobody_writes_begin_no_session(past: Make) -> None:
    here = past(1)
    here.spark = "none is asked"
    assert here.audit().clean
    here.set("tags", store="cassandra")
    assert here.audit().clean
    with pytest.raises(BadRequest, match="they have no keys"):
        here.audit(keys=True)
    with pytest.raises(BadRequest, match="as a whole"):
        past(1).rebuild("red", day=0)


# Rebuilds.


def test_a_tag_that_was_damaged_or_lost_comes_back_with_the_same_numbers_and_timeuuids(past: Make) -> None:
    here = past(2)
    pids = ["p", "q", "r", "s", "t"]
    here.put(here.history(pids, "red", "blue", "whole", hours=4), at_once=7)
    with Keeper(here.store, view="tags") as keeper:
        keeper.pack()
    here.put(here.history(pids, "red", "blue", "whole", hours=1, first=4), at_once=7)
    here.put([here.event("late", "red", "blue", at=-5 * HOUR), here.event("late", "blue", at=6 * HOUR)])
    before = {tag: here.events(tag) for tag in ("red", "blue", "whole")}
    client, key = here.segment_key("red", 1)
    client.delete(key)
    client = here.client("blue")
    client.delete(here.log_key("blue"), *(here.segment_key("blue", i)[1] for i in range(5)))
    client.zrem(here.names_key("blue"), "blue")
    done = here.rebuild()
    assert (done["rebuilt"], done["left"]) == (2, {})
    for tag, events in before.items():
        assert by_source(here.events(tag)) == by_source(events)
    assert here.events("whole") == before["whole"]
    here.put(here.history(pids, "red", "blue", hours=1, first=7))
    assert_gapless(here, "blue", {**dict.fromkeys(pids, 24), "late": 2})
    assert here.audit(keys=True).clean


def test_what_kafka_no_longer_has_stays_and_is_numbered_on(past: Make) -> None:
    here = past(1)
    here.put(here.history(["p", "q"], "red", hours=5), at_once=4)
    before = here.events("red")
    here.forget(0, 20)
    client, key = here.segment_key("red", 4)
    client.delete(key)
    front = here.log("red").segments[:2]
    with here.restorer() as restoring:
        done = restoring.restore("red")
        assert (done.verdict, done.events, done.replaced) == ("rebuilt", 24, 3)
    assert (here.events("red"), here.log("red").segments[:2]) == (before, front)
    client, key = here.segment_key("red", 0)
    client.delete(key)
    with here.restorer() as restoring:
        assert restoring.restore("red").verdict == "rebuilt"
    assert here.events("red") == before[8:]
    here.restart(rules=TagRules({"red": Where({"n": {"$gt": 1}})}), paths=())
    with here.restorer() as restoring:
        done = restoring.restore("red")
        assert (done.verdict, done.events, done.replaced) == ("rebuilt", 12 + 12, 4), "also what stood in front of it"
    assert_gapless(here, "red", {"p": 20, "q": 20})


def test_history_is_tagged_while_the_pipeline_writes_and_nothing_live_is_renumbered(past: Make) -> None:
    here = past(2)
    pids = [f"p{i}" for i in range(6)]
    here.put(here.history(pids, "red", hours=3, each=5))
    here.restart(rules=TagRules({"big": Where({"n": {"$gte": 3}}), "red": Where({"n": 100})}))
    found = here.audit()
    assert {(f.name, f.kind) for f in found.findings} == {("big", "missing"), ("red", "different")}
    live: dict[str, list[Seen]] = {}

    def write(turn: int) -> None:
        here.put([here.event(pids[turn % 5], "red", at=4 * HOUR + turn * MINUTE, n=turn % 6)])

    with meanwhile(write) as turns:
        done = here.rebuild()
    assert (done["rebuilt"], done["left"]) == (2, {})
    assert turns.count > 5
    for tag, history in (("big", 6), ("red", 15)):
        events = by_source(here.events(tag))
        for pid in pids:
            live[pid] = [each for each in events[pid] if each.ms >= NOON + 4 * HOUR]
            numbers = [each.number for each in events[pid]]
            begin = 1 - history if tag == "big" else 1
            assert numbers == list(range(begin, begin + len(numbers))), (tag, pid)
            assert [each.number for each in live[pid]] == numbers[history:]
    assert {each.tags for each in here.events("big")} == {("red", "big")}
    assert here.audit(keys=True).clean
    here.put([here.event("p5", "red", at=5 * HOUR, n=3)])
    assert here.numbers("big")["p5"] == [-5, -4, -3, -2, -1, 0, 1]


async def test_the_command_says_what_would_be_tagged_and_readers_inside_are_told(
    past: Make, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    here = past(1)
    here.put(here.history(["p"], "red", hours=2))
    here.restart(rules=TagRules({"big": Where({"n": 3}), "red": Where({"n": 100})}))
    here.put([here.event("p", "red", at=3 * HOUR, n=3)])

    def retag(tag: str | None, dry_run: bool) -> tuple[int, list[Any]]:
        code = run_rebuild(here.settings, "tags", tag, None, dry_run=dry_run, wait_s=1, json=True, spark=here.spark)
        return code, [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]

    async with tag_feeds(here.store) as feeds:
        frames = [f for f in await feeds.all("red", follow=False) if isinstance(f, EventFrame)]
        code, (big, _red, summary) = retag(None, dry_run=True)
        assert (code, big["name"], big["events"], big["before"], summary["dry_run"]) == (0, "big", 3, 1, True)
        assert here.numbers("big") == {"p": [1]}
        code, (big, summary) = retag("big", dry_run=False)
        assert (code, big["verdict"], summary["restored"]) == (0, "rebuilt", 2)
        assert here.numbers("big") == {"p": [-1, 0, 1]}
        assert retag(None, dry_run=False)[1][0]["name"] == "red", "its events have one more tag"
        rest = await feeds.all("red", after=frames[2].cursor, follow=False)
        assert (gaps(rest), len(ids(rest))) == (["rebuilt"], 9)


# Cleanup.


async def test_a_source_is_erased_for_good_and_nobody_else_notices(past: Make) -> None:
    here = past(2)
    here.put(here.history(["p", "q", "gone"], "red", "blue", hours=3), at_once=5)
    here.put(here.history(["gone"], "red", "alone", hours=1, first=3))
    with Keeper(here.store, view="tags") as keeper:
        keeper.pack()
    here.put(here.history(["p", "gone"], "red", hours=1, first=4))
    before = {tag: here.events(tag) for tag in ("red", "blue", "alone")}
    preview = here.cleanup("gone", dry_run=True)
    assert {each.tag: each.events for each in preview.erased} == {"red": 20, "blue": 12, "alone": 4}
    assert {tag: here.events(tag) for tag in before} == before
    async with tag_feeds(here.store) as feeds:
        frames = [f for f in await feeds.all("red", follow=False) if isinstance(f, EventFrame)]
        assert here.cleanup("gone", "blue").facts() == {
            "source": "gone",
            "tags": 1,
            "events": 12,
            "segments": 3,
            "left": {},
        }
        done = here.cleanup("gone")
        assert {each.tag: (each.verdict, each.events) for each in done.erased} == {
            "red": ("cleaned", 20),
            "alone": ("cleaned", 4),
        }
        left = {tag: [each for each in events if each.source != "gone"] for tag, events in before.items()}
        assert {tag: here.events(tag) for tag in before} == left
        assert here.audit(keys=True).clean
        here.put(here.history(["p", "gone"], "red", hours=1, each=1, first=6))
        after = here.events("red")
        assert after == [*left["red"], *after[-2:]]
        assert here.numbers("red")["gone"] == [21], "its numbers go on"
        everyone = [json.loads(f.data)["id"] for f in frames]
        for i, frame in enumerate(frames):
            rest = await feeds.all("red", after=frame.cursor, follow=False)
            wanted = [each.id for each in after if each.id not in everyone[: i + 1]]
            assert (gaps(rest), ids(rest)) == ([], wanted), i
    client, key = here.segment_key("red", 1)
    client.delete(key)
    assert here.rebuild("red")["rebuilt"] == 1
    assert by_source(here.events("red")) == by_source(after), "a rebuild does not bring it back"
    assert here.audit().clean
    with pytest.raises(BadRequest, match="nobody"):
        here.cleanup("nobody")


def test_a_source_that_was_erased_comes_back_when_it_is_asked_for(past: Make) -> None:
    here = past(1)
    here.put(here.history(["p", "gone"], "red", "blue", hours=2))
    before = by_source(here.events("red"))
    here.cleanup("gone")
    here.put(here.history(["gone"], "red", hours=1, each=1, first=3))
    assert here.rebuild()["rebuilt"] == 0
    assert here.rebuild(source="gone")["rebuilt"] == 2
    assert by_source(here.events("red"))["gone"][:8] == before["gone"]
    assert here.numbers("red")["gone"] == list(range(1, 10))
    assert here.audit().clean


@pytest.mark.parametrize("step", STEPS)
def test_a_cleanup_that_dies_is_completed_by_the_next(past: Make, step: str) -> None:
    here = past(1)
    here.put(here.history(["p", "gone"], "red", hours=3))
    left = [each for each in here.events("red") if each.source == "p"]

    def die(reached: str) -> None:
        if reached == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        here.cleanup("gone", reached=die)
    here.put([here.event("gone", "red", at=4 * HOUR)])
    if step == STEPS[-1]:
        assert here.audit().clean
        assert here.numbers("red")["gone"] == list(range(5, 14))
    here.cleanup("gone")
    assert here.events("red") == left
    here.put([here.event("gone", "red", at=5 * HOUR)])
    assert here.numbers("red")["gone"] == [14]


def test_the_command_says_what_it_would_erase_and_one_that_is_killed_is_completed_by_the_next(
    store: StoreOptions,
) -> None:
    tagging = TagsSettings(paths=("tags",))
    writer = Writer(store, views=("intake", "tags"), tags=TagsPlan(tagging))
    values = [b'{"tags":["red","blue"]}', b'{"tags":["red"]}']
    writer.write([Record(i, (b"p", b"q")[i % 3 % 2], values[i % 2], NOON + i * HOUR) for i in range(12)])

    def clean(*arguments: str, **changes: str) -> tuple[int, list[Any], str]:
        done = run(store, "tags", "cleanup", "q", "-J", *arguments, **changes)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr

    code, (blue, red, summary), stderr = clean()
    assert (code, blue["tag"], blue["events"], red["tag"], red["events"]) == (0, "blue", 2, "red", 4)
    assert (summary["dry_run"], summary["events"], summary["tags"]) == (True, 6, 2)
    assert "tag 'red': 4 event(s) of 'q' would be erased" in stderr
    code, lines, _ = clean("--no-dry-run", "--tag", "red", **{FAILPOINT: "thinned"})
    assert (code, lines) == (-signal.SIGKILL, [])
    code, (red, _), stderr = clean("--no-dry-run", "--tag", "red", "--wait", "10")
    assert (code, red["verdict"], red["events"]) == (0, "cleaned", 3), stderr
    with Keeper(store, view="tags") as keeper:
        check = TagLogCopy(TagsPlan(), Settings().tags).check_numbers
        logs = read_logs(keeper.shards, "tags", ["red"])
        (examined,) = examine(keeper.shards, "tags", logs, {}, check_numbers=check)
        assert not examined.findings
        assert keeper.unowned() == []
        left = [
            note.source
            for segment in keeper.log("red").segments
            for entry in keeper.registry.read_whole([("red", segment)])[0]
            for note in (
                entry.run.tag_columns.rows(entry.run.offsets, entry.run.times) if entry.run.tag_columns else ()
            )
        ]
        assert left == ["p"] * 8
    assert clean("--tag", "green")[0] == 1

"""The jobs of upkeep on a real store, in this process and on a real Spark: what they do, leave alone and report."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import psutil
import pytest

from tailrace.config.settings import Settings, load
from tailrace.errors import (
    BadRequest,
    LeaseHeld,
    PipelineError,
    StaleUpkeep,
    StoreChanged,
    StoreError,
    StoreUnavailable,
)
from tailrace.log.segment import PACKED
from tailrace.log.store import LogRegistry
from tailrace.testing.fixtures import end_spark
from tailrace.testing.installation import QUICK_JAVA, wait_for
from tailrace.upkeep import pack, sweep
from tailrace.upkeep.job import ScheduledJob, Scope, Throttle, find_view, matcher, now_ms, run_job
from tailrace.upkeep.loop import JobLoop
from tailrace.upkeep.pack import GROUP_SEGMENTS, PackPlan, Share, divided, due_segments, pack_share
from tailrace.upkeep.spark import Spread
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.views import VIEWS
from tests.upkeep.past import Keeper
from tests.writing import DAY, NOON, Record, Writer, read_view

MINUTE = 60_000
NOW = pack.PackRules(after_ms=0)


def settings(options: StoreOptions, **flags: object) -> Settings:
    at = {"valkey.url": options.url, "valkey.prefix": options.prefix}
    quick = {"spark.driver.extraJavaOptions": QUICK_JAVA}
    given = {name.replace("__", "."): value for name, value in flags.items()}
    return load(flags={**at, "spark.conf": quick, "spark.driver_memory": "512m", **given})


def some_days(names: int = 20, days: int = 3, each: int = 4) -> list[Record]:
    """Records of several streams and days, the days in order."""
    places = [(d, n, i) for d in range(days) for n in range(names) for i in range(each)]
    return [
        Record(offset, b'["queue","set-%d"]' % n, b'{"n":%d}' % offset, time=NOON + d * DAY + i)
        for offset, (d, n, i) in enumerate(places)
    ]


def contents(options: StoreOptions) -> dict[bytes, bytes]:
    """Everything that is stored under a prefix, as it is."""
    shards = Shards(options).open()
    found: dict[bytes, Any] = {
        key: node.dump(key) for node in shards.primaries() for key in node.scan_iter(f"{options.prefix}:*", count=1000)
    }
    shards.close()
    return found


def reports(options: StoreOptions) -> dict[str, dict[str, Any]]:
    shards = Shards(options).open()
    stored: Any = shards.client(0).hgetall(shards.keys.upkeep())
    shards.close()
    return {field.decode(): msgspec.json.decode(report) for field, report in stored.items()}


@pytest.fixture(scope="module")
def spread() -> Iterator[Spread]:
    """One session for all tests of this file, and no other one."""
    end_spark()
    with Spread(settings(StoreOptions("valkey://127.0.0.1:1/0"))) as spread:
        yield spread


@pytest.mark.jvm
def test_what_spark_packs_is_what_this_process_packs(
    store: StoreOptions, spread: Spread, capfd: pytest.CaptureFixture[str]
) -> None:
    other = msgspec.structs.replace(store, prefix=f"{store.prefix}b")
    for options in (store, other):
        writer = Writer(options)
        for at in range(0, 240, 60):
            writer.write(some_days()[at : at + 60])
    before = asyncio.run(read_view(store))
    progress: list[tuple[int, int]] = []
    here = pack.Packing("days", NOW, Scope(progress=lambda *far: progress.append(far)), spread=spread)
    run_job(settings(store), here)
    there = pack.Packing("days", pack.PackRules(0, spark_from=0), spread=spread)
    run_job(settings(other), there)
    assert here.facts() == there.facts()
    assert capfd.readouterr().out == "", "standard output is for results; Spark writes elsewhere"
    assert (here.outcome.segments, here.found["days"], here.outcome.events, here.outcome.left) == (60, 3, 240, {})
    assert progress[-1] == (here.found["bytes_before"], here.found["bytes_before"])
    assert asyncio.run(read_view(store)) == asyncio.run(read_view(other)) == before
    for options in (store, other):
        with Keeper(options) as keeper:
            assert keeper.unowned() == []
            assert keeper.pack().segments == 0


def test_errors_of_tasks_come_back_as_what_they_were(store: StoreOptions, spread: Spread) -> None:
    Writer(store).write(some_days())
    with Keeper(store) as keeper:
        dues = [d for found in keeper.registry.walk() for d in due_segments(found.name, found.log, 0, now_ms())]
        rules = pack.PackRules(0, 512 << 10)
        plan = PackPlan(store, dict(keeper.shards.run_ids), keeper.lease.token, "days", rules, now_ms())
        assert spread.start()

        def packed(plan: PackPlan) -> list[Share]:
            return spread.map(partial(pack_share, plan), divided(dues, spread.parts), lambda: False)

        late = msgspec.structs.replace(plan, token=plan.token - 1)
        assert {type(share.error) for share in packed(late)} == {StaleUpkeep}
        restarted = msgspec.structs.replace(plan, run_ids=dict.fromkeys(plan.run_ids, "another"))
        assert {type(share.error) for share in packed(restarted)} == {StoreChanged}
        shares = packed(plan)
        assert [share.error for share in shares] == [None, None]
        assert sum(share.outcome.segments for share in shares) == 60


def test_workers_that_are_killed_lose_nothing(store: StoreOptions, spread: Spread) -> None:
    Writer(store).write(some_days())
    before = asyncio.run(read_view(store))
    assert spread.start()

    killed: list[int] = []

    def kill() -> None:
        wait_for("something packed", lambda: _packed(store))
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "tailrace.worker" in process.cmdline() and not process.children():
                    process.kill()
                    killed.append(process.pid)

    killer = threading.Thread(target=kill)
    killer.start()
    rules = pack.PackRules(0, spark_from=0, per_hour=60 * 3600)
    facts = run_job(settings(store), pack.Packing("days", rules, spread=spread))
    killer.join()
    assert killed
    assert facts["segments"] + facts["left"].get("moved", 0) == 60
    assert _packed(store) == 60
    assert asyncio.run(read_view(store)) == before


def _packed(options: StoreOptions) -> int:
    shards = Shards(options).open()
    found = sum(s.state == PACKED for each in LogRegistry(shards, "days").walk() for s in each.log.segments)
    shards.close()
    return found


def test_a_jvm_that_dies_fails_the_run_and_nothing_is_left_of_it(store: StoreOptions, spread: Spread) -> None:
    Writer(store).write(some_days())
    assert spread.start()
    (jvm,) = _jvms()
    jvm.kill()
    rules = pack.PackRules(0, spark_from=0)
    with pytest.raises(PipelineError, match="a Spark job of upkeep failed"):
        run_job(settings(store), pack.Packing("days", rules, spread=spread))
    assert _jvms() == []
    assert "Spark" in reports(store)["pack:days"]["error"]


def test_without_a_spark_everything_is_packed_here(store: StoreOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    Writer(store).write(some_days())
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with Spread(settings(store)) as none:
        work = pack.Packing("days", pack.PackRules(0, spark_from=0), spread=none)
        assert run_job(settings(store), work)["segments"] == 60


def _jvms() -> list[psutil.Process]:
    """The JVMs of Spark, without the one that writes classes for later ones; a broker of another test is one too."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie has no command either
            command = " ".join(child.cmdline())
            if "SparkSubmit" in command and "ArchiveClassesAtExit" not in command:
                found.append(child)
    return found


def test_shares_are_even_and_hold_everything_once(store: StoreOptions) -> None:
    Writer(store).write(some_days(names=100))
    shards = Shards(store).open()
    dues = [d for found in LogRegistry(shards, "days").walk() for d in due_segments(found.name, found.log, 0, now_ms())]
    shards.close()
    shares = divided(dues, 3)
    assert sorted(due.name for share in shares for due in share) == sorted(due.name for due in dues)
    assert all(64 <= len(share) <= 128 for share in shares)
    assert divided(dues[:1], 3) == [dues[:1]]


def test_a_name_pattern_packs_the_streams_that_match_as_a_whole(any_store: StoreOptions) -> None:
    Writer(any_store).write(some_days(names=12))
    run_job(settings(any_store), pack.Packing("days", NOW, Scope(matcher("queue/set-1"))))
    with Keeper(any_store) as keeper:
        packed = {found.name for found in keeper.registry.walk() if all(s.state for s in found.log.segments)}
        assert packed == {"queue/set-1"}
    rest = pack.Packing("days", NOW, Scope(matcher(".*")))
    assert run_job(settings(any_store), rest)["segments"] == 33


def test_a_view_or_a_pattern_that_is_none_is_said_so(store: StoreOptions) -> None:
    with pytest.raises(BadRequest, match="there is no view 'nights'"):
        find_view(settings(store), VIEWS, "nights")
    with pytest.raises(BadRequest, match=r"'a\(' is no regular expression in RE2 syntax: missing \)"):
        matcher("a(")


def test_a_dry_run_counts_and_changes_nothing(any_store: StoreOptions) -> None:
    Writer(any_store).write(some_days())
    before = contents(any_store)
    shards = Shards(any_store).open()
    due = pack.Packing("days", NOW).look(shards)
    assert due == {"segments": 60, "days": 3, "events": 240, "bytes_before": due["bytes_before"]}
    keep = timedelta(milliseconds=now_ms() - NOON - 2 * DAY)
    gone = sweep.Sweeping("days", sweep.SweepRules(lambda _: keep)).look(shards)
    assert (gone["segments"], gone["events"], gone["ended"]) == (40, 160, 0)
    shards.close()
    assert contents(any_store) == before


class Time:
    """A clock that goes on only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_packing_keeps_the_pace_that_is_configured(store: StoreOptions) -> None:
    Writer(store).write(some_days())
    clock = Time()
    rules = pack.PackRules(0, per_hour=120)
    throttle = Throttle(120, clock=lambda: clock.now, sleep=clock.sleep)
    run_job(settings(store), pack.Packing("days", rules, throttle=throttle))
    assert clock.now == pytest.approx(58 * 30), "two at a time, and the last two are not waited for"
    throttle.wait()
    assert clock.now == pytest.approx(60 * 30)


def test_a_throttle_keeps_both_paces_and_saves_nothing_up() -> None:
    clock = Time()
    throttle = Throttle(3600, 1000, clock=lambda: clock.now, sleep=clock.sleep)
    throttle.take(2, 10)
    throttle.take(0, 5_000)
    throttle.wait()
    assert clock.now == pytest.approx(5.01)
    clock.now = 100.0
    throttle.take(3, 0)
    throttle.wait()
    assert clock.now == pytest.approx(100.0), "it had taken long enough"
    throttle.take(3, 0)
    throttle.wait()
    assert clock.now == pytest.approx(103.0)
    assert throttle.share(4) == (900.0, 250.0)


def test_a_run_that_is_stopped_leaves_the_rest_to_the_next(store: StoreOptions) -> None:
    Writer(store).write(some_days(names=100))
    looks = iter((False, True))
    first = pack.Packing("days", NOW, Scope(stopped=lambda: next(looks)))
    facts = run_job(settings(store), first)
    assert facts["segments"] == GROUP_SEGMENTS
    assert facts["left"] == {"later": 300 - GROUP_SEGMENTS}
    assert run_job(settings(store), pack.Packing("days", NOW))["segments"] == 300 - GROUP_SEGMENTS


def test_a_damaged_run_is_left_and_all_others_are_packed(store: StoreOptions) -> None:
    Writer(store).write(some_days())
    shards = Shards(store).open()
    shard = LogRegistry(shards, "days").logs(["queue/set-7"])[0].shard
    key = shards.keys.segment(shard, "days", 1, "queue/set-7")
    node = shards.client(shard)
    ((entry, fields),) = node.xrange(key)  # type: ignore[misc]
    node.delete(key)
    node.xadd(key, {b"r": fields[b"r"][:-5], b"t": fields[b"t"]}, id=entry)
    shards.close()
    facts = run_job(settings(store), pack.Packing("days", NOW))
    assert (facts["segments"], facts["left"]) == (59, {"unreadable": 1})
    node.delete(key)
    assert run_job(settings(store), pack.Packing("days", NOW))["left"] == {"incomplete": 1}


def test_a_sweep_drops_by_name_and_never_what_is_kept_for_ever(any_store: StoreOptions) -> None:
    writer = Writer(any_store)
    for at, queue in enumerate((b"audit", b"debug", b"jobs")):
        days = 5 if queue == b"jobs" else 2
        key = b'["%s","a"]' % queue
        writer.write([Record(10 * at + d, key, time=now_ms() - (5 - d) * DAY) for d in range(days)])
    by_name = {"audit/.*": "forever", "debug/.*": "1h"}
    chosen = settings(any_store, days__keep="2d", days__keep_by_name=by_name)
    rules = sweep.SweepRules.of(chosen, find_view(chosen, VIEWS, "days"))
    facts = run_job(chosen, sweep.Sweeping("days", rules))
    assert asyncio.run(read_view(any_store)) == {
        "audit/a": ["jobs:0:0", "jobs:0:1"],
        "jobs/a": ["jobs:0:23", "jobs:0:24"],
    }
    assert (facts["segments"], facts["events"], facts["ended"]) == (5, 5, 1)
    report = reports(any_store)["sweep:days"]
    assert {name: report[name] for name in facts} == facts
    assert (report["job"], report["view"], report["error"]) == ("sweep", "days", "")
    assert report["started_ms"] <= report["ended_ms"]
    assert run_job(chosen, sweep.Sweeping("days", rules))["segments"] == 0


def test_a_stream_with_more_old_buckets_than_one_call_drops_is_swept_at_once(store: StoreOptions) -> None:
    start = NOON - NOON % DAY
    Writer(store, span_ms=MINUTE).write([Record(i, b"a", time=start + i * MINUTE) for i in range(250)])
    rules = sweep.SweepRules(lambda _: timedelta(hours=1))
    facts = run_job(settings(store), sweep.Sweeping("days", rules))
    assert (facts["segments"], facts["ended"]) == (250, 1)


@pytest.mark.parametrize("ahead", [10 * MINUTE, -10 * MINUTE])
def test_nothing_is_swept_when_the_clocks_disagree(store: StoreOptions, ahead: int) -> None:
    Writer(store).write(some_days())
    rules = sweep.SweepRules(lambda _: timedelta(hours=1))
    wrong = sweep.Sweeping("days", rules, Scope(clock=lambda: now_ms() + ahead))
    with pytest.raises(StoreError, match=r"600 s (ahead of|behind) ours"):
        run_job(settings(store), wrong)
    report = reports(store)["sweep:days"]
    assert "clock" in report["error"]
    assert report["segments"] == 0
    assert run_job(settings(store), sweep.Sweeping("days", rules))["ended"] == 20


def test_a_run_that_failed_reports_what_it_had_done(store: StoreOptions) -> None:
    Writer(store).write(some_days(names=100))
    with Keeper(store), pytest.raises(LeaseHeld, match="one is doing upkeep"):
        run_job(settings(store), pack.Packing("days", NOW))
    assert reports(store) == {}, "it did not run"

    def broken(done: int, total: int) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        run_job(settings(store), pack.Packing("days", NOW, Scope(progress=broken)))
    report = reports(store)["pack:days"]
    assert (report["segments"], report["error"]) == (GROUP_SEGMENTS, "no space left")


def test_the_loop_goes_on_after_every_kind_of_error() -> None:
    stopping = threading.Event()
    errors = iter([StoreError("no"), StoreUnavailable("not now"), ZeroDivisionError(), StaleUpkeep(1, 2)])
    runs: list[str] = []

    def bad(view: str, stopped: object) -> dict[str, object]:
        runs.append(view)
        error = next(errors, None)
        if error is None:
            stopping.set()
            return {}
        raise error

    every = timedelta(milliseconds=10)
    JobLoop({"bad": ScheduledJob(every, bad), "never": ScheduledJob(None, bad)}, ("days",), stopping).run()
    assert runs == ["days"] * 5


def test_a_job_that_takes_long_gives_way_to_one_that_is_due() -> None:
    stopping, clock, ran = threading.Event(), Time(), []

    def long(view: str, stopped: Any) -> dict[str, object]:
        ran.append("long")
        while not stopped():
            clock.now += 10
        return {"left": {"later": 1}}

    def short(view: str, stopped: object) -> dict[str, object]:
        ran.append("short")
        if len(ran) > 6:
            stopping.set()
        return {}

    jobs = {
        "short": ScheduledJob(timedelta(seconds=30), short),
        "long": ScheduledJob(timedelta(seconds=1), long, yields=True),
    }
    loop = JobLoop(jobs, ("days",), stopping, clock=lambda: clock.now)
    clock.now += 2
    loop.run()
    assert ran == ["long", "short"] * 4
    assert clock.now < 5 * 70


def test_a_job_that_must_finish_to_have_done_anything_is_not_stopped_for_another() -> None:
    stopping, clock, ran = threading.Event(), Time(), []

    def walk(view: str, stopped: Any) -> dict[str, object]:
        for _ in range(20):
            clock.now += 10
            assert not stopped()
        ran.append("walk")
        return {}

    def pack(view: str, stopped: Any) -> dict[str, object]:
        clock.now += 200  # counts what is due, and does not look up
        done = 0
        while not stopped():
            clock.now, done = clock.now + 10, done + 1
        ran.append(f"packed {done > 5}")
        if len(ran) > 5:
            stopping.set()
        return {"left": {"later": 1}}

    every = timedelta(seconds=30)
    jobs = {"walk": ScheduledJob(every, walk), "pack": ScheduledJob(every, pack, yields=True)}
    loop = JobLoop(jobs, ("days",), stopping, clock=lambda: clock.now)
    clock.now += 20
    loop.run()
    assert ran == ["walk", "packed True"] * 3

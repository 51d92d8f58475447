"""Upkeep as it is run: commands and the process, on real stores, killed at every step and in each other's way."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailrace.embedded.process import free_port
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.log.segment import PACKED
from tailrace.testing.installation import QUICK_JAVA, wait_for
from tailrace.upkeep.job import FAILPOINT
from tailrace.upkeep.pack import GROUP_SEGMENTS, STEPS
from tailrace.valkey.shards import StoreOptions
from tests import forked
from tests.upkeep.past import Keeper, now_ms
from tests.upkeep.test_jobs import reports, some_days
from tests.writing import DAY, Record, Writer, read_view

EVERY = 50
"""Records of one batch, so that most segments have several runs."""


def environment(options: StoreOptions, **changes: str) -> dict[str, str]:
    """The settings of a process that works on a store; ``upkeep__lease="…"`` changes or adds one."""
    given = {
        "valkey__url": options.url,
        "valkey__prefix": options.prefix,
        "upkeep__lease": "1s",
        "spark__conf": json.dumps({"spark.driver.extraJavaOptions": QUICK_JAVA}),
        "spark__driver_memory": "512m",
    } | changes
    settings = {f"TAILRACE_{name.upper()}": value for name, value in given.items() if name != FAILPOINT}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    step = {FAILPOINT: given[FAILPOINT]} if FAILPOINT in given else {}
    return kept | {"TAILRACE_CONFIG": os.devnull} | settings | step


def start(options: StoreOptions, *arguments: str, **changes: str) -> subprocess.Popen[str]:
    command = (sys.executable, "-m", "tailrace", *arguments)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment(options, **changes), stdout=pipe, stderr=pipe, text=True)


def run(options: StoreOptions, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return forked.run("tailrace", *arguments, env=environment(options, **changes))


def packed(options: StoreOptions, *arguments: str, **changes: str) -> dict[str, Any]:
    """Run ``tailrace pack`` to its end; return its report."""
    done = run(options, "pack", *arguments, **changes)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def written(options: StoreOptions, records: list[Record]) -> dict[str, list[str]]:
    """Write records in small batches; return what the view holds then."""
    writer = Writer(options)
    for at in range(0, len(records), EVERY):
        writer.write(records[at : at + EVERY])
    view = asyncio.run(read_view(options))
    assert {id_ for ids in view.values() for id_ in ids} >= {record.id for record in records}
    return view


def assert_whole(options: StoreOptions, view: dict[str, list[str]]) -> None:
    """Every event is there once, and no key is without an owner."""
    assert asyncio.run(read_view(options)) == view
    with Keeper(options) as keeper:
        assert keeper.unowned() == []


@pytest.mark.slow
@pytest.mark.parametrize("any_store", ["single", "cluster"], indirect=True)
def test_killed_at_every_step_and_run_again_it_has_packed_everything_once(any_store: StoreOptions) -> None:
    view = written(any_store, some_days(names=100))
    for step in STEPS:
        ended = run(any_store, "pack", **{FAILPOINT: step})
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert asyncio.run(read_view(any_store)) == view
    assert packed(any_store)["segments"] == 300 - GROUP_SEGMENTS, "what was swapped before the last kill stays"
    assert_whole(any_store, view)


def test_killed_between_the_pieces_of_a_large_segment_it_loses_nothing(store: StoreOptions) -> None:
    chance = random.Random(2)
    records = [Record(i, b"a", b'{"x":"%s"}' % chance.randbytes(20_000).hex().encode()) for i in range(40)]
    view = written(store, records)
    for step in ("staged", "swapped"):
        assert run(store, "pack", **{FAILPOINT: step}).returncode == -signal.SIGKILL
        assert asyncio.run(read_view(store)) == view
    assert packed(store)["segments"] == 0
    assert_whole(store, view)


def test_two_at_once_pack_everything_once(store: StoreOptions) -> None:
    view = written(store, some_days(names=100))
    both = [start(store, "pack", "--wait", "30") for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sorted(json.loads(out)["segments"] for out, _ in outputs) == [0, 300]
    assert_whole(store, view)


def test_one_that_does_not_wait_says_who_is_at_work(store: StoreOptions) -> None:
    written(store, some_days(names=2))
    with Keeper(store, owner="somebody"):
        done = run(store, "pack", "--wait", "0")
    assert done.returncode == 1
    assert "somebody is doing upkeep" in done.stderr
    assert "upkeep.held" in done.stderr


def test_the_commands_say_what_they_did_and_would_do(store: StoreOptions) -> None:
    written(store, some_days(names=10, each=40))
    due = packed(store, "--dry-run", "--name", "queue/set-[12]")
    assert (due["job"], due["view"], due["dry_run"]) == ("pack", "days", True)
    assert (due["segments"], due["days"], due["events"]) == (6, 3, 240)
    done = packed(store, "days", "-J")
    assert (done["segments"], done["days"], done["events"], done["left"]) == (30, 3, 1_200, {})
    assert done["bytes_after"] < done["bytes_before"]
    assert done.keys() == {
        *("job", "view", "segments", "days", "events", "bytes_before", "bytes_after", "raw_bytes", "left", "seconds")
    }
    swept = run(store, "sweep", "--name", "queue/set-[12]")
    assert json.loads(swept.stdout) | {"seconds": 0, "bytes": 0} == {
        **{"job": "sweep", "view": "days", "segments": 6, "events": 240, "bytes": 0, "ended": 2, "seconds": 0}
    }


@contextmanager
def upkeep(options: StoreOptions, log: Path, **changes: str) -> Iterator[subprocess.Popen[bytes]]:
    """``tailrace upkeep``, which must end within three seconds when it is told to."""
    command = (sys.executable, "-m", "tailrace", "upkeep")
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment(options, **changes), stdout=output, stderr=output)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()
        print(log.read_text())


def ran(options: StoreOptions, job: str, **wanted: int) -> bool:
    report = reports(options).get(f"{job}:days", {})
    return all(report.get(name) == value for name, value in wanted.items()) and bool(report)


def test_the_process_packs_and_sweeps_by_itself_and_stops_when_told(store: StoreOptions, tmp_path: Path) -> None:
    now = now_ms()
    keys = [b'["new","a"]', b'["old","a"]']
    records = [Record(i, key, time=now - (40 - 30 * (1 - i)) * DAY) for i, key in enumerate(keys)]
    written(store, records)
    every = {"upkeep__pack_every": "1s", "upkeep__sweep_every": "1s"}
    with upkeep(store, tmp_path / "log", **every) as process:
        wait_for("the old stream to go", lambda: asyncio.run(read_view(store)) == {"new/a": ["jobs:0:0"]}, 30)
        wait_for("the other one to be packed", lambda: _states(store, "new/a") == [PACKED], 30)
        wait_for("reports of both", lambda: ran(store, "pack") and ran(store, "sweep"), 30)
        assert "java" not in {child.name() for child in psutil.Process(process.pid).children(recursive=True)}


def _states(options: StoreOptions, name: str) -> list[int]:
    keeper = Keeper(options)  # without the lease, which is the process's
    found = [segment.state for segment in keeper.log(name).segments]
    keeper.shards.close()
    return found


@pytest.mark.jvm
def test_the_process_is_stopped_soon_while_spark_works_for_it(store: StoreOptions, tmp_path: Path) -> None:
    view = written(store, some_days(names=30))
    slow = {"upkeep__pack_every": "1s", "upkeep__spark_from": "0B", "upkeep__buckets_per_hour": "600"}
    with upkeep(store, tmp_path / "log", **slow) as process:
        wait_for("something packed", lambda: _count_packed(store) > 0, 150)
        family = psutil.Process(process.pid).children(recursive=True)
    wait_for("the end of Spark", lambda: not any(child.is_running() for child in family), 10)
    assert 0 < _count_packed(store) < 90
    assert asyncio.run(read_view(store)) == view


def _count_packed(options: StoreOptions) -> int:
    keeper = Keeper(options)
    found = sum(s.state == PACKED for each in keeper.registry.walk() for s in each.log.segments)
    keeper.shards.close()
    return found


def test_the_process_waits_for_a_store_that_is_away_and_goes_on_after_its_restart(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path / "valkey", free_port())
    options = StoreOptions(server.url, prefix="away")
    every = {"upkeep__pack_every": "1s", "upkeep__sweep_every": "never"}
    with upkeep(options, tmp_path / "log", **every):
        try:
            wait_for("a complaint", lambda: "trying again" in (tmp_path / "log").read_text(), 30)
            server.start(30)
            written(options, some_days(names=2))
            wait_for("everything packed", lambda: _count_packed(options) == 6, 30)
            server.stop()
            server.start(30)
            written(options, [Record(100, b"b")])
            wait_for("the new one packed", lambda: _count_packed(options) == 7, 30)
        finally:
            server.stop()


def test_a_store_that_is_away_is_said_so() -> None:
    done = run(StoreOptions(f"valkey://127.0.0.1:{free_port()}/0"), "pack")
    assert done.returncode == 1
    assert "valkey does not answer" in done.stderr

"""The sample source: the same stories from the same numbers, lives that make sense, and sending that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from tailrace.config.settings import Demo
from tailrace.demo import bursts, example_name, job_events
from tests.scripted import running

AFTER: dict[str, set[str]] = {
    "": {"job.submitted"},
    "job.submitted": {"job.queued"},
    "job.queued": {"job.leased"},
    "job.leased": {"job.running"},
    "job.running": {"job.succeeded", "job.failed", "job.preempted"},
    "job.preempted": {"job.queued"},
    "job.failed": {"job.queued"},
    "job.succeeded": set(),
}


def generate(seed: int, count: int, *, queues: int = 3, jobsets: int = 12) -> list[dict[str, Any]]:
    clock = datetime(2026, 11, 15, 8, tzinfo=UTC)
    return list(islice(job_events(Random(seed), lambda: clock, queues=queues, jobsets=jobsets), count))


def test_the_same_seed_tells_the_same_stories() -> None:
    assert generate(7, 500) == generate(7, 500)
    assert generate(7, 500) != generate(8, 500)


def test_every_job_lives_a_life_that_makes_sense() -> None:
    states: dict[str, str] = defaultdict(str)
    for event in generate(1, 20_000):
        value = event["value"]
        if "job" in value:
            assert value["type"] in AFTER[states[value["job"]]], value
            states[value["job"]] = value["type"]


def test_a_jobset_starts_and_finishes_when_all_its_jobs_have_ended() -> None:
    open_jobs: dict[str, int] = {}
    finished = 0
    for event in generate(2, 20_000):
        name, value = "/".join(event["key"]), event["value"]
        if value["type"] == "jobset.started":
            assert not open_jobs.get(name)
            open_jobs[name] = value["jobs"]
        elif value["type"] == "job.succeeded" or value.get("final"):
            open_jobs[name] -= 1
        elif value["type"] == "jobset.finished":
            assert open_jobs[name] == 0
            finished += 1
    assert finished > 100


def test_events_are_of_a_likely_size_and_all_streams_are_there() -> None:
    events = generate(3, 5_000)
    sizes = [len(msgspec.json.encode(event["value"])) for event in events]
    assert 200 < sum(sizes) / len(sizes) < 400
    names = {"/".join(event["key"]) for event in events}
    assert len(names) == 12
    assert example_name(Demo(queues=3, jobsets=12)) in names
    assert len({"/".join(event["key"]) for event in generate(3, 5_000, queues=7, jobsets=40)}) == 40


def test_bursts_keep_the_rate() -> None:
    for rate in (0.5, 20.0, 5_000.0):
        plan = list(islice(bursts(Random(4), rate), 20_000))
        sent, spent = sum(count for _, count in plan), sum(wait for wait, _ in plan)
        assert abs(sent / spent - rate) < rate * 0.05


def test_it_sends_all_samples_over_outages_until_it_is_told_to_stop(tmp_path: Path) -> None:
    with running() as service:

        def written(topic: str) -> int:
            return len(service.written.get(topic, []))

        service.unavailable = 2
        env = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")} | {
            "TAILRACE_SERVE__PORT": service.url.rpartition(":")[2],
            "TAILRACE_DEMO__RATE": "400",
            "TAILRACE_DEMO__TOPIC": "sample",
            "TAILRACE_DEMO__ACCOUNTS": "100",
            "TAILRACE_DEMO__POSTS_TOPIC": "social",
            "TAILRACE_DEMO__ORDERS": "100",
        }
        least = {"sample": 200, "social": 50, "orders-eu": 20, "orders-us": 20, "payments": 20, "logs": 100}
        with subprocess.Popen([sys.executable, "-m", "tailrace.demo"], env=env, cwd=tmp_path) as process:
            until = time.monotonic() + 60
            while any(written(topic) < count for topic, count in least.items()) and time.monotonic() < until:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert all(written(topic) >= count for topic, count in least.items())
        assert service.unavailable == 0

"""An installation whose pipeline writes all views, under a load for each of them, while its drivers end one after the
other.

What is aimed at a moment is made certain of: the workers, who write, are stopped when the moment seems to be there, and
go on if it has passed by then.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from tailrace.testing.installation import PipelineProcess, wait_for
from tailrace.valkey.marks import read_marks
from tailrace.views.tags.settings import CassandraSettings
from tests.faults.loads import Laps, Posts, Searches, Tagged
from tests.faults.rig import Load, LoadedInstallation, Standing


class End(NamedTuple):
    """End of a driver."""

    met: bool
    """True if it was at the intended moment."""
    exit_code: int
    log: str


class Life:
    """The loads of one installation, and its drivers. Use as ``with``: the last driver stays until its end."""

    def __init__(self, installation: LoadedInstallation, rows: CassandraSettings | None) -> None:
        self.installation = installation
        topic = installation.topic("killed")
        self.searches = Searches(installation, topic)
        self.posts, self.laps = Posts(installation), Laps(installation)
        self.tagged = Tagged(installation, topic, rows)
        self.load = Load(installation, topic, rate=150)
        rules = json.dumps({self.posts.name: self.posts.rule})
        settings = {"folds__rules": rules, "folds__begin": "start", **self.laps.settings, **self.tagged.settings}
        self.standing = Standing(installation, **settings)
        self.ends: dict[str, list[End]] = {}

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *_: object) -> None:
        self.searches.__exit__()
        self.standing.__exit__()
        self.tagged.close()

    @contextmanager
    def under_load(self) -> Iterator[None]:
        """Have the loads go on meanwhile, and a driver at the end."""
        with self.load, self.laps, self.posts.going_on():
            self.searches.another()
            yield
            self.standing.pipeline()
            self.load.wait_more(100)
            self.laps.finish()

    def go_through(self, ways: Sequence[str], times: int) -> None:
        """Let drivers end in these ways one after the other, so often in all; in each way once at least."""
        with self.under_load():
            for i in range(max(times, len(ways))):
                self.end(ways[i % len(ways)])

    def end(self, way: str) -> None:
        """Let a driver write, and end it in one of the ways."""
        before = self._stored()
        driver = self.standing.pipeline(wait=False)
        wait_for("its writes", lambda: self._stored() > before)
        met = WAYS[way](self, driver)
        self.ends.setdefault(way, []).append(End(met, driver.wait_end(), driver.log))

    def uneven(self) -> bool:
        """Return True if a shard is ahead of another now: a start would begin at the lowest mark, and replay."""
        marks = read_marks(self.installation.shards(), "days")
        return any(len({shard.get(source, -1) for shard in marks}) > 1 for source in set().union(*marks))

    def _stored(self) -> int:
        return self.installation.counts().get("stored", 0)


def _at_any_moment(life: Life, driver: PipelineProcess) -> bool:
    time.sleep(random.uniform(0, 1.5))
    driver.kill()
    return True


def _between_two_shards(life: Life, driver: PipelineProcess) -> bool:
    return _kill_when(driver, life.uneven)


def _between_rows_and_mark(life: Life, driver: PipelineProcess) -> bool:
    return _kill_when(driver, life.tagged.rows_are_ahead)


def _between_hash_and_stream(life: Life, driver: PipelineProcess) -> bool:
    return _kill_when(driver, life.laps.hash_is_ahead, patience_s=10)


def _in_a_scan(life: Life, driver: PipelineProcess) -> bool:
    life.searches.another()

    def half_scanned() -> bool:
        if life.searches.scanned():  # that was too quick
            life.searches.another()
        return life.searches.half_scanned()

    return _kill_when(driver, half_scanned)


def _without_its_jvm(life: Life, driver: PipelineProcess) -> bool:
    driver.jvm().kill()
    return True


def _overtaken(life: Life, driver: PipelineProcess) -> bool:
    life.standing.another()
    return True


def _back_from_the_dead(life: Life, driver: PipelineProcess) -> bool:
    stopped = [driver.pid, *(process.pid for process in driver.family())]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    life.standing.another()
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    return True


WAYS: dict[str, Callable[[Life, PipelineProcess], bool]] = {
    "killed at any moment": _at_any_moment,
    "killed between two shards": _between_two_shards,
    "killed between rows and mark": _between_rows_and_mark,
    "killed between hash and stream": _between_hash_and_stream,
    "killed in a scan": _in_a_scan,
    "without its JVM": _without_its_jvm,
    "overtaken by another": _overtaken,
    "stopped, and back when another is there": _back_from_the_dead,
}


def _kill_when(driver: PipelineProcess, condition: Callable[[], bool], patience_s: float = 30.0) -> bool:
    """Kill a driver and all that it started while a condition holds; return whether it did in the end."""
    deadline = time.monotonic() + patience_s
    met = False
    while not met and time.monotonic() < deadline:
        workers = [process.pid for process in driver.workers()]
        renewed = time.monotonic() + 2.0
        while not met and time.monotonic() < renewed:
            if condition():
                _tell(workers, signal.SIGSTOP)
                time.sleep(0.02)  # what they had sent by then is written
                met = condition()
                if not met:
                    _tell(workers, signal.SIGCONT)
    family = driver.family()
    _tell([driver.pid, driver.jvm().pid, *(process.pid for process in family)], signal.SIGKILL)
    driver.wait_gone(family)
    return met


def _tell(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

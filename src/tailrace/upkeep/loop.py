"""The process of upkeep: runs each job of each view when it is due, until it is told to stop.

Every run connects anew, takes the lease, works, leaves its report in the store and gives the lease back; between runs
there is no connection and no JVM. Packs, sweeps and audits take turns. The jobs that a view brings itself get a thread
of their own, since trimming sessions must not wait for a pack that takes an hour. Invariant: the process outlives every
failure of a run; work that was not done is due again.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing

from tailrace.config.settings import Settings
from tailrace.config.values import format_duration
from tailrace.errors import LeaseHeld, StoreChanged, TailraceError, Unavailable
from tailrace.upkeep.audit import Auditing
from tailrace.upkeep.job import (
    FIRST_S,
    LATER,
    Facts,
    Jobs,
    ScheduledJob,
    Scope,
    Stopped,
    Throttle,
    last_end,
    now_ms,
    run_job,
)
from tailrace.upkeep.pack import Packing, PackRules
from tailrace.upkeep.spark import Spread, step_back
from tailrace.upkeep.sweep import Sweeping, SweepRules
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.view import View

logger = logging.getLogger(__name__)

BACKOFF_S = (1.0, 60.0)
"""Pauses after a run that could not begin: the store does not answer, or another process is at work."""
TURN_S = 60.0
"""Seconds that a job may work when another one is due."""


def jobs_of(settings: Settings, views: Iterable[View], spread: Spread) -> Jobs:
    """Return the jobs that views share. Of those that are due, the first is run first."""
    upkeep = settings.upkeep
    throttle = Throttle(upkeep.buckets_per_hour, upkeep.bytes_per_second)
    by_name = {view.name: view for view in views}
    logs = tuple(name for name, view in by_name.items() if view.keeps_logs(settings))
    audited = tuple(name for name, view in by_name.items() if view.is_audited(settings))

    def sweep_once(view: str, stopped: Stopped) -> Facts:
        return run_job(settings, Sweeping(view, SweepRules.of(settings, by_name[view]), Scope(stopped=stopped)))

    def pack_once(view: str, stopped: Stopped) -> Facts:
        rules = PackRules.of(settings, by_name[view])
        return run_job(settings, Packing(view, rules, Scope(stopped=stopped), spread=spread, throttle=throttle))

    def audit_once(view: str, stopped: Stopped) -> Facts:
        spread.stop()  # an audit has a session of its own
        return run_job(settings, Auditing(settings, by_name[view], stopped=stopped))

    return {
        "sweep": ScheduledJob(upkeep.sweep_every, sweep_once, views=logs),
        "pack": ScheduledJob(upkeep.pack_every, pack_once, yields=True, views=logs),
        "audit": ScheduledJob(upkeep.audit_every, audit_once, _next_audit(settings, audited), views=audited),
    }


def _next_audit(settings: Settings, views: Iterable[str]) -> float:
    """Return in how many seconds an audit is due: a restart of upkeep is no reason for one."""
    every = settings.upkeep.audit_every
    if every is None:
        return 0.0
    with closing(Shards(StoreOptions.of(settings.valkey))) as shards:
        try:
            ended = [last_end(shards, "audit", view) for view in views]
        except TailraceError:
            ended = [None]
    since = min(((now_ms() - each) / 1000 if each else 0.0 for each in ended), default=0.0)
    return max(FIRST_S, every.total_seconds() - since)


class JobLoop:
    """Runs jobs when they are due, and calls ``rest`` when none is."""

    def __init__(
        self,
        jobs: Jobs,
        views: tuple[str, ...],
        stopping: threading.Event,
        rest: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs, self._stopping, self._rest, self._clock = jobs, stopping, rest, clock
        now = clock()
        self._due = {
            (name, view): now + min(job.first_s, job.every.total_seconds())
            for name, job in jobs.items()
            if job.every is not None
            for view in views
            if job.views is None or view in job.views
        }
        self._pause = dict.fromkeys(self._due, BACKOFF_S[0])

    def run(self) -> None:
        while not self._stopping.is_set():
            if not self._due:
                self._stopping.wait()
                return
            which = min(self._due, key=lambda each: self._due[each])
            left = self._due[which] - self._clock()
            if left > 0:
                self._rest()
                self._stopping.wait(left)
            else:
                pause = self._run(*which)
                self._due[which] = self._clock() + pause

    def _run(self, name: str, view: str) -> float:
        """Run a job; return how many seconds it is until it is due again."""
        job = self._jobs[name]
        every = job.every
        assert every is not None
        began = self._clock()
        turn = None

        def stopped() -> bool:
            nonlocal turn
            if self._stopping.is_set() or not job.yields:
                return self._stopping.is_set()
            now = self._clock()
            # A turn begins when the job first asks: the count before its work takes as long as it takes.
            turn = now if turn is None else turn
            others = (due for each, due in self._due.items() if each != (name, view))
            return now > turn + TURN_S and any(due <= now for due in others)

        try:
            facts = job.run(view, stopped)
            if any(facts.values()):
                summary = ", ".join(f"{name} {value}" for name, value in facts.items())
                logger.info("%s of %s in %.1f s: %s", name, view, self._clock() - began, summary)
            if facts.get("left", {}).get(LATER):
                return 0.0
        except (LeaseHeld, StoreChanged, Unavailable) as error:
            pause = self._pause[name, view]
            self._pause[name, view] = min(2 * pause, BACKOFF_S[1])
            logger.warning("%s of %s: %s; trying again in %.0f s", name, view, error, pause)
            return min(pause, every.total_seconds())
        except TailraceError as error:
            logger.error("%s of %s ended: %s; the next one is due as always", name, view, error)
        except Exception:
            logger.exception("%s of %s ended; the next one is due as always", name, view)
        self._pause[name, view] = BACKOFF_S[0]
        return max(0.0, began + every.total_seconds() - self._clock())


def main(settings: Settings, views: Iterable[View]) -> int:
    """Run upkeep until it is told to stop; return the exit code of ``tailrace upkeep``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    stopping = threading.Event()
    # In a thread of its own: the signal may come while the main thread holds the event's lock.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=stopping.set).start())
    step_back()
    views = tuple(views)
    with Spread(settings) as spread:
        jobs = jobs_of(settings, views, spread)
        names = tuple(view.name for view in views if view.keeps_logs(settings) or view.is_audited(settings))
        intervals = [
            f"{name} {f'every {format_duration(job.every)}' if job.every else 'never'}" for name, job in jobs.items()
        ]
        logger.info("upkeep of %s: %s", ", ".join(names), ", ".join(intervals))
        others = [(view.name, view.jobs(settings)) for view in views]
        loops = [(name, JobLoop(own, (name,), stopping)) for name, own in others if own]
        threads = [threading.Thread(target=loop.run, name=name) for name, loop in loops]
        for thread in threads:
            thread.start()
        try:
            JobLoop(jobs, names, stopping, spread.stop).run()
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
    return 0

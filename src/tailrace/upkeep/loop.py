"""The process of upkeep: runs each job of each view when it is due, one at a time, until it is told to stop.

Every run connects anew, takes the lease, works, leaves its report in the store and gives the lease back; between runs
there is no connection and no JVM. Sessions have a thread and a lease of their own, since trimming must not wait for a
pack that takes an hour. Invariant: whatever a run ends with, the process goes on; what was not done is due
again.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeAlias

import msgspec

from tailrace.config.settings import Settings
from tailrace.config.units import format_duration
from tailrace.errors import LeaseHeld, StoreChanged, TailraceError, Unavailable
from tailrace.upkeep import pack, sweep
from tailrace.upkeep.backends import auditing
from tailrace.upkeep.job import LATER, SESSIONS, Facts, Scope, Stopped, Throttle, Work, last_end, now_ms, run_job
from tailrace.upkeep.spark import Spread, step_back
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.views.sessions import upkeep as abandon
from tailrace.views.sessions import upkeep as forget
from tailrace.views.sessions import upkeep as trim

logger = logging.getLogger(__name__)

FIRST_S = 10.0
"""The first run of each job is so long after the start, so that live work comes up first."""
BACKOFF_S = (1.0, 60.0)
"""Pauses after a run that could not begin: the store does not answer, or another process is at work."""
TURN_S = 60.0
"""How long a job may work when another one is due."""


class ScheduledJob(msgspec.Struct, frozen=True):
    """A job of the loop."""

    every: timedelta | None
    """How often it is run; None = never."""
    run: Callable[[str, Stopped], Facts]
    """Does it for a view, and looks now and then whether to end soon."""
    first_s: float = FIRST_S
    """How long after the start it is run first."""
    yields: bool = False
    """Whether it can be stopped for another one that is due, and gone on with: it has done something by then."""
    views: tuple[str, ...] | None = None
    """The views that it is for; None = all."""


Jobs: TypeAlias = Mapping[str, ScheduledJob]


def jobs_of(settings: Settings, spread: Spread) -> Jobs:
    """Return the jobs that there are. Of those that are due, the first is run first."""
    upkeep = settings.upkeep
    throttle = Throttle(upkeep.buckets_per_hour, upkeep.bytes_per_second)

    def sweep_once(view: str, stopped: Stopped) -> Facts:
        return run_job(settings, sweep.Sweeping(view, sweep.SweepRules.of(settings, view), Scope(stopped=stopped)))

    def pack_once(view: str, stopped: Stopped) -> Facts:
        rules = pack.PackRules.of(settings, view)
        work = pack.Packing(view, rules, Scope(stopped=stopped), spread=spread, throttle=throttle)
        return run_job(settings, work)

    def audit_once(view: str, stopped: Stopped) -> Facts:
        spread.stop()  # an audit reads Kafka, and its session has the connector
        return run_job(settings, auditing(settings, view, stopped=stopped))

    return {
        "sweep": ScheduledJob(upkeep.sweep_every, sweep_once, views=settings.log_views),
        "pack": ScheduledJob(upkeep.pack_every, pack_once, yields=True, views=settings.log_views),
        "audit": ScheduledJob(upkeep.audit_every, audit_once, _next_audit(settings), views=settings.audited_views),
    }


def session_jobs(settings: Settings) -> Jobs:
    """Return the jobs of telemetry sessions."""
    memory = trim.TrimMemory()
    rules = trim.TrimRules.of(settings), abandon.AbandonRules.of(settings), forget.ForgetRules.of(settings)

    def run(work: Work) -> Facts:
        # Streams of that name may be anybody's in a store where nobody has anything to do with sessions.
        is_used = settings.sessions.is_used or _has_sessions(settings)
        return run_job(settings, work, what=SESSIONS) if is_used else {}

    every, forget_every = settings.sessions.trim_every, settings.sessions.forget_every
    return {
        "trim": ScheduledJob(every, lambda _, stopped: run(trim.Trimming(rules[0], memory, Scope(stopped=stopped)))),
        "abandon": ScheduledJob(every, lambda _, stopped: run(abandon.Abandoning(rules[1], Scope(stopped=stopped)))),
        "forget": ScheduledJob(
            forget_every, lambda _, stopped: run(forget.Forgetting(rules[2], Scope(stopped=stopped)))
        ),
    }


def _has_sessions(settings: Settings) -> bool:
    """Return whether anybody wrote sessions with Tailrace, without the pipeline."""
    shards = Shards(StoreOptions.of(settings.valkey))
    try:
        return bool(shards.run_keyed([(shards.keys.sessions(), ("EXISTS", shards.keys.sessions()))])[0])
    finally:
        shards.close()


def _next_audit(settings: Settings) -> float:
    """Return in how many seconds an audit is due: a restart of upkeep is no reason for one."""
    every = settings.upkeep.audit_every
    if every is None:
        return 0.0
    shards = Shards(StoreOptions.of(settings.valkey))
    try:
        ended = [last_end(shards, "audit", view) for view in settings.audited_views]
    except TailraceError:
        ended = [None]
    finally:
        shards.close()
    since = min(((now_ms() - each) / 1000 if each else 0.0 for each in ended), default=0.0)
    return max(FIRST_S, every.total_seconds() - since)


class Loop:
    """Runs jobs when they are due, and calls ``rest`` when none is for now."""

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
        """Run until told to stop."""
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
        """Run a job; return how long it is until it is due again."""
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
            # A turn begins when the job first looks up: what it has to count before takes as long as it takes.
            turn = now if turn is None else turn
            others = (due for each, due in self._due.items() if each != (name, view))
            return now > turn + TURN_S and any(due <= now for due in others)

        try:
            facts = job.run(view, stopped)
            if any(facts.values()):
                told = ", ".join(f"{name} {value}" for name, value in facts.items())
                logger.info("%s of %s in %.1f s: %s", name, view, self._clock() - began, told)
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


def main(settings: Settings) -> int:
    """Run upkeep until it is told to stop; the exit code of ``tailrace upkeep``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    stopping = threading.Event()
    # In a thread of its own: the signal may come while the main thread holds the event's lock.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=stopping.set).start())
    step_back()
    with Spread(settings) as spread:
        jobs = jobs_of(settings, spread)
        views = tuple(dict.fromkeys((*settings.log_views, *settings.audited_views)))
        told = [
            f"{name} {f'every {format_duration(job.every)}' if job.every else 'never'}" for name, job in jobs.items()
        ]
        logger.info("upkeep of %s: %s", ", ".join(views), ", ".join(told))
        sessions = Loop(session_jobs(settings), ("sessions",), stopping)
        thread = threading.Thread(target=sessions.run, name="sessions")
        thread.start()
        try:
            Loop(jobs, views, stopping, spread.stop).run()
        finally:
            stopping.set()
            thread.join()
    return 0

"""Jobs of upkeep: a run of one, its scope, its throttle, the lease that it works under, and its report.

One process at a time holds a lease, by the store's clock, and each holder gets a higher token than all before it. The
token is put into force on every shard before anything is done, so an earlier holder is refused there. Invariant: of all
processes that ever believed to hold the lease of logs, only the one with the highest token can change a log. A run
changes nothing outside its lease, and leaves a report however it ends. A report keeps what later runs must not hide:
when the job last succeeded, and its last run that changed something. A run over some names only leaves none.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, nullcontext
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import msgspec

from tailrace.config.settings import Settings
from tailrace.config.values import compile_pattern
from tailrace.errors import BadRequest, LeaseHeld, StaleDriver, StaleUpkeep, TailraceError
from tailrace.valkey.shards import Shards, StoreOptions, check_layout, fence, prepare
from tailrace.view import View

logger = logging.getLogger(__name__)

Facts: TypeAlias = Mapping[str, Any]
Stopped: TypeAlias = Callable[[], bool]

LATER = "later"
"""The reason for leaving a segment when the run was stopped before it."""
LOGS = "upkeep"
"""The lease of the process that changes logs."""
FIRST_S = 10.0
"""Seconds from the start of upkeep to the first run of a job: live work comes up first."""
FAILPOINT = "UPKEEP_FAILPOINT"
"""Environment variable (not a setting) with the step at which a test kills the process: a death there loses nothing."""

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Work(Protocol):
    """One run of a job."""

    name: str
    view: str
    whole: bool
    """True if it covers all names of the view."""

    def run(self, shards: Shards, lease: JobLease) -> None: ...

    def facts(self) -> dict[str, object]: ...


class Looking(Work, Protocol):
    """One run of a job that can also report what it would do."""

    def look(self, shards: Shards) -> dict[str, object]: ...


class ScheduledJob(msgspec.Struct, frozen=True):
    """A job that upkeep runs at intervals."""

    every: timedelta | None
    """Interval; None = never."""
    run: Callable[[str, Stopped], Facts]
    """Run it for a view; it asks now and then whether to stop soon."""
    first_s: float = FIRST_S
    yields: bool = False
    """True if it can be stopped for another job that is due, and continued: it has made progress by then."""
    views: tuple[str, ...] | None = None
    """Views that it is for; None = all."""


Jobs: TypeAlias = Mapping[str, ScheduledJob]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def failpoint(step: str) -> None:
    """End this process as ``kill -9`` does if the environment names this step."""
    if os.environ.get(FAILPOINT) == step:
        os.kill(os.getpid(), signal.SIGKILL)


def every(name: str) -> bool:
    return True


class Scope(msgspec.Struct, frozen=True):
    """The names that one run covers, and its observers."""

    wanted: Callable[[str], bool] = every
    stopped: Stopped = lambda: False
    """True if the run is to end at the next opportunity."""
    progress: Callable[[int, int], None] = lambda done, total: None
    """Called with the work done and the work in total."""
    clock: Callable[[], int] = now_ms

    @property
    def whole(self) -> bool:
        """True if the run covers all names of the view."""
        return self.wanted is every


EVERYTHING = Scope()


def matcher(pattern: str | None) -> Callable[[str], bool]:
    """Return a test of whole names against a pattern; without one, every name passes. Raises BadRequest."""
    if pattern is None:
        return every
    import re2

    try:
        expression = compile_pattern(pattern)
    except re2.error as error:
        said = error.args[0].decode(errors="replace")
        raise BadRequest(f"--name {pattern!r} is no regular expression in RE2 syntax: {said}") from None
    return lambda name: expression.fullmatch(name) is not None


class BucketSettings(Protocol):
    """The part of a view's settings that says how long its buckets live."""

    @property
    def pack_after(self) -> timedelta: ...

    def keep_of(self, name: str, /) -> timedelta | None: ...


def find_view(settings: Settings, views: Iterable[View], name: str) -> View:
    """Return the view of this name; raise BadRequest if the pipeline writes no such view."""
    configured = [view for view in views if view.is_configured(settings)]
    for view in configured:
        if view.name == name:
            return view
    logs = ", ".join(view.name for view in configured if view.keeps_logs(settings))
    raise BadRequest(f"there is no view {name!r} that keeps streams; there is: {logs}")


def buckets_of(settings: Settings, view: View) -> BucketSettings:
    """Return the settings of a view's buckets; raise BadRequest if it keeps no logs."""
    found = view.buckets(settings) if view.keeps_logs(settings) else None
    if found is None:
        raise BadRequest(f"the view {view.name!r} keeps no streams")
    return found


class Throttle:
    """Limits buckets per hour and bytes per second, 0 = no limit. Idle time earns no credit."""

    def __init__(
        self,
        per_hour: float = 0,
        bytes_per_second: float = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._each = 3600 / per_hour if per_hour else 0.0
        self._byte = 1 / bytes_per_second if bytes_per_second else 0.0
        self._clock, self._sleep = clock, sleep
        self._buckets_until = self._bytes_until = clock()

    def take(self, buckets: int, size: int) -> None:
        now = self._clock()
        for_buckets, for_bytes = buckets * self._each, size * self._byte
        self._buckets_until = max(self._buckets_until, now - for_buckets) + for_buckets
        self._bytes_until = max(self._bytes_until, now - for_bytes) + for_bytes

    def wait(self, check: Callable[[], None] = lambda: None) -> None:
        """Sleep until all counted work is paid for. ``check`` is called meanwhile; when it raises, the debt stays."""
        while (left := max(self._buckets_until, self._bytes_until) - self._clock()) > 0:
            check()
            self._sleep(min(left, 0.5))

    def share(self, parts: int) -> tuple[float, float]:
        """Return buckets per hour and bytes per second of one of several tasks that work side by side."""
        return (3600 / self._each / parts if self._each else 0.0, 1 / self._byte / parts if self._byte else 0.0)


class JobLease:
    """A lease: use as ``with``. It is taken at the beginning, renewed in the background, given back at the end.

    Other processes are shown the name of its owner. LeaseHeld is raised if another owner does not give it back in time.
    """

    def __init__(
        self, shards: Shards, owner: str, length_s: float = 30.0, wait_s: float = 0.0, kind: str = LOGS
    ) -> None:
        self._shards, self._owner, self._length_s, self._wait_s, self._kind = shards, owner, length_s, wait_s, kind
        self._ending = threading.Event()
        self._renewing: threading.Thread | None = None
        self._lost = False
        self.token = 0

    def __enter__(self) -> JobLease:
        deadline = time.monotonic() + self._wait_s
        while (answer := self._call(self._shards, self._length_s, 0))[0] != b"ok":
            if time.monotonic() >= deadline:
                raise LeaseHeld(answer[1].decode(), int(answer[2]) / 1000)
            time.sleep(0.2)
        self.token = int(answer[1])
        try:
            fence(self._shards, (self._kind,), self.token)
        except StaleDriver as error:
            raise StaleUpkeep(self.token, error.stored) from None
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        if self._renewing is not None:
            self._renewing.join()
        try:
            self._call(self._shards, 0, self.token)
        except TailraceError as problem:
            logger.warning("the lease could not be given back: %s; it ends by itself", problem)

    def check(self) -> None:
        """Raise StaleUpkeep when the lease is known to have gone to another process."""
        if self._lost:
            raise StaleUpkeep(self.token, self.token + 1)

    def _call(self, shards: Shards, length_s: float, token: int) -> Any:
        """Take the lease (without a token), renew it, or give it back (length 0)."""
        return shards.call(0, "lease", self._kind, self._owner, round(length_s * 1000), token)

    def _renew(self) -> None:
        with closing(Shards(self._shards.options, dict(self._shards.run_ids))) as own:
            while not self._ending.wait(self._length_s / 3):
                try:
                    if self._call(own, self._length_s, self.token)[0] != b"ok":
                        self._lost = True
                        return
                except TailraceError as problem:
                    logger.warning("the lease could not be renewed: %s", problem)


def run_job(settings: Settings, work: Work, *, alone: bool = True, wait_s: float = 0.0, lease: str = LOGS) -> Facts:
    """Do one run of a job under a lease, leave its report, and return its facts.

    Without ``alone`` the lease is not taken: that is for work that changes nothing. Raises LeaseHeld if another process
    was at work all the time that we waited, and the error that ended the run, which is in the report too.
    """
    with closing(Shards(StoreOptions.of(settings.valkey)).open()) as shards:
        prepare(shards)
        owner = f"{socket.gethostname()}:{os.getpid()} {work.name}"
        held = JobLease(shards, owner, settings.upkeep.lease.total_seconds(), wait_s, kind=lease)
        with held if alone else nullcontext():
            started, error = now_ms(), ""
            try:
                work.run(shards, held)
            except BaseException as problem:
                error = str(problem) or type(problem).__name__
                raise
            finally:
                if work.whole:
                    leave(shards, work.name, work.view, started, now_ms(), work.facts(), error)
        return work.facts()


def look_once(settings: Settings, work: Looking) -> Facts:
    """Return what a run would do, without the lease and without a change."""
    with closing(Shards(StoreOptions.of(settings.valkey)).open()) as shards:
        check_layout(shards)
        return work.look(shards)


def leave(shards: Shards, job: str, view: str, started_ms: int, ended_ms: int, facts: Facts, error: str) -> None:
    """Store the report of a run; a failure to store it is only logged."""
    field, key = f"{job}:{view}", shards.keys.upkeep()
    report = {"job": job, "view": view, "started_ms": started_ms, "ended_ms": ended_ms, **facts, "error": error}
    try:
        before = _read_report(shards, job, view)
        report["succeeded_ms"] = before.get("succeeded_ms") if error else ended_ms
        report["effective"] = dict(facts) if facts.get("segments") else before.get("effective")
        shards.run_all([(0, ("HSET", key, field, msgspec.json.encode(report)))])
    except TailraceError as problem:
        logger.warning("the report of %s could not be stored: %s", field, problem)


def last_end(shards: Shards, job: str, view: str) -> int | None:
    """Return when a job's last run ended, in milliseconds; None without a report of one."""
    return _read_report(shards, job, view).get("ended_ms")


def _read_report(shards: Shards, job: str, view: str) -> dict[str, Any]:
    (stored,) = shards.run_all([(0, ("HGET", shards.keys.upkeep(), f"{job}:{view}"))])
    try:
        return _decode(stored) if stored else {}
    except msgspec.DecodeError:
        return {}

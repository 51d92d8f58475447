"""What a job of upkeep is: which logs it is about, how long it may go on, and how one run of it is done.

Invariant: a run changes nothing outside the lease, and leaves a report of what it did, however it ends.

Reports: what each job left of its last run, for the service to show.

A report has what later runs must not hide: when the job last succeeded, and its last run that changed something. A run
over some names only leaves none, since it says nothing of the view.

A throttle: so many buckets per hour and so many bytes per second, paid for after they were used.

The leases of upkeep: one process at a time, by the store's clock, each with a higher token than all before it.

The token is put into force on every shard before anything is done, so whoever held the lease before is refused there.
Invariant: of all who ever believed to hold the lease of logs, only the one with the highest token can change a log.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import msgspec

from tailrace.config.settings import Settings
from tailrace.config.units import compiled
from tailrace.errors import BadRequest, LeaseHeld, StaleDriver, StaleUpkeep, TailraceError
from tailrace.valkey.shards import Shards, StoreOptions, check_layout, fence, prepare

logger = logging.getLogger(__name__)

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def leave(
    shards: Shards, job: str, view: str, started_ms: int, ended_ms: int, facts: Mapping[str, Any], error: str
) -> None:
    """Store the report of a run; one that cannot be stored is only logged."""
    field, key = f"{job}:{view}", shards.keys.upkeep()
    report = {"job": job, "view": view, "started_ms": started_ms, "ended_ms": ended_ms, **facts, "error": error}
    try:
        before = _read(shards.run_all([(0, ("HGET", key, field))])[0])
        report["succeeded_ms"] = before.get("succeeded_ms") if error else ended_ms
        report["effective"] = dict(facts) if facts.get("segments") else before.get("effective")
        shards.run_all([(0, ("HSET", key, field, msgspec.json.encode(report)))])
    except TailraceError as problem:
        logger.warning("the report of %s could not be stored: %s", field, problem)


def last_end(shards: Shards, job: str, view: str) -> int | None:
    """Return when a job's last run ended; None when there is no report of one."""
    found: int | None = _read(shards.run_all([(0, ("HGET", shards.keys.upkeep(), f"{job}:{view}"))])[0]).get("ended_ms")
    return found


def _read(stored: bytes | None) -> dict[str, Any]:
    try:
        return _decode(stored) if stored else {}
    except msgspec.DecodeError:
        return {}


SLICE_S = 0.5


class Throttle:
    """Keeps both paces over time; 0 = no limit. Time in which nothing was done is not saved up."""

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
        """Note what was just done."""
        now = self._clock()
        self._buckets_until = _paid(self._buckets_until, buckets * self._each, now)
        self._bytes_until = _paid(self._bytes_until, size * self._byte, now)

    def wait(self, check: Callable[[], None] = lambda: None) -> None:
        """Sleep until all that was noted is paid for. ``check`` is called meanwhile; when it raises, the debt stays."""
        while (left := max(self._buckets_until, self._bytes_until) - self._clock()) > 0:
            check()
            self._sleep(min(left, SLICE_S))

    def share(self, parts: int) -> tuple[float, float]:
        """Return buckets per hour and bytes per second of one of several that work side by side."""
        return (3600 / self._each / parts if self._each else 0.0, 1 / self._byte / parts if self._byte else 0.0)


def _paid(until: float, price: float, now: float) -> float:
    """Return when something just done is paid for, if what was done before is at ``until``."""
    return max(until, now - price) + price


WHAT = "upkeep"
"""The lease of whoever changes logs."""
SESSIONS = "session-upkeep"
"""The lease of whoever looks after sessions; what they do can be done by two at once, and is only wasted then."""


class JobLease:
    """Use as ``with``: taken at the beginning, renewed in the background, given back at the end.

    Args:
        shards: An open, prepared client; the renewals use a connection of their own.
        owner: Who takes it, as other processes are told.
        length_s: How long it lasts when it is not renewed.
        wait_s: How long to wait for another owner to give it back.
        what: Which lease.

    Raises:
        LeaseHeld: Another process has it, and kept it for as long as we waited.
    """

    def __init__(
        self,
        shards: Shards,
        owner: str,
        length_s: float = 30.0,
        wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        what: str = WHAT,
    ) -> None:
        self._what = what
        self._shards, self._owner, self._length_s, self._wait_s, self._clock = shards, owner, length_s, wait_s, clock
        self._ending = threading.Event()
        self._renewing: threading.Thread | None = None
        self._lost = False
        self.token = 0

    def __enter__(self) -> JobLease:
        deadline = self._clock() + self._wait_s
        while True:
            answer = self._shards.call(0, "lease", self._what, self._owner, round(self._length_s * 1000), 0)
            if answer[0] == b"ok":
                break
            if self._clock() >= deadline:
                raise LeaseHeld(answer[1].decode(), int(answer[2]) / 1000)
            time.sleep(0.2)
        self.token = int(answer[1])
        try:
            fence(self._shards, (self._what,), self.token)
        except StaleDriver as error:
            raise StaleUpkeep(self.token, error.stored) from None
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewing.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        if self._renewing is not None:
            self._renewing.join()
        try:
            self._shards.call(0, "lease", self._what, self._owner, 0, self.token)
        except TailraceError as problem:
            logger.warning("the lease could not be given back: %s; it ends by itself", problem)

    def check(self) -> None:
        """Raise StaleUpkeep when the lease is known to have gone to another process."""
        if self._lost:
            raise StaleUpkeep(self.token, self.token + 1)

    def _renew(self) -> None:
        own = Shards(self._shards.options, dict(self._shards.run_ids))
        try:
            while not self._ending.wait(self._length_s / 3):
                try:
                    answer = own.call(0, "lease", self._what, self._owner, round(self._length_s * 1000), self.token)
                    if answer[0] != b"ok":
                        self._lost = True
                        return
                except TailraceError as problem:
                    logger.warning("the lease could not be renewed: %s", problem)
        finally:
            own.close()


Facts: TypeAlias = Mapping[str, Any]
Stopped: TypeAlias = Callable[[], bool]

LATER = "later"
"""Why a segment is left when the run was stopped before it."""


def now_ms() -> int:
    """The clock of upkeep."""
    return time.time_ns() // 1_000_000


class BucketSettings(Protocol):
    """What every view's section of the configuration says of the life of its buckets."""

    @property
    def pack_after(self) -> timedelta: ...

    def keep_of(self, name: str, /) -> timedelta | None: ...


def section_of(settings: Settings, view: str) -> BucketSettings:
    """Return a view's section of the configuration.

    Raises:
        BadRequest: There is no such view.
    """
    if view not in settings.log_views:
        raise BadRequest(f"there is no view {view!r} that keeps streams; there is: {', '.join(settings.log_views)}")
    section: BucketSettings = getattr(settings, "grep" if view == "matches" else view)
    return section


def require_copy(settings: Settings, view: str) -> None:
    """Refuse a view that does not hold what Kafka has.

    Raises:
        BadRequest: There is no such view, or it cannot be compared with Kafka nor made again from it.
    """
    if view == "tags" and settings.tags.store == "cassandra":
        raise BadRequest(
            "the tags rest in Cassandra (tags.store), and this job is for logs in Valkey: see upkeep.by_store"
        )
    section_of(settings, view)
    if view not in settings.copied_views:
        raise BadRequest(
            f"the view {view!r} holds what searches found, not what Kafka has: there is nothing to compare or to "
            "restore; a search that was ended (`tailrace searches end`) looks for everything anew when it is asked for"
        )


def every(name: str) -> bool:
    """Every name is wanted."""
    return True


def matcher(pattern: str | None) -> Callable[[str], bool]:
    """Return whether a whole name matches a pattern; without one, every name does.

    Raises:
        BadRequest: It is no pattern.
    """
    if pattern is None:
        return every
    import re2

    try:
        expression = compiled(pattern)
    except re2.error as error:
        said = error.args[0].decode(errors="replace")
        raise BadRequest(f"--name {pattern!r} is no regular expression in RE2 syntax: {said}") from None
    return lambda name: expression.fullmatch(name) is not None


def milliseconds(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)


class Scope(msgspec.Struct, frozen=True):
    """What one run is about, and who looks on."""

    wanted: Callable[[str], bool] = every
    """Which names."""
    stopped: Stopped = lambda: False
    """Whether to end at the next opportunity."""
    progress: Callable[[int, int], None] = lambda done, total: None
    """Told how much is done, of how much."""
    clock: Callable[[], int] = now_ms

    @property
    def whole(self) -> bool:
        """Whether it is about all names of the view."""
        return self.wanted is every


EVERYTHING = Scope()
"""All names, to the end, unwatched."""


class Work(Protocol):
    """One run of a job."""

    name: str
    view: str
    whole: bool
    """Whether it is about all names of the view."""

    def run(self, shards: Shards, lease: JobLease) -> None: ...

    def facts(self) -> dict[str, object]: ...


class Looking(Protocol):
    """One run of a job that can also only say what it would do."""

    def look(self, shards: Shards) -> dict[str, object]: ...


def run_job(
    settings: Settings,
    work: Work,
    *,
    alone: bool = True,
    wait_s: float = 0.0,
    clock: Callable[[], int] = now_ms,
    what: str = WHAT,
) -> Facts:
    """Do one run of a job under a lease, and leave its report; return what it did.

    Without ``alone`` the lease is not taken, which is for work that changes nothing.

    Raises:
        LeaseHeld: Another process is at work, and was so for as long as we waited.
        TailraceError: What ended the run; the report has it too.
    """
    shards = Shards(StoreOptions.of(settings.valkey)).open()
    try:
        prepare(shards)
        owner = f"{socket.gethostname()}:{os.getpid()} {work.name}"
        lease = JobLease(shards, owner, settings.upkeep.lease.total_seconds(), wait_s, what=what)
        with lease if alone else nullcontext():
            started, error = clock(), ""
            try:
                work.run(shards, lease)
            except BaseException as problem:
                error = str(problem) or type(problem).__name__
                raise
            finally:
                if work.whole:
                    leave(shards, work.name, work.view, started, clock(), work.facts(), error)
        return work.facts()
    finally:
        shards.close()


def look_once(settings: Settings, work: Looking) -> Facts:
    """Say what a run would do: without the lease, and changing nothing."""
    shards = Shards(StoreOptions.of(settings.valkey)).open()
    try:
        check_layout(shards)
        return work.look(shards)
    finally:
        shards.close()

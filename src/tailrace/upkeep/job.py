"""What a job of upkeep is: which logs it is about, how long it may go on, and how one run of it is done.

Invariant: a run changes nothing outside the lease, and leaves a report of what it did, however it ends.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import msgspec

from tailrace.config import Settings
from tailrace.config.units import compiled
from tailrace.errors import BadRequest
from tailrace.upkeep.lease import WHAT, Lease
from tailrace.upkeep.report import leave
from tailrace.valkey.shards import Shards, StoreOptions, check_layout, prepare

Facts: TypeAlias = Mapping[str, Any]
Stopped: TypeAlias = Callable[[], bool]

LATER = "later"
"""Why a segment is left when the run was stopped before it."""


def now_ms() -> int:
    """The clock of upkeep."""
    return time.time_ns() // 1_000_000


class Section(Protocol):
    """What every view's section of the configuration says of the life of its buckets."""

    @property
    def pack_after(self) -> timedelta: ...

    def keep_of(self, name: str, /) -> timedelta | None: ...


def section_of(settings: Settings, view: str) -> Section:
    """Return a view's section of the configuration.

    Raises:
        BadRequest: There is no such view.
    """
    if view not in settings.log_views:
        raise BadRequest(f"there is no view {view!r} that keeps streams; there is: {', '.join(settings.log_views)}")
    section: Section = getattr(settings, "grep" if view == "matches" else view)
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

    def run(self, shards: Shards, lease: Lease) -> None: ...

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
        lease = Lease(shards, owner, settings.upkeep.lease.total_seconds(), wait_s, what=what)
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

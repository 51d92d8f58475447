"""Reports: what each job left of its last run, for the service to show.

A report has what later runs must not hide: when the job last succeeded, and its last run that changed something. A run
over some names only leaves none, since it says nothing of the view.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from tailrace.errors import TailraceError
from tailrace.valkey.shards import Shards

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

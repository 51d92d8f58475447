"""Commands that ask the service once and print the answer: a table on a terminal, JSON everywhere else."""

from __future__ import annotations

import math
from typing import Any

from tailrace.cli.answers import ask, lines, percent, plain, size, table, text
from tailrace.errors import StreamNotFound


def streams(
    prefix: str | None, limit: int | None, *, top: int | None = None, memory: bool = False, json: bool, url: str
) -> None:
    """Print the streams."""
    found = ask(url, lambda river: river.streams(prefix, limit, top=top, memory=memory))
    if plain(json):
        lines(found)
        return
    rows = [
        (
            s.name,
            f"{s.events:,}",
            size(s.bytes),
            *([size(s.memory or 0)] if memory else []),
            f"{s.days:,}",
            f"{math.floor(s.packed * 100)}%",
            s.last_time or "",
        )
        for s in found
    ]
    table(("stream", "events", "bytes", *(["memory"] if memory else []), "days", "packed", "last event"), rows)


def days(name: str, *, json: bool, url: str) -> None:
    """Print the days of a stream."""
    found = ask(url, lambda river: river.days(name))
    if not found:
        raise StreamNotFound(name)
    if plain(json):
        lines(found)
        return
    rows = [
        (
            d.day,
            f"{d.events:,}",
            size(d.bytes),
            size(d.raw_bytes) if d.raw_bytes else "",
            str(d.first),
            str(d.last),
            d.state,
        )
        for d in found
    ]
    table(("day", "events", "bytes", "unpacked", "first", "last", "state"), rows)


_FIGURES = (
    "rate",
    "lag",
    "batch_ms",
    "in",
    "stored",
    "skipped",
    "dead",
    "expired",
    "unaccounted",
    "outbox",
    "restarts",
)


def status(*, json: bool, url: str) -> None:
    """Print what the parts do."""
    answer = ask(url, lambda river: river.status())
    if plain(json):
        lines([answer])
        return
    parts = [part for part in answer.get("parts", []) if isinstance(part, dict)]
    rest = [" ".join(f"{k}={v}" for k, v in part.items() if k not in ("name", "state")) for part in parts]
    table(("part", "state", ""), [(text(p, "name"), text(p, "state"), r) for p, r in zip(parts, rest, strict=True)])
    views = [(name, view) for name, view in answer.get("views", {}).items() if isinstance(view, dict)]
    table(
        ("view", *(name for name, _ in views)),
        [(key.replace("_", " "), *(text(view, key) for _, view in views)) for key in _FIGURES],
    )
    jobs = [job for job in answer.get("upkeep", ()) if isinstance(job, dict)]
    if jobs:
        table(
            ("upkeep", "view", "last run", "took", "state", ""),
            [(text(job, "job"), text(job, "view"), *_run(job)) for job in jobs],
        )
    searches = answer.get("searches") or {}
    if searches.get("alive"):
        row = tuple(text(searches, key) for key in ("alive", "followers", "scanning"))
        table(("searches", "followers", "scans waiting"), [row])
    rules = [rule for rule in answer.get("folds", ()) if isinstance(rule, dict)]
    if rules:
        rows = [(text(rule, "rule"), text(rule, "pending"), percent(rule.get("ratio"))) for rule in rules]
        table(("folds", "pending", "folded"), rows)
    gaps = [
        (text(gap, "source"), text(gap, "first"), text(gap, "until")) for _, v in views[:1] for gap in v.get("gaps", ())
    ]
    if gaps:
        table(("dropped by Kafka before it was read", "from offset", "until"), gaps)


def _run(job: dict[str, Any]) -> tuple[str, str, str, str]:
    """When a run of upkeep ended, how long it took, how it went, and what it counted."""
    ended = text(job, "ended").partition(".")[0].replace("T", " ")
    took = "" if job.get("seconds") is None else f"{job['seconds']:,.1f}s"
    late = "overdue" if job.get("overdue") else ""
    went = f"failed: {job['error']}" if job.get("error") else "" if job.get("started") else "has not run"
    figures = job.get("figures") or {}
    said = [
        f"{key.replace('_', ' ')} {size(value) if 'bytes' in key and isinstance(value, int) else text(figures, key)}"
        for key, value in figures.items()
        if value
    ]
    return ended, took, ", ".join(filter(None, (late, went))) or "ok", ", ".join(said)

"""Commands that ask the service once and print the answer: a table on a terminal, JSON everywhere else."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from tailrace.client import River, connect
from tailrace.commands.follow import visible
from tailrace.errors import StreamNotFound
from tailrace.units import format_size

T = TypeVar("T")


def streams(
    prefix: str | None, limit: int | None, *, top: int | None = None, memory: bool = False, json: bool, url: str
) -> None:
    """Print the streams."""
    found = _ask(url, lambda river: river.streams(prefix, limit, top=top, memory=memory))
    if _plain(json):
        _lines(found)
        return
    rows = [
        (
            s.name,
            f"{s.events:,}",
            _size(s.bytes),
            *([_size(s.memory or 0)] if memory else []),
            f"{s.days:,}",
            f"{math.floor(s.packed * 100)}%",
            s.last_time or "",
        )
        for s in found
    ]
    _table(("stream", "events", "bytes", *(["memory"] if memory else []), "days", "packed", "last event"), rows)


def days(name: str, *, json: bool, url: str) -> None:
    """Print the days of a stream."""
    found = _ask(url, lambda river: river.days(name))
    if not found:
        raise StreamNotFound(name)
    if _plain(json):
        _lines(found)
        return
    rows = [
        (
            d.day,
            f"{d.events:,}",
            _size(d.bytes),
            _size(d.raw_bytes) if d.raw_bytes else "",
            str(d.first),
            str(d.last),
            d.state,
        )
        for d in found
    ]
    _table(("day", "events", "bytes", "unpacked", "first", "last", "state"), rows)


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
    answer = _ask(url, lambda river: river.status())
    if _plain(json):
        _lines([answer])
        return
    parts = [part for part in answer.get("parts", []) if isinstance(part, dict)]
    rest = [" ".join(f"{k}={v}" for k, v in part.items() if k not in ("name", "state")) for part in parts]
    _table(("part", "state", ""), [(_text(p, "name"), _text(p, "state"), r) for p, r in zip(parts, rest, strict=True)])
    views = [(name, view) for name, view in answer.get("views", {}).items() if isinstance(view, dict)]
    _table(
        ("view", *(name for name, _ in views)),
        [(key.replace("_", " "), *(_text(view, key) for _, view in views)) for key in _FIGURES],
    )
    jobs = [job for job in answer.get("upkeep", ()) if isinstance(job, dict)]
    if jobs:
        _table(
            ("upkeep", "view", "last run", "took", "state", ""),
            [(_text(job, "job"), _text(job, "view"), *_run(job)) for job in jobs],
        )
    gaps = [
        (_text(gap, "source"), _text(gap, "first"), _text(gap, "until"))
        for _, v in views[:1]
        for gap in v.get("gaps", ())
    ]
    if gaps:
        _table(("dropped by Kafka before it was read", "from offset", "until"), gaps)


def _run(job: dict[str, Any]) -> tuple[str, str, str, str]:
    """When a run of upkeep ended, how long it took, how it went, and what it counted."""
    ended = _text(job, "ended").partition(".")[0].replace("T", " ")
    took = "" if job.get("seconds") is None else f"{job['seconds']:,.1f}s"
    late = "overdue" if job.get("overdue") else ""
    went = f"failed: {job['error']}" if job.get("error") else "" if job.get("started") else "has not run"
    figures = job.get("figures") or {}
    said = [
        f"{key.replace('_', ' ')} {_size(value) if 'bytes' in key and isinstance(value, int) else _text(figures, key)}"
        for key, value in figures.items()
        if value
    ]
    return ended, took, ", ".join(filter(None, (late, went))) or "ok", ", ".join(said)


def _ask(url: str, question: Callable[[River], Awaitable[T]]) -> T:
    async def ask() -> T:
        async with connect(url) as river:
            return await question(river)

    return asyncio.run(ask())


def _plain(json: bool) -> bool:
    return json or not sys.stdout.isatty()


def _lines(rows: Iterable[object]) -> None:
    sys.stdout.buffer.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    sys.stdout.buffer.flush()


def _size(value: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if value >= factor:
            return f"{value / factor:.1f}{unit}"
    return format_size(value)


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if isinstance(value, list):
        return f"{len(value):,}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(value, name)}" for name in value) or "0"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,.1f}".removesuffix(".0")
    return "" if value is None else str(value)


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    Console().print(table)

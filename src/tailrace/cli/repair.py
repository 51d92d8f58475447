"""Commands that compare a view with Kafka, and restore from it what the view has lost.

What was found or done is printed line by line, as JSON or as a table on a terminal, and then a summary.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from tailrace.cli import parts
from tailrace.cli.follow import visible
from tailrace.cli.upkeep import once, step_aside, summary
from tailrace.config import Settings
from tailrace.errors import BadRequest


def audit(
    settings: Settings,
    view: str,
    name_pattern: str | None,
    *,
    keys: bool,
    json: bool,
    spark: Any = None,
) -> int:
    """Compare a view with Kafka and with its own registries. 1 if something is wrong."""
    try:
        from tailrace.upkeep.backends import auditing
        from tailrace.upkeep.job import run_job
    except ImportError as error:
        raise parts.lacking(error, "spark") from None
    if spark is None:
        step_aside()
    settings = parts.at_stack(settings)
    work = auditing(settings, view, pattern=name_pattern, keys=keys, spark=spark)
    run_job(settings, work, alone=False)
    found = work.found
    _print(found.findings, json=json)
    offsets = sum(last - first + 1 for first, last in found.retained.values())
    kafka = {"sources": len(found.retained), "offsets": offsets}
    summary({"job": "audit", "view": view, **kafka, **found.facts(), "seconds": found.seconds}, json=json)
    return 0 if found.clean else 1


def rebuild(
    settings: Settings,
    view: str,
    name: str | None,
    day: str | None,
    *,
    dry_run: bool,
    wait_s: float,
    json: bool,
    source: str | None = None,
    spark: Any = None,
) -> int:
    """Restore what Kafka still has. 1 if some log could not be restored."""
    try:
        from tailrace.upkeep.backends import rebuilding
        from tailrace.upkeep.restore import REBUILT, SAME
    except ImportError as error:
        raise parts.lacking(error, "spark") from None
    if spark is None:
        step_aside()
    settings = parts.at_stack(settings)
    day_ms = None if day is None else begin_of(day)
    work = rebuilding(settings, view, name=name, day_ms=day_ms, source=source, spark=spark)
    facts = once(settings, work, dry_run=dry_run, wait_s=wait_s)
    restored = sorted(work.restored.values(), key=lambda each: each.name)
    _print(restored, json=json)
    summary(facts, json=json)
    return 0 if all(each.verdict in (REBUILT, SAME) for each in restored) else 1


def cleanup(settings: Settings, source: str, tag: str | None, *, dry_run: bool, wait_s: float, json: bool) -> int:
    """Take a source's events out of tags for good. 1 if some could not be taken out."""
    try:
        from tailrace.upkeep.backends import cleaning
        from tailrace.views.tags.upkeep import CLEANED
    except ImportError as error:
        raise parts.lacking(error, "stores") from None
    step_aside()
    logging.getLogger("tailrace.views.tags.upkeep").setLevel(logging.INFO)
    settings = parts.at_stack(settings)
    work = cleaning(settings, source, tag)
    facts = once(settings, work, dry_run=dry_run, wait_s=wait_s)
    _print(work.cleaned, json=json)
    summary(facts, json=json)
    return 0 if all(each.verdict == CLEANED for each in work.cleaned) else 1


def begin_of(day: str) -> int:
    """Return when a UTC day began, in milliseconds.

    Raises:
        BadRequest: It is no day.
    """
    try:
        return round(datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp() * 1000)
    except ValueError:
        raise BadRequest(f"--day {day!r} is no day: write it as 2026-11-15") from None


def _print(rows: Sequence[msgspec.Struct], *, json: bool) -> None:
    if json or not sys.stdout.isatty():
        sys.stdout.buffer.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        sys.stdout.buffer.flush()
        return
    if not rows:
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*rows[0].__struct_fields__, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        cells = (msgspec.structs.asdict(row)[field] for field in row.__struct_fields__)
        table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else visible(str(cell))) for cell in cells))
    Console().print(table)

"""Commands of upkeep: the process that does it at intervals, and each of its jobs run once.

What was done is the last line of standard output, or a table on a terminal; how far it is goes to standard error.

Commands that compare a view with Kafka, and restore from it what the view has lost.

What was found or done is printed line by line, as JSON or as a table on a terminal, and then a summary.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tailrace.cli import parts
from tailrace.cli.follow import visible
from tailrace.config.settings import Settings
from tailrace.errors import BadRequest

if TYPE_CHECKING:
    from tailrace.upkeep.job import Looking, Work

    class Job(Work, Looking, Protocol):
        """A run that can be tried first."""


Progress = Callable[[int, int], None]


def run(settings: Settings) -> int:
    """Run upkeep until it is stopped."""
    try:
        from tailrace.upkeep.loop import main
    except ImportError as error:
        raise parts.lacking(error, "stores") from None
    return main(parts.at_stack(settings))


def pack(settings: Settings, view: str, name_pattern: str | None, *, dry_run: bool, wait_s: float, json: bool) -> int:
    """Pack what is due now. 1 if something cannot be packed at all."""
    try:
        from tailrace.upkeep.job import Scope, matcher
        from tailrace.upkeep.pack import Packing, PackRules
        from tailrace.upkeep.packer import FAULTS
        from tailrace.upkeep.spark import Spread
    except ImportError as error:
        raise parts.lacking(error, "stores") from None
    settings = parts.at_stack(settings)
    step_aside()
    with Spread(settings) as spread, bar(f"packing {view}") as progress:
        scope = Scope(matcher(name_pattern), progress=progress)
        work = Packing(view, PackRules.of(settings, view), scope, spread=spread)
        facts = once(settings, work, dry_run=dry_run, wait_s=wait_s)
    summary(facts, json=json)
    return 1 if FAULTS.keys() & work.outcome.left.keys() else 0


def sweep(settings: Settings, view: str, name_pattern: str | None, *, dry_run: bool, wait_s: float, json: bool) -> int:
    """Drop what has been kept long enough."""
    try:
        from tailrace.upkeep.job import Scope, matcher
        from tailrace.upkeep.sweep import Sweeping, SweepRules
    except ImportError as error:
        raise parts.lacking(error, "stores") from None
    settings = parts.at_stack(settings)
    step_aside()
    with bar(f"sweeping {view}") as progress:
        work = Sweeping(view, SweepRules.of(settings, view), Scope(matcher(name_pattern), progress=progress))
        facts = once(settings, work, dry_run=dry_run, wait_s=wait_s)
    summary(facts, json=json)
    return 0


def once(settings: Settings, work: Job, *, dry_run: bool, wait_s: float) -> dict[str, object]:
    """Do one run of a job, or say what it would do; return what to print of it."""
    from tailrace.upkeep.job import look_once, run_job

    began = time.monotonic()
    head: dict[str, object] = {"job": work.name, "view": work.view}
    facts = {"dry_run": True, **look_once(settings, work)} if dry_run else run_job(settings, work, wait_s=wait_s)
    return {**head, **facts, "seconds": round(time.monotonic() - began, 3)}


def step_aside() -> None:
    """Say only what matters, and let live work go first."""
    from tailrace.upkeep.spark import step_back

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.ERROR)
    step_back()


@contextmanager
def bar(what: str) -> Iterator[Progress]:
    """Show how far something is, on a terminal; give the function that is told."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def summary(facts: Mapping[str, object], *, json: bool) -> None:
    """Print what was done: a table on a terminal, one line of JSON everywhere else."""
    if json or not sys.stdout.isatty():
        sys.stdout.buffer.write(msgspec.json.encode(facts) + b"\n")
        sys.stdout.buffer.flush()
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), Text(_text(value)))
    Console().print(table)


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items()) or "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


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

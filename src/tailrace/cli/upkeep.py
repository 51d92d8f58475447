"""Commands that keep views in order: the process that runs the jobs at intervals, and each job run once.

A job prints what it found or did, line by line and then as a summary, to standard output, and its progress to standard
error. ``run_audit`` and ``run_rebuild`` take a Spark session where one runs already.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.command import (
    Config,
    DryRun,
    Folder,
    StackOptions,
    Wait,
    at_stack,
    grouped,
    load_settings,
    needs,
    print_structs,
    print_summary,
)
from tailrace.errors import BadRequest
from tailrace.views import VIEWS

if TYPE_CHECKING:
    from tailrace.config.settings import Settings
    from tailrace.upkeep.job import Looking

ViewName = Annotated[str, typer.Argument(metavar="VIEW", help="The view: days, tags, or matches.")]
NamePattern = Annotated[
    str | None, typer.Option("--name", metavar="PATTERN", help="Only streams whose whole name matches, in RE2 syntax.")
]


def upkeep(config: Config = None, folder: Folder = None) -> None:
    """Pack, sweep and audit the views at the configured intervals, until stopped."""
    settings = load_settings(config, folder=folder)
    with needs("stores"):
        from tailrace.upkeep.loop import main
    raise typer.Exit(main(at_stack(settings), VIEWS))


@dataclass(frozen=True)
class JobOptions:
    """Options of a job over the logs of a view."""

    view: ViewName = "days"
    name: NamePattern = None
    dry_run: DryRun = False
    wait: Wait = 10.0


@grouped
def pack(*, job: JobOptions, stack: StackOptions) -> None:
    """Pack closed days now: the same events in few large pieces. Exit code 1 if some cannot be packed."""
    settings = stack.settings()
    with needs("stores"):
        from tailrace.upkeep.job import Scope, find_view, matcher
        from tailrace.upkeep.pack import FAULTS, Packing, PackRules
        from tailrace.upkeep.spark import Spread
    step_aside()
    with Spread(settings) as spread, progress_bar(f"packing {job.view}") as progress:
        scope = Scope(matcher(job.name), progress=progress)
        rules = PackRules.of(settings, find_view(settings, VIEWS, job.view))
        work = Packing(job.view, rules, scope, spread=spread)
        facts = run_once(settings, work, dry_run=job.dry_run, wait_s=job.wait)
    print_summary(facts, json=stack.json)
    raise typer.Exit(1 if FAULTS.keys() & work.outcome.left.keys() else 0)


@grouped
def sweep(*, job: JobOptions, stack: StackOptions) -> None:
    """Drop days that are older than the retention time."""
    settings = stack.settings()
    with needs("stores"):
        from tailrace.upkeep.job import Scope, find_view, matcher
        from tailrace.upkeep.sweep import Sweeping, SweepRules
    step_aside()
    with progress_bar(f"sweeping {job.view}") as progress:
        rules = SweepRules.of(settings, find_view(settings, VIEWS, job.view))
        work = Sweeping(job.view, rules, Scope(matcher(job.name), progress=progress))
        facts = run_once(settings, work, dry_run=job.dry_run, wait_s=job.wait)
    print_summary(facts, json=stack.json)


@grouped
def audit(
    view: ViewName = "days",
    name: NamePattern = None,
    keys: Annotated[bool, typer.Option("--keys", help="Also search all keys of the store for strays.")] = False,
    *,
    stack: StackOptions,
) -> None:
    """Compare a view with Kafka and with its own registries. Exit code 1 if something is wrong."""
    raise typer.Exit(run_audit(stack.settings(), view, name, keys=keys, json=stack.json))


def run_audit(
    settings: Settings, view: str, name_pattern: str | None, *, keys: bool, json: bool, spark: Any = None
) -> int:
    """Compare a view with Kafka and with its registries; return 1 if something is wrong."""
    with needs("spark"):
        from tailrace.upkeep.audit import Auditing
        from tailrace.upkeep.job import find_view, run_job
    if spark is None:
        step_aside()
    work = Auditing(settings, find_view(settings, VIEWS, view), pattern=name_pattern, keys=keys, spark=spark)
    run_job(settings, work, alone=False)
    found = work.found
    print_structs(found.findings, json=json)
    offsets = sum(last - first + 1 for first, last in found.retained.values())
    kafka = {"sources": len(found.retained), "offsets": offsets}
    print_summary({"job": "audit", "view": view, **kafka, **found.facts(), "seconds": found.seconds}, json=json)
    return 0 if found.clean else 1


@grouped
def rebuild(
    view: ViewName = "days",
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One stream. Default: all of them.")] = None,
    day: Annotated[str | None, typer.Option("--day", metavar="DAY", help="One UTC day: 2026-11-15.")] = None,
    dry_run: DryRun = False,
    wait: Wait = 10.0,
    *,
    stack: StackOptions,
) -> None:
    """Restore a stream, a day of it, or the whole view from Kafka, while everything runs. Exit code 1 if some fail."""
    code = run_rebuild(stack.settings(), view, name, day, dry_run=dry_run, wait_s=wait, json=stack.json)
    raise typer.Exit(code)


def run_rebuild(
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
    """Restore what Kafka still has; return 1 if some log could not be restored."""
    with needs("spark"):
        from tailrace.upkeep.copy import REBUILT, SAME
        from tailrace.upkeep.job import find_view
        from tailrace.upkeep.rebuild import Rebuilding
    if spark is None:
        step_aside()
    day_ms = None if day is None else begin_of(day)
    found = find_view(settings, VIEWS, view)
    work = Rebuilding(settings, found, name=name, day_ms=day_ms, source=source, spark=spark)
    facts = run_once(settings, work, dry_run=dry_run, wait_s=wait_s)
    restored = sorted(work.restored.values(), key=lambda each: each.name)
    print_structs(restored, json=json)
    print_summary(facts, json=json)
    return 0 if all(each.verdict in (REBUILT, SAME) for each in restored) else 1


def run_once(settings: Settings, work: Looking, *, dry_run: bool, wait_s: float) -> dict[str, object]:
    """Run a job, or only say what it would do; return the facts to print."""
    from tailrace.upkeep.job import look_once, run_job

    began = time.monotonic()
    facts = {"dry_run": True, **look_once(settings, work)} if dry_run else run_job(settings, work, wait_s=wait_s)
    return {"job": work.name, "view": work.view, **facts, "seconds": round(time.monotonic() - began, 3)}


def step_aside() -> None:
    """Log only warnings, and give live work a higher priority than this process."""
    from tailrace.upkeep.spark import step_back

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.ERROR)
    step_back()


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal; yield the function that takes the number done and the total."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def begin_of(day: str) -> int:
    """Return when a UTC day began, in milliseconds; refuse a text that is no day."""
    try:
        return round(datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp() * 1000)
    except ValueError:
        raise BadRequest(f"--day {day!r} is no day: write it as 2026-11-15") from None

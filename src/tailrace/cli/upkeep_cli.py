"""The commands that keep views in order, ``upkeep`` to ``retag``: names and options only, as in ``cli``."""

from __future__ import annotations

from typing import Annotated

import typer

from tailrace.cli.options import Config, DryRun, Folder, Json, Wait

View = Annotated[str, typer.Argument(metavar="VIEW", help="The view: days, tags, or matches.")]
NamePattern = Annotated[
    str | None, typer.Option("--name", metavar="PATTERN", help="Only streams whose whole name matches, in RE2 syntax.")
]


def upkeep(config: Config = None, folder: Folder = None) -> None:
    """Pack, sweep and audit the views at the configured intervals, until it is stopped."""
    from tailrace.cli import parts, upkeep

    raise typer.Exit(upkeep.run(parts.load(config, folder=folder)))


def pack(
    view: View = "days",
    name: NamePattern = None,
    dry_run: DryRun = False,
    wait: Wait = 10.0,
    json: Json = False,
    folder: Folder = None,
    config: Config = None,
) -> None:
    """Pack closed days now: the same events in few large pieces."""
    from tailrace.cli import parts, upkeep

    settings = parts.load(config, folder=folder)
    raise typer.Exit(upkeep.pack(settings, view, name, dry_run=dry_run, wait_s=wait, json=json))


def sweep(
    view: View = "days",
    name: NamePattern = None,
    dry_run: DryRun = False,
    wait: Wait = 10.0,
    json: Json = False,
    folder: Folder = None,
    config: Config = None,
) -> None:
    """Drop days that are older than what is kept."""
    from tailrace.cli import parts, upkeep

    settings = parts.load(config, folder=folder)
    raise typer.Exit(upkeep.sweep(settings, view, name, dry_run=dry_run, wait_s=wait, json=json))


def audit(
    view: View = "days",
    name: NamePattern = None,
    keys: Annotated[bool, typer.Option("--keys", help="Also look through all keys for some that nobody owns.")] = False,
    json: Json = False,
    folder: Folder = None,
    config: Config = None,
) -> None:
    """Compare a view with Kafka and with its own registries. Exit code 1 if something is wrong."""
    from tailrace.cli import parts
    from tailrace.cli import upkeep as repair

    settings = parts.load(config, folder=folder)
    raise typer.Exit(repair.audit(settings, view, name, keys=keys, json=json))


def rebuild(
    view: View = "days",
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One stream; all of them without it.")] = None,
    day: Annotated[str | None, typer.Option("--day", metavar="DAY", help="One UTC day: 2026-11-15.")] = None,
    dry_run: DryRun = False,
    wait: Wait = 10.0,
    json: Json = False,
    folder: Folder = None,
    config: Config = None,
) -> None:
    """Restore what Kafka still has: a stream, a day of it, or the whole view, while everything runs."""
    from tailrace.cli import parts
    from tailrace.cli import upkeep as repair

    settings = parts.load(config, folder=folder)
    raise typer.Exit(repair.rebuild(settings, view, name, day, dry_run=dry_run, wait_s=wait, json=json))


def retag(
    tag: Annotated[str | None, typer.Argument(metavar="TAG", help="One tag; all of them without it.")] = None,
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="SOURCE", help="The tags of one source; what a cleanup took out comes back."),
    ] = None,
    dry_run: DryRun = False,
    wait: Wait = 10.0,
    json: Json = False,
    folder: Folder = None,
    config: Config = None,
) -> None:
    """Tag what Kafka still has by the present paths and rules, while everything runs: `rebuild tags`."""
    from tailrace.cli import parts
    from tailrace.cli import upkeep as repair

    settings = parts.load(config, folder=folder)
    code = repair.rebuild(settings, "tags", tag, None, source=source, dry_run=dry_run, wait_s=wait, json=json)
    raise typer.Exit(code)

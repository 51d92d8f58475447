"""The commands ``tailrace retag`` and ``tailrace tags cleanup``: names and options only, as in ``cli``."""

from __future__ import annotations

from typing import Annotated

import typer

from tailrace.options import Config, DryRun, Folder, Json, Wait


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
    from tailrace.commands import parts, repair

    settings = parts.load(config, folder=folder)
    code = repair.rebuild(settings, "tags", tag, None, source=source, dry_run=dry_run, wait_s=wait, json=json)
    raise typer.Exit(code)


def cleanup(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="As `tailrace tags sources` lists it.")],
    tag: Annotated[str | None, typer.Option("--tag", metavar="TAG", help="Out of this tag only.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run/--no-dry-run", help="Say what would be taken out, and do nothing.")
    ] = True,
    wait: Wait = 10.0,
    json: Json = False,
    folder: Folder = None,
    config: Config = None,
) -> None:
    """Take a source's events out of its tags for good; what it writes later is kept."""
    from tailrace.commands import parts, repair

    settings = parts.load(config, folder=folder)
    raise typer.Exit(repair.cleanup(settings, source, tag, dry_run=dry_run, wait_s=wait, json=json))

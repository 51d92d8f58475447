"""The commands ``tailrace folds``: names and options only, as in ``cli``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tailrace.cli.options import (
    DEFAULT_URL,
    After,
    Config,
    Ends,
    Folder,
    Json,
    Missing,
    Most,
    OnGap,
    Start,
    Until,
    Url,
)

folds = typer.Typer(help="Bursts of events that became one: the rules, and what they hold.", no_args_is_help=True)

Rule = Annotated[str, typer.Argument(metavar="NAME", help="The rule, as `tailrace folds ls` lists it.")]
GroupText = Annotated[
    str, typer.Argument(metavar="GROUP", help="A JSON array or object; any other text is the group's only part.")
]


@folds.command("ls")
def folds_ls(json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List the rules: their windows, what they hold and how much they fold."""
    from tailrace.views.folds import commands as folds

    folds.ls(json=json, url=url)


@folds.command("tail")
def folds_tail(
    name: Rule,
    start: Start = None,
    after: After = None,
    limit: Most = None,
    ends: Ends = False,
    until: Until = None,
    json: Json = False,
    on_gap: OnGap = "skip",
    missing: Missing = "wait",
    url: Url = DEFAULT_URL,
) -> None:
    """Follow the folded events of a rule."""
    from tailrace.cli import follow
    from tailrace.views.folds import commands as folds

    asked = follow.FollowOptions([], start, after, limit, not ends, until, missing, on_gap, url)
    raise typer.Exit(folds.tail(name, asked, json=json))


@folds.command("pending")
def folds_pending(name: Rule, limit: Most = None, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List the groups that hold folds, the first due first."""
    from tailrace.views.folds import commands as folds

    folds.pending(name, limit, json=json, url=url)


@folds.command("flush")
def folds_flush(
    name: Rule,
    group: Annotated[
        str | None,
        typer.Argument(metavar="GROUP", help="A JSON array or object; any other text is the group's only part."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All groups.")] = False,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Give out the folds of a group now."""
    from tailrace.views.folds import commands as folds

    folds.flush(name, group, everything=everything, json=json, url=url)


@folds.command("delete")
def folds_delete(name: Rule, group: GroupText, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Drop the folds of a group: they are given out with the reason deleted."""
    from tailrace.views.folds import commands as folds

    folds.delete(name, group, json=json, url=url)


@folds.command("set")
def folds_set(
    name: Rule,
    quiet: Annotated[str | None, typer.Option("--quiet", help="Give out after so long without events.")] = None,
    max_wait: Annotated[str | None, typer.Option("--max-wait", help="Give out so long after the first event.")] = None,
    max_count: Annotated[int | None, typer.Option("--max-count", help="Give out at so many events.")] = None,
    max_bytes: Annotated[str | None, typer.Option("--max-bytes", help="Give out at so many bytes.")] = None,
    lateness: Annotated[str | None, typer.Option("--lateness", help="Wait so long for late events.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Take them from the configuration again.")] = False,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Change the windows of a rule while it runs."""
    from tailrace.views.folds import commands as folds

    windows = {"quiet": quiet, "max_wait": max_wait, "max_count": max_count, "max_bytes": max_bytes}
    folds.change(name, {**windows, "lateness": lateness}, reset=reset, json=json, url=url)


@folds.command("tune")
def folds_tune(
    name: Rule,
    since: Annotated[str, typer.Option("--since", metavar="PLACE", help="How far back to look.")] = "-7d",
    windows: Annotated[
        list[str] | None, typer.Option("--window", metavar="DURATION", help="A quiet period to try; may be repeated.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it: .png or .svg.")] = None,
    json: Json = False,
    folder: Folder = None,
    config: Config = None,
) -> None:
    """Say how much would have been folded, and how late, with other quiet periods."""
    from tailrace.cli import parts
    from tailrace.views.folds import commands as tune

    settings = parts.load(config, folder=folder)
    raise typer.Exit(tune.tune(settings, name, since=since, windows=windows or [], json=json, plot=plot))

"""The commands ``tailrace tagged`` and ``tailrace tags``: names and options only, as in ``cli``."""

from __future__ import annotations

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
    Wait,
)

tags = typer.Typer(help="What tags there are, and whose events have them.", no_args_is_help=True)


def tagged(
    names: Annotated[list[str], typer.Argument(metavar="TAG", help="Tags, as `tailrace tags ls` lists them.")],
    every: Annotated[bool, typer.Option("--all", help="Only events that have all of the tags.")] = False,
    query: Annotated[
        str | None,
        typer.Option("--query", metavar="JSON", help="Only events that this holds for; @FILE reads it from a file."),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option("--client", help="A name: the place is kept, and the next one by this name goes on there."),
    ] = None,
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
    """Follow the events of tags: what there is, then what comes, over any disconnect."""
    from tailrace.cli import follow
    from tailrace.views.tags import commands as tagged

    asked = follow.FollowOptions(names, start, after, limit, not ends, until, missing, on_gap, url)
    raise typer.Exit(tagged.tagged(asked, query, every=every, client=client, json=json))


@tags.command("ls")
def tags_ls(
    prefix: Annotated[str | None, typer.Option("--prefix", help="Only tags that begin with this.")] = None,
    limit: Most = None,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List the tags."""
    from tailrace.views.tags import commands as tags

    tags.ls(prefix, limit, json=json, url=url)


@tags.command("sources")
def tags_sources(
    tag: Annotated[str, typer.Argument(metavar="TAG")], limit: Most = None, json: Json = False, url: Url = DEFAULT_URL
) -> None:
    """List the sources that have had events with a tag, and how far each of them is."""
    from tailrace.views.tags import commands as tags

    tags.sources(tag, limit, json=json, url=url)


@tags.command("readers")
def tags_readers(json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List the readers that have a name, and who of them may miss what is dropped soon."""
    from tailrace.views.tags import commands as tags

    tags.readers(json=json, url=url)


@tags.command("cleanup")
def tags_cleanup(
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
    from tailrace.cli import parts
    from tailrace.cli import upkeep as repair

    settings = parts.load(config, folder=folder)
    raise typer.Exit(repair.cleanup(settings, source, tag, dry_run=dry_run, wait_s=wait, json=json))

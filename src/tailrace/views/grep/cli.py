"""The commands ``tailrace searches``: names and options only, as in ``cli``."""

from __future__ import annotations

from typing import Annotated

import typer

from tailrace.cli.options import DEFAULT_URL, Json, Most, Url

searches = typer.Typer(help="What is searched for, and by how many.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(metavar="ID", help="The search, as `tailrace searches ls` lists it.")]


@searches.command("ls")
def searches_ls(limit: Most = None, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List the searches that are alive."""
    from tailrace.views.grep import commands as searches

    searches.ls(limit, json=json, url=url)


@searches.command("show")
def searches_show(search: Id, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Show a search, how far its past is scanned, and who follows it."""
    from tailrace.views.grep import commands as searches

    searches.show(search, json=json, url=url)


@searches.command("end")
def searches_end(
    search: Id,
    force: Annotated[bool, typer.Option("--force", help="Also if somebody follows it.")] = False,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """End a search and its scans, and forget what it found."""
    from tailrace.views.grep import commands as searches

    searches.end(search, force=force, json=json, url=url)

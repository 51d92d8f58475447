"""The commands of day streams: ``tailrace tail`` and ``tailrace streams``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli.command import DEFAULT_URL, FeedOptions, Json, Limit, Url, ask, grouped, print_rows, size
from tailrace.cli.follow import Printer, follow
from tailrace.errors import StreamNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailrace.api.answers import Stream

streams = typer.Typer(help="List day streams.", no_args_is_help=True)


def add_commands(app: typer.Typer) -> None:
    app.command()(tail)
    app.add_typer(streams, name="streams")


@grouped
def tail(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Streams, as `tailrace streams ls` lists them.")],
    *,
    feed: FeedOptions,
) -> None:
    """Follow streams: the events there are, then new ones, over any disconnect."""
    raise typer.Exit(follow(Printer(names, feed)))


@streams.command("ls")
def streams_ls(
    prefix: Annotated[str | None, typer.Option("--prefix", help="Only names that begin with this.")] = None,
    limit: Limit = None,
    top: Annotated[
        int | None,
        typer.Option("--top", min=1, max=1000, help="This many of the largest by stored bytes, the largest first."),
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="With --top: memory of each in the server.")] = False,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List the streams."""
    found = ask(url, lambda river: river.streams(prefix, limit, top=top, memory=memory))
    memory_column: dict[str, Callable[[Stream], object]] = {"memory": lambda s: size(s.memory or 0)} if memory else {}
    print_rows(
        found,
        {
            "stream": lambda s: s.name,
            "events": lambda s: s.events,
            "bytes": lambda s: size(s.bytes),
            **memory_column,
            "days": lambda s: s.days,
            "packed": lambda s: f"{math.floor(s.packed * 100)}%",
            "last event": lambda s: s.last_time,
        },
        json=json,
    )


@streams.command("days")
def streams_days(
    name: Annotated[str, typer.Argument(metavar="NAME")], json: Json = False, url: Url = DEFAULT_URL
) -> None:
    """List the days of a stream."""
    found = ask(url, lambda river: river.days(name))
    if not found:
        raise StreamNotFound(name)
    print_rows(
        found,
        {
            "day": lambda d: d.day,
            "events": lambda d: d.events,
            "bytes": lambda d: size(d.bytes),
            "unpacked": lambda d: size(d.raw_bytes or None),
            "first": lambda d: str(d.first),
            "last": lambda d: str(d.last),
            "state": lambda d: d.state,
        },
        json=json,
    )

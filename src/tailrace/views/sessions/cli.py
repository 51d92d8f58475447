"""The commands ``tailrace sessions``: names and options only, as in ``cli``."""

from __future__ import annotations

from typing import Annotated

import typer

from tailrace.cli.options import DEFAULT_URL, After, Ends, Json, Missing, Most, OnGap, Start, Until, Url

sessions = typer.Typer(help="Telemetry sessions: which there are, and one as it goes on.", no_args_is_help=True)


@sessions.command("ls")
def sessions_ls(
    prefix: Annotated[str | None, typer.Option("--prefix", help="Only sessions that begin with this.")] = None,
    state: Annotated[str | None, typer.Option("--state", help="Only sessions in this state, such as open.")] = None,
    limit: Most = None,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List the sessions, those that were updated last first."""
    from tailrace.views.sessions import commands as sessions

    sessions.ls(prefix, state, limit, json=json, url=url)


@sessions.command("watch")
def sessions_watch(
    session: Annotated[str, typer.Argument(metavar="ID", help="A session, as `tailrace sessions ls` lists it.")],
    channels: Annotated[
        list[str] | None,
        typer.Option(
            "-c", "--channels", metavar="NAME", help="Only these: numbers, names or patterns; may be repeated."
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="At most so many samples of each channel a second.")
    ] = None,
    pixel: Annotated[
        str | None,
        typer.Option("--pixel", metavar="TIME", help="Of every such time the least and the greatest sample."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Values as they were sampled, not converted.")] = False,
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
    """Watch a session: a table of its channels on a terminal, bursts as lines in a pipe; over any disconnect."""
    from tailrace.cli import follow
    from tailrace.views.sessions import commands as sessions

    asked = follow.FollowOptions([session], start, after, limit, not ends, until, missing, on_gap, url)
    names = [name for text in channels or () for name in text.split(",") if name]
    raise typer.Exit(sessions.watch(asked, names, rate=rate, pixel=pixel, raw=raw, json=json))

"""The command ``tailrace``: names and options only, so that ``--help`` is quick; what they do is in ``commands``.

Data goes to standard output and everything else to standard error. Exit codes: 0 done, 1 failed, 2 wrong usage,
130 stopped with Ctrl-C; ``grep`` has those of grep(1).
"""

from __future__ import annotations

import sys
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
from tailrace.cli.upkeep_cli import audit, pack, rebuild, retag, sweep, upkeep
from tailrace.errors import TailraceError
from tailrace.views.folds.cli import folds
from tailrace.views.grep.cli import searches
from tailrace.views.sessions.cli import sessions
from tailrace.views.tags.cli import tagged, tags

app = typer.Typer(
    help="Follow Kafka's JSON events as streams that can be resumed exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
streams = typer.Typer(help="What streams there are.", no_args_is_help=True)
settings = typer.Typer(help="What is configured, and why.", no_args_is_help=True)
app.add_typer(streams, name="streams")
app.add_typer(folds, name="folds")
app.add_typer(searches, name="searches")
app.add_typer(sessions, name="sessions")
app.add_typer(tags, name="tags")
app.add_typer(settings, name="config")

Port = Annotated[int | None, typer.Option("--port", help="The port of the service.")]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The Kafka topic; it is created if need be.")]


def main() -> None:
    """Run the command line and exit."""
    try:
        app()
    except TailraceError as error:
        print(f"error: {error} ({error.code})", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def demo(port: Port = None, folder: Folder = None, config: Config = None) -> None:
    """Run everything on this machine, with sample events."""
    from tailrace.cli import parts

    raise typer.Exit(parts.stack(parts.load(config, port=port, folder=folder), demo=True))


@app.command()
def up(port: Port = None, folder: Folder = None, config: Config = None) -> None:
    """Run everything on this machine: Kafka, Valkey, the pipeline and the service."""
    from tailrace.cli import parts

    raise typer.Exit(parts.stack(parts.load(config, port=port, folder=folder), demo=False))


@app.command()
def run(
    views: Annotated[
        str | None,
        typer.Option(
            "--views", help="Some of the configured views, with commas between; the others are left to another process."
        ),
    ] = None,
    config: Config = None,
) -> None:
    """Run the pipeline: Kafka to the views."""
    from tailrace.cli import parts

    raise typer.Exit(parts.pipeline(parts.load(config), views))


@app.command()
def serve(port: Port = None, config: Config = None) -> None:
    """Run the service: the views over HTTP."""
    from tailrace.cli import parts

    raise typer.Exit(parts.service(parts.load(config, port=port)))


for command in (upkeep, pack, sweep, audit, rebuild, retag):
    app.command()(command)


@app.command()
def put(
    topic: Topic,
    batch: Annotated[int, typer.Option("--batch", min=1, max=10_000, help="Events sent at once, at most.")] = 1_000,
    json: Annotated[bool, typer.Option("-J", "--json", help="Print where each event was written.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Write events from standard input, one JSON object per line.

    A line is {"key": [...], "value": {...}, "headers": {...}, "time": "...Z"}; only the value is needed.
    """
    from tailrace.cli import ask as write

    raise typer.Exit(write.put(topic, batch=batch, coordinates=json, url=url))


@app.command()
def tail(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Streams, as `tailrace streams ls` lists them.")],
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
    """Follow streams: what there is, then what comes, over any disconnect."""
    from tailrace.cli import follow

    asked = follow.FollowOptions(names, start, after, limit, not ends, until, missing, on_gap, url)
    raise typer.Exit(follow.tail(asked, json=json))


app.command()(tagged)


@app.command()
def grep(
    topics: Annotated[
        str, typer.Argument(metavar="TOPICS", help="Names, with commas between, or an expression (RE2); '' for all.")
    ],
    query: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUERY", help="JSON in single quotes, - for standard input, or @FILE. Default: {}"),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="Its first elements as a JSON array, or an expression (RE2) for one.")
    ] = None,
    start: Start = None,
    after: After = None,
    limit: Most = None,
    ends: Ends = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="With -l: go on with what comes.")] = False,
    count: Annotated[bool, typer.Option("-c", "--count", help="Only how many events there are.")] = False,
    invert: Annotated[bool, typer.Option("-v", "--invert-match", help="What the query does not match.")] = False,
    names: Annotated[bool, typer.Option("-l", "--topics", help="Only the topics that have a match.")] = False,
    client: Annotated[
        str | None,
        typer.Option("--client", help="A name: the place is kept, and the next one by this name goes on there."),
    ] = None,
    until: Until = None,
    json: Json = False,
    on_gap: OnGap = "skip",
    missing: Missing = "wait",
    url: Url = DEFAULT_URL,
) -> None:
    """Search topics: the past from any time on, then what comes. Exits like grep(1): 0 found, 1 not, 2 failed."""
    from tailrace.views.grep import commands as grep

    given = (query or [], key, start, after, limit, until, ends, follow, count, invert, names, client, missing, on_gap)
    raise typer.Exit(grep.grep(grep.GrepOptions(topics, *given, json, url)))


@streams.command("ls")
def streams_ls(
    prefix: Annotated[str | None, typer.Option("--prefix", help="Only names that begin with this.")] = None,
    limit: Most = None,
    top: Annotated[
        int | None,
        typer.Option("--top", min=1, max=1000, help="The largest ones by stored bytes, so many, the largest first."),
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="With --top: what each takes in the server.")] = False,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List the streams."""
    from tailrace.cli import ask as listings

    listings.streams(prefix, limit, top=top, memory=memory, json=json, url=url)


@streams.command("days")
def streams_days(
    name: Annotated[str, typer.Argument(metavar="NAME")], json: Json = False, url: Url = DEFAULT_URL
) -> None:
    """List the days of a stream."""
    from tailrace.cli import ask as listings

    listings.days(name, json=json, url=url)


@app.command()
def status(json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Show rates, lag, batch time and health of every part."""
    from tailrace.cli import ask as listings

    listings.status(json=json, url=url)


@settings.command("show")
def config_show(
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value came from.")] = False,
    config: Config = None,
) -> None:
    """Print the settings in force as TOML; secrets are hidden."""
    from tailrace.cli import parts

    parts.show(parts.load(config), origin=origin)


@settings.command("check")
def config_check(config: Config = None) -> None:
    """Say what is wrong with the settings, if anything."""
    from tailrace.cli import parts

    parts.check(parts.load(config))


@settings.command("reference")
def config_reference() -> None:
    """Print every setting with its meaning and its default."""
    from tailrace.config.load import REFERENCE

    sys.stdout.write(REFERENCE.read_text("utf-8"))


@app.command()
def doctor(config: Config = None) -> None:
    """Check this machine and the parts, and say what to do."""
    from tailrace.cli import parts

    raise typer.Exit(parts.examine(parts.load(config)))


@app.command()
def version() -> None:
    """Print the version."""
    from tailrace import __version__

    print(__version__)

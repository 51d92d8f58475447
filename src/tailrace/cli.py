"""The command ``tailrace``: names and options only, so that ``--help`` is quick; what they do is in ``commands``.

Data goes to standard output and everything else to standard error. Exit codes: 0 done, 1 failed, 2 wrong usage,
130 stopped with Ctrl-C; ``grep`` has those of grep(1).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tailrace.errors import TailraceError
from tailrace.options import (
    DEFAULT_URL,
    After,
    Config,
    DryRun,
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
from tailrace.retag_cli import retag
from tailrace.searches_cli import searches
from tailrace.sessions_cli import sessions
from tailrace.tags_cli import tagged, tags

app = typer.Typer(
    help="Follow Kafka's JSON events as streams that can be resumed exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
streams = typer.Typer(help="What streams there are.", no_args_is_help=True)
folds = typer.Typer(help="Bursts of events that became one: the rules, and what they hold.", no_args_is_help=True)
settings = typer.Typer(help="What is configured, and why.", no_args_is_help=True)
app.add_typer(streams, name="streams")
app.add_typer(folds, name="folds")
app.add_typer(searches, name="searches")
app.add_typer(sessions, name="sessions")
app.add_typer(tags, name="tags")
app.add_typer(settings, name="config")

Port = Annotated[int | None, typer.Option("--port", help="The port of the service.")]
View = Annotated[str, typer.Argument(metavar="VIEW", help="The view: days, tags, or matches.")]
NamePattern = Annotated[
    str | None, typer.Option("--name", metavar="PATTERN", help="Only streams whose whole name matches, in RE2 syntax.")
]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The Kafka topic; it is created if need be.")]
Rule = Annotated[str, typer.Argument(metavar="NAME", help="The rule, as `tailrace folds ls` lists it.")]
GroupText = Annotated[
    str, typer.Argument(metavar="GROUP", help="A JSON array or object; any other text is the group's only part.")
]


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
    from tailrace.commands import parts

    raise typer.Exit(parts.stack(parts.load(config, port=port, folder=folder), demo=True))


@app.command()
def up(port: Port = None, folder: Folder = None, config: Config = None) -> None:
    """Run everything on this machine: Kafka, Valkey, the pipeline and the service."""
    from tailrace.commands import parts

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
    from tailrace.commands import parts

    raise typer.Exit(parts.pipeline(parts.load(config), views))


@app.command()
def serve(port: Port = None, config: Config = None) -> None:
    """Run the service: the views over HTTP."""
    from tailrace.commands import parts

    raise typer.Exit(parts.service(parts.load(config, port=port)))


@app.command()
def upkeep(config: Config = None, folder: Folder = None) -> None:
    """Pack, sweep and audit the views at the configured intervals, until it is stopped."""
    from tailrace.commands import parts, upkeep

    raise typer.Exit(upkeep.run(parts.load(config, folder=folder)))


@app.command()
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
    from tailrace.commands import parts, upkeep

    settings = parts.load(config, folder=folder)
    raise typer.Exit(upkeep.pack(settings, view, name, dry_run=dry_run, wait_s=wait, json=json))


@app.command()
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
    from tailrace.commands import parts, upkeep

    settings = parts.load(config, folder=folder)
    raise typer.Exit(upkeep.sweep(settings, view, name, dry_run=dry_run, wait_s=wait, json=json))


@app.command()
def audit(
    view: View = "days",
    name: NamePattern = None,
    keys: Annotated[bool, typer.Option("--keys", help="Also look through all keys for some that nobody owns.")] = False,
    json: Json = False,
    folder: Folder = None,
    config: Config = None,
) -> None:
    """Compare a view with Kafka and with its own registries. Exit code 1 if something is wrong."""
    from tailrace.commands import parts, repair

    settings = parts.load(config, folder=folder)
    raise typer.Exit(repair.audit(settings, view, name, keys=keys, json=json))


@app.command()
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
    from tailrace.commands import parts, repair

    settings = parts.load(config, folder=folder)
    raise typer.Exit(repair.rebuild(settings, view, name, day, dry_run=dry_run, wait_s=wait, json=json))


app.command()(retag)


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
    from tailrace.commands import write

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
    from tailrace.commands import follow

    asked = follow.Request(names, start, after, limit, not ends, until, missing, on_gap, url)
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
    from tailrace.commands import grep

    given = (query or [], key, start, after, limit, until, ends, follow, count, invert, names, client, missing, on_gap)
    raise typer.Exit(grep.grep(grep.Request(topics, *given, json, url)))


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
    from tailrace.commands import listings

    listings.streams(prefix, limit, top=top, memory=memory, json=json, url=url)


@streams.command("days")
def streams_days(
    name: Annotated[str, typer.Argument(metavar="NAME")], json: Json = False, url: Url = DEFAULT_URL
) -> None:
    """List the days of a stream."""
    from tailrace.commands import listings

    listings.days(name, json=json, url=url)


@folds.command("ls")
def folds_ls(json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List the rules: their windows, what they hold and how much they fold."""
    from tailrace.commands import folds

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
    from tailrace.commands import folds, follow

    asked = follow.Request([], start, after, limit, not ends, until, missing, on_gap, url)
    raise typer.Exit(folds.tail(name, asked, json=json))


@folds.command("pending")
def folds_pending(name: Rule, limit: Most = None, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List the groups that hold folds, the first due first."""
    from tailrace.commands import folds

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
    from tailrace.commands import folds

    folds.flush(name, group, everything=everything, json=json, url=url)


@folds.command("delete")
def folds_delete(name: Rule, group: GroupText, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Drop the folds of a group: they are given out with the reason deleted."""
    from tailrace.commands import folds

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
    from tailrace.commands import folds

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
    from tailrace.commands import parts, tune

    settings = parts.load(config, folder=folder)
    raise typer.Exit(tune.tune(settings, name, since=since, windows=windows or [], json=json, plot=plot))


@app.command()
def status(json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Show rates, lag, batch time and health of every part."""
    from tailrace.commands import listings

    listings.status(json=json, url=url)


@settings.command("show")
def config_show(
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value came from.")] = False,
    config: Config = None,
) -> None:
    """Print the settings in force as TOML; secrets are hidden."""
    from tailrace.commands import parts

    parts.show(parts.load(config), origin=origin)


@settings.command("check")
def config_check(config: Config = None) -> None:
    """Say what is wrong with the settings, if anything."""
    from tailrace.commands import parts

    parts.check(parts.load(config))


@settings.command("reference")
def config_reference() -> None:
    """Print every setting with its meaning and its default."""
    from tailrace.config import REFERENCE

    sys.stdout.write(REFERENCE.read_text("utf-8"))


@app.command()
def doctor(config: Config = None) -> None:
    """Check this machine and the parts, and say what to do."""
    from tailrace.commands import parts

    raise typer.Exit(parts.examine(parts.load(config)))


@app.command()
def version() -> None:
    """Print the version."""
    from tailrace import __version__

    print(__version__)

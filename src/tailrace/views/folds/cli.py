"""The commands ``tailrace folds``: rules and pending groups, their changes, and a trial of other windows on the past.

``tune`` prints a line for each candidate and then a summary, and draws the curves if asked. A candidate is a quiet
period; its ``max_wait`` has the configured proportion to it, ``max_count`` and ``max_bytes`` are as configured.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.command import (
    DEFAULT_URL,
    FeedOptions,
    Json,
    Limit,
    StackOptions,
    Url,
    ask,
    grouped,
    is_plain,
    needs,
    percent,
    print_lines,
    print_rows,
    print_summary,
    print_table,
    second,
    size,
    visible,
)
from tailrace.cli.follow import Printer, follow
from tailrace.errors import BadRequest, RuleNotFound

if TYPE_CHECKING:
    from tailrace.api.answers import EmittedFolds
    from tailrace.client.river import Group
    from tailrace.config.settings import Settings

PICTURES = (".png", ".svg")
GROUP_HELP = "A JSON array or object; any other text is the group's only part."

folds = typer.Typer(help="Fold rules, and the groups that they hold.", no_args_is_help=True)

Rule = Annotated[str, typer.Argument(metavar="NAME", help="The rule, as `tailrace folds ls` lists it.")]


def add_commands(app: typer.Typer) -> None:
    app.add_typer(folds, name="folds")


@folds.command("ls")
def folds_ls(json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List the rules with their windows, pending groups and folding ratios."""
    print_rows(
        ask(url, lambda river: river.fold_rules()),
        {
            "rule": lambda rule: rule.name,
            "quiet / wait": lambda rule: f"{rule.windows.quiet} / {rule.windows.max_wait}",
            "pending": lambda rule: rule.pending,
            "events": lambda rule: rule.input,
            "folds": lambda rule: rule.emitted,
            "folded": lambda rule: percent(rule.ratio),
            "since set": lambda rule: percent(rule.since.ratio) if rule.since else "",
            "premature": lambda rule: rule.premature,
        },
        json=json,
    )


@folds.command("tail")
@grouped
def folds_tail(name: Rule, *, feed: FeedOptions) -> None:
    """Follow the folded events of a rule."""
    rules = ask(feed.url, lambda river: river.fold_rules())
    stream = next((rule.stream for rule in rules if rule.name == name), None)
    if stream is None:
        raise RuleNotFound(name)
    raise typer.Exit(follow(Printer([stream], feed)))


@folds.command("pending")
def folds_pending(name: Rule, limit: Limit = None, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List the groups with open folds, in the order in which they are due."""
    import msgspec

    def group(payload: bytes) -> str:
        """Write a group as ``flush`` reads it."""
        return msgspec.json.encode([*msgspec.json.decode(payload, type=dict[str, msgspec.Raw]).values()]).decode()

    print_rows(
        ask(url, lambda river: river.pending(name, limit)),
        {
            "group": lambda row: group(row.payload),
            "folds": lambda row: row.folds,
            "events": lambda row: row.count,
            "bytes": lambda row: size(row.bytes),
            "last event": lambda row: second(row.last),
            "due": lambda row: second(row.due),
        },
        json=json,
    )


@folds.command("flush")
def folds_flush(
    name: Rule,
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help=GROUP_HELP)] = None,
    everything: Annotated[bool, typer.Option("--all", help="All groups.")] = False,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Emit the folds of a group now."""
    if everything == (group is not None):
        raise BadRequest("give either a group or --all")
    wanted = None if group is None else read_group(group)
    done = ask(url, lambda river: river.flush_all(name) if wanted is None else river.flush(name, wanted))
    _print_done(done, "emitted", json=json)


@folds.command("delete")
def folds_delete(
    name: Rule,
    group: Annotated[str, typer.Argument(metavar="GROUP", help=GROUP_HELP)],
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Drop the folds of a group: they are emitted with the reason deleted."""
    wanted = read_group(group)
    _print_done(ask(url, lambda river: river.delete(name, wanted)), "deleted", json=json)


def read_group(text: str) -> Group:
    """Read a group from the command line: a JSON array or object, or else a text that is its only part."""
    import msgspec

    if text[:1] not in ("[", "{"):
        return text
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        as_json = msgspec.json.encode([text]).decode()
        raise BadRequest(f"the group {text!r} is no JSON ({error}): if it is a text, write {as_json!r}") from None
    return msgspec.Raw(text)


def _print_done(done: EmittedFolds, verb: str, *, json: bool) -> None:
    if is_plain(json):
        print_lines([done])
        return
    for fold in done.folds:
        print(visible(fold))
    print(f"{len(done.folds):,} fold(s) of {done.groups:,} group(s) {verb}", file=sys.stderr)


@folds.command("set")
def folds_set(
    name: Rule,
    quiet: Annotated[str | None, typer.Option("--quiet", help="Emit after this long without events.")] = None,
    max_wait: Annotated[str | None, typer.Option("--max-wait", help="Emit this long after the first event.")] = None,
    max_count: Annotated[int | None, typer.Option("--max-count", help="Emit at this many events.")] = None,
    max_bytes: Annotated[str | None, typer.Option("--max-bytes", help="Emit at this many bytes.")] = None,
    lateness: Annotated[str | None, typer.Option("--lateness", help="Wait this long for late events.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Take the windows from the configuration again.")] = False,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Change the windows of a rule while it runs."""
    import msgspec

    windows: dict[str, str | int | None] = {
        "quiet": quiet,
        "max_wait": max_wait,
        "max_count": max_count,
        "max_bytes": max_bytes,
        "lateness": lateness,
    }
    changes = {key: value for key, value in windows.items() if value is not None}
    if reset == bool(changes):
        raise BadRequest("give either some windows, such as --quiet 5s, or --reset")
    answer = ask(url, lambda river: river.reset_windows(name) if reset else river.set_windows(name, **changes))
    if is_plain(json):
        print_lines([answer])
    else:
        print_table(answer.__struct_fields__, [[str(value) for value in msgspec.structs.astuple(answer)]])


@folds.command("tune")
@grouped
def folds_tune(
    name: Rule,
    since: Annotated[str, typer.Option("--since", metavar="POSITION", help="How far back to read.")] = "-7d",
    windows: Annotated[
        list[str] | None, typer.Option("--window", metavar="DURATION", help="A quiet period to try; may be repeated.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it: .png or .svg.")] = None,
    *,
    stack: StackOptions,
) -> None:
    """Say how much would have been folded, and how late, with other quiet periods."""
    run_tune(stack.settings(), name, since=since, windows=windows or [], json=stack.json, plot=plot)


def run_tune(
    settings: Settings,
    rule: str,
    *,
    since: str,
    windows: Sequence[str],
    json: bool,
    plot: Path | None,
    spark: Any = None,
) -> None:
    """Print the result of each window on the events since a time; draw it to ``plot``, as PNG or SVG by its name.

    Everything that can be wrong with the request is refused before Spark starts.
    """
    with needs("spark"):
        from tailrace.cli.upkeep import step_aside
        from tailrace.config.values import format_duration
        from tailrace.log.event import iso_time, parse_time
        from tailrace.upkeep.job import now_ms
        from tailrace.views.folds.tune import tune

    def duration(ms: int) -> str:
        return format_duration(timedelta(milliseconds=ms))

    since_ms = parse_time(since, now_ms())
    quiets = [quiet_ms(text) for text in windows]
    if plot is not None:
        if plot.suffix.lower() not in PICTURES:
            raise BadRequest(f"cannot draw to {str(plot)!r}: a name that ends in {' or '.join(PICTURES)}")
        if not plot.parent.is_dir():
            raise BadRequest(f"cannot draw to {str(plot)!r}: there is no folder {str(plot.parent)!r}")
        with needs("plot"):
            import matplotlib  # noqa: F401
    if spark is None:
        step_aside()
    tuned = tune(settings, rule, since_ms=since_ms, quiets_ms=quiets, spark=spark)
    configured = tuned.rule.windows
    # A delay is from an event's time to the due time of its fold.
    rows: list[dict[str, Any]] = [
        {
            "rule": rule,
            "quiet": duration(tried.quiet_ms),
            "max_wait": duration(tried.max_wait_ms),
            "configured": tried == configured,
            "inputs": figures.inputs,
            "folds": figures.folds,
            "ratio": figures.ratio,
            "delay_mean_ms": round(figures.mean_ms, 1),
            "delay_p50_ms": figures.percentile_ms(0.5),
            "delay_p99_ms": figures.percentile_ms(0.99),
            "premature": figures.premature,
            "reasons": figures.reasons,
            "quiet_ms": tried.quiet_ms,
        }
        for tried, figures in tuned.figures
    ]
    print_rows(
        rows,
        {
            "quiet": lambda row: row["quiet"],
            "max wait": lambda row: row["max_wait"],
            "folds": lambda row: row["folds"],
            "ratio": lambda row: f"{100 * row['ratio']:.2f}%",
            "mean delay": lambda row: f"{row['delay_mean_ms'] / 1000:,.3f}s",
            "p50": lambda row: f"{row['delay_p50_ms'] / 1000:,.3f}s",
            "p99": lambda row: f"{row['delay_p99_ms'] / 1000:,.3f}s",
            "premature": lambda row: row["premature"],
            "": lambda row: "configured" if row["configured"] else "",
        },
        json=json,
    )
    if plot is not None:
        draw(rows, plot)
    facts = {
        "job": "tune",
        "rule": rule,
        "clock": tuned.rule.clock,
        "since": iso_time(since_ms),
        "records": tuned.records,
        "left_out": tuned.left_out,
        "max_wait_per_quiet": round(configured.max_wait_ms / configured.quiet_ms, 3),
        "max_count": configured.max_count,
        "max_bytes": configured.max_bytes,
        "seconds": tuned.seconds,
    }
    print_summary(facts if plot is None else {**facts, "plot": str(plot)}, json=json)


def quiet_ms(text: str) -> int:
    """Read a quiet period to try; BadRequest if the text is no duration, or one below a millisecond."""
    from tailrace.config.values import parse_duration

    try:
        duration = parse_duration(text) // timedelta(milliseconds=1)
    except ValueError as error:
        raise BadRequest(f"cannot read window {text[:80]!r}: {error}") from None
    if duration < 1:
        raise BadRequest(f"window {text!r} is too short: 1ms or longer")
    return duration


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw ratio and delays against the window, one above the other."""
    from matplotlib.figure import Figure

    windows = [row["quiet_ms"] / 1000 for row in rows]
    (configured,) = [row["quiet_ms"] / 1000 for row in rows if row["configured"]]
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(windows, [100 * row["ratio"] for row in rows], marker="o", label="folding ratio")
    above.set_ylabel("ratio (%)")
    above.set_title(f"{rows[0]['rule']}: {rows[0]['inputs']:,} events")
    for label in ("p99", "mean", "p50"):
        # A logarithmic axis cannot show 0; times are in whole milliseconds, so draw less than one as one.
        delays = [max(row[f"delay_{label}_ms"], 1) / 1000 for row in rows]
        below.plot(windows, delays, marker="o", label=label)
    below.set_ylabel("added delay (s)")
    below.set_xlabel("quiet")
    below.set_xscale("log")
    below.set_yscale("log")
    below.set_xticks(windows, [row["quiet"] for row in rows], rotation=30)
    below.set_xticks([], minor=True)
    for axes in (above, below):
        axes.axvline(configured, color="grey", linestyle=":", label="configured")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    try:
        figure.savefig(file)
    except OSError as error:
        raise BadRequest(f"cannot write {file}: {error.strerror}") from None

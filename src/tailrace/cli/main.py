"""The command ``tailrace``: its own commands, and those that each view adds.

A command's signature is its options. Its body imports what it needs, so that ``--help`` is quick and works without
Spark, Kafka or a web framework installed. Data goes to standard output, everything else to standard error. Exit codes:
0 done, 1 failed, 2 wrong usage, 130 stopped with Ctrl-C; ``grep`` has those of grep(1).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer

from tailrace.cli.command import (
    DEFAULT_URL,
    Config,
    Folder,
    Json,
    Url,
    ask,
    cell,
    is_plain,
    load_settings,
    needs,
    percent,
    print_lines,
    print_table,
    second,
    size,
)
from tailrace.cli.command import run as run_to_end
from tailrace.cli.upkeep import audit, pack, rebuild, sweep, upkeep
from tailrace.errors import ConfigError, TailraceError
from tailrace.views import VIEWS

Port = Annotated[int | None, typer.Option("--port", help="Port of the service.")]

app = typer.Typer(
    help="Follow Kafka's JSON events as streams that can be resumed exactly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config = typer.Typer(help="Show and check the configuration.", no_args_is_help=True)


def main() -> None:
    try:
        app(prog_name="tailrace")
    except TailraceError as error:
        print(f"error: {error} ({error.code})", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def demo(port: Port = None, folder: Folder = None, config: Config = None) -> None:
    """Run everything on this machine, with sample events."""
    settings = load_settings(config, port=port, folder=folder)
    with needs("embedded"):
        from rich.console import Console

        from tailrace.embedded.stack import run_stack
    from tailrace.demo import cars, example_name, examples, with_rule, with_tags

    code = run_stack(
        cars.with_sessions(with_tags(with_rule(settings))),
        demo=True,
        console=Console(),
        example=example_name(settings.demo),
        searches=examples(settings),
        pages=cars.pages(settings),
    )
    raise typer.Exit(code)


def up(port: Port = None, folder: Folder = None, config: Config = None) -> None:
    """Run everything on this machine: Kafka, Valkey, the pipeline and the service."""
    settings = load_settings(config, port=port, folder=folder)
    with needs("embedded"):
        from rich.console import Console

        from tailrace.embedded.stack import run_stack
    raise typer.Exit(run_stack(settings, demo=False, console=Console()))


def run(
    views: Annotated[
        str | None,
        typer.Option(
            "--views", help="Only these of the configured views, separated by commas; another process runs the others."
        ),
    ] = None,
    config: Config = None,
) -> None:
    """Run the pipeline: from Kafka into the views."""
    settings = load_settings(config)
    chosen = tuple(name.strip() for name in views.split(",")) if views else None
    if chosen and (unknown := set(chosen) - set(settings.pipeline.views)):
        raise ConfigError(
            f"--views names {', '.join(sorted(unknown))}, which pipeline.views does not have: "
            f"it has {', '.join(settings.pipeline.views)}"
        )
    with needs("spark"):
        from tailrace.driver.job import main
    raise typer.Exit(main(settings, VIEWS, chosen))


def serve(port: Port = None, config: Config = None) -> None:
    """Run the service: the views over HTTP."""
    settings = load_settings(config, port=port)
    with needs("serve"):
        from tailrace.http.app import main
    raise typer.Exit(main(settings, VIEWS))


def put(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Kafka topic; it is created if it does not exist.")],
    batch: Annotated[int, typer.Option("--batch", min=1, max=10_000, help="Most events in one request.")] = 1_000,
    json: Annotated[bool, typer.Option("-J", "--json", help="Print where each event was written.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Write events from standard input, one JSON object per line.

    A line is {"key": [...], "value": {...}, "headers": {...}, "time": "...Z"}; only the value is needed.
    """
    import time

    from tailrace.cli.put import InputWriter

    writer = InputWriter(topic, batch, prints_ids=json)
    began = time.monotonic()
    try:
        run_to_end(writer.run(url))
    finally:
        seconds = time.monotonic() - began
        print(f"{writer.written:,} events written to {topic} in {seconds:.1f} s", file=sys.stderr)


FIGURES = (
    "rate", "lag", "take_ms", "busy", "in", "stored", "skipped", "dead", "expired", "unaccounted", "outbox", "restarts",
)  # fmt: skip
"""Fields of a view's report that ``status`` shows."""


def status(json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Show rates, lag, take time and health of every part."""
    answer = ask(url, lambda river: river.status())
    if is_plain(json):
        print_lines([answer])
        return

    def rows(of: str) -> list[dict[str, Any]]:
        return [row for row in answer.get(of, ()) if isinstance(row, dict)]

    def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        print_table(titles, [[cell(value) for value in row] for row in rows])

    def detail(part: dict[str, Any]) -> str:
        return " ".join(f"{name}={value}" for name, value in part.items() if name not in ("name", "state"))

    table(("part", "state", ""), [(part.get("name"), part.get("state"), detail(part)) for part in rows("parts")])
    views = {name: view for name, view in answer.get("views", {}).items() if isinstance(view, dict)}
    table(("view", *views), [(key.replace("_", " "), *(view.get(key) for view in views.values())) for key in FIGURES])
    if jobs := rows("upkeep"):
        table(("upkeep", "view", "last run", "took", "state", ""), map(_job_row, jobs))
    searches = answer.get("searches") or {}
    if searches.get("alive"):
        figures = [searches.get(key) for key in ("alive", "followers", "scanning")]
        table(("searches", "followers", "scans waiting"), [figures])
    if rules := rows("folds"):
        shown = [(rule.get("rule"), rule.get("pending"), percent(rule.get("ratio"))) for rule in rules]
        table(("folds", "pending", "folded"), shown)
    if gaps := next(iter(views.values()), {}).get("gaps", ()):
        titles = "dropped by Kafka before it was read", "from offset", "until"
        table(titles, [[gap.get(key) for key in ("source", "first", "until")] for gap in gaps])


def _job_row(job: dict[str, Any]) -> tuple[object, ...]:
    took = "" if job.get("seconds") is None else f"{job['seconds']:,.1f}s"
    overdue = "overdue" if job.get("overdue") else ""
    result = f"failed: {job['error']}" if job.get("error") else "" if job.get("started") else "has not run"
    figures = [
        f"{key.replace('_', ' ')} {size(value) if 'bytes' in key and isinstance(value, int) else cell(value)}"
        for key, value in (job.get("figures") or {}).items()
        if value
    ]
    state = ", ".join(filter(None, (overdue, result))) or "ok"
    return job.get("job"), job.get("view"), second(job.get("ended")), took, state, ", ".join(figures)


@config.command("show")
def config_show(
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    config: Config = None,
) -> None:
    """Print the settings as TOML; secrets are hidden."""
    from itertools import groupby

    rows = load_settings(config).show()
    width = max(len(row.path.partition(".")[2] + row.value) for row in rows if len(row.value) < 60) + 3
    for section, group in groupby(rows, key=lambda row: row.path.partition(".")[0]):
        print(f"[{section}]")
        for row in group:
            line = f"{row.path.partition('.')[2]} = {row.value}"
            print(f"{line:<{width}}  # {row.origin}" if origin else line)
        print()


@config.command("check")
def config_check(config: Config = None) -> None:
    """Check the settings, and say what is wrong with them."""
    rows = load_settings(config).show()
    files = {row.origin for row in rows if row.origin.startswith("file ")}
    print(f"ok: {len(rows)} settings" + "".join(f", {file}" for file in sorted(files)), file=sys.stderr)


@config.command("reference")
def config_reference() -> None:
    """Print every setting with its meaning and its default."""
    from tailrace.config.settings import REFERENCE

    sys.stdout.write(REFERENCE.read_text("utf-8"))


def doctor(config: Config = None) -> None:
    """Check this machine and the parts, and say what to do."""
    settings = load_settings(config)
    with needs("embedded"):
        from rich.console import Console

        from tailrace.cli.doctor import checks, render
    raise typer.Exit(render(checks(settings), Console()))


def version() -> None:
    """Print the version."""
    from tailrace import __version__

    print(__version__)


def _add_commands() -> None:
    first: list[Callable[..., None]] = [demo, up, run, serve, put]
    last: list[Callable[..., None]] = [status, upkeep, pack, sweep, audit, rebuild, doctor, version]
    for command in first:
        app.command()(command)
    for view in VIEWS:
        view.commands(app)
    for command in last:
        app.command()(command)
    app.add_typer(config, name="config")


_add_commands()

"""Base of the commands: their options, their requests to the service, and the printing of answers.

An alias such as ``Json`` is one option as typer reads it. A group such as ``FeedOptions`` is a set of options that many
commands have: ``@grouped`` lets a command take a group as one parameter while typer sees its fields.

Answers are JSON lines for programs, tables for people; messages go to standard error. Text from events, names and
errors reaches a terminal only through ``visible``. Everything heavy is imported where it is used: this module is loaded
by every start of ``tailrace``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import re
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tailrace.errors import PrerequisiteMissing

if TYPE_CHECKING:
    import msgspec

    from tailrace.client.river import River
    from tailrace.config.settings import Settings

T = TypeVar("T")

UNBROKEN = 24
"""Longest cell, in characters, that is never broken over lines: the length of a time."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_NUMBER = re.compile(r"-?[\d,]+(\.\d+)?( ?([kMG]?B|m?s|%))?")

DEFAULT_URL = "http://127.0.0.1:7070"

Url = Annotated[str, typer.Option("--url", envvar="TAILRACE_URL", help="Address of the service.")]
Json = Annotated[bool, typer.Option("-J", "--json", help="Print JSON, one object per line, also on a terminal.")]
Limit = Annotated[int | None, typer.Option("-n", "--max", min=1, help="At most this many.")]
Client = Annotated[
    str | None,
    typer.Option("--client", help="Name of this reader: its position is stored, and the next run continues there."),
]
Config = Annotated[Path | None, typer.Option("--config", help="Configuration file.", metavar="FILE")]
Folder = Annotated[Path | None, typer.Option("--dir", help="Folder for data and logs.", metavar="DIR")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")]
Wait = Annotated[
    float, typer.Option("--wait", min=0, metavar="SECONDS", help="How long to wait for another upkeep job to end.")
]


@dataclass(frozen=True)
class FeedOptions:
    """Options of every command that follows a feed."""

    start: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--from",
            metavar="POSITION",
            help="Where to begin: start, end, -N (the last N events), a time, -1h or a cursor. "
            "Default: end; with -e start.",
        ),
    ] = None
    after: Annotated[str | None, typer.Option("--after", metavar="CURSOR", help="Begin after this cursor.")] = None
    limit: Limit = None
    ends: Annotated[bool, typer.Option("-e", "--exit", help="Stop at the last event there is.")] = False
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Stop after this time.")] = None
    json: Json = False
    on_gap: Annotated[str, typer.Option("--on-gap", help="If events are gone: skip or fail.")] = "skip"
    missing: Annotated[str, typer.Option("--missing", help="If there is no such name: wait or fail.")] = "wait"
    url: Url = DEFAULT_URL


@dataclass(frozen=True)
class StackOptions:
    """Options of every command that works on Kafka and the stores itself, without the service."""

    json: Json = False
    folder: Folder = None
    config: Config = None

    def settings(self) -> Settings:
        """Return the settings; addresses that are not configured are those of the stack that runs in the folder."""
        return at_stack(load_settings(self.config, folder=self.folder))


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see the fields of each group that the command has as a parameter."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if dataclasses.is_dataclass(parameter.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        own = inspect.signature(groups[name], eval_str=True).parameters.values() if name in groups else [parameter]
        parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]

    @functools.wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def load_settings(file: Path | None, *, port: int | None = None, folder: Path | None = None) -> Settings:
    """Read the settings with these flags on top, and print their warnings to standard error."""
    from tailrace.config.settings import load

    settings = load(file, {"serve.port": port, "embedded.dir": None if folder is None else str(folder)})
    for warning in settings.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    return settings


def at_stack(settings: Settings, *, always: bool = False) -> Settings:
    """Return settings that reach the stack of ``embedded.dir`` while it runs.

    Configured addresses of Kafka, Valkey and Cassandra stay, unless ``always``; others become the stack's own.
    """
    try:
        from tailrace.embedded.process import last_ports, lock_holder
        from tailrace.embedded.stack import PORTS_FILE, at_servers
    except ImportError:
        return settings
    folder = Path(settings.embedded.dir)
    if lock_holder(folder) is None:
        return settings
    addresses = {"kafka": "kafka.bootstrap", "valkey": "valkey.url", "cassandra": "cassandra.port"}
    ports = last_ports(folder / PORTS_FILE)
    moved = [part for part, path in addresses.items() if always or settings.origin(path) == "default"]
    return at_servers(settings, {part: ports[part] for part in moved if part in ports})


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Import packages of an extra inside; say which extra to install if one of them is missing."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "tailrace":
            raise
        raise PrerequisiteMissing(f"this command needs {error.name}: install tailrace[{extra}]") from None


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end or to Ctrl-C, also if the parent process ignores SIGINT and we inherited that."""
    import asyncio

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return asyncio.run(coroutine)


def ask(url: str, question: Callable[[River], Awaitable[T]]) -> T:
    """Connect to the service, ask one question, and return the answer."""
    from tailrace.client.river import connect

    async def answer() -> T:
        async with connect(url) as river:
            return await question(river)

    return run(answer())


def is_plain(json: bool) -> bool:
    """Return True if JSON lines are to be printed: the user asked for them, or standard output is no terminal."""
    return json or not sys.stdout.isatty()


def print_lines(rows: Iterable[object]) -> None:
    """Print each row as a line of JSON."""
    import msgspec

    sys.stdout.buffer.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    sys.stdout.buffer.flush()


def print_rows(rows: Sequence[T], columns: Mapping[str, Callable[[T], object]], *, json: bool) -> None:
    """Print rows as JSON lines or as a table; a column is its title and the function that returns its value."""
    if is_plain(json):
        print_lines(rows)
    else:
        print_table(tuple(columns), [tuple(cell(value(row)) for value in columns.values()) for row in rows])


def print_structs(rows: Sequence[msgspec.Struct], *, json: bool) -> None:
    """Print structs of one class as JSON lines, or as a table with a column for each field, if there are any."""
    if rows or is_plain(json):
        names = rows[0].__struct_fields__ if rows else ()
        print_rows(rows, {name: attrgetter(name) for name in names}, json=json)


def print_summary(facts: Mapping[str, object], *, json: bool) -> None:
    """Print the result of a command as one line of JSON, or as a table with a row for each fact."""
    if is_plain(json):
        print_lines([facts])
    else:
        print_table(("", ""), [(name.replace("_", " "), _fact(value)) for name, value in facts.items()])


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table for people; it has no heading if all titles are empty.

    Where the terminal is narrow, the first column (the name) and long texts are broken over lines. Times and numbers
    are not.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    screen = shutil.get_terminal_size()
    console = Console(width=screen.columns, height=screen.lines)  # rich would take 80 columns for a dumb terminal
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    cells = [[visible(text) for text in column] for column in zip(*rows, strict=True)] or [[] for _ in columns]
    longest = [max(map(len, column), default=0) for column in cells]
    is_narrow = sum(max(*sizes) + 3 for sizes in zip(longest, map(len, columns), strict=True)) > console.width
    for at, (title, column) in enumerate(zip(columns, cells, strict=True)):
        is_number = any(column) and all(_NUMBER.fullmatch(text) for text in column if text)
        is_fixed = is_narrow and at > 0 and longest[at] <= UNBROKEN
        width = max([longest[at], *map(len, title.split())]) if is_fixed else None
        table.add_column(title, width=width, overflow="fold", justify="right" if is_number else "left")
    for row in zip(*cells, strict=True):
        table.add_row(*map(Text, row))
    console.print(table)


def cell(value: object) -> str:
    """Write a value for a table: numbers in groups of three digits, a list as its length, None as nothing."""
    if isinstance(value, list):
        return f"{len(value):,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {cell(each)}" for name, each in value.items()) or "0"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,.1f}".removesuffix(".0")
    return "" if value is None else str(value)


def size(value: int | None) -> str:
    """Write a number of bytes with its unit, as in 98.8kB; None as nothing."""
    if value is None:
        return ""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if value >= factor:
            return f"{value / factor:.1f}{unit}"
    return f"{value}B"


def percent(ratio: float | None) -> str:
    """Write a ratio as in 92.0%; None as nothing."""
    return "" if ratio is None else f"{ratio * 100:.1f}%"


def second(time: str | None) -> str:
    """Write an ISO time to the second, as in 2026-11-15 08:00:00; None as nothing."""
    return (time or "").partition(".")[0].replace("T", " ")


def visible(text: str) -> str:
    """Replace control characters by escapes, so that the text cannot steer a terminal."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class Messages(logging.Handler):
    """Standard error: messages and log records, and on a terminal one line of progress below them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._is_watched = sys.stderr.isatty()
        self._width = 0  # of the progress line on the screen

    def say(self, text: str) -> None:
        self.clear()
        print("\n".join(map(visible, text.split("\n"))), file=sys.stderr)

    def progress(self, text: str) -> None:
        if self._is_watched:
            text = text[: shutil.get_terminal_size().columns - 1]
            print(f"\r{text.ljust(self._width)}", end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def clear(self) -> None:
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)
            self._width = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.say(f"tailrace: {record.getMessage()}")


def _fact(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_fact(each)}" for name, each in value.items()) or "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else str(value)

"""Asking the service and printing its answers: JSON lines for programs, tables for people, messages to standard error.

Text from events, names and errors reaches a terminal only through ``visible``. Everything heavy is imported where it is
used: this module is loaded by every start of ``tailrace``.
"""

from __future__ import annotations

import logging
import re
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import msgspec

    from tailrace.client.river import River

T = TypeVar("T")

UNBROKEN = 24
"""Longest cell, in characters, that is never broken over lines: the length of a time."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_NUMBER = re.compile(r"-?[\d,]+(\.\d+)?( ?([kMG]?B|m?s|%))?")


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
        """Replace the progress line."""
        if self._is_watched:
            text = text[: shutil.get_terminal_size().columns - 1]
            print(f"\r{text.ljust(self._width)}", end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def clear(self) -> None:
        """Remove the progress line."""
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

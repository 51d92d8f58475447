"""Follows streams in a terminal or a pipe.

In a pipe every event is the line that the service sent, byte for byte. What was printed is what the cursor of the
resuming command says, so that stopping and resuming neither repeats nor skips.

How commands ask the service and print what it answers: JSON lines for programs, tables for people.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from tailrace.client.connection import DEFAULT_URL
from tailrace.client.following import Feed
from tailrace.client.river import River, connect
from tailrace.config.units import format_size

if TYPE_CHECKING:
    from tailrace.api import Control, Event
    from tailrace.client.following import FeedParameters


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class FollowOptions(NamedTuple):
    """What was asked on the command line."""

    names: list[str]
    start: str | None
    after: str | None
    limit: int | None
    follow: bool
    until: str | None
    missing: str
    on_gap: str
    url: str


def tail(asked: FollowOptions, *, json: bool) -> int:
    """Print events until the feed ends or Ctrl-C, and then how to go on."""
    return follow(Printer(asked, lines=json or not sys.stdout.isatty()), json=json)


def follow(printer: Printer, *, json: bool) -> int:
    """Let a printer print until its feed ends or Ctrl-C, and then how to go on; return the exit code."""
    _log_to_stderr()
    try:
        asyncio.run(printer.run())
    except KeyboardInterrupt:
        print(f"\nto go on: {printer.resume(json=json)}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has had enough; Python would complain when it flushes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 0


class Printer:
    """Prints one feed of day streams; other feeds are opened otherwise."""

    def __init__(self, asked: FollowOptions, *, lines: bool) -> None:
        self.asked = asked
        self.lines = lines
        self.printed = 0
        self.cursor = asked.after

    def open(self, river: River) -> Feed:
        return river.tail(*self.asked.names, **self.parameters())

    def parameters(self) -> FeedParameters:
        """What every feed takes."""
        asked = self.asked
        return {
            "after": asked.after,
            "start": asked.start,
            "until": asked.until,
            "limit": asked.limit,
            "follow": asked.follow,
            "missing": asked.missing,
            "on_gap": asked.on_gap,
            "on_control": self.tell,
        }

    async def run(self) -> None:
        async with connect(self.asked.url) as river:
            feed = self.open(river)
            try:
                await (self.pipe(feed) if self.lines else self.screen(feed))
            finally:
                self.cursor = feed.cursor

    async def pipe(self, feed: Feed) -> None:
        out = sys.stdout.buffer
        async for batch in feed.lines():
            out.write(b"\n".join(batch) + b"\n")
            out.flush()
            self.printed += len(batch)

    async def screen(self, feed: Feed) -> None:
        from rich.console import Console
        from rich.highlighter import JSONHighlighter
        from rich.text import Text

        console, colour = Console(), JSONHighlighter()
        async for event in feed:
            data = Text(visible(event.raw.decode("utf-8", "replace")))
            colour.highlight(data)
            late = ("late ", "yellow") if event.late else ("", "")
            console.print(
                Text.assemble((event.time, "dim"), " ", (self.name(event), "cyan"), " ", late, data), soft_wrap=True
            )
            self.printed += 1

    def name(self, event: Event) -> str:
        """What stands before an event on a terminal."""
        key = event.key
        return visible("/".join(map(str, key)) if isinstance(key, list) else str(key))

    def tell(self, control: Control) -> None:
        if control.kind == "problem":  # gaps are in the log of the client
            print(f"problem: {visible(str(control.data.get('detail', control.data)))}", file=sys.stderr)

    def words(self) -> list[str]:
        """The command, up to the names."""
        return ["tailrace", "tail"]

    def place(self, cursor: str) -> str:
        """The cursor of a new request."""
        return cursor.partition("~")[0]

    def resume(self, *, json: bool) -> str:
        """The command that goes on exactly where this one stopped."""
        asked = self.asked
        words = [*self.words(), *asked.names]
        if self.cursor is not None:
            words += ["--after", self.place(self.cursor)]
        elif asked.start is not None:
            words += ["--from", asked.start]
        words += ["-n", str(max(1, asked.limit - self.printed))] if asked.limit else []
        words += ["--until", asked.until] if asked.until else []
        words += [] if asked.follow else ["-e"]
        words += ["-J"] if json else []
        words += ["--on-gap", asked.on_gap] if asked.on_gap != "skip" else []
        words += ["--missing", asked.missing] if asked.missing != "wait" else []
        words += ["--url", asked.url] if asked.url != DEFAULT_URL else []
        return shlex.join(words)


def visible(text: str) -> str:
    """Text that cannot steer a terminal: control characters as escapes."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("tailrace: %(message)s"))
    logger = logging.getLogger("tailrace.client")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


T = TypeVar("T")

LONG = 40
"""Characters of a name from which on it may be broken over lines."""


def ask(url: str, question: Callable[[River], Awaitable[T]]) -> T:
    """Ask the service one question."""

    async def ask() -> T:
        async with connect(url) as river:
            return await question(river)

    return asyncio.run(ask())


def plain(json: bool) -> bool:
    """Whether to print JSON, one object per line: when it is wanted, and when nobody watches."""
    return json or not sys.stdout.isatty()


def lines(rows: Iterable[object]) -> None:
    """Print rows as JSON, one per line."""
    sys.stdout.buffer.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    sys.stdout.buffer.flush()


def size(value: int) -> str:
    """Write a number of bytes in few characters."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if value >= factor:
            return f"{value / factor:.1f}{unit}"
    return format_size(value)


def text(row: dict[str, Any], key: str) -> str:
    """Write a value of a row as a cell."""
    value = row.get(key)
    if isinstance(value, list):
        return f"{len(value):,}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {text(value, name)}" for name in value) or "0"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,.1f}".removesuffix(".0")
    return "" if value is None else str(value)


def table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table for people; what could steer their terminal is made visible."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    # The name is what people copy; a long one would leave no room for the rest.
    is_whole = all(len(row[0]) <= LONG for row in rows)
    for at, column in enumerate(columns):
        table.add_column(column, no_wrap=at == 0 and is_whole)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    Console().print(table)


def percent(ratio: float | None) -> str:
    """Write a ratio for people; nothing for none."""
    return "" if ratio is None else f"{ratio * 100:.1f}%"

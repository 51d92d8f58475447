"""How commands ask the service and print what it answers: JSON lines for programs, tables for people."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from tailrace.cli.follow import visible
from tailrace.client import River, connect
from tailrace.config.units import format_size

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

"""Base of every measurement: CPU time of whole process trees, and one way to print results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table


def cpu_seconds(roots: Iterable[int]) -> float:
    """Return the CPU time that processes and all their children, ended ones too, have used; each process once."""
    family: set[psutil.Process] = set()
    for root in roots:
        try:
            process = psutil.Process(root)
            family |= {process, *process.children(recursive=True)}
        except psutil.NoSuchProcess:
            continue
    total = 0.0
    for process in family:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def report(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print results as JSON lines on standard output and as a table on standard error."""
    for row in rows:
        print(json.dumps(row), flush=True)
    if not rows:
        return
    table = Table(title=title)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for column in columns:
        table.add_column(column, justify="left" if isinstance(rows[0].get(column), str) else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    Console(file=sys.stderr, width=140).print(table)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of all values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value if value is not None else "")

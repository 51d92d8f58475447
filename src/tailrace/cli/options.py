"""Options that commands of several files share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:7070"

Url = Annotated[str, typer.Option("--url", envvar="TAILRACE_URL", help="Where the service is.")]
Json = Annotated[bool, typer.Option("-J", "--json", help="JSON, one object per line, also on a terminal.")]
Most = Annotated[int | None, typer.Option("-n", "--max", min=1, help="So many at most.")]
Start = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--from",
        metavar="PLACE",
        help="start, end, -N (the last N), a time, -1h or a cursor. Default: end; with -e start.",
    ),
]
After = Annotated[str | None, typer.Option("--after", metavar="CURSOR", help="Begin after this cursor.")]
Ends = Annotated[bool, typer.Option("-e", "--exit", help="End at the last event there is.")]
Until = Annotated[str | None, typer.Option("--until", metavar="TIME", help="End after this time.")]
OnGap = Annotated[str, typer.Option("--on-gap", help="What to do when events are gone: skip or fail.")]
Missing = Annotated[str, typer.Option("--missing", help="What to do when there is no such name: wait or fail.")]
Config = Annotated[Path | None, typer.Option("--config", help="The configuration file.", metavar="FILE")]
Folder = Annotated[Path | None, typer.Option("--dir", help="The folder for data and logs.", metavar="DIR")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Wait = Annotated[
    float, typer.Option("--wait", min=0, metavar="SECONDS", help="How long to wait for other upkeep to end.")
]

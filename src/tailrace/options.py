"""Options that commands of several files share."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:7070"

Url = Annotated[str, typer.Option("--url", envvar="TAILRACE_URL", help="Where the service is.")]
Json = Annotated[bool, typer.Option("-J", "--json", help="JSON, one object per line, also on a terminal.")]
Most = Annotated[int | None, typer.Option("-n", "--max", min=1, help="So many at most.")]

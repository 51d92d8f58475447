"""What the commands do, one file per kind, each imported when its command is called."""

from __future__ import annotations

import sys

# If click is installed, httpx loads a command line of its own: 0.2 s at every start, for nothing that a command uses.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]

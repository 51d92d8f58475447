"""Follow Kafka's JSON events as streams that can be resumed exactly.

    async with tailrace.connect("http://127.0.0.1:7070") as river:
        async for event in river.tail("jobs/nightly"):
            print(event.id, event.data)

Importing this package loads nothing else; each name loads its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.api.answers import Burst, Event
    from tailrace.client.connection import Feed
    from tailrace.client.river import River, connect
    from tailrace.errors import TailraceError
    from tailrace.views.folds.write import Folder
    from tailrace.views.sessions.writer import SessionWriter

__version__ = "0.1.0"

__all__ = ["Burst", "Event", "Feed", "Folder", "River", "SessionWriter", "TailraceError", "__version__", "connect"]

_HOMES = {
    "Burst": "tailrace.api.answers",
    "Event": "tailrace.api.answers",
    "Feed": "tailrace.client.connection",
    "Folder": "tailrace.views.folds.write",
    "River": "tailrace.client.river",
    "SessionWriter": "tailrace.views.sessions.writer",
    "TailraceError": "tailrace.errors",
    "connect": "tailrace.client.river",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tailrace' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

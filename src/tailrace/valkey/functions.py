"""The Lua functions that change a shard, and the version under which they are loaded.

The version is a digest of their text and part of every function's name, so a new release never changes what a running
driver of the old one calls.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files

# One library, so one text: the later parts use what the first defines.
_PARTS = ("tailrace.lua", "folds.lua", "tags.lua", "apply.lua", "upkeep.lua", "searches.lua", "sessions.lua")
_SOURCE = "\n".join((files(__package__) / name).read_text() for name in _PARTS)

VERSION = sha256(_SOURCE.encode()).hexdigest()[:10]
LIBRARY = f"tailrace_{VERSION}"
CODE = f"#!lua name={LIBRARY}\n" + _SOURCE.replace("VERSION", VERSION)


def function(name: str) -> str:
    """Return the loaded name of one of our functions."""
    return f"tailrace_{name}_{VERSION}"

"""The Lua functions that change a shard, and the version under which they are loaded.

The version is a digest of their text and part of every function's name, so a new release never changes what a running
driver of the old one calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from importlib.resources import files


def _read_parts() -> Iterator[str]:
    """Yield the parts of the library in the order in which they use each other: ``apply`` calls what views define."""
    package = files("tailrace")
    core = package / "valkey" / "functions"
    yield (core / "tailrace.lua").read_text()
    for view in sorted((package / "views").iterdir(), key=lambda each: each.name):
        if view.is_dir():
            for part in sorted(view.iterdir(), key=lambda each: each.name):
                if part.name.endswith(".lua"):
                    yield part.read_text()
    yield (core / "apply.lua").read_text()
    yield (core / "upkeep.lua").read_text()


# One library, so one text.
_SOURCE = "\n".join(_read_parts())

VERSION = sha256(_SOURCE.encode()).hexdigest()[:10]
LIBRARY = f"tailrace_{VERSION}"
CODE = f"#!lua name={LIBRARY}\n" + _SOURCE.replace("VERSION", VERSION)


def function(name: str) -> str:
    """Return the loaded name of one of our functions."""
    return f"tailrace_{name}_{VERSION}"

"""A service whose events are tagged, over a real store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tailrace.config.load import load
from tailrace.valkey.shards import StoreOptions
from tests.http.parts import NO_BROKER, Running


@contextmanager
def served(store: StoreOptions, folder: Path, **more: Any) -> Iterator[Running]:
    """Run a service with these settings on top."""
    empty = folder / "tailrace.toml"
    empty.touch()
    given = {"valkey.url": store.url, "valkey.prefix": store.prefix, "kafka.bootstrap": NO_BROKER}
    running = Running(load(empty, given | {"tags.paths": ["tags"]} | more))
    try:
        yield running
    finally:
        running.stop()

"""What a view is to the pipeline: it looks at a slice of records and says what each shard has to write.

All views have this interface. The host (``onepass``) owns the marks, the calls and the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from tailrace.driver.slice import Slice
from tailrace.valkey.shards import Arg, Shards


class Window(msgspec.Struct, frozen=True):
    """What one shard writes for a contiguous range of offsets, all of it or nothing."""

    shard: int
    end: int
    """The shard's mark afterwards: the last offset of the range."""
    items: list[Arg]
    time: int | None = None
    """The running-maximum time that the shard keeps with the mark, if it does."""
    rows: Sequence[Any] = ()
    """What is written elsewhere, before the shard is told. A window that ends where its shard is, or before, has only
    that."""


class Place(NamedTuple):
    """How far each shard has come with a source."""

    marks: Sequence[int]
    times: Sequence[tuple[int, int]]
    """Running-maximum times, where the view keeps them, each with the mark that it holds at."""


class View(Protocol):
    """One view. Instances are made in every Spark task's process; what they remember between calls only saves work."""

    name: str
    span_ms: int
    """Length of a bucket."""
    future_ms: int
    """How far beyond the store's clock a bucket may lie."""

    keeps_times: bool = False
    """Whether all shards keep running-maximum times with their marks."""

    def load(self, shards: Shards, work: Sequence[tuple[Slice, Place]]) -> None:
        """Read what the view must know of the store before these slices are cut. Most views need nothing."""
        return

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return the windows of a slice for the shards that have something to write, in offset order.

        Records at or below a shard's mark are left out for that shard. Where windows are cut may differ; what they
        write in all does not.
        """
        ...

    def store(self, windows: Sequence[Window]) -> Sequence[Window] | None:
        """Write what rests outside of the shards, before they are told. It may be written again, and by others.

        Return the windows that were refused there, if any: their slices are loaded and cut again.
        """
        return None

    def refused(self, window: Window, mark: int) -> None:
        """Take note that a shard refused a window of which it has applied no more than up to a mark."""
        return

"""The settings of searches: how many, for how long, how far back, and how large a query may be."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import Field

from tailrace.config.values import (
    Count,
    CountOrZero,
    Delay,
    Keep,
    Reach,
    Section,
    Size,
    SizeOrZero,
    durations,
    format_duration,
    sizes,
)


class GrepSettings(Section):
    keep: Annotated[Delay, durations("1m", "365d")] = timedelta(days=1)
    idle: CountOrZero = 100
    keep_popular: Annotated[Delay, durations(most="365d")] = timedelta(days=7)
    searches: Count = 10_000
    reach: Reach = None
    retention: Keep = timedelta(days=7)
    pack_after: Delay = timedelta(hours=1)
    kept: SizeOrZero = 16 * 2**20
    memory: Annotated[Size, sizes("1MiB", "64GiB")] = 64 * 2**20
    depth: Annotated[int, Field(ge=1, le=100)] = 32
    nodes: Annotated[int, Field(ge=1, le=100_000)] = 250
    in_members: Annotated[int, Field(ge=0, le=1_000_000)] = 10_000
    regexes: Annotated[int, Field(ge=0, le=1_000)] = 20
    regex_length: Annotated[int, Field(ge=0, le=100_000)] = 1_000
    regex_size: Annotated[int, Field(ge=0, le=1_000_000)] = 1_500
    bytes: Annotated[Size, sizes("1KiB", "16MiB")] = 256 * 2**10

    def keep_of(self, name: str) -> timedelta | None:
        """Return how long the matches of a log are kept after their bucket's end; None is as long as the search lives.

        That holds for the log of a stretch, whose name has a third part. It does not grow once it is scanned; and since
        stretches abut, nobody would scan it again, and later requests for that time would meet a gap where Kafka may
        still have the records.
        """
        return None if name.count(".") > 1 else self.retention

    def warnings(self) -> list[str]:
        if self.retention is None or self.retention >= self.keep:
            return []
        return [
            f"grep.retention = {format_duration(self.retention)!r} removes matches that a reader may come "
            f"back for, within grep.keep = {format_duration(self.keep)!r}: make it as long, or longer"
        ]

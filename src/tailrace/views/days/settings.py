"""The settings of day streams."""

from __future__ import annotations

from datetime import timedelta

from tailrace.config.values import (
    Bucket,
    Delay,
    Duration,
    Keep,
    KeepByName,
    NameRule,
    Section,
    Where,
    compile_pattern,
    format_duration,
)


class DaysSettings(Section):
    """The section ``[days]``."""

    name: NameRule = "key"
    future_limit: Duration = timedelta(minutes=10)
    bucket: Bucket = timedelta(days=1)
    seal_when: Where = Where()
    pack_after: Delay = timedelta(days=2)
    keep: Keep = timedelta(days=30)
    keep_by_name: KeepByName = KeepByName()

    def keep_of(self, name: str) -> timedelta | None:
        """Return how long a bucket of a stream is kept after its end; None is for ever.

        The first pattern that matches the whole name decides. Needs RE2 if there are patterns.
        """
        for pattern, keep in self.keep_by_name.items():
            if compile_pattern(pattern).fullmatch(name):
                return keep
        return self.keep

    def warnings(self) -> list[str]:
        if self.keep is None or self.keep > self.pack_after:
            return []
        return [
            f"days.keep = {format_duration(self.keep)!r} removes a bucket before it is packed, "
            f"{format_duration(self.pack_after)} after its end: keep longer, or pack sooner"
        ]

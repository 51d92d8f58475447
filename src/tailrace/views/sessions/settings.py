"""Settings of the sessions view: topics, streams, retention and serving."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tailrace.config.values import Count, Delay, Duration, Pattern, Section, Size, Topic, durations, sizes


def _template(needed: str, *others: str) -> AfterValidator:
    """Take only texts with ``{needed}`` in them, and perhaps others."""
    known = {needed, *others}

    def check(text: str) -> str:
        found, rest = set(re.findall(r"\{([^{}]*)\}", text)), re.sub(r"\{[^{}]*\}", "", text)
        if found - known or needed not in found or "{" in rest or "}" in rest:
            names = ", ".join(f"{{{name}}}" for name in sorted(known))
            raise ValueError(f"a text with {{{needed}}} in it, and no other braces than {names}")
        return text

    return AfterValidator(check)


class SessionsSettings(Section):
    topics: Pattern | tuple[Topic, ...] = ()
    begin: Literal["end", "start"] = "end"
    stream: Annotated[str, _template("topic", "partition")] = "{topic}-{partition}"
    key: Annotated[str, _template("identity")] = "sessions:{identity}"
    burst: Annotated[Size, sizes("1KiB", "512KiB")] = 64 * 2**10
    expire: Annotated[Duration, durations("1m", "365d")] = timedelta(hours=24)
    abandon_after: Annotated[Duration, durations("1s")] = timedelta(minutes=5)
    trim_every: Annotated[Duration, durations("1s")] = timedelta(seconds=30)
    keep_entries: Count = 10_000
    keep_bytes: Annotated[Size, sizes("1MiB", "64GiB")] = 64 * 2**20
    keep_time: Annotated[Duration, durations("1s")] = timedelta(hours=1)
    keep_ledger: Delay = timedelta(days=1)
    stream_bytes: Annotated[Size, sizes("1MiB", "1TiB")] = 512 * 2**20
    forget_streams: Annotated[Duration, durations("1h")] = timedelta(days=7)
    container: Literal["auto", "block", "frame", "sized", "pickle", "plain"] = "auto"
    unit_rational: bool = False
    backfill: Delay = timedelta(minutes=1)
    client_bytes: Annotated[Size, sizes("64KiB", "1GiB")] = 8 * 2**20
    slow: Literal["drop", "close"] = "drop"
    ring_bytes: Size = 64 * 2**20
    ping: Annotated[Duration, durations("1s", "10m")] = timedelta(seconds=20)
    origins: tuple[Annotated[str, Field(pattern=r"^https?://[^/]+$")], ...] = ()

    @property
    def forget_every(self) -> timedelta:
        """Interval of the search for idle sessions."""
        return min(timedelta(minutes=10), self.expire / 4)

    @property
    def is_used(self) -> bool:
        return bool(self.topics)
